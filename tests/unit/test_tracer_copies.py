"""Copies from the host to a (simulated) GPU are counted, invisibly to the script."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dpmon.record.record_types import Step
from dpmon.record.span_format import Kind
from dpmon.tracer.devices.device_timing import MAX_TIMED_COPIES
from dpmon.tracer.steps.copies import CopyTracer, target_of_cuda, target_of_to
from support.fake_devices import SimulatedProcess

pytestmark = pytest.mark.slow

EMPTIES_TRACEBACKS = sys.version_info >= (3, 11)
"""Python 3.10 cannot remove the only entry of a traceback, so an error of a C function keeps that of the wrapper."""
SCRIPT = str(Path(__file__).parents[1] / "process" / "scripts" / "knows_methods.py")


class Setting(SimulatedProcess):
    """An open step with device times; `to` takes the place of Tensor.to, and takes 3 ms on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.phase(Kind.FETCH, 0.0)
        self.seen: list[tuple[int, int]] = []
        self.copies = CopyTracer(self.session, self.recorder)
        self.to = self.copies.wrap_copy_method(self.original, target_of_to)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((self.recorder.open_kinds[self.me.number], self.me.open_kind))
        self.device.now += 3.0
        if kwargs.get("fails"):
            raise RuntimeError("no room")
        return args[0].type(args[2]) if len(args) == 3 else args[0]

    def copying(self) -> bool:
        """Return whether the current phase of the process is a copy."""
        return Kind.COPY in (self.recorder.open_kinds[self.me.number], self.me.open_kind)

    def over(self) -> Step:
        """End the step; return its record."""
        with self.call():  # without a call there is no step
            pass
        self.phase(Kind.FETCH, 0.0)
        assert self.faults == []
        return self.records().steps[-1]


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return Setting()


def test_a_copy_is_a_phase_of_the_step(setting: Setting) -> None:
    batch = torch.zeros(4, 5)
    assert setting.to(batch, "cuda:0", non_blocking=True) is batch
    assert setting.to(batch, device=torch.device("cuda", 0)) is batch
    assert setting.seen == [(Kind.COPY, Kind.COPY)] * 2
    assert not setting.copying()
    step = setting.over()
    assert step.quantity("copied_bytes") == 2 * 80
    assert step.device_ms == {"data": None, "copy": 6.0, "forward": None}
    assert 0 < step.phases["copy"] <= step.wall_ns


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("cuda",), {}),
        (("cuda:3", torch.float32), {}),
        ((torch.device("cuda"),), {}),
        ((2,), {}),
        ((), {"device": "cuda:0"}),
        ((torch.empty(1),), {}),
    ],
)
def test_copies_to_a_gpu_count(setting: Setting, args: Any, named: Any) -> None:
    if args and isinstance(args[0], torch.Tensor):
        args = (SimpleTensor(),)
    setting.to(torch.zeros(3), *args, **named)
    step = setting.over()
    assert (step.quantity("copied_bytes"), copied(step)) == (12, 3.0)


def copied(step: Step) -> float | None:
    """Return the time of the copies on the slowest device."""
    return (step.device_ms or {})["copy"]


class SimpleTensor(torch.Tensor):
    """A tensor that claims to be on a GPU."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:1")


def test_copies_within_the_host_or_from_a_gpu_do_not_count(setting: Setting) -> None:
    here = torch.zeros(3)
    for args, named in (
        (("cpu",), {}), ((torch.float16,), {}), ((here,), {}), ((), {"dtype": torch.int8}), ((), {}), ((None,), {}),
        ((True,), {}), (("no device",), {}), ((), {"device": None}), ((-1,), {}),
        (("cuda:4",), {}), ((4,), {}),  # there are no such GPUs, and after three failed events timing stops
    ):  # fmt: skip
        setting.to(here, *args, **named)
    setting.to(SimpleTensor(), "cuda:0")
    setting.to(torch.zeros(1, device="meta"), "cuda:0")
    setting.to("no tensor at all", "cuda:0")
    assert set(setting.seen) == {(0, 0)}
    step = setting.over()
    assert (step.quantity("copied_bytes"), step.device_ms, "copy" in step.phases) == (None, None, False)


@pytest.mark.parametrize(
    ("tensor", "more", "size"),
    [
        (torch.zeros(10).to_sparse(), (), 0),
        (torch.eye(3).to_sparse(), (), 3 * 2 * 8 + 3 * 4),
        (torch.zeros(2).expand(5, 2), (), 40),
        (torch.zeros(10), (torch.float16,), 20),  # the host converts first (aten/src/ATen/native/cuda/Copy.cu)
    ],
)
def test_copied_bytes_are_those_of_the_data(setting: Setting, tensor: torch.Tensor, more: Any, size: int) -> None:
    setting.to(tensor, "cuda:0", *more)
    assert setting.over().quantity("copied_bytes") == size


def test_fake_tensors_are_not_copied(setting: Setting) -> None:
    """A size that torch.compile made symbolic stays symbolic; otherwise it would compile for each size."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with FakeTensorMode(shape_env=shapes) as mode:
        setting.to(mode.from_tensor(torch.zeros(7, 4), symbolic_context=context), "cuda:0")
        setting.to(mode.from_tensor(torch.zeros(3)), "cuda:0")
    assert (shapes.guards, setting.device.recorded) == ([], [])
    assert "copy" not in setting.over().phases


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace. is deprecated")
def test_a_trace_of_the_script_is_as_without_us(setting: Setting) -> None:
    def function(copy: Any) -> Any:
        return lambda tensor: copy(tensor, "cuda:0", torch.float64) * 2

    trace: Any = torch.jit.trace
    codes = [trace(function(copy), torch.ones(2)).code for copy in (setting.to, setting.original)]
    assert codes[0] == codes[1]


