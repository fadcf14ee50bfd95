"""A Python that has torch already: a script is started in a fork of it, and not made to wait for the import again.

What the script sees is what a fresh interpreter shows it: `__main__`, sys.argv, sys.path, the environment, no torch in
sys.modules until it is imported (which then goes through all finders, the tracer's among them), its own standard
streams. What a fork cannot show is how an interpreter comes up: that is for fresh ones (`tracing.Script`, fresh=True).

    python warm.py FD     serves what comes over the socket FD; ends when its other end is closed
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib.machinery
import io
import json
import os
import random
import selectors
import signal
import site
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

__all__ = ["Forked", "Piped"]

LARGEST = 1 << 20


class Forked:
    """A script in a fork that has `fds` as its standard streams, with what a test needs of subprocess.Popen."""

    def __init__(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        fds: Sequence[int],
        *,
        start_new_session: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        request = {"argv": list(argv), "cwd": str(cwd), "env": dict(env), "session": start_new_session}
        with theirs:
            socket.send_fds(_server(env), [json.dumps(request).encode()], [theirs.fileno(), *fds])
        self.pid = int(self._connection.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        """Its status, minus the number of the signal that killed it; subprocess.TimeoutExpired."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                told = self._connection.recv(100)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a script", timeout or 0.0) from None
            assert told, "the server of scripts has gone"
            self._connection.close()
            self.returncode = int(told)
        return self.returncode

    def poll(self) -> int | None:
        """Its status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it at once."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._connection.close()


class Piped(Forked):
    """One with pipes, for text."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        inside = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self.stdin: IO[str] = open(pipes[0][1], "w")  # noqa: SIM115 - closed by whoever uses it, as Popen's are
        self.stdout: IO[str] = open(pipes[1][0])  # noqa: SIM115
        self.stderr: IO[str] = open(pipes[2][0])  # noqa: SIM115
        self._said = ["", ""]
        self._readers: list[threading.Thread] = []
        try:
            super().__init__(argv, cwd, env, inside)
        finally:
            for fd in inside:
                os.close(fd)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Close its input and read the rest of what it says, until it has ended; subprocess.TimeoutExpired."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in range(2)]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a script", timeout)
        self.stdout.close()
        self.stderr.close()
        self.wait(timeout)
        return self._said[0], self._said[1]

    def _read(self, number: int) -> None:
        with contextlib.suppress(ValueError):  # closed by a test that has failed
            self._said[number] = (self.stdout, self.stderr)[number].read()


_servers: dict[tuple[tuple[str, str], ...], tuple[socket.socket, subprocess.Popen[bytes]]] = {}


def _server(env: Mapping[str, str]) -> socket.socket:
    """The way to the server whose interpreter came up with these variables for Python; it is started when first asked.

    They say, for one, whether streams have buffers.
    """
    own = {name: value for name, value in env.items() if name.startswith("PYTHON") and name != "PYTHONPATH"}
    key = tuple(sorted(own.items()))
    if key in _servers and _servers[key][1].poll() is not None:
        raise AssertionError(f"the server of scripts ended with {_servers[key][1].returncode}")
    if key not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # It outlasts the test that is the first to ask; what the tests end with their state directory it must not name.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DPMON_", "PYTHON", "CUDA_", "XDG_"))}
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env={**kept, **own, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,  # streams of the kind that the scripts get
            stdout=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        if not _servers:
            atexit.register(_end)
        _servers[key] = ours, process
    return _servers[key][0]


def _end() -> None:
    for ours, process in _servers.values():
        ours.close()
        process.communicate()


# ------------------------------------------------------------------------------------------------ in the server


def serve(control: socket.socket) -> Callable[[], None] | None:
    """Fork for every request; in a fork: what it is to do. None when nobody can ask any more."""
    running = selectors.DefaultSelector()
    running.register(control, selectors.EVENT_READ)
    path = sys.path[1:]  # without the directory of this file
    while True:
        for key, _ in running.select():
            if key.fileobj is control:
                message, fds, _, _ = socket.recv_fds(control, LARGEST, 4)
                if not message:
                    return None
                request = json.loads(message)
                connection = socket.socket(fileno=fds.pop(0))
                pid = os.fork()
                if pid == 0:
                    _close(running, control, connection)
                    return lambda: become(request, fds, path)
                for fd in fds:
                    os.close(fd)
                connection.send(str(pid).encode())
                running.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, connection))
            else:
                pid, connection = key.data
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                running.unregister(key.fileobj)
                os.close(key.fd)
                with contextlib.suppress(OSError):  # nobody wants to know
                    connection.send(str(status).encode())
                connection.close()


