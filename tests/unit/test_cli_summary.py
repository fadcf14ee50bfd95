"""The summary at the end of a run; on a small terminal its last lines are left out and counted."""

from __future__ import annotations

import os
import pty
import struct
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

from dpmon.cli.messages import print_closing_summary, print_message
from dpmon.cli.summary import WIDTH, fit_lines, summary_lines
from dpmon.record.record_types import Event
from dpmon.run.run_directory import load_exit
from support.format_readers import report_text
from support.history_builders import write_playback_run, write_run_directory
from support.record_builders import SECOND, Training

MORE = "dpmon report linear-7f3a"


def rows_of(lines: list[str], columns: int) -> int:
    return sum(max(-(-len(line) // columns), 1) for line in lines)


@pytest.mark.parametrize("columns", [40, 73, 113])
def test_the_first_lines_stay_and_the_others_are_counted(state: Path, columns: int) -> None:
    training = Training(devices=[f"cpu:{i}" for i in range(8)])
    rows = [*training.begin(), *training.run(40), *training.switch("single"), *training.run(40)]
    directory = write_run_directory({0: [*rows, Event("warning", {"process": 0, "t_s": 1.0, "text": "lost"})]})
    lines = summary_lines(directory, load_exit(directory))
    assert lines[2] == "warning: lost", "before the figures"
    whole = rows_of(lines, columns)
    assert fit_lines(lines, whole, columns, MORE) == lines
    for room in range(8, whole):
        *shown, said, last = fit_lines(lines, room, columns, MORE)
        assert rows_of([*shown, said, last], columns) <= room
        assert shown == lines[: len(shown)]
        assert last == lines[-1], "where the record is"
        left = len(lines) - len(shown) - 1
        assert said == f"{left} more line{'s' * (left > 1)}: {MORE}"
        assert rows_of([*lines[: len(shown) + 1], f"{len(lines)} more lines: {MORE}", last], columns) > room, "full"


def test_the_tables_of_the_report_follow(state: Path) -> None:
    """Each replica with its most frequent size, and the others counted; named after its model."""
    training = Training(root="Generator")
    rows = [*training.begin(), *training.run(20)]
    for size in range(2, 30, 2):
        rows += training.step(size)
    training.root = "Critic"
    directory = write_run_directory({0: [*rows, *training.run(3)]})
    lines = summary_lines(directory, load_exit(directory))
    at = lines.index("REPLICAS")
    shown = [line.split() for line in lines[at + 2 : at + 6]]
    assert [line[:4] for line in shown] == [
        [name, number, f"cpu:{number}", calls]
        for name, calls in (("Critic", "3"), ("Generator", "34"))
        for number in "01"
    ]
    assert lines[at + 4].endswith("[15, 5] -> [15, 2] (+14 other sizes)")
    assert lines[at:-1] == [line for line in report_text(directory, WIDTH) if line in lines[at:-1]]


def test_a_damaged_history_is_reported(state: Path) -> None:
    directory = write_run_directory({})
    (directory / "history.sqlite").write_bytes(b"x" * 5000)
    lines = summary_lines(directory, load_exit(directory))
    assert any(line.startswith("warning: the history is damaged: ") for line in lines)


def test_the_parts_of_the_elapsed_time_stand_there_if_not_nearly_all_was_training(state: Path) -> None:
    training = Training(mode="single", step_ns=100_000_000, start_ns=3 * SECOND)
    payloads = [*training.begin(), *training.run(20)]
    gap_after = training.steps
    training.now += 4 * SECOND
    payloads += training.run(20)
    seconds = training.now / SECOND + 1
    directory = write_run_directory({0: payloads, -1: [Event("exit", {"status": 0, "t_s": seconds})]}, seconds=seconds)
    lines = summary_lines(directory, load_exit(directory))
    parts = f"start-up 3.00 s, training {seconds - 8:.2f} s, between steps 4.00 s, after the last step 1.00 s"
    at = lines.index("TIME")
    assert lines[at + 1].partition(": ")[2] == parts
    assert lines[at + 2].startswith(f"  the longest gaps between steps: 4.00 s after step {gap_after}")


@pytest.mark.parametrize(
    ("term", "encoding", "plain"),
    [("xterm", "utf-8", False), ("vt100", "utf-8", True), ("xterm", "latin-1", True), ("linux", "utf-8", True)],
)
def test_a_terminal_gets_only_characters_that_it_can_show(
    monkeypatch: pytest.MonkeyPatch, term: str, encoding: str, plain: bool
) -> None:
    master, slave = pty.openpty()
    monkeypatch.setenv("TERM", term)
    with os.fdopen(slave, "w", encoding=encoding) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        print_message("median 120 µs, rest –")
        printed = os.read(master, 1 << 16)
        monkeypatch.undo()
    os.close(master)
    assert printed == ("dpmon: median 120 us, rest -" if plain else "dpmon: median 120 µs, rest –").encode() + b"\r\n"


def test_a_file_gets_unchanged_characters(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TERM", "vt100")
    print_message("median 120 µs")
    assert capsys.readouterr().err == "dpmon: median 120 µs\n"


@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (12, 60)])
def test_a_summary_leaves_room_for_the_prompt_and_its_headline(
    state: Path, monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    directory = write_playback_run()
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    with os.fdopen(slave, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert print_closing_summary(directory, load_exit(directory), print_message) == 0
        monkeypatch.undo()
        text = b""
        while b"dpmon: record: " not in text or not text.endswith(b"\n"):  # a terminal returns only what it has now
            text += os.read(master, 1 << 16)
    printed = text.decode().splitlines()
    os.close(master)
    assert rows_of(printed, columns) <= rows - 2
    assert "finished in" in printed[0]
    assert "more lines: dpmon report " in printed[-2]
    assert printed[-1].startswith("dpmon: record: ")


def test_further_warnings_are_counted_and_the_command_that_lists_them_is_named(state: Path) -> None:
    training = Training(mode="single")
    warnings = [Event("warning", {"process": 0, "t_s": 1.0, "text": f"warning number {n}"}) for n in range(12)]
    directory = write_run_directory({0: [*training.begin(), *training.run(5), *warnings]})
    lines = summary_lines(directory, load_exit(directory))
    assert [line for line in lines if line.startswith("warning: ")] == [
        f"warning: warning number {n}" for n in range(5)
    ]
    (more,) = [line for line in lines if "more warning" in line]
    assert more.startswith("7 more warnings: dpmon export ")
    assert more.endswith(" --kind warning lists all 12")
    few = summary_lines(write_run_directory({0: [*training.begin(), *warnings[:5]]}, name="few"), None)
    assert not any("more warning" in line for line in few)


@pytest.mark.parametrize(
    ("ranks", "steps", "said"),
    [
        ((None, None), (32, 32), "2 training processes, 64 steps, 64 calls total"),
        ((0, 1), (32, 32), "2 training processes, 32 steps, 64 calls total"),
        ((0, 1), (32, 30), "2 training processes, 32 steps, 62 calls total"),
        ((None,), (32,), "one training process, 32 steps, 32 calls"),
    ],
)
def test_a_summary_names_the_processes_that_steps_belong_to(
    state: Path, ranks: tuple[int | None, ...], steps: tuple[int, ...], said: str
) -> None:
    processes = {}
    for number, (rank, count) in enumerate(zip(ranks, steps, strict=True)):
        training = Training(process=number, rank=rank, mode="single", seed=number)
        processes[number] = [*training.begin(), *training.run(count)]
    lines = summary_lines(write_run_directory(processes), None)
    assert lines[1].startswith(said), lines
