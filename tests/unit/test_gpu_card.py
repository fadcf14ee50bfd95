"""One GPU, queried in rounds: due, failed, outdated and unsupported fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pynvml import NVMLError  # noqa: TID251 - the real error class: unhashable, compares badly

from dpmon.gpu import gpu_state as card_module
from dpmon.gpu.device_record import MissingValue, RunContext
from dpmon.gpu.gpu_state import GpuState
from dpmon.gpu.nvml import call_nvml
from dpmon.gpu.nvml_queries import QUERIES, NvmlQuery, throttle_reasons


class Module:
    """A fake pynvml with the function that finds a GPU."""

    handle: Any = "handle"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.handle


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A GPU with these queries, and a fake clock."""

    def __init__(self, *questions: NvmlQuery) -> None:
        self.module = Module()
        self.clock = Clock()
        nvml: Any = SimpleNamespace(module=self.module, run=call_nvml)
        self.card = GpuState(0, nvml, self.clock, questions)

    def round(self, seconds: float = 1.0) -> Any:
        """Run a round after `seconds`; return the sample."""
        self.clock.now += seconds
        self.card.poll()
        return self.sample()

    def sample(self) -> Any:
        return SimpleNamespace(**self.card.sample(RunContext()))


class Told:
    """A fake call with a settable answer; counts its uses."""

    def __init__(self, *answer: Any) -> None:
        self.answer = answer
        self.code: int | None = None
        self.asked = 0
        self.memos: list[dict[str, Any]] = []

    def __call__(self, nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        assert handle == "handle"
        self.asked += 1
        self.memos.append(memo)
        if self.code is not None:
            raise NVMLError(self.code)
        return self.answer


def test_text_that_is_not_utf_8_is_readable() -> None:
    question = next(question for question in QUERIES if question.fields == ("name",))
    bench = Bench(question)
    bench.module.nvmlDeviceGetName = lambda handle: b"Fake \xff"  # type: ignore[attr-defined]
    assert bench.round().name == "Fake �"


def test_questions_beyond_the_budget_wait_and_all_are_asked_equally_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card_module, "MAX_CALLS_PER_S", 3)
    monkeypatch.setattr(card_module, "FIRST_ROUND_S", 0)
    ways = [Told(i) for i in range(6)]
    names = ("util_pct", "power_w", "energy_j", "fan_pct", "xid", "sm_clock_mhz")
    bench = Bench(*(NvmlQuery((n,), 5, 2, (w,)) for n, w in zip(names, ways, strict=True)))
    first = bench.round()
    assert sum(way.asked for way in ways) == 1
    assert [first.absent[name] for name in names[1:]] == ["not asked yet"] * 5
    for _ in range(5):
        bench.round()
    assert [way.asked for way in ways] == [1] * 6
    for _ in range(60):
        bench.round()
    assert max(way.asked for way in ways) - min(way.asked for way in ways) <= 1


def test_a_substitute_is_asked_only_for_missing_values() -> None:
    first, second = Told(MissingValue("not here"), 3), Told(9)
    whole = NvmlQuery(("pcie_rx_bytes_s", "pcie_tx_bytes_s"), 1, 1, (first,))
    sub = NvmlQuery(("pcie_rx_bytes_s",), 1, 1, (second,), replaces=whole)
    other = Told(8)
    useless = NvmlQuery(("pcie_tx_bytes_s",), 1, 1, (other,), replaces=whole)
    bench = Bench(whole, sub, useless)
    for _ in range(5):
        sample = bench.round()
    assert (sample.pcie_rx_bytes_s, sample.pcie_tx_bytes_s) == (
        9,
        3,
    )  # a missing value in one does not remove the other
    assert other.asked == 0


def test_a_value_that_is_not_renewed_is_hidden_after_10_seconds() -> None:
    bench = Bench(NvmlQuery(("util_pct",), 1, 1, (Told(40),)))
    bench.round()
    bench.clock.now += 9.0
    assert bench.sample().util_pct == 40
    bench.clock.now += 1.0
    assert bench.sample().absent["util_pct"] == "NVML answers slowly: the last answer is 10 s old"


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (0, []),
        (1, []),  # nothing to do
        (4 | 1, ["power limit"]),
        (0x20 | 0x40, ["temperature", "temperature (hardware)"]),
        (0x8000, ["reason 0x8000"]),
    ],
)
def test_throttle_words(bits: int, words: list[str]) -> None:
    assert throttle_reasons(bits) == words


def test_an_error_that_is_not_nvmls_is_contained() -> None:
    def odd(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        raise ValueError("odd structure")

    def unknown(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        return (nvml.nvmlDeviceGetWhatNobodyKnows(handle),)

    bench = Bench(NvmlQuery(("util_pct",), 1, 1, (odd,)), NvmlQuery(("power_w",), 1, 1, (unknown,)))
    absent = bench.round().absent
    assert absent["util_pct"] == "NVML: ValueError: odd structure"
    assert absent["power_w"] == "the installed nvidia-ml-py does not know it"
