"""The record classes, for all parts of dpmon outside the training process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

from dpmon.record.schema import SPAN_PHASES, STEP_KINDS, SYNC_NUMBER, TRAINING
from dpmon.record.shared_names import CALL_PHASES
from dpmon.record.span_format import Flag

UNTIMED = (
    "",
    "the device had not finished it after 64 more steps",
    "a CUDA graph was being captured: an event recorded then becomes part of the graph",
    "too few events were free: the device is so far behind that most of its 256 events are in use",
    "the device's events failed",
    "the process ended before the device had finished it",
    "the device is the CPU: host time is all there is",
    "it began on one stream and ended on another, which was ahead",
    "the step has more phases than can be timed (4096)",
    "the step copies more tensors to devices than can be timed (16)",
    "steps are so short that only a random sample of them is timed on devices",
)
"""Why a device time is unknown: the texts for the numbers of `dpmon.record.shared_names.Untimed`."""
_BEFORE = "it ran before the first call on a GPU, or not on the training thread"
MAX_SPANS = 256
"""Maximum number of recorded spans per step; later spans are only counted."""
BUCKET = len(SPAN_PHASES)
"""Takes the place of a phase in an entry that marks when the last gradient of a bucket was ready. It has no
duration."""


@dataclass(frozen=True, slots=True)
class Size:
    """One tensor among the arguments or results: its path, shape, dtype and bytes (elements times item size).

    For a DTensor, which is divided among ranks, shape and bytes describe this rank's part.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    global_shape: tuple[int, ...] | None = None
    """Global shape of a DTensor; None for any other tensor."""


class CallPhaseTime(NamedTuple):
    """A phase of a call: offset from the call's start (ns), duration (ns) and device time (ms, None: unknown)."""

    offset_ns: int
    host_ns: int
    device_ms: float | None = None


class PhaseSpan(NamedTuple):
    """One occurrence of a phase in a step: offset from the step's start and duration in ns."""

    phase: str
    offset_ns: int
    host_ns: int


class Replica(NamedTuple):
    """One replica's share of a call. `offset_ns` counts from the call's start; sizes are None if no hook saw them."""

    replica: int
    device: str
    offset_ns: int
    host_ns: int
    inputs: tuple[Size, ...] | None
    outputs: tuple[Size, ...] | None
    device_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """One device's work in a call of a model on several devices; its parts ran one after the other.

    The inputs of every stage but the first came from the previous stage's device. `host_ns` is None if the stage did
    not end.
    """

    stage: int
    device: str
    parts: tuple[str, ...]
    offset_ns: int
    host_ns: int | None
    inputs: tuple[Size, ...] | None
    outputs: tuple[Size, ...] | None
    device_ms: float | None = None

    @property
    def crossed_bytes(self) -> int | None:
        """Bytes that came from the previous stage's device; None for the first stage, or if unknown."""
        if self.stage == 0 or self.inputs is None:
            return None
        return sum(size.bytes for size in self.inputs)


@dataclass(frozen=True, slots=True)
class Call:
    """One outermost forward of a model. `start_ns` counts from the run's start."""

    process: int
    rank: int | None
    step: int | None
    """Number of its step; None if it ran outside the steps."""
    call: int
    root: str
    via: str | None
    mode: str
    virtual: bool
    training: bool
    grad: bool
    failed: bool
    start_ns: int
    wall_ns: int
    devices: tuple[str, ...]
    phases: Mapping[str, CallPhaseTime]
    replicas: tuple[Replica, ...]
    inputs: tuple[Size, ...] | None
    outputs: tuple[Size, ...] | None
    absent: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    """Stages of a model on several devices; such a call has no replicas."""
    dim: int = 0
    """The batch dimension."""
    kind: int = TRAINING
    """Kind of its step, or its own kind outside the steps: a key of STEP_KINDS."""

    @property
    def step_kind(self) -> str:
        """Name of its kind."""
        return STEP_KINDS[self.kind]

    @property
    def rows(self) -> int | None:
        """Rows of the batch; None if no input has the batch dimension."""
        return count_rows(self.inputs, self.dim)


class CallParts(NamedTuple):
    """The parts of a call. `offset` counts from the start of the call (ns)."""

    phases: Sequence[tuple[int, int] | None] = (None,) * len(CALL_PHASES)
    """Offset and duration of each of CALL_PHASES; None if it did not run."""
    replicas: Sequence[tuple[int, int, int, int]] = ()
    """For each replica: inputs and outputs (numbers of definitions, 0: unknown), offset and duration."""
    stages: Sequence[tuple[int, int, int, int, int | None]] = ()
    """For each stage: its definition, then the same as for a replica. The duration is None if it did not end."""
    device_ms: Sequence[float | None] | None = None
    """Device times of CALL_PHASES, then of the replicas or stages; None if the call used no GPU."""
    untimed_reason: int = 0
    """Why a device time is None: a number of Untimed."""

    @property
    def replica_or_stage_device_ms(self) -> Sequence[float | None]:
        """Device times of the replicas or stages, in order; empty if unknown."""
        return (self.device_ms or ())[len(CALL_PHASES) :]

    @property
    def phase_device_ms(self) -> dict[str, float | None]:
        """Device times (ms) of the phases that ran, by name; None: unknown."""
        triples = zip(CALL_PHASES, self.phases, self.device_ms or (), strict=False)
        return {name: ms for name, phase, ms in triples if phase is not None}


