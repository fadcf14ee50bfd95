"""One GPU: its last known values, the questions to NVML about it, and the age limits of the values.

Two threads ask NVML (see `watch`): one the cheap questions, the other the expensive ones. Each stores every answer
here. A sample can be composed at any time, even while a thread waits a minute for an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpmon.gpu.compose import compose
from dpmon.gpu.device import DeviceSample, without_values
from dpmon.gpu.failure import GPU_IS_LOST, CallFailed, Missing
from dpmon.gpu.questions import Question
from dpmon.gpu.share import Run, bare_uuid

RETRY_S = 5.0
"""Time until the next attempt with a lost GPU, or with a library that did not start."""
SILENT_S = 3.0
"""Longest wait for an answer during which the last values still count as current."""
MAX_WAYS = 2
"""Most alternative calls that the first round tries for one question."""
_LATE = 4
"""An answer expires at the age of this many periods of its question (at least SILENT_S) plus RETRY_S. It may expire
earlier while NVML gives no answer at all: see SILENT_S."""


@dataclass(slots=True)
class _Known:
    """A value, when it was read (s), and the question that provided it."""

    value: Any
    at_s: float
    by: Question


@dataclass(slots=True)
class _QuestionProgress:
    """An asker's progress with one question: when it is due, and which of its ways is in use."""

    due_s: float = 0.0
    way: int = 0
    memo: dict[str, Any] = field(default_factory=dict)
    asked: int = 0
    left_open: set[str] = field(default_factory=set)


