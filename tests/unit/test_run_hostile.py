"""Randomly damaged files of a run cause an error of dpmon or fewer records, never anything else."""

from __future__ import annotations

import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from dpmon.cli.summary import summary_lines
from dpmon.errors import HistoryError
from dpmon.export import iter_records
from dpmon.record.jsonl import as_json
from dpmon.report import report_text
from dpmon.run.run_directory import RunError, load_exit, load_info
from dpmon.run.run_reader import RunReader
from dpmon.store.ring_drain import RingDrain
from support.history_builders import snapshot_of_directory, write_run_directory
from support.record_builders import SECOND, Training
from support.ring_writers import SpanTraining as Spans
from support.run_harness import scaled_size

pytestmark = pytest.mark.slow

RINGS = ("process-1.ring", "process-1.jsonl")


@pytest.fixture
def whole(state: Path) -> Path:
    """A finished run with a history, and more records in its rings."""
    training = Training()
    directory = write_run_directory({0: [*training.begin(), *training.run(120)]}, status=0)
    spans = Spans(str(directory / "process-1.ring"), 1, slots=1 << 9)
    drain = RingDrain(directory, load_info(directory))
    for _ in range(20):
        spans.step()
    drain.flush(command_ended=True)
    drain.close()
    with closing(sqlite3.connect(directory / "history.sqlite", isolation_level=None)) as db:
        db.execute("UPDATE meta SET value = 1 WHERE key = 'pruned'")
    (directory / "stages.log").write_text("1 2 torch imported\n")
    return directory


def changed(data: bytes, chance: random.Random) -> bytes:
    """Return the bytes with random damage: flips, a cut, a repeated part, zeros, noise."""
    what = bytearray(data)
    for _ in range(chance.choice((1, 1, 3, 40))):
        at = chance.randrange(len(what)) if what else 0
        # Most of a file is filler: the first kilobytes are where its meaning is.
        at = at if chance.random() < 0.5 else at % min(len(what) or 1, 9000)
        size = chance.choice((1, 4, 8, 64))
        kind = chance.randrange(5)
        if kind == 0:
            what[at : at + size] = chance.randbytes(min(size, len(what) - at))
        elif kind == 1:
            what[at : at + size] = bytes(min(size, len(what) - at))
        elif kind == 2:
            what[at : at + size] = b"\xff" * min(size, len(what) - at)
        elif kind == 3 and chance.random() < 0.3:
            del what[at:]
        elif kind == 4 and chance.random() < 0.3:
            what[at:at] = what[at : at + 512]
    return bytes(what)


def play_back(directory: Path) -> None:
    """Play back at a few times, if there is anything to play."""
    for at in (3 * SECOND, 0, 2 * SECOND, 2_100_000_000, None):
        state = snapshot_of_directory(directory, at, over=at is None)
        assert state.missed >= 0
        assert state.representative is None or state.representative.process in state.processes


@pytest.mark.parametrize("seed", range(scaled_size(5, 1200)))
def test_a_run_with_randomly_damaged_files_can_be_read(whole: Path, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    names = ("run.json", "exit.json", "history.sqlite", "stages.log", *RINGS)
    untouched = len(list(iter_records(whole)))
    assert untouched == 2 + 240 + 1 + 40 + 2
    readable = 0
    for number in range(40):
        directory = tmp_path / f"number-{number}"
        shutil.copytree(whole, directory)
        path = directory / chance.choice(names)
        path.write_bytes(changed(path.read_bytes(), chance))
        try:
            for record in iter_records(directory):
                as_json(record)
            reader = RunReader(directory)
            (
                reader.startup_stage(),
                reader.exit_info(),
                reader.activities(),
                reader.is_command_alive(),
                reader.has_pending_request(),
            )
            reader.close()
            assert summary_lines(directory, load_exit(directory))
            assert report_text(directory)
            play_back(directory)
            readable += 1
        except RunError:
            assert path.name == "run.json", "no other file can make the directory unreadable"
        except HistoryError:
            assert path.name not in ("run.json", "exit.json", "stages.log"), "it is not part of the history"
        shutil.rmtree(directory)
    assert readable > 10
