"""A reader of a run knows the phases of its processes, sends requests, and knows how the run ended."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dpmon.cli.main import main
from dpmon.record.span_format import DOING
from dpmon.run import proc
from dpmon.run.mirror_state import STATE_FILE, MirrorState, activities_by_word
from dpmon.run.run_directory import ExitInfo, RunInfo, write_info
from dpmon.run.run_reader import PauseState, RunReader
from dpmon.run.run_registry import create_run
from dpmon.span_ring import HeaderWord, SpanRing
from dpmon.supervise.command_process import last_sign_of_life_ns
from support.history_builders import make_run_info

START = 1_000_000_000


@pytest.fixture
def run(state: Path) -> tuple[Path, RunInfo]:
    """A run's directory whose command is this process."""
    us = {"command_pid": os.getpid(), "command_started": proc.start_time_s(os.getpid()), "boot_id": proc.boot_id()}
    return create_run(make_run_info(start_ns=START, **us))


@pytest.fixture
def reader(run: tuple[Path, RunInfo]) -> Iterator[RunReader]:
    """A reader of the run."""
    found = RunReader(run[0])
    yield found
    found.close()


class Process:
    """A traced process."""

    def __init__(self, directory: Path, process: int = 0, rank: int = -1, world: int = -1) -> None:
        path = str(directory / f"process-{process}.ring")
        ring = SpanRing(path, process=process, rank=rank, world=world, start_ns=START, slots=64)
        self.words, self.kinds = ring.words, ring.kinds
        self.words[HeaderWord.TRAINING_THREAD] = 3

    def does(self, what: str, since_ns: int) -> None:
        """Set the phase of the training thread."""
        self.words[HeaderWord.ENDED] = what == "ended"
        kind = 0 if what in ("other", "ended") else next(kind for kind, name in DOING.items() if name == what)
        self.words[HeaderWord.SPAN_START + 3] = since_ns
        self.kinds[3] = kind

    def asked(self) -> tuple[int, int]:
        """Return the requested mode, and the last request for a pause."""
        return self.words[HeaderWord.REQUESTED_MODE], self.words[HeaderWord.PAUSE]

    def answer(self, mode: int) -> None:
        """Answer the requests."""
        self.words[HeaderWord.MODE], self.words[HeaderWord.ACKNOWLEDGED] = mode, self.words[HeaderWord.REQUEST]
        self.words[HeaderWord.PAUSED] = self.words[HeaderWord.PAUSE]


