"""Inspects a run's training processes through their rings, /proc and stack dumps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpmon.record.safe_json import load_json
from dpmon.record.schema import SECOND
from dpmon.run import proc
from dpmon.run.activities import ONLY_IMPORTS, StartupStage, read_startup_ranks
from dpmon.run.process_notes import read_notes, read_uncaught_exceptions
from dpmon.run.run_directory import ring_paths
from dpmon.run.run_signals import is_member
from dpmon.run.safe_files import read_tail
from dpmon.run.stdin_terminal import is_reading_stdin
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError
from dpmon.stalls.stacks import ProcessStacks, Stack, dump_stacks, parse_threads
from dpmon.stalls.stall_detection import INPUT_WAIT, LoaderWorker, ProcessGroupView, RankActivity

INSPECT_AFTER_NS = 3 * SECOND
"""A process without progress for this long is inspected in /proc."""
ACTIVITY_WINDOW_NS, MIN_ACTIVITY_WINDOW_NS = 10 * SECOND, 5 * SECOND
"""CPU use, wake-ups and I/O are averaged over the first time, so that a helper thread that wakes occasionally is not a
sign of life. They are known after the second time."""
MIN_BUSY_CPU = 0.05
"""Minimum CPU use of the process and its children (share of a core) that is a sign of life."""
MIN_BUSY_WAKES_PER_S = 20.0
"""Minimum wake-ups per second of the training thread that are a sign of life. A loader that waits for a dead worker has
0.2."""
MIN_BUSY_BYTES_PER_S = 64 << 10
"""Minimum bytes read and written per second, by the process and its children, that are a sign of life."""
MAX_NOTE_WAIT_S = 0.6
"""Maximum wait for a process to note its stacks. It checks for requests four times per second."""
MAX_WORKERS = 32
_STATES = {"R": "running", "D": "disk wait", "T": "stopped", "t": "stopped"}
_MAX_STACKS_BYTES = 256 << 10


class Counters(NamedTuple):
    """The counters of a process and its children at one time."""

    at_ns: int
    cpu_s: float
    wakes: int
    io_bytes: int

    def cpu_since(self, earlier: Counters) -> float:
        """Return the share of a core used since `earlier`."""
        return max(self.cpu_s - earlier.cpu_s, 0.0) / ((self.at_ns - earlier.at_ns) / SECOND)

    def busy_since(self, earlier: Counters) -> bool:
        """Return whether the process showed a sign of life since `earlier`."""
        seconds = (self.at_ns - earlier.at_ns) / SECOND
        wakes, io_bytes = (self.wakes - earlier.wakes) / seconds, (self.io_bytes - earlier.io_bytes) / seconds
        return (
            self.cpu_since(earlier) >= MIN_BUSY_CPU or wakes >= MIN_BUSY_WAKES_PER_S or io_bytes >= MIN_BUSY_BYTES_PER_S
        )


class LastActivity(NamedTuple):
    """What a process was doing at its last inspection. Times are monotonic."""

    doing: str
    span_ns: int
    """Start of its last span."""
    since_ns: int
    """Start of its activity."""
    at_ns: int
    """Time of the inspection."""


class _LoopEnd(NamedTuple):
    """The end of a process's last loop over a loader, and its last step when this end was first seen."""

    end_ns: int
    step: int | None


