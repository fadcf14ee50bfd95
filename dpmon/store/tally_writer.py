"""Writes tallies and times: for each second at once, for wider buckets when they have passed.

A step is added to the tally of the second in which it ended. When 10 s are over, their tallies are merged into a tally
of 10 s; six of these make a tally of 60 s, and so on. Late facts, such as a wait for input or the records of a process
that was stopped, are added to all existing tallies that cover their time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import pairwise

from dpmon.store.history_schema import ACTIVITY_COLUMNS, SHARE_IDS, BoundedConnection
from dpmon.store.tally import COLUMNS, WIDTHS, SeriesNames, Tally, TallyKey
from dpmon.store.time_accounting import ACTIVITIES
from dpmon.store.write_batch import WriteBatch

_CACHED = 4096
_PARTS = dict(zip(WIDTHS, (4, 8, 8, 8, 16, 16), strict=False))
"""The rows of a width may take the size limit divided by this number. Tallies of a day are never deleted."""
LATE_S = 10
"""A change of a second that ended this long before the newest one is late."""
_LATE_KEPT, _LATE_BYTES = 10_000, 2_000
"""Most late seconds that are kept: the first number, and at the size limit its bytes divided by the second (1%)."""
_PRUNE_LATE = "DELETE FROM late WHERE rowid <= (SELECT max(rowid) FROM late) - ?"
_SLACK_S = 2
"""Delay after the end of a bucket until it is merged, because processes are read one after the other."""
_ROW_BYTES = 200
"""Approximate size of a row of tallies without its sketches, or of a row of times."""
_KEY = "width = ? AND start_s = ? AND process = ? AND mode = ? AND kind = ? AND batch = ?"
_INTO_TALLIES = (
    f"INSERT INTO tallies (width, start_s, process, mode, kind, batch, {', '.join(COLUMNS)})"
    f" VALUES ({', '.join('?' * (6 + len(COLUMNS)))})"
    " ON CONFLICT (width, start_s, process, mode, kind, batch) DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in COLUMNS)
)
_ADD_TIME = (
    f"INSERT INTO times VALUES ({', '.join('?' * (4 + len(ACTIVITY_COLUMNS)))})"
    " ON CONFLICT (width, start_s, process, mode) DO UPDATE SET "
    + ", ".join(f"{name} = {name} + excluded.{name}" for name in ACTIVITY_COLUMNS)
)
_SUMS = ", ".join(f"sum({name})" for name in ACTIVITY_COLUMNS)
_Place = tuple[int, int, TallyKey]
"""Width, start in seconds, key."""


class TallyWriter:
    """Writes the tables `tallies` and `times`, within the transactions of its owner."""

    def __init__(self, connection: BoundedConnection) -> None:
        self._connection = connection
        self._db = connection.db
        self._names = SeriesNames()
        self._cache: dict[_Place, Tally] = {}
        """Tallies as stored in the database."""
        self._keys: set[TallyKey] = set()
        """Keys of all tallies so far."""
        self._whole: dict[int, int] = {}
        """The second up to which all tallies of a width exist, by width."""
        self._newest = 0
        """The second of the newest step or of the last write, the later of the two."""
        self._known = False
        """Whether these attributes match the database."""

    def reload_before_write(self) -> None:
        """Read the database again before the next write, because a transaction was rolled back."""
        self._known = False

    def _load(self) -> None:
        self._cache.clear()
        self._names = SeriesNames(self._connection.rows("SELECT number, name FROM series"))
        self._keys = {TallyKey(*row) for row in self._connection.rows("SELECT process, mode, kind, batch FROM keys")}
        meta = dict(self._connection.rows("SELECT key, value FROM meta WHERE key != 'run'"))
        self._whole = {width: meta.get(f"whole_{width}", 0) for width in WIDTHS[1:]}
        self._known = True

    def add(self, batch: WriteBatch) -> None:
        """Add the steps and times of a batch."""
        if not self._known:
            self._load()
        changed: dict[_Place, Tally] = {}
        new = {key for _, key in batch.steps_by_tally} - self._keys
        self._db.executemany("INSERT OR IGNORE INTO keys VALUES (?,?,?,?)", new)
        self._keys |= new
        for (second, key), ended in batch.steps_by_tally.items():
            for width in self._widths(second):
                self._changed_tally((width, second // width * width, key), changed).add(ended.rows, ended.series)
        newest = max((second for second, _ in batch.steps_by_tally), default=0)
        self._put(changed)
        self._add_times(batch.activity_ns)
        seconds = {second for second, _ in batch.steps_by_tally}
        seconds |= {second for second, *_ in batch.activity_ns}
        self._note_late(seconds, max(newest, batch.now_s))
        self._merge_closed_buckets(newest)
        if self._names.unwritten:
            self._db.executemany("INSERT OR IGNORE INTO series VALUES (?, ?)", self._names.unwritten)
            self._names.unwritten.clear()

    def _note_late(self, seconds: Collection[int], newest_s: int) -> None:
        """Note the seconds that a reader would not read again, because it looks only at the newest ones.

        After a stop of this process, these may be all seconds of a batch.
        """
        self._newest = max(self._newest, newest_s)
        late = [(second,) for second in seconds if second < self._newest - LATE_S]
        if late:
            ids = " UNION ALL ".join(f"SELECT max(id) AS id FROM {table}" for table in SHARE_IDS)
            self._db.executemany(f"INSERT INTO late SELECT ifnull(max(id), 0), ? FROM ({ids})", late)
            self._db.execute(_PRUNE_LATE, (_LATE_KEPT,))

    def _widths(self, second: int) -> Iterable[int]:
        """Return the widths of the tallies that include a second: 1 s, and the wider ones that already exist."""
        return [width for width in WIDTHS if width == 1 or second < self._whole[width]]

    def _changed_tally(self, place: _Place, changed: dict[_Place, Tally]) -> Tally:
        """Return the tally at a place, and note it as changed."""
        found = changed.get(place)
        if found is None:
            found = changed[place] = self._cache.get(place) or self._read(place)
        return found

    def _read(self, place: _Place) -> Tally:
        """Return the stored tally at a place; an empty one if there is none."""
        width, start, key = place
        query = f"SELECT {', '.join(COLUMNS)} FROM tallies WHERE {_KEY}"
        found = Tally()
        for row in self._db.execute(query, (width, start, *key)):
            found.add_row(row, self._names.by_number)
        return found

    def _put(self, tallies: Mapping[_Place, Tally]) -> None:
        rows = [(width, start, *key, *tally.row(self._names)) for (width, start, key), tally in tallies.items()]
        self._db.executemany(_INTO_TALLIES, rows)
        self._cache.update(tallies)
        if len(self._cache) > _CACHED:
            self._cache = dict(tallies)

    def _add_times(self, spent: Mapping[tuple[int, int, str, str], int]) -> None:
        sums: dict[tuple[int, int, int, str], list[int]] = defaultdict(lambda: [0] * len(ACTIVITIES))
        for (second, process, mode, activity), ns in spent.items():
            for width in self._widths(second):
                sums[width, second // width * width, process, mode][ACTIVITIES.index(activity)] += ns
        self._db.executemany(_ADD_TIME, [(*key, *values) for key, values in sums.items()])

    # ------------------------------------------------------------------------------------------ wider buckets

    def _merge_closed_buckets(self, newest_s: int) -> None:
        """Merge tallies and times into the wider buckets that have passed by second `newest_s`."""
        for finer, width in pairwise(WIDTHS):
            begin, end = self._whole[width], (newest_s - _SLACK_S) // width * width
            if end <= begin:
                continue
            self._merge_tallies(finer, width, begin, end)
            self._db.execute(
                f"INSERT OR REPLACE INTO times SELECT ?, start_s / ? * ?, process, mode, {_SUMS} FROM times"
                " WHERE width = ? AND start_s >= ? AND start_s < ? GROUP BY 2, 3, 4",
                (width, width, width, finer, begin, end),
            )
            self._whole[width] = end
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"whole_{width}", end))

    def _merge_tallies(self, finer: int, width: int, begin: int, end: int) -> None:
        query = (
            "SELECT start_s, process, mode, kind, batch FROM tallies"
            " WHERE width = ? AND start_s >= ? AND start_s < ? ORDER BY start_s"
        )
        wider: dict[_Place, Tally] = {}
        at = None
        for second, *values in list(self._connection.rows(query, (finer, begin, end))):
            start, key = second // width * width, TallyKey(*values)
            if start != at:
                self._put(wider)
                wider, at = {}, start
            place = finer, second, key
            wider.setdefault((width, start, key), Tally()).merge(self._cache.get(place) or self._read(place))
        self._put(wider)
        for place in [place for place in self._cache if place[0] < width and place[1] < end]:
            del self._cache[place]

    # ------------------------------------------------------------------------------------------ room

    def prune(self, limit: int) -> None:
        """Delete the oldest eighth of the tallies and times of each width that exceed their share of `limit` bytes."""
        run = self._db.execute
        run(_PRUNE_LATE, (limit // _LATE_BYTES,))
        # Read again: the wider tallies of a mirror come from other machines.
        whole = dict(self._connection.rows("SELECT key, value FROM meta WHERE key LIKE 'whole_%'"))
        query = (
            "SELECT count(*), total(size), min(start_s), max(start_s) FROM"
            " (SELECT start_s, length(sketches) AS size FROM tallies WHERE width = :width"
            " UNION ALL SELECT start_s, 0 FROM times WHERE width = :width)"
        )
        for width, wider in pairwise(WIDTHS):
            count, data, first, last = run(query, {"width": width}).fetchone()
            if count * _ROW_BYTES + data <= limit / _PARTS[width]:
                continue
            before = min(first + max((last - first) // 8, 1), whole.get(f"whole_{wider}", 0))
            for table in ("tallies", "times"):
                run(f"DELETE FROM {table} WHERE width = ? AND start_s < ?", (width, before))
            run(
                "INSERT INTO meta VALUES (?, ?) ON CONFLICT DO UPDATE SET value = max(value, excluded.value)",
                (f"pruned_{width}", before),
            )
            self._cache.clear()
