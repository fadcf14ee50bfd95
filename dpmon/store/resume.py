"""Restores the state that a new supervisor needs to continue another supervisor's history."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from itertools import takewhile
from typing import Any

from dpmon.record.kinds import RecordError
from dpmon.record.plainjson import load_json
from dpmon.record.schema import EVALUATION, SETTLING_STEPS
from dpmon.store.accounting import LATEST_NS
from dpmon.store.accounts import Accounts
from dpmon.store.batch import Batch
from dpmon.store.intake import Intake, device_tail
from dpmon.store.parts import call_in
from dpmon.store.rounds import Joined, SyncStep
from dpmon.store.tables import CALL_ROW, LASTING, RingRow, all_integers
from dpmon.store.tally import NO_SAMPLES, OTHER_SIZES, Key, known_keys
from dpmon.store.writer import History

_RECENT = 10_000
"""Number of recent steps that a late wait for input may overlap."""
_LAST_ID = (1 << 63) - 1
_ACCOUNTED = "id, process, step, mode, start_ns, wall_ns, kind"
_SYNCED = "id, process, mode, kind, samples, start_ns, wall_ns, sync_ns, device, synced, sync_number"
_TYPES = [int, int, int, str, int, int, int]
_START, _WALL = 4, 5


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
    query = f"SELECT id, process, kind, t_ns, json FROM events WHERE {LASTING} AND kind IN (?, ?, ?, ?, ?)"
    events = [
        row
        for row in history.rows(query, ("process", "pause", "input", "exit", "ddp"))
        if type(row[0]) is int and (row[3] is None or _is_time(row[3]))
    ]
    nowhere = Batch()
    for row in sorted([*steps, *events], key=lambda row: row[0]):
        if len(row) == len(_TYPES):
            _, process, number, mode, start, wall, kind = row
            account, evaluation = accounts.account(process), bool(kind & EVALUATION)
            if process in older:
                account.resume(number, mode, start, max(wall, 0), evaluation)
                older.remove(process)
            else:
                account.step(number, mode, start, max(wall, 0), evaluation)
        else:
            _, process, kind, at, text = row
            with suppress(ValueError, TypeError, AttributeError, RecursionError):
                accounts.event(nowhere, process, kind, load_json(text), at)


def resume_rounds(history: History, accounts: Accounts) -> list[Joined]:
    """Take up the recent steps that still wait for other ranks; return the steps that are now complete.

    `accounts` must already know the ranks.
    """
    recent = "id > (SELECT max(id) FROM steps) - ? AND sync_number IS NOT NULL"
    rounds, reached = accounts.rounds, f"SELECT process, max(sync_number) FROM steps WHERE {recent} GROUP BY process"
    for process, number in history.rows(reached, (_RECENT,)):
        if type(process) is type(number) is int:
            rounds.resume(process, number)
    keys = known_keys(history.rows("SELECT process, mode, kind, batch FROM keys"))
    query = f"SELECT {_SYNCED} FROM steps WHERE {recent} AND wait_ns IS NULL ORDER BY id"
    found = []
    for number, process, mode, kind, samples, start, wall, tail, device, passes, last in history.rows(
        query, (_RECENT,)
    ):
        if device is not None:
            with suppress(ValueError, TypeError, LookupError):
                tail = device_tail(load_json(device)[1:])
        key = Key(process, mode, kind, NO_SAMPLES if samples is None else samples)
        key = key if key in keys else key._replace(batch=OTHER_SIZES)
        if all_integers(number, process, start, wall, tail, passes, last) and key in keys:
            step = SyncStep(number, key, (start + max(wall, 0)) // 1_000_000_000, last, passes, tail)
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
        for number, *columns in held:
            with suppress(RecordError):
                calls.append((number, call_in(columns)))
    keys = known_keys(history.rows("SELECT process, mode, kind, batch FROM keys WHERE process = ?", (row.process,)))
    query = "SELECT process, mode, kind, layout, virtual, sizes, untimed FROM shapes WHERE process = ?"
    shapes = history.rows(query, (row.process,))
    intake.resume(mode, in_mode, {key.batch for key in keys if key.batch >= 0}, calls, shapes)


def _steps(history: History, which: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """Return the columns _ACCOUNTED of some steps, without damaged rows."""
    rows = history.rows(f"SELECT {_ACCOUNTED} FROM steps {which}", values)
    return [
        row
        for row in rows
        if [type(value) for value in row] == _TYPES and _is_time(row[_START]) and _is_time(row[_START] + row[_WALL])
    ]


def _is_time(value: object) -> bool:
    """Whether this is a time of a run (ns since its start)."""
    return type(value) is int and abs(value) <= LATEST_NS


def _of_ring(ring: RingRow, most: int) -> tuple[str, tuple[Any, ...]]:
    """Return the SQL condition for the last steps of a ring, the newest first, and its values."""
    last_id = _LAST_ID if ring.last_id is None else ring.last_id
    return "WHERE process = ? AND id <= ? ORDER BY id DESC LIMIT ?", (ring.process, last_id, most)
