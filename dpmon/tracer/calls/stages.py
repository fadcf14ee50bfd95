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

KEY = -7062
"""Key of our hooks. torch counts up from 0, so no other hook has a negative key."""
MAX_STAGES = 64
MAX_PARTS = 256
MAX_DEPTH = 4
_MAX_NAMES = 64

_WHY = {
    "cpu": "host time is all there is",
    "meta": "it holds only shapes: nothing is computed",
}
_NO_EVENTS = "it was not timed"
_COMPILED = "the model is compiled: hooks on its parts would break its graph"
_THREADS = "parts of the model ran on other threads at the same time: they are in no stage"


_Part = tuple[str, torch.nn.Module, str | None]
"""Name, module and device of a part of the root."""
_Hook = Callable[..., None]


class TracedStage:
    """One stage of the current call.

    `inputs`, `outputs`: definitions of its sizes (0 if unknown). `began`, `ended`: monotonic ns (`ended` is 0 if it has
    no end).
    """

    def __init__(self, device: str, inputs: int) -> None:
        self.device = device
        self.inputs = inputs
        self.outputs = 0
        self.names: list[str] = []
        self.began = self.ended = 0
        self.mark: PhaseTimer | None = None
        """Its device time, if the device is a GPU."""


class StageTracer:
    """The parts of one root, and their stages in the current call."""

    def __init__(self, session: Session, devices: tuple[str, ...], parts: Iterable[_Part], absent: str | None) -> None:
        """`absent`: why there are no stages; None if there are."""
        self.session = session
        self.devices = devices
        why = (f"{device}: {_WHY.get(device.partition(':')[0], _NO_EVENTS)}" for device in devices)
        self.absent = {"device_ms": "; ".join(why)}
        """Reasons for the missing fields of a call with stages."""
        if absent is not None:
            self.absent["stages"] = absent
        self._ran: list[TracedStage] = []
        self._running: list[str] = []
        """Names of the running parts. Only the first is in a stage: the others run inside it."""
        self._handled = 0
        """Id of the exception that was being handled when the first began."""
        self._thread = 0
        self._elsewhere = False
        """Whether a part has run on another thread. Such a part is in no stage."""
        self._timing: DeviceTimer | None = None
        self._hooked = [(weakref.ref(module), self._hooks(name, device)) for name, module, device in parts]

    def _hooks(self, name: str, own: str | None) -> tuple[_Hook, _Hook]:
        """Return the two hooks of a part. `own`: its device; a part without parameters runs on its input's device."""
        session, guard = self.session, self.session.guard("stages of a model")
        got, gave = SizeCache(), SizeCache()

        def enter(module: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            if get_ident() != self._thread:
                self._elsewhere = True
                return
            self._running.append(name)
            if len(self._running) > 1:
                return
            self._handled = id(sys.exc_info()[1])
            with guard:
                last = self._ran[-1] if self._ran else None
                device = own or device_in((args, kwargs)) or (last.device if last is not None else "")
                if last is None or last.device != device:
                    if len(self._ran) >= MAX_STAGES:
                        return
                    last = TracedStage(device, session.input_definition(args, kwargs, got))
                    self._ran.append(last)
                    if self._timing is not None:
                        last.mark = self._timing.begin_part(Kind.STAGE, gpu_of(device))
                if name not in last.names and len(last.names) < _MAX_NAMES:
                    last.names.append(name)
                last.ended = 0  # until the part ends, which it does not if it raises
                last.began = last.began or monotonic_ns()

        def leave(module: object, args: tuple[object, ...], kwargs: dict[str, object], result: object) -> None:
            now = monotonic_ns()
            if get_ident() != self._thread or name not in self._running:  # a hook may have raised before `enter` ran
                return
            while self._running.pop() != name:
                pass
            if self._running or id(sys.exc_info()[1]) != self._handled:  # it runs inside another part, or it raised
                return
            stage = self._ran[-1] if self._ran else None
            if stage is None or stage.device != (own or stage.device):  # beyond the limit
                return
            with guard:
                stage.ended = now
                if stage.mark is not None:
                    stage.mark.mark_possible_end()
                stage.outputs = session.output_definition(result, gave)

        return enter, leave

    def begin(self, recorder: SpanRecorder) -> None:
        """Hook the parts when a call of the root begins on the training thread. Never raises."""
        self._ran, self._running = [], []
        self._timing = recorder.timing
        self._thread = get_ident()
        with self.session.guard("stages of a model"):
            for known, (enter, leave) in self._hooked:
                module = known()
                hooks = enter, True, leave, True, True
                for name, hook in zip(_TABLES, hooks, strict=True) if module is not None else ():
                    module.__dict__[name][KEY] = hook

    def end(self, recorder: SpanRecorder, me: ThreadState) -> str | None:
        """Write the stages when a call of the root ends, and remove the hooks. Never raises.

        Return why the stages are incomplete; None if they are complete.
        """
        with self.session.guard("stages of a model"):
            for stage in self._ran:
                self._write(recorder, me, stage)
        self._ran = []
        for known, _ in self._hooked:
            module = known()
            with self.session.guard("stages of a model"):  # the other parts must lose their hooks, too
                for name in _TABLES if module is not None else ():
                    module.__dict__[name].pop(KEY, None)
        return _THREADS if self._elsewhere else None

    def _write(self, recorder: SpanRecorder, me: ThreadState, stage: TracedStage) -> None:
        names, device = tuple(stage.names), stage.device
        number = self.session.define(("stage", device, names), lambda: {"device": device, "parts": list(names)})
        head = Kind.STAGE | me.head | Kind.CALL << INSIDE_AT | number << SITE_AT
        if stage.mark is not None:
            head |= stage.mark.end() if stage.ended else stage.mark.raised()
        if not stage.ended:
            head |= Flag.FAILED << FLAGS_AT
        took = stage.ended - stage.began if stage.ended else 0
        outputs = stage.outputs if stage.ended else 0
        slot = recorder.put(head, stage.began, took, stage.inputs | outputs << 32)
        if stage.mark is not None:
            stage.mark.set_span_number(slot)


_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def make_stage_tracer(module: object, session: Session) -> StageTracer | None:
    """Make the stages of a root; None if the root is on one device."""
    devices = devices_of(module)
    if len(devices) < 2:
        return None
    if any(map(is_compiled, modules_of(module))):
        return StageTracer(session, devices, [], _COMPILED)
    return StageTracer(session, devices, islice(_top_level_parts(module, "", 0), MAX_PARTS), None)


def _top_level_parts(module: Any, prefix: str, depth: int) -> Iterator[_Part]:
    """Yield the top-level parts; a part on several devices is divided further."""
    for name, child in torch.nn.Module.named_children(module):
        devices = devices_of(child)
        path = prefix + name
        if len(devices) > 1 and depth < MAX_DEPTH:
            yield from _top_level_parts(child, f"{path}.", depth + 1)
        elif not isinstance(child, torch.jit.ScriptModule):
            yield shorten_name(path, MAX_PATH), child, devices[0] if devices else None