class CallRow(NamedTuple):
    """A call as its step holds it. Its layout, inputs and outputs are numbers of definitions; times in ns."""

    call: int
    """Its number in the process."""
    flags: int
    """TRAINING, GRAD, FAILED, VIRTUAL, DP and BY_SCRIPT (the script composed it) of dpmon.record.span_format.Flag."""
    layout: int
    start: int
    """On the same clock as the start of its step."""
    wall: int
    inputs: int
    outputs: int
    parts: CallParts | None = None
    """None if it has no phases, and a single replica that takes the whole call."""

    @property
    def mode(self) -> str:
        """The mode in which it ran."""
        return mode_of(self.flags)

    @property
    def parts_or_replica(self) -> CallParts:
        """Its parts, with the single replica if `parts` is None."""
        return self.parts or CallParts(replicas=((self.inputs, self.outputs, 0, self.wall),))

    @property
    def end(self) -> int:
        """The time at which it ended."""
        return self.start + self.wall

    @property
    def failed(self) -> bool:
        """Whether it raised an exception."""
        return bool(self.flags & Flag.FAILED)

    @property
    def definitions(self) -> set[int]:
        """The numbers of all definitions that it refers to."""
        parts = self.parts_or_replica
        numbers = {self.layout, self.inputs, self.outputs}
        for inputs, outputs, _, _ in parts.replicas:
            numbers |= {inputs, outputs}
        for stage, inputs, outputs, _, _ in parts.stages:
            numbers |= {stage, inputs, outputs}
        return numbers - {0}

    def with_device_times(self, device_ms: Sequence[float | None], untimed_reason: int) -> CallRow:
        """Return the call with these device times. `untimed_reason`: the number of Untimed that explains each None."""
        return self._replace(parts=self.parts_or_replica._replace(device_ms=device_ms, untimed_reason=untimed_reason))


def mode_of(flags: int) -> str:
    """Return the mode of a call with these flags."""
    return "dp" if flags & Flag.DP else "single"


class Batches(NamedTuple):
    """The batches that a step fetched from a DataLoader."""

    loop: int
    """Number of the loop over a DataLoader in its process, from 1."""
    dataset: int
    """Number of the dataset in its process, from 1."""
    length: int | None
    """Number of batches of the loader; None if unknown."""
    fetched: int
    is_exhausted: bool = False
    """Whether the loader reached its end before the step ended, so that no batch that was read ahead is left."""


