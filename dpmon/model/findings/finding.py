"""A finding: a problem that was detected, its evidence, and advice with an upper bound on the time it saves."""

from __future__ import annotations

from typing import NamedTuple

from dpmon.text.formatting import format_long_duration


class Finding(NamedTuple):
    """A possible problem of a run."""

    kind: str
    """data, copy, slower, replicate, transfer, idle, small batch, uneven, fuller, throttled, slow link, low use,
    small kernels, drift, stall, long steps, spread, between, evaluation, quiet, failed, loss, crowded, straggler,
    in turn, own collectives, exposed, bucket, accumulation, unused, memory, checkpoints,
    recompiled, graph break, sync, wrong."""
    text: str
    """The problem, in one sentence."""
    ground: str
    """The evidence: the metrics behind it."""
    advice: str
    """What to try."""
    weight: float
    """Importance, for sorting: roughly the affected share of the time (0 to 1)."""
    saves_s: float | None = None
    """Upper bound on the elapsed time (s) saved if the cause is fixed: the time in the evidence; None if unknown."""
    elapsed_s: float | None = None
    """Elapsed time of the run (s), which includes `saves_s`; None if the finding is not about a whole run."""

    @property
    def gain_text(self) -> str:
        """The largest gain, in words: "saves at most 1.20 s of 97.0 s"; empty if it is unknown."""
        if self.saves_s is None or self.elapsed_s is None:
            return ""
        saved, elapsed = (format_long_duration(seconds * 1e9) for seconds in (self.saves_s, self.elapsed_s))
        return f"saves at most {saved} of {elapsed}"

    @property
    def advice_text(self) -> str:
        """The advice with its largest gain: "try (saves at most 1.20 s of 97.0 s): more workers"."""
        return f"try{f' ({self.gain_text})' if self.gain_text else ''}: {self.advice}"

    @property
    def whole_text(self) -> str:
        """The problem, its evidence and the advice."""
        return f"{self.text} Evidence: {self.ground}; {self.advice_text}"
