"""Foreign, truncated or damaged rings, and rings of killed writers: an error or fewer records, and no harm."""

from __future__ import annotations

import gc
import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
from sizes import size

import dpmon.ring
from dpmon.record.codec import Decoder
from dpmon.record.kinds import RecordError
from dpmon.record.wire import pack_call, pack_definition, pack_event, pack_step
from dpmon.ring import BLOCK_BYTES, Ring
from dpmon.ring_file import HEADER_BYTES, RingError
from dpmon.ring_reader import RingReader

ROOT = Path(dpmon.ring.__file__).resolve().parents[1]
SMALL = 2 * BLOCK_BYTES
WORDS = 128
"""Offsets of the numbers in the header that change."""


def typical(path: str, steps: int = 40) -> list[bytes]:
    """Write a ring like a training; return its payloads."""
    ring = Ring(path, process=0, capacity=SMALL)
    layout = {"root": "Net", "via": None, "virtual": True, "devices": ["cpu:0", "cpu:1"], "absent": {"a": "b"}}
    payloads = [
        pack_event("process", {"process": 0, "pid": 1}),
        pack_definition(1, layout),
        pack_definition(2, [["0", [30, 5], "float32", 600]]),
    ]
    for step in range(steps):
        phases = (0, 1, 1, 2, 3, 4, 7, 1)
        payloads.append(pack_call(1, 7, 1, step, step, step * 10, 9, 2, 2, phases, (2, 2, 3, 4) * 2))
        payloads.append(pack_step(1, step, step * 10, 10, 30, (1, 2, 3, 4)))
    for payload in payloads:
        assert ring.write(payload)
    return payloads


def read_all(path: str) -> list[bytes]:
    """Read all records and header fields of a file; RingError and OSError are allowed."""
    reader = RingReader(path)
    try:
        found: list[bytes] = []
        for _ in range(64):
            before = reader.position
            found += reader.read()
            reader.lost(), reader.has_more()
            if reader.position == before:
                return found
        raise AssertionError("the reader does not come to an end")
    finally:
        reader.close()


# ------------------------------------------------------------------------------------------------ no ring at all


@pytest.mark.parametrize("size", [0, 1, 7, 8, 47, 100, HEADER_BYTES, HEADER_BYTES + SMALL - 1])
def test_a_file_that_is_too_short(tmp_path: Path, size: int) -> None:
    path = tmp_path / "short.ring"
    typical(str(path))
    os.truncate(path, size)
    with pytest.raises(RingError):
        RingReader(str(path))


def test_a_header_that_is_not_finished(tmp_path: Path) -> None:
    """As seen by a reader while the file is being created."""
    path = tmp_path / "new.ring"
    path.write_bytes(bytes(HEADER_BYTES + SMALL))
    with pytest.raises(RingError, match="not a ring"):
        RingReader(str(path))


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"XPMONRNG"), (8, struct.pack("=I", 99)), (12, struct.pack("=I", 8192)), (16, struct.pack("=Q", 1 << 60))],
)
def test_a_header_of_another_kind(tmp_path: Path, at: int, value: bytes) -> None:
    path = tmp_path / "other.ring"
    typical(str(path))
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(value)
    with pytest.raises(RingError):
        RingReader(str(path))


def test_things_that_are_no_files(tmp_path: Path) -> None:
    """No reader blocks, or follows a link."""
    real = tmp_path / "real.ring"
    typical(str(real))
    (tmp_path / "link.ring").symlink_to(real)
    (tmp_path / "directory.ring").mkdir()
    os.mkfifo(tmp_path / "pipe.ring")
    for name in ("link", "directory", "pipe", "absent"):
        with pytest.raises((RingError, OSError)):
            RingReader(str(tmp_path / f"{name}.ring"))
    with pytest.raises((RingError, OSError)):
        RingReader("/dev/zero")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user(tmp_path: Path) -> None:
    path = tmp_path / "foreign.ring"
    typical(str(path))
    os.chown(path, 12345, 12345)
    with pytest.raises(RingError, match="another user"):
        RingReader(str(path))


def test_no_descriptor_is_left_by_any_of_them(tmp_path: Path) -> None:
    path = tmp_path / "bad.ring"
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    for content in (b"", bytes(HEADER_BYTES + SMALL), b"DPMONRNG" + bytes(5000)):
        path.write_bytes(content)
        with suppress(RingError):
            RingReader(str(path))
    assert len(os.listdir("/proc/self/fd")) <= before


def test_a_file_that_is_truncated_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "cut.ring"
    typical(str(path))
    reader = RingReader(str(path))
    os.truncate(path, HEADER_BYTES + 100)
    with pytest.raises(RingError, match="truncated"):
        reader.read()
    os.truncate(path, 10)
    for look in (reader.read, reader.lost, reader.has_more):
        with pytest.raises(RingError, match="truncated"):
            look()
    reader.close()


# ------------------------------------------------------------------------------------------------ damaged


