"""One GPU, queried in rounds: due, failed, outdated and unsupported fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pynvml import NVMLError  # noqa: TID251 - the real error class: unhashable, compares badly

from dpmon.gpu.card import SILENT_S, Asker, Card
from dpmon.gpu.device import VALUES
from dpmon.gpu.failure import CallFailed, Missing, call
from dpmon.gpu.questions import CHEAP, EXPENSIVE, Question, throttle_words
from dpmon.gpu.share import Run

NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, GPU_IS_LOST, UNKNOWN = 3, 4, 13, 15, 999


class Module:
    """A fake pynvml with the functions that find a GPU."""

    handle: Any = "handle"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.handle

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return "GPU-0"

    def nvmlDeviceGetName(self, handle: Any) -> bytes:
        return b"Fake \xff"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A GPU, an Asker with these questions, and a fake clock."""

    def __init__(self, *questions: Question, calls: int = 8) -> None:
        self.module = Module()
        self.clock = Clock()
        self.card = Card(0)
        self.asker = Asker(self.card, questions, calls)
        self.ask: Callable[[Any], Any] = self.asker.guarded(call, self.clock)
        self.card.open(self.module, self.ask)

    def round(self, seconds: float = 1.0, calls: int | None = None) -> Any:
        """Run a round after `seconds`; return the sample."""
        self.clock.now += seconds
        self.asker.round(self.module, self.ask, self.clock, self.asker.calls if calls is None else calls)
        return self.sample()

    def sample(self, run: Run | None = None) -> Any:
        return self.card.sample(run or Run(), self.clock.now)


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
    bench = Bench(Question(("util_pct",), 1, 1, (quick,)), Question(("power_limit_w",), 30, 1, (rare,)))
    for _ in range(60):
        sample = bench.round()
    assert (quick.asked, rare.asked) == (60, 2)
    assert (sample.util_pct, sample.power_limit_w, sample.name) == (40, 700.0, "Fake �")


def test_questions_beyond_the_budget_wait_and_all_are_asked_equally_often() -> None:
    ways = [Told(i) for i in range(6)]
    names = ("util_pct", "power_w", "energy_j", "fan_pct", "xid", "sm_clock_mhz")
    bench = Bench(*(Question((n,), 5, 2, (w,)) for n, w in zip(names, ways, strict=True)), calls=3)
    first = bench.round()
    assert sum(way.asked for way in ways) == 1
    assert [first.absent[name] for name in names[1:]] == ["not asked yet"] * 5
    for _ in range(5):
        bench.round()
    assert [way.asked for way in ways] == [1] * 6
    for _ in range(60):
        bench.round()
    assert max(way.asked for way in ways) - min(way.asked for way in ways) <= 1


def test_the_first_round_asks_everything_and_later_ones_keep_to_the_budget() -> None:
    ways = [Told(i) for i in range(6)]
    old = Told(6)
    names = ("util_pct", "power_w", "energy_j", "fan_pct", "xid", "sm_clock_mhz")
    questions = [Question((n,), 1, 1, (w,)) for n, w in zip(names, ways, strict=True)]
    broken = Told(7)
    broken.code = NOT_SUPPORTED
    bench = Bench(*questions, Question(("temperature_c",), 1, 1, (broken, old)), calls=3)
    bench.asker.round(bench.module, bench.ask, bench.clock, 1, 0.5)
    assert [way.asked for way in (*ways, broken, old)] == [1] * 8, "also the next alternative if one is not supported"
    bench.round()
    assert sum(way.asked for way in (*ways, old)) == 7 + 3


