"""The cost of communication between ranks, and the facts that their DistributedDataParallel reported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.members import number_in, text_in, whole_in
from dpmon.model.stragglers import RankTimes, Straggler, rank_times, straggler
from dpmon.store.answers import Communicated
from dpmon.store.tally import Tally
from dpmon.store.window import Window

if TYPE_CHECKING:
    from dpmon.model.process import ProcessFacts

BUCKETS_READ = 4096
WRAPPERS_READ = 256
"""Most records of wrappers to read in a live run: a rank writes a new one when its times change."""
_NOTHING = Communicated()
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
    """Why its synchronised passes have no times."""
    group: tuple[int, ...] | None = None
    """The ranks that average their gradients, in order."""
    most_unused_bytes: int | None = None
    """The largest `unused_bytes` of all its records; in a `Communication`, of all ranks."""
    looked: int = 0
    """Number of recorded iterations in which torch looked for unused parameters."""

    @property
    def waits_in_forward(self) -> bool:
        """Whether its ranks wait for each other in the forward, too."""
        return self.sync_batch_norm or self.broadcast_buffers

    @property
    def unhidden_ns(self) -> float:
        """torch's communication time beyond the end of the computation, in ns."""
        return (self.comm_ns or 0.0) - (self.overlap_ns or 0.0)


class Communication(NamedTuple):
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
    collectives: Communicated = Communicated()
    """The collectives of sampled steps."""
    sampled_of: int = 0
    """Number of steps of all ranks in the time that these samples cover."""

    @property
    def one_in(self) -> int | None:
        """Interval of samples: one step in this many; None without samples."""
        samples = self.collectives.samples
        return max(round(self.sampled_of / samples), 1) if samples and self.sampled_of else None

    @property
    def known(self) -> tuple[RankTimes, ...]:
        """The ranks with known waits."""
        return tuple(one for one in self.ranks if one.joined)

    @property
    def joined(self) -> int:
        """Number of steps with known waits between ranks."""
        return min((one.joined for one in self.known), default=0)

    @property
    def step_ns(self) -> float | None:
        """The mean step of these ranks."""
        return _mean(one.step_ns for one in self.known)

    @property
    def exposed_ns(self) -> float | None:
        """Communication that no computation hides."""
        return _mean(one.exposed_ns for one in self.known)

    @property
    def waiting(self) -> tuple[RankTimes, ...]:
        """The ranks with known waits, without those that the others wait for."""
        slow = self.straggler()
        return tuple(one for one in self.known if slow is None or one.process not in slow.processes)

    @property
    def wait_ns(self) -> float | None:
        """The wait for the slowest rank, as a mean over the ranks that wait."""
        return _mean(one.wait_ns for one in self.waiting)

    @property
    def exposed_share(self) -> float | None:
        """`exposed_ns` as a share of the step (0 to 1)."""
        return _share(self.exposed_ns, self.step_ns)

    @property
    def wait_share(self) -> float | None:
        """`wait_ns` as a share of the step (0 to 1)."""
        return _share(self.wait_ns, self.step_ns)

    @property
    def hidden_share(self) -> float | None:
        """The part of torch's communication time in which the backward pass still computed (0 to 1).

        None with a single bucket, because its communication begins after the last gradient.
        """
        one = self.torch_times
        return _share(one.overlap_ns, one.comm_ns) if one is not None and len(one.bucket_bytes) > 1 else None

    @property
    def steps(self) -> int:
        """The largest number of steps of any rank."""
        return max((one.steps for one in self.ranks), default=0)

    @property
    def synced(self) -> float | None:
        """Backward passes per step that averaged gradients."""
        return _a_step(self.ranks, [one.synced for one in self.ranks])

    @property
    def unsynced(self) -> float | None:
        """Backward passes per step that averaged nothing (no_sync)."""
        return _a_step(self.ranks, [one.unsynced for one in self.ranks])

    def straggler(self) -> Straggler | None:
        """The ranks that the others wait for; None if no rank stands out."""
        return straggler(self.ranks)

    @property
    def own_names(self) -> str:
        """The script's own collectives: "all_reduce and barrier"; empty without any."""
        return " and ".join(self.collectives.own)

    def other_waits(self) -> tuple[str, ...]:
        """Sentences about waits between ranks that are not at the end of the backward pass."""
        found = []
        in_forward = self._waits_in_forward()
        if in_forward is not None:
            found.append(in_forward)
        if self.own_names:
            found.append(f"the script's own {self.own_names} may make the ranks wait for each other, too: see `other`")
        return tuple(found)

    def _waits_in_forward(self) -> str | None:
        causes = []
        if any(one.sync_batch_norm for one in self.wrappers):
            causes.append("SyncBatchNorm")
        if any(one.broadcast_buffers for one in self.wrappers):
            causes.append("broadcast_buffers")
        if not causes:
            return None
        makes = "make" if len(causes) > 1 else "makes"
        return f"{' and '.join(causes)} {makes} the ranks wait for each other in the forward, too"


