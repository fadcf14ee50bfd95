"""The rings of training processes: each process's activity, and requests to it."""

from __future__ import annotations

from dpmon.record.spans import DOING
from dpmon.span_reader import SpanReader


class ProcessRing:
    """The ring of one training process. Its records are read elsewhere (dpmon.store.sources)."""

    def __init__(self, path: str) -> None:
        """Raises RingError if it is not a ring, OSError if it cannot be opened."""
        ring = self._ring = SpanReader(path)
        self.pid: int = ring.pid
        self.process: int = ring.process
        self.rank = ring.rank
        self.world = ring.world
        self.request = ring.request
        self.acknowledged = ring.acknowledged
        self.request_pause = ring.request_pause
        self.pause_requests = ring.pause_requests
        self.request_sample = ring.request_sample

    def close(self) -> None:
        """Close the file; the ring is of no further use."""
        self._ring.close()

    def activity(self) -> tuple[str, int]:
        """The activity of the training thread, and when it began (monotonic ns; 0 if nothing has begun).

        One of data, copy, forward, backward, optimizer, paused; "other": in the script; "ended". Raises RingError if
        the file was truncated.
        """
        kind, since = self._ring.current_span()
        return "ended" if self._ring.ended() else DOING.get(kind, "other"), since
