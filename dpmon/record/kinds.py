"""What a record is to everybody but the training process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpmon.errors import DpmonError

__all__ = [
    "Call",
    "Collective",
    "Event",
    "PartTimes",
    "Phase",
    "PhaseSpan",
    "Record",
    "RecordError",
    "Replica",
    "Sampled",
    "Size",
    "Stage",
    "Step",
    "bus_factor",
    "collective_in",
    "is_evaluation",
    "rows_of",
]


class RecordError(DpmonError):
    """Bytes that are no record of ours, or refer to a definition that was not seen."""


@dataclass(frozen=True, slots=True)
class Size:
    """One tensor among the arguments or results: where it is, its shape, dtype and bytes (elements times item size).

    For a DTensor, which is divided among ranks, shape and bytes are those of this rank's part.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    global_shape: tuple[int, ...] | None = None
    """Of a DTensor; None for any other tensor."""


class Phase(NamedTuple):
    """A phase of a call: start after the call's own start and duration, in ns; device time in ms or None."""

    offset_ns: int
    host_ns: int
    device_ms: float | None = None


class PhaseSpan(NamedTuple):
    """One time that a phase of a step ran: start after the step's start and duration, in ns."""

    phase: str
    offset_ns: int
    host_ns: int


class Replica(NamedTuple):
    """One share of a call. Sizes are None where they could not be seen; offset_ns counts from the call's start."""

    replica: int
    device: str
    offset_ns: int
    host_ns: int
    inputs: tuple[Size, ...] | None
    outputs: tuple[Size, ...] | None
    device_ms: float | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """What one device did in a call of a model that lies on several devices: its parts ran one after the other.

    What a stage but the first received has crossed from the device of the one before. host_ns None: it did not end.
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
    def crossed(self) -> int | None:
        """Bytes that came from the device of the stage before; None for the first stage, or if they were not seen."""
        return None if self.stage == 0 or self.inputs is None else sum(size.bytes for size in self.inputs)


@dataclass(frozen=True, slots=True)
class Call:
    """One top-level forward; start_ns counts from the run's start."""

    process: int
    rank: int | None
    step: int
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
    phases: Mapping[str, Phase]
    replicas: tuple[Replica, ...]
    inputs: tuple[Size, ...] | None
    outputs: tuple[Size, ...] | None
    absent: Mapping[str, str] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    """Of a model that lies on several devices; it has no replicas."""

    @property
    def evaluates(self) -> bool:
        """Whether it is an evaluation's: a model may be trained in eval mode, or look ahead without gradients."""
        return not (self.training or self.grad)

    @property
    def rows(self) -> int | None:
        """Rows of the batch: the first tensor's size along dimension 0; None if it has none."""
        return rows_of(self.inputs)

    def __deepcopy__(self, memo: object) -> Call:
        """Nobody changes a record, so copies of what holds it share it."""
        return self


class PartTimes(NamedTuple):
    """What the devices took for each replica or stage of a call, in ms (None: not known), and why one is not known."""

    ms: Sequence[float | None]
    why: str

    def of(self, index: int) -> float | None:
        """Of the part at `index`."""
        return self.ms[index] if index < len(self.ms) else None


@dataclass(frozen=True, slots=True)
class Step:
    """One turn of the training loop; phases in ns, those that did not run are missing ("other" is always there)."""

    process: int
    rank: int | None
    step: int
    mode: str
    start_ns: int
    wall_ns: int
    samples: int | None
    phases: Mapping[str, int]
    device_ms: Mapping[str, float | None] | None = None
    """What its devices took for the phases that ran on them; None: no device's time was looked at."""
    untimed: str | None = None
    """Why one of those is missing."""
    quantities: Mapping[str, int] = field(default_factory=dict)
    """The quantities that it has beside its samples, by name."""
    spans: tuple[PhaseSpan, ...] | None = None
    """When its phases ran, in order of start, enclosing before enclosed; None: an earlier version recorded it."""
    missing_spans: int = 0
    """How many came after those."""
    buckets: tuple[int, ...] = ()
    """When each bucket of gradients was ready, in ns after the step's start; empty if it is not known."""
    sync_number: int | None = None
    """Number of its last synchronised backward pass, the same on all ranks; None if it has none."""
    exposed_ns: int | None = None
    """Communication of its synchronised passes that no computation hid; None if it is not known."""
    wait_ns: int | None = None
    """How long it waited in them for the slowest rank; None if it is not known."""

    def quantity(self, name: str) -> int | None:
        """One of dpmon.record.schema.QUANTITIES; None if it is not known."""
        return self.samples if name == "samples" else self.quantities.get(name)

    @property
    def evaluation(self) -> bool:
        """Whether it belongs to an evaluation, if other steps of its mode train."""
        return is_evaluation(self.phases.get("backward"), self.phases.get("optimizer"))