def communication(
    ranks: Sequence[RankTimes],
    wrappers: Sequence[Wrapper],
    collectives: Communicated = _NOTHING,
    sampled_of: int = 0,
    *,
    lately: bool,
) -> Communication | None:
    """The communication of these ranks; None for one process without a DistributedDataParallel.

    `collectives`: the collectives of sampled steps. `sampled_of`: the number of all steps in the same time.
    """
    if len(ranks) < 2 and not wrappers:
        return None
    first = min(wrappers, key=lambda one: (one.rank is None, one.rank or 0, one.process), default=None)
    own = [
        one._replace(most_unused_bytes=_most_unused(wrappers, one.number))
        for one in wrappers
        if first is not None and one.process == first.process
    ]
    own.sort(key=lambda one: one.number)
    groups = _groups(wrappers)
    missing = None if any(one.joined for one in ranks) else _missing(ranks, own, groups)
    times = _grouped(ranks, wrappers, groups)
    return Communication(times, tuple(own), _torch_times(wrappers), lately, missing, collectives, sampled_of)


def _most_unused(wrappers: Iterable[Wrapper], number: int) -> int | None:
    """The most unused bytes of a wrapper on any rank. If even one rank leaves out a parameter, the search is needed.

    None if they are unknown on some rank.
    """
    sizes = [one.most_unused_bytes for one in wrappers if one.number == number]
    known = [size for size in sizes if size is not None]
    return max(known, default=None) if len(known) == len(sizes) else None


