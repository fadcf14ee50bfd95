"""Turns the records of a ring into rows, tallies and the account of time.

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
from dpmon.record.record_types import Event, RecordError, Step
from dpmon.record.safe_json import load_json
from dpmon.record.schema import (
    EVALUATION,
    PHASES,
    QUANTITIES,
    REST,
    SPAN_PHASES,
    STEP_PHASES,
    WARM_UP,
    WARM_UP_STEPS,
    device_series,
)
from dpmon.record.shared_names import CALL_PHASES, to_bounded_json
from dpmon.record.span_format import Flag
from dpmon.store.history_schema import RingRow
from dpmon.store.loader_loops import LoaderLoopTracker
from dpmon.store.process_accounts import ProcessAccounts, seconds_to_ns
from dpmon.store.query_results import encode_parts, replica_series, stage_series
from dpmon.store.sync_passes import SyncStep, sync_device_ns
from dpmon.store.tally import NO_SAMPLES, OTHER_SIZES, TallyKey
from dpmon.store.time_accounting import LATEST_NS
from dpmon.store.write_batch import GAP_NS, ShapeKey, WriteBatch

if TYPE_CHECKING:
    from dpmon.store.history_writer import HistoryWriter

BATCH_SIZES = 16
"""Most batch sizes of a process with their own tallies; further sizes share OTHER_SIZES."""
SHAPES = 2000
"""Most distinct shapes of a process that keep their sizes; further shapes are counted without sizes."""
HELD_CALLS = 4096
"""Most calls of a process that are held for their step."""
_MAX_INT = (1 << 63) - 1
_APPLY = CALL_PHASES.index("parallel_apply")
_LEARNS = Flag.TRAINING | Flag.GRAD
_CALL_AT = {name: index for index, name in enumerate(CALL_PHASES)}
_STEP_AT = {name: index for index, name in enumerate(STEP_PHASES)}
_COUNTED = tuple(quantity.name for quantity in QUANTITIES if quantity.name != "samples")
_SAMPLES_AT = [quantity.name for quantity in QUANTITIES].index("samples")
_phases_of = itemgetter(
    *(len(STEP_PHASES) + _CALL_AT[phase.name] if phase.of_call else _STEP_AT[phase.name] for phase in PHASES)
)
"""Returns values in the order of PHASES, from the phases of a step followed by the phases of its calls."""
_DAMAGE = (LookupError, ValueError, TypeError, AttributeError, RecursionError)


class RingIntake:
    """Puts the rows of one ring into a batch."""

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
        self._loops = LoaderLoopTracker(row.process)

    def resume(self, history: HistoryWriter) -> None:
        """Continue after the last step of the ring, which another supervisor wrote. Raises HistoryError."""
        for _, mode, _, _, kind in history.last_step(self.row):
            self._mode, self._steps_in_mode = mode, 0 if kind & WARM_UP else WARM_UP_STEPS
        self._loops.resume(history.loops(self.row.process))

    def add(self, batch: WriteBatch, number: int, row: Row) -> bool:
        """Put `row` into `batch` under the id `number`; False for a definition, which takes no id.

        Raises RecordError if its numbers are impossible.
        """
        if isinstance(row, CallRow):
            self._call(batch, number, row)
        elif isinstance(row, Step):
            self._step(batch, number, row)
        elif isinstance(row, Event):
            try:
                self._event(batch, number, row)
            except _DAMAGE as error:
                raise RecordError(f"damaged event: {type(error).__name__}") from None
        elif isinstance(row, CollectiveRow):
            row = row._replace(start=row.start - self._start_ns)
            _check_ranges(row.start, max(row.took, 0), row.number, row.step, row.queued, row.quantity)
            batch.add_collective(number, self.row.process, row)
        elif isinstance(row, LossRow):
            began = row.start - self._start_ns
            _check_ranges(began, 0, row.definition, row.step)
            batch.losses.append((number, self.row.process, row.definition, row.step, began, row.loss))
        else:
            text = json.dumps(row.value, separators=(",", ":"))
            batch.definitions.append((self.row.process, row.number, text))
            batch.characters += len(text)
            return False
        return True

    # ------------------------------------------------------------------------------------------ calls

    def _call(self, batch: WriteBatch, number: int, row: CallRow) -> None:
        began = row.start - self._start_ns
        _check_ranges(began, row.wall, row.step, row.call)
        self._calls[number] = row
        parts = encode_parts(row.parts)
        batch.calls.append((number, self.row.process, *row[:5], began, *row[6:-1], parts))
        batch.characters += len(parts or "")
        if len(self._calls) > HELD_CALLS:  # a process with calls outside steps
            self._count(batch, [self._calls.pop(next(iter(self._calls)))], None)
        self._note_id(number)
        self.row.calls += 1
        self.row.last_call = row.call

    def _count(self, batch: WriteBatch, calls: Iterable[CallRow], kind: int | None) -> None:
        """Count the sizes of calls. `kind`: kind of their step; None if they are in no step."""
        for call in calls:
            of_call = kind if kind is not None else EVALUATION * (call.flags & _LEARNS == 0)
            virtual = int(call.flags & Flag.VIRTUAL > 0)
            parts, sizes = call.parts, _sizes_of(call)
            untimed = 0 if parts is None or parts.device_ms is None or None not in parts.device_ms else parts.why
            shape = self.row.process, call.mode, of_call, call.layout, virtual, sizes, untimed
            if shape not in self._shapes:
                if len(self._shapes) < SHAPES:
                    self._shapes.add(shape)
                else:
                    shape = (*shape[:-2], _without_sizes(sizes), untimed)
            batch.shapes[shape] += 1

    def finish_process(self, batch: WriteBatch) -> None:
        """Handle the end of the process: count its last calls, which are in no finished step."""
        self._count(batch, self._calls.values(), None)
        self._calls.clear()

    # ------------------------------------------------------------------------------------------ steps

    def _step(self, batch: WriteBatch, number: int, row: Step) -> None:
        step, mode, began, wall = row.step, row.mode, row.start_ns - self._start_ns, row.wall_ns
        _check_ranges(began, wall, step, row.samples or 0, *row.phases.values(), *row.counts.values())
        evaluation = row.is_evaluation and not self._is_training_step(step)
        account = self._accounts.account(self.row.process)
        waited = row.phases.get("data", 0) + row.phases.get("sync", 0)
        left_out = account.exclusion_flag(began, began + wall, waited)
        kind = self._next_step_kind(mode, evaluation) | left_out
        calls = self._pop_step_calls(batch, step, kind)
        own = [*map(row.phases.get, STEP_PHASES)]
        by_call, rest = _sum_call_phases(own, calls)
        values = _phases_of((*own, *by_call))
        quantities = [*map(row.counts.get, _COUNTED)]
        quantities.insert(_SAMPLES_AT, row.samples)
        process = self.row.process
        spent, gap = account.step(step, mode, began, wall, evaluation, left_out)
        batch.add_activity_time(process, spent)
        if gap is not None and gap.ns >= GAP_NS:
            batch.gaps.append(gap)
        evaluated = sum([one.end - one.begin for one in spent if one.activity == "evaluation"]) if evaluation else 0
        loop = self._loops.add_step(step, row.batches, began, began + wall, evaluation, evaluated)
        if self._loops.changed:
            batch.loops |= {(process, one): each for one, each in self._loops.changed.items()}
            self._loops.changed.clear()
        in_loop = (None, None) if loop is None else (loop.loop, loop.batches_used)
        named = number, process, step, mode, began, wall, kind, len(calls)
        times = None if row.times is None else json.dumps([row.why, *row.times], separators=(",", ":"))
        spans = f"[{','.join(map(str, chain.from_iterable(row.runs)))}]" if row.runs else None
        sync_number = row.sync_number
        rest_of = rest, times, spans, row.missing_spans, sync_number, None, None, *in_loop
        key = TallyKey(process, mode, kind, self._batch_size(row.samples))
        series = [(device_series(name), ns) for name, ns in _device_times(row, calls, by_call).items()]
        series += chain.from_iterable(map(_series_of, calls))
        batch.add_step(key, began + wall, (*named, *quantities, *values, *rest_of), series)
        batch.characters += len(spans or "") + len(times or "")
        if sync_number is not None:
            second = (began + wall) // 1_000_000_000
            # With devices, the host does not wait for other ranks, so its time does not measure the communication.
            tail = row.phases.get("sync") if row.times is None else sync_device_ns(row.times)
            if tail is not None:
                synced = SyncStep(number, key, second, sync_number, row.counts.get("synced", 0), tail)
                batch.add_waits(self._accounts.rounds.add_step(process, synced))
        self._note_id(number)
        self.row.steps += 1
        self.row.last_step = step

    def _is_training_step(self, step: int) -> bool:
        """Whether all calls of a step train and none failed: a server (RPC) has no backward pass of its own."""
        flags = [call.flags & (_LEARNS | Flag.FAILED) for call in self._calls.values() if call.step == step]
        return set(flags) == {_LEARNS}

    def _pop_step_calls(self, batch: WriteBatch, step: int, kind: int) -> list[CallRow]:
        """Return the held calls of a step. Release them, and the calls of earlier steps that were not recorded."""
        held = self._calls
        self._calls = {}
        calls = [call for call in held.values() if call.step == step]
        self._count(batch, calls, kind)
        if len(calls) != len(held):
            self._count(batch, (call for call in held.values() if call.step < step), None)
            self._calls = {number: call for number, call in held.items() if call.step > step}
        return calls

    def _next_step_kind(self, mode: str, evaluation: bool) -> int:
        """Return the kind of the next step."""
        if mode != self._mode:
            self._mode, self._steps_in_mode = mode, 0
        self._steps_in_mode += 1
        return EVALUATION * evaluation | WARM_UP * (self._steps_in_mode <= WARM_UP_STEPS)

    def _batch_size(self, samples: int | None) -> int:
        if samples is None:
            return NO_SAMPLES
        if samples not in self._sizes:
            if len(self._sizes) >= BATCH_SIZES:
                return OTHER_SIZES
            self._sizes.add(samples)
        return samples

    def _note_id(self, number: int) -> None:
        row = self.row
        row.last_id = number
        if row.first_id is None:
            row.first_id = number

    # ------------------------------------------------------------------------------------------ events

    def _event(self, batch: WriteBatch, number: int, event: Event) -> None:
        kind, data = event.kind, event.data
        kind.encode()  # ValueError for a lone surrogate, which the database rejects
        t_ns = seconds_to_ns(data.get("t_s"))
        process = self.row.process if self.row.process >= 0 else None
        self._accounts.handle_event(batch, process, kind, data, t_ns)
        if process is None and t_ns is not None and kind in ("device", "host"):
            _add_sample(batch, t_ns, kind, data)
        text = to_bounded_json({"kind": kind, **data})
        if b"NaN" in text or b"Infinity" in text:  # not JSON: unknown
            text = to_bounded_json(load_json(text))
        batch.add_event(number, process, kind, t_ns, text.decode())


def _series_of(row: CallRow) -> list[tuple[str, int]]:
    """Return the series and the time (ns) of each replica or stage of a call: on the host, then on its device."""
    layout, parts = row.layout, row.parts
    if parts is None:
        return [(replica_series(layout, 0), row.wall)]
    named: list[tuple[str, int | None]]
    named = [(replica_series(layout, i), ran) for i, (_, _, _, ran) in enumerate(parts.replicas)]
    named += [(stage_series(layout, i, *one[:3]), one[4]) for i, one in enumerate(parts.stages)]
    found = [(name, ran) for name, ran in named if ran is not None]
    known = zip(named, parts.replica_or_stage_device_ms, strict=False)
    return found + [(device_series(name), int(ms * 1e6)) for (name, _), ms in known if ms is not None]


def _sizes_of(row: CallRow) -> str:
    """Return the definitions of the sizes of a call and its replicas or stages as JSON (see query_results.Shape)."""
    parts = row.parts
    if parts is None:
        return _sizes_text(row.inputs, row.outputs, (row.inputs, row.outputs))
    inner = [*(one[:2] for one in parts.replicas), *(one[:3] for one in parts.stages)]
    return _sizes_text(row.inputs, row.outputs, *inner)


@lru_cache(4096)
def _sizes_text(*sizes: int | tuple[int, ...]) -> str:
    return json.dumps(sizes, separators=(",", ":"))


def _without_sizes(text: str) -> str:
    """Return a text from `_sizes_text` with all sizes unknown."""
    _, _, *parts = json.loads(text)
    return _sizes_text(0, 0, *((0, 0) if len(part) == 2 else (part[0], 0, 0) for part in parts))


def _sum_call_phases(own: Sequence[int | None], calls: Sequence[CallRow]) -> tuple[list[int | None], int | None]:
    """Return the summed phases of a step's calls (None: did not run), and the rest of its forward.

    `own`: the step's phases in the order of STEP_PHASES. Calls of other threads, or calls repeated in the backward
    pass, may take longer than the whole forward. Then the phases cannot be separated, and all time counts as forward.
    """
    took = [[at and at[1] for at in call.parts.phases] for call in calls if call.parts is not None]
    sums: list[int | None] = took[0] if took else [None] * len(CALL_PHASES)
    for phases in took[1:]:
        sums = [one if more is None else (one or 0) + more for one, more in zip(sums, phases, strict=True)]
    forward, copy, apply = own[_STEP_AT["forward"]], own[_STEP_AT["copy"]], sums[_APPLY]
    if forward is None:
        return [None] * len(CALL_PHASES), None
    inside = sum([took for took in sums if took])
    over = inside - forward
    if copy and apply and 0 < over <= min(copy, apply):
        # A single replica runs on the training thread: its copies are subtracted from the forward, not from the call.
        sums[_APPLY] = apply - over
        inside = forward
    if inside > forward:
        return [None] * len(CALL_PHASES), forward
    return sums, forward - inside


def _device_times(row: Step, calls: Sequence[CallRow], by_call: Sequence[int | None]) -> dict[str, int]:
    """Return device times (ns) by phase: of the step, of its calls if all of them are timed, and of the REST."""
    parts = [call.parts for call in calls if call.parts is not None]
    timed = any(one.device_ms for one in parts)
    if row.times is None and not timed:
        return {}
    of_calls = [(one.phases, one.phase_device_ms) for one in parts]
    known = zip(SPAN_PHASES, row.times or (), strict=False)
    found = {name: int(ms * 1e6) for name, ms in known if ms is not None}
    for name, index in _CALL_AT.items() if timed else ():
        ran = [times.get(name) for phases, times in of_calls if phases[index] is not None]
        measured = [ms for ms in ran if ms is not None]
        if by_call[index] is not None and measured and len(measured) == len(ran):
            found[name] = int(sum(measured) * 1e6)
    inside = [name for name, index in _CALL_AT.items() if by_call[index] is not None]
    if "forward" in found and all(name in found for name in inside):
        found[REST] = max(found["forward"] - sum(found[name] for name in inside), 0)
    return found


def _add_sample(batch: WriteBatch, t_ns: int, kind: str, data: Mapping[str, Any]) -> None:
    index = data.get("index") if kind == "device" else -1
    if type(index) is not int or not -1 <= index <= 0xFFFF:
        return
    for name, value in data.items():
        if type(value) in (int, float) and name not in ("t_s", "index") and abs(value) < 1e18:
            name.encode()
            batch.add_device_value(t_ns, index, name[:64], float(value))


def _check_ranges(began: int, wall: int, *numbers: int) -> None:
    """Raise RecordError for numbers that do not fit into the database, and for impossible times."""
    if began < -LATEST_NS or began + wall > LATEST_NS or max(numbers) > _MAX_INT:
        raise RecordError("impossible numbers")
