"""NVML answering and failing, one function at a time: pynvml is replaced by a module that does as told."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pynvml import NVMLError  # noqa: TID251 - the real error class: unhashable, compares badly

from dpmon.gpu import present
from dpmon.gpu.device import DeviceSample, share_of_run
from dpmon.gpu.nvml import CALLS_A_SAMPLE, RETRY_S, Nvml
from dpmon.gpu.present import missing

UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED = 1, 3, 4, 9
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH, UNKNOWN = 12, 13, 15, 18, 999
GIB = 1 << 30

FIELDS_OF = {
    "nvmlDeviceGetUtilizationRates": {"util_pct"},
    "nvmlDeviceGetMemoryInfo": {"mem_used_bytes", "mem_total_bytes"},
    "nvmlDeviceGetTemperature": {"temperature_c"},
    "nvmlDeviceGetPowerUsage": {"power_w"},
    "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
    "nvmlDeviceGetClockInfo": {"sm_clock_mhz"},
    "nvmlDeviceGetComputeRunningProcesses": {"of_run", "mem_run_bytes"},
    "nvmlDeviceGetUUID": {"uuid"},
    "nvmlDeviceGetName": {"name"},
}
ALTERNATIVES = {
    "nvmlDeviceGetTemperature": "nvmlDeviceGetTemperatureV",
    "nvmlDeviceGetEnforcedPowerLimit": "nvmlDeviceGetPowerManagementLimit",
}


class FakePynvml(ModuleType):
    """`codes` says what fails: by function, or by (function, GPU); `calls` is what was asked."""

    NVML_TEMPERATURE_GPU = 0
    NVML_CLOCK_SM = 1
    nvmlMemory_v2 = 0x2000028
    NVMLError = NVMLError

    def __init__(self, gpus: int = 2) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.codes: dict[Any, Any] = {}
        self.calls: list[tuple[str, int | None]] = []
        self.processes: dict[int, list[tuple[int, int | None]]] = {}
        self.answers = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetCount": lambda: self.gpus,
            "nvmlDeviceGetHandleByIndex": lambda gpu: SimpleNamespace(gpu=gpu),
            "nvmlDeviceGetUUID": lambda gpu: f"GPU-{gpu}",
            "nvmlDeviceGetName": lambda gpu: b"Fake \xff",
            "nvmlDeviceGetUtilizationRates": lambda gpu: SimpleNamespace(gpu=40 + gpu, memory=3),
            "nvmlDeviceGetMemoryInfo": self._memory,
            "nvmlDeviceGetTemperature": lambda gpu, sensor: 60 + gpu,
            "nvmlDeviceGetTemperatureV": lambda gpu, sensor: 70 + gpu,
            "nvmlDeviceGetPowerUsage": lambda gpu: 250_500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda gpu: 700_000,
            "nvmlDeviceGetPowerManagementLimit": lambda gpu: 650_000,
            "nvmlDeviceGetClockInfo": lambda gpu, clock: 1980,
            "nvmlDeviceGetComputeRunningProcesses": lambda gpu: self._processes(gpu),
            "nvmlDeviceGetGraphicsRunningProcesses": lambda gpu: [],
        }

    def _memory(self, gpu: int, version: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(used=(10 if version else 11) * GIB, total=80 * GIB)

    def _processes(self, gpu: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes.get(gpu, [])]

    def __getattr__(self, name: str) -> Any:
        if name not in self.answers or self.codes.get(name) is AttributeError:
            raise AttributeError(name)

        def function(*args: Any, **kwargs: Any) -> Any:
            gpu = getattr(args[0], "gpu", args[0]) if args else None
            self.calls.append((name, gpu))
            for key in (name, (name, gpu), (name, kwargs.get("version") and "v2")):
                if key in self.codes:
                    failure = self.codes[key]
                    raise NVMLError(failure) if isinstance(failure, int) else failure
            return self.answers[name](*(gpu, *args[1:]) if args else (), **kwargs)

        return function

    def count(self, name: str, gpu: int = 0) -> int:
        return self.calls.count((name, gpu))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakePynvml]:
    module = FakePynvml()
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setattr("dpmon.gpu.nvml.pids_are_shared", lambda: True)
    return module


def opened() -> Nvml:
    nvml = Nvml()
    assert nvml.open() is None
    return nvml


def settled(nvml: Nvml, pids: frozenset[int] = frozenset(), start_s: float = 0.0) -> list[DeviceSample]:
    """The third sample: by then everything was asked once, and in another way where the first one failed."""
    for second in range(3):
        samples = nvml.sample(pids, start_s + second)
    return samples


def test_every_value_in_its_unit(fake: FakePynvml) -> None:
    fake.processes = {1: [(500, 3 * GIB), (501, GIB), (9, 5 * GIB)]}
    first, second = settled(opened(), frozenset({500, 501}))
    assert first == DeviceSample(
        index=0,
        uuid="GPU-0",
        name="Fake �",
        of_run=False,
        util_pct=40,
        mem_used_bytes=10 * GIB,
        mem_total_bytes=80 * GIB,
        mem_run_bytes=0,
        temperature_c=60,
        power_w=250.5,
        power_limit_w=700.0,
        sm_clock_mhz=1980,
        absent={},
    )
    assert (second.of_run, second.mem_run_bytes, second.util_pct) == (True, 4 * GIB, 41)


def test_nothing_is_asked_for_more_often_than_eight_times_a_sample(fake: FakePynvml) -> None:
    nvml = opened()
    fake.calls.clear()
    for second in range(60):
        before = len(fake.calls)
        nvml.sample(frozenset(), float(second))
        asked = [gpu for name, gpu in fake.calls[before:]]
        processes = sum("RunningProcesses" in name and gpu == 0 for name, gpu in fake.calls[before:])
        assert asked.count(0) + processes <= CALLS_A_SAMPLE  # a list of processes is two calls of the library
    assert 50 <= fake.count("nvmlDeviceGetUtilizationRates") <= 60
    assert fake.count("nvmlDeviceGetComputeRunningProcesses") <= 12
    assert fake.count("nvmlDeviceGetEnforcedPowerLimit") <= 2
    assert fake.count("nvmlDeviceGetName") == 1


@pytest.mark.parametrize("function", FIELDS_OF)
@pytest.mark.parametrize("code", [2, NO_PERMISSION, 10, 24, UNKNOWN, 31337])
def test_a_field_that_fails_costs_only_itself(fake: FakePynvml, function: str, code: int) -> None:
    good = settled(opened())
    fake.codes[(function, 0)] = code
    first, second = settled(opened())
    assert second == good[1]
    for name in DeviceSample.__slots__:
        if name in FIELDS_OF[function]:
            assert getattr(first, name) is None
            assert first.absent[name]
        elif name != "absent":
            assert getattr(first, name) == getattr(good[0], name)
    assert set(first.absent) == FIELDS_OF[function]


@pytest.mark.parametrize(
    "function", [name for name in FIELDS_OF if name not in ("nvmlDeviceGetUUID", "nvmlDeviceGetName")]
)
@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_what_is_not_supported_is_not_asked_again(fake: FakePynvml, function: str, code: int) -> None:
    fake.codes[(function, 0)] = code
    if function in ALTERNATIVES:
        fake.codes[(ALTERNATIVES[function], 0)] = code
    nvml = opened()
    sample = settled(nvml)[0]
    assert {sample.absent[name] for name in FIELDS_OF[function]} <= {
        "not supported",
        "this driver does not offer it",
    }
    asked = fake.count(function)
    for second in range(3, 40):
        nvml.sample(frozenset(), float(second))
    assert fake.count(function) == asked
    assert fake.count(function, gpu=1) > asked  # the other GPU is asked as before


def test_a_failure_that_passes_is_asked_again(fake: FakePynvml) -> None:
    fake.codes["nvmlDeviceGetPowerUsage"] = UNKNOWN
    nvml = opened()
    assert settled(nvml)[0].power_w is None
    del fake.codes["nvmlDeviceGetPowerUsage"]
    sample = nvml.sample(frozenset(), 4.0)[0]
    assert sample.power_w == 250.5
    assert "power_w" not in sample.absent


@pytest.mark.parametrize(
    ("broken", "field", "value"),
    [
        (("nvmlDeviceGetMemoryInfo", "v2"), "mem_used_bytes", 11 * GIB),
        ("nvmlDeviceGetTemperature", "temperature_c", 70),
        ("nvmlDeviceGetEnforcedPowerLimit", "power_limit_w", 650.0),
    ],
)
def test_an_older_driver_is_asked_in_its_own_way(fake: FakePynvml, broken: Any, field: str, value: float) -> None:
    fake.codes[broken] = FUNCTION_NOT_FOUND
    nvml = opened()
    settled(nvml)
    sample = nvml.sample(frozenset(), 4.0)[0]
    assert getattr(sample, field) == value
    assert field not in sample.absent


def test_a_binding_without_the_function(fake: FakePynvml) -> None:
    fake.codes["nvmlDeviceGetClockInfo"] = AttributeError
    sample = settled(opened())[0]
    assert sample.absent == {"sm_clock_mhz": "the installed nvidia-ml-py does not know it"}


def test_anything_that_is_raised_is_contained(fake: FakePynvml) -> None:
    fake.codes["nvmlDeviceGetUtilizationRates"] = ValueError("odd structure")
    sample = settled(opened())[0]
    assert sample.absent == {"util_pct": "NVML: ValueError: odd structure"}


@pytest.mark.parametrize(
    ("function", "failure", "words"),
    [
        ("nvmlInit", LIBRARY_NOT_FOUND, "no NVIDIA driver on this machine"),
        ("nvmlInit", DRIVER_NOT_LOADED, "installed but not loaded"),
        ("nvmlInit", VERSION_MISMATCH, "differ in version"),
        ("nvmlInit", NO_PERMISSION, "no permission"),
        ("nvmlInit", UNKNOWN, "NVML does not start: NVML: unknown error"),
        ("nvmlInit", OSError("exec format"), "NVML does not start: NVML: OSError: exec format"),
        ("nvmlDeviceGetCount", UNKNOWN, "NVML cannot count the GPUs"),
    ],
)
def test_no_gpu_has_one_reason(fake: FakePynvml, function: str, failure: Any, words: str) -> None:
    fake.codes[function] = failure
    nvml = Nvml()
    reason = nvml.open()
    assert reason is not None
    assert words in reason
    assert not nvml.is_open
    del fake.codes[function]
    assert nvml.open() is None  # and it may come


def test_a_driver_without_gpus(fake: FakePynvml) -> None:
    fake.gpus = 0
    assert Nvml().open() == "the NVIDIA driver is loaded but sees no GPU"
    assert ("nvmlShutdown", None) in fake.calls


def test_no_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml().open() == "the Python package nvidia-ml-py is not installed"


def test_a_lost_gpu_says_so_in_every_field_and_comes_back(fake: FakePynvml) -> None:
    nvml = opened()
    settled(nvml)
    fake.codes[("nvmlDeviceGetUtilizationRates", 0)] = GPU_IS_LOST
    fake.codes[("nvmlDeviceGetHandleByIndex", 0)] = GPU_IS_LOST
    lost, fine = nvml.sample(frozenset(), 10.0)
    assert (lost.uuid, lost.name) == ("GPU-0", "Fake �")
    assert (lost.util_pct, lost.power_w, lost.of_run) == (None, None, None)
    assert set(lost.absent.values()) == {"the GPU is lost"}
    assert fine.util_pct == 41
    opened_before = fake.count("nvmlDeviceGetHandleByIndex")
    nvml.sample(frozenset(), 11.0)
    assert fake.count("nvmlDeviceGetHandleByIndex") == opened_before  # not looked for at every sample
    fake.codes.clear()
    back = nvml.sample(frozenset(), 10.0 + RETRY_S)[0]
    assert back.util_pct == 40


def test_a_library_that_forgot_us_is_started_again(fake: FakePynvml) -> None:
    nvml = opened()
    fake.codes["nvmlDeviceGetUtilizationRates"] = UNINITIALIZED
    assert [sample.util_pct for sample in nvml.sample(frozenset(), 0.0)] == [None, None]
    assert not nvml.is_open
    fake.codes.clear()
    assert nvml.open() is None
    assert nvml.sample(frozenset(), 1.0)[0].util_pct == 40


def test_a_null_handle_is_never_used(fake: FakePynvml) -> None:
    fake.answers["nvmlDeviceGetHandleByIndex"] = lambda gpu: None
    sample = opened().sample(frozenset(), 0.0)[0]
    assert sample.absent["util_pct"] == "NVML gave no handle for this GPU"
    assert fake.count("nvmlDeviceGetUUID") == 0


@pytest.mark.parametrize(
    ("held", "same_pids", "expected"),
    [
        ({}, True, (False, 0)),
        ({}, False, (False, 0)),
        ({7: 100}, True, (False, 0)),
        ({7: 100}, False, (None, None)),  # in a container the ids are the machine's: 7 may well be ours
        ({1: 100, 7: 50}, True, (True, 100)),
        ({1: 100, 2: 50}, True, (True, 150)),
        ({1: None, 2: 50}, True, (True, None)),
    ],
)
def test_share_of_run(held: dict[int, int | None], same_pids: bool, expected: tuple[Any, Any]) -> None:
    of_run, mem_run, absent = share_of_run(held, {1, 2}, same_pids)
    assert (of_run, mem_run) == expected
    assert set(absent) == {n for n, v in (("of_run", of_run), ("mem_run_bytes", mem_run)) if v is None}


# ------------------------------------------------------------------------------------------------ what is there


@pytest.fixture
def plain_machine(fake: FakePynvml, monkeypatch: pytest.MonkeyPatch) -> FakePynvml:
    """No GPUs but those that NVML knows of."""
    monkeypatch.setattr(present, "_OTHERS", ())
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
    assert missing(names) == why
    opened, closed = (plain_machine.calls.count((what, None)) for what in ("nvmlInit", "nvmlShutdown"))
    assert opened == closed == ("cuda" in names)


def test_one_gpu_and_none(plain_machine: FakePynvml) -> None:
    plain_machine.gpus = 1
    assert missing("cuda:1") == "there is no cuda:1 here, only cuda:0"
    plain_machine.gpus = 0
    assert missing("cuda:0") == "cuda:0 cannot be had: the NVIDIA driver is loaded but sees no GPU"


@pytest.mark.parametrize("code", [LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED, VERSION_MISMATCH, NO_PERMISSION, UNKNOWN])
def test_without_nvml_there_is_no_gpu_or_nobody_knows(plain_machine: FakePynvml, code: int) -> None:
    """A library that does not start for another reason says nothing about the GPUs that torch will find."""
    plain_machine.codes["nvmlInit"] = code
    why = missing("cuda:0")
    assert (why is not None) is (code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED))
    assert why is None or why.startswith("cuda:0 cannot be had: ")


def test_a_driver_that_does_not_answer_and_gpus_of_others(
    plain_machine: FakePynvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(present, "WAIT_S", 0.0)
    plain_machine.answers["nvmlInit"] = lambda: released.wait(60)
    assert missing("cuda:9") is None
    released.set()
    monkeypatch.setattr(present, "WAIT_S", 60.0)
    monkeypatch.setattr(present, "_OTHERS", ("/dev/null",))
    assert missing("cuda:9") is None
