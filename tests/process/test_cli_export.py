"""`dpmon export` of real runs, while they go on and after."""

from __future__ import annotations

import csv
import json
import signal
import subprocess
from pathlib import Path

from dpmon.run import proc
from support.format_readers import read_trace
from support.run_harness import Dpmon, plain_training_script, wait_for


def test_all_formats_of_a_run_that_goes_on_and_that_has_ended(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.waiting("", plain_training_script(20, wrapped=True))
    dpmon.run(*dpmon.warm(), "--detach", "--devices", "cpu,cpu", "script.py")
    dpmon.begun()
    # Records of a live run are in its history a moment later.
    wait_for(lambda: dpmon.run("export", "--kind", "call").text.count("\n") == 20)
    for over in (False, True):
        lines = [json.loads(line) for line in dpmon.run("export").text.splitlines()]
        calls = [line for line in lines if line["kind"] == "call"]
        assert len(calls) == 20
        assert [line["kind"] for line in lines if line["kind"] == "exit"] == ["exit"] * over
        where = tmp_path / f"tables{over}"
        assert dpmon.run("export", "last", "--format", "csv", "-o", where).status == 0
        with open(where / "call.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [len(json.loads(row["replicas"])) for row in rows] == [2] * 20
        assert [float(row["wall_ms"]) for row in rows] == [call["wall_ms"] for call in calls]
        trace = read_trace(dpmon.run("export", "--format", "perfetto").text)
        assert trace.tracks("process 0") == ["calls", "replica 0 cpu:0", "replica 1 cpu:1", "steps"]
        assert len(trace.slices["process 0", "replica 1 cpu:1"]) == 20
        linear = [event for event in trace.slices["process 0", "calls"] if event["name"] == "Linear"]
        in_ns = [int(event["dur"] * 1000.0) for event in linear]  # in the way that Perfetto reads it
        assert in_ns == [round(call["wall_ms"] * 1e6) for call in calls]
        dpmon.go()
        dpmon.exit()


def test_an_export_that_is_not_possible_gives_one_sentence(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.script("pass")
    dpmon.run("script.py")
    for words, said in (
        (["--format", "csv"], "give a directory with -o"),
        (["--format", "perfetto", "--kind", "call"], "a perfetto trace holds all kinds"),
        (["--format", "xml"], "invalid choice"),
        (["-o", tmp_path / "no" / "where"], "cannot be written"),
    ):
        result = dpmon.run("export", *words)
        assert (result.status, result.out) == (2, b"")
        assert result.errors.startswith("dpmon: ")
        assert said in result.errors
        assert result.errors.count("\n") == 1
    assert dpmon.run("export", "-o", tmp_path / "records").out == b""
    assert (tmp_path / "records").read_text() == dpmon.run("export").text
    narrow = dpmon.run("export", env={"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"})
    assert narrow.status == 0


def test_a_mirror_gets_the_last_rows_after_a_sigterm(dpmon: Dpmon) -> None:
    """Slurm sends SIGTERM to the steps of a job as soon as its command has ended."""
    dpmon.waiting("", plain_training_script(20))
    dpmon.run(*dpmon.warm(), "--detach", "script.py")
    dpmon.begun()
    process = dpmon.start("export", "last", "--follow", "--rollups", stdin=subprocess.PIPE)
    assert process.stdin is not None
    output = process.stdout
    assert output is not None
    process.stdin.write(b'{"ask": "begin"}\n')
    process.stdin.flush()
    wait_for(lambda: b'{"beat"' in output.readline(), what="the first rows")
    process.send_signal(signal.SIGTERM)
    dpmon.go()
    wait_for(lambda: b'"exit"' in output.readline(), what="the last rows")
    process.stdin.close()
    assert process.wait(100) == 0


def test_a_supervisor_that_an_exporter_starts_does_not_ignore_sigterm(dpmon: Dpmon) -> None:
    dpmon.waiting("", plain_training_script(20))
    dpmon.run(*dpmon.warm(), "--detach", "script.py")
    dpmon.begun()
    before = dpmon.kill_supervisor()["supervisor_pid"]
    process = dpmon.start("export", "last", "--follow", "--rollups", stdin=subprocess.PIPE)
    pid = wait_for(lambda: (now := dpmon.info()["supervisor_pid"]) != before and now, what="the next supervisor")
    ignored = int(proc.read_proc_bytes(pid, "status").partition(b"SigIgn:")[2].split()[0], 16)
    assert not ignored >> (signal.SIGTERM - 1) & 1
    assert process.stdin is not None
    process.stdin.close()
    process.wait(100)
    dpmon.go()
