"""The inputs, outputs and times of a run's replicas, processes and stages, with their numbers of calls. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dpmon.record.kinds import UNTIMED
from dpmon.record.names import RANK_MODES
from dpmon.record.schema import EVALUATION, device_series
from dpmon.store.answers import Shape
from dpmon.store.parts import replica_series, stage_series
from dpmon.store.tally import Key, Stat, Tally

_TENSORS_NAMED = 4
_PARTS_NAMED = 4


def flow(inputs: str | None, outputs: str | None, unfinished: str = "sizes not seen") -> str:
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


class ProcessSizes(NamedTuple):
    """The most frequent inputs and outputs of a process's calls; `calls` counts all of them."""

    device: str
    inputs: str | None
    outputs: str | None
    calls: int


class StageSizes(NamedTuple):
    """The inputs and outputs of one stage of a model on several devices. Times cover only calls in which it ended."""

    root: str
    stage: int
    device: str
    parts: tuple[str, ...]
    inputs: str | None
    outputs: str | None
    calls: int
    time: Stat
    on_device: Stat
    untimed: str | None
    """Why the device time is unknown, if the record gives a reason."""

    @property
    def named_parts(self) -> str:
        """The first parts, and the number of others."""
        more = len(self.parts) - _PARTS_NAMED
        return ", ".join(self.parts[:_PARTS_NAMED]) + (f" and {more} more" if more > 0 else "")


class BatchFacts(NamedTuple):
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


class ReplicaFacts(NamedTuple):
    """One replica in one mode: its most frequent rows, and its forward's host and device time in ns."""

    mode: str
    root: str
    replica: int
    device: str
    calls: int
    rows: int | None
    median_ns: float | None
    p95_ns: float | None
    virtual: bool
    device_ns: float | None = None
    """Median device time of the forward."""
    device_calls: int = 0
    """Number of calls with a known device time."""
    untimed: str | None = None
    """Why no call has a device time, if the record gives a reason."""


