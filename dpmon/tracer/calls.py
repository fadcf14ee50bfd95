"""A call and its phases: the wrappers around DataParallel.forward, its four verbs, and bare root modules.

Every wrapper runs torch's own code whatever happens to us, and takes its own frame out of a traceback that passes
through it (Python 3.11 and later keep the change when an exception is raised again).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from operator import is_
from threading import get_ident
from time import monotonic_ns
from types import FunctionType, MethodType
from typing import Any

import torch

from dpmon.record.wire import CALL_PHASES, CALL_TAG, DDP, FAILED, GRAD, TRAINING, VIRTUAL, Untimed, pack_call
from dpmon.ring import Ring
from dpmon.tracer.byhand import ByHand
from dpmon.tracer.errors import in_a_line
from dpmon.tracer.events import Span
from dpmon.tracer.frames import OF_CALLS, drop_frames, named_like, outwards
from dpmon.tracer.lane import ODD, ROWS, Lane, Unsuited, frame_of, lane_way
from dpmon.tracer.modes import DP, SINGLE, Modes, Plan, overrides
from dpmon.tracer.names import class_name
from dpmon.tracer.replicas import Watch
from dpmon.tracer.session import Memo, Session
from dpmon.tracer.sizes import tensors_in
from dpmon.tracer.stages import Stages, stages_of
from dpmon.tracer.steps import Steps
from dpmon.tracer.tables import Place, buffers_of, modules_of, trains
from dpmon.tracer.timing import CallTimes, Timing, gpus_of, may_be_used, usable
from dpmon.tracer.virtual import GATHER, PARALLEL_APPLY, REPLICATE, SCATTER, VERBS, Originals, with_globals

__all__ = ["Calls", "Site"]

VERB_OF = (SCATTER, REPLICATE, PARALLEL_APPLY, GATHER, SCATTER, SCATTER, REPLICATE, GATHER)
"""Which phase each of `Originals.all` is."""
MAX_SITES = 1024
_NO_MODULE = torch.nn.Identity()


class Site:
    """What is known of one module that is called: how its calls run, and what they looked like the last time."""

    __slots__ = (
        "absent",
        "dim",
        "epoch",
        "given",
        "gpus",
        "inputs",
        "lane",
        "layout",
        "module",
        "outputs",
        "own",
        "place",
        "plain",
        "plan",
        "proven",
        "replicas",
        "root",
        "share",
        "stages",
        "tags",
        "via",
        "weights",
    )

    def __init__(self, module: Any, plan: Plan, via: str | None, dim: int, gone: Callable[[Any], object]) -> None:
        self.module = weakref.ref(module, gone)
        self.plan = plan
        self.gpus = gpus_of(plan.devices)
        self.plain = plan.mode == SINGLE and (via is None or _is_ddp(module)) and not _holds_wrapper(module)
        """Whether nothing but the module's own code runs: no phases, no DataParallel inside."""
        self.via = via
        wraps = isinstance(module, torch.nn.DataParallel) or _is_ddp(module)
        self.root = class_name(module.module if wraps else module)
        self.dim = dim
        self.inputs = Memo()
        self.outputs = Memo()
        self.share = Memo()
        self.replicas: list[tuple[Memo, Memo]] = []
        self.stages: Stages | None = None
        """What its devices do, if its parts lie on several."""
        self.proven = False
        """dp has worked for it."""
        self.lane: Lane | None = None
        """Where its calls over virtual replicas leave what they did, if they may go the short way."""
        self.place: Place | None = None
        """Where the module lay when the plan was made; None where the plan does not depend on it."""
        self.layout = 0
        self.tags = 0
        """The beginning of a plain call's record."""
        self.epoch = -1
        self.given: Any = None
        """Devices, output device and dim, as the functional form was given them."""
        self.own: tuple[str, ...] = ()
        """The methods of DataParallel that the script's subclass has of its own."""
        self.absent: dict[str, str] = {}
        """What these bypass, with the reason."""
        self.weights = 0
        """Number of leading arguments that are weights, not a batch."""

    def holds(self) -> bool:
        """Whether the module is still where it was when the plan was made."""
        return self.place is None or not self.place.left()

    def stays(self) -> bool:
        """Whether it will be there as long as CUDA is not up, so that nobody need look."""
        return (
            self.place is None or self.place.device is None or self.place.device.type == "cpu"
        ) and not may_be_used()

    @classmethod
    def by_hand(cls, root: str, plan: Plan) -> Site:
        """Of what a script composes itself, which belongs to no one module."""
        site = cls(_NO_MODULE, plan, "data_parallel", 0, lambda _: None)
        site.root = root
        return site


