"""Records the stages of a bare root with parts on several devices: inputs, outputs and times of each device.

The first call of a root checks whether it is on several devices; a model on one device costs nothing more. On several
devices, the parts of the root get hooks when a call begins and lose them when the call ends, on the training thread
only. So the script never copies or pickles our hooks. Consecutive parts on one device make one stage. Each stage has a
host time, and on a GPU also a device time from events. No synchronization is added.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import shorten_name
from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, SITE_AT, Flag, Kind
from dpmon.tracer.core.module_tables import devices_of, is_compiled, modules_of
from dpmon.tracer.core.session import Session, SizeCache
from dpmon.tracer.core.tensor_sizes import MAX_PATH, device_in
from dpmon.tracer.devices.device_timing import DeviceTimer, PhaseTimer, gpu_of
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

HOOK_KEY = -7062
"""Key of our hooks. torch counts up from 0, so no other hook has a negative key."""
MAX_STAGES = 64
MAX_PARTS = 256
MAX_DEPTH = 4
_MAX_NAMES = 64

_NO_EVENT_REASONS = {
    "cpu": "host time is all there is",
    "meta": "it holds only shapes: nothing is computed",
}
_NO_EVENTS = "it was not timed"
_COMPILED = "the model is compiled: hooks on its parts would break its graph"


_Part = tuple[str, torch.nn.Module, str | None]
"""Name, module and device of a part of the root."""
_Hook = Callable[..., None]


@dataclass(eq=False)
class TracedStage:
    """One stage of the current call."""

    device: str
    inputs: int
    outputs: int = 0
    """The definitions of its sizes; 0 if unknown."""
    part_names: list[str] = field(default_factory=list)
    start_ns: int = 0
    end_ns: int = 0
    """Monotonic ns. The end is 0 while the stage runs, and if it raised."""
    phase_timer: PhaseTimer | None = None
    """Its device time, if the device is a GPU."""


class StageTracer:
    """The parts of one root, and their stages in the current call."""

    def __init__(
        self, session: Session, devices: tuple[str, ...], parts: Iterable[_Part], absent_reason: str | None
    ) -> None:
        """Trace `parts`. `absent_reason`: why there are no stages; None if there are."""
        self.session = session
        self.devices = devices
        reasons = (f"{device}: {_NO_EVENT_REASONS.get(device.partition(':')[0], _NO_EVENTS)}" for device in devices)
        self.absent = {"device_ms": "; ".join(reasons)}
        """Reasons for the missing fields of a call with stages."""
        if absent_reason is not None:
            self.absent["stages"] = absent_reason
        self._stages: list[TracedStage] = []
        self._running_parts: list[str] = []
        """Names of the running parts. Only the first one is in a stage: the others run inside it."""
        self._handled_error_id = 0
        """Id of the exception that was being handled when the first part began."""
        self._thread_ident = 0
        """The thread of the call. A part that runs on another thread is in no stage."""
        self._device_timer: DeviceTimer | None = None
        self._hooked_parts = [(weakref.ref(module), self._make_hooks(name, device)) for name, module, device in parts]

    def _make_hooks(self, name: str, fixed_device: str | None) -> tuple[_Hook, _Hook]:
        """Return the two hooks of a part. `fixed_device`: its device; None: the device of its inputs."""
        session, guard = self.session, self.session.guard("stages of a model")
        input_cache, output_cache = SizeCache(), SizeCache()

        def enter(module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if get_ident() != self._thread_ident:
                return
            self._running_parts.append(name)
            if len(self._running_parts) > 1:
                return
            self._handled_error_id = id(sys.exc_info()[1])
            with guard:
                stage = self._stages[-1] if self._stages else None
                device = fixed_device or device_in((args, kwargs)) or (stage.device if stage is not None else "")
                if stage is None or stage.device != device:
                    if len(self._stages) >= MAX_STAGES:
                        return
                    stage = TracedStage(device, session.input_definition(args, kwargs, input_cache))
                    self._stages.append(stage)
                    if self._device_timer is not None:
                        stage.phase_timer = self._device_timer.begin_part(gpu_of(device))
                if name not in stage.part_names and len(stage.part_names) < _MAX_NAMES:
                    stage.part_names.append(name)
                stage.end_ns = 0  # until the part ends, which it does not if it raises
                stage.start_ns = stage.start_ns or monotonic_ns()

        def leave(module: object, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
            end_ns = monotonic_ns()
            # A hook may have raised before `enter` ran.
            if get_ident() != self._thread_ident or name not in self._running_parts:
                return
            while self._running_parts.pop() != name:
                pass
            # It runs inside another part, or it raised.
            if self._running_parts or id(sys.exc_info()[1]) != self._handled_error_id:
                return
            stage = self._stages[-1] if self._stages else None
            if stage is None or stage.device != (fixed_device or stage.device):  # beyond the limit
                return
            with guard:
                stage.end_ns = end_ns
                if stage.phase_timer is not None:
                    stage.phase_timer.mark_possible_end()
                stage.outputs = session.output_definition(result, output_cache)

        return enter, leave

    def begin(self, recorder: SpanRecorder) -> None:
        """Hook the parts when a call of the root begins on the training thread. Never raises."""
        self._stages, self._running_parts = [], []
        self._device_timer = recorder.device_timer
        self._thread_ident = get_ident()
        with self.session.guard("stages of a model"):
            for module_ref, (enter, leave) in self._hooked_parts:
                module = module_ref()
                hooks = enter, True, leave, True, True
                for name, hook in zip(_TABLES, hooks, strict=True) if module is not None else ():
                    module.__dict__[name][HOOK_KEY] = hook

    def end(self, recorder: SpanRecorder, thread: ThreadState) -> None:
        """Write the stages when a call of the root ends, and remove the hooks. Never raises."""
        with self.session.guard("stages of a model"):
            for stage in self._stages:
                self._write(recorder, thread, stage)
        self._stages = []
        for module_ref, _ in self._hooked_parts:
            module = module_ref()
            with self.session.guard("stages of a model"):  # the other parts must lose their hooks, too
                for name in _TABLES if module is not None else ():
                    module.__dict__[name].pop(HOOK_KEY, None)

    def _write(self, recorder: SpanRecorder, thread: ThreadState, stage: TracedStage) -> None:
        """Write the span of one stage."""
        names, device = tuple(stage.part_names), stage.device
        definition = self.session.define(("stage", device, names), lambda: {"device": device, "parts": list(names)})
        first_word = Kind.STAGE | thread.thread_bits | Kind.CALL << INSIDE_AT | definition << SITE_AT
        phase_timer, duration_ns, outputs = stage.phase_timer, 0, 0
        if stage.end_ns:
            duration_ns, outputs = stage.end_ns - stage.start_ns, stage.outputs
        else:
            first_word |= Flag.FAILED << FLAGS_AT
        if phase_timer is not None:
            first_word |= phase_timer.end()
        span_number = recorder.put(first_word, stage.start_ns, duration_ns, stage.inputs | outputs << 32)
        if phase_timer is not None:
            phase_timer.set_span_number(span_number)


_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def make_stage_tracer(module: object, session: Session) -> StageTracer | None:
    """Make the stage tracer of a root; None if the root is on one device."""
    devices = devices_of(module)
    if len(devices) < 2:
        return None
    if any(map(is_compiled, modules_of(module))):
        return StageTracer(session, devices, [], _COMPILED)
    return StageTracer(session, devices, islice(_top_level_parts(module, "", 0), MAX_PARTS), None)


def _top_level_parts(module: Any, prefix: str, depth: int) -> Iterator[_Part]:
    """Yield the top-level parts of a module. A part on several devices is divided further."""
    for name, child in torch.nn.Module.named_children(module):
        devices = devices_of(child)
        path = prefix + name
        if len(devices) > 1 and depth < MAX_DEPTH:
            yield from _top_level_parts(child, f"{path}.", depth + 1)
        elif not isinstance(child, torch.jit.ScriptModule):
            yield shorten_name(path, MAX_PATH), child, devices[0] if devices else None
