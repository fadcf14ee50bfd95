"""Readers of a ring of spans and its lines, whatever happens to the writer or the files."""

from __future__ import annotations

import gc
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.span_format import LAP_AT, Kind, Span
from dpmon.span_reader import HOLE_NS, SpanReader, lines_path
from dpmon.span_ring import HEADER_BYTES, SLOT, SLOT_BYTES, SLOTS, HeaderWord, RingError, SpanRing, wants_pause
from support.ring_writers import (
    WRITE_SPANS,
    Children,
    Lines,
    check_words,
    checkable_words,
    first_word,
    open_reader,
    read_all_spans,
)
from support.run_harness import report_measured, scaled_size

FEW = 256


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "process-0.ring")


@pytest.fixture
def ring(path: str) -> SpanRing:
    return SpanRing(path, process=0, rank=1, world=4, start_ns=77, slots=FEW)


@pytest.fixture
def reader(ring: SpanRing, path: str) -> Iterator[SpanReader]:
    with open_reader(path) as found:
        yield found


@pytest.fixture
def children() -> Iterator[Children]:
    found = Children()
    yield found
    found.end()


def write(ring: SpanRing, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        ring.put(*checkable_words(number))


def numbers(spans: list[Span]) -> list[int]:
    return [check_words(span) for span in spans]


def slot(path: str, at: int, *words: int) -> None:
    """Write raw words into a slot."""
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + at * SLOT_BYTES)
        file.write(SLOT.pack(*words))


# ------------------------------------------------------------------------------------------------ what is written


def test_the_header_names_the_writer(ring: SpanRing, reader: SpanReader, path: str) -> None:
    assert (reader.pid, reader.process, reader.rank, reader.world) == (os.getpid(), 0, 1, 4)
    assert (reader.start_ns, reader.slots) == (77, FEW)
    with pytest.raises(FileExistsError):
        SpanRing(path, process=0)


def test_a_span_and_its_parts(ring: SpanRing, reader: SpanReader) -> None:
    word = first_word(Kind.REPLICA, flags=0x3FF, inside=Kind.CALL, thread=511, site=(1 << 24) - 1)
    assert ring.put(word, 10, 20, 7 | 9 << 32) == 0
    assert reader.read(0) == [Span(0, Kind.REPLICA, 0x3FF, Kind.CALL, 511, (1 << 24) - 1, 10, 20, 7, 9)]
    assert reader.read(0) == []
    assert reader.at_end


@pytest.mark.parametrize("portion", [1, 7, 100, FEW - 40])
def test_a_reader_that_keeps_up_sees_all(ring: SpanRing, reader: SpanReader, portion: int) -> None:
    found: list[Span] = []
    for first in range(0, 5 * FEW, portion):
        write(ring, portion, first)
        found += reader.read(0)
        assert reader.at_end
    assert numbers(found) == [span.number for span in found] == list(range(len(found)))
    assert reader.missed == 0


def test_a_read_returns_at_most_the_given_number(ring: SpanRing, reader: SpanReader) -> None:
    write(ring, 100)
    assert len(reader.read(0, 70)) == 70
    assert not reader.at_end
    assert numbers(reader.read(0, 70)) == list(range(70, 100))
    assert reader.at_end


# ------------------------------------------------------------------------------------------------ laps


