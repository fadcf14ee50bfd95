"""The doorway to NVML: the only importer of pynvml, and the guard over every call that goes through it.

Any call may take seconds, or never return. Calls are counted while they are in flight, so that the library is never
shut down under one: that crashes the process, and so does leaving it through exit().
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from dpmon.gpu.failure import NO_START, UNINITIALIZED, Failure, call

NO_GPU = "the NVIDIA driver is loaded but sees no GPU"


_waiting: set[Nvml] = set()
"""Those with a call in flight."""


def leave(status: int) -> None:
    """End the process with this status if a call is in flight: the library's own farewell crashes then."""
    if _waiting:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)


class Nvml:
    """The library; for any number of threads. Nothing is imported or loaded before `open`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._in_flight = 0
        self._closed = False
        self.forgot = False
        """Whether the library has said that it was never started: then only a new start helps."""

    @property
    def module(self) -> Any:
        """pynvml, None before it was opened."""
        return self._nvml

    def guard(self, read: Callable[[], Any]) -> Any:
        """What `read` returns; raises Failure. The library is not shut down while it runs, and not asked afterwards."""
        with self._lock:
            if self._closed:
                raise Failure("NVML was shut down", UNINITIALIZED)
            self._in_flight += 1
            _waiting.add(self)
        try:
            return call(read)
        except Failure as failure:
            self.forgot = self.forgot or failure.code == UNINITIALIZED
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    _waiting.discard(self)

    def open(self) -> str | None:
        """Start NVML; None if that worked, otherwise one sentence: why not."""
        try:
            import pynvml  # noqa: TID251 - this is the doorway
        except Exception as error:  # noqa: BLE001 - a broken installation is a reason like any other
            if isinstance(error, ModuleNotFoundError):
                return "the Python package nvidia-ml-py is not installed"
            return f"the Python package nvidia-ml-py does not load: {type(error).__name__}: {error}"
        try:
            self.guard(pynvml.nvmlInit)
        except Failure as failure:
            return NO_START.get(failure.code, f"NVML does not start: {failure.reason}")
        self._nvml = pynvml
        self.forgot = False
        return None

    def count(self) -> int:
        """How many GPUs there are; raises Failure."""
        return int(self.guard(self._nvml.nvmlDeviceGetCount))

    def close(self) -> bool:
        """Shut the library down for good; False, and nothing is done, while a call is in flight."""
        with self._lock:
            if self._in_flight:
                return False
            started, self._closed = self._nvml is not None and not self._closed, True
        if started:
            with contextlib.suppress(Failure):  # then there is nothing left to be shut down
                call(self._nvml.nvmlShutdown)
        return True
