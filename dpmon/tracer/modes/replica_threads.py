"""Runs virtual replicas on threads that persist between calls. Each thread has its share of the cores.

torch's parallel_apply starts a thread per replica and call. On GPUs, the cost is small compared with the work. On a
CPU, each new thread waits for a core and for the GIL, and starts an OpenMP team as large as the machine: on a busy
machine, a step of 0.5 ms took 20 ms. So on a CPU, `ReplicaThread` replaces `threading.Thread` in parallel_apply. To the
replica it looks like a new thread: thread-locals and context variables are empty, and `threading` forgets the thread
after its run.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from _thread import allocate_lock, get_ident, start_new_thread
from collections.abc import Callable
from contextlib import suppress
from contextvars import Context
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import torch

from dpmon.tracer.core.hidden_frames import Function

_CGROUPS = Path("/sys/fs/cgroup")
_ACTIVE_THREADS: dict[int, object] = getattr(threading, "_active", {})
"""Python's table of threads by id. A worker gets an entry if its replica asks for the current thread."""


class ReplicaThread:
    """A thread that runs `target(*args)`. Its parallel regions use at most `max_threads` threads."""

    __slots__ = ("_args", "_done", "_target", "_threads", "join")

    def __init__(self, max_threads: int, target: Function, args: tuple[object, ...] = ()) -> None:
        self._target: Function = target
        self._args = args
        self._threads = min(max_threads, torch.get_num_threads())
        self._done = allocate_lock()
        self._done.acquire()
        # A C function: Ctrl-C often interrupts the script here, and a Python function would appear in the traceback.
        self.join: Callable[[], object] = self._done.acquire
        """Waits until the target has run; may be called once."""

    def start(self) -> None:
        """Start the thread. Raises RuntimeError if no thread can be started."""
        # Only threads of `threading` call the trace functions that debuggers and coverage set for new threads.
        if threading.gettrace() is None and threading.getprofile() is None and _worker_pool.is_open():
            _worker_pool.idle_worker().submit(self)
        else:
            thread = threading.Thread(target=self.run)
            self.join = thread.join
            thread.start()

    def run(self) -> None:
        """Call the target on this thread, then drop the reference to it."""
        target, args, self._target, self._args = self._target, self._args, _nothing, ()
        with suppress(Exception):  # with an unknown OpenMP, the number of threads is not limited
            limit_this_thread(self._threads)
        target(*args)

    def finish(self) -> None:
        """Let `join` return."""
        self._done.release()


class _Worker:
    """A thread that runs one replica after another.

    `threading` does not list it: a script that joins all threads would wait for it forever.
    """

    def __init__(self, pool: _WorkerPool) -> None:
        self._pool = pool
        # `put` is one C call. If a signal handler raises, the replica is either in the queue or not.
        self._replicas: SimpleQueue[ReplicaThread] = SimpleQueue()
        start_new_thread(self._serve, ())

    def submit(self, replica: ReplicaThread) -> None:
        """Queue a replica behind the earlier ones."""
        self._replicas.put(replica)

    def _serve(self) -> None:
        pool, generation = self._pool, self._pool.generation
        locals_of_thread = _locals_of_thread()
        while pool.generation == generation:  # it differs in a child that a replica has forked
            replica = self._replicas.get()
            try:
                Context().run(replica.run)
            except BaseException as error:  # noqa: BLE001 - torch handles Exceptions itself
                _report_thread_exception(error)
            # A new thread has no tracer and no profiler. Clearing the thread-locals may run finalizers.
            sys.settrace(None)
            sys.setprofile(None)
            locals_of_thread.clear()
            _ACTIVE_THREADS.pop(get_ident(), None)
            pool.idle.append(self)
            replica.finish()
            del replica


