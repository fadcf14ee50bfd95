"""Models that are sharded over ranks: FSDP2 (fully_shard) and tensor parallelism (DTensor), over gloo on the CPU.

They run as without dpmon, also if dp is requested. Their records have the work of each rank on its part of the tensors.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from pickletools import genops
from typing import Any, NamedTuple

import pytest

from dpmon.record.shared_names import MODES
from support.baseline_comparison import Outcome, SideBySide, records_of_kind, run_unless_aborted
from support.run_harness import Dpmon
from support.tracer_harness import TracedScript

if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
    pytest.skip("torch 2.6 and later have fully_shard in torch.distributed.fsdp", allow_module_level=True)

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parent / "scripts" / "sharded_ranks.py"
FORMS = {
    "fsdp": "fully_shard",
    "accumulating": "fully_shard",
    "keeping": "fully_shard",
    "only_parts": None,
    "tensor_parallel": None,
    "distributed_tensors": None,
    "sharded_rows": None,
}
"""Each form of the script, in its order, with `via` of its calls."""
RANKS = (0, 1)
STEPS, EVALUATIONS = 8, 2


class Run(NamedTuple):
    outcome: Outcome
    records: list[dict[str, Any]]

    def of(self, form: str, rank: int, kind: str) -> list[dict[str, Any]]:
        """Return the records of one rank of one form."""
        processes = [one["process"] for one in records_of_kind(self.records, "process") if one["rank"] == rank]
        process = sorted(processes)[list(FORMS).index(form)]
        return [one for one in records_of_kind(self.records, kind) if one["process"] == process]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SideBySide]:
    directory = tmp_path_factory.mktemp("sharded")
    (directory / "work").mkdir()
    dpmon = Dpmon(directory / "state", directory / "work")
    yield SideBySide(dpmon)
    dpmon.clean_up()


@pytest.fixture(scope="module")
def alone(place: SideBySide) -> Outcome:
    outcome = run_unless_aborted(lambda _: place.alone(SCRIPT), lambda ended: ended.stderr.decode())
    assert outcome.status == 0, outcome.stderr
    return outcome


@pytest.fixture(scope="module")
def run(place: SideBySide) -> Run:
    outcome = run_unless_aborted(
        lambda _: place.under(SCRIPT, options=("--mode", "dp")), lambda ended: ended.stderr.decode()
    )
    assert outcome.status == 0, outcome.stderr
    return Run(outcome, place.dpmon.records())


def own(outcome: Outcome, form: str, rank: int) -> dict[str, Any]:
    """Return the counts of the rank itself."""
    found: dict[str, Any] = json.loads(outcome.files[f"{form}-{rank}.json"])
    return found


def test_losses_weights_and_checkpoints_are_those_of_the_script_alone(alone: Outcome, run: Run) -> None:
    assert sorted(run.outcome.files) == sorted(alone.files)
    assert (run.outcome.status, run.outcome.stdout, run.outcome.stderr) == (0, alone.stdout, alone.stderr)
    for name, content in alone.files.items():
        assert comparable(name, run.outcome.files[name]) == comparable(name, content), name
    assert all(own(alone, form, rank)["loads_again"] for form in FORMS for rank in RANKS)


def comparable(name: str, content: bytes) -> Any:
    """Return a file without hashes of meshes, which torch.save writes and which depend on addresses."""
    if not name.endswith(".pt"):
        return content
    with zipfile.ZipFile(io.BytesIO(content)) as parts:
        found: dict[str, Any] = {part: parts.read(part) for part in parts.namelist()}
    for part in list(found):
        if part.endswith("data.pkl"):
            found[part] = [(code.name, code.name == "LONG1" or value) for code, value, _ in genops(found[part])]
        elif part.endswith("serialization_id"):  # torch's own digest of the other files
            del found[part]
    return found


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_each_call_has_the_sizes_on_its_rank(run: Run, form: str, rank: int) -> None:
    calls = run.of(form, rank, "call")
    assert {(call["root"], call["via"], call["mode"], call["virtual"]) for call in calls} == {
        ("Net", FORMS[form], "single", False)
    }
    found = [[call["step"], call["grad"], sizes(call["inputs"]), sizes(call["outputs"])] for call in calls]
    counted = own(run.outcome, form, rank)["calls"]  # the script numbers the evaluation after the training
    assert found == [[step if step <= STEPS else step - STEPS, *rest] for step, *rest in counted]
    assert [call["call"] for call in calls] == list(range(1, len(calls) + 1))


def sizes(tensors: list[dict[str, Any]]) -> list[Any]:
    """Local and global shape of the only tensor, as the script has them."""
    (tensor,) = tensors
    assert tensor["bytes"] == math.prod(tensor["shape"]) * 4
    return [tensor["shape"], tensor.get("global_shape")]


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_each_step_is_one_of_the_loop(run: Run, form: str, rank: int) -> None:
    steps = run.of(form, rank, "step")
    assert [step["step"] for step in steps] == [*range(1, STEPS + 1), *range(1, EVALUATIONS + 1)]
    training = [{"forward", "backward", "optimizer"} <= set(step["phases"]) for step in steps]
    assert training == [True] * STEPS + [False] * EVALUATIONS
    counted = own(run.outcome, form, rank)["calls"]
    for step in steps:
        rows = [given[0][0] for number, _, given, _ in counted if number == step["step"]]
        assert step["samples"] == (sum(rows) if "backward" in step["phases"] else max(rows))


@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("form", FORMS)
def test_memory_is_that_of_the_shards(run: Run, form: str, rank: int) -> None:
    counted = own(run.outcome, form, rank)["bytes"]
    records = run.of(form, rank, "memory")
    assert records
    for record in records:
        (device,) = record["devices"]
        assert device["model_bytes"] == counted["model"]
        assert device["gradients_bytes"] in counted["gradients"]
    assert device["optimizer_bytes"] == counted["optimizer"]


def test_dp_is_refused_for_a_model_that_is_sharded(run: Run) -> None:
    modes = records_of_kind(run.records, "mode")
    warnings = [warning["text"] for warning in records_of_kind(run.records, "warning")]
    assert {(mode["root"], mode["mode"], mode["virtual"]) for mode in modes} == {("Net", "single", False)}
    reason = "its parameters are sharded over the ranks, which must all run the same calls"
    assert {mode["refused"] for mode in modes} == {reason}
    assert warnings == [f"dp was requested, but Net runs on one device: {reason}"] * len(FORMS) * len(RANKS)


UNSHARDED = """
import json, sys, tempfile, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

