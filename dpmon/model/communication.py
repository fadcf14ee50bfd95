"""The cost of communication between ranks, and the facts that their DistributedDataParallel reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from dpmon.model.stragglers import Group, RankTimes, Straggler, delay_shares, find_straggler, wait_of
from dpmon.store.query_results import CollectiveSums
from dpmon.text.formatting import (
    format_bytes,
    format_count,
    format_count_with_noun,
    format_duration,
    format_percent,
    format_three_digits,
)

_MAX_OPERATIONS = 4
"""Most kinds of collectives to name."""
_MAX_BUCKET_RUNS = 4
"""Most runs of equal buckets to name."""
_NO_COLLECTIVES = CollectiveSums()
_NO_WRAPPER = "no DistributedDataParallel averages gradients here, so it is unknown which rank waits for which"
_SEVERAL_GROUPS = "its DistributedDataParallel wrappers have different process groups"
_NOT_YET = "no step is recorded yet in which all ranks averaged their gradients"


class Wrapper(NamedTuple):
    """Facts of a DistributedDataParallel; None if unknown."""

    process: int
    rank: int | None
    number: int
    """Number of the wrapper in its process."""
    root: str
    backend: str | None = None
    group_size: int | None = None
    parameter_bytes: int | None = None
    bucket_bytes: tuple[int, ...] = ()
    """Sizes of the buckets, in the order in which they are averaged."""
    bucket_cap_bytes: int | None = None
    find_unused_parameters: bool = False
    unused_bytes: int | None = None
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: str | None = None
    broadcast_buffers: bool = False
    sync_batch_norm: bool = False
    iteration: int | None = None
    """The last iteration that torch itself timed."""
    comm_ns: float | None = None
    """Communication time of the backward pass, from the first bucket on, as measured by torch."""
    overlap_ns: float | None = None
    """The part of that time in which the backward pass still computed."""
    no_sync_times: str | None = None
    """Why its synchronized passes have no times."""
    group: Group | None = None
    """The ranks that average their gradients, in order."""
    all_used: int = 0
    """Number of recorded iterations in which all parameters were used; 0 if one was unused in any, or if it is unknown.

    In a `Communication`, the least of all ranks.
    """

    @property
    def waits_in_forward(self) -> bool:
        """Whether its ranks wait for each other in the forward, too."""
        return self.sync_batch_norm or self.broadcast_buffers


@dataclass(frozen=True)
class Communication:
    """The ranks' communication in a mean step; ns, None if unknown."""

    ranks: tuple[RankTimes, ...]
    """The ranks, each with its process group if known."""
    wrappers: tuple[Wrapper, ...]
    """The wrappers of one rank, by number."""
    torch_times: Wrapper | None
    """The wrapper of the slowest rank, with torch's own times of the newest iteration."""
    lately: bool
    """Whether the times cover only the last steps, instead of the whole run."""
    missing: str | None
    """Why it is unknown how the ranks wait for each other."""
    collectives: CollectiveSums = _NO_COLLECTIVES
    """The collectives of sampled steps."""
    sampled_of: int = 0
    """Number of steps of all ranks in the time that these samples cover."""
    elsewhere: tuple[RankTimes, ...] = ()
    """The ranks of other nodes, if a picture shows one node alone: its ranks may wait for one of them."""

    @cached_property
    def one_in(self) -> int | None:
        """Interval of samples: one step in this many; None without samples."""
        samples = self.collectives.samples
        return max(round(self.sampled_of / samples), 1) if samples and self.sampled_of else None

    @cached_property
    def ranks_with_waits(self) -> tuple[RankTimes, ...]:
        """The ranks with known waits."""
        return tuple([one for one in self.ranks if one.joined])

    @cached_property
    def ranks_by_wait(self) -> Sequence[RankTimes]:
        """The ranks with known waits, the shortest wait first."""
        return sorted((one for one in self.ranks if one.wait_ns is not None), key=wait_of)

    @cached_property
    def step_count_with_waits(self) -> int:
        """Number of steps with known waits between ranks."""
        return min([one.joined for one in self.ranks_with_waits], default=0)

    @cached_property
    def step_ns(self) -> float | None:
        """The mean step of these ranks."""
        return _mean([one.step_ns for one in self.ranks_with_waits])

    @cached_property
    def exposed_ns(self) -> float | None:
        """Communication that no computation hides."""
        return _mean([one.exposed_ns for one in self.ranks_with_waits])

    @cached_property
    def non_stragglers(self) -> tuple[RankTimes, ...]:
        """The ranks with known waits, without those that the others wait for."""
        slow = self.straggler
        return (
            self.ranks_with_waits
            if slow is None
            else tuple([one for one in self.ranks_with_waits if one.process not in slow.processes])
        )

    @cached_property
    def wait_ns(self) -> float | None:
        """The wait for the slowest rank, as a mean over the ranks that wait."""
        return _mean([one.wait_ns for one in self.non_stragglers])

    @cached_property
    def exposed_share(self) -> float | None:
        """`exposed_ns` as a share of the step (0 to 1)."""
        return _share(self.exposed_ns, self.step_ns)

    @cached_property
    def wait_share(self) -> float | None:
        """`wait_ns` as a share of the step (0 to 1)."""
        return _share(self.wait_ns, self.step_ns)

    @cached_property
    def hidden_share(self) -> float | None:
        """The part of torch's communication time in which the backward pass still computed (0 to 1).

        None with a single bucket, because its communication begins after the last gradient.
        """
        one = self.torch_times
        return _share(one.overlap_ns, one.comm_ns) if one is not None and len(one.bucket_bytes) > 1 else None

    @cached_property
    def steps(self) -> int:
        """The largest number of steps of any rank."""
        return max((one.steps for one in self.ranks), default=0)

    @cached_property
    def passes(self) -> tuple[int, int, int, int]:
        """All steps, backward passes that averaged gradients, those that did not, and steps with an optimizer step."""
        every = [(one.steps, one.synced, one.unsynced, one.optimized) for one in self.ranks if one.steps]
        steps, synced, unsynced, optimized = map(sum, zip(*every, strict=True)) if every else (0, 0, 0, 0)
        return steps, synced, unsynced, optimized

    @property
    def synced(self) -> float | None:
        """Backward passes per step that averaged gradients."""
        return _share(self.passes[1], self.passes[0])

    @property
    def unsynced(self) -> float | None:
        """Backward passes per step that averaged nothing (no_sync)."""
        return _share(self.passes[2], self.passes[0])

    @cached_property
    def delays(self) -> Mapping[int, float]:
        """How much longer the others waited than a rank, by process (dpmon.model.stragglers)."""
        return delay_shares(self.ranks)

    @cached_property
    def straggler(self) -> Straggler | None:
        """The ranks that the others wait for; None if no rank stands out."""
        return find_straggler((*self.ranks, *self.elsewhere))

    @cached_property
    def own_collective_names(self) -> str:
        """The script's own collectives: "all_reduce and barrier"; empty without any."""
        return " and ".join(self.collectives.own)

    @cached_property
    def labeled_texts(self) -> list[tuple[str, str]]:
        """Labels and texts, the most important first."""
        return _labeled_texts(self)

    def with_times(
        self,
        ranks: Sequence[RankTimes],
        wrappers: Sequence[Wrapper],
        elsewhere: Sequence[RankTimes],
        groups: Mapping[int, Group | None],
    ) -> Communication:
        """Return a copy with other times.

        `wrappers`: those of all ranks, as before. `groups`: the process group of each rank.
        """
        missing = (
            None if any(one.joined for one in ranks) else _unknown_wait_reason((*ranks, *elsewhere), self.wrappers)
        )
        waits = any(one.waits_in_forward for one in wrappers)
        times, others = (
            tuple(
                one
                if one.group == groups[one.rank] and one.waits_in_forward == waits
                else one._replace(group=groups[one.rank], waits_in_forward=waits)
                for one in those
            )
            for those in (ranks, elsewhere)
        )
        return replace(self, ranks=times, elsewhere=others, missing=missing)

    def other_waits(self) -> tuple[str, ...]:
        """Sentences about waits between ranks that are not at the end of the backward pass."""
        there = {
            "SyncBatchNorm": any(one.sync_batch_norm for one in self.wrappers),
            "broadcast_buffers": any(one.broadcast_buffers for one in self.wrappers),
        }
        causes, found = [name for name, known in there.items() if known], []
        if causes:
            make = f"{' and '.join(causes)} {'make' if len(causes) > 1 else 'makes'}"
            found.append(f"{make} the ranks wait for each other in the forward, too")
        if self.own_collective_names:
            found.append(
                f"the script's own {self.own_collective_names} may make the ranks wait for each other, too: see `other`"
            )
        return tuple(found)


