"""Writing to a path that the user gave replaces only a regular file; a stream is written to directly."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from dpmon.cli.main import main
from dpmon.cli.status_stream import NonBlockingLineFile
from dpmon.run.run_directory import RunError
from support.history_builders import write_run_directory
from support.hostile_inputs import FILE_TYPES, create_file_of_type, file_identity
from support.record_builders import Training, host_event

STREAMS = ("a FIFO", "a device")
NOT_STREAMS = [kind for kind in FILE_TYPES if kind not in STREAMS]


@pytest.fixture
def directory(state: Path) -> Path:
    training = Training()
    return write_run_directory({0: [*training.begin(), *training.run(5)], -1: [host_event(1.0)]}, status=0)


def said(capfd: pytest.CaptureFixture[str]) -> str:
    """The only line on standard error."""
    err = capfd.readouterr().err
    assert err.count("\n") == 1, err
    assert err.startswith("dpmon: ")
    return err


COMMANDS = (
    ["export", "--format", "jsonl", "-o"],
    ["export", "--format", "perfetto", "-o"],
    ["export", "--format", "csv", "--kind", "step", "-o"],
    ["report", "-o"],
    ["report", "--json", "-o"],
    ["report", "--html", "-o"],
)


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("kind", NOT_STREAMS)
def test_only_a_regular_file_is_replaced(
    directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], words: list[str], kind: str
) -> None:
    target = tmp_path / "target"
    create_file_of_type(kind, target)
    before = file_identity(target)
    assert main([*words, str(target)]) == 2
    assert f"it is {kind.replace('block ', '')}" in said(capfd)
    assert file_identity(target) == before
    assert not list(tmp_path.glob("**/*.part"))
    if kind == "a symbolic link":
        assert (tmp_path / "precious").read_text() == "precious"


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_stream_is_written_to_and_stays(directory: Path, tmp_path: Path, words: list[str]) -> None:
    target = tmp_path / "target"
    create_file_of_type("a device", target)
    before = file_identity(target)
    assert main([*words, str(target)]) == 0
    assert file_identity(target) == before
    create_file_of_type("a FIFO", target)
    before = file_identity(target)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(target.read_bytes()))
    reader.start()
    assert main([*words, str(target)]) == 0
    reader.join(60)
    assert got[0]
    assert file_identity(target) == before


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_a_table_is_never_a_stream(
    directory: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    create_file_of_type(kind, tables / "exit.csv")
    before = file_identity(tables / "exit.csv")
    assert main(["export", "--format", "csv", "-o", str(tables)]) == 2
    assert "exit.csv" in said(capfd)
    assert file_identity(tables / "exit.csv") == before
    assert {path.name for path in tables.iterdir()} <= {"exit.csv", "precious"}, "no file was written"


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_a_place_for_metrics_is_refused_before_the_start(
    state: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    target = tmp_path / "target"
    create_file_of_type(kind, target)
    if kind == "a directory":  # the file goes into it
        target.rmdir()
        target.symlink_to(tmp_path / "nowhere")
    before = file_identity(target)
    monkeypatch.setattr("dpmon.cli.launch.start_supervisor", None)
    assert main(["--headless", "--metrics", str(target), str(script)]) == 2
    assert f"metrics cannot be written to {target}: it is a" in said(capfd)
    assert file_identity(target) == before
    assert not state.exists()


@pytest.mark.parametrize("kind", NOT_STREAMS)
def test_lines_of_json_truncate_only_the_named_file(tmp_path: Path, kind: str) -> None:
    target = tmp_path / "lines"
    create_file_of_type(kind, target)
    before = file_identity(target)
    with pytest.raises(RunError, match="it is a"):
        NonBlockingLineFile(str(target))
    assert file_identity(target) == before
    if kind == "a symbolic link":
        assert (tmp_path / "precious").read_text() == "precious"
