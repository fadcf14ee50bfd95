"""Rows from the records of a ring: kinds, batch sizes, phases of calls, and continuation by another supervisor."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from dpmon.record.history_rows import Definition, Row
from dpmon.record.record_types import CallRow, Event, Step
from dpmon.record.schema import EVALUATION, EXCLUDED, MIXED_MODES, STEP_KINDS, TRAINING, WARM_UP, WARM_UP_STEPS
from dpmon.store.gaps import GAPS
from dpmon.store.history_writer import WriteBatch
from dpmon.store.process_accounts import ProcessAccounts
from dpmon.store.ring_intake import BATCH_SIZES, SHAPES, RingIntake
from dpmon.store.rings import RingRow
from dpmon.store.steps import STEPS
from dpmon.store.tally_keys import NO_SAMPLES, OTHER_SIZES
from support.record_builders import TRAINING_FLAGS, call_row, calls_alone, flags_of, step_row

MS = 1_000_000
SECOND = 1000 * MS
DP, SINGLE = "dp", "single"
PHASES_AT = (0, 1 * MS, 1 * MS, 2 * MS, 3 * MS, 5 * MS, 8 * MS, 1 * MS)
"""Offset and duration of each phase of a call: 1, 2, 5 and 1 ms."""
TRAIN, EVALUATE = (1 * MS, 20 * MS, 10 * MS, 2 * MS), (1 * MS, 20 * MS, -1, -1)


class Ring:
    """Passes rows of one process to an intake, without a ring."""

    def __init__(self, process: int = 0, accounts: ProcessAccounts | None = None) -> None:
        self.row = RingRow(f"process-{process}.ring", process, None, 1)
        self.accounts = accounts or ProcessAccounts()
        self.batch = WriteBatch()
        self.intake = RingIntake(self.row, 0, self.accounts)
        self.ids = 0
        self.now = SECOND
        self.numbers = dict.fromkeys(STEP_KINDS, 0)
        self.calls: list[CallRow] = []
        self.call_count = 0

    def add(self, row: Row) -> None:
        self.ids += self.intake.add(self.batch, self.ids + 1, row)

    def call(self, mode: str = DP, phases: tuple[int, ...] = PHASES_AT, **more: Any) -> None:
        """Make a call of the next step."""
        flags = more.get("flags", TRAINING_FLAGS)
        inputs, outputs = more.get("sizes", (2, 3))
        self.call_count += 1
        row = call_row(mode, flags, 1, self.call_count, self.now + MS, 10 * MS, inputs, outputs, phases,
                       more.get("replicas", (2, 3, 0, 4 * MS) * 2))  # fmt: skip
        self.calls.append(row.with_device_times(more["times"], more.get("why", 0)) if "times" in more else row)

    def step(self, mode: str = DP, phases: tuple[int, ...] = TRAIN, samples: int = 8, wall: int = 40 * MS) -> None:
        """Add the next step, directly after the last one."""
        kind = EVALUATION if phases == EVALUATE else TRAINING
        self.numbers[kind] += 1
        self.add_step(step_row(mode, self.numbers[kind], self.now, wall, samples, phases)._replace(kind=kind))
        self.now += wall

    def add_step(self, step: Step) -> None:
        """Add a step with the calls so far."""
        self.add(step._replace(calls=self.calls))
        self.calls = []

    @property
    def last(self) -> dict[str, Any]:
        """Return the row of the last step."""
        return self.steps[-1]

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return the rows of the steps."""
        return [dict(zip(STEPS.columns, STEPS.to_values(row), strict=True)) for row in self.batch.rows[STEPS]]

    def shapes(self) -> Counter[tuple[str, int]]:
        """Return calls by mode and kind."""
        found: Counter[tuple[str, int]] = Counter()
        for shape, count in self.batch.shapes.items():
            found[shape.mode, shape.kind] += count
        return found


@pytest.fixture
def ring() -> Ring:
    return Ring()


def kinds(ring: Ring) -> list[int]:
    return [row["kind"] for row in ring.steps]


def test_the_first_steps_and_those_after_a_toggle_settle(ring: Ring) -> None:
    for mode, count in ((DP, 8), (SINGLE, 3), (DP, 7)):
        for _ in range(count):
            ring.step(mode)
    settled = [WARM_UP] * WARM_UP_STEPS
    assert kinds(ring) == [*settled, 0, 0, 0, *settled[:3], *settled, 0, 0]
    assert {(key.mode, key.kind) for _, key in ring.batch.steps_by_tally} == {
        ("dp", WARM_UP), ("dp", 0), ("single", WARM_UP),
    }  # fmt: skip


