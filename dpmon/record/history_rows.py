"""The rows of steps, calls and collectives: the assembler makes them, the store writes them, readers resolve them.

Facts that do not change from batch to batch (names, devices, shapes) are a row of their own, a definition. Other rows
refer to it by number. A `Resolver` knows the definitions and turns rows into records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, NamedTuple

from dpmon.record.record_types import (
    Call,
    CallPhaseTime,
    Collective,
    Event,
    RecordError,
    Replica,
    Sampled,
    Size,
    Stage,
    Step,
    untimed_text,
)
from dpmon.record.shared_names import CALL_PHASES
from dpmon.record.span_format import DOING, Flag

UNENDED = (
    "",
    "it ran on a device, and the host does not wait for its end",
    "it was not complete after 10 s",
    "the process ended before it was complete",
    "gloo does not report when a reduce_scatter is complete",
)
"""Why the end of a collective is unknown: the texts for the numbers of `dpmon.record.shared_names.Unended`."""
MAX_DEFINITIONS = 1 << 16
"""Most definitions of each sort of a process. Beyond this limit, readers drop the oldest."""
_LARGEST = 1 << 53
_MAX_DEVICES = 4096
"""Most devices of a layout, because each device takes memory in every call."""
_NO_PHASES = (None,) * len(CALL_PHASES)
_made = tuple.__new__

# ------------------------------------------------------------------------------------------------ rows


class Definition(NamedTuple):
    """A layout, stage or collective (the members of the class), or a list of sizes. `value` is as in JSON.

    A size is a list: path, shape, dtype, bytes, and the global shape for a DTensor.
    """

    number: int
    value: Any


class CallParts(NamedTuple):
    """The parts of a call. Each begins `offset` after the call (ns)."""

    phases: Sequence[tuple[int, int] | None] = _NO_PHASES
    """Offset and duration of each of CALL_PHASES; None if it did not run."""
    replicas: Sequence[tuple[int, int, int, int]] = ()
    """Inputs and outputs (definitions, 0 unknown), offset and duration of each replica."""
    stages: Sequence[tuple[int, int, int, int, int | None]] = ()
    """Definition of each stage, then the same as for a replica; the duration is None if the stage did not end."""
    device_ms: Sequence[float | None] | None = None
    """Device times of CALL_PHASES, then of the replicas or stages; None if the call used no GPU."""
    why: int = 0
    """Why a device time is None: a number of Untimed."""

    @property
    def of_devices(self) -> Sequence[float | None]:
        """Device times of the replicas or stages, in order; empty if unknown."""
        return (self.device_ms or ())[len(CALL_PHASES) :]

    @property
    def of_phases(self) -> dict[str, float | None]:
        """Device times of the phases that ran."""
        named = zip(CALL_PHASES, self.phases, self.device_ms or (), strict=False)
        return {name: ms for name, at, ms in named if at is not None}


class CallRow(NamedTuple):
    """A call. Times in ns."""

    step: int
    call: int
    mode: str
    flags: int
    """The lowest four of dpmon.record.span_format.Flag."""
    layout: int
    start: int
    """Monotonic; in the history, since the run's start. The same holds for other rows."""
    wall: int
    inputs: int
    outputs: int
    parts: CallParts | None = None
    """None: it has no phases, and one replica that takes the whole call."""

    @property
    def parts_or_replica(self) -> CallParts:
        """Its parts; if `parts` is None, the single replica."""
        return self.parts or CallParts(replicas=((self.inputs, self.outputs, 0, self.wall),))

    @property
    def end(self) -> int:
        """When it ended."""
        return self.start + self.wall

    @property
    def evaluates(self) -> bool:
        """Whether it belongs to an evaluation: neither in training mode nor with gradients."""
        return not self.flags & (Flag.TRAINING | Flag.GRAD)

    @property
    def failed(self) -> bool:
        """Whether it raised an exception."""
        return bool(self.flags & Flag.FAILED)

    @property
    def definitions(self) -> set[int]:
        """The numbers of all definitions that it refers to."""
        parts = self.parts_or_replica
        inner = [*(one[:2] for one in parts.replicas), *(one[:3] for one in parts.stages)]
        return {self.layout, self.inputs, self.outputs}.union(*inner) - {0}

    def timed(self, times: Sequence[float | None], why: int) -> CallRow:
        """Return the call with device times."""
        return self._replace(parts=self.parts_or_replica._replace(device_ms=times, why=why))


class CollectiveRow(NamedTuple):
    """A collective, or a sample if `definition` is 0: a period in which all collectives are recorded.

    If the definition has no operation, it gives the reason why there are no samples.
    """

    number: int
    """Number of its span."""
    definition: int
    phase: int
    """Kind of the span in which it was launched; 0 for none."""
    unended: int
    """Why its end is unknown: a number of Unended."""
    step: int
    """The step that ran at its start, or at the middle of a sample; 0 for none."""
    start: int
    """When it was launched."""
    took: int
    """ns from the launch to its end; -1 if unknown."""
    queued: int
    """ns from the launch to the end of the collectives launched earlier on its group; -1 if unknown."""
    quantity: int
    """Bytes of a collective, or number of collectives of a sample."""

    @property
    def time_of_step(self) -> int:
        """The time that decides to which step it belongs: the launch of a collective, the middle of a sample."""
        return self.start if self.definition else self.start + self.took // 2


