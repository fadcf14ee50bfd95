"""The results of the store's queries, except tallies; and how columns of JSON become records. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import nan
from types import NoneType
from typing import Any, NamedTuple

from dpmon.errors import HistoryError
from dpmon.record.history_rows import CallParts, CallRow, LossRow
from dpmon.record.record_types import BUCKET, Collective, Event, Operation
from dpmon.record.safe_json import load_event, load_json
from dpmon.record.shared_names import CALL_PHASES


class TimeRow(NamedTuple):
    """Activities of one process in one stretch of time and one mode (ns)."""

    start_s: int
    width_s: int
    process: int
    mode: str
    spent: Mapping[str, int]


class RingSummary(NamedTuple):
    """What queries need of a row of `rings`. There may be a thousand of them in each picture."""

    process: int
    rank: int | None
    missed: int
    """Records that were lost."""
    calls: int
    steps: int
    last_step: int | None
    first_id: int | None
    """First id of its calls and steps; `last_id` is the last. None if it has none."""
    last_id: int | None
    open_calls: int
    """Calls so far, while no step has ended."""
    node: int | None
    """Number of its machine; None: this machine."""


class SecondRow(NamedTuple):
    """The steps of one process, mode and kind that ended in one second."""

    process: int
    mode: str
    kind: int
    steps: int
    samples: int | None
    """Sum of the known ones; None if a step has no sample count."""
    first_ns: int
    """Start of the first step."""
    last_ns: int
    """End of the last step."""
    step_ns: int
    """Sum of their durations."""


class LongStepRow(NamedTuple):
    """One of the longest steps."""

    process: int
    step: int
    mode: str
    kind: int
    start_ns: int
    wall_ns: int
    phases: Mapping[str, int]
    """ns by phase, without the phases of its calls."""


class SlowStepRow(NamedTuple):
    """A long step of one of several processes that train together."""

    process: int
    step: int
    start_ns: int
    wall_ns: int
    sync_number: int | None
    """Number of its last synchronized backward pass, the same on all ranks."""
    wait_ns: int | None
    """Its wait for the slowest rank."""
    loop: int | None
    """Number of the loop over a loader that its batches came from; None if from none."""
    batch: int | None
    """Number of batches of that loop that were used up to its end; None if unknown."""
    phases: Mapping[str, int]
    """ns by phase, also those of calls."""


class LoopStep(NamedTuple):
    """A step with batches of a loop over a loader."""

    step: int
    loop: int
    batch: int
    """Number of batches of the loop that were used up to its end."""
    start_ns: int
    wall_ns: int

    @property
    def end_ns(self) -> int:
        """When it ended."""
        return self.start_ns + self.wall_ns


NODE_STATES = ("connecting", "connected", "cut", "refused", "ended")
"""States of a machine of a mirror. cut: no word from it, but the mirror tries again; refused: it does not try again."""


NODE_DEVICES = 1000
"""Device i of node n has the index n * NODE_DEVICES + i."""


@dataclass
class NodeRow:
    """One machine of a mirror, a row of the table `nodes`. Times in ns since the mirror's run began."""

    number: int
    name: str
    """How the user reaches it."""
    host: str | None = None
    """The name that the machine gives itself; None until it has answered. `run` and `version` likewise."""
    run: str | None = None
    version: str | None = None
    state: str = "connecting"
    """One of NODE_STATES."""
    why: str | None = None
    """Why it is in this state, in a sentence."""
    since_ns: int = 0
    """When the state began."""
    heard_ns: int | None = None
    """When it last answered; None: never."""
    received: int = 0
    """The last id of its records that is here."""
    tallied_s: int = 0
    """Its tallies are complete up to this second."""
    clock_ns: int | None = None
    """What is added to its times, known up to `clock_error_ns`; None until it is measured."""
    clock_error_ns: int | None = None
    shift_s: int | None = None
    """What is added to the seconds of its tallies."""
    exit: str | None = None
    """How its run ended, as JSON; None while it runs."""


class MinuteRow(NamedTuple):
    """One figure of a device (-1: the host) in one minute; `start_s` -1: in all time before the kept minutes."""

    start_s: int
    device: int
    name: str
    samples: int
    total: float
    high: float


class Shape(NamedTuple):
    """Calls of one layout with the same sizes of inputs and outputs, all as numbers of the process's definitions."""

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
    """Definition, inputs and outputs (0: it did not end) of each stage."""
    untimed: int
    """Why a device time is missing: an index of dpmon.record.history_rows.UNTIMED; 0 if none is."""
    calls: int


class CollectiveSums(NamedTuple):
    """The sampled collectives in a stretch of time."""

    operations: tuple[Operation, ...] = ()
    """The operations, those with the most bytes first."""
    samples: int = 0
    """Number of samples of all processes."""
    why: str | None = None
    """Why no collectives can be recorded; None if they can."""
    own: tuple[str, ...] = ()
    """The operations that the script called in its own work, outside the phases, sorted; from the newest samples."""


class LastSample(NamedTuple):
    """The newest sample of a process: usually one step, with its first collectives."""

    step: int | None
    start_ns: int
    wall_ns: int
    collectives: tuple[Collective, ...]
    """In order of launch."""


