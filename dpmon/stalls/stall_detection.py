"""Decides whether a run is stalled, and which rank the others wait for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpmon.record.schema import SECOND
from dpmon.record.shared_names import node_suffix
from dpmon.run.activities import IDLE
from dpmon.stalls.stacks import Stack

MIN_STALL_NS = 10 * SECOND
"""A lack of progress is never called a stall before this time."""
MAX_BUSY_NS = 1200 * SECOND
"""A process that shows a sign of life is not called stalled before this time at a new location, before its first step,
or after a loop: a compilation, checkpoint, download or evaluation may take this long."""
MAX_BUSY_DATA_NS = 180 * SECOND
"""A process that shows a sign of life and waits for data is not called stalled before this time."""
MAX_SAVE_NS = 60 * SECOND
"""A process that saves without a sign of life is not called stalled before this time. If it waits for a disk, it has
MAX_BUSY_NS."""
LEARNED_RATIO = 3
"""A rank may stay at a location for this many times its longest earlier stay."""


LEARNED_PHASES = ("data", "copy", "forward", "backward", "optimizer", "checkpoint")
"""Activities whose durations are learned as a whole. In the script, they are learned for each line, because otherwise a
long checkpoint would hide a stall."""


INPUT_WAIT = "input wait"
"""The state of a process that waits for a line of standard input."""
FIRST_BATCH = ("first batch", None)
"""The `timing_key` of a wait for the first batch of a loop."""


@dataclass(frozen=True, slots=True)
class ProcessGroupView:
    """A process group as one rank sees it."""

    group: int
    """A number that is the same on all its ranks."""
    ranks: int
    sequence: int | None
    """Number of collectives that this rank has started in it; None if the backend does not count them."""


class LoaderWorker(NamedTuple):
    """A worker of the DataLoader that the training waits for."""

    pid: int
    description: str
    """dead, stopped, disk wait, or its location: "in Samples.__getitem__ (data.py:31)"."""
    stack: Stack | None = None


class RankActivity(NamedTuple):
    """The current activity of one training process."""

    pid: int
    process: int | None = None
    rank: int | None = None
    world: int = 1
    doing: str = "other"
    """data, copy, forward, backward, sync, optimizer, paused, other (in the script), ended, gone, or a stage."""
    since_ns: int = 0
    """When this activity started (monotonic)."""
    step: int | None = None
    """Its last finished step."""
    groups: tuple[ProcessGroupView, ...] = ()
    state: str = "sleeping"
    """running, sleeping, disk wait, stopped, INPUT_WAIT or gone, from /proc."""
    cpu: float | None = None
    """Share of a core used in the last second, including its children."""
    busy: bool | None = None
    """Whether it has shown a sign of life in the last seconds (dpmon.stalls.rank_inspector); None: not known yet."""
    between_loops: bool = False
    """Whether the last loop over a loader has ended, and nothing has started since."""
    loop_begins: bool = False
    """Whether it has finished at most one step since its last loop over a loader ended."""
    job: int = 0
    """A number shared by all ranks that may wait for each other."""
    namesake: bool = False
    """Whether a rank of another job has the same number."""
    stack: Stack | None = None
    why_no_stack: str | None = None
    raised: str | None = None
    """The exception that ended it, with its line."""
    worker: LoaderWorker | None = None
    """A worker of its data loader, if the rank waits for data."""
    node: str | None = None
    """The node that it runs on, if the run has several."""
    usual_ns: int = 0
    """How long it may stay at its location according to earlier times, if another supervisor has learned them."""

    @property
    def key(self) -> tuple[str | None, int]:
        """A key that is unique in the run: on two nodes, processes may have the same id."""
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
        """Whether the stack was requested since the rank has been at its location."""
        return self.is_over or self.stack is not None or self.why_no_stack is not None

    @property
    def is_starting(self) -> bool:
        """Whether it has not made its first call, so that `doing` is a stage."""
        return self.step is None and " " in self.doing

    @property
    def is_over(self) -> bool:
        """Whether it will run no further step, because it has ended."""
        return self.doing in ("ended", "gone") or self.state == "gone"

    @property
    def timing_key(self) -> tuple[str, str | None]:
        """The location for which durations are learned: the activity, and in the script also the line."""
        if self.doing == "data" and (self.step is None or self.loop_begins):
            return FIRST_BATCH
        if self.step is None:
            return "starting", None
        script = None if self.stack is None or self.doing in LEARNED_PHASES else self.stack.innermost_script_frame
        return self.doing, None if script is None else f"{script.file}:{script.line}"

    @property
    def is_in_collective(self) -> bool:
        """Whether it is in an operation that waits for other ranks."""
        if self.world < 2 or self.is_over or self.state == "stopped":
            return False
        if self.stack is not None:
            return self.stack.operation_kind in ("collective", "backward")
        return self.doing in ("backward", "sync")


@dataclass(frozen=True, slots=True)
class NodeActivities:
    """What the ranks of a node do while one of them makes no progress; no ranks if all make progress."""

    now_ns: int
    """The node's monotonic time."""
    ranks: tuple[RankActivity, ...]


