"""Defines the training rate, for the screen, the report, the summary, JSON lines and metrics. Pure.

A rate is a number of steps or samples divided by the elapsed training time. That time runs from the start of the first
step to the end of the last one, without pauses, evaluations and waits for input (dpmon.store.accounting). The time
between two steps counts, for example to start workers, write a checkpoint or log an epoch.
"""

from __future__ import annotations

from typing import NamedTuple

SAME_RATE = 0.03
"""Up to this relative difference of the two rates, only the first one is shown."""


class Rate(NamedTuple):
    """Steps and samples per second of elapsed training time, and per second within steps.

    Samples are None if a step has no sample count.
    """

    steps_per_s: float
    samples_per_s: float | None
    steps_within: float
    samples_within: float | None

    @property
    def apart(self) -> bool:
        """Whether the two rates differ so much that both must be shown."""
        return abs(self.steps_within / self.steps_per_s - 1) > SAME_RATE


def span_rate(steps: float, samples: float | None, elapsed_ns: float, step_ns: float, at_once: float = 1.0) -> Rate:
    """Return the rate of `steps` in `elapsed_ns` (above 0). `at_once`: number of processes that train at once."""
    within = step_ns if step_ns > 0 else elapsed_ns
    return Rate(
        steps * 1e9 / elapsed_ns,
        None if samples is None else samples * 1e9 / elapsed_ns * at_once,
        steps * 1e9 / within,
        None if samples is None else samples * 1e9 / within * at_once,
    )


def as_fields(rate: Rate | None) -> dict[str, float | None]:
    """Return the values of the rate by their names in JSON; all are None without a rate."""
    names = ("steps_per_s", "samples_per_s", "steps_per_s_within_steps", "samples_per_s_within_steps")
    return dict(zip(names, rate or (None,) * len(names), strict=True))
