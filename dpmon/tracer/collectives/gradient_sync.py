"""Traces when the gradients of DistributedDataParallel were ready in a backward pass.

DistributedDataParallel averages gradients during the backward pass, bucket by bucket. When all gradients of a rank are
ready, the rank waits for the unfinished buckets, and so for the other ranks. The backward pass therefore takes equally
long on all ranks. The wait at its end differs: it is shortest on the slowest rank.

torch notes when each gradient was ready (`Reducer.get_backward_stats`: ns since the end of the forward). The tracer
reads these notes after the backward pass. It adds no hooks to the script's parameters and no communication hook. torch
notes nothing in the first pass of a static graph, so that pass is not recorded.
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

from dpmon.record.span_format import FLAGS_AT, LEAD_NS, MAX_LEAD, SITE_AT, WRAPPER_AT, Flag, Kind
from dpmon.tracer.core.hidden_frames import Function, wrap_rare_function
from dpmon.tracer.core.module_tables import class_name
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import PhaseTimer
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

_engine: Any = torch.autograd.Variable._execution_engine

LOOK_EVERY = 16
"""All notes are used once in this many passes. Other passes use only the note of the last gradient of each bucket."""
FACTS_AT = (1, 2, 3, 11)
"""Numbers of the passes after which the facts of a wrapper are read. torch rebuilds the buckets in the forward after
the first synchronized pass."""
FACTS_EVERY_NS = 10_000_000_000
"""Interval between later reads of the facts."""
MAX_BUCKETS = 1024
_LEADS = struct.Struct("<4e")
_WORDS = struct.Struct("<Q")
NOT_TIMED = "torch has not timed an iteration yet"
ADDED_UP = "this version of torch adds it up over iterations"
_NEWER = "num_buckets_reduced"
"""A member of torch's logging data in versions that do not add up the size of unused parameters (2.4 does)."""
_MAX_RANKS = 4096
_WRAPPER_MASK = (1 << 24 - WRAPPER_AT) - 1


