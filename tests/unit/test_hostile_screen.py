"""The screen draws runs with any contents, and ends when it is asked to."""

from __future__ import annotations

from pathlib import Path

import pytest
from kept import keep
from places import PLACES, put
from stage import LOOK, until
from synthetic import Training, host_event

from dpmon.ui.monitor import Monitor

pytestmark = [pytest.mark.timeout(100), pytest.mark.slow]
FILES = (
    *("exit.json", "history.sqlite-journal", "history.sqlite-wal", "stdout.log", "output.log", "stages.log"),
    *("warnings.log", "process-7.ring", "waits-for-input", "input.fifo"),
)


async def looked_at(app: Monitor) -> None:
    """Show every panel."""
    async with app.run_test(size=(120, 40)) as pilot:
        await until(lambda: not app.live_run.build_screen_data(app.view).is_reading, "all that is in the record")
        for key in "1122334455wn":
            await pilot.press(key, "escape")
            text = "\n".join(app.text())
            assert text.strip()
            assert "\x1b" not in text
    app.live_run.close()
    assert app.open_error is None
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
