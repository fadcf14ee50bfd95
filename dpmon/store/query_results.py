"""The results of the store's queries (all but tallies), and the decoding of JSON columns. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import nan
from typing import Any, NamedTuple

from dpmon.record.history_rows import Defined, LossRow, parse_definition
from dpmon.record.record_types import CallParts, CallRow, Collective, Event, Operation, Step
from dpmon.record.safe_json import load_event


class RingSummary(NamedTuple):
    """The columns of `rings` that queries need. Each frame of the screen may read a thousand of these rows."""

    process: int
    rank: int | None
    missed: int
    """Number of lost records."""
    calls: int
    steps: int
    last_step: int | None
    """Number of its last training step."""
    evaluations: int
    """Number of its last evaluation step."""
    forward_steps: int
    """Number of its last forward-only step."""
    evaluation_phases: int
    """Number of evaluations, each of one or several steps."""
    first_id: int | None
    """First id of its rows in steps; `last_id` is the last. None if it has none."""
    last_id: int | None
    open_calls: int
    """Number of calls so far; 0 once a step has ended."""
    node: int | None
    """Number of its node; None if it ran on this machine."""


class LongStepRow(NamedTuple):
    """One of the longest steps of a mode."""

    process: int
    step: int
    mode: str
    kind: int
    start_ns: int
    wall_ns: int
    wait_ns: int | None
    """Its wait for the straggler."""
    phases: Mapping[str, int]
    """ns by phase. The phases of its calls are not included."""


class SlowStepRow(NamedTuple):
    """A long step of one of several processes that train together."""

    process: int
    step: int
    start_ns: int
    wall_ns: int
    sync_number: int | None
    """Number of its last sync pass, the same on all ranks."""
    wait_ns: int | None
    """Its wait for the straggler."""
    loop: int | None
    """Number of the loader loop that its batches came from; None if it used no loader."""
    batch: int | None
    """How many batches of that loop were used by the end of the step; None if unknown."""
    phases: Mapping[str, int]
    """ns by phase, including the phases of its calls."""


def blame_weight_ns(step: LongStepRow | SlowStepRow) -> int:
    """Return the length (ns) by which the ranks' steps of one sync pass compete: half of a wait counts.

    The straggler's step wins, unless it is short: then the straggler was late for another reason, as an evaluation.
    """
    return step.wall_ns - (step.wait_ns or 0) // 2


class LoopStep(NamedTuple):
    """A step that used batches of a loader loop."""

    step: int
    loop: int
    batch: int
    """How many batches of the loop were used by the end of the step."""
    start_ns: int
    wall_ns: int

    @property
    def end_ns(self) -> int:
        """Its end (ns since the run's start)."""
        return self.start_ns + self.wall_ns


NODE_STATES = ("connecting", "connected", "cut", "refused", "ended")
"""States of a node of a mirror. cut: it does not respond, but the mirror keeps trying; refused: the mirror gave up."""


NODE_DEVICES = 1000
"""Device i of node n has the index n * NODE_DEVICES + i."""


@dataclass
class NodeRow:
    """One node of a mirror, a row of the table `nodes`. Times in ns since the start of the mirror's run."""

    number: int
    name: str
    """The name under which the user reaches it."""
    host: str | None = None
    """The machine's own name. Like `run` and `version`, None until it has responded."""
    run: str | None = None
    version: str | None = None
    state: str = "connecting"
    """One of NODE_STATES."""
    why: str | None = None
    """The reason for the state, in a sentence."""
    since_ns: int = 0
    """Start of the state."""
    heard_ns: int | None = None
    """Time of its last response; None if it never responded."""
    received: int = 0
    """The last id of its records that the mirror has."""
    tallied_s: int = 0
    """The mirror has its tallies up to this second."""
    clock_ns: int | None = None
    """Offset added to its times, exact to `clock_error_ns`; None until it is measured."""
    clock_error_ns: int | None = None
    shift_s: int | None = None
    """Offset added to the seconds of its tallies."""
    exit: str | None = None
    """The exit record of its run, as JSON; None while it runs."""


class MinuteRow(NamedTuple):
    """One value of a device (-1: the host) in one minute; `start_s` -1: in all time before the stored minutes."""

    start_s: int
    device: int
    name: str
    samples: int
    total: float
    high: float


class Shape(NamedTuple):
    """Calls of one layout with the same sizes of inputs and outputs. Layouts and sizes are numbers of definitions."""

    process: int
    mode: str
    kind: int
    layout: int
    virtual: bool
    inputs: int
    outputs: int
    replicas: tuple[tuple[int, int], ...]
    """Inputs and outputs of each replica."""
    stages: tuple[tuple[int, int, int], ...]
    """Definition, inputs and outputs (0: it did not finish) of each stage."""
    untimed: int
    """The reason for a missing device time, an index of dpmon.record.record_types.UNTIMED; 0 if none is missing."""
    calls: int
    """Number of these calls."""


class CollectiveSums(NamedTuple):
    """The sampled collectives of a time range."""

    operations: tuple[Operation, ...] = ()
    """In order of bytes, the most first."""
    samples: int = 0
    """Number of sampled steps of all processes."""
    why: str | None = None
    """Why no collectives can be recorded; None if they can be."""
    own: tuple[str, ...] = ()
    """Names of the operations that the script itself launched outside the phases, sorted; from the newest samples."""


class LastSample(NamedTuple):
    """The newest sampled step of a process, with its first collectives."""

    step: int | None
    start_ns: int
    wall_ns: int
    collectives: tuple[Collective, ...]
    """In order of launch."""


class ChartSample(NamedTuple):
    """The values of one device sample (-1: of the host) for the charts. Unknown values are None."""

    id: int
    t_ns: int
    device: int
    util: float | None
    """Utilization of the device, or of the host's CPU cores (%)."""
    mem_used: float | None
    """Memory in use (bytes); `mem_total` is in bytes, too."""
    mem_total: float | None
    power: float | None
    """Watts."""
    run_mem: float | None
    """Host memory in use by the run's processes (bytes)."""


class LossBin(NamedTuple):
    """The losses of one script line in one time bucket."""

    second: int
    """Start of the bucket (s since the run's start)."""
    values: int
    """Number of finite values. If it is 0, the next three members are None."""
    low: float | None
    mean: float | None
    high: float | None
    unfit: int
    """Number of values that are NaN or infinite."""


class InvalidLoss(NamedTuple):
    """The first NaN or infinite loss of a process at a script line."""

    process: int
    place: str
    step: int | None
    t_ns: int
    loss: float


# ------------------------------------------------------------------------------------------------ columns of JSON

_json = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


@lru_cache(4096)
def replica_series(layout: int, index: int) -> str:
    """Return the series name of the replica at `index` in calls of this layout."""
    return f"replica {layout} {index}"


def stage_series(layout: int, index: int, stage: int, inputs: int, outputs: int) -> str:
    """Return the series name of the stage at `index` in calls with these sizes of inputs and outputs."""
    return f"stage {layout} {index} {stage} {inputs} {outputs}"


def encode_calls(step: Step) -> str | None:
    """Return the calls of a step as JSON, and None if there are none: a list of lists, without their numbers.

    A call has its flags, layout, offset from the start of the step, duration, inputs and outputs, and the members of
    its CallParts if it has parts; without device times, only the first three of them.
    """
    if not step.calls:
        return None
    texts = []
    for _, flags, layout, start_ns, wall_ns, inputs, outputs, parts in step.calls:
        text = f"{flags},{layout},{start_ns - step.start_ns},{wall_ns},{inputs},{outputs}"
        if parts is not None:
            text += f",{_json(parts if parts.device_ms is not None else parts[:3])[1:-1]}"
        texts.append(f"[{text}]")
    return f"[{','.join(texts)}]"


def decode_calls(text: str | None, step_start_ns: int, last_number: int) -> list[CallRow]:
    """Return the calls of a step from their JSON. `last_number`: the number of the last one."""
    if text is None:
        return []
    calls = json.loads(text)
    rows = []
    for number, call in enumerate(calls, last_number + 1 - len(calls)):
        flags, layout, offset_ns, wall_ns, inputs, outputs, *parts = call
        call_parts = CallParts(*parts) if parts else None
        rows.append(CallRow(number, flags, layout, step_start_ns + offset_ns, wall_ns, inputs, outputs, call_parts))
    return rows


def loss_from_columns(columns: Sequence[Any]) -> LossRow:
    """Return the loss in a row of (definition, step, t_ns, loss)."""
    row = LossRow._make(columns)
    value: Any = row.loss
    return row if value is not None else row._replace(loss=nan)  # SQLite has no NaN


def step_lists(spans: str | None, device: str | None) -> tuple[list[Any], int, list[float | None] | None]:
    """Return the runs of a step's phases, why device times are missing (Untimed), and its device times or None."""
    flat_spans = [] if spans is None else json.loads(spans)
    runs = list(zip(flat_spans[::3], flat_spans[1::3], flat_spans[2::3], strict=True))
    if device is None:
        return runs, 0, None
    untimed, *times = json.loads(device)
    return runs, untimed, times


def shape_from_row(row: Sequence[Any]) -> Shape:
    """Return the shape in a row."""
    process, mode, kind, layout, virtual, sizes, untimed, calls = row
    inputs, outputs, *parts = json.loads(sizes)
    replicas = tuple(tuple(part) for part in parts if len(part) == 2)
    stages = tuple(tuple(part) for part in parts if len(part) == 3)
    return Shape(process, mode, kind, layout, bool(virtual), inputs, outputs, replicas, stages, untimed, calls)


def definition_from_row(row: Sequence[Any]) -> tuple[int, Defined]:
    """Return the definition in a row, and its number."""
    number, text = row
    return number, parse_definition(json.loads(text))


def event_from_row(row: Sequence[str]) -> Event:
    """Return the event in a row with its JSON."""
    return Event(*load_event(row[0]))
