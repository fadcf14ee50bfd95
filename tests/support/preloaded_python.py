"""A Python with torch already imported: each script runs in a fork of it, so it need not import torch again.

The script sees the same as in a fresh interpreter: `__main__`, sys.argv, sys.path, the environment, its own standard
streams, and no torch in sys.modules until it imports torch (through all finders, including the tracer's). Only tests of
the start of an interpreter need a fresh one (`tracer_harness.TracedScript`, fresh=True).

    python preloaded_python.py FD     serve clients that connect to this socket, until standard input ends
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import io
import json
import os
import random
import selectors
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any, NamedTuple

_MAX_REQUEST_BYTES = 1 << 20


class ForkedScript:
    """A script in a fork with standard streams `fds`; offers the methods of subprocess.Popen that tests need."""

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
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(str(_server(env).place / "socket"))
        request = {"argv": list(argv), "cwd": str(cwd), "env": dict(env), "session": start_new_session}
        socket.send_fds(self._connection, [json.dumps(request).encode()], fds)
        self.pid = int(self._connection.recv(100))

    def wait(self, timeout: float | None = None) -> int:
        """Return its status, or minus the signal that killed it; raise subprocess.TimeoutExpired after `timeout`."""
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
        """Return its status, or None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the script has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._connection.close()


