"""Builds snapshots of a run from queries: `SnapshotBuilder.build` returns the state as of a time.

A live snapshot is as of now, a playback as of another time, and a finished run as of its end. What can no longer change
is kept for the next snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpmon.model.run_snapshot import DEFAULT_REQUEST, RunSnapshot, SnapshotCaches, SnapshotRequest

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store


class SnapshotBuilder:
    """Builds the snapshots of one run, one after the other."""

    def __init__(self) -> None:
        self._caches = SnapshotCaches()

    def build(
        self, store: Store, request: SnapshotRequest = DEFAULT_REQUEST, ended: frozenset[int] = frozenset()
    ) -> RunSnapshot:
        """Return the state as of the time of `store`. `ended`: processes that are known to have ended.

        All facts are queried, so that the store may be closed.
        """
        self._caches.answers.start_read(store)
        snapshot = RunSnapshot(store, request, ended, self._caches)
        snapshot.query_everything()
        return snapshot
