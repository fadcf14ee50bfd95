"""Machines that a user names, the way to them (a shell script here), and which of their runs belong together."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli import multi_node as module
from dpmon.cli.commands import ListedRun
from dpmon.cli.main import main
from dpmon.cli.multi_node import RemoteRun, choose_job_runs, group_by_job
from dpmon.mirror import remote_hosts
from dpmon.mirror.disconnect_reasons import explain_disconnect
from dpmon.mirror.remote_hosts import (
    HostError,
    HostOutput,
    RemoteHost,
    expand_hostlist,
    resolve_hosts,
    slurm_hosts,
)
from dpmon.record.record_types import Event
from dpmon.run import proc
from dpmon.run.run_directory import RunError
from support.history_builders import write_run_directory
from support.record_builders import Training

BIN = os.path.dirname(shutil.which("dpmon", path=os.path.dirname(sys.executable)) or sys.executable)
JOB = {"by": "torchelastic", "id": "abc"}
Run = Callable[..., Path]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("node1", ["node1"]),
        ("a,b", ["a", "b"]),
        ("gpu[1-3,7]", ["gpu1", "gpu2", "gpu3", "gpu7"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("login,r[1-2]n[0,3],x", ["login", "r1n0", "r1n3", "r2n0", "r2n3", "x"]),
        ("gpu[3]-ib.cluster", ["gpu3-ib.cluster"]),
    ],
)
def test_a_list_is_expanded_as_slurm_does(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize(
    "text", ["gpu[1-", "gpu[]", "gpu[a-b]", "gpu[3-1]", "gpu[1-9999999]", "a[1-900]b[1-900]", "gpu[1-900],n[1-900]"]
)
def test_a_list_that_is_wrong_or_endless_is_refused(text: str) -> None:
    with pytest.raises(HostError):
        expand_hostlist(text)


def test_the_way_is_a_list_of_words_that_ends_with_the_name() -> None:
    (machine,) = resolve_hosts(["root@gpu-2"])
    assert machine.command_prefix[:2] == ("ssh", "-T")
    assert machine.command_prefix[-3:] == ("--", "root@gpu-2", "dpmon")
    (machine,) = resolve_hosts(["3", "3"], via="kubectl exec -i 'pod-{}' -c 'my trainer' --")
    assert machine.command_prefix == ("kubectl", "exec", "-i", "pod-3", "-c", "my trainer", "--", "dpmon")
    for names in (["localhost"], [proc.host_name(), "localhost"]):
        (machine,) = resolve_hosts(names)
        assert (machine.name, machine.command_prefix) == (proc.host_name(), (sys.executable, "-m", "dpmon"))
    assert resolve_hosts(["localhost"], via="x {}")[0].command_prefix == ("x", "localhost", "dpmon")


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "", "a;b", "$(x)", "a\nb", "x" * 300])
def test_a_name_that_is_an_option_or_for_a_shell_is_refused(name: str) -> None:
    with pytest.raises(HostError):
        resolve_hosts([name])


@pytest.mark.parametrize("via", ["kubectl exec pod", "kubectl 'exec {}", ""])
def test_a_way_without_a_place_for_the_name_is_refused(via: str) -> None:
    with pytest.raises(HostError):
        resolve_hosts(["a"], via=via)


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        ("echo 'RUNNING n[1-2]'", ["n1", "n2"]),
        ("echo 'PENDING '", "Slurm job 12 has no nodes: it is PENDING"),
        ("exit 0", "Slurm job 12 has no nodes: it has ended"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "of job 12: its Slurm job has ended"),
    ],
)
def test_slurm_names_the_machines_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, names: object
) -> None:
    (tmp_path / "squeue").write_text(
        f'#!/bin/sh\n[ "$*" = "--noheader --jobs 12 --format %T %N" ] || exit 9\n{answer}\n'
    )
    (tmp_path / "squeue").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    if isinstance(names, list):
        found = slurm_hosts("12.0")
        assert [machine.name for machine in found] == names
        assert found[0].command_prefix[:4] == ("srun", "--overlap", "--quiet", "--jobid")
        assert found[0].command_prefix[-3:] == ("--nodelist", "n1", "dpmon")
    else:
        with pytest.raises(HostError, match=str(names)):
            slurm_hosts("12")


def test_a_job_of_slurm_is_a_number() -> None:
    with pytest.raises(HostError, match="is not a Slurm job number"):
        slurm_hosts("-x")


# ------------------------------------------------------------------------------------------------ asking


def way(tmp_path: Path, text: str) -> str:
    """Return a way to machines: a shell script with the name in $n, whose rest says what happens there."""
    script = tmp_path / "way.sh"
    script.write_text(f"n=$1; shift; export PATH={BIN}:$PATH XDG_STATE_HOME={tmp_path}/$n\n{text}\n")
    return f"sh {script} {{}}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that keeps a run on a machine."""

    def make(machine: str, job: dict[str, str] | None = JOB, **about: Any) -> Path:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / machine))
        training = Training()
        event = Event("process", {"process": 0, "rank": 0, "t_s": 1.0, "job": job, "node": 0})
        return write_run_directory({0: [*training.begin(), event, *training.run(5)]}, **about)

    return make