def build_communication(
    ranks: Sequence[RankTimes],
    wrappers: Sequence[Wrapper],
    collectives: CollectiveSums = _NO_COLLECTIVES,
    sampled_of: int = 0,
    elsewhere: Sequence[RankTimes] = (),
    *,
    lately: bool,
) -> Communication | None:
    """The communication of these ranks; None for one process without a DistributedDataParallel.

    `collectives`: the collectives of sampled steps. `sampled_of`: the number of all steps in the same time.
    `elsewhere`: the ranks of nodes that are not shown.
    """
    if len(ranks) < 2 and not wrappers:
        return None
    first = min(wrappers, key=lambda one: (one.rank is None, one.rank or 0, one.process), default=None)
    own = [
        one._replace(all_used=min(other.all_used for other in wrappers if other.number == one.number))
        for one in wrappers
        if first is not None and one.process == first.process
    ]
    own.sort(key=lambda one: one.number)
    known = Communication((), tuple(own), _torch_times(wrappers), lately, None, collectives, sampled_of)
    return known.with_times(ranks, wrappers, elsewhere, groups_of([one.rank for one in (*ranks, *elsewhere)], wrappers))


def groups_of(ranks: Iterable[int], wrappers: Sequence[Wrapper]) -> Mapping[int, Group | None]:
    """The process group of each rank: of its newest process, or else one that lists it; None if there are several."""
    every = {one.group for one in wrappers} - {None}
    if len(every) == 1:  # as usual; there may be a thousand ranks
        (group,) = every
        members = group if isinstance(group, range) else frozenset(group or ())
        return {rank: group if rank in members else None for rank in ranks}
    own: dict[int | None, dict[Group, int]] = {}
    listed: dict[Group, int] = {}
    for one in wrappers:
        if one.group is not None:
            for newest in (own.setdefault(one.rank, {}), listed):
                newest[one.group] = max(newest.get(one.group, 0), one.process)
    sets = [(frozenset(each), each) for each in listed]
    found = {}
    for rank in ranks:
        known = own.get(rank) or {each: listed[each] for those, each in sets if rank in those}
        last = [each for each, process in known.items() if process == max(known.values())]
        found[rank] = last[0] if len(last) == 1 else None
    return found


