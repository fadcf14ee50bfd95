"""When the training processes are asked what grows, and what is said of a lack of memory and of a full /dev/shm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dpmon.model.findings.failure_findings import find_failure
from dpmon.model.findings.memory_findings import find_full_shared_memory, find_memory_growth
from dpmon.model.run_events import LoaderStart
from dpmon.run import failure_cause
from dpmon.span_reader import SpanReader
from dpmon.span_ring import HeaderWord, SpanRing
from dpmon.store.memory_growth import MemoryTrend
from dpmon.supervise.memory_watch import CHECK_S, WALK_S, MemoryWatch, add_memory_note
from dpmon.text.growth_text import describe_growth
from support.analysis_builders import GIB, GROWING_MEMORY, HEALTHY_RUN, MIB
from support.history_builders import with_changes

GRAPH = {
    "name": "kept", "function": None, "place": "train.py:6", "type": "graph", "count": 296, "before": 250,
    "graphs": True, "length": 301, "is_cut": False,
}  # fmt: skip
LIST = {
    "name": "history", "function": "main", "place": None, "type": "list", "count": 1200, "before": 1100,
    "items": "tensor", "device": "cuda:0", "graphs": False, "new_bytes": 1 << 20,
}  # fmt: skip
GROWTH = {
    "process": 0,
    "names": [GRAPH, LIST],
    "allocations": [{"place": "train.py:9", "bytes": 8 << 20}],
    "omitted": [],
}
HOST = {
    "run_mem_bytes": 3 * GIB, "mem_limit": "cgroup", "mem_limit_bytes": 4 * GIB, "mem_room_bytes": 64 * MIB,
    "shm_used_bytes": 63 * MIB, "shm_total_bytes": 64 * MIB,
}  # fmt: skip
OOM = {"device": "cuda:0", "asked_bytes": 512 * MIB, "free_bytes": 128 * MIB, "total_bytes": GIB}


class Drain:
    """The parts of a RingDrain that are used."""

    def __init__(self, trends: Sequence[MemoryTrend] = (), **events: Sequence[Mapping[str, Any]]) -> None:
        self.trends = list(trends)
        self.events = events

    def memory_trends(self) -> list[MemoryTrend]:
        return self.trends

    def recorded_events(self, kind: str, limit: int = -1) -> list[Mapping[str, Any]]:
        return list(self.events.get(kind, ()))


def test_processes_are_asked_once_memory_grows_and_then_rarely(tmp_path: Path) -> None:
    rings = [SpanRing(str(tmp_path / f"process-{index}.ring"), process=index, slots=64) for index in range(2)]
    drain = Drain()
    watch = MemoryWatch(tmp_path, drain)  # type: ignore[arg-type]

    def requests() -> list[int]:
        return [ring.words[HeaderWord.WALK] for ring in rings]

    watch.poll(0.0)
    assert requests() == [0, 0]
    drain.trends = [GROWING_MEMORY._replace(room_bytes=None)]  # it grows, and need not matter yet
    watch.poll(CHECK_S / 2)
    assert requests() == [0, 0]
    watch.poll(CHECK_S)
    assert requests() == [1, 1]
    watch.poll(WALK_S)
    assert requests() == [1, 1]
    watch.poll(CHECK_S + WALK_S)
    assert requests() == [2, 2]
    reader = SpanReader(str(tmp_path / "process-0.ring"))
    assert reader.request_walk() == 3
    reader.close()


@pytest.mark.parametrize(("room", "asked"), [(0.05, 1), (0.2, 0)])
def test_processes_are_asked_when_a_gpu_is_nearly_full(tmp_path: Path, room: float, asked: int) -> None:
    ring = SpanRing(str(tmp_path / "process-0.ring"), process=0, slots=64)
    still = GROWING_MEMORY.growth._replace(lasts=False)
    trend = GROWING_MEMORY._replace(growth=still, limit="GPU", limit_bytes=GIB, room_bytes=room * GIB)
    MemoryWatch(tmp_path, Drain([trend])).poll(0.0)  # type: ignore[arg-type]
    assert ring.words[HeaderWord.WALK] == asked


def test_what_is_said_of_names() -> None:
    assert describe_growth({**GROWTH, "omitted": ["variables of main, which uses locals()"]}) == [
        "`kept` (train.py:6) keeps 296 graphs alive",
        "list `history` holds 1,200 tensors (cuda:0)",
        "train.py:9 keeps 8.00 MiB on GPUs",
        "not looked at: variables of main, which uses locals()",
    ]
    cut = {**GRAPH, "count": 1, "is_cut": True, "place": None}
    logs = {**LIST, "items": "dict", "graphs": True, "device": None}
    own = {**LIST, "type": "deque", "items": "Batch", "device": None}
    assert describe_growth({**GROWTH, "names": [cut, logs, own], "allocations": []}) == [
        "`kept` keeps at least a graph of 301 operations in a row alive",
        "list `history` holds 1,200 dicts and their graphs",
        "deque `history` holds 1,200 objects (Batch)",
    ]


def test_the_finding_names_what_grows() -> None:
    run = with_changes(HEALTHY_RUN, memory_trends=[GROWING_MEMORY], memory_events={"growth": [GROWTH]})
    (finding,) = find_memory_growth(run)
    assert "grows 2.20 MiB per step: `kept` (train.py:6) keeps 296 graphs alive; the limit" in finding.text
    assert finding.ground.startswith("list `history` holds 1,200 tensors")
    other = GROWING_MEMORY._replace(device="cuda:0", process=1)
    (finding,) = find_memory_growth(with_changes(run, memory_trends=[other]))
    assert finding.ground.startswith("95%: ")


CUDA = "OutOfMemoryError: CUDA out of memory. Tried to allocate 512.00 MiB. (train.py:12)"
BUS = "RuntimeError: DataLoader worker (pid 5) is killed by signal: Bus error."
SAID = "the run used 3.00 GiB; 64.0 MiB of 4.00 GiB were free; it grew 2.20 MiB per step"
KILLED = "out of memory: the kernel killed 1 of this machine's processes during the run"


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (None, None),
        ("ValueError: no memory at all (train.py:3)", "ValueError: no memory at all (train.py:3)"),
        (CUDA, f"{CUDA}; cuda:0: 512 MiB were requested, 128 MiB of 1.00 GiB were free"),
        ("MemoryError (train.py:7)", f"MemoryError (train.py:7); {SAID}"),
        (KILLED, f"{KILLED}; {SAID}"),
        (BUS, f"{BUS}; 63.0 MiB of 64.0 MiB in /dev/shm were used"),
    ],
)
def test_the_cause_of_the_end(cause: str | None, said: str | None) -> None:
    drain: Any = Drain([GROWING_MEMORY], host=[{**HOST, "shm_used_bytes": 1}, HOST], oom=[OOM])
    assert add_memory_note(cause, drain) == said
    assert add_memory_note(cause, Drain()) == cause  # type: ignore[arg-type]  # nothing was recorded
    drain.events["growth"] = [GROWTH]
    if said != cause and "shm" not in (said or ""):
        assert add_memory_note(cause, drain) == f"{said}; `kept` (train.py:6) keeps 296 graphs alive"


def test_the_finding_of_the_failure_says_the_same() -> None:
    note = "; cuda:0: 512 MiB were requested, 128 MiB of 1.00 GiB were free"
    run = with_changes(HEALTHY_RUN, death=None, raised=CUDA, memory_events={"exit": [{"cause": CUDA + note}]})
    (finding,) = find_failure(run)
    assert finding.ground.endswith(note)
    (finding,) = find_failure(with_changes(run, memory_events={"exit": [{"cause": CUDA}]}))
    assert finding.ground.endswith("consequences of it")


def test_a_nearly_full_dev_shm_is_a_finding_if_workers_use_it() -> None:
    run = with_changes(HEALTHY_RUN, loaders=[LoaderStart(0, 0, 0, workers=4)], memory_events={"host": [HOST]})
    (finding,) = find_full_shared_memory(run)
    assert finding.text.startswith("/dev/shm is nearly full: 63.0 / 64.0 MiB.")
    assert not list(find_full_shared_memory(with_changes(run, loaders=[LoaderStart(0, 0, 0, workers=0)])))
    half = {**HOST, "shm_used_bytes": 32 * MIB}
    assert not list(find_full_shared_memory(with_changes(run, memory_events={"host": [half]})))
    unknown = {**HOST, "shm_used_bytes": None, "shm_total_bytes": None}
    assert not list(find_full_shared_memory(with_changes(run, memory_events={"host": [unknown]})))


def test_kills_are_counted_where_the_kernel_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path / "memory.events"
    events.write_text("low 0\noom 4\noom_kill 2\noom_group_kill 0\n")
    monkeypatch.setattr(failure_cause, "_oom_kill_file", lambda: events)
    assert failure_cause.count_oom_kills() == 2
