"""Measures the memory of each device: models, their gradients, optimizer states, and the rest.

The first measurement follows the first steps, the others follow every few seconds, or less often if they are expensive.
The tensors are counted after a backward pass, because many scripts clear the gradients before the step ends;
the statistics of torch's allocator are read at the same time. This time is in the step's `other`. Until the process
runs its first backward pass, it is measured between two steps. A storage that holds, for example, both a parameter and
an optimizer state counts once, for the first of them in the order above. The allocator's statistics are never reset:
the peak is the highest value since the start, or since the script reset it.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from dpmon.record.span_format import INSIDE_AT, Kind
from dpmon.tracer.calls.traced_modules import FunctionalStandIn, TracedModules
from dpmon.tracer.core.hidden_frames import Function, wrap_rare_function
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.session import Session
from dpmon.tracer.memory import allocator
from dpmon.tracer.memory.storages import GRADIENTS, STATES, StorageWalk
from dpmon.tracer.steps.span_recorder import SpanRecorder

MEASURE_INTERVAL_NS = 5_000_000_000
SAME_EVENT_INTERVAL_NS = 60_000_000_000
"""Interval between events while nothing changes."""
WAIT_FACTOR = 1000
"""After a measurement that took t, the next one waits WAIT_FACTOR * t. So all take at most a thousandth of the time."""
NEVER = 1 << 62

_NO_BACKWARD = "no backward pass was seen before this measurement"
_NO_STATISTICS = "torch keeps no statistics of this device's allocator"
_PARTS = ("model_bytes", "gradients_bytes", "optimizer_bytes")
_ALLOCATOR = ("allocated_bytes", "rest_bytes", "reserved_bytes", "peak_bytes")


class MemoryTracer:
    """The measurement of one process's device memory."""

    def __init__(self, session: Session, recorder: SpanRecorder, traced_modules: TracedModules) -> None:
        self.session = session
        self.recorder = recorder
        self.traced_modules = traced_modules
        self.on_optimizer: Callable[[], None] = lambda: None
        """Called after an optimizer is made."""
        self._optimizers: IdentityTable[bool] = IdentityTable()
        """The living optimizers."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._due_ns = self._poll_count = 0
        self._last_devices: list[dict[str, object]] = []
        self._last_event_ns = 0

    # ---------------------------------------------------------------- when

    def wrap_optimizer_init(self, original: Function) -> Function:
        """Return the traced form of Optimizer.__init__, which remembers the optimizer weakly."""

        def on_init(_: object, start_ns: int, optimizer: object, *args: object, **kwargs: object) -> None:
            self._optimizers.set(optimizer, True)
            if not self.recorder.has_optimizer:
                self.recorder.has_optimizer = True
                self.report_optimizers()
            self.on_optimizer()

        return wrap_rare_function(original, self.session.guard("search for optimizers", fatal=False), on_init)

    def report_optimizers(self) -> None:
        """Report to the assembler that the script makes optimizers.

        Called when the ring opens, and when the first optimizer is made.
        """
        if self.recorder.has_optimizer:
            self.session.write_line(optimizer=1)

    def poll(self, now: int) -> int:
        """Choose the next backward pass for a measurement if it is time to; without backward passes, measure now.

        Called between two steps. Returns when to call again (monotonic ns). Never raises.
        """
        if now < self._due_ns or self.session.ring is None:
            return self._due_ns
        self._poll_count += 1
        if self._poll_count == 1:
            return 0  # optimizers make their states in their first steps
        self.recorder.after_backward = self._measure
        if self.recorder.has_run_backward:
            return now + MEASURE_INTERVAL_NS
        if self._poll_count > 2:
            self._measure()
        return self._due_ns

    def _measure(self) -> None:
        """Measure now, and choose when to measure again. Called after a backward pass if there are any."""
        recorder, start_ns = self.recorder, monotonic_ns()
        self._due_ns = start_ns + MEASURE_INTERVAL_NS  # an interrupt may end this measurement
        if recorder.has_run_backward:
            recorder.after_backward = None
        with self.session.hidden("memory of devices"):
            self._record_measurement(start_ns)
            end_ns = monotonic_ns()
            thread = recorder.current_thread_state()
            first_word = Kind.MEMORY | thread.thread_bits | thread.open_kind << INSIDE_AT
            recorder.put(first_word, start_ns, end_ns - start_ns, 0)
            self._due_ns = end_ns + max(MEASURE_INTERVAL_NS, (end_ns - start_ns) * WAIT_FACTOR)
            return
        self._due_ns, recorder.after_backward = NEVER, None  # a fault of ours

    # ---------------------------------------------------------------- what

    def _walk_storages(self) -> StorageWalk:
        """Count the tensors of all called modules and all living optimizers."""
        owners = [traced_module.module_ref() for traced_module in list(self.traced_modules.modules_by_id.values())]
        models = [owner.module if isinstance(owner, FunctionalStandIn) else owner for owner in owners]
        optimizers = [optimizer for optimizer, _ in self._optimizers.items()]
        return StorageWalk([model for model in models if model is not None], optimizers)

    def _record_measurement(self, start_ns: int) -> None:
        """Count the tensors, and record the result if it is new."""
        walk, statistics = self._walk_storages(), allocator.statistics()
        walk.bytes_by_device.pop("meta", None)
        if statistics:
            allocator.watch_out_of_memory(self.session)
        for device in statistics:
            walk.bytes_by_device.setdefault(device, [0, 0, 0])
        devices = [
            self._device_entry(walk, name, statistics.get(name), self._unknown_reasons(walk))
            for name in sorted(walk.bytes_by_device)
        ]
        is_recent = start_ns - self._last_event_ns < SAME_EVENT_INTERVAL_NS
        if not devices or (devices == self._last_devices and is_recent):
            return
        self._last_devices, self._last_event_ns = devices, start_ns
        took_ms = (monotonic_ns() - start_ns) / 1e6
        self.session.record_event("memory", "last", step=None, took_ms=took_ms, devices=devices, absent={})

    def _unknown_reasons(self, walk: StorageWalk) -> dict[str, str]:
        """Return the reason for each part that is not fully known."""
        absent = {_PARTS[kind]: reason for kind, reason in walk.unknown_reasons.items()}
        if not self.recorder.has_run_backward and not walk.total(GRADIENTS):
            absent.setdefault(_PARTS[GRADIENTS], _NO_BACKWARD)
        has_stepped = self.recorder.optimizer_steps > 0
        if not walk.total(STATES) and not (self._optimizers and has_stepped):
            reason = "no optimizer had stepped before this measurement"
            if has_stepped:
                reason = "the optimizer that stepped was freed, or was not made by its constructor"
            elif not self.recorder.has_optimizer:
                reason = "no torch optimizer was made"
            absent.setdefault(_PARTS[STATES], reason)
        return absent

    def _device_entry(
        self, walk: StorageWalk, name: str, stats: dict[str, Any] | None, absent: dict[str, str]
    ) -> dict[str, object]:
        """Return the fields of one device. `absent`: reasons for unknown parts, to which reasons are added."""
        part_bytes = walk.bytes_by_device[name]
        entry: dict[str, object] = {"device": name, **dict(zip(_PARTS, part_bytes, strict=True))}
        if stats is None:
            entry.update(dict.fromkeys(_ALLOCATOR))
            absent.update(dict.fromkeys(_ALLOCATOR, _NO_STATISTICS))
        else:
            unknown_part = next((part for part in _PARTS if part in absent), None)
            rest_bytes = stats["allocated_bytes"] - sum(part_bytes)
            if unknown_part is not None:
                absent["rest_bytes"] = f"{unknown_part} is not known"
            elif rest_bytes < 0:
                absent["rest_bytes"] = "part of the tensors' memory is not from torch's allocator"
            entry.update(stats, rest_bytes=None if "rest_bytes" in absent else rest_bytes)
        return {**entry, **{part: None for part in _PARTS if part in absent}, "absent": absent}
