"""All forms of data parallelism: the function, primitives called by the script, and subclasses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dpmon.record.jsonl import as_json
from dpmon.record.record_types import Call
from support.tracer_harness import DP, SINGLE, SteeredScript, TracedRun, TracedScript, run_traced

PRIMITIVES = ["scatter", "replicate", "parallel_apply", "gather"]


@pytest.fixture(scope="module")
def steered(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRun, list[Any], list[tuple[int, int]]]:
    """Run each form for two steps at first, two after a request for single, and two after a request for dp."""
    forms = SteeredScript(tmp_path_factory.mktemp("forms"), "forms")
    said = forms.step(2)
    answers = []
    for mode in (SINGLE, DP):
        forms.ask(mode)
        said += forms.step(2)
        answers.append(forms.answer())
    return forms.script.end(), said, answers


def rows(call: Call) -> list[int]:
    return [replica.inputs[0].shape[0] for replica in call.replicas if replica.inputs]


def first(run: TracedRun, root: str, via: str) -> list[Call]:
    """Return a form's calls, one per step; several models of one class are numbered."""
    found = [call for call in run.calls() if call.root.split()[0] == root and call.via == via]
    assert [call.step for call in found] == list(range(1, 7))
    return found


def test_each_form_computes_the_same_as_one_device(steered: Any) -> None:
    run, said, _ = steered
    assert (run.status, run.err, run.complaints) == (0, "", [])
    for same, right, shapes in said:
        assert all(same), same  # the names that are imported pickle, and have their source and signature
        assert all(right), right
        assert shapes.pop("objects") == [15, 2]
        assert set(map(tuple, shapes.values())) == {(30, 2)}


@pytest.mark.parametrize(
    ("root", "via", "shares", "toggles"),
    [
        ("Functional", "data_parallel", [10, 10, 10], True),
        ("ByHand", "data_parallel", [10, 10, 10], False),
        ("Inner", "data_parallel", [15, 15], True),
        ("HandInner", "data_parallel", [15, 15], False),
        ("affine", "data_parallel", [15, 15], False),
        ("Linear", "Uneven", [4, 26], True),
    ],
)
def test_calls_of_each_form_have_all_sizes_and_phases(
    steered: Any, root: str, via: str, shares: list[int], toggles: bool
) -> None:
    run, _, _ = steered
    calls = first(run, root, via)
    assert [c.mode for c in calls] == (["dp"] * 2 + ["single"] * 2 + ["dp"] * 2 if toggles else ["dp"] * 6)
    for call in calls:
        assert [(size.path, size.shape) for size in call.inputs or ()] == [("0", (30, 6))]
        assert [(size.path, size.shape) for size in call.outputs or ()] == [("", (30, 2))]
        if call.mode == "single":
            assert (call.virtual, rows(call), len(call.devices)) == (False, [30], 1)
            continue
        assert (call.virtual, rows(call), list(call.phases)) == (True, shares, PRIMITIVES)
        assert call.devices == tuple(f"cpu:{i}" for i in range(len(shares)))
        assert [r.outputs[0].shape for r in call.replicas if r.outputs] == [(share, 2) for share in shares]
        assert all(call.phases[name].host_ns > 0 for name in PRIMITIVES)
        ends = [phase.offset_ns + phase.host_ns for phase in call.phases.values()]
        assert max(ends) <= call.wall_ns
        assert set(call.absent) == {"device_ms"}


def test_a_model_split_inside_its_forward_is_recorded_by_the_inner_call(steered: Any) -> None:
    run, _, _ = steered
    assert run.calls("Inside") == run.calls("Inside 2") == []


def test_phases_that_a_subclass_bypasses_are_absent_with_a_reason(steered: Any) -> None:
    run, _, _ = steered
    dealt = first(run, "OverGraphs", "Listed")[0]
    assert list(dealt.phases) == PRIMITIVES[1:]
    assert "its own forward, scatter" in dealt.absent["scatter"]
    assert [[size.path for size in r.inputs or ()] for r in dealt.replicas] == [
        ["0.0.x", "0.1.x", "0.2.x"],
        ["0.0.x", "0.1.x"],
    ]
    assert len(dealt.inputs or ()) == 5
    bypassing = first(run, "Linear", "Bypassing")[0]
    assert list(bypassing.phases) == ["scatter", "gather"]
    assert bypassing.replicas == ()
    assert {"replicate", "parallel_apply", "replicas"} <= set(bypassing.absent)
    cached = first(run, "Linear", "Cached")[0]
    assert (list(cached.phases), rows(cached)) == (["scatter", "parallel_apply", "gather"], [15, 15])
    assert "replicate" in cached.absent


def test_without_a_gather_the_size_of_the_output_is_unknown(steered: Any) -> None:
    run, _, _ = steered
    for call in first(run, "Lone", "data_parallel"):
        assert (list(call.phases), rows(call), call.outputs) == (PRIMITIVES[:3], [15, 15], None)
        assert "did not gather" in call.absent["gather"]
        assert as_json(call)["outputs"] is None
        assert "did not gather" in as_json(call)["absent"]["outputs"]


