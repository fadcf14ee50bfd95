"""Copies from the host to a GPU: what counts as one, and that nobody sees it counted. The GPU is played."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dpmon.tracer.steps import Steps
from rings import everything, opened
from test_tracer_events import Device

from dpmon.record.codec import Decoder
from dpmon.record.kinds import Step
from dpmon.record.wire import Untimed
from dpmon.ring import Activity, Ring
from dpmon.tracer.copies import Copies, where_cuda, where_to
from dpmon.tracer.timing import BACKWARD, FORWARD, MAX_COPIES, Timing

SCRIPT = str(Path(__file__).parents[1] / "process" / "scripts" / "knows_methods.py")


class Setting:
    """Steps in a turn, with devices that are timed; `copy` stands for Tensor.to: 3 ms on the device."""

    def __init__(self, path: Path) -> None:
        self.device = Device()
        self.path = str(path / "ring")
        self.ring = Ring(self.path, process=0)
        self.faults: list[Any] = []
        session: Any = SimpleNamespace(
            ring=self.ring, renew_at=1 << 60, timing=None, off=False, local=SimpleNamespace(depth=0),
            fault=lambda *what, **_: self.faults.append(what),
        )  # fmt: skip
        self.session = session
        self.steps = Steps(session)
        self.steps.attach(self.ring)
        self.timing = session.timing = Timing(session, self.steps, self.ring, self.device)
        self.steps.thread = threading.get_ident()
        self.steps._begin(1)
        self.seen: list[tuple[Any, ...]] = []
        self.copies = Copies(session, self.steps)
        self.to = self.copies.traced(self.original, where_to)

    def original(self, *args: Any, **kwargs: Any) -> Any:
        what = self.ring.words[Activity.WORD] & 7
        self.seen.append((what, self.steps.copying))
        self.device.now += 3.0
        if kwargs.get("fails"):
            raise RuntimeError("no room")
        return args[0].type(args[2]) if len(args) == 3 else args[0]

    def step(self) -> Step:
        """The turn is over: its record."""
        self.steps.close(self.steps.last or 2)
        self.device.reached = self.device.now
        self.timing.read(Untimed.ENDED)
        with opened(self.path) as reader:
            found = Decoder(0).decode(everything(reader)[-1])
        assert isinstance(found, Step)
        assert self.faults == []
        return found


@pytest.fixture
def setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    return Setting(tmp_path)


def test_a_copy_is_a_phase_of_the_step(setting: Setting) -> None:
    batch = torch.zeros(4, 5)
    assert setting.to(batch, "cuda:0", non_blocking=True) is batch
    assert setting.to(batch, device=torch.device("cuda", 0)) is batch
    assert setting.seen == [(Activity.COPY, True)] * 2
    assert setting.ring.words[Activity.WORD] & 7 == Activity.OTHER
    step = setting.step()
    assert step.quantity("copied_bytes") == 2 * 80
    assert step.device_ms == {"copy": 6.0}
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
def test_what_is_copied_to_a_gpu_counts(setting: Setting, args: Any, named: Any) -> None:
    if args and isinstance(args[0], torch.Tensor):
        args = (SimpleTensor(),)
    setting.to(torch.zeros(3), *args, **named)
    step = setting.step()
    assert (step.quantity("copied_bytes"), step.device_ms) == (12, {"copy": 3.0})


class SimpleTensor(torch.Tensor):
    """One that says it is on a GPU."""

    @property
    def is_cpu(self) -> bool:  # type: ignore[override]
        return False

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:1")


def test_what_stays_on_the_host_or_comes_from_a_gpu_does_not(setting: Setting) -> None:
    here = torch.zeros(3)
    for args, named in (
        (("cpu",), {}), ((torch.float16,), {}), ((here,), {}), ((), {"dtype": torch.int8}), ((), {}), ((None,), {}),
        ((True,), {}), (("no device",), {}), ((), {"device": None}), ((-1,), {}),
        (("cuda:4",), {}), ((4,), {}),  # no such GPUs: an event there would fail, and three such are the last
    ):  # fmt: skip
        setting.to(here, *args, **named)
    setting.to(SimpleTensor(), "cuda:0")
    setting.to(torch.zeros(1, device="meta"), "cuda:0")
    setting.to("no tensor at all", "cuda:0")
    assert {copying for _, copying in setting.seen} == {False}
    step = setting.step()
    assert (step.quantity("copied_bytes"), step.device_ms, "copy" in step.phases) == (None, None, False)


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (torch.zeros(10).to_sparse(), 0),
        (torch.eye(3).to_sparse(), 3 * 2 * 8 + 3 * 4),
        (torch.zeros(2).expand(5, 2), 40),
    ],
)
def test_bytes_are_those_that_there_are(setting: Setting, tensor: torch.Tensor, size: int) -> None:
    setting.to(tensor, "cuda:0")
    assert setting.step().quantity("copied_bytes") == size


def test_the_host_converts_before_it_copies(setting: Setting) -> None:
    """As torch does (aten/src/ATen/native/cuda/Copy.cu)."""
    setting.to(torch.zeros(10), "cuda:0", torch.float16)
    assert setting.step().quantity("copied_bytes") == 20


def test_what_is_traced_with_is_not_copied(setting: Setting) -> None:
    """A size that torch.compile has made a variable of stays one: else there is a compilation for each."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv()
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    with FakeTensorMode(shape_env=shapes) as mode:
        setting.to(mode.from_tensor(torch.zeros(7, 4), symbolic_context=context), "cuda:0")
        setting.to(mode.from_tensor(torch.zeros(3)), "cuda:0")
    assert (shapes.guards, setting.device.recorded) == ([], [])
    assert "copy" not in setting.step().phases


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trace_of_the_script_is_as_without_us(setting: Setting) -> None:
    def function(copy: Any) -> Any:
        return lambda tensor: copy(tensor, "cuda:0", torch.float64) * 2

    trace: Any = torch.jit.trace
    codes = [trace(function(copy), torch.ones(2)).code for copy in (setting.to, setting.original)]
    assert codes[0] == codes[1]