def test_one_damaged_record_costs_its_block_and_no_more(tmp_path: Path) -> None:
    path = str(tmp_path / "damaged.ring")
    ring = Ring(path, process=0, capacity=8 * BLOCK_BYTES)
    written = 0
    while ring.head < 5 * BLOCK_BYTES:
        assert ring.write(str(written).encode().ljust(100))
        written += 1
    with open(path, "r+b") as file:
        file.seek(HEADER_BYTES + 2 * BLOCK_BYTES + 10 * 120)  # the head of a record in the third block
        file.write(b"\xff\x01\x02\x03")
    reader = RingReader(path)
    seen = [int(payload) for payload in reader.read()]
    assert len(seen) + reader.missed == written
    a_block = BLOCK_BYTES // 120 + 1
    assert 0 < reader.missed <= a_block
    assert seen[-1] == written - 1
    reader.close()


def mutations(chance: random.Random, image: bytes) -> bytes:
    """Return the image with random damage."""
    data = bytearray(image)
    for _ in range(chance.choice((1, 1, 1, 3, 20))):
        where = chance.randrange(10)
        if where < 3:  # a number of the header
            at = chance.choice((16, *range(WORDS, WORDS + 24, 8)))
            extreme = (0, 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1, SMALL, SMALL + 1, BLOCK_BYTES)
            data[at : at + 8] = struct.pack("=Q", chance.choice((*extreme, chance.getrandbits(64))))
        elif where < 8:  # a byte of the records, mostly of a head
            at = HEADER_BYTES + chance.randrange(6000)
            data[at] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))
        elif where == 8:  # a few bytes moved
            at, to = (HEADER_BYTES + chance.randrange(6000) for _ in range(2))
            data[to : to + 200] = data[at : at + 200]
        else:
            at = chance.randrange(len(data) - 400)
            data[at : at + 400] = chance.randbytes(400)
    return bytes(data)


def test_files_mutated_at_random(tmp_path: Path) -> None:
    """An error or fewer records: no other exception, no endless read, no more memory than the file's size."""
    path = str(tmp_path / "mutated.ring")
    whole = typical(path)
    image = Path(path).read_bytes()
    chance = random.Random(7)
    outcomes = {"read": 0, "refused": 0, "record refused": 0}
    for number in range(size(2000, 200_000)):  # a hundred frames each, roughly
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, mutations(chance, image), 0)
        os.close(fd)
        measured = number % 8 == 0  # it makes everything ten times slower
        if measured:
            tracemalloc.start()
        try:
            payloads = read_all(path)
        except (RingError, OSError):
            outcomes["refused"] += 1
            continue
        finally:
            if measured:
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert peak < 8 * SMALL
        outcomes["read"] += 1
        assert sum(map(len, payloads)) <= SMALL
        decoder = Decoder(0)
        for payload in payloads:
            try:
                decoder.decode(payload)
            except RecordError:
                outcomes["record refused"] += 1
    assert all(count > 20 for count in outcomes.values()), outcomes
    with open(path, "r+b") as file:
        file.write(image)
    assert read_all(path) == whole


def test_files_of_random_bytes(tmp_path: Path) -> None:
    """With a valid header and random contents."""
    path = str(tmp_path / "random.ring")
    typical(path)
    header = Path(path).read_bytes()[:WORDS]
    chance = random.Random(3)
    for _ in range(100):
        fd = os.open(path, os.O_WRONLY)
        os.pwrite(fd, header + chance.randbytes(HEADER_BYTES + SMALL - WORDS), 0)
        os.close(fd)
        with suppress(RingError):
            read_all(path)


# ------------------------------------------------------------------------------------------------ killed


KILLER = """
import json, mmap, os, random, signal, sys, time
from dpmon.ring import Ring
from dpmon.ring_reader import RingReader

directory, rounds, capacity = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
chance = random.Random(5)
count = memoryview(mmap.mmap(-1, 4096)).cast("Q")
outcomes = []
for number in range(rounds):
    path = f"{directory}/{number}.ring"
    count[0] = 0
    pid = os.fork()
    if not pid:
        ring = Ring(path, process=0, capacity=capacity)
        written = 0
        while True:
            ring.write(f"{written}:".encode() + b"x" * (written * 7 % 300))
            written += 1
            count[0] = written
    while not count[0]:
        time.sleep(0.0001)
    target = chance.randrange(1, 4000)  # of records, not of time: how far it comes in a time is the machine's affair
    while count[0] < target:
        pass
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    reader = RingReader(path)
    seen, before = [], -1
    while reader.position != before:
        before = reader.position
        for payload in reader.read():
            text, _, rest = payload.partition(b":")
            assert rest == b"x" * (int(text) * 7 % 300), payload
            seen.append(int(text))
    assert seen == sorted(set(seen))
    outcomes.append([count[0], len(seen) + reader.missed, seen[-1], len(seen)])
    reader.close()
    os.unlink(path)
print(json.dumps(outcomes))
"""


def test_every_finished_record_outlives_its_writer(tmp_path: Path) -> None:
    """Writers are killed at random instants, most of them after the ring has wrapped around."""
    times = size(80, 200)
    words = [sys.executable, "-c", KILLER, tmp_path, str(times), str(SMALL)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert len(outcomes) == times
    for finished, known, last, seen in outcomes:
        assert known in (finished, finished + 1)  # the last may have been written, but not yet counted
        assert last in (finished - 1, finished)
        assert seen > 0
    assert len({finished for finished, *_ in outcomes}) > times // 2
    assert any(known > seen for _, known, _, seen in outcomes)  # some were overwritten before they died