def test_a_tracer_that_has_given_up_times_nothing(setting: Setting) -> None:
    setting.session.is_off = True
    setting.to(torch.zeros(1), "cuda:0")
    assert (len(setting.seen), setting.device.recorded, len(setting.spans)) == (1, [], 1)


def test_a_fault_of_dpmon_stops_no_copy(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("dpmon.tracer.steps.copies._bytes", fails)
    batch = torch.zeros(1)
    assert setting.to(batch, "cuda:0") is batch
    assert [what[0] for what in setting.faults] == ["end of a phase"]
    assert not setting.copying()


def test_an_exception_of_a_signal_handler_reaches_the_script(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: object) -> None:
        raise TimeoutError("the script's own")

    def interrupted() -> int:
        signal.raise_signal(signal.SIGUSR1)
        return 0

    before = signal.signal(signal.SIGUSR1, too_late)
    try:
        monkeypatch.setattr(torch.cuda, "current_device", interrupted)
        with pytest.raises(TimeoutError, match="own"):
            setting.to(torch.zeros(1), "cuda")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert setting.seen == []


def test_cuda_goes_to_the_current_gpu_or_to_the_one_it_names(setting: Setting) -> None:
    cuda = setting.copies.wrap_copy_method(setting.original, target_of_cuda)
    cuda(torch.zeros(1))
    cuda(torch.zeros(1), 3, non_blocking=True)
    cuda(torch.zeros(1), device="cuda:2")
    assert [device for device, _ in setting.device.recorded] == [1, 1, 3, 3, 2, 2]
    assert copied(setting.over()) == 3.0, "of the slowest device"


def test_a_copy_inside_a_phase_is_subtracted_from_it(setting: Setting) -> None:
    with setting.call(0, ms=2.0):
        setting.to(torch.zeros(1), "cuda:0")
        setting.device.now += 4.0
    step = setting.over()
    assert step.device_ms == {"data": None, "forward": 6.0, "copy": 3.0}


def test_a_method_that_a_copy_goes_through_again_counts_once(setting: Setting) -> None:
    """A subclass's __torch_function__ may call the method again."""
    again = setting.copies.wrap_copy_method(lambda *args: setting.to(*args), target_of_to)
    again(torch.zeros(2), "cuda:0")
    assert setting.over().quantity("copied_bytes") == 8


def test_a_copy_that_fails_raises_what_it_raised_and_took_its_time(setting: Setting) -> None:
    with pytest.raises(RuntimeError, match="no room") as caught:
        setting.to(torch.zeros(1), "cuda:0", fails=True)
    files = [str(entry.path) for entry in caught.traceback]
    assert files == [__file__] * 2, "nothing of ours is in the traceback"
    assert not setting.copying()
    assert copied(setting.over()) == 3.0


def test_more_copies_than_are_timed_have_a_reason(setting: Setting) -> None:
    for _ in range(MAX_TIMED_COPIES + 1):
        setting.to(torch.zeros(1), "cuda:0")
    assert len(setting.device.recorded) == 2 * MAX_TIMED_COPIES
    step = setting.over()
    assert copied(step) is None
    assert step.untimed == "the step copies more tensors to devices than can be timed (16)"
    assert step.quantity("copied_bytes") == 4 * (MAX_TIMED_COPIES + 1)


def test_a_phase_with_copies_that_are_not_timed_has_no_time_of_its_own(setting: Setting) -> None:
    for copies in (MAX_TIMED_COPIES + 1, 1):
        with setting.call(0, ms=0.0):
            for _ in range(copies):
                setting.to(torch.zeros(1), "cuda:0")
        setting.phase(Kind.BACKWARD, 2.0)
        setting.phase(Kind.FETCH, 0.5)
    many, one = setting.records().steps
    assert many.device_ms == {"data": None, "forward": None, "backward": 2.0, "copy": None}
    assert one.device_ms == {"data": 0.5, "forward": 0.0, "backward": 2.0, "copy": 3.0}
    assert setting.faults == []


def test_other_threads_and_times_without_devices_are_left_alone(setting: Setting) -> None:
    other = threading.Thread(target=setting.to, args=(torch.zeros(1), "cuda:0"))
    other.start()
    other.join()
    timing, setting.recorder.device_timer = setting.recorder.device_timer, None
    setting.to(torch.zeros(1), "cuda:0")
    setting.recorder.device_timer = timing
    assert setting.seen == [(0, 0)] * 2
    assert setting.device.recorded == []


def test_tensor_subclasses_and_modes_see_only_the_scripts_own_calls(setting: Setting) -> None:
    seen: list[str] = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    tensor = torch.zeros(2).as_subclass(Watching)
    seen.clear()
    with Mode():
        setting.to(tensor, "cuda:0")
    assert seen == []
    assert setting.over().quantity("copied_bytes") == 8


@pytest.mark.slow
def test_the_patched_methods_are_recognized_as_torchs_own() -> None:
    """Lazy modules, subclasses, torch.overrides, pickle, torch.compile without a break, fx, vmap, tracebacks."""
    said = [
        subprocess.run([sys.executable, SCRIPT, how], capture_output=True, text=True, timeout=300, check=True).stdout
        for how in ("replaced", "as torch has them")
    ]
    if not EMPTIES_TRACEBACKS:  # lines about errors end with the number of frames
        said = [re.sub(r"^(<class .*) \d+$", r"\1", text, flags=re.MULTILINE) for text in said]
    assert said[0] == said[1]
    assert said[0].splitlines()[-1] == "all of it"


def test_a_torch_for_the_cpu_is_not_touched(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    before = torch.Tensor.to, torch.Tensor.cuda
    setting.copies.install()
    assert (torch.Tensor.to, torch.Tensor.cuda) == before