class Before:
    """The random state and the buffers of a module, to be put back when an attempt at dp has failed."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._random = torch.get_rng_state()
        self._device = device
        self._there = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in buffers_of(module)]

    def restore(self) -> None:
        """As if nothing had been tried (what the forward did outside torch stays done)."""
        torch.set_rng_state(self._random)
        if self._there is not None:
            torch.cuda.set_rng_state(self._there, self._device)
        with torch.no_grad():
            for buffer, was in self._buffers:
                buffer.copy_(was)


class Trace:
    """One call while it runs. Times are monotonic ns; phases hold start and duration, start -1 if it did not run."""

    __slots__ = (
        "before",
        "free",
        "inputs",
        "number",
        "outer",
        "phases",
        "plan",
        "rows",
        "runs",
        "share",
        "silent",
        "site",
        "start",
        "step",
        "times",
        "watch",
    )

    def __init__(self, site: Site, number: int, step: int) -> None:
        self.site = site
        self.plan = site.plan
        self.number = number
        self.step = step
        self.phases = [-1, 0, -1, 0, -1, 0, -1, 0]
        self.watch: Watch | None = None
        """Hooks on what is run in parallel; none on a bare root that runs as it is written."""
        self.share: Any = None
        """What scatter gave to replica 0, where torch runs the module itself: (args, kwargs)."""
        self.before: Before | None = None
        self.runs: Any = None
        """The DataParallel, or the view of it, whose forward is being run."""
        self.silent = False
        """A bare root in which a DataParallel was called is recorded by that one's calls."""
        self.inputs = 0
        self.rows = -1
        self.outer = -1
        self.times: CallTimes | None = None
        """Of its GPUs, where it is timed on them."""
        self.free = 0
        """As it was in Steps before the call."""
        self.start = 0