def _groups(wrappers: Iterable[Wrapper]) -> dict[int, set[tuple[int, ...]]]:
    """The process groups of each process's wrappers, by process."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for one in wrappers:
        if one.group is not None:
            found.setdefault(one.process, set()).add(one.group)
    return found


def _grouped(
    ranks: Iterable[RankTimes], wrappers: Iterable[Wrapper], groups: Mapping[int, set[tuple[int, ...]]]
) -> tuple[RankTimes, ...]:
    """The ranks with their process groups: the group of a rank's newest process, or else the group that lists the rank.

    A rank has none if the wrappers of that process have different groups.
    """
    newest: dict[int, int] = {}
    for one in wrappers:
        if one.rank is not None and one.process in groups:
            newest[one.rank] = max(one.process, newest.get(one.rank, one.process))
    own = {rank: next(iter(groups[process])) if len(groups[process]) == 1 else None for rank, process in newest.items()}
    listed = {rank: group for group in set(own.values()) if group is not None for rank in group}
    known = {**listed, **own}
    waits = any(one.waits_in_forward for one in wrappers)
    return tuple(
        one if one.rank is None else one._replace(group=known.get(one.rank), waits_in_forward=waits) for one in ranks
    )


def _missing(
    ranks: Sequence[RankTimes], wrappers: Sequence[Wrapper], groups: Mapping[int, set[tuple[int, ...]]]
) -> str:
    """Why waits are unknown. `wrappers`: of one rank. `groups`: the groups of all wrappers, by process."""
    if not wrappers:
        return _NO_WRAPPER
    reason = next((one.no_sync_times for one in wrappers if one.no_sync_times), None)
    if reason is not None:
        return reason
    if any(len(own) > 1 for own in groups.values()):
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
    return min((one for one in timed if one.iteration == newest), key=lambda one: one.unhidden_ns, default=None)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else part / whole


def _a_step(ranks: Sequence[RankTimes], counts: Sequence[int]) -> float | None:
    steps = sum(one.steps for one in ranks)
    return sum(counts) / steps if steps else None


# ------------------------------------------------------------------------------------------------ of a whole run


def ranks_in(window: Window, facts: Mapping[int, ProcessFacts]) -> tuple[RankTimes, ...]:
    """The mean times of each rank in a window; a restarted rank includes all its processes.

    `facts`: by process. Omits processes without a rank, and the first steps after a change of mode.
    """
    found: dict[int, tuple[int, Tally]] = {}
    for process in window.processes:
        rank = facts[process].rank if process in facts else None
        if rank is not None:
            whole = found.get(rank, (process, Tally()))[1]
            for mode, evaluation in window.modes:
                if not evaluation:
                    whole.merge(window.tally(mode, process=process, settled=True))
            found[rank] = process, whole
    return tuple(rank_times(process, rank, tally) for rank, (process, tally) in sorted(found.items()))


# ------------------------------------------------------------------------------------------------ records


class _Unused:
    """The unused parameters of a wrapper, from all its records."""

    def __init__(self) -> None:
        self.most: int | None = None
        self.looked = 0
        self._unknown = False
        self._iteration: int | None = None

    def add(self, data: Mapping[str, object]) -> None:
        """Add the next record; several records may repeat one iteration."""
        unused, iteration = whole_in(data, "unused_bytes"), whole_in(data, "iteration")
        absent = data.get("absent")
        self._unknown |= isinstance(absent, Mapping) and "unused_bytes" in absent
        if self._unknown:
            self.most = None
        if self._unknown or unused is None or iteration is None:
            return
        self.most = max(unused, self.most or 0)
        self.looked += iteration != self._iteration
        self._iteration = iteration


def newest_wrappers(records: Iterable[Mapping[str, object]]) -> tuple[Wrapper, ...]:
    """The newest record of each wrapper, from a run's `ddp` records in order; unused parameters cover all records."""
    newest: dict[tuple[int | None, int | None], Mapping[str, object]] = {}
    unused: dict[tuple[int | None, int | None], _Unused] = {}
    for data in records:
        key = whole_in(data, "process"), whole_in(data, "wrapper")
        newest[key] = data
        unused.setdefault(key, _Unused()).add(data)
    return tuple(
        one._replace(most_unused_bytes=unused[key].most, looked=unused[key].looked)
        for key, data in newest.items()
        if (one := wrapper(data)) is not None
    )


def wrapper(data: Mapping[str, object]) -> Wrapper | None:
    """The facts in a `ddp` record; None if it names no process."""
    process = whole_in(data, "process")
    if process is None:
        return None
    sizes, absent = data.get("bucket_bytes"), data.get("absent")
    buckets = sizes[:BUCKETS_READ] if isinstance(sizes, list) else []
    return Wrapper(
        process=process,
        rank=whole_in(data, "rank"),
        number=whole_in(data, "wrapper") or 0,
        root=text_in(data, "root") or "",
        backend=text_in(data, "backend"),
        group_size=whole_in(data, "group_size"),
        parameter_bytes=whole_in(data, "parameter_bytes"),
        bucket_bytes=tuple(size for size in buckets if type(size) is int and size >= 0),
        bucket_cap_bytes=whole_in(data, "bucket_cap_bytes"),
        find_unused_parameters=data.get("find_unused_parameters") is True,
        unused_bytes=whole_in(data, "unused_bytes"),
        gradient_as_bucket_view=data.get("gradient_as_bucket_view") is True,
        static_graph=data.get("static_graph") is True,
        comm_hook=text_in(data, "comm_hook"),
        broadcast_buffers=data.get("broadcast_buffers") is True,
        sync_batch_norm=data.get("sync_batch_norm") is True,
        iteration=whole_in(data, "iteration"),
        comm_ns=_ns(data, "comm_ms"),
        overlap_ns=_ns(data, "overlap_ms"),
        no_sync_times=text_in(absent, "sync") if isinstance(absent, Mapping) else None,
        group=_group(data),
    )


def _group(data: Mapping[str, object]) -> tuple[int, ...] | None:
    """The process group of a wrapper; None if it is unknown or invalid."""
    listed, rank = data.get("group"), whole_in(data, "rank")
    if not isinstance(listed, list) or any(type(one) is not int for one in listed) or rank not in listed:
        return None
    return tuple(sorted(listed))


def _ns(data: Mapping[str, object], key: str) -> float | None:
    value = number_in(data, key)
    return value * 1e6 if value is not None and 0 <= value < 1e9 else None
