"""Selects the rows of a history that a reader does not have yet, and moves their times to the reader's clock.

Rows with ids from the common counter are sent once: the highest id is the offset. Other rows change, and are sent
again when they have: those of the newest seconds are compared with what was sent, and the writer notes the seconds that
change later. After a new connection, all of them are sent again.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from dpmon.record.safe_json import load_json
from dpmon.record.schema import SECOND
from dpmon.store.history_schema import BEFORE_S, COLLECTIVE_SUMS, LASTING
from dpmon.store.row_exchange import NUMBERED, TIMES, columns_sent, encode_rows
from dpmon.store.store_queries import Store
from dpmon.store.tally import WIDTHS, SeriesNames
from dpmon.store.time_accounting import ACTIVITIES

MOST_IDS, MOST_WHOLE = 20_000, 2000
"""Most ids of a chunk: if only some steps are sent, and if all rows are."""
MOST_SECONDS, MOST_OF_RANKS = 600, 2000
"""Most seconds by which a chunk advances sums and tallies, and of tallies, most seconds of all ranks together."""
_READ_AS = {
    ("events", "process"): "ifnull(process, -1)",  # those of the supervisor have no process
    ("device_rollups", "device"): "device AS number",
}
"""Columns that have another type in the tables before theirs, under names of their type (see `CheckedConnection`)."""
ROWS_S = 600
"""At its first connection, a reader gets the steps and samples of this time; of earlier time, what the figures need."""
SINCE_S = {1: 120, 10: 1200, 60: 3 * 3600, 600: 86_400}
"""Likewise, for tallies of these widths."""
AGAIN = 30
"""After a cut, a reader gets the rows of this many times that time."""
LATE_S = 12
"""Seconds that are compared again with what was sent; a little more than the writer's (dpmon.store.tally_writer)."""
SELDOM, MINUTE_S = 5, 30
"""Sums over the whole run, and sums of minutes, are sent in one chunk of this many."""
SPARSE_S, SPARSE_STEPS = 5, 4
"""For a reader of many machines: one in so many samples of devices, and of steps with calls and spans."""
_MOST_LASTING = 4000
_MOST_ROWS = 2000
_SUMS = (("collective_sums", "process, definition", 1), ("device_rollups", "device, name", 60))
"""Tables of sums, the rest of their keys, and the length of a stretch in seconds."""


