"""Looks at the training processes of a run: their rings, /proc, and their stacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpmon.record.safe_json import load_json
from dpmon.record.schema import SECOND
from dpmon.run import proc
from dpmon.run.process_notes import read_uncaught_exceptions
from dpmon.run.run_directory import ring_paths
from dpmon.run.run_signals import is_member
from dpmon.run.safe_files import open_file
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError
from dpmon.stalls.nccl_ras import query_ras_problems
from dpmon.stalls.stacks import ProcessStacks, Stack, dump_stacks, parse_threads
from dpmon.stalls.stall_detection import LoaderWorker, ProcessGroupView, RankActivity

DETAILS_NS = 3 * SECOND
"""A process that has stood still for this long is looked at in /proc."""
SIGNS_OVER_NS, SIGNS_AFTER_NS = 10 * SECOND, 5 * SECOND
"""Signs of life are averages over the first time, so that a helper thread that wakes now and then is none. They are
known after the second."""
SIGN_CPU = 0.05
"""Share of a core, of the process and its children, that is a sign of life."""
SIGNS_PER_S = 20.0
"""Wake-ups a second of the training thread that are one. A loader that waits for a dead worker wakes 0.2 times."""
SIGN_BYTES_PER_S = 64 << 10
"""Bytes read and written a second, by the process and its children, that are one."""
NOTE_WAIT_S = 0.6
"""How long a process may take to note its stacks: it looks for requests four times a second."""
MOST_WORKERS = 32
_STATES = {"R": "running", "D": "disk wait", "T": "stopped", "t": "stopped"}
_LAST_BYTES = 256 << 10


class Counters(NamedTuple):
    """Counters of a process and its children at one time."""

    at_ns: int
    cpu_s: float
    wakes: int
    io_bytes: int

    def cpu_since(self, before: Counters) -> float:
        """Share of a core used since then."""
        return max(self.cpu_s - before.cpu_s, 0.0) / ((self.at_ns - before.at_ns) / SECOND)

    def busy_since(self, before: Counters) -> bool:
        """Whether the process showed a sign of life since then."""
        seconds = (self.at_ns - before.at_ns) / SECOND
        wakes, io_bytes = (self.wakes - before.wakes) / seconds, (self.io_bytes - before.io_bytes) / seconds
        return self.cpu_since(before) >= SIGN_CPU or wakes >= SIGNS_PER_S or io_bytes >= SIGN_BYTES_PER_S


class LastActivity(NamedTuple):
    """A process at the last look: what it did, the start of its last span, and since when it does that."""

    doing: str
    span_ns: int
    since_ns: int
    at_ns: int


class RankInspector:
    """The training processes of one run, looked at again and again."""

    def __init__(self, directory: Path, cwd: str, *, adopted: bool = False) -> None:
        """`adopted`: this process is no ancestor of theirs, so that they have to let it look into them."""
        self._adopted = adopted
        self.directory = directory
        self.cwd = cwd
        self._rings: dict[str, SpanReader] = {}
        self._parents: dict[int, int] = {}
        self._started: dict[int, float | None] = {}
        """When each process started. Another one may get its number after its end."""
        self._members: set[int] = set()
        """Processes that are proven to be the run's. py-spy halts a process, so it looks into no other one."""
        self._standing: dict[int, LastActivity] = {}
        self._loops: dict[int, tuple[int, int | None]] = {}
        """When the last loop over a loader was over, and the last step when this was seen."""
        self._counters: dict[int, list[Counters]] = {}
        self._dumps: dict[int, tuple[int, ProcessStacks]] = {}
        """The last stacks of each process, and when they were asked for."""
        self._of_nccl = False
        self.nccl: tuple[str, ...] = ()
        """What NCCL said about the ranks when it was asked last."""
        self._workers: dict[int, LoaderWorker | None] = {}

    def close(self) -> None:
        """Close the rings."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    def inspect_ranks(self, steps: Mapping[int, int | None], now_ns: int) -> list[RankActivity]:
        """What each training process does. `steps`: the last step of each process."""
        for path in ring_paths(self.directory, self._rings):
            with contextlib.suppress(RingError, OSError):
                ring = self._rings[path.name] = SpanReader(str(path))
                process = proc.read_process(ring.pid)
                self._parents[ring.pid] = 0 if process is None else process.parent
                self._started[ring.pid] = None if process is None else process.start_s
                if is_member(ring.pid, self.directory):
                    self._members.add(ring.pid)
                if self._adopted:
                    ring.allow_ptrace_by(os.getpid())
        found: list[RankActivity] = []
        self._table: Mapping[int, proc.ProcessEntry] = {}
        for ring in self._rings.values():
            with contextlib.suppress(RingError, OSError):
                found.append(self._inspect(ring, steps.get(ring.process), now_ns))
        found = newest_process_per_rank(found)
        self._of_nccl = any(group.nccl for rank in found if rank.pid in self._members for group in rank.groups)
        several = any(rank.namesake for rank in found)
        return [
            rank._replace(job=rank.pid if rank.world < 2 else self._launcher_pid(rank.pid) if several else 0)
            for rank in found
        ]

    def _inspect(self, ring: SpanReader, step: int | None, now_ns: int) -> RankActivity:
        pid, world, loop_over = ring.pid, ring.world or 1, ring.last_loop_end_ns()
        doing, span_ns = ring.activity()
        since, before = span_ns, self._standing.get(pid)
        if before is not None and before.span_ns == span_ns:  # a span may have ended: the ring has only its start
            since = before.since_ns if before.doing == doing else before.at_ns
        self._standing[pid] = LastActivity(doing, span_ns, since, now_ns)
        if self._loops.get(pid, (-1,))[0] != loop_over:
            self._loops[pid] = loop_over, step
        # The loop's last step may be recorded just after the end of the loop was seen.
        begins = loop_over > 0 and (step or 0) - (self._loops[pid][1] or 0) <= 1
        rank = RankActivity(
            pid, ring.process, ring.rank, world, doing, since, step, state="running", loop_begins=begins
        )
        if now_ns - since < DETAILS_NS:
            self._counters.pop(pid, None)
            return rank
        process = proc.read_process(pid)
        if process is None or process.is_dead or not proc.has_start_time(process, self._started.get(pid)):
            return rank._replace(doing=doing if doing == "ended" else "gone", state="gone")
        asked_ns, taken = self._dumps.get(pid, (0, ProcessStacks()))
        if asked_ns < since:
            taken = ProcessStacks()
        counters = self._counters.setdefault(pid, [])
        if not counters or now_ns - counters[-1].at_ns >= SECOND // 2:  # an answer may need a look in between
            self._table = self._table or proc.read_process_table()
            counters.append(_read_counters(pid, ring.training_tid(), self._table, now_ns))
        while now_ns - counters[0].at_ns > SIGNS_OVER_NS and len(counters) > 1:
            del counters[0]
        first, last = counters[0], counters[-1]
        return rank._replace(
            groups=tuple(ProcessGroupView(*group) for group in ring.groups()),
            state=_STATES.get(process.state, "sleeping"),
            stack=taken.main,
            why_no_stack=taken.reason if taken.main is None else None,
            worker=self._workers.get(pid) if taken.main is not None else None,
            between_loops=doing == "other" and loop_over > span_ns,
            cpu=last.cpu_since(counters[-2]) if len(counters) > 1 else None,
            busy=last.busy_since(first) if last.at_ns - first.at_ns >= SIGNS_AFTER_NS else None,
        )

    def _launcher_pid(self, pid: int) -> int:
        """The process that started the ranks of this one's job: a launcher, or the one that a rank was forked from."""
        parent = self._parents.get(pid, 0)
        return self._launcher_pid(parent) if parent in self._parents and parent != pid else parent

    def with_exceptions(self, ranks: list[RankActivity]) -> list[RankActivity]:
        """The same with the exceptions that ended processes."""
        raised = {
            one.pid: one._replace(rank=None).sentence(self.cwd) for one in read_uncaught_exceptions(self.directory)
        }
        return [rank._replace(raised=raised.get(rank.pid)) for rank in ranks]

    def take_stacks(self, *, native: bool = False, still_ns: int = 0) -> Mapping[int, ProcessStacks]:
        """Take the stacks of all living processes (by pid); takes up to some seconds. From any thread.

        `still_ns`: only of those that have stood still for this long.
        """
        now = time.monotonic_ns()
        rings: dict[int, SpanReader] = {}
        for ring in list(self._rings.values()):
            with contextlib.suppress(RingError, OSError):
                if proc.is_running(ring.pid, self._started.get(ring.pid)) and now - ring.current_span()[1] >= still_ns:
                    rings[ring.pid] = ring
        threads = {pid: ring.training_tid() for pid, ring in rings.items() if pid in self._members}
        taken = {
            pid: ProcessStacks(reason="it is not proven to be a process of this run")
            for pid in rings.keys() - threads.keys()
        }
        taken |= dump_stacks(threads, native=native)
        if native:  # py-spy cannot see the C frames of a process that is stopped
            taken |= dump_stacks({pid: threads[pid] for pid in threads if taken[pid].reason is not None})
        asked = {}
        for pid, one in taken.items():
            if one.reason is not None:
                with contextlib.suppress(RingError, OSError):
                    asked[pid] = rings[pid].request_stacks()
        end = time.monotonic() + NOTE_WAIT_S
        while asked and time.monotonic() < end:
            time.sleep(0.02)
            for pid in list(asked):
                stacks = self._read_own_stacks(rings[pid].process, asked[pid])
                if stacks:
                    taken[pid] = ProcessStacks(stacks)
                    del asked[pid]
        for pid in asked:
            reason = f"{taken[pid].reason}; and the process does not answer: C code holds the GIL, or it is stopped"
            taken[pid] = ProcessStacks(reason=reason)
        table = proc.read_process_table() if any(_waits_for_data(one) for one in taken.values()) else {}
        for pid, one in taken.items():
            children = [each for each in table.values() if each.parent == pid and each.pid not in taken]
            is_waiting = pid in self._members and _waits_for_data(one)
            self._workers[pid] = self._find_loader_worker(children) if is_waiting else None
        self._dumps.update((pid, (now, one)) for pid, one in taken.items())
        return taken

    def query_nccl(self) -> None:
        """Ask NCCL which ranks are missing or behind, if a rank uses it; takes up to some seconds. From any thread."""
        self.nccl = query_ras_problems(self._members) if self._of_nccl else ()

    def _find_loader_worker(self, children: Sequence[proc.ProcessEntry]) -> LoaderWorker | None:
        """The first worker of a data loader that is dead, stopped or waits for a disk, else the first one at work."""
        for one in children:
            if one.is_dead or (one.state in _STATES and one.state != "R"):
                return LoaderWorker(one.pid, "dead" if one.is_dead else _STATES[one.state])
        for pid, taken in dump_stacks({one.pid: one.pid for one in children[:MOST_WORKERS]}).items():
            stack = taken.main
            if stack is not None and stack.innermost_script_frame is not None and not stack.is_idle_worker:
                return LoaderWorker(pid, stack.innermost_script_frame.description(self.cwd), stack)
        return None

    def _read_own_stacks(self, process: int, serial: int) -> tuple[Stack, ...]:
        """The stacks that a process noted as the answer to a request; empty if they are not there yet."""
        with contextlib.suppress(OSError, ValueError):
            with open(open_file(self.directory / f"process-{process}.stacks"), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - _LAST_BYTES, 0))
                lines = file.read(_LAST_BYTES).splitlines()
            answer = load_json(lines[-1]) if lines else None
            if isinstance(answer, dict) and answer.get("asked") == serial:
                return parse_threads(answer.get("threads"))
        return ()