class Net(nn.Linear):
    pass

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)
model = fully_shard(Net(4, 4), mesh=init_device_mesh("cpu", (1,)))
forms = []
for _ in sys.stdin:
    forms.append(type(model.weight).__name__)
    with torch.no_grad():
        print(model(torch.ones(2, 4)).sum().item(), flush=True)
print(json.dumps(forms))
dist.destroy_process_group()
"""


def test_the_toggle_is_refused_while_the_weights_are_gathered(tmp_path: Path) -> None:
    """After a forward without a backward, the parameters are ordinary tensors."""
    script = TracedScript(tmp_path, UNSHARDED)
    said = []
    for _ in range(3):
        script.go_on()
        said.append(script.line())
    ring = script.ring()
    serial = ring.request(MODES.index("dp"))
    for _ in range(3):
        script.go_on()
        said.append(script.line())
    assert ring.acknowledged() == (serial, MODES.index("single"))
    ring.close()
    run = script.end()
    assert run.printed == ["DTensor"] + ["Parameter"] * 5
    assert len(set(said)) == 1
    assert [(event.data["requested_by"], event.data["mode"]) for event in run.events("mode")] == [
        ("start", "single"),
        ("user", "single"),
    ]
    assert "sharded over the ranks" in run.events("mode")[1].data["refused"]
    assert {(call.root, call.via, call.mode) for call in run.calls()} == {("Net", "fully_shard", "single")}
    assert run.complaints == []
