"""Turns the records of a ring into rows, tallies and the time account of its process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from dpmon.record.history_rows import CollectiveRow, LossRow, Row
from dpmon.record.record_types import CallParts, CallRow, Event, Step
from dpmon.record.safe_json import ns_member
from dpmon.record.schema import (
    AFTER_OTHER_KIND,
    EVALUATION,
    MIXED_MODES,
    REST,
    SPAN_PHASES,
    STEP_KINDS,
    TRAINING,
    WARM_UP,
    WARM_UP_STEPS,
    device_series,
    step_kind,
)
from dpmon.record.shared_names import CALL_PHASES
from dpmon.record.span_format import Flag
from dpmon.store.collectives import add_collective
from dpmon.store.definition_table import DEFINITIONS, DefinitionRow
from dpmon.store.device_rollups import add_sample
from dpmon.store.events import EVENTS, EventRow, event_to_json
from dpmon.store.gaps import GAP_NS, GAPS
from dpmon.store.history_writer import WriteBatch
from dpmon.store.loops import LoaderLoopTracker, read_loops
from dpmon.store.loss_table import LOSSES
from dpmon.store.process_accounts import ProcessAccounts
from dpmon.store.rings import RingRow
from dpmon.store.shapes import CallShape, shape_of_call
from dpmon.store.steps import MEASURED, STEPS, StepRow, encode_calls, encode_device_times, encode_spans, read_last_step
from dpmon.store.sync_passes import sync_device_ns
from dpmon.store.tally_keys import NO_SAMPLES, OTHER_SIZES, TallyKey
from dpmon.store.tally_tables import replica_series, stage_series

if TYPE_CHECKING:
    from dpmon.store.database import HistoryConnection

BATCH_SIZES = 16
"""How many batch sizes of a process have tallies of their own. Further sizes share OTHER_SIZES."""
SHAPES = 2000
"""How many shapes of a process keep their sizes. Further shapes are counted without sizes."""


class RingIntake:
    """Adds the rows of one ring to a batch."""

    def __init__(self, row: RingRow, start_ns: int, accounts: ProcessAccounts) -> None:
        self.row = row
        self._start_ns = start_ns
        self._accounts = accounts
        self._shapes: set[CallShape] = set()
        """Shapes that are kept with their sizes."""
        self._sizes: set[int] = set()
        """Batch sizes with their own tallies."""
        self._mode: str | None = None
        self._steps_in_mode = 0
        self._switched = False
        """Whether a root changed its mode since the last step."""
        self._ran_other_kind = False
        """Whether steps of other kinds than training ran since the last sync pass. Rollouts count as training."""
        self._loops = LoaderLoopTracker(row.process)

    def resume(self, connection: HistoryConnection) -> None:
        """Continue after the last step of the ring, which another supervisor wrote. Raises HistoryError."""
        last_step = read_last_step(connection, self.row)
        if last_step is not None:
            self._mode, self._steps_in_mode = last_step.mode, 0 if last_step.kind & WARM_UP else WARM_UP_STEPS
            self._ran_other_kind = step_kind(last_step.kind) != TRAINING
        self._loops.resume(read_loops(connection, self.row.process))

    def add(self, batch: WriteBatch, row_id: int, row: Row) -> bool:
        """Add `row` to `batch` under the id `row_id`. Return False for a row that takes no id."""
        process = self.row.process
        if isinstance(row, Step):
            return self._add_step(batch, row_id, row)
        if isinstance(row, Event):
            self._event(batch, row_id, row)
        elif isinstance(row, CollectiveRow):
            row = row._replace(id=row_id, process=process, start_ns=row.start_ns - self._start_ns)
            add_collective(batch, row)
        elif isinstance(row, LossRow):
            row = row._replace(id=row_id, process=process, t_ns=row.t_ns - self._start_ns)
            batch.add(LOSSES, row)
        else:
            text = json.dumps(row.value, separators=(",", ":"))
            batch.add(DEFINITIONS, DefinitionRow(process, row.number, text))
            return False
        return True

    # ------------------------------------------------------------------------------------------ steps

    def _count_shapes(self, batch: WriteBatch, calls: Iterable[CallRow], kind: int) -> None:
        """Count the shapes of calls. `kind`: the flags of their step.

        In a training step, only calls with gradients train.
        """
        for call in calls:
            evaluates = step_kind(kind) == TRAINING and not call.flags & Flag.GRAD
            shape = shape_of_call(self.row.process, call, kind | EVALUATION if evaluates else kind)
            if shape not in self._shapes:
                if len(self._shapes) < SHAPES:
                    self._shapes.add(shape)
                else:
                    shape = shape.without_sizes
            batch.shapes[shape] += 1

    def _add_step(self, batch: WriteBatch, row_id: int, row: Step) -> bool:
        """Add a step or calls alone. Return whether it takes the id."""
        called, calls, start_ns = encode_calls(row), row.calls, row.start_ns - self._start_ns
        if row.step > 0:
            self._step(batch, row_id, row, start_ns, called)
        else:
            self._count_shapes(batch, calls, row.kind)
            if row.takes_time:  # its calls are not repeated
                self._add_step_time(batch, row, start_ns)
            if not calls:
                return False
            stored = StepRow(
                id=row_id,
                process=self.row.process,
                step=row.step,
                mode=row.mode,
                start_ns=start_ns,
                wall_ns=row.wall_ns,
                kind=row.kind,
                calls=len(calls),
                measured=tuple(map({"samples": row.samples}.get, MEASURED)),
                last_call=calls[-1].call,
                called=called,
            )
            batch.add(STEPS, stored)
        self.row.last_id = row_id
        if self.row.first_id is None:
            self.row.first_id = row_id
        self.row.calls += len(calls)
        if calls:
            self.row.last_call = calls[-1].call
        return True

    def _step(self, batch: WriteBatch, row_id: int, row: Step, start_ns: int, called: str | None) -> None:
        """Add a step that began at `start_ns` (since the run's start). `called`: its calls as JSON."""
        process, mode, end_ns, calls = self.row.process, row.mode, start_ns + row.wall_ns, row.calls
        kind, sync_number = row.kind | self._warm_up_flag(mode) | WARM_UP * row.is_slowed, row.sync_number
        if sync_number is not None:
            kind |= AFTER_OTHER_KIND * (self._ran_other_kind or row.is_slowed)
            self._ran_other_kind = False
        if self._switched and len({call.mode for call in calls}) > 1:
            kind |= MIXED_MODES
            row = row._replace(mode="")  # its time counts in the rate of neither mode
        self._switched = False
        exclusion, evaluation_ns = self._add_step_time(batch, row, start_ns)
        kind |= exclusion
        self._count_shapes(batch, calls, kind)
        parts = [call.parts for call in calls if call.parts is not None]
        call_phases, rest_ns = _sum_call_phases(row.phases, parts)
        known = {"samples": row.samples, **row.counts, **row.phases, **call_phases}
        loop = self._loops.add_step(row.step, row.batches, start_ns, end_ns, row.kind != TRAINING, evaluation_ns)
        if self._loops.changed:
            batch.loops |= {(process, changed.loop): changed for changed in self._loops.changed.values()}
            self._loops.changed.clear()
        stored = StepRow(
            id=row_id,
            process=process,
            step=row.step,
            mode=mode,
            start_ns=start_ns,
            wall_ns=row.wall_ns,
            kind=kind,
            calls=len(calls),
            measured=tuple(map(known.get, MEASURED)),
            rest_ns=rest_ns,
            device=encode_device_times(row),
            spans=encode_spans(row),
            missing_spans=row.missing_spans,
            sync_number=sync_number,
            loop=None if loop is None else loop.loop,
            loop_batch=None if loop is None else loop.batches_used,
            last_call=calls[-1].call if calls else None,
            called=called,
        )
        series = [(device_series(name), ns) for name, ns in _device_times(row, parts, call_phases).items()]
        series += chain.from_iterable(map(_series_of, [call for call in calls if call.flags & Flag.GRAD] or calls))
        key = TallyKey(process, mode, kind, self._batch_size(row.samples))
        batch.add_step(key, stored, series)
        if sync_number is not None:
            # With devices, the host does not wait for other ranks, so its time does not measure the communication.
            tail_ns = row.phases.get("sync") if row.times is None else sync_device_ns(row.times)
            sync_step = self._accounts.rank_groups.sync_step(key, stored, tail_ns, batch.second_of(end_ns))
            if sync_step is not None:
                batch.sync_steps.append(sync_step)
        self.row.steps += 1
        if row.kind == TRAINING:
            self.row.last_step = row.step
        elif row.kind == EVALUATION:
            self.row.evaluations = row.step
        else:
            self.row.forward_steps = row.step

    def _add_step_time(self, batch: WriteBatch, row: Step, start_ns: int) -> tuple[int, int]:
        """Account for the time up to the end of a step that began at `start_ns` (since the run's start).

        Return its flag if statistics exclude it, else 0, and the time (ns) outside training and pauses.
        """
        account = self._accounts.get_account(self.row.process)
        self.row.evaluation_phases += row.kind == EVALUATION != account.kind
        intervals, gap, exclusion = account.add_step(row, start_ns)
        batch.add_activity_time(self.row.process, intervals)
        if gap is not None and gap.ns >= GAP_NS:
            batch.add(GAPS, gap)
        if row.kind == TRAINING:
            return exclusion, 0
        self._ran_other_kind = not self.row.has_rollouts
        parts = (part for part in intervals if part.activity == STEP_KINDS[row.kind])
        return exclusion, sum(part.sign * (part.end - part.begin) for part in parts)

    def _warm_up_flag(self, mode: str) -> int:
        """Return WARM_UP if the next step is one of the first in its mode since the last switch; else 0."""
        if mode != self._mode:
            self._mode, self._steps_in_mode = mode, 0
        self._steps_in_mode += 1
        return WARM_UP * (self._steps_in_mode <= WARM_UP_STEPS)

    def _batch_size(self, samples: int | None) -> int:
        if samples is None:
            return NO_SAMPLES
        if samples not in self._sizes:
            if len(self._sizes) >= BATCH_SIZES:
                return OTHER_SIZES
            self._sizes.add(samples)
        return samples

    # ------------------------------------------------------------------------------------------ events

    def _event(self, batch: WriteBatch, event_id: int, event: Event) -> None:
        kind, data = event.kind, event.data
        self.row.events += 1
        self._switched = self._switched or kind == "mode"
        t_ns = ns_member(data, "t_s")
        process = self.row.process if self.row.process >= 0 else None
        self._accounts.handle_event(batch, process, kind, data, t_ns)
        if process is None and t_ns is not None and kind in ("device", "host"):
            add_sample(batch, t_ns, kind, data)
        batch.add(EVENTS, EventRow(event_id, process, kind, t_ns, event_to_json(event)))


def _series_of(row: CallRow) -> list[tuple[str, int]]:
    """Return (series, ns) of each replica or stage of a call: first the times on the host, then those on its device."""
    layout, parts = row.layout, row.parts
    if parts is None:
        return [(replica_series(layout, 0), row.wall)]
    times_by_series: list[tuple[str, int | None]]
    times_by_series = [(replica_series(layout, i), host_ns) for i, (_, _, _, host_ns) in enumerate(parts.replicas)]
    for i, (stage, inputs, outputs, _, host_ns) in enumerate(parts.stages):
        times_by_series.append((stage_series(layout, i, stage, inputs, outputs), host_ns))
    series = [(name, host_ns) for name, host_ns in times_by_series if host_ns is not None]
    device_times = zip(times_by_series, parts.replica_or_stage_device_ms, strict=False)
    return series + [(device_series(name), int(ms * 1e6)) for (name, _), ms in device_times if ms is not None]


def _sum_call_phases(own_phases: Mapping[str, int], parts: Sequence[CallParts]) -> tuple[Mapping[str, int], int | None]:
    """Return the sum of each phase of a step's calls, and the rest of its forward; None if it has no forward.

    `own_phases`: the phases of the step. Calls of other threads, or calls repeated in the backward pass, may take
    longer than the whole forward. Then the phases cannot be separated, and all time counts as forward.
    """
    forward_ns = own_phases.get("forward")
    if forward_ns is None:
        return {}, None
    sums: dict[str, int] = {}
    for call_parts in parts:
        for name, span in zip(CALL_PHASES, call_parts.phases, strict=True):
            if span is not None:
                sums[name] = sums.get(name, 0) + span[1]
    inside_ns, copy_ns, apply_ns = sum(sums.values()), own_phases.get("copy"), sums.get("parallel_apply")
    excess_ns = inside_ns - forward_ns
    if copy_ns and apply_ns and 0 < excess_ns <= min(copy_ns, apply_ns):
        # A single replica runs on the training thread: its copies are subtracted from the forward, not from the call.
        sums["parallel_apply"] = apply_ns - excess_ns
        inside_ns = forward_ns
    return (sums, forward_ns - inside_ns) if inside_ns <= forward_ns else ({}, forward_ns)


def _device_times(row: Step, parts: Sequence[CallParts], call_phases: Mapping[str, int]) -> dict[str, int]:
    """Return device times (ns) by phase: of the step, of its calls if all of them are timed, and of the REST."""
    if row.times is None and not parts:
        return {}  # the usual case without a GPU
    span_times = zip(SPAN_PHASES, row.times or (), strict=False)
    ns_by_phase = {name: int(ms * 1e6) for name, ms in span_times if ms is not None}
    if any(call_parts.device_ms for call_parts in parts):
        times_by_call = [(call_parts.phases, call_parts.phase_device_ms) for call_parts in parts]
        for index, name in enumerate(CALL_PHASES):
            call_times = [times.get(name) for phases, times in times_by_call if phases[index] is not None]
            measured = [ms for ms in call_times if ms is not None]
            if name in call_phases and len(measured) == len(call_times):
                ns_by_phase[name] = int(sum(measured) * 1e6)
    if "forward" in ns_by_phase and all(name in ns_by_phase for name in call_phases):
        ns_by_phase[REST] = max(ns_by_phase["forward"] - sum(ns_by_phase[name] for name in call_phases), 0)
    return ns_by_phase
