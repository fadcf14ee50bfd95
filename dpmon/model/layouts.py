"""The inputs, outputs and times of a run's replicas, processes and stages, with their numbers of calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from dpmon.record.history_rows import Definitions, Layout
from dpmon.record.record_types import UNTIMED, count_rows
from dpmon.record.schema import TRAINING, device_series, step_kind
from dpmon.record.shared_names import RANK_MODES
from dpmon.store.shapes import CallShape
from dpmon.store.tally import SeriesStats, Tally
from dpmon.store.tally_keys import TallyKey
from dpmon.store.tally_tables import replica_series, stage_series

_TENSORS_NAMED = 4
_PARTS_NAMED = 4


def format_sizes(inputs: str | None, outputs: str | None, unfinished: str = "sizes not seen") -> str:
    """Return the sizes received and returned as text; `unfinished` takes the place of unknown outputs."""
    return f"{inputs or 'sizes not seen'} -> {outputs or unfinished}"


class PartTimes:
    """The columns of tables that replicas and stages share."""

    __slots__ = ()
    time: SeriesStats
    on_device: SeriesStats
    reasons: Counter[str]

    def add_times(self, tallies: Iterable[Tally], *names: str) -> None:
        """Add the host times and the device times of some series in all tallies."""
        for tally in tallies:
            for name in names:
                self.time.merge(tally.stat(name))
                self.on_device.merge(tally.stat(device_series(name)))

    @property
    def host_ns(self) -> float | None:
        """The median time on the host."""
        return self.time.median

    @property
    def device_ns(self) -> float | None:
        """The median time on the device."""
        return self.on_device.median

    @property
    def device_calls(self) -> int:
        """Number of calls with a known device time."""
        return self.on_device.count

    @property
    def untimed(self) -> str | None:
        """Why no call has a device time, if the record gives a reason."""
        return None if self.on_device.count else most_common(self.reasons)


@dataclass(slots=True)
class StageSizes(PartTimes):
    """The inputs and outputs of one stage of a model on several devices. Times cover only calls in which it ended."""

    root: str
    stage: int
    device: str
    parts: tuple[str, ...]
    inputs: str | None
    outputs: str | None
    calls: int = 0
    time: SeriesStats = field(default_factory=SeriesStats)
    on_device: SeriesStats = field(default_factory=SeriesStats)
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of calls without a device time, by reason."""

    @property
    def flow(self) -> str:
        """The first parts and the number of others, then the sizes received and returned."""
        more = len(self.parts) - _PARTS_NAMED
        parts = ", ".join(self.parts[:_PARTS_NAMED]) + (f" and {more} more" if more > 0 else "")
        return f"{parts}: {format_sizes(self.inputs, self.outputs, 'not finished')}"


class IdleDeviceCounts(NamedTuple):
    """The calls of one root under dp: how often devices received no rows."""

    root: str
    devices: int
    calls: int
    idle_calls: int
    """Calls in which some devices received no rows."""
    rows: int | None
    """The most frequent number of rows of the batch in those calls; None if not seen."""
    idle: int
    """The most frequent number of devices without rows in those calls."""


