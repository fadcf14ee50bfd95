"""On a full disk, the file with the script's output is cut off, and its readers go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.cli.headless import LogCopier
from dpmon.supervise import output_space
from dpmon.supervise.output_space import KEPT_BYTES, OutputSpaceReserver


def test_the_newest_output_stays_and_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "output.log"
    texts: list[str] = []
    output = OutputSpaceReserver([log], texts.append)
    monkeypatch.setattr(output_space, "KEPT_BYTES", 100)
    output.poll()  # the file is missing
    monkeypatch.setattr(
        output_space, "_reserve", lambda fd, size, ahead: size == 0
    )  # there is space once it is cut off
    with open(log, "ab", buffering=0) as script:
        script.write(b"a" * KEPT_BYTES + b"b" * 100)
        output.poll()
        assert log.read_bytes() == b"b" * 100
        script.write(b"c" * KEPT_BYTES * 10)
        output.poll()
        assert log.read_bytes() == b"c" * 100
        script.write(b"d")
        output.poll()
        output.close(nobody_writes=True)
    assert log.read_bytes() == b"c" * 100 + b"d"
    assert texts == [
        "the disk is full: the script's oldest output is deleted to make room for the newest",
        f"{11 * KEPT_BYTES:,} bytes of the script's output were deleted, because the disk was full",
    ]


@pytest.mark.parametrize("kept_bytes", [0, 1000, KEPT_BYTES])
def test_a_slow_foreground_says_what_it_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    log, copied = tmp_path / "stdout.log", tmp_path / "copied"
    output = OutputSpaceReserver([log], lambda text: None)
    monkeypatch.setattr(output_space, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(output_space, "_reserve", lambda fd, size, ahead: size == 0)
    lines = [b"line %08d\n" % number for number in range(480_000)]
    missed: list[str] = []
    with open(log, "ab", buffering=0) as script, open(copied, "wb") as stdout:
        stream = LogCopier(log, stdout.fileno())
        for first in (0, 240_000):
            script.write(b"".join(lines[first : first + 200_000]))
            assert stream.copy_chunk()  # a part of it
            output.poll()
            script.write(b"".join(lines[first + 200_000 : first + 240_000]))  # beyond the position of the reader
            while stream.copy_chunk():
                missed += [stream.gap] if stream.gap else []
                stream.gap = None
    output.close(nobody_writes=True)
    passed = copied.read_bytes()
    known = set(lines)
    unfinished = [line for line in passed.splitlines(keepends=True) if line not in known]
    assert len(unfinished) == len(missed) == 2  # one before each gap
    assert all(lines[0].startswith(line[:5]) and len(line) < len(lines[0]) for line in unfinished)
    count = sum(int(gap.removesuffix(" bytes").replace(",", "")) for gap in missed)
    assert len(passed) - 2 + count == sum(map(len, lines))  # a newline was added to each unfinished line


def test_a_foreground_in_time_misses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, copied = tmp_path / "stdout.log", tmp_path / "copied"
    output = OutputSpaceReserver([log], lambda text: None)
    monkeypatch.setattr(output_space, "_reserve", lambda fd, size, ahead: size == 0)
    lines = [b"line %08d\n" % number for number in range(240_000)]
    with open(log, "ab", buffering=0) as script, open(copied, "wb") as stdout:
        stream = LogCopier(log, stdout.fileno())
        script.write(b"".join(lines[:160_000]))
        while stream.copy_chunk():
            pass
        script.write(b"".join(lines[160_000:200_000]))
        output.poll()
        script.write(b"".join(lines[200_000:]))
        while stream.copy_chunk():
            assert stream.gap is None
    output.close(nobody_writes=True)
    assert copied.read_bytes() == b"".join(lines)
