"""Decides whether a run is stalled, and names the rank that the others wait for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dpmon.stalls.stacks import Stack

SECOND = 1_000_000_000
LEAST_NS = 10 * SECOND
"""No lack of progress is called a stall before this time."""
BUSY_NS = 1200 * SECOND
"""The same for a process with a sign of life (processor time, file I/O, wake-ups) in a place that it was not seen in
before: a first compilation, checkpoint, download or evaluation may take this long."""
BUSY_DATA_NS = 60 * SECOND
"""The same for a wait for data after the first batches."""
START_NS = 1200 * SECOND
"""The same before the first step."""
LONGER = 3
"""A place may take this many times as long as it took at most before."""
SIGNS_PER_S = 20.0
"""Wake-ups a second that count as a sign of life. A loader that waits for a dead worker wakes 0.2 times a second."""
SIGN_CPU = 0.05
"""Share of a core, of the process and its children, that counts as a sign of life."""
SIGN_BYTES_PER_S = 64 << 10


class GroupSeen(NamedTuple):
    """A process group as one rank sees it."""

    name: int
    """The same number on all its ranks."""
    ranks: int
    sequence: int
    """Number of collectives that this rank has started in it."""


class RankFacts(NamedTuple):
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
    groups: tuple[GroupSeen, ...] = ()
    state: str = "sleeping"
    """running, sleeping, disk wait, stopped or gone, from /proc."""
    cpu: float | None = None
    """Share of a core in the last second, its children included."""
    wakes: float = 0.0
    """Wake-ups of its main thread a second."""
    io_bytes: float = 0.0
    """Bytes read and written a second, its children included."""
    stack: Stack | None = None
    why_no_stack: str | None = None
    raised: str | None = None
    """The exception that ended it, with its line."""
    worker: str | None = None
    """What a worker of its data loader does, if the rank waits for data."""

    @property
    def name(self) -> str:
        """Its name in a list of several."""
        if self.rank is not None:
            return f"rank {self.rank}"
        return f"process {self.process}" if self.process is not None else f"pid {self.pid}"

    @property
    def number(self) -> int:
        """The number in its name."""
        return next(number for number in (self.rank, self.process, self.pid) if number is not None)

    @property
    def alive_signs(self) -> bool:
        """Whether it shows a sign of life."""
        return (
            (self.cpu or 0.0) >= SIGN_CPU or self.wakes >= SIGNS_PER_S or self.io_bytes >= SIGN_BYTES_PER_S
        ) and self.state not in ("stopped", "gone")

    @property
    def over(self) -> bool:
        """Whether it makes no further step: ended or gone."""
        return self.doing in ("ended", "gone") or self.state == "gone"

    @property
    def where(self) -> tuple[str, str | None]:
        """The place whose usual time is learned: what it does, and the function and line of the script."""
        script = None if self.stack is None else self.stack.script
        return self.doing, None if script is None else f"{script.file}:{script.line}"

    @property
    def in_collective(self) -> bool:
        """Whether it stands in an operation that waits for other ranks."""
        if self.world < 2 or self.over or self.state == "stopped":
            return False
        if self.stack is not None:
            return self.stack.kind in ("collective", "backward")
        return self.doing in ("backward", "sync")


class UsualTimes:
    """How long each place may take, learned from the times it took before."""

    def __init__(self) -> None:
        self._longest: dict[tuple[str, str | None], int] = {}

    def learn(self, where: tuple[str, str | None], took_ns: int) -> None:
        """Take note of a finished time."""
        for key in {where, (where[0], None)}:
            if took_ns > self._longest.get(key, 0):
                self._longest[key] = took_ns

    def of(self, rank: RankFacts, *, started: bool) -> int:
        """How long (ns) a rank may stand where it stands. `started`: whether the run has finished a step."""
        what, place = rank.where
        # A place in the script is known by its line. The longest of all places would hide a stall behind a checkpoint.
        known = self._longest.get((what, place), 0)
        least = LEAST_NS if started else START_NS
        if rank.alive_signs:
            least = BUSY_DATA_NS if started and what == "data" else BUSY_NS
        return max(least, LONGER * known)


class Stall(NamedTuple):
    """A run without progress."""

    since_ns: int
    """When the last progress was made (monotonic)."""
    guilty: tuple[int, ...]
    """Indices of the ranks that the others wait for, or that stand still themselves; empty if none can be named."""
    waiting: tuple[int, ...]
    """Indices of the ranks that wait for them."""


def stall(ranks: Sequence[RankFacts], patience: UsualTimes, now_ns: int, *, started: bool) -> Stall | None:
    """Return the stall of a run; None if it makes progress, or if the lack of it is plausible."""
    there = [i for i, rank in enumerate(ranks) if rank.doing != "paused"]
    if not there or all(ranks[i].over for i in there):
        return None
    waiting = [i for i in there if ranks[i].in_collective]
    if waiting:
        behind = _behind([ranks[i] for i in waiting])
        waiting = [i for i in waiting if ranks[i].pid not in behind]
    still = [i for i in there if i not in waiting and not ranks[i].over]
    slow = [i for i in still if now_ns - ranks[i].since_ns >= patience.of(ranks[i], started=started)]
    if slow:
        since = min(ranks[i].since_ns for i in slow)
        return Stall(since, tuple(slow), tuple(waiting))
    if still or not waiting:
        return None
    # All ranks that are left wait in a collective: for one that is gone or has ended, or for each other.
    since = max(ranks[i].since_ns for i in waiting)
    least = LEAST_NS if started else START_NS
    known = max(patience.of(ranks[i]._replace(cpu=None, wakes=0, io_bytes=0), started=started) for i in waiting)
    if now_ns - since < max(least, known):
        return None
    gone = tuple(i for i in there if ranks[i].over)
    if gone:
        return Stall(since, gone, tuple(waiting))
    odd = _odd(ranks, waiting)
    return Stall(since, odd, tuple(i for i in waiting if i not in odd))


def _behind(ranks: Sequence[RankFacts]) -> set[int]:
    """The pids of ranks that have started fewer collectives of a group than another rank of it."""
    most: dict[int, int] = {}
    for rank in ranks:
        for group in rank.groups:
            most[group.name] = max(most.get(group.name, 0), group.sequence)
    return {rank.pid for rank in ranks for group in rank.groups if group.sequence < most[group.name]}


def _odd(ranks: Sequence[RankFacts], waiting: Sequence[int]) -> tuple[int, ...]:
    """Of ranks that wait for each other, the smallest group that stands elsewhere; empty if all stand together."""
    places: dict[object, list[int]] = {}  # in the order of the ranks
    for i in waiting:
        stack = ranks[i].stack
        places.setdefault((ranks[i].where, stack and stack.inside), []).append(i)
    if len(places) < 2:
        return ()
    smallest = min(len(group) for group in places.values())
    return tuple(next(group for group in reversed(places.values()) if len(group) == smallest))


# ------------------------------------------------------------------------------------------------ words


_DOING = {"data": "waits for data", "other": "in the script", "sync": "waits in a collective"}
_STATES = {"stopped": "is stopped (SIGSTOP)", "disk wait": "waits for a disk", "gone": "is gone"}


def doing_words(rank: RankFacts, directory: str, *, waits: bool = False) -> str:
    """What a rank does and where: "in DataLoader.__next__ (train.py:88)"; `waits`: as a rank that waits for others."""
    if rank.over:
        return f"ended: {rank.raised}" if rank.raised else "is gone" if rank.doing == "gone" else "has ended"
    stack = rank.stack
    script = None if stack is None else stack.script
    place = "" if script is None else f" ({script.place(directory)})"
    inside = None if stack is None else stack.inside
    if waits:
        return f"in {inside or rank.doing}{place}"
    if inside is not None:
        what = f"in {inside}{place}"
    elif script is not None:
        what = f"in {script.function}{place}" if script.function != "<module>" else f"at {script.place(directory)}"
    else:
        what = _DOING.get(rank.doing, f"in {rank.doing}")
    state = _STATES.get(rank.state)
    worker = f"; {rank.worker}" if rank.worker else ""
    return f"{state}, {what}{worker}" if state else f"{what}{worker}"


def sentence(found: Stall, ranks: Sequence[RankFacts], directory: str) -> str:
    """The stall in one sentence: "rank 3 in DataLoader.__next__ (train.py:88); the other 7 wait for it in backward"."""
    if not found.guilty:
        words = doing_words(ranks[found.waiting[0]], directory, waits=True)
        return f"all {len(found.waiting)} ranks wait {words}: no rank is behind"
    if all(ranks[i].in_collective for i in found.guilty):
        groups = _grouped([*found.guilty, *found.waiting], ranks, lambda rank: doing_words(rank, directory, waits=True))
        named = "; ".join(f"{who} {'waits' if _one(who) else 'wait'} {words}" for who, words in groups)
        return f"{named}: different collectives" if len(groups) > 1 else named
    guilty = _grouped(found.guilty, ranks, lambda rank: doing_words(rank, directory))
    only = len(ranks) == 1
    text = "; ".join(words if only else f"{names} {words}" for names, words in guilty)
    if not found.waiting:
        return text
    waits = _grouped(found.waiting, ranks, lambda rank: doing_words(rank, directory, waits=True))
    if len(waits) == 1 and len(found.waiting) + len(found.guilty) == len(ranks) and len(found.waiting) > 2:
        return f"{text}; the other {len(found.waiting)} wait for it {waits[0][1]}"
    return text + "".join(f"; {who} {'waits' if _one(who) else 'wait'} {words}" for who, words in waits)


def _one(who: str) -> bool:
    """Whether this names a single rank."""
    return "," not in who and "-" not in who


def _grouped(
    which: Sequence[int], ranks: Sequence[RankFacts], words: Callable[[RankFacts], str]
) -> list[tuple[str, str]]:
    groups: dict[str, list[RankFacts]] = {}
    for i in which:
        groups.setdefault(words(ranks[i]), []).append(ranks[i])
    return [(names(group), text) for text, group in sorted(groups.items(), key=lambda item: len(item[1]))]


def names(group: Sequence[RankFacts]) -> str:
    """ "rank 3", "ranks 0-2, 5"."""
    if len(group) == 1:
        return group[0].name
    kind = group[0].name.partition(" ")[0]
    numbers = sorted(rank.number for rank in group)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{kind}{'es' if kind == 'process' else 's'} {', '.join(texts)}"