class _WorkerPool:
    """The worker threads of this process."""

    def __init__(self) -> None:
        self._is_usable: bool | None = None
        """None: not checked yet."""
        self._all: list[_Worker] = []
        self.idle: list[_Worker] = []
        self.generation = 0
        """Number of forks; threads do not survive a fork."""

    def is_open(self) -> bool:
        """Return whether workers can be used: Python can wait for them when it exits, and is not exiting yet."""
        if self._is_usable is None:
            # At its end Python waits for threads of `threading`. It must also wait for replicas that still run: a
            # thread that returns from torch after the interpreter has gone aborts the process.
            try:
                threading._register_atexit(self._close)  # type: ignore[attr-defined]
                os.register_at_fork(after_in_child=self._reset_after_fork)
                self._is_usable = True
            except (AttributeError, RuntimeError):  # another Python, or the end has begun
                self._is_usable = False
        return self._is_usable

    def idle_worker(self) -> _Worker:
        """Return an idle worker, or a new worker. Raises RuntimeError if no thread can be started."""
        try:
            return self.idle.pop()
        except IndexError:
            worker = _Worker(self)
            self._all.append(worker)
            return worker

    def _close(self) -> None:
        """Wait until all started replicas have run."""
        self._is_usable = False
        for worker in self._all:
            barrier = ReplicaThread(1, _nothing)
            worker.submit(barrier)
            barrier.join()

    def _reset_after_fork(self) -> None:
        self.generation += 1
        self.idle.clear()
        self._all.clear()


def _nothing() -> None:
    pass


def _locals_of_thread() -> dict[object, object]:
    """Return the dict of the calling thread's `threading.local` values. Clearing it acts like the end of the thread."""
    # A separate function object, because the script shares the one in `pythonapi`. The result is a borrowed reference,
    # so its type must not be py_object, which would release it.
    function = ctypes.PYFUNCTYPE(ctypes.c_void_p)(("PyThreadState_GetDict", ctypes.pythonapi))
    thread_locals: dict[object, object] = ctypes.cast(function(), ctypes.py_object).value
    return thread_locals


def _report_thread_exception(error: BaseException) -> None:
    """Report the exception that ended a thread, as `threading` does."""
    if isinstance(error, SystemExit):
        return
    try:
        thread = threading.current_thread()
        threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__, thread)))
    except BaseException:  # noqa: BLE001 - raised by the script's own hook
        with suppress(BaseException):
            sys.excepthook(*sys.exc_info())


_worker_pool = _WorkerPool()


# ------------------------------------------------------------------------------------------------ cores


def available_cores(cgroups: Path = _CGROUPS, membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return how many cores this process may use: its affinity, limited by its cgroups' CPU quota; at least 1."""
    cores = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, ValueError):
        own_group = Path(membership.read_text().rpartition("0::/")[2].strip())
        for group in (own_group, *own_group.parents):  # the quotas of all ancestors apply, too
            with suppress(OSError, ValueError):  # no such file, or "max"
                quota, period = (cgroups / group / "cpu.max").read_text().split()
                cores = min(cores, int(quota) / int(period))
    return max(1, int(cores))


def limit_this_thread(count: int) -> None:
    """Limit parallel regions that begin on this thread to `count` threads; other threads keep their number.

    `torch.set_num_threads` is no alternative: it also sets the initial number of every later thread.
    """
    torch.get_num_threads()  # on a new thread, this sets torch's initial number, which would later replace ours
    for set_number in _thread_count_setters():
        set_number(count)


@cache
def _thread_count_setters() -> tuple[Callable[[int], object], ...]:
    """Return the C functions that set the number for the calling thread only; empty if torch uses no OpenMP and no MKL.

    Only loaded libraries are searched. The global scope comes first, as in the linker, because torch would also call
    a preloaded OpenMP. PyDLL keeps the GIL: a call takes half a microsecond, and releasing the GIL would cost more.
    """
    libraries = []
    for name, mode in ((None, 0), (str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"), os.RTLD_NOLOAD)):
        try:
            libraries.append(ctypes.PyDLL(name, mode=mode))
        except OSError:
            continue
    setters = []
    # MKL's lower-case name is the Fortran function, which takes a pointer.
    for symbol in ("omp_set_num_threads", "MKL_Set_Num_Threads_Local"):
        function = next((getattr(library, symbol) for library in libraries if hasattr(library, symbol)), None)
        if function is not None:
            function.argtypes = (ctypes.c_int,)
            function.restype = ctypes.c_int if symbol.startswith("MKL") else None
            setters.append(function)
    return tuple(setters)
