"""Messages about a run that makes no progress, from the notes of its processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from dpmon.model.state import State
from dpmon.run.activities import QUIET_NS, ProcessActivity, _interrupted, newest_stage, stages, stall_text
from dpmon.run.rundir import RunInfo
from dpmon.ui.scene import Scene, life

SECOND = 1_000_000_000
NOW = 100 * SECOND
IMPORTING, IMPORTED, IN_SCRIPT = "importing torch", "torch imported", "in the script"
JOINING, FETCHING = "joining the process group: gloo, rank 1 of 2", "waiting for data: the first batch of Images"


def test_the_last_complete_line_of_each_process_counts(tmp_path: Path) -> None:
    assert stages(tmp_path) == {}
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
    assert stages(tmp_path) == {7: (IMPORTED, 200), 8: (IMPORTING, 150)}
    assert stages(tmp_path, 120) == {7: (IMPORTING, 100)}


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
    assert newest_stage(found) == expected


def test_a_process_that_has_gone_counts_only_if_all_have() -> None:
    found = {7: (JOINING, 5), 8: (IMPORTING, 2)}
    assert newest_stage(found, {8}.__contains__) == (IMPORTING, 2)
    assert newest_stage(found, set().__contains__) == (JOINING, 5)


def of(process: int | None, doing: str, since_s: float, rank: int | None = None) -> ProcessActivity:
    return ProcessActivity(process, rank, 70 + (process or 0), doing, int(since_s * SECOND))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ([], None),
        ([of(0, "in forward", 66)], "no new phase for 34 s: in forward"),
        ([of(0, "in forward", 95)], None),
        ([of(0, "in forward", 0)], None),
        ([of(0, "paused", 10)], None),
        ([of(0, "at its end", 10)], None),
        ([of(0, "in backward", 66, 0), of(1, "waiting for data", 60, 1)],
         "no new phase for 34 s: rank 0 in backward, rank 1 waiting for data"),
        ([of(0, "in backward", 66, 0), of(1, "gone", 60, 1)],
         "no new phase for 34 s: rank 0 in backward, rank 1 gone"),
        ([of(0, "in backward", 10), of(1, "in forward", 99)], None),
        ([of(0, "at its end", 10), of(1, "in forward", 66)], "no new phase for 34 s: in forward"),
        ([of(None, FETCHING, 66)], f"nothing has moved for 34 s: {FETCHING}"),
    ],
)  # fmt: skip
def test_a_stall_names_its_duration_and_the_place_of_each_process(
    found: list[ProcessActivity], said: str | None
) -> None:
    assert QUIET_NS == 10 * SECOND
    assert stall_text(found, NOW) == said


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"in forward": range(40)}, "ranks 0-39 in forward"),
        ({"in forward": (0, 1)}, "ranks 0, 1 in forward"),
        ({"in backward": (*range(5), *range(6, 64)), "in the script": (5,)},
         "rank 5 in the script; ranks 0-4, 6-63 in backward"),
        ({"in backward": range(0, 64, 2), "gone": range(1, 64, 2)},
         f"ranks {', '.join(map(str, range(0, 32, 2)))} and 16 more in backward;"
         f" ranks {', '.join(map(str, range(1, 32, 2)))} and 16 more gone"),
    ],
)  # fmt: skip
def test_many_processes_are_named_in_groups_the_odd_ones_first(where: dict[str, Sequence[int]], said: str) -> None:
    found = [of(rank, doing, 66, rank) for doing, ranks in where.items() for rank in ranks]
    assert stall_text(found, NOW) == f"no new phase for 34 s: {said}"


def test_processes_without_a_rank_are_named_by_their_number() -> None:
    found = [of(0, "in forward", 66), of(1, "in forward", 66), of(2, "in forward", 66), of(None, FETCHING, 60)]
    assert stall_text(found, NOW) == f"no new phase for 34 s: pid 70 {FETCHING}; processes 0-2 in forward"


@pytest.mark.parametrize(
    ("stage", "word", "detail"),
    [
        (IMPORTING, "importing torch", "34 s"),
        (IMPORTED, "waiting for the first step", "34 s"),
        (IN_SCRIPT, "waiting for the first step", "34 s"),
        (JOINING, "joining the process group", "gloo, rank 1 of 2, 34 s"),
        (FETCHING, "waiting for data", "the first batch of Images, 34 s"),
    ],
)
def test_the_screen_says_what_is_under_way_before_the_first_step(stage: str, word: str, detail: str) -> None:
    assert life(Scene(State(), NOW, stage=(stage, 66 * SECOND), alive=True)) == (word, "wait", detail)


def test_an_interrupted_rank_is_named_if_there_are_others(tmp_path: Path) -> None:
    """The note of the other rank may be missing. Then the place alone does not show which rank it belongs to."""
    (tmp_path / "endings.log").write_text('70 5 KeyboardInterrupt {"file": "/work/train.py", "line": 15}\n')
    info = RunInfo("", "n", ("c",), "s", "/work", None, 1e9, 0, "", True)
    ranks = [ProcessActivity(number, number, 70 + number, "forward", 0) for number in (0, 1)]
    assert _interrupted(tmp_path, info, ranks) == "rank 0 interrupted at train.py:15"
    assert _interrupted(tmp_path, info, ranks[:1]) == "interrupted at train.py:15"
    assert _interrupted(tmp_path, info, []) == "interrupted at train.py:15"