class Step(NamedTuple):
    """One step of the training loop with its calls, or calls that no step holds. Times in ns.

    As the assembler's row, it has a monotonic start, process 0 and no rank, because these follow from its ring. In the
    history, the start counts from the run's start.
    """

    process: int
    rank: int | None
    step: int
    """Its number, from 1. Otherwise, it is no step of a loop: 0 for calls outside the steps, -n for calls of step n
    that the step does not hold, because it did not end."""
    mode: str
    start_ns: int
    wall_ns: int
    samples: int | None
    phases: Mapping[str, int]
    """Durations of the phases that ran, in the order of STEP_PHASES. "other" always exists; empty if only its calls are
    known."""
    counts: Mapping[str, int] = {}
    """Its known quantities (dpmon.record.schema.QUANTITIES) except its samples, and its SYNC_NUMBER."""
    runs: Sequence[tuple[int, int, int]] = ()
    """For each occurrence of a phase: the phase (an index in SPAN_PHASES, or BUCKET), the offset from the step's start
    and the duration. In order of start, outer before nested ones; at most MAX_SPANS."""
    missing_spans: int = 0
    """Number of occurrences beyond MAX_SPANS, which are not in `runs`."""
    times: Sequence[float | None] | None = None
    """Device times (ms) of SPAN_PHASES; None if the step used no GPU."""
    why: int = 0
    """Why a device time is None: a number of Untimed."""
    exposed_ns: int | None = None
    """Exposed communication of its sync passes; None if unknown."""
    wait_ns: int | None = None
    """Wait for the slowest rank in these passes; None if unknown."""
    loop: int | None = None
    """In the history: number of the loop over a DataLoader that its batches came from; None without a loader."""
    batch: int | None = None
    """In the history: number of batches of that loop that were used until the step ended; None if unknown."""
    batches: Batches | None = None
    """In the assembler's row: its batches; None if it fetched none."""
    kind: int = TRAINING
    """A key of STEP_KINDS. `step` counts the steps of this kind."""
    calls: Sequence[CallRow] = ()
    """Its calls, with consecutive numbers."""
    is_slowed: bool = False
    """In the assembler's row: whether dpmon counted its FLOPs or profiled it, which takes time."""

    @property
    def takes_time(self) -> bool:
        """Whether the activities of the process include this time: it is a step or a single pass through a model."""
        return bool(self.phases)

    def with_device_times(self, times: Sequence[float | None], why: int) -> Step:
        """Return the step with these device times. `why`: the number of Untimed that explains each None."""
        return self._replace(times=times, why=why)

    def quantity(self, name: str) -> int | None:
        """Return one of dpmon.record.schema.QUANTITIES; None if unknown."""
        return self.samples if name == "samples" else self.counts.get(name)

    @property
    def quantities(self) -> dict[str, int]:
        """Its known quantities by name, without its samples."""
        return {name: count for name, count in self.counts.items() if name != SYNC_NUMBER}

    @property
    def sync_number(self) -> int | None:
        """Number of its last sync pass, which is the same on all ranks; None if it has none."""
        return self.counts.get(SYNC_NUMBER)

    @property
    def spans(self) -> tuple[PhaseSpan, ...]:
        """Occurrences of its phases in order of start, outer before nested ones."""
        return tuple(
            [
                PhaseSpan(SPAN_PHASES[phase], offset, duration)
                for phase, offset, duration in self.runs
                if phase != BUCKET
            ]
        )

    @property
    def buckets(self) -> tuple[int, ...]:
        """Time from the step's start until each bucket of gradients was ready (ns); empty if unknown."""
        return tuple([offset for phase, offset, _ in self.runs if phase == BUCKET])

    @property
    def device_ms(self) -> dict[str, float | None] | None:
        """Device times of the phases that ran on devices (None: unknown); None if the step used no GPU."""
        if self.times is None:
            return None
        return {name: ms for name, ms in zip(SPAN_PHASES, self.times, strict=False) if name in self.phases}

    @property
    def untimed(self) -> str | None:
        """Why a device time is missing; None if none is."""
        device_times = self.device_ms
        if device_times is None or None not in device_times.values():
            return None
        return untimed_text(self.why)

    @property
    def step_kind(self) -> str:
        """Name of its kind."""
        return STEP_KINDS[self.kind]


@dataclass(frozen=True, slots=True)
class Event:
    """A record of any other kind (mode, pause, process, device, warning, dropped, exit ...): its JSON object."""

    kind: str
    data: Mapping[str, Any]


class Operation(NamedTuple):
    """The sampled collectives of one operation and one size of process group in a period of time."""

    name: str
    size: int
    """Ranks of the group."""
    collectives: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a sampled step. `start_ns` counts from the run's start."""

    process: int
    rank: int | None
    step: int | None
    """The step that ran when it was launched; None between two steps."""
    operation: str
    phase: str
    """Activity of the thread that launched it: forward, backward ...; other for the script's own work."""
    bytes: int
    dtype: str
    group: str
    group_size: int
    ranks: tuple[int, ...] | None
    """None: all ranks, or unknown."""
    backend: str | None
    device: str
    start_ns: int
    host_ns: int
    """Duration of the call that launched it."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """A period, usually one step, in which every collective is recorded. `start_ns` counts from the run's start."""

    process: int
    rank: int | None
    step: int | None
    start_ns: int
    wall_ns: int
    collectives: int | None
    """Number of collectives launched; None if they cannot be recorded."""
    why: str | None = None
    """Why they cannot be recorded."""


Record = Call | Step | Event | Collective | Sampled


def kind_of(record: Record) -> str:
    """Return the record's kind, as in its JSON."""
    return record.kind if isinstance(record, Event) else type(record).__name__.lower()


def count_rows(sizes: Sequence[Size] | None, dim: int) -> int | None:
    """Return the length along `dim` of the first tensor that has this dimension; None if none has it."""
    for size in sizes or ():
        if -len(size.shape) <= dim < len(size.shape):
            return size.shape[dim]
    return None


def count_tokens(inputs: Sequence[Size], outputs: Sequence[Size]) -> int:
    """Return the number of elements of the input of a call that has tokens; 0 if there is none.

    It is an integer tensor [batch, sequence] named input_ids, or else one to which an output [batch, sequence, ...] of
    floating-point numbers belongs. So edge indices [2, edges] and categorical features are no tokens.
    """
    tables = [size for size in inputs if len(size.shape) == 2 and size.dtype in ("int64", "int32")]
    shapes = {size.shape[:2] for size in outputs if len(size.shape) > 2 and "float" in size.dtype}
    named = [size.shape for size in tables if size.path.split(".")[-1] == "input_ids"]
    return prod(next(iter(named + [size.shape for size in tables if size.shape in shapes and size.shape[1] > 1]), (0,)))


def untimed_text(reason_number: int) -> str:
    """Return why a device time is unknown, in words, from its number of Untimed."""
    return UNTIMED[reason_number] if 0 < reason_number < len(UNTIMED) else _BEFORE