class Calls:
    """Traces the calls of one process."""

    def __init__(self, session: Session, steps: Steps, modes: Modes, originals: Originals) -> None:
        self.session = session
        self.steps = steps
        self.modes = modes
        self.originals = originals
        self.by_hand = ByHand(self)
        self._functional: dict[Any, Callable[..., Any]] = {}
        self.sites: dict[int, Site] = {}
        self.ready: dict[int, Site] = {}
        """By id, the bare roots whose next call may go the short way; empty whenever that has to be looked into."""
        self.lanes: tuple[dict[int, Lane], dict[int, Lane]] = ({}, {})
        """By id, the bare roots and the DataParallels whose next call over virtual replicas may; emptied likewise."""
        self.on_site: Callable[[], None] = lambda: None
        """Called when a module is called for the first time (or planned anew)."""
        session.on_change = self.look_again
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        self.sites.clear()
        self.by_hand.reset()
        self.go_long()

    def go_long(self) -> None:
        """Let no call go a short way until the long way has been gone once more."""
        self.ready.clear()
        for lanes in self.lanes:
            lanes.clear()

    def heal(self) -> None:
        """Forget a call that an interrupt ended between two instructions of ours, if none is under way any more.

        For when batches come and no call is seen; on the training thread.
        """
        if any(frame.f_code.co_filename in OF_CALLS for frame in outwards(sys._getframe(1))):
            return
        self.session.local.clear()
        self.steps.free = 0

    # ---------------------------------------------------------------- the verbs

    def verb(self, number: int) -> Callable[..., Any]:
        """The traced form of one of `Originals.all`."""
        original = self.originals.all[number]
        index = VERB_OF[number]
        local = self.session.local
        by_hand = self.by_hand
        fault = self.session.fault
        is_compiling = torch.compiler.is_dynamo_compiling
        clock = monotonic_ns

        def on_devices(times: CallTimes, ended: int) -> None:
            try:
                if ended < 0:
                    times.begins()
                else:
                    times.ends(ended)
            except Exception as error:  # noqa: BLE001 - the phase is worth more than its time
                fault("events", error, fatal=False)

        def traced(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            trace = local.call
            try:
                if local.verb and (trace is not None or by_hand.running()):
                    return original(*args, **kwargs)
                if trace is None:
                    return by_hand.verb(number, index, original, args, kwargs)
                if index == GATHER and trace.watch is not None and trace.watch.odd:
                    raise Unsuited(ODD)
                virtual = trace.plan.virtual
                if index == PARALLEL_APPLY and trace.watch is not None and not trace.watch.probes:
                    try:
                        args, kwargs = watched(trace.watch, args, kwargs)
                    except Exception as error:  # noqa: BLE001 - sizes are not worth a training
                        fault("replicas", error)
                began = clock()
                if trace.times is not None:
                    on_devices(trace.times, -1)
                try:
                    local.verb = index != PARALLEL_APPLY
                    result = (original if virtual is None else virtual.verbs[number])(*args, **kwargs)
                finally:
                    local.verb = False
                if trace.times is not None:
                    on_devices(trace.times, index)
                ended = clock()
            except BaseException as error:
                drop_frames(error)
                args, kwargs, trace = (), {}, None
                raise
            try:
                phases = trace.phases
                if phases[2 * index] < 0:
                    phases[2 * index] = began - trace.start
                phases[2 * index + 1] += ended - began  # a subclass may run one twice in a call
                if number == REPLICATE and trace.watch is not None:
                    trace.watch.expect(result)
                elif number == SCATTER and len(result[0]) == 1:
                    trace.share = result[0][0], result[1][0]
            except Exception as error:  # noqa: BLE001 - the result is torch's, whatever we make of it
                fault("phases", error)
            return result

        return named_like(traced, original)

    # ---------------------------------------------------------------- the functional form

    def functional(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The traced form of the function torch.nn.parallel.data_parallel."""
        session = self.session
        local = session.local

        def data_parallel(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_dynamo_compiling():
                return original(*args, **kwargs)
            before, depth = local.call, local.depth
            bound: Any = None
            trace: Trace | None = None
            result: Any = None
            failed = True
            try:
                if depth <= 1 and not session.off and torch._C._current_graph_task_id() == -1:
                    try:
                        bound = _bind(args, kwargs)
                    except Exception as error:  # noqa: BLE001 - ours must not reach the script
                        session.fault("functional", error)
                    if bound is not None:
                        trace = self._begin(bound[0], True, bound[1], bound[5] or {}, bound[2:5])
                local.call = trace
                if trace is None and depth <= 1:
                    result = self._run_unrecorded(original, args, kwargs)
                elif trace is None:
                    result = original(*args, **kwargs)
                else:
                    if depth == 1:
                        self._runs_inside(local.root, trace)
                    local.depth = depth + 2
                    result = self._run_functional(original, trace, bound)
                failed = False
            except BaseException as error:
                drop_frames(error)
                raise
            finally:
                local.call = before
                local.depth = depth
                if trace is not None:
                    self.end(trace, bound[0], failed, result)
                if failed:
                    args, kwargs, bound, before, trace = (), {}, None, None, None
            return result

        return named_like(data_parallel, original)

    def _run_functional(self, original: Callable[..., Any], trace: Trace, bound: Any) -> Any:
        module, inputs, ids, output, dim, kwargs = bound
        plan = trace.plan
        if plan.device_ids is None:
            return original(module, inputs, ids, output, dim, kwargs)
        chosen = list(plan.device_ids)
        if plan.virtual is not None:
            try:
                function = self._functional_for(plan)
            except Exception as error:  # noqa: BLE001 - the call goes on as it is written
                self.session.fault("functional", error)
                return original(module, inputs, ids, output, dim, kwargs)
            return function(module, inputs, chosen, None, dim, kwargs)
        if plan.mode == DP:
            return original(module, inputs, chosen, output, dim, kwargs)
        result = original(module, inputs, chosen, None, dim, kwargs)
        if output is not None and output != chosen[0]:
            result = self.originals.gather([result], output, dim)
        return result

    def _run_unrecorded(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """The function where it is not recorded, or not any more: without GPUs it still needs virtual replicas."""
        local = self.session.local
        try:
            bound = _bind(args, kwargs)
            plan = None if bound is None else self.modes.unrecorded(bound[0], bound[2])
            function = None if plan is None else self._functional_for(plan)
        except Exception as error:  # noqa: BLE001 - the call goes on as it is written
            self.session.fault("functional", error)
            plan = function = None
        if plan is None or function is None:
            local.depth = 2  # its verbs are no calls composed by hand
            return original(*args, **kwargs)
        module, inputs, _, _, dim, given = bound
        return function(module, inputs, list(plan.device_ids or ()), None, dim, given)

    # ---------------------------------------------------------------- DataParallel

    def adopt(self, kind: type) -> None:
        """Trace a subclass of DataParallel that has a forward of its own."""
        for base in kind.__mro__:
            forward = base.__dict__.get("forward")
            if base is torch.nn.DataParallel or isinstance(forward, _Forward):
                return
            if forward is not None:
                if isinstance(forward, FunctionType):
                    base.forward = _Forward(forward, self.wrapper_forward(forward))  # type: ignore[attr-defined]
                return

    def wrapper_forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The traced form of DataParallel.forward."""
        session = self.session
        local = session.local
        is_compiling = torch.compiler.is_dynamo_compiling
        lane_of, short_way = lane_way(self, self.lanes[1])
        methods = self.originals.methods
        now = torch.nn.DataParallel.__dict__

        def intact() -> bool:  # a script may put methods of its own on torch's class
            return all(map(is_, map(now.get, methods), methods.values()))

        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(module, *args, **kwargs)
            lane = lane_of(module)
            if lane is not None and intact():
                try:
                    return short_way(original, lane, module, args, kwargs)
                except BaseException as error:
                    drop_frames(error)
                    module, args, kwargs = None, (), {}
                    raise
            before, depth = local.call, local.depth
            trace: Trace | None = None
            result: Any = None
            failed = True
            try:  # from here on: an interrupt must leave neither call nor depth behind
                if before is not None and before.runs is module:  # a subclass goes on to the forward it overrides
                    return original(module, *args, **kwargs)
                # Depth 1 is inside a bare root, more is inside another DataParallel.
                trace = None if session.off or depth > 1 else self._begin(module, True, args, kwargs)
                local.call = trace
                if trace is None:
                    result = original(module, *args, **kwargs)
                else:
                    if depth == 1:
                        self._runs_inside(local.root, trace)
                    local.depth = depth + 2
                    result = self._run_wrapper(original, trace, module, args, kwargs)
                failed = False
            except BaseException as error:
                drop_frames(error)
                raise
            finally:
                local.call = before
                local.depth = depth  # a hook that was passed over by an exception did not count down
                if trace is not None:
                    self.end(trace, module, failed, result)
                if failed:
                    module, args, kwargs, before, trace = None, (), {}, None, None
            return result

        return named_like(forward, original)

    def recorded_inside(self, root: Trace) -> None:
        """A root's call is recorded by what is in it, and goes the long way from now on."""
        root.silent = True
        root.site.plain = False
        self.go_long()

    def _runs_inside(self, root: Trace, trace: Trace) -> None:
        """A root's call is recorded by what is data-parallel in it, its step has that one's mode. Never raises."""
        try:
            self.recorded_inside(root)
            if root.outer >= 0:
                self.steps.ran_as(trace.plan.mode)
        except Exception as error:  # noqa: BLE001 - the call goes on as it is written
            self.session.fault("inside", error)

    def _run_wrapper(self, original: Callable[..., Any], trace: Trace, module: Any, args: Any, kwargs: Any) -> Any:
        plan = trace.plan
        trace.runs = module
        if plan.device_ids is None:
            return original(module, *args, **kwargs)
        try:
            view = trace.runs = _view(module, plan, trace.site.dim)
            self._before(trace, module)
        except Exception as error:  # noqa: BLE001 - the call goes on as it is written
            self.session.fault("view", error)
            return original(module, *args, **kwargs)
        if plan.virtual is None:
            result = original(view, *args, **kwargs)
            if plan.mode == SINGLE and module.output_device != plan.device_ids[0]:
                result = self.originals.gather([result], module.output_device, module.dim)
            self._take_back(module, view)
            return result
        try:
            result = original(view, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 - without us this call would not have been data parallel
            self.fall_back(trace, module, True, error, False)
        else:
            self._take_back(module, view)
            if "forward" in trace.site.own and max(trace.phases[::2]) < 0:
                # It ran, but in one piece: what is in the script's forward is nobody's data parallelism.
                trace.before = None
                reason = f"{trace.site.via} has its own forward, which uses none of DataParallel's functions"
                self.fall_back(trace, module, True, reason, True)
            else:
                self._worked(trace, module)
            return result
        return original(module, *args, **kwargs)

    def _before(self, trace: Trace, module: Any) -> None:
        """Remember what a first attempt at dp may change, should it fail. Never raises."""
        if trace.site.proven or trace.plan.virtual is None:
            return
        try:
            trace.before = Before(module, trace.plan.virtual.base)
        except Exception as error:  # noqa: BLE001 - then the attempt leaves its traces
            self.session.fault("before", error)

    def _worked(self, trace: Trace, module: Any) -> None:
        """dp went well: earlier failures no longer count. Never raises."""
        try:
            trace.site.proven = True
            self.modes.succeeded(module)
        except Exception as error:  # noqa: BLE001 - the result is there, whatever we make of it
            self.session.fault("success", error)

    def _take_back(self, module: Any, view: Any) -> None:
        """What a subclass set on itself during the call belongs to the script's object. Never raises."""
        if type(module) is torch.nn.DataParallel:
            return
        try:
            own = module.__dict__
            for name, value in view.__dict__.items():
                if name not in _OVERLAID and own.get(name, own) is not value:
                    own[name] = value
        except Exception as error:  # noqa: BLE001 - the result is there, whatever we make of it
            self.session.fault("view", error)

    def fall_back(self, trace: Trace, module: Any, wrapper: bool, why: Exception | str, final: bool) -> None:
        """dp did not work for this call: note why, and let it run as the script alone would. Never raises."""
        trace.phases = [-1, 0] * 4
        watch = trace.watch
        trace.watch = trace.share = None
        try:
            if trace.times is not None:
                trace.times.raised(spans_of(watch))
                trace.times = trace.times.again()
            if trace.before is not None:
                trace.before.restore()
            known = isinstance(why, (str, Unsuited))
            reason = str(why) if known else f"the model raised {in_a_line(why)}"
            plan = self.modes.failed(module, reason, final, trace.number)
            if plan is None:
                plan = self._new_site(module, wrapper).plan
                self.modes.announce(trace.step, trace.number)
            trace.plan = plan
            self.steps.ran_as(plan.mode)
        except Exception as error:  # noqa: BLE001 - the call goes on as it is written
            self.session.fault("fall back", error)
        finally:
            self.let_go(watch)
            if isinstance(why, Exception):
                # torch raises a replica's error from a local variable of a frame in the error's own traceback. This
                # cycle would keep the call's arguments alive until the next garbage collection.
                why.__traceback__ = None

    # ---------------------------------------------------------------- bare roots

    def root_call(self, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """Trace the call of a bare root module; `original` is torch's Module.__call__."""
        local = self.session.local
        trace = self._begin(module, False, args, kwargs)
        if trace is None:
            depth = local.depth
            try:
                local.depth = max(depth, 2)  # its parts are no roots
                return original(module, *args, **kwargs)
            finally:
                local.depth = depth
        result: Any = None
        failed = True
        stages = trace.site.stages if trace.outer >= 0 else None  # the training thread's calls only
        try:
            local.depth = 1
            local.root = trace
            if stages is not None:
                stages.begin()
            if trace.plan.mode == DP:
                result = self._run_root(original, trace, module, args, kwargs)
            else:
                result = original(module, *args, **kwargs)
            failed = False
        finally:
            local.depth = 0
            local.root = None
            if stages is not None:
                stages.end(trace.site)
            self.end(trace, module, failed, result)
        return result

    def _run_root(self, original: Callable[..., Any], trace: Trace, module: Any, args: Any, kwargs: Any) -> Any:
        plan = trace.plan
        local = self.session.local
        self._before(trace, module)
        try:
            local.call = trace
            local.depth = 2
            result = self._functional_for(plan)(module, args, plan.device_ids, None, 0, kwargs)
            reason = changed_meaning(result, trace.rows, 0 if trace.watch is None else len(trace.watch.probes))
        except Exception as error:  # noqa: BLE001 - without us this call would not have been data parallel
            self.fall_back(trace, module, False, error, isinstance(error, Unsuited))
        else:
            if reason is None:
                self._worked(trace, module)
                return result
            self.fall_back(trace, module, False, reason, True)
        finally:
            local.call = None
            local.depth = 1
        return original(module, *args, **kwargs)

    def _functional_for(self, plan: Plan) -> Callable[..., Any]:
        if plan.virtual is None:
            function: Callable[..., Any] = self.originals.data_parallel
            return function
        functional = self._functional.get(plan.virtual)
        if functional is None:
            functional = self._functional[plan.virtual] = plan.virtual.functional(self.originals.data_parallel)
        return functional

    # ---------------------------------------------------------------- the short way over virtual replicas

    def _open_lane(self, trace: Trace, module: Any) -> None:
        """Let the next call go the short way, if this one was as usual and what is remembered of it is defined."""
        site, plan, epoch = trace.site, trace.plan, self.session.epoch
        if (
            plan is not site.plan
            or plan.mode != DP
            or len(plan.device_ids or ()) < 2
            or trace.outer < 0
            or trace.silent
            or not site.proven
            or site.given is not None
            or (site.via is not None and type(module) is not torch.nn.DataParallel)
            or site.epoch != epoch
            or self.session.off
            or self.sites.get(id(module)) is not site
            or not site.stays()
        ):
            return
        for memo in (site.inputs, site.outputs):
            if memo.epoch != epoch:
                memo.shape = None
        if site.lane is None:
            try:
                site.lane = self._lane_for(site, plan)
            except TypeError:
                return  # a torch whose functions use other names
        if site.lane is not None:
            self.lanes[site.via is not None][id(module)] = site.lane

    def _lane_for(self, site: Site, plan: Plan) -> Lane | None:
        """torch's own functions, given the timed verbs in place of those that everybody calls."""
        ids, virtual = plan.device_ids, plan.virtual
        if ids is None or virtual is None:
            return None
        while len(site.replicas) < len(ids):
            site.replicas.append((Memo(), Memo()))
        lane = Lane(self.session, site)
        verbs = {name: lane.verb(name, verb) for name, verb in zip(VERBS, virtual.verbs, strict=False)}
        if site.via is None:
            functional = with_globals(virtual.functional(self.originals.data_parallel), **verbs)
            lane.run = lambda _, module, args, kwargs: functional(module, args, ids, None, 0, kwargs)
            return lane
        own = {
            name: with_globals(method, **{verb: verbs[verb]})
            for (name, method), verb in zip(self.originals.methods.items(), VERBS, strict=True)
        }
        kind = type("DataParallel", (torch.nn.DataParallel,), own)
        dim = site.dim
        lane.run = lambda original, module, args, kwargs: original(_view(module, plan, dim, kind), *args, **kwargs)
        return lane

    def check_meaning(self, result: Any, rows: int, replicas: int) -> None:
        """Raises Unsuited if dp has given a bare root's script something else than it is written for."""
        reason = changed_meaning(result, rows, replicas)
        if reason is not None:
            raise Unsuited(reason)

    def taken_over(self, lane: Lane, module: Any, inputs: int, rows: int) -> Trace | None:
        """What a call on the short way has done so far, for the long way to go on with. Never raises."""
        try:
            self.lanes[lane.site.via is not None].pop(id(module), None)
            lane.site.lane = None
            steps = self.steps
            trace = Trace(lane.site, steps.count + 1, steps.number)
            trace.start = lane.start
            trace.inputs, trace.rows = inputs, rows
            trace.outer = 0
            trace.free = steps.thread
            trace.phases = lane.phases
            trace.watch = lane.watch()
            return trace
        except Exception as error:  # noqa: BLE001 - then there is no record of this call
            self.session.fault("take over", error)
            return None

    def again(self, trace: Trace, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        """A call that failed on the short way runs as the script alone would run it."""
        local = self.session.local
        wrapper = trace.site.via is not None
        result: Any = None
        failed = True
        try:
            local.depth = 2 if wrapper else 1
            if wrapper:
                local.call = trace
                trace.runs = module
            else:
                local.root = trace
            result = original(module, *args, **kwargs)
            failed = False
        finally:
            local.call = local.root = None
            local.depth = 0
            self.end(trace, module, failed, result)
        return result

    # ---------------------------------------------------------------- begin and end

    def _begin(self, module: Any, wrapper: bool, args: Any, kwargs: Any, given: Any = None) -> Trace | None:
        """Start tracing a call; None where nothing is recorded. Never raises.

        `given`: devices, output device and dim handed to the functional form, else None.
        """
        session = self.session
        steps = self.steps
        try:
            if not session.ready():
                return None
            ring = session.ring
            if torch._C._get_tracing_state() is not None:  # torch.jit.trace: sizes are tensors of its graph
                return None
            local = session.local
            if local.depth == 0:
                local.verb = False  # an interrupt may have left it behind
                if local.hand is not None:
                    self.by_hand.flush()
            key = id(module) + (given is not None)  # no two objects lie one byte apart
            site = self.sites.get(key)
            if site is not None and given is not None and site.given != _as_given(given):
                site = None
            if site is not None and not site.holds():
                site = None
            if ring is None:
                return None
            if local.depth == 0 and ring.words[Ring.REQUEST] != self.modes.serial and self.modes.poll():
                self.sites.clear()
                self.go_long()
                site = None
            if site is None:
                site = self._new_site(module, wrapper, args) if given is None else self._functional_site(module, given)
            if given is not None:
                if local.depth == 1:
                    self.splits_itself(local.root)
                args = args if isinstance(args, tuple) else () if args is None else (args,)
            trace = Trace(site, steps.count + 1, steps.number)
            if site.plan.mode == DP:
                trace.watch = Watch(session, site.replicas, strict=not wrapper)
            trace.inputs = inputs = session.inputs(args, kwargs, site.inputs)
            trace.rows = session.rows(inputs, site.dim, site.weights)
            trace.start = now = monotonic_ns()
            outermost = local.depth == 0 and (steps.thread == 0 or steps.thread == get_ident())
            self.time(trace, outermost)
            if outermost:
                trace.start = steps.call_begins(id(module), site.plan.mode, now)
                trace.step = steps.number
                trace.outer = steps.inner
                steps.inner = 0
                trace.free = steps.free
                steps.free = 0
            if self.modes.unannounced:
                self.modes.announce(trace.step, trace.number)
            return trace
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            session.fault("begin", error)
            return None

    def time(self, trace: Trace, outermost: bool) -> None:
        """A call that may run on GPUs is about to begin: it is timed on them, if the training thread makes it."""
        session, site, steps = self.session, trace.site, self.steps
        timing = session.timing
        if not (site.gpus or timing is not None) or not (outermost or steps.thread == get_ident()):
            return
        if timing is None:
            if session.ring is None or not usable():
                return
            # Once and for all: from here on the ways are gone on which events are recorded.
            session.ring.flush()
            steps.detach()
            self.go_long()
            timing = session.timing = Timing(session, steps, session.ring)
        if outermost:
            timing.runs_on(site.gpus)
        if site.gpus:
            trace.times = timing.call_begins(site.plan.devices, outermost)
            if trace.watch is not None:
                trace.watch.times = trace.times

    def _new_site(self, module: Any, wrapper: bool, args: tuple[Any, ...] = ()) -> Site:
        weights = 0 if wrapper else weights_given(type(module))
        if weights and args and isinstance(args[0], (list, tuple)):
            site = self._keep(id(module), module, self.modes.stateless(module, args[0]), None, 0)
            site.weights, site.plain = weights, False
            site.root = class_name(getattr(module, "stateless_model", module))
            return site
        dim = self.modes.dim_of(module) if wrapper else 0
        if wrapper:
            via: str | None = class_name(module)
        else:
            via = DDP if _is_ddp(module) else None
        plan = self.modes.plan(module, wrapper)
        site = self._keep(id(module), module, plan, via, dim or 0)
        if wrapper:
            site.own = own_methods(type(module))
        else:
            site.place = Place(module)
        if not wrapper and plan.mode == SINGLE:
            site.stages = stages_of(module.module if via is not None else module, self.session)
            site.plain = site.plain and site.stages is None
            if site.stages is not None:
                site.gpus = gpus_of(site.stages.devices)
        return site

    def splits_itself(self, root: Trace) -> None:
        """A bare root's forward runs a part of itself data-parallel: it cannot be split as a whole."""
        module = root.site.module()
        if module is not None and not self.modes.splits_itself(module, True):
            self.sites.pop(id(module), None)  # planned anew for its next call
            self.ready.pop(id(module), None)
            self.lanes[0].pop(id(module), None)

    def _functional_site(self, module: Any, given: Any) -> Site:
        plan = self.modes.functional(module, given[0])
        site = self._keep(id(module) + 1, module, plan, "data_parallel", given[2])
        site.root = class_name(module)
        site.given = _as_given(given)
        site.place = Place(module)
        return site

    def _keep(self, key: int, module: Any, plan: Plan, via: str | None, dim: int) -> Site:
        if len(self.sites) >= MAX_SITES:
            self.sites.clear()
        known: Any = self.sites, self.ready, *self.lanes
        gone: Callable[[Any], object] = lambda _: [table.pop(key, None) for table in known]  # noqa: E731
        site = self.sites[key] = Site(module, plan, via, dim, gone)
        self.on_site()
        return site

    def look_again(self) -> None:
        """What is remembered of the definitions is void, or the tracer has given up."""
        self.go_long()
        if self.session.off:
            self.steps.free = self.steps.mine = 0

    def end(self, trace: Trace, module: Any, failed: bool, result: Any) -> None:
        """The call is over: close its phase and write its record. Never raises."""
        now = monotonic_ns()
        try:
            flags = FAILED if failed else 0
            if trains(module):
                flags |= TRAINING
            if torch.is_grad_enabled():
                flags |= GRAD
            if trace.outer >= 0:
                self.steps.call_ends(id(module), trace.start, now, trace.outer, trace.rows, flags)
                self.steps.settle(trace.free)
            timing = self.session.timing
            if timing is not None and trace.times is not None:
                timing.call_ends(trace.times, trace.outer >= 0, spans_of(trace.watch))
            if self.session.local.tried is not None:
                self.modes.tried(failed)
            if self.modes.doubtful and not self.session.local.depth:
                self.modes.decide(trace.silent, trace.step, trace.number)
            if not trace.silent:
                outputs = 0 if failed else self.session.outputs(result, trace.site.outputs)
                self.write(trace, flags, outputs, now)
            if trace.plan.virtual is not None and not failed:
                self._open_lane(trace, module)
        except Exception as error:  # noqa: BLE001 - the result is the script's, whatever we make of it
            self.session.fault("end", error)
        finally:
            self.let_go(trace.watch)

    def let_go(self, watch: Watch | None) -> None:
        """Drop all references to the replicas of a call that is over. Never raises."""
        try:
            if watch is not None:
                watch.close()
        except Exception as error:  # noqa: BLE001 - then the garbage collector frees them
            self.session.fault("let go", error, fatal=False)

    def write(self, trace: Trace, flags: int, outputs: int, now: int) -> None:
        """Write the record of a call that was over at `now`; `flags` without VIRTUAL. Never raises."""
        session = self.session
        try:
            ring = session.ring
            if ring is None:
                return
            self.steps.count += 1
            site, plan = trace.site, trace.plan
            replicas = self._replicas(trace, outputs, now)
            if site.own and not flags & FAILED:
                self._bypassed(trace, bool(replicas))
            fresh = plan is site.plan and site.epoch == session.epoch
            layout = site.layout if fresh else self.layout(site, plan)
            if plan.virtual is not None and plan.mode == DP:
                flags |= VIRTUAL
            stages = site.stages
            timing = session.timing
            staged = stages is not None and trace.outer >= 0
            if staged or (timing is not None and self.steps.thread == get_ident()):
                head = plan.mode, flags, layout, trace.step, self.steps.count, trace.start, now - trace.start
                packed = stages.packed(trace.start) if stages is not None and staged else ()
                call = pack_call(*head, trace.inputs, outputs, trace.phases, () if staged else replicas, packed)
                if timing is not None:
                    timing.add(call, *self._slots(trace, staged))
                    return
                ring.write(call)
                if ring.head >= session.renew_at:
                    session.renew()
                return
            ring.flush()
            values = (
                CALL_TAG,
                plan.mode,
                flags,
                0,
                layout,
                trace.step,
                self.steps.count,
                trace.start,
                now - trace.start,
                trace.inputs,
                outputs,
                *trace.phases,
                *replicas,
            )
            ring.put(frame_of(len(replicas) >> 2), values)
            if ring.head >= session.renew_at:
                session.renew()
        except Exception as error:  # noqa: BLE001 - the result is the script's, whatever we make of it
            session.fault("end", error)

    def layout(self, site: Site, plan: Plan) -> int:
        devices = plan.devices if site.stages is None else site.stages.devices
        key = (site.root, site.via, devices, tuple(site.absent.items()))
        number = self.session.define(key, lambda: _spell(site, plan))
        if plan is site.plan:
            site.layout, site.epoch = number, self.session.epoch
        return number

    def _replicas(self, trace: Trace, outputs: int, now: int) -> tuple[int, ...] | list[int]:
        """Four numbers a replica, as dpmon.record.wire.pack_call takes them."""
        start = trace.start
        if trace.share is not None:
            args, kwargs = trace.share
            began = trace.phases[0] + trace.phases[1]
            return self.session.inputs(args, kwargs, trace.site.share), outputs, began, now - start - began
        if trace.watch is None or not trace.watch.probes:
            if trace.site.own and trace.watch is not None:
                return ()  # the subclass went its own way: what its replicas got is not known
            return trace.inputs, outputs, 0, now - start
        flat: list[int] = []
        for probe in trace.watch.probes:
            began, took = probe.began - start, probe.ended - probe.began
            flat += (probe.inputs, probe.outputs, began if began > 0 else 0, took if took > 0 else 0)
        return flat

    def _slots(self, trace: Trace, staged: bool) -> tuple[Any, int]:
        """What the record of a call is to have of its devices, as Timing.add takes it."""
        if trace.times is None:
            return None, Untimed.NONE
        if staged and trace.site.stages is not None:
            return trace.site.stages.slots(), Untimed.ON_CPU
        probes = trace.watch.probes if trace.watch is not None else ()
        return trace.times.slots([probe.span for probe in probes] if probes else None), Untimed.NONE

    def _bypassed(self, trace: Trace, replicas: bool) -> None:
        """Say what is missing because the script's subclass does it itself."""
        site = trace.site
        absent = {}
        if trace.plan.mode == DP:
            own = ", ".join(site.own)
            for index, name in enumerate(CALL_PHASES):
                if trace.phases[2 * index] < 0:
                    absent[name] = f"{site.via} has its own {own} and does not use torch's {name}"
            if not replicas:
                absent["replicas"] = f"{site.via} has its own {own}: no replica was made or run by torch's functions"
        if absent != site.absent:
            site.absent = absent
            site.epoch = -1


class _Forward:
    """The forward of a script's own subclass: on an instance the traced one, on the class the script's."""

    def __init__(self, original: Any, traced: Any) -> None:
        self._original = original
        self._traced = traced

    def __get__(self, module: Any, owner: Any = None) -> Any:
        return self._original if module is None else MethodType(self._traced, module)

    def __reduce__(self) -> Any:
        # A class that is pickled by value (cloudpickle) takes the script's function with it, and nothing of ours.
        return next, (iter([self._original]),)


def spans_of(watch: Watch | None) -> list[Span | None]:
    """What the replicas took on their devices."""
    return [] if watch is None else [probe.span for probe in watch.probes]


def changed_meaning(result: Any, rows: int, replicas: int) -> str | None:
    """Why dp would give the script something else than it is written for; None if it would not.

    A script that wraps in DataParallel expects a vector of losses; one that never heard of it does not.
    """
    for tensor in tensors_in(result):
        count = tensor.shape[0] if tensor.dim() else 0
        if count != rows:
            kind = "a scalar" if tensor.dim() == 1 and count == replicas else "tensors of other lengths"
            return f"{ROWS}: the model returns {kind} for the {rows} rows of the batch"
    return None


def weights_given(kind: type) -> int:
    """Number of leading arguments that are parameters and buffers, for a module that does not hold them itself."""
    if not kind.__module__.startswith("torch._functorch"):
        return 0
    return {"FunctionalModule": 1, "FunctionalModuleWithBuffers": 2}.get(kind.__name__, 0)


def own_methods(kind: type) -> tuple[str, ...]:
    """The methods that a subclass of DataParallel has of its own, by name."""
    return tuple(
        name for name in ("forward", "scatter", "replicate", "parallel_apply", "gather") if overrides(kind, name)
    )


def watched(watch: Watch, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of parallel_apply, with a probe over each of its modules."""
    if args and isinstance(args[0], (list, tuple)):
        return (watch.over(args[0]), *args[1:]), kwargs
    if isinstance(kwargs.get("modules"), (list, tuple)):
        return args, {**kwargs, "modules": watch.over(kwargs["modules"])}
    return args, kwargs


_ARGUMENTS = ("module", "inputs", "device_ids", "output_device", "dim", "module_kwargs")


def _bind(args: Any, kwargs: Any) -> Any:
    """The arguments of the functional data_parallel in their order; None for what is none of its calls."""
    named = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
    if len(named) != len(args) + len(kwargs) or not set(named) <= set(_ARGUMENTS) or "inputs" not in named:
        return None  # torch says what is wrong with it
    if not isinstance(named.get("module"), torch.nn.Module):
        return None
    return tuple(named.get(name, 0 if name == "dim" else None) for name in _ARGUMENTS)


def _as_given(given: Any) -> tuple[Any, ...]:
    ids, output, dim = given
    return (None if ids is None else tuple(ids)), output, dim


def _spell(site: Site, plan: Plan) -> dict[str, Any]:
    devices, absent = plan.devices, plan.absent
    if site.stages is not None:
        devices, absent = site.stages.devices, site.stages.absent
    if site.via == DDP:
        absent = {**absent, "all_reduce": _IN_BACKWARD}
    return {"root": site.root, "via": site.via, "devices": list(devices), "absent": {**absent, **site.absent}}


def _holds_wrapper(module: Any) -> bool:
    return any(isinstance(inner, torch.nn.DataParallel) for inner in modules_of(module))


def _is_ddp(module: Any) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def _view(module: Any, plan: Plan, dim: int, kind: type | None = None) -> Any:
    """The same DataParallel with other devices: shares everything with `module`, which is not touched."""
    ids = list(plan.device_ids or ())
    view: Any = object.__new__(kind or type(module))
    state = view.__dict__
    state.update(module.__dict__)
    state["device_ids"] = ids
    if plan.virtual is not None:
        state["src_device_obj"] = plan.virtual.base
        state["output_device"] = ids[0]
        state["dim"] = dim
    return view


_IN_BACKWARD = "the ranks average their gradients within the backward pass; that time is not told apart"
_OVERLAID = frozenset(("device_ids", "src_device_obj", "output_device", "dim"))
