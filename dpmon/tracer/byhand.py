"""Calls that a script composes itself of scatter, replicate, parallel_apply and gather.

What is a call: one parallel_apply, with the scatters and replicates that ran before it in the same turn of the loop
and the gather that comes next. It begins with the first of them and ends with the last; time is forward's only while
one of them runs. Without a gather it ends with parallel_apply, and its result as a whole is not known.

The pieces need not be torch's replicas: whatever parallel_apply is given to call is a replica here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from dpmon.record.wire import FAILED, GRAD, TRAINING
from dpmon.ring import Ring
from dpmon.tracer.frames import OF_CALLS, outwards
from dpmon.tracer.modes import DP
from dpmon.tracer.names import name_of
from dpmon.tracer.replicas import Watch
from dpmon.tracer.sizes import leaves
from dpmon.tracer.tables import trains
from dpmon.tracer.virtual import GATHER, PARALLEL_APPLY, REPLICATE, SCATTER

if TYPE_CHECKING:
    from dpmon.tracer.calls import Calls, Site, Trace
    from dpmon.tracer.events import Span

__all__ = ["ByHand"]

MAX_SITES = 256
PATIENCE = 2
"""Calls without a gather after which none is waited for."""


class Hand:
    """What has been composed so far; `trace` once parallel_apply has run. Times are monotonic ns."""

    __slots__ = (
        "depth",
        "devices",
        "ended",
        "flags",
        "given",
        "leaves",
        "phases",
        "spans",
        "start",
        "trace",
        "turn",
    )

    def __init__(self, start: int, turn: int, depth: int) -> None:
        self.start = self.ended = start
        self.turn = turn
        self.depth = depth
        self.phases: list[list[int]] = [[-1, 0], [-1, 0], [-1, 0], [-1, 0]]
        """Absolute start and duration of each verb."""
        self.leaves: list[Any] = []
        """Signatures of what was scattered, in order."""
        self.given = 0
        self.devices: tuple[Any, ...] | None = None
        """A copy, so that the script's own list is not kept alive."""
        self.trace: Trace | None = None
        self.flags = 0
        self.spans: list[list[Span]] = [[], [], [], []]
        """Of each verb: what it takes on the GPUs."""

    def hands(self, devices: Any) -> None:
        """Note the devices that the script passes to a primitive."""
        self.devices = tuple(devices) if isinstance(devices, (list, tuple, range)) else None

    def ran(self, index: int, began: int, ended: int) -> None:
        """A verb has run."""
        phase = self.phases[index]
        if phase[0] < 0:
            phase[0] = began
        phase[1] += ended - began
        self.ended = ended

    def scattered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the sizes of what was cut up: the paths go on from one scatter to the next."""
        for value in args:
            self.leaves += leaves(value, str(self.given))
            self.given += 1
        for name, value in kwargs.items():
            self.leaves += leaves(value, name)


class ByHand:
    """Traces them on every thread of one process."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.session = calls.session
        self._sites: dict[Any, tuple[int, Site]] = {}
        self._ungathered: dict[Any, int] = {}

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        self._sites.clear()
        self._ungathered.clear()

    def verb(self, number: int, index: int, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a primitive that the script called itself; the caller takes our frames out of a traceback."""
        session, local = self.session, self.session.local
        if (
            (local.depth > 1 and not self._left_over())
            or torch._C._current_graph_task_id() != -1
            or torch._C._get_tracing_state() is not None
        ):
            return original(*args, **kwargs)
        hand: Hand | None = None
        run = original
        ready: Any = None
        spans: Sequence[Span] = ()
        try:
            # Also once the tracer has given up: the script could not go on without.
            virtual = self.calls.modes.hand_devices()
            if virtual is not None:
                run = virtual.verbs[number]
            if not session.off:
                hand = self._hand(index)
                if hand is not None and index == PARALLEL_APPLY and session.ready():
                    ready = self._begin(hand, virtual, args, kwargs)
                if hand is not None and ready is None and not local.depth:
                    spans = self._spans()
        except Exception as error:  # noqa: BLE001 - the script's function is run all the same
            session.fault("by hand", error)
            hand = local.hand = None
        if ready is not None and hand is not None:
            return self._apply(hand, run, *ready)
        began = monotonic_ns()
        failed = True
        try:
            local.verb = index != PARALLEL_APPLY
            result = run(*args, **kwargs)
            failed = False
        finally:
            local.verb = False
            if hand is not None and spans:
                self._end_spans(hand, index, spans, failed)
        if hand is not None:
            try:
                hand.ran(index, began, monotonic_ns())
                self._ran(hand, number, index, args, kwargs, result)
            except Exception as error:  # noqa: BLE001 - the result is torch's, whatever we make of it
                session.fault("by hand", error)
        return result

    def _spans(self) -> Sequence[Span]:
        """A verb but parallel_apply is about to run: on the GPUs of the step. Never raises."""
        timing = self.session.timing
        if timing is None or self.calls.steps.thread != get_ident():
            return ()
        try:
            return [timing.times.begin(gpu) for gpu in timing.gpus]
        except Exception as error:  # noqa: BLE001 - the verb is worth more than its time
            self.session.fault("events", error, fatal=False)
            return ()

    def _end_spans(self, hand: Hand, index: int, spans: Sequence[Span], failed: bool) -> None:
        """It is over. Never raises."""
        timing = self.session.timing
        try:
            for span in spans if timing is not None else ():
                if failed:
                    timing.times.abandon(span)  # type: ignore[union-attr]  # it is there
                else:
                    timing.times.end(span)  # type: ignore[union-attr]
            hand.spans[index] += spans
        except Exception as error:  # noqa: BLE001 - the verb is worth more than its time
            self.session.fault("events", error, fatal=False)

    def _left_over(self) -> bool:
        """Whether an interrupt has left behind that this thread is in a call; then it is in none any more."""
        of_ours = OF_CALLS | {__file__}
        around = outwards(sys._getframe(2).f_back)  # of whoever called the traced primitive
        if any(frame.f_code.co_filename in of_ours for frame in around):
            return False
        self.session.local.clear()
        return True

    def running(self) -> bool:
        """Whether a primitive runs on this thread, whose parts are no calls of their own.

        If not, an interrupt has left behind that one does, and none does any more.
        """
        if any(frame.f_code is ByHand.verb.__code__ for frame in outwards(sys._getframe(1))):
            return True
        self.session.local.verb = False
        return False

    def _hand(self, index: int) -> Hand | None:
        """What this verb belongs to, begun here if need be; None for a gather of nothing that we saw."""
        local = self.session.local
        hand: Hand | None = local.hand
        turn = self.calls.steps.number
        if hand is not None and hand.trace is not None and (index != GATHER or hand.turn != turn):
            self.flush()
            hand = None
        if hand is not None and (hand.turn != turn or hand.depth != local.depth):
            hand = local.hand = None
        if hand is None and index != GATHER:
            hand = local.hand = Hand(monotonic_ns(), turn, local.depth)
        return hand

    def _ran(self, hand: Hand, number: int, index: int, args: Any, kwargs: Any, result: Any) -> None:
        if index == GATHER:
            if hand.trace is not None:
                self._finish(hand, result)
        elif index == SCATTER:
            if number == 0:  # scatter_kwargs(inputs, kwargs, devices)
                named = args[1] if len(args) > 1 else kwargs.get("kwargs")
                hand.scattered(args[0] if args else kwargs["inputs"], named or {})
                hand.hands(args[2] if len(args) > 2 else kwargs.get("target_gpus"))
            elif number == 4:  # scatter(inputs, devices)
                value = args[0] if args else kwargs["inputs"]
                if isinstance(value, dict):
                    hand.scattered((), value)
                else:
                    hand.scattered(tuple(value) if type(value) in (tuple, list) else (value,), {})
                hand.hands(args[1] if len(args) > 1 else kwargs.get("target_gpus"))
            else:  # Scatter.apply(devices, sizes, dim, tensor)
                hand.scattered(args[3:], {})
                hand.hands(args[0])
        elif hand.devices is None:
            position = 0 if number == 6 else 1  # Broadcast.apply(devices, *tensors); replicate(module, devices)
            hand.hands(args[position] if len(args) > position else kwargs.get("devices"))

    # ---------------------------------------------------------------- a call

    def _apply(self, hand: Hand, run: Callable[..., Any], began: int, args: Any, kwargs: Any) -> Any:
        local = self.session.local
        depth = local.depth
        failed = True
        try:
            local.depth = depth + 2
            result = run(*args, **kwargs)
            failed = False
            return result
        finally:
            local.depth = depth
            try:
                self._applied(hand, began, failed)
            except Exception as error:  # noqa: BLE001 - the result is torch's, whatever we make of it
                self.session.fault("by hand", error)

    def _begin(self, hand: Hand, virtual: Any, args: Any, kwargs: Any) -> Any:
        from dpmon.tracer.calls import Trace, watched

        calls, session = self.calls, self.session
        steps, modes, local = calls.steps, calls.modes, session.local
        modules = args[0] if args else kwargs.get("modules")
        if not isinstance(modules, (list, tuple)) or not modules:
            return None
        ring = session.ring
        assert ring is not None
        if local.depth == 0 and ring.words[Ring.REQUEST] != modes.serial and modes.poll():
            calls.sites.clear()
            calls.go_long()
        site = self._site(modules, hand, virtual)
        if local.depth == 1:  # that one is recorded by what is in it, from now on the long way
            calls.recorded_inside(local.root)
            calls.splits_itself(local.root)
            if local.root.outer >= 0:
                steps.ran_as(site.plan.mode)
        hand.trace = trace = Trace(site, steps.count + 1, steps.number)
        grad = torch.is_grad_enabled()  # a function has no mode of its own: it trains if gradients are wanted
        hand.flags = TRAINING * (trains(modules[0]) if hasattr(modules[0], "training") else grad) | GRAD * grad
        trace.watch = Watch(session, site.replicas, strict=False)
        trace.start = hand.start
        if hand.leaves:
            trace.inputs = session.sizes("0", tuple(hand.leaves))
            trace.rows = session.rows(trace.inputs, 0)
        args, kwargs = watched(trace.watch, args, kwargs)
        began = monotonic_ns()
        outermost = local.depth == 0 and (steps.thread == 0 or steps.thread == get_ident())
        calls.time(trace, outermost)
        if outermost:
            steps.call_begins(_root(site), DP, hand.start, False)  # its scatter has already run
            hand.turn = trace.step = steps.number
            spent = sum(took for _, took in hand.phases)
            steps.forward += spent
            steps.inner += spent
            trace.outer = steps.inner
            steps.inner = 0
            trace.free = steps.free
            steps.free = 0
            if session.timing is not None:
                session.timing.ran_before([span for spans in hand.spans for span in spans])
        if modes.unannounced:
            modes.announce(trace.step, trace.number)
        return began, args, kwargs

    def _applied(self, hand: Hand, began: int, failed: bool) -> None:
        from dpmon.tracer.calls import spans_of

        now = monotonic_ns()
        hand.ran(PARALLEL_APPLY, began, now)
        trace = hand.trace
        assert trace is not None
        if trace.watch is not None:
            trace.watch.release()  # the gather may come late, or never
        if trace.outer >= 0:
            self.calls.steps.call_ends(_root(trace.site), began, now, trace.outer, trace.rows, hand.flags)
            self.calls.steps.settle(trace.free)
        timing = self.session.timing
        if timing is not None and trace.times is not None:
            timing.call_ends(trace.times, trace.outer >= 0, spans_of(trace.watch))
            hand.spans[PARALLEL_APPLY] = list(trace.times.whole)
        if failed:
            self._write(hand, True, 0)
        elif self._ungathered.get(trace.site.root, 0) >= PATIENCE:
            self.flush()

    def _finish(self, hand: Hand, result: Any) -> None:
        trace = hand.trace
        assert trace is not None
        if trace.outer >= 0:
            self.calls.steps.forward += hand.phases[GATHER][1]
            self.calls.steps.inner += hand.phases[GATHER][1]
            if self.session.timing is not None:
                self.session.timing.ran_before(hand.spans[GATHER])
        self._ungathered.pop(trace.site.root, None)
        self._write(hand, False, self.session.outputs(result, trace.site.outputs))

    def flush(self) -> None:
        """Write the call that has waited for a gather on this thread. Never raises."""
        local = self.session.local
        hand: Hand | None = local.hand
        local.hand = None
        if hand is None or hand.trace is None:
            return
        try:
            root = hand.trace.site.root
            self._ungathered[root] = min(PATIENCE, self._ungathered.get(root, 0) + 1)
            self._write(hand, False, 0)
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            self.session.fault("by hand", error)

    def _write(self, hand: Hand, failed: bool, outputs: int) -> None:
        trace = hand.trace
        assert trace is not None
        self.session.local.hand = None
        site = trace.site
        trace.phases = [value for began, took in hand.phases for value in _since(began, took, trace.start)]
        if trace.times is not None:
            trace.times.phases = [[(span, 1) for span in spans] for spans in hand.spans]
        absent = {}
        if hand.phases[SCATTER][0] < 0:
            absent["scatter"] = "the script did not scatter in this turn of its loop"
            absent["inputs"] = "nothing was scattered: only what the replicas were given is known"
        if hand.phases[REPLICATE][0] < 0:
            absent["replicate"] = "the script did not replicate in this turn of its loop"
        if not outputs and not failed:
            absent["gather"] = "the script did not gather what the replicas returned"
            absent["outputs"] = absent["gather"]
        if absent != site.absent:
            site.absent = absent
            site.epoch = -1
        self.calls.write(trace, hand.flags | failed * FAILED, outputs, hand.ended)
        self.calls.let_go(trace.watch)

    def _site(self, modules: Any, hand: Hand, virtual: Any) -> Site:
        from dpmon.tracer.calls import Site

        modes = self.calls.modes
        first = modules[0]
        root = name_of(first)
        offered = range(len(modules)) if hand.devices is None else hand.devices
        count = max(len(offered), len(modules))
        if virtual is not None:
            devices = tuple(f"cpu:{i}" for i in range(count))
        elif len(offered) == count:
            devices = tuple(str(torch.device("cuda", d) if isinstance(d, int) else d) for d in offered)
        else:
            devices = tuple(f"cuda:{i}" for i in range(count))
        key = root, devices
        known = self._sites.get(key)
        if known is not None and known[0] == modes.serial:
            return known[1]
        if len(self._sites) >= MAX_SITES:
            self._sites.clear()
        site = Site.by_hand(root, modes.by_hand(root, devices, virtual))
        self._sites[key] = modes.serial, site
        return site


def _since(began: int, took: int, start: int) -> tuple[int, int]:
    return (began - start if began >= 0 else -1), took


def _root(site: Site) -> int:
    """The key of calls by hand in `Steps`. It is not the module's id, because the module also has calls of its own."""
    return hash((site.root, "by hand"))
