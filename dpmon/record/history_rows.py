"""The rows of steps, calls and collectives: the assembler makes them, the store writes them, readers resolve them.

Values that do not change from batch to batch (names, devices, shapes) are a row of their own, a definition. Other rows
refer to it by number. A `Resolver` knows the definitions and turns rows into records.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, nan
from typing import Any, NamedTuple

from dpmon.record.record_types import (
    Call,
    CallPhaseTime,
    CallRow,
    Collective,
    Event,
    Replica,
    Sampled,
    Size,
    Stage,
    Step,
    untimed_text,
)
from dpmon.record.shared_names import CALL_PHASES
from dpmon.record.span_format import DOING, Flag

MAX_DEFINITIONS = 1 << 16
"""Maximum number of definitions of each type per process. Beyond this limit, the oldest are dropped."""
_new_tuple = tuple.__new__

# ------------------------------------------------------------------------------------------------ rows


class Definition(NamedTuple):
    """A layout, stage, collective or loss site (an object with the fields of the class), or a list of sizes, as JSON.

    A size is a list: path, shape, dtype, bytes, and for a DTensor the global shape.
    """

    number: int
    value: Any


class CollectiveRow(NamedTuple):
    """A collective; if `definition` is 0, a sample, which is a period in which all collectives are recorded.

    If the definition has no operation, it gives the reason why there are no samples.
    """

    number: int
    """Number of its span."""
    definition: int
    phase: int
    """Kind of the span in which it was launched; 0: none."""
    step: int
    """The step that ran when it was launched, or in the middle of a sample; 0: none."""
    start_ns: int
    """When it was launched."""
    wall_ns: int
    """Duration of the call that launched it, or of the sample."""
    quantity: int
    """Bytes of a collective, or number of collectives in a sample."""
    process: int = 0
    """Like its id, set when it is stored."""
    id: int = 0

    @property
    def time_of_step(self) -> int:
        """The time that decides to which step it belongs: the launch of a collective, the middle of a sample."""
        return self.start_ns if self.definition else self.start_ns + self.wall_ns // 2


class LossRow(NamedTuple):
    """The value from which a backward pass began."""

    definition: int
    """Number of the LossSite. If that says why there is no value, `loss` is NaN."""
    step: int
    """The step of the pass; 0 if unknown."""
    t_ns: int
    loss: float | None
    """None: NaN, in a row that was stored."""
    process: int = 0
    """Like its id, set when it is stored."""
    id: int = 0

    @property
    def value(self) -> float:
        """The loss, which may be NaN."""
        return nan if self.loss is None else self.loss

    @property
    def time_of_step(self) -> int:
        """The time that decides to which step it belongs."""
        return self.t_ns


Row = Step | CollectiveRow | LossRow | Definition | Event
"""A row that the assembler builds."""

# ------------------------------------------------------------------------------------------------ records


class Layout(NamedTuple):
    """The devices and the mode in which the calls of one module run."""

    root: str
    via: str | None
    devices: tuple[str, ...]
    absent: Mapping[str, str]
    dim: int = 0
    """The batch dimension."""
    module: int = 0
    """Number of the module; a bare model and its wrapper have the same number."""

    @property
    def can_have_replicas(self) -> bool:
        """Whether a call that is not divided is a single replica."""
        return bool(self.devices) and "replicas" not in self.absent


class StageParts(NamedTuple):
    """The parts of a model that run on one of its devices."""

    device: str
    parts: tuple[str, ...]


class CollectiveDefinition(NamedTuple):
    """The properties that collectives of one operation on one process group share, or `why` none can be recorded."""

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
    """Return the object in the JSON of a definition."""
    if isinstance(value, list):
        return tuple([_parse_size(*size) for size in value])
    if "parts" in value:
        return StageParts(value["device"], tuple(value["parts"]))
    if "operation" in value:
        ranks = value.get("ranks")
        return CollectiveDefinition(**{**value, "ranks": None if ranks is None else tuple(ranks)})
    if "place" in value:
        return LossSite(**value)
    return Layout(**{**value, "devices": tuple(value["devices"])})


def _parse_size(path: str, shape: Sequence[int], dtype: str, byte_count: int, lengths: Any = None) -> Size:
    return Size(path, tuple(shape), dtype, byte_count, None if lengths is None else tuple(lengths))


class Definitions:
    """The definitions of one process by number: the newest MAX_DEFINITIONS of each type."""

    def __init__(self) -> None:
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

    def remember(self, number: int, definition: Defined) -> None:
        """Remember a definition, and drop the oldest of its type if there are too many."""
        table = self._tables[type(definition)]
        table.pop(number, None)
        table[number] = definition
        if len(table) > MAX_DEFINITIONS:
            del table[next(iter(table))]

    def module(self, layout: int) -> int:
        """Return the module of a layout; an unused number if it is unknown."""
        known = self.layouts.get(layout)
        return -1 - layout if known is None else known.module


def _missing_primitives(row: CallRow, phases: Mapping[str, CallPhaseTime]) -> dict[str, str]:
    """Return why fields of a call that the script composed are absent, by name."""
    absent = {}
    if "scatter" not in phases:
        absent["scatter"] = "the script did not scatter in this step"
        absent["inputs"] = "the script did not scatter: only the inputs of the replicas are known"
    if "replicate" not in phases:
        absent["replicate"] = "the script did not replicate in this step"
    if not (row.outputs or row.failed):
        absent["gather"] = absent["outputs"] = "the script did not gather the outputs of the replicas"
    return absent


class Resolver:
    """A converter from the rows of one process's calls, collectives and losses to records.

    A very long run has more definitions than are kept. A row whose layout or stage is lost gives no record; lost sizes
    are unknown.
    """

    def __init__(self, process: int, rank: int | None = None) -> None:
        self._process = process
        self._rank = rank
        self.definitions = Definitions()

    def call(self, step: Step, row: CallRow) -> Call | None:
        """Return the record of a call of `step`; None if its layout or a stage is lost."""
        try:
            return self._call(step, row)
        except KeyError:
            return None

    def collective(self, row: CollectiveRow) -> Collective | Sampled | None:
        """Return the record of a collective or a sample; None if its definition is lost."""
        step, definition = row.step or None, CollectiveDefinition(None)
        if row.definition:
            if row.definition not in self.definitions.collectives:
                return None
            definition = self.definitions.collectives[row.definition]
        if definition.operation is None:
            count = row.quantity if definition.why is None else None
            return Sampled(self._process, self._rank, step, row.start_ns, row.wall_ns, count, definition.why)
        return Collective(
            process=self._process,
            rank=self._rank,
            step=step,
            operation=definition.operation,
            phase=DOING.get(row.phase, "other"),
            bytes=row.quantity,
            dtype=definition.dtype,
            group=definition.group,
            group_size=definition.size,
            ranks=definition.ranks,
            backend=definition.backend,
            device=definition.device,
            start_ns=row.start_ns,
            host_ns=row.wall_ns,
        )

    def loss(self, row: LossRow) -> Event | None:
        """Return the record of a loss; None if its line is lost."""
        site = self.definitions.losses.get(row.definition)
        if site is None:
            return None
        is_known = site.why is None and isfinite(row.value)
        absent = {}
        if not row.step:
            absent["step"] = "it is not known in which step the pass ran"
        if not is_known:
            absent["loss"] = site.why or repr(row.value)
        data = {"process": self._process, "rank": self._rank, "step": row.step or None, "t_s": row.t_ns / 1e9}
        return Event("loss", {**data, "place": site.place, "loss": row.loss if is_known else None, "absent": absent})

    def _call(self, step: Step, row: CallRow) -> Call:
        layout, parts = self.definitions.layouts[row.layout], row.parts_or_replica
        sizes, device_times = self.definitions.sizes.get, iter(parts.replica_or_stage_device_ms)
        phase_times = parts.device_ms or (None,) * len(CALL_PHASES)
        phases = {
            name: CallPhaseTime(*offset_and_duration, phase_times[index])
            for index, (name, offset_and_duration) in enumerate(zip(CALL_PHASES, parts.phases, strict=True))
            if offset_and_duration is not None
        }
        replicas: tuple[Replica, ...] = tuple(
            [
                # The constructor would take twice as long, and this runs millions of times.
                _new_tuple(
                    Replica,
                    (i, layout.devices[i], offset, duration, sizes(inputs), sizes(outputs), next(device_times, None)),
                )
                for i, (inputs, outputs, offset, duration) in enumerate(parts.replicas)
            ]
        )
        stages = tuple(
            Stage(i, device, names, offset, duration, sizes(inputs), sizes(outputs), next(device_times, None))
            for i, (definition, inputs, outputs, offset, duration) in enumerate(parts.stages)
            for device, names in (self.definitions.stages[definition],)
        )
        absent = layout.absent
        if row.flags & Flag.BY_SCRIPT:
            absent = {**absent, **_missing_primitives(row, phases)}
        if parts.device_ms is not None:
            absent = {key: text for key, text in absent.items() if key != "device_ms"}
            timed_parts: tuple[CallPhaseTime | Replica | Stage, ...] = (*phases.values(), *replicas, *stages)
            if any(part.device_ms is None for part in timed_parts):
                absent["device_ms"] = untimed_text(parts.untimed_reason)
        return Call(
            process=self._process,
            rank=self._rank,
            step=abs(step.step) or None,
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
            kind=step.kind,
        )
