"""The short way of a call over virtual replicas: on the training thread, with nothing else under way.

A call over replicas is timed at many more places than a plain one, and goes through torch's own functions between them.
Where such a call has worked before and nothing about it has changed, it needs no Trace: what its phases and replicas
leave behind is kept in a `Lane`, which is made once and used again. Whatever is out of the ordinary, a failure
included, goes the long way (`Calls`). Why it looks as it does: see dpmon.tracer.steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from dpmon.record.wire import CALL_TAG, GRAD, TRAINING, VIRTUAL, call_format
from dpmon.ring import Activity, Frame, Ring
from dpmon.tracer.frames import drop_frames
from dpmon.tracer.modes import DP
from dpmon.tracer.replicas import KEY, Probe, Watch
from dpmon.tracer.session import Memo, Session
from dpmon.tracer.sizes import gathers
from dpmon.tracer.steps import HELD, LEARNS, PLAIN, QUICK_NS
from dpmon.tracer.tables import trains
from dpmon.tracer.virtual import VERBS

if TYPE_CHECKING:
    from dpmon.tracer.calls import Calls, Site

__all__ = ["ODD", "ROWS", "Lane", "Unsuited", "frame_of", "lane_way"]

ROWS = "return one row per input row, and compute the loss outside the model"
"""What a script must do so that dp works."""
ODD = f"{ROWS}: the model returns a scalar, or more than tensors, which DataParallel would change"
_frames: list[Frame] = []


def frame_of(replicas: int) -> Frame:
    """The frame of a call over so many replicas."""
    while len(_frames) <= replicas:
        _frames.append(Frame(call_format(len(_frames))))
    return _frames[replicas]


class Unsuited(Exception):
    """A bare root whose results would mean something else to the script under dp; the text says why."""


class Lane:
    """What the calls of one module leave behind while they run, one call at a time. Times are monotonic ns."""

    __slots__ = (
        "_modules",
        "_nested",
        "_stands",
        "_tables",
        "blank",
        "count",
        "marks",
        "odd",
        "replicas",
        "run",
        "session",
        "site",
        "start",
    )

    def __init__(self, session: Session, site: Site) -> None:
        """`run` is to be set: (torch's own call, module, args, kwargs), which runs torch's code with `verbs`."""
        self.session = session
        self.site = site
        self.run: Callable[..., Any]
        self.start = 0
        self.marks: list[int] = []
        """When each verb began and ended. torch's code runs each once, in their order, or raises on the way."""
        self.count = 0
        """Replicas in this call."""
        self.replicas = [0] * (4 * len(site.replicas))
        """Four numbers each, as dpmon.record.wire.pack_call takes them."""
        self.blank = tuple(self.replicas)
        self.odd: bool | None = False if site.via is None else None
        """As `Watch.odd`."""
        self._modules: list[Any] = [None] * len(site.replicas)
        """The replicas of the call under way, until they are run."""
        self._nested = [0] * len(site.replicas)
        """Calls of each replica that have begun and not returned, where they have hooks."""
        around = [self._around(index, *memos) for index, memos in enumerate(site.replicas)]
        self._stands = [stand for stand, _ in around]
        self._tables = [tables for _, tables in around]

    @property
    def phases(self) -> list[int]:
        """Offset from the call's start and duration of each verb, as dpmon.record.wire.pack_call takes them.

        The offset is -1 if the verb did not run to its end.
        """
        phases = [-1, 0] * len(VERBS)
        for at in range(0, len(self.marks) & ~1, 2):
            began, ended = self.marks[at : at + 2]
            phases[at : at + 2] = began - self.start, ended - began
        return phases

    def verb(self, name: str, verb: Callable[..., Any]) -> Callable[..., Any]:
        """One of the four verbs of DataParallel, timed."""
        mark, clock = self.marks.append, monotonic_ns
        makes, gathers_odd = name == "replicate", name == "gather" and self.odd is not None

        def timed(*args: Any, **kwargs: Any) -> Any:
            try:
                if gathers_odd and self.odd:
                    raise Unsuited(ODD)
                mark(clock())
                result = verb(*args, **kwargs)
                mark(clock())
            except BaseException as error:
                drop_frames(error)
                args, kwargs = (), {}
                raise
            return self._watched(result) if makes else result

        return timed

    def _watched(self, replicas: Any) -> Any:
        """What parallel_apply is to run in place of these replicas: see `_around`."""
        try:
            self.count = count = len(replicas)
            first = replicas[0].__dict__
            if not (first["_forward_pre_hooks"] or first["_forward_hooks"]):
                self._modules[:count] = replicas
                return self._stands[:count]
            self._nested[:] = [0] * len(self._nested)
            for replica, tables in zip(replicas, self._tables, strict=False):
                own = replica.__dict__
                for name, hooks in tables.items():
                    own[name] = OrderedDict((*own[name].items(), *hooks.items()))
        except Exception as error:  # noqa: BLE001 - sizes are not worth a training
            self.session.fault("replicas", error)
        return replicas

    def _around(
        self, index: int, first: Memo, second: Memo
    ) -> tuple[Callable[..., Any], dict[str, OrderedDict[int, Any]]]:
        """Two ways to see what one replica is given and returns, on its thread, changing nothing.

        A function that stands for the replica, which costs a third of the hooks that torch calls; and those hooks, by
        the names of torch's tables, where the script has some of its own: then it is theirs, which come first, that
        say what the replica is given.
        """
        at = 4 * index
        session, seen, modules = self.session, self.replicas, self._modules
        local = session.local
        clock = monotonic_ns
        tensor_type = torch.Tensor

        def enter(module: Any, args: Any, kwargs: Any) -> None:
            try:
                local.depth += 2  # inside a replica nothing is a root
                if (
                    len(args) == 1
                    and type(value := args[0]) is tensor_type
                    and value.shape == first.shape
                    and value.dtype is first.dtype
                    and first.epoch == session.epoch
                    and not kwargs
                ):
                    seen[at] = first.number
                else:
                    seen[at] = session.inputs(args, kwargs, first)
            except Exception as error:  # noqa: BLE001 - sizes are not worth a training
                session.fault("hooks", error)
            seen[at + 2] = clock() - self.start

        def leave(module: Any, args: Any, kwargs: Any, result: Any) -> None:
            seen[at + 3] = clock() - self.start - seen[at + 2]
            try:
                local.depth -= 2
                if (
                    type(result) is tensor_type
                    and result.shape == second.shape
                    and result.dtype is second.dtype
                    and second.epoch == session.epoch
                ):
                    seen[at + 1] = second.number
                else:
                    seen[at + 1] = session.outputs(result, second)
                if self.odd is False and not gathers(result):
                    self.odd = True
            except Exception as error:  # noqa: BLE001 - sizes are not worth a training
                session.fault("hooks", error)

        nested = self._nested

        def enter_outermost(module: Any, args: Any, kwargs: Any) -> None:
            nested[index] += 1
            if nested[index] > 1:  # the module calls itself
                local.depth += 2
            else:
                enter(module, args, kwargs)

        def leave_outermost(module: Any, args: Any, kwargs: Any, result: Any) -> None:
            nested[index] -= 1
            if nested[index]:
                local.depth -= 2
            else:
                leave(module, args, kwargs, result)

        def stand(*args: Any, **kwargs: Any) -> Any:
            module, modules[index] = modules[index], None
            enter(module, args, kwargs)
            try:
                result = module(*args, **kwargs)
            except BaseException as error:
                drop_frames(error)
                module, args, kwargs = None, (), {}
                raise
            leave(module, args, kwargs, result)
            return result

        return stand, {
            "_forward_pre_hooks": OrderedDict({KEY: enter_outermost}),
            "_forward_hooks": OrderedDict({KEY: leave_outermost}),
            "_forward_pre_hooks_with_kwargs": OrderedDict({KEY: True}),
            "_forward_hooks_with_kwargs": OrderedDict({KEY: True}),
        }

    def watch(self) -> Watch:
        """What the replicas have done in a call that goes the long way from here on."""
        self._modules[:] = [None] * len(self._modules)  # those that the call did not come to run
        watch = Watch(self.session, self.site.replicas, strict=self.odd is not None)
        watch.odd = self.odd
        for at in range(0, 4 * self.count, 4):
            inputs, outputs, began, took = self.replicas[at : at + 4]
            probe = Probe(watch, self.site.replicas[at >> 2])
            probe.inputs, probe.outputs = inputs, outputs
            probe.began = self.start + began if began else 0
            probe.ended = probe.began + took
            watch.probes.append(probe)
        return watch


def lane_way(calls: Calls, lanes: dict[int, Lane]) -> tuple[Callable[[Any], Lane | None], Callable[..., Any]]:
    """Two functions: which of `lanes` a module's call may take now, and (torch's own call, lane, module, args, kwargs).

    torch's own call is `Module.__call__` or `DataParallel.forward`, for when the short way turns out to be none.
    """
    session, steps, modes = calls.session, calls.steps, calls.modes
    is_grad_enabled, tensor_type = torch.is_grad_enabled, torch.Tensor
    tracing, function_modes = torch._C._get_tracing_state, torch._C._len_torch_function_stack
    activity, forward, request = Activity.BYTE, Activity.FORWARD, Ring.REQUEST
    clock = monotonic_ns

    def lane_of(module: Any) -> Lane | None:
        lane = lanes.get(id(module))
        if (
            lane is None
            or steps.free != get_ident()
            or steps.words[request] != modes.serial
            or (steps.calls and not steps.loader)  # may begin a turn
            or tracing() is not None
            or function_modes()
        ):
            return None
        return lane

    def call(original: Callable[..., Any], lane: Lane, module: Any, args: Any, kwargs: Any) -> Any:
        inputs, rows = 0, -1
        began = clock()
        try:
            steps.free = PLAIN
            inputs, rows = begins(lane, began, args, kwargs)
            result = lane.run(original, module, args, kwargs)
            if lane.odd is not None:
                shape = result.shape if type(result) is tensor_type else ()
                if not shape or shape[0] != rows:
                    calls.check_meaning(result, rows, lane.count)
        except BaseException as error:
            steps.free = 0
            session.local.depth = 0  # a lone replica runs on this thread, and one that raises does not count down
            trace = calls.taken_over(lane, module, inputs, rows)
            if not isinstance(error, Exception):
                if trace is not None:
                    calls.end(trace, module, True, None)
                raise
            # Without us this call would not have been data parallel.
            if trace is not None:
                calls.fall_back(trace, module, lane.site.via is not None, error, isinstance(error, Unsuited))
        else:
            steps.free = steps.mine  # no signal is handled between the call and here
            ends(lane, began, clock(), rows, inputs, module, result)
            return result
        # The error is handled: what the script's own call may raise has nothing to do with it.
        return (
            original(module, *args, **kwargs) if trace is None else calls.again(trace, original, module, args, kwargs)
        )

    def begins(lane: Lane, now: int, args: Any, kwargs: Any) -> tuple[int, int]:
        """The call begins; its inputs and rows."""
        inputs, rows = 0, -1
        try:
            site = lane.site
            memo = site.inputs
            if (
                len(args) == 1
                and type(value := args[0]) is tensor_type
                and value.shape == memo.shape
                and value.dtype is memo.dtype
                and not (kwargs or site.dim)
            ):
                inputs, rows = memo.number, memo.rows
            else:
                inputs = session.inputs(args, kwargs, memo)
                rows = session.rows(inputs, site.dim)
            if not steps.calls:
                steps.mode = DP
            steps.calls += 1
            steps.inner = 0
            steps.map[activity] = forward
            lane.start = now
            lane.marks.clear()
            lane.replicas[:] = lane.blank  # one that does not run must not show what it did in the last call
            lane.count = 0
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            session.fault("begin", error)
        return inputs, rows

    def ends(lane: Lane, began: int, now: int, rows: int, inputs: int, module: Any, result: Any) -> None:
        """The call is over: write its record."""
        try:
            site = lane.site
            wall = now - began
            steps.last = now
            steps.forward += wall - steps.inner
            memo = site.outputs
            if type(result) is tensor_type and result.shape == memo.shape and result.dtype is memo.dtype:
                outputs = memo.number
            else:
                outputs = session.outputs(result, memo)
            flags = VIRTUAL
            if trains(module):
                flags |= TRAINING
            if is_grad_enabled():
                flags |= GRAD
            if not flags & LEARNS:
                steps.looks(rows)
            elif steps.ahead:
                steps.add(id(module), rows)
            elif rows > steps.samples:
                steps.samples = rows
            steps.count = number = steps.count + 1
            count = lane.count
            ring = session.ring
            if ring is None:
                return
            scatter, scattered, replicate, replicated, apply, applied, gather, gathered = lane.marks
            frame = _frames[count] if count < len(_frames) else frame_of(count)
            values = (
                CALL_TAG,
                DP,
                flags,
                0,
                site.layout,
                steps.number,
                number,
                began,
                wall,
                inputs,
                outputs,
                scatter - began,
                scattered - scatter,
                replicate - began,
                replicated - replicate,
                apply - began,
                applied - apply,
                gather - began,
                gathered - gather,
                *(lane.replicas[: 4 * count]),
            )
            if steps.quick and now - steps.start < QUICK_NS:
                before, ring.staged = ring.staged, None
                steps.words[HELD] += 1
                held = ring.held
                if before is not None:
                    held += ((before, None, None),)
                held += ((values, None, frame),)
                return
            if ring.held or ring.staged is not None:
                ring.flush()
            ring.put(frame, values)
            if ring.head >= session.renew_at:
                session.renew()
        except Exception as error:  # noqa: BLE001 - the result is the script's, whatever we make of it
            session.fault("end", error)

    return lane_of, call