def test_a_step_in_which_the_mode_was_switched_counts_in_no_mode(ring: Ring) -> None:
    def step(*modes: str) -> None:
        for mode in modes:
            ring.call(mode)
        ring.step(modes[0])

    for _ in range(6):
        step(SINGLE, SINGLE)
    ring.call(SINGLE)
    ring.add(event("mode", mode=DP))
    ring.call(DP)
    ring.step(SINGLE)
    step(DP, DP)
    step(DP, SINGLE)  # a root that was refused in dp
    ring.add(event("mode", mode=SINGLE))
    step(SINGLE, SINGLE)
    assert kinds(ring) == [*[WARM_UP] * WARM_UP_STEPS, 0, MIXED_MODES, WARM_UP, WARM_UP, WARM_UP]
    assert MIXED_MODES & EXCLUDED
    training_ns = Counter[str]()
    for (_, _, mode, activity), ns in ring.batch.activity_ns.items():
        training_ns[mode] += ns * (activity == "training")
    assert training_ns == {SINGLE: 7 * 40 * MS, DP: 2 * 40 * MS, "": 40 * MS}


def test_an_evaluation_is_a_kind_of_its_own_and_settles_too(ring: Ring) -> None:
    for phases in (TRAIN, EVALUATE, TRAIN, TRAIN, TRAIN, EVALUATE, (1, 2, 3, -1), (1, 2, -1, 3)):
        trains = phases != EVALUATE
        flags = flags_of(virtual=False, training=trains, grad=trains, failed=False)
        ring.call(flags=flags)
        ring.step(phases=phases)
    both = EVALUATION | WARM_UP
    assert kinds(ring) == [WARM_UP, both, WARM_UP, WARM_UP, WARM_UP, EVALUATION, 0, 0]
    assert ring.shapes() == {("dp", kind): kinds(ring).count(kind) for kind in (0, WARM_UP, EVALUATION, both)}


def test_batch_sizes_beyond_the_first_share_a_tally(ring: Ring) -> None:
    for samples in (-1, *range(100, 100 + BATCH_SIZES + 5), 100, 0, -1):
        ring.step(samples=samples)
    found = Counter(key.batch for ended in [ring.batch.steps_by_tally] for _, key in ended for _ in ended[_, key].rows)
    assert found[NO_SAMPLES] == 2
    assert found[OTHER_SIZES] == 6
    assert found[100] == 2
    assert len(found) == BATCH_SIZES + 2
    assert ring.last["samples"] is None
    assert ring.steps[-2]["samples"] == 0


@pytest.mark.parametrize(("copied", "apply", "rest"), [(3, 4, 0), (9, 4, 0), (2, None, 8), (0, None, 8)])
def test_a_lone_replicas_copies_are_no_part_of_its_forward(
    ring: Ring, copied: int, apply: int | None, rest: int
) -> None:
    """Its forward is 3 ms shorter than the phases of its calls: its copies took this time, or it is unknown."""
    ring.call(phases=(0, 1 * MS, 1 * MS, 2 * MS, 3 * MS, 7 * MS, 10 * MS, 1 * MS))
    ring.numbers[TRAINING] += 1
    extras: dict[str, Any] = {"copy": copied * MS, "copied_bytes": 4096} if copied else {}
    ring.add_step(
        step_row(DP, ring.numbers[TRAINING], ring.now, 40 * MS, 8, (1 * MS, 8 * MS, 10 * MS, 1 * MS), **extras)
    )
    assert ring.last["parallel_apply_ns"] == (None if apply is None else apply * MS)
    assert ring.last["rest_ns"] == rest * MS
    assert ring.last["copied_bytes"] == (4096 if copied else None)
    assert ring.last["copy_ns"] == (copied * MS or None)


def test_device_times_count_where_every_call_has_them(ring: Ring) -> None:
    times = (0.5, None, 3.0, 0.25, 2.0, 2.5)
    ring.call(times=times)
    ring.call(times=(0.5, 1.0, 1.0, None, 1.0, None), why=1)
    ring.numbers[TRAINING] += 1
    step = step_row(DP, ring.numbers[TRAINING], ring.now, 60 * MS, 8, (1 * MS, 30 * MS, 10 * MS, 1 * MS))
    ring.add_step(step.with_device_times((None, 20.0, 9.0, 1.5), 1))
    (ended,) = ring.batch.steps_by_tally.values()
    assert [one for one in ended.series if one[0].endswith("@device")] == [
        ("forward@device", 20 * MS), ("backward@device", 9 * MS), ("optimizer@device", 1_500_000),
        ("scatter@device", MS), ("parallel_apply@device", 4 * MS),
        ("replica 1 0@device", 2 * MS), ("replica 1 1@device", 2_500_000), ("replica 1 0@device", MS),
    ]  # fmt: skip
    assert sorted(shape.untimed for shape in ring.batch.shapes) == [0, 1]