class LearnedDurations:
    """The longest duration so far at each location, from which the allowed time follows."""

    def __init__(self) -> None:
        self._longest: dict[tuple[str, str | None], int] = {}

    def add_duration(self, timing_key: tuple[str, str | None], duration_ns: int) -> None:
        """Add the duration of a finished stay."""
        if duration_ns > self._longest.get(timing_key, 0):
            self._longest[timing_key] = duration_ns

    def allowed_ns(self, rank: RankActivity, *, awaited: bool = True) -> int:
        """Return how long (ns) a rank may stay at its location. `awaited`: whether other ranks are waiting for it."""
        if rank.state == "stopped":
            return MIN_STALL_NS
        return max(_default_allowed_ns(rank, awaited), self.learned_ns(rank))

    def learned_ns(self, rank: RankActivity) -> int:
        """Return how long (ns) a rank may stay there according to earlier times; 0 if there are none."""
        return max(LEARNED_RATIO * self._longest.get(rank.timing_key, 0), rank.usual_ns)


def _default_allowed_ns(rank: RankActivity, awaited: bool) -> int:
    """Return how long (ns) a rank may stay at a location where it was not seen before."""
    if rank.is_starting and (rank.world < 2 or rank.busy is not False):
        return 1 << 62  # it may prepare data for hours, or not train at all
    operation_kind = "" if rank.stack is None else rank.stack.operation_kind
    if rank.step is None or operation_kind == "compile" or (rank.between_loops and not awaited):
        return MAX_BUSY_NS
    if operation_kind == "save" or rank.doing == "checkpoint":
        return MAX_BUSY_NS if rank.busy is not False or rank.state == "disk wait" else MAX_SAVE_NS
    if rank.busy is not False:
        return MAX_BUSY_DATA_NS if rank.doing == "data" else MAX_BUSY_NS
    return MIN_STALL_NS


class Stall(NamedTuple):
    """A run without progress."""

    since_ns: int
    """When the last progress was made (monotonic)."""
    blockers: tuple[int, ...]
    """Indices of the ranks that the others wait for, or that make no progress themselves; empty if unknown."""
    waiters: tuple[int, ...]
    """Indices of the ranks that wait for them."""


def find_stall(ranks: Sequence[RankActivity], learned: LearnedDurations, now_ns: int) -> Stall | None:
    """Return the stall of a run; None if it makes progress, or if the lack of it is plausible."""
    jobs: dict[int, list[int]] = {}
    for i, rank in enumerate(ranks):
        if rank.doing != "paused":
            jobs.setdefault(rank.job, []).append(i)
    stalls = [stall for job in jobs.values() if (stall := _find_job_stall(ranks, job, learned, now_ns)) is not None]
    if not stalls:
        return None
    blockers = [i for stall in stalls for i in stall.blockers]
    waiters = [i for stall in stalls for i in stall.waiters]
    return Stall(min(stall.since_ns for stall in stalls), tuple(blockers), tuple(waiters))


def _find_job_stall(
    ranks: Sequence[RankActivity], indices: Sequence[int], learned: LearnedDurations, now_ns: int
) -> Stall | None:
    """Return the stall of the ranks of one job, which may wait for each other. `indices`: their indices."""
    if all(ranks[i].is_over for i in indices):
        return None
    waiters = [i for i in indices if ranks[i].is_in_collective]
    still = [i for i in indices if not ranks[i].is_in_collective and not ranks[i].is_over]
    # A rank that is ahead of another one waits for it, or will wait, although its stack does not show it.
    ahead_of_last = _ranks_not_at(ranks, [*still, *waiters], min)
    ahead = {i for i in still if i in ahead_of_last and ranks[i].state != "stopped"}
    waiters = sorted([*waiters, *ahead])
    still = [i for i in still if i not in ahead]
    overdue = [i for i in still if now_ns - ranks[i].since_ns >= learned.allowed_ns(ranks[i], awaited=bool(waiters))]
    if overdue:
        return Stall(min(ranks[i].since_ns for i in overdue), tuple(overdue), tuple(waiters))
    if still or not waiters:
        return None
    # All live ranks wait in a collective: for one that has ended or is on another node, or for each other.
    is_complete = len(indices) >= max(ranks[i].world for i in indices)
    since_ns = max(ranks[i].since_ns for i in waiters)
    allowed_ns = max(learned.learned_ns(ranks[i]) for i in waiters)
    if now_ns - since_ns < max(allowed_ns, _allowed_collective_ns(ranks, waiters, is_complete)):
        return None
    blockers = tuple(i for i in indices if ranks[i].is_over)
    if is_complete:  # otherwise, they may wait for a rank that is not visible here
        blockers = blockers or _choose_blockers(ranks, waiters)
    return Stall(since_ns, blockers, tuple(i for i in waiters if i not in blockers))


