"""The only access to NVML: starts the library, guards every call, and describes failures in words.

No other module imports pynvml. Any call may take seconds, or never return. If the library is shut down or exit() is
called during a call, the process crashes. So this module counts the calls in flight.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

# NVML's own numbers (nvml.h); a driver may answer with any other.
UNINITIALIZED, _NOT_SUPPORTED, _NO_PERMISSION, _DRIVER_NOT_LOADED, TIMEOUT = 1, 3, 4, 9, 10
_LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND, GPU_IS_LOST, _VERSION_MISMATCH = 12, 13, 15, 18
_MEANINGS = {
    UNINITIALIZED: "NVML is not initialized",
    _NOT_SUPPORTED: "not supported",
    _NO_PERMISSION: "no permission",
    TIMEOUT: "NVML: timeout",
    _FUNCTION_NOT_FOUND: "this driver does not offer it",
    GPU_IS_LOST: "the GPU is lost",
    16: "the GPU needs a reset",
    21: "no data yet",
    25: "this driver does not offer it",
    28: "NVML: GPU not found",
    999: "NVML: unknown error",
}
_NO_START: dict[int | None, str] = {
    _LIBRARY_NOT_FOUND: "no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded",
    _VERSION_MISMATCH: "the NVIDIA driver and its library differ in version: a reboot is due after an update",
    _NO_PERMISSION: "no permission to talk to the NVIDIA driver",
}
_PERMANENT_CODES = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, 22, 25, 26})
_GPU_GONE_CODES = frozenset({UNINITIALIZED, GPU_IS_LOST, 16, 28})


class NvmlCallError(Exception):
    """A failed call, with the reason in words, and NVML's error number if NVML failed."""

    def __init__(self, reason: str, code: int | None = None, *, is_permanent: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.is_permanent = is_permanent or code in _PERMANENT_CODES  # repeating the call is useless
        self.is_gpu_gone = code in _GPU_GONE_CODES  # the GPU as a whole does not answer


def describe_return_code(code: int) -> str:
    """Return the meaning of an NVML return code; for an unknown one, its number."""
    return _MEANINGS.get(code, f"NVML error {code}")


def call_nvml(read: Callable[[], Any]) -> Any:
    """Return the result of `read`. Raises NvmlCallError. NVML's errors are compared by number: they have no hash."""
    try:
        return read()
    except NvmlCallError:
        raise
    except AttributeError:
        raise NvmlCallError("the installed nvidia-ml-py does not know it", is_permanent=True) from None
    except Exception as error:  # noqa: BLE001 - ctypes and pynvml may raise anything; only one field is lost
        code = getattr(error, "value", None)
        if not isinstance(code, int):
            # pynvml raises this if a function called without a version needs a newer driver.
            if type(error).__name__ == "NVMLLibraryMismatchError":
                code = _FUNCTION_NOT_FOUND
            else:
                raise NvmlCallError(f"NVML: {type(error).__name__}: {error}") from None
        raise NvmlCallError(describe_return_code(code), code) from None


_running: list[Nvml] = []
"""The instance of each call in flight."""


def exit_past_nvml(status: int) -> None:
    """End the process with this status if a call is in flight, because a normal exit would crash in the library."""
    if _running:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(status)


class Nvml:
    """The NVML library, for any number of threads. `open` imports and loads it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self.module: Any = None
        """pynvml; None before `open`."""

    def run(self, read: Callable[[], Any]) -> Any:
        """Return the result of `read`. The library stays open during it. Raises NvmlCallError, also after `close`."""
        with self._lock:
            if self._closed:
                raise NvmlCallError("NVML was shut down", UNINITIALIZED)
            _running.append(self)
        try:
            return call_nvml(read)
        finally:
            with self._lock:
                _running.remove(self)

    def open(self) -> str | None:
        """Start NVML. Return None, or why that failed, in one sentence."""
        try:
            import pynvml  # noqa: TID251 - the only import of pynvml
        except Exception as error:  # noqa: BLE001 - a broken installation is reported as a reason
            return f"the Python package nvidia-ml-py does not load: {type(error).__name__}: {error}"
        try:
            self.run(pynvml.nvmlInit)
        except NvmlCallError as failure:
            return _NO_START.get(failure.code, f"NVML does not start: {failure.reason}")
        self.module = pynvml
        return None

    def count(self) -> tuple[int, str | None]:
        """Start NVML. Return the number of GPUs, and why there are none (None if there are some)."""
        reason = self.open()
        if reason is not None:
            return 0, reason
        try:
            count = int(self.run(self.module.nvmlDeviceGetCount))
        except NvmlCallError as failure:
            return 0, f"NVML cannot count the GPUs: {failure.reason}"
        return count, None if count else "the NVIDIA driver is loaded but sees no GPU"

    def close(self) -> bool:
        """Shut the library down for good. Return False, without any action, while a call is in flight."""
        with self._lock:
            if self in _running:
                return False
            is_started, self._closed = self.module is not None and not self._closed, True
        if is_started:
            with contextlib.suppress(NvmlCallError):  # it is already shut down
                call_nvml(self.module.nvmlShutdown)
        return True
