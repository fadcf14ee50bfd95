"""What the replicas, processes and stages of a run got and gave, and in how many calls. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.record.codec import DDP
from dpmon.record.schema import EVALUATION
from dpmon.store.answers import Shape
from dpmon.store.parts import stage_series
from dpmon.store.tally import Key, Stat, Tally

__all__ = ["Layouts", "ProcessSizes", "ReplicaSizes", "StageSizes"]

_TENSORS_NAMED = 4


class ReplicaSizes(NamedTuple):
    """What one replica got and gave, and in how many calls; sizes are None if they were not seen."""

    mode: str
    root: str
    replica: int
    device: str
    inputs: str | None
    outputs: str | None
    calls: int


class ProcessSizes(NamedTuple):
    """What the calls of a process got and gave most often; `calls` are all of them."""

    device: str
    inputs: str | None
    outputs: str | None
    calls: int


class StageSizes(NamedTuple):
    """What one stage of a model on several devices got and gave; `time` is of the calls in which it ended."""

    root: str
    stage: int
    device: str
    parts: tuple[str, ...]
    inputs: str | None
    outputs: str | None
    calls: int
    time: Stat


class Layouts:
    """The shapes of a run's calls, with the definitions that they refer to."""

    def __init__(self, shapes: Sequence[Shape], definitions: Mapping[int, Mapping[int, Any]]) -> None:
        """`definitions`: by process and number."""
        self._shapes = shapes
        self._definitions = definitions
        self.processes = {shape.process for shape in shapes}
        """Those with calls."""
        self.virtual = any(shape.virtual and self._layout(shape) for shape in shapes)
        """Whether a call had virtual replicas."""
        self.distributed = any(self._via(shape) == DDP for shape in shapes)
        """Whether a call was of a DistributedDataParallel."""

    def calls(self, mode: str, evaluation: bool, trained: bool) -> int:
        """Calls of a mode, those in no step too; parameters as in dpmon.store.figures.merged."""
        return sum(
            shape.calls
            for shape in self._shapes
            if shape.mode == mode and (not trained or bool(shape.kind & EVALUATION) == evaluation)
        )

    def kinds(self) -> set[tuple[str, int]]:
        """Mode and kind of all calls."""
        return {(shape.mode, shape.kind) for shape in self._shapes}

    def replicas(self, several: bool) -> list[ReplicaSizes]:
        """What each replica got and gave, most calls first. `several`: processes, so ranks are not listed here."""
        found: Counter[ReplicaSizes] = Counter()
        for shape in self._shapes:
            layout = self._layout(shape)
            if not layout or (several and layout.get("via") == DDP):
                continue
            devices = layout.get("devices") or []
            for index, (got, gave) in enumerate(shape.replicas):
                device = str(devices[index]) if index < len(devices) else "?"
                sizes = self._text(shape.process, got), self._text(shape.process, gave)
                found[ReplicaSizes(shape.mode, str(layout.get("root")), index, device, *sizes, 0)] += shape.calls
        return sorted(
            (each._replace(calls=calls) for each, calls in found.items()),
            key=lambda one: (*one[:4], -one.calls, one.inputs or "", one.outputs or ""),
        )

    def of_process(self, process: int) -> ProcessSizes:
        """What the calls of a process got and gave most often."""
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
        """What each stage got and gave, most calls first; `tallies` of each process."""
        calls: Counter[tuple[int, int, int, int, int, int]] = Counter()
        for shape in self._shapes:
            for index, (number, got, gave) in enumerate(shape.stages):
                calls[shape.process, shape.layout, index, number, got, gave] += shape.calls
        found: dict[tuple[Any, ...], StageSizes] = {}
        for (process, layout_number, index, number, got, gave), count in calls.items():
            layout, stage = self._definition(process, layout_number), self._definition(process, number)
            if not isinstance(layout, dict) or not isinstance(stage, dict):
                continue
            parts = tuple(str(name) for name in stage.get("parts") or ())
            about = str(layout.get("root")), index, str(stage.get("device")), parts
            key = (*about, self._text(process, got), self._text(process, gave))
            known = found.get(key) or StageSizes(*key, 0, Stat())
            series = stage_series(layout_number, index, number, got, gave)
            for of, tally in tallies.items():
                if of.process == process:
                    known.time.merge(tally.stat(series))
            found[key] = known._replace(calls=known.calls + count)
        return sorted(found.values(), key=lambda one: (one.root, one.stage, -one.calls))

    def _via(self, shape: Shape) -> Any:
        return self._layout(shape).get("via")

    def _layout(self, shape: Shape) -> Mapping[str, Any]:
        """The layout of a shape; empty if it is not known."""
        found = self._definition(shape.process, shape.layout)
        return found if isinstance(found, dict) else {}

    def _definition(self, process: int, number: int) -> Any:
        return self._definitions.get(process, {}).get(number)

    def _text(self, process: int, number: int) -> str | None:
        """Sizes as people write them, None if they were not seen: [30, 5] or x [30, 5], mask [30]."""
        value = self._definition(process, number) if number else None
        if not isinstance(value, list):
            return None
        texts = [f"{list(shape)}" if path in ("", "0") else f"{path} {list(shape)}" for path, shape, *_ in value]
        more = len(texts) - _TENSORS_NAMED
        return ", ".join(texts[:_TENSORS_NAMED]) + (f" and {more} more" if more > 0 else "")
