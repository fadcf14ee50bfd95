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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from running import LIMIT_S, Dpmon
from slurm import NODES, free_ports, slurm

pytestmark = pytest.mark.slow

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


def both(dpmon: Dpmon, *commands: Sequence[object], **env: str) -> dict[int, tuple[int, int]]:
    """Run a command on each of two machines at once; return what the script counted."""
    started = [
        dpmon.start("--headless", *command, env={"XDG_STATE_HOME": str(dpmon.state / str(at)), **env})
        for at, command in enumerate(commands)
    ]
    outputs = [process.communicate(timeout=2 * LIMIT_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], outputs
    return counted(*(out.decode() for out, _ in outputs))


def test_torchrun_with_the_address_of_the_first_machine(dpmon: Dpmon) -> None:
    (port,), address = free_ports(1), own_address()
    how = ("--master-addr", address, "--master-port", port, "--node-rank")
    counts = both(dpmon, *([*TORCHRUN, *how, node, TRAIN, STEPS] for node in range(2)))
    check(dpmon, [dpmon.state / "0", dpmon.state / "1"], counts, "master")


def test_torchrun_with_a_rendezvous_and_pods(dpmon: Dpmon) -> None:
    """A stand-in for kubectl runs the commands here: there is no Kubernetes in which to try the real one."""
    (port,) = free_ports(1)
    how = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a job")
    counts = both(dpmon, *(2 * [[*TORCHRUN, *how, TRAIN, STEPS]]))
    check(dpmon, [dpmon.state / "0", dpmon.state / "1"], counts, "torchelastic")
    kubectl = dpmon.cwd / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\n[ "$1 $2 $4" = "exec -i --" ] || exit 1\n'
        f'export XDG_STATE_HOME={dpmon.state}/"${{3#pod-}}"\nshift 4\nexec "$@"\n'
    )
    kubectl.chmod(0o755)
    pods = ("--via", "kubectl exec -i pod-{} --", "--hosts", "[0-1]")
    path = {"PATH": f"{dpmon.cwd}:{os.environ['PATH']}", "XDG_STATE_HOME": str(dpmon.state / "viewer")}
    done = dpmon.run("attach", *pods, "--headless", env=path)
    assert done.status == 0, done.errors
    ranks = json.loads(dpmon.run("report", "--json", env=path).out)["ranks"]
    assert {rank["rank"]: rank["steps"] for rank in ranks} == {rank: steps for rank, (steps, _) in counts.items()}
    assert {rank["node"] for rank in ranks if rank["rank"] < 2} | {rank["node"] for rank in ranks} == {"0", "1"}


@pytest.mark.skipif(shutil.which("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_on_each_machine(dpmon: Dpmon) -> None:
    (port,), address = free_ports(1), own_address()
    options = ("--multi_gpu", "--gpu_ids", "all", "--mixed_precision", "no", "--dynamo_backend", "no")
    where = ("--num_machines", 2, "--num_processes", 4, "--main_process_ip", address, "--main_process_port", port)
    commands = (["accelerate", "launch", *options, *where, "--machine_rank", node, TRAIN, STEPS] for node in range(2))
    check(dpmon, [dpmon.state / "0", dpmon.state / "1"], both(dpmon, *commands, HF_HOME=str(dpmon.cwd)), "master")


def test_srun_starts_each_rank(dpmon: Dpmon) -> None:
    """Each rank has a run of its own, two on each node. (tests/process/test_machines.py: srun dpmon torchrun.)"""
    (port,) = free_ports(1)
    with slurm(dpmon.state / "slurm") as cluster:
        command = ["srun", "-N2", "--ntasks-per-node=2", "dpmon", "python", str(TRAIN), str(STEPS)]
        done = dpmon.run(argv=command, env={**cluster.environment, "MASTER_PORT": str(port)}, limit=2 * LIMIT_S)
        assert done.status == 0, done.errors
        check(dpmon, [cluster.state(node) for node in NODES], counted(done.text), "slurm")
        assert sorted(run["node"] for node in NODES for run in runs_in(dpmon, cluster.state(node))) == [0, 0, 1, 1]


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
