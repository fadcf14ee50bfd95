"""Messages about a run that makes no progress, from the notes of its processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.run.activities import StartupStage, current_startup_stage, read_startup_stages

IMPORTING, IMPORTED, IN_SCRIPT = "importing torch", "torch imported", "in the script"
JOINING, FETCHING = "joining the process group: gloo, rank 1 of 2", "waiting for data: the first batch of Images"


def test_the_last_complete_line_of_each_process_counts(tmp_path: Path) -> None:
    assert read_startup_stages(tmp_path) == {}
    lines = [
        f"7 100 {IMPORTING}",
        f"8 150 {IMPORTING}",
        f"7 200 {IMPORTED}",
        "x 3 no",
        "9 y no",
        "9 5",
        "",
        "7 300 tor",
    ]
    (tmp_path / "stages.log").write_text("\n".join(lines))
    assert read_startup_stages(tmp_path) == {7: (IMPORTED, 200), 8: (IMPORTING, 150)}
    assert read_startup_stages(tmp_path, 120) == {7: (IMPORTING, 100)}


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, None),
        ({7: (IMPORTED, 1)}, (IMPORTED, 1)),
        ({7: (IMPORTED, 9), 8: (IMPORTING, 2)}, (IMPORTING, 2)),
        ({7: (IMPORTED, 9), 8: (JOINING, 2)}, (JOINING, 2)),
        ({7: (IMPORTED, 9), 8: (JOINING, 2), 9: (JOINING, 3)}, (JOINING, 3)),
        ({7: (FETCHING, 2), 8: (IMPORTING, 5)}, (FETCHING, 2)),  # a spawned worker shows nothing about the loop
        ({7: (IN_SCRIPT, 2), 8: (IMPORTING, 5)}, (IN_SCRIPT, 2)),
        ({7: (IN_SCRIPT, 9), 8: (JOINING, 2)}, (JOINING, 2)),
    ],
)
def test_the_stage_of_a_run_is_chosen_among_those_of_its_processes(
    found: dict[int, tuple[str, int]], expected: tuple[str, int] | None
) -> None:
    stages = {pid: StartupStage(*stage) for pid, stage in found.items()}
    assert current_startup_stage(stages) == expected


def test_a_process_that_has_gone_counts_only_if_all_have() -> None:
    found = {7: StartupStage(JOINING, 5), 8: StartupStage(IMPORTING, 2)}
    assert current_startup_stage(found, {8}.__contains__) == (IMPORTING, 2)
    assert current_startup_stage(found, set().__contains__) == (JOINING, 5)
