"""Inputs and results of virtual replicas are the same as on GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from support.tracer_harness import TracedRun, TracedScript, traced_script_text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TracedRun]:
    """The checks over two replicas, then without dpmon, which loads the files of the first."""
    place = tmp_path_factory.mktemp("semantics")
    path = place / "model.pt"
    return {
        name: TracedScript(place, traced_script_text("semantics"), path, run=name == "dp").end()
        for name in ("dp", "alone")
    }


@pytest.fixture(scope="module")
def dp(runs: dict[str, TracedRun]) -> Any:
    return runs["dp"].printed


@pytest.fixture(scope="module")
def on_its_own(runs: dict[str, TracedRun]) -> Any:
    return runs["alone"].printed


def test_results_of_any_kind(dp: Any, on_its_own: Any) -> None:
    assert dp["results"] == on_its_own["results"]
    assert dp["results"]["named"] == ["Pair", [6, 2], {"deep": ["tuple", [6, 2]]}]
    assert dp["results"]["none"] is None


def test_arguments_of_any_kind(dp: Any) -> None:
    half = [3, 2]
    one = [[half], {"mask": half, "flag": True, "name": "n", "nothing": None}]
    nested = [[{"a": half, "b": ["list", half, ["tuple", half, 1]]}], {}]
    assert dp["arguments"] == {
        "keywords": [one, one],
        "only keywords": [[[], {"mask": half}]] * 2,
        "none": [[[None, half, None], {}]] * 2,
        "plain": [[[half, 3, "text", 0.5], {}]] * 2,
        "nested": [nested, nested],
        "nothing": [[[], {}]],  # inputs that cannot be split run once
        "same object": [True, True],
    }


def test_scalars_become_a_vector_and_torch_says_so(dp: Any, on_its_own: Any) -> None:
    text = (
        "Was asked to gather along dimension 0, but all input tensors were scalars; "
        "will instead unsqueeze and return a vector."
    )
    assert dp["scalars"] == [[2.5, 8.5], [["UserWarning", text]]]
    assert on_its_own["scalars"] == [5.5, []]


def test_running_statistics_are_those_of_replica_0(dp: Any, on_its_own: Any) -> None:
    assert dp["batchnorm"] == [[2.0, 3.0], [4.0, 4.0], 1]  # of rows (0, 1), (2, 3), (4, 5)
    assert on_its_own["batchnorm"][0] == [5.0, 6.0]


def test_writes_by_other_replicas_than_0_are_lost(dp: Any, on_its_own: Any) -> None:
    """In-place writes on replica 0 are kept; assignments stay on the discarded replica, as torch documents."""
    assert dp["buffers"] == [15.0, 0.0, 0]
    assert on_its_own["buffers"] == [66.0, 1.0, 1]


def test_autocast_reaches_the_replicas(dp: Any, on_its_own: Any) -> None:
    assert dp["autocast"] == on_its_own["autocast"] == ["torch.float32", "torch.bfloat16", "torch.float32"]


def test_no_grad_and_eval_reach_the_replicas(dp: Any, on_its_own: Any) -> None:
    expected = [[True, [True, True]], [False, [False, True]], [True, [True, False]]]
    assert dp["gradient_modes"] == on_its_own["gradient_modes"] == expected


def test_hooks_of_the_script_run_on_every_replica(dp: Any, on_its_own: Any) -> None:
    counts, out, left = dp["hooks_of_the_scripts_own"]
    assert counts == {"before": 2, "before, keywords": 2, "after": 2}
    assert (out, left) == ([5.0], [2, 2, 0, 1, 1])
    assert on_its_own["hooks_of_the_scripts_own"][1:] == [out, left]


def test_an_exception_in_one_replica_reaches_the_script_unchanged(dp: Any, on_its_own: Any) -> None:
    """It has the original type, message, causes and frames, not those of torch's copy from the thread of a replica."""
    assert dp["exceptions"] == on_its_own["exceptions"]
    assert dp["exceptions"][:3] == ["Unlucky", "no luck: 7 times", "[None, None]"]


def test_a_batch_that_cannot_be_split(dp: Any, runs: dict[str, TracedRun]) -> None:
    """One row per replica is too few for BatchNorm: that call runs on one device, later calls in dp again."""
    assert dp["one_row_each"] == [[2, 2], [6, 2], [4, 2]]
    assert [call.mode for call in runs["dp"].calls("Norm")] == ["single", "dp", "dp"]
    first, *others = runs["dp"].calls("Norm")
    assert (first.failed, first.virtual, len(first.devices), list(first.phases)) == (False, False, 1, [])
    assert all(call.virtual and len(call.replicas) == 2 for call in others)
    (complaint,) = [text for text in runs["dp"].complaints if "more than 1 value per channel" in text]
    assert str(first.call) in complaint


def test_fewer_rows_than_replicas(dp: Any, runs: dict[str, TracedRun]) -> None:
    assert dp["few_rows"] == [[1, 3], [0, 3]]
    one, none = runs["dp"].calls("Shares")
    assert (one.mode, len(one.devices), [len(r.inputs or ()) for r in one.replicas]) == ("dp", 2, [1])
    assert one.replicas[0].inputs is not None
    assert one.replicas[0].inputs[0].shape == (1, 2)
    assert none.rows == 0


