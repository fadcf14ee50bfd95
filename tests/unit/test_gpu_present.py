"""Whether the GPUs named on a command line exist, with a fake pynvml that counts them."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest
from pynvml import NVMLError  # noqa: TID251 - the real error class: unhashable, compares badly

from dpmon.gpu import nvml
from dpmon.gpu.nvml import missing_device_reason

NO_PERMISSION, DRIVER_NOT_LOADED, LIBRARY_NOT_FOUND, VERSION_MISMATCH, UNKNOWN = 4, 9, 12, 18, 999


class FakePynvml(ModuleType):
    """`codes`: error code by function; `calls`: functions called."""

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.gpus = 2
        self.codes: dict[str, int] = {}
        self.calls: list[tuple[str, None]] = []
        self.answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: self.gpus,
        }

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers:
            raise AttributeError(name)

        def function() -> Any:
            self.calls.append((name, None))
            if name in self.codes:
                raise NVMLError(self.codes[name])
            return self.answers[name]()

        return function


@pytest.fixture
def plain_machine(monkeypatch: pytest.MonkeyPatch) -> FakePynvml:
    """A machine with only the GPUs that NVML knows."""
    fake = FakePynvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "_OTHER_GPU_FILES", ())
    return fake


@pytest.mark.parametrize(
    ("names", "why"),
    [
        ("cuda:0,cuda:1", None),
        ("cuda,cuda", None),
        ("cpu,cpu", None),
        ("cuda:0,cuda:7", "there is no cuda:7 here, only cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_is_not_there(plain_machine: FakePynvml, names: str, why: str | None) -> None:
    assert missing_device_reason(names) == why
    opened, closed = (plain_machine.calls.count((what, None)) for what in ("nvmlInit", "nvmlShutdown"))
    assert opened == closed == ("cuda" in names)


def test_one_gpu_and_none(plain_machine: FakePynvml) -> None:
    plain_machine.gpus = 1
    assert missing_device_reason("cuda:1") == "there is no cuda:1 here, only cuda:0"
    plain_machine.gpus = 0
    assert missing_device_reason("cuda:0") == "cuda:0 is not available: the NVIDIA driver is loaded but sees no GPU"


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, VERSION_MISMATCH, NO_PERMISSION, UNKNOWN])
def test_without_nvml_there_is_no_gpu_or_nobody_knows(plain_machine: FakePynvml, code: int) -> None:
    """A library that does not start for another reason says nothing about the GPUs that torch will find."""
    plain_machine.codes["nvmlInit"] = code
    why = missing_device_reason("cuda:0")
    assert (why is not None) is (code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED))
    assert why is None or why.startswith("cuda:0 is not available: ")


def test_a_driver_that_does_not_answer_and_gpus_of_others(
    plain_machine: FakePynvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(nvml, "MAX_COUNT_S", 0.0)
    plain_machine.answers["nvmlInit"] = lambda: released.wait(60)
    assert missing_device_reason("cuda:9") is None
    released.set()
    monkeypatch.setattr(nvml, "MAX_COUNT_S", 60.0)
    monkeypatch.setattr(nvml, "_OTHER_GPU_FILES", ("/dev/null",))
    assert missing_device_reason("cuda:9") is None
