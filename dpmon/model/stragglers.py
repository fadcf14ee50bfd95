"""Finds the ranks that the others wait for, and the phase that delays them.

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

from dpmon.record.schema import EXPOSED, STEP, STEP_PHASES, STRAGGLER_DELAY, UNCOMPARED, WAIT, device_series
from dpmon.record.shared_names import node_suffix, rank_name
from dpmon.store.tally import Tally
from dpmon.text.formatting import format_count, format_duration, format_percent

if TYPE_CHECKING:
    from dpmon.store.step_stats import StatsWindow

Group = tuple[int, ...] | range
"""The ranks of a process group, in order; a range if they are the first ones of the run, as of a thousand ranks."""
MIN_EXCESS_SHARE = 0.05
"""Smallest excess to report, as a part of a step. Similar tools use 10%. But a rank that is slower by 10% also makes
the step longer, so its excess is less than 10% of that step."""
MIN_CAUSE_SHARE = 0.8
"""Part of the excess that one phase must cover to be named."""
MAX_ALIKE_SHARE = 0.2
"""Ranks count as equally slow if they wait at most this part of the way from the least wait to the others' median."""
MIN_STEPS = 20
SERIES = (
    *(STEP, *STEP_PHASES, *map(device_series, STEP_PHASES), EXPOSED, WAIT, STRAGGLER_DELAY, UNCOMPARED),
    *("synced", "updates"),
)
"""Series that `build_rank_times` reads."""
_DEVICE_SERIES = {phase: device_series(phase) for phase in STEP_PHASES}
_SIGMAS = 4.0
"""Standard deviations by which ranks must be the slowest more often than by chance."""
_SYNC, _FORWARD = "sync", "forward"
wait_of: Callable[[RankTimes], float] = attrgetter("wait_ns")
"""The wait of a rank (ns); only for ranks with a known wait."""
_MAX_NAMED_RANKS = 3
"""Most names in a list of ranks; a longer list ends with a count ("ranks 0, 1 and 3 more")."""


class RankTimes(NamedTuple):
    """Mean times of the training steps or updates of one rank, in ns; None if unknown."""

    process: int
    rank: int
    steps: int
    step_ns: float | None
    """Without steps in which a rank may wait for steps of another kind, as `exposed_ns` and `wait_ns`."""
    phases: Mapping[str, float]
    """Mean time (ns) of each phase that ran; device time if known."""
    joined: int = 0
    """Steps with known waits between ranks."""
    exposed_ns: float | None = None
    """Exposed communication, the same on all ranks. Steps or updates without averaging count as 0."""
    wait_ns: float | None = None
    """Its wait for the slowest rank. Steps or updates without averaging count as 0."""
    slowest: int = 0
    """Steps in which the others waited for it."""
    synced: int = 0
    """Backward passes that averaged gradients, in all steps."""
    updates: int = 0
    """Optimizer updates in all steps."""
    group: Group | None = None
    """The ranks with which it averages its gradients; None if unknown."""
    waits_in_forward: bool = False
    """Whether ranks wait for each other in the forward of the model, too."""
    node: str | None = None
    """Its node; None on one machine."""
    unit: str = "step"
    """What the times are means of: "step" or "update"."""

    def per_update(self, steps: float) -> RankTimes:
        """Return the mean times of an update, which has this many steps; these must be mean times of a step."""
        times = (self.step_ns, self.exposed_ns, self.wait_ns)
        step_ns, exposed_ns, wait_ns = (None if ns is None else ns * steps for ns in times)
        phases = {name: ns * steps for name, ns in self.phases.items()}
        return self._replace(step_ns=step_ns, phases=phases, exposed_ns=exposed_ns, wait_ns=wait_ns, unit="update")

    @property
    def wait_share(self) -> float | None:
        """Wait of the rank as a share of step time (0 to 1); None if it is unknown."""
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
    """Time per `unit` that the others wait for them: the others' median wait minus the slowest rank's wait."""
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
    unit: str = "step"
    """What the times are means of: "step" or "update"."""

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
        same_node = len(set(nodes)) == 1
        names = [
            f"{rank}{'' if same_node else node_suffix(node)}" for rank, node in zip(self.ranks, nodes, strict=True)
        ]
        if len(names) > _MAX_NAMED_RANKS:
            names[_MAX_NAMED_RANKS - 1 :] = [f"{len(names) - _MAX_NAMED_RANKS + 1} more"]
        return f"ranks {', '.join(names[:-1])} and {names[-1]}{node_suffix(nodes[0]) if same_node else ''}"


