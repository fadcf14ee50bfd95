"""What a run's record says of any time between two seconds: tallies, times, gaps, shapes and the longest steps.

A `Store` reads the database as of one instant. Every figure of the screen, the report, the summary, the lines of JSON
and the metrics is made from what it returns (dpmon.store.figures, dpmon.store.window).
"""

from __future__ import annotations

import json
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from dpmon.record.codec import (
    STEP_PHASES,
    Call,
    Decoder,
    Event,
    RecordError,
    Step,
    kept_step_times,
    pack_definition,
)
from dpmon.record.plainjson import load_event, load_json
from dpmon.record.schema import MODES, PHASES, SETTLING
from dpmon.store.accounting import ACTIVITIES
from dpmon.store.answers import GapRow, LongRow, Shape, TimeRow, TimeTogether
from dpmon.store.tables import ACTIVITY_COLUMNS, TALLY_COLUMNS, RingRow, rings_in
from dpmon.store.tally import ALL, PLAIN, WIDTHS, Key, Tally

__all__ = ["END", "Store"]

END = 1 << 40
"""A second after every run."""
_LAST_NS = (1 << 63) - 1
_TALLY = ("start_s", "process", "mode", "kind", "batch", *TALLY_COLUMNS, "sketches")
_SUMS = (
    *("CAST(total(steps) AS INTEGER)", "CAST(total(calls) AS INTEGER)", "max(last_step)", "min(low_ns)"),
    *("max(high_ns)", "min(first_ns)", "max(last_ns)"),
    *(f"CAST(total({name}) AS INTEGER)" for name in TALLY_COLUMNS[len(PLAIN) :]),
    "x''",
)
"""Of the columns of several tallies; `sum` would raise an error where a damaged one is too large."""
_TIME_SUMS = ", ".join(f"total({name})" for name in ACTIVITY_COLUMNS)
_NAMED_TIME_SUMS = ", ".join(f"total({name}) AS {name}" for name in ACTIVITY_COLUMNS)
_SUMMED = (*TALLY_COLUMNS, "sketches")
_LONG_PHASES = tuple(f"{phase.name}_ns" for phase in PHASES if not phase.of_call)
_SHAPE_CHARACTERS = 1 << 20


