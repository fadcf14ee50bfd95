"""Failures of NVML calls: texts for the error numbers, and their consequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# NVML's own numbers (nvml.h); a driver may answer with any other.
UNINITIALIZED, _INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION = 1, 2, 3, 4
_DRIVER_NOT_LOADED, _LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND = 9, 12, 13
GPU_IS_LOST, _RESET_REQUIRED, _VERSION_MISMATCH, _ARGUMENT_VERSION, _GPU_NOT_FOUND = 15, 16, 18, 25, 28

_WORDS = {
    UNINITIALIZED: "NVML is not initialised",
    _INVALID_ARGUMENT: "NVML: invalid argument",
    _NOT_SUPPORTED: "not supported",
    _NO_PERMISSION: "no permission",
    6: "NVML: not found",
    7: "NVML: insufficient size",
    8: "the GPU's external power cable is not connected",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
    10: "NVML: timeout",
    11: "NVML: interrupt problem in the driver",
    _LIBRARY_NOT_FOUND: "no NVML library",
    _FUNCTION_NOT_FOUND: "this driver does not offer it",
    14: "the GPU's infoROM is corrupted",
    GPU_IS_LOST: "the GPU is lost",
    _RESET_REQUIRED: "the GPU needs a reset",
    17: "NVML: blocked by the operating system",
    _VERSION_MISMATCH: "driver and NVML library differ in version",
    19: "NVML: in use",
    20: "NVML: out of memory",
    21: "no data yet",
    22: "not supported on a virtual GPU with ECC",
    23: "NVML: insufficient resources",
    _ARGUMENT_VERSION: "this driver does not offer it",
    26: "this driver does not offer it any more",
    27: "NVML: not ready",
    _GPU_NOT_FOUND: "NVML: GPU not found",
    29: "NVML: the GPU's state does not allow an answer",
    999: "NVML: unknown error",
}
NO_START: dict[int | None, str] = {
    _LIBRARY_NOT_FOUND: "no NVIDIA driver on this machine: libnvidia-ml.so.1 was not found",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is installed but not loaded",
    _VERSION_MISMATCH: "the NVIDIA driver and its library differ in version: a reboot is due after an update",
    _NO_PERMISSION: "no permission to talk to the NVIDIA driver",
}
_NEVER = frozenset({_NOT_SUPPORTED, _FUNCTION_NOT_FOUND, _ARGUMENT_VERSION, 22, 26})
_GONE = frozenset({UNINITIALIZED, GPU_IS_LOST, _RESET_REQUIRED, _GPU_NOT_FOUND})


@dataclass(frozen=True, slots=True)
class Missing:
    """Takes the place of one missing value in an answer, and gives the reason."""

    reason: str


class CallFailed(Exception):
    """A failed call, with the reason in words, and NVML's error number if NVML failed."""

    def __init__(self, reason: str, code: int | None = None, *, never: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.code = code
        self.never = never or code in _NEVER  # asking again is useless
        self.gone = code in _GONE  # the GPU as a whole does not answer


def words_of(code: int) -> str:
    """Return the meaning of an NVML return code."""
    return _WORDS.get(code, f"NVML error {code}")


def call(read: Callable[[], Any]) -> Any:
    """Return the result of `read`. Raises CallFailed. NVML's errors are compared by number: they are not hashable."""
    try:
        return read()
    except CallFailed:
        raise
    except AttributeError:
        raise CallFailed("the installed nvidia-ml-py does not know it", never=True) from None
    except Exception as error:  # noqa: BLE001 - ctypes and pynvml may raise anything; only one field is lost
        code = getattr(error, "value", None)
        if not isinstance(code, int):
            # pynvml raises this if a function called without a version needs a newer driver.
            if type(error).__name__ == "NVMLLibraryMismatchError":
                code = _FUNCTION_NOT_FOUND
            else:
                raise CallFailed(f"NVML: {type(error).__name__}: {error}") from None
        raise CallFailed(words_of(code), code) from None
