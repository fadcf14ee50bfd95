"""Adds device times to records of `synthetic`, as the tracer does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from synthetic import LEARNS, Training, call_row, step_row

from dpmon.record.history_rows import CallRow, Definition, Row
from dpmon.record.record_types import Step
from dpmon.record.shared_names import Untimed

GPUS = ("cuda:0", "cuda:1")
OF_CALL = (0.5, 1.0, 2.0, 0.25)
OF_STEP = (0.25, 4.0, 3.0, 0.5)
HOST_ONLY = "the devices are CPUs: host time is all there is"


def timed(
    rows: Sequence[Row],
    replicas: Callable[[int], Sequence[float | None]] = lambda number: (1.5, 1.75),
    why: int = Untimed.NONE,
    of_step: Sequence[float | None] = OF_STEP,
    of_call: Sequence[float | None] = OF_CALL,
) -> list[Row]:
    """Return the records with device times; `replicas`: times of the replicas in call `number`, ms."""
    found: list[Row] = []
    number = 0
    for row in rows:
        if isinstance(row, CallRow):
            number += 1
            row = row.with_device_times((*of_call, *replicas(number)), why)
        elif isinstance(row, Step):
            row = row.with_device_times(of_step, why)
        found.append(row)
    return found


def growing(number: int) -> tuple[float, float]:
    """Return 1, 2, 3 ... ms for the first replica, and twice that for the second."""
    return float(number), 2.0 * number


def trained(steps: int = 9, replicas: Any = growing, **how: Any) -> list[Row]:
    made = Training(devices=GPUS, virtual=False)
    return [*made.begin(), *timed(made.run(steps), replicas, **how)]


def staged(calls: int, took: Callable[[int], Sequence[float | None]] | None) -> list[Row]:
    """Return calls of a model with two stages; calls with an even number have another size."""
    absent = {"device_ms": HOST_ONLY}
    layout = {"root": "Toy", "via": None, "virtual": False, "devices": list(GPUS), "absent": absent}
    found: list[Row] = [
        Definition(1, layout),
        Definition(2, [["0", [30, 8], "int64", 1920]]),
        Definition(3, [["", [30, 5], "float32", 600]]),
        Definition(4, {"device": "cuda:0", "parts": ["embedding"]}),
        Definition(5, {"device": "cuda:1", "parts": ["rnn"]}),
        Definition(6, [["", [15, 5], "float32", 300]]),
    ]
    for number in range(1, calls + 1):
        gave = 6 if number % 2 == 0 else 3
        stages = (4, 2, 3, 0, 2_000_000, 5, 3, gave, 2_000_000, 5_000_000)
        numbers = 1, number, number, number * 10**7, 9_000_000, 2, gave
        call = call_row("single", LEARNS, *numbers, stages=stages)
        found.append(call if took is None else call.with_device_times((*[None] * 4, *took(number)), Untimed.LATE))
        found.append(step_row("single", number, number * 10**7, 9_500_000, 30, (-1, 9_000_000, -1, -1)))
    return found