def choose_step_ids(rows: Iterable[tuple[int, int, int]], fewer: int = 1) -> list[int]:
    """Return the ids of the steps to send, of (id, number, end in ns) of one process: about one or two a second.

    `fewer`: one in so many of these; a power of two.

    The numbers are the same on all ranks that average gradients, so that all of them send the same steps. This needs
    no memory of what was sent before.
    """
    rows = list(rows)
    took = max(rows[-1][2] - rows[0][2], 1) if rows else 1
    one_in = fewer << max(((len(rows) - 1) * SECOND // took).bit_length() - 1, 0)
    return [row for row, number, _ in rows if number % one_in == 0]


class IncrementalRows:
    """What was sent to one reader, and what is to be sent next."""

    def __init__(
        self,
        *,
        rollups: bool,
        offset: int = 0,
        tallied_s: int = 0,
        shift_ns: int = 0,
        shift_s: int = 0,
        sparse: bool = False,
    ) -> None:
        """`offset` and `tallied_s`: what the reader has. `shift_ns` and `shift_s`: what is added to times and seconds.

        `rollups`: only some of the steps and calls. `sparse`: of their details and of the samples of devices, only
        some, too: the reader has many machines.
        """
        self.offset = offset
        self.whole: Collection[int] = ()
        """Processes whose steps, calls and collectives are all sent."""
        self.left_out = 0
        """Number of ids that are too old for a first connection."""
        self.deleted: dict[int, int] = {}
        """By width: the reader's second before which it gets no tallies."""
        self._rollups, self._sparse = rollups, sparse
        self._shift_ns, self._shift_s = shift_ns, shift_s
        self._tallied = max(tallied_s - shift_s, 0)
        self._first = offset == 0
        """Whether the reader has nothing yet."""
        self._begun = offset
        self._last_steps: dict[int, int] = {}
        """By process: the id of the last step that was sent."""
        self._again = AGAIN if offset else 1
        self._since: dict[int, int] = {}
        self._seen: dict[str, dict[tuple[Any, ...], int]] = {}
        """By table: the hash of each row that was sent and may change, by its key."""
        self._defined: dict[int, int] = {}
        self._gaps: dict[int, int] = {}
        self._summed_s: dict[str, int] = {}
        """By table of sums: the second up to which they were sent."""
        self._late: int | None = None
        self._chunks = 0

    @property
    def tallied_s(self) -> int:
        """The reader's second up to which the tallies were sent."""
        return self._tallied + self._shift_s

    def next_chunk(self, store: Store, upto_s: int, *, last: bool) -> tuple[list[str], bool]:
        """Return the lines with what is new, and whether there is more. `upto_s`: the seconds before it are complete.

        `last`: the run has ended.
        """
        newest = max(row[0] or 0 for table in NUMBERED for row in store.query(f"SELECT max(id) FROM {table}"))
        lines: list[str] = []
        if self._chunks == 0 and self._rollups and self._first:
            lines += self._skip_backlog(store, upto_s)
        if self._chunks == 0 and not self._since:
            self._limit_backlog(store, upto_s)
        until = min(newest, self.offset + (MOST_IDS if self._rollups else MOST_WHOLE))
        tallied = self._next_s(upto_s, min(MOST_SECONDS, MOST_OF_RANKS // max(len(store.rings), 1) + 1))
        seldom = self._chunks % SELDOM == 0 or last
        if seldom or len(store.rings) > len(self._seen.get("rings", ())):
            lines += self._lines("rings", self._filter_changed("rings", self._rows(store, "rings", ""), 1))
        lines += self._definitions(store)
        lines += self._new_id_rows(store, until, last=last and until == newest)
        lines += self._changed_small_tables(store, upto_s, seldom=seldom, last=last)
        lines += self._gap_rows(store)
        lines += self._tallies(store, max(tallied, self._tallied))
        self._chunks += 1
        self.offset = max(until, self.offset)
        return lines, until < newest or tallied < upto_s or (last and min(self._summed_s.values()) < upto_s)

    def _next_s(self, upto_s: int, most: int) -> int:
        """Return the second to which a chunk advances the tallies.

        For the beginning of a long run, only wider stretches are sent, each made from many rows. `most`: the most
        seconds, if tallies of single seconds are sent.
        """
        narrowest = WIDTHS[len(self._since)]
        for width, since in sorted(self._since.items()):
            if since <= self._tallied:
                narrowest = width
                break
            upto_s = min(upto_s, since)
        return min(upto_s, self._tallied + (most if narrowest == 1 else (most // 8 + 1) * narrowest))

    def _limit_backlog(self, store: Store, upto_s: int) -> None:
        """Limit what is sent of the time before."""
        for width in SINCE_S if self._rollups else ():
            since = self._since[width] = max(upto_s - SINCE_S[width] * self._again, 0)
            deleted = max(since if since > self._tallied else 0, store.kept_from(width))
            self.deleted[width] = deleted + self._shift_s if deleted else 0

    def _skip_backlog(self, store: Store, upto_s: int) -> list[str]:
        """Skip the rows that are too old for a first connection, except lasting events and losses."""
        query = "SELECT id FROM steps WHERE start_ns < ? ORDER BY id DESC LIMIT 1"
        low = next((number for (number,) in store.query(query, ((upto_s - ROWS_S) * SECOND,))), 0)
        if not low:
            return []
        self.left_out = low
        lasting = f"WHERE id IN (SELECT id FROM events WHERE {LASTING} AND id <= ? ORDER BY id DESC LIMIT ?)"
        lines = self._lines("events", self._rows(store, "events", f"{lasting} AND kind != 'exit'", low, _MOST_LASTING))
        lines += self._lines("losses", self._rows(store, "losses", "WHERE id <= ?", low))
        self.offset = low
        return lines

    # ------------------------------------------------------------------------------------------ reading

    def _rows(self, store: Store, table: str, where: str, *values: object) -> list[tuple[Any, ...]]:
        names = ", ".join(_READ_AS.get((table, name), name) for name in columns_sent(table))
        return store.query(f"SELECT {names} FROM {table} {where}", values)

    def _lines(self, table: str, rows: Iterable[Sequence[Any]]) -> list[str]:
        """Return rows as lines, with their times on the reader's clock."""
        columns = tuple(columns_sent(table))
        at = [i for i, name in enumerate(columns) if name in TIMES] if self._shift_ns else []
        if table == "events":
            rows = [(*row[:-1], self._shift_event_times(row[-1])) for row in rows]
        if not at:
            return list(encode_rows(table, columns, rows))
        moved = [list(row) for row in rows]
        for row in moved:
            for i in at:
                if row[i] is not None:
                    row[i] += self._shift_ns
        return list(encode_rows(table, columns, moved))

    def _shift_event_times(self, text: str) -> str:
        """Return the JSON of an event with its times on the reader's clock."""
        if not self._shift_ns:
            return text
        try:
            data = load_json(text)
        except ValueError:
            return text
        for name in ("t_s", "since_s") if isinstance(data, dict) else ():
            if type(data.get(name)) in (int, float):
                data[name] += self._shift_ns / 1e9
        return json.dumps(data, separators=(",", ":"))

    def _filter_changed(self, table: str, rows: Sequence[tuple[Any, ...]], keys: int) -> list[tuple[Any, ...]]:
        """Return the rows that have changed. `rows`: all that still may; the first `keys` columns are the key."""
        before = self._seen.get(table, {})
        now = self._seen[table] = {row[:keys]: hash(row) for row in rows}
        return [row for row in rows if before.get(row[:keys]) != now[row[:keys]]]

    # ------------------------------------------------------------------------------------------ numbered rows

    def _new_id_rows(self, store: Store, until: int, *, last: bool) -> list[str]:
        """Return the rows with ids above the offset, up to `until`; if it is the `last` time, also the last steps."""
        between = "WHERE id > ? AND id <= ?"
        which = f"{between} AND kind != 'exit'"
        if self._sparse and not self.whole:
            which += f" AND (kind NOT IN ('device', 'host') OR t_ns / {SECOND} % {SPARSE_S} = 0)"
        events = self._rows(store, "events", which, self.offset, until)
        lines = self._lines("events", events)
        lines += self._lines("losses", self._rows(store, "losses", between, self.offset, until))
        if not self._rollups:
            for table in ("calls", "steps", "collectives"):
                lines += self._lines(table, self._rows(store, table, between, self.offset, until))
            return lines
        whole = f"process IN ({', '.join(map(str, self.whole))})"
        lines += self._lines(
            "collectives", self._rows(store, "collectives", f"{between} AND {whole}", self.offset, until)
        )
        steps: dict[tuple[int, bool], list[tuple[int, int, int]]] = defaultdict(list)
        """By process, and by whether they averaged gradients: with accumulation, only some steps do."""
        names: dict[int, tuple[int, int]] = {}
        query = f"SELECT id, process, step, sync_number, start_ns + wall_ns FROM steps {between}"
        for number, process, step, sync_number, end in store.query(query, (self.offset, until)):
            averaged = sync_number is not None
            steps[process, averaged].append((number, sync_number if averaged else step, end))
            names[number] = process, step
        fewer = 1 + self._sparse
        chosen = {
            number
            for (process, _), ended in steps.items()
            for number in ([row[0] for row in ended] if process in self.whole else choose_step_ids(ended, fewer))
        }
        self._last_steps |= {names[number][0]: number for number in sorted(chosen)}
        newest = f"SELECT max(id), process, step FROM steps {between} GROUP BY process"
        for number, process, step in store.query(newest, (self._begun, until)) if last else ():
            if number > self._last_steps.get(process, 0):  # else readers would show an earlier step
                chosen.add(number)
                self._last_steps[process], names[number] = number, (process, step)
        detailed = chosen
        if self._sparse:
            few = {number for ended in steps.values() for number in choose_step_ids(ended, SPARSE_STEPS)}
            detailed = {number for number in chosen if number in few or names[number][0] in self.whole}
        in_steps, trains = {names[number] for number in detailed}, {process for process, _ in steps}
        calls: dict[tuple[int, ...], int] = {}
        query = f"SELECT id, process, step, layout FROM calls {between}"
        for number, process, step, layout in store.query(query, (self.offset, until)):
            if process in self.whole:
                calls[process, number] = number
            elif (process, step) in in_steps or process not in trains:
                calls[process, step * (process in trains), layout] = number  # the last one of a module
        lines += self._lines("calls", self._rows_by_id(store, "calls", sorted(calls.values())))
        spans = list(columns_sent("steps")).index("spans")
        rows = [
            row if row[0] in detailed else (*row[:spans], None, *row[spans + 1 :])
            for row in self._rows_by_id(store, "steps", sorted(chosen))
        ]
        return lines + self._lines("steps", rows)

    def _rows_by_id(self, store: Store, table: str, numbers: Sequence[int]) -> Iterator[tuple[Any, ...]]:
        for at in range(0, len(numbers), 500):
            yield from self._rows(store, table, f"WHERE id IN ({', '.join(map(str, numbers[at : at + 500]))})")

    # ------------------------------------------------------------------------------------------ other tables

    def _definitions(self, store: Store) -> list[str]:
        rows: list[tuple[Any, ...]] = []
        for ring in store.rings.values():
            known = self._defined.get(ring.process, -1)
            rows += self._rows(store, "definitions", "WHERE process = ? AND number > ?", ring.process, known)
            self._defined[ring.process] = max((row[1] for row in rows if row[0] == ring.process), default=known)
        return self._lines("definitions", rows)

    def _changed_small_tables(self, store: Store, upto_s: int, *, seldom: bool, last: bool) -> list[str]:
        """Return the changed rows of the small tables, and the sums of collectives and devices."""
        tables = [("series", 1), ("keys", 4), *([("shapes", 7)] if seldom else [])]
        lines = []
        for table, keys in tables:
            lines += self._lines(table, self._filter_changed(table, self._rows(store, table, ""), keys))
        loops = "WHERE loop > (SELECT max(loop) FROM loops AS other WHERE other.process = loops.process) - ?"
        recent = _MOST_ROWS if self._chunks == 0 else 10
        lines += self._lines("loops", self._filter_changed("loops", self._rows(store, "loops", loops, recent), 2))
        minute = last or self._chunks % MINUTE_S == 0
        for table, per, width in _SUMS[: seldom + (seldom and minute)]:
            lines += self._lines(table, self._changed_sum_rows(store, table, per, width, upto_s))
        return lines

    def _changed_sum_rows(self, store: Store, table: str, per: str, width: int, upto_s: int) -> list[tuple[Any, ...]]:
        """Return the changed rows of a table of sums by second or minute; at first, all earlier time is one row."""
        # Of the time before a cut, the sums of the last minute or so had not been sent.
        first_s = upto_s - ROWS_S if self._first else self._tallied - 60 - MINUTE_S
        begin = self._summed_s.get(table, first_s)
        until = self._summed_s[table] = min(upto_s, begin + MOST_SECONDS * width)
        since = max(begin - 60 - LATE_S, 0) // width * width
        rows = [
            ((row[0] + self._shift_s) // width * width, *row[1:])
            for row in self._rows(store, table, "WHERE start_s >= ? AND start_s < ?", since, until)
        ]
        found = self._filter_changed(table, rows, 3)
        if self._chunks == 0 and self._first:
            sums = {name: "max" if name == "high" else "sum" for name in ("count", "total", "high")}
            if table == "collective_sums":
                sums = dict.fromkeys(COLLECTIVE_SUMS, "sum")
            # The door takes an expression for a whole number, so it gets the name of the column.
            named = ", ".join(f"{how}({name}) AS {name}" for name, how in sums.items())
            own = per.replace("device", "device AS number")
            query = f"SELECT {BEFORE_S} AS start_s, {own}, {named} FROM {table} WHERE start_s < ? GROUP BY {per}"
            found += store.query(query, (since,))
        return found

    def _gap_rows(self, store: Store) -> list[str]:
        """Return new gaps between steps; after a cut, those after the last step that was sent."""
        rows: list[tuple[Any, ...]] = []
        for process in (ring.process for ring in store.rings.values()):
            if process not in self._gaps:
                step = "SELECT start_ns FROM steps WHERE process = ? AND id <= ? ORDER BY id DESC LIMIT 1"
                query = f"SELECT max(id) FROM gaps WHERE process = ? AND end_ns <= ({step})"
                known = store.query(query, (process, process, 0 if self._first else self.offset))
                self._gaps[process] = max((row[0] or 0 for row in known), default=0)
            where = "WHERE process = ? AND id > ? ORDER BY id DESC LIMIT ?"
            found = self._rows(store, "gaps", where, process, self._gaps[process], _MOST_ROWS)
            self._gaps[process] = max((row[0] for row in found), default=self._gaps[process])
            rows += found
        return self._lines("gaps", rows)

    # ------------------------------------------------------------------------------------------ tallies

    def _tallies(self, store: Store, upto_s: int) -> list[str]:
        """Return the tallies and times of the seconds up to `upto_s` that are new or have changed, of all widths."""
        names = SeriesNames(store.query("SELECT number, name FROM series"))
        late = self._late_seconds(store)
        begin = max(self._tallied - LATE_S, self._since.get(1, 0))
        seconds: set[int] = set()
        lines: list[str] = []
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for table, keys in (("tallies", 6), ("times", 4)):
            found = self._rows(store, table, "WHERE width = 1 AND start_s >= ? AND start_s < ?", begin, upto_s)
            found = self._filter_changed(table, found, keys)
            for at in range(0, len(late), 500):
                which = f"WHERE width = 1 AND start_s IN ({', '.join(map(str, late[at : at + 500]))})"
                found += self._rows(store, table, which)
            seconds.update(row[1] for row in found)
            rows[table] = [(1, row[1] + self._shift_s, *row[2:]) for row in found]
        for width, start in self._closed_time_buckets(seconds, upto_s):
            first, end = (store.next_bucket_edge(max(at - self._shift_s, 0)) for at in (start, start + width))
            if first < end:
                for left_out in (False, True):
                    whole = store.tallies(first, end, left_out=left_out)
                    rows["tallies"] += ((width, start, *key, *tally.row(names)) for key, tally in whole.items())
                rows["times"] += _merged_time_rows(store, first, end, width, start)
        self._tallied = upto_s
        for table, each in rows.items():
            lines += self._lines(table, each)
        return lines

    def _late_seconds(self, store: Store) -> list[int]:
        """Return the seconds that have changed late since the last chunk."""
        if self._late is None:
            before = store.query("SELECT max(rowid) FROM late WHERE id < ?", (self.offset,))
            self._late = max((row[0] or 0 for row in before), default=0)
        rows = store.query("SELECT rowid, start_s FROM late WHERE rowid > ? ORDER BY rowid", (self._late,))
        self._late = max((row[0] for row in rows), default=self._late)
        begin = max(self._tallied - LATE_S, 0)
        return sorted({second for _, second in rows if self._since.get(1, 0) <= second < begin})

    def _closed_time_buckets(self, changed: Collection[int], upto_s: int) -> list[tuple[int, int]]:
        """Return width and start of the reader's wider stretches that end now, or have changed since they were sent."""
        begin, end = self._tallied + self._shift_s, upto_s + self._shift_s
        found: set[tuple[int, int]] = set()
        for width in WIDTHS[1:]:
            starts = {(second + self._shift_s) // width * width for second in changed}
            found.update((width, start) for start in starts if start + width <= begin)
            since = self._since.get(width, 0) + self._shift_s
            starts = set(range(begin // width * width, end, width))
            found.update((width, start) for start in starts if max(begin, since) < start + width <= end)
        return sorted(found)


def _merged_time_rows(store: Store, begin_s: int, end_s: int, width: int, start: int) -> Iterator[tuple[Any, ...]]:
    """Yield the times between two seconds as rows of one stretch."""
    sums: dict[tuple[int, str], list[int]] = defaultdict(lambda: [0] * len(ACTIVITIES))
    for row in store.time_rows(begin_s, end_s):
        whole = sums[row.process, row.mode]
        for at, name in enumerate(ACTIVITIES):
            whole[at] += row.spent[name]
    for key, values in sums.items():
        yield width, start, *key, *values
