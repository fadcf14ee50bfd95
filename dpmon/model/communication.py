"""The cost of communication between ranks, and the settings of their DistributedDataParallel wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from dpmon.model.stragglers import Group, RankTimes, Straggler, delay_shares, find_straggler, wait_of
from dpmon.record.schema import EXPOSED, WAIT
from dpmon.store.collectives import CollectiveSums
from dpmon.store.tally import Tally, averaging_unit
from dpmon.text.formatting import (
    format_bytes,
    format_count,
    format_count_with_noun,
    format_duration,
    format_percent,
    format_three_digits,
)

_MAX_OPERATIONS = 4
"""Most kinds of collectives in the text."""
_MAX_BUCKET_RUNS = 4
"""Most runs of equal buckets in the text."""
_NO_COLLECTIVES = CollectiveSums()
_NO_WRAPPER = "no DistributedDataParallel averages gradients here, so it is unknown which rank waits for which"
_SEVERAL_GROUPS = "its DistributedDataParallel wrappers have different process groups"
_NOT_YET = "no step is recorded yet in which all ranks averaged their gradients"


class Wrapper(NamedTuple):
    """Settings and times of one DistributedDataParallel wrapper; None if unknown."""

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
    """Why its sync passes have no times."""
    group: Group | None = None
    """The ranks that average their gradients, in order."""
    all_used: int = 0
    """Number of recorded iterations, each of which used all parameters; 0 if any left one unused, or if it is unknown.

    In a `Communication`, the smallest value of all ranks.
    """

    @property
    def waits_in_forward(self) -> bool:
        """Whether ranks wait for each other in the forward, too."""
        return self.sync_batch_norm or self.broadcast_buffers


@dataclass(frozen=True)
class Communication:
    """The ranks' communication in a mean step or update; ns, None if unknown."""

    ranks: tuple[RankTimes, ...]
    """The ranks, each with its process group if known."""
    wrappers: tuple[Wrapper, ...]
    """The wrappers of one rank, by number."""
    torch_times: Wrapper | None
    """The wrapper of the slowest rank, with torch's own times of the newest iteration."""
    lately: bool
    """Whether the times cover only the last steps, not the whole run."""
    missing: str | None
    """Why the waits between ranks are unknown; None if they are known."""
    tally: Tally
    """The steps of the main kind of the process that represents the run."""
    collectives: CollectiveSums = _NO_COLLECTIVES
    """The collectives of sampled steps."""
    sampled_of: int = 0
    """Number of steps of the main kind of all ranks in the time that these samples cover."""
    elsewhere: tuple[RankTimes, ...] = ()
    """The ranks of other nodes, if the analysis covers only one node: its ranks may wait for one of them."""

    @cached_property
    def unit(self) -> str:
        """What the times are means of: "step" or "update"."""
        return self.ranks[0].unit if self.ranks else averaging_unit(self.tally.steps, self.tally.updates)[0]

    @property
    def mean_step_times(self) -> dict[str, float | None]:
        """The exposed communication and the wait per step (ns), whatever `unit` is, for comparisons of runs."""
        _, steps = _averaging_unit_of(self.ranks)
        return {EXPOSED: _ratio(self.exposed_ns, steps), WAIT: _ratio(self.wait_ns, steps)}

    @cached_property
    def one_in(self) -> int | None:
        """Interval of samples: one step or update in this many; None without samples."""
        interval = _ratio(self.sampled_of * self.unit_count, self.collectives.samples * self.tally.steps)
        return max(round(interval), 1) if interval else None

    @cached_property
    def ranks_with_waits(self) -> tuple[RankTimes, ...]:
        """The ranks with known waits."""
        return tuple([rank for rank in self.ranks if rank.joined])

    @cached_property
    def ranks_by_wait(self) -> Sequence[RankTimes]:
        """The ranks with known waits, the shortest wait first."""
        return sorted((rank for rank in self.ranks if rank.wait_ns is not None), key=wait_of)

    @cached_property
    def step_count_with_waits(self) -> int:
        """Number of steps with known waits between ranks."""
        return min([rank.joined for rank in self.ranks_with_waits], default=0)

    @cached_property
    def text_of_known_waits(self) -> str:
        """The number of steps or updates with known waits: "99 updates"."""
        counts = [min(rank.joined, rank.updates) for rank in self.ranks_with_waits if rank.updates]
        count = min(counts) if counts and self.unit == "update" else self.step_count_with_waits
        return format_count_with_noun(count, self.unit)

    @cached_property
    def step_ns(self) -> float | None:
        """The mean step or update of these ranks."""
        return _mean([rank.step_ns for rank in self.ranks_with_waits])

    @cached_property
    def exposed_ns(self) -> float | None:
        """Mean exposed communication per step or update."""
        return _mean([rank.exposed_ns for rank in self.ranks_with_waits])

    @cached_property
    def non_stragglers(self) -> tuple[RankTimes, ...]:
        """The ranks with known waits, without those that the others wait for."""
        straggler = self.straggler
        if straggler is None:
            return self.ranks_with_waits
        return tuple([rank for rank in self.ranks_with_waits if rank.process not in straggler.processes])

    @cached_property
    def wait_ns(self) -> float | None:
        """The wait for the slowest rank, as a mean over the ranks that wait."""
        return _mean([rank.wait_ns for rank in self.non_stragglers])

    @cached_property
    def exposed_share(self) -> float | None:
        """`exposed_ns` as a share of the step (0 to 1)."""
        return _ratio(self.exposed_ns, self.step_ns)

    @cached_property
    def wait_share(self) -> float | None:
        """`wait_ns` as a share of the step (0 to 1)."""
        return _ratio(self.wait_ns, self.step_ns)

    @cached_property
    def hidden_share(self) -> float | None:
        """The part of torch's communication time in which the backward pass still computed (0 to 1).

        None with a single bucket, because its communication begins after the last gradient.
        """
        wrapper = self.torch_times
        if wrapper is None or len(wrapper.bucket_bytes) < 2:
            return None
        return _ratio(wrapper.overlap_ns, wrapper.comm_ns)

    @property
    def unit_count(self) -> int:
        """Number of steps or updates in `tally`."""
        return self.tally.updates if self.unit == "update" else self.tally.steps

    @property
    def synced(self) -> float | None:
        """Backward passes per step or update that averaged gradients; None without steps."""
        return _ratio(self.tally.stat("synced").total, self.unit_count)

    @property
    def unsynced(self) -> float | None:
        """Backward passes per step or update that averaged nothing (no_sync); None without steps."""
        return _ratio(self.tally.stat("unsynced").total, self.unit_count)

    @cached_property
    def delays(self) -> Mapping[int, float]:
        """How much longer the others waited than each rank, by process (dpmon.model.stragglers.delay_shares)."""
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
        rows: list[tuple[str, str]] = []
        if self.exposed_ns is not None:
            exposed = f"{format_duration(self.exposed_ns)} per {self.unit}"
            exposed += f", {format_percent(self.exposed_share)} of it"
            rows.append(("exposed", f"{exposed}; {'last ' * self.lately}{self.text_of_known_waits}"))
            rank_count = len(self.ranks_with_waits)
            straggler_count = rank_count - len(self.non_stragglers)
            ranks_text = f"of {format_count_with_noun(rank_count, 'rank')}"
            if straggler_count:
                ranks_text = f"without the straggler{'s' * (straggler_count > 1)}"
            wait = f"{format_duration(self.wait_ns)}, {format_percent(self.wait_share)}"
            rows.append(("wait", f"{wait}; mean {ranks_text}"))
        if self.missing is not None:
            rows.append(("wait", f"unknown: {self.missing}"))
        if self.torch_times is not None and self.hidden_share is not None:
            rows.append(("hidden", _format_overlap(self, self.torch_times)))
        rows += [("" if row else "sampled", text) for row, text in enumerate(format_operations(self))]
        several = len(self.wrappers) > 1
        for wrapper in self.wrappers:
            rows.append((f"buckets{f' {wrapper.root}' if several else ''}", format_buckets(wrapper)))
        if self.wrappers:
            rows.append(("group", _format_group(self.wrappers[0])))
        if self.synced:
            passes = f"{format_three_digits(self.synced)} synced per {self.unit}"
            if self.unsynced:
                passes += f", {format_three_digits(self.unsynced)} under no_sync"
            rows.append(("passes", passes))
        return rows

    def other_waits(self) -> tuple[str, ...]:
        """Return sentences about waits between ranks that do not happen at the end of the backward pass."""
        is_cause = {
            "SyncBatchNorm": any(wrapper.sync_batch_norm for wrapper in self.wrappers),
            "broadcast_buffers": any(wrapper.broadcast_buffers for wrapper in self.wrappers),
        }
        causes = [name for name, applies in is_cause.items() if applies]
        sentences = []
        if causes:
            make = f"{' and '.join(causes)} {'make' if len(causes) > 1 else 'makes'}"
            sentences.append(f"{make} the ranks wait for each other in the forward, too")
        if self.own_collective_names:
            sentences.append(
                f"the script's own {self.own_collective_names} may make the ranks wait for each other, too: see `other`"
            )
        return tuple(sentences)


