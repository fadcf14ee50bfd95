"""Runs virtual replicas on threads that persist between calls. Each thread has its share of the cores.

torch's parallel_apply starts a thread per replica and call. On GPUs, the cost is small compared with the work. On a
CPU, each new thread waits for a core and for the GIL, and starts an OpenMP team as large as the machine: on a busy
machine, a step of 0.5 ms took 20 ms. So on a CPU, `ReplicaThread` replaces `threading.Thread` in parallel_apply.
`threading` does not list the workers: a script that joins all threads would wait for them forever.
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

_known_threads: dict[int, object] = threading._active  # type: ignore[attr-defined]
"""Python's table of threads by id. A worker gets an entry if its replica asks for the current thread."""
_workers: list[SimpleQueue[ReplicaThread]] = []
_idle_workers: list[SimpleQueue[ReplicaThread]] = []
"""The queues of all workers, and of those that wait for a replica. `put` is one C call: if a signal handler raises, the
replica is either in the queue or not."""


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
        if threading.gettrace() is not None or threading.getprofile() is not None:
            thread = threading.Thread(target=self.run)
            self.join = thread.join
            thread.start()
            return
        try:
            queue = _idle_workers.pop()
        except IndexError:
            queue = SimpleQueue()
            start_new_thread(_serve, (queue,))
            _workers.append(queue)
        queue.put(self)

    def run(self) -> None:
        """Call the target on this thread, then drop the reference to it."""
        target, args, self._target, self._args = self._target, self._args, _nothing, ()
        with suppress(Exception):  # with an unknown OpenMP, the number of threads is not limited
            limit_this_thread(self._threads)
        target(*args)

    def finish(self) -> None:
        """Let `join` return."""
        self._done.release()


def _serve(queue: SimpleQueue[ReplicaThread]) -> None:
    """Run one replica after another on this thread."""
    while True:
        replica = queue.get()
        try:
            Context().run(replica.run)
        except BaseException:  # noqa: BLE001 - torch handles Exceptions itself
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), None)))
        _known_threads.pop(get_ident(), None)
        _idle_workers.append(queue)
        replica.finish()
        del replica


def _wait_for_replicas() -> None:
    """Wait for the running replicas: a thread that returns from torch after the interpreter has gone aborts it."""
    for queue in _workers:
        barrier = ReplicaThread(1, _nothing)
        queue.put(barrier)
        barrier.join()


def _reset_after_fork() -> None:
    """Forget the workers in a forked child, which has no threads but one."""
    _workers.clear()
    _idle_workers.clear()


def _nothing() -> None:
    pass


threading._register_atexit(_wait_for_replicas)  # type: ignore[attr-defined]  # Python waits for other threads here
os.register_at_fork(after_in_child=_reset_after_fork)


# ------------------------------------------------------------------------------------------------ cores


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
