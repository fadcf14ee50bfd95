"""Finds the ranks that the others wait for, and the phase that delays them. Pure.

In a synchronized backward pass every rank waits for the last one, so the slowest rank waits least. The ranks' mean
times over some steps show which phase takes longer on the slow ranks. Equally slow ranks are named together, because
speeding up only one gains nothing. Only ranks of one process group wait for each other.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from statistics import fmean, median
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import EXPOSED, STEP, STEP_PHASES, STRAGGLER_DELAY, WAIT, device_series
from dpmon.record.shared_names import node_suffix, rank_name
from dpmon.store.tally import Tally
from dpmon.text.formatting import format_count, format_duration, format_percent

if TYPE_CHECKING:
    from dpmon.store.step_stats import StatsWindow

Group = tuple[int, ...] | range
"""The ranks of a process group, in order; a range if they are the first ones of the run, as of a thousand ranks."""
LEAST_SHARE = 0.05
"""Smallest excess to report, as a part of a step. Similar tools use 10%. But a rank that is slower by 10% also makes
the step longer, so its excess is less than 10% of that step."""
CAUSE_SHARE = 0.8
"""Part of the excess that one phase must cover to be named."""
ALIKE_SHARE = 0.2
"""Part of the way from the least wait to the others' median: ranks up to this wait count as equally slow."""
MIN_STEPS = 20
SERIES = (STEP, *STEP_PHASES, *map(device_series, STEP_PHASES), EXPOSED, WAIT, STRAGGLER_DELAY)
"""Series that `build_rank_times` reads."""
_DEVICE = {phase: device_series(phase) for phase in STEP_PHASES}
_SIGMAS = 4.0
"""Standard deviations by which ranks must be the slowest more often than by chance."""
_SYNC, _FORWARD = "sync", "forward"
wait_of: Callable[[RankTimes], float] = attrgetter("wait_ns")
"""The wait of a rank (ns); only for ranks with a known wait."""
_NAMED = 3
"""Most names in a list of ranks; a longer list ends with a count ("ranks 0, 1 and 3 more")."""


class RankTimes(NamedTuple):
    """Mean times of the training steps of one rank, in ns; None if unknown."""

    process: int
    rank: int
    steps: int
    step_ns: float | None
    phases: Mapping[str, float]
    """Mean time (ns) of each phase that ran; device time if known."""
    joined: int = 0
    """Steps with known waits between ranks."""
    exposed_ns: float | None = None
    """Exposed communication, the same on all ranks. Steps without averaging count as 0."""
    wait_ns: float | None = None
    """Its wait for the slowest rank. Steps without averaging count as 0."""
    slowest: int = 0
    """Steps in which the others waited for it."""
    synced: int = 0
    """Backward passes that averaged gradients, in all steps."""
    unsynced: int = 0
    """Backward passes that averaged nothing (no_sync)."""
    optimized: int = 0
    """Steps in which an optimizer stepped."""
    group: Group | None = None
    """The ranks with which it averages its gradients; None if unknown."""
    waits_in_forward: bool = False
    """Whether its model makes ranks wait for each other in the forward, too."""
    node: str | None = None
    """Its node; None on one machine."""

    @property
    def wait_share(self) -> float | None:
        """The share of its step time that the rank waited (0 to 1)."""
        return self.wait_ns / self.step_ns if self.wait_ns is not None and self.step_ns else None


class Straggler(NamedTuple):
    """The rank that the others wait for, or several equally slow ones."""

    process: int
    """Process of the slowest rank."""
    rank: int
    """Number of the slowest rank."""
    processes: tuple[int, ...]
    """Processes of all slow ranks, in the order of `ranks`."""
    ranks: tuple[int, ...]
    """All slow ranks."""
    excess_ns: float
    """Time per step that the others wait for them: the others' median wait minus the slowest rank's wait."""
    share: float
    """`excess_ns` as a share of the step (0 to 1)."""
    slowest: int | None
    """Number of steps in which one of them was the slowest; None if unknown."""
    steps: int
    phase: str | None
    """The phase that covers the excess on each of them; None if no phase does."""
    own_ns: float | None = None
    """The phase's mean time on these ranks, and the median of the others' means."""
    others_ns: float | None = None
    nodes: tuple[str | None, ...] = ()
    """The node of each rank in `ranks`; None on one machine."""

    @property
    def is_group(self) -> bool:
        """Whether there are several such ranks."""
        return len(self.processes) > 1

    @property
    def name(self) -> str:
        """The ranks as part of a sentence: "rank 1", "ranks 0 and 2", "rank 11 (gpu-3)", "ranks 8 and 9 (gpu-1)"."""
        nodes = self.nodes or (None,) * len(self.ranks)
        if len(self.ranks) == 1:
            return rank_name(self.ranks[0], nodes[0])
        together = len(set(nodes)) == 1
        words = [f"{rank}{'' if together else node_suffix(node)}" for rank, node in zip(self.ranks, nodes, strict=True)]
        if len(words) > _NAMED:
            words[_NAMED - 1 :] = [f"{len(words) - _NAMED + 1} more"]
        return f"ranks {', '.join(words[:-1])} and {words[-1]}{node_suffix(nodes[0]) if together else ''}"