class LossRow(NamedTuple):
    """The value from which a backward pass began."""

    definition: int
    """The place of the call. If it says why there is no value, `loss` is NaN."""
    step: int
    """The step of the pass; 0 if unknown."""
    start: int
    loss: float

    @property
    def time_of_step(self) -> int:
        """The time that decides to which step it belongs."""
        return self.start


Row = CallRow | Step | CollectiveRow | LossRow | Definition | Event
"""A row that the assembler makes."""

# ------------------------------------------------------------------------------------------------ records


class Layout(NamedTuple):
    """How the calls of one module run."""

    root: str
    via: str | None
    devices: tuple[str, ...]
    absent: Mapping[str, str]
    dim: int = 0
    """The dimension of the batch."""
    module: int | None = None
    """Number of the module; a bare model and its wrapper have the same number."""


class StageParts(NamedTuple):
    """What runs on one device of a model on several devices."""

    device: str
    parts: tuple[str, ...]


class CollectiveDefinition(NamedTuple):
    """What collectives of one operation on one process group share, or `why` none can be recorded."""

    operation: str | None
    group: str = ""
    dtype: str = ""
    device: str = ""
    backend: str | None = None
    size: int = 0
    ranks: tuple[int, ...] | None = None
    why: str | None = None


class LossSite(NamedTuple):
    """A line that calls backward, or `why` the losses there cannot be read."""

    place: str
    why: str | None = None


Defined = Layout | StageParts | CollectiveDefinition | LossSite | tuple[Size, ...]


def parse_definition(value: Any) -> Defined:
    """Return what a definition defines. Raises LookupError, ValueError, TypeError or AttributeError if damaged."""
    if isinstance(value, list):
        return tuple([_parse_size(*one) for one in value])
    if "parts" in value:
        return StageParts(str(value["device"]), tuple(map(str, value["parts"])))
    if "operation" in value:
        return _parse_collective(value)
    if "place" in value:
        return LossSite(str(value["place"]), _text(value["why"]))
    absent = {str(key): str(reason) for key, reason in value["absent"].items()}
    devices, module = tuple(map(str, value["devices"])), value.get("module")
    if len(devices) > _MAX_DEVICES:
        raise ValueError("more devices than a machine has")
    dim = _whole(value.get("dim", 0))
    return Layout(str(value["root"]), _text(value["via"]), devices, absent, dim, module and _whole(module))


def serialize_definition(known: Defined) -> Any:
    """Return the value of a definition."""
    if isinstance(known, (Layout, StageParts, CollectiveDefinition, LossSite)):
        return known._asdict()
    return [
        [size.path, size.shape, size.dtype, size.bytes, *(() if size.global_shape is None else [size.global_shape])]
        for size in known
    ]


def _parse_size(path: object, shape: Any, dtype: object, count: object, whole: Any = None) -> Size:
    global_shape = None if whole is None else tuple(map(_whole, whole))
    return Size(str(path), tuple(map(_whole, shape)), str(dtype), _whole(count), global_shape)


def _parse_collective(value: Mapping[str, Any]) -> CollectiveDefinition:
    if value["operation"] is None:
        return CollectiveDefinition(None, why=str(value["why"]))
    operation, group, dtype, device = (str(value[name]) for name in ("operation", "group", "dtype", "device"))
    size, backend = _whole(value["size"]), _text(value["backend"])
    ranks = None if value["ranks"] is None else tuple(map(_whole, value["ranks"]))
    if not 0 < size < 1 << 32:
        raise ValueError("an impossible size of a process group")
    return CollectiveDefinition(operation, group, dtype, device, backend, size, ranks)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > _LARGEST:
        raise TypeError("not a number that a run writes")
    return value


_DAMAGE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError)


