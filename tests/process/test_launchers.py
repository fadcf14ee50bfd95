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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import slurm as slurm_here
from running import LIMIT_S, Dpmon
from slurm import NODES, Slurm, free_ports, slurm

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


@pytest.mark.parametrize("rendezvous", ["master", "c10d"])
def test_torchrun_on_each_machine(dpmon: Dpmon, rendezvous: str) -> None:
    (port,), address = free_ports(1), own_address()
    if rendezvous == "master":
        how = [("--node-rank", node, "--master-addr", address, "--master-port", port) for node in range(2)]
    else:
        how = 2 * [("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a job")]
    counts = both(dpmon, *([*TORCHRUN, *each, TRAIN, STEPS] for each in how))
    check(dpmon, [dpmon.state / "0", dpmon.state / "1"], counts, {"c10d": "torchelastic"}.get(rendezvous, rendezvous))


def test_kubectl(dpmon: Dpmon) -> None:
    """A stand-in for kubectl, which runs the command here: there is no Kubernetes in which to try the real one."""
    (port,) = free_ports(1)
    how = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    counts = both(dpmon, *(2 * [[*TORCHRUN, *how, TRAIN, STEPS]]))
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
    report = json.loads(dpmon.run("report", "--json", env=path).out)
    assert {rank["rank"]: rank["steps"] for rank in report["ranks"]} == {
        rank: steps for rank, (steps, _) in counts.items()
    }
    assert [rank["node"] for rank in sorted(report["ranks"], key=lambda rank: rank["rank"])] in (
        ["0", "0", "1", "1"],
        ["1", "1", "0", "0"],
    )


@pytest.mark.skipif(shutil.which("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_on_each_machine(dpmon: Dpmon) -> None:
    (port,), address = free_ports(1), own_address()
    options = ("--multi_gpu", "--gpu_ids", "all", "--mixed_precision", "no", "--dynamo_backend", "no")
    where = ("--num_machines", 2, "--num_processes", 4, "--main_process_ip", address, "--main_process_port", port)
    commands = (["accelerate", "launch", *options, *where, "--machine_rank", node, TRAIN, STEPS] for node in range(2))
    check(dpmon, [dpmon.state / "0", dpmon.state / "1"], both(dpmon, *commands, HF_HOME=str(dpmon.cwd)), "master")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    if slurm_here.MISSING is not None:
        pytest.skip(f"{slurm_here.MISSING} of Slurm is not installed")
    with slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_slurm(dpmon: Dpmon, cluster: Slurm, launcher: str) -> None:
    """One run on each node (srun dpmon torchrun), or a run of each rank (srun dpmon python)."""
    (port,) = free_ports(1)
    tasks, words = {
        "torchrun": (1, [*TORCHRUN, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]),
        "srun": (2, []),
    }[launcher]
    command = ["srun", "-N2", f"--ntasks-per-node={tasks}", "dpmon", *map(str, [*words, TRAIN, STEPS])]
    for node in NODES:
        shutil.rmtree(cluster.state(node), ignore_errors=True)
    done = dpmon.run(argv=command, env={**cluster.environment, "MASTER_PORT": str(port)}, limit=2 * LIMIT_S)
    assert done.status == 0, done.errors
    check(dpmon, [cluster.state(node) for node in NODES], counted(done.text), "slurm")
    assert [len(runs_in(dpmon, cluster.state(node))) for node in NODES] == [tasks, tasks]
    assert sorted(run["node"] for node in NODES for run in runs_in(dpmon, cluster.state(node))) == sorted(
        [0, 1] * tasks
    )


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