def _allowed_collective_ns(ranks: Sequence[RankActivity], waiters: Sequence[int], is_complete: bool) -> int:
    """Return how long (ns) these ranks may stay in collectives. `is_complete`: whether there are no other ranks."""
    if not is_complete or any(ranks[i].step is None or ranks[i].busy is None for i in waiters):
        return MAX_BUSY_NS
    # In a stall, all of them sleep (gloo) or all of them spin (NCCL). Otherwise, the busy ones compute their backward.
    return MAX_BUSY_NS if len({ranks[i].busy for i in waiters}) > 1 else MIN_STALL_NS


def _ranks_not_at(
    ranks: Sequence[RankActivity], indices: Sequence[int], choose: Callable[[list[int]], int]
) -> tuple[int, ...]:
    """Return the ranks that, in some process group, have not started the chosen number of collectives.

    `choose` picks that number from those of all ranks in `indices`: with min, the result is the ranks that are ahead of
    the last one; with max, the ranks that are behind the first one.
    """
    sequences: dict[int, list[int]] = {}
    for i in indices:
        for group in ranks[i].groups:
            if group.sequence is not None:
                sequences.setdefault(group.group, []).append(group.sequence)
    chosen = {name: choose(group_sequences) for name, group_sequences in sequences.items()}

    def differs(rank: RankActivity) -> bool:
        return any(group.sequence not in (None, chosen.get(group.group)) for group in rank.groups)

    return tuple(i for i in indices if differs(ranks[i]))


