"""One GPU: its queries, which one thread runs, and NVML's last answers, of which any thread can build a sample.

A call to NVML may take seconds, or never return. The values of the GPU then become absent, with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dpmon.gpu.device_record import NOT_QUERIED, MissingValue, RunContext, bare_uuid, build_device_record
from dpmon.gpu.nvml import GPU_IS_LOST, Nvml, NvmlCallError
from dpmon.gpu.nvml_queries import MAX_CALLS_PER_S, NEEDS_TWO_READINGS, QUERIES, NvmlQuery

RETRY_S = 5.0
"""Time until dpmon retries a lost GPU, or a library that did not start."""
MAX_SILENCE_S = 3.0
"""Maximum duration of a call to NVML during which the last values still count as current."""
FIRST_ROUND_S = 0.5
"""For this time after a GPU is found, all queries run without a limit, so that its first sample has the answers."""
_MAX_AGE_PERIODS = 4
"""An answer expires at the age of this many periods of its query (at least MAX_SILENCE_S) plus RETRY_S."""


@dataclass(slots=True)
class _QueryState:
    """The state of one query: its last answer, when it is due, and which of its getters is in use."""

    values: tuple[Any, ...]
    """A value or `MissingValue` for each field."""
    due_s: float
    answered_s: float
    """When `values` were read."""
    getter_index: int = 0
    memo: dict[str, Any] = field(default_factory=dict)


class GpuState:
    """One GPU. One thread calls `poll` again and again."""

    def __init__(
        self,
        index: int,
        nvml: Nvml,
        clock: Callable[[], float] = time.monotonic,
        queries: tuple[NvmlQuery, ...] = QUERIES,
    ) -> None:
        self.index = index
        self.is_silent = False
        """Whether a warning says that a call about this GPU does not return."""
        self._nvml = nvml
        self._clock = clock
        self._queries = queries
        self._handle: Any = None
        self._lost_reason = NOT_QUERIED.reason
        self._retry_at_s = 0.0
        self._call_start_s: float | None = None
        """When the call that has not returned yet was made; None if there is none."""
        self._query_states: dict[NvmlQuery, _QueryState] = {}

    # ---------------------------------------------------------------- queries

    def poll(self) -> str | None:
        """Run the queries that are due. Return a warning if the GPU was lost or came back."""
        start_s, earlier_reason = self._clock(), self._lost_reason
        if self._handle is None and start_s < self._retry_at_s:
            return None
        try:
            self._run_due_queries(start_s)
        except Exception as error:  # noqa: BLE001 - if the thread died, all later values would be missing
            self._handle, self._lost_reason = None, f"{type(error).__name__}: {error}"
            if isinstance(error, NvmlCallError):
                self._lost_reason = error.reason
            self._retry_at_s = self._clock() + RETRY_S
            return None if self._lost_reason == earlier_reason else f"GPU {self.index}: {self._lost_reason}"
        return None if earlier_reason in ("", NOT_QUERIED.reason) else f"GPU {self.index} is back"

    def unanswered_s(self) -> float:
        """Return how long the current call has waited for its answer (s); 0 if there is no call."""
        start_s = self._call_start_s
        return 0.0 if start_s is None else self._clock() - start_s

    def _run_due_queries(self, start_s: float) -> None:
        """Run the most overdue queries, with at most MAX_CALLS_PER_S calls.

        For a GPU just found, run all queries within FIRST_ROUND_S. Raises NvmlCallError only if the GPU is lost.
        """
        calls_left = MAX_CALLS_PER_S
        is_first_round = self._handle is None
        if is_first_round:
            calls_left -= 1
            handle = self._call_nvml(lambda: self._nvml.module.nvmlDeviceGetHandleByIndex(self.index))
            if not handle:  # some drivers crash with a null handle
                raise NvmlCallError("NVML gave no handle for this GPU", GPU_IS_LOST)
            # Answers, events and buffers of an earlier handle become void.
            self._query_states = {
                query: _QueryState((NOT_QUERIED,) * len(query.fields), start_s, start_s) for query in self._queries
            }
            self._handle, self._lost_reason = handle, ""
        for query in self._due_queries(start_s):
            if query.max_calls <= calls_left or (is_first_round and self._clock() - start_s < FIRST_ROUND_S):
                calls_left -= query.max_calls
                self._run_query(query)

    def _due_queries(self, now_s: float) -> list[NvmlQuery]:
        """Return the due queries, the most overdue first. Delays count in periods, so that rare queries wait longer."""
        due = [
            query
            for query, state in self._query_states.items()
            if state.due_s <= now_s and state.getter_index < len(query.getters) and self._is_needed(query)
        ]
        return sorted(due, key=lambda query: (self._query_states[query].due_s - now_s) / query.period_s)

    def _is_needed(self, query: NvmlQuery) -> bool:
        replaced = query.replaces
        if replaced is None:
            return True
        field_name, *_ = query.fields
        value = self._query_states[replaced].values[replaced.fields.index(field_name)]
        return isinstance(value, MissingValue) and value not in (NOT_QUERIED, NEEDS_TWO_READINGS)

    def _run_query(self, query: NvmlQuery) -> None:
        query_state = self._query_states[query]
        query_state.due_s = self._clock() + query.period_s - 0.1  # tolerate a round that begins slightly early
        values: tuple[Any, ...] = ()
        while query_state.getter_index < len(query.getters):
            read_fields = query.getters[query_state.getter_index]
            try:
                values = self._call_nvml(partial(read_fields, self._nvml.module, self._handle, query_state.memo))
                break
            except NvmlCallError as failure:
                if failure.is_gpu_gone:
                    raise
                values = (MissingValue(failure.reason),) * len(query.fields)
                if not failure.is_permanent:
                    break
                query_state.getter_index += 1
        query_state.values, query_state.answered_s = values, self._clock()

    def _call_nvml(self, read: Callable[[], Any]) -> Any:
        self._call_start_s = self._clock()
        try:
            return self._nvml.run(read)
        finally:
            self._call_start_s = None

    # ---------------------------------------------------------------- samples

    @property
    def uuid(self) -> str | None:
        """The UUID as NVML writes it; None until it is known. It stays known when the GPU is lost."""
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
        for query, query_state in self._query_states.items():
            if name in query.fields:
                return query_state.values[query.fields.index(name)]
        return None

    def sample(self, run_context: RunContext) -> dict[str, Any]:
        """Return the fields of the `device` record except `t_s`, from the values known now."""
        values_by_name: dict[str, Any] = {}
        for query, state in self._query_states.items():
            age_s = self._clock() - state.answered_s
            is_old = age_s > max(MAX_SILENCE_S, _MAX_AGE_PERIODS * query.period_s) + RETRY_S
            for name, value in zip(query.fields, state.values, strict=True):
                if is_old and not isinstance(value, MissingValue):
                    value = MissingValue(f"NVML answers slowly: the last answer is {age_s:.0f} s old")
                earlier = values_by_name.get(name, NOT_QUERIED)  # from the query that this one replaces
                if earlier is NOT_QUERIED or (isinstance(earlier, MissingValue) and value is not NOT_QUERIED):
                    values_by_name[name] = value
        reason, unanswered_s = self._lost_reason, self.unanswered_s()
        if unanswered_s >= MAX_SILENCE_S:
            reason = f"NVML has not answered for {unanswered_s:.0f} s"
        return build_device_record(self.index, values_by_name, run_context, self.uuids(), reason)