def build_rank_times(process: int, rank: int, tally: Tally, node: str | None = None) -> RankTimes:
    """The mean times of a rank, from the tally of its training steps."""
    steps = max(tally.steps, 1)
    averaged = tally.stat(_SYNC).count / steps

    def mean(name: str, times: float = 1.0) -> float | None:
        found = tally.stat(name).mean
        return None if found is None else found * times

    phases = {}
    for name in STEP_PHASES:
        ran, on_device = tally.stat(name), tally.stat(_DEVICE[name]).mean
        if ran.mean is not None:
            phases[name] = (ran.mean if on_device is None else on_device) * ran.count / steps
    return RankTimes(
        process,
        rank,
        tally.steps,
        mean(STEP),
        phases,
        tally.stat(WAIT).count,
        mean(EXPOSED, averaged),
        mean(WAIT, averaged),
        tally.stat(STRAGGLER_DELAY).count,
        tally.sum("synced").total,
        tally.sum("unsynced").total,
        tally.stat("optimizer").count,
        node=node,
    )


def rank_times_in_window(
    window: StatsWindow, numbers: Mapping[int, int | None], nodes: Mapping[int, str | None]
) -> tuple[RankTimes, ...]:
    """The mean times of each rank in a window; a restarted rank includes all its processes.

    `numbers`: the rank of each process; `nodes`: its node. Omits processes without a rank, and the first steps after a
    change of mode.
    """
    found: dict[int, tuple[int, Tally]] = {}
    for process in window.processes:
        rank = numbers.get(process)
        if rank is not None:
            whole = found.get(rank, (process, Tally()))[1]
            for mode, evaluation in window.modes:
                if not evaluation:
                    whole.merge(window.tally(mode, process=process, settled=True))
            found[rank] = process, whole
    return tuple(
        build_rank_times(process, rank, tally, nodes.get(process)) for rank, (process, tally) in sorted(found.items())
    )


def find_straggler(ranks: Sequence[RankTimes]) -> Straggler | None:
    """The ranks that the others wait for; None if no rank stands out, or too little is known.

    If there are several process groups, only the slow ranks of the group that waits longest.
    """
    groups = _groups([one for one in ranks if one.joined >= MIN_STEPS])
    found = [slow for members in groups if (slow := _find_in_group(members)) is not None]
    return max(found, key=lambda slow: slow.excess_ns, default=None)


def _groups(ranks: Iterable[RankTimes]) -> Iterable[list[RankTimes]]:
    """The ranks with known waits, by process group; a group with only one such rank is left out."""
    found: dict[Group | None, list[RankTimes]] = {}
    group: object = found  # no group yet; most ranks are in the group of the rank before, so few are hashed
    members: list[RankTimes] = []
    for one in ranks:
        if one.wait_ns is not None and one.step_ns:
            if one.group is not group:
                group, members = one.group, found.setdefault(one.group, [])
            members.append(one)
    return [members for members in found.values() if len(members) > 1]


def _find_in_group(members: Sequence[RankTimes]) -> Straggler | None:
    """The slow ranks of one process group; None if no rank stands out.

    If ranks also wait for each other in the forward, the excess of a forward over the shortest forward counts as a
    wait. The number of steps in which a rank was the slowest is then unknown, so a phase must show the cause.
    """
    hidden = any(one.waits_in_forward for one in members)
    if hidden:
        least_forward = min(one.phases.get(_FORWARD, 0.0) for one in members)
        members = [
            one._replace(wait_ns=wait_of(one) + one.phases.get(_FORWARD, 0.0) - least_forward, slowest=one.joined)
            for one in members
        ]
    waits = [*map(wait_of, members)]
    least, *above = sorted(waits)
    slowest = members[waits.index(least)]
    assert slowest.step_ns is not None
    limit = least + ALIKE_SHARE * (median(above) - least)
    late = (one for one, wait in zip(members, waits, strict=True) if one is slowest or wait <= limit)
    slow = sorted(late, key=lambda one: (one.rank, one.process))
    named = {one.process for one in slow}
    others = [one for one in members if one.process not in named]
    if not others:
        return None
    steps = max(one.joined for one in slow)
    times = min(sum(one.slowest for one in slow), steps)
    excess = median(map(wait_of, others)) - least
    share = excess / slowest.step_ns
    if share < LEAST_SHARE or times < _chance_limit(steps, len(slow) / len(members)):
        return None
    processes, numbers = tuple(one.process for one in slow), tuple(one.rank for one in slow)
    nodes = tuple(one.node for one in slow)
    found = Straggler(slowest.process, slowest.rank, processes, numbers, excess, share, times, steps, None, nodes=nodes)
    if hidden:
        found = _with_cause(found._replace(slowest=None), slow, others, (_SYNC, _FORWARD))
        return found if found.phase is not None else None
    return _with_cause(found, slow, others, (_SYNC,))


