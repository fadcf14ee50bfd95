"""Turns the records of a ring into rows, tallies and the account of time.

An `Intake` belongs to one ring. The calls of a step arrive before the step. They are held until then, because the row
of the step contains their phases, and the calls take the kind of the step.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from dpmon.record.codec import MAX_DEFINITIONS
from dpmon.record.kinds import RecordError, is_evaluation
from dpmon.record.payloads import (
    BACKWARD_AT,
    OPTIMIZER_AT,
    SAMPLES_AT,
    call_head,
    call_replicas,
    call_stages,
    definition,
    kind_of,
    known_times,
    part_times,
    step_fields,
    step_times,
    why_number,
    without_times,
)
from dpmon.record.plainjson import load_event
from dpmon.record.schema import (
    EVALUATION,
    PHASES,
    QUANTITIES,
    REST,
    SETTLING,
    SETTLING_STEPS,
    STEP_PHASES,
    device_series,
)
from dpmon.record.wire import CALL_PHASES, FAILED, GRAD, MODES, TRAINING, VIRTUAL, unpack_collective
from dpmon.store.accounting import LATEST_NS
from dpmon.store.accounts import Accounts, ns_of
from dpmon.store.batch import GAP_NS, Batch, ShapeKey
from dpmon.store.parts import replica_series, stage_series
from dpmon.store.rounds import SyncStep
from dpmon.store.tables import RingRow
from dpmon.store.tally import NO_SAMPLES, OTHER_SIZES, Key, StepFacts

BATCH_SIZES = 16
"""Most batch sizes of a process with their own tallies; further sizes share OTHER_SIZES."""
SHAPES = 2000
"""Most distinct shapes of a process that keep their sizes; further shapes are counted without sizes."""
HELD_CALLS = 4096
"""Most calls of a process that are held for their step."""
_MAX_INT = (1 << 63) - 1
_APPLY = CALL_PHASES.index("parallel_apply")
_LEARNS = TRAINING | GRAD
_CALL_AT = {name: index for index, name in enumerate(CALL_PHASES)}
_SYNCED_AT = [quantity.name for quantity in QUANTITIES].index("synced")
_STEP_AT = {name: index for index, name in enumerate(STEP_PHASES)}
_phases_of = itemgetter(
    *(len(STEP_PHASES) + _CALL_AT[phase.name] if phase.of_call else _STEP_AT[phase.name] for phase in PHASES)
)
"""Returns values in the order of PHASES, from the phases of a step followed by the phases of its calls."""
_DAMAGE = (RecordError, LookupError, ValueError, TypeError, AttributeError, struct.error, RecursionError)


class _HeldCall(NamedTuple):
    """The parts of a call that are held until its step arrives."""

    number: int
    """Id of the call."""
    step: int
    mode: str
    layout: int
    flags: int
    phases: tuple[int, ...]
    """ns in the order of CALL_PHASES; -1: did not run."""
    device_ms: Mapping[str, float] | None
    parts: list[tuple[str, int]]
    sizes: str
    untimed: int


class Intake:
    """Puts the payloads of one ring into a batch, and decodes no more than necessary."""

    def __init__(self, row: RingRow, start_ns: int, accounts: Accounts) -> None:
        self.row = row
        self._start_ns = start_ns
        self._accounts = accounts
        self._rows: dict[int, int | None] = {}
        """Number of rows in a batch by the definition of its sizes, for the newest definitions."""
        self._shapes: set[ShapeKey] = set()
        """Shapes that are kept with their sizes."""
        self._calls: list[_HeldCall] = []
        self._sizes: set[int] = set()
        """Batch sizes with their own tallies."""
        self._mode: str | None = None
        self._steps_in_mode = 0

    def learn(self, number: int, value: Any) -> None:
        """Remember how many rows a batch with the sizes of this definition has (None: unknown)."""
        if isinstance(value, list):
            shapes = (size[1] for size in value if size[1])
            rows = next((shape[0] for shape in shapes), None)
            self._rows.pop(number, None)
            self._rows[number] = rows if type(rows) is int and 0 <= rows <= _MAX_INT else None
            if len(self._rows) > MAX_DEFINITIONS:
                del self._rows[next(iter(self._rows))]

    def resume(
        self,
        mode: str | None,
        steps_in_mode: int,
        sizes: Iterable[int],
        waiting: Iterable[tuple[int, bytes]],
        shapes: Iterable[ShapeKey] = (),
    ) -> None:
        """Continue the history of an earlier supervisor.

        `steps_in_mode`: steps since the mode last changed. `sizes`: batch sizes with their own tallies. `waiting`: id
        and payload of calls that wait for their step. `shapes`: the shapes in the history.
        """
        self._mode, self._steps_in_mode = mode, steps_in_mode
        self._sizes.update(sizes)
        self._shapes.update(shapes)
        self._calls = []
        for number, payload in waiting:
            with suppress(*_DAMAGE):
                inner = without_times(payload)
                self._calls.append(_held(number, payload, inner, call_head(inner)))

    def add(self, batch: Batch, number: int, payload: bytes) -> bool:
        """Put `payload` into `batch` under the id `number`; False for a definition, which takes no id.

        Raises RecordError if `payload` is not a record.
        """
        kind = kind_of(payload)
        try:
            if kind == "call":
                self._call(batch, number, payload)
            elif kind == "step":
                self._step(batch, number, payload)
            elif kind == "event":
                batch.events.append(self._event(batch, number, payload))
            elif kind == "collective":
                self._collective(batch, number, payload)
            elif kind == "definition":
                which, value = definition(payload)
                self.learn(which, value)
                batch.definitions.append((self.row.process, which, json.dumps(value, separators=(",", ":"))))
                return False
            else:
                raise RecordError("unknown kind of record")
        except _DAMAGE as error:
            if isinstance(error, RecordError):
                raise
            raise RecordError(f"unreadable record: {type(error).__name__}") from None
        return True

    # ------------------------------------------------------------------------------------------ calls

    def _call(self, batch: Batch, number: int, payload: bytes) -> None:
        inner = without_times(payload)
        head = call_head(inner)
        _, _, _, _, step, call, start, wall, inputs, *_ = head
        began = start - self._start_ns
        _check(began, wall, step, call)
        held = _held(number, payload, inner, head)
        self._calls.append(held)
        named = number, self.row.process, call, step, held.mode, began, wall, self._rows.get(inputs), payload
        phases = [took if took >= 0 else None for took in held.phases]
        batch.calls.append((*named, *phases))
        if len(self._calls) > HELD_CALLS:  # a process with calls outside steps
            self._count(batch, [self._calls.pop(0)], None)
        self._place(number)
        self._note_held()
        self.row.calls += 1
        self.row.last_call = call

    def _note_held(self) -> None:
        self.row.held_id = self._calls[0].number if self._calls else None

    def _count(self, batch: Batch, calls: Sequence[_HeldCall], kind: int | None) -> None:
        """Count the sizes of calls. `kind`: kind of their step; None if they are in no step."""
        for call in calls:
            of_call = kind if kind is not None else EVALUATION * (call.flags & _LEARNS == 0)
            virtual = int(call.flags & VIRTUAL > 0)
            shape = self.row.process, call.mode, of_call, call.layout, virtual, call.sizes, call.untimed
            if shape not in self._shapes:
                if len(self._shapes) < SHAPES:
                    self._shapes.add(shape)
                else:
                    shape = (*shape[:-2], _without_sizes(call.sizes), call.untimed)
            batch.shapes[shape] += 1

    def flush(self, batch: Batch) -> None:
        """Handle the end of the process: count its last calls, which are in no finished step, and close its rounds."""
        self._count(batch, self._calls, None)
        self._calls.clear()
        self._note_held()
        batch.joined += self._accounts.rounds.ended(self.row.process)

    # ------------------------------------------------------------------------------------------ steps

    def _step(self, batch: Batch, number: int, payload: bytes) -> None:
        mode_number, step, start, wall, phases, counted, spans, sync_number = step_fields(payload)
        mode = MODES[mode_number]
        began = start - self._start_ns
        _check(began, wall, step)
        evaluation = is_evaluation(phases[BACKWARD_AT], phases[OPTIMIZER_AT]) and not self._learns(step)
        kind = self._kind(mode, evaluation)
        calls = self._of_step(batch, step, kind)
        own = [*phases, max(0, wall - sum([took for took in phases if took >= 0]))]
        by_call, rest = _of_calls(own, calls)
        values = [took if took >= 0 else None for took in _phases_of((*own, *by_call))]
        quantities = [count if count >= 0 else None for count in counted]
        times = step_times(payload)
        device = _device_times(times, calls, by_call)
        parts = [part for call in calls for part in call.parts]
        facts = StepFacts(step, max(wall, 0), quantities, values, rest, len(calls), device, parts)
        process = self.row.process
        key = Key(process, mode, kind, self._batch_size(quantities[SAMPLES_AT]))
        batch.step(key, began, facts)
        spent, gap = self._accounts.account(process).step(step, mode, began, max(wall, 0), evaluation)
        batch.spend(process, spent)
        if gap is not None and gap.ns >= GAP_NS:
            batch.gaps.append((process, *gap))
        named = number, process, step, mode, began, wall, kind, len(calls)
        numbers = sync_number if sync_number >= 0 else None, None, None
        batch.steps.append((*named, *quantities, *values, rest, times, spans or None, *numbers))
        if sync_number >= 0:
            second = (began + max(wall, 0)) // 1_000_000_000
            # With devices, the host does not wait for other ranks, so its time does not measure the communication.
            tail = phases[_STEP_AT["sync"]] if times is None else device_tail(known_times(times))
            if tail is not None:
                synced = SyncStep(number, key, second, sync_number, counted[_SYNCED_AT], tail)
                batch.joined += self._accounts.rounds.step(process, synced)
        self._place(number)
        self._note_held()
        self.row.steps += 1
        self.row.last_step = step

    def _learns(self, step: int) -> bool:
        """Whether all calls of a step train and none failed: a server (RPC) has no backward pass of its own."""
        flags = [call.flags & (_LEARNS | FAILED) for call in self._calls if call.step == step]
        return set(flags) == {_LEARNS}

    def _of_step(self, batch: Batch, step: int, kind: int) -> list[_HeldCall]:
        """Return the held calls of a step. Release them, and the calls of earlier steps that were not recorded."""
        held = self._calls
        self._calls = []
        calls = [call for call in held if call.step == step]
        self._count(batch, calls, kind)
        if len(calls) != len(held):
            self._count(batch, [call for call in held if call.step < step], None)
            self._calls = [call for call in held if call.step > step]
        return calls

    def _kind(self, mode: str, evaluation: bool) -> int:
        """Return the kind of the next step."""
        if mode != self._mode:
            self._mode, self._steps_in_mode = mode, 0
        self._steps_in_mode += 1
        return EVALUATION * evaluation | SETTLING * (self._steps_in_mode <= SETTLING_STEPS)

    def _batch_size(self, samples: int | None) -> int:
        if samples is None:
            return NO_SAMPLES
        if samples not in self._sizes:
            if len(self._sizes) >= BATCH_SIZES:
                return OTHER_SIZES
            self._sizes.add(samples)
        return samples

    def _place(self, number: int) -> None:
        row = self.row
        row.last_id = number
        if row.first_id is None:
            row.first_id = number

    # ------------------------------------------------------------------------------------------ collectives

    def _collective(self, batch: Batch, number: int, payload: bytes) -> None:
        collected = unpack_collective(payload)
        collected = collected._replace(start=collected.start - self._start_ns)
        _check(
            collected.start,
            max(collected.took, 0),
            collected.number,
            collected.step,
            collected.queued,
            collected.quantity,
        )
        batch.collective(number, self.row.process, collected)

    # ------------------------------------------------------------------------------------------ events

    def _event(self, batch: Batch, number: int, payload: bytes) -> tuple[Any, ...]:
        text = payload[1:].decode()
        kind, data = load_event(text)
        t_ns = ns_of(data.get("t_s"))
        process = self.row.process if self.row.process >= 0 else None
        kind.encode()  # ValueError for a lone surrogate, which the database rejects
        self._accounts.event(batch, process, kind, data, t_ns)
        if process is None and t_ns is not None and kind in ("device", "host"):
            _add_sample(batch, t_ns, kind, data)
        return (number, process, kind, t_ns, text)


def _held(number: int, payload: bytes, inner: bytes, head: Sequence[int]) -> _HeldCall:
    """Return the parts of a call to hold. `inner`: payload without device times. `head`: its numbers
    (dpmon.record.payloads)."""
    mode, flags, _, layout, step, _, _, _, inputs, outputs, *phases = head
    took = tuple([took if at >= 0 else -1 for at, took in zip(phases[::2], phases[1::2], strict=True)])
    replicas, stages = call_replicas(inner), call_stages(inner)
    parts = [(replica_series(layout, i), ran if ran > 0 else 0) for i, (_, _, _, ran) in enumerate(replicas)]
    parts += [(stage_series(layout, i, *stage[:3]), stage[4]) for i, stage in enumerate(stages) if stage[4] >= 0]
    sizes = _sizes_text(inputs, outputs, *[part[:2] for part in replicas], *[part[:3] for part in stages])
    if inner is payload:
        return _HeldCall(number, step, MODES[mode], layout, flags, took, None, parts, sizes, 0)
    named = [replica_series(layout, i) for i in range(len(replicas))]
    named = named or [stage_series(layout, i, *stage[:3]) for i, stage in enumerate(stages)]
    times = part_times(payload)
    known = ((name, times.of(i)) for i, name in enumerate(named))
    parts += [(device_series(name), int(ms * 1e6)) for name, ms in known if ms is not None]
    return _HeldCall(
        number, step, MODES[mode], layout, flags, took, known_times(payload), parts, sizes, why_number(payload)
    )


@lru_cache(4096)
def _sizes_text(*sizes: int | tuple[int, ...]) -> str:
    """Return the definitions of the sizes of a call and its replicas or stages as JSON (dpmon.store.answers.Shape)."""
    return json.dumps(sizes, separators=(",", ":"))


def _without_sizes(text: str) -> str:
    """Return a text from `_sizes_text` with all sizes unknown."""
    _, _, *parts = json.loads(text)
    return _sizes_text(0, 0, *((0, 0) if len(part) == 2 else (part[0], 0, 0) for part in parts))


def _of_calls(own: Sequence[int], calls: Sequence[_HeldCall]) -> tuple[list[int], int | None]:
    """Return the summed phases of a step's calls (-1: did not run), and the rest of its forward.

    `own`: the step's phases in the order of STEP_PHASES. Calls of other threads, or calls repeated in the backward
    pass, may take longer than the whole forward. Then the phases cannot be separated, and all time counts as forward.
    """
    sums = list(calls[0].phases) if calls else [-1] * len(CALL_PHASES)
    for call in calls[1:]:
        for index, took in enumerate(call.phases):
            if took >= 0:
                sums[index] = max(sums[index], 0) + took
    forward, copy = own[_STEP_AT["forward"]], own[_STEP_AT["copy"]]
    if forward < 0:
        return [-1] * len(CALL_PHASES), None
    inside = sum([took for took in sums if took > 0])
    over = inside - forward
    if 0 < over <= min(copy, sums[_APPLY]):
        # A single replica runs on the training thread: its copies are subtracted from the forward, not from the call.
        sums[_APPLY] -= over
        inside = forward
    if inside > forward:
        return [-1] * len(CALL_PHASES), forward
    return sums, forward - inside


def _device_times(times: bytes | None, calls: Sequence[_HeldCall], by_call: Sequence[int]) -> dict[str, int]:
    """Return device times (ns) by phase: of the step, of its calls if all of them are timed, and of the REST."""
    timed = [call for call in calls if call.device_ms]
    if times is None and not timed:
        return {}
    found = {} if times is None else {name: int(ms * 1e6) for name, ms in known_times(times).items()}
    for name, index in _CALL_AT.items() if timed else ():
        if by_call[index] < 0:
            continue
        ran = [call.device_ms for call in calls if call.phases[index] >= 0]
        known = [ms[name] for ms in ran if ms is not None and name in ms]
        if known and len(known) == len(ran):
            found[name] = int(sum(known) * 1e6)
    inside = [name for name, index in _CALL_AT.items() if by_call[index] >= 0]
    if "forward" in found and all(name in found for name in inside):
        found[REST] = max(found["forward"] - sum(found[name] for name in inside), 0)
    return found


def device_tail(times: Mapping[str, float]) -> int | None:
    """Return the device time (ns) of a step's phase `sync`, or None. `times`: its device times (ms) by phase."""
    return int(times["sync"] * 1e6) if "sync" in times else None


def _add_sample(batch: Batch, t_ns: int, kind: str, data: Mapping[str, Any]) -> None:
    index = data.get("index") if kind == "device" else -1
    if type(index) is not int or not -1 <= index <= 0xFFFF:
        return
    for name, value in data.items():
        if type(value) in (int, float) and name not in ("t_s", "index") and abs(value) < 1e18:
            name.encode()
            batch.device(t_ns, index, name[:64], float(value))


def _check(began: int, wall: int, *numbers: int) -> None:
    """Raise RecordError for numbers that do not fit into the database, and for impossible times."""
    if began < -LATEST_NS or began + wall > LATEST_NS or max(numbers) > _MAX_INT:
        raise RecordError("impossible numbers")
