"""Traces how DistributedDataParallel averages the gradients: when the last gradient was ready in a backward pass.

DistributedDataParallel averages gradients during the backward pass, bucket by bucket. Once all gradients of a rank are
ready, it waits for the buckets under way, and so for the other ranks. The backward pass therefore takes equally long on
all ranks. The wait at its end does not: it is shortest on the rank that the others wait for.

torch notes when each gradient was ready (`Reducer.get_backward_stats`: ns since the end of the forward). The tracer
reads the notes after the backward pass. It adds no hook to the script's parameters, and no communication hook. Of the
first pass of a static graph torch notes nothing, so that pass is not recorded.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Sequence
from itertools import count
from operator import eq, itemgetter
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.spans import FLAGS_AT, LEAD_NS, MAX_LEAD, SITE_AT, WRAPPER_AT, Flag, Kind
from dpmon.tracer.frames import drop_frames, named_like
from dpmon.tracer.names import class_name
from dpmon.tracer.recorder import Recorder
from dpmon.tracer.session import Session
from dpmon.tracer.threads import Thread
from dpmon.tracer.timing import Mark

_engine: Any = torch.autograd.Variable._execution_engine

LOOK_EVERY = 16
"""Synchronised passes between two looks at all gradients. In between, each bucket's latest gradient stands for it."""
FACTS_AT = (1, 2, 3, 11)
"""Synchronised passes after which the facts of a wrapper may have changed; torch rebuilds the buckets in the second."""
FACTS_EVERY_NS = 10_000_000_000
"""Time between two later looks at the facts of a wrapper."""
MAX_BUCKETS = 1024
_LEADS = struct.Struct("<4e")
_WORDS = struct.Struct("<Q")
NO_NOTES = "this version of torch does not note when gradients are ready"
NOT_TIMED = "torch has not timed an iteration yet"
ADDED_UP = "this version of torch adds it up over iterations"
_MAX_RANKS = 4096
_MOST = (1 << 24 - WRAPPER_AT) - 1


