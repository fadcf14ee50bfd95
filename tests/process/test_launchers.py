"""Jobs over two machines, as torchrun, Slurm, accelerate and Ray start them: each machine records its own ranks.

Here, two state directories stand for two machines; under Slurm there are two real nodes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.baseline_comparison import run_unless_aborted
from support.cluster_harness import SLURM_NODES, start_slurm
from support.run_harness import LIMIT_S, CommandResult, Dpmon, free_ports

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN, RAY = SCRIPTS / "two_nodes.py", SCRIPTS / "ray_ranks.py"
STEPS = 12
TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")
_HAS_RAY = importlib.util.find_spec("ray") is not None


def own_address() -> str:
    """An address of this machine, as another machine would use it; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def counted(*texts: str) -> dict[int, tuple[int, int]]:
    """The steps and the rows of a batch, by rank, as the script counted them."""
    found = [line for text in texts for line in re.findall(r"counted: (\d+) (\d+) (\d+) (\d+)", text)]
    assert len(found) == len({rank for rank, *_ in found}), found
    return {int(rank): (int(steps), int(rows)) for rank, _, steps, rows in found}


def runs_in(dpmon: Dpmon, state: Path) -> list[dict[str, Any]]:
    """What `ls --json` says of the runs in a state directory."""
    result = dpmon.run("ls", "--json", env={"XDG_STATE_HOME": str(state)})
    assert result.status == 0, result.errors
    return [json.loads(line) for line in result.out.splitlines()]


def check(dpmon: Dpmon, states: Sequence[Path], counts: dict[int, tuple[int, int]], by: str) -> None:
    """Check that the runs in all state directories are one job, with the ranks, steps and rows that were counted."""
    runs = [(run, state) for state in states for run in runs_in(dpmon, state)]
    assert {run["job"]["by"] for run, _ in runs} == {by}
    assert len({run["job"]["id"] for run, _ in runs}) == 1
    assert {run["state"] for run, _ in runs} == {"finished"}
    seen: dict[int, tuple[int, int]] = {}
    for run, state in runs:
        done = dpmon.run("export", run["id"], env={"XDG_STATE_HOME": str(state)})
        records = [json.loads(line) for line in done.out.splitlines()]
        assert {each["node"] for each in records if each["kind"] == "process"} == {run["node"]}
        steps = [each for each in records if each["kind"] == "step"]
        for rank in {each["rank"] for each in steps}:
            own = [each for each in steps if each["rank"] == rank]
            assert rank not in seen
            seen[rank] = len(own), own[0]["samples"]
    assert seen == counts
    assert sorted(counts) == [0, 1, 2, 3]
    assert {steps for steps, _ in counts.values()} == {STEPS}


def both(
    dpmon: Dpmon, command: Callable[[int, int], Sequence[object]], **env: str
) -> tuple[list[Path], dict[int, tuple[int, int]]]:
    """Run a command on each of two machines at once; it gets a port and the number of the machine.

    Return the state directories of the machines, and what the script counted.
    """

    def run(number: int) -> tuple[list[Path], list[CommandResult]]:
        (port,) = free_ports(1)
        states = [dpmon.state / f"try-{number}" / str(node) for node in range(2)]
        started = [
            dpmon.start("--headless", *command(port, node), env={"XDG_STATE_HOME": str(state), **env})
            for node, state in enumerate(states)
        ]
        outputs = [process.communicate(timeout=2 * LIMIT_S) for process in started]
        return states, [
            CommandResult(process.returncode, *each) for process, each in zip(started, outputs, strict=True)
        ]

    states, ended = run_unless_aborted(run, lambda tried: "".join(each.errors for each in tried[1]))
    assert [each.status for each in ended] == [0, 0], ended
    return states, counted(*(each.text for each in ended))


def test_torchrun_with_the_address_of_the_first_machine(dpmon: Dpmon) -> None:
    how = ("--master-addr", own_address(), "--master-port")
    check(dpmon, *both(dpmon, lambda port, node: [*TORCHRUN, *how, port, "--node-rank", node, TRAIN, STEPS]), "master")


