"""The header of the screen, `ls`, `status` and the report say the same about the state of a run and about its end."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpmon.cli.main import main
from dpmon.record.record_types import Event
from dpmon.run import proc
from dpmon.run.run_directory import ExitInfo, record_stop_request, write_info
from dpmon.run.run_reader import PauseState, RunReader
from dpmon.stalls.run_state import format_state
from dpmon.ui.live_run import LiveRun
from dpmon.ui.panels.panel_status import render_panel
from dpmon.ui.screen_data import View, describe_activity
from dpmon.ui.styled_rows import plain_text
from support.format_readers import report_text
from support.history_builders import write_run_directory
from support.record_builders import Training

STALL = Event("stall", {"t_s": 52.0, "since_s": 40.0, "text": "rank 1 in save (t.py:3)", "ranks": [{"rank": 1}]})
IN_STALL = "ended in a stall of 20.0 s: rank 1 in save (t.py:3)"


class Said(NamedTuple):
    """What the four places say."""

    word: str
    """The state in the list."""
    header: str
    sentences: tuple[str, str]
    """Of `status` and of the report."""
    details: list[str]
    """The lines below the row of the list."""
    texts: tuple[str, ...]
    """The first rows of the screen, and everything that `status` prints."""
    status: int


def a_run(*own: Event, ended: ExitInfo | None = None, **about: Any) -> Path:
    training = Training()
    directory = write_run_directory({0: [*training.begin(), *training.run(40)], -1: list(own)}, status=None, **about)
    if ended is not None:
        write_info(directory, ended)
    return directory


def live(*own: Event, **about: Any) -> Path:
    """A run of a minute that goes on: this process plays the supervisor and the command."""
    us: dict[str, Any] = {f"{name}_pid": os.getpid() for name in ("supervisor", "command")}
    us |= {f"{name}_started": proc.start_time_s(os.getpid()) for name in ("supervisor", "command")}
    began = {"start_ns": time.monotonic_ns() - 60 * 10**9, "started_unix": time.time() - 60}
    return a_run(*own, boot_id=proc.boot_id(), host=proc.host_name(), **{**began, **us, **about})


def end(status: int | None, signal: str | None = None, **more: Any) -> ExitInfo:
    return ExitInfo(status, signal, 1.7e9 + 60, 60 * 10**9, 60.0, "supervisor", **more)


def stopped() -> Path:
    directory = a_run(ended=end(130))
    record_stop_request(directory)
    os.utime(directory / "stop-asked", (1.7e9 + 60, 1.7e9 + 60))
    return directory


def read_places(directory: Path, capsys: pytest.CaptureFixture[str]) -> Said:
    """Return what the places say about a run; durations of live states, which grow, are T."""

    def output(*words: str) -> tuple[int, list[str]]:
        status = main(words)
        return status, capsys.readouterr().out.splitlines()

    def timeless(text: str) -> str:
        return re.sub(r" for [\d.]+ s", " for T", text)

    (listed,) = (json.loads(line) for line in output("ls", "--json")[1])
    status, lines = output("status", directory.name)
    report, *_ = report_text(directory, 400)
    run = LiveRun(directory, lambda: RunReader(directory))
    run.start()
    for _ in range(2):
        screen = run.build_screen_data(View())
        run.refresh()
    screen = run.build_screen_data(View())
    word, _, detail = describe_activity(screen)
    header = f"{word} {detail}".rstrip() if screen.is_over else word.lower()
    panel = [plain_text(row) for row in render_panel(screen, 200, 2)]
    run.close()
    return Said(
        format_state(listed["state"]),
        header,
        (timeless(lines[0].partition("  ")[2]), timeless(report.partition("): ")[2])),
        [line.strip() for line in output("ls")[1][2:]],
        (*panel, *lines),
        status,
    )


@pytest.mark.parametrize(
    ("make", "sentence", "word", "details", "status"),
    [
        (live, "training", "training", [], 0),
        (live, "paused for T", "paused", [], 3),
        (live, "waiting for input for T", "waiting for input", [], 3),
        (lambda: live(STALL), "stalled for T: rank 1 in save (t.py:3)", "stalled", ["rank 1 in save (t.py:3)"], 5),
        (lambda: a_run(ended=end(0)), "finished in 1 min 00 s", "finished", [], 3),
        (
            lambda: a_run(ended=end(1, cause="ValueError: boom (t.py:3)")),
            "failed with exit status 1 after 1 min 00 s: ValueError: boom (t.py:3)",
            "failed",
            ["ValueError: boom (t.py:3)"],
            6,
        ),
        (lambda: a_run(ended=end(137, "SIGKILL")), "killed by SIGKILL after 1 min 00 s", "killed", [], 6),
        (lambda: a_run(ended=end(130, "SIGINT")), "interrupted by SIGINT after 1 min 00 s", "interrupted", [], 3),
        (stopped, "stopped by you after 1 min 00 s", "stopped", [], 3),
        (lambda: a_run(STALL, ended=end(1)), "failed with exit status 1 after 1 min 00 s", "failed", [IN_STALL], 6),
        (
            lambda: a_run(ended=end(None, unknown="its supervisor was killed")),
            "ended with unknown exit status after 1 min 00 s: its supervisor was killed",
            "ended",
            ["its supervisor was killed"],
            6,
        ),
        (lambda: a_run(started_unix=1.0), "lost: its end was not recorded", "lost", [], 6),
    ],
    ids=[
        *("training", "paused", "waiting for input", "stalled", "finished", "failed", "killed", "interrupted"),
        *("stopped", "ended in a stall", "end unknown", "lost"),
    ],
)
def test_header_list_status_and_report_say_the_same(
    state: Path, make: Callable[[], Path], sentence: str, word: str, details: list[str], status: int,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    now_ns = time.monotonic_ns()
    # A start in the future: the activity has just begun, however long this test takes.
    monkeypatch.setattr(RunReader, "activities", lambda _: {0: ("forward", now_ns + 600 * 10**9)})
    if word == "paused":
        monkeypatch.setattr(RunReader, "pause_state", lambda _: PauseState(True, True, now_ns - 9 * 10**9))
    if word == "waiting for input":
        monkeypatch.setattr(RunReader, "input_wait_start_ns", lambda _: now_ns - 9 * 10**9)
    said = read_places(make(), capsys)
    assert said.sentences == (sentence, sentence)
    assert said.word == word
    assert sentence.startswith(said.header)
    assert said.header.startswith(word)
    assert said.details == details
    assert said.status == status
    for detail in details:
        assert sum(detail in text for text in said.texts) >= 2, "on the screen, and in the status"


def test_a_run_that_nobody_records_is_not_fine(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its command runs, so that it may train; but its supervisor was killed, and no stall would be noticed."""
    directory = live(supervisor_pid=None)
    name, sentence = f"linear-{directory.name[-4:]}", "unsupervised: its supervisor was killed: nothing is recorded"
    assert main(["status", directory.name]) == 3
    first, remedy, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{name}  {sentence}"
    assert remedy == f"  try: dpmon attach {name} starts another one"
    assert main(["status", "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["health"]["fine"], found["health"]["end"]) == ("unsupervised", False, None)
    assert main(["status", "--wait", "fine", "--timeout", "0"]) == 124
    capsys.readouterr()
    assert main(["ls"]) == 0
    _, row, reason = capsys.readouterr().out.splitlines()
    assert " unsupervised " in row
    assert f"unsupervised: {reason.strip()}" == sentence
    assert report_text(directory, 400)[0].endswith(f"): {sentence}")
