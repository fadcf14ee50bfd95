"""Turns the records of a ring into rows, tallies and the time account of its process.

A `RingIntake` belongs to one ring. The calls of a step arrive before the step. They are held until then, because the
row of the step contains their phases, and the calls take the kind of the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from dpmon.record.history_rows import CallRow, CollectiveRow, LossRow, Row
from dpmon.record.record_types import Event, Step
from dpmon.record.safe_json import replace_nonfinite
from dpmon.record.schema import (
    AFTER_OTHER_KIND,
    EVALUATION,
    MIXED_MODES,
    PHASES,
    QUANTITIES,
    REST,
    SPAN_PHASES,
    STEP_KINDS,
    STEP_PHASES,
    TRAINING,
    WARM_UP,
    WARM_UP_STEPS,
    device_series,
    step_kind,
)
from dpmon.record.shared_names import CALL_PHASES, to_bounded_json
from dpmon.record.span_format import Flag
from dpmon.store.history_schema import RingRow, are_rollouts
from dpmon.store.loader_loops import LoaderLoopTracker
from dpmon.store.process_accounts import ProcessAccounts, seconds_to_ns
from dpmon.store.query_results import encode_parts, replica_series, stage_series
from dpmon.store.sync_passes import sync_device_ns
from dpmon.store.tally_keys import NO_SAMPLES, OTHER_SIZES, TallyKey
from dpmon.store.write_batch import GAP_NS, ShapeKey, WriteBatch

if TYPE_CHECKING:
    from dpmon.store.history_writer import HistoryWriter

BATCH_SIZES = 16
"""How many batch sizes of a process have tallies of their own. Further sizes share OTHER_SIZES."""
SHAPES = 2000
"""How many shapes of a process keep their sizes. Further shapes are counted without sizes."""
HELD_CALLS = 4096
"""How many calls of a process are held for their step."""
_APPLY = CALL_PHASES.index("parallel_apply")
_CALL_AT = {name: index for index, name in enumerate(CALL_PHASES)}
_STEP_AT = {name: index for index, name in enumerate(STEP_PHASES)}
_COUNTED = tuple(quantity.name for quantity in QUANTITIES if quantity.name != "samples")
_SAMPLES_AT = [quantity.name for quantity in QUANTITIES].index("samples")
_phases_of = itemgetter(
    *(len(STEP_PHASES) + _CALL_AT[phase.name] if phase.of_call else _STEP_AT[phase.name] for phase in PHASES)
)
"""Returns values in the order of PHASES, from the phases of a step followed by the phases of its calls."""


class RingIntake:
    """Adds the rows of one ring to a batch."""

    def __init__(self, row: RingRow, start_ns: int, accounts: ProcessAccounts) -> None:
        self.row = row
        self._start_ns = start_ns
        self._accounts = accounts
        self._shapes: set[ShapeKey] = set()
        """Shapes that are kept with their sizes."""
        self._calls: dict[int, CallRow] = {}
        """The calls that wait for their step, by id."""
        self._sizes: set[int] = set()
        """Batch sizes with their own tallies."""
        self._mode: str | None = None
        self._steps_in_mode = 0
        self._switched = False
        """Whether a root changed its mode since the last step."""
        self._ran_other_kind = False
        """Whether steps of other kinds than training ran since the last sync pass. Rollouts count as training."""
        self._loops = LoaderLoopTracker(row.process)

    def resume(self, history: HistoryWriter) -> None:
        """Continue after the last step of the ring, which another supervisor wrote. Raises HistoryError."""
        for mode, _, _, kind in history.last_step(self.row):
            self._mode, self._steps_in_mode = mode, 0 if kind & WARM_UP else WARM_UP_STEPS
            self._ran_other_kind = step_kind(kind) != TRAINING
        self._loops.resume(history.loops(self.row.process))

    def add(self, batch: WriteBatch, row_id: int, row: Row) -> bool:
        """Add `row` to `batch` under the id `row_id`. Return False for a row that takes no id."""
        if isinstance(row, CallRow):
            self._call(batch, row_id, row)
        elif isinstance(row, Step) and row.step:
            self._step(batch, row_id, row)
        elif isinstance(row, Step):  # its calls are not repeated: it takes time, but is no step of a loop
            self._add_step_time(batch, row._replace(start_ns=row.start_ns - self._start_ns), 0)
            return False
        elif isinstance(row, Event):
            self._event(batch, row_id, row)
        elif isinstance(row, CollectiveRow):
            batch.add_collective(row_id, self.row.process, row._replace(start=row.start - self._start_ns))
        elif isinstance(row, LossRow):
            start_ns = row.start - self._start_ns
            batch.losses.append((row_id, self.row.process, row.definition, row.step, start_ns, row.loss))
        else:
            text = json.dumps(row.value, separators=(",", ":"))
            batch.definitions.append((self.row.process, row.number, text))
            batch.characters += len(text)
            return False
        return True

    # ------------------------------------------------------------------------------------------ calls

    def _call(self, batch: WriteBatch, row_id: int, row: CallRow) -> None:
        start_ns = row.start - self._start_ns
        if row.step:
            self._calls[row_id] = row
        else:
            self._count(batch, [row], row.kind)
        parts = encode_parts(row.parts)
        batch.calls.append(
            (row_id, self.row.process, *row[:5], start_ns, row.wall, row.inputs, row.outputs, parts, row.kind)
        )
        batch.characters += len(parts or "")
        if len(self._calls) > HELD_CALLS:  # a step with very many calls
            held = self._calls.pop(next(iter(self._calls)))
            self._count(batch, [held], held.kind)
        self._note_id(row_id)
        self.row.calls += 1
        self.row.last_call = row.call

    def _count(self, batch: WriteBatch, calls: Iterable[CallRow], kind: int) -> None:
        """Count the shapes of calls. `kind`: the flags of their step.

        In a training step, only calls with gradients train.
        """
        for call in calls:
            call_kind = kind
            if step_kind(kind) == TRAINING and not call.flags & Flag.GRAD:
                call_kind |= EVALUATION
            virtual = int(call.flags & Flag.VIRTUAL > 0)
            parts, sizes = call.parts, _sizes_of(call)
            has_missing = parts is not None and parts.device_ms is not None and None in parts.device_ms
            untimed_reason = parts.untimed_reason if parts is not None and has_missing else 0
            shape = self.row.process, call.mode, call_kind, call.layout, virtual, sizes, untimed_reason
            if shape not in self._shapes:
                if len(self._shapes) < SHAPES:
                    self._shapes.add(shape)
                else:
                    shape = (*shape[:-2], _without_sizes(sizes), untimed_reason)
            batch.shapes[shape] += 1

    def finish_process(self, batch: WriteBatch) -> None:
        """Handle the end of the process: count its last calls, which belong to no finished step."""
        for call in self._calls.values():
            self._count(batch, [call], call.kind)
        self._calls.clear()

    # ------------------------------------------------------------------------------------------ steps

    def _step(self, batch: WriteBatch, row_id: int, row: Step) -> None:
        row = row._replace(start_ns=row.start_ns - self._start_ns)
        step, mode, start_ns, wall_ns = row.step, row.mode, row.start_ns, row.wall_ns
        account = self._accounts.get_account(self.row.process)
        waited_ns = row.phases.get("data", 0) + row.phases.get("sync", 0)
        exclusion = account.exclusion_flag(start_ns, start_ns + wall_ns, waited_ns)
        kind = row.kind | self._warm_up_flag(mode) | exclusion
        if row.sync_number is not None:
            kind |= AFTER_OTHER_KIND * self._ran_other_kind
            self._ran_other_kind = False
        calls = self._pop_step_calls(batch, row)
        if self._switched and len({call.mode for call in calls}) > 1:
            kind |= MIXED_MODES
            row = row._replace(mode="")  # its time counts in the rate of neither mode
        self._switched = False
        self._count(batch, calls, kind)
        own_phases = [*map(row.phases.get, STEP_PHASES)]
        call_phases, rest_ns = _sum_call_phases(own_phases, calls)
        values = _phases_of((*own_phases, *call_phases))
        quantities = [*map(row.counts.get, _COUNTED)]
        quantities.insert(_SAMPLES_AT, row.samples)
        process = self.row.process
        evaluation_ns = self._add_step_time(batch, row, exclusion)
        evaluation = row.kind != TRAINING
        loop = self._loops.add_step(step, row.batches, start_ns, start_ns + wall_ns, evaluation, evaluation_ns)
        if self._loops.changed:
            batch.loops |= {(process, changed.loop): changed for changed in self._loops.changed.values()}
            self._loops.changed.clear()
        loop_columns = (None, None) if loop is None else (loop.loop, loop.batches_used)
        first_columns = row_id, process, step, mode, start_ns, wall_ns, kind, len(calls)
        times = None if row.times is None else json.dumps([row.why, *row.times], separators=(",", ":"))
        spans = f"[{','.join(map(str, chain.from_iterable(row.runs)))}]" if row.runs else None
        sync_number = row.sync_number
        last_columns = rest_ns, times, spans, row.missing_spans, sync_number, None, None, *loop_columns
        key = TallyKey(process, mode, kind, self._batch_size(row.samples))
        series = [(device_series(name), ns) for name, ns in _device_times(row, calls, call_phases).items()]
        series += chain.from_iterable(map(_series_of, [call for call in calls if call.flags & Flag.GRAD] or calls))
        batch.add_step(key, start_ns + wall_ns, (*first_columns, *quantities, *values, *last_columns), series)
        batch.characters += len(spans or "") + len(times or "")
        if sync_number is not None:
            second = (start_ns + wall_ns) // 1_000_000_000
            # With devices, the host does not wait for other ranks, so its time does not measure the communication.
            tail_ns = row.phases.get("sync") if row.times is None else sync_device_ns(row.times)
            if tail_ns is not None:
                passes = row.counts.get("synced", 0)
                sync_step = self._accounts.rank_groups.sync_step(
                    key, row_id, second, number=sync_number, passes=passes, tail_ns=tail_ns, wall_ns=wall_ns
                )
                if sync_step is not None:
                    batch.sync_steps.append(sync_step)
        self._note_id(row_id)
        self.row.steps += 1
        if row.kind == TRAINING:
            self.row.last_step = step
        elif row.kind == EVALUATION:
            self.row.evaluations = step
        else:
            self.row.forward_steps = step

    def _add_step_time(self, batch: WriteBatch, row: Step, exclusion: int) -> int:
        """Account for the time up to the end of a step. Return the time (ns) outside training and pauses.

        `exclusion`: see `TimeAccount.exclusion_flag`. `row`: its start counts from the run's start.
        """
        account = self._accounts.get_account(self.row.process)
        self.row.evaluation_phases += row.kind == EVALUATION != account.kind
        intervals, gap = account.add_step(row, exclusion)
        batch.add_activity_time(self.row.process, intervals)
        if gap is not None and gap.ns >= GAP_NS:
            batch.gaps.append(gap)
        if row.kind == TRAINING:
            return 0
        self._ran_other_kind = not are_rollouts(self.row.evaluation_phases, self.row.last_step or 0)
        parts = (part for part in intervals if part.activity == STEP_KINDS[row.kind])
        return sum(part.sign * (part.end - part.begin) for part in parts)

    def _pop_step_calls(self, batch: WriteBatch, step: Step) -> list[CallRow]:
        """Remove and return the held calls of a step.

        Calls of earlier steps, which were not recorded, are dropped.
        """
        held_calls, self._calls = self._calls, {}
        calls = []
        for row_id, call in held_calls.items():
            if call.kind == step.kind and call.step == step.step:
                calls.append(call)
            elif call.kind == step.kind and call.step > step.step:
                self._calls[row_id] = call
            else:
                self._count(batch, [call], call.kind)
        return calls

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

    def _note_id(self, row_id: int) -> None:
        row = self.row
        row.last_id = row_id
        if row.first_id is None:
            row.first_id = row_id

    # ------------------------------------------------------------------------------------------ events

    def _event(self, batch: WriteBatch, event_id: int, event: Event) -> None:
        kind, data = event.kind, event.data
        self.row.events += 1
        self._switched = self._switched or kind == "mode"
        t_ns = seconds_to_ns(data.get("t_s"))
        process = self.row.process if self.row.process >= 0 else None
        self._accounts.handle_event(batch, process, kind, data, t_ns)
        if process is None and t_ns is not None and kind in ("device", "host"):
            _add_sample(batch, t_ns, kind, data)
        text = to_bounded_json({"kind": kind, **data})
        if b"NaN" in text or b"Infinity" in text:  # not JSON: unknown
            text = to_bounded_json(replace_nonfinite({"kind": kind, **data}))
        batch.add_event(event_id, process, kind, t_ns, text.decode())


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


def _sizes_of(row: CallRow) -> str:
    """Return the definitions of the sizes of a call and its replicas or stages as JSON (see query_results.Shape)."""
    parts = row.parts
    if parts is None:
        return _sizes_text(row.inputs, row.outputs, (row.inputs, row.outputs))
    part_sizes = [*(part[:2] for part in parts.replicas), *(part[:3] for part in parts.stages)]
    return _sizes_text(row.inputs, row.outputs, *part_sizes)


@lru_cache(4096)
def _sizes_text(*sizes: int | tuple[int, ...]) -> str:
    return json.dumps(sizes, separators=(",", ":"))


def _without_sizes(text: str) -> str:
    """Return a text from `_sizes_text` with all sizes unknown."""
    _, _, *parts = json.loads(text)
    return _sizes_text(0, 0, *((*part[:-2], 0, 0) for part in parts))


def _sum_call_phases(own_phases: Sequence[int | None], calls: Sequence[CallRow]) -> tuple[list[int | None], int | None]:
    """Return the summed phases of a step's calls (None: did not run), and the rest of its forward.

    `own_phases`: the step's phases in the order of STEP_PHASES. Calls of other threads, or calls repeated in the
    backward pass, may take longer than the whole forward. Then the phases cannot be separated, and all time counts as
    forward.
    """
    phases_by_call = [[run and run[1] for run in call.parts.phases] for call in calls if call.parts is not None]
    phase_sums: list[int | None] = phases_by_call[0] if phases_by_call else [None] * len(CALL_PHASES)
    for phases in phases_by_call[1:]:
        phase_sums = [
            sum_ns if added_ns is None else (sum_ns or 0) + added_ns
            for sum_ns, added_ns in zip(phase_sums, phases, strict=True)
        ]
    forward, copy, apply = own_phases[_STEP_AT["forward"]], own_phases[_STEP_AT["copy"]], phase_sums[_APPLY]
    if forward is None:
        return [None] * len(CALL_PHASES), None
    inside_ns = sum(ns for ns in phase_sums if ns)
    excess_ns = inside_ns - forward
    if copy and apply and 0 < excess_ns <= min(copy, apply):
        # A single replica runs on the training thread: its copies are subtracted from the forward, not from the call.
        phase_sums[_APPLY] = apply - excess_ns
        inside_ns = forward
    if inside_ns > forward:
        return [None] * len(CALL_PHASES), forward
    return phase_sums, forward - inside_ns


def _device_times(row: Step, calls: Sequence[CallRow], call_phases: Sequence[int | None]) -> dict[str, int]:
    """Return device times (ns) by phase: of the step, of its calls if all of them are timed, and of the REST."""
    parts = [call.parts for call in calls if call.parts is not None]
    has_call_times = any(call_parts.device_ms for call_parts in parts)
    if row.times is None and not has_call_times:
        return {}
    times_by_call = [(call_parts.phases, call_parts.phase_device_ms) for call_parts in parts]
    span_times = zip(SPAN_PHASES, row.times or (), strict=False)
    ns_by_phase = {name: int(ms * 1e6) for name, ms in span_times if ms is not None}
    for name, index in _CALL_AT.items() if has_call_times else ():
        call_times = [times.get(name) for phases, times in times_by_call if phases[index] is not None]
        measured = [ms for ms in call_times if ms is not None]
        if call_phases[index] is not None and measured and len(measured) == len(call_times):
            ns_by_phase[name] = int(sum(measured) * 1e6)
    ran_in_calls = [name for name, index in _CALL_AT.items() if call_phases[index] is not None]
    if "forward" in ns_by_phase and all(name in ns_by_phase for name in ran_in_calls):
        ns_by_phase[REST] = max(ns_by_phase["forward"] - sum(ns_by_phase[name] for name in ran_in_calls), 0)
    return ns_by_phase


def _add_sample(batch: WriteBatch, t_ns: int, kind: str, data: Mapping[str, Any]) -> None:
    index = data["index"] if kind == "device" else -1
    for name, value in data.items():
        if type(value) in (int, float) and name not in ("t_s", "index"):
            batch.add_device_value(t_ns, index, name[:64], float(value))