class GradientSync:
    """The synchronised backward passes of one process."""

    def __init__(self, session: Session, recorder: Recorder) -> None:
        self._session = session
        self._recorder = recorder
        self._wrappers: dict[int, _Wrapper] = {}
        """By id of the DistributedDataParallel. The traced function holds this very object, and the next one."""
        self._waiting: list[_Wrapper] = []
        """Those with a forward since their last backward pass."""
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        self._wrappers.clear()
        self._waiting.clear()
        self._mark: Mark | None = None
        """Device times of the end of the backward pass under way."""
        self._computed = 0
        """When all of its gradients were computed (monotonic ns); 0 if that was not asked."""
        self._made = count()
        """Numbers of wrappers."""
        self._number = 0
        """Number of the last synchronised pass, the same on all ranks for the same pass."""

    def install(self) -> None:
        """Trace the end of every forward of a DistributedDataParallel, where torch begins to note the gradients."""
        kind = torch.nn.parallel.DistributedDataParallel
        original = getattr(kind, "_post_forward", None)
        if original is not None:
            kind._post_forward = self._traced(original)  # type: ignore[method-assign]
            self._recorder.on_gradients = self._backward_ended
            self._recorder.on_backward_begins = self._backward_begins

    def _traced(self, original: Callable[..., Any]) -> Callable[..., Any]:
        is_compiling, clock, is_grad_enabled = torch.compiler.is_dynamo_compiling, monotonic_ns, torch.is_grad_enabled
        wrappers, waiting, threads = self._wrappers, self._waiting, self._recorder.threads

        def _post_forward(module: Any, output: Any) -> Any:
            if is_compiling():
                return original(module, output)
            began = clock()
            try:
                result = original(module, output)
            except BaseException as error:
                drop_frames(error)
                module = output = None
                raise
            try:
                if is_grad_enabled():
                    one = wrappers.get(id(module)) or self._known(module)
                    one.base, one.averages = began, module.require_backward_grad_sync
                    me = threads.get(get_ident())
                    root = None if me is None else me.root
                    one.inner = root is None or root.module() is not module
                    if not one.waits:
                        one.waits = True
                        waiting.append(one)
            except Exception as error:  # noqa: BLE001 - our fault must not reach the script
                self._session.fault("gradients", error, fatal=False)
            return result

        return named_like(_post_forward, original)

    def _known(self, module: Any) -> _Wrapper:
        """Remember a wrapper for as long as it lives."""
        key, wrappers = id(module), self._wrappers
        one = wrappers[key] = _Wrapper(module, next(self._made), lambda _: wrappers.pop(key, None))
        return one

    # ---------------------------------------------------------------- the end of the computation

    def _backward_begins(self, me: Thread, args: Any) -> None:
        """Find out when all gradients of a pass are computed, where the wrapper's own do not tell.

        They do not on devices, and where other models or other wrappers take part in the pass. autograd calls back what
        was queued during a pass after the last gradient, in the order in which it was queued. DistributedDataParallel
        queues its own callback, which waits for the other ranks, with its last bucket. Ours is queued before the first
        gradient, so it comes first.
        """
        waiting, timing = self._waiting, self._recorder.timing
        self._mark, self._computed = None, 0
        if not any(one.averages for one in waiting):
            return
        if timing is not None:
            timing.synced = self._synced
        elif len(waiting) == 1 and not waiting[0].inner and self._recorder.calls < 2:
            return
        node = next((node for tensor in args[0] if (node := tensor.grad_fn) is not None), None)
        if node is None:
            return
        fault = self._session.fault

        def computed() -> None:
            try:
                self._computed = monotonic_ns()
                if timing is not None:
                    self._mark = timing.begin(me, Kind.SYNC)
            except Exception as error:  # noqa: BLE001 - our fault must not reach the script
                fault("gradients", error, fatal=False)

        def begins(_: Any) -> None:
            try:
                handle.remove()
                _engine.queue_callback(computed)
            except Exception as error:  # noqa: BLE001 - our fault must not reach the script
                fault("gradients", error, fatal=False)

        handle = node.register_prehook(begins)

    def _synced(self) -> int:
        return self._number

    # ---------------------------------------------------------------- the end of a backward pass

    def _backward_ended(self, head: int, began: int, ended: int) -> None:
        """Write the gradients of the wrappers in a backward pass, before its own span is written.

        `head`: thread and enclosing kind. `began`, `ended`: of the pass (monotonic ns).
        """
        try:
            if self._waiting:
                self._write_passes(head, began, ended)
        except Exception as error:  # noqa: BLE001 - our fault must not reach the script
            self._session.fault("gradients", error, fatal=False)

    def _write_passes(self, head: int, began: int, ended: int) -> None:
        """Write the passes that are over. Several wrappers wait together, after the last gradient of all of them."""
        found = []
        last = max(self._computed, began)
        for one in tuple(self._waiting):
            module = one.module()
            if module is None:
                self._waiting.remove(one)
            elif not one.notes:
                self._is_over(one, module, ended)
            elif one.averages and (ready := one.ready(_notes(module))):
                found.append((one, module, ready))
                last = max(last, one.base + max(ready))
        for one, module, ready in found:
            self._write(one, ready, min(last, ended), head, ended)
            self._is_over(one, module, ended)
        if not found:
            self._write_unsynced(head, ended)

    def _write_unsynced(self, head: int, ended: int) -> None:
        """Write a pass that averaged nothing, of one of the wrappers under `no_sync`."""
        for one in self._waiting:
            if not one.averages:
                self._recorder.put(head | Kind.SYNC | Flag.SKIPPED << FLAGS_AT, ended, 0, 0)
                self._is_over(one, one.module(), ended)
                break

    def _is_over(self, one: _Wrapper, module: Any, ended: int) -> None:
        """The pass of a wrapper's forward is over."""
        one.waits = False
        self._waiting.remove(one)
        one.passes = passes = one.passes + 1
        if module is not None and (ended >= one.due or passes in FACTS_AT):
            one.due = ended + FACTS_EVERY_NS
            self._tell(one, module)

    def _write(self, one: _Wrapper, ready: Sequence[int], at: int, head: int, ended: int) -> None:
        """Write a synchronised pass. All gradients were ready at `at`; `ready`: each bucket (ns after the forward)."""
        head |= (one.number & _MOST) << WRAPPER_AT + SITE_AT
        if one.several:
            self._write_buckets(head, at, [max(at - one.base - each, 0) for each in ready])
        first = head | Kind.SYNC | len(one.buckets) << SITE_AT
        mark, self._mark = self._mark, None
        if mark is not None:
            first |= mark.end()
        self._number = number = self._number + 1
        written = self._recorder.put(first, at, ended - at, number & 0xFFFFFFFF)
        if mark is not None:
            mark.written(written)

    def _write_buckets(self, head: int, at: int, leads: Sequence[int]) -> None:
        """Write how long (ns) before `at` each bucket was ready."""
        scaled = [min(lead / LEAD_NS, MAX_LEAD) for lead in leads] + [0.0] * (-len(leads) % 4)
        for first in range(0, len(leads), 4):
            (packed,) = _WORDS.unpack(_LEADS.pack(*scaled[first : first + 4]))
            self._recorder.put(head | Kind.BUCKETS | first << SITE_AT, at, 0, packed)

    # ---------------------------------------------------------------- facts

    def _tell(self, one: _Wrapper, module: Any) -> None:
        """Record the facts of a wrapper if they have changed."""
        data = module._get_ddp_logging_data()
        one.divide(data)
        facts = {**_facts(one, module, data), **_times(one, data)}
        if facts != one.facts:
            one.facts = facts
            self._session.event("ddp", fill="last", **facts)