def test_the_toggle_works_or_is_refused_with_a_reason(steered: Any) -> None:
    run, _, answers = steered
    assert [serial for serial, _ in answers] == [1, 2]
    asked = [e.data for e in run.events("mode") if e.data["requested_by"] == "user"]
    refused = {e["root"] for e in asked if e["refused"]}
    assert refused == {"ByHand", "HandInner", "Lone", "affine", "Inside", "Inside 2"}
    for event in asked:
        if event["root"].split()[0] == "Inside":  # the model itself is not split
            assert event["mode"] == "single"
        elif event["refused"]:
            assert event["mode"] == "dp"
            assert "composes" in event["refused"]


def test_time_of_hand_made_calls_is_forward(steered: Any) -> None:
    run, _, _ = steered
    assert run.steps()
    for step in run.steps():
        inside = [call for call in run.calls() if call.step == step.step]
        assert len(inside) == 10
        assert {"forward", "backward", "optimizer"} <= set(step.phases)
        assert step.samples == 30
        primitives_ns = sum(phase.host_ns for call in inside for phase in call.phases.values())
        assert 0 < primitives_ns <= step.phases["forward"]


INSIDE = """
import torch
from torch.nn.parallel import gather, parallel_apply, replicate, scatter

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)

    def forward(self, x):
        return gather(parallel_apply(replicate(self.inner, [0, 1]), scatter((x,), [0, 1])), 0)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(torch.ones(40, 4), batch_size=10):
    model(x).sum().backward()
    optimizer.step()
"""


def test_a_step_has_the_mode_of_what_is_composed_inside_its_model(tmp_path: Path) -> None:
    run = run_traced(tmp_path, INSIDE)
    assert (run.status, run.complaints) == (0, [])
    assert [call.mode for call in run.calls()] == ["dp"] * 4
    assert [step.mode for step in run.steps()] == ["dp"] * 4


SHORT = """
import torch
from torch.nn.parallel import gather, parallel_apply, replicate, scatter
model = torch.nn.Linear(4, 1)
for rows in (4, 4, 1):
    given = scatter((torch.ones(rows, 4),), [0, 1])
    gather(parallel_apply(replicate(model, [0, 1])[:len(given)], given), 0)
"""


def test_a_short_batch_leaves_a_device_idle(tmp_path: Path) -> None:
    run = run_traced(tmp_path, SHORT)
    assert [(call.devices, rows(call)) for call in run.calls()] == [
        (("cpu:0", "cpu:1"), [2, 2]),
        (("cpu:0", "cpu:1"), [2, 2]),
        (("cpu:0", "cpu:1"), [1]),
    ]
    assert len(run.events("mode")) == 1


NAMED = """
import contextlib
import torch
from torch.nn.parallel import parallel_apply
model = torch.nn.Linear(4, 1)
named = [{"input": torch.ones(3, 4, device="meta")}] * 2
for given in ((named,), ([{}, {}],), ([{}, {}], [0, 1])):
    with contextlib.suppress(Exception):
        parallel_apply([model] * 2, [()] * 2, *given)
"""


def test_devices_of_a_composed_call_are_not_invented(tmp_path: Path) -> None:
    run = run_traced(tmp_path, NAMED, mode="script")
    assert run.complaints == []
    assert [call.devices for call in run.calls()] == [("meta",) * 2, ("unknown",) * 2, ("cuda:0", "cuda:1")]
    assert "its device is unknown" in run.calls()[1].absent["device_ms"]


BROKEN = """
import torch
from dpmon.tracer.calls.traced_modules import TracedModules
from torch import nn
from torch.nn.parallel import data_parallel
def broken(*_):
    raise KeyError("broken")
TracedModules.make_for_stand_in = broken
model = nn.Linear(4, 2)
print([list(data_parallel(model, torch.ones(6, 4), [0, 1]).shape) for _ in range(5)])
"""


def test_the_functional_form_goes_on_after_the_tracer_gave_up(tmp_path: Path) -> None:
    run = run_traced(tmp_path, BROKEN)
    assert (run.status, run.out) == (0, f"{[[6, 2]] * 5}\n"), run.err
    assert any("gave up" in text for text in run.complaints)


AS_WRITTEN = """
import torch
from torch import nn
from torch.nn.parallel import data_parallel, gather, parallel_apply, replicate, scatter
model = nn.Linear(4, 2)
x = torch.ones(6, 4)
found = []
for attempt in (lambda: data_parallel(model, x, [0, 1]), lambda: replicate(model, [0, 1]), lambda: scatter(x, [0, 1]),
                lambda: parallel_apply([model, model], [x, x]), lambda: gather([x, x], 0)):
    try:
        attempt()
        found.append("ran")
    except Exception as error:
        found.append([type(error).__name__, str(error).splitlines()[0]])
print(found)
"""

