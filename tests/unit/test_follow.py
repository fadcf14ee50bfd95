"""`export --follow` for a mirror that never asks: it does not wait without a limit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kept import keep
from test_export import samples, trained

from dpmon.export import ExportError
from dpmon.export import follow as module
from dpmon.export.follow import follow
from dpmon.mirror.local_run import mirror_of
from dpmon.run.rundir import load_info, stop_asked_unix
from dpmon.run.signalling import stop_run


@pytest.fixture
def directory(state: Path) -> Path:
    return keep({0: trained(), -1: samples()}, status=0)


@contextmanager
def as_input() -> Iterator[int]:
    """Make a pipe the standard input; return its other end."""
    here, there = os.pipe()
    before = os.dup(0)
    os.dup2(here, 0)
    try:
        yield there
    finally:
        os.dup2(before, 0)
        for each in (here, before):
            os.close(each)


def test_a_way_without_input_is_said(directory: Path) -> None:
    with as_input() as there:
        os.close(there)
        with pytest.raises(ExportError, match="standard input ends at once"):
            follow(directory, 0, rollups=True)


@pytest.mark.parametrize("asked", [b"", b'{"ask": "begin"}\n'])
def test_a_reader_that_is_gone_is_not_waited_for(
    directory: Path, asked: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.2)
    with as_input() as there:
        os.write(there, asked)
        follow(directory, 0, rollups=True)
        os.close(there)
    assert ('"exit"' in capsys.readouterr().out) == bool(asked)


def test_machines_that_cannot_be_asked_are_not_called_stopped(state: Path) -> None:
    mirror = mirror_of("train", [("gpu-1", "20260101-000000-train-0001", ["false"])])
    *_, said = stop_run(mirror, load_info(mirror))
    assert said == "no machine is connected, so they cannot be stopped now: try again in some seconds"
    assert stop_asked_unix(mirror) is None
