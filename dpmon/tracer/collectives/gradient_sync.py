"""Traces when the gradients of DistributedDataParallel were ready in a backward pass.

DistributedDataParallel averages gradients during the backward pass, bucket by bucket. When all gradients of a rank are
ready, the rank waits for the unfinished buckets, and so for the other ranks. The backward pass therefore takes equally
long on all ranks. The wait at its end differs: it is shortest on the slowest rank.

torch notes when each gradient was ready (`Reducer.get_backward_stats`: ns since the end of the forward). The tracer
reads these notes after the backward pass. It adds no hooks to the script's parameters, and no communication hook. torch
notes nothing in the first pass of a static graph, so that pass is not recorded.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import eq, itemgetter
from threading import get_ident
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.span_format import FLAGS_AT, LEAD_NS, MAX_LEAD, SITE_AT, WRAPPER_AT, Flag, Kind
from dpmon.tracer.core.hidden_frames import Function, wrap_rare_function
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.module_tables import class_name
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.device_timing import PhaseTimer
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

_engine: Any = torch.autograd.Variable._execution_engine

FULL_READ_INTERVAL = 16
"""Once in this many passes, all notes are used. Other passes use only the note of the last gradient of each bucket."""
FACTS_PASSES = (1, 2, 3, 11)
"""Numbers of the passes after which the facts of a wrapper are read. torch rebuilds the buckets in the forward after
the first sync pass."""
FACTS_INTERVAL_NS = 10_000_000_000
"""Interval between later reads of the facts."""
MAX_BUCKETS = 1024
_LEADS = struct.Struct("<4e")
_WORDS = struct.Struct("<Q")
NOT_TIMED_REASON = "torch has not timed an iteration yet"
ADDED_UP_REASON = "this version of torch adds it up over iterations"
_NEWER_TORCH_MEMBER = "num_buckets_reduced"
"""A member of torch's logging data in versions that do not sum the size of unused parameters over iterations."""
_MAX_RANKS = 4096
_WRAPPER_MASK = (1 << 24 - WRAPPER_AT) - 1