class RankInspector:
    """An inspector of the training processes of one run, to be called again and again."""

    def __init__(self, directory: Path, cwd: str) -> None:
        self.directory = directory
        self.cwd = cwd
        self._rings: dict[str, SpanReader] = {}
        self._parents: dict[int, int] = {}
        self._started: dict[int, float | None] = {}
        """When each process started. Another process may get its id after its end."""
        self._members: set[int] = set()
        """Processes that are proven to be the run's. py-spy stops a process, so it is used on no other ones."""
        self._last_activities: dict[int, LastActivity] = {}
        self._loop_ends: dict[int, _LoopEnd] = {}
        self._counters: dict[int, list[Counters]] = {}
        self._dumps: dict[int, tuple[int, ProcessStacks]] = {}
        """When the last stacks of each process were requested, and these stacks."""
        self._starting: dict[int, StartupStage] = {}
        """The stages of processes that have not made their first call, by their id."""
        self._workers: dict[int, LoaderWorker | None] = {}

    def close(self) -> None:
        """Close the rings."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    def inspect_ranks(self, steps: Mapping[int, int | None], now_ns: int) -> list[RankActivity]:
        """Return the activity of each training process. `steps`: the last step of each process, by its index."""
        for path in ring_paths(self.directory, self._rings):
            with contextlib.suppress(RingError, OSError):
                ring = self._rings[path.name] = SpanReader(str(path))
                self._add_process(ring.pid)
        ranks: list[RankActivity] = []
        self._table: Mapping[int, proc.ProcessEntry] = {}
        for ring in self._rings.values():
            with contextlib.suppress(RingError, OSError):
                ranks.append(self._inspect(ring, steps.get(ring.process), now_ns))
        self._starting = {}
        if all(rank.step is None for rank in ranks):
            ranks += self._inspect_starting({rank.pid for rank in ranks}, now_ns)
        ranks = newest_process_per_rank(ranks)
        has_duplicates = any(rank.namesake for rank in ranks)
        return [rank._replace(job=self._job_of(rank, has_duplicates)) for rank in ranks]

    def _add_process(self, pid: int) -> None:
        """Note the parent and the start of a process, and whether it is proven to be the run's."""
        process = proc.read_process(pid)
        self._parents[pid] = 0 if process is None else process.parent
        self._started[pid] = None if process is None else process.start_s
        if is_member(pid, self.directory):
            self._members.add(pid)

    def _inspect_starting(self, ring_pids: set[int], now_ns: int) -> list[RankActivity]:
        """Return the activity of the processes that have no ring, because they have not made their first call."""
        notes = read_notes(self.directory / "stages.log")
        stages = {pid: StartupStage(text, at_ns) for pid, at_ns, text in notes if pid not in ring_pids}
        for pid in stages.keys() - self._parents.keys():
            self._add_process(pid)
        living = {
            pid: stage
            for pid, stage in stages.items()
            if pid in self._members and proc.is_running(pid, self._started[pid])
        }
        further = {pid: stage for pid, stage in living.items() if stage.name not in ONLY_IMPORTS}
        self._starting = further if further or ring_pids else living
        rank_numbers = read_startup_ranks(notes)
        ranks = []
        for pid, stage in self._starting.items():
            number, world = rank_numbers.get(pid, (None, 1))
            rank = RankActivity(pid, None, number, world, stage.name, stage.start_ns, state="running")
            ranks.append(self._with_process_state(rank, pid, now_ns))
        return ranks

    def _job_of(self, rank: RankActivity, has_duplicates: bool) -> int:
        """Return a number that ranks share if they may wait for each other."""
        if rank.world < 2:
            return rank.pid
        return self._launcher_pid(rank.pid) if has_duplicates else 0

    def _inspect(self, ring: SpanReader, step: int | None, now_ns: int) -> RankActivity:
        pid, world, loop_end_ns = ring.pid, ring.world or 1, ring.last_loop_end_ns()
        doing, span_ns = ring.activity()
        since_ns, last_activity = span_ns, self._last_activities.get(pid)
        if last_activity is not None and last_activity.span_ns == span_ns:
            # The span may have ended, because the ring has only its start.
            since_ns = last_activity.since_ns if last_activity.doing == doing else last_activity.at_ns
        self._last_activities[pid] = LastActivity(doing, span_ns, since_ns, now_ns)
        loop_end = self._loop_ends.get(pid)
        if loop_end is None or loop_end.end_ns != loop_end_ns:
            loop_end = self._loop_ends[pid] = _LoopEnd(loop_end_ns, step)
        # The loop's last step may be recorded just after the end of the loop was seen.
        loop_begins = loop_end_ns > 0 and (step or 0) - (loop_end.step or 0) <= 1
        rank = RankActivity(
            pid, ring.process, ring.rank, world, doing, since_ns, step, state="running", loop_begins=loop_begins
        )
        rank = self._with_process_state(rank, ring.training_tid(), now_ns)
        if now_ns - since_ns < INSPECT_AFTER_NS:
            return rank
        return rank._replace(
            groups=tuple(ProcessGroupView(*group) for group in ring.groups()),
            between_loops=doing == "other" and loop_end_ns > span_ns,
        )

    def _with_process_state(self, rank: RankActivity, tid: int, now_ns: int) -> RankActivity:
        """Return the rank with the state of its process, if it has made no progress for long. `tid`: its thread."""
        pid, doing, since_ns = rank.pid, rank.doing, rank.since_ns
        if now_ns - since_ns < INSPECT_AFTER_NS:
            self._counters.pop(pid, None)
            return rank
        process = proc.read_process(pid)
        if process is None or process.is_dead or not proc.has_start_time(process, self._started.get(pid)):
            return rank._replace(doing=doing if doing == "ended" else "gone", state="gone")
        dump_ns, dump = self._dumps.get(pid, (0, ProcessStacks()))
        if dump_ns < since_ns:
            dump = ProcessStacks()
        counters = self._counters.setdefault(pid, [])
        if not counters or now_ns - counters[-1].at_ns >= SECOND // 2:  # a reply may need an inspection in between
            self._table = self._table or proc.read_process_table()
            counters.append(_read_counters(pid, tid, self._table, now_ns))
        while now_ns - counters[0].at_ns > ACTIVITY_WINDOW_NS and len(counters) > 1:
            del counters[0]
        first, last = counters[0], counters[-1]
        return rank._replace(
            state=_STATES.get(process.state) or (INPUT_WAIT if is_reading_stdin(pid) else "sleeping"),
            stack=dump.main,
            why_no_stack=dump.reason if dump.main is None else None,
            worker=self._workers.get(pid) if dump.main is not None else None,
            cpu=last.cpu_since(counters[-2]) if len(counters) > 1 else None,
            busy=last.busy_since(first) if last.at_ns - first.at_ns >= MIN_ACTIVITY_WINDOW_NS else None,
        )

    def _launcher_pid(self, pid: int) -> int:
        """Return the pid of the process that started the ranks of this process's job: its nearest untraced ancestor."""
        parent = self._parents.get(pid, 0)
        return self._launcher_pid(parent) if parent in self._parents and parent != pid else parent

    def with_exceptions(self, ranks: list[RankActivity]) -> list[RankActivity]:
        """Return the ranks with the exceptions that ended them."""
        sentences = {
            exception.pid: exception._replace(rank=None).sentence(self.cwd)
            for exception in read_uncaught_exceptions(self.directory)
        }
        return [rank._replace(raised=sentences.get(rank.pid)) for rank in ranks]

    def take_stacks(self, *, still_ns: int = 0) -> Mapping[int, ProcessStacks]:
        """Take the stacks of all living processes. Return them by pid.

        `still_ns`: only of processes without progress for this long. Takes up to some seconds; may run in any thread.
        """
        now = time.monotonic_ns()
        rings: dict[int, SpanReader] = {}
        for ring in list(self._rings.values()):
            with contextlib.suppress(RingError, OSError):
                if proc.is_running(ring.pid, self._started.get(ring.pid)):
                    _, span_start_ns = ring.current_span()
                    if now - span_start_ns >= still_ns:
                        rings[ring.pid] = ring
        main_threads_by_pid = {pid: ring.training_tid() for pid, ring in rings.items() if pid in self._members}
        main_threads_by_pid |= {pid: pid for pid in self._starting}
        dumps = {
            pid: ProcessStacks(reason="it is not proven to be a process of this run")
            for pid in rings.keys() - main_threads_by_pid.keys()
        }
        dumps |= dump_stacks(main_threads_by_pid)
        requests = {}
        for pid, dump in dumps.items():
            if dump.reason is not None and pid in rings:  # without a ring, a process does not see a request
                with contextlib.suppress(RingError, OSError):
                    requests[pid] = rings[pid].request_stacks()
        deadline = time.monotonic() + MAX_NOTE_WAIT_S
        while requests and time.monotonic() < deadline:
            time.sleep(0.02)
            for pid in list(requests):
                stacks = self._read_own_stacks(rings[pid].process, requests[pid])
                if stacks:
                    dumps[pid] = ProcessStacks(stacks)
                    del requests[pid]
        for pid in requests:
            reason = f"{dumps[pid].reason}; and the process does not answer: C code holds the GIL, or it is stopped"
            dumps[pid] = ProcessStacks(reason=reason)
        table = proc.read_process_table() if any(_waits_for_data(dump) for dump in dumps.values()) else {}
        for pid, dump in dumps.items():
            children = [child for child in table.values() if child.parent == pid and child.pid not in dumps]
            is_waiting = pid in self._members and _waits_for_data(dump)
            self._workers[pid] = self._find_loader_worker(children) if is_waiting else None
        self._dumps.update((pid, (now, dump)) for pid, dump in dumps.items())
        return dumps

    def _find_loader_worker(self, children: Sequence[proc.ProcessEntry]) -> LoaderWorker | None:
        """Return the first loader worker that is dead, stopped or waits for a disk, else the first one at work."""
        for child in children:
            if child.is_dead:
                return LoaderWorker(child.pid, "dead")
            if child.state in _STATES and child.state != "R":
                return LoaderWorker(child.pid, _STATES[child.state])
        for pid, dump in dump_stacks({child.pid: child.pid for child in children[:MAX_WORKERS]}).items():
            stack = dump.main
            if stack is not None and stack.innermost_script_frame is not None and not stack.is_idle_worker:
                return LoaderWorker(pid, stack.innermost_script_frame.description(self.cwd), stack)
        return None

    def _read_own_stacks(self, process: int, serial: int) -> tuple[Stack, ...]:
        """Return the stacks that a process noted in reply to a request; empty if they are not there yet."""
        with contextlib.suppress(OSError, ValueError):
            lines = read_tail(self.directory / f"process-{process}.stacks", _MAX_STACKS_BYTES).splitlines()
            reply = load_json(lines[-1]) if lines else None
            if isinstance(reply, dict) and reply.get("asked") == serial:
                return parse_threads(reply.get("threads"))
        return ()


