"""Measures the memory of each device: models, their gradients, optimizer states, and the rest.

The first measurement follows the first steps. Later measurements follow every few seconds, or less often if they are
expensive. The tensors are counted after a backward pass, because many scripts clear the gradients before the step ends;
the statistics of torch's allocator are read at the same time. This time is in the step's `other`. Until the process
runs its first backward pass, it is measured between two steps. A storage that holds, for example, both a parameter and
an optimizer state counts once, for the first of them in the order above. The allocator's statistics are never reset:
the peak is the highest value since the start, or since the script reset it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from time import monotonic_ns
from typing import Any

from dpmon.record.span_format import INSIDE_AT, SITE_AT, Kind
from dpmon.tracer.calls.traced_modules import FunctionalStandIn, TracedModules
from dpmon.tracer.core.hidden_frames import Function, wrap_rare_function
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.session import Session, set_eval_frame
from dpmon.tracer.memory import allocator
from dpmon.tracer.memory.storages import GRADIENTS, MAX_TENSORS, STATES, StorageWalk, mapped_files
from dpmon.tracer.steps.span_recorder import SpanRecorder

MEASURE_INTERVAL_NS = 5_000_000_000
SAME_EVENT_INTERVAL_NS = 60_000_000_000
"""Interval between events while nothing changes."""
EARLY_MEASUREMENTS = 8
"""After this many measurements, a new model or optimizer is measured at the usual time only."""
WAIT_FACTOR = 1000
"""After a measurement that took t, the next one waits WAIT_FACTOR * t. So all take at most a thousandth of the time."""
MAX_TYPES = 4
"""How many types of tensors of unknown size are named."""
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
        self._peaks: dict[str, tuple[int, int]] = {}
        """Per device: the peak at the last measurement, and the number of the last measurement before that peak."""
        self._look_count = 0
        """Number of measurements."""

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

    def measure_soon(self) -> None:
        """Measure soon if the run is young: a model was called, or an optimizer has stepped, for the first time."""
        if self._look_count < EARLY_MEASUREMENTS and self._due_ns < NEVER:
            self._due_ns = 0
            self.recorder.schedule_poll()

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
        """Measure now, and record the result. Called after a backward pass if there are any."""
        dynamo_callback = set_eval_frame(None)  # else dynamo would try to compile functions that are called below
        try:
            self._measure_now()
        finally:
            set_eval_frame(dynamo_callback)

    def _measure_now(self) -> None:
        """Measure, and choose when to measure again."""
        recorder, start_ns = self.recorder, monotonic_ns()
        self._due_ns = start_ns + MEASURE_INTERVAL_NS  # an interrupt may end this measurement
        if recorder.has_run_backward:
            recorder.after_backward = None
        with self.session.guard("memory of devices", fatal=False):
            self._look_count += 1
            self._record_measurement(start_ns)
            end_ns = monotonic_ns()
            thread = recorder.current_thread_state()
            first_word = Kind.MEMORY | thread.thread_bits | thread.open_kind << INSIDE_AT | self._look_count << SITE_AT
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
            self._device_entry(walk, name, statistics.get(name), self._unknown_reasons(walk, name))
            for name in sorted(walk.bytes_by_device)
        ]
        is_recent = start_ns - self._last_event_ns < SAME_EVENT_INTERVAL_NS
        if not devices or (devices == self._last_devices and is_recent):
            return
        self._last_devices, self._last_event_ns = devices, start_ns
        took_ms = (monotonic_ns() - start_ns) / 1e6
        self.session.record_event("memory", "last", step=None, took_ms=took_ms, devices=devices, absent={})

    def _unknown_reasons(self, walk: StorageWalk, device: str) -> dict[str, str]:
        """Return the reason for each part that is not fully known."""
        absent = {}
        for kind, part in enumerate(_PARTS):
            names = walk.unsized_types[kind]
            if kind in walk.truncated_kinds:
                absent[part] = f"not measured: there are more than {MAX_TENSORS:,} tensors"
            elif names:
                count, types = sum(names.values()), ", ".join(islice(names, MAX_TYPES))
                verb = "does not report its size" if count == 1 else "do not report their size"
                others_text = f"the others hold {walk.bytes_by_device[device][kind]:,} bytes on this device"
                absent[part] = f"{count:,} of its tensors {verb} ({types}); {others_text}"
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
            unknown_parts = (*_ALLOCATOR, "peak_after_step")
            entry.update(dict.fromkeys(unknown_parts))
            absent.update(dict.fromkeys(unknown_parts, _NO_STATISTICS))
        else:
            last_peak, peak_after_look = self._peaks.get(name, (-1, 0))
            if stats["peak_bytes"] != last_peak:  # it grew, or the script has reset it
                peak_after_look = self._look_count - 1
            self._peaks[name] = stats["peak_bytes"], peak_after_look
            unknown_part = next((part for part in _PARTS if part in absent), None)
            rest_bytes = stats["allocated_bytes"] - sum(part_bytes)
            entry.update(
                stats,
                rest_bytes=rest_bytes if rest_bytes >= 0 and unknown_part is None else None,
                peak_after_step=peak_after_look,  # the assembler replaces it by the step of that measurement
            )
            if unknown_part is not None:
                absent["rest_bytes"] = f"{unknown_part} is not known"
            elif rest_bytes < 0:
                absent["rest_bytes"] = "part of the tensors' memory is not from torch's allocator"
        if name in walk.shared_bytes:
            entry.update(shared_bytes=walk.shared_bytes[name], shared_files=mapped_files(walk.shared_addresses))
        return {**entry, **{part: None for part in _PARTS if part in absent}, "absent": absent}
