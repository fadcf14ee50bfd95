"""Keeps what was derived from finished time buckets, so that the next picture reads only the others.

A bucket is finished LATE_S before the newest second. It changes only if a record arrives late; then its rows have the
number of a new transaction, and its answers are forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

LATE_S = 3
_MAX_UNUSED_READS = 32
"""An answer is forgotten after this many reads that did not need it."""
_Answer = TypeVar("_Answer")


class BucketAnswers:
    """The answers of one reader of a history, by question and time bucket."""

    def __init__(self) -> None:
        self._answers: dict[tuple[Hashable, int], dict[int, Any]] = {}
        """By question and width of its buckets (s), then by start (s)."""
        self._last_use: dict[tuple[Hashable, int], int] = {}
        self._reads = self._seq = self._newest_s = self._finished_s = 0

    def start_read(self, store: Store) -> None:
        """Forget the answers about buckets that have changed since the last read, and those that nobody needs."""
        self._reads += 1
        self._newest_s = store.newest_s
        self._finished_s = self._newest_s + 1 - LATE_S
        changed: list[tuple[int, int]] = []
        if self._answers and store.seq != self._seq:
            # A late record changes buckets of all widths, but a new wide bucket changes nothing.
            query = "SELECT DISTINCT start_s FROM tallies WHERE seq > ? AND width = ? AND start_s < ?"
            width = store.buckets.narrowest
            starts = store.query(query, (self._seq, width, self._finished_s + store.origin_s))
            changed = [(start_s - store.origin_s, start_s - store.origin_s + width) for (start_s,) in starts]
        for (question, width), answers in [*self._answers.items()]:
            if self._last_use[question, width] < self._reads - _MAX_UNUSED_READS:
                del self._answers[question, width], self._last_use[question, width]
            for start_s in [s for s in answers if any(s < end and start < s + width for start, end in changed)]:
                del answers[start_s]
        self._seq = store.seq

    def read_once(self, question: Hashable, seconds: int, read: Callable[[], _Answer]) -> _Answer:
        """Return an answer about the present, which is read once in `seconds` of the history."""
        start_s = self._newest_s // seconds * seconds
        answers = self._answers.get((question, 0), {})
        if start_s not in answers:
            answers = self._answers[question, 0] = {start_s: read()}
        self._last_use[question, 0] = self._reads
        answer: _Answer = answers[start_s]
        return answer

    def read(
        self,
        store: Store,
        question: Hashable,
        width: int,
        begin_s: int,
        end_s: int,
        read: Callable[[int, int], Mapping[int, _Answer]],
    ) -> dict[int, _Answer]:
        """Return the answers about the buckets of `width` seconds between two seconds, by start; the last one is cut.

        `read`: returns the answers about adjacent buckets between two seconds, by start; none for an empty bucket.
        """
        known, finished_s = self._answers.get((question, width), {}), min(self._finished_s, end_s)
        answers: dict[int, _Answer | None] = {}
        starts = range(store.bucket_start(begin_s, width), end_s, width)
        for is_known, group in groupby(starts, lambda start_s: start_s in known and start_s + width <= finished_s):
            unread = [*group]
            fresh = known if is_known else read(unread[0], min(unread[-1] + width, end_s))
            answers |= {start_s: fresh.get(start_s) for start_s in unread}
        self._answers[question, width] = {s: answer for s, answer in answers.items() if s + width <= finished_s}
        self._last_use[question, width] = self._reads
        return {start_s: answer for start_s, answer in answers.items() if answer is not None}