def test_runs_of_several_machines_are_listed_by_job(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    run("a", started_unix=now - 100)
    run("a", job=None, name="alone", started_unix=now - 90)
    run("b", started_unix=now - 80)
    via = way(tmp_path, '[ $n = c ] || echo Welcome to $n; exec "$@"')
    assert main(["ls", "--hosts", "a,b,c", "--via", via]) == 0
    said = capsys.readouterr()
    rows = [line.split() for line in said.out.splitlines()]
    assert rows[0][:4] == ["JOB", "NODE", "NAME", "STATE"]
    before = [" ".join(row[: row.index("finished") - 1]) for row in rows[1:]]
    assert before == ["- a", "torchelastic abc a", "torchelastic abc b"]
    assert said.err == ""
    assert main(["ls", "--json", "--host", "a", "--host", "b", "--via", via]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["machine"], one["job"]) for one in found] == [("a", None), ("a", JOB), ("b", JOB)]


BAD = """\
case $n in
    unknown) echo "ssh: Could not resolve hostname unknown: Name or service not known" >&2; exit 255;;
    refuses) echo "ssh: connect to host refuses port 22: Connection refused" >&2; exit 255;;
    password) echo "root@password: Permission denied (publickey,password)." >&2; exit 255;;
    key) echo "Host key verification failed." >&2; exit 255;;
    rubbish) printf 'x\\033[2Jy\\nz'; exit 0;;
    half) printf '{"id": "20260101-'; exit 0;;
    other) echo '{"id": "20260101-000000-x-0000", "name": "x"}';;
    silent) exec sleep 1000;;
    flood) exec yes;;
    gigabyte) exec head -c 1000000000 /dev/zero;;
    missing) exec no-"$@";;
    *) exec "$@";;
esac"""
SAID = {
    "unknown": "its name has no address: check the name",
    "refuses": "it refused the connection: no ssh server at its port",
    "password": "it asks for a password, or refuses your key: set up a key that needs none",
    "key": "its host key is unknown or has changed: connect to it once by hand",
    "rubbish": "it lists no run that this dpmon can read, but prints: z",
    "half": 'it lists no run that this dpmon can read, but prints: {"id": "20260101-',
    "other": 'it lists no run that this dpmon can read, but prints: {"id": "20260101-000000-x-0000", "name": "x"}',
    "silent": "it has sent nothing for 5 s",
    "flood": "it printed more than 8 MiB",
    "gigabyte": "it sent a line of more than 1 MiB",
    "missing": "dpmon is not there, or not in the PATH of its commands",
}