def test_subclasses_of_dataparallel(dp: Any, on_its_own: Any, runs: dict[str, TracedRun]) -> None:
    found = dp["subclasses"]
    assert found["uneven"] == [1, 5]
    assert found["sets attributes"] == [[0, 1], 0]  # on the script's object, as without dpmon
    assert on_its_own["subclasses"]["uneven"] == "written for one device"
    for name in ("by name", "passes attributes", "around", "instead"):
        assert found[name] == on_its_own["subclasses"][name]
    vias = {call.via: call for call in runs["dp"].calls()}
    assert [share.inputs[0].shape for share in vias["Uneven"].replicas if share.inputs] == [(1, 2), (5, 2)]
    assert vias["Uneven"].outputs == ()  # a list of integers has no tensors
    assert vias["ByName"].mode == vias["Around"].mode == vias["MyDataParallel"].mode == "dp"
    assert "scatter" in vias["ByName"].phases  # imported by name, it is still torch's
    (inner,) = runs["dp"].calls("Inner")
    assert (inner.via, inner.mode, inner.phases) == ("Instead", "single", {})
    assert any("Instead has its own forward" in (e.data["refused"] or "") for e in runs["dp"].events("mode"))


def test_the_wrapper_looks_as_without_dpmon(dp: Any, on_its_own: Any) -> None:
    assert dp["looks"] == on_its_own["looks"]
    before, after, clone, _ = dp["looks"]
    assert before == after == clone
    assert before[1] == []


def test_a_copy_runs_as_it_is_written(runs: dict[str, TracedRun]) -> None:
    """The dimension along which to split a copy is unknown."""
    (model, *_), (clone, *_) = runs["dp"].calls("Sequential"), runs["dp"].calls("Sequential 2")
    assert (model.mode, clone.mode) == ("dp", "single")
    assert any("copied or loaded" in (e.data["refused"] or "") for e in runs["dp"].events("mode"))


def test_a_saved_wrapper_can_be_loaded_without_dpmon(dp: Any, on_its_own: Any) -> None:
    assert dp["saved"] == on_its_own["saved"]
    assert dp["saved"][:3] == [["module.0.weight", "module.0.bias"], True, []]


def test_a_wrapper_copied_while_it_is_called(dp: Any, on_its_own: Any) -> None:
    assert on_its_own["copied_by_a_thread_meanwhile"] == [[0, False]]
    assert dp["copied_by_a_thread_meanwhile"] == [[0, False]]


@pytest.mark.parametrize("name", ["calls_itself", "several_threads", "scripted"])
def test_odd_things_to_do_in_a_forward(dp: Any, on_its_own: Any, name: str) -> None:
    assert "raised" not in on_its_own[name]
    if name == "calls_itself":  # each share loses its first rows
        assert (dp[name], on_its_own[name]) == ([2, 2], [4, 2])
    else:
        assert dp[name] == on_its_own[name]


def test_sizes_of_a_module_that_calls_itself(runs: dict[str, TracedRun]) -> None:
    (call,) = runs["dp"].calls("Recursive")
    assert [replica.outputs[0].shape for replica in call.replicas if replica.outputs] == [(1, 2), (1, 2)]
    assert [replica.inputs[0].shape for replica in call.replicas if replica.inputs] == [(3, 2), (3, 2)]


def test_calls_of_several_threads_at_once(runs: dict[str, TracedRun]) -> None:
    calls = runs["dp"].calls("Shared")
    assert len(calls) == 90
    for call in calls:
        assert [replica.inputs[0].shape for replica in call.replicas if replica.inputs] == [(3, 2), (3, 2)]
        assert [replica.outputs[0].shape for replica in call.replicas if replica.outputs] == [(3, 3), (3, 3)]


def test_no_hook_is_left_behind(dp: Any, on_its_own: Any) -> None:
    assert set(dp["hooks_left_behind"]) == {0}
    assert len(dp["hooks_left_behind"]) == len(on_its_own["hooks_left_behind"]) >= 5


def test_a_scripted_model_is_one_call(runs: dict[str, TracedRun]) -> None:
    assert [call.via for call in runs["dp"].calls("RecursiveScriptModule")] == ["DataParallel"] * 2


def test_two_wrappers_of_one_model(dp: Any, on_its_own: Any) -> None:
    assert dp["two_wrappers_of_one_model"] == on_its_own["two_wrappers_of_one_model"] == [[6, 2], [6, 2]]


def test_calls_are_numbered_and_belong_to_a_step(runs: dict[str, TracedRun]) -> None:
    calls = runs["dp"].calls()
    assert [call.call for call in calls] == list(range(1, len(calls) + 1))
    assert runs["dp"].missed == 0
    assert runs["dp"].unreadable == ()
    assert [call.failed for call in calls if call.root == "Raises"] == [True]
    failed = [call for call in calls if call.failed]
    assert {call.root for call in failed} == {"Raises", "Sometimes"}
    assert all(call.outputs is None for call in failed)