class Layouts:
    """The shapes of a run's calls, with their definitions."""

    def __init__(self, shapes: Sequence[Shape], definitions: Mapping[int, Mapping[int, Any]]) -> None:
        """`definitions`: by process and number."""
        self._shapes = shapes
        self.trained = {(one.process, one.layout, one.mode) for one in shapes if not one.kind & EVALUATION}
        """Process, layout and mode of layouts with calls in training steps."""
        self._definitions = definitions
        self.processes = {shape.process for shape in shapes}
        """Processes with calls."""
        self.virtual = any(shape.virtual and self._layout(shape) for shape in shapes)
        """Whether a call had virtual replicas."""
        self.distributed = next((by for shape in shapes if (by := _by_ranks(self._layout(shape)))), None)
        """How the run's ranks trained one model together: a key of RANK_MODES; None if they did not."""

    def split(self) -> Iterator[tuple[Shape, Mapping[str, Any]]]:
        """Each shape with its layout, except the shapes of ranks, which are no replicas."""
        for shape in self._shapes:
            layout = self._layout(shape)
            if _by_ranks(layout) is None and isinstance(layout.get("devices"), list):
                yield shape, layout

    def rows(self, process: int, number: int, layout: Mapping[str, Any]) -> int | None:
        """Rows of a definition of sizes: those of the first tensor with the layout's dimension of the batch."""
        dim = layout.get("dim", 0)
        value = self._definition(process, number) if number else None
        for size in value if isinstance(value, list) else ():
            shape = size[1] if isinstance(size, list) and len(size) > 1 and isinstance(size[1], list) else ()
            if -len(shape) <= dim < len(shape):
                return shape[dim] if type(shape[dim]) is int else None
        return None

    def calls(self, mode: str, evaluation: bool, trained: bool) -> int:
        """Number of calls of a mode, including those outside steps; parameters as in dpmon.store.figures.merged."""
        return sum(
            shape.calls
            for shape in self._shapes
            if shape.mode == mode and (not trained or bool(shape.kind & EVALUATION) == evaluation)
        )

    @property
    def all_calls(self) -> int:
        """Number of all calls, including those outside steps."""
        return sum(shape.calls for shape in self._shapes)

    def kinds(self) -> set[tuple[str, int]]:
        """Mode and kind of all calls."""
        return {(shape.mode, shape.kind) for shape in self._shapes}

    def replicas(self, several: bool) -> list[ReplicaSizes]:
        """The inputs and outputs of each replica, by mode, root and replica, then by calls.

        `several`: several processes train; then the layouts of ranks are left out.
        """
        found: Counter[ReplicaSizes] = Counter()
        evaluations: Counter[ReplicaSizes] = Counter()
        for shape in self._shapes:
            layout = self._layout(shape)
            if not layout or (several and _by_ranks(layout)):
                continue
            devices = layout.get("devices") or []
            for index, (got, gave) in enumerate(shape.replicas):
                device = str(devices[index]) if index < len(devices) else "?"
                sizes = self._text(shape.process, got), self._text(shape.process, gave)
                key = ReplicaSizes(shape.mode, str(layout.get("root")), index, device, *sizes, 0)
                found[key] += shape.calls
                if shape.kind & EVALUATION and (shape.process, shape.layout, shape.mode) in self.trained:
                    evaluations[key] += shape.calls
        return sorted(
            (each._replace(calls=calls, evaluations=evaluations[each]) for each, calls in found.items()),
            key=lambda one: (*one[:4], -one.calls, one.inputs or "", one.outputs or ""),
        )

    def of_process(self, process: int) -> ProcessSizes:
        """The most frequent inputs and outputs of a process's calls."""
        groups: Counter[tuple[str, bool, int, tuple[tuple[int, int], ...]]] = Counter()
        for shape in self._shapes:
            if shape.process == process:
                groups[shape.mode, shape.virtual, shape.layout, shape.replicas] += shape.calls
        if not groups:
            return ProcessSizes("?", None, None, 0)
        _, _, number, pairs = max(groups, key=lambda group: groups[group])
        layout = self._definition(process, number)
        devices = layout.get("devices") if isinstance(layout, dict) else None
        got, gave = pairs[0] if len(pairs) == 1 else (0, 0)
        return ProcessSizes(
            " ".join(map(str, devices)) if devices else "?",
            self._text(process, got),
            self._text(process, gave),
            groups.total(),
        )

    def stages(self, tallies: Mapping[Key, Tally]) -> list[StageSizes]:
        """The inputs and outputs of each stage, by root and stage, then by calls. `tallies`: of each process."""
        calls: Counter[tuple[int, int, int, int, int, int]] = Counter()
        for shape in self._shapes:
            for index, (number, got, gave) in enumerate(shape.stages):
                calls[shape.process, shape.layout, index, number, got, gave] += shape.calls
        found: dict[tuple[Any, ...], StageSizes] = {}
        untimed: dict[tuple[Any, ...], Counter[str]] = {}
        for (process, layout_number, index, number, got, gave), count in calls.items():
            layout, stage = self._definition(process, layout_number), self._definition(process, number)
            if not isinstance(layout, dict) or not isinstance(stage, dict):
                continue
            parts = tuple(str(name) for name in stage.get("parts") or ())
            about = str(layout.get("root")), index, str(stage.get("device")), parts
            key = (*about, self._text(process, got), self._text(process, gave))
            known = found.get(key) or StageSizes(*key, 0, Stat(), Stat(), None)
            series = stage_series(layout_number, index, number, got, gave)
            for of, tally in tallies.items():
                if of.process == process:
                    known.time.merge(tally.stat(series))
                    known.on_device.merge(tally.stat(device_series(series)))
            found[key] = known._replace(calls=known.calls + count)
            untimed.setdefault(key, Counter()).update(self.untimed(process, layout_number))
        for key, stage in found.items():
            found[key] = stage._replace(untimed=None if stage.on_device.count else most_common(untimed[key]))
        return sorted(found.values(), key=lambda one: (one.root, one.stage, -one.calls))

    def untimed(self, process: int, layout: int | None = None) -> Counter[str]:
        """Number of a process's calls without a device time, by reason; of one layout, or of all."""
        found: Counter[str] = Counter()
        for shape in self._shapes:
            if shape.process == process and layout in (None, shape.layout):
                reason = why_untimed(self._layout(shape), shape.untimed)
                if reason is not None:
                    found[reason] += shape.calls
        return found

    def _layout(self, shape: Shape) -> Mapping[str, Any]:
        """The layout of a shape; empty if unknown."""
        found = self._definition(shape.process, shape.layout)
        return found if isinstance(found, dict) else {}

    def _definition(self, process: int, number: int) -> Any:
        return self._definitions.get(process, {}).get(number)

    def _text(self, process: int, number: int) -> str | None:
        """Sizes as text: "[30, 5]" or "x [30, 5], mask [30]"; None if they were not seen.

        A DTensor has both shapes: "[15, 5] of [30, 5]".
        """
        value = self._definition(process, number) if number else None
        if not isinstance(value, list):
            return None
        texts = [
            ("" if path in ("", "0") else f"{path} ") + " of ".join(f"{list(each)}" for each in (shape, *more[2:]))
            for path, shape, *more in value
        ]
        others = len(texts) - _TENSORS_NAMED
        return ", ".join(texts[:_TENSORS_NAMED]) + (f" and {others} more" if others > 0 else "")


def _by_ranks(layout: Mapping[str, Any]) -> str | None:
    """`via` of a layout if its calls belong to ranks that train one model together; else None."""
    via = layout.get("via")
    return via if isinstance(via, str) and via in RANK_MODES else None


