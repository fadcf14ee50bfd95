"""What each process of a run is doing: its stage before the first call, its phase afterwards, and since when."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpmon.run import proc
from dpmon.run.notes import every_uncaught, read_notes
from dpmon.run.rundir import ExitInfo, RunInfo, ring_paths
from dpmon.run.standard_input import waits_since
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError

QUIET_NS = 10_000_000_000
"""A lack of progress is reported after this time."""
IMPORTING, IMPORTED, IN_SCRIPT = "importing torch", "torch imported", "in the script"
IDLE = (IMPORTED, IN_SCRIPT)
"""Stages without a known operation in progress."""
_MAX_BYTES = 1 << 16
_MAX_NAMED = 16
_WORDS = {"data": "waiting for data", "other": IN_SCRIPT, "ended": "at its end", "paused": "paused"}

Stage = tuple[str, int]


class ProcessActivity(NamedTuple):
    """A process: number (None before its first call), rank, pid, activity, start of the activity (monotonic ns)."""

    process: int | None
    rank: int | None
    pid: int
    doing: str
    since_ns: int

    @property
    def number(self) -> tuple[str, int]:
        """The process's number in a list of several, and its kind: rank, process or pid."""
        if self.rank is not None:
            return "rank", self.rank
        return ("process", self.process) if self.process is not None else ("pid", self.pid)

    @property
    def name(self) -> str:
        """The process's name in a list of several."""
        return "{} {}".format(*self.number)


def stages(directory: Path, until_ns: int | None = None) -> dict[int, Stage]:
    """The last stage that each process noted (up to `until_ns`) and its time (monotonic ns), by process id."""
    notes = read_notes(directory / "stages.log", _MAX_BYTES, newest=True)
    return {pid: (text, at_ns) for pid, at_ns, text in notes if until_ns is None or at_ns <= until_ns}


def newest_stage(found: Mapping[int, Stage], alive: Callable[[int], bool] = lambda pid: True) -> Stage | None:
    """The stage shown for the run: the newest with an operation in progress, among living processes.

    A process that only imported torch (a launcher, a worker) does not count if another process is further.
    """
    living = [stage for pid, stage in found.items() if alive(pid)] or list(found.values())
    further = [stage for stage in living if stage[0] not in (IMPORTING, IMPORTED)] or living
    busy = [stage for stage in further if stage[0] not in IDLE] or further
    return max(busy, key=lambda stage: stage[1], default=None)


def ring_activities(directory: Path) -> Iterator[tuple[SpanReader, str, int]]:
    """Yield the ring of each training process, its activity, and the activity's start (monotonic ns).

    The ring is open until the next item is requested.
    """
    for path in ring_paths(directory):
        with contextlib.suppress(RingError, OSError), contextlib.closing(SpanReader(str(path))) as ring:
            yield ring, *ring.activity()


def process_activities(directory: Path, *, over: bool) -> list[ProcessActivity]:
    """All training processes, then the processes with an operation in progress before their first call.

    `over`: whether the run has ended.
    """
    found = []
    for ring, name, since in ring_activities(directory):
        doing = _WORDS.get(name, f"in {name}")
        if not over and name != "ended" and not proc.alive(ring.pid, None):
            doing = "gone"
        found.append(ProcessActivity(ring.process, ring.rank, ring.pid, doing, since))
    known = {one.pid for one in found}
    for pid, (text, since) in stages(directory).items():
        if pid not in known and text not in IDLE and (over or proc.alive(pid, None)):
            found.append(ProcessActivity(None, None, pid, text, since))
    return found


def stall_text(found: Iterable[ProcessActivity], now_ns: int) -> str | None:
    """How long nothing has moved, and where each process is; None if something moves or all ended or paused."""
    there = [one for one in found if one.doing != _WORDS["ended"]]
    moving = [one for one in there if one.doing != "gone" and one.since_ns > 0]
    if not moving or all(one.doing == _WORDS["paused"] for one in moving):
        return None
    quiet = now_ns - max(one.since_ns for one in moving)
    if quiet < QUIET_NS:
        return None
    what = "nothing has moved" if all(one.process is None for one in moving) else "no new phase"
    return f"{what} for {quiet / 1e9:.0f} s: {there[0].doing if len(there) == 1 else _where(there)}"


