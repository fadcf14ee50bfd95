"""Makes records of simulated DistributedDataParallel ranks, which wait for the slowest in each backward pass."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

from stored import Recording
from synthetic import Training, changed, step_row

from dpmon.record.history_rows import Row
from dpmon.record.record_types import BUCKET, Event
from dpmon.record.schema import SPAN_PHASES
from dpmon.record.shared_names import DDP

MS = 1_000_000
USUAL: Mapping[str, float] = {"data": 0.4, "forward": 3.1, "backward": 5.0, "optimizer": 1.0}
"""Phases of a step in ms, up to the last gradient of the backward pass."""
EXPOSED_MS = 2.1


class _Rank(Training):
    """One rank; `times`: duration of each phase of its next step, ns."""

    times: Mapping[str, int] = {}

    def _wobble(self, ns: float) -> int:
        return int(ns)

    def joined(self, number: int, sync_ns: int, passes: tuple[int, int]) -> list[Row]:
        """Return a step whose backward pass ends `sync_ns` after its last gradient, if it has synchronized passes."""
        start, took, (synced, unsynced) = self.now, dict(self.times), passes
        self.shares = {"single": {"rest" if name == "forward" else name: ns for name, ns in took.items()}}
        sync_ns = sync_ns if synced else 0
        *rows, _ = self.step()
        wall = sum(took.values()) + sync_ns
        names = ("data", "forward", "backward", "optimizer")
        spans, at = [], start
        for name in names:
            whole = took[name] + (sync_ns if name == "backward" else 0)
            spans.append((SPAN_PHASES.index(name), at, whole))
            if name == "backward" and synced:
                ready = at + took[name]
                spans += [(BUCKET, ready - took[name] // 2, 0), (BUCKET, ready, 0)]
                spans.append((SPAN_PHASES.index("sync"), ready, sync_ns))
            at += whole
        parts = [took[name] for name in names]
        extras = {"sync": sync_ns, "synced": synced, "sync_number": number} if synced else {}
        extras |= {"unsynced": unsynced} if unsynced else {}
        self.now = start + wall
        return [*rows, step_row("single", self.steps, start, wall, self.batch, parts, spans, **extras)]


def joined_ranks(number: int, **how: Any) -> tuple[Recording, int]:
    """Return a run of ranks and its end (ns); `how`: arguments of `joined_rows`."""
    run = Recording()
    rows, end = joined_rows(number, **how)
    for rank, own in rows.items():
        run.add(own, rank, rank)
    return run, end


def joined_rows(
    number: int,
    *,
    slow: int | tuple[int, ...] | None = None,
    phase: str = "backward",
    extra_ms: float = 6.0,
    steps: int = 400,
    passes: Sequence[tuple[int, int]] = ((1, 0),),
    world: int | None = None,
    wrapper: Mapping[str, Any] | None = None,
    exposed_ms: float = EXPOSED_MS,
    noise: float = 0.02,
    then: tuple[int, int] | None = None,
) -> tuple[dict[int, list[Row]], int]:
    """Return the rows of each rank, and the end (ns).

    `slow`: the rank or ranks that need `extra_ms` more for `phase` in each step. `passes`: numbers of synchronized and
    other backward passes of a step, repeated over the steps. `wrapper`: fields of the `ddp` record. `then`: a
    step, and the rank that is slow from there on.
    """
    ranks = ranks_of(number)
    rows = [begun(one, world or number, wrapper or {}) for one in ranks]
    wanted = {"slow": slow, "phase": phase, "extra_ms": extra_ms, "passes": passes, "exposed_ms": exposed_ms}
    for own in islice(joined_steps(ranks, noise=noise, then=then, **wanted), steps):
        for whole, part in zip(rows, own, strict=True):
            whole += part
    return dict(enumerate(rows)), ranks[0].now


def ranks_of(number: int, **more: Any) -> list[_Rank]:
    """Return ranks that have not begun; `more`: arguments of Training."""
    usually: dict[str, Any] = {"virtual": False, "mode": "single", "via": DDP, "step_ns": 100, **more}
    return [_Rank(process=rank, rank=rank, devices=(f"cuda:{rank % 8}",), **usually) for rank in range(number)]


def begun(rank: _Rank, world: int, wrapper: Mapping[str, Any]) -> list[Row]:
    """Return what a rank writes first; `wrapper`: fields of its `ddp` record."""
    return [*(in_world(row, world) for row in rank.begin()), ddp_event(rank.process, world, **wrapper)]


def joined_steps(
    ranks: Sequence[_Rank],
    *,
    slow: int | tuple[int, ...] | None = None,
    phase: str = "backward",
    extra_ms: float = 6.0,
    passes: Sequence[tuple[int, int]] = ((1, 0),),
    exposed_ms: float = EXPOSED_MS,
    noise: float = 0.02,
    then: tuple[int, int] | None = None,
    times: float = 1.0,
) -> Iterator[list[list[Row]]]:
    """Yield the rows of each rank, step after step, without end; `times`: how many times as long as usual they take."""
    chance = random.Random(len(ranks))
    slow_ones = (slow,) if isinstance(slow, int) else slow or ()
    for number in count():
        if then is not None and number == then[0]:
            slow_ones = (then[1],)
        for rank, one in enumerate(ranks):
            took = {name: ms + (extra_ms if rank in slow_ones and name == phase else 0) for name, ms in USUAL.items()}
            one.times = {name: int(ms * MS * times * chance.gauss(1, noise)) for name, ms in took.items()}
        ready = [sum(one.times.values()) - one.times["optimizer"] for one in ranks]
        rows = [
            one.joined(number + 1, max(ready) - at + int(exposed_ms * MS * times), passes[number % len(passes)])
            for one, at in zip(ranks, ready, strict=True)
        ]
        together = max(one.now for one in ranks)
        for one in ranks:
            one.now = together
        yield rows


def ddp_event(rank: int, size: int, **more: Any) -> Event:
    """Return a `ddp` record."""
    usual = {
        "process": rank,
        "rank": rank,
        "t_s": 2.5,
        "wrapper": 0,
        "root": "Model",
        "backend": "nccl",
        "group_size": size,
        "group": list(range(size)),
        "parameters": 18,
        "parameter_bytes": 130 << 20,
        "bucket_bytes": [1 << 20, *[25 << 20] * 5],
        "bucket_cap_bytes": 25 << 20,
        "find_unused_parameters": False,
        "unused_bytes": 0,
        "gradient_as_bucket_view": False,
        "static_graph": False,
        "comm_hook": None,
        "broadcast_buffers": False,
        "sync_batch_norm": False,
        "iteration": 300,
        "comm_ms": 8.0 + rank,
        "overlap_ms": 5.9,
        "absent": {},
    }
    return Event("ddp", {**usual, **more})


def in_world(row: Row, world: int) -> Row:
    """Return a row; in the record of the process, set the number of ranks."""
    return changed(row, world=world) if isinstance(row, Event) and row.kind == "process" else row