def test_each_bad_machine_has_a_sentence_and_the_others_are_listed(
    tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("good")
    monkeypatch.setattr(remote_hosts, "_MAX_SILENCE_S", 5.0)
    # The good machine may not have 5 s on a busy computer to import what it needs, so its list is ready.
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    assert main(["ls", "--json"]) == 0
    (tmp_path / "list").write_text(capsys.readouterr().out)
    via = way(tmp_path, BAD.replace('*) exec "$@"', f"*) cat {tmp_path}/list"))
    assert main(["ls", "--hosts", ",".join([*SAID, "good"]), "--via", via]) == 1
    said = capsys.readouterr()
    assert dict(line.removeprefix("dpmon: ").split(": ", 1) for line in said.err.splitlines()) == SAID
    assert [line.split()[2] for line in said.out.splitlines()[1:]] == ["good"]


def test_dpmon_is_found_at_its_path_here_if_it_is_in_no_path_there(tmp_path: Path) -> None:
    script = tmp_path / "way.sh"
    script.write_text('shift; case $1 in dpmon) echo "sh: 1: dpmon: not found" >&2; exit 127;; *) exec "$@";; esac')
    (machine,), (answer,) = remote_hosts.run_dpmon_on_hosts(
        resolve_hosts(["a"], via=f"sh {script} {{}}"), ("--version",)
    )
    assert machine.dpmon == (sys.executable, "-m", "dpmon")
    assert answer.lines[0].startswith(b"dpmon ")
    assert answer.why == ""


@pytest.mark.parametrize(("name", "said"), [("missing", "no host replied"), ("a", "no run on 1 host that replied")])
def test_machines_without_a_run_are_told_from_those_that_do_not_answer(
    tmp_path: Path, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    via = way(tmp_path, BAD.replace('*) exec "$@"', "*) :"))
    assert main(["attach", "--host", name, "--via", via]) != 0
    assert capsys.readouterr().err.splitlines()[-1].removeprefix("dpmon: ") == said
    assert main(["ls", "--host", name, "--via", via]) == int(name == "missing")
    listed = capsys.readouterr()
    assert listed.err == f"dpmon: {f'missing: {SAID[name]}' if name in SAID else said}\n"
    assert listed.out == ""


# ------------------------------------------------------------------------------------------------ jobs


def there(machine: str, number: int, job: dict[str, str] | None = JOB, **more: Any) -> RemoteRun:
    """Return a live run of a machine; `number` orders its start."""
    values = dict.fromkeys(ListedRun._fields) | {
        "id": f"20260101-{number:06d}-train-{number:04x}",
        "name": f"train-{number:04x}",
        "state": "training",
        "started_unix": float(number),
        "seconds": 1.0,
        "command": [],
        "machines": [],
        "job": job,
    }
    return RemoteRun(RemoteHost(machine, ()), ListedRun(**{**values, **more}))


def over(machine: str, number: int, job: dict[str, str] | None = JOB) -> RemoteRun:
    """Return a finished run."""
    return there(machine, number, job, status=0, state="finished")


def slurm(step: str) -> dict[str, str]:
    return {"by": "slurm", "id": step}


@pytest.mark.parametrize(
    ("runs", "what", "slurm_job", "expected"),
    [
        ([there("a", 1), there("b", 2)], None, None, [1, 2]),
        ([there("a", 1), there("b", 2), over("a", 3, None)], None, None, [1, 2]),
        ([over("a", 1), there("a", 3), there("b", 2)], None, None, [3, 2]),  # started again
        ([there("a", 1), there("a", 3), there("b", 2)], None, None, [1, 3, 2]),  # a run for each rank
        ([there("a", 1, node=1), there("a", 2, node=0), there("b", 3, node=2)], None, None, [2, 1, 3]),
        ([over("a", 1), over("b", 2)], None, None, [1, 2]),
        ([over("a", 1), over("a", 90), over("a", 91), over("b", 92)], None, None, [90, 91, 92]),
        ([there("a", 1), there("b", 2), there("c", 3, None)], None, None, [1, 2]),  # something else on c
        ([there("a", 1, None)], None, None, [1]),
        ([there("a", 1, None), there("b", 2, None)], "train", None, [1, 2]),
        ([there("a", 1), there("b", 2), there("b", 3, slurm("1.0"))], "abc", None, [1, 2]),
        ([there("a", 1), there("b", 2), there("b", 3, slurm("1.0"))], "train-0001", None, [1, 2]),
        ([there("a", 1, slurm("7.0")), there("a", 2, slurm("7.1")), there("b", 3, slurm("7.1"))], None, "7", [2, 3]),
        ([there("a", 1, slurm("7")), there("a", 2, slurm("77.0"))], None, "7", [1]),
    ],
)
def test_the_newest_live_job_or_the_named_one_is_chosen(
    runs: list[RemoteRun], what: str | None, slurm_job: str | None, expected: list[int]
) -> None:
    found = choose_job_runs(sorted(runs, key=lambda one: one.run.started_unix), what, slurm_job)
    assert [int(one.run.started_unix) for same in found.values() for one in same] == expected


def test_live_runs_of_unknown_jobs_are_not_mixed() -> None:
    runs = [there("a", 1, None), there("b", 2, None)]
    assert len(group_by_job(runs)) == 2
    for slurm_job in (None, "7"):
        with pytest.raises(RunError, match="attach again when one trains, or give its name, such as train-0002"):
            choose_job_runs(runs, None, slurm_job)
    with pytest.raises(RunError, match="no host that replied has a run other: `dpmon ls` with the same"):
        choose_job_runs(runs, "other")
    with pytest.raises(RunError, match="no host that replied has a run of job 7"):
        choose_job_runs([there("a", 1)], None, "7")


def test_the_mirror_is_named_by_an_id_that_was_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [there("a", 1, name="../../etc/x"), there("b", 2)]  # a machine may say anything
    monkeypatch.setattr(module, "list_remote_runs", lambda asked: (runs, {}))
    made = []
    monkeypatch.setattr(module, "find_or_create_mirror", lambda *about: made.append(about))
    options = Namespace(run=None, slurm=None, metrics=None)
    module._find_or_create_mirror(options, [one.host for one in runs], None)
    assert [machine for machine, _, _ in made[0][1]] == ["a", "b"]
    assert made[0][0] == "train"


# ------------------------------------------------------------------------------------------------ command line


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["ls", "--via", "x {}"], "--via needs hosts"),
        (["ls", "--host", "-x"], "--host: expected one argument"),
        (["ls", "--host=-x"], "'-x' is not a valid node name"),
        (["ls", "--hosts", "a[1-"], "is not a list of nodes"),
        (["report", "--host", "a"], "unknown option --host"),
    ],
)
def test_a_wrong_command_line_has_a_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert sentence in capsys.readouterr().err