class _Wrapper:
    """A DistributedDataParallel, and when the gradients of its last backward pass were ready."""

    __slots__ = (
        *("averages", "base", "buckets", "due", "facts", "inner", "latest", "module", "notes", "number", "passes"),
        *("partly", "pick", "seen", "several", "values", "waits"),
    )

    def __init__(self, module: Any, number: int, let_go: Callable[[Any], object]) -> None:
        self.module = weakref.ref(module, let_go)
        self.number = number
        self.base = 0
        """When its last forward ended (monotonic ns)."""
        self.averages = True
        """Whether the backward pass of that forward averages the gradients: not under `no_sync`."""
        self.inner = False
        """Whether that forward was a part of another model's."""
        self.waits = False
        """Whether that backward pass is still to come."""
        self.partly = bool(module.find_unused_parameters)
        """Whether a synchronised pass may leave gradients out."""
        self.notes = hasattr(module.reducer, "get_backward_stats")
        self.passes = 0
        """Number of synchronised passes."""
        self.due = 0
        """When to look at the facts again (monotonic ns)."""
        self.buckets: list[list[int]] = []
        """Indices of the parameters of each bucket; empty until torch has said."""
        self.seen: list[int] = []
        """torch's notes after the last synchronised pass."""
        self.latest: list[int] = []
        """For each bucket, the index of the gradient that was ready last."""
        self.several = False
        """Whether there are several buckets."""
        self.pick: Callable[[list[int]], tuple[int, ...]] | None = None
        self.values: tuple[int, ...] = ()
        """The notes of `latest` after the last synchronised pass; twice the same of one bucket."""
        self.facts: dict[str, Any] = {}
        """As they were recorded last."""

    def divide(self, data: Any) -> None:
        """Take the buckets from torch's facts."""
        text = data.get("rebuilt_per_bucket_param_indices")
        found = [[int(index) for index in part.split()] for part in text.split(",")] if text else []
        if len(found) <= MAX_BUCKETS and found != self.buckets:
            self.buckets, self.several, self.pick = found, len(found) > 1, None

    def ready(self, notes: list[int]) -> Sequence[int]:
        """For each bucket, when its last gradient was ready (ns after the forward); one bucket if they are unknown.

        Empty if no gradient has become ready since the last time.
        """
        pick = self.pick
        if pick is not None:
            values = pick(notes)
            if self.passes % LOOK_EVERY and not any(map(eq, values, self.values)):
                self.seen, self.values = notes, values
                return values if self.several else values[:1]
            if values == self.values and notes == self.seen:
                return ()
        return self._look(notes)

    def _look(self, notes: list[int]) -> Sequence[int]:
        """As `ready`, from the notes of all gradients. A gradient of an unused parameter keeps its old note."""
        seen = self.seen if len(self.seen) == len(notes) else [0] * len(notes)
        fresh = [note if note != old else -1 for note, old in zip(notes, seen, strict=True)]
        if (max if self.partly else min)(fresh, default=-1) < 0:
            return ()  # nothing yet, or a part: further passes of this forward complete it
        buckets = self.buckets
        if not buckets or max(map(max, buckets)) >= len(notes):
            buckets = [list(range(len(notes)))]
        self.latest = [max(bucket, key=fresh.__getitem__) for bucket in buckets]
        one = self.latest[:1] if len(self.latest) == 1 else []  # it returns a tuple of two at least
        self.pick = itemgetter(*self.latest, *one)
        self.seen, self.values = notes, self.pick(notes)
        return [max(fresh[index], 0) for index in self.latest]


