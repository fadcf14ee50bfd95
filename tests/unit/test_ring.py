"""The ring: what was written is read, or counted as missed or lost."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from rings import SMALL, everything, number_of, numbered, opened

import dpmon.ring
from dpmon.ring import BLOCK_BYTES, MAX_PAYLOAD, Ring
from dpmon.ring_file import RingError
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


def test_the_header_names_the_writer(ring: Ring, reader: RingReader, path: str) -> None:
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
    """Over many laps, with ends of blocks and of the ring anywhere."""
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
def test_a_reader_that_is_lapped_counts_what_it_missed(ring: Ring, reader: RingReader, seed: int) -> None:
    chance = random.Random(seed)
    largest = chance.choice([100, 1000, 10_000])
    written, seen = 0, []
    for _ in range(30):
        for _ in range(chance.randrange(2 * SMALL // largest)):
            assert ring.write(numbered(written, chance.randrange(largest)))
            written += 1
        found = [number_of(payload) for payload in everything(reader)]
        seen += found
        assert found[-1:] in ([], [written - 1])  # the newest can always be read
        assert len(seen) + reader.missed == written
    assert seen == sorted(set(seen))
    assert 0 < reader.missed < written


def test_a_writer_that_is_faster_than_its_reader(tmp_path: Path) -> None:
    """Bytes that are overwritten during the copy are not taken for a record."""
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
            with suppress(FileNotFoundError, RingError):  # not there yet, or being created
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


@pytest.mark.parametrize("busy", [0, 4])
def test_threads_that_write_at_once(path: str, busy: int) -> None:
    """Busy threads may stop a writer for a long time in the middle of a record."""
    threads, each = 4, 1500
    ring = Ring(path, process=0, capacity=64 * BLOCK_BYTES)
    over = threading.Event()

    def write(index: int) -> None:
        for number in range(each):
            assert ring.write(numbered(index * each + number, number % 90))

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
        assert len(found) == threads * each
        assert (reader.missed, reader.lost()) == (0, 0)
        for index in range(threads):
            mine = [number for number in found if number // each == index]
            assert mine == sorted(mine)


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
