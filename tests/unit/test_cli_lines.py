"""Device times beside host times in the lines of a headless run with --json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kept import keep
from timed import HOST_ONLY, OF_CALL, staged, trained

from dpmon.cli.lines import Lines, _progress
from dpmon.model.state import State
from dpmon.record.history_rows import Row
from dpmon.record.kinds import UNTIMED
from dpmon.record.names import CALL_PHASES, Untimed
from dpmon.run.reader import RunReader


def line_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the line of a headless run with these records."""
    said: list[bytes] = []
    lines = Lines(RunReader(keep({0: rows}, status=None)), lambda line: bool(said.append(line)) or True)
    lines.tick(1e9)
    lines.end(None)
    found: dict[str, Any] = json.loads(said[0])
    return found


def near(times: dict[str, Any]) -> Any:
    """Equal within the precision of medians of many steps."""
    return {name: None if took is None else pytest.approx(took, rel=0.005) for name, took in times.items()}


def on_device(phases: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    return {name: phase["device_median_ms"] for name, phase in phases.items()}


def test_a_line_has_the_device_beside_the_host_of_the_same_thing(state: Path) -> None:
    said = line_of(trained(40))
    # The whole forward, as for the host; without the phases of the calls, only 0.25 ms would be left.
    assert on_device(said["phases"]) == near(
        {
            "data": 0.25,
            "forward": 4.0,
            "backward": 3.0,
            "optimizer": 0.5,
            "other": None,
        }
    )
    assert on_device(said["call_phases"]) == near(dict(zip(CALL_PHASES, OF_CALL, strict=True)))
    whole = said["phases"]["forward"]["median_ms"]
    assert whole > sum(phase["median_ms"] for phase in said["call_phases"].values()) * 0.9
    assert "device_median_ms" not in said["absent"]


@pytest.mark.parametrize(("took", "reason"), [(None, HOST_ONLY), (lambda number: (None, None), UNTIMED[Untimed.LATE])])
def test_a_line_without_device_times_says_why(state: Path, took: Any, reason: str) -> None:
    said = line_of(staged(9, took))
    assert on_device(said["phases"]) == {"forward": None, "other": None}
    assert said["absent"]["device_median_ms"] == reason


def test_the_reasons_for_nulls_are_returned_separately() -> None:
    progress, absent = _progress(None, State(), 0)
    assert progress.keys() == absent.keys()
    assert set(absent.values()) == {"no step has ended yet"}
