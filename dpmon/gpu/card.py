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

from dpmon.gpu.nvml import GPU_IS_LOST, CallFailed, Nvml
from dpmon.gpu.questions import CALLS, FIRST, QUESTIONS, Question
from dpmon.gpu.sample import NOT_ASKED, Missing, Run, bare_uuid, compose

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
class _Answer:
    """The state of one question: when it is due, which of its ways is in use, and the last values.

    `given`: a value or `Missing` for each field, in order, and the time of the reading (s; None: not yet read).
    """

    given: tuple[tuple[Any, ...], float | None]
    due_s: float
    way: int = 0
    memo: dict[str, Any] = field(default_factory=dict)


class Card:
    """The known values of one GPU. Only its newest asker may call `found` and `lose`."""

    def __init__(self, index: int, questions: tuple[Question, ...] = QUESTIONS) -> None:
        self.index = index
        self.handle: Any = None
        self.lost = NOT_ASKED.reason
        self.retry_at_s = 0.0
        self.askers: tuple[Asker, ...] = ()
        """The threads that ask: the newest is the last. An earlier one was left behind."""
        self.silent = False
        """Whether a call to NVML about this GPU does not return."""
        self._questions = questions
        self.answers: dict[Question, _Answer] = {}

    def found(self, handle: Any, now_s: float) -> None:
        """Use a new handle: answers, events and buffers of an earlier one are void."""
        self.answers = {each: _Answer(((NOT_ASKED,) * len(each.fields), None), now_s) for each in self._questions}
        self.handle, self.lost = handle, ""

    def lose(self, reason: str, now_s: float) -> None:
        """Mark the GPU as lost; a later round looks for it again. Its UUID and name stay known."""
        self.handle, self.lost = None, reason
        self.retry_at_s = now_s + RETRY_S

    def due(self, now_s: float) -> list[Question]:
        """Return the due questions, the most overdue first, counted in periods: rare questions can wait longer."""
        waiting = {asker.question for asker in self.askers}
        due = [
            each
            for each, answer in self.answers.items()
            if answer.due_s <= now_s and answer.way < len(each.ways) and each not in waiting and self._needed(each)
        ]
        return sorted(due, key=lambda each: (self.answers[each].due_s - now_s) / each.every_s)

    def _needed(self, question: Question) -> bool:
        other = question.instead_of
        if other is None:
            return True
        value = self.answers[other].given[0][other.fields.index(question.fields[0])]
        return isinstance(value, Missing) and value not in (NOT_ASKED, FIRST)

    # ---------------------------------------------------------------- samples

    @property
    def uuid(self) -> str | None:
        """The UUID as NVML writes it; None until known."""
        uuid = self._newest("uuid")
        return uuid if isinstance(uuid, str) else None

    def uuids(self) -> frozenset[str]:
        """Return the bare UUIDs of the GPU and its MIG instances."""
        instances = self._newest("mig_devices")
        every = [self.uuid, *(each["uuid"] for each in (instances if isinstance(instances, list) else ()))]
        return frozenset(bare_uuid(uuid) for uuid in every if uuid)

    def _newest(self, name: str) -> Any:
        """Return the last answer for a field, however old."""
        given = (zip(each.fields, answer.given[0], strict=True) for each, answer in self.answers.items())
        return next((value for pairs in given for field_, value in pairs if field_ == name), None)

    def sample(self, run: Run, now_s: float) -> dict[str, Any]:
        """Return the fields of the `device` record, but for `t_s`, from the values known now."""
        known: dict[str, Any] = {}
        for question, answer in self.answers.items():
            values, at_s = answer.given
            late = self._late(question, at_s, now_s)
            for name, value in zip(question.fields, values, strict=True):
                if late and (value is NOT_ASKED or not isinstance(value, Missing)):
                    value = late
                before = known.get(name, NOT_ASKED)  # from the question that this one replaces
                if before is NOT_ASKED or (isinstance(before, Missing) and value is not NOT_ASKED):
                    known[name] = value
        return compose(self.index, known, run, self.uuids(), self.lost)

    def _late(self, question: Question, at_s: float | None, now_s: float) -> Missing | None:
        """Return why an answer read at `at_s` is too old to be shown, or has not come; None if there is no reason."""
        age = math.inf if at_s is None else now_s - at_s
        for asker in self.askers:
            silence = asker.silence(now_s)
            nobody_asks = asker is self.askers[-1] and age >= max(SILENT_S, question.every_s)
            if silence >= SILENT_S and (asker.question is question or nobody_asks):
                return Missing(f"NVML has not answered for {silence:.0f} s")
        if at_s is not None and age > max(SILENT_S, _LATE * question.every_s) + RETRY_S:
            return Missing(f"NVML answers slowly: the last answer is {age:.0f} s old")
        return None


class Asker:
    """Asks NVML about one GPU; for one thread."""

    def __init__(self, card: Card, nvml: Nvml, clock: Callable[[], float] = time.monotonic) -> None:
        self.question: Question | None = None
        """The question whose answer the thread waits for."""
        self.ended = False
        self._card = card
        self._nvml = nvml
        self._clock = clock
        self._since_s: float | None = None
        card.askers = (*card.askers, self)

    @property
    def newest(self) -> bool:
        """Whether the thread has not been left behind."""
        return self._card.askers[-1] is self

    def silence(self, now_s: float) -> float:
        """Return how long the thread has waited for the current answer (s); 0 while not waiting."""
        since = self._since_s
        return 0.0 if since is None else now_s - since

    def round(self) -> None:
        """Ask the most overdue questions, with at most CALLS calls; of a GPU just found, all of them for FIRST_S.

        Raises CallFailed only if the GPU is gone.
        """
        began, calls = self._clock(), CALLS
        first = self._card.handle is None
        if first:
            calls -= 1
            handle = self._ask(lambda: self._nvml.module.nvmlDeviceGetHandleByIndex(self._card.index))
            if not handle:  # some drivers crash with a null handle
                raise CallFailed("NVML gave no handle for this GPU", GPU_IS_LOST)
            if self.newest:
                self._card.found(handle, began)
        for question in self._card.due(began):
            if not self.newest:
                return
            if question.calls <= calls or (first and self._clock() - began < FIRST_S):
                calls -= question.calls
                self._answer(question)

    def _answer(self, question: Question) -> None:
        handle, answer = self._card.handle, self._card.answers[question]
        answer.due_s = self._clock() + question.every_s - 0.1  # tolerate a round that begins slightly early
        values: tuple[Any, ...] = ()
        while answer.way < len(question.ways):
            way = question.ways[answer.way]
            try:
                values = self._ask(lambda way=way: way(self._nvml.module, handle, answer.memo), question)  # type: ignore[misc]
                break
            except CallFailed as failure:
                if failure.gone:
                    raise
                values = (Missing(failure.reason),) * len(question.fields)
                if not failure.never:
                    break
                answer.way += 1
        answer.given = values, self._clock()

    def _ask(self, read: Callable[[], Any], question: Question | None = None) -> Any:
        self.question, self._since_s = question, self._clock()
        try:
            return self._nvml.guard(read)
        finally:
            self.question = self._since_s = None