class GradientSync:
    """Traces the synchronized backward passes of one process."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self._wrappers: dict[int, _TracedWrapper] = {}
        """By id of the DistributedDataParallel. The traced function refers to this dict and to `_waiting`: never
        replace them."""
        self._waiting: list[_TracedWrapper] = []
        """Wrappers with a forward since their last backward pass."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._wrappers.clear()
        self._waiting.clear()
        self._mark: PhaseTimer | None = None
        """Device times of the end of the current backward pass."""
        self._computed = 0
        """When all gradients of that pass were computed (monotonic ns); 0 if unknown."""
        self._made = count()
        """Numbers of wrappers."""
        self._number = 0
        """Number of the last synchronized pass, the same on all ranks for the same pass."""
        self._recorder.on_gradients = self._recorder.on_backward_begins = None

    def install(self) -> None:
        """Trace the end of each forward of a DistributedDataParallel, where torch starts to note the gradients."""
        kind = torch.nn.parallel.DistributedDataParallel
        kind._post_forward = self._traced(kind._post_forward)  # type: ignore[method-assign]

    def _traced(self, original: Function) -> Function:
        wrappers, waiting, threads = self._wrappers, self._waiting, self._recorder.threads

        def forward_ended(_: object, began: int, module: Any, output: object) -> None:
            if torch.is_grad_enabled():
                wrapper = wrappers.get(id(module)) or self._register_wrapper(module)
                wrapper.base, wrapper.averages = began, module.require_backward_grad_sync
                me = threads.get(get_ident())
                root = None if me is None else me.root
                wrapper.inner = root is None or root.module() is not module
                if not wrapper.waits:
                    wrapper.waits = True
                    waiting.append(wrapper)

        return wrap_rare_function(
            original, self._session.guard("gradients of a backward pass", fatal=False), forward_ended
        )

    def _register_wrapper(self, module: object) -> _TracedWrapper:
        """Remember a wrapper while it lives."""
        key, wrappers = id(module), self._wrappers
        wrapper = wrappers[key] = _TracedWrapper(module, next(self._made), lambda _: wrappers.pop(key, None))
        self._recorder.on_gradients = self._backward_ended
        self._recorder.on_backward_begins = self._backward_begins
        return wrapper

    # ---------------------------------------------------------------- the end of the computation

    def _backward_begins(self, me: ThreadState, args: Any) -> None:
        """Find out when all gradients of a pass are computed, if the notes of a single wrapper do not show it.

        The notes do not show it on GPUs, or if other models or wrappers take part in the pass. After the last gradient,
        autograd calls the callbacks that were queued during the pass, in order. With its last bucket,
        DistributedDataParallel queues a callback that waits for the other ranks. Our callback is queued before the
        first gradient, so it runs first.
        """
        waiting, timing = self._waiting, self._recorder.timing
        self._mark, self._computed = None, 0
        if not any(wrapper.averages for wrapper in waiting):
            return
        if timing is not None:
            timing.synced = lambda: self._number
        elif len(waiting) == 1 and not waiting[0].inner and self._recorder.calls < 2:
            return
        node = next((node for tensor in args[0] if (node := tensor.grad_fn) is not None), None)
        if node is None:
            return
        guard = self._session.guard("gradients of a backward pass", fatal=False)

        def computed() -> None:
            with guard:
                self._computed = monotonic_ns()
                if timing is not None:
                    self._mark = timing.begin(me, Kind.SYNC)

        def begins(_: object) -> None:
            with guard:
                handle.remove()
                _engine.queue_callback(computed)

        handle = node.register_prehook(begins)

    # ---------------------------------------------------------------- the end of a backward pass

    def _backward_ended(self, head: int, began: int, ended: int) -> None:
        """Write the synchronization spans of a backward pass, before the span of the pass itself is written.

        `head`: thread and enclosing kind. `began`, `ended`: start and end of the pass (monotonic ns).
        """
        try:
            if self._waiting:
                self._write_passes(head, began, ended)
        except Exception as error:  # noqa: BLE001 - our fault must not reach the script
            self._session.count_error("gradients of a backward pass", error, fatal=False)

    def _write_passes(self, head: int, began: int, ended: int) -> None:
        """Write the passes that are over.

        With several wrappers, the wait of each begins when the gradients of all of them are ready. torch starts to note
        gradients somewhat later than the tracer takes the time: after it has synchronized buffers, for example.
        """
        found = []
        last = max(self._computed, began)
        for wrapper in tuple(self._waiting):
            module, end = wrapper.module(), ended - wrapper.base
            if module is None:
                self._waiting.remove(wrapper)
            elif wrapper.averages and (ready := wrapper.bucket_ready_times(module.reducer.get_backward_stats(), end)):
                if not (wrapper.partly or wrapper.in_parts):  # all notes are from this pass
                    wrapper.base = max(wrapper.base, began - min(ready))
                found.append((wrapper, module, ready))
                last = max(last, wrapper.base + max(ready))
        for wrapper, module, ready in found:
            self._write(wrapper, ready, min(last, ended), head, ended)
            self._finish(wrapper, module, ended)
        if not found:
            self._write_unsynced(head, ended)

    def _write_unsynced(self, head: int, ended: int) -> None:
        """Write one pass that averaged nothing, because its wrapper is under `no_sync`."""
        for wrapper in self._waiting:
            if not wrapper.averages:
                self._recorder.put(head | Kind.SYNC | Flag.UNSYNCED << FLAGS_AT, ended, 0, 0)
                self._finish(wrapper, wrapper.module(), ended)
                break

    def _finish(self, wrapper: _TracedWrapper, module: object, ended: int) -> None:
        """Count the finished backward pass of a wrapper, and record the wrapper's facts when they are due."""
        wrapper.waits = False
        self._waiting.remove(wrapper)
        wrapper.passes = passes = wrapper.passes + 1
        if module is not None and (ended >= wrapper.due or passes in FACTS_AT):
            wrapper.due = ended + FACTS_EVERY_NS
            self._record_facts(wrapper, module)

    def _write(self, wrapper: _TracedWrapper, ready: Sequence[int], at: int, head: int, ended: int) -> None:
        """Write a synchronized pass. `at`: when all gradients were ready. `ready`: by bucket (ns after forward)."""
        head |= (wrapper.number & _WRAPPER_MASK) << WRAPPER_AT + SITE_AT
        if wrapper.several:
            self._write_buckets(head, at, [max(at - wrapper.base - each, 0) for each in ready])
        first = head | Kind.SYNC | len(wrapper.buckets) << SITE_AT
        mark, self._mark = self._mark, None
        if mark is not None:
            # UNTIMED would read as UNSYNCED here. The span of the backward pass says that the step is not timed.
            first |= mark.end() & ~(Flag.UNSYNCED << FLAGS_AT)
        self._number = number = self._number + 1
        written = self._recorder.put(first, at, ended - at, number & 0xFFFFFFFF)
        if mark is not None:
            mark.set_span_number(written)

    def _write_buckets(self, head: int, at: int, leads: Sequence[int]) -> None:
        """Write how long (ns) before `at` each bucket was ready."""
        scaled = [min(lead / LEAD_NS, MAX_LEAD) for lead in leads] + [0.0] * (-len(leads) % 4)
        for first in range(0, len(leads), 4):
            (packed,) = _WORDS.unpack(_LEADS.pack(*scaled[first : first + 4]))
            self._recorder.put(head | Kind.BUCKETS | first << SITE_AT, at, 0, packed)

    # ---------------------------------------------------------------- facts

    def _record_facts(self, wrapper: _TracedWrapper, module: Any) -> None:
        """Record the facts of a wrapper if they have changed."""
        data = module._get_ddp_logging_data()
        wrapper.read_buckets(data)
        facts = {**_wrapper_facts(wrapper, module, data), **_torch_comm_times(data)}
        if facts != wrapper.facts:
            wrapper.facts = facts
            self._session.record_event("ddp", fill="last", **facts)


