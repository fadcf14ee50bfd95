"""The inputs, outputs and times of a run's replicas, processes and stages, with their numbers of calls. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dpmon.record.history_rows import Definitions, Layout
from dpmon.record.record_types import UNTIMED, count_rows
from dpmon.record.schema import EVALUATION, device_series
from dpmon.record.shared_names import RANK_MODES
from dpmon.store.query_results import Shape, replica_series, stage_series
from dpmon.store.step_stats import merge_mode_tallies
from dpmon.store.tally import SeriesStats, Tally, TallyKey

_TENSORS_NAMED = 4
_PARTS_NAMED = 4


def format_sizes(inputs: str | None, outputs: str | None, unfinished: str = "sizes not seen") -> str:
    """The sizes received and returned as text; `unfinished` takes the place of unknown outputs."""
    return f"{inputs or 'sizes not seen'} -> {outputs or unfinished}"


class ReplicaSizes(NamedTuple):
    """The inputs and outputs of one replica and their number of calls; sizes are None if they were not seen."""

    mode: str
    root: str
    replica: int
    device: str
    inputs: str | None
    outputs: str | None
    calls: int
    evaluations: int = 0
    """Part of `calls`: those in evaluations, of a model that also trains in this mode."""


class StageSizes(NamedTuple):
    """The inputs and outputs of one stage of a model on several devices. Times cover only calls in which it ended."""

    root: str
    stage: int
    device: str
    parts: tuple[str, ...]
    inputs: str | None
    outputs: str | None
    calls: int
    time: SeriesStats
    on_device: SeriesStats
    untimed: str | None
    """Why the device time is unknown, if the record gives a reason."""

    @property
    def named_parts(self) -> str:
        """The first parts, and the number of others."""
        more = len(self.parts) - _PARTS_NAMED
        return ", ".join(self.parts[:_PARTS_NAMED]) + (f" and {more} more" if more > 0 else "")


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
class ReplicaStats:
    """One replica on one device in one mode, over all calls: the host and device times of its forward."""

    mode: str
    root: str
    replica: int
    device: str
    calls: int = 0
    rows: int | None = None
    """The rows of this replica in the most frequent split."""
    virtual: bool = False
    time: SeriesStats = field(default_factory=SeriesStats)
    on_device: SeriesStats = field(default_factory=SeriesStats)
    reasons: Counter[str] = field(default_factory=Counter)
    """Number of calls without a device time, by reason."""

    @property
    def untimed(self) -> str | None:
        """Why no call has a device time, if the record gives a reason."""
        return None if self.on_device.count else most_common(self.reasons)


class CallLayouts:
    """The shapes of a run's calls, with their definitions."""

    def __init__(self, shapes: Sequence[Shape], definitions: Mapping[int, Definitions]) -> None:
        """`definitions`: those of each process."""
        self._shapes = [(shape, definitions[shape.process].layouts.get(shape.layout)) for shape in shapes]
        self._definitions = definitions
        self.trained = {(one.process, one.layout, one.mode) for one in shapes if not one.kind & EVALUATION}
        """Process, layout and mode of layouts with calls in training steps."""
        self.processes = {shape.process for shape in shapes}
        """Processes with calls."""
        self.virtual = any(shape.virtual and layout is not None for shape, layout in self._shapes)
        """Whether a call had virtual replicas."""
        layouts = (layout for _, layout in self._shapes if layout is not None)
        self.distributed = next((layout.via for layout in layouts if _is_rank_layout(layout)), None)
        """How the run's ranks trained one model together: a key of RANK_MODES; None if they did not."""

    def replica_shapes(self) -> Iterator[tuple[Shape, Layout]]:
        """Each shape with its layout, except the shapes of ranks, which are no replicas."""
        for shape, layout in self._shapes:
            if layout is not None and not _is_rank_layout(layout):
                yield shape, layout

    def rows(self, process: int, number: int, layout: Layout) -> int | None:
        """Rows of a definition of sizes: those of the first tensor with the layout's dimension of the batch."""
        return count_rows(self._definitions[process].sizes.get(number), layout.dim)

    def calls(self, mode: str, evaluation: bool, trained: bool) -> int:
        """Number of calls of a mode, including those outside steps; parameters as in step_stats.merge_mode_tallies."""
        return sum(
            shape.calls
            for shape, _ in self._shapes
            if shape.mode == mode and (not trained or bool(shape.kind & EVALUATION) == evaluation)
        )

    @property
    def all_calls(self) -> int:
        """Number of all calls, including those outside steps."""
        return sum(shape.calls for shape, _ in self._shapes)

    def modes_and_kinds(self) -> set[tuple[str, int]]:
        """Mode and kind of all calls."""
        return {(shape.mode, shape.kind) for shape, _ in self._shapes}

    def replicas(self, several: bool) -> list[ReplicaSizes]:
        """The inputs and outputs of each replica, by mode, root and replica, then by calls.

        `several`: several processes train; then the layouts of ranks are left out.
        """
        found: Counter[ReplicaSizes] = Counter()
        evaluations: Counter[ReplicaSizes] = Counter()
        for shape, layout in self._shapes:
            if layout is None or (several and _is_rank_layout(layout)):
                continue
            for index, (got, gave) in enumerate(shape.replicas):
                device = layout.devices[index] if index < len(layout.devices) else "?"
                sizes = self._text(shape.process, got), self._text(shape.process, gave)
                key = ReplicaSizes(shape.mode, layout.root, index, device, *sizes, 0)
                found[key] += shape.calls
                if shape.kind & EVALUATION and (shape.process, shape.layout, shape.mode) in self.trained:
                    evaluations[key] += shape.calls
        return sorted(
            (each._replace(calls=calls, evaluations=evaluations[each]) for each, calls in found.items()),
            key=lambda one: (*one[:4], -one.calls, one.inputs or "", one.outputs or ""),
        )

    def of_process(self, process: int) -> tuple[str, str | None, str | None, int]:
        """The devices, the most frequent inputs and outputs, and the number of a process's calls."""
        groups: Counter[tuple[str, bool, int, tuple[tuple[int, int], ...]]] = Counter()
        for shape, _ in self._shapes:
            if shape.process == process:
                groups[shape.mode, shape.virtual, shape.layout, shape.replicas] += shape.calls
        if not groups:
            return "?", None, None, 0
        _, _, number, pairs = max(groups, key=lambda group: groups[group])
        layout = self._definitions[process].layouts.get(number)
        got, gave = pairs[0] if len(pairs) == 1 else (0, 0)
        devices = "?" if layout is None else " ".join(layout.devices)
        return devices, self._text(process, got), self._text(process, gave), groups.total()

    def stages(self, tallies: Mapping[TallyKey, Tally]) -> list[StageSizes]:
        """The inputs and outputs of each stage, by root and stage, then by calls. `tallies`: of each process."""
        calls: Counter[tuple[int, int, int, int, int, int]] = Counter()
        for shape, _ in self._shapes:
            for index, (number, got, gave) in enumerate(shape.stages):
                calls[shape.process, shape.layout, index, number, got, gave] += shape.calls
        found: dict[tuple[object, ...], StageSizes] = {}
        untimed: defaultdict[tuple[object, ...], Counter[str]] = defaultdict(Counter)
        for (process, layout_number, index, number, got, gave), count in calls.items():
            of_process = self._definitions[process]
            layout, stage = of_process.layouts.get(layout_number), of_process.stages.get(number)
            if layout is None or stage is None:
                continue
            key = layout.root, index, *stage, self._text(process, got), self._text(process, gave)
            known = found.get(key) or StageSizes(*key, 0, SeriesStats(), SeriesStats(), None)
            series = stage_series(layout_number, index, number, got, gave)
            for of, tally in tallies.items():
                if of.process == process:
                    known.time.merge(tally.stat(series))
                    known.on_device.merge(tally.stat(device_series(series)))
            found[key] = known._replace(calls=known.calls + count)
            untimed[key].update(self.untimed_reasons(process, layout_number))
        lines = (
            line._replace(untimed=None if line.on_device.count else most_common(untimed[each]))
            for each, line in found.items()
        )
        return sorted(lines, key=lambda one: (one.root, one.stage, -one.calls))

    def untimed_reasons(self, process: int, number: int | None = None) -> Counter[str]:
        """Number of a process's calls without a device time, by reason; of one layout, or of all."""
        found: Counter[str] = Counter()
        for shape, layout in self._shapes:
            if shape.process == process and number in (None, shape.layout):
                reason = why_untimed(layout, shape.untimed)
                if reason is not None:
                    found[reason] += shape.calls
        return found

    def _text(self, process: int, number: int) -> str | None:
        """Sizes as text: "[30, 5]" or "x [30, 5], mask [30]"; None if they were not seen.

        A DTensor has both shapes: "[15, 5] of [30, 5]".
        """
        sizes = self._definitions[process].sizes.get(number)
        if sizes is None:
            return None
        texts = [
            ("" if size.path in ("", "0") else f"{size.path} ")
            + " of ".join(f"{list(shape)}" for shape in (size.shape, size.global_shape) if shape is not None)
            for size in sizes[:_TENSORS_NAMED]
        ]
        others = len(sizes) - _TENSORS_NAMED
        return ", ".join(texts) + (f" and {others} more" if others > 0 else "")