def _waits_for_data(taken: ProcessStacks) -> bool:
    return taken.main is not None and taken.main.operation_kind == "data"


def newest_process_per_rank(found: list[RankActivity]) -> list[RankActivity]:
    """The processes by rank, without those that a restarted job has left behind. Equal ranks are marked."""
    living: dict[int | None, list[RankActivity]] = {}
    for rank in found:
        before = living.setdefault(rank.rank, [])
        if rank.rank is not None:
            before[:] = [each for each in before if not each.is_over]
        before.append(rank)
    kept = sorted(
        (rank for same in living.values() for rank in same), key=lambda rank: (rank.rank is None, rank.number)
    )
    several = {number for number, same in living.items() if number is not None and len(same) > 1}
    over = [rank for rank in kept if rank.rank is None and rank.is_over]
    return [rank._replace(namesake=rank.rank in several) for rank in kept if len(kept) == len(over) or rank not in over]


def _read_counters(pid: int, tid: int, table: Mapping[int, proc.ProcessEntry], now_ns: int) -> Counters:
    """The counters of a process and its children. `tid`: its training thread."""
    family, io = proc.with_descendants({pid}, table), 0
    for one in family:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{one}/io").read_text().splitlines():
                if line.startswith(("rchar:", "wchar:")):
                    io += int(line.split()[1])
    cpu_s = sum(table[one].cpu_s for one in family if one in table)
    return Counters(now_ns, cpu_s, proc.voluntary_switches(pid, tid) or 0, io)
