"""Which rank do the others wait for, and on what does it spend the time? Pure.

In a synchronised backward pass every rank waits for the last one, so the wait is shortest on that rank. Each rank's
mean times over some steps say what the slowest one does longer than the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from dpmon.model.numbers import duration, group, percent
from dpmon.record.schema import EXPOSED, HELD, STEP, STEP_PHASES, WAIT, device_series
from dpmon.store.tally import Tally

LEAST_SHARE = 0.05
"""Part of a step below which nobody is named. Peers use 10 %; but a rank that is slower by 10 % of a step must be
found, and with its time the step grows."""
CAUSE_SHARE = 0.8
"""Part of the excess that one phase must cover to be named."""
MIN_STEPS = 20
SERIES = (STEP, *STEP_PHASES, *map(device_series, STEP_PHASES), EXPOSED, WAIT, HELD)
"""Series that `rank_times` reads."""
_SIGMAS = 4.0
"""A rank must be the slowest more often than by chance, by so many standard deviations."""
_SYNC = "sync"


class RankTimes(NamedTuple):
    """Mean times of the training steps of one rank, in ns; None if unknown."""

    process: int
    rank: int | None
    steps: int
    step_ns: float | None
    phases: Mapping[str, float]
    """By phase that ran; on its device where that is known."""
    joined: int = 0
    """Steps for which it is known how the ranks waited for each other."""
    exposed_ns: float | None = None
    """Communication that no computation hid, the same on all ranks. Steps without averaging count as 0."""
    wait_ns: float | None = None
    """How long it waited for the slowest rank. Steps without averaging count as 0."""
    slowest: int = 0
    """Steps in which the others waited for it."""
    synced: int = 0
    """Backward passes that averaged gradients, in all of the steps."""
    unsynced: int = 0
    """Those that averaged nothing (no_sync)."""
    optimized: int = 0
    """Steps in which an optimizer stepped."""

    @property
    def backward_ns(self) -> float | None:
        """The whole backward pass, with the wait in it."""
        found = self.phases.get("backward")
        return None if found is None else found + self.phases.get(_SYNC, 0.0)

    @property
    def wait_share(self) -> float | None:
        """The part of its steps that it waited (0 to 1)."""
        return self.wait_ns / self.step_ns if self.wait_ns is not None and self.step_ns else None

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        return _name(self.process, self.rank)


class Straggler(NamedTuple):
    """The rank that the others wait for."""

    process: int
    rank: int | None
    excess_ns: float
    """How long the others wait for it in a step: their median wait, less its own."""
    share: float
    """Of the step (0 to 1)."""
    slowest: int
    """In how many steps it was the slowest."""
    steps: int
    phase: str | None
    """The phase that covers its excess; None if no phase does."""
    own_ns: float | None = None
    """The mean time of that phase on this rank, and the median of the means of the others."""
    others_ns: float | None = None

    @property
    def name(self) -> str:
        """What it is called in a sentence."""
        return _name(self.process, self.rank)


def rank_times(process: int, rank: int | None, tally: Tally) -> RankTimes:
    """The mean times of a rank, from the tally of its training steps."""
    steps = max(tally.steps, 1)
    totals = {name: tally.stat(name) for name in STEP_PHASES}
    wait = tally.stat(WAIT)
    averaged = totals[_SYNC].count / steps

    def mean(series: str) -> float | None:
        found = tally.stat(series).mean
        return None if found is None else found * averaged

    return RankTimes(
        process,
        rank,
        tally.steps,
        tally.stat(STEP).mean,
        {name: _mean(tally, name) * stat.count / steps for name, stat in totals.items() if stat.count},
        wait.count,
        mean(EXPOSED),
        mean(WAIT),
        tally.stat(HELD).count,
        tally.sum("synced").total,
        tally.sum("unsynced").total,
        totals["optimizer"].count,
    )


def _mean(tally: Tally, phase: str) -> float:
    """The mean time of a phase that ran."""
    on_device = tally.stat(device_series(phase)).mean
    return (tally.stat(phase).mean or 0.0) if on_device is None else on_device


def straggler(ranks: Sequence[RankTimes]) -> Straggler | None:
    """The rank that the others wait for; None if no rank stands out, or too little is known."""
    known = [one for one in ranks if one.joined >= MIN_STEPS and one.wait_ns is not None and one.step_ns]
    if len(known) < 2:
        return None
    slow = min(known, key=lambda one: one.wait_ns or 0.0)
    others = [one for one in known if one is not slow]
    assert slow.wait_ns is not None
    assert slow.step_ns is not None
    excess = median(one.wait_ns or 0.0 for one in others) - slow.wait_ns
    share = excess / slow.step_ns
    if share < LEAST_SHARE or slow.slowest < _by_chance(slow.joined, len(known)):
        return None
    found = Straggler(slow.process, slow.rank, excess, share, slow.slowest, slow.joined, None)
    usual = {phase: median(one.phases.get(phase, 0.0) for one in others) for phase in slow.phases if phase != _SYNC}
    phase = max(usual, key=lambda name: slow.phases[name] - usual[name], default=None)
    if phase is None or slow.phases[phase] - usual[phase] < CAUSE_SHARE * excess:
        return found
    return found._replace(phase=phase, own_ns=slow.phases[phase], others_ns=usual[phase])


def _by_chance(steps: int, ranks: int) -> float:
    """How often a rank may be the slowest by chance in so many steps."""
    expected = 1 / ranks
    return steps * expected + _SIGMAS * math.sqrt(steps * expected * (1 - expected))


# ------------------------------------------------------------------------------------------------ words


def sentence(found: Straggler, *, lately: bool) -> str:
    """Which rank the others wait for, how long, why and how often; `lately`: the figures are of the last steps."""
    return f"{held_up(found)}; {how_often(found, lately=lately)}"


def held_up(found: Straggler) -> str:
    """Which rank the others wait for, how long and why."""
    head = f"{found.name} holds the others up by {duration(found.excess_ns)} a step ({percent(found.share)})"
    if found.phase is None:
        return f"{head}, in no single phase"
    what = "the script's own work (other)" if found.phase == "other" else f"its {found.phase}"
    return f"{head}: {what} takes {_against(found)}"


def how_often(found: Straggler, *, lately: bool) -> str:
    """In how many steps it was the slowest."""
    return f"slowest in {group(found.slowest)} of {'the last ' if lately else ''}{group(found.steps)} steps"


def in_short(found: Straggler) -> str:
    """The same in few words."""
    cause = f", {found.phase} {_against(found)}" if found.phase is not None else ""
    return f"others wait for {found.name}: {duration(found.excess_ns)} ({percent(found.share)}){cause}"


def _against(found: Straggler) -> str:
    others = f"against {duration(found.others_ns)}" if found.others_ns else "and nothing on the others"
    return f"{duration(found.own_ns)} {others}"


def _name(process: int, rank: int | None) -> str:
    return f"process {process}" if rank is None else f"rank {rank}"
