"""Writing to a path that the user gave replaces only a regular file; a stream is written to directly."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from dpmon.cli.main import main
from dpmon.cli.status_stream import NonBlockingLineFile
from dpmon.run.output_target import check_replaceable, is_stream
from dpmon.run.run_directory import ExitInfo, RunError, load_exit
from dpmon.supervise.prometheus_file import PrometheusFile
from dpmon.supervise.supervisor import Supervisor
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


def test_the_descriptors_of_the_machine_are_streams_that_are_never_replaced(tmp_path: Path) -> None:
    for name in ("/dev/fd/1", "/dev/stdout", "/dev/stderr", "/proc/self/fd/1", f"/proc/{os.getpid()}/fd/0"):
        assert is_stream(Path(name)), name
    # Only check these: a failing test must not replace files that the machine needs.
    for name in ("/dev/stdout", "/proc/self/fd/1"):
        with pytest.raises(OSError, match="symbolic link"):
            check_replaceable(Path(name))
    assert not is_stream(tmp_path / "fd")
    assert not is_stream(Path("/dev/fd/1x"))


@pytest.mark.parametrize("kind", FILE_TYPES)
def test_a_path_that_is_no_longer_the_metrics_file_stays(directory: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "it.prom"
    told: list[str] = []
    metrics = PrometheusFile(target, directory, told.append)
    metrics.write()
    assert target.read_text().startswith("# HELP")
    create_file_of_type(kind, target)
    before = file_identity(target)
    metrics.write()
    metrics.write()
    how = load_exit(directory)
    assert how is not None
    metrics.write(how)
    assert file_identity(target) == before
    (text,) = told
    assert f"cannot be written: it is {kind.replace('block ', '')}" in text
    assert not list(tmp_path.glob(".dpmon*"))


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


def test_lines_of_json_through_a_descriptor_come_after_what_is_there(tmp_path: Path) -> None:
    with open(tmp_path / "log", "wb") as file:
        file.write(b"before\n")
        file.flush()
        NonBlockingLineFile(f"/dev/fd/{file.fileno()}").write(b"{}\n")
        assert (tmp_path / "log").read_bytes() == b"before\n{}\n"


def test_lines_of_json_go_to_a_device_and_truncate_a_file(tmp_path: Path) -> None:
    create_file_of_type("a device", tmp_path / "sink")
    before = file_identity(tmp_path / "sink")
    assert NonBlockingLineFile(str(tmp_path / "sink")).write(b"{}\n")
    assert file_identity(tmp_path / "sink") == before
    (tmp_path / "lines").write_text("old and long\n")
    NonBlockingLineFile(str(tmp_path / "lines")).write(b"{}\n")
    assert json.loads((tmp_path / "lines").read_bytes()) == {}


def test_a_long_file_name_can_be_written(directory: Path, tmp_path: Path) -> None:
    target = tmp_path / ("ü" * 120)
    assert main(["export", "-o", str(target)]) == 0
    assert target.stat().st_size


def test_the_end_of_a_run_is_written_after_a_restart_of_the_machine(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "it.prom"
    directory = write_run_directory({}, status=None, boot_id="another", options={"metrics": str(target)})
    before = PrometheusFile(target, directory, print)
    before.write()
    monkeypatch.setenv("DPMON_METRICS", str(target))
    metrics = Supervisor(directory)._metrics(print)
    assert metrics is not None
    metrics.write(ExitInfo(None, None, 1.7e9, 5, 5.0, "supervisor"))
    (line,) = [line for line in target.read_text().splitlines() if line.startswith("dpmon_run_running{")]
    assert line.endswith(" 0")
