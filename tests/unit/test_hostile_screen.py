"""The screen draws runs with any contents, and ends when it is asked to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from kept import keep
from places import PLACES, put
from sizes import LONG
from spoiled import DAMAGE, spoiled
from stage import LOOK
from synthetic import Training, device_event, host_event

from dpmon.ui.monitor import Monitor
from dpmon.ui.playback import Playback

pytestmark = [pytest.mark.timeout(100), pytest.mark.slow]
FILES = (
    *("exit.json", "history.sqlite-journal", "history.sqlite-wal", "stdout.log", "output.log", "stages.log"),
    *("warnings.log", "process-7.ring", "waits-for-input", "input.fifo"),
)


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for a condition."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"never came: {what}")


async def looked_at(app: Monitor) -> None:
    """Show every panel."""
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: not app.feed.scene(app.view).reading, "all that is in the record")
        for key in "1122334455wn":
            await pilot.press(key, "escape")
            text = "\n".join(app.text())
            assert text.strip()
            assert "\x1b" not in text
    app.feed.close()
    assert app.problem is None
    assert not app.return_code


@pytest.mark.parametrize("kind", PLACES)
async def test_paths_that_are_not_files(state: Path, kind: str) -> None:
    training = Training()
    directory = keep({0: [*training.begin(), *training.run(5)], -1: [host_event(1.0)]}, status=0)
    for name in FILES:
        put(kind, directory / name)
    await looked_at(Monitor(directory, LOOK, refresh=0.1))
    put(kind, directory / "history.sqlite")
    await looked_at(Monitor(directory, LOOK, refresh=0.1))


@pytest.mark.parametrize("screen", [Monitor, Playback] if LONG else [Playback])
@pytest.mark.parametrize("what", DAMAGE)
async def test_records_that_no_tracer_writes(state: Path, screen: type[Monitor], what: str) -> None:
    training = Training()
    own = [host_event(1.0), device_event(1.0, 0), *spoiled(DAMAGE[what])]
    records = [*training.begin(), *training.run(5), *spoiled(DAMAGE[what]), *training.run(5)]
    directory = keep({0: records, -1: own}, status=0)
    info = json.loads((directory / "run.json").read_text())
    text = json.dumps({**info, "options": {"mode": "HERE", "devices": "HERE", "replicas": "HERE"}, "refresh": -1})
    refused = len(DAMAGE[what]) >= 1000 or what in ("a great number", "infinity", "no number")  # see test_run_rundir
    (directory / "run.json").write_text(text.replace('"HERE"', "3" if refused else DAMAGE[what]))
    await looked_at(screen(directory, LOOK, refresh=0.1))