WRONG = """
import os
import torch
from torch import nn
from torch.nn.parallel import data_parallel, parallel_apply, replicate, scatter
class Fails(nn.Linear):
    def forward(self, x):
        raise KeyError("mine")
model = Fails(4, 2)
x = torch.ones(6, 4)
for attempt in (lambda: data_parallel(model, x, [0, 1]),
                lambda: parallel_apply(replicate(model, [0, 1]), scatter(x, [0, 1])), lambda: data_parallel(),
                lambda: scatter()):
    try:
        attempt()
    except (KeyError, TypeError) as error:
        # A directory above torch or above this script may be named dpmon.
        told = str(error).replace(os.path.dirname(torch.__file__), "").replace(os.path.dirname(__file__), "")
        print(type(error).__name__, "dpmon" in told)
print(list(data_parallel(nn.Linear(4, 2), x).shape))
"""


def test_with_mode_script_forms_fail_as_without_dpmon(tmp_path: Path) -> None:
    scripts = [TracedScript(tmp_path, AS_WRITTEN, mode="script"), TracedScript(tmp_path, AS_WRITTEN, run=False)]
    under, alone = [script.end() for script in scripts]
    assert (under.status, under.out, under.err) == (0, alone.out, alone.err)
    assert "ran" not in alone.out


def test_the_scripts_own_errors_are_its_own(tmp_path: Path) -> None:
    run = run_traced(tmp_path, WRONG)
    assert run.out == "KeyError False\nKeyError False\nTypeError False\nTypeError False\n[6, 2]\n", run.err
    assert [(call.root, call.failed) for call in run.calls()] == [("Fails", True), ("Fails", True), ("Linear", False)]
    assert run.complaints == []


CONTAINERS = """
import collections, dataclasses
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
Pair = collections.namedtuple("Pair", "left right")
@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    note: str = "n"
    inner: object = None
class Output(collections.OrderedDict):
    pass
class Net(nn.Linear):
    def forward(self, what, *args, **kwargs):
        return super().forward(torch.ones(4, 3)) if isinstance(what, str) and not what else what
net = Net(3, 2)
x = torch.ones(4, 3)
for value in (x, (x, x), [x], {"a": x, "b": {"c": x}}, Pair(x, x), Batch(x, inner=Pair(x, None)),
              Output(loss=x.sum(), logits=x), collections.UserDict(k=x), None, 3.5, [(x, {"d": [x]}), None],
              pack_padded_sequence(torch.ones(2, 4, 3), [4, 2], batch_first=True), [x] * 64, [x] * 3000,
              list(range(100000))):
    net(value)
net("", x, None, 3, flag=True, mask=x)
growing = []
for _ in range(3):
    growing.append(x)
    net(growing)
"""
CONTAINED: list[list[str] | str] = [
    ["0"], ["0.0", "0.1"], ["0.0"], ["0.a", "0.b.c"], ["0.left", "0.right"], ["0.x", "0.inner.left"],
    ["0.loss", "0.logits"], ["0.k"], [], [], ["0.0.0", "0.0.1.d.0"], ["0.data", "0.batch_sizes"],
    [f"0.{i}" for i in range(64)], "bounded", "cut off", ["1", "mask"], ["0.0"], ["0.0", "0.1"],
    ["0.0", "0.1", "0.2"],
]  # fmt: skip


def test_containers_of_every_kind_by_path(tmp_path: Path) -> None:
    run = run_traced(tmp_path, CONTAINERS)
    assert (run.status, run.err, run.complaints) == (0, "", [])
    for call, expected in zip(run.calls(), CONTAINED, strict=True):
        record = as_json(call)
        paths = [size["path"] for size in record["inputs"]]
        if isinstance(expected, list):
            assert paths == expected
            assert "inputs" not in record["absent"]
        else:
            assert len(paths) == (64 if expected == "bounded" else 0)
            assert "cut off" in record["absent"]["inputs"]
        if isinstance(expected, list) and "mask" not in expected:
            assert [size["path"] for size in record["outputs"]] == [
                path.removeprefix("0").lstrip(".") for path in paths
            ]


EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_the_examples(tmp_path: Path) -> None:
    by_hand = TracedScript(tmp_path, (EXAMPLES / "primitives.py").read_text(), "--devices", 3, "--steps", 4)
    nested = TracedScript(tmp_path, (EXAMPLES / "nested.py").read_text(), "--steps", 4)
    run = by_hand.end()
    assert (run.status, run.err, run.complaints) == (0, "", [])
    assert [(c.step, c.root, c.via, rows(c)) for c in run.calls()] == [
        (step, "Model", "data_parallel", [10, 10, 10]) for step in range(1, 5)
    ]
    run = nested.end()
    assert (run.status, run.err, run.complaints) == (0, "", [])
    assert run.out.splitlines()[0] == "2 classes"
    assert [(c.step, c.root, c.via, rows(c), list(c.phases)) for c in run.calls()] == [
        call
        for step in range(1, 5)
        for call in (
            (step, "Linear", "DataParallel", [15, 15], PRIMITIVES),
            (step, "Head", "Attributes", [15, 15], PRIMITIVES),
        )
    ]
