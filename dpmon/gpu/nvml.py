"""Guards every NVML call. No other module imports pynvml.

Any call may take seconds, or never return. If the library is shut down or exit() is called during a call, the process
crashes. So this module counts the calls in flight.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from dpmon.gpu.failure import NO_START, UNINITIALIZED, CallFailed, call

NO_GPU = "the NVIDIA driver is loaded but sees no GPU"


_waiting: set[Nvml] = set()
"""Instances with a call in flight."""


def leave(status: int) -> None:
    """End the process with this status if a call is in flight, because the library would crash at a normal exit."""
    if _waiting:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)


class Nvml:
    """The NVML library, for any number of threads. It is not imported or loaded before `open`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nvml: Any = None
        self._in_flight = 0
        self._closed = False
        self.uninitialised = False
        """Whether the library reports that it is not initialised, so that it must be started again."""

    @property
    def module(self) -> Any:
        """pynvml; None before `open`."""
        return self._nvml

    def guard(self, read: Callable[[], Any]) -> Any:
        """Return the result of `read`. The library stays open meanwhile. Raises CallFailed, also after `close`."""
        with self._lock:
            if self._closed:
                raise CallFailed("NVML was shut down", UNINITIALIZED)
            self._in_flight += 1
            _waiting.add(self)
        try:
            return call(read)
        except CallFailed as failure:
            self.uninitialised = self.uninitialised or failure.code == UNINITIALIZED
            raise
        finally:
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    _waiting.discard(self)

    def open(self) -> str | None:
        """Start NVML. Return None on success, else the reason in one sentence."""
        try:
            import pynvml  # noqa: TID251 - the only import of pynvml
        except Exception as error:  # noqa: BLE001 - a broken installation is reported as a reason
            if isinstance(error, ModuleNotFoundError):
                return "the Python package nvidia-ml-py is not installed"
            return f"the Python package nvidia-ml-py does not load: {type(error).__name__}: {error}"
        try:
            self.guard(pynvml.nvmlInit)
        except CallFailed as failure:
            return NO_START.get(failure.code, f"NVML does not start: {failure.reason}")
        self._nvml = pynvml
        self.uninitialised = False
        return None

    def count(self) -> int:
        """Return the number of GPUs. Raises CallFailed."""
        return int(self.guard(self._nvml.nvmlDeviceGetCount))

    def close(self) -> bool:
        """Shut the library down for good. Return False, without any action, while a call is in flight."""
        with self._lock:
            if self._in_flight:
                return False
            started, self._closed = self._nvml is not None and not self._closed, True
        if started:
            with contextlib.suppress(CallFailed):  # then it is already shut down
                call(self._nvml.nvmlShutdown)
        return True