def _choose_blockers(ranks: Sequence[RankActivity], waiters: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks to blame if all ranks wait for each other; empty if unknown.

    They are the fewest ranks at one location; if that does not tell, the ranks that have started fewer collectives. If
    nothing tells, of several groups of the same size the last one is chosen.
    """
    groups: dict[object, list[int]] = {}  # in the order of the ranks
    for i in waiters:
        stack = ranks[i].stack
        line = operation = None
        if stack is not None:
            operation, frame = stack.library_operation, stack.innermost_script_frame
            line = None if frame is None else (frame.file, frame.line)
        groups.setdefault((ranks[i].doing, line, operation), []).append(i)
    fewest = min(map(len, groups.values()))
    smallest_groups = [group for group in groups.values() if len(group) == fewest]
    behind_first = _ranks_not_at(ranks, waiters, max)
    if len(groups) == 1 or (behind_first and len(smallest_groups) > 1):
        return behind_first
    return tuple(smallest_groups[-1])


# ------------------------------------------------------------------------------------------------ words


_ACTIVITY_TEXTS = {"data": "waiting for data", "other": "in the script", "sync": "in a collective"}
_STATE_TEXTS = {
    "stopped": "is stopped (SIGSTOP)",
    "disk wait": "waits for a disk",
    INPUT_WAIT: "waits for input",
    "gone": "has exited",
}


def describe_activity(rank: RankActivity, directory: str, *, is_waiter: bool = False) -> str:
    """Return what a rank does and where: "in save (train.py:88)". `is_waiter`: whether it waits for other ranks."""
    if rank.is_over:
        if rank.raised:
            return f"ended: {rank.raised}"
        return "has exited" if rank.doing == "gone" else "has ended"
    stack = rank.stack
    frame = None if stack is None else stack.innermost_script_frame
    location_suffix = "" if frame is None else f" ({frame.location(directory)})"
    operation = None if stack is None else stack.library_operation
    if rank.is_starting and rank.doing not in IDLE:
        activity = f"{rank.doing}{location_suffix}"
    elif operation is not None:
        activity = f"in {operation}{location_suffix}"
    elif frame is not None and not (is_waiter and rank.doing in LEARNED_PHASES):
        activity = frame.description(directory)
    else:
        text = rank.doing if rank.is_starting else f"in {rank.doing}"
        activity = f"{_ACTIVITY_TEXTS.get(rank.doing, text)}{location_suffix}"
    if is_waiter:
        return activity
    state = _STATE_TEXTS.get(rank.state)
    worker_text = "" if rank.worker is None else f"; its worker (pid {rank.worker.pid}) is {rank.worker.description}"
    return f"{state}, {activity}{worker_text}" if state else f"{activity}{worker_text}"


def sentence(stall: Stall, ranks: Sequence[RankActivity], directory: str) -> str:
    """Return the stall in a sentence: "rank 3 in save (train.py:88); the other 7 wait for it in backward"."""
    jobs = dict.fromkeys(ranks[i].job for i in (*stall.blockers, *stall.waiters))
    return "; ".join(_sentence_of_job(stall, ranks, job, directory) for job in jobs)


def _sentence_of_job(stall: Stall, ranks: Sequence[RankActivity], job: int, directory: str) -> str:
    blockers = [ranks[i] for i in stall.blockers if ranks[i].job == job]
    waiters = [ranks[i] for i in stall.waiters if ranks[i].job == job]

    def describe_waiter(rank: RankActivity) -> str:
        return describe_activity(rank, directory, is_waiter=True)

    def describe_waiters(group: Sequence[RankActivity]) -> list[str]:
        texts = _group_by_text(group, describe_waiter)
        return [f"{names} {'waits' if is_single else 'wait'} {text}" for names, is_single, text in texts]

    if not blockers:
        first_waiter = waiters[0]
        visible = "this machine" if first_waiter.node is None else "the nodes that answer"
        scope = "" if len(waiters) == first_waiter.world else f" of {visible}"
        names = f"all {len(waiters)} ranks wait" if len(waiters) > 1 else f"{first_waiter.name} waits"
        return f"{names} {describe_waiter(first_waiter)}: no rank{scope} is behind"
    if all(rank.is_in_collective for rank in blockers):
        waiter_texts = describe_waiters([*blockers, *waiters])
        if len(waiter_texts) > 1:
            return f"{'; '.join(waiter_texts)}: different collectives"
        verb = "has" if len(blockers) == 1 else "have"
        return f"{waiter_texts[0]}: {format_rank_names(blockers)} {verb} started fewer collectives"
    blocker_texts = _group_by_text(blockers, lambda rank: describe_activity(rank, directory))
    if len(ranks) == 1:
        (_, _, activity), *_ = blocker_texts
        return activity if activity.startswith(("in ", "at ", "waiting ")) else f"it {activity}"
    text = "; ".join(f"{names} {activity}" for names, _, activity in blocker_texts)
    if not waiters:
        return text
    waiter_texts = describe_waiters(waiters)
    all_others_wait = len(waiters) + len(blockers) == sum(rank.job == job for rank in ranks)
    if all_others_wait and len(waiter_texts) == 1 and len(waiters) > 2:
        return f"{text}; the other {len(waiters)} wait for it {describe_waiter(waiters[0])}"
    return "; ".join((text, *waiter_texts))


def _group_by_text(
    ranks: Sequence[RankActivity], describe: Callable[[RankActivity], str]
) -> list[tuple[str, bool, str]]:
    """Return names, whether it is a single rank, and text of each group of ranks with the same text; smallest first."""
    groups: dict[str, list[RankActivity]] = {}
    for rank in ranks:
        groups.setdefault(describe(rank), []).append(rank)
    smallest_first = sorted(groups, key=lambda text: len(groups[text]))
    return [(format_rank_names(groups[text]), len(groups[text]) == 1, text) for text in smallest_first]


def format_rank_names(ranks: Sequence[RankActivity]) -> str:
    """Return the names of ranks: "rank 3", "ranks 0-2, 5"."""
    if len(ranks) == 1:
        return ranks[0].name
    if any(rank.namesake for rank in ranks):
        return ", ".join(rank.name for rank in ranks)
    noun, _, _ = ranks[0].name.partition(" ")
    nouns = "processes" if noun == "process" else f"{noun}s"
    numbers = format_ranges(sorted(rank.number for rank in ranks))
    return f"{nouns} {numbers}{_node_suffix(ranks)}"


def format_ranges(numbers: Iterable[int], separator: str = ", ", min_length: int = 3) -> str:
    """Return sorted numbers as text: "0-2, 5". `min_length`: the fewest numbers that are written as a range."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1].append(number)
        else:
            ranges.append([number])

    def format_range(members: list[int]) -> str:
        is_long = len(members) >= min_length
        return f"{members[0]}-{members[-1]}" if is_long else separator.join(map(str, members))

    return separator.join(map(format_range, ranges))


def _node_suffix(ranks: Sequence[RankActivity]) -> str:
    """Return the suffix that names the ranks' node: " (gpu-2)"; empty if they have several, or on one machine."""
    nodes = {rank.node for rank in ranks}
    return node_suffix(nodes.pop()) if len(nodes) == 1 else ""
