"""`--json` and `--metrics` of real runs."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from support.run_harness import Dpmon, plain_training_script, wait_for

BEGIN = f"""
print("out", flush=True)
{plain_training_script(50, wrapped=True)}
sys.stderr.write("in the middle of a line")
sys.stderr.flush()
"""
END = "raise SystemExit(7)"
WATCHED = "while not pathlib.Path('watched').exists(): time.sleep(0.01)\n"


def parsed(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def let_go_once(dpmon: Dpmon, path: Path, lines: int) -> None:
    """Let the script end after this number of lines with a step and a sample of the host."""

    def known() -> int:
        return sum('"step":50' in line and '"mem_total_bytes":' in line for line in path.read_text().splitlines())

    wait_for(lambda: known() >= lines, what="lines of JSON")
    dpmon.go()


def test_lines_of_json_on_stderr_leave_stdout_to_the_script(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.waiting(END, WATCHED + BEGIN)
    with open(tmp_path / "err", "wb") as err:
        process = dpmon.start(*dpmon.warm(), "--json", "--devices", "cpu,cpu", "script.py", stderr=err)
        wait_for((tmp_path / "err").read_bytes, what="the first line, before the first step")
        (dpmon.cwd / "watched").touch()
        let_go_once(dpmon, tmp_path / "err", 2)
        out, _ = process.communicate(timeout=100)
    assert (out, process.returncode) == (b"out\n", 7)
    text = (tmp_path / "err").read_text()
    lines = parsed(text)
    assert [line for line in text.splitlines() if not line.startswith("{")] == ["in the middle of a line"]
    assert lines[0]["state"] == "starting"
    assert lines[0]["absent"]["steps_per_s"] == "no step has finished yet"
    known = [line for line in lines if line.get("step") == 50]
    assert (known[0]["mode"], known[0]["virtual"], known[0]["health"]["end"]) == ("dp", True, None)
    assert known[0]["step_ms"]["median_ms"] > 0
    assert set(known[0]["phases"]) == {"forward", "backward", "optimizer", "other"}
    assert sum(phase["share"] for phase in known[0]["phases"].values()) == pytest.approx(1, abs=0.01)
    assert set(known[0]["call_phases"]) == {"scatter", "replicate", "parallel_apply", "gather"}
    within = sum(phase["share"] for phase in known[0]["call_phases"].values())
    assert 0 < within <= known[0]["phases"]["forward"]["share"]
    parts = (*known[0]["phases"].values(), *known[0]["call_phases"].values())
    assert {phase["device_median_ms"] for phase in parts} == {None}
    assert known[0]["absent"]["device_median_ms"] == "the devices are CPUs: host time is all there is"
    assert known[-1]["host"]["mem_total_bytes"] > 0
    times = [line["t_s"] for line in lines if line["kind"] == "status"]
    assert all(after > before for before, after in pairwise(times))
    assert lines[-1] == {"kind": "exit", "run": dpmon.last().name, "t_s": lines[-1]["t_s"], "status": 7,
                         "signal": None, "skipped": 0}  # fmt: skip


def test_lines_of_json_in_a_file_and_of_a_run_that_is_followed(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.waiting(END, BEGIN)
    process = dpmon.start(*dpmon.warm(), "--headless", f"--json={tmp_path / 'lines'}", "script.py")
    dpmon.begun()
    follower = dpmon.start("attach", "--json", "last")
    let_go_once(dpmon, tmp_path / "lines", 1)
    _, err = process.communicate(timeout=100)
    assert b"{" not in err
    assert b"exit status 7 after" in err, "what dpmon says in words stays"
    assert parsed((tmp_path / "lines").read_text())[-1]["status"] == 7
    _, err = follower.communicate(timeout=100)
    assert [line["kind"] for line in parsed(err.decode())][-1] == "exit"


def test_a_full_pipe_does_not_block_dpmon(dpmon: Dpmon, tmp_path: Path) -> None:
    from dpmon.cli.status_stream import NonBlockingLineFile

    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    lines = NonBlockingLineFile(str(tmp_path / "pipe"))
    line = b"x" * 9_999 + b"\n"
    taken = [lines.write(line) for _ in range(100)]
    assert not all(taken)
    got = b""
    while True:
        try:
            part = os.read(reader, 1 << 20)
        except BlockingIOError:
            if lines.write(b"last\n") and got.endswith(b"last\n"):
                break
            continue
        got += part
    os.close(reader)
    assert set(got.splitlines()) == {line[:-1], b"last"}, "only whole lines"
    assert lines.write(line), "a reader that has gone takes everything"


def test_invalid_options_are_refused_before_the_script_starts(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.script("open('ran', 'w')")
    for words, said in (
        (["--json", "--detach"], "does not work with --detach"),
        ([f"--json={tmp_path}/no/file"], "cannot be written"),
        (["--metrics", f"{tmp_path}/no/file"], "is not a writable directory"),
    ):
        result = dpmon.run(*words, "script.py")
        assert (result.status, result.errors.count("\n")) == (2, 1)
        assert said in result.errors
    assert not (dpmon.cwd / "ran").exists()


def test_metrics_of_a_detached_run(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.waiting(END, BEGIN)
    assert dpmon.run(*dpmon.warm(), "--detach", "script.py", env={"DPMON_METRICS": str(tmp_path)}).status == 0
    (target,) = wait_for(lambda: list(tmp_path.glob("dpmon-script-*.prom")))
    dpmon.go()
    assert dpmon.exit()["status"] == 7

    def over() -> dict[str, float] | None:
        values = {
            s.name: s.value for family in text_string_to_metric_families(target.read_text()) for s in family.samples
        }
        return values if values["dpmon_run_running"] == 0 else None

    found = wait_for(over, what="the last metrics")
    assert (found["dpmon_run_exit_status"], found["dpmon_step_duration_seconds_count"]) == (7, 50)
    assert not [warning for warning in dpmon.records() if warning["kind"] == "warning"]
