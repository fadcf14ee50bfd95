"""Damaged values in a history that SQLite can read: the screen keeps its last picture and says so."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from dpmon.errors import HistoryError
from dpmon.record.record_types import Event
from dpmon.run.run_reader import RunReader
from dpmon.store.database import HISTORY_FILE
from dpmon.ui.live_run import LiveRun
from dpmon.ui.screen_data import View
from dpmon.ui.screen_painter import paint_screen, panel_slots
from dpmon.ui.terminal_style import TerminalStyle
from support.history_builders import write_run_directory
from support.record_builders import Training, host_event

_EVENTS = "UPDATE events SET json = "
DAMAGES = [
    *(
        f"{_EVENTS}'{text}' WHERE kind = '{kind}'"
        for kind in ("mode", "memory", "host")
        for text in ("{bad", "[]", "{}")
    ),
    *(f"{_EVENTS}json_set(json, '$.devices', 5) WHERE kind = '{kind}'" for kind in ("mode", "memory")),
    f"{_EVENTS}json_set(json, '$.cpu_pct', 'x')",
    f"{_EVENTS}json_set(json, '$.devices[0].model_bytes', 'x')",
    "UPDATE events SET t_ns = 'x'",
    *(f"UPDATE steps SET {column} = '{{bad'" for column in ("called", "spans", "device", "wall_ns", "data_ns", "kind")),
    "UPDATE steps SET kind = 9999999",
    "UPDATE definitions SET value = '{bad'",
    "DELETE FROM definitions",
    "UPDATE series SET sketch = x'00'",
    "UPDATE series SET total = 'x'",
    "UPDATE tallies SET steps = 'x'",
    "DELETE FROM keys",
    "UPDATE times SET ns = 'x'",
    "UPDATE loops SET length = 'x'",
    "UPDATE rings SET last_id = 'x'",
    "UPDATE meta SET value = 'x' WHERE key = 'origin_s'",
]
STYLE = TerminalStyle("dark")


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_value_never_ends_the_screen(state: Path, damage: str) -> None:
    training = Training()
    device = {"device": "cpu", "model_bytes": 4096, "gradients_bytes": 4096, "optimizer_bytes": 0, "absent": {}}
    memory: dict[str, Any] = {"process": 0, "t_s": 2.5, "step": 9, "absent": {}, "devices": [device]}
    rows = [*training.begin(), *training.run(40), *training.switch("single"), *training.run(40)]
    own = [host_event(float(second)) for second in range(5)]
    directory = write_run_directory({0: [*rows, Event("memory", memory)], -1: own}, seconds=5.0)
    with closing(sqlite3.connect(directory / HISTORY_FILE)) as db, db:
        db.execute(damage)
    run = LiveRun(directory, lambda: RunReader(directory))
    run.start()
    for time_ns in (None, 2_000_000_000):
        run.refresh()
        if time_ns is not None:
            run.move_cursor(lambda cursor: cursor.seek(2_000_000_000))
        for view in (View(), View(zoom="devices"), View(zoom="batch")):
            try:
                with run.reading_facts():
                    data = run.build_screen_data(view)
                    paint_screen(data, run.output, panel_slots(data, 120, 40), STYLE)
            except HistoryError as error:
                run.note_unreadable(error)
            run.finish_drawing()
    run.close()
