"""The screen draws runs with any contents, and ends when it is asked to."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.ui.monitor import Monitor
from support.history_builders import write_run_directory
from support.hostile_inputs import FILE_TYPES, create_file_of_type
from support.record_builders import Training, host_event
from support.screen_harness import wait_until
from support.screen_states import STYLE

pytestmark = [pytest.mark.timeout(100), pytest.mark.slow]
FILES = (
    *("exit.json", "history.sqlite-journal", "history.sqlite-wal", "stdout.log", "output.log", "stages.log"),
    *("warnings.log", "process-7.ring", "waits-for-input", "input.fifo"),
)


async def looked_at(app: Monitor) -> None:
    """Show every panel."""
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_until(lambda: not app.live_run.build_screen_data(app.view).is_reading, "all that is in the record")
        for key in "1122334455wn":
            await pilot.press(key, "escape")
            text = "\n".join(app.text())
            assert text.strip()
            assert "\x1b" not in text
    app.live_run.close()
    assert app.open_error is None
    assert not app.return_code


@pytest.mark.parametrize("kind", FILE_TYPES)
async def test_paths_that_are_not_files(state: Path, kind: str) -> None:
    training = Training()
    directory = write_run_directory({0: [*training.begin(), *training.run(5)], -1: [host_event(1.0)]}, status=0)
    for name in FILES:
        create_file_of_type(kind, directory / name)
    await looked_at(Monitor(directory, STYLE, refresh=0.1))
    create_file_of_type(kind, directory / "history.sqlite")
    await looked_at(Monitor(directory, STYLE, refresh=0.1))