def delay_shares(ranks: Sequence[RankTimes]) -> dict[int, float]:
    """How much longer the others of its process group waited than a rank, by process: a share of its step (0 to 1).

    The wait of the others is their median. Ranks below LEAST_SHARE are left out.
    """
    found = {}
    for members in _groups(ranks):
        own = [*map(wait_of, members)]
        waits = sorted(own)
        # The median is the same without any one of the waits below the middle.
        usual, middle = median_without(waits, waits[0]), waits[len(waits) // 2]
        for one, wait in zip(members, own, strict=True):
            step = one.step_ns or 0.0
            if wait < middle and usual - wait >= LEAST_SHARE * step:
                found[one.process] = min((usual - wait) / step, 1.0)
    return found


def median_without(ordered: Sequence[float], one: float) -> float:
    """The median of sorted values without one of them."""
    at, half = bisect_left(ordered, one), (len(ordered) - 1) // 2
    upper = ordered[half + (at <= half)]
    return upper if len(ordered) % 2 == 0 else (ordered[half - 1 + (at < half)] + upper) / 2


def _with_cause(
    found: Straggler, slow: Sequence[RankTimes], others: Sequence[RankTimes], waits: Sequence[str]
) -> Straggler:
    """`found` with the phase that covers the excess on each slow rank, if any; `waits`: phases that include waits."""
    waited = median(map(wait_of, others))
    slow, others = ([one for one in each if one.phases] for each in (slow, others))  # some of many ranks have none
    if not slow or not others:
        return found
    ran = {phase: None for one in slow for phase in one.phases if phase not in waits}
    enough = [(one.phases, CAUSE_SHARE * (waited - wait_of(one))) for one in slow]
    usual = {
        phase: median(one.phases.get(phase, 0.0) for one in others)
        for phase in ran
        if all(phases.get(phase, 0.0) >= least for phases, least in enough)
    }

    def covered(phase: str) -> float:
        """The part of the excess that the phase covers, on the slow rank where it covers least."""
        return min((one.phases.get(phase, 0.0) - usual[phase]) / (waited - wait_of(one)) for one in slow)

    phase = max(usual, key=covered, default=None)
    if phase is None or covered(phase) < CAUSE_SHARE:
        return found
    own = fmean(one.phases.get(phase, 0.0) for one in slow)
    return found._replace(phase=phase, own_ns=own, others_ns=usual[phase])


def _chance_limit(steps: int, expected: float) -> float:
    """The most steps in which a slow rank may be the slowest by chance. `expected`: the share of slow ranks."""
    return steps * expected + _SIGMAS * math.sqrt(steps * expected * (1 - expected))


# ------------------------------------------------------------------------------------------------ words


def straggler_sentence(found: Straggler, *, lately: bool) -> str:
    """Which ranks the others wait for, how long, why and how often; `lately`: the figures cover only the last steps."""
    often = slowest_count_text(found, lately=lately)
    return f"{delay_sentence(found)}; {often}" if often else delay_sentence(found)


def delay_sentence(found: Straggler) -> str:
    """Which ranks the others wait for, how long and why."""
    holds, its = ("hold", "their") if found.is_group else ("holds", "its")
    excess = f"{format_duration(found.excess_ns)} a step ({format_percent(found.share)})"
    head = f"{found.name} {holds} the others up by {excess}"
    if found.phase is None:
        return f"{head}, in no single phase"
    what = "the script's own work (other)" if found.phase == "other" else f"{its} {found.phase}"
    return f"{head}: {what} takes {_compared_times_text(found)}"


def slowest_count_text(found: Straggler, *, lately: bool) -> str:
    """In how many steps one of them was the slowest; empty if unknown."""
    if found.slowest is None:
        return ""
    which = "one of them slowest" if found.is_group else "slowest"
    return (
        f"{which} in {format_count(found.slowest)} of {'the last ' if lately else ''}{format_count(found.steps)} steps"
    )


def short_sentence(found: Straggler) -> str:
    """`straggler_sentence` in few words."""
    cause = f", {found.phase} {_compared_times_text(found)}" if found.phase is not None else ""
    return f"others wait for {found.name}: {format_duration(found.excess_ns)} ({format_percent(found.share)}){cause}"


def _compared_times_text(found: Straggler) -> str:
    others = f"against {format_duration(found.others_ns)}" if found.others_ns else "and nothing on the others"
    return f"{format_duration(found.own_ns)} {others}"