def test_a_tracer_that_has_given_up_times_nothing(setting: Setting) -> None:
    setting.session.off = True
    setting.to(torch.zeros(1), "cuda:0")
    assert (len(setting.seen), setting.device.recorded, setting.steps.copies) == (1, [], 0)


def test_our_own_fault_stops_no_copy(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(gpu: int) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(setting.timing, "copy_begins", fails)
    batch = torch.zeros(1)
    assert setting.to(batch, "cuda:0") is batch
    assert [what[0] for what in setting.faults] == ["copy"]
    assert not setting.steps.copying
    assert setting.ring.words[Activity.WORD] & 7 == Activity.OTHER


def test_what_a_signal_handler_raises_goes_on_to_the_script(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
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
    cuda = setting.copies.traced(setting.original, where_cuda)
    cuda(torch.zeros(1))
    cuda(torch.zeros(1), 3, non_blocking=True)
    cuda(torch.zeros(1), device="cuda:2")
    assert [device for device, _ in setting.device.recorded] == [1, 1, 3, 3, 2, 2]
    assert setting.step().device_ms == {"copy": 3.0}, "of the slowest device"


def test_a_copy_within_a_phase_is_taken_off_it(setting: Setting) -> None:
    setting.timing.runs_on((0,))
    setting.timing.begin(FORWARD)
    outer, setting.steps.inner = setting.steps.inner, 0
    setting.device.now += 2.0
    setting.to(torch.zeros(1), "cuda:0")
    setting.device.now += 4.0
    began = setting.steps.last - setting.steps.inner - 1000
    setting.steps.call_ends(0, began, setting.steps.last, outer, 1, 0)
    step = setting.step()
    assert step.device_ms == {"forward": 6.0, "copy": 3.0}
    assert step.phases["forward"] == 1000


def test_a_method_that_a_copy_goes_through_again_counts_once(setting: Setting) -> None:
    """As a subclass's __torch_function__ does."""
    again = setting.copies.traced(lambda *args: setting.to(*args), where_to)
    again(torch.zeros(2), "cuda:0")
    assert setting.step().quantity("copied_bytes") == 8


def test_a_copy_that_fails_raises_what_it_raised_and_took_its_time(setting: Setting) -> None:
    with pytest.raises(RuntimeError, match="no room") as caught:
        setting.to(torch.zeros(1), "cuda:0", fails=True)
    files = [str(entry.path) for entry in caught.traceback]
    assert files == [__file__] * 2, "nothing of ours is in the traceback"
    assert not setting.steps.copying
    assert setting.step().device_ms == {"copy": 3.0}


def test_more_copies_than_are_timed_have_a_reason(setting: Setting) -> None:
    for _ in range(MAX_COPIES + 1):
        setting.to(torch.zeros(1), "cuda:0")
    assert len(setting.device.recorded) == 2 * MAX_COPIES
    step = setting.step()
    assert step.device_ms == {"copy": None}
    assert step.untimed == "the step copies more tensors to devices than are timed: 16"
    assert step.quantity("copied_bytes") == 4 * (MAX_COPIES + 1)


def test_a_phase_with_copies_that_are_not_timed_has_no_time_of_its_own(setting: Setting) -> None:
    setting.timing.runs_on((0,))
    for copies in (MAX_COPIES + 1, 1):
        setting.steps.open = True
        setting.timing.begin(FORWARD)
        for _ in range(copies):
            setting.to(torch.zeros(1), "cuda:0")
        setting.timing.end(FORWARD)
        setting.timing.begin(BACKWARD)
        setting.device.now += 2.0
        setting.timing.end(BACKWARD)
        setting.steps.forward = setting.steps.backward = 1000
        step = setting.step()
        if copies > 1:
            assert step.device_ms == {"forward": None, "backward": 2.0, "copy": None}
            setting.steps._begin(setting.steps.last)
    assert step.device_ms == {"forward": 0.0, "backward": 2.0, "copy": 3.0}


def test_other_threads_and_times_without_a_turn_are_left_alone(setting: Setting) -> None:
    other = threading.Thread(target=setting.to, args=(torch.zeros(1), "cuda:0"))
    other.start()
    other.join()
    setting.steps.open = False
    setting.to(torch.zeros(1), "cuda:0")
    setting.steps.open = True
    timing, setting.session.timing = setting.session.timing, None
    setting.to(torch.zeros(1), "cuda:0")
    setting.session.timing = timing
    assert len(setting.seen) == 3
    assert {copying for _, copying in setting.seen} == {False}
    assert setting.device.recorded == []


def test_nobodys_subclass_or_mode_sees_that_somebody_looks(setting: Setting) -> None:
    seen: list[str] = []

    class Watching(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    tensor = torch.zeros(2).as_subclass(Watching)
    seen.clear()
    with Mode():
        setting.to(tensor, "cuda:0")
    assert seen == []
    assert setting.step().quantity("copied_bytes") == 8


@pytest.mark.slow
def test_the_methods_are_torchs_own_to_all_who_know_them() -> None:
    """Lazy modules, subclasses, torch.overrides, pickle, torch.compile without a break, fx, vmap, tracebacks."""
    said = [
        subprocess.run([sys.executable, SCRIPT, how], capture_output=True, text=True, timeout=300, check=True).stdout
        for how in ("replaced", "as torch has them")
    ]
    assert said[0] == said[1]
    assert said[0].splitlines()[-1] == "all of it"


def test_a_torch_for_the_cpu_is_not_touched(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    before = torch.Tensor.to, torch.Tensor.cuda
    setting.copies.install()
    assert (torch.Tensor.to, torch.Tensor.cuda) == before