def _unknown_wait_reason(ranks: Sequence[RankTimes], wrappers: Sequence[Wrapper]) -> str:
    """Why waits are unknown. `wrappers`: of one rank."""
    if not wrappers:
        return _NO_WRAPPER
    reason = next((one.no_sync_times for one in wrappers if one.no_sync_times), None)
    if reason is not None:
        return reason
    if len({one.group for one in wrappers} - {None}) > 1:
        return _SEVERAL_GROUPS
    size, there = max(one.group_size or 0 for one in wrappers), max(len(ranks), 1)
    if size == 1:
        return "there is only one rank"
    if there < size:
        return f"{there} of {size} ranks are in this record; all of them are needed to see who waits for whom"
    return _NOT_YET


def _torch_times(wrappers: Iterable[Wrapper]) -> Wrapper | None:
    """The wrapper on the slowest rank, where the least communication remains after the computation."""
    timed = [one for one in wrappers if one.comm_ns and one.iteration is not None]
    newest = max((one.iteration or 0 for one in timed), default=0)
    last = [one for one in timed if one.iteration == newest]
    return min(last, key=lambda one: (one.comm_ns or 0.0) - (one.overlap_ns or 0.0), default=None)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


# ------------------------------------------------------------------------------------------------ words


def _labeled_texts(traffic: Communication) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    if traffic.exposed_ns is not None:
        steps = f"{'last ' * traffic.lately}{format_count_with_noun(traffic.step_count_with_waits, 'step')}"
        rows.append(
            (
                "exposed",
                f"{format_duration(traffic.exposed_ns)} a step, {format_percent(traffic.exposed_share)} of it; {steps}",
            )
        )
        who = format_count_with_noun(
            len(traffic.non_stragglers),
            "rank" if len(traffic.non_stragglers) == len(traffic.ranks_with_waits) else "waiting rank",
        )
        rows.append(
            ("wait", f"{format_duration(traffic.wait_ns)}, {format_percent(traffic.wait_share)}; mean of {who}")
        )
    if traffic.missing is not None:
        rows.append(("wait", f"unknown: {traffic.missing}"))
    if traffic.torch_times is not None and traffic.hidden_share is not None:
        rows.append(("hidden", _format_overlap(traffic, traffic.torch_times)))
    rows += [("" if row else "sampled", text) for row, text in enumerate(format_operations(traffic))]
    several = len(traffic.wrappers) > 1
    for one in traffic.wrappers:
        rows.append((f"buckets{f' {one.root}' if several else ''}", format_buckets(one)))
    if traffic.wrappers:
        rows.append(("group", _format_group(traffic.wrappers[0])))
    if traffic.synced:
        under = f", {format_three_digits(traffic.unsynced)} under no_sync" if traffic.unsynced else ""
        rows.append(("passes", f"{format_three_digits(traffic.synced)} synchronized a step{under}"))
    return rows