class _TracedWrapper:
    """A DistributedDataParallel, and when the gradients of its last backward pass were ready."""

    def __init__(self, module: Any, number: int, let_go: Callable[[object], object]) -> None:
        self.module = weakref.ref(module, let_go)
        self.number = number
        self.base = 0
        """When its last forward ended (monotonic ns)."""
        self.averages = True
        """Whether the backward pass of that forward averages the gradients: not under `no_sync`."""
        self.inner = False
        """Whether that forward ran inside another model's forward."""
        self.waits = False
        """Whether that backward pass is still to come."""
        self.in_parts = False
        """Whether several backward passes of one forward have computed the gradients."""
        self.partly = bool(module.find_unused_parameters)
        """Whether a synchronized pass may leave gradients out."""
        self.passes = 0
        """Number of finished backward passes, synchronized or not."""
        self.due = 0
        """When to read the facts again (monotonic ns)."""
        self.buckets: list[list[int]] = []
        """Indices of the parameters of each bucket; empty until torch reports them."""
        self.seen: list[int] = []
        """torch's notes after the last synchronized pass."""
        self.latest: list[int] = []
        """For each bucket, the index of the gradient that was ready last."""
        self.several = False
        """Whether there are several buckets."""
        self.pick: Callable[[list[int]], tuple[int, ...]] | None = None
        """Selects the notes of `latest` from all notes; None until all notes have been read."""
        self.values: tuple[int, ...] = ()
        """The notes of `latest` after the last synchronized pass; with a single bucket, its note twice."""
        self.facts: dict[str, object] = {}
        """The facts that were recorded last."""

    def read_buckets(self, data: Any) -> None:
        """Read the buckets from torch's logging data."""
        text = data.get("rebuilt_per_bucket_param_indices")
        found = [[int(index) for index in part.split()] for part in text.split(",")] if text else []
        if len(found) <= MAX_BUCKETS and found != self.buckets:
            self.buckets, self.several, self.pick = found, len(found) > 1, None

    def bucket_ready_times(self, notes: list[int], end: int) -> Sequence[int]:
        """Return when the last gradient of each bucket was ready (ns after forward); one value if buckets are unknown.

        The result is empty if no gradient became ready in this backward pass, or not yet all that must. `end`: its end
        (ns after forward).
        """
        pick = self.pick
        if pick is not None:
            values = pick(notes)
            if self.passes % LOOK_EVERY and not any(map(eq, values, self.values)):
                self.seen, self.values = notes, values
                return values if self.several else values[:1]
            if values == self.values and notes == self.seen:
                return ()
        return self._ready_from_notes(notes, end)

    def _ready_from_notes(self, notes: list[int], end: int) -> Sequence[int]:
        """Return the result of `ready` from the notes of all gradients. Unused parameters keep their old notes."""
        seen = self.seen if len(self.seen) == len(notes) else [0] * len(notes)
        fresh = [note if note != old else -1 for note, old in zip(notes, seen, strict=True)]
        if not self.partly and max(fresh, default=-1) >= 0:
            # Some gradients became ready. A gradient without a note becomes ready in another backward pass of this
            # forward. Else a note that equals the old one is new by chance, unless its time is still to come.
            self.in_parts = self.in_parts or min(notes) <= 0
            if not self.in_parts:
                fresh = [note if note <= end else -1 for note in notes]
        if (max if self.partly else min)(fresh, default=-1) < 0:
            return ()  # no gradients yet, or only some: later backward passes of this forward complete them
        buckets = self.buckets
        if not buckets or max(map(max, buckets)) >= len(notes):
            buckets = [list(range(len(notes)))]
        self.latest = [max(bucket, key=fresh.__getitem__) for bucket in buckets]
        repeated = self.latest[:1] if len(self.latest) == 1 else []  # itemgetter of one index returns no tuple
        self.pick = itemgetter(*self.latest, *repeated)
        self.seen, self.values = notes, self.pick(notes)
        return [max(fresh[index], 0) for index in self.latest]