def _is_rank_layout(layout: Layout) -> bool:
    """Whether the calls of a layout belong to ranks that train one model together."""
    return layout.via in RANK_MODES


def why_untimed(layout: Layout | None, number: int) -> str | None:
    """Why calls have no device time: by the number in their records, or by their layout."""
    if 0 < number < len(UNTIMED):
        return UNTIMED[number]
    return None if layout is None else layout.absent.get("device_ms")


def most_common(reasons: Counter[str]) -> str | None:
    """The most frequent reason; None without one."""
    return reasons.most_common(1)[0][0] if reasons else None


# ------------------------------------------------------------------------------------------------ replicas over a run


def count_idle_devices(layouts: CallLayouts) -> list[IdleDeviceCounts]:
    """How often devices received no rows under dp, by root."""
    groups: defaultdict[tuple[str, int], Counter[tuple[int, int | None]]] = defaultdict(Counter)
    for shape, layout in layouts.replica_shapes():
        if len(layout.devices) > 1 and shape.mode == "dp":
            rows = layouts.rows(shape.process, shape.inputs, layout)
            groups[layout.root, len(layout.devices)][len(shape.replicas), rows] += shape.calls
    found = []
    for (root, devices), counts in groups.items():
        idle = {group: calls for group, calls in counts.items() if group[0] < devices}
        (replicas, rows), _ = max(idle.items(), key=lambda item: item[1], default=((devices, None), 0))
        found.append(IdleDeviceCounts(root, devices, counts.total(), sum(idle.values()), rows, devices - replicas))
    return found