@pytest.mark.parametrize("behind", [1, FEW, FEW + 1, 2 * FEW - 1, 5 * FEW + 17])
@pytest.mark.parametrize("over", [False, True])
def test_a_reader_that_comes_late_knows_what_it_missed(ring: SpanRing, path: str, behind: int, over: bool) -> None:
    write(ring, FEW + behind)
    with open_reader(path) as reader:
        found = read_all_spans(reader, process_ended=over)
    assert numbers(found) == list(range(reader.missed, FEW + behind))
    # The next eighth may be overwritten while it is copied, unless nobody writes any more.
    assert reader.missed == behind + (0 if over else FEW // 8)


def test_the_writer_comes_round_while_a_slot_is_copied(
    ring: SpanRing, reader: SpanReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer may go on between any two reads of the file: no span is torn, and each is read or counted."""
    chance = random.Random(7)
    pread, written = os.pread, 0

    def slow(fd: int, count: int, at: int) -> bytes:
        nonlocal written
        if at >= HEADER_BYTES and written < 40 * FEW and chance.random() < 0.5:
            further = chance.choice([1, 20, FEW, 3 * FEW])
            write(ring, further, written)
            written += further
        return pread(fd, count, at)

    monkeypatch.setattr(os, "pread", slow)
    found: list[int] = []
    while written < 40 * FEW or not reader.at_end:
        found += numbers(reader.read(0))
    assert found == sorted(set(found))
    assert len(found) + reader.missed == written


def test_a_writer_that_is_faster_does_not_hold_its_reader_up(
    ring: SpanRing, reader: SpanReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread, written = os.pread, 0

    def slow(fd: int, count: int, at: int) -> bytes:
        nonlocal written
        write(ring, 2 * FEW, written)
        written += 2 * FEW
        return pread(fd, count, at)

    monkeypatch.setattr(os, "pread", slow)
    assert reader.read(0) == []
    assert not reader.at_end
    monkeypatch.setattr(os, "pread", pread)
    assert len(reader.read(0)) + reader.missed == written


def test_a_slot_that_is_being_overwritten_is_not_read(ring: SpanRing, reader: SpanReader, path: str) -> None:
    """Its slot still has the old number, but its first words are already new, or zero."""
    write(ring, 5)
    for word, at in ((0, 1), (checkable_words(3)[0] | 1 << LAP_AT, 3)):
        slot(path, at, word, *checkable_words(at)[1:], at + 1)
    assert numbers(reader.read(0)) == [0, 2, 4]
    assert reader.missed == 2


# ------------------------------------------------------------------------------------------------ holes


@pytest.mark.parametrize(("before", "holes"), [(5, 1), (5, 3), (5, 20), (FEW - 1, 1), (FEW, 1), (FEW + 1, 1)])
def test_a_hole_is_waited_for_and_then_skipped(ring: SpanRing, reader: SpanReader, before: int, holes: int) -> None:
    """Also where the ring wraps around."""
    for first in range(0, before, 100):
        write(ring, min(100, before - first), first)
        reader.read(0)
    for _ in range(holes):
        ring.next()
    write(ring, 5, before + holes)
    assert reader.read(1) == []
    assert not reader.at_end, "what comes later cannot be concluded from yet"
    assert reader.read(HOLE_NS) == []
    assert reader.missed == 0
    assert numbers(reader.read(1 + HOLE_NS)) == list(range(before + holes, before + holes + 5))
    assert reader.at_end
    assert reader.missed == holes


@pytest.mark.parametrize("before", range(60, 66))
def test_a_hole_anywhere_in_what_is_read_at_once(ring: SpanRing, reader: SpanReader, before: int) -> None:
    """What comes after it is not lost, although it is the last slot that was read."""
    write(ring, before)
    for _ in range(3):
        ring.next()
    write(ring, 5, before + 3)
    assert numbers(reader.read(0, process_ended=True)) == [*range(before), *range(before + 3, before + 8)]
    assert reader.at_end
    assert reader.missed == 3


def test_a_slot_that_is_written_late_is_seen(ring: SpanRing, reader: SpanReader) -> None:
    late = ring.next()
    write(ring, 2, 1)
    assert reader.read(1) == []
    SLOT.pack_into(ring.map, HEADER_BYTES + late * SLOT_BYTES, *checkable_words(0), late + 1)
    assert numbers(reader.read(2)) == [0, 1, 2]
    assert reader.missed == 0


# ------------------------------------------------------------------------------------------------ control block


def test_a_request_and_its_answer(ring: SpanRing, reader: SpanReader) -> None:
    assert reader.acknowledged() == (0, 0)
    assert reader.request(2) == 1
    assert (ring.words[HeaderWord.REQUEST], ring.words[HeaderWord.REQUESTED_MODE]) == (1, 2)
    ring.words[HeaderWord.MODE], ring.words[HeaderWord.ACKNOWLEDGED] = 2, 1
    assert reader.acknowledged() == (1, 2)


def test_a_request_for_a_pause_and_its_answer(ring: SpanRing, reader: SpanReader) -> None:
    asked = reader.request_pause(True)
    assert (asked, wants_pause(asked)) == (0xFFFFFFFC_00000003, True)
    ring.words[HeaderWord.PAUSED] = asked
    ended = reader.request_pause(False)
    assert (ended, wants_pause(ended)) == (0xFFFFFFFB_00000004, False)
    assert reader.pause_requests() == (ended, asked)


def test_the_number_of_a_request_to_profile_wraps(ring: SpanRing, reader: SpanReader) -> None:
    ring.words[HeaderWord.PROFILE] = (1 << 64) - 1
    assert [reader.request_profile(3), reader.request_profile(0)] == [3, 1 << 16]


# ------------------------------------------------------------------------------------------------ foreign files


def test_things_that_are_no_rings(tmp_path: Path, ring: SpanRing, path: str) -> None:
    (tmp_path / "link.ring").symlink_to(path)
    (tmp_path / "directory.ring").mkdir()
    os.mkfifo(tmp_path / "pipe.ring")
    (tmp_path / "frames.ring").write_bytes(b"DPMONRNG" + bytes(HEADER_BYTES + FEW * SLOT_BYTES))
    (tmp_path / "new.ring").write_bytes(bytes(HEADER_BYTES + FEW * SLOT_BYTES))
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    for name in ("link", "directory", "pipe", "absent", "frames", "new"):
        other = str(tmp_path / f"{name}.ring")
        with pytest.raises((RingError, OSError)):
            SpanReader(other)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_ring_that_is_truncated_under_its_reader(ring: SpanRing, reader: SpanReader, path: str) -> None:
    write(ring, 100)
    os.truncate(path, HEADER_BYTES + 10 * SLOT_BYTES)
    with pytest.raises(RingError, match="truncated"):
        reader.read(0)
    os.truncate(path, 100)
    for action in (reader.header_words, reader.current_span, lambda: reader.request(1), reader.is_ended):
        with pytest.raises(RingError, match="truncated"):
            action()
    assert os.stat(path).st_size == 100, "a request does not make the file grow again"


# ------------------------------------------------------------------------------------------------ real writers


@pytest.mark.timeout(scaled_size(300, 3000))
def test_a_writer_that_is_killed_at_any_instant(tmp_path: Path, children: Children) -> None:
    """Each of many threads may have reserved a slot that it never writes; all other spans are counted."""
    chance = random.Random(3)
    holes = 0
    times = scaled_size(5, 200)
    for number in range(times):
        path = str(tmp_path / f"process-{number}.ring")
        writer = children.start(*WRITE_SPANS, path, 16)
        with open_reader(path) as reader:
            found: list[Span] = []
            until = time.monotonic() + chance.random() * 0.2
            while time.monotonic() < until:
                found += reader.read(time.monotonic_ns())
            children.kill(writer)
            found += read_all_spans(reader, process_ended=True)
            assert reader.at_end
            assert len(found) + reader.missed == reader.position
            next_of: Counter[int] = Counter()
            gaps = 0
            for span in found:
                assert check_words(span) >= next_of[span.thread]
                gaps += check_words(span) - next_of[span.thread]
                next_of[span.thread] = check_words(span) + 1
            assert gaps <= reader.missed
            if reader.missed < SLOTS // 100:  # more only if the reader was overtaken
                assert reader.missed - gaps <= 16
                holes += reader.missed - gaps
        os.unlink(path)
    report_measured("a writer that is killed", f"{times} times, {holes} spans were begun and not written")


# ------------------------------------------------------------------------------------------------ lines


def lines_read(reader: SpanReader, **options: Any) -> list[dict[str, Any]]:
    return [line for part in reader.lines(**options) for line in part]


def test_lines_as_they_come(reader: SpanReader, path: str) -> None:
    assert lines_read(reader) == []
    with open(lines_path(path), "ab", buffering=0) as file:
        file.write(b'{"define":1,"value":[')
        assert lines_read(reader) == []
        file.write(b']}\n{"optimizer":1}\n{"e')
        assert lines_read(reader) == [{"define": 1, "value": []}, {"optimizer": 1}]
        assert lines_read(reader) == []
        file.write(b'nd":true}\n')
        assert lines_read(reader) == [{"end": True}]
    assert reader.damaged_lines == 0
    assert reader.lines_position == os.stat(lines_path(path)).st_size


def test_torn_lines_cost_only_themselves(reader: SpanReader, path: str) -> None:
    bad = [b"", b"{", b'{"a', b'{"a":1}{"b":2}']
    lines = [part for each in bad for part in (each, b'{"good":1}')]
    Path(lines_path(path)).write_bytes(b"\n".join(lines) + b"\n")
    assert lines_read(reader) == [{"good": 1}] * len(bad)
    assert reader.damaged_lines == len(bad) - 1, "an empty line is none"


def test_lines_up_to_where_another_reader_came(reader: SpanReader, path: str) -> None:
    lines = Lines(path)
    lines.define(1, "a")
    lines_read(reader)
    lines.define(2, "b")
    with open_reader(path) as successor:
        assert lines_read(successor, until=reader.lines_position) == [{"define": 1, "value": "a"}]
        assert lines_read(successor) == [{"define": 2, "value": "b"}]
    with open_reader(path, lines_position=reader.lines_position) as successor:
        assert lines_read(successor) == [{"define": 2, "value": "b"}]