def _where(found: Sequence[ProcessActivity]) -> str:
    """What the processes are doing, in groups that do the same. The smallest group is the odd one, and comes first."""
    groups: dict[str, list[ProcessActivity]] = {}
    for one in found:
        groups.setdefault(one.doing, []).append(one)
    named = [f"{_names(group)} {doing}" for doing, group in sorted(groups.items(), key=lambda item: len(item[1]))]
    return (", " if len(groups) == len(found) else "; ").join(named)


def _names(found: Sequence[ProcessActivity]) -> str:
    """Processes with one kind of number: "rank 3", "ranks 0-2, 5, process 7"."""
    kinds: dict[str, list[int]] = {}
    for one in found:
        kind, number = one.number
        kinds.setdefault(kind, []).append(number)
    return ", ".join(_numbered(kind, sorted(numbers)) for kind, numbers in kinds.items())


def _numbered(kind: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{kind} {numbers[0]}"
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    more = f" and {sum(map(len, runs[_MAX_NAMED:]))} more" if len(runs) > _MAX_NAMED else ""
    return f"{kind}{'es' if kind == 'process' else 's'} {', '.join(texts[:_MAX_NAMED])}{more}"


def describe_stall(directory: Path, info: RunInfo, state: str, how: ExitInfo | None) -> str | None:
    """Where a stalled run is, or where it was when a signal ended it; None for other runs."""
    if state in ("running", "unsupervised"):
        now = time.monotonic_ns()
        waits = waits_since(directory)
        if waits is not None and now - waits >= QUIET_NS:
            return f"waiting for a line of input for {(now - waits) / 1e9:.0f} s"
        found = process_activities(directory, over=False)
        return stall_text(found, now) if found else _before_any_call(stages(directory), now)
    if how is not None and (how.signal is not None or how.stopped):
        found = process_activities(directory, over=True)
        known = (stall_text(found, how.end_ns), _interrupted(directory, info, found))
        texts = [text for text in known if text is not None]
        return f"when it ended: {'; '.join(texts)}" if texts else None
    return None


def why_nothing(directory: Path, info: RunInfo, how: ExitInfo | None, warnings: Iterable[str]) -> str | None:
    """Why a run has no steps and no calls; None if its command was not started."""
    # A warning that no ring could take is only in the log. The warning about the place of the run is not a reason.
    for text in (*warnings, *(note.text for note in read_notes(directory / "warnings.log", _MAX_BYTES))):
        if text != info.options.get("elsewhere"):
            return text
    if info.command_pid is None:
        return None
    stage = newest_stage(stages(directory), lambda pid: proc.alive(pid, None))
    if stage is None:
        return "no Python process of the run imported torch"
    if stage[0] == IMPORTING:
        return "the process ended while it imported torch"
    if stage[0] in IDLE:
        return "torch was imported, but no model was called"
    end_ns = time.monotonic_ns() if how is None else how.end_ns
    process = "the process is" if how is None else "when the process ended, it was"
    return f"no model was called; {process} {stage[0]}, for {max(end_ns - stage[1], 0) / 1e9:.0f} s"


def _interrupted(directory: Path, info: RunInfo, found: Iterable[ProcessActivity]) -> str | None:
    """The line of the script at which each process was interrupted."""
    names = {one.pid: one.name for one in found}
    places = [(one.pid, one.place(info.cwd)) for one in every_uncaught(directory) if one.kind == "KeyboardInterrupt"]
    known = [(names.get(pid, f"pid {pid}"), place) for pid, place in places[:_MAX_NAMED] if place is not None]
    if len(known) == 1 and len(names) <= 1:
        return f"interrupted at {known[0][1]}"
    return ", ".join(f"{name} interrupted at {place}" for name, place in sorted(known)) or None


def _before_any_call(found: Mapping[int, Stage], now_ns: int) -> str | None:
    stage = newest_stage(found, lambda pid: proc.alive(pid, None))
    if stage is None or now_ns - stage[1] < QUIET_NS:
        return None
    return f"no model was called yet; in the script for {(now_ns - stage[1]) / 1e9:.0f} s"