class GradientSync:
    """The tracer of one process's sync passes: backward passes in which ranks average gradients."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self._wrappers: IdentityTable[_TracedWrapper] = IdentityTable()
        """By DistributedDataParallel. The traced function refers to this table: never replace it."""
        self._pending_wrappers: list[_TracedWrapper] = []
        """Wrappers with a forward since their last backward pass. Never replace this list either."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._wrappers.clear()
        self._pending_wrappers.clear()
        self._phase_timer: PhaseTimer | None = None
        """Device times of the end of the current backward pass."""
        self._computed_ns = 0
        """When all gradients of that pass were computed (monotonic ns); 0 if unknown."""
        self._wrapper_numbers = count()
        self._pass_number = 0
        """Number of the last sync pass. The same pass has the same number on all ranks."""
        self._recorder.write_sync_spans = self._recorder.before_backward = None

    def install(self) -> None:
        """Trace the end of each forward of a DistributedDataParallel, where torch starts to note the gradients."""
        cls = torch.nn.parallel.DistributedDataParallel
        cls._post_forward = self._wrap_post_forward(cls._post_forward)  # type: ignore[method-assign]

    def _wrap_post_forward(self, original: Function) -> Function:
        """Return the traced form of `_post_forward`, which notes that the wrapper awaits a backward pass."""
        wrappers, pending, threads = self._wrappers, self._pending_wrappers, self._recorder.threads
        guard = self._session.guard("gradients of a backward pass", fatal=False)

        def on_forward_end(_: object, start_ns: int, module: Any, output: object) -> None:
            if torch.is_grad_enabled():
                wrapper = wrappers.get(module) or self._register_wrapper(module)
                wrapper.forward_end_ns, wrapper.averages_gradients = start_ns, module.require_backward_grad_sync
                thread = threads.get(get_ident())
                root = None if thread is None else thread.root
                wrapper.is_nested = root is None or root.module_ref() is not module
                if not wrapper.awaits_backward:
                    wrapper.awaits_backward = True
                    pending.append(wrapper)

        return wrap_rare_function(original, guard, on_forward_end)

    def _register_wrapper(self, module: Any) -> _TracedWrapper:
        """Remember a wrapper while it lives, and return its entry."""
        number, may_skip_gradients = next(self._wrapper_numbers), bool(module.find_unused_parameters)
        wrapper = self._wrappers.set(module, _TracedWrapper(weakref.ref(module), number, may_skip_gradients))
        self._recorder.write_sync_spans = self._on_backward_end
        self._recorder.before_backward = self._on_backward_start
        return wrapper

    # ---------------------------------------------------------------- the end of the computation

    def _on_backward_start(self, thread: ThreadState, args: Any) -> None:
        """Find out when all gradients of a pass are computed, if the notes of a single wrapper do not show it.

        The notes do not show it on GPUs, or if other models or wrappers take part in the pass. After the last gradient,
        autograd calls the callbacks that were queued during the pass, in order. With its last bucket,
        DistributedDataParallel queues a callback that waits for the other ranks. Our callback is queued before the
        first gradient, so it runs first.
        """
        pending, device_timer = self._pending_wrappers, self._recorder.device_timer
        self._phase_timer, self._computed_ns = None, 0
        if not any(wrapper.averages_gradients for wrapper in pending):
            return
        if device_timer is not None:
            device_timer.count_sync_passes = lambda: self._pass_number
        elif len(pending) == 1 and not pending[0].is_nested and self._recorder.recent_calls < 2:
            return
        node = next((node for tensor in args[0] if (node := tensor.grad_fn) is not None), None)
        if node is None:
            return
        guard = self._session.guard("gradients of a backward pass", fatal=False)

        def on_computed() -> None:
            with guard:
                self._computed_ns = monotonic_ns()
                if device_timer is not None:
                    self._phase_timer = device_timer.begin(thread)

        def queue_callback(_: object) -> None:
            with guard:
                handle.remove()
                _engine.queue_callback(on_computed)

        handle = node.register_prehook(queue_callback)

    # ---------------------------------------------------------------- the end of a backward pass

    def _on_backward_end(self, first_word: int, start_ns: int, end_ns: int) -> None:
        """Write the sync spans of a backward pass, before the span of the pass itself is written.

        `first_word`: thread and enclosing kind. `start_ns`, `end_ns`: start and end of the pass (monotonic ns).
        """
        try:
            if self._pending_wrappers:
                self._write_passes(first_word, start_ns, end_ns)
        except Exception as error:  # noqa: BLE001 - our fault must not reach the script
            self._session.count_error("gradients of a backward pass", error, fatal=False)

    def _write_passes(self, first_word: int, start_ns: int, end_ns: int) -> None:
        """Write the passes that have ended.

        With several wrappers, the wait of each wrapper begins when the gradients of all wrappers are ready. torch
        starts to note gradients somewhat later than the tracer takes the time, for example after syncing buffers.
        """
        synced = []
        last_ready_ns = max(self._computed_ns, start_ns)
        for wrapper in tuple(self._pending_wrappers):
            module = wrapper.module_ref()
            if module is None:
                self._pending_wrappers.remove(wrapper)
                continue
            ready_times: Sequence[int] = ()
            if wrapper.averages_gradients:
                notes, since_forward_ns = module.reducer.get_backward_stats(), end_ns - wrapper.forward_end_ns
                ready_times = wrapper.bucket_ready_times(notes, since_forward_ns)
            if ready_times:
                if not (wrapper.may_skip_gradients or wrapper.needs_several_passes):  # all notes are from this pass
                    wrapper.forward_end_ns = max(wrapper.forward_end_ns, start_ns - min(ready_times))
                synced.append((wrapper, module, ready_times))
                last_ready_ns = max(last_ready_ns, wrapper.forward_end_ns + max(ready_times))
        for wrapper, module, ready_times in synced:
            self._write(wrapper, ready_times, min(last_ready_ns, end_ns), first_word, end_ns)
            self._finish(wrapper, module, end_ns)
        if not synced:
            self._write_unsynced(first_word, end_ns)

    def _write_unsynced(self, first_word: int, end_ns: int) -> None:
        """Write one pass that averaged nothing, because its wrapper is under `no_sync`."""
        for wrapper in self._pending_wrappers:
            if not wrapper.averages_gradients:
                self._recorder.put(first_word | Kind.SYNC | Flag.UNSYNCED << FLAGS_AT, end_ns, 0, 0)
                self._finish(wrapper, wrapper.module_ref(), end_ns)
                break

    def _finish(self, wrapper: _TracedWrapper, module: object, end_ns: int) -> None:
        """Count the finished backward pass of a wrapper, and record the wrapper's facts when they are due."""
        wrapper.awaits_backward = False
        self._pending_wrappers.remove(wrapper)
        wrapper.pass_count += 1
        if module is not None and (end_ns >= wrapper.facts_due_ns or wrapper.pass_count in FACTS_PASSES):
            wrapper.facts_due_ns = end_ns + FACTS_INTERVAL_NS
            self._record_facts(wrapper, module)

    def _write(
        self, wrapper: _TracedWrapper, ready_times: Sequence[int], ready_ns: int, first_word: int, end_ns: int
    ) -> None:
        """Write a sync pass. `ready_ns`: when all gradients were ready; `ready_times`: by bucket (ns after forward)."""
        first_word |= (wrapper.number & _WRAPPER_MASK) << WRAPPER_AT + SITE_AT
        if len(wrapper.buckets) > 1:
            all_ready_ns = ready_ns - wrapper.forward_end_ns
            self._write_buckets(first_word, ready_ns, [max(all_ready_ns - ready, 0) for ready in ready_times])
        first_word |= Kind.SYNC | len(wrapper.buckets) << SITE_AT
        phase_timer, self._phase_timer = self._phase_timer, None
        if phase_timer is not None:
            # UNTIMED would read as UNSYNCED here. The span of the backward pass says that the step is not timed.
            first_word |= phase_timer.end() & ~(Flag.UNSYNCED << FLAGS_AT)
        self._pass_number += 1
        span_number = self._recorder.put(first_word, ready_ns, end_ns - ready_ns, self._pass_number & 0xFFFFFFFF)
        if phase_timer is not None:
            phase_timer.set_span_number(span_number)

    def _write_buckets(self, first_word: int, ready_ns: int, leads: Sequence[int]) -> None:
        """Write how long (ns) before `ready_ns` each bucket was ready."""
        scaled = [min(lead / LEAD_NS, MAX_LEAD) for lead in leads] + [0.0] * (-len(leads) % 4)
        for first in range(0, len(leads), 4):
            (packed,) = _WORDS.unpack(_LEADS.pack(*scaled[first : first + 4]))
            self._recorder.put(first_word | Kind.BUCKETS | first << SITE_AT, ready_ns, 0, packed)

    # ---------------------------------------------------------------- facts

    def _record_facts(self, wrapper: _TracedWrapper, module: Any) -> None:
        """Record the facts of a wrapper if they have changed."""
        data = module._get_ddp_logging_data()
        wrapper.read_buckets(data)
        facts = {**_wrapper_facts(wrapper, module, data), **_torch_comm_times(data)}
        if facts != wrapper.facts:
            wrapper.facts = facts
            self._session.record_event("ddp", call_reference="last", **facts)