class ChartSample(NamedTuple):
    """The values of one sample of a device (-1: the host) for the charts; None for unknown values."""

    id: int
    t_ns: int
    device: int
    util: float | None
    """Utilization of the device, or of the host's processors (%)."""
    mem_used: float | None
    """Bytes in use; `mem_total` is also in bytes."""
    mem_total: float | None
    power: float | None
    """Watts."""
    run_mem: float | None
    """Bytes of the host's memory in use by the run's processes."""


SMOOTHED = 8.0
"""In a smoothed loss, a value weighs e times as much as the value this many before it."""


class LossBin(NamedTuple):
    """The losses of one line in one stretch of time."""

    second: int
    """Its start (s since the run's start)."""
    values: int
    """Number of finite values; if it is 0, the next three are None."""
    low: float | None
    mean: float | None
    high: float | None
    unfit: int
    """Number of values that are NaN or infinite."""


class InvalidLoss(NamedTuple):
    """The first loss of a process and a line that is NaN or infinite."""

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


_LISTS = re.compile(r"[][0-9,.\-nul]*")
_LONG = re.compile(r"[0-9]{19}")


def parse_numbers(text: str) -> Any:
    """Return the nested lists of numbers and None in a column of JSON. Raises HistoryError if it is anything else."""
    try:
        # Nearly every text has only these characters, and no long number: its values need no check.
        usual = _LISTS.fullmatch(text) is not None and _LONG.search(text) is None
        return json.loads(text) if usual else _check_numbers(load_json(text))
    except ValueError as error:
        raise HistoryError(f"a damaged list: {error}") from None


def _check_numbers(found: Any) -> Any:
    left = [found]
    for one in left:
        if isinstance(one, list):
            left += one
        elif not (one is None or type(one) in (int, float)):
            raise ValueError("not a number")
    return found


def encode_parts(parts: CallParts | None) -> str | None:
    """Return the parts of a call for their column."""
    return None if parts is None else _json(parts)


def call_from_columns(columns: Sequence[Any]) -> CallRow:
    """Return the call in CALL_ROW columns (see history_schema). Raises HistoryError if its parts are damaged."""
    row = CallRow._make(columns)
    text: Any = row.parts
    return row if text is None else row._replace(parts=_decode_parts(text))


def loss_from_columns(columns: Sequence[Any]) -> LossRow:
    """Return the loss in its columns: definition, step, t_ns, loss."""
    row = LossRow._make(columns)
    value: Any = row.loss
    return row if value is not None else row._replace(loss=nan)  # SQLite has no NaN


_MOST_MS = 1e12
"""Longest device time that is not damage: 30 years."""


@lru_cache(1024)
def _decode_parts(text: str) -> CallParts:
    """Return the parts in a column. Cached, because every picture shows the newest calls."""
    try:
        phases, replicas, stages, times, why = parse_numbers(text)
        ran = [None if at is None else (at[0], at[1]) for at in phases]
        lengths = [len(ran), *map(len, replicas), *map(len, stages)]
        if lengths != [len(CALL_PHASES), *[4] * len(replicas), *[5] * len(stages)]:
            raise ValueError("a list of another length")
        if {*map(type, chain(*filter(None, ran), *replicas, *stages))} - {int, NoneType}:
            raise ValueError("another type")
        if not all(0 <= ms < _MOST_MS for ms in times or () if ms is not None):
            raise ValueError("an impossible time")
        return CallParts(ran, [*map(tuple, replicas)], [*map(tuple, stages)], times, int(why))
    except (ValueError, TypeError, LookupError) as error:
        raise HistoryError(f"a damaged call: {error}") from None


def step_lists(spans: str | None, device: str | None) -> tuple[list[Any], int, list[float | None] | None]:
    """Return the runs of a step's phases, and its device times (None: none) after the number of why one is missing.

    Raises HistoryError if a column is damaged.
    """
    try:
        flat = [] if spans is None else parse_numbers(spans)
        why, *times = [0] if device is None else parse_numbers(device)
        runs = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
        if list in map(type, (*flat, *times)) or any(not 0 <= phase <= BUCKET for phase, _, _ in runs):
            raise ValueError("an unknown phase")
    except (ValueError, TypeError) as error:
        raise HistoryError(f"a damaged step: {error}") from None
    return runs, why, None if device is None else times


def shape_from_row(row: Sequence[Any]) -> Shape:
    """Return the shape in a row. Raises HistoryError if it is damaged."""
    process, mode, kind, layout, virtual, sizes, untimed, calls = row
    try:
        inputs, outputs, *parts = parse_numbers(sizes)
        pairs = tuple((part[0], part[1]) for part in parts if len(part) == 2)
        stages = tuple((part[0], part[1], part[2]) for part in parts if len(part) == 3)
    except (ValueError, TypeError) as error:
        raise HistoryError(f"a damaged shape: {error}") from None
    return Shape(process, mode, kind, layout, bool(virtual), inputs, outputs, pairs, stages, untimed, calls)


def event_from_row(row: Sequence[str]) -> Event:
    """Return the event in a row with its JSON. Raises HistoryError if it is damaged."""
    try:
        return Event(*load_event(row[0]))
    except ValueError as error:
        raise HistoryError(f"a damaged event: {error}") from None
