"""Several writers of one ring at once: threads, signal handlers, interrupts. Nothing is lost that is not counted."""

from __future__ import annotations

import signal
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rings import SMALL, everything, number_of, numbered, opened

import dpmon.ring
from dpmon.ring import BLOCK_BYTES, MAX_PAYLOAD, Frame, Ring


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "process-0.ring")


@pytest.mark.parametrize("busy", [0, 4])
def test_threads_that_write_at_once(path: str, busy: int) -> None:
    """With threads that keep the interpreter busy, a writer may be stopped for long in the midst of a record."""
    threads, each = 4, 1500
    ring = Ring(path, process=0, capacity=64 * BLOCK_BYTES)
    refused = [0] * threads
    over = threading.Event()

    def write(index: int) -> None:
        for number in range(each):
            refused[index] += not ring.write(numbered(index * each + number, number % 90))

    def burn() -> None:
        while not over.is_set():
            sum(range(2000))

    burners = [threading.Thread(target=burn) for _ in range(busy)]
    writers = [threading.Thread(target=write, args=(index,)) for index in range(threads)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5 if not busy else 1e-3)
    try:
        for thread in [*burners, *writers]:
            thread.start()
        for thread in writers:
            thread.join()
    finally:
        over.set()
        sys.setswitchinterval(interval)
    for thread in burners:
        thread.join()
    with opened(path) as reader:
        found = [number_of(payload) for payload in everything(reader)]
        assert len(set(found)) == len(found)
        assert len(found) == threads * each - sum(refused)
        assert (reader.missed, reader.lost()) == (0, sum(refused))
        for index in range(threads):
            mine = [number for number in found if number // each == index]
            assert mine == sorted(mine)


class AtLine:
    """Runs `act` in the midst of the ring's code, before the k-th of its lines, as a signal handler may.

    Or before the k-th instruction of its byte code, which is more often than Python looks for signals.
    """

    def __init__(self, line: int, act: Callable[[], object], event: str = "line") -> None:
        self.left = line
        self.act = act
        self.event = event
        self.acted = False

    def __call__(self, frame: FrameType, event: str, _: Any) -> AtLine | None:
        if frame.f_code.co_filename != dpmon.ring.__file__:
            return None
        frame.f_trace_opcodes = self.event == "opcode"
        if event == self.event:
            self.left -= 1
            if self.left == 0:
                self.acted = True
                self.act()
        return self


@contextmanager
def at_line(line: int, act: Callable[[], object], event: str = "line") -> Iterator[AtLine]:
    hook = AtLine(line, act, event)
    before = sys.gettrace()
    # Python 3.12 looks whether any frame wants its instructions traced when the hook is set, not later.
    sys._getframe().f_trace_opcodes = event == "opcode"
    sys.settrace(hook)
    try:
        yield hook
    finally:
        sys.settrace(before)


def filled(tmp_path: Path, line: int, full: bool) -> tuple[Ring, str]:
    """A ring whose next record goes into the block under way, or (`full`) begins a new one."""
    path = str(tmp_path / f"{line}-{full}.ring")
    ring = Ring(path, process=0, capacity=SMALL)
    assert ring.write(numbered(0, MAX_PAYLOAD - 200 if full else 10))
    return ring, path


def disturbed(tmp_path: Path, full: bool, act: Callable[[Ring], object]) -> Iterator[tuple[Ring, str, bool | None]]:
    """A ring for every line of a write: `act` came in before it; whether the write said that it was done, if it did."""
    for line in range(1, 200):
        ring, path = filled(tmp_path, line, full)
        done: bool | None = None
        with at_line(line, lambda ring=ring: act(ring)) as hook, suppress(KeyboardInterrupt):
            done = ring.write(numbered(1, 300))
        if not hook.acted:
            assert line > 10
            return
        yield ring, path, done
    raise AssertionError("a write has no end")


@pytest.mark.parametrize("full", [False, True])
def test_a_signal_handler_that_writes_in_the_midst_of_a_write(tmp_path: Path, full: bool) -> None:
    answers: list[bool] = []
    for ring, path, done in disturbed(tmp_path, full, lambda ring: answers.append(ring.write(numbered(9, 40)))):
        assert done
        assert ring.write(numbered(2, 300))
        with opened(path) as reader:
            found = [number_of(payload) for payload in everything(reader)]
            assert sorted(found) == sorted([0, 1, 2, *([9] if answers[-1] else [])])
            assert (reader.missed, reader.lost()) == (0, 0 if answers[-1] else 1)
    assert True in answers
    assert False in answers  # it came in where there was nothing else to do


@pytest.mark.parametrize(
    "full",
    [
        False,
        True,
    ],
)
def test_an_exception_in_the_midst_of_a_write(tmp_path: Path, full: bool) -> None:
    """Ctrl-C: the record may be gone, but not those after it."""

    def interrupt(_: Ring) -> None:
        raise KeyboardInterrupt

    for ring, path, done in disturbed(tmp_path, full, interrupt):
        assert done is None
        later = list(range(2, 6))
        assert all(ring.write(numbered(number, 200)) for number in later)
        with opened(path) as reader:
            found = [number_of(payload) for payload in everything(reader)]
            assert found in ([0, 1, *later], [0, *later])
            assert reader.missed <= 1


# ------------------------------------------------------------------------------------------------ held records

PAIR = "<QQ"
"""Of each record of a pair: twice its number."""
FIRST = {False: numbered(0, 10), True: numbered(0, BLOCK_BYTES - 130)}


def holding(tmp_path: Path, name: object, full: bool) -> tuple[Ring, str]:
    """A ring that holds back 1 to 4 (1 with a layout of its own, 2 and 3 as a pair) and has 5 staged.

    `full`: the pair begins a new block.
    """
    path = str(tmp_path / f"{name}-{full}.ring")
    ring = Ring(path, process=0, capacity=SMALL)
    ring.staging(PAIR, PAIR)
    assert ring.write(FIRST[full])
    ring.held.extend([((1, 1), None, Frame(PAIR)), ((2, 2), (3, 3), None), ((4, 4), None, None)])
    ring.stage((5, 5))
    return ring, path


def numbers(payloads: list[bytes]) -> list[int]:
    """Of what `holding` made, each whole, and of what was written after it."""
    found = []
    for payload in payloads:
        if len(payload) == 16:
            one, two = (int.from_bytes(payload[at : at + 8], "little") for at in (0, 8))
            assert one == two
            found.append(one)
        elif payload in FIRST.values():
            found.append(0)
        else:
            found.append(number_of(payload))
    return found


@pytest.mark.parametrize("full", [False, True])
def test_an_exception_while_what_was_held_is_written(tmp_path: Path, full: bool) -> None:
    """Ctrl-C, before each instruction: what was held is written then or by the next flush, once, or it is counted."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    for at in range(1, 2000):
        ring, path = holding(tmp_path, at, full)
        with at_line(at, interrupt, "opcode") as hook, suppress(KeyboardInterrupt):
            ring.flush()
        ring.flush()
        assert ring.write(numbered(6, 200))
        assert not ring.held
        assert not ring.staged
        with opened(path) as reader:
            found = numbers(everything(reader))
            assert reader.missed + reader.lost() == 7 - len(found)
            if len(found) != 7:  # the one that was staged: it has no second chance
                found.insert(5, 5)
            assert found == list(range(7))
        if not hook.acted:
            assert at > 100
            return
    raise AssertionError("a flush has no end")


@pytest.mark.parametrize("full", [False, True])
def test_a_signal_handler_that_flushes_while_what_was_held_is_written(tmp_path: Path, full: bool) -> None:
    """It is refused, and nothing is lost by that: whoever it interrupted writes it all."""
    for at in range(1, 500):
        ring, path = holding(tmp_path, at, full)
        with at_line(at, ring.flush) as hook:
            ring.flush()
        with opened(path) as reader:
            found = numbers(everything(reader))
            assert found[:5] == list(range(5))
            assert len(found) + reader.lost() == 6
            assert reader.missed == 0
        if not hook.acted:
            assert at > 20
            return
    raise AssertionError("a flush has no end")


@pytest.mark.parametrize(
    ("at", "wrong", "left"), [(0, ((-1, 1), None, None), [0, 2, 3, 4, 5]), (1, ((2, 2), (-3, -3), None), [0, 1, 4, 5])]
)
def test_what_cannot_be_written_is_counted_and_not_tried_again(
    tmp_path: Path, at: int, wrong: tuple[tuple[int, ...], tuple[int, ...] | None, Frame | None], left: list[int]
) -> None:
    ring, path = holding(tmp_path, "wrong", False)
    ring.held[at] = wrong
    with pytest.raises(struct.error):
        ring.flush()
    ring.flush()
    with opened(path) as reader:
        assert numbers(everything(reader)) == left
        assert (reader.missed, reader.lost(), reader.held()) == (0, 6 - len(left), 0)


def test_what_is_larger_than_a_block_is_not_tried_for_ever(tmp_path: Path) -> None:
    ring, path = holding(tmp_path, "large", False)
    ring.held.insert(1, ((b"",), None, Frame(f"<{BLOCK_BYTES}s")))  # type: ignore[arg-type]
    with pytest.raises(struct.error):
        ring.flush()
    ring.flush()
    with opened(path) as reader:
        assert numbers(everything(reader)) == [0, 1, 2, 3, 4, 5]
        assert (reader.missed, reader.lost(), reader.held()) == (0, 1, 0)


def test_signals_at_any_time(path: str) -> None:
    """A real timer, a real handler."""
    ring = Ring(path, process=0, capacity=256 * BLOCK_BYTES)
    answers: list[bool] = []

    def handler(*_: object) -> None:
        answers.append(ring.write(numbered(1_000_000 + len(answers))))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 2e-4, 2e-4)
    try:
        written = 0
        while answers.count(False) < 3 and written < 300_000:
            assert ring.write(numbered(written))
            written += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with opened(path) as reader:
        found = [number_of(payload) for payload in everything(reader)]
        assert [number for number in found if number < 1_000_000] == list(range(written))
        assert len(found) - written == answers.count(True) > 0
        assert (reader.missed, reader.lost()) == (0, answers.count(False))
