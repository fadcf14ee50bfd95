"""Decides whether a run is stalled, and names the rank that the others wait for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from dpmon.record.schema import SECOND
from dpmon.record.shared_names import node_suffix
from dpmon.stalls.stacks import Stack

LEAST_NS = 10 * SECOND
"""No lack of progress is called a stall before this time."""
BUSY_NS = 1200 * SECOND
"""The same for a process with a sign of life in a place that it was not seen in before, before its first step, and
after a loop: a compilation, checkpoint, download or evaluation may take this long."""
BUSY_DATA_NS = 180 * SECOND
"""The same for a wait for data of a process with a sign of life."""
SAVE_NS = 60 * SECOND
"""The same for a process that saves without a sign of life; in a wait for a disk it has BUSY_NS."""
LONGER = 3
"""A place may take this many times as long as it took at most before."""


PHASES = ("data", "copy", "forward", "backward", "optimizer")
"""Activities that are learned as a whole. In the script, each line is learned: else a checkpoint would hide a stall."""


FIRST_BATCH = ("first batch", None)
"""The place of a wait for the first batch of a loop."""


class ProcessGroupView(NamedTuple):
    """A process group as one rank sees it."""

    name: int
    """The same number on all its ranks."""
    ranks: int
    sequence: int | None
    """Number of collectives that this rank has started in it; None if the backend does not count them."""
    nccl: bool = False
    """Whether one of its backends is NCCL."""


class LoaderWorker(NamedTuple):
    """A worker of a data loader that the training waits for."""

    pid: int
    words: str
    """dead, stopped, disk wait, or its place: "in Samples.__getitem__ (data.py:31)"."""
    stack: Stack | None = None


class RankActivity(NamedTuple):
    """What one training process does now."""

    pid: int
    process: int | None = None
    rank: int | None = None
    world: int = 1
    doing: str = "other"
    """data, copy, forward, backward, sync, optimizer, paused, other (in the script), ended, gone, or a stage."""
    since_ns: int = 0
    """When that began (monotonic)."""
    step: int | None = None
    """Its last finished step."""
    groups: tuple[ProcessGroupView, ...] = ()
    state: str = "sleeping"
    """running, sleeping, disk wait, stopped or gone, from /proc."""
    cpu: float | None = None
    """Share of a core in the last second, its children included."""
    busy: bool | None = None
    """Whether it has shown a sign of life in the last seconds (dpmon.stalls.rank_inspector); None: not known yet."""
    between_loops: bool = False
    """Whether its last loop over a loader is over and it has begun nothing since."""
    loop_begins: bool = False
    """Whether it has made no step, or only one, since its last loop over a loader was over."""
    job: int = 0
    """The same number for all ranks that may wait for each other."""
    namesake: bool = False
    """Whether a rank of another job has the same number."""
    stack: Stack | None = None
    why_no_stack: str | None = None
    raised: str | None = None
    """The exception that ended it, with its line."""
    worker: LoaderWorker | None = None
    """A worker of its data loader, if the rank waits for data."""
    node: str | None = None
    """The machine that it runs on, if the run has several."""
    usual_ns: int = 0
    """How long it may stand there according to earlier times, if another supervisor has learned them."""

    @property
    def key(self) -> tuple[str | None, int]:
        """What tells it from all other ranks: on two machines, processes may have the same number."""
        return self.node, self.pid

    @property
    def name(self) -> str:
        """Its name in a list of several."""
        if self.rank is not None:
            return f"rank {self.rank} (pid {self.pid})" if self.namesake else f"rank {self.rank}{_node_suffix([self])}"
        return f"process {self.process}" if self.process is not None else f"pid {self.pid}"

    @property
    def number(self) -> int:
        """The number in its name."""
        return next(number for number in (self.rank, self.process, self.pid) if number is not None)

    @property
    def has_current_stack(self) -> bool:
        """Whether its stack was asked for since it stands there."""
        return self.is_over or self.stack is not None or self.why_no_stack is not None

    @property
    def is_over(self) -> bool:
        """Whether it makes no further step: ended or gone."""
        return self.doing in ("ended", "gone") or self.state == "gone"

    @property
    def timing_key(self) -> tuple[str, str | None]:
        """The place for which a usual time is learned: what it does; in the script also the line."""
        if self.doing == "data" and (self.step is None or self.loop_begins):
            return FIRST_BATCH
        if self.step is None:
            return "starting", None
        script = None if self.stack is None or self.doing in PHASES else self.stack.innermost_script_frame
        return self.doing, None if script is None else f"{script.file}:{script.line}"

    @property
    def is_in_collective(self) -> bool:
        """Whether it stands in an operation that waits for other ranks."""
        if self.world < 2 or self.is_over or self.state == "stopped":
            return False
        if self.stack is not None:
            return self.stack.operation_kind in ("collective", "backward")
        return self.doing in ("backward", "sync")


class LearnedDurations:
    """How long each place may take, learned from the times it took before."""

    def __init__(self) -> None:
        self._longest: dict[tuple[str, str | None], int] = {}

    def add_duration(self, where: tuple[str, str | None], took_ns: int) -> None:
        """Take note of a finished time."""
        if took_ns > self._longest.get(where, 0):
            self._longest[where] = took_ns

    def allowed_ns(self, rank: RankActivity, *, awaited: bool = True) -> int:
        """How long (ns) a rank may stand where it stands. `awaited`: whether other ranks wait for it."""
        return max(_default_allowed_ns(rank, awaited), self.learned_ns(rank))

    def learned_ns(self, rank: RankActivity) -> int:
        """How long (ns) a rank may stand there according to earlier times; 0 if there are none."""
        return max(LONGER * self._longest.get(rank.timing_key, 0), rank.usual_ns)


def _default_allowed_ns(rank: RankActivity, awaited: bool) -> int:
    """How long (ns) a rank may stand where it was not seen before."""
    kind = "" if rank.stack is None else rank.stack.operation_kind
    if rank.state == "stopped":
        return LEAST_NS
    if rank.step is None or kind == "compile" or (rank.between_loops and not awaited):
        return BUSY_NS
    if kind == "save":
        return BUSY_NS if rank.busy is not False or rank.state == "disk wait" else SAVE_NS
    if rank.busy is not False:
        return BUSY_DATA_NS if rank.doing == "data" else BUSY_NS
    return LEAST_NS


class Stall(NamedTuple):
    """A run without progress."""

    since_ns: int
    """When the last progress was made (monotonic)."""
    guilty: tuple[int, ...]
    """Indices of the ranks that the others wait for, or that stand still themselves; empty if none can be named."""
    waiting: tuple[int, ...]
    """Indices of the ranks that wait for them."""


def find_stall(ranks: Sequence[RankActivity], usual: LearnedDurations, now_ns: int) -> Stall | None:
    """Return the stall of a run; None if it makes progress, or if the lack of it is plausible."""
    jobs: dict[int, list[int]] = {}
    for i, rank in enumerate(ranks):
        if rank.doing != "paused":
            jobs.setdefault(rank.job, []).append(i)
    found = [each for job in jobs.values() if (each := _find_job_stall(ranks, job, usual, now_ns)) is not None]
    if not found:
        return None
    guilty = [i for each in found for i in each.guilty]
    waiting = [i for each in found for i in each.waiting]
    return Stall(min(each.since_ns for each in found), tuple(guilty), tuple(waiting))


def _find_job_stall(
    ranks: Sequence[RankActivity], job: Sequence[int], usual: LearnedDurations, now_ns: int
) -> Stall | None:
    """The stall of ranks that may wait for each other. `job`: their indices."""
    if all(ranks[i].is_over for i in job):
        return None
    waiting = [i for i in job if ranks[i].is_in_collective]
    still = [i for i in job if not ranks[i].is_in_collective and not ranks[i].is_over]
    # A rank that is ahead of another one waits for it, or will; without stacks there is no other sign.
    ahead = {*_ranks_not_at(ranks, still, min)}
    waiting = sorted([*waiting, *ahead])
    still = [i for i in still if i not in ahead]
    slow = [i for i in still if now_ns - ranks[i].since_ns >= usual.allowed_ns(ranks[i], awaited=bool(waiting))]
    if slow:
        return Stall(min(ranks[i].since_ns for i in slow), tuple(slow), tuple(waiting))
    if still or not waiting:
        return None
    # All ranks that are left wait in a collective: for one that is gone, has ended or is elsewhere, or for each other.
    complete = len(job) >= max(ranks[i].world for i in job)
    since = max(ranks[i].since_ns for i in waiting)
    if now_ns - since < max(
        _allowed_collective_ns(ranks, waiting, complete), *(usual.learned_ns(ranks[i]) for i in waiting)
    ):
        return None
    guilty = tuple(i for i in job if ranks[i].is_over)
    if complete:  # otherwise, the rank that holds them up may be one that is not seen
        guilty = guilty or _smallest_group(ranks, waiting) or _ranks_not_at(ranks, waiting, max)
    return Stall(since, guilty, tuple(i for i in waiting if i not in guilty))


def _allowed_collective_ns(ranks: Sequence[RankActivity], waiting: Sequence[int], complete: bool) -> int:
    """How long (ns) these ranks may stand in collectives. `complete`: whether there are no others."""
    if not complete or any(ranks[i].step is None or ranks[i].busy is None for i in waiting):
        return BUSY_NS
    # All of them wait without a processor (gloo) or all spin (NCCL). Otherwise, the busy ones compute their backward.
    return BUSY_NS if len({ranks[i].busy for i in waiting}) > 1 else LEAST_NS


def _ranks_not_at(
    ranks: Sequence[RankActivity], which: Sequence[int], end: Callable[[list[int]], int]
) -> tuple[int, ...]:
    """Those that are not last in a group (`end`: min), or not first (max), by the collectives that they have started.

    The first and the last one are those among `which`.
    """
    numbers: dict[int, list[int]] = {}
    for i in which:
        for group in ranks[i].groups:
            if group.sequence is not None:
                numbers.setdefault(group.name, []).append(group.sequence)
    ends = {name: end(each) for name, each in numbers.items()}
    return tuple(i for i in which if any(one.sequence not in (None, ends.get(one.name)) for one in ranks[i].groups))


def _smallest_group(ranks: Sequence[RankActivity], waiting: Sequence[int]) -> tuple[int, ...]:
    """Of ranks that wait for each other, the smallest group that stands elsewhere; empty if all stand together."""
    places: dict[object, list[int]] = {}  # in the order of the ranks
    for i in waiting:
        stack = ranks[i].stack
        script = None if stack is None else stack.innermost_script_frame
        places.setdefault(
            (ranks[i].doing, script and (script.file, script.line), stack and stack.library_operation), []
        ).append(i)
    if len(places) < 2:
        return ()
    smallest = min(len(group) for group in places.values())
    return tuple(next(group for group in reversed(places.values()) if len(group) == smallest))


# ------------------------------------------------------------------------------------------------ words


_DOING = {"data": "waiting for data", "other": "in the script", "sync": "in a collective"}
_STATES = {"stopped": "is stopped (SIGSTOP)", "disk wait": "waits for a disk", "gone": "is gone"}


def describe_activity(rank: RankActivity, directory: str, *, waits: bool = False) -> str:
    """What a rank does and where: "in DataLoader.__next__ (train.py:88)"; `waits`: as a rank that waits for others."""
    if rank.is_over:
        return f"ended: {rank.raised}" if rank.raised else "is gone" if rank.doing == "gone" else "has ended"
    stack = rank.stack
    script = None if stack is None else stack.innermost_script_frame
    place = "" if script is None else f" ({script.location(directory)})"
    inside = None if stack is None else stack.library_operation
    if inside is not None:
        what = f"in {inside}{place}"
    elif script is not None and not (waits and rank.doing in PHASES):
        what = script.description(directory)
    else:
        what = f"{_DOING.get(rank.doing, f'in {rank.doing}')}{place}"
    if waits:
        return what
    state = _STATES.get(rank.state)
    worker = "" if rank.worker is None else f"; its worker (pid {rank.worker.pid}) is {rank.worker.words}"
    return f"{state}, {what}{worker}" if state else f"{what}{worker}"


def sentence(found: Stall, ranks: Sequence[RankActivity], directory: str) -> str:
    """The stall in one sentence: "rank 3 in DataLoader.__next__ (train.py:88); the other 7 wait for it in backward"."""
    jobs = dict.fromkeys(ranks[i].job for i in (*found.guilty, *found.waiting))
    return "; ".join(_sentence_of_job(found, ranks, job, directory) for job in jobs)


def _sentence_of_job(found: Stall, ranks: Sequence[RankActivity], job: int, directory: str) -> str:
    guilty, waiting = ([ranks[i] for i in part if ranks[i].job == job] for part in found[1:])

    def waits(group: Sequence[RankActivity]) -> list[str]:
        words = _group_by_text(group, lambda rank: describe_activity(rank, directory, waits=True))
        return [f"{who} {'waits' if one else 'wait'} {text}" for who, one, text in words]

    if not guilty:
        words = describe_activity(waiting[0], directory, waits=True)
        places = "this machine" if waiting[0].node is None else "the machines that answer"
        here = "" if len(waiting) == waiting[0].world else f" of {places}"
        who = f"all {len(waiting)} ranks wait" if len(waiting) > 1 else f"{waiting[0].name} waits"
        return f"{who} {words}: no rank{here} is behind"
    if all(rank.is_in_collective for rank in guilty):
        named = waits([*guilty, *waiting])
        if len(named) > 1:
            return f"{'; '.join(named)}: different collectives"
        who = format_rank_names(guilty)
        return f"{named[0]}: {who} {'has' if len(guilty) == 1 else 'have'} started fewer collectives"
    stuck = _group_by_text(guilty, lambda rank: describe_activity(rank, directory))
    if len(ranks) == 1:
        (_, _, words), *_ = stuck
        return words if words.startswith(("in ", "at ", "waiting ")) else f"it {words}"
    text = "; ".join(f"{who} {words}" for who, _, words in stuck)
    if not waiting:
        return text
    named = waits(waiting)
    if len(named) == 1 and len(waiting) > 2 and len(waiting) + len(guilty) == sum(rank.job == job for rank in ranks):
        return f"{text}; the other {len(waiting)} wait for it {describe_activity(waiting[0], directory, waits=True)}"
    return "; ".join((text, *named))


def _group_by_text(which: Sequence[RankActivity], words: Callable[[RankActivity], str]) -> list[tuple[str, bool, str]]:
    """Names of the ranks with equal words, whether it is a single one, and the words; the smallest group first."""
    groups: dict[str, list[RankActivity]] = {}
    for rank in which:
        groups.setdefault(words(rank), []).append(rank)
    return [
        (format_rank_names(group), len(group) == 1, text)
        for text, group in sorted(groups.items(), key=lambda item: len(item[1]))
    ]


def format_rank_names(group: Sequence[RankActivity]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    if len(group) == 1:
        return group[0].name
    if any(rank.namesake for rank in group):
        return ", ".join(rank.name for rank in group)
    kind = group[0].name.partition(" ")[0]
    numbers = format_ranges(sorted(rank.number for rank in group))
    return f"{kind}{'es' if kind == 'process' else 's'} {numbers}{_node_suffix(group)}"


def format_ranges(numbers: Iterable[int], between: str = ", ", least: int = 3) -> str:
    """(0, 1, 2, 5) -> "0-2, 5"; `least`: the fewest numbers that are written as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return between.join(between.join(map(str, run)) if len(run) < least else f"{run[0]}-{run[-1]}" for run in runs)


def _node_suffix(group: Sequence[RankActivity]) -> str:
    """The machine of these ranks: " (gpu-2)"; empty if they have several, or if the run has only one."""
    return node_suffix(group[0].node) if len({rank.node for rank in group}) == 1 else ""
