"""The ring: what was written is read, or counted as missed or lost."""

from __future__ import annotations

import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rings import SMALL, everything, number_of, numbered, opened

import dpmon.ring
from dpmon.record.wire import mode_number
from dpmon.ring import BLOCK_BYTES, MAX_PAYLOAD, Activity, Ring, RingError
from dpmon.ring_reader import RingReader

ROOT = Path(dpmon.ring.__file__).resolve().parents[1]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "process-0.ring")


@pytest.fixture
def ring(path: str) -> Ring:
    return Ring(path, process=3, rank=1, world=4, start_ns=77, capacity=SMALL)


@pytest.fixture
def reader(ring: Ring, path: str) -> Iterator[RingReader]:
    with opened(path) as reader:
        yield reader


# ------------------------------------------------------------------------------------------------ writing and reading


def test_who_wrote_it(ring: Ring, reader: RingReader, path: str) -> None:
    assert (reader.pid, reader.process, reader.rank, reader.world) == (os.getpid(), 3, 1, 4)
    assert (reader.start_ns, reader.capacity) == (77, SMALL)
    assert everything(reader) == []
    assert (reader.missed, reader.lost()) == (0, 0)
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_without_a_rank(path: str) -> None:
    Ring(path, process=0, capacity=SMALL)
    with opened(path) as reader:
        assert (reader.rank, reader.world) == (None, None)


def test_records_of_any_size_in_their_order(ring: Ring, reader: RingReader) -> None:
    payloads = [numbered(i, size) for i, size in enumerate([1, 7, 8, 9, 15, 16, 17, 400, 5000, 30_000])]
    assert all(ring.write(payload) for payload in [*payloads, b""])
    assert everything(reader) == [*payloads, b""]
    assert everything(reader) == []
    assert reader.missed == 0


@pytest.mark.parametrize("largest", [60, 1000, 20_000, MAX_PAYLOAD])
def test_a_reader_that_keeps_up_sees_all(ring: Ring, reader: RingReader, largest: int) -> None:
    """Round and round, wherever blocks and the ring itself end."""
    chance = random.Random(largest)
    written, number = 0, 0
    while written < 20 * SMALL:
        payloads = [numbered(number, chance.randrange(largest))]
        while sum(map(len, payloads)) < 10_000 and chance.random() < 0.9:
            payloads.append(numbered(number + len(payloads), chance.randrange(min(largest, 2000))))
        assert all(ring.write(payload) for payload in payloads)
        assert everything(reader) == payloads
        number += len(payloads)
        written += sum(map(len, payloads))
    assert (reader.missed, reader.lost()) == (0, 0)


