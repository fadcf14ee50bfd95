"""Calls over virtual replicas on the fast path have the same record and results as on the slow path."""

from __future__ import annotations

from pathlib import Path

import pytest
from tracing import Script, Traced, text_of, traced


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Traced]:
    place = tmp_path_factory.mktemp("lanes")
    scripts = {
        (form, run): Script(place, text_of("lanes"), form, run=run, **({"replicas": 3} if run else {}))
        for form in ("wrapped", "bare")
        for run in (True, False)
    }
    return {key: script.end() for key, script in scripts.items()}


@pytest.fixture(scope="module", params=["wrapped", "bare"])
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_script_sees_nothing_of_it(runs: dict[tuple[str, bool], Traced], form: str) -> None:
    run, alone = runs[form, True].printed, runs[form, False].printed
    assert run.pop("asked", None) in (None, [3, 3, 3])  # its own method, called in each step
    alone.pop("asked", None)
    assert run["lines of ours"] == 0
    assert run.pop("interrupted", []) == []
    alone.pop("interrupted", None)
    assert run == alone
    failed, refused = "was not possible for call", "Changing runs on one device"
    assert [c for c in runs[form, True].complaints if failed not in c and refused not in c] == []


@pytest.mark.parametrize("name", ["Usual", "Hooked", "Again", "Stopped"])
def test_every_call_has_its_phases_and_replicas(runs: dict[tuple[str, bool], Traced], form: str, name: str) -> None:
    """Only the first call takes the slow path; the records of all calls are alike."""
    calls = [call for call in runs[form, True].calls(name) if not call.failed and call.phases]
    assert len(calls) >= 7
    for call in calls:
        assert (call.mode, call.virtual) == ("dp", True)
        assert set(call.phases) == {"scatter", "replicate", "parallel_apply", "gather"}
        ends = [call.phases[phase].offset_ns + call.phases[phase].host_ns for phase in call.phases]
        assert ends == sorted(ends)
        assert ends[-1] <= call.wall_ns
        rows = [replica.inputs[0].shape[0] for replica in call.replicas if replica.inputs]
        assert sum(rows) == call.rows
        assert len(rows) == len(call.replicas) <= 3
        assert [replica.outputs[0].shape for replica in call.replicas if replica.outputs] == [(n, 2) for n in rows]
        apply = call.phases["parallel_apply"]
        for replica in call.replicas:
            assert apply.offset_ns <= replica.offset_ns
            assert replica.offset_ns + replica.host_ns <= apply.offset_ns + apply.host_ns


def test_each_call_has_its_own_shapes_and_flags(runs: dict[tuple[str, bool], Traced], form: str) -> None:
    calls = runs[form, True].calls("Usual")
    assert [call.rows for call in calls] == [8] * 6 + [5] * 3 + [1] * 3 + [8] * 3 + [4]
    assert [len(call.replicas) for call in calls] == [3] * 6 + [3] * 3 + [1] * 3 + [3] * 3 + [2]
    assert [(call.training, call.grad) for call in calls] == [(True, True)] * 15 + [(False, False)]


def test_a_call_that_fails_is_recorded_once(runs: dict[tuple[str, bool], Traced], form: str) -> None:
    calls = runs[form, True].calls("Failing")
    assert [call.failed for call in calls] == [False] * 4 + [True] + [False] * 3
    assert [call.mode for call in calls] == ["dp"] * 4 + ["single"] + ["dp"] * 3
    numbers = [call.call for call in runs[form, True].calls()]
    assert numbers == sorted(set(numbers))


def test_a_call_that_is_interrupted_is_a_failed_one(runs: dict[tuple[str, bool], Traced]) -> None:
    (call,) = [call for call in runs["wrapped", True].calls("Stopped") if call.failed]
    assert set(call.phases) == {"scatter", "replicate", "parallel_apply"}
    assert len(call.replicas) == 3
    assert all(replica.inputs and replica.outputs for replica in call.replicas)


def test_a_model_whose_meaning_changes_under_dp_runs_on_one_device(runs: dict[tuple[str, bool], Traced]) -> None:
    modes = [call.mode for call in runs["bare", True].calls("Changing")]
    assert modes == ["dp"] * 3 + ["single"] * 3


LONE = """\
import json, sys, traceback, torch
class Lone(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.part = torch.nn.Linear(4, 2)
    def forward(self, x):
        if raising:
            raise raising.pop()
        return self.part(x)
raising = []
model = Lone()
model = torch.nn.DataParallel(model) if sys.argv[1] == "wrapped" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, x in enumerate(torch.utils.data.DataLoader(torch.randn(20, 4), batch_size=1)):
    raising = [KeyboardInterrupt()] if number == 10 else []
    try:
        model(x).sum().backward()
    except KeyboardInterrupt as error:
        print(json.dumps([frame.filename for frame in traceback.extract_tb(error.__traceback__)]))
        continue
    optimizer.step()
"""


def test_after_a_lone_replica_was_interrupted_every_call_is_recorded(tmp_path: Path, form: str) -> None:
    """A batch of one row has one replica, which runs on the training thread."""
    run = traced(tmp_path, LONE, form, replicas=2)
    assert [call.step for call in run.calls("Lone")] == list(range(1, 21))
    assert [call.step for call in run.calls("Lone") if call.failed] == [11]
    assert any(name.endswith(("parallel_apply.py", "data_parallel.py")) for name in run.printed)
    assert [name for name in run.printed if "dpmon" in name.split("/")[-3:]] == []


INTERRUPTED = """\
import json, sys, traceback, torch
model = torch.nn.Linear(4, 2)
model = torch.nn.DataParallel(model) if sys.argv[1] == "wrapped" else model
cat = torch.cat
def interrupted(*args, **kwargs):
    raise KeyboardInterrupt
for number, x in enumerate(torch.utils.data.DataLoader(torch.randn(40, 4), batch_size=2)):
    torch.cat = interrupted if number == 10 else cat
    try:
        model(x).sum().backward()
    except KeyboardInterrupt as error:
        print(json.dumps([frame.filename for frame in traceback.extract_tb(error.__traceback__)]))
"""


def test_an_interrupt_in_gather_has_no_frame_of_a_timed_primitive(tmp_path: Path, form: str) -> None:
    run = traced(tmp_path, INTERRUPTED, form, replicas=2)
    assert any(name.endswith("scatter_gather.py") for name in run.printed), "it was in gather"
    assert [name for name in run.printed if name.endswith("lane.py")] == []