def test_a_slow_gpu_is_not_asked_everything_in_one_round() -> None:
    bench = Bench()

    def slow(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        bench.clock.now += 0.4
        asked.append(bench.clock.now)
        return (1,)

    asked: list[float] = []
    bench.asker = Asker(bench.card, tuple(Question((str(i),), 1, 1, (slow,)) for i in range(9)), 1)
    bench.asker.round(bench.module, bench.ask, bench.clock, 1, 0.5)
    assert len(asked) == 2


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
def test_an_unsupported_call_is_replaced_by_the_next_one_and_not_repeated(code: int) -> None:
    new, old = Told(1), Told(2)
    new.code = code
    bench = Bench(Question(("util_pct",), 1, 1, (new, old)))
    bench.round()
    for _ in range(20):
        sample = bench.round()
    assert (sample.util_pct, new.asked) == (2, 1)
    old.code = code
    for _ in range(20):
        sample = bench.round()
    assert sample.util_pct is None
    assert sample.absent["util_pct"] in ("not supported", "this driver does not offer it")
    assert (new.asked, old.asked) == (1, 21)


def test_a_failure_that_passes_is_asked_again() -> None:
    way = Told(7)
    way.code = UNKNOWN
    bench = Bench(Question(("util_pct",), 1, 1, (way,)))
    assert bench.round().absent["util_pct"] == "NVML: unknown error"
    way.code = None
    sample = bench.round()
    assert sample.util_pct == 7
    assert "util_pct" not in sample.absent


def test_one_value_of_an_answer_can_be_missing() -> None:
    bench = Bench(Question(("mem_used_bytes", "mem_reserved_bytes"), 1, 1, (Told(5, Missing("counted as used")),)))
    sample = bench.round()
    assert sample.mem_used_bytes == 5
    assert sample.absent["mem_reserved_bytes"] == "counted as used"


def test_a_substitute_is_asked_only_for_missing_values() -> None:
    first, second = Told(Missing("not here"), 3), Told(9)
    whole = Question(("pcie_rx_bytes_s", "pcie_tx_bytes_s"), 1, 1, (first,))
    sub = Question(("pcie_rx_bytes_s",), 1, 1, (second,), instead_of=whole)
    other = Told(8)
    useless = Question(("pcie_tx_bytes_s",), 1, 1, (other,), instead_of=whole)
    bench = Bench(whole, sub, useless)
    for _ in range(5):
        sample = bench.round()
    assert (sample.pcie_rx_bytes_s, sample.pcie_tx_bytes_s) == (
        9,
        3,
    )  # a missing value in one does not remove the other
    assert other.asked == 0


def test_a_question_that_depends_on_a_field() -> None:
    mig, instances = Told(False), Told([{"uuid": "MIG-1"}])
    bench = Bench(Question(("mig",), 1, 1, (mig,)), Question(("mig_devices",), 1, 1, (instances,), only_if="mig"))
    bench.round()
    assert bench.round().mig_devices == []
    assert instances.asked == 0
    mig.answer = (True,)
    bench.round()
    assert bench.round().mig_devices == [{"uuid": "MIG-1"}]


def test_a_lost_gpu_shows_no_values_and_drops_old_ones() -> None:
    way = Told(7)
    bench = Bench(Question(("util_pct",), 1, 1, (way,)))
    bench.round()
    way.code = GPU_IS_LOST
    with pytest.raises(CallFailed) as failure:
        bench.round()
    bench.card.lose(failure.value.reason, bench.clock.now)
    sample = bench.sample()
    assert sample.uuid == "GPU-0"
    assert sample.util_pct is None
    assert sample.absent["util_pct"] == "the GPU is lost"
    asked = way.asked
    assert bench.round().util_pct is None  # it is not asked without a handle
    assert way.asked == asked
    way.code = None
    bench.card.open(bench.module, bench.ask)
    assert bench.round().util_pct == 7
    assert way.memos[0] is not way.memos[-1]  # events and buffers of the old handle are void


def test_an_answer_to_a_handle_that_was_lost_meanwhile_is_not_taken() -> None:
    bench = Bench()
    question = Question(("util_pct",), 1, 1, ())
    opened = bench.card.opened
    bench.card.lose("the GPU is lost", bench.clock.now)
    bench.card.open(bench.module, bench.ask)
    bench.card.take(question, (7,), bench.clock.now, opened)
    assert bench.sample().util_pct is None


def test_a_null_handle_is_never_used() -> None:
    bench = Bench()
    bench.module.handle = None
    card = Card(1)
    with pytest.raises(CallFailed, match="no handle"):
        card.open(bench.module, bench.ask)
    assert card.handle is None


def test_values_are_hidden_when_nvml_has_not_answered_for_long() -> None:
    quick, rare = Told(40), Told(700.0)
    bench = Bench(Question(("util_pct",), 1, 1, (quick,)), Question(("power_limit_w",), 30, 1, (rare,)))
    bench.round()
    seen = []

    def never_comes() -> None:
        for seconds in (1.0, SILENT_S - 1.0, 9.0):
            bench.clock.now += seconds
            seen.append(bench.sample())

    bench.ask(never_comes)
    assert [sample.util_pct for sample in seen] == [40, None, None]
    assert [sample.absent.get("util_pct") for sample in seen[1:]] == [
        "NVML has not answered for 3 s",
        "NVML has not answered for 12 s",
    ]
    assert [sample.power_limit_w for sample in seen] == [700.0] * 3  # asked only every 30 s
    assert bench.round().util_pct == 40


def test_a_value_that_is_not_renewed_is_hidden_after_10_seconds() -> None:
    bench = Bench(Question(("util_pct",), 1, 1, (Told(40),)))
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
    assert throttle_words(bits) == words


def test_the_questions_fit_into_eight_calls_a_second() -> None:
    """The average number of due calls is below each thread's share, so that all calls are made."""
    for questions, calls in ((CHEAP, 5), (EXPENSIVE, 3)):
        asked = [q for q in questions if q.instead_of is None]
        assert sum(q.calls / q.every_s for q in asked) <= calls
        assert max(q.calls for q in questions) <= calls
    fields = {name for q in (*CHEAP, *EXPENSIVE) for name in q.fields}
    computed = {"uuid", "name", "of_run", "visible", "ordinals", "retired_pages", "processes", "process_count"}
    computed |= {"mem_run_bytes", "mem_others_bytes", "mem_torch_bytes"}
    assert fields | computed == {*VALUES, "compute", "graphics", "retired_single", "retired_double"}


def test_an_error_that_is_not_nvmls_is_contained() -> None:
    def odd(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        raise ValueError("odd structure")

    def unknown(nvml: Any, handle: Any, memo: dict[str, Any]) -> tuple[Any, ...]:
        return (nvml.nvmlDeviceGetWhatNobodyKnows(handle),)

    bench = Bench(Question(("util_pct",), 1, 1, (odd,)), Question(("power_w",), 1, 1, (unknown,)))
    absent = bench.round().absent
    assert absent["util_pct"] == "NVML: ValueError: odd structure"
    assert absent["power_w"] == "the installed nvidia-ml-py does not know it"
