"""The history of a run as of one instant: what the queries of all tables have in common, and tallies and times.

All numbers of the screen, the report, the summary, the JSON lines and the metrics come from such a `Store`. The module
of a table has its other queries (dpmon.store.database lists them); dpmon.store.step_stats computes the statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from dpmon.record.history_rows import Defined, Resolver
from dpmon.record.schema import EVALUATION, FORWARD_ONLY, SECOND, STEP_KINDS, TRAINING
from dpmon.store.database import HistoryConnection
from dpmon.store.definition_table import DEFINITIONS
from dpmon.store.rings import RINGS
from dpmon.store.table import LAST_NS, Parameters
from dpmon.store.time_buckets import TimeBuckets, bucket_start

_MANY, _MIN_NEAR_IDS = 8, 2048
"""For more processes than the first, rows are searched among the ids near that of one of them: `_MANY` for each ring on
either side, and at least the second."""


class Store:
    """The tables of one history, as of one instant. Every query raises HistoryError if the database is damaged.

    After `as_of`, methods that return the newest rows leave out later ones.
    """

    def __init__(self, connection: HistoryConnection, unread_count: int = 0) -> None:
        """`connection`: in a transaction, so that all queries see the same state of the database.

        `unread_count`: how many records are not in the history yet, and no supervisor is writing them.
        """
        self.connection = connection
        self._unread_count = unread_count
        self.rings = {ring.process: ring for ring in RINGS.select(connection)}
        """By process."""
        meta: dict[str, int] = dict(connection.rows("SELECT key, value FROM meta WHERE key != 'run'"))
        self.origin_s = meta.get("origin_s", 0)
        """The second of the run's start in the tables (dpmon.store.time_buckets)."""
        self.buckets = TimeBuckets(connection, self.origin_s)
        """The time buckets of tallies and times."""
        self.seq = meta.get("seq", 0)
        """Number of the last transaction."""
        self.pruned = meta.get("pruned", 0)
        """Number of rows deleted to keep the history below its size limit."""
        self.mode_kinds: set[tuple[str, int]] = {*connection.rows("SELECT DISTINCT mode, kind FROM keys")}
        """Mode and flags of all steps so far."""
        self._resolvers: dict[int, Resolver] = {}
        """By process."""
        self.ranks = {process: ring.rank for process, ring in self.rings.items() if process >= 0}
        """Rank by process, for all processes with records."""
        self.open_calls = sum(ring.open_calls for ring in self.rings.values())
        """Number of calls so far of processes that have not finished a step."""
        self.main_kind = TRAINING
        """The kind of steps that describes the run: training, or the most frequent kind if it never trains."""
        evaluations = sum(ring.evaluations for ring in self.rings.values())
        forward_steps = sum(ring.forward_steps for ring in self.rings.values())
        trained = [ring for ring in self.rings.values() if ring.last_step]
        if evaluations + forward_steps and not trained:
            self.main_kind = EVALUATION if evaluations >= forward_steps else FORWARD_ONLY
        self.kind_words = {kind: name.replace("_", " ") for kind, name in STEP_KINDS.items()}
        """The word for each kind of steps and calls. Evaluations before nearly every update, or only within training
        steps, have another word: they generate data."""
        self.between_activities = ["between"]
        """The activities (dpmon.store.time_accounting) between steps of the main kind. Their time counts in rates."""
        has_rollouts = any(ring.has_rollouts for ring in trained)
        if has_rollouts or (trained and not any(ring.evaluation_phases for ring in self.rings.values())):
            self.kind_words[EVALUATION] = "without gradients"
            self.between_activities.append("evaluation")
        self.until_ns = LAST_NS
        """Methods that return the newest rows leave out rows after this time (ns since the run's start)."""
        self._last_ids: dict[int, int] = {}
        """By process: see `last_id`."""
        self.undefined = 0
        """Number of rows without a record, because they refer to a lost definition."""

    def as_of(self, t_ns: int | None) -> Store:
        """Return this store as of an earlier time (ns since the run's start), or as of now if `t_ns` is None."""
        store = copy(self)
        store.until_ns, store._last_ids = LAST_NS if t_ns is None else t_ns, {}
        return store

    @property
    def unread_warning(self) -> str | None:
        """A warning about the records that are not in the history yet; None if there are none."""
        if not self._unread_count:
            return None
        records = "1 record is" if self._unread_count == 1 else f"{self._unread_count:,} records are"
        return f"{records} not in the history yet: no supervisor is writing it"

    def bucket_start(self, second: int, width: int) -> int:
        """Return the start of the time bucket of `width` seconds with a second; both in s since the run's start.

        The first bucket may start before the run.
        """
        return bucket_start(second, width, self.origin_s)

    @property
    def newest_s(self) -> int:
        """The newest second with a time bucket."""
        return self.buckets.end_s - 1 - self.origin_s

    @property
    def is_mirror(self) -> bool:
        """Whether a mirror writes this history (dpmon.mirror)."""
        return any(ring.node is not None for ring in self.rings.values())

    @property
    def until_s(self) -> int | None:
        """The first second that has not ended at the time of this store; None if the store is as of now."""
        return None if self.until_ns == LAST_NS else self.until_ns // SECOND

    @cached_property
    def processes(self) -> list[int]:
        """The processes with steps."""
        return [process for (process,) in self.query("SELECT DISTINCT process FROM keys ORDER BY process")]

    @cached_property
    def trained_processes(self) -> set[int]:
        """The processes with training steps."""
        return {process for process, ring in self.rings.items() if ring.last_step}

    def query(self, query: str, values: Parameters = ()) -> list[tuple[Any, ...]]:
        """Return all rows of a query. Raises HistoryError."""
        return list(self.connection.rows(query, values))

    def definitions(self, process: int, numbers: Collection[int] | None = None) -> dict[int, Defined]:
        """Return the definitions of a process by number: all of them, or those in `numbers`."""
        condition = "WHERE process = ?"
        if numbers is not None:
            condition += f" AND number IN ({', '.join(map(str, numbers))})"
        rows = DEFINITIONS.select(self.connection, condition, (process,))
        return {row.number: row.parsed for row in rows}

    def resolver(self, process: int) -> Resolver:
        """Return a resolver that knows the definitions of a process."""
        resolver = self._resolvers.get(process)
        if resolver is None:
            resolver = self._resolvers[process] = Resolver(process, self.ranks.get(process))
            for number, definition in self.definitions(process).items():
                resolver.definitions.remember(number, definition)
        return resolver

    def other_kind(self, kind: int) -> str:
        """Return the word for a kind of steps; empty for the main kind."""
        return "" if kind == self.main_kind else self.kind_words[kind]

    # ------------------------------------------------------------------------------------------ ids of steps

    def first_id(self, process: int) -> int:
        """Return a lower bound for the ids of a process's steps."""
        ring = self.rings.get(process)
        return 0 if ring is None else ring.first_id or 0

    def last_id(self, process: int) -> int:
        """Return an upper bound for the ids of a process's steps up to this store's time; later steps are above it."""
        last_id = self._last_ids.get(process)
        if last_id is None:
            ring = self.rings.get(process)
            last_id = 0 if ring is None else ring.last_id
            last_id = self.newest_step_id if last_id is None else last_id
            if self.until_ns != LAST_NS:
                last_id = self._find_last_id(process, self.first_id(process), last_id)
            self._last_ids[process] = last_id
        return last_id

    def find_last_ids(self, processes: Sequence[int]) -> None:
        """Find what `last_id` returns for many processes in one query: the rows of one time have near ids.

        If a process has no row there, or none after it, `last_id` searches for it alone.
        """
        if self.until_ns == LAST_NS or len(processes) <= _MANY:
            return
        near_id, reach = self.last_id(processes[0]), max(_MANY * len(self.rings), _MIN_NEAR_IDS)
        query = (
            "SELECT process, max(CASE WHEN start_ns + wall_ns <= ?1 THEN id END), max(start_ns + wall_ns > ?1), max(id)"
            " FROM steps WHERE id BETWEEN ?2 AND ?3 GROUP BY process"
        )
        for process, last_id, has_later, newest_id in self.query(
            query, (self.until_ns, near_id - reach, near_id + reach)
        ):
            if last_id is not None and (has_later or newest_id == self.rings[process].last_id):
                self._last_ids[process] = last_id

    @cached_property
    def newest_step_id(self) -> int:
        """The highest id of a step, of all processes as of now; 0 if there is none."""
        return next(step_id or 0 for (step_id,) in self.query("SELECT max(id) FROM steps"))

    def _find_last_id(self, process: int, low_id: int, high_id: int) -> int:
        """Return the highest id of a process's steps that ended by `until_ns`; `low_id` - 1 if there is none.

        A binary search from `low_id` to `high_id`: the rows of one process are in order of time.
        """
        query = (
            "SELECT id, start_ns + wall_ns <= ? FROM steps WHERE process = ? AND id BETWEEN ? AND ? ORDER BY id LIMIT 1"
        )
        last_id = low_id - 1
        while low_id <= high_id:
            middle_id = (low_id + high_id) // 2
            rows = self.query(query, (self.until_ns, process, middle_id, high_id))
            if any(has_ended for _, has_ended in rows):
                ((last_id, _),) = rows
                low_id = last_id + 1
            else:
                high_id = middle_id - 1
        return last_id

    @property
    def dropped(self) -> int:
        """The number of lost records: by their writer, by being overwritten, or with their definition."""
        return self.undefined + sum(ring.missed for ring in self.rings.values())