class Definitions:
    """The definitions of one process by number, of each sort the newest `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.layouts: dict[int, Layout] = {}
        self.sizes: dict[int, tuple[Size, ...]] = {}
        self.stages: dict[int, StageParts] = {}
        self.collectives: dict[int, CollectiveDefinition] = {}
        self.losses: dict[int, LossSite] = {}
        self._tables: dict[type, dict[int, Any]] = {
            Layout: self.layouts,
            tuple: self.sizes,
            StageParts: self.stages,
            CollectiveDefinition: self.collectives,
            LossSite: self.losses,
        }

    def remember(self, number: int, known: Defined) -> None:
        """Remember a definition, and forget the oldest of its sort if there are too many."""
        table = self._tables[type(known)]
        table.pop(number, None)
        table[number] = known
        if len(table) > self._most:
            del table[next(iter(table))]

    def get(self, number: int) -> Defined | None:
        """Return a definition; None if it is unknown."""
        return next((table[number] for table in self._tables.values() if number in table), None)


class Resolver:
    """Turns the rows of one process's calls and collectives into records."""

    def __init__(self, process: int, rank: int | None = None) -> None:
        self._process = process
        self._rank = rank
        self.definitions = Definitions(MAX_DEFINITIONS)

    def define(self, number: int, value: Any) -> None:
        """Remember a definition. Raises RecordError if it is damaged."""
        try:
            self.definitions.remember(number, parse_definition(value))
        except _DAMAGE as error:
            raise RecordError(f"damaged definition: {error}") from None

    def call(self, row: CallRow) -> Call:
        """Return the record of a call. Raises RecordError if the row or a definition is damaged."""
        try:
            return self._call(row)
        except _DAMAGE as error:
            raise RecordError(f"damaged call: {type(error).__name__}: {error}") from None

    def collective(self, row: CollectiveRow) -> Collective | Sampled:
        """Return the record of a collective or a sample. Raises RecordError if the row or a definition is damaged."""
        try:
            return self._collective(row)
        except _DAMAGE as error:
            raise RecordError(f"damaged collective: {type(error).__name__}: {error}") from None

    def loss(self, row: LossRow) -> Event:
        """Return the record of a loss. Raises RecordError if its place is unknown."""
        place = self.definitions.losses.get(row.definition)
        if place is None:
            raise RecordError("a loss without a place")
        known = place.why is None and isfinite(row.loss)
        absent = {} if row.step else {"step": "it is not known in which step the pass ran"}
        absent |= {} if known else {"loss": place.why or repr(row.loss)}
        data = {"process": self._process, "rank": self._rank, "step": row.step or None, "t_s": row.start / 1e9}
        return Event("loss", {**data, "place": place.place, "loss": row.loss if known else None, "absent": absent})

    def _sizes(self, number: int) -> tuple[Size, ...] | None:
        return self.definitions.sizes[number] if number else None

    def _call(self, row: CallRow) -> Call:
        layout, parts = self.definitions.layouts[row.layout], row.parts_or_replica
        sizes, times = self._sizes, iter(parts.of_devices)
        phases = {
            name: CallPhaseTime(*at, None if parts.device_ms is None else parts.device_ms[index])
            for index, (name, at) in enumerate(zip(CALL_PHASES, parts.phases, strict=True))
            if at is not None
        }
        replicas: tuple[Replica, ...] = tuple(
            [
                # The constructor would take twice as long, and this runs millions of times.
                _made(Replica, (i, layout.devices[i], offset, took, sizes(got), sizes(gave), next(times, None)))
                for i, (got, gave, offset, took) in enumerate(parts.replicas)
            ]
        )
        stages = tuple(
            Stage(i, device, names, offset, took, sizes(got), sizes(gave), next(times, None))
            for i, (which, got, gave, offset, took) in enumerate(parts.stages)
            for device, names in (self.definitions.stages[which],)
        )
        absent = layout.absent
        if parts.device_ms is not None:
            absent = {key: text for key, text in absent.items() if key != "device_ms"}
            of_parts: tuple[CallPhaseTime | Replica | Stage, ...] = (*phases.values(), *replicas, *stages)
            if any(part.device_ms is None for part in of_parts):
                absent["device_ms"] = untimed_text(parts.why)
        return Call(
            process=self._process,
            rank=self._rank,
            step=row.step,
            call=row.call,
            root=layout.root,
            via=layout.via,
            mode=row.mode,
            virtual=bool(row.flags & Flag.VIRTUAL),
            training=bool(row.flags & Flag.TRAINING),
            grad=bool(row.flags & Flag.GRAD),
            failed=bool(row.flags & Flag.FAILED),
            start_ns=row.start,
            wall_ns=row.wall,
            devices=layout.devices,
            dim=layout.dim,
            phases=phases,
            replicas=replicas,
            inputs=sizes(row.inputs),
            outputs=sizes(row.outputs),
            absent=absent,
            stages=stages,
        )

    def _collective(self, row: CollectiveRow) -> Collective | Sampled:
        facts = self.definitions.collectives[row.definition] if row.definition else CollectiveDefinition(None)
        start, step = row.start, row.step or None
        if facts.operation is None:
            count = row.quantity if facts.why is None else None
            return Sampled(self._process, self._rank, step, start, max(row.took, 0), count, facts.why)
        return Collective(
            process=self._process,
            rank=self._rank,
            step=step,
            operation=facts.operation,
            phase=DOING.get(row.phase, "other"),
            bytes=row.quantity,
            dtype=facts.dtype,
            group=facts.group,
            group_size=facts.size,
            ranks=facts.ranks,
            backend=facts.backend,
            device=facts.device,
            start_ns=start,
            host_ns=row.took if row.took >= 0 else None,
            queue_ns=row.queued if row.queued >= 0 else None,
            unended=UNENDED[row.unended] if 0 < row.unended < len(UNENDED) else None,
        )
