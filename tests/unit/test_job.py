"""Which runs on several machines belong together."""

from __future__ import annotations

import json
import platform
from argparse import Namespace
from typing import Any

import pytest

from dpmon.cli.commands import ls
from dpmon.record.record_types import Event
from dpmon.tracer.core.session import job_and_node
from support.history_builders import write_run_directory
from support.record_builders import Training

MASTER = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "world", "job", "node"),
    [
        ({}, None, None, None),
        ({"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "0", "SLURM_NODEID": "1", **MASTER}, 4, ("slurm", "12.0"), 1),
        ({"SLURM_JOB_ID": "12", "TORCHELASTIC_RUN_ID": "abc", "GROUP_RANK": "1"}, 4, ("slurm", "12"), 1),
        # torchrun under srun numbers the machines itself
        ({"SLURM_JOB_ID": "12", "SLURM_NODEID": "0", "GROUP_RANK": "1"}, 4, ("slurm", "12"), 1),
        ({"TORCHELASTIC_RUN_ID": "abc", "GROUP_RANK": "0", **MASTER}, 4, ("torchelastic", "abc"), 0),
        ({"TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", **MASTER}, 4, ("master", "10.0.0.1:29500/4"), 0),
        ({"TORCHELASTIC_RUN_ID": "", **MASTER}, 2, ("master", "10.0.0.1:29500/2"), None),
        (MASTER, None, None, None),  # no rank
        ({"MASTER_ADDR": "10.0.0.1"}, 2, None, None),
        ({"GROUP_RANK": "x", "NODE_RANK": "3"}, 2, None, 3),
    ],
)
def test_the_job_of_a_process_follows_from_its_environment(
    environment: dict[str, str], world: int | None, job: tuple[str, str] | None, node: int | None
) -> None:
    expected = None if job is None else {"by": job[0], "id": job[1]}
    assert job_and_node(environment, world) == {"job": expected, "node": node}


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_localhost_is_another_job_on_another_machine(address: str) -> None:
    found = job_and_node({"MASTER_ADDR": address, "MASTER_PORT": "29500"}, 2)
    assert found["job"] == {"by": "master", "id": f"{platform.node()}:29500/2"}


def listed(capsys: pytest.CaptureFixture[str], *events: dict[str, Any]) -> tuple[Any, Any]:
    rows = [Event("process", {"process": 0, "rank": 0, "t_s": 1.0, **each}) for each in events]
    write_run_directory({0: [*Training().begin(), *rows]})
    assert ls(Namespace(json=True, script=None)) == 0
    run = json.loads(capsys.readouterr().out)
    return run["job"], run["node"]


JOB = {"by": "slurm", "id": "12.0"}


@pytest.mark.parametrize(
    ("events", "found"),
    [
        ([], (None, None)),
        ([{"job": JOB, "node": 1}], (JOB, 1)),
        ([{"job": {**JOB, "id": "11.0"}, "node": 0}, {"job": JOB, "node": 1}, {}], (JOB, 1)),  # the newest that knows
        ([{"job": JOB, "node": None}], (JOB, None)),
        ([{"job": "12", "node": 1}], (None, None)),
        ([{"job": {"by": "slurm", "id": 12}, "node": "1"}], (None, None)),
    ],
)
def test_ls_tells_the_job_that_a_run_is_part_of(
    state: object, capsys: pytest.CaptureFixture[str], events: list[dict[str, Any]], found: tuple[Any, Any]
) -> None:
    assert listed(capsys, *events) == found
