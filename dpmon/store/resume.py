"""Restores the state that a new supervisor needs to continue another supervisor's history."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import takewhile
from operator import itemgetter
from typing import Any

from dpmon.record.schema import EVALUATION, SETTLING_STEPS
from dpmon.store.accounts import Accounts
from dpmon.store.batch import Batch
from dpmon.store.intake import Intake, device_tail
from dpmon.store.parts import call_in, event_in, numbers_in
from dpmon.store.rounds import Joined, SyncStep
from dpmon.store.tables import CALL_ROW, LASTING, RingRow
from dpmon.store.tally import NO_SAMPLES, OTHER_SIZES, Key
from dpmon.store.writer import History

_RECENT = 10_000
"""Number of recent steps that a late wait for input may overlap."""
_LAST_ID = (1 << 63) - 1
_ACCOUNTED = "id, process, step, mode, start_ns, wall_ns, kind"
_SYNCED = "id, process, mode, kind, samples, start_ns, wall_ns, sync_ns, device, synced, sync_number"


def resume_accounts(history: History, accounts: Accounts) -> None:
    """Account again for the recent steps and all events that an account uses, in the order of their records."""
    steps = _steps(history, "ORDER BY id DESC LIMIT ?", (_RECENT,))
    recent = Counter(process for _, process, *_ in steps)
    rings = history.rings().values()
    older = {ring.process for ring in rings if ring.steps > recent[ring.process]}
    """Processes with steps before the recent ones."""
    for ring in rings:
        if ring.steps and not recent[ring.process]:
            steps += _steps(history, *_of_ring(ring, 1))
    query = (
        f"SELECT id, ifnull(process, -1), t_ns, json FROM events WHERE {LASTING}"
        " AND kind IN ('process', 'pause', 'input', 'exit', 'ddp')"
    )
    nowhere = Batch()
    for _, process, *row in sorted([*steps, *history.rows(query)], key=itemgetter(0)):
        if len(row) > 2:
            number, mode, start, wall, kind = row
            account, evaluation = accounts.account(process), bool(kind & EVALUATION)
            if process in older:
                account.resume(number, mode, start, wall, evaluation)
                older.remove(process)
            else:
                account.step(number, mode, start, wall, evaluation)
        else:
            at, event = row[0], event_in(row[1:])
            accounts.event(nowhere, process if process >= 0 else None, event.kind, event.data, at)


def resume_rounds(history: History, accounts: Accounts) -> list[Joined]:
    """Take up the recent steps that still wait for other ranks; return the steps that are now complete.

    `accounts` must already know the ranks.
    """
    recent = "id > (SELECT max(id) FROM steps) - ? AND sync_number IS NOT NULL"
    rounds, reached = accounts.rounds, f"SELECT process, max(sync_number) FROM steps WHERE {recent} GROUP BY process"
    for process, number in history.rows(reached, (_RECENT,)):
        rounds.resume(process, number)
    keys = {Key(*row) for row in history.rows("SELECT process, mode, kind, batch FROM keys")}
    query = f"SELECT {_SYNCED} FROM steps WHERE {recent} AND wait_ns IS NULL ORDER BY id"
    found = []
    for number, process, mode, kind, samples, start, wall, tail, device, passes, last in history.rows(
        query, (_RECENT,)
    ):
        if device is not None:
            tail = device_tail(numbers_in(device)[1:])
        key = Key(process, mode, kind, NO_SAMPLES if samples is None else samples)
        key = key if key in keys else key._replace(batch=OTHER_SIZES)
        if tail is not None:
            step = SyncStep(number, key, (start + wall) // 1_000_000_000, last, passes or 0, tail)
            found += rounds.step(process, step)
    return found


def resume_intake(history: History, intake: Intake) -> None:
    """Restore the state of an intake after all earlier records of its ring."""
    row = intake.row
    for number, value in history.definitions(row.process).items():
        with suppress(LookupError, TypeError):  # damaged
            intake.learn(number, value)
    last = _steps(history, *_of_ring(row, SETTLING_STEPS)) if row.steps else []
    mode, last_id = (last[0][3], last[0][0]) if last else (None, 0)
    in_mode = sum(1 for _ in takewhile(lambda step: step[3] == mode, last))
    calls = []
    if row.held_id is not None:
        query = f"SELECT id, {CALL_ROW} FROM calls WHERE process = ? AND id >= ? AND (id > ? OR step > ?) ORDER BY id"
        held = history.rows(query, (row.process, row.held_id, last_id, -1 if row.last_step is None else row.last_step))
        calls = [(number, call_in(columns)) for number, *columns in held]
    batches = history.rows("SELECT DISTINCT batch FROM keys WHERE process = ?", (row.process,))
    query = "SELECT process, mode, kind, layout, virtual, sizes, untimed FROM shapes WHERE process = ?"
    shapes = history.rows(query, (row.process,))
    intake.resume(mode, in_mode, {batch for (batch,) in batches if batch >= 0}, calls, shapes)


def _steps(history: History, which: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the columns _ACCOUNTED of some steps."""
    return history.rows(f"SELECT {_ACCOUNTED} FROM steps {which}", values)


def _of_ring(ring: RingRow, most: int) -> tuple[str, tuple[Any, ...]]:
    """Return the SQL condition for the last steps of a ring, the newest first, and its values."""
    last_id = _LAST_ID if ring.last_id is None else ring.last_id
    return "WHERE process = ? AND id <= ? ORDER BY id DESC LIMIT ?", (ring.process, last_id, most)