def build_rank_times(process: int, rank: int, tally: Tally, node: str | None = None) -> RankTimes:
    """Return the mean times of a rank from the tally of its training steps."""
    steps = max(tally.steps, 1)
    syncs_per_step = tally.stat(_SYNC).count / steps
    whole, uncompared = tally.stat(STEP), tally.stat(UNCOMPARED)
    compared_steps = whole.count - uncompared.count

    def mean(name: str, scale: float = 1.0) -> float | None:
        mean_ns = tally.stat(name).mean
        return None if mean_ns is None else mean_ns * scale

    phases = {}
    for name in STEP_PHASES:
        host, device_mean = tally.stat(name), tally.stat(_DEVICE_SERIES[name]).mean
        if host.mean is not None:
            phases[name] = (host.mean if device_mean is None else device_mean) * host.count / steps
    return RankTimes(
        process,
        rank,
        tally.steps,
        (whole.total - uncompared.total) / compared_steps if compared_steps > 0 else None,
        phases,
        tally.stat(WAIT).count,
        mean(EXPOSED, syncs_per_step),
        mean(WAIT, syncs_per_step),
        tally.stat(STRAGGLER_DELAY).count,
        tally.stat("synced").total,
        tally.updates,
        node=node,
    )


def rank_times_in_window(
    window: StatsWindow, numbers: Mapping[int, int | None], nodes: Mapping[int, str | None]
) -> tuple[RankTimes, ...]:
    """Return the mean times of each rank in a window; a restarted rank includes all its processes.

    `numbers`: the rank of each process; `nodes`: its node. Processes without a rank and warm-up steps are left out.
    """
    newest: dict[int, int] = {}
    tallies: dict[int, Tally] = {}
    for process in window.processes:
        rank = numbers.get(process)
        if rank is None:
            continue
        newest[rank] = process
        tally = tallies.setdefault(rank, Tally())
        for mode in window.modes:
            tally.merge(window.tally(mode, process=process, without_warmup=True))
    return tuple(
        build_rank_times(newest[rank], rank, tally, nodes.get(newest[rank])) for rank, tally in sorted(tallies.items())
    )


def find_straggler(ranks: Sequence[RankTimes]) -> Straggler | None:
    """Return the ranks that the others wait for; None if no rank stands out, or too little is known.

    With several process groups, they are the slow ranks of the group that waits longest.
    """
    groups = _groups([rank for rank in ranks if rank.joined >= MIN_STEPS])
    stragglers = [straggler for members in groups if (straggler := _find_in_group(members)) is not None]
    return max(stragglers, key=lambda slow: slow.excess_ns, default=None)


def _groups(ranks: Iterable[RankTimes]) -> Iterable[list[RankTimes]]:
    """Return the ranks with known waits, by process group; a group with only one such rank is left out."""
    groups: dict[Group | None, list[RankTimes]] = {}
    # No group yet. Most ranks are in the group of the previous rank, so few groups are hashed.
    group: object = groups
    members: list[RankTimes] = []
    for rank in ranks:
        if rank.wait_ns is not None and rank.step_ns:
            if rank.group is not group:
                group, members = rank.group, groups.setdefault(rank.group, [])
            members.append(rank)
    return [members for members in groups.values() if len(members) > 1]


def _find_in_group(members: Sequence[RankTimes]) -> Straggler | None:
    """Return the slow ranks of one process group; None if no rank stands out.

    If ranks also wait for each other in the forward, the time by which a forward exceeds the shortest one counts as a
    wait. The number of steps in which a rank was the slowest is then unknown, so a phase must show the cause.
    """
    waits_in_forward = any(rank.waits_in_forward for rank in members)
    if waits_in_forward:
        least_forward = min(rank.phases.get(_FORWARD, 0.0) for rank in members)
        members = [
            rank._replace(wait_ns=wait_of(rank) + rank.phases.get(_FORWARD, 0.0) - least_forward, slowest=rank.joined)
            for rank in members
        ]
    waits = [*map(wait_of, members)]
    least_ns, *longer_waits = sorted(waits)
    slowest = members[waits.index(least_ns)]
    assert slowest.step_ns is not None
    limit = least_ns + MAX_ALIKE_SHARE * (median(longer_waits) - least_ns)
    slow_ranks = (rank for rank, wait in zip(members, waits, strict=True) if rank is slowest or wait <= limit)
    slow = sorted(slow_ranks, key=lambda rank: (rank.rank, rank.process))
    slow_processes = {rank.process for rank in slow}
    others = [rank for rank in members if rank.process not in slow_processes]
    if not others:
        return None
    steps = max(rank.joined for rank in slow)
    slowest_count = min(sum(rank.slowest for rank in slow), steps)
    excess_ns = median(map(wait_of, others)) - least_ns
    share = excess_ns / slowest.step_ns
    if share < MIN_EXCESS_SHARE or slowest_count < _chance_limit(steps, len(slow) / len(members)):
        return None
    processes, rank_numbers = tuple(rank.process for rank in slow), tuple(rank.rank for rank in slow)
    nodes = tuple(rank.node for rank in slow)
    straggler = Straggler(
        slowest.process,
        slowest.rank,
        processes,
        rank_numbers,
        excess_ns,
        share,
        slowest_count,
        steps,
        None,
        nodes=nodes,
        unit=slowest.unit,
    )
    if waits_in_forward:
        straggler = _with_cause(straggler._replace(slowest=None), slow, others, (_SYNC, _FORWARD))
        return straggler if straggler.phase is not None else None
    return _with_cause(straggler, slow, others, (_SYNC,))