@dataclass(slots=True)
class ReplicaStats(PartTimes):
    """One replica on one device in one mode, over all calls of one kind: the host and device times of its forward."""

    mode: str
    root: str
    replica: int
    device: str
    kind: int = TRAINING
    """A key of STEP_KINDS."""
    calls: int = 0
    rows: int | None = None
    """The rows of this replica in the most frequent split."""
    virtual: bool = False
    time: SeriesStats = field(default_factory=SeriesStats)
    on_device: SeriesStats = field(default_factory=SeriesStats)
    sizes: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    """Number of calls by their inputs and outputs; None: they were not seen."""
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of calls without a device time, by reason."""

    @property
    def label(self) -> str:
        """Its root module, with its number under dp, or else with the mode."""
        return f"{self.root} {self.replica if self.mode == 'dp' else self.mode or '?'}"

    @property
    def sizes_by_calls(self) -> list[tuple[str | None, str | None]]:
        """The inputs and outputs, the most frequent first."""
        return sorted(self.sizes, key=lambda sizes: (-self.sizes[sizes], *(size or "" for size in sizes)))

    @property
    def flow(self) -> str:
        """The most frequent sizes received and returned, and the number of others."""
        (inputs, outputs), *others = self.sizes_by_calls
        text = format_sizes(inputs, outputs)
        if others:
            text += f" (+{len(others)} other size{'s' if len(others) > 1 else ''})"
        return text


class CallLayouts:
    """The shapes of a run's calls, with their definitions."""

    def __init__(self, shapes: Sequence[CallShape], definitions: Mapping[int, Definitions]) -> None:
        """`definitions`: those of each process."""
        self._shapes = [(shape, definitions[shape.process].layouts.get(shape.layout)) for shape in shapes]
        self._definitions = definitions
        kinds = [step_kind(shape.kind) for shape in shapes]
        self.main_kind = TRAINING if TRAINING in kinds else max(kinds, key=kinds.count, default=TRAINING)
        """The kind of calls that describes the run."""
        self.processes = {shape.process for shape in shapes}
        """Processes with calls."""
        self.known_shapes = [(shape, layout) for shape, layout in self._shapes if layout is not None]
        """The shapes whose layouts are known."""
        self.virtual = any(shape.virtual for shape, _ in self.known_shapes)
        """Whether a call had virtual replicas."""
        self.distributed_by_kind = {
            step_kind(shape.kind): layout.via for shape, layout in self.known_shapes if layout.via in RANK_MODES
        }
        """By kind of calls: how the run's ranks called one model together, a key of RANK_MODES."""
        self.distributed = next(iter(self.distributed_by_kind.values()), None)
        """How the run's ranks trained one model together; None if they did not."""

    def usual_input_share(self, process: int) -> float:
        """Return the share of training calls with the most frequent inputs of their layout (0 to 1); 1 if none."""
        counts: defaultdict[int, Counter[int]] = defaultdict(Counter)
        for shape, _ in self._shapes:
            if shape.process == process and step_kind(shape.kind) == self.main_kind:
                counts[shape.layout][shape.inputs] += shape.calls
        usual = sum(max(sizes.values()) for sizes in counts.values())
        return usual / sum(sizes.total() for sizes in counts.values()) if counts else 1.0

    def rows(self, process: int, number: int, layout: Layout) -> int | None:
        """Return the rows in a definition of sizes: those of the first tensor in the batch dimension of the layout."""
        return count_rows(self._definitions[process].sizes.get(number), layout.dim)

    def calls(self, mode: str, kind: int) -> int:
        """Return the number of calls of a mode and kind, including those outside steps."""
        return sum(shape.calls for shape, _ in self._shapes if (shape.mode, step_kind(shape.kind)) == (mode, kind))

    @property
    def all_calls(self) -> int:
        """Number of all calls, including those outside steps."""
        return sum(shape.calls for shape, _ in self._shapes)

    def have_only_ranks(self) -> bool:
        """Return whether all calls are those of ranks in one mode, whose sizes the table of ranks has."""
        modes = {(_mode_of_calls(shape, layout), step_kind(shape.kind)) for shape, layout in self.known_shapes}
        return self.distributed is not None and len(modes) == 1

    def of_process(self, process: int) -> tuple[str, str | None, str | None, int]:
        """Return the devices, and of calls of the main kind, the most frequent inputs and outputs, and the number."""
        groups: Counter[tuple[bool, str, int, int, tuple[tuple[int, int], ...]]] = Counter()
        for shape, _ in self._shapes:
            if shape.process == process:
                is_main = step_kind(shape.kind) == self.main_kind
                groups[is_main, shape.mode, shape.virtual, shape.layout, shape.replicas] += shape.calls
        if not groups:
            return "?", None, None, 0
        _, _, _, number, pairs = max(groups, key=lambda group: (group[0], groups[group]))
        layout = self._definitions[process].layouts.get(number)
        input_number, output_number = pairs[0] if len(pairs) == 1 else (0, 0)
        devices = "?" if layout is None else " ".join(layout.devices)
        return (
            devices,
            self.sizes_text(process, input_number),
            self.sizes_text(process, output_number),
            sum(calls for (is_main, *_), calls in groups.items() if is_main),
        )

    def stages(self, tallies: Mapping[int, Mapping[TallyKey, Tally]]) -> list[StageSizes]:
        """Return the inputs and outputs of each stage, by root and stage, then by calls. `tallies`: of each process."""
        lines: dict[tuple[object, ...], StageSizes] = {}
        timed: set[tuple[int, str]] = set()
        for shape, layout in self.known_shapes:
            reason = why_untimed(layout, shape.untimed)
            for index, (number, inputs, outputs) in enumerate(shape.stages):
                stage = self._definitions[shape.process].stages.get(number)
                if stage is None:
                    continue
                sizes = self.sizes_text(shape.process, inputs), self.sizes_text(shape.process, outputs)
                line = StageSizes(layout.root, index, *stage, *sizes)
                line = lines.setdefault((layout.root, index, *stage, *sizes), line)
                line.calls += shape.calls
                line.reasons.update({} if reason is None else {reason: shape.calls})
                series = stage_series(shape.layout, index, number, inputs, outputs)
                if (shape.process, series) not in timed:
                    timed.add((shape.process, series))
                    line.add_times(tallies.get(shape.process, {}).values(), series)
        return sorted(lines.values(), key=lambda sizes: (sizes.root, sizes.stage, -sizes.calls))

    def untimed_reason(self, process: int) -> str | None:
        """Return the most frequent reason why a process's calls have no device time; None without one."""
        reasons: Counter[str] = Counter()
        for shape, layout in self._shapes:
            reason = why_untimed(layout, shape.untimed) if shape.process == process else None
            reasons.update({} if reason is None else {reason: shape.calls})
        return most_common(reasons)

    def sizes_text(self, process: int, sizes_number: int) -> str | None:
        """Return sizes as text: "[30, 5]" or "x [30, 5], mask [30]"; None if they were not seen.

        A DTensor has both shapes: "[15, 5] of [30, 5]".
        """
        sizes = self._definitions[process].sizes.get(sizes_number)
        if sizes is None:
            return None
        texts = [
            ("" if size.path in ("", "0") else f"{size.path} ")
            + " of ".join(f"{list(shape)}" for shape in (size.shape, size.global_shape) if shape is not None)
            for size in sizes[:_TENSORS_NAMED]
        ]
        others = len(sizes) - _TENSORS_NAMED
        return ", ".join(texts) + (f" and {others} more" if others > 0 else "")