def test_torchrun_with_a_rendezvous_and_pods(dpmon: Dpmon) -> None:
    """A stand-in for kubectl runs the commands here: there is no Kubernetes in which to try the real one."""
    how = ("--rdzv-backend", "c10d", "--rdzv-id", "a job", "--rdzv-endpoint")
    states, counts = both(dpmon, lambda port, node: [*TORCHRUN, *how, f"127.0.0.1:{port}", TRAIN, STEPS])
    check(dpmon, states, counts, "torchelastic")
    kubectl = dpmon.cwd / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\n[ "$1 $2 $4" = "exec -i --" ] || exit 1\n'
        f'export XDG_STATE_HOME={states[0].parent}/"${{3#pod-}}"\nshift 4\nexec "$@"\n'
    )
    kubectl.chmod(0o755)
    pods = ("--via", "kubectl exec -i pod-{} --", "--hosts", "[0-1]")
    path = {"PATH": f"{dpmon.cwd}:{os.environ['PATH']}", "XDG_STATE_HOME": str(dpmon.state / "viewer")}
    done = dpmon.run("attach", *pods, "--headless", env=path)
    assert done.status == 0, done.errors
    ranks = json.loads(dpmon.run("report", "--json", env=path).out)["ranks"]
    assert {rank["rank"]: rank["steps"] for rank in ranks} == {rank: steps for rank, (steps, _) in counts.items()}
    assert {rank["node"] for rank in ranks} == {"0", "1"}


@pytest.mark.skipif(shutil.which("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_on_each_machine(dpmon: Dpmon) -> None:
    options = ("--multi_gpu", "--gpu_ids", "all", "--mixed_precision", "no", "--dynamo_backend", "no")
    where = ("--num_machines", 2, "--num_processes", 4, "--main_process_ip", own_address(), "--main_process_port")
    words = ("accelerate", "launch", *options, *where)
    found = both(
        dpmon,
        lambda port, node: [*words, port, "--machine_rank", node, TRAIN, STEPS],
        HF_HOME=str(dpmon.cwd),
    )
    check(dpmon, *found, "master")


def test_srun_starts_each_rank(dpmon: Dpmon) -> None:
    """Each rank has a run of its own, two on each node. (tests/process/test_machines.py: srun dpmon torchrun.)"""
    with start_slurm(dpmon.state / "slurm") as cluster:
        states = [cluster.state(node) for node in SLURM_NODES]
        command = ["srun", "-N2", "--ntasks-per-node=2", "dpmon", "python", str(TRAIN), str(STEPS)]

        def run(_: int) -> CommandResult:
            for state in states:
                shutil.rmtree(state, ignore_errors=True)
            env = {**cluster.environment, "MASTER_PORT": str(free_ports(1)[0])}
            return dpmon.run(argv=command, env=env, limit=2 * LIMIT_S)

        done = run_unless_aborted(run, lambda ended: ended.errors)
        assert done.status == 0, done.errors
        check(dpmon, states, counted(done.text), "slurm")
        assert sorted(run["node"] for state in states for run in runs_in(dpmon, state)) == [0, 0, 1, 1]


@pytest.mark.skipif(not _HAS_RAY, reason="ray[train] is not installed")
def test_the_workers_of_ray_train_are_traced(dpmon: Dpmon) -> None:
    """A cluster of two simulated nodes, which the script starts: all ranks are in the run of the script."""
    done = dpmon.run("--headless", RAY, STEPS, env={"RAY_USAGE_STATS_ENABLED": "0"}, limit=3 * LIMIT_S)
    assert "all steps are made" in done.text, done.errors
    (run,) = runs_in(dpmon, dpmon.state)
    assert (run["job"]["by"], run["steps"]) == ("master", STEPS)
    records = [json.loads(line) for line in dpmon.run("export").out.splitlines()]
    steps = [each["rank"] for each in records if each["kind"] == "step"]
    assert {rank: steps.count(rank) for rank in range(4)} == dict.fromkeys(range(4), STEPS)
