"""The short way: a bare root module that runs as it is written, on the training thread, with nothing else under way.

This is what most scripts do most of the time, so it is one function, written out: what `Calls.root_call` does for every
case, without a Trace and without phases, and with a call staged, or held back in a short turn, rather than written.
Whatever is out of the ordinary goes the long way. Why it looks as it does: see dpmon.tracer.steps.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from dpmon.record.wire import FAILED, GRAD, PLAIN_TAG, TRAINING
from dpmon.ring import Activity, Ring
from dpmon.tracer.frames import drop_frames
from dpmon.tracer.lane import lane_way
from dpmon.tracer.modes import SINGLE
from dpmon.tracer.replicas import KEY
from dpmon.tracer.steps import HELD, LEARNS, PLAIN, QUICK_NS
from dpmon.tracer.tables import trains

if TYPE_CHECKING:
    from dpmon.tracer.calls import Calls, Site

__all__ = ["short_way"]

_TAGS = PLAIN_TAG | SINGLE << 8
_TRAINING, _GRAD, _LEARNS = TRAINING << 16, GRAD << 16, LEARNS << 16


def short_way(
    calls: Calls, original: Callable[..., Any], long_way: Callable[[Any, Any, Any], Any]
) -> Callable[..., Any]:
    """The traced form of Module.__call__; `long_way(module, args, kwargs)` takes what is not plain."""
    session, steps, modes, sites, ready = calls.session, calls.steps, calls.modes, calls.sites, calls.ready
    local = session.local
    is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
    tracing = torch._C._get_tracing_state  # torch.jit.trace: sizes are tensors of its graph
    function_modes = torch._C._len_torch_function_stack  # a mode of the script's would see us look at sizes
    clock = monotonic_ns
    request, activity, forward = Ring.REQUEST, Activity.BYTE, Activity.FORWARD
    tensor_type = torch.Tensor
    lane_of, over_replicas = lane_way(calls, calls.lanes[0])

    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(module, *args, **kwargs)
        began = 0
        lone: Any = None
        site = ready.get(id(module))
        try:
            if (
                site is None
                or steps.free != get_ident()
                or (not (steps.quick or goes_on()) if steps.calls else steps.words[request] != modes.serial)
                or tracing() is not None
                or function_modes()
            ):
                return any_call(module, args, kwargs)
            inputs, rows = 0, -1
            began = clock()
            steps.free = PLAIN
            try:
                memo = site.inputs
                if (
                    len(args) == 1
                    and type(value := args[0]) is tensor_type
                    and value.shape == memo.shape
                    and value.dtype is memo.dtype
                    and not kwargs
                ):
                    inputs, rows = memo.number, memo.rows
                    lone = value
                else:
                    inputs = session.inputs(args, kwargs, memo)
                    rows = session.rows(inputs, 0)
                if not steps.calls:
                    steps.mode = SINGLE
                steps.calls += 1
                steps.inner = 0
                steps.map[activity] = forward
            except Exception as error:  # noqa: BLE001 - ours must not reach the script
                session.fault("begin", error)
            result = original(module, *args, **kwargs) if lone is None else original(module, lone)
        except BaseException as error:
            if began and site is not None:
                ended(module, site, began, 0, 0, (inputs, rows), None, FAILED)
            drop_frames(error)
            module, args, kwargs, lone, value = None, (), {}, None, None
            raise
        steps.free = steps.mine  # first: no signal is handled between the call and here
        now = clock()
        try:
            steps.last = now
            wall = now - began
            steps.forward += wall - steps.inner
            memo = site.outputs
            if type(result) is tensor_type and result.shape == memo.shape and result.dtype is memo.dtype:
                outputs = memo.number
            else:
                outputs = session.outputs(result, memo)
            tags = site.tags
            if is_grad_enabled() and (module.training if site.via is None else trains(module)):
                if steps.ahead:
                    steps.add(id(module), rows)
                elif rows > steps.samples:
                    steps.samples = rows
            else:
                tags = otherwise(module, tags, rows)
            steps.count = count = steps.count + 1
            values = tags, steps.number, count, began, wall, inputs | outputs << 32
            ring: Any = steps.ring  # there is one: see Steps.settle
            if steps.quick:  # as Steps.stage
                before, ring.staged = ring.staged, values
                steps.words[HELD] += 1
                if before is not None:
                    held = ring.held
                    held += ((before, None, None),)
                if now - steps.start >= QUICK_NS:
                    steps.quick = False
                    ring.flush()
            else:
                ring.stage(values)
        except Exception as error:  # noqa: BLE001 - the result is the script's, whatever we make of it
            session.fault("end", error)
        return result

    def otherwise(module: Any, tags: int, rows: int) -> int:
        """The tags of a call that does not learn, or half: see Site.tags."""
        tags &= ~_LEARNS
        if trains(module):
            tags |= _TRAINING
        elif is_grad_enabled():
            tags |= _GRAD
        else:
            steps.looks(rows)
        if tags & _LEARNS and steps.ahead:
            steps.add(id(module), rows)
        elif tags & _LEARNS and rows > steps.samples:
            steps.samples = rows
        return tags

    def goes_on() -> bool:
        """Whether a second call in a turn is as usual: the turns are the loader's, and nobody asks for another mode."""
        ring = session.ring
        if ring is None or not steps.loader or steps.words[request] != modes.serial:
            return False
        try:
            ring.flush()
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            session.fault("begin", error)
        return True

    def holds(site: Site) -> bool:
        """Whether the module is where it was when its calls were planned."""
        try:
            return site.holds()
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            session.fault("place", error)
            return False

    def any_call(module: Any, args: Any, kwargs: Any) -> Any:
        if (
            (steps.free == PLAIN and steps.thread == get_ident())
            or local.depth > 1  # in a replica
            or KEY in module.__dict__["_forward_pre_hooks"]
        ):
            return original(module, *args, **kwargs)
        lane = lane_of(module)
        if lane is not None:
            return over_replicas(original, lane, module, args, kwargs)
        site = sites.get(id(module))
        ring = session.ring
        if (
            site is None
            or not site.plain
            or ring is None
            or steps.thread != get_ident()
            or steps.backwards
            or local.depth
            or tracing() is not None
            or function_modes()
            or session.off
            or not holds(site)
            or ring.words[request] != modes.serial
        ):
            return long_way(module, args, kwargs)
        was, outer = steps.free, steps.inner
        inputs, rows = 0, -1
        began = clock()
        try:
            inputs = session.inputs(args, kwargs, site.inputs)
            rows = session.rows(inputs, 0)
            ring.flush()
            if session.timing is not None:
                session.timing.runs_on(site.gpus)
            began = steps.call_begins(id(module), SINGLE, began)
            outer = steps.inner
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            session.fault("begin", error)
            return original(module, *args, **kwargs)
        result: Any = None
        flags = FAILED
        try:
            steps.free = PLAIN
            steps.inner = 0
            result = original(module, *args, **kwargs)
            flags = 0
            return result
        finally:
            steps.free = 0  # first: no signal is handled between the call and here
            ended(module, site, began, outer, was, (inputs, rows), result, flags)
            look(module, site)

    def ended(
        module: Any, site: Site, began: int, outer: int, was: int, given: tuple[int, int], result: Any, flags: int
    ) -> None:
        steps.free = 0
        now = clock()
        inputs, rows = given
        try:
            if trains(module):
                flags |= TRAINING
            if is_grad_enabled():
                flags |= GRAD
            steps.call_ends(id(module), began, now, outer, rows, flags)
            outputs = 0 if flags & FAILED else session.outputs(result, site.outputs)
            if site.epoch != session.epoch:
                calls.layout(site, site.plan)
            tags = _TAGS | flags << 16 | site.layout << 32
            steps.count += 1
            values = tags, steps.number, steps.count, began, now - began, inputs | outputs << 32
            if session.timing is not None:
                session.timing.plain(values, site.gpus)
            elif steps.ring is not None:
                steps.stage(values, now)
            elif session.ring is not None:
                session.ring.stage(values)
            steps.settle(was)
        except Exception as error:  # noqa: BLE001 - the result is the script's, whatever we make of it
            session.fault("end", error)

    def look(module: Any, site: Site) -> None:
        """Let the next call go the short way, if what is remembered of this one is defined."""
        try:
            if session.off or site.epoch != session.epoch or sites.get(id(module)) is not site or not site.stays():
                return
            for memo in (site.inputs, site.outputs):
                if memo.epoch != session.epoch:
                    memo.shape = None
            site.tags = _TAGS | _LEARNS | site.layout << 32
            ready[id(module)] = site
        except Exception as error:  # noqa: BLE001 - then it goes the long way
            session.fault("look", error)

    return __call__