def why_untimed(layout: Mapping[str, Any], number: int) -> str | None:
    """Why calls have no device time: by the number in their records, or by their layout."""
    if 0 < number < len(UNTIMED):
        return UNTIMED[number]
    absent = layout.get("absent")
    reason = absent.get("device_ms") if isinstance(absent, Mapping) else None
    return reason if isinstance(reason, str) else None


def most_common(reasons: Counter[str]) -> str | None:
    """The most frequent reason; None without one."""
    return reasons.most_common(1)[0][0] if reasons else None


# ------------------------------------------------------------------------------------------------ replicas over a run


@dataclass(slots=True)
class _ReplicaTotals:
    """One replica on one device in one mode, over all calls."""

    time: Stat = field(default_factory=Stat)
    on_device: Stat = field(default_factory=Stat)
    untimed: Counter[str] = field(default_factory=Counter)
    calls: int = 0
    virtual: bool = False


def batch_facts(layouts: Layouts) -> list[BatchFacts]:
    """How often devices received no rows under dp, by root."""
    groups: defaultdict[tuple[str, int], Counter[tuple[int, int | None]]] = defaultdict(Counter)
    for shape, layout in layouts.split():
        devices = len(layout["devices"])
        if devices > 1 and shape.mode == "dp":
            rows = layouts.rows(shape.process, shape.inputs, layout)
            groups[str(layout.get("root")), devices][len(shape.replicas), rows] += shape.calls
    found = []
    for (root, devices), counts in groups.items():
        idle = {group: calls for group, calls in counts.items() if group[0] < devices}
        (replicas, rows), _ = max(idle.items(), key=lambda item: item[1], default=((devices, None), 0))
        found.append(BatchFacts(root, devices, counts.total(), sum(idle.values()), rows, devices - replicas))
    return found


def replica_facts(layouts: Layouts, tallies: Mapping[Key, Tally]) -> list[ReplicaFacts]:
    """Each replica with its rows and times; evaluations count only if no call of the same layout trains.

    `tallies`: of each process.
    """
    lines: dict[tuple[str, str, int, str], _ReplicaTotals] = {}
    splits: defaultdict[tuple[str, str], Counter[tuple[int | None, ...]]] = defaultdict(Counter)
    timed: set[tuple[int, int, str]] = set()
    for shape, layout in layouts.split():
        of = shape.process, shape.layout, shape.mode
        if shape.kind & EVALUATION and of in layouts.trained:
            continue
        devices = layout["devices"]
        reason = why_untimed(layout, shape.untimed)
        replicas = shape.replicas[: len(devices)]
        rows = tuple(layouts.rows(shape.process, got, layout) for got, _ in replicas)
        splits[shape.mode, str(layout.get("root"))][rows] += shape.calls
        for index in range(len(replicas)):
            line = lines.setdefault((shape.mode, str(layout.get("root")), index, str(devices[index])), _ReplicaTotals())
            line.calls += shape.calls
            line.virtual |= shape.virtual and shape.mode == "dp"
            if reason is not None:
                line.untimed[reason] += shape.calls
        if of not in timed:
            timed.add(of)
            _add_times(lines, of, layout, _tallies_of(tallies, of, of in layouts.trained))
    usual = {root: counts.most_common(1)[0][0] for root, counts in splits.items()}
    return [_facts(key, lines[key], usual.get(key[:2], ())) for key in sorted(lines)]


def _tallies_of(tallies: Mapping[Key, Tally], of: tuple[int, int, str], trained: bool) -> list[Tally]:
    process, _, mode = of
    return [
        tally
        for key, tally in tallies.items()
        if (key.process, key.mode) == (process, mode) and not (trained and key.kind & EVALUATION)
    ]


def _add_times(
    lines: dict[tuple[str, str, int, str], _ReplicaTotals],
    of: tuple[int, int, str],
    layout: Mapping[str, Any],
    tallies: Sequence[Tally],
) -> None:
    _, number, mode = of
    for index, device in enumerate(layout["devices"]):
        series = replica_series(number, index)
        for tally in tallies:
            if tally.stat(series).count:
                line = lines.setdefault((mode, str(layout.get("root")), index, str(device)), _ReplicaTotals())
                line.time.merge(tally.stat(series))
                line.on_device.merge(tally.stat(device_series(series)))


def _facts(key: tuple[str, str, int, str], line: _ReplicaTotals, usual: Sequence[int | None]) -> ReplicaFacts:
    """`usual`: the rows of each replica in the most frequent split."""
    index = key[2]
    return ReplicaFacts(
        *key,
        calls=line.calls,
        rows=usual[index] if index < len(usual) else None,
        median_ns=line.time.median,
        p95_ns=line.time.quantile(0.95),
        virtual=line.virtual,
        device_ns=line.on_device.median,
        device_calls=line.on_device.count,
        untimed=None if line.on_device.count else most_common(line.untimed),
    )