def _mode_of_calls(shape: CallShape, layout: Layout) -> str:
    """Return "dp" or "single"; "ddp" or "fsdp" for calls of ranks that train one model together."""
    return RANK_MODES.get(layout.via or "", shape.mode)


def why_untimed(layout: Layout | None, number: int) -> str | None:
    """Return why calls have no device time: by the number in their records, or by their layout."""
    if 0 < number < len(UNTIMED):
        return UNTIMED[number]
    return None if layout is None else layout.absent.get("device_ms")


def most_common(reasons: Counter[str]) -> str | None:
    """Return the most frequent reason; None without one."""
    return max(reasons, key=lambda reason: reasons[reason], default=None)


# ------------------------------------------------------------------------------------------------ replicas over a run


def count_idle_devices(layouts: CallLayouts) -> list[IdleDeviceCounts]:
    """Return how often devices received no rows under dp, by root."""
    groups: defaultdict[tuple[str, int], Counter[tuple[int, int | None]]] = defaultdict(Counter)
    for shape, layout in layouts.known_shapes:
        if len(layout.devices) > 1 and shape.mode == "dp":
            rows = layouts.rows(shape.process, shape.inputs, layout)
            groups[layout.root, len(layout.devices)][len(shape.replicas), rows] += shape.calls
    idle_counts = []
    for (root, devices), counts in groups.items():
        idle = {(used, rows): calls for (used, rows), calls in counts.items() if used < devices}
        (replicas, rows), _ = max(idle.items(), key=itemgetter(1), default=((devices, None), 0))
        idle_counts.append(
            IdleDeviceCounts(root, devices, counts.total(), sum(idle.values()), rows, devices - replicas)
        )
    return idle_counts


def build_replica_stats(layouts: CallLayouts, tallies: Mapping[int, Mapping[TallyKey, Tally]]) -> list[ReplicaStats]:
    """Return each replica with its rows and times, by kind of its calls.

    `tallies`: of each process. The mode of a step is not always that of its calls: a root that cannot be split also
    runs as single in dp steps.
    """
    lines: dict[tuple[str, str, int, str, int], ReplicaStats] = {}
    splits: defaultdict[tuple[str, str, int], Counter[tuple[int | None, ...]]] = defaultdict(Counter)
    modes_of_layout: defaultdict[tuple[int, int], set[str]] = defaultdict(set)
    for shape, _ in layouts.known_shapes:
        modes_of_layout[shape.process, shape.layout].add(shape.mode)
    timed: set[tuple[int, int, str, int]] = set()
    for shape, layout in layouts.known_shapes:
        mode, kind = _mode_of_calls(shape, layout), step_kind(shape.kind)
        layout_key = shape.process, shape.layout, shape.mode, kind
        other_modes = modes_of_layout[shape.process, shape.layout] - {shape.mode}
        own_tallies = [
            tally
            for key, tally in tallies.get(shape.process, {}).items()
            if layout_key not in timed and step_kind(key.kind) == kind and key.mode not in other_modes
        ]
        timed.add(layout_key)
        reason = why_untimed(layout, shape.untimed)
        rows = tuple(layouts.rows(shape.process, input_number, layout) for input_number, _ in shape.replicas)
        splits[mode, layout.root, kind][rows] += shape.calls
        for index in range(max(len(layout.devices), len(shape.replicas))):
            device = layout.devices[index] if index < len(layout.devices) else "?"
            key = mode, layout.root, index, device, kind
            line = lines.setdefault(key, ReplicaStats(*key))
            if index < len(shape.replicas):
                inputs, outputs = (layouts.sizes_text(shape.process, sizes) for sizes in shape.replicas[index])
                line.calls += shape.calls
                line.sizes[inputs, outputs] += shape.calls
                line.virtual |= shape.virtual > 0 and shape.mode == "dp"
                line.reasons.update({} if reason is None else {reason: shape.calls})
            line.add_times(own_tallies, replica_series(shape.layout, index))
    for line in lines.values():
        counts = splits[line.mode, line.root, line.kind]
        usual_split = max(counts, key=counts.__getitem__)
        line.rows = usual_split[line.replica] if line.replica < len(usual_split) else None
    return [line for _, line in sorted(lines.items()) if line.calls or line.time.count]