def format_operations(traffic: Communication) -> list[str]:
    """A line for each kind of collective in the sampled steps: number, size, speed."""
    collectives = traffic.collectives
    if collectives.why is not None and not collectives.samples:
        return [f"collectives: {collectives.why}"]
    lines, known = [], {one.group_size for one in traffic.wrappers}
    of = "" if traffic.one_in is None else f"; 1 step in {format_count(traffic.one_in)}"
    per = "an update" if traffic.unsynced else "a step"  # a sample ends with an optimizer step, if there are any
    for one in collectives.operations[:_MAX_OPERATIONS]:
        count = (
            format_three_digits(one.collectives / collectives.samples)
            if collectives.samples
            else format_count(one.collectives)
        )
        size = f" of {format_bytes(one.bytes / one.collectives)}" if one.bytes else ""
        bus = one.bus_bytes_s
        why = one.no_bandwidth if one.bytes or not one.ended else None  # a barrier has none
        fast = (
            f", {format_bandwidth(bus)} bus" if bus is not None else "" if why is None else f", {why.partition(':')[0]}"
        )
        ranks = "" if one.size in known else f" of {format_count_with_noun(one.size, 'rank')},"
        lines.append(f"{one.name}{ranks} {count} {per}{size}{fast}{of}")
    return lines


def format_bandwidth(bytes_s: float) -> str:
    """Three digits in GB/s, or MB/s below one: "187 GB/s"."""
    return (
        f"{format_three_digits(bytes_s / 1e9)} GB/s" if bytes_s >= 1e9 else f"{format_three_digits(bytes_s / 1e6)} MB/s"
    )


def _format_overlap(traffic: Communication, one: Wrapper) -> str:
    """The share of communication that the backward pass hid, from torch's own times of one iteration."""
    who = "" if one.rank is None else f", rank {one.rank}"
    return (
        f"{format_percent(traffic.hidden_share)} of {format_duration(one.comm_ns)}"
        f" (torch: iteration {format_count(one.iteration)}{who})"
    )


def format_buckets(one: Wrapper) -> str:
    """The number of buckets, and their sizes in the order of averaging: "6: 1.00 MiB, 25.0 MiB ×5"."""
    if not one.bucket_bytes:
        return "unknown so far"
    runs = [(size, sum(1 for _ in same)) for size, same in groupby(map(format_bytes, one.bucket_bytes))]
    named = ", ".join(size if count == 1 else f"{size} ×{count}" for size, count in runs[:_MAX_BUCKET_RUNS])
    return f"{len(one.bucket_bytes)}: {named}{' ...' if len(runs) > _MAX_BUCKET_RUNS else ''}"


def _format_group(one: Wrapper) -> str:
    parts = [
        "size unknown" if one.group_size is None else format_count_with_noun(one.group_size, "rank"),
        one.backend or "backend unknown",
    ]
    if one.comm_hook:
        parts.append(f"communication hook {one.comm_hook}")
    if one.gradient_as_bucket_view:
        parts.append("gradients are views of buckets")
    if one.static_graph:
        parts.append("static graph")
    if one.find_unused_parameters:
        parts.append("finds unused parameters")
    return ", ".join(parts)