UNREACHED = HostOutput([], "it cannot be reached", False)


@pytest.mark.parametrize(
    ("runs", "answer", "followed", "said"),
    [
        ([there("a", 1)], UNREACHED, ["a", "b"], "b: dpmon keeps trying, and shows it when it replies"),
        ([there("a", 1)], UNREACHED._replace(for_good=True), ["a"], "b: it cannot be reached"),
        ([there("a", 1), there("a", 2)], UNREACHED, ["a", "a:2"], "attach again when it replies"),
        ([there("a", 1, None)], UNREACHED, ["a"], "attach again when it replies"),
        ([there("a", 1, slurm("1; rm"))], UNREACHED, ["a"], "attach again when it replies"),
    ],
)
def test_a_machine_that_cannot_be_reached_is_sought_by_the_job(
    runs: list[RemoteRun],
    answer: HostOutput,
    followed: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "list_remote_runs", lambda asked: (runs, {"b": answer}))
    made: list[Any] = []
    monkeypatch.setattr(module, "find_or_create_mirror", lambda *about: made.append(about))
    hosts = [RemoteHost("a", ()), RemoteHost("b", ("ssh", "b"))]
    module._find_or_create_mirror(Namespace(run=None, slurm=None), hosts, None)
    ways = made[0][1]
    assert [name for name, *_ in ways] == followed
    assert said in capsys.readouterr().err
    if "b" in followed:
        assert ways[-1][1:] == ["job=torchelastic:abc", "ssh", "b", "dpmon"]


def test_a_run_is_found_by_its_job(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run("a")
    newest = run("a", started_unix=time.time())
    run("a", job=None)
    monkeypatch.setattr("dpmon.export.row_stream.stream_rows", lambda directory, *_, **__: print(directory))
    assert main(["export", "job=torchelastic:abc", "--follow", "--rollups"]) == 0
    assert capsys.readouterr().out == f"{newest}\n"
    assert main(["export", "job=torchelastic:x", "--follow", "--rollups"]) != 0
    said = capsys.readouterr().err
    assert explain_disconnect(1, said.encode(), b"", was_open=False) == ("there is no run of job torchelastic:x", True)