def test_a_request_is_pending_until_every_process_has_acted(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    assert reader.request_mode("single") == 0
    assert not reader.has_pending_request()
    one, two = Process(run[0], 0), Process(run[0], 1)
    assert reader.request_mode("single") == 2
    assert reader.has_pending_request()
    for writer in (one, two):
        assert writer.asked() == (2, 0)
        assert reader.has_pending_request()
        writer.answer(2)
    assert not reader.has_pending_request()
    with pytest.raises(ValueError, match="not in tuple"):
        reader.request_mode("fast")


def test_an_ended_process_is_not_waited_for(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    one, two = Process(run[0], 0), Process(run[0], 1)
    reader.request_mode("dp")
    one.answer(1)
    assert reader.has_pending_request()
    two.does("ended", time.monotonic_ns())
    assert not reader.has_pending_request()
    assert reader.request_mode("single") == 1


def test_a_pause_holds_once_all_that_train_have_paused(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    assert reader.request_pause(True) == 0
    assert reader.pause_refusal() == "no training process is running"
    assert reader.pause_state() == PauseState(False, False, None)
    one, two = Process(run[0], 0), Process(run[0], 1)
    assert reader.request_pause(True) == 2
    assert reader.pause_state() == PauseState(True, True, None)
    for number, writer in enumerate((one, two), 1):
        writer.does("paused", number * 1000)
        writer.answer(0)
    assert reader.pause_state() == PauseState(True, False, 2000)
    assert reader.request_pause(False) == 2
    assert reader.pause_state() == PauseState(False, True, 2000)
    for writer in (one, two):
        writer.does("ended", 3000)
    assert reader.pause_state() == PauseState(False, False, None)


def test_a_pause_that_ended_by_itself_is_not_requested_any_more(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    """The next request pauses again: it does not resume a training that goes on."""
    writer = Process(run[0], 0)
    reader.request_pause(True)
    writer.does("paused", 1000)
    writer.answer(0)
    assert reader.pause_state() == PauseState(True, False, 1000)
    writer.does("backward", 2000)
    assert reader.pause_state() == PauseState(False, False, None)
    reader.request_pause(True)
    assert reader.pause_state() == PauseState(True, True, None)


def test_ranks_are_not_asked_to_pause(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    rank = Process(run[0], 0, rank=1, world=2)
    assert reader.request_pause(True) == 0
    assert "ranks" in (reader.pause_refusal() or "")
    assert rank.asked() == (0, 0)


def test_activities_and_stages(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    assert reader.activities() == {}
    assert reader.startup_stage() is None
    path = run[0] / "stages.log"
    path.write_text("12 1000 importing torch\n12 2000 torch imp")
    assert reader.startup_stage() == ("importing torch", 1000)
    path.write_text("12 1000 importing torch\n12 2000 torch imported\n")
    assert reader.startup_stage() == ("torch imported", 2000)
    path.write_bytes(b"\xff\n" * 10_000 + b"no line of ours\n")
    assert reader.startup_stage() is None


@pytest.mark.parametrize("what", sorted({*DOING.values(), "other", "ended"}))
def test_the_activity_of_a_process_is_known(run: tuple[Path, RunInfo], reader: RunReader, what: str) -> None:
    assert reader.activities() == {}
    writer = Process(run[0], rank=1)
    assert reader.activities() == {0: ("other", 0)}
    writer.does(what, 77_000)
    assert reader.activities() == {0: (what, 0 if what == "ended" else 77_000)}
    assert last_sign_of_life_ns(*run) == START


def test_a_killed_process_counts_as_ended(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    Process(run[0]).does("backward", 77_000)
    assert reader.activities()[0][0] == "backward"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (ring,) = reader._rings.values()
    ring.pid = gone.pid
    assert reader.activities() == {0: ("ended", 0)}


def test_the_end_is_read_from_the_file(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    assert reader.exit_info() is None
    write_info(run[0], ExitInfo(137, "SIGKILL", 1.0, 2, 2.5, "supervisor"))
    found = reader.exit_info()
    assert found is not None
    assert (found.status, found.signal, found.seconds) == (137, "SIGKILL", 2.5)


def test_whether_the_command_lives(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    directory, info = run
    assert reader.is_command_alive() is True
    for change, expected in (
        ({"command_started": (info.command_started or 0) - 5}, False),  # the number belongs to another process now
        ({"boot_id": "another boot"}, False),
        ({"command_pid": None}, None),
    ):
        write_info(directory, replace(info, **change))
        other = RunReader(directory)
        assert other.is_command_alive() is expected
        other.close()


def test_run_json_is_read_again_when_it_was_replaced(run: tuple[Path, RunInfo], reader: RunReader) -> None:
    directory, info = run
    write_info(directory, replace(info, command_pid=4))
    assert reader.refresh().command_pid == 4
    (directory / "run.json").write_text("{")
    assert reader.refresh().command_pid == 4


def test_descriptors_are_given_back(run: tuple[Path, RunInfo]) -> None:
    for number in range(2):
        Process(run[0], number)
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        reader = RunReader(run[0])
        assert reader.activities()
        assert reader.exit_info() is None
        reader.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_ls_says_paused_while_every_process_that_trains_is(
    run: tuple[Path, RunInfo], capsys: pytest.CaptureFixture[str]
) -> None:
    directory, info = run
    pid = os.getpid()
    write_info(directory, replace(info, supervisor_pid=pid, supervisor_started=proc.start_time_s(pid)))

    def state() -> str:
        assert main(["ls", "--json"]) == 0
        return str(json.loads(capsys.readouterr().out)["state"])

    assert state() == "starting"
    one, two = Process(directory, 0), Process(directory, 12)
    one.does("paused", 5)
    two.does("forward", 5)
    assert state() == "starting"
    two.does("paused", 5)
    assert state() == "paused"
    one.does("ended", 5)
    assert state() == "paused", "one that has ended does not train"
    two.does("other", 5)
    assert state() == "starting"


def test_what_the_processes_of_a_mirror_do_is_what_it_wrote_last(tmp_path: Path) -> None:
    machines, path = MirrorState(tmp_path, 5), tmp_path / STATE_FILE
    assert machines.activities() == {}
    for at, doing in enumerate(({3: ("data", 7)}, {3: ("backward", 9), 4: ("ended", 0)}, {})):
        path.write_text(json.dumps({"doing": activities_by_word(doing)}))
        os.utime(path, ns=(at, at + 1))
        for _ in range(2):
            assert machines.state["doing"] == {word: {str(n): since} for n, (word, since) in doing.items()}
            assert machines.activities() == {n: (word, since and since + 5) for n, (word, since) in doing.items()}
