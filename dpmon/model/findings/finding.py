"""A finding: a problem that was detected, its evidence, and advice with an upper bound on what it saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dpmon.text.formatting import format_percent

OF_RUN = ("between", "evaluation")
"""Kinds of findings about the time of the run, not only of its training steps."""
MOST_SAVED, MOST_AS_RATE = 0.99, 0.95
"""The largest share of the time that advice promises to save, and the largest share with a rate."""


class Finding(NamedTuple):
    """One thing worth a look."""

    kind: str
    """data, copy, slower, replicate, transfer, idle, small batch, uneven, fuller, throttled, low use, drift, stall,
    spread, between, evaluation, quiet, failed, loss, busy, crowded, straggler, in turn, own collectives, exposed,
    bucket, accumulation, unused."""
    text: str
    """The fact, in one sentence."""
    ground: str
    """The figures behind it."""
    advice: str
    """What to try."""
    weight: float
    """Importance, by which findings are sorted: roughly the affected share of the time (0 to 1)."""
    saves: float | None = None
    """The share of the time (0 to 1) that goes at most if the cause goes: of the steps, or for the kinds in OF_RUN of
    the run. None where no bound is sound."""
    parts: Mapping[str, float] = {}
    """The parts of `saves` that other findings may be about, too: by phase, or "wait", "exposed", "between"."""

    @property
    def gain_limit_text(self) -> str:
        """The most that the advice can bring, in words: "steps at most 31% faster"; empty if unknown."""
        return (
            "" if self.saves is None else f"{'run' if self.kind in OF_RUN else 'steps'} {format_gain_limit(self.saves)}"
        )

    @property
    def advice_text(self) -> str:
        """The advice with the most that it can bring: "try (steps at most 31% faster): more workers"."""
        return f"try{f' ({self.gain_limit_text})' if self.gain_limit_text else ''}: {self.advice}"


def format_gain_limit(saves: float) -> str:
    """The most that is gained without this share of the time: "at most 31% faster", "at most 4.0 times as fast".

    If little time is left, "in 2% of the time at best": a small error of the share would change a rate much.
    """
    left = 1 - min(saves, MOST_SAVED)
    return (
        f"in {format_percent(left)} of the time at best" if saves > MOST_AS_RATE else f"at most {format_gain(1 / left)}"
    )


def format_gain(times: float) -> str:
    """A rate against another one (1 or more): "31% faster", "4.0 times as fast"."""
    return f"{format_percent(times - 1)} faster" if times < 2 else f"{times:.1f} times as fast"
