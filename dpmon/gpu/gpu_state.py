"""One GPU: the last answers of NVML about it, their age limits, and the threads that ask.

Usually one thread asks about a GPU. A thread whose call does not return is left behind, and a second one asks the other
questions. A sample can be composed at any time, even while all threads wait for an answer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpmon.gpu.device_record import NOT_ASKED, MissingValue, RunContext, bare_uuid, build_device_record
from dpmon.gpu.nvml import GPU_IS_LOST, Nvml, NvmlCallError
from dpmon.gpu.nvml_queries import CALLS, FIRST, QUESTIONS, NvmlQuery

RETRY_S = 5.0
"""Time until dpmon tries a lost GPU, or a library that did not start, again."""
SILENT_S = 3.0
"""Longest wait for an answer during which the last values still count as current."""
FIRST_S = 0.5
"""For this time after a GPU is found, all questions are asked at once: its first sample has the answers."""
_LATE = 4
"""An answer expires at the age of this many periods of its question (at least SILENT_S) plus RETRY_S. It may expire
earlier while NVML gives no answer at all: see SILENT_S."""


@dataclass(slots=True)
class _QueryState:
    """The state of one question: when it is due, which of its ways is in use, and the last values.

    `given`: a value or `MissingValue` for each field, in order, and the time of the reading (s; None: not yet read).
    """

    given: tuple[tuple[Any, ...], float | None]
    due_s: float
    way: int = 0
    memo: dict[str, Any] = field(default_factory=dict)


class GpuState:
    """The known values of one GPU. Only its newest asker may call `attach_handle` and `mark_lost`."""

    def __init__(self, index: int, questions: tuple[NvmlQuery, ...] = QUESTIONS) -> None:
        self.index = index
        self.handle: Any = None
        self.lost = NOT_ASKED.reason
        self.retry_at_s = 0.0
        self.askers: tuple[GpuPoller, ...] = ()
        """The threads that ask: the newest is the last. An earlier one was left behind."""
        self.silent = False
        """Whether a call to NVML about this GPU does not return."""
        self._questions = questions
        self.answers: dict[NvmlQuery, _QueryState] = {}

    def attach_handle(self, handle: Any, now_s: float) -> None:
        """Use a new handle: answers, events and buffers of an earlier one are void."""
        self.answers = {each: _QueryState(((NOT_ASKED,) * len(each.fields), None), now_s) for each in self._questions}
        self.handle, self.lost = handle, ""

    def mark_lost(self, reason: str, now_s: float) -> None:
        """Mark the GPU as lost; a later round looks for it again. Its UUID and name stay known."""
        self.handle, self.lost = None, reason
        self.retry_at_s = now_s + RETRY_S

    def due_queries(self, now_s: float) -> list[NvmlQuery]:
        """Return the due questions, the most overdue first, counted in periods: rare questions can wait longer."""
        waiting = {asker.question for asker in self.askers}
        due = [
            each
            for each, answer in self.answers.items()
            if answer.due_s <= now_s and answer.way < len(each.ways) and each not in waiting and self._is_needed(each)
        ]
        return sorted(due, key=lambda each: (self.answers[each].due_s - now_s) / each.every_s)

    def _is_needed(self, question: NvmlQuery) -> bool:
        other = question.instead_of
        if other is None:
            return True
        value = self.answers[other].given[0][other.fields.index(question.fields[0])]
        return isinstance(value, MissingValue) and value not in (NOT_ASKED, FIRST)

    # ---------------------------------------------------------------- samples

    @property
    def uuid(self) -> str | None:
        """The UUID as NVML writes it; None until known."""
        uuid = self._last_value("uuid")
        return uuid if isinstance(uuid, str) else None

    def uuids(self) -> frozenset[str]:
        """Return the bare UUIDs of the GPU and its MIG instances."""
        instances = self._last_value("mig_devices")
        every = [self.uuid, *(each["uuid"] for each in (instances if isinstance(instances, list) else ()))]
        return frozenset(bare_uuid(uuid) for uuid in every if uuid)

    def _last_value(self, name: str) -> Any:
        """Return the last answer for a field, however old."""
        given = (zip(each.fields, answer.given[0], strict=True) for each, answer in self.answers.items())
        return next((value for pairs in given for field_, value in pairs if field_ == name), None)

    def sample(self, run: RunContext, now_s: float) -> dict[str, Any]:
        """Return the fields of the `device` record, but for `t_s`, from the values known now."""
        known: dict[str, Any] = {}
        for question, answer in self.answers.items():
            values, at_s = answer.given
            late = self._stale_reason(question, at_s, now_s)
            for name, value in zip(question.fields, values, strict=True):
                if late and (value is NOT_ASKED or not isinstance(value, MissingValue)):
                    value = late
                before = known.get(name, NOT_ASKED)  # from the question that this one replaces
                if before is NOT_ASKED or (isinstance(before, MissingValue) and value is not NOT_ASKED):
                    known[name] = value
        return build_device_record(self.index, known, run, self.uuids(), self.lost)

    def _stale_reason(self, question: NvmlQuery, at_s: float | None, now_s: float) -> MissingValue | None:
        """Return why an answer read at `at_s` is too old to be shown, or has not come; None if there is no reason."""
        age = math.inf if at_s is None else now_s - at_s
        for asker in self.askers:
            silence = asker.unanswered_s(now_s)
            nobody_asks = asker is self.askers[-1] and age >= max(SILENT_S, question.every_s)
            if silence >= SILENT_S and (asker.question is question or nobody_asks):
                return MissingValue(f"NVML has not answered for {silence:.0f} s")
        if at_s is not None and age > max(SILENT_S, _LATE * question.every_s) + RETRY_S:
            return MissingValue(f"NVML answers slowly: the last answer is {age:.0f} s old")
        return None


class GpuPoller:
    """Asks NVML about one GPU; for one thread."""

    def __init__(self, card: GpuState, nvml: Nvml, clock: Callable[[], float] = time.monotonic) -> None:
        self.question: NvmlQuery | None = None
        """The question whose answer the thread waits for."""
        self.ended = False
        self._card = card
        self._nvml = nvml
        self._clock = clock
        self._since_s: float | None = None
        card.askers = (*card.askers, self)

    @property
    def is_current(self) -> bool:
        """Whether the thread has not been left behind."""
        return self._card.askers[-1] is self

    def unanswered_s(self, now_s: float) -> float:
        """Return how long the thread has waited for the current answer (s); 0 while not waiting."""
        since = self._since_s
        return 0.0 if since is None else now_s - since

    def poll_due_queries(self) -> None:
        """Ask the most overdue questions, with at most CALLS calls; of a GPU just found, all of them for FIRST_S.

        Raises NvmlCallError only if the GPU is gone.
        """
        began, calls = self._clock(), CALLS
        first = self._card.handle is None
        if first:
            calls -= 1
            handle = self._call_nvml(lambda: self._nvml.module.nvmlDeviceGetHandleByIndex(self._card.index))
            if not handle:  # some drivers crash with a null handle
                raise NvmlCallError("NVML gave no handle for this GPU", GPU_IS_LOST)
            if self.is_current:
                self._card.attach_handle(handle, began)
        for question in self._card.due_queries(began):
            if not self.is_current:
                return
            if question.calls <= calls or (first and self._clock() - began < FIRST_S):
                calls -= question.calls
                self._run_query(question)

    def _run_query(self, question: NvmlQuery) -> None:
        handle, answer = self._card.handle, self._card.answers[question]
        answer.due_s = self._clock() + question.every_s - 0.1  # tolerate a round that begins slightly early
        values: tuple[Any, ...] = ()
        while answer.way < len(question.ways):
            way = question.ways[answer.way]
            try:
                values = self._call_nvml(lambda way=way: way(self._nvml.module, handle, answer.memo), question)  # type: ignore[misc]
                break
            except NvmlCallError as failure:
                if failure.gone:
                    raise
                values = (MissingValue(failure.reason),) * len(question.fields)
                if not failure.never:
                    break
                answer.way += 1
        answer.given = values, self._clock()

    def _call_nvml(self, read: Callable[[], Any], question: NvmlQuery | None = None) -> Any:
        self.question, self._since_s = question, self._clock()
        try:
            return self._nvml.run(read)
        finally:
            self.question = self._since_s = None
