"""The short way: a bare root module that runs as it is written, on the training thread, with nothing else under way.

This is what most scripts do most of the time, so it is one function, written out: what `Calls.root_call` does for every
case, without a Trace and without phases, and with the first call of a turn staged rather than written. Whatever is out
of the ordinary goes the long way. Why it looks as it does: see dpmon.tracer.steps.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from dpmon.records import FAILED, GRAD, PLAIN_TAG, PLAIN_WORDS, TRAINING
from dpmon.ring import Activity, Frame, Ring
from dpmon.tracer.frames import drop_frames
from dpmon.tracer.modes import SINGLE
from dpmon.tracer.steps import LEARNS

if TYPE_CHECKING:
    from dpmon.tracer.calls import Calls

__all__ = ["short_way"]

_FRAME = Frame(PLAIN_WORDS)
_TAGS = PLAIN_TAG | SINGLE << 8


def short_way(
    calls: Calls, original: Callable[..., Any], long_way: Callable[[Any, Any, Any], Any]
) -> Callable[..., Any]:
    """The traced form of Module.__call__; `long_way(module, args, kwargs)` takes what is not plain."""
    session, steps, modes, sites = calls.session, calls.steps, calls.modes, calls.sites
    local = session.local
    is_compiling, is_grad_enabled = torch.compiler.is_dynamo_compiling, torch.is_grad_enabled
    tracing = torch._C._get_tracing_state  # torch.jit.trace: sizes are tensors of its graph
    function_modes = torch._C._len_torch_function_stack  # a mode of the script's would see us look at sizes
    clock = monotonic_ns
    request, activity, forward = Ring.REQUEST, Activity.BYTE, Activity.FORWARD
    tensor_type = torch.Tensor

    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(module, *args, **kwargs)
        site = sites.get(id(module))
        ring = session.ring
        try:
            if steps.plain and steps.thread == get_ident():  # inside such a call: only one frame of ours a level
                return original(module, *args, **kwargs)
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
                or ring.words[request] != modes.serial
            ):
                return long_way(module, args, kwargs)
        except BaseException as error:
            drop_frames(error)
            raise
        try:
            epoch = session.epoch
            memo = site.inputs
            if (
                len(args) == 1
                and type(value := args[0]) is tensor_type
                and value.shape == memo.shape
                and value.dtype is memo.dtype
                and memo.epoch == epoch
                and not kwargs
            ):
                inputs, rows = memo.number, memo.rows
            else:
                inputs = session.inputs(args, kwargs, memo)
                rows = session.rows(inputs, 0)
            began = clock()
            if steps.calls or not steps.open:
                ring.flush()
                steps.call_begins(id(module), SINGLE, began)
            else:
                steps.calls = 1
                steps.mode = SINGLE
                steps.fetches = 0
                steps.since_optimizer += 1
                if not steps.root:
                    steps.root = id(module)
                steps.map[activity] = forward
            outer = steps.inner
            steps.inner = 0
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            session.fault("begin", error)
            return original(module, *args, **kwargs)
        result: Any = None
        flags = FAILED
        try:
            steps.plain = True
            result = original(module, *args, **kwargs)
            flags = 0
            return result
        except BaseException as error:
            drop_frames(error)
            raise
        finally:
            steps.plain = False  # first: no signal is handled between the call and here
            now = clock()
            try:
                wall = now - began
                steps.forward += wall - steps.inner
                steps.inner = outer + wall
                steps.last = now
                memo = site.outputs
                if (
                    type(result) is tensor_type
                    and result.shape == memo.shape
                    and result.dtype is memo.dtype
                    and memo.epoch == epoch
                ):
                    outputs = memo.number
                else:
                    outputs = 0 if flags else session.outputs(result, memo)
                if module.training:
                    flags |= TRAINING
                if is_grad_enabled():
                    flags |= GRAD
                if flags & LEARNS:
                    if rows > steps.samples:
                        steps.samples = rows
                else:
                    steps.looks(rows)
                if site.epoch != epoch:
                    calls.layout(site, site.plan)
                calls.count += 1
                values = (
                    _TAGS | flags << 16 | site.layout << 32,
                    steps.number,
                    calls.count,
                    began,
                    wall,
                    inputs | outputs << 32,
                )
                if steps.calls == 1:
                    ring.stage(values)
                else:
                    ring.put(_FRAME, values)
                    if ring.head >= session.renew_at:
                        session.renew()
            except Exception as error:  # noqa: BLE001 - the result is the script's, whatever we make of it
                session.fault("end", error)

    return __call__
