"""Traces scatter, replicate, parallel_apply and gather: as phases of a call, or in calls that the script composes."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.spans import INSIDE_AT, Kind
from dpmon.tracer.compositions import Compositions
from dpmon.tracer.frames import drop_frames, named_like
from dpmon.tracer.recorder import Recorder
from dpmon.tracer.replicas import ODD, Unsuited
from dpmon.tracer.virtual import PRIMITIVES, REPLICATE, SCATTER_KWARGS, Originals

KIND_OF = (*PRIMITIVES, Kind.SCATTER, Kind.SCATTER, Kind.REPLICATE, Kind.GATHER)
"""Kind of each function in `Originals.all`."""
_OURS = frozenset((Kind.CALL, Kind.WRAPPED))
_MOVING = frozenset((Kind.SCATTER, Kind.REPLICATE, Kind.GATHER))


class Primitives:
    """Traces the primitives on every thread of one process."""

    def __init__(self, recorder: Recorder, originals: Originals, compositions: Compositions) -> None:
        self.recorder = recorder
        self.originals = originals
        self.compositions = compositions

    def traced(self, number: int) -> Callable[..., Any]:
        """The traced form of one function in `Originals.all`."""
        recorder, compositions = self.recorder, self.compositions
        original, kind = self.originals.all[number], KIND_OF[number]
        fault = recorder.session.fault
        is_compiling = torch.compiler.is_dynamo_compiling

        def phase(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            me, inside = None, 0
            try:
                me = recorder.threads.get(get_ident()) or recorder.thread()
                call, inside = me.split, me.inside
                if inside in _MOVING:  # a primitive inside another one is not a phase
                    return original(*args, **kwargs)
                if call is None or inside not in _OURS:
                    return compositions.run(me, number, kind, original, args, kwargs)
                if kind == Kind.GATHER and call.watch is not None and call.watch.odd:
                    raise Unsuited(ODD)
                if kind == Kind.PARALLEL_APPLY and call.watch is not None and not call.watch.hooked:
                    try:
                        args, kwargs = call.watch.wrapped_arguments(args, kwargs)
                    except Exception as error:  # noqa: BLE001 - missing sizes must not stop a training
                        fault("replicas", error)
                virtual = call.plan.virtual
                function = original if virtual is None else virtual.primitives[number]
                timing = recorder.timing
                mark = None if timing is None else timing.primitive_begins(me, call.site.gpus, kind)
                head = kind | me.head | inside << INSIDE_AT
                result = recorder.within(me, head, mark, None, function, args, kwargs)
                call.primitives.add(kind)
                try:
                    if number == REPLICATE and call.watch is not None and "parallel_apply" in call.site.own:
                        call.watch.hook(result)  # the script's own method runs them
                    elif number == SCATTER_KWARGS and len(call.plan.devices) == 1:
                        call.share = result[0][0], result[1][0], monotonic_ns()
                        me.inside = Kind.REPLICA  # until the call ends, torch runs the module itself
                except Exception as error:  # noqa: BLE001 - torch has the result anyway
                    fault("replicas", error)
                return result
            except BaseException as error:
                if me is not None:  # an interrupt may have come between any two lines
                    me.inside = inside
                drop_frames(error)
                args, kwargs, call, virtual, result = (), {}, None, None, None
                raise

        return named_like(phase, original)