def test_calls_without_their_step_are_counted_but_are_no_step(ring: Ring) -> None:
    ring.call()
    ring.call(SINGLE, flags=flags_of(virtual=False, training=False, grad=False, failed=False))
    ring.add(calls_alone(3, *ring.calls))
    assert ring.shapes() == {("dp", 0): 1, ("single", EVALUATION): 1}
    assert (ring.row.calls, ring.row.last_call, ring.row.steps, ring.row.last_step) == (2, 2, 0, None)
    assert (ring.last["step"], ring.last["calls"]) == (-3, 2)
    assert not ring.batch.steps_by_tally
    assert not ring.batch.activity_ns


def test_a_pass_outside_the_steps_takes_time_but_is_no_step(ring: Ring) -> None:
    ring.step()
    ring.call()
    one_pass = step_row(DP, 0, ring.now, 40 * MS, 8, EVALUATE)._replace(kind=EVALUATION)
    ring.add_step(one_pass)
    assert (ring.last["step"], ring.last["mode"], ring.row.evaluations, ring.row.steps) == (0, DP, 0, 1)
    assert [len(ended.rows) for ended in ring.batch.steps_by_tally.values()] == [1]
    ring.step()
    assert spent(ring)["evaluation"] == 40 * MS
    ring.add_step(one_pass)
    assert len(ring.steps) == 3, "without a call, it has no row"


def test_sizes_are_those_of_the_call_and_of_each_replica(ring: Ring) -> None:
    ring.add(Definition(2, [["x", [24, 5], "float32", 480]]))
    ring.call(replicas=(4, 5, 0, 1, 6, 7, 0, 1))
    ring.step()
    (shape,) = ring.batch.shapes
    assert (shape.layout, shape.virtual, shape.untimed) == (1, 0, 0)
    assert json.loads(shape.sizes) == [2, 3, [4, 5], [6, 7]]


# ---------------------------------------------------------------------------------------- time


def spent(ring: Ring) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, _, _, activity), ns in ring.batch.activity_ns.items():
        found[activity] += ns
    return +found


def event(kind: str, **data: Any) -> Event:
    return Event(kind, data)


def test_a_process_is_known_by_the_pid_that_waits(ring: Ring) -> None:
    """The wait is reported by the supervisor: before the process is known, then while it trains."""
    supervisor = Ring(-1, ring.accounts)
    supervisor.batch = ring.batch
    supervisor.add(event("input", pid=77, t_s=0.1, waited_s=0.3))
    supervisor.add(event("input", pid=78, t_s=0.1, waited_s=0.3))
    ring.add(event("process", process=0, pid=77, t_s=0.05))
    ring.step()
    ring.now += 500 * MS
    ring.step()
    supervisor.add(event("input", pid=77, t_s=1.14, waited_s=0.2))
    supervisor.add(event("exit", t_s=2.0, status=0))
    assert spent(ring) == {
        "startup": 650 * MS, "input": 500 * MS, "training": 80 * MS, "between": 300 * MS,
    }  # fmt: skip
    assert ring.batch.late_input_waits == [(0, 1140 * MS, 1340 * MS)]


def test_pauses_and_refused_ones(ring: Ring) -> None:
    ring.add(event("process", process=0, pid=77, t_s=1.0))
    ring.step()
    ring.add(event("pause", process=0, paused=True, t_s=1.05))
    ring.add(event("pause", process=0, paused=False, t_s=1.25, paused_s=0.2))
    ring.add(event("pause", process=0, paused=True, refused="no", t_s=1.3))
    ring.now += 400 * MS
    ring.step()
    assert spent(ring) == {"training": 80 * MS, "between": 200 * MS, "paused": 200 * MS}
    assert [gap[-1] for gap in ring.batch.rows[GAPS]] == [200 * MS]


# ---------------------------------------------------------------------------------------- limits


def test_shapes_beyond_the_first_are_counted_without_sizes() -> None:
    """The number of replicas stays known, so that no device seems to have no rows."""
    ring = Ring()
    for number in range(SHAPES + 50):
        ring.call(sizes=(number, 3), replicas=(number, 3, 0, MS, number, 4, 0, MS))
        ring.step()
    sizes = Counter({key.sizes: count for key, count in ring.batch.shapes.items()})
    assert len(sizes) <= SHAPES + 2
    assert sizes["[0,0,[0,0],[0,0]]"] == 50
    assert sizes.total() == SHAPES + 50
