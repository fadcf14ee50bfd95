"""The table `losses`: the values from which backward passes began.

Losses are only thinned, to some thousand of each script line that calls backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import nan
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.history_rows import LossRow, LossSite
from dpmon.record.schema import SECOND
from dpmon.store.table import NUMBERED, StoreTable

if TYPE_CHECKING:
    import sqlite3

    from dpmon.store.store_queries import Store

UNFIT = "loss - loss IS NULL"
"""The SQL condition for a loss that is NaN or infinite."""
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS losses (
    id INTEGER PRIMARY KEY, process INTEGER NOT NULL,
    definition INTEGER NOT NULL,  -- of the script line that calls backward
    step       INTEGER NOT NULL,  -- the step of the backward pass; 0: unknown
    t_ns       INTEGER NOT NULL,
    loss       REAL               -- NULL: NaN, which SQLite does not have
);
CREATE INDEX IF NOT EXISTS curves ON losses (process, definition, t_ns);
CREATE INDEX IF NOT EXISTS unfit ON losses (process, definition, t_ns) WHERE {UNFIT};
"""
KEPT_LOSSES, KEPT_OLDER = 1024, 2048
"""How many of the newest losses of a script line are kept, and how many older ones, at equal distances."""
_THIN = f"""\
DELETE FROM losses WHERE process = :process AND definition = :line AND t_ns < :until AND id NOT IN (
    SELECT min(id) FROM losses WHERE process = :process AND definition = :line GROUP BY t_ns / :slot
    UNION ALL SELECT * FROM (
        SELECT id FROM losses WHERE process = :process AND definition = :line AND {UNFIT} ORDER BY t_ns LIMIT 1))"""
_OF_LINE = "WHERE process = ? AND definition = ? AND t_ns <= ?"


LOSSES = StoreTable("losses", LossRow, SCHEMA, sent=NUMBERED)


class LossBin(NamedTuple):
    """The losses of one script line in one time bucket."""

    second: int
    """Start of the bucket (s since the run's start)."""
    values: int
    """Number of finite values. If it is 0, the next three members are None."""
    low: float | None
    mean: float | None
    high: float | None
    unfit: int
    """Number of values that are NaN or infinite."""


class InvalidLoss(NamedTuple):
    """The first NaN or infinite loss of a process at a script line."""

    process: int
    place: str
    step: int | None
    t_ns: int
    loss: float


class LossThinning:
    """Deletes losses of a script line after every KEPT_LOSSES of them. The first invalid loss is never deleted."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._losses_left: dict[tuple[int, int], int] = {}
        """By process and definition: after how many more losses the script line is thinned."""

    def note_losses(self, lines: Iterable[tuple[int, int]]) -> None:
        """Thin the script lines that need it. `lines`: process and definition of each new loss."""
        for line in lines:
            self._losses_left[line] = self._losses_left.get(line, 1) - 1
            if not self._losses_left[line]:
                self._losses_left[line] = KEPT_LOSSES
                self._thin_line(*line)

    def _thin_line(self, process: int, definition: int) -> None:
        query = "SELECT t_ns FROM losses WHERE process = ? AND definition = ? ORDER BY t_ns {} LIMIT 1 OFFSET ?"
        oldest = self._db.execute(query.format(""), (process, definition, 0)).fetchone()
        first_kept = self._db.execute(query.format("DESC"), (process, definition, KEPT_LOSSES)).fetchone()
        if oldest is None or first_kept is None:
            return
        (oldest_ns,), (until_ns,) = oldest, first_kept
        slot_ns = SECOND
        while (until_ns - oldest_ns) // slot_ns > KEPT_OLDER:
            slot_ns *= 2  # so that a slot is always a pair of earlier slots
        self._db.execute(_THIN, {"process": process, "line": definition, "until": until_ns, "slot": slot_ns})


# ------------------------------------------------------------------------------------------------ queries


def read_loss_sites(store: Store, process: int) -> dict[int, LossSite]:
    """Return the script lines with losses of a process, by definition, in the order of their first loss."""
    query = "SELECT DISTINCT definition FROM losses WHERE process = ? AND t_ns <= ? ORDER BY definition"
    return _find_sites(store, process, [number for (number,) in store.query(query, (process, store.until_ns))])


def _find_sites(store: Store, process: int, numbers: Sequence[int]) -> dict[int, LossSite]:
    definitions = store.definitions(process, numbers) if numbers else {}
    return {number: value for number, value in definitions.items() if isinstance(value, LossSite)}


def read_loss_bins(
    store: Store, process: int, definition: int, start_s: int, end_s: int, width_s: int
) -> list[LossBin]:
    """Return the losses of a script line from `start_s` up to `end_s`, in bins of `width_s`.

    Bins start at multiples of `width_s`. Those without a loss are left out.
    """
    query = (
        "SELECT t_ns / :width AS at, count(fit), min(fit), avg(fit), max(fit),"
        f" count(*) - count(fit) FROM (SELECT t_ns, CASE WHEN {UNFIT} THEN NULL ELSE loss END AS fit FROM losses"
        " WHERE process = :process AND definition = :line AND t_ns >= :begin AND t_ns < :end)"
        " GROUP BY at ORDER BY at"
    )
    start_ns, end_ns = start_s * SECOND, min(end_s * SECOND, store.until_ns + 1)
    values = {"process": process, "line": definition, "begin": start_ns, "end": end_ns, "width": width_s * SECOND}
    return [LossBin(bin_index * width_s, *statistics) for bin_index, *statistics in store.query(query, values)]


def read_first_loss(store: Store, process: int, definition: int) -> float | None:
    """Return the first loss of a script line, which may be NaN; None if there is none."""
    values = process, definition, store.until_ns
    rows = LOSSES.select(store.connection, f"{_OF_LINE} ORDER BY t_ns LIMIT 1", values)
    return next((row.value for row in rows), None)


def read_newest_losses(store: Store, process: int, definition: int, limit: int) -> list[LossRow]:
    """Return at most `limit` losses of a script line, the newest first."""
    values = process, definition, store.until_ns, limit
    return list(LOSSES.select(store.connection, f"{_OF_LINE} ORDER BY t_ns DESC LIMIT ?", values))


def find_invalid_losses(store: Store) -> list[InvalidLoss]:
    """Return the first NaN or infinite loss of each process and script line, in order of time."""
    query = (
        f"SELECT process, definition, step, min(t_ns), loss FROM losses WHERE {UNFIT} AND t_ns <= ?"
        " GROUP BY process, definition"
    )
    invalid_losses = []
    for process, definition, step, t_ns, loss in store.query(query, (store.until_ns,)):
        site = _find_sites(store, process, [definition]).get(definition)
        if site is not None and site.why is None:
            value = nan if loss is None else loss
            invalid_losses.append(InvalidLoss(process, site.place, step or None, t_ns, value))
    return sorted(invalid_losses, key=lambda invalid: invalid.t_ns)
