"""The stages of a run's calls, added up without decoding every record."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from dpmon.record.codec import PartTimes
from dpmon.run.totals import OnDevice, StageLine, why_untimed

__all__ = ["Stages"]


@dataclass(slots=True)
class _Sum:
    """The calls of one stage in which it got and gave the same; ns of those that ended."""

    calls: int = 0
    walls: array[int] = field(default_factory=lambda: array("q"))
    on_device: OnDevice = field(default_factory=OnDevice)


class Stages:
    """Takes the stages of every call."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, ...], _Sum] = {}
        """By process, layout, number of the stage, its definition and sizes."""

    def call(
        self, process: int, layout: int, stages: Iterable[tuple[int, int, int, int, int]], parts: PartTimes | None
    ) -> None:
        """A call's: as dpmon.record.codec.call_stages and part_times give them."""
        for index, (number, got, gave, _, took) in enumerate(stages):
            key = (process, layout, index, number, got, gave)
            found = self._sums.get(key)
            if found is None:
                found = self._sums[key] = _Sum()
            found.calls += 1
            if took >= 0:
                found.walls.append(took)
            if parts is not None:
                found.on_device.take(parts.of(index), parts.why)

    def lines(self, definition: Callable[[int, int], Any], text: Callable[[int, int], str | None]) -> list[StageLine]:
        """A line a stage and sizes; `definition` and `text` (of sizes): of a process, by number."""
        lines: dict[tuple[Any, ...], StageLine] = {}
        for (process, layout_number, index, number, got, gave), found in self._sums.items():
            layout, stage = definition(process, layout_number), definition(process, number)
            if not isinstance(layout, dict) or not isinstance(stage, dict):
                continue
            names = tuple(str(name) for name in stage.get("parts") or ())
            about = (str(layout.get("root")), index, str(stage.get("device")), names)
            key = (*about, text(process, got), text(process, gave))
            line = lines.get(key) or StageLine(*key, 0, array("q"), OnDevice())
            line.walls.extend(found.walls)
            line.on_device.add(found.on_device, found.calls, why_untimed(layout))
            lines[key] = line._replace(calls=line.calls + found.calls)
        return sorted(lines.values(), key=lambda line: (line.root, line.stage, -line.calls))
