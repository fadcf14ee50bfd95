"""One job on two machines, by a real ssh between network namespaces and by a real Slurm: one run, true in each figure.

The training goes on, whatever of dpmon is killed. All files of both machines are below the state directory of the test:
by it, whatever a failed test leaves is found and killed.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dpmon.run import proc
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.run_directory import load_info
from support.baseline_comparison import ABORTED
from support.cluster_harness import SLURM_NODES, NamespaceHosts, missing_for_namespaces, start_slurm
from support.run_harness import LIMIT_S, Dpmon, free_ports, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TRAIN = Path(__file__).parent / "scripts" / "two_nodes.py"
TORCHRUN = ("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2")
HOLD = next(at for at, line in enumerate(TRAIN.read_text().splitlines(), 1) if "stands here" in line)
TOGETHER = next(at for at, line in enumerate(TRAIN.read_text().splitlines(), 1) if "all_reduce(" in line)
WIDTHS = 16, 2


@dataclass
class Job:
    """A job that trains on two machines."""

    dpmon: Dpmon
    names: tuple[str, str]
    states: tuple[Path, Path]
    """The state directory of each machine."""
    attach: tuple[str, ...]
    """The options of `dpmon attach` that name the machines."""
    before: tuple[str, ...]
    """The words before a command on the machine of the viewer."""
    env: Mapping[str, str]
    commands: list[subprocess.Popen[bytes]]
    aborted: bool = False
    """Whether torch has ended a rank at its end."""

    def command(self, *words: object) -> dict[str, Any]:
        """Arguments for `Dpmon.run` and `start`: dpmon on the machine of the viewer."""
        return {"argv": [*self.before, *self.dpmon.words(*words)], "env": self.env}

    def json(self, *words: object) -> Any:
        """The JSON that a command about the mirrored run prints."""
        said = wait_for(lambda: self.dpmon.run(**self.command(*words)).out, what=f"the JSON of {words}")
        return json.loads(said)

    def runs(self, node: int) -> list[dict[str, Any]]:
        """The runs of a machine, as it lists them."""
        done = self.dpmon.run("ls", "--json", env={"XDG_STATE_HOME": str(self.states[node])})
        return [json.loads(line) for line in done.out.splitlines()]

    def steps(self, node: int) -> int:
        """The steps so far on a machine, as it knows them."""
        return max((run["steps"] or 0 for run in self.runs(node)), default=0)

    def info(self, node: int) -> dict[str, Any]:
        """run.json of a machine."""
        (run,) = self.runs(node)
        found: dict[str, Any] = json.loads((Path(run["directory"]) / "run.json").read_text())
        return found

    def node_of(self, rank: int) -> str:
        """The name of the machine of a rank, as the script knows it."""
        name = (self.dpmon.cwd / f"rank-{rank}").read_text()
        return self.names[int(name)] if name.isdecimal() else name

    def trains(self) -> None:
        """Wait until both machines have made more steps."""
        wanted = [self.steps(node) + 5 for node in range(2)]
        wait_for(lambda: all(self.steps(node) >= wanted[node] for node in range(2)), what="more steps")

    def end(self) -> dict[int, tuple[int, int, float]]:
        """Let the training end; return the steps, the rows and the median of forward (s), as each rank counted them."""
        (self.dpmon.cwd / "end").touch()
        outputs = [command.communicate(timeout=2 * LIMIT_S) for command in self.commands]
        self.aborted = any(ABORTED.encode() in err for _, err in outputs)
        assert self.aborted or not any(command.returncode for command in self.commands), outputs
        found = re.findall(rb"counted: (\d+) \d+ (\d+) (\d+) ([\d.]+)", b"".join(out for out, _ in outputs))
        return {int(rank): (int(steps), int(rows), float(seconds)) for rank, steps, rows, seconds in found}


@contextmanager
def over_ssh(dpmon: Dpmon) -> Iterator[Job]:
    """Two namespaces with an sshd in each; torchrun is started in both."""
    why = missing_for_namespaces()
    if why is not None:
        pytest.skip(why)
    names, states = ("gpu-1", "gpu-2"), (dpmon.state / "gpu-1", dpmon.state / "gpu-2")
    hosts = NamespaceHosts(dpmon.state / "net", dict(zip(names, states, strict=True)))
    try:
        how = ("--master-addr", hosts.address(0), "--master-port", 29500, "--node-rank")
        commands = [
            dpmon.start(
                argv=[
                    *("ip", "netns", "exec", hosts.namespace(node)),
                    *dpmon.words("--headless", *TORCHRUN, *how, node, TRAIN),
                ],
                env={"XDG_STATE_HOME": str(states[node]), "GLOO_SOCKET_IFNAME": "eth"},
            )
            for node in range(2)
        ]
        before = ("ip", "netns", "exec", hosts.viewer)
        yield Job(dpmon, names, states, ("--hosts", "gpu-[1-2]"), before, hosts.environment, commands)
    finally:
        dpmon.clean_up()
        hosts.close()


@contextmanager
def under_slurm(dpmon: Dpmon) -> Iterator[Job]:
    """Two nodes of a real Slurm; one srun starts dpmon and torchrun on both."""
    with start_slurm(dpmon.state / "slurm") as cluster:
        how = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}")
        words = ["srun", "-N2", "--ntasks-per-node=1", "dpmon", *map(str, [*TORCHRUN, *how, TRAIN])]
        command = dpmon.start(argv=words, env=cluster.environment)
        number = wait_for(lambda: cluster.said("squeue", "--noheader", "--format", "%i"), what="the job")
        states = cluster.state(SLURM_NODES[0]), cluster.state(SLURM_NODES[1])
        yield Job(dpmon, SLURM_NODES, states, ("--slurm", number), (), cluster.environment, [command])
        dpmon.clean_up()


WAYS = {"ssh": over_ssh, "slurm": under_slurm}


@pytest.mark.parametrize("way", WAYS)
def test_a_job_on_two_machines_is_one_run(dpmon: Dpmon, way: str) -> None:
    with WAYS[way](dpmon) as job:
        wait_for(lambda: all(run["job"] for node in range(2) for run in job.runs(node) or [{"job": None}]), LIMIT_S)
        job.trains()
        screen = dpmon.start(**job.command("attach", *job.attach, "--headless"))
        mirror = wait_for(lambda: dpmon.runs()[-1] if dpmon.runs() else None, what="the mirror")
        wait_for(lambda: len(job.json("report", "--json")["ranks"]) == 4, what="all ranks")

        # A rank of the other machine stands still: it is named with its machine and line, and nobody else is.
        (dpmon.cwd / "hold-3").touch()
        nodes = {rank: job.node_of(rank) for rank in range(4)}
        others = f"the other 3 wait for it in all_reduce (two_nodes.py:{TOGETHER})"
        named = f"rank 3 ({nodes[3]}) in hold (two_nodes.py:{HOLD}); {others}"
        wait_for(lambda: job.json("status", "--json")["state"] == "stalled", what="the stall")
        found = wait_for(lambda: complete(job.json("why", "--json")), what="the answers of both machines")
        assert found["now"]["text"] == named
        assert [(rank["rank"], rank["node"], rank["waits"]) for rank in found["now"]["ranks"]] == [
            (3, nodes[3], False), *((rank, nodes[rank], True) for rank in range(3))
        ]  # fmt: skip
        (dpmon.cwd / "hold-3").unlink()
        job.trains()
        wait_for(lambda: job.json("status", "--json")["state"] == "training", what="the end of the stall")

        # The screen, the mirror, and a supervisor are killed: the training goes on, and so do the others.
        os.killpg(screen.pid, signal.SIGKILL)
        supervisor = json.loads((mirror / "run.json").read_text())["supervisor_pid"]
        os.kill(supervisor, signal.SIGKILL)
        job.trains()
        info = job.info(0)
        os.kill(info["supervisor_pid"], signal.SIGKILL)
        wait_for(lambda: not proc.is_alive(info["supervisor_pid"], info["supervisor_started"]))
        screen = dpmon.start(**job.command("attach", *job.attach, "--headless"))
        wait_for(lambda: has_live_supervisor(load_info(mirror)), what="another mirror of the same record")
        job.trains()

        # About one step a second is compared; the report names a straggler from 30 of them on.
        def compared() -> int:
            return min(int(rank["joined_steps"]) for rank in job.json("report", "--json")["ranks"])

        wait_for(lambda: compared() > 32, 3 * LIMIT_S, "enough steps that are compared")
        counts = job.end()
        assert sorted(counts) == [0, 1, 2, 3]
        _, err = screen.communicate(timeout=2 * LIMIT_S)
        assert screen.returncode == 0 or job.aborted, err
        check_figures(job, counts)
        stalls = job.json("why", "--json")["stalls"]
        assert [one["text"] for one in stalls] == [named]
        assert stalls[0]["end_s"] is not None


def complete(why: dict[str, Any]) -> dict[str, Any] | None:
    """Return the answer of `dpmon why`; None if a machine did not answer in time."""
    return why if why["now"] is not None and "without" not in why["now"] else None


def check_figures(job: Job, counts: dict[int, tuple[int, int, float]]) -> None:
    """Check sizes, steps, phases, waits and the straggler, against what each rank and each machine counted."""
    report = job.json("report", "--json")
    ranks = {rank["rank"]: rank for rank in report["ranks"]}
    assert sorted(ranks) == sorted(counts)
    there: dict[int, Any] = {}
    rates = []
    for state in job.states:
        done = job.dpmon.run("report", "--json", env={"XDG_STATE_HOME": str(state)})
        there |= {rank["rank"]: rank for rank in json.loads(done.out)["ranks"]}
        rates.append(json.loads(done.out)["modes"][0]["steps_per_s"])
    assert report["modes"][0]["steps_per_s"] == min(rates), "the ranks of all machines are as fast as the slowest"
    records = [json.loads(line) for line in job.dpmon.run(**job.command("export")).out.splitlines()]
    for rank, (steps, rows, forward_s) in counts.items():
        found = ranks[rank]
        assert found["node"] == job.node_of(rank)
        # Another supervisor may lose the open step; one step with a stall is left out of the metrics.
        assert steps - 1 <= found["calls"] <= steps
        assert steps - 2 <= found["steps"] <= steps
        same = ("calls", "steps", "inputs", "outputs", "median_ms", "forward_ms", "backward_ms")
        assert {name: found[name] for name in same} == {name: there[rank][name] for name in same}
        assert found["inputs"] == f"[{rows}, {WIDTHS[0]}]"
        calls = [each for each in records if each["kind"] == "call" and each["rank"] == rank]
        assert calls
        for call in calls:
            assert [each["shape"] for each in (*call["inputs"], *call["outputs"])] == [[rows, w] for w in WIDTHS]
        assert 0.5 < found["forward_ms"] / (1000 * forward_s) < 2
        # What no machine knows alone. The last rank sleeps 150 ms more in each step, before the backward pass.
        assert there[rank]["exposed_ms"] is there[rank]["wait_ms"] is None
        assert found["exposed_ms"] > 0
        assert rank == 3 or found["wait_ms"] > 50
    assert ranks[3]["wait_ms"] < 10
    assert ranks[3]["slowest"] > 0.8 * ranks[3]["joined_steps"]
    told = [each["text"] for each in report["findings"] if each["kind"] == "straggler"]
    assert len(told) == 1, (report["findings"], report["ranks"])
    assert told[0].startswith(f"Rank 3 ({job.node_of(3)}) delays the others by ")