def build_communication(
    ranks: Sequence[RankTimes],
    wrappers: Sequence[Wrapper],
    collectives: CollectiveSums = _NO_COLLECTIVES,
    sampled_of: int = 0,
    elsewhere: Sequence[RankTimes] = (),
    *,
    tally: Tally,
    lately: bool,
) -> Communication | None:
    """Return the communication of these ranks; None for a single process without a DistributedDataParallel.

    `ranks`: with means per step. `tally`: the steps of the main kind of the process that represents the run.
    `collectives`: the collectives of sampled steps. `sampled_of`: the number of all steps in the same time.
    `elsewhere`: the ranks of nodes outside the analysis.
    """
    if len(ranks) < 2 and not wrappers:
        return None
    first = min(wrappers, key=lambda wrapper: (wrapper.rank is None, wrapper.rank or 0, wrapper.process), default=None)
    rank_wrappers = [
        wrapper._replace(all_used=min(other.all_used for other in wrappers if other.number == wrapper.number))
        for wrapper in wrappers
        if first is not None and wrapper.process == first.process
    ]
    rank_wrappers.sort(key=lambda wrapper: wrapper.number)
    missing = None
    if not any(rank.joined for rank in ranks):
        missing = _unknown_wait_reason((*ranks, *elsewhere), rank_wrappers)
    groups = groups_of([rank.rank for rank in (*ranks, *elsewhere)], wrappers)
    waits_in_forward = any(wrapper.waits_in_forward for wrapper in wrappers)
    unit, steps_per_unit = _averaging_unit_of(ranks)

    def with_group(rank: RankTimes) -> RankTimes:
        group = groups[rank.rank]
        if unit == "update":
            rank = rank.per_update(steps_per_unit)
        if rank.group == group and rank.waits_in_forward == waits_in_forward:
            return rank  # as usual; there may be a thousand ranks
        return rank._replace(group=group, waits_in_forward=waits_in_forward)

    return Communication(
        tuple(map(with_group, ranks)),
        tuple(rank_wrappers),
        _torch_times(wrappers),
        lately,
        missing,
        tally,
        collectives,
        sampled_of,
        tuple(map(with_group, elsewhere)),
    )


