"""The state of one GPU: NVML's last answers, their maximum ages, and the threads that query it.

Usually one thread queries a GPU. If its call does not return, a second thread takes over and runs the other queries. A
sample can be built at any time, even while all threads wait for an answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from dpmon.gpu.device_record import NOT_QUERIED, MissingValue, RunContext, bare_uuid, build_device_record
from dpmon.gpu.nvml import GPU_IS_LOST, Nvml, NvmlCallError
from dpmon.gpu.nvml_queries import MAX_CALLS_PER_S, NEEDS_TWO_READINGS, QUERIES, NvmlQuery

RETRY_S = 5.0
"""Time until dpmon retries a lost GPU, or a library that did not start."""
MAX_SILENCE_S = 3.0
"""Maximum wait for an answer during which the last values still count as current."""
FIRST_ROUND_S = 0.5
"""For this time after a GPU is found, all queries run without a limit, so that its first sample has the answers."""
_MAX_AGE_PERIODS = 4
"""An answer expires at the age of this many periods of its query (at least MAX_SILENCE_S) plus RETRY_S. It may expire
earlier while NVML gives no answer at all: see MAX_SILENCE_S."""


class _QueryReply(NamedTuple):
    """The last answer to a query: a value or `MissingValue` for each field, and when it was read (s; None: not yet)."""

    values: tuple[Any, ...]
    time_s: float | None


@dataclass(slots=True)
class _QueryState:
    """The state of one query: its last answer, when it is due, and which of its getters is in use."""

    reply: _QueryReply
    due_s: float
    getter_index: int = 0
    memo: dict[str, Any] = field(default_factory=dict)


class GpuState:
    """The known values of one GPU. Only its newest poller may call `attach_handle` and `mark_lost`."""

    def __init__(self, index: int, queries: tuple[NvmlQuery, ...] = QUERIES) -> None:
        self.index = index
        self.handle: Any = None
        self.lost_reason = NOT_QUERIED.reason
        self.retry_at_s = 0.0
        self.pollers: tuple[GpuPoller, ...] = ()
        """The threads that query it. The last one is the newest; it has replaced the earlier ones."""
        self.is_silent = False
        """Whether a call to NVML about this GPU does not return."""
        self._queries = queries
        self.query_states: dict[NvmlQuery, _QueryState] = {}

    def attach_handle(self, handle: Any, now_s: float) -> None:
        """Use a new handle. Answers, events and buffers of an earlier one become void."""
        self.query_states = {
            query: _QueryState(_QueryReply((NOT_QUERIED,) * len(query.fields), None), now_s) for query in self._queries
        }
        self.handle, self.lost_reason = handle, ""

    def mark_lost(self, reason: str, now_s: float) -> None:
        """Mark the GPU as lost. A later round tries to find it again. Its UUID and name stay known."""
        self.handle, self.lost_reason = None, reason
        self.retry_at_s = now_s + RETRY_S

    def due_queries(self, now_s: float) -> list[NvmlQuery]:
        """Return the due queries, the most overdue first. Delays count in periods, so that rare queries wait longer."""
        running = {poller.current_query for poller in self.pollers}
        due = [
            query
            for query, state in self.query_states.items()
            if state.due_s <= now_s
            and state.getter_index < len(query.getters)
            and query not in running
            and self._is_needed(query)
        ]
        return sorted(due, key=lambda query: (self.query_states[query].due_s - now_s) / query.period_s)

    def _is_needed(self, query: NvmlQuery) -> bool:
        replaced = query.replaces
        if replaced is None:
            return True
        field_name, *_ = query.fields
        value = self.query_states[replaced].reply.values[replaced.fields.index(field_name)]
        return isinstance(value, MissingValue) and value not in (NOT_QUERIED, NEEDS_TWO_READINGS)

    # ---------------------------------------------------------------- samples

    @property
    def uuid(self) -> str | None:
        """The UUID as NVML writes it; None until it is known."""
        uuid = self._last_value("uuid")
        return uuid if isinstance(uuid, str) else None

    def uuids(self) -> frozenset[str]:
        """Return the bare UUIDs of the GPU and its MIG instances."""
        instances = self._last_value("mig_devices")
        uuids = [self.uuid]
        if isinstance(instances, list):
            uuids += [instance["uuid"] for instance in instances]
        return frozenset(bare_uuid(uuid) for uuid in uuids if uuid)

    def _last_value(self, name: str) -> Any:
        """Return the last answer for a field, however old."""
        for query, query_state in self.query_states.items():
            if name in query.fields:
                return query_state.reply.values[query.fields.index(name)]
        return None

    def sample(self, run_context: RunContext, now_s: float) -> dict[str, Any]:
        """Return the fields of the `device` record except `t_s`, from the values known now."""
        values_by_name: dict[str, Any] = {}
        for query, state in self.query_states.items():
            values, time_s = state.reply
            stale_reason = self._stale_reason(query, time_s, now_s)
            for name, value in zip(query.fields, values, strict=True):
                if stale_reason and (value is NOT_QUERIED or not isinstance(value, MissingValue)):
                    value = stale_reason
                earlier = values_by_name.get(name, NOT_QUERIED)  # from the query that this one replaces
                if earlier is NOT_QUERIED or (isinstance(earlier, MissingValue) and value is not NOT_QUERIED):
                    values_by_name[name] = value
        return build_device_record(self.index, values_by_name, run_context, self.uuids(), self.lost_reason)

    def _stale_reason(self, query: NvmlQuery, time_s: float | None, now_s: float) -> MissingValue | None:
        """Return why an answer read at `time_s` is too old to be shown, or has not come; None if it is current."""
        age_s = math.inf if time_s is None else now_s - time_s
        for poller in self.pollers:
            unanswered_s = poller.unanswered_s(now_s)
            is_waiting = poller is self.pollers[-1] and age_s >= max(MAX_SILENCE_S, query.period_s)
            if unanswered_s >= MAX_SILENCE_S and (poller.current_query is query or is_waiting):
                return MissingValue(f"NVML has not answered for {unanswered_s:.0f} s")
        if time_s is not None and age_s > max(MAX_SILENCE_S, _MAX_AGE_PERIODS * query.period_s) + RETRY_S:
            return MissingValue(f"NVML answers slowly: the last answer is {age_s:.0f} s old")
        return None


class GpuPoller:
    """A poller of NVML for one GPU, for use by one thread."""

    def __init__(self, gpu: GpuState, nvml: Nvml, clock: Callable[[], float] = time.monotonic) -> None:
        self.current_query: NvmlQuery | None = None
        """The query whose answer the thread waits for; None while it does not wait."""
        self.has_ended = False
        self._gpu = gpu
        self._nvml = nvml
        self._clock = clock
        self._call_start_s: float | None = None
        gpu.pollers = (*gpu.pollers, self)

    @property
    def is_current(self) -> bool:
        """Whether no newer thread has replaced this one."""
        return self._gpu.pollers[-1] is self

    def unanswered_s(self, now_s: float) -> float:
        """Return how long the thread has waited for the current answer (s); 0 while not waiting."""
        start_s = self._call_start_s
        return 0.0 if start_s is None else now_s - start_s

    def poll_due_queries(self) -> None:
        """Run the most overdue queries, with at most MAX_CALLS_PER_S calls.

        For a GPU just found, run all queries within FIRST_ROUND_S. Raises NvmlCallError only if the GPU is lost.
        """
        start_s, calls_left = self._clock(), MAX_CALLS_PER_S
        is_first_round = self._gpu.handle is None
        if is_first_round:
            calls_left -= 1
            handle = self._call_nvml(lambda: self._nvml.module.nvmlDeviceGetHandleByIndex(self._gpu.index))
            if not handle:  # some drivers crash with a null handle
                raise NvmlCallError("NVML gave no handle for this GPU", GPU_IS_LOST)
            if self.is_current:
                self._gpu.attach_handle(handle, start_s)
        for query in self._gpu.due_queries(start_s):
            if not self.is_current:
                return
            if query.max_calls <= calls_left or (is_first_round and self._clock() - start_s < FIRST_ROUND_S):
                calls_left -= query.max_calls
                self._run_query(query)

    def _run_query(self, query: NvmlQuery) -> None:
        handle, query_state = self._gpu.handle, self._gpu.query_states[query]
        query_state.due_s = self._clock() + query.period_s - 0.1  # tolerate a round that begins slightly early
        values: tuple[Any, ...] = ()
        while query_state.getter_index < len(query.getters):
            read_fields = query.getters[query_state.getter_index]
            try:
                values = self._call_nvml(partial(read_fields, self._nvml.module, handle, query_state.memo), query)
                break
            except NvmlCallError as failure:
                if failure.is_gpu_gone:
                    raise
                values = (MissingValue(failure.reason),) * len(query.fields)
                if not failure.is_permanent:
                    break
                query_state.getter_index += 1
        query_state.reply = _QueryReply(values, self._clock())

    def _call_nvml(self, read: Callable[[], Any], query: NvmlQuery | None = None) -> Any:
        self.current_query, self._call_start_s = query, self._clock()
        try:
            return self._nvml.run(read)
        finally:
            self.current_query = self._call_start_s = None