def _notes(module: Any) -> list[int]:
    """torch's notes of one wrapper. Earlier versions gave a list for each device."""
    notes: list[Any] = module.reducer.get_backward_stats()
    return notes[0] if notes and isinstance(notes[0], list) else notes


def _facts(one: _Wrapper, module: Any, data: Any) -> dict[str, Any]:
    group = module.process_group
    ranks = torch.distributed.get_process_group_ranks(group)
    buffers = bool(data.get("broadcast_buffers")) and any(True for _ in module.module.buffers())
    return {
        "wrapper": one.number,
        "root": class_name(module.module),
        "backend": data.get("backend_name"),
        "group_size": len(ranks),
        "group": ranks if len(ranks) <= _MAX_RANKS else None,
        "parameters": data.get("num_parameter_tensors"),
        "parameter_bytes": data.get("total_parameter_size_bytes"),
        "bucket_bytes": _whole(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes")),
        "bucket_cap_bytes": data.get("bucket_cap_bytes"),
        "find_unused_parameters": bool(data.get("find_unused_parameters")),
        "unused_bytes": None if _is_sum(data) else data.get("unused_parameter_size"),
        "gradient_as_bucket_view": bool(data.get("gradient_as_bucket_view")),
        "static_graph": bool(data.get("static_graph")),
        "comm_hook": data.get("comm_hook"),
        "broadcast_buffers": buffers,
        "sync_batch_norm": bool(data.get("has_sync_bn")),
    }


def _is_sum(data: Any) -> bool:
    """Whether torch's size of unused parameters is of several iterations.

    torch 2.4 sets it to 0 only in an iteration that uses all parameters (Logger::set_runtime_stats_and_log). Versions
    that set it anew each time also count reduced buckets.
    """
    newer = "num_buckets_reduced" in data
    return not newer and bool(data.get("unused_parameter_size")) and (data.get("iteration") or 0) > 1


def _times(one: _Wrapper, data: Any) -> dict[str, Any]:
    """Times of the last pass that torch sampled, and why times are absent.

    torch times the communication, and its overlap with the computation.
    """
    absent = {} if one.notes else {"sync": NO_NOTES}
    if _is_sum(data):
        absent["unused_bytes"] = ADDED_UP
    comm, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    if comm:
        times = {"iteration": data.get("iteration"), "comm_ms": comm / 1e6, "overlap_ms": (overlap or 0) / 1e6}
    else:
        times = {"iteration": None, "comm_ms": None, "overlap_ms": None}
        absent |= dict.fromkeys(times, NOT_TIMED)
    return {**times, "absent": absent}


def _whole(text: Any) -> list[int]:
    return [int(part) for part in text.split(",")] if isinstance(text, str) and text else []
