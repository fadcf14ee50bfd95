"""Findings about ranks need weights that differ, or losses that are equal, and ranks that communicate little."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.model.findings.correctness_findings import MAX_STEP_BYTES, MIN_LOSSES, find_wrong_training
from dpmon.model.findings.finding_evidence import MIN_STEPS
from dpmon.model.layouts import CallLayouts
from dpmon.model.loss_curves import LossCurve
from dpmon.record.history_rows import Definitions, Layout
from dpmon.record.record_types import Event, Operation, Size
from dpmon.record.schema import EVALUATION
from dpmon.store.collectives import CollectiveSums
from dpmon.store.events import event_to_json
from dpmon.store.loss_table import LossBin
from dpmon.store.shapes import CallShape
from support.history_builders import HEALTHY_STORE, run_analysis_with

SILENT = CollectiveSums((Operation("all_reduce", 2, 1, 4),), 1)
"""One sampled step, in which the script adds up a loss."""
BUSY = CollectiveSums((Operation("all_reduce", 2, 1, MAX_STEP_BYTES + 1),), 1)
UPDATES = 4, 12, 24, 32


def look(rank: int, update: int, **more: Any) -> dict[str, Any]:
    """Return the fields of a `check` record; by default, weights and losses differ between ranks."""
    common = {"process": rank, "rank": rank, "update": update, "optimizer_class": "SGD", "roots": ["Net"]}
    seen = {"idle": False, "no_gradient": [], "rates": [0.1], "evaluating": False, "norm_dimensions": []}
    return {**common, **seen, "weights": [1.0, 1.0 + rank], "losses": [update + rank], **more}


def texts(looks: list[dict[str, Any]], sums: CollectiveSums = SILENT, **facts: Any) -> list[str]:
    """Return the findings about these looks, which are recorded in this order."""
    rows = [(0, 0, "check", 0, event_to_json(Event("check", data))) for data in reversed(looks)]
    store = SimpleNamespace(**{**vars(HEALTHY_STORE), "connection": SimpleNamespace(rows=lambda *_: rows)})
    run = run_analysis_with(store=store, whole_communication=SimpleNamespace(collectives=sums), **facts)
    return [finding.text for finding in find_wrong_training(run)]


def looks_of(**more: Any) -> list[dict[str, Any]]:
    return [look(rank, update, **more) for update in UPDATES for rank in (0, 1)]


def test_weights_that_differ_although_ranks_hardly_communicate() -> None:
    assert texts(looks_of()) == ["Nothing averages the gradients: weights of the ranks differ by up to 50%."]


@pytest.mark.parametrize("sums", [BUSY, CollectiveSums()], ids=["they communicate", "it is unknown"])
def test_ranks_that_may_communicate(sums: CollectiveSums) -> None:
    assert texts(looks_of(), sums) == []


def test_weights_that_were_averaged_once() -> None:
    """Averaging after some updates only: local SGD."""
    looks = looks_of()
    looks[2] = look(0, 12, weights=[1.0, 2.0])
    looks[3] = look(1, 12, weights=[1.0, 2.0])
    assert texts(looks) == []


@pytest.mark.parametrize("weights", [[], [None, 1.0]], ids=["sharded", "NaN"])
def test_weights_that_cannot_be_compared(weights: list[Any]) -> None:
    assert texts(looks_of(weights=weights, losses=[0.5])) == []


def test_rounding_is_no_difference() -> None:
    looks = [look(rank, update, weights=[1.0 + rank * 1e-7]) for update in UPDATES for rank in (0, 1)]
    assert texts(looks) == []


def same_data(**more: Any) -> list[dict[str, Any]]:
    return [
        look(rank, update, **{"weights": [1.0], "losses": [update / 3], **more})
        for update in UPDATES
        for rank in (0, 1)
    ]


def test_equal_losses_and_weights() -> None:
    assert texts(same_data()) == ["All ranks train on the same data: their losses and weights are equal."]
    assert texts(same_data(losses=[0.0])) == [], "a loss that never changes says nothing about the data"
    assert texts(same_data(losses=[])) == [], "losses that are not read"
    assert texts(same_data(), SILENT._replace(own=("all_reduce",))) == [], "the script may average the losses itself"
    assert texts(same_data()[:4]) == [], "too few looks"
    assert texts([look(0, update) for update in UPDATES]) == [], "one rank"
    shards = [look(rank, update, weights=[1.0]) for update in UPDATES for rank in (0, 1)]
    assert texts(shards) == [], "each rank has its own data"


def test_conditions_of_an_optimizer_hold_at_all_newest_looks() -> None:
    def of_one(*values: dict[str, Any]) -> list[str]:
        return texts([look(0, update, **more) for update, more in zip(UPDATES, values, strict=False)])

    evaluating, training = {"evaluating": True}, {"evaluating": False}
    assert of_one(training, evaluating, evaluating, evaluating) == ["Net is in eval mode while it trains."]
    assert of_one(evaluating, evaluating) == []
    assert of_one(evaluating, evaluating, evaluating, training) == []
    assert of_one(*[{"rates": [0.0, 0]}] * 3) == ["The learning rate of SGD is 0."]
    assert of_one(*[{"rates": [0.0, None]}] * 3) == [], "a rate in a tensor is not read"
    assert of_one(*[{"rates": [0.0, 0.1]}] * 3) == [], "one group is frozen"
    bare = {"no_gradient": ["a.weight", "a.bias"]}
    assert of_one(bare, bare, {"no_gradient": ["a.bias"]}) == ["No gradient ever reaches a.bias of Net."]
    assert of_one(training, bare, bare, bare) == [], "it had one at the first look"
    assert texts([look(rank, update, **evaluating) for update in UPDATES for rank in (0, 1)])[1:] == [
        "Net is in eval mode while it trains."
    ], "once for all ranks"


def test_an_optimizer_of_another_model() -> None:
    idle = [look(0, update, idle=True, roots=[]) for update in UPDATES]
    assert texts(idle) == ["No parameter of SGD belongs to a model that is called, and none has a gradient."]
    assert texts([*idle, look(0, 48, roots=[])]) == [], "it has a gradient now"


def curve(*values: float | None, first: float = 0.5, unfit: int = 0) -> LossCurve:
    """Return a curve of these losses, one per second; None: only invalid values."""
    points = [
        LossBin(second, 0 if value is None else 1, value, value, value, unfit) for second, value in enumerate(values)
    ]
    return LossCurve(0, "train.py:8", tuple(points), last=values[-1], first=first)


@pytest.mark.parametrize(
    ("losses", "update", "has_finding"),
    [
        (curve(*[0.5] * MIN_LOSSES), 100, True),
        (curve(*[0.5] * MIN_LOSSES), 99, False),
        (curve(*[0.5] * (MIN_LOSSES - 1)), 100, False),
        (curve(0.5, *[0.0] * MIN_LOSSES), 100, False),
        (curve(*[0.5] * MIN_LOSSES, 0.5000000000000001), 100, False),
        (curve(*[0.5] * MIN_LOSSES, unfit=1), 100, False),
        (curve(None, *[0.5] * MIN_LOSSES), 100, False),
        (LossCurve(0, "train.py:8", why="several values"), 100, False),
    ],
    ids=["constant", "few updates", "few losses", "has become 0", "rounding", "NaN", "NaN at first", "not read"],
)
def test_a_loss_that_never_changes(losses: LossCurve, update: int, has_finding: bool) -> None:
    wanted = ["The loss never changes: it is 0.5 (train.py:8)."] if has_finding else []
    assert texts([look(0, update)], whole_losses=(losses,)) == wanted


def layouts_of(*calls: tuple[tuple[int, ...], int], kind: int = 0, root: str = "Net") -> CallLayouts:
    """Return the layouts of calls of one replica: the shape of its input, and how many there were."""
    definitions, shapes = Definitions(), []
    definitions.layouts[1] = Layout(root, None, ("cpu",), {})
    for number, (shape, count) in enumerate(calls, 1):
        definitions.sizes[number] = (Size("0", shape, "float32", 4),)
        shapes.append(CallShape(0, "single", kind, 1, 0, f"[{number},{number},[{number},{number}]]", 0, count))
    return CallLayouts(shapes, {0: definitions})


IMAGE, VIDEO = (1, 3, 8, 8), (1, 9, 3, 8, 8)


@pytest.mark.parametrize(
    ("layouts", "dimensions", "has_finding"),
    [
        (layouts_of((IMAGE, MIN_STEPS)), [4], True),
        (layouts_of((IMAGE, MIN_STEPS - 1)), [4], False),
        (layouts_of((IMAGE, 40), ((16, 3, 8, 8), 60)), [4], False),
        (layouts_of((VIDEO, 99)), [4], False),
        (layouts_of((VIDEO, 99)), [5], True),
        (layouts_of((IMAGE, 99)), [], False),
        (layouts_of((IMAGE, 99), kind=EVALUATION), [4], False),
        (layouts_of((IMAGE, 99), root="Other"), [4], False),
        (layouts_of(((), 99)), [4], False),
    ],
    ids=["image", "few", "last batches", "frames", "volume", "no BatchNorm", "evaluation", "other model", "scalar"],
)
def test_batch_norm_over_one_row(layouts: CallLayouts, dimensions: list[int], has_finding: bool) -> None:
    looks = [look(0, update, norm_dimensions=dimensions) for update in UPDATES]
    wanted = ["BatchNorm in Net normalizes batches of one row."] if has_finding else []
    assert texts(looks, layouts=layouts) == wanted
