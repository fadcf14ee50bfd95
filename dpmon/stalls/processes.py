"""Looks at the training processes of a run: their rings, /proc, and their stacks."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dpmon.record.plainjson import load_json
from dpmon.run import proc
from dpmon.run.files import open_file
from dpmon.run.notes import every_uncaught
from dpmon.run.rundir import ring_paths
from dpmon.span_reader import SpanReader
from dpmon.span_ring import RingError
from dpmon.stalls.stacks import Dump, Stack, dump, noted, worker_words
from dpmon.stalls.verdict import SECOND, GroupSeen, RankFacts

DETAILS_NS = 3 * SECOND
"""A process that has stood still for this long is looked at in /proc."""
NOTE_WAIT_S = 0.6
"""How long a process may take to note its stacks: it looks for requests four times a second."""
MOST_WORKERS = 32
_STATES = {"R": "running", "D": "disk wait", "T": "stopped", "t": "stopped"}
_LAST_BYTES = 256 << 10


class _Counters(NamedTuple):
    """Counters of a process and its children at one time."""

    at_ns: int
    cpu_s: float
    wakes: int
    io_bytes: int


class RankLook:
    """The training processes of one run, looked at again and again."""

    def __init__(self, directory: Path, cwd: str, *, adopted: bool = False) -> None:
        """`adopted`: this process is no ancestor of theirs, so that they have to let it look into them."""
        self._adopted = adopted
        self.directory = directory
        self.cwd = cwd
        self._rings: dict[str, SpanReader] = {}
        self._samples: dict[int, _Counters] = {}
        self._dumps: Mapping[int, Dump] = {}
        self._workers: Mapping[int, str] = {}

    def close(self) -> None:
        """Close the rings."""
        for ring in self._rings.values():
            ring.close()
        self._rings.clear()

    def ranks(self, steps: Mapping[int, int | None], now_ns: int) -> list[RankFacts]:
        """What each training process does. `steps`: the last step of each process."""
        for path in ring_paths(self.directory, self._rings):
            with contextlib.suppress(RingError, OSError):
                ring = self._rings[path.name] = SpanReader(str(path))
                if self._adopted:
                    ring.allow(os.getpid())
        found: list[RankFacts] = []
        self._table: Mapping[int, proc.ProcessEntry] = {}
        for ring in self._rings.values():
            with contextlib.suppress(RingError, OSError):
                found.append(self._facts(ring, steps.get(ring.process), now_ns))
        return newest_of_each_rank(found)

    def _facts(self, ring: SpanReader, step: int | None, now_ns: int) -> RankFacts:
        doing, since = ring.activity()
        rank = RankFacts(ring.pid, ring.process, ring.rank, ring.world or 1, doing, since, step, state="running")
        if now_ns - since < DETAILS_NS:
            self._samples.pop(ring.pid, None)
            return rank
        process = proc.read(ring.pid)
        if process is None or process.dead:
            return rank._replace(doing=doing if doing == "ended" else "gone", state="gone")
        groups = tuple(GroupSeen(*group) for group in ring.groups())
        taken = self._dumps.get(ring.pid, Dump())
        rank = rank._replace(groups=groups, state=_STATES.get(process.state, "sleeping"))
        rank = rank._replace(stack=taken.main, why_no_stack=taken.reason, worker=self._workers.get(ring.pid))
        self._table = self._table or proc.every_process()
        before, now = self._samples.get(ring.pid), _sample(ring.pid, self._table, now_ns)
        self._samples[ring.pid] = now
        if before is not None and now.at_ns > before.at_ns:
            seconds = (now.at_ns - before.at_ns) / SECOND
            rank = rank._replace(
                cpu=max(now.cpu_s - before.cpu_s, 0.0) / seconds,
                wakes=max(now.wakes - before.wakes, 0) / seconds,
                io_bytes=max(now.io_bytes - before.io_bytes, 0) / seconds,
            )
        return rank

    def with_ends(self, ranks: list[RankFacts]) -> list[RankFacts]:
        """The same with the exceptions that ended processes."""
        raised = {one.pid: one._replace(rank=None).sentence(self.cwd) for one in every_uncaught(self.directory)}
        return [rank._replace(raised=raised.get(rank.pid)) for rank in ranks]

    def take_stacks(self, *, native: bool = False) -> Mapping[int, Dump]:
        """Take the stacks of all living processes (by pid); takes up to some seconds. From any thread."""
        rings = {ring.pid: ring for ring in list(self._rings.values()) if proc.alive(ring.pid, None)}
        taken = dump(list(rings), native=native)
        asked = {}
        for pid, one in taken.items():
            if one.reason is not None:
                with contextlib.suppress(RingError, OSError):
                    asked[pid] = rings[pid].request_stacks()
        end = time.monotonic() + NOTE_WAIT_S
        while asked and time.monotonic() < end:
            time.sleep(0.05)
            for pid in list(asked):
                stacks = self._noted(rings[pid].process, asked[pid])
                if stacks:
                    taken[pid] = Dump(stacks)
                    del asked[pid]
        for pid in asked:
            reason = f"{taken[pid].reason}; and the process does not answer: C code holds the GIL, or it is stopped"
            taken[pid] = Dump(reason=reason)
        self._dumps = taken
        self._workers = self._look_at_workers(taken)
        return taken

    def _look_at_workers(self, taken: Mapping[int, Dump]) -> dict[int, str]:
        """What a worker of each rank that waits for its data loader does, by the rank's pid."""
        waiting = [pid for pid, one in taken.items() if one.main is not None and one.main.kind == "data"]
        if not waiting:
            return {}
        table, found = proc.every_process(), {}
        for pid in waiting:
            children = [one for one in table.values() if one.parent == pid and one.pid not in taken]
            bad = next((one for one in children if one.dead or (one.state in _STATES and one.state != "R")), None)
            if bad is not None:
                found[pid] = f"its worker (pid {bad.pid}) is {'dead' if bad.dead else _STATES[bad.state]}"
                continue
            text = worker_words(dump([one.pid for one in children[:MOST_WORKERS]]), self.cwd)
            if text is not None:
                found[pid] = text
        return found

    def _noted(self, process: int, serial: int) -> tuple[Stack, ...]:
        """The stacks that a process noted as the answer to a request; empty if they are not there yet."""
        with contextlib.suppress(OSError, ValueError):
            with open(open_file(self.directory / f"process-{process}.stacks"), "rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(size - _LAST_BYTES, 0))
                lines = file.read(_LAST_BYTES).splitlines()
            answer = load_json(lines[-1]) if lines else None
            if isinstance(answer, dict) and answer.get("asked") == serial:
                return noted(answer)
        return ()


def newest_of_each_rank(found: list[RankFacts]) -> list[RankFacts]:
    """The processes without those that a restarted job has left behind."""
    newest: dict[object, RankFacts] = {}
    for rank in found:
        newest[("pid", rank.pid) if rank.rank is None else rank.rank] = rank
    return [rank for rank in newest.values() if not (rank.rank is None and rank.over and len(newest) > 1)]


def _sample(pid: int, table: Mapping[int, proc.ProcessEntry], now_ns: int) -> _Counters:
    """The counters of a process and its children."""
    cpu, wakes, io = 0.0, 0, 0
    for one in proc.with_descendants({pid}, table):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{one}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
            cpu += (int(fields[11]) + int(fields[12])) * proc.TICK_S
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in Path(f"/proc/{one}/io").read_text().splitlines():
                if line.startswith(("rchar:", "wchar:")):
                    io += int(line.split()[1])
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/status").read_text("utf-8", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                wakes = int(line.split()[1])
    return _Counters(now_ns, cpu, wakes, io)