def groups_of(ranks: Iterable[int], wrappers: Sequence[Wrapper]) -> Mapping[int, Group | None]:
    """Return the process group of each rank; None if it has several.

    It is the group of the rank's newest process, or else a group that lists the rank.
    """
    all_groups = {wrapper.group for wrapper in wrappers} - {None}
    if len(all_groups) == 1:  # as usual; there may be a thousand ranks
        (group,) = all_groups
        members = group if isinstance(group, range) else frozenset(group or ())
        return {rank: group if rank in members else None for rank in ranks}
    newest_by_rank: dict[int | None, dict[Group, int]] = {}
    newest_by_group: dict[Group, int] = {}
    for wrapper in wrappers:
        if wrapper.group is not None:
            for newest in (newest_by_rank.setdefault(wrapper.rank, {}), newest_by_group):
                newest[wrapper.group] = max(newest.get(wrapper.group, 0), wrapper.process)
    members_of = {group: frozenset(group) for group in newest_by_group}
    groups: dict[int, Group | None] = {}
    for rank in ranks:
        candidates = newest_by_rank.get(rank)
        if not candidates:
            candidates = {group: newest for group, newest in newest_by_group.items() if rank in members_of[group]}
        newest_process = max(candidates.values(), default=None)
        newest_groups = [group for group, process in candidates.items() if process == newest_process]
        groups[rank] = newest_groups[0] if len(newest_groups) == 1 else None
    return groups


def _unknown_wait_reason(ranks: Sequence[RankTimes], wrappers: Sequence[Wrapper]) -> str:
    """Return why waits are unknown. `wrappers`: of one rank."""
    if not wrappers:
        return _NO_WRAPPER
    reason = next((wrapper.no_sync_times for wrapper in wrappers if wrapper.no_sync_times), None)
    if reason is not None:
        return reason
    if len({wrapper.group for wrapper in wrappers} - {None}) > 1:
        return _SEVERAL_GROUPS
    size, rank_count = max(wrapper.group_size or 0 for wrapper in wrappers), max(len(ranks), 1)
    if size == 1:
        return "there is only one rank"
    if rank_count < size:
        return f"{rank_count} of {size} ranks are recorded; all of them are needed to see which rank waits for which"
    return _NOT_YET


