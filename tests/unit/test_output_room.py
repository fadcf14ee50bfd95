"""On a full disk, the file with the script's output is cut off, and its readers go on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpmon.cli.headless import Stream
from dpmon.supervise import room
from dpmon.supervise.room import LITTLE, OutputRoom


def test_the_newest_output_stays_and_the_rest_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "output.log"
    texts: list[str] = []
    output = OutputRoom([log], texts.append, keep_last=100)
    output.look(0.0)  # the file is missing
    monkeypatch.setattr(room, "_reserve", lambda fd, size, ahead: size == 0)  # there is space once it is cut off
    with open(log, "ab", buffering=0) as script:
        script.write(b"a" * LITTLE + b"b" * 100)
        output.look(1.0)
        assert log.read_bytes() == b"b" * 100
        script.write(b"c" * LITTLE * 10)
        output.look(2.0)
        assert log.read_bytes() == b"c" * 100
        script.write(b"d")
        output.look(3.0)
        output.close(nobody_writes=True)
    assert log.read_bytes() == b"c" * 100 + b"d"
    assert texts == [
        "the disk is full: the script's oldest output is deleted to make room for the newest",
        f"{11 * LITTLE:,} bytes of the script's output were deleted, because the disk was full",
    ]


def test_a_foreground_without_a_screen_passes_on_what_follows(tmp_path: Path) -> None:
    log = tmp_path / "stdout.log"
    log.write_bytes(b"first, of some length\n")
    reading, writing = os.pipe()
    stream = Stream(log, writing)
    assert stream.pump()
    os.truncate(log, 0)
    assert not stream.pump()
    with open(log, "ab") as script:
        script.write(b"second\n")
    assert stream.pump()
    assert not stream.pump()
    assert os.read(reading, 100) == b"first, of some length\nsecond\n"
    os.close(reading)
    os.close(writing)
