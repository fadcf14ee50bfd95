"""Which operators of a profile take most time."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch.autograd.profiler import DeviceType

from dpmon.tracer.profiling import find_top_operators


class KinetoEvent(NamedTuple):
    """An event of Kineto, times in ns."""

    label: str
    start: int
    end: int
    thread: int = 1
    on_gpu: bool = False
    is_annotation: bool = False
    is_async_span: bool = False

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.end - self.start

    def start_thread_id(self) -> int:
        return self.thread

    def device_type(self) -> Any:
        return DeviceType.CUDA if self.on_gpu else DeviceType.CPU

    def is_user_annotation(self) -> bool:
        return self.is_annotation

    def is_async(self) -> bool:
        return self.is_async_span


def top_operators(*events: KinetoEvent) -> dict[tuple[Any, Any], tuple[Any, Any]]:
    """Return calls and time (ns) of the top operators, by place and name, those with most time first."""
    found = find_top_operators(list(events))
    return {(row["on"], row["name"]): (row["calls"], round(float(str(row["ms"])) * 1e6)) for row in found}


def test_the_time_of_an_operator_is_without_that_of_operators_it_calls() -> None:
    events = [
        KinetoEvent("linear", 0, 100),
        KinetoEvent("addmm", 10, 80),
        KinetoEvent("copy", 10, 30),
        KinetoEvent("addmm", 100, 150),
    ]
    expected = {("host", "addmm"): (2, 100), ("host", "linear"): (1, 30), ("host", "copy"): (1, 20)}
    assert top_operators(*reversed(events)) == expected
    assert list(top_operators(*events)) == list(expected)


def test_an_operator_may_call_itself() -> None:
    assert top_operators(KinetoEvent("to", 0, 100), KinetoEvent("to", 10, 90)) == {("host", "to"): (2, 100)}


def test_threads_streams_and_spans_around_others_do_not_mix() -> None:
    found = top_operators(
        KinetoEvent("backward", 0, 100),
        KinetoEvent("forward", 10, 50, thread=2),
        KinetoEvent("all_reduce", 0, 90, is_async_span=True),
        KinetoEvent("gemm", 20, 120, on_gpu=True),
        KinetoEvent("copy", 30, 60, on_gpu=True),
        KinetoEvent("Optimizer.step", 0, 200, on_gpu=True, is_annotation=True),
    )
    assert found == {
        ("host", "backward"): (1, 100),
        ("device", "gemm"): (1, 100),
        ("host", "forward"): (1, 40),
        ("device", "copy"): (1, 30),
    }
