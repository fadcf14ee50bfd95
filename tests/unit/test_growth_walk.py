"""Looking for what grows: what it must survive, what it must not keep, and how long it may take at once."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from typing import Any

import pytest
import torch

from dpmon.tracer.memory import growth_walk
from dpmon.tracer.memory.growth_walk import _growing_lines, _iter_code, _Look


def sizes_of(look: _Look) -> dict[str, int]:
    """The length of each container and graph by its path, for variables of functions of this file."""
    return {path: count for (scope, path), (count, _) in look.sizes.items() if not isinstance(scope, str)}


def whole(look: _Look) -> _Look:
    while not look.run():
        pass
    return look


class Held:
    """An object that can be referred to weakly."""


def test_lengths_by_name() -> None:
    class Own:
        def __init__(self) -> None:
            self.items = deque([1, 2])
            self.itself = self

    def train() -> _Look:
        own, plain, by_key = Own(), [1, 2, 3], OrderedDict(a=[1], b=(2, 3))
        endless: list[Any] = [plain]
        endless.append(endless)
        look = whole(_Look({}))
        del own, by_key
        return look

    found = sizes_of(train())
    assert found["own.items"] == 2
    assert found["plain"] == 3
    assert (found["by_key"], found["by_key['a']"], found["by_key['b']"]) == (2, 1, 2)
    assert found["endless"] == 2


def test_a_huge_list_costs_no_more_than_its_length() -> None:
    def train() -> _Look:
        huge = [0] * 10_000_000
        look = whole(_Look({}))
        del huge
        return look

    look = train()
    assert sizes_of(look)["huge"] == 10_000_000
    assert look._objects < 100_000


def test_deep_nesting_ends() -> None:
    def train() -> _Look:
        deep: list[Any] = []
        for _ in range(10_000):
            deep = [deep]
        look = whole(_Look({}))
        while deep:
            deep = deep[0]
        return look

    assert any("nested more than 6 deep" in text for text in train().omitted)


def test_an_id_that_is_used_again_is_no_growth() -> None:
    def train() -> _Look:
        first = [Held(), Held()]
        before = whole(_Look({}))
        del first
        second = [Held() for _ in range(5)]
        after = whole(_Look(before.sizes))
        second.append(Held())
        return after

    after = train()
    assert sizes_of(after)["second"] == 5
    assert [entry["name"] for entry in after.largest() if entry["function"].endswith("train")] == []


def test_nothing_lives_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> tuple[_Look, list[weakref.ref[Any]]]:
        kept, graph, held = [Held()], torch.ones(3, requires_grad=True).exp(), Held()
        references: list[weakref.ref[Any]] = [*map(weakref.ref, (kept[0], graph, held))]
        look = _Look({})
        for _ in range(5):
            look.run()
        del kept, graph, held
        return look, references

    monkeypatch.setattr(growth_walk, "SLICE_NS", 1)
    gc.disable()
    try:
        _, references = train()
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()


def test_a_dict_that_the_script_has_from_locals_is_not_changed() -> None:
    mine = locals()
    mine["own"] = 1
    before = dict(mine)
    later = [1, 2]
    look = whole(_Look({}))
    if sys.version_info < (3, 13):
        assert any("which uses locals()" in text for text in look.omitted)
    assert mine == before
    assert len(later) == 2


def test_a_dict_that_an_inspector_has_loses_nothing() -> None:
    def inspector() -> dict[str, Any]:
        return sys._getframe(1).f_locals

    def train() -> tuple[_Look, dict[str, Any]]:
        mine = [1, 2]
        held = inspector()
        look = whole(_Look({}))
        del mine
        return look, dict(held)

    look, held = train()
    assert sizes_of(look)["mine"] == 2
    assert len(held) >= (1 if sys.version_info < (3, 13) else 0)


def test_a_dict_that_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    changing = {"a": 1}

    def train(inner: object) -> _Look:
        other = [1]
        look = whole(_Look({}))
        del other
        return look

    def items(container: object, base: object) -> list[tuple[str, object]]:
        if container is changing:
            raise RuntimeError("dictionary changed size during iteration")
        return []

    monkeypatch.setattr(growth_walk, "_items", items)
    look = train(changing)
    assert "parts of inner, which changed meanwhile" in look.omitted
    assert sizes_of(look)["other"] == 1


def test_a_foreign_dict() -> None:
    class Loud(dict[str, object]):
        def __getattribute__(self, name: str) -> object:
            raise AssertionError(name)

        __iter__ = __len__ = __contains__ = None  # type: ignore[assignment]

    class Foreign:
        pass

    def train(foreign: Foreign) -> _Look:
        return whole(_Look({}))

    foreign = Foreign()
    foreign.__dict__ = Loud(items=[1, 2])
    assert sizes_of(train(foreign))["foreign.items"] == 2


def test_the_count_of_graphs_is_exact() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * 2

    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4))

    def loss() -> torch.Tensor:
        value: torch.Tensor = Twice.apply(net(torch.ones(2, 4))).pow(2).mean()
        return value

    def train() -> dict[str, dict[str, Any]]:
        total, average, last = torch.zeros(()), loss(), loss()
        for step in range(20):
            total = total + loss()
            average = 0.9 * average + 0.1 * loss()
            last = loss()
            if step == 9:
                sizes = whole(_Look({})).sizes
        grown = whole(_Look(sizes)).largest()
        del total, average, last
        return {entry["name"]: entry for entry in grown}

    found = train()
    assert {"total", "average"} <= found.keys()
    assert (found["total"]["count"], found["average"]["count"], found["total"]["is_cut"]) == (20, 21, False)
    assert "last" not in found


def test_the_work_on_one_variable_is_limited() -> None:
    def train() -> tuple[_Look, dict[str, Any]]:
        total, graphs = torch.zeros((), requires_grad=True), []
        for step in range(2000):
            total = total + torch.ones((), requires_grad=True) * 2
            if step % 100 == 0:
                graphs.append(total)
            if step == 1980:
                sizes = whole(_Look({})).sizes
        second = whole(_Look(sizes))
        del total, graphs
        return second, {entry["name"]: entry for entry in second.largest()}

    look, found = train()
    assert found["total"]["is_cut"]
    assert growth_walk.MAX_AT_ONCE - 2 <= found["total"]["count"] <= growth_walk.MAX_AT_ONCE
    assert sum(count for path, count in sizes_of(look).items() if path.startswith("graphs[")) < growth_walk.MAX_AT_ONCE
    assert any("or too many" in text for text in look.omitted)


def test_a_slice_is_short_and_a_large_model_takes_several() -> None:
    net = torch.nn.ModuleList(torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(20))) for _ in range(60))

    def train(model: object) -> list[int]:
        look, cpu_ns, is_done = _Look({}), [], False
        while not is_done:
            start_ns = time.thread_time_ns()
            is_done = look.run()
            cpu_ns.append(time.thread_time_ns() - start_ns)
        return cpu_ns

    gc.disable()
    try:
        cpu_ns = train(net)
    finally:
        gc.enable()
    assert len(cpu_ns) > 3
    usual_ms = sorted(cpu_ns)[len(cpu_ns) // 2] / 1e6
    print(
        "slices:",
        len(cpu_ns),
        "ms of the first, the median and the longest:",
        cpu_ns[0] / 1e6,
        usual_ms,
        max(cpu_ns) / 1e6,
    )
    assert usual_ms < 4  # 2 ms, and what is under way when they are over


def test_other_threads_may_run_meanwhile() -> None:
    changing: dict[int, int] = {}
    is_over = threading.Event()

    def change() -> None:
        while not is_over.is_set():
            changing.clear()
            changing.update(enumerate(range(50)))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            whole(_Look({}))
    finally:
        is_over.set()
        thread.join()


LINES = """
cache = {}
log = {"a": [], "b": []}
total = 0.0
def train(self, key, value):
    global total
    cache[key] = value
    cache.get(key)
    total = (
        total + value
    )
    self.items.append(value)
    log["a"].append(value)
    log["b"].append(value)
    other = value
    both = [value]
    both.append(key)
    both += [value]
    return other
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("cache", {7}),
        ("total", {9}),
        ("items", {12}),
        ("log", {13, 14}),
        ("other", set()),
        ("both", {17, 18}),
        ("value", set()),
    ],
)
def test_the_lines_that_add_to_a_variable(name: str, expected: set[int]) -> None:
    module = compile(LINES, "train.py", "exec")
    assert {line for code in _iter_code(module) for line in _growing_lines(code, name)} == expected
