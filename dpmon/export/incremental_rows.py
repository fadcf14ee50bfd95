"""Selects the rows of a history that a reader does not have yet, and converts their times to the reader's clock.

Rows with ids from the common counter are sent once: the highest id is the offset. Other rows may change, and are then
sent again. The rows of the newest seconds are compared with what was sent, and the writer lists older seconds that have
changed. After a reconnection, all of these rows are sent again.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpmon.record.schema import SECOND, step_kind
from dpmon.store.activity_times import read_times
from dpmon.store.collectives import COLLECTIVE_SUMS
from dpmon.store.device_rollups import DEVICE_ROLLUPS
from dpmon.store.events import LASTING
from dpmon.store.quantile_sketch import pack
from dpmon.store.rollups import BEFORE_S
from dpmon.store.row_exchange import NUMBERED, TIMES, columns_sent, encode_rows
from dpmon.store.steps import STEPS, StepRow
from dpmon.store.store_queries import Store
from dpmon.store.table import StoreTable
from dpmon.store.tally_keys import read_keys
from dpmon.store.tally_tables import read_tallies
from dpmon.store.time_buckets import WIDTHS

MAX_IDS, MAX_COMPLETE_IDS = 20_000, 2000
"""Most ids of a chunk, if only some steps are sent, and if all rows are sent."""
MAX_CALLED_CHARS = 1 << 12
"""Most characters of the calls of a step, about 150 of them: of more calls, only the last are sent."""
MAX_SECONDS, MAX_RANK_SECONDS = 600, 2000
"""Most seconds by which a chunk advances sums and tallies, and for tallies, most seconds of all ranks together."""
INITIAL_ROWS_S = 600
"""At its first connection, a reader gets all rows of this time. Of earlier time, it gets tallies, sums,
losses and lasting events."""
INITIAL_TALLIES_S = {1: 120, 10: 1200, 60: 3 * 3600, 600: 86_400}
"""At its first connection, a reader gets tallies of this many seconds, by their width (s)."""
RECONNECT_FACTOR = 30
"""After a reconnection, a reader gets tallies of this many times INITIAL_TALLIES_S."""
LATE_S = 12
"""How many seconds are compared again with what was sent."""
_IS_NEW = "WHERE width = 1 AND start_s >= :new AND start_s < :end"
_HAS_CHANGED = "WHERE width = 1 AND seq > :seq AND start_s >= :oldest AND start_s < :new"
_SERIES_HAVE_CHANGED = f"WHERE (width, start_s, key) IN (SELECT width, start_s, key FROM tallies {_HAS_CHANGED})"
RARE_CHUNKS, MINUTE_CHUNKS = 5, 30
"""Sums over the whole run, and sums of minutes, are sent only in every n-th chunk."""
SPARSE_S, SPARSE_STEPS = 5, 4
"""A reader of many nodes gets every n-th sample of devices, and every n-th step with its calls and spans."""
_MAX_LASTING_EVENTS = 4000
_MAX_ROWS = 2000
_SUM_TABLES: tuple[tuple[StoreTable[Any], int], ...] = ((COLLECTIVE_SUMS, 1), (DEVICE_ROLLUPS, 60))
"""Tables of sums, and the width of their time buckets (s)."""


def choose_step_ids(rows: Iterable[tuple[int, int, int]], divisor: int = 1) -> list[int]:
    """Return the ids of the steps to send: about one or two per second.

    `rows`: id, number and end (ns) of the steps of one process. `divisor`: choose only every n-th of these steps, where
    n is a power of two. Ranks that average gradients have the same numbers, so that all of them choose the same steps,
    without remembering what was sent before.
    """
    steps = list(rows)
    if not steps:
        return []
    (_, _, first_end_ns), (_, _, last_end_ns) = steps[0], steps[-1]
    duration_ns = max(last_end_ns - first_end_ns, 1)
    one_in = divisor << max(((len(steps) - 1) * SECOND // duration_ns).bit_length() - 1, 0)
    return [step_id for step_id, number, _ in steps if number % one_in == 0]


class IncrementalRows:
    """The rows of a history for one reader: what was sent, and what to send next."""

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
        """`offset` and `tallied_s`: what the reader has. `shift_ns` and `shift_s`: added to times and seconds.

        `rollups`: send only some of the steps. `sparse`: also send only some of their details and of the device
        samples, because the reader has many nodes.
        """
        self.offset = offset
        self.whole: Collection[int] = ()
        """Processes of which all steps and collectives are sent."""
        self.left_out = 0
        """How many ids were skipped, because they are too old for a first connection."""
        self.deleted: dict[int, int] = {}
        """The reader's second before which it gets no tallies, by width."""
        self._rollups, self._sparse = rollups, sparse
        self._shift_ns, self._shift_s = shift_ns, shift_s
        self._tallied = max(tallied_s - shift_s, 0)
        self._first = offset == 0
        """Whether the reader has nothing yet."""
        self._begun = offset
        self._last_steps: dict[int, int] = {}
        """The id of the last step that was sent, by process."""
        self._again = RECONNECT_FACTOR if offset else 1
        self._since: dict[int, int] = {}
        self._seen: dict[str, dict[tuple[Any, ...], int]] = {}
        """The hash of each row that was sent and may change, by table and key."""
        self._defined: dict[int, int] = {}
        self._gaps: dict[int, int] = {}
        self._summed_s: dict[str, int] = {}
        """The second up to which a table of sums was sent, by table."""
        self._seq: int | None = None
        """The number of the transaction up to which changes of earlier seconds were sent."""
        self._chunks = 0

    @property
    def tallied_s(self) -> int:
        """The reader's second up to which the tallies were sent."""
        return self._tallied + self._shift_s

    def next_chunk(self, store: Store, upto_s: int, *, is_last: bool) -> tuple[list[str], bool]:
        """Return the lines with what is new, and whether there is more. `upto_s`: the seconds before it are complete.

        `is_last`: the run has ended.
        """
        newest_ids = (store.query(f"SELECT max(id) FROM {table}") for table in NUMBERED)
        newest_id = max(max_id or 0 for rows in newest_ids for (max_id,) in rows)
        lines: list[str] = []
        if self._chunks == 0 and self._rollups and self._first:
            lines += self._skip_backlog(store, upto_s)
        if self._chunks == 0 and not self._since:
            self._limit_backlog(store, upto_s)
        end_id = min(newest_id, self.offset + (MAX_IDS if self._rollups else MAX_COMPLETE_IDS))
        tallied_s = self._next_s(upto_s, min(MAX_SECONDS, MAX_RANK_SECONDS // max(len(store.rings), 1) + 1))
        is_rare_chunk_due = self._chunks % RARE_CHUNKS == 0 or is_last
        if is_rare_chunk_due or len(store.rings) > len(self._seen.get("rings", ())):
            lines += self._lines("rings", self._filter_changed("rings", self._rows(store, "rings", ""), 1))
        lines += self._definitions(store)
        lines += self._new_id_rows(store, end_id, is_last=is_last and end_id == newest_id)
        lines += self._changed_small_tables(store, upto_s, is_rare_chunk_due=is_rare_chunk_due, is_last=is_last)
        lines += self._gap_rows(store)
        lines += self._tallies(store, max(tallied_s, self._tallied))
        self._chunks += 1
        self.offset = max(end_id, self.offset)
        return lines, end_id < newest_id or tallied_s < upto_s or (is_last and min(self._summed_s.values()) < upto_s)

    def _next_s(self, upto_s: int, max_seconds: int) -> int:
        """Return the second up to which a chunk sends tallies.

        Of the beginning of a long run, only tallies of wider buckets are sent, each made of many rows.
        `max_seconds`: the largest advance, if tallies of single seconds are sent.
        """
        narrowest = WIDTHS[len(self._since)]
        for width, since in sorted(self._since.items()):
            if since <= self._tallied:
                narrowest = width
                break
            upto_s = min(upto_s, since)
        return min(upto_s, self._tallied + (max_seconds if narrowest == 1 else (max_seconds // 8 + 1) * narrowest))

    def _limit_backlog(self, store: Store, upto_s: int) -> None:
        """Limit the tallies of earlier time that are sent."""
        for width in INITIAL_TALLIES_S if self._rollups else ():
            since = self._since[width] = max(upto_s - INITIAL_TALLIES_S[width] * self._again, 0)
            deleted = max(since if since > self._tallied else 0, store.buckets.deleted_until[width])
            self.deleted[width] = deleted + self._shift_s if deleted else 0

    def _skip_backlog(self, store: Store, upto_s: int) -> list[str]:
        """Skip the rows that are too old for a first connection, except lasting events and losses."""
        query = "SELECT id FROM steps WHERE start_ns < ? ORDER BY id DESC LIMIT 1"
        last_skipped_id = next((step_id for (step_id,) in store.query(query, ((upto_s - INITIAL_ROWS_S) * SECOND,))), 0)
        if not last_skipped_id:
            return []
        self.left_out = last_skipped_id
        lasting = f"WHERE id IN (SELECT id FROM events WHERE {LASTING} AND id <= ? ORDER BY id DESC LIMIT ?)"
        lasting += " AND kind != 'exit'"
        lines = self._lines("events", self._rows(store, "events", lasting, last_skipped_id, _MAX_LASTING_EVENTS))
        lines += self._lines("losses", self._rows(store, "losses", "WHERE id <= ?", last_skipped_id))
        self.offset = last_skipped_id
        return lines

    # ------------------------------------------------------------------------------------------ reading

    def _rows(self, store: Store, table: str, condition: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows of a table. `values`: of the condition, or one mapping with them."""
        names = ", ".join(columns_sent(table))
        named = values[0] if values and isinstance(values[0], Mapping) else values
        return store.query(f"SELECT {names} FROM {table} {condition}", named)

    def _lines(self, table: str, rows: Iterable[Sequence[Any]]) -> list[str]:
        """Return rows as lines, with their times on the reader's clock."""
        columns = tuple(columns_sent(table))
        time_columns = [i for i, name in enumerate(columns) if name in TIMES] if self._shift_ns else []
        if table == "events":
            rows = [(*row[:-1], self._shift_event_times(row[-1])) for row in rows]
        if not time_columns:
            return list(encode_rows(table, columns, rows))
        shifted = [list(row) for row in rows]
        for row in shifted:
            for i in time_columns:
                if row[i] is not None:
                    row[i] += self._shift_ns
        return list(encode_rows(table, columns, shifted))

    def _shift_event_times(self, text: str) -> str:
        """Return the JSON of an event with its times on the reader's clock."""
        if not self._shift_ns:
            return text
        data = json.loads(text)
        for name in ("t_s", "since_s"):
            if data.get(name) is not None:
                data[name] += self._shift_ns / 1e9
        return json.dumps(data, separators=(",", ":"))

    def _filter_changed(self, table: str, rows: Sequence[tuple[Any, ...]], key_length: int) -> list[tuple[Any, ...]]:
        """Return the changed ones of `rows`. The first `key_length` columns are the key."""
        earlier_hashes = self._seen.get(table, {})
        hashes = self._seen[table] = {row[:key_length]: hash(row) for row in rows}
        return [row for row in rows if earlier_hashes.get(row[:key_length]) != hashes[row[:key_length]]]

    # ------------------------------------------------------------------------------------------ numbered rows

    def _new_id_rows(self, store: Store, end_id: int, *, is_last: bool) -> list[str]:
        """Return the rows with ids above the offset, up to `end_id`. With `is_last`, also each process's last step."""
        id_range = "WHERE id > ? AND id <= ?"
        event_condition = f"{id_range} AND kind != 'exit'"
        if self._sparse and not self.whole:
            event_condition += f" AND (kind NOT IN ('device', 'host') OR t_ns / {SECOND} % {SPARSE_S} = 0)"
        events = self._rows(store, "events", event_condition, self.offset, end_id)
        lines = self._lines("events", events)
        lines += self._lines("losses", self._rows(store, "losses", id_range, self.offset, end_id))
        if not self._rollups:
            lines += self._lines("collectives", self._rows(store, "collectives", id_range, self.offset, end_id))
            rows = STEPS.select(store.connection, id_range, (self.offset, end_id))
            return lines + self._lines("steps", map(STEPS.to_values, map(_with_last_calls, rows)))
        complete_processes = f"process IN ({', '.join(map(str, self.whole))})"
        lines += self._lines(
            "collectives", self._rows(store, "collectives", f"{id_range} AND {complete_processes}", self.offset, end_id)
        )
        steps: dict[tuple[int, tuple[bool, bool, int]], list[tuple[int, int, int]]] = defaultdict(list)
        """By process, by whether they are steps of a loop and averaged gradients (with accumulation, only some steps
        do), and by kind."""
        process_by_id: dict[int, int] = {}
        query = f"SELECT id, process, step, kind, sync_number, start_ns + wall_ns FROM steps {id_range}"
        for row_id, process, step, flags, sync_number, end_ns in store.query(query, (self.offset, end_id)):
            process_by_id[row_id] = process
            similar_steps = steps[process, (step > 0, sync_number is not None, step_kind(flags))]
            number = step if sync_number is None else sync_number
            if step <= 0:  # calls alone have no number
                number = len(similar_steps)
            similar_steps.append((row_id, number, end_ns))
        divisor = 1 + self._sparse
        chosen_ids: set[int] = set()
        for (process, (is_step, *_)), similar_steps in steps.items():
            row_ids = [row_id for row_id, _, _ in similar_steps]
            if process not in self.whole:
                row_ids = choose_step_ids(similar_steps, divisor)
            chosen_ids.update(row_ids)
            if is_step:
                self._last_steps[process] = max([self._last_steps.get(process, 0), *row_ids])
        newest = f"SELECT max(id), process FROM steps {id_range} AND step > 0 GROUP BY process"
        for row_id, process in store.query(newest, (self._begun, end_id)) if is_last else ():
            if row_id > self._last_steps.get(process, 0):  # otherwise, readers would show an earlier step
                chosen_ids.add(row_id)
                self._last_steps[process], process_by_id[row_id] = row_id, process
        detailed_ids = chosen_ids
        if self._sparse:
            detailed_ids = {row_id for rows in steps.values() for row_id in choose_step_ids(rows, SPARSE_STEPS)}
            detailed_ids |= {row_id for row_id in chosen_ids if process_by_id[row_id] in self.whole}
        chosen = [
            _with_last_calls(row) if row.id in detailed_ids else row._replace(spans=None, called=None)
            for row in _steps_by_id(store, sorted(chosen_ids))
        ]
        return lines + self._lines("steps", map(STEPS.to_values, chosen))

    # ------------------------------------------------------------------------------------------ other tables

    def _definitions(self, store: Store) -> list[str]:
        rows: list[tuple[Any, ...]] = []
        for ring in store.rings.values():
            last_number = self._defined.get(ring.process, -1)
            rows += self._rows(store, "definitions", "WHERE process = ? AND number > ?", ring.process, last_number)
            self._defined[ring.process] = max((row[1] for row in rows if row[0] == ring.process), default=last_number)
        return self._lines("definitions", rows)

    def _changed_small_tables(self, store: Store, upto_s: int, *, is_rare_chunk_due: bool, is_last: bool) -> list[str]:
        """Return the changed rows of the small tables, and the sums of collectives and devices."""
        tables = [("keys", 1), *([("shapes", 7)] if is_rare_chunk_due else [])]
        lines = []
        for table, keys in tables:
            lines += self._lines(table, self._filter_changed(table, self._rows(store, table, ""), keys))
        loops = "WHERE loop > (SELECT max(loop) FROM loops AS other WHERE other.process = loops.process) - ?"
        recent = _MAX_ROWS if self._chunks == 0 else 10
        lines += self._lines("loops", self._filter_changed("loops", self._rows(store, "loops", loops, recent), 2))
        minute = is_last or self._chunks % MINUTE_CHUNKS == 0
        for summed, width in _SUM_TABLES[: is_rare_chunk_due + (is_rare_chunk_due and minute)]:
            lines += self._lines(summed.name, self._changed_sum_rows(store, summed, width, upto_s))
        return lines

    def _changed_sum_rows(self, store: Store, table: StoreTable[Any], width: int, upto_s: int) -> list[tuple[Any, ...]]:
        """Return the changed rows of a table of sums by second or minute; at first, all earlier time is one row."""
        # Before a disconnect, the sums of about the last minute had not been sent.
        first_s = upto_s - INITIAL_ROWS_S if self._first else self._tallied - 60 - MINUTE_CHUNKS
        start_s = self._summed_s.get(table.name, first_s)
        end_s = self._summed_s[table.name] = min(upto_s, start_s + MAX_SECONDS * width)
        since_s = max(start_s - 60 - LATE_S, 0) // width * width
        rows = [
            ((row[0] + self._shift_s) // width * width, *row[1:])
            for row in self._rows(store, table.name, "WHERE start_s >= ? AND start_s < ?", since_s, end_s)
        ]
        changed = self._filter_changed(table.name, rows, 3)
        if self._chunks == 0 and self._first:
            earlier = table.merge_sql(f"FROM {table.name} WHERE start_s < ?", start_s=str(BEFORE_S))
            changed += store.query(earlier, (since_s,))
        return changed

    def _gap_rows(self, store: Store) -> list[str]:
        """Return new gaps between steps. After a reconnection, those after the last step that was sent."""
        rows: list[tuple[Any, ...]] = []
        for process in (ring.process for ring in store.rings.values()):
            if process not in self._gaps:
                step = "SELECT start_ns FROM steps WHERE process = ? AND step > 0 AND id <= ? ORDER BY id DESC LIMIT 1"
                query = f"SELECT max(id) FROM gaps WHERE process = ? AND end_ns <= ({step})"
                newest_rows = store.query(query, (process, process, 0 if self._first else self.offset))
                self._gaps[process] = max((max_id or 0 for (max_id,) in newest_rows), default=0)
            condition = "WHERE process = ? AND id > ? ORDER BY id DESC LIMIT ?"
            new_rows = self._rows(store, "gaps", condition, process, self._gaps[process], _MAX_ROWS)
            self._gaps[process] = max((row[0] for row in new_rows), default=self._gaps[process])
            rows += new_rows
        return self._lines("gaps", rows)

    # ------------------------------------------------------------------------------------------ tallies

    def _tallies(self, store: Store, upto_s: int) -> list[str]:
        """Return the tallies and times of the seconds up to `upto_s` that are new or have changed, of all widths."""
        first_new_s = max(self._tallied, self._since.get(1, 0))
        if self._seq is None:
            self._seq = self._sent_seq(store)
        values = {"seq": self._seq, "oldest": self._since.get(1, 0), "new": first_new_s, "end": upto_s}
        rows: dict[str, list[tuple[Any, ...]]] = {}
        for table, is_new, has_changed in (
            ("tallies", _IS_NEW, _HAS_CHANGED),
            ("times", _IS_NEW, _HAS_CHANGED),
            ("series", _IS_NEW, _SERIES_HAVE_CHANGED),
        ):
            sent = self._rows(store, table, is_new, values) + self._rows(store, table, has_changed, values)
            rows[table] = [(1, row[1] + self._shift_s, *row[2:]) for row in sent]
        seconds = {row[1] - self._shift_s for table in ("tallies", "times") for row in rows[table]}
        numbers = {
            key: number
            for left_out in (False, True)
            for number, key in read_keys(store.connection, left_out=left_out).items()
        }
        for width, start in self._closed_time_buckets(seconds, upto_s):
            first, end = (store.buckets.next_edge(max(edge_s - self._shift_s, 0)) for edge_s in (start, start + width))
            if first < end:
                for left_out in (False, True):
                    for key, tally in read_tallies(store, first, end, left_out=left_out).items():
                        place = width, start, numbers[key]
                        rows["tallies"].append((*place, *tally.columns))
                        rows["series"] += (
                            (*place, name, stats.count, stats.total, pack(stats.counts))
                            for name, stats in tally.stats.items()
                        )
                rows["times"] += _merged_time_rows(store, first, end, width, start)
        self._tallied, self._seq = upto_s, store.seq
        return [line for table, table_rows in rows.items() for line in self._lines(table, table_rows)]

    def _sent_seq(self, store: Store) -> int:
        """Return the number of a transaction after which the reader may lack changes of the seconds that it has."""
        query = "SELECT min(seq) FROM tallies WHERE width = 1 AND start_s >= ? AND start_s < ?"
        ((seq,),) = store.query(query, (self._tallied - LATE_S, self._tallied))
        return store.seq if seq is None else seq - 1

    def _closed_time_buckets(self, changed: Collection[int], upto_s: int) -> list[tuple[int, int]]:
        """Return width and start of the reader's wider buckets that end now or have changed since they were sent."""
        start_s, end_s = self._tallied + self._shift_s, upto_s + self._shift_s
        buckets: set[tuple[int, int]] = set()
        for width in WIDTHS[1:]:
            starts = {(second + self._shift_s) // width * width for second in changed}
            buckets.update((width, start) for start in starts if start + width <= start_s)
            since = self._since.get(width, 0) + self._shift_s
            starts = set(range(start_s // width * width, end_s, width))
            buckets.update((width, start) for start in starts if max(start_s, since) < start + width <= end_s)
        return sorted(buckets)


def _steps_by_id(store: Store, row_ids: Sequence[int]) -> Iterator[StepRow]:
    for start in range(0, len(row_ids), 500):
        numbers = ", ".join(map(str, row_ids[start : start + 500]))
        yield from STEPS.select(store.connection, f"WHERE id IN ({numbers})")


def _with_last_calls(row: StepRow) -> StepRow:
    """Return a step with only the last of its calls if they have more than MAX_CALLED_CHARS characters."""
    if row.called is None or len(row.called) <= MAX_CALLED_CHARS:
        return row
    calls = json.loads(row.called)
    last_calls = calls[-max(len(calls) * MAX_CALLED_CHARS // len(row.called), 1) :]
    return row._replace(called=json.dumps(last_calls, separators=(",", ":")))


def _merged_time_rows(store: Store, begin_s: int, end_s: int, width: int, start: int) -> Iterator[tuple[Any, ...]]:
    """Yield the times between two seconds as rows of one time bucket."""
    sums: Counter[tuple[int, str, str]] = Counter()
    for row in read_times(store, begin_s, end_s):
        sums.update({(row.process, row.mode, activity): ns for activity, ns in row.spent.items() if ns})
    for key, ns in sums.items():
        yield width, start, *key, ns