def _torch_times(wrappers: Iterable[Wrapper]) -> Wrapper | None:
    """Return the wrapper of the slowest rank, where the least communication remains after the computation."""
    timed = [wrapper for wrapper in wrappers if wrapper.comm_ns and wrapper.iteration is not None]
    newest = max((wrapper.iteration or 0 for wrapper in timed), default=0)
    candidates = [wrapper for wrapper in timed if wrapper.iteration == newest]
    return min(candidates, key=lambda wrapper: (wrapper.comm_ns or 0.0) - (wrapper.overlap_ns or 0.0), default=None)


def _averaging_unit_of(ranks: Sequence[RankTimes]) -> tuple[str, float]:
    """Return what mean times of these ranks are of, "step" or "update", and how many steps that takes."""
    steps = sum(rank.steps for rank in ranks)
    unit, count = averaging_unit(steps, sum(rank.updates for rank in ranks))
    return unit, _ratio(steps, count) or 1.0


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the known values; None without one."""
    known_values = [value for value in values if value is not None]
    return fmean(known_values) if known_values else None


def _ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole, which may exceed 1; None if one of them is unknown, or `whole` is 0."""
    return None if part is None or not whole else part / whole


# ------------------------------------------------------------------------------------------------ words


def format_operations(communication: Communication) -> list[str]:
    """Return a line for each kind of collective in the sampled steps: number and size."""
    collectives = communication.collectives
    if collectives.why is not None and not collectives.samples:
        return [f"collectives: {collectives.why}"]
    lines, group_sizes = [], {wrapper.group_size for wrapper in communication.wrappers}
    unit = communication.unit  # a sample is of whole steps, and ends with an update
    interval_text = "" if communication.one_in is None else f"; 1 {unit} in {format_count(communication.one_in)}"
    for operation in collectives.operations[:_MAX_OPERATIONS]:
        if collectives.samples:
            count = format_three_digits(operation.collectives / collectives.samples)
        else:
            count = format_count(operation.collectives)
        size = f" of {format_bytes(operation.bytes / operation.collectives)}" if operation.bytes else ""
        ranks = "" if operation.size in group_sizes else f" of {format_count_with_noun(operation.size, 'rank')},"
        lines.append(f"{operation.name}{ranks} {count} per {unit}{size}{interval_text}")
    return lines


def _format_overlap(communication: Communication, wrapper: Wrapper) -> str:
    """Return the share of communication that overlapped with the backward pass, from torch's own times, as text."""
    rank_text = "" if wrapper.rank is None else f", rank {wrapper.rank}"
    return (
        f"{format_percent(communication.hidden_share)} of {format_duration(wrapper.comm_ns)}"
        f" (torch: iteration {format_count(wrapper.iteration)}{rank_text})"
    )


def format_buckets(wrapper: Wrapper) -> str:
    """Return the number of buckets and their sizes in the order of averaging: "6: 1.00 MiB, 25.0 MiB ×5"."""
    if not wrapper.bucket_bytes:
        return "unknown so far"
    runs = [(size, sum(1 for _ in same)) for size, same in groupby(map(format_bytes, wrapper.bucket_bytes))]
    sizes_text = ", ".join(size if count == 1 else f"{size} ×{count}" for size, count in runs[:_MAX_BUCKET_RUNS])
    return f"{len(wrapper.bucket_bytes)}: {sizes_text}{' ...' if len(runs) > _MAX_BUCKET_RUNS else ''}"


def _format_group(wrapper: Wrapper) -> str:
    parts = [
        "size unknown" if wrapper.group_size is None else format_count_with_noun(wrapper.group_size, "rank"),
        wrapper.backend or "backend unknown",
    ]
    if wrapper.comm_hook:
        parts.append(f"communication hook {wrapper.comm_hook}")
    if wrapper.gradient_as_bucket_view:
        parts.append("gradients are views of buckets")
    if wrapper.static_graph:
        parts.append("static graph")
    if wrapper.find_unused_parameters:
        parts.append("finds unused parameters")
    return ", ".join(parts)