@dataclass(eq=False)
class _TracedWrapper:
    """A DistributedDataParallel, and when the gradients of its last backward pass were ready."""

    module_ref: weakref.ref[Any]
    number: int
    may_skip_gradients: bool
    """Whether a sync pass may omit gradients."""
    forward_end_ns: int = 0
    """When its last forward ended (monotonic ns)."""
    averages_gradients: bool = True
    """Whether the backward pass of that forward averages the gradients: not under `no_sync`."""
    is_nested: bool = False
    """Whether that forward ran inside another model's forward."""
    awaits_backward: bool = False
    """Whether that backward pass is still to come."""
    needs_several_passes: bool = False
    """Whether several backward passes of one forward have computed the gradients."""
    pass_count: int = 0
    """Number of finished backward passes, with or without averaging."""
    facts_due_ns: int = 0
    """When to read the facts again (monotonic ns)."""
    buckets: Sequence[list[int]] = ()
    """Indices of the parameters of each bucket; empty until torch reports them."""
    last_notes: Sequence[int] = ()
    """torch's notes after the last sync pass."""
    pick_values: Callable[[list[int]], tuple[int, ...]] | None = None
    """Selects the note of each bucket's last gradient from all notes; None until all notes have been read."""
    last_values: tuple[int, ...] = ()
    """The selected notes after the last sync pass, the first one twice."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """The facts that were recorded last."""

    def read_buckets(self, data: Any) -> None:
        """Read the buckets from torch's logging data."""
        text = data.get("rebuilt_per_bucket_param_indices")
        buckets = [[int(index) for index in part.split()] for part in text.split(",")] if text else []
        if len(buckets) <= MAX_BUCKETS and buckets != self.buckets:
            self.buckets, self.pick_values = buckets, None

    def bucket_ready_times(self, notes: list[int], end_ns: int) -> Sequence[int]:
        """Return when the last gradient of each bucket was ready (ns after forward); one value if buckets are unknown.

        The result is empty if no gradient became ready in this backward pass, or not yet all that must be. `end_ns`:
        the end of the pass (ns after forward).
        """
        pick = self.pick_values
        if pick is not None:
            values = pick(notes)
            if self.pass_count % FULL_READ_INTERVAL and not any(map(eq, values, self.last_values)):
                self.last_notes, self.last_values = notes, values
                return values[:-1]
            if values == self.last_values and notes == self.last_notes:
                return ()
        return self._ready_from_notes(notes, end_ns)

    def _ready_from_notes(self, notes: list[int], end_ns: int) -> Sequence[int]:
        """Return the result of `bucket_ready_times` from all notes. Unused parameters keep their old notes."""
        old_notes = self.last_notes if len(self.last_notes) == len(notes) else [0] * len(notes)
        new_notes = [note if note != old else -1 for note, old in zip(notes, old_notes, strict=True)]
        if not self.may_skip_gradients and max(new_notes, default=-1) >= 0:
            # Some gradients became ready. A gradient without a note becomes ready in another backward pass of this
            # forward. Otherwise, a note that equals the old one is new by chance, unless its time is in the future.
            self.needs_several_passes = self.needs_several_passes or min(notes) <= 0
            if not self.needs_several_passes:
                new_notes = [note if note <= end_ns else -1 for note in notes]
        if (max if self.may_skip_gradients else min)(new_notes, default=-1) < 0:
            return ()  # no gradients yet, or only some: later backward passes of this forward complete them
        buckets = self.buckets
        if not buckets or max(map(max, buckets)) >= len(notes):
            buckets = [list(range(len(notes)))]
        last_indices = [max(bucket, key=new_notes.__getitem__) for bucket in buckets]
        self.pick_values = itemgetter(*last_indices, last_indices[0])  # with one index, it would return no tuple
        self.last_notes, self.last_values = notes, self.pick_values(notes)
        return [max(new_notes[index], 0) for index in last_indices]


