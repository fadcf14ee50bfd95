"""Waits between ranks in the script's own collectives, which the end of the backward pass does not show. Pure.

A rank that comes late to a collective spends the least time in it, because the others are already there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev
from typing import NamedTuple

from dpmon.model.numbers import count_of, duration, percent
from dpmon.model.stragglers import RankTimes
from dpmon.store.answers import OwnCollectives

LEAST_SHARE = 0.1
"""Smallest loss to report, as a part of a step. Only a few steps are sampled, so a smaller loss may be chance."""
MIN_SAMPLES = 3
"""Fewest sampled steps that all ranks share."""
CERTAIN = 4.0
"""Smallest loss, in standard errors of its mean over the sampled steps."""
WITHIN = 0.8
"""Part of the time in the collectives that must also be in phase `other`: an asynchronous collective that runs during
other phases delays nobody."""
LATE = 0.5
"""Largest time of the late rank in the collectives, as a part of the others' median."""


class OwnWait(NamedTuple):
    """The rank that the others wait for in the script's own collectives; times in ns per sampled step."""

    rank: str
    """Its name: "rank 1"."""
    names: str
    """The operations: "all_reduce and barrier"."""
    late_ns: float
    """The rank's own time in the collectives."""
    others_ns: float
    """The others' time: the median over the ranks of each step, on average."""
    samples: int
    """Number of sampled steps."""
    step_ns: float
    """The ranks' mean step."""

    @property
    def share(self) -> float:
        """The loss as a share of the mean step (0 to 1)."""
        return min(self.lost_ns / self.step_ns, 1.0)

    @property
    def lost_ns(self) -> float:
        """How long the other ranks wait."""
        return self.others_ns - self.late_ns

    @property
    def sentence(self) -> str:
        """Which rank the others wait for, where and how long."""
        return (
            f"the others wait for {self.rank} in the script's own {self.names}: {duration(self.lost_ns)} a step"
            f" ({percent(self.share)}), in {count_of(self.samples, 'sampled step')}"
        )


def names_of(own: Sequence[OwnCollectives]) -> str:
    """The operations of the script's own collectives: "all_reduce and barrier"; empty without any."""
    return " and ".join(sorted({name for one in own for name in one.names}))


def own_wait(ranks: Sequence[RankTimes], own: Sequence[OwnCollectives]) -> OwnWait | None:
    """The rank that comes late to the script's own collectives; None if none stands out, or too little is known."""
    took = {one.process: one.took_ns for one in own}
    if len(ranks) < 2 or any(one.process not in took or not one.step_ns for one in ranks):
        return None
    steps = set.intersection(*(set(took[one.process]) for one in ranks))
    if len(steps) < MIN_SAMPLES:
        return None
    waits = {one.process: fmean(took[one.process][step] for step in steps) for one in ranks}
    if any(one.phases.get("other", 0.0) < WITHIN * waits[one.process] for one in ranks):
        return None
    late = min(ranks, key=lambda one: waits[one.process])
    others = [took[one.process] for one in ranks if one is not late]
    lost = [median(times[step] for times in others) - took[late.process][step] for step in steps]
    found = OwnWait(
        f"process {late.process}" if late.rank is None else f"rank {late.rank}",
        names_of(own),
        waits[late.process],
        waits[late.process] + fmean(lost),
        len(steps),
        fmean(one.step_ns or 0.0 for one in ranks),
    )
    certain = fmean(lost) >= CERTAIN * stdev(lost) / math.sqrt(len(lost))
    return found if certain and found.share >= LEAST_SHARE and found.late_ns <= LATE * found.others_ns else None