def delay_shares(ranks: Sequence[RankTimes]) -> dict[int, float]:
    """Return how much longer the others waited than a rank, as a share of its step (0 to 1), by process.

    The wait of the others is the median of its process group. Ranks below MIN_EXCESS_SHARE are left out.
    """
    shares = {}
    for members in _groups(ranks):
        wait_by_member = [*map(wait_of, members)]
        waits = sorted(wait_by_member)
        # The median is the same without any one of the waits below the middle.
        median_ns, middle_ns = median_without(waits, waits[0]), waits[len(waits) // 2]
        for rank, wait in zip(members, wait_by_member, strict=True):
            step_ns = rank.step_ns or 0.0
            if wait < middle_ns and median_ns - wait >= MIN_EXCESS_SHARE * step_ns:
                shares[rank.process] = min((median_ns - wait) / step_ns, 1.0)
    return shares


def median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values without `value`, which is one of them."""
    index, half = bisect_left(ordered, value), (len(ordered) - 1) // 2
    upper = ordered[half + (index <= half)]
    return upper if len(ordered) % 2 == 0 else (ordered[half - 1 + (index < half)] + upper) / 2


def _with_cause(
    straggler: Straggler, slow: Sequence[RankTimes], others: Sequence[RankTimes], wait_phases: Sequence[str]
) -> Straggler:
    """Return `straggler` with the phase that covers the excess on each slow rank, if there is one.

    `wait_phases`: phases that include waits, which are no cause.
    """
    others_wait_ns = median(map(wait_of, others))
    slow, others = ([rank for rank in ranks if rank.phases] for ranks in (slow, others))  # some of many ranks have none
    if not slow or not others:
        return straggler
    phases_of_slow = {phase: None for rank in slow for phase in rank.phases if phase not in wait_phases}
    needed = [(rank.phases, MIN_CAUSE_SHARE * (others_wait_ns - wait_of(rank))) for rank in slow]
    others_ns = {
        phase: median(rank.phases.get(phase, 0.0) for rank in others)
        for phase in phases_of_slow
        if all(phases.get(phase, 0.0) >= least_ns for phases, least_ns in needed)
    }

    def covered(phase: str) -> float:
        """Return the part of the excess that the phase covers on the slow rank where it covers least."""
        return min((rank.phases.get(phase, 0.0) - others_ns[phase]) / (others_wait_ns - wait_of(rank)) for rank in slow)

    phase = max(others_ns, key=covered, default=None)
    if phase is None or covered(phase) < MIN_CAUSE_SHARE:
        return straggler
    own_ns = fmean(rank.phases.get(phase, 0.0) for rank in slow)
    return straggler._replace(phase=phase, own_ns=own_ns, others_ns=others_ns[phase])


def _chance_limit(steps: int, expected: float) -> float:
    """Return the largest number of steps in which a slow rank could be the slowest by chance.

    `expected`: the share of ranks that are slow.
    """
    return steps * expected + _SIGMAS * math.sqrt(steps * expected * (1 - expected))


# ------------------------------------------------------------------------------------------------ words


def straggler_sentence(straggler: Straggler, *, lately: bool) -> str:
    """Return which ranks the others wait for, how long, why and how often. `lately`: only over the last steps."""
    count_text = slowest_count_text(straggler, lately=lately)
    return f"{delay_sentence(straggler)}; {count_text}" if count_text else delay_sentence(straggler)


def delay_sentence(straggler: Straggler) -> str:
    """Return which ranks the others wait for, how long and why."""
    delays, its = ("delay", "their") if straggler.is_group else ("delays", "its")
    excess = f"{format_duration(straggler.excess_ns)} per {straggler.unit} ({format_percent(straggler.share)})"
    delay = f"{straggler.name} {delays} the others by {excess}"
    if straggler.phase is None:
        return f"{delay}, in no single phase"
    subject = "the script's own work (other)" if straggler.phase == "other" else f"{its} {straggler.phase}"
    return f"{delay}: {subject} takes {_compared_times_text(straggler)}"


def slowest_count_text(straggler: Straggler, *, lately: bool) -> str:
    """Return in how many steps one of them was the slowest; empty if unknown."""
    if straggler.slowest is None:
        return ""
    subject = "one of them slowest" if straggler.is_group else "slowest"
    steps = f"{'the last ' if lately else ''}{format_count(straggler.steps)} steps"
    return f"{subject} in {format_count(straggler.slowest)} of {steps}"


def short_sentence(straggler: Straggler) -> str:
    """Return the short form of `straggler_sentence`."""
    cause = f", {straggler.phase} {_compared_times_text(straggler)}" if straggler.phase is not None else ""
    excess = f"{format_duration(straggler.excess_ns)} ({format_percent(straggler.share)})"
    return f"others wait for {straggler.name}: {excess}{cause}"


def _compared_times_text(straggler: Straggler) -> str:
    others = format_duration(straggler.others_ns) if straggler.others_ns else "none"
    return f"{format_duration(straggler.own_ns)}, others {others}"