def _wrapper_facts(wrapper: _TracedWrapper, module: Any, data: Any) -> dict[str, object]:
    """Return the facts of a wrapper from torch's logging data, by their names in records."""
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
        "bucket_bytes": _parse_integers(data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes")),
        "bucket_cap_bytes": data.get("bucket_cap_bytes"),
        "find_unused_parameters": bool(data.get("find_unused_parameters")),
        "unused_bytes": data.get("unused_parameter_size") if _NEWER_TORCH_MEMBER in data else None,
        "gradient_as_bucket_view": bool(data.get("gradient_as_bucket_view")),
        "static_graph": bool(data.get("static_graph")),
        "comm_hook": data.get("comm_hook"),
        "broadcast_buffers": buffers,
        "sync_batch_norm": bool(data.get("has_sync_bn")),
    }


def _torch_comm_times(data: Any) -> dict[str, object]:
    """Return torch's times of communication and of its overlap with computation, and reasons for absent values.

    torch samples these times; they are from the last sampled iteration.
    """
    absent = {}
    if _NEWER_TORCH_MEMBER not in data:
        absent["unused_bytes"] = ADDED_UP_REASON
    comm, overlap = data.get("backward_comm_time"), data.get("backward_compute_comm_overlap_time")
    if comm:
        times = {"iteration": data.get("iteration"), "comm_ms": comm / 1e6, "overlap_ms": (overlap or 0) / 1e6}
    else:
        times = {"iteration": None, "comm_ms": None, "overlap_ms": None}
        absent |= dict.fromkeys(times, NOT_TIMED_REASON)
    return {**times, "absent": absent}


def _parse_integers(text: object) -> list[int]:
    """Parse integers separated by commas; empty for anything else."""
    return [int(part) for part in text.split(",")] if isinstance(text, str) and text else []