@pytest.mark.parametrize("seed", range(6))
def test_a_reader_that_is_lapped_knows_what_it_missed(ring: Ring, reader: RingReader, seed: int) -> None:
    chance = random.Random(seed)
    largest = chance.choice([100, 1000, 10_000])
    written, seen = 0, []
    for _ in range(30):
        for _ in range(chance.randrange(2 * SMALL // largest)):
            assert ring.write(numbered(written, chance.randrange(largest)))
            written += 1
        found = [number_of(payload) for payload in everything(reader)]
        seen += found
        assert found[-1:] in ([], [written - 1])  # the newest is always there
        assert len(seen) + reader.missed == written
    assert seen == sorted(set(seen))
    assert 0 < reader.missed < written


def test_a_process_that_writes_faster_than_it_is_read(tmp_path: Path) -> None:
    """What is copied while it is overwritten is not taken for a record."""
    path = str(tmp_path / "fast.ring")
    program = (
        "import sys; from dpmon.ring import Ring\n"
        f"ring = Ring(sys.argv[1], process=0, capacity={SMALL})\n"
        "for i in range(60_000):\n"
        "    text = f'{i}:'.encode()\n"
        "    ring.write(text + bytes((i + k) & 255 for k in range(i % 50)))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", program, path], cwd=ROOT)
    seen: list[int] = []
    reader: RingReader | None = None
    running = True
    while running:
        running = writer.poll() is None
        if reader is None:
            with suppress(FileNotFoundError, RingError):  # not there yet, or being made
                reader = RingReader(path)
        else:
            seen += [number_of(payload) for payload in everything(reader)]
    assert writer.returncode == 0
    assert reader is not None
    seen += [number_of(payload) for payload in everything(reader)]
    assert len(seen) + reader.missed == 60_000
    assert seen == sorted(set(seen))
    assert seen[-1] == 59_999
    assert len(seen) > 1000
    reader.close()


def test_reading_goes_on_where_another_reader_was(ring: Ring, path: str) -> None:
    with opened(path) as first:
        ring.write(b"one")
        ring.write(b"two")
        assert everything(first) == [b"one", b"two"]
        ring.write(b"three")
        with opened(path, position=first.position, sequence=first.sequence) as second:
            assert everything(second) == [b"three"]
            assert second.missed == 0


def test_a_live_reader_counts_from_where_it_came_in(ring: Ring, path: str) -> None:
    for number in range(5000):
        ring.write(numbered(number, 100))
    with opened(path, live=True) as live, opened(path) as late:
        found = [number_of(payload) for payload in everything(live)]
        assert found == list(range(found[0], 5000))
        assert live.missed == 0
        assert [number_of(payload) for payload in everything(late)] == found
        assert late.missed == found[0] > 0


def test_a_read_is_bounded(path: str) -> None:
    ring = Ring(path, process=0, capacity=32 * BLOCK_BYTES)
    for number in range(1500):
        ring.write(numbered(number, 1000))
    with opened(path) as reader:
        first = reader.read(limit=200_000)
        assert 0 < sum(map(len, first)) <= 200_000
        assert [number_of(payload) for payload in [*first, *everything(reader)]] == list(range(1500))


def test_too_large_a_record_is_lost_and_counted(ring: Ring, reader: RingReader) -> None:
    assert ring.write(numbered(0, MAX_PAYLOAD))
    assert not ring.write(numbered(1, MAX_PAYLOAD + 1))
    assert ring.write(numbered(2))
    assert [number_of(payload) for payload in everything(reader)] == [0, 2]
    assert (reader.missed, reader.lost()) == (0, 1)


# ------------------------------------------------------------------------------------------------ a staged record

LAYOUT = "<BxxxIQ"
"""Of a staged record; eight-byte fields lie on multiples of eight."""


def staged(number: int) -> bytes:
    return struct.pack(LAYOUT, 7, number, number * 2)


@pytest.fixture
def stage(ring: Ring) -> Callable[[int], None]:
    """Stages a record."""
    ring.staging(LAYOUT)
    return lambda number: ring.stage((7, number, number * 2))


def test_a_staged_record_is_there_for_those_who_ask_for_last_words(
    ring: Ring, stage: Callable[[int], None], path: str
) -> None:
    assert ring.write(b"before")
    stage(1)
    with opened(path) as reader:
        assert everything(reader) == [b"before"]
        assert reader.last_words() == [staged(1)]
        assert reader.last_words() == []
        assert reader.missed == 0


def test_a_staged_record_comes_once_and_in_its_place(ring: Ring, stage: Callable[[int], None], path: str) -> None:
    with opened(path) as early, opened(path) as late:
        stage(1)
        assert early.last_words() == [staged(1)]
        assert ring.write(b"between")
        stage(2)
        ring.flush()
        ring.flush()
        assert everything(early) == [b"between", staged(2)]
        assert everything(late) == [staged(1), b"between", staged(2)]
        for reader in (early, late):
            assert reader.last_words() == []
            assert (reader.missed, reader.lost()) == (0, 0)


def test_there_are_no_last_words_where_nothing_was_staged(ring: Ring, reader: RingReader) -> None:
    assert reader.last_words() == []
    ring.staging(LAYOUT)
    assert reader.last_words() == []


def test_last_words_that_were_cut_off(ring: Ring, stage: Callable[[int], None], path: str) -> None:
    """Killed while it staged: the number at the end is not the one at the beginning."""
    stage(1)
    ring.flush()
    stage(2)
    with open(path, "r+b") as file:
        image = file.read()
        file.seek(image.index(staged(2)) + len(staged(2)))
        file.write(bytes(8))
    with opened(path) as reader:
        assert everything(reader) == [staged(1)]
        assert reader.last_words() == []


# ------------------------------------------------------------------------------------------------ requests, activity


def test_a_request_and_its_acknowledgement(ring: Ring, reader: RingReader, path: str) -> None:
    dp, single = mode_number("dp"), mode_number("single")
    assert (ring.request_serial, reader.acknowledged()) == (0, (0, 0))
    assert reader.request(dp) == 1
    assert (ring.request_serial, ring.request_mode) == (1, dp)
    with opened(path) as another:
        assert another.request(single) == 2
    assert (ring.request_serial, ring.request_mode) == (2, single)
    assert reader.acknowledged() == (0, 0)
    ring.acknowledge(2, single)
    assert reader.acknowledged() == (2, single)
    assert everything(reader) == []


def test_a_request_for_a_pause_and_its_answer(ring: Ring, reader: RingReader) -> None:
    """The lowest bit says what is asked for, and no request is like the one before it."""
    assert reader.pause_requests() == (0, 0)
    asked = [reader.request_pause(paused) for paused in (True, True, False, True)]
    assert asked == [3, 5, 6, 9]
    assert (ring.words[Ring.PAUSE], reader.pause_requests()) == (9, (9, 0))
    ring.words[Ring.PAUSE_ANSWERED] = 9
    assert reader.pause_requests() == (9, 9)
    assert (ring.request_serial, reader.acknowledged()) == (0, (0, 0))


def test_what_the_training_is_in(ring: Ring, reader: RingReader) -> None:
    assert reader.activity() == (Activity.OTHER, 0)
    for what in range(len(Activity.NAMES)):
        ring.activity(what, 123_456_789_012_345)
        assert reader.activity() == (what, 123_456_789_012_345)


# ------------------------------------------------------------------------------------------------ making one


def test_a_name_that_is_taken(ring: Ring, path: str) -> None:
    ring.write(b"kept")
    with pytest.raises(FileExistsError):
        Ring(path, process=0)
    with opened(path) as reader:
        assert everything(reader) == [b"kept"]


@pytest.mark.parametrize("capacity", [0, BLOCK_BYTES, SMALL + 8, -SMALL])
def test_a_capacity_that_cannot_be(path: str, capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        Ring(path, process=0, capacity=capacity)
    assert not os.path.exists(path)


def test_no_room_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import os, resource, sys; from dpmon.ring import Ring\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "before = len(os.listdir('/proc/self/fd'))\n"
        "try:\n    Ring(sys.argv[1], process=0)\n"
        "except OSError as error:\n    print(type(error).__name__, len(os.listdir('/proc/self/fd')) - before)\n"
    )
    path = tmp_path / "no-room.ring"
    done = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("OSError 0\n", "")
    assert not path.exists()