def _wrapper_facts(wrapper: _TracedWrapper, module: Any, data: Any) -> dict[str, object]:
    group = module.process_group
    ranks = torch.distributed.get_process_group_ranks(group)
    buffers = bool(data.get("broadcast_buffers")) and any(True for _ in module.module.buffers())
    return {
        "wrapper": wrapper.number,
        "root": class_name(module.module),
        "backend": data.get("backend_name"),
        "group_size": len(ranks),
        "group": ranks if len(ranks) <= _MAX_RANKS else None,
        "parameters": data.get("num_parameter_tensors"),
        "parameter_bytes": data.get("total_parameter_size_bytes"),
        "bucket_bytes": _whole(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes")),
        "bucket_cap_bytes": data.get("bucket_cap_bytes"),
        "find_unused_parameters": bool(data.get("find_unused_parameters")),
        "unused_bytes": data.get("unused_parameter_size") if _NEWER in data else None,
        "gradient_as_bucket_view": bool(data.get("gradient_as_bucket_view")),
        "static_graph": bool(data.get("static_graph")),
        "comm_hook": data.get("comm_hook"),
        "broadcast_buffers": buffers,
        "sync_batch_norm": bool(data.get("has_sync_bn")),
    }


def _torch_comm_times(data: Any) -> dict[str, object]:
    """Return torch's times of the communication and its overlap with the computation, and reasons for absent values.

    torch samples these times; they are from the last sampled iteration.
    """
    absent = {}
    if _NEWER not in data:
        absent["unused_bytes"] = ADDED_UP
    comm, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    if comm:
        times = {"iteration": data.get("iteration"), "comm_ms": comm / 1e6, "overlap_ms": (overlap or 0) / 1e6}
    else:
        times = {"iteration": None, "comm_ms": None, "overlap_ms": None}
        absent |= dict.fromkeys(times, NOT_TIMED)
    return {**times, "absent": absent}


def _whole(text: object) -> list[int]:
    return [int(part) for part in text.split(",")] if isinstance(text, str) and text else []