@dataclass(frozen=True, slots=True)
class Event:
    """Everything that is rare (mode, pause, process, device, warning, dropped, exit): its JSON object as it is."""

    kind: str
    data: Mapping[str, Any]


_HALF = ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")
"""Operations in which a rank keeps its own part of the bytes, so that it sends (n-1)/n of them."""


def bus_factor(operation: str, size: int) -> float:
    """Bus bandwidth over algorithm bandwidth in a group of `size` ranks (nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (size - 1) / size
    return (size - 1) / size if operation in _HALF else 1.0


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a sampled step; start_ns counts from the run's start."""

    process: int
    rank: int | None
    step: int | None
    """The step under way when it was launched; None: it lies between two steps."""
    operation: str
    phase: str
    """Activity of the thread that launched it: forward, backward ...; other for the script's own work."""
    bytes: int
    dtype: str
    group: str
    size: int
    ranks: tuple[int, ...] | None
    """None: all of them, or they are not known."""
    backend: str | None
    device: str
    start_ns: int
    took_ns: int | None
    """From its launch until it was complete."""
    queued_ns: int | None
    """From its launch until those launched before on its group were complete."""
    unended: str | None = None
    """Why its end is unknown."""

    @property
    def alg_bytes_s(self) -> float | None:
        """Algorithm bandwidth; None if it is unknown."""
        if self.took_ns is None or not self.bytes:
            return None
        ran = self.took_ns - (self.queued_ns or 0)
        return self.bytes / ran * 1e9 if ran > 0 else None

    @property
    def bus_bytes_s(self) -> float | None:
        """Bus bandwidth; None if it is unknown."""
        found = self.alg_bytes_s
        return None if found is None else found * bus_factor(self.operation, self.size)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A time, mostly one step, in which every collective was recorded; start_ns counts from the run's start."""

    process: int
    rank: int | None
    step: int | None
    start_ns: int
    wall_ns: int
    collectives: int | None
    """How many were launched; None: they cannot be recorded."""
    why: str | None = None
    """Why they cannot be recorded."""


def collective_in(value: Mapping[str, Any]) -> dict[str, Any]:
    """The facts in the definition of a collective; LookupError, TypeError or ValueError if it is damaged."""
    if value["operation"] is None:
        return {"operation": None, "why": str(value["why"])}
    ranks, backend = value["ranks"], value["backend"]
    found: dict[str, Any] = {name: str(value[name]) for name in ("operation", "group", "dtype", "device")}
    found["backend"] = None if backend is None else str(backend)
    size = int(value["size"])
    if not 0 < size < 1 << 32:
        raise ValueError("no size of a process group")
    return {**found, "size": size, "ranks": None if ranks is None else [int(rank) for rank in ranks]}


Record = Call | Step | Event | Collective | Sampled


def rows_of(sizes: Sequence[Size] | None) -> int | None:
    """Rows of the first tensor that has a dimension, None if there is none."""
    for size in sizes or ():
        if size.shape:
            return size.shape[0]
    return None


def is_evaluation(backward: int | None, optimizer: int | None) -> bool:
    """Whether a step with these phases (None or negative: did not run) belongs to an evaluation.

    This holds if other steps of its mode train. A batch that the script skips cannot be told from an evaluation.
    """
    return (backward is None or backward < 0) and (optimizer is None or optimizer < 0)
