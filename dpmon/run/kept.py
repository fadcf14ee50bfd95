"""Reads what a run keeps for good: history.sqlite, at one instant (`tables` has what lies in it)."""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dpmon.record.plainjson import load_json
from dpmon.record.wire import MODES
from dpmon.run.files import check_database
from dpmon.run.rollup import WHOLE, Rollup
from dpmon.run.tables import (
    BEFORE_S,
    HISTORY_FILE,
    LASTING,
    Bounds,
    HistoryError,
    check_schema,
    check_version,
    last_ids,
    rings_in,
)

__all__ = ["DISORDER", "Kept", "chance"]

DISORDER = 16_000
"""Rings are taken over in turn, so that rows do not lie in strict order of time: by so many ids at most."""

_NEAR_STEP = 4096
"""Ids before a step's in which its calls are looked for."""
_CHANCE = "(step * 2654435761 & 4294967295)"
"""What is drawn is what has the lowest; so a part of it is drawn evenly too: all that have ids below some place. And of
the same steps the same are drawn by everybody."""
_CHANCES = 1 << 32


def chance(number: int) -> int:
    """By what the step of this number is drawn: the lowest are."""
    return number * 2654435761 & 4294967295


class Kept:
    """A snapshot of a history: what it holds at one instant, whatever is written meanwhile."""

    def __init__(self, directory: Path) -> None:
        """HistoryError if it cannot be read, FileNotFoundError if it does not exist, OSError if it is not a file."""
        path = directory / HISTORY_FILE
        check_database(path)
        try:
            self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            # A damaged letter is no reason to read nothing that follows it.
            self._db.text_factory = partial(str, encoding="utf-8", errors="replace")
        except sqlite3.Error as error:
            raise HistoryError(str(error)) from None
        try:
            self._bounds = Bounds(self._db, path)
            self._db.execute("BEGIN")
            check_schema(self._db)
            check_version(self._db)
            self.rings = rings_in(self._db)
            self.last_id = max(last_ids(self._db))
            row = self._db.execute("SELECT value FROM meta WHERE key = 'pruned'").fetchone()
            self.pruned = int(row[0]) if row else 0
        except (HistoryError, sqlite3.Error, OSError, ValueError, TypeError, OverflowError) as error:
            self._db.close()
            raise HistoryError(str(error)) from None

    def definitions(self, process: int) -> list[tuple[int, Any]]:
        """Number and value of every definition of one process."""
        query = "SELECT number, value FROM definitions WHERE process = ?"
        found = []
        for number, value in self._all(query, (process,)):
            with suppress(ValueError, TypeError):  # its calls then count as unreadable
                found.append((number, load_json(value)))
        return found

    def rows(self, after: int = 0) -> Iterator[tuple[Any, ...]]:
        """Everything with an id above `after` in order: (id, table name, columns after the id ...)."""
        return heapq.merge(
            *(
                self._all(f"SELECT id, '{table}', * FROM {table} WHERE id > ? ORDER BY id", (after,))
                for table in ("calls", "steps", "events")
            )
        )

    def lasting(self, before: int, since_ns: int) -> Iterator[tuple[Any, ...]]:
        """Of the events up to the id `before`: those that still matter, and all after `since_ns`; as `rows`."""
        query = "SELECT id, 'events', * FROM events WHERE id <= ?"
        still = self._all(f"{query} AND {LASTING} ORDER BY id", (before,))
        near = max(self.id_at(since_ns) - DISORDER, 0)
        recent = f"{query} AND NOT ({LASTING}) AND id > ? AND t_ns > ? ORDER BY id"
        return heapq.merge(still, self._all(recent, (before, near, since_ns)))

    def last_ns(self) -> int:
        """The time of the newest event, 0 if there is none."""
        # Not of all: there may be hundreds of thousands.
        for (found,) in self._all("SELECT max(t_ns) FROM (SELECT t_ns FROM events ORDER BY id DESC LIMIT 1000)", ()):
            return int(found or 0)
        return 0

    def newest_ns(self, until: int | None = None) -> int:
        """When the last thing in the record was over; the last up to the id `until`."""
        found, most = 0, self.last_id if until is None else until
        for query in (
            "SELECT max(start_ns + wall_ns) FROM (SELECT * FROM steps WHERE id <= ? ORDER BY id DESC LIMIT 1000)",
            "SELECT max(start_ns + wall_ns) FROM (SELECT * FROM calls WHERE id <= ? ORDER BY id DESC LIMIT 1000)",
            "SELECT max(t_ns) FROM (SELECT * FROM events WHERE id <= ? ORDER BY id DESC LIMIT 1000)",
        ):
            for (newest,) in self._all(query, (most,)):
                found = max(found, newest if isinstance(newest, int) else 0)
        return found

    def id_at(self, t_ns: int) -> int:
        """About the id of what was over at `t_ns`: found by halving, since ids are drawn as time goes."""
        low, high = 0, self.last_id + 1
        while high - low > 1:
            middle = (low + high) // 2
            at = self.time_from(middle)
            if at is None or at > t_ns:
                high = middle
            else:
                low = middle
        return low

    def time_from(self, first: int, *, events: bool = True) -> int | None:
        """When the first thing with this id or a higher one, whose time is known, was over; None if there is none.

        Without `events` of calls and steps only.
        """
        found: list[tuple[int, int]] = []
        queries = (
            "SELECT id, start_ns + wall_ns FROM steps WHERE id >= ? ORDER BY id LIMIT 1",
            "SELECT id, start_ns + wall_ns FROM calls WHERE id >= ? ORDER BY id LIMIT 1",
            "SELECT id, t_ns FROM events WHERE id >= ? AND t_ns IS NOT NULL ORDER BY id LIMIT 1",
        )
        for query in queries if events else queries[:2]:
            found += [(number, at) for number, at in self._all(query, (first,)) if isinstance(at, int)]
        return min(found)[1] if found else None

    def step_end(self, near: int, t_ns: int, *, forward: bool) -> int | None:
        """The end of the first step after `t_ns` (or of the last one before it), looked for around the id `near`."""
        reach = 4096
        if forward:
            query = "SELECT min(start_ns + wall_ns) FROM (SELECT * FROM steps WHERE id >= ? ORDER BY id LIMIT ?)"
            query += " WHERE start_ns + wall_ns > ?"
            parameters = max(near - reach // 8, 0), reach, t_ns
        else:
            query = "SELECT max(start_ns + wall_ns) FROM (SELECT * FROM steps WHERE id <= ? ORDER BY id DESC LIMIT ?)"
            query += " WHERE start_ns + wall_ns < ?"
            parameters = near + reach // 8, reach, t_ns
        for (found,) in self._all(query, parameters):
            return found if isinstance(found, int) else None
        return None

    def rollups(self, width: int, since_s: int = 0) -> Iterator[Rollup]:
        """Those of seconds (width 1), minutes (60) or WHOLE that start at `since_s` or later, in that order."""
        if not self._has("rollups"):
            return
        query = "SELECT * FROM rollups WHERE width = ? AND start_s >= ? ORDER BY start_s, process, mode"
        for row in self._all(query, (width, since_s)):
            with suppress(ValueError):
                yield Rollup.of_row(row)

    def whole(self) -> Iterator[Rollup]:
        """Those of WHOLE; they start where they end, with the first minute of which more is known."""
        if not self._has("rollups"):
            return
        minute = self._first_minute()
        for rollup in self.rollups(WHOLE):
            rollup.start_s = minute
            yield rollup

    def summed(self) -> tuple[int, int]:
        """The first second of which more is known than one sum of all before it, and the time (ns) from which on steps
        are left in full; 0 and 0 where nothing was deleted, or nothing is left of what was.
        """
        if not self.pruned or not self._has("rollups"):
            return 0, 0
        full = self.time_from(0, events=False)
        return self._first_minute(), self.newest_ns() if full is None else full

    def _first_minute(self) -> int:
        """The second with which the first minute that is left begins; 0 where there is none."""
        first = next(self._all("SELECT min(start_s) FROM rollups WHERE width = 60", ()), (None,))[0]
        return first if type(first) is int else 0

    def seconds_from(self) -> int:
        """The beginning of the first minute of which all seconds still have rollups of their own; 0 if none has."""
        if not self._has("rollups"):
            return 0
        query = "SELECT min(start_s) FROM rollups WHERE width = ?"
        (second,), (minute,) = (next(self._all(query, (width,))) for width in (1, 60))
        if type(second) is not int or type(minute) is not int:
            return 0
        return second // 60 * 60 if second // 60 * 60 <= minute else -(-second // 60) * 60

    def has_steps(self, until: int) -> bool:
        """Whether steps were recorded up to the id `until`, though they may have been deleted since."""
        return self.pruned > 0 or any(self._all("SELECT 1 FROM steps WHERE id <= ? LIMIT 1", (until,)))

    def modes(self) -> Iterator[tuple[Any, ...]]:
        """Process and JSON of every event of a mode."""
        return self._all("SELECT process, json FROM events WHERE kind = 'mode' AND process IS NOT NULL", ())

    def steps_by_mode(self, after: int, until: int) -> list[tuple[int, str, int]]:
        """Process, mode and how many steps of it have ids above `after` up to `until`."""
        query = (
            "SELECT process, mode, count(*) FROM steps WHERE id > ? AND id <= ?"
            " GROUP BY process, mode ORDER BY process, mode"
        )
        return [
            (process, mode, count)
            for process, mode, count in self._all(query, (after, until))
            if type(process) is int and mode in MODES
        ]

    def steps_by_block(self, width: int) -> Iterator[tuple[int, int, str, int]]:
        """Number of the block of `width` ids, process, mode and how many steps of it lie there; blocks in order."""
        query = "SELECT id / ? AS block, process, mode, count(*) FROM steps GROUP BY 1, 2, 3 ORDER BY 1"
        return (
            (block, process, mode, count)
            for block, process, mode, count in self._all(query, (width,))
            if type(process) is int and mode in MODES
        )

    def span(self, process: int) -> tuple[int, int] | None:
        """The first and the last id of its calls and steps; None if there are none."""
        rings = [ring for ring in self.rings.values() if ring.process == process and (ring.calls or ring.steps)]
        bounds = [(ring.first_id, ring.last_id) for ring in rings]
        # Without these bounds (a history of an earlier version) all rows are looked at of a process that ended early.
        low, high = 0, self.last_id
        known = [(first, last) for first, last in bounds if isinstance(first, int) and isinstance(last, int)]
        if known and len(known) == len(bounds):
            low, high = min(first for first, _ in known), max(last for _, last in known)
        found: list[int] = []
        for table, has in self._counted(process).items():
            for order in ("", " DESC") if has else ():
                query = f"SELECT id FROM {table} WHERE process = ? AND id BETWEEN ? AND ? ORDER BY id{order} LIMIT 1"
                found += [number for (number,) in self._all(query, (process, low, high))]
        return (min(found), max(found)) if found else None

    def rows_of(self, process: int, low: int, high: int, *, back: bool = False) -> Iterator[tuple[Any, ...]]:
        """Its calls and steps with ids from `low` to `high`, in order (`back`: the last first); as `rows`."""
        return heapq.merge(
            *(
                self._all(
                    f"SELECT id, '{table}', * FROM {table} WHERE id BETWEEN ? AND ? AND process = ?"
                    f" ORDER BY id{' DESC' if back else ''}",
                    (low, high, process),
                )
                for table, has in self._counted(process).items()
                if has
            ),
            key=_id_of,
            reverse=back,
        )

    def _counted(self, process: int) -> dict[str, bool]:
        """Whether each table was given rows of it: where there were none, none is looked for."""
        rings = [ring for ring in self.rings.values() if ring.process == process]
        return {"calls": any(ring.calls for ring in rings), "steps": any(ring.steps for ring in rings)}

    def drawn_ids(
        self, after: int, until: int, counts: Mapping[tuple[int, str], int], most: int
    ) -> dict[tuple[int, str], list[tuple[int, int]]]:
        """Of each process and mode, of which there are so many, the chances and ids of `most` steps, drawn evenly from
        those above `after` up to `until`; or of all. In the order of the draw. However many there are, it looks at each
        row once.
        """
        found: dict[tuple[int, str], list[tuple[int, int]]] = {pair: [] for pair in counts}
        whens, values = [], []
        for (process, mode), count in counts.items():
            whens.append("WHEN process = ? AND mode = ? THEN ?")
            # Some more than are wanted, since how many lie below a limit is left to chance.
            values += [process, mode, _CHANCES if count <= 2 * most else int(_CHANCES * 1.5 * most / count)]
        if not whens:
            return {}
        query = (
            f"SELECT {_CHANCE}, id, process, mode FROM steps WHERE id > ? AND id <= ?"
            f" AND {_CHANCE} < CASE {' '.join(whens)} ELSE 0 END"
        )
        for chance, number, process, mode in self._all(query, (after, until, *values)):
            found[process, mode].append((chance, number))
        return {pair: sorted(rows)[:most] for pair, rows in found.items()}

    def steps_at(self, number: int) -> Iterator[tuple[Any, ...]]:
        """The step with this id, as in `rows`, if there is one."""
        return self._all("SELECT id, 'steps', * FROM steps WHERE id = ?", (number,))

    def calls_of(self, before: int, process: int, step: int) -> list[bytes] | None:
        """Payloads of the calls of a step that has the id `before`: they lie shortly before it.

        None: there may be more of them than can be looked at here.
        """
        query = "SELECT step, payload FROM calls WHERE id BETWEEN ? AND ? AND process = ? ORDER BY id DESC"
        found: list[bytes] = []
        first = before - _NEAR_STEP
        for number, payload in self._all(query, (first, before, process)) if self._counted(process)["calls"] else ():
            if number != step:
                return found
            found.append(payload)
        return None if found and (first > 0 or self.pruned) else found

    def device_rollups(self, since_s: int = 0) -> Iterator[tuple[Any, ...]]:
        """Rows of (start_s of a minute, device or -1 for the host, name, count, total, low, high), in that order."""
        if self._has("device_rollups"):
            query = "SELECT start_s, device, name, count, total, low, high FROM device_rollups WHERE start_s >= ?"
            yield from self._all(f"{query} ORDER BY start_s, device, name", (since_s,))

    def deleted_samples(self) -> Iterator[tuple[Any, ...]]:
        """Those of `device_rollups` whose samples are there no more; first, with a start of BEFORE_S, what is left of
        minutes that are there no more either.
        """
        query = "SELECT t_ns FROM events WHERE kind IN ('host', 'device') AND t_ns IS NOT NULL ORDER BY id LIMIT 1"
        first = next((at for (at,) in self._all(query, ()) if isinstance(at, int)), None)
        for row in self.device_rollups(BEFORE_S) if self.pruned else ():
            if first is None or (isinstance(row[0], int) and (row[0] + 60) * 1_000_000_000 <= first):
                yield row

    def first_sample(self, after: int, since_ns: int) -> int | None:
        """When (ns) the first sample of a device or of the host was that has an id above `after` or came after that."""
        query = "SELECT min(t_ns) FROM events WHERE id > ? AND kind IN ('device', 'host') AND (id > ? OR t_ns > ?)"
        near = max(min(after, self.id_at(since_ns) - DISORDER), 0)
        for (found,) in self._all(query, (near, after, since_ns)):
            return found if isinstance(found, int) else None
        return None

    def _has(self, table: str) -> bool:
        """Whether the table is there: a history of an earlier version may lack it."""
        return any(self._all("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (table,)))

    def _all(self, query: str, parameters: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        self._bounds.begin()
        try:
            for number, row in enumerate(self._db.execute(query, parameters)):
                if number > self._bounds.rows:
                    raise HistoryError("it is damaged: it has more rows than its size allows")
                self._bounds.begin()
                yield row
        except (sqlite3.Error, UnicodeError) as error:  # the latter: of a damaged schema's names
            raise HistoryError(str(error)) from None

    def close(self) -> None:
        """Let go of the snapshot."""
        self._db.close()


def _id_of(row: tuple[Any, ...]) -> int:
    return int(row[0])
