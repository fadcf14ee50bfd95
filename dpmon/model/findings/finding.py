"""A finding: a problem that was detected, its evidence, and advice with an upper bound on what it saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from dpmon.text.formatting import format_percent

OF_RUN = ("between", "evaluation")
"""Kinds of findings whose `saves` is a share of the run's time; that of other kinds is a share of its steps."""
MAX_SAVED_SHARE = 0.99
"""The largest share of the time that advice promises to save."""
MAX_RATE_SHARE = 0.95
"""The largest share that is given as a rate. Above it, a small error of the share would change the rate much."""


class Finding(NamedTuple):
    """A possible problem of a run."""

    kind: str
    """data, copy, slower, replicate, transfer, idle, small batch, uneven, fuller, throttled, low use, drift, stall,
    spread, between, evaluation, quiet, failed, loss, busy, crowded, straggler, in turn, own collectives, exposed,
    bucket, accumulation, unused."""
    text: str
    """The problem, in one sentence."""
    ground: str
    """The evidence: the metrics behind it."""
    advice: str
    """What to try."""
    weight: float
    """Importance, for sorting: roughly the affected share of the time (0 to 1)."""
    saves: float | None = None
    """Upper bound on the share of the time (0 to 1) saved if the cause is fixed, see OF_RUN; None if unknown."""
    parts: Mapping[str, float] = {}
    """The parts of `saves` that other findings may include, too: by phase, or "wait", "exposed", "between"."""

    @property
    def gain_limit_text(self) -> str:
        """The largest gain, in words: "steps up to 31% faster"; empty if it is unknown."""
        if self.saves is None:
            return ""
        return f"{'run' if self.kind in OF_RUN else 'steps'} {format_gain_limit(self.saves)}"

    @property
    def advice_text(self) -> str:
        """The advice with its largest gain: "try (steps up to 31% faster): more workers"."""
        return f"try{f' ({self.gain_limit_text})' if self.gain_limit_text else ''}: {self.advice}"


def format_gain_limit(saves: float) -> str:
    """Return the largest gain if a share of the time is saved: "up to 31% faster", "up to 4.0× as fast".

    For a share above MAX_RATE_SHARE: "in 2% of the time at best".
    """
    left = 1 - min(saves, MAX_SAVED_SHARE)
    return (
        f"in {format_percent(left)} of the time at best" if saves > MAX_RATE_SHARE else f"up to {format_gain(1 / left)}"
    )


def format_gain(speedup: float) -> str:
    """Return the ratio of two rates (1 or more) in words: "31% faster", "4.0× as fast"."""
    return f"{format_percent(speedup - 1)} faster" if speedup < 2 else f"{speedup:.1f}× as fast"
