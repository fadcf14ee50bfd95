"""On a full disk, the oldest of the script's output is deleted, and readers of the file go on."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dpmon.cli.headless import DescriptorWriter, LogCopier
from dpmon.supervise import output_space
from dpmon.supervise.output_space import KEPT_BYTES, OutputSpaceReserver

BLOCK = 1 << 16


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Space can be allocated only after some was freed."""
    fallocate, has_room = output_space._fallocate, False

    def allocate(fd: int, mode: int, offset: int, length: int) -> None:
        nonlocal has_room
        if not mode & output_space._PUNCH_HOLE and not has_room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        has_room = bool(mode & output_space._PUNCH_HOLE)
        fallocate(fd, mode, offset, length)

    monkeypatch.setattr(output_space, "_fallocate", allocate)


@pytest.mark.usefixtures("full_disk")
def test_the_newest_output_stays_and_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "output.log"
    texts: list[str] = []
    output = OutputSpaceReserver([log], texts.append)
    monkeypatch.setattr(output_space, "KEPT_BYTES", BLOCK)
    output.poll()  # the file is missing
    with open(log, "ab", buffering=0) as script:
        script.write(b"a" * 5 * BLOCK + b"b" * BLOCK)
        output.poll()
        assert log.read_bytes() == bytes(5 * BLOCK) + b"b" * BLOCK
        script.write(b"c" * (100 * BLOCK + 1))
        output.poll()
        assert log.read_bytes().lstrip(b"\0") == b"c" * (BLOCK + 1)
        script.write(b"d")
        output.poll()
        output.close(nobody_writes=True)
    assert log.read_bytes().lstrip(b"\0") == b"c" * (BLOCK + 1) + b"d"
    assert log.stat().st_blocks * 512 <= 3 * BLOCK
    assert texts == [
        "the disk is full: the script's oldest output is deleted to make room for the newest",
        f"{105 * BLOCK:,} bytes of the script's output were deleted, because the disk was full",
    ]


def copy_all(stream: LogCopier) -> list[str]:
    """Copy all new output. Return what the stream says about missing parts."""
    gaps = []
    while stream.copy_chunk():
        gaps += [stream.gap] if stream.gap else []
        stream.gap = None
    return gaps


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("kept_bytes", [0, 1000, KEPT_BYTES])
def test_a_slow_foreground_says_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    log, copied = tmp_path / "stdout.log", tmp_path / "copied"
    output = OutputSpaceReserver([log], lambda text: None)
    monkeypatch.setattr(output_space, "KEPT_BYTES", kept_bytes)
    lines = [b"line %08d\n" % number for number in range(480_000)]
    missed: list[str] = []
    with open(log, "ab", buffering=0) as script, open(copied, "wb") as stdout:
        stream = LogCopier(log, DescriptorWriter(stdout.fileno()))
        for first in (0, 240_000):
            script.write(b"".join(lines[first : first + 200_000]))
            assert stream.copy_chunk()  # a part of it
            output.poll()
            script.write(b"".join(lines[first + 200_000 : first + 240_000]))
            missed += copy_all(stream)
    output.close(nobody_writes=True)
    passed = copied.read_bytes()
    assert b"\0" not in passed
    known = set(lines)
    unfinished = [line for line in passed.splitlines(keepends=True) if line not in known]
    assert len(missed) == 2
    assert len(unfinished) <= 4  # the line before each gap and the line after it
    count = sum(int(gap.removesuffix(" bytes").replace(",", "")) for gap in missed)
    assert 0 <= len(passed) + count - sum(map(len, lines)) <= 2  # a newline is added to an unfinished line


@pytest.mark.usefixtures("full_disk")
def test_a_foreground_in_time_misses_nothing(tmp_path: Path) -> None:
    log, copied = tmp_path / "stdout.log", tmp_path / "copied"
    output = OutputSpaceReserver([log], lambda text: None)
    lines = [b"line %08d\n" % number for number in range(240_000)]
    with open(log, "ab", buffering=0) as script, open(copied, "wb") as stdout:
        stream = LogCopier(log, DescriptorWriter(stdout.fileno()))
        script.write(b"".join(lines[:160_000]))
        assert copy_all(stream) == []
        script.write(b"".join(lines[160_000:200_000]))
        output.poll()
        script.write(b"".join(lines[200_000:]))
        assert copy_all(stream) == []
    output.close(nobody_writes=True)
    assert copied.read_bytes() == b"".join(lines)