class Store:
    """The tables of one history, as of one instant."""

    def __init__(self, db: sqlite3.Connection, origin_ns: int = 0) -> None:
        """`db`: in a transaction, so that every query sees the same; `origin_ns`: the run's start, monotonic."""
        self._db = db
        self._origin_ns = origin_ns
        self._decoders: dict[int, Decoder] = {}
        self.rings: dict[str, RingRow] = rings_in(db)
        self._names = dict(self._rows("SELECT number, name FROM series"))
        meta = dict(self._rows("SELECT key, value FROM meta"))
        self._whole: dict[int, int] = {width: _whole(meta.get(f"whole_{width}")) for width in WIDTHS[1:]}
        self._pruned: dict[int, int] = {width: _whole(meta.get(f"pruned_{width}")) for width in WIDTHS[:-1]}
        self._keys = [
            key
            for key in map(Key._make, self._rows("SELECT process, mode, kind, batch FROM keys"))
            if key.mode in MODES and type(key.process) is type(key.kind) is type(key.batch) is int
        ]
        self.processes = sorted({key.process for key in self._keys})
        """Those with steps."""
        self._newest = self._newest_second()

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(query, values).fetchall()

    # ------------------------------------------------------------------------------------------ tallies

    def cover(self, begin_s: int, end_s: int, finest: int = 1) -> list[tuple[int, int, int]]:
        """Width, begin and end of the fewest stretches of tallies that make up the time from `begin_s` to `end_s`.

        `finest`: use no narrower tallies. Where narrow ones were deleted, wider ones reach beyond it.
        """
        end_s = min(end_s, max(self._newest, begin_s) + 1)
        found: list[tuple[int, int, int]] = []
        at = begin_s
        while at < end_s:
            width = self._width_at(at, end_s, finest)
            at -= at % width
            until = at + width
            if found and found[-1][0] == width and found[-1][2] == at:
                found[-1] = width, found[-1][1], until
            else:
                found.append((width, at, until))
            at = until
        return found

    def _width_at(self, at: int, end: int, finest: int) -> int:
        """The widest stretch that begins at a second and ends by `end`, or the narrowest that was not deleted."""
        for width in WIDTHS[:0:-1]:
            there = at + width <= min(end, self._whole[width]) and at >= self._pruned.get(width, 0)
            if there and at % width == 0:
                return width
        for width in WIDTHS:
            start = at - at % width
            there = width == 1 or start + width <= self._whole[width]
            if width >= finest and there and start >= self._pruned.get(width, 0):
                return width
        return WIDTHS[0]

    def _newest_second(self) -> int:
        (found,) = self._rows(
            "SELECT max(t) FROM (SELECT max(start_s) AS t FROM tallies WHERE width = 1"
            " UNION ALL SELECT max(start_s) FROM times WHERE width = 1)"
        )[0]
        return _whole(found, -1)

    def tally_rows(
        self, begin_s: int, end_s: int = END, *, process: int | None = None, sketches: bool = True, finest: int = 1
    ) -> Iterator[tuple[int, int, Key, Tally]]:
        """Start, width, key and tally of each row between two seconds, in order of time; damaged rows are left out.

        `process`: of this one only; ALL for those of all processes together, which a run of one process lacks.
        """
        who = "process >= 0" if process is None else "process = ?"
        values = () if process is None else (process,)
        query = f"SELECT {', '.join(_TALLY)} FROM tallies WHERE width = ? AND start_s >= ? AND start_s < ? AND {who}"
        for width, begin, end in self.cover(begin_s, end_s, finest):
            for row in self._db.execute(f"{query} ORDER BY start_s", (width, begin, end, *values)):
                named = dict(zip(_TALLY, row, strict=True))
                if type(named["start_s"]) is not int or type(named["process"]) is not int or named["mode"] not in MODES:
                    continue
                with suppress(ValueError):
                    tally = Tally.of_row(named, self._names, sketches=sketches)
                    key = Key(named["process"], named["mode"], named["kind"], named["batch"])
                    yield named["start_s"], width, key, tally

    def tallies(
        self, begin_s: int = 0, end_s: int = END, *, process: int | None = None, sketches: bool = True
    ) -> dict[Key, Tally]:
        """By key, all of the time between two seconds. `process` as in `tally_rows`."""
        found: dict[Key, Tally] = {}
        for _, _, key, tally in self.tally_rows(begin_s, end_s, process=process, sketches=sketches):
            known = found.get(key)
            if known is None:
                found[key] = tally
            else:
                known.merge(tally)
        return found

    def of_all(self, begin_s: int = 0, end_s: int = END) -> dict[Key, Tally]:
        """As `tallies`, of all processes together, under the process ALL."""
        if len(self.processes) > 1:
            return self.tallies(begin_s, end_s, process=ALL)
        return {key._replace(process=ALL): tally for key, tally in self.tallies(begin_s, end_s).items()}

    def sums(self, begin_s: int = 0, end_s: int = END) -> dict[Key, Tally]:
        """As `tallies` of each process, without series: the database adds up, so that many processes cost little."""
        query = (
            f"SELECT process, mode, kind, batch, {', '.join(_SUMS)} FROM tallies"
            " WHERE width = ? AND start_s >= ? AND start_s < ? AND process >= 0 GROUP BY process, mode, kind, batch"
        )
        found: dict[Key, Tally] = {}
        for width, begin, end in self.cover(begin_s, end_s):
            for process, mode, kind, batch, *values in self._rows(query, (width, begin, end)):
                with suppress(ValueError):
                    tally = Tally.of_row(dict(zip(_SUMMED, values, strict=True)), {})
                    if mode in MODES and type(process) is int:
                        found.setdefault(Key(process, mode, kind, batch), Tally()).merge(tally)
        return found

    def kinds(self) -> set[tuple[str, int]]:
        """Mode and kind of all steps so far."""
        return {(key.mode, key.kind) for key in self._keys}

    # ------------------------------------------------------------------------------------------ time

    def time_rows(self, begin_s: int = 0, end_s: int = END, *, finest: int = 1) -> list[TimeRow]:
        """What each process did between two seconds, in order of time."""
        query = (
            f"SELECT start_s, process, mode, {', '.join(ACTIVITY_COLUMNS)} FROM times"
            " WHERE width = ? AND start_s >= ? AND start_s < ? ORDER BY start_s"
        )
        found = []
        for width, begin, end in self.cover(begin_s, end_s, finest):
            for start, process, mode, *spent in self._rows(query, (width, begin, end)):
                if mode in MODES and {type(start), type(process), *map(type, spent)} <= {int, float}:
                    ns = dict(zip(ACTIVITIES, (int(each) for each in spent), strict=True))
                    found.append(TimeRow(int(start), width, int(process), mode, ns))
        return found

    def time_sums(self, begin_s: int = 0, end_s: int = END) -> list[TimeRow]:
        """What each process did in each mode: rows are added up as far as they are of one width."""
        query = (
            f"SELECT process, mode, {_TIME_SUMS} FROM times WHERE width = ? AND start_s >= ? AND start_s < ?"
            " GROUP BY process, mode"
        )
        return [
            TimeRow(begin, end - begin, process, mode, _by_activity(spent))
            for width, begin, end in self.cover(begin_s, end_s)
            for process, mode, *spent in self._rows(query, (width, begin, end))
            if type(process) is int and mode in MODES
        ]

    def times_together(self, begin_s: int = 0, end_s: int = END) -> list[TimeTogether]:
        """What all processes did together, in order of time."""
        own = " + ".join(f"total({name})" for name in ACTIVITY_COLUMNS)
        query = (
            f"SELECT max(own), {_TIME_SUMS} FROM (SELECT start_s, {_NAMED_TIME_SUMS}, {own} AS own FROM times"
            " WHERE width = ? AND start_s >= ? AND start_s < ? GROUP BY start_s, process) GROUP BY start_s"
        )
        return [
            TimeTogether(int(covered), _by_activity(spent))
            for width, begin, end in self.cover(begin_s, end_s)
            for covered, *spent in self._rows(query, (width, begin, end))
        ]

    def gaps(self, most: int, begin_ns: int = 0, end_ns: int = _LAST_NS) -> list[GapRow]:
        """The longest times between two steps, the longest first."""
        query = (
            "SELECT process, after_step, before_step, mode, begin_ns, end_ns, ns FROM gaps"
            " WHERE end_ns > ? AND begin_ns < ? ORDER BY ns DESC LIMIT ?"
        )
        return [
            GapRow(*row)
            for row in self._rows(query, (begin_ns, end_ns, most))
            if row[3] in MODES and all(type(value) is int for value in (*row[:3], *row[4:]))
        ]

    # ------------------------------------------------------------------------------------------ rows

    def longest(self, most: int, begin_ns: int = 0, end_ns: int = _LAST_NS) -> list[LongRow]:
        """The longest steps that began between two times, the longest first, without settling ones."""
        query = (
            f"SELECT process, step, mode, kind, start_ns, wall_ns, {', '.join(_LONG_PHASES)} FROM steps"
            f" WHERE start_ns >= ? AND start_ns < ? AND kind & {SETTLING} = 0 ORDER BY wall_ns DESC LIMIT ?"
        )
        found = []
        for process, step, mode, kind, start, wall, *phases in self._rows(query, (begin_ns, end_ns, most)):
            known = {
                phase.name: took
                for phase, took in zip((p for p in PHASES if not p.of_call), phases, strict=True)
                if type(took) is int
            }
            if mode in MODES and all(type(value) is int for value in (process, step, kind, start, wall)):
                found.append(LongRow(process, step, mode, kind, start, wall, known))
        return found

    def steps(self, most: int, *, begin_ns: int = 0, end_ns: int = _LAST_NS, process: int | None = None) -> list[Step]:
        """The newest steps that ended between two times, the newest first; damaged ones are left out."""
        who, values = ("", ()) if process is None else (" AND process = ?", (process,))
        ended = "start_ns + wall_ns"
        query = f"SELECT * FROM steps WHERE {ended} > ? AND {ended} <= ?{who} ORDER BY id DESC LIMIT ?"
        cursor = self._db.execute(query, (begin_ns, end_ns, *values, most))
        names = [column[0] for column in cursor.description]
        found = []
        for row in cursor:
            with suppress(RecordError):
                found.append(self._step(dict(zip(names, row, strict=True))))
        return found

    def _step(self, row: Mapping[str, Any]) -> Step:
        """The record in a row of steps; RecordError if it is damaged."""
        phases = {name: row[f"{name}_ns"] for name in STEP_PHASES}
        whole = [row[name] for name in ("process", "step", "start_ns", "wall_ns")]
        optional = [row["samples"], row["copied_bytes"], *phases.values()]
        known = all(type(value) is int for value in whole)
        if not known or row["mode"] not in MODES or not all(value is None or type(value) is int for value in optional):
            raise RecordError("damaged row in steps")
        process, number, start, wall = whole
        found = Step(
            process=process,
            rank=self.rank(process),
            step=number,
            mode=row["mode"],
            start_ns=start,
            wall_ns=wall,
            samples=row["samples"],
            phases={name: took for name, took in phases.items() if took is not None},
            copied=row["copied_bytes"],
        )
        try:
            return kept_step_times(found, row["device"]) if isinstance(row["device"], bytes) else found
        except (struct.error, ValueError, IndexError):
            raise RecordError("damaged row in steps") from None

    def rank(self, process: int) -> int | None:
        """The rank of a process; None if it has none."""
        return next((ring.rank for ring in self.rings.values() if ring.process == process), None)

    def oldest_step_ns(self) -> int | None:
        """When the oldest step began that has a row; None if there is none."""
        (found,) = self._rows("SELECT min(start_ns) FROM (SELECT start_ns FROM steps ORDER BY id LIMIT 1000)")[0]
        return found if type(found) is int else None

    # ------------------------------------------------------------------------------------------ calls

    def calls(self, most: int, *, process: int, step: int | None = None, end_ns: int = _LAST_NS) -> list[Call]:
        """The newest calls of a process that ended by a time, or of one of its steps; the newest first.

        Damaged ones are left out.
        """
        of_step, values = ("", ()) if step is None else (" AND step = ?", (step,))
        query = (
            f"SELECT payload FROM calls WHERE process = ? AND start_ns + wall_ns <= ?{of_step} ORDER BY id DESC LIMIT ?"
        )
        found = []
        for (payload,) in self._rows(query, (process, end_ns, *values, most)):
            with suppress(RecordError, LookupError, TypeError):
                record = self.decoder(process).decode(payload)
                if isinstance(record, Call):
                    found.append(record)
        return found

    def decoder(self, process: int) -> Decoder:
        """A decoder that knows the definitions of a process."""
        found = self._decoders.get(process)
        if found is None:
            found = self._decoders[process] = Decoder(process, self.rank(process), self._origin_ns)
            for number, value in self.definitions(process).items():
                with suppress(RecordError, struct.error):
                    found.decode(pack_definition(number, value))
        return found

    def events(
        self, *kinds: str, begin_ns: int | None = None, end_ns: int = _LAST_NS, newest: int | None = None
    ) -> list[Event]:
        """Events of some kinds up to a time, in their order; the newest of them if `newest` says how many.

        An event without a time counts as old. Damaged ones are left out.
        """
        since, values = ("", ()) if begin_ns is None else (" AND t_ns >= ?", (begin_ns,))
        query = (
            f"SELECT json FROM events WHERE kind IN ({', '.join('?' * len(kinds))}) AND ifnull(t_ns, 0) <= ?{since}"
            " ORDER BY id DESC LIMIT ?"
        )
        found = []
        for (text,) in reversed(self._rows(query, (*kinds, end_ns, *values, -1 if newest is None else newest))):
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                found.append(Event(*load_event(text)))
        return found

    def shapes(self) -> list[Shape]:
        """What calls got and gave, over the whole run so far."""
        query = "SELECT process, mode, kind, layout, virtual, sizes, untimed, calls FROM shapes"
        found = []
        for process, mode, kind, layout, virtual, sizes, untimed, calls in self._rows(query):
            with suppress(ValueError, TypeError, RecursionError):
                if not isinstance(sizes, str) or len(sizes) > _SHAPE_CHARACTERS or mode not in MODES:
                    continue
                inputs, outputs, *replicas = json.loads(sizes)
                pairs = tuple((int(got), int(gave)) for got, gave in replicas)
                numbers = (process, kind, layout, untimed, calls, inputs, outputs)
                if all(type(number) is int for number in numbers):
                    found.append(
                        Shape(process, mode, kind, layout, bool(virtual), inputs, outputs, pairs, untimed, calls)
                    )
        return found

    def definitions(self, process: int) -> dict[int, Any]:
        """The definitions of a process by number; damaged ones are left out."""
        found: dict[int, Any] = {}
        for number, value in self._rows("SELECT number, value FROM definitions WHERE process = ?", (process,)):
            with suppress(ValueError, TypeError):
                found[number] = load_json(value)
        return found

    def call_counts(self) -> Counter[int]:
        """Calls by process, those that are in no step too."""
        found: Counter[int] = Counter()
        for shape in self.shapes():
            found[shape.process] += shape.calls
        return found


def _by_activity(spent: Sequence[float]) -> dict[str, int]:
    return dict(zip(ACTIVITIES, map(int, spent), strict=True))


def _whole(value: object, otherwise: int = 0) -> int:
    return value if isinstance(value, int) else otherwise
