"""Findings about wrong trainings need their proof at each of the newest looks, and nothing that explains it away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.model.findings.correctness_findings import MIN_LOSSES, find_wrong_training
from dpmon.model.loss_curves import LossCurve
from dpmon.record.record_types import Event, Operation
from dpmon.store.collectives import CollectiveSums
from dpmon.store.events import event_to_json
from dpmon.store.loss_table import LossBin
from support.history_builders import HEALTHY_STORE, run_analysis_with

AVERAGED = CollectiveSums((Operation("all_reduce", 2, 1, 4096),), 1)
"""One sampled step of DistributedDataParallel."""
UPDATES = 4, 9, 18, 36


def look(rank: int, update: int, **more: Any) -> dict[str, Any]:
    """Return the fields of a `check` record; by default, weights and losses differ between ranks."""
    common = {"process": rank, "rank": rank, "update": update, "optimizer_class": "SGD", "roots": ["Net"]}
    seen = {"idle": False, "no_gradient": [], "has_rate": True, "evaluating": False, "single_rows": False}
    return {**common, **seen, "has_wrapper": True, "weights": [1.0, 1.0 + rank], "losses": [update + rank], **more}


def texts(looks: list[dict[str, Any]], synced: float = 0, **facts: Any) -> list[str]:
    """Return the findings about these looks, which are recorded in this order."""
    rows = [(0, 0, "check", 0, event_to_json(Event("check", data))) for data in reversed(looks)]
    store = SimpleNamespace(**{**vars(HEALTHY_STORE), "connection": SimpleNamespace(rows=lambda *_: rows)})
    communication = SimpleNamespace(collectives=facts.pop("sums", AVERAGED), synced=synced, unsynced=None)
    run = run_analysis_with(store=store, **{"whole_communication": communication, **facts})
    return [finding.text for finding in find_wrong_training(run)]


def looks_of(**more: Any) -> list[dict[str, Any]]:
    return [look(rank, update, **more) for update in UPDATES for rank in (0, 1)]


def test_weights_that_differ_because_the_wrapper_is_not_called() -> None:
    assert texts(looks_of()) == ["Nothing averages the gradients: the weights of the ranks differ."]


@pytest.mark.parametrize(
    ("looks", "synced"),
    [
        (looks_of(), 1.0),
        (looks_of(has_wrapper=False), 0.0),
        (looks_of(weights=[1.0]), 0.0),
        (looks_of(weights=[], losses=[0.5]), 0.0),
        (looks_of(weights=[None, 1.0]), 0.0),
        (looks_of()[:4], 0.0),
        ([look(0, update) for update in UPDATES], 0.0),
    ],
    ids=["called", "separate models, local SGD", "equal", "sharded", "NaN", "too few looks", "one rank"],
)
def test_ranks_whose_weights_may_differ(looks: list[dict[str, Any]], synced: float) -> None:
    assert texts(looks, synced) == []


def test_gradients_under_no_sync_may_be_local_sgd() -> None:
    communication = SimpleNamespace(collectives=CollectiveSums(), synced=0, unsynced=1.0)
    assert texts(looks_of(), whole_communication=communication) == []


def same_data(**more: Any) -> list[dict[str, Any]]:
    return [
        look(rank, update, **{"weights": [1.0], "losses": [update / 3], **more})
        for update in UPDATES
        for rank in (0, 1)
    ]


def test_equal_losses_and_weights() -> None:
    assert texts(same_data(), 1.0) == ["All ranks train on the same data: their losses and weights are equal."]
    assert texts(same_data(losses=[0.0]), 1.0) == [], "a loss that never changes says nothing about the data"
    assert texts(same_data(losses=[]), 1.0) == [], "losses that are not read"
    assert texts(same_data(weights=[]), 1.0) == [], "sharded weights: the ranks may share the data on purpose"
    assert texts(same_data()[:4], 1.0) == [], "too few looks"
    assert texts(looks_of(weights=[1.0]), 1.0) == [], "each rank has its own data"


@pytest.mark.parametrize(
    "sums",
    [
        AVERAGED._replace(own=("all_reduce",)),
        AVERAGED._replace(operations=(*AVERAGED.operations, Operation("all_gather", 2, 1, 64))),
        CollectiveSums(),
    ],
    ids=["the script averages the losses", "a loss over the outputs of all ranks", "it is unknown"],
)
def test_losses_that_may_depend_on_the_data_of_all_ranks(sums: CollectiveSums) -> None:
    assert texts(same_data(), 1.0, sums=sums) == []


def test_conditions_of_an_optimizer_hold_at_all_newest_looks() -> None:
    def of_one(*values: dict[str, Any]) -> list[str]:
        return texts([look(0, update, **more) for update, more in zip(UPDATES, values, strict=False)])

    evaluating, training = {"evaluating": True}, {"evaluating": False}
    assert of_one(training, evaluating, evaluating, evaluating) == ["Net is in eval mode while it trains."]
    assert of_one(evaluating, evaluating) == []
    assert of_one(evaluating, evaluating, evaluating, training) == []
    assert of_one(*[{"has_rate": False}] * 3) == ["The learning rate of SGD is 0."]
    assert of_one(*[{"has_rate": False}] * 3, training) == [], "a warm-up from 0"
    bare = {"no_gradient": ["a.weight", "a.bias"]}
    assert of_one(bare, bare, {"no_gradient": ["a.bias"]}) == ["No gradient has ever reached a.bias of Net."]
    assert of_one(bare, bare, bare, training) == [], "it has one at last"
    single = {"single_rows": True}
    assert of_one(*[single] * 3) == ["BatchNorm in Net normalizes batches of one row."]
    assert of_one(single, training, single, single) == [], "the last batch of an epoch"
    assert texts(looks_of(evaluating=True, weights=[1.0])) == ["Net is in eval mode while it trains."], "once"


def test_an_optimizer_of_another_model() -> None:
    idle = [look(0, update, idle=True, roots=[]) for update in UPDATES]
    assert texts(idle) == ["No parameter of SGD belongs to a model that is called, and none has ever had a gradient."]
    assert texts([*idle, look(0, 65, roots=[])]) == [], "it has a gradient now"


def curve(*values: float | None, first: float = 0.5, unfit: int = 0) -> LossCurve:
    """Return a curve of these losses, one per second; None: only invalid values."""
    points = [
        LossBin(second, 0 if value is None else 1, value, value, value, unfit) for second, value in enumerate(values)
    ]
    return LossCurve(0, "train.py:8", tuple(points), last=values[-1], first=first)


@pytest.mark.parametrize(
    ("losses", "has_finding"),
    [
        (curve(*[0.5] * MIN_LOSSES), True),
        (curve(*[0.5] * (MIN_LOSSES - 1)), False),
        (curve(*[0.0] * MIN_LOSSES, first=0.0), False),
        (curve(0.25, *[0.5] * MIN_LOSSES, first=0.25), False),
        (curve(*[0.5] * MIN_LOSSES, 0.5000000000000001), False),
        (curve(*[0.5] * MIN_LOSSES, unfit=1), False),
        (curve(None, *[0.5] * MIN_LOSSES), False),
        (LossCurve(0, "train.py:8", why="several values"), False),
    ],
    ids=["constant", "few losses", "0", "has become constant", "rounding", "NaN", "NaN at first", "not read"],
)
def test_a_loss_that_never_changes(losses: LossCurve, has_finding: bool) -> None:
    wanted = ["The loss never changes: it is 0.5 (train.py:8)."] if has_finding else []
    assert texts([], whole_losses=(losses,)) == wanted
