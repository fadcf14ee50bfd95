"""Device times beside host times in the lines of a headless run with --json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from kept import keep
from synthetic import Training, step_row
from timed import GPUS, HOST_ONLY, OF_CALL, staged, timed, trained

from dpmon.cli.lines import Lines, _progress
from dpmon.model.state import State
from dpmon.record.history_rows import CallRow, Row
from dpmon.record.kinds import UNTIMED, Step
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


def test_a_line_is_of_the_mode_in_force(state: Path) -> None:
    made = Training(devices=GPUS, virtual=False)
    payloads = timed(made.run(10), of_step=(0.25, 9.0, 3.0, 0.5)) + made.switch("single")
    payloads += timed(made.run(5), lambda _: (2.0,), of_step=(None, 7.0, 3.0, 0.5), why=Untimed.LATE)
    payloads += timed(made.run(128), lambda _: (2.0,), of_step=(None, 2.0, 1.0, 0.5), why=Untimed.LATE)
    said = line_of(payloads)
    assert (said["mode"], said["call_phases"]) == ("single", {})
    assert on_device(said["phases"]) == near(
        {
            "data": None,
            "forward": 2.0,
            "backward": 1.0,
            "optimizer": 0.5,
            "other": None,
        }
    )


def test_several_calls_of_a_step_count_together_as_on_the_host(state: Path) -> None:
    made = Training(devices=GPUS, virtual=False)
    payloads: list[Row] = []
    for _ in range(20):
        call = [row for row in made.step() if not isinstance(row, Step)]
        number = made.steps
        made.steps -= 1
        again = made.step()
        assert made.steps == number
        # Their forward on the host is that of both calls.
        took = sum(row.wall for row in (*call, *again) if isinstance(row, CallRow))
        step = step_row("dp", number, made.now, 3 * took, 60, (-1, took, took, -1))
        payloads += timed([*call, *again[:-1], step], of_step=(None, 8.0, 3.0, None))
    said = line_of([*made.begin(), *payloads])
    assert on_device(said["call_phases"]) == near(
        {name: 2 * took for name, took in zip(CALL_PHASES, OF_CALL, strict=True)}
    )
    assert on_device(said["phases"]) == near({"forward": 8.0, "backward": 3.0, "other": None})


@pytest.mark.parametrize(("took", "reason"), [(None, HOST_ONLY), (lambda number: (None, None), UNTIMED[Untimed.LATE])])
def test_a_line_without_device_times_says_why(state: Path, took: Any, reason: str) -> None:
    said = line_of(staged(9, took))
    assert on_device(said["phases"]) == {"forward": None, "other": None}
    assert said["absent"]["device_median_ms"] == reason


def test_the_reasons_for_nulls_are_returned_separately() -> None:
    progress, absent = _progress(None, State(), 0)
    assert progress.keys() == absent.keys()
    assert set(absent.values()) == {"no step has ended yet"}