def _close(running: selectors.BaseSelector, *sockets: socket.socket) -> None:
    """Of the server a fork keeps nothing but the modules."""
    for key in list(running.get_map().values()):
        if key.data is not None:
            os.close(key.fd)
            key.data[1].close()
    running.close()
    for one in sockets:
        one.close()


# ------------------------------------------------------------------------------------------------ in a fork


def become(request: dict[str, Any], fds: list[int], path: list[str]) -> None:
    """Be the script, as far as the end of its module; what it raises is reported as Python reports it."""
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    env = request["env"]
    if request["session"]:
        os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(env)
    random.seed()
    sys.modules["numpy"].random.seed()  # as at its import, from the system
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    sys.path[:] = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry] + path
    _Torch().hide()
    site.execsitecustomize()  # type: ignore[attr-defined]  # what `site` calls when Python comes up
    name = os.path.join(os.getcwd(), sys.argv[0])
    sys.path.insert(0, os.path.dirname(name))
    main = sys.modules["__main__"]
    vars(main).clear()
    loader = importlib.machinery.SourceFileLoader("__main__", name)
    vars(main).update(
        __name__="__main__", __doc__=None, __package__=None, __loader__=loader, __spec__=None, __annotations__={},
        __builtins__=sys.modules["builtins"], __file__=name, __cached__=None,
    )  # fmt: skip
    del sys.modules["warm"]
    try:
        with io.open_code(name) as file:
            text = file.read()
        exec(compile(text, name, "exec", dont_inherit=True), vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
        raise


def _report(error: BaseException) -> None:
    """Tell of an exception as the interpreter does, without frames of this file; it is not told again at the top."""
    traceback = error.__traceback__
    assert traceback is not None
    error.__traceback__ = traceback.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback.tb_next
    hook = sys.excepthook
    hook(type(error), error, traceback.tb_next)

    def told(*_: object) -> None:
        sys.excepthook = hook

    sys.excepthook = told


class _Torch:
    """torch, taken out of sys.modules and given back to whoever imports it."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}

    def hide(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            self._modules[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]  # all that the import system asks of one

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        known = self._modules["torch"].__spec__
        assert known is not None
        spec = importlib.machinery.ModuleSpec(name, known.loader, origin=known.origin, is_package=True)
        spec.submodule_search_locations = known.submodule_search_locations
        spec.cached, spec.has_location = known.cached, known.has_location
        spec.loader = _Given(known.loader, self)  # type: ignore[assignment]
        return spec

    def give_back(self) -> None:
        sys.modules.update(self._modules)
        sys.meta_path.remove(self)  # type: ignore[arg-type]


class _Given:
    """The loader of a module that is there."""

    def __init__(self, loader: Any, torch: _Torch) -> None:
        self._loader = loader
        self._torch = torch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return self._torch._modules["torch"]

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._torch.give_back()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def main() -> None:
    """Import torch and serve; returns in a fork too, when its script is over."""
    import numpy  # noqa: F401 - torch does, where it is installed
    import torch
    import torch._dynamo  # noqa: F401 - the first optimizer of every script imports it

    control = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()  # what is shared with the forks is not looked at again and again
    try:
        script = serve(control)
    except KeyboardInterrupt:  # of the tests; its forks get one of their own
        os._exit(130)
    if script is not None:
        script()


if __name__ == "__main__":
    from warm import main as whole

    whole()
