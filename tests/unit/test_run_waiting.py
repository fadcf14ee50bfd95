"""A command that waits for input is distinguished from one that works, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpmon.run.stdin_terminal import WAITS_FILE, InputWaitWatcher, input_wait_start_ns, is_reading_stdin
from support.run_harness import wait_for

pytestmark = pytest.mark.skipif(
    is_reading_stdin(os.getpid()) is None, reason="this kernel does not say in which system call a process is"
)
SCRIPT = "print(input(), flush=True); import time; time.sleep(60)"


@pytest.fixture
def asking() -> Iterator[subprocess.Popen[bytes]]:
    """A process that reads a line, then sleeps for a minute."""
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def answer(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"yes\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"yes\n"


def test_begin_and_end_of_a_read_of_standard_input_are_seen(asking: subprocess.Popen[bytes]) -> None:
    wait_for(lambda: is_reading_stdin(asking.pid), what="the wait for a line")
    asking.send_signal(signal.SIGSTOP)
    wait_for(lambda: is_reading_stdin(asking.pid) is False, what="the stop")
    asking.send_signal(signal.SIGCONT)
    wait_for(lambda: is_reading_stdin(asking.pid), what="the wait after it")
    answer(asking)
    wait_for(lambda: is_reading_stdin(asking.pid) is False, what="the end of the wait")
    asking.kill()
    asking.wait()
    assert not is_reading_stdin(asking.pid)


def test_the_file_is_there_while_it_waits(asking: subprocess.Popen[bytes], tmp_path: Path) -> None:
    now = time.monotonic_ns()
    (tmp_path / WAITS_FILE).write_text(f"{now} {now}")
    assert input_wait_start_ns(tmp_path) == now
    watch = InputWaitWatcher(tmp_path, asking.pid)
    assert input_wait_start_ns(tmp_path) is None, "what a supervisor that was killed has left"
    wait_for(lambda: is_reading_stdin(asking.pid), what="the wait for a line")
    before = time.monotonic_ns()
    watch.poll(100.0)
    since = input_wait_start_ns(tmp_path)
    assert since is not None
    assert before <= since <= time.monotonic_ns()
    watch.poll(101.5)
    assert input_wait_start_ns(tmp_path) == since, "it still waits, since then"
    answer(asking)
    wait_for(lambda: is_reading_stdin(asking.pid) is False, what="the end of the wait")
    watch.poll(101.52)
    assert input_wait_start_ns(tmp_path) == since, "not checked again at once"
    watch.poll(103.0)
    assert input_wait_start_ns(tmp_path) is None


def test_a_rank_that_waits_is_reported_with_its_id(asking: subprocess.Popen[bytes], tmp_path: Path) -> None:
    told: list[int] = []
    watch = InputWaitWatcher(tmp_path, os.getpid(), lambda pid, since, seen: told.append(pid))
    wait_for(lambda: is_reading_stdin(asking.pid), what="the wait for a line")
    watch.poll(100.0)
    assert input_wait_start_ns(tmp_path) is None
    watch.poll(101.0, [asking.pid])
    assert input_wait_start_ns(tmp_path) is not None
    time.sleep(1.1)  # only a wait of at least a second is reported
    watch.poll(102.0, [asking.pid])
    answer(asking)
    wait_for(lambda: is_reading_stdin(asking.pid) is False, what="the end of the wait")
    watch.poll(104.0, [asking.pid])
    assert told == [asking.pid]


def test_a_wait_never_starts_before_a_check_that_saw_it(
    asking: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor without a processor checks late: a step that ended just before the check comes before the wait."""
    pids = iter([os.getpid(), asking.pid])
    monkeypatch.setattr("dpmon.run.stdin_terminal.is_reading_stdin", lambda _: next(pids) == asking.pid)
    watch = InputWaitWatcher(tmp_path, asking.pid)
    watch.poll(100.0)
    before_ns = time.monotonic_ns()
    watch.poll(101.0)
    since_ns = input_wait_start_ns(tmp_path)
    assert since_ns is not None
    assert since_ns >= before_ns


@pytest.mark.parametrize("text", ["", "-3", "1e5 1e5", "since yesterday", "12", "1 2 3"])
def test_nonsense_in_the_file_is_no_wait(tmp_path: Path, text: str) -> None:
    (tmp_path / WAITS_FILE).write_text(text)
    assert input_wait_start_ns(tmp_path) is None


def test_a_wait_is_reported_once_at_its_end_unless_it_was_short(
    asking: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    watch = InputWaitWatcher(tmp_path, asking.pid, lambda _, since, seen: told.append((since, seen)))
    wait_for(lambda: is_reading_stdin(asking.pid), what="the wait for a line")
    clock = iter(range(10**9, 10**11, 10**9))
    monkeypatch.setattr("dpmon.run.stdin_terminal.time.monotonic_ns", lambda: next(clock))
    for now in (100.0, 101.0, 101.1, 102.0):
        watch.poll(now)
    assert told == []
    answer(asking)
    wait_for(lambda: is_reading_stdin(asking.pid) is False, what="the end of the wait")
    watch.poll(103.0)
    watch.poll(104.0)
    watch.close()
    assert told == [(10**9, 4 * 10**9)], "once, from the first to the last check that saw the wait"


def test_a_short_wait_is_not_reported_but_one_cut_off_by_the_end_is(
    asking: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    wait_for(lambda: is_reading_stdin(asking.pid), what="the wait for a line")
    for step, expected in ((10**8, []), (10**9, [(10**9, 2 * 10**9)])):
        clock = iter((10**9, 10**9 + step))
        monkeypatch.setattr("dpmon.run.stdin_terminal.time.monotonic_ns", lambda clock=clock: next(clock))
        watch = InputWaitWatcher(tmp_path, asking.pid, lambda _, since, seen: told.append((since, seen)))
        watch.poll(100.0)
        watch.poll(101.0)
        watch.close()
        assert told == expected
