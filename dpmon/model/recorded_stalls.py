"""The stalls of a run, as they were recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.text.formatting import format_long_duration


class RecordedStall(NamedTuple):
    """A recorded stall of the run."""

    since_ns: int
    """When the last progress was made."""
    noticed_ns: int
    end_ns: int | None = None
    """None if the stall continues, or if the run ended in it."""
    record: Mapping[str, object] = {}
    """The newest `stall` record that describes the ranks."""

    @property
    def text(self) -> str:
        """Where each rank is, and which ranks wait for it."""
        return str(self.record.get("text") or "")

    @property
    def ranks(self) -> list[Mapping[str, Any]]:
        """What each rank did, those that the others waited for first."""
        ranks = self.record.get("ranks")
        return [rank for rank in ranks if isinstance(rank, Mapping)] if isinstance(ranks, list) else []

    def duration_ns(self, now_ns: int) -> int:
        """Return how long (ns) no progress was made: until now, or until the end of the stall."""
        return max((now_ns if self.end_ns is None else self.end_ns) - self.since_ns, 0)


def final_stall(stalls: Sequence[RecordedStall], newest_ns: int, has_succeeded: bool = False) -> RecordedStall | None:
    """Return the stall in which a run ended; None if it ended in none. A run that has succeeded left its stalls.

    `newest_ns`: end of the run's newest step. Interrupting a stalled run may have ended the stall just before the run.
    """
    last = stalls[-1] if stalls else None
    if last is None or has_succeeded:
        return None
    return last if last.end_ns is None or newest_ns <= last.noticed_ns else None


def final_stall_sentence(duration_ns: float, text: str) -> str:
    """Return the sentence on the stall in which a run ended. `text`: where each rank was."""
    return f"ended in a stall of {format_long_duration(duration_ns)}: {text}"