def _waits_for_data(dump: ProcessStacks) -> bool:
    return dump.main is not None and dump.main.operation_kind == "data"


def newest_process_per_rank(ranks: list[RankActivity]) -> list[RankActivity]:
    """Return the newest process of each rank, without leftovers of a restarted job. Duplicate ranks are marked."""
    processes_by_rank: dict[int | None, list[RankActivity]] = {}
    for rank in ranks:
        processes = processes_by_rank.setdefault(rank.rank, [])
        if rank.rank is not None:
            processes[:] = [process for process in processes if not process.is_over]
        processes.append(rank)
    duplicates = {number for number, same in processes_by_rank.items() if number is not None and len(same) > 1}
    newest = [process for processes in processes_by_rank.values() for process in processes]
    newest.sort(key=lambda process: (process.rank is None, process.number))
    # A process without a rank that has ended is omitted unless there are no others.
    current = [process for process in newest if process.rank is not None or not process.is_over]
    return [process._replace(namesake=process.rank in duplicates) for process in current or newest]


def _read_counters(pid: int, tid: int, table: Mapping[int, proc.ProcessEntry], now_ns: int) -> Counters:
    """Return the counters of a process and its children. `tid`: its training thread."""
    family_pids, io_bytes = proc.with_descendants({pid}, table), 0
    for member in family_pids:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{member}/io").read_text().splitlines():
                if line.startswith(("rchar:", "wchar:")):
                    _, count = line.split()
                    io_bytes += int(count)
    cpu_s = sum(table[member].cpu_s for member in family_pids if member in table)
    return Counters(now_ns, cpu_s, proc.voluntary_switches(pid, tid) or 0, io_bytes)