class PipedScript(ForkedScript):
    """A script with text pipes as standard streams."""

    def __init__(self, argv: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        pipes = [os.pipe() for _ in range(3)]
        inside = [pipes[0][0], pipes[1][1], pipes[2][1]]
        self.stdin: IO[str] = open(pipes[0][1], "w")  # noqa: SIM115 - closed by the test, as with Popen
        self.stdout: IO[str] = open(pipes[1][0])  # noqa: SIM115
        self.stderr: IO[str] = open(pipes[2][0])  # noqa: SIM115
        self._said = ["", ""]
        self._readers: list[threading.Thread] = []
        try:
            super().__init__(argv, cwd, env, inside)
        finally:
            for fd in inside:
                os.close(fd)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Close its input and return its output at the end; raise subprocess.TimeoutExpired after `timeout`."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(n,), daemon=True) for n in range(2)]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():
                raise subprocess.TimeoutExpired("a script", timeout or 0.0)
        self.stdout.close()
        self.stderr.close()
        self.wait(timeout)
        return self._said[0], self._said[1]

    def _read(self, number: int) -> None:
        with contextlib.suppress(ValueError):  # closed by a test that has failed
            self._said[number] = (self.stdout, self.stderr)[number].read()


_STAND_IN = """\
{interpreter}
import os, sys
if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
import _thread, json, resource, signal, socket
handed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})
request = {{"argv": sys.argv[1:], "cwd": os.getcwd(), "env": dict(os.environ), "session": True}}
socket.send_fds(server, [json.dumps(request).encode()], [0, 1, 2])
pid = int(server.recv(100))
def hand_on():
    while True:
        os.kill(pid, signal.sigwait(handed_on))
_thread.start_new_thread(hand_on, ())
for number in range(3):
    os.close(number)
status = int(server.recv(100))
if status < 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
    signal.raise_signal(-status)
os._exit(status)
"""
"""A program in place of Python: it requests a fork that runs the script, forwards signals to it, and ends like it.

Signals are blocked from the start and taken with sigwait: a handler that is installed later, or that runs between two
system calls, could miss an early signal.
"""


class _Server:
    """A process that has imported torch, and the directory with its socket and stand-in for Python."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self.ready = False
        self.place = Path(tempfile.mkdtemp(prefix="warm-"))
        self.python = self.place / "python"
        path = str(self.place / "socket")
        interpreter = f"#!{sys.executable} -IS"
        if " " in interpreter.removesuffix(" -IS"):  # the kernel ends the path at a space
            interpreter = f"#!/bin/sh\n'''exec' '{sys.executable}' -IS \"$0\" \"$@\"\n' '''"
        self.python.write_text(_STAND_IN.format(interpreter=interpreter, python=sys.executable, path=path))
        self.python.chmod(0o700)
        # It outlives the first test that needs it. Without XDG_ variables, clean_up of a test does not kill it.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("DPMON_", "PYTHON", "CUDA_", "XDG_"))}
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.bind(path)
            door.listen()
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(door.fileno())],
                env={**kept, **variables, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,  # the same kind of streams as those of scripts
                stdout=subprocess.PIPE,
                pass_fds=[door.fileno()],
            )

    def wait(self) -> None:
        """Wait until it has imported torch, which on a busy machine takes longer than the time limits of some tests."""
        if not self.ready:
            assert self.process.stdout is not None
            self.ready = bool(self.process.stdout.read(1))
            assert self.ready, "the server of scripts has gone"

    def end(self) -> None:
        self.process.communicate()
        shutil.rmtree(self.place)


_servers: dict[tuple[tuple[str, str], ...], _Server] = {}


def _server(env: Mapping[str, str]) -> _Server:
    """Return the server with these variables for Python and the linker, started on first use.

    Variables that a fork can apply itself do not count: paths, and unbuffered streams.
    """
    by_fork = ("PYTHONPATH", "PYTHONUNBUFFERED")
    own = {
        name: value for name, value in env.items() if name.startswith(("PYTHON", "LD_PRELOAD")) and name not in by_fork
    }
    key = tuple(sorted(own.items()))
    if key in _servers and _servers[key].process.poll() is not None:
        raise AssertionError(f"the server of scripts ended with {_servers[key].process.returncode}")
    if key not in _servers:
        if not _servers:
            atexit.register(_end_servers)
        _servers[key] = _Server(own)
    return _servers[key]


def _end_servers() -> None:
    for server in _servers.values():
        server.end()


def preload_python(env: Mapping[str, str]) -> str:
    """Return the path of a program for `dpmon --python` that runs a script in a fork, as Python with these variables.

    dpmon starts this program and waits for it as usual. The script is another process, with its own process id, parent
    and session.
    """
    server = _server(env)
    server.wait()
    return str(server.python)


# ------------------------------------------------------------------------------------------------ in the server


def serve_forks(door: socket.socket) -> Callable[[], None] | None:
    """Fork for every request. Return in a fork the function that runs the script, and in the server None."""
    running = selectors.DefaultSelector()
    running.register(sys.stdin.fileno(), selectors.EVENT_READ)
    running.register(door, selectors.EVENT_READ)
    path = sys.path[1:]  # without the directory of this file
    while True:
        for key, _ in running.select():
            if key.fd == sys.stdin.fileno():
                return None
            if key.fileobj is door:
                connection = door.accept()[0]
                message: bytes = b""
                fds: list[int] = []
                with contextlib.suppress(ConnectionError):  # the client was killed meanwhile
                    message, fds, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 3)
                if not message:
                    connection.close()
                    continue
                pid = os.fork()
                if pid == 0:
                    _close_server_files(running, connection)
                    request = json.loads(message)
                    return lambda: run_in_fork(request, fds, path)
                for fd in fds:
                    os.close(fd)
                with contextlib.suppress(OSError):  # the client has ended; handled below
                    connection.send(str(pid).encode())
                child = _Child(pid, connection)
                running.register(os.pidfd_open(pid), selectors.EVENT_READ, child)
                running.register(connection, selectors.EVENT_READ, child)  # if the client is killed, so is the script
            elif key.fileobj is key.data.connection:
                running.unregister(key.fileobj)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(key.data.pid, signal.SIGKILL)
            else:
                status = os.waitstatus_to_exitcode(os.waitpid(key.data.pid, 0)[1])
                running.unregister(key.fileobj)
                os.close(key.fd)
                connection = key.data.connection
                with contextlib.suppress(KeyError):
                    running.unregister(connection)
                with contextlib.suppress(OSError):  # the client has ended
                    connection.send(str(status).encode())
                connection.close()
                break  # other ready events may belong to the same script


class _Child(NamedTuple):
    """A running fork, and the connection to its client."""

    pid: int
    connection: socket.socket


def _close_server_files(running: selectors.BaseSelector, connection: socket.socket) -> None:
    """Close the server's files in a fork, but for its standard input."""
    for key in list(running.get_map().values()):
        if not isinstance(key.fileobj, int):
            key.fileobj.close()  # type: ignore[attr-defined]
        elif key.data is not None:
            os.close(key.fileobj)
            key.data.connection.close()
    running.close()
    connection.close()


# ------------------------------------------------------------------------------------------------ in a fork


def run_in_fork(request: dict[str, Any], fds: list[int], path: list[str]) -> None:
    """Run the script to the end of its module; report exceptions as Python does."""
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
    sys.modules["numpy"].random.seed()  # from the system, as at its import
    sys.argv[:] = request["argv"]
    sys.orig_argv[:] = [sys.executable, *sys.argv]
    sys.path[:] = [entry for entry in env.get("PYTHONPATH", "").split(os.pathsep) if entry] + path
    if env.get("PYTHONUNBUFFERED"):
        sys.stdin.reconfigure(write_through=True)  # type: ignore[union-attr]
        _replace_by_unbuffered("stdout")
        _replace_by_unbuffered("stderr")
    _HiddenTorch().hide()
    site.execsitecustomize()  # called by `site` when Python starts
    name = os.path.join(os.getcwd(), sys.argv[0])
    sys.path.insert(0, os.path.dirname(name))
    main = sys.modules["__main__"]
    vars(main).clear()
    loader = importlib.machinery.SourceFileLoader("__main__", name)
    vars(main).update(
        __name__="__main__", __doc__=None, __package__=None, __loader__=loader, __spec__=None, __annotations__={},
        __builtins__=sys.modules["builtins"], __file__=name, __cached__=None,
    )  # fmt: skip
    del sys.modules["preloaded_python"]
    try:
        with io.open_code(name) as file:
            text = file.read()
        exec(compile(text, name, "exec", dont_inherit=True), vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        _report_exception(error)
        raise


def _replace_by_unbuffered(name: str) -> None:
    """Replace a standard stream by an unbuffered one, as in a Python started with -u."""
    old = getattr(sys, name)
    raw = open(old.fileno(), "wb", buffering=0, closefd=False)  # noqa: SIM115 - open until the end
    raw.name = f"<{name}>"
    new = io.TextIOWrapper(raw, old.encoding, old.errors, "\n", write_through=True)
    new.mode = "w"  # type: ignore[misc]
    setattr(sys, name, new)
    setattr(sys, f"__{name}__", new)


def _report_exception(error: BaseException) -> None:
    """Print an exception as the interpreter does, without frames of this file; prevent a second report."""
    traceback = error.__traceback__
    assert traceback is not None
    error.__traceback__ = traceback.tb_next
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, traceback.tb_next
    hook = sys.excepthook
    hook(type(error), error, traceback.tb_next)

    def already_printed(*_: object) -> None:
        sys.excepthook = hook

    sys.excepthook = already_printed


class _HiddenTorch:
    """torch, removed from sys.modules and put back when a script imports it."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}

    def hide(self) -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
            self._modules[name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)  # has all that the import system needs

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        known = self._modules["torch"].__spec__
        assert known is not None
        spec = importlib.machinery.ModuleSpec(name, known.loader, origin=known.origin, is_package=True)
        spec.submodule_search_locations = known.submodule_search_locations
        spec.cached, spec.has_location = known.cached, known.has_location
        spec.loader = _LoadedModuleLoader(known.loader, self)  # type: ignore[assignment]
        return spec

    def give_back(self) -> None:
        sys.modules.update(self._modules)
        sys.meta_path.remove(self)


class _LoadedModuleLoader:
    """A loader that returns the module already loaded."""

    def __init__(self, loader: Any, torch: _HiddenTorch) -> None:
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
    """Import torch and serve; also returns in a fork, after the end of its script."""
    import numpy  # noqa: F401 - torch imports it if it is installed
    import torch
    import torch._dynamo  # noqa: F401 - the first optimizer of every script imports it

    door = socket.socket(fileno=int(sys.argv[1]))
    gc.collect()
    gc.freeze()  # the collector need not visit objects shared with forks
    os.write(1, b"!")
    try:
        script = serve_forks(door)
    except KeyboardInterrupt:  # ctrl+c of the tests; forks get their own
        os._exit(130)
    if script is not None:
        script()


if __name__ == "__main__":
    # As a module of its own, because a fork fills `__main__` with the script.
    importlib.import_module("preloaded_python").main()