class Card:
    """The known values of one GPU. Safe for any number of threads."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.handle: Any = None
        self.opened = 0
        """Number of handles obtained; answers for an earlier handle are void."""
        self.lost = "not asked yet"
        self.retry_at_s = 0.0
        self.askers: list[Asker] = []
        self._lock = threading.Lock()
        self._who: dict[str, str] = {}
        self._values: dict[str, _Known] = {}
        self._absent: dict[str, str] = {}
        self._who_absent: dict[str, str] = {}

    @property
    def uuid(self) -> str | None:
        """The UUID as NVML writes it; None until known."""
        return self._who.get("uuid")

    def uuids(self) -> frozenset[str]:
        """Return the bare UUIDs of the GPU and its MIG instances."""
        with self._lock:
            known = self._values.get("mig_devices")
            found = [self._who.get("uuid"), *(instance.get("uuid") for instance in (known.value if known else ()))]
        return frozenset(bare_uuid(uuid) for uuid in found if uuid)

    # ---------------------------------------------------------------- the handle

    def open(self, nvml: Any, guard: Callable[[Callable[[], Any]], Any]) -> None:
        """Find the GPU by its index. Its UUID and name may be missing. Raises CallFailed."""
        handle = guard(lambda: nvml.nvmlDeviceGetHandleByIndex(self.index))
        if not handle:  # some drivers crash with a null handle
            raise CallFailed("NVML gave no handle for this GPU", GPU_IS_LOST)
        who, absent = {}, {}
        for name, ask in (
            ("uuid", lambda: nvml.nvmlDeviceGetUUID(handle)),
            ("name", lambda: nvml.nvmlDeviceGetName(handle)),
        ):
            try:
                text = guard(ask)
                who[name] = text.decode("utf-8", "replace") if isinstance(text, bytes) else str(text)
            except CallFailed as failure:
                absent[name] = failure.reason
        with self._lock:
            self._who, self._who_absent = who, absent
            self.handle = handle
            self.opened += 1
            self.lost = ""

    def lose(self, reason: str, now_s: float) -> None:
        """Mark the GPU as lost; a later round looks for it again."""
        with self._lock:
            self.handle = None
            self.lost = reason
            self.retry_at_s = now_s + RETRY_S
            self._values.clear()
            self._absent.clear()

    # ---------------------------------------------------------------- answers

    def take(self, question: Question, values: tuple[Any, ...], now_s: float, opened: int) -> None:
        """Keep an answer, unless it came from an earlier handle."""
        with self._lock:
            if opened != self.opened or self.handle is None:
                return
            for name, value in zip(question.fields, values, strict=True):
                if isinstance(value, Missing):
                    self._miss(question, name, value.reason)
                else:
                    self._values[name] = _Known(value, now_s, question)
                    self._absent.pop(name, None)

    def miss(self, question: Question, reason: str, opened: int) -> None:
        """Note why a question has no answer."""
        with self._lock:
            if opened == self.opened and self.handle is not None:
                for name in question.fields:
                    self._miss(question, name, reason)

    def _miss(self, question: Question, name: str, reason: str) -> None:
        known = self._values.get(name)
        if known is not None and known.by is not question:
            return  # another question provides the value
        self._values.pop(name, None)
        self._absent[name] = reason

    def is_true(self, name: str) -> bool:
        """Whether a field is known and true."""
        with self._lock:
            return name in self._values and bool(self._values[name].value)

    # ---------------------------------------------------------------- samples

    def sample(self, run: Run, now_s: float) -> DeviceSample:
        """Compose a sample from the values known now."""
        with self._lock:
            who, values, lost = dict(self._who), dict(self._values), self.lost
            absent = {**self._who_absent, **self._absent}
        late = {name: why for name, known in values.items() if (why := self._late(known, now_s))}
        found = {name: known.value for name, known in values.items() if name not in late}
        for asker in self.askers:
            if asker.silence(now_s) >= SILENT_S:
                reason = asker.complaint(now_s)
                waited = [name for question in asker.places for name in question.fields if name not in values]
                absent = {**dict.fromkeys(waited, reason), **absent}
        sample = compose(self.index, who, found, {**absent, **late}, run, self.uuids())
        return without_values(sample, lost) if lost else sample

    def _late(self, known: _Known, now_s: float) -> str:
        """Return why a value is too old to be shown; empty if it is not."""
        age = now_s - known.at_s
        for asker in self.askers:
            if known.by in asker.places and asker.silence(now_s) >= SILENT_S <= age >= known.by.every_s:
                return asker.complaint(now_s)
        if age > max(SILENT_S, _LATE * known.by.every_s) + RETRY_S:
            return f"NVML answers slowly: the last answer is {age:.0f} s old"
        return ""


class Asker:
    """Asks one GPU the questions that are due, with a limit of calls per round; for one thread."""

    def __init__(self, card: Card, questions: tuple[Question, ...], calls: int) -> None:
        self.card = card
        self.calls = calls
        self.places = {question: _QuestionProgress() for question in questions}
        self._opened = 0
        self._waiting_s: float | None = None
        """Start of the wait for an answer; None while not waiting."""
        card.askers.append(self)

    def silence(self, now_s: float) -> float:
        """Return how long the thread has waited for the current answer (s); 0 while not waiting."""
        since = self._waiting_s
        return 0.0 if since is None else now_s - since

    def complaint(self, now_s: float) -> str:
        """Return `silence` as a sentence."""
        return f"NVML has not answered for {self.silence(now_s):.0f} s"

    def guarded(self, guard: Callable[[Callable[[], Any]], Any], clock: Callable[[], float]) -> Callable[[Any], Any]:
        """Return a `guard` that notes the start of each wait for an answer."""

        def asking(read: Callable[[], Any]) -> Any:
            self._waiting_s = clock()
            try:
                return guard(read)
            finally:
                self._waiting_s = None

        return asking

    def round(
        self,
        nvml: Any,
        ask: Callable[[Callable[[], Any]], Any],
        clock: Callable[[], float],
        calls: int,
        first_s: float = 0.0,
    ) -> None:
        """Ask the most overdue questions, with at most `calls` calls; during the first `first_s`, ask all.

        Raises CallFailed only if the GPU is gone.
        """
        handle, opened = self.card.handle, self.card.opened
        if handle is None:
            return
        began = clock()
        if opened != self._opened:  # a new handle: events and buffers of the old one are void
            self._opened = opened
            for place in self.places.values():
                place.memo, place.due_s, place.asked = {}, began, 0
        for _ in range(MAX_WAYS if first_s else 1):
            for question in self._overdue(clock()):
                hurries = clock() - began < first_s
                if question.calls <= calls or hurries:
                    calls -= question.calls
                    self._ask(question, nvml, handle, opened, ask, clock)

    def _overdue(self, now_s: float) -> list[Question]:
        """Return the due questions, the most overdue first, counted in periods: rare questions can wait longer."""
        due = [q for q in self.places if self._due(q, now_s)]
        return sorted(due, key=lambda q: (self.places[q].due_s - now_s) / q.every_s)

    def _due(self, question: Question, now_s: float) -> bool:
        place = self.places[question]
        if place.way == len(question.ways) or now_s < place.due_s:
            return False
        if question.only_if and not self.card.is_true(question.only_if):
            return False
        other = question.instead_of
        if other is None:
            return True
        first = self.places[other]
        settled = first.asked >= 2 or first.way == len(other.ways)
        return settled and question.fields[0] in first.left_open

    def _ask(
        self,
        question: Question,
        nvml: Any,
        handle: Any,
        opened: int,
        ask: Callable[[Callable[[], Any]], Any],
        clock: Callable[[], float],
    ) -> None:
        place = self.places[question]
        place.due_s = clock() + question.every_s - 0.1  # tolerate a round that begins slightly early
        place.asked += 1
        try:
            values = ask(lambda: question.ways[place.way](nvml, handle, place.memo))
        except CallFailed as failure:
            if failure.gone:
                raise
            if failure.never:
                place.way += 1
                place.due_s = clock()
            place.left_open = set(question.fields)
            self.card.miss(question, failure.reason, opened)
            return
        place.left_open = {n for n, v in zip(question.fields, values, strict=True) if isinstance(v, Missing)}
        self.card.take(question, values, clock(), opened)
