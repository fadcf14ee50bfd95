"""Selects the rows of a history that a reader does not have yet.

Rows with ids from the common counter are sent once, in the order of their ids. All other rows may change. They are sent
when a transaction has changed them (dpmon.store.table.CHANGING), and the reader replaces those with the same key. Time
buckets (dpmon.store.time_buckets) are sent when their time is over. A new reader gets narrow ones of recent time only.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable
from itertools import pairwise
from typing import Any

from dpmon.record.schema import SECOND, step_kind
from dpmon.store.collectives import COLLECTIVE_SUMS
from dpmon.store.database import BUCKET_TABLES, TABLES
from dpmon.store.device_rollups import DEVICE_ROLLUPS
from dpmon.store.events import LASTING
from dpmon.store.row_exchange import TIMES, columns_sent, encode_rows
from dpmon.store.steps import STEPS, StepRow
from dpmon.store.store_queries import Store
from dpmon.store.table import NUMBERED, Parameters, StoreTable
from dpmon.store.time_buckets import BEFORE_S, WIDTHS

MAX_IDS, MAX_COMPLETE_IDS = 20_000, 2000
"""Most ids of a chunk, if only some steps are sent, and if all rows are sent."""
MAX_ROWS = 20_000
"""Most changed rows of a table in a chunk."""
MAX_CALLED_CHARS = 1 << 12
"""Most characters of the calls of a step, about 150 of them: of more calls, only the last are sent."""
MAX_BUCKETS = 2000
"""Most new time buckets of all keys together in a chunk, and most earlier ones that are read at once."""
MAX_BACKLOG_CHARS = 1 << 20
"""After this many characters of earlier time buckets, a chunk ends."""
INITIAL_ROWS_S = 600
"""How far back (s) a new reader gets steps, events and sums. Earlier sums arrive as one row per key; earlier losses and
lasting events arrive in full."""
INITIAL_BUCKETS_S = {1: 120, 10: 1200, 60: 3 * 3600, 600: 86_400}
"""How far back (s) a new reader gets time buckets, by width. Wider ones go back to the run's start."""
RECONNECT_FACTOR = 30
"""After a reconnection, a reader gets time buckets of this many times INITIAL_BUCKETS_S."""
CHANGED_S = 600
"""After a reconnection, changed time buckets up to this age (s) are sent again."""
_INTERVALS = {"rings": 5, "shapes": 5, "collective_sums": 5, "device_rollups": 30}
"""The changed rows of these tables are sent only in every n-th chunk."""
SPARSE_S, SPARSE_STEPS = 5, 4
"""A reader of many nodes gets every n-th sample of devices, and every n-th step with its calls and spans."""
_SUM_TABLES = (COLLECTIVE_SUMS, DEVICE_ROLLUPS)
_MAX_LASTING_EVENTS = 4000


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
        seq: int = 0,
        tallied_s: int = 0,
        shift_ns: int = 0,
        shift_s: int = 0,
        sparse: bool = False,
    ) -> None:
        """`offset`, `seq` and `tallied_s`: what the reader has. `shift_ns` and `shift_s`: added to times and seconds.

        `rollups`: send only some of the steps. `sparse`: also send only some of their details and of the device
        samples, and no time buckets of one second, because the reader has many nodes.
        """
        self.offset = offset
        self.whole: Collection[int] = ()
        """Processes of which all steps and collectives are sent."""
        self.left_out = 0
        """How many ids were skipped, because they are too old for a first connection."""
        self._rollups, self._sparse = rollups, sparse
        self._shift_ns, self._shift_s = shift_ns, shift_s
        self._tallied_s = max(tallied_s - shift_s, 0)
        """Second of the tables up to which the time buckets were sent."""
        self._is_new = offset == 0
        """Whether the reader has nothing yet."""
        self._begun = offset
        self._last_steps: dict[int, int] = {}
        """The id of the last step that was sent, by process."""
        self._seqs = dict.fromkeys((table.name for table in TABLES if table.has_seq), seq)
        """By table: the number of the last transaction whose changes were sent."""
        self._narrowest = 10 if sparse else 1
        """Width of the narrowest buckets that are sent."""
        self._widths = [width for width in WIDTHS if shift_s % width == 0]
        """All buckets of these widths are sent. With a wrong clock, buckets of other widths begin elsewhere than the
        reader's, so they are sent only for the time without finer ones."""
        self._backlog: list[str] = []
        """SQL conditions for buckets of earlier time that are not sent yet, each for about MAX_BUCKETS of all keys."""
        self._first_seconds: dict[int, int] = {}
        """The start of the first bucket that is sent, by width, in seconds of the tables."""
        self._changed_from_s = 0
        """Changed buckets are sent if they end after this second of the tables."""
        self._first_sum_s = BEFORE_S if self._is_new else 0
        """Changed sums are sent if they start at or after this second of the tables."""
        self._ring_count = 0
        self._chunks = 0

    @property
    def tallied_s(self) -> int:
        """The reader's second up to which the time buckets were sent."""
        return self._tallied_s + self._shift_s

    @property
    def seq(self) -> int:
        """The number of the last transaction of which the reader has all changes."""
        return min(self._seqs.values())

    @property
    def deleted(self) -> dict[int, int]:
        """By width: the reader gets no buckets that start before this second of its own."""
        not_sent = {1: self._tallied_s} if self._narrowest > 1 else {}
        return {width: second + self._shift_s for width, second in {**self._first_seconds, **not_sent}.items()}

    def next_chunk(self, store: Store, upto_s: int, *, is_last: bool) -> tuple[list[str], bool]:
        """Return the lines with what is new, and whether there is more.

        `upto_s`: the seconds (since the run's start) before it are complete. `is_last`: the run has ended.
        """
        end_s = upto_s + store.origin_s
        newest_ids = (store.query(f"SELECT max(id) FROM {table.name}") for table in TABLES if table.sent == NUMBERED)
        newest_id = max(max_id or 0 for rows in newest_ids for (max_id,) in rows)
        lines: list[str] = []
        if self._chunks == 0:
            if self._rollups and self._is_new:
                lines += self._skip_old_rows(store, upto_s)
            self._plan_backlog(store, end_s)
        end_id = min(newest_id, self.offset + (MAX_IDS if self._rollups else MAX_COMPLETE_IDS))
        has_more = end_id < newest_id
        for table in self._due_tables(store, is_last=is_last):
            changed_lines, is_cut = self._changed_lines(store, table)
            lines += changed_lines
            has_more = has_more or is_cut
        lines += self._new_id_lines(store, end_id, is_last=is_last and end_id == newest_id)
        narrow_end_s, width = end_s, self._narrowest  # the end of its newest complete bucket
        if width > 1:
            narrow_end_s = min(-(-end_s // width) * width, store.buckets.made_until[width])
        lines += self._bucket_lines(store, narrow_end_s)
        self._chunks += 1
        self.offset = max(end_id, self.offset)
        self._first_sum_s = max(self._first_sum_s, 0)
        has_more_buckets = bool(self._backlog) or self._tallied_s < narrow_end_s
        return lines, has_more or has_more_buckets

    def _skip_old_rows(self, store: Store, upto_s: int) -> list[str]:
        """Skip the rows that are too old for a first connection, except lasting events and losses."""
        query = "SELECT id FROM steps WHERE start_ns < ? ORDER BY id DESC LIMIT 1"
        last_skipped_id = next((step_id for (step_id,) in store.query(query, ((upto_s - INITIAL_ROWS_S) * SECOND,))), 0)
        if not last_skipped_id:
            return []
        self.left_out = last_skipped_id
        lasting = f"WHERE id IN (SELECT id FROM events WHERE {LASTING} AND id <= ? ORDER BY id DESC LIMIT ?)"
        lasting += " AND kind != 'exit'"
        lines = self._lines(store, "events", lasting, (last_skipped_id, _MAX_LASTING_EVENTS))
        lines += self._lines(store, "losses", "WHERE id <= ?", (last_skipped_id,))
        self._first_sum_s = (upto_s + store.origin_s - INITIAL_ROWS_S) // 60 * 60
        for table in _SUM_TABLES:
            query = table.merged_rows_sql(f"FROM {table.name} WHERE start_s < ?", start_s=str(BEFORE_S))
            lines += encode_rows(table.name, store.query(query, (self._first_sum_s,)))
        self.offset = last_skipped_id
        return lines

    # ------------------------------------------------------------------------------------------ reading

    def _column_list(self, table: str) -> str:
        """Return the columns of a table that are sent for a query, with times and seconds on the reader's clock."""
        expressions = []
        for name in columns_sent(table):
            if name in TIMES and self._shift_ns:
                name = f"{name} + {self._shift_ns}"
            elif name == "start_s" and self._shift_s:
                width = {"collective_sums": "1", "device_rollups": "60"}.get(table, "width")
                name = f"(start_s + {self._shift_s}) / {width} * {width}"
            elif (table, name) == ("events", "process"):
                name = "ifnull(process, -1)"  # events of the supervisor have no process
            expressions.append(name)
        return ", ".join(expressions)

    def _rows(self, store: Store, table: str, condition: str, values: Parameters = ()) -> list[tuple[Any, ...]]:
        return store.query(f"SELECT {self._column_list(table)} FROM {table} {condition}", values)

    def _lines(self, store: Store, table: str, condition: str, values: Parameters = ()) -> list[str]:
        """Return the rows of a table that satisfy a condition as lines."""
        rows = self._rows(store, table, condition, values)
        if table == "events":
            rows = [(*row[:-1], self._shift_event_times(row[-1])) for row in rows]
        return list(encode_rows(table, rows))

    def _shift_event_times(self, text: str) -> str:
        """Return the JSON of an event with its times on the reader's clock."""
        if not self._shift_ns:
            return text
        data = json.loads(text)
        for name in ("t_s", "since_s"):
            if data.get(name) is not None:
                data[name] += self._shift_ns / 1e9
        return json.dumps(data, separators=(",", ":"))

    # ------------------------------------------------------------------------------------------ numbered rows

    def _new_id_lines(self, store: Store, end_id: int, *, is_last: bool) -> list[str]:
        """Return the rows with ids above the offset, up to `end_id`. With `is_last`, also each process's last step."""
        id_range = "WHERE id > ? AND id <= ?"
        event_condition = f"{id_range} AND kind != 'exit'"
        if self._sparse and not self.whole:
            event_condition += f" AND (kind NOT IN ('device', 'host') OR t_ns / {SECOND} % {SPARSE_S} = 0)"
        ids = self.offset, end_id
        lines = self._lines(store, "events", event_condition, ids)
        lines += self._lines(store, "losses", id_range, ids)
        if not self._rollups:
            lines += self._lines(store, "collectives", id_range, ids)
            return lines + self._step_lines(store, id_range, ids)
        complete_processes = f"process IN ({', '.join(map(str, self.whole))})"
        lines += self._lines(store, "collectives", f"{id_range} AND {complete_processes}", ids)
        steps: dict[tuple[int, tuple[bool, bool, int]], list[tuple[int, int, int]]] = defaultdict(list)
        """By process, by whether they are steps of a loop and averaged gradients (with accumulation, only some steps
        do), and by kind."""
        query = f"SELECT id, process, step, kind, sync_number, start_ns + wall_ns FROM steps {id_range}"
        for row_id, process, step, flags, sync_number, end_ns in store.query(query, ids):
            similar_steps = steps[process, (step > 0, sync_number is not None, step_kind(flags))]
            number = step if sync_number is None else sync_number
            if step <= 0:  # calls alone have no number
                number = len(similar_steps)
            similar_steps.append((row_id, number, end_ns))
        divisors = (2, SPARSE_STEPS) if self._sparse else (1, 1)
        chosen_ids, detailed_ids = set[int](), set[int]()
        for (process, (is_step, *_)), similar_steps in steps.items():
            chosen = detailed = [row_id for row_id, _, _ in similar_steps]
            if process not in self.whole:
                chosen, detailed = (choose_step_ids(similar_steps, divisor) for divisor in divisors)
            chosen_ids.update(chosen)
            detailed_ids.update(detailed)
            if is_step:
                self._last_steps[process] = max([self._last_steps.get(process, 0), *chosen])
        newest = f"SELECT max(id), process FROM steps {id_range} AND step > 0 GROUP BY process"
        for row_id, process in store.query(newest, (self._begun, end_id)) if is_last else ():
            if row_id > self._last_steps.get(process, 0):  # otherwise, readers would show an earlier step
                self._last_steps[process] = row_id
                chosen_ids.add(row_id)
                if not self._sparse or process in self.whole:
                    detailed_ids.add(row_id)
        for start in range(0, len(chosen_ids), 500):
            numbers = ", ".join(map(str, sorted(chosen_ids)[start : start + 500]))
            lines += self._step_lines(store, f"WHERE id IN ({numbers})", (), detailed_ids)
        return lines

    def _step_lines(
        self, store: Store, condition: str, values: Parameters, detailed_ids: Collection[int] | None = None
    ) -> list[str]:
        """Return steps as lines. `detailed_ids`: those that are sent with their calls and spans; None: all."""
        steps = map(STEPS.from_values, self._rows(store, "steps", condition, values))
        sent = [
            _with_last_calls(step)
            if detailed_ids is None or step.id in detailed_ids
            else step._replace(spans=None, called=None)
            for step in steps
        ]
        return list(encode_rows("steps", map(STEPS.to_values, sent)))

    # ------------------------------------------------------------------------------------------ rows that change

    def _due_tables(self, store: Store, *, is_last: bool) -> list[StoreTable[Any]]:
        """Return the tables whose changed rows are sent in this chunk, except those of time buckets."""
        has_new_ring, self._ring_count = len(store.rings) > self._ring_count, len(store.rings)
        tables = [table for table in TABLES if table.has_seq and table not in BUCKET_TABLES]
        if is_last:
            return tables
        return [
            table
            for table in tables
            if self._chunks % _INTERVALS.get(table.name, 1) == 0 or (table.name == "rings" and has_new_ring)
        ]

    def _changed_lines(self, store: Store, table: StoreTable[Any]) -> tuple[list[str], bool]:
        """Return the oldest MAX_ROWS changed rows of a table as lines, and whether there are more."""
        condition = "seq > ?"
        if table in _SUM_TABLES:
            condition += f" AND start_s >= {self._first_sum_s}"
        query = f"SELECT seq, {self._column_list(table.name)} FROM {table.name} WHERE {condition} ORDER BY seq LIMIT ?"
        rows = store.query(query, (self._seqs[table.name], MAX_ROWS))
        seqs = [seq for seq, *_ in rows]
        is_cut = len(rows) == MAX_ROWS and seqs[0] < seqs[-1]
        if is_cut:  # the last transaction may have changed more rows
            del rows[bisect_left(seqs, seqs[-1]) :]
        self._seqs[table.name] = seqs[len(rows) - 1] if is_cut else store.seq
        return list(encode_rows(table.name, (values for _, *values in rows))), is_cut

    # ------------------------------------------------------------------------------------------ time buckets

    def _plan_backlog(self, store: Store, upto_s: int) -> None:
        """Choose the buckets of earlier time that are sent: narrow ones only of recent time."""
        factor, count = 1 if self._is_new else RECONNECT_FACTOR, self._buckets_per_chunk(store)
        sent_until_s = max(self._tallied_s, store.origin_s)
        self._changed_from_s = sent_until_s - CHANGED_S
        for finer, width in pairwise((0, *WIDTHS[WIDTHS.index(self._narrowest) :])):
            first_s = store.buckets.deleted_until[width]
            if self._rollups and width in INITIAL_BUCKETS_S:
                first_s = max(first_s, upto_s - factor * INITIAL_BUCKETS_S[width])
            if first_s > sent_until_s:
                wider = WIDTHS[min(WIDTHS.index(width) + 1, len(WIDTHS) - 1)]
                self._first_seconds[width] = first_s = -(-first_s // wider) * wider
            begin_s = max(first_s, sent_until_s // width * width)
            if width == self._narrowest:
                self._tallied_s = max(begin_s, self._tallied_s)
                continue
            end_s = store.buckets.made_until[width]
            if width not in self._widths:
                end_s = min(end_s, self._first_seconds.get(finer, 0))
            for start_s in range(begin_s, end_s, count * width):
                stop_s = min(start_s + count * width, end_s)
                self._backlog.append(f"width = {width} AND start_s >= {start_s} AND start_s < {stop_s}")
        if self._is_new:
            self._seqs |= dict.fromkeys(("tallies", "times"), store.seq)

    def _bucket_lines(self, store: Store, upto_s: int) -> list[str]:
        """Return the next buckets of the backlog; after that, the new buckets up to a second, and the changed ones."""
        lines: list[str] = []
        while self._backlog:
            lines += self._lines_of_buckets(store, self._backlog.pop())
            if sum(map(len, lines)) > MAX_BACKLOG_CHARS:
                return lines
        begin_s, width = self._tallied_s, self._narrowest
        wider = [other for other in self._widths if other > width]
        self._tallied_s = max(min(begin_s + self._buckets_per_chunk(store) * width, upto_s), begin_s)
        new = f"width = {width} AND start_s >= {begin_s} AND start_s < {self._tallied_s}"
        changed = (  # without the plus, SQLite would not search for the numbers of transactions
            f"seq > {self._seqs['tallies']} AND +start_s + width > {self._changed_from_s}"
            f" AND (+width = {width} AND +start_s < {begin_s} OR +width IN ({', '.join(map(str, wider))}))"
        )
        self._seqs |= dict.fromkeys(("tallies", "times"), store.seq)
        return lines + self._lines_of_buckets(store, new) + self._lines_of_buckets(store, changed)

    def _buckets_per_chunk(self, store: Store) -> int:
        ((key_count,),) = store.query("SELECT count(*) FROM keys")
        return int(MAX_BUCKETS // max(key_count, 1) + 1)

    def _lines_of_buckets(self, store: Store, condition: str) -> list[str]:
        lines = []
        for table in BUCKET_TABLES:
            of_tallies = f"(width, start_s, key) IN (SELECT width, start_s, key FROM tallies WHERE {condition})"
            lines += self._lines(store, table.name, f"WHERE {condition if table.has_seq else of_tallies}")
        return lines


def _with_last_calls(row: StepRow) -> StepRow:
    """Return a step with only the last of its calls if they have more than MAX_CALLED_CHARS characters."""
    if row.called is None or len(row.called) <= MAX_CALLED_CHARS:
        return row
    calls = json.loads(row.called)
    last_calls = calls[-max(len(calls) * MAX_CALLED_CHARS // len(row.called), 1) :]
    return row._replace(called=json.dumps(last_calls, separators=(",", ":")))
