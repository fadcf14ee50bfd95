"""One GPU, queried in rounds: due, failed, outdated and unsupported fields."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pynvml import NVMLError  # noqa: TID251 - the real error class: unhashable, compares badly

from dpmon.gpu import gpu_state as card_module
from dpmon.gpu.device_record import OPTIONAL_FIELDS, MissingValue, RunContext
from dpmon.gpu.gpu_state import GpuState
from dpmon.gpu.nvml import call_nvml
from dpmon.gpu.nvml_queries import MAX_CALLS_PER_S, QUERIES, NvmlQuery, throttle_reasons

NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 4, 13, 15, 999


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


def test_each_question_is_asked_at_its_own_interval() -> None:
    quick, rare = Told(40), Told(700.0)
    bench = Bench(NvmlQuery(("util_pct",), 1, 1, (quick,)), NvmlQuery(("power_limit_w",), 30, 1, (rare,)))
    for _ in range(60):
        sample = bench.round()
    assert (quick.asked, rare.asked) == (60, 2)
    assert (sample.util_pct, sample.power_limit_w) == (40, 700.0)


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


def test_a_failure_that_passes_is_asked_again() -> None:
    way = Told(7)
    way.code = UNKNOWN
    bench = Bench(NvmlQuery(("util_pct",), 1, 1, (way,)))
    assert bench.round().absent["util_pct"] == "NVML: unknown error"
    way.code = None
    sample = bench.round()
    assert sample.util_pct == 7
    assert "util_pct" not in sample.absent


def test_one_value_of_an_answer_can_be_missing() -> None:
    bench = Bench(
        NvmlQuery(("mem_used_bytes", "mem_reserved_bytes"), 1, 1, (Told(5, MissingValue("counted as used")),))
    )
    sample = bench.round()
    assert sample.mem_used_bytes == 5
    assert sample.absent["mem_reserved_bytes"] == "counted as used"


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


def test_while_a_call_does_not_return_all_values_but_the_name_are_absent() -> None:
    seen: list[Any] = []

    def answer_late(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        for _ in range(2):
            seen.append(bench.sample())
            bench.clock.now += 3
        seen.append(bench.sample())
        return (7,)

    quick = Told("Fake", 5)
    bench = Bench(NvmlQuery(("name", "fan_pct"), 1e9, 1, (quick,)), NvmlQuery(("util_pct",), 1, 1, (answer_late,)))
    assert bench.round().util_pct == 7
    assert [(sample.name, sample.fan_pct) for sample in seen] == [("Fake", 5), ("Fake", None), ("Fake", None)]
    assert seen[2].absent["fan_pct"] == "NVML has not answered for 6 s"


def test_a_lost_gpu_is_found_again_with_one_warning_each() -> None:
    way = Told(40)
    bench = Bench(NvmlQuery(("util_pct",), 1, 1, (way,)))
    assert bench.card.poll() is None
    way.code = GPU_IS_LOST
    bench.clock.now += 1
    assert bench.card.poll() == "GPU 0: the GPU is lost"
    assert bench.sample().absent["util_pct"] == "the GPU is lost"
    bench.clock.now += 1
    assert bench.card.poll() is None
    bench.clock.now += card_module.RETRY_S
    way.code = None
    assert bench.card.poll() == "GPU 0 is back"
    assert bench.sample().util_pct == 40


def test_a_null_handle_is_not_used() -> None:
    bench = Bench(NvmlQuery(("util_pct",), 1, 1, (Told(40),)))
    bench.module.handle = None
    assert bench.card.poll() == "GPU 0: NVML gave no handle for this GPU"


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


def test_the_questions_fit_into_eight_calls_a_second() -> None:
    """The average number of due calls is below the limit, so that all calls are made."""
    asked = [question for question in QUERIES if question.replaces is None]
    assert MAX_CALLS_PER_S == 8
    assert sum(question.max_calls / question.period_s for question in asked) <= MAX_CALLS_PER_S
    fields = {name for question in QUERIES for name in question.fields}
    computed = {"of_run", "visible", "ordinals", "processes", "process_count"}
    computed |= {"mem_run_bytes", "mem_others_bytes", "mem_torch_bytes"}
    assert fields | computed == {*OPTIONAL_FIELDS, "compute", "graphics"}


def test_an_error_that_is_not_nvmls_is_contained() -> None:
    def odd(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        raise ValueError("odd structure")

    def unknown(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        return (nvml.nvmlDeviceGetWhatNobodyKnows(handle),)

    bench = Bench(NvmlQuery(("util_pct",), 1, 1, (odd,)), NvmlQuery(("power_w",), 1, 1, (unknown,)))
    absent = bench.round().absent
    assert absent["util_pct"] == "NVML: ValueError: odd structure"
    assert absent["power_w"] == "the installed nvidia-ml-py does not know it"