def build_replica_stats(layouts: CallLayouts, tallies: Mapping[int, Mapping[TallyKey, Tally]]) -> list[ReplicaStats]:
    """Each replica with its rows and times; evaluations count only if no call of the same layout trains.

    `tallies`: of each process.
    """
    lines: dict[tuple[str, str, int, str], ReplicaStats] = {}
    splits: defaultdict[tuple[str, str], Counter[tuple[int | None, ...]]] = defaultdict(Counter)
    timed: set[tuple[int, int, str]] = set()
    for shape, layout in layouts.replica_shapes():
        of = shape.process, shape.layout, shape.mode
        trained = of in layouts.trained
        if shape.kind & EVALUATION and trained:
            continue
        own = {} if of in timed else tallies.get(shape.process, {})
        times = merge_mode_tallies(own, shape.mode, False, trained)
        timed.add(of)
        reason = why_untimed(layout, shape.untimed)
        rows = tuple(layouts.rows(shape.process, got, layout) for got, _ in shape.replicas)
        splits[shape.mode, layout.root][rows] += shape.calls
        for index, device in enumerate(layout.devices):
            key = shape.mode, layout.root, index, device
            line = lines.setdefault(key, ReplicaStats(*key))
            if index < len(shape.replicas):
                line.calls += shape.calls
                line.virtual |= shape.virtual and shape.mode == "dp"
                line.reasons.update({} if reason is None else {reason: shape.calls})
            series = replica_series(shape.layout, index)
            line.time.merge(times.stat(series))
            line.on_device.merge(times.stat(device_series(series)))
    for line in lines.values():
        usual = splits[line.mode, line.root].most_common(1)[0][0]
        line.rows = usual[line.replica] if line.replica < len(usual) else None
    return [line for _, line in sorted(lines.items()) if line.calls or line.time.count]
