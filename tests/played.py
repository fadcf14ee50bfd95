"""Simulates devices for unit tests: a clock for events, and a process whose device times come from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic_ns as clock
from types import SimpleNamespace
from typing import Any

import torch
from pretend import Result, decoded

from dpmon.assemble import Assembler
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, SITE_AT, Flag, Kind, unpack_span
from dpmon.span_ring import HeaderWord
from dpmon.tracer.core.session import TracerErrorGuard
from dpmon.tracer.devices.device_timing import DeviceTimer
from dpmon.tracer.steps.optimizers import OptimizerTracer
from dpmon.tracer.steps.span_recorder import SpanRecorder

LAYOUT = 1
_CALL = Kind.CALL | LAYOUT << SITE_AT | (Flag.TRAINING | Flag.GRAD | Flag.SINGLE) << FLAGS_AT


class Device:
    """A device whose events get the time `now`; those up to `reached` have occurred."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = -1.0
        self.graph = False
        self.made = 0
        self.recorded: list[tuple[int, float]] = []
        self.asked = 0
        self.failure: Exception | None = None

    def is_capturing(self) -> bool:
        return self.graph

    def create_event(self) -> dict[str, Any]:
        self.made += 1
        return {}

    def record(self, event: dict[str, Any], device: int) -> None:
        if self.failure is not None:
            raise self.failure
        assert not self.graph, "it would become part of the graph"
        assert event.setdefault("device", device) == device, "an event belongs to one device"
        event["at"] = self.now
        self.recorded.append((device, self.now))

    def is_done(self, event: dict[str, Any]) -> bool:
        self.asked += 1
        return float(event["at"]) <= self.reached

    def elapsed_ms(self, first: dict[str, Any], last: dict[str, Any]) -> float:
        assert self.is_done(first)
        assert self.is_done(last)
        return float(last["at"] - first["at"])


class _Optimizer(torch.optim.Optimizer):
    """An optimizer with a step that calls the closure."""

    def __init__(self, recorder: SpanRecorder) -> None:
        super().__init__([torch.zeros(1)], {})
        before, after = OptimizerTracer(recorder).hooks()
        self.register_step_pre_hook(before)
        self.register_step_post_hook(after)

    def step(self, closure: Any = None) -> None:
        closure()


class Process:
    """A process whose training the test performs phase by phase, on this thread; an assembler reads its spans."""

    def __init__(self) -> None:
        self.device = Device()
        self.faults: list[Any] = []
        self.session: Any = SimpleNamespace(is_off=False, count_error=lambda *what, **_: self.faults.append(what))
        self.session.guard = lambda where, fatal=True: TracerErrorGuard(self.session, where, fatal)
        self.recorder = SpanRecorder(self.session)
        self.spans: list[tuple[int, int, int, int]] = []
        self.recorder.put = self.put
        self.me = self.recorder.current_thread_state()
        self.recorder.training_thread = self.me
        device: Any = self.device
        self.timing = self.recorder.device_timer = DeviceTimer(self.recorder, device)
        self._optimizer = _Optimizer(self.recorder)
        self._assembler = Assembler()
        self._layout: Any = {"define": LAYOUT, "value": {"root": "Net", "via": None, "module": 1, "absent": {}}}
        self._heard = False
        self._fed = 0

    def put(self, head: int, start: int, took: int, sizes: int) -> int:
        """Take the place of SpanRing.put."""
        self.spans.append((head, start, took, sizes))
        return len(self.spans) - 1

    def one_in(self, count: int) -> None:
        """Request device times for one step in `count`."""
        self.recorder.words[HeaderWord.ONE_IN] = count

    def phase(self, kind: int, ms: float = 1.0, work: Any = None) -> None:
        """Run a fetch, a backward pass, or a step of the optimizer: `ms` on the device, then `work`."""

        def original(*_: Any) -> None:
            self.device.now += ms
            if work is not None:
                work()

        if kind == Kind.OPTIMIZER:
            self._optimizer.step(original)
        else:
            self.recorder.wrap_phase(kind, original)(self)

    @contextmanager
    def call(self, *gpus: int, ms: float = 1.0) -> Iterator[None]:
        """Call the model; phases in the block are nested in the call, and exceptions end there."""
        me, recorder = self.me, self.recorder
        mark = self.timing.begin_call(me, gpus)
        head = _CALL | me.thread_bits | me.open_kind << INSIDE_AT
        inside, me.open_kind = me.open_kind, Kind.CALL
        began = clock()
        self.device.now += ms
        try:
            yield
        except ZeroDivisionError as error:
            me.open_kind = inside
            recorder.write_failed(me, head, began, 0, error, mark)
            return
        me.open_kind = inside
        if mark is not None:
            head |= mark.end()
        number = self.put(head, began, clock() - began, 0)
        if mark is not None:
            mark.set_span_number(number)

    def step(self, *gpus: int) -> None:
        """Run fetch, call, backward pass and optimizer."""
        self.phase(Kind.FETCH, 0.5)
        with self.call(*gpus, ms=2.0):
            pass
        self.phase(Kind.BACKWARD, 3.0)
        self.phase(Kind.OPTIMIZER, 1.0)

    def records(self, *, devices: tuple[str, ...] = ("cuda:0",), end: bool = True) -> Result:
        """Return the records of the new spans. With `end`, the devices have finished and the process has ended."""
        if end:
            self.device.reached = self.device.now
            self.timing.write_known_times(Untimed.ENDED)
        lines = [] if self._heard else [{**self._layout, "value": {**self._layout["value"], "devices": list(devices)}}]
        self._heard = True
        new = [unpack_span(self._fed + at, *words) for at, words in enumerate(self.spans[self._fed :])]
        self._fed = len(self.spans)
        rows = self._assembler.feed(new, lines)
        if end:
            rows += self._assembler.finish()
        assert self._assembler.dropped == 0
        return decoded(rows)
