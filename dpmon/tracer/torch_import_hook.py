"""Waits for the user's program to import torch, then installs the tracer.

A finder at the head of sys.meta_path wraps the loader of `torch` so that `dpmon.tracer.patch.install` runs after the
import. Its `find_spec` may be called more than once (transformers looks for torch with find_spec before the import), so
the finder stays until the import. Processes that never import torch pay only for one more finder: this module imports
only modules that every Python has already loaded. It also runs on a Python that is too old for the tracer, to say so.
"""

from __future__ import annotations

import os
import sys
from _thread import get_ident

from dpmon.tracer.note_files import append_note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
_OTHER_NODE_MESSAGE = (
    "dpmon: the training on {} is not recorded, because dpmon was started on another node."
    " Put dpmon after the launcher: srun dpmon torchrun ..., not dpmon srun torchrun ..."
)


class _Loader:
    """A loader that runs torch's own loader, then installs the tracer. It removes itself before torch's code runs."""

    def __init__(self, loader: Any, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._finder.remove()
        _detach_on_other_node()
        append_note("importing torch")
        try:
            self._loader.exec_module(module)
        except BaseException as error:
            self._finder.restore()  # the program may retry the import
            _drop_own_frame(error)
            raise
        append_note("torch imported")
        if "DPMON_RUN" in os.environ:
            _install(module)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


class _Finder:
    """A finder for `torch` only; it leaves all other names to the other finders."""

    def __init__(self) -> None:
        self._asking_threads: set[int] = set()
        """The threads that are asking the other finders. Another finder, such as wrapt's, may call
        importlib.util.find_spec, and so call this finder again. Only the outermost call wraps the loader."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        _hide_sitecustomize()
        thread = get_ident()
        if name != "torch" or thread in self._asking_threads:
            return None
        self._asking_threads.add(thread)
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._asking_threads.discard(thread)
        if spec is not None and hasattr(spec.loader, "exec_module") and not isinstance(spec.loader, _Loader):
            spec.loader = _Loader(spec.loader, self)  # type: ignore[assignment]  # has everything that importlib uses
        return spec

    def _ask_others(self, name: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in list(sys.meta_path):
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: ModuleSpec | None = finder.find_spec(name, path, target)
            if spec is not None:
                return spec
        return None

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def restore(self) -> None:
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)


def _drop_own_frame(error: BaseException) -> None:
    # The import system removes its own frames from a traceback if they form an unbroken chain down to the module's
    # code. Our frame breaks the chain.
    while (entry := error.__traceback__) is not None and entry.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = entry.tb_next


def _hide_sitecustomize() -> None:
    # A program without its own sitecustomize must not find ours. But the import system expects to find the module
    # during its import.
    module = sys.modules.get("sitecustomize")
    own_file = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site", "sitecustomize.py")
    if module is None or getattr(module, "__file__", None) != own_file:
        return
    if not getattr(module.__spec__, "_initializing", False):
        del sys.modules["sitecustomize"]


def _detach_on_other_node() -> None:
    """Leave the run if it belongs to another node, because there is no supervisor here.

    A launcher such as srun copies its environment to all nodes. The first process on each node prints a message; its
    children get an environment without the run.
    """
    boot_id = os.environ.get("DPMON_BOOT")
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            if not boot_id or file.read().strip() == boot_id.encode():
                return
        del os.environ["DPMON_RUN"]
        if sys.stderr is not None and all(os.environ.get(name, "0") == "0" for name in _LOCAL_RANKS):
            print(_OTHER_NODE_MESSAGE.format(os.uname().nodename), file=sys.stderr, flush=True)
    except Exception:  # noqa: BLE001 - there is no such file, or standard error is closed
        pass


def _refusal() -> str | None:
    """Return why this Python cannot be traced; None if it can."""
    version = sys.version_info[:2]
    if version < (3, 11):
        return f"Python {version[0]}.{version[1]} cannot be traced: use Python 3.11 or later"
    if "t" in sys.abiflags:
        return "a free-threaded Python cannot be traced: use a build of Python that has the GIL"
    return None


def _install(torch: ModuleType) -> None:
    try:
        refusal = _refusal()
        if refusal is not None:
            append_note(refusal, "warnings.log")
            return
        from dpmon.tracer.patch import install

        install()
    except Exception as error:  # noqa: BLE001 - with an unsupported torch, only the record is lost
        version = getattr(torch, "__version__", "unknown version")
        append_note(f"this torch ({version}) cannot be traced: {type(error).__name__}: {error}", "warnings.log")


def install_import_hook() -> None:
    """Start waiting for torch; does nothing if torch is already imported."""
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())
