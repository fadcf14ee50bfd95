"""What the replicas of a run's calls received, and how long each took: 8 bytes a duration are held, and no call."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpmon.model.evidence import BatchFacts, ReplicaFacts
from dpmon.model.stats import median, percentile
from dpmon.record.codec import PartTimes
from dpmon.record.wire import DDP, GRAD, MODES, TRAINING, VIRTUAL
from dpmon.run.totals import OnDevice, why_untimed

__all__ = ["Shares"]

_Key = tuple[int, int, int, int, bool]
"""Process, layout, number of the mode and of replicas, whether it evaluates."""
_Replica = tuple[str, str, int, str]
"""Mode, root, replica, device."""


@dataclass(slots=True)
class _Calls:
    """Calls that were shared alike."""

    took: list[array[int]]
    """Durations of each replica on the host, ns."""
    on_device: list[OnDevice]
    sizes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    """How often the batch and the replicas' inputs were of these sizes (definitions)."""


@dataclass(slots=True)
class _Line:
    """One replica on one device in one mode, over all that called it so."""

    took: array[int] = field(default_factory=lambda: array("q"))
    on_device: OnDevice = field(default_factory=OnDevice)
    rows: Counter[int | None] = field(default_factory=Counter)
    virtual: bool = False


class Shares:
    """Takes every call; `definition` gives the value of a process's definition, None if it is not known."""

    def __init__(self, definition: Callable[[int, int], Any]) -> None:
        self._definition = definition
        self._calls: dict[_Key, _Calls] = {}
        self._virtual: set[tuple[int, int]] = set()

    def call(
        self,
        process: int,
        head: Sequence[int],
        shares: Sequence[tuple[int, int, int, int]],
        parts: PartTimes | None,
    ) -> None:
        """A call, as dpmon.run.adder.Adder.called has it."""
        mode, flags, _, layout, _, _, _, _, inputs, *_ = head
        if flags & VIRTUAL:
            self._virtual.add((process, layout))
        key = (process, layout, mode, len(shares), flags & (TRAINING | GRAD) == 0)
        found = self._calls.get(key)
        if found is None:
            found = self._calls[key] = _Calls([array("q") for _ in shares], [OnDevice() for _ in shares])
        sizes = (inputs, *[got for got, _, _, _ in shares])
        found.sizes[sizes] += 1
        for times, (_, _, _, took) in zip(found.took, shares, strict=True):
            times.append(took)
        if parts is not None:
            for index, on_device in enumerate(found.on_device):
                on_device.take(parts.of(index), parts.why)

    def _layout(self, process: int, layout: int) -> tuple[str, list[str]] | None:
        """Root and devices of a layout; None for one that is unknown or DDP's, whose ranks are no replicas."""
        value = self._definition(process, layout)
        if not isinstance(value, dict) or value.get("via") == DDP or not isinstance(value.get("devices"), list):
            return None
        return str(value.get("root")), [str(device) for device in value["devices"]]

    def _rows_of(self, process: int, number: int) -> int | None:
        """Rows of a definition of sizes: the first dimension of the first tensor that has one."""
        value = self._definition(process, number) if number else None
        for size in value if isinstance(value, list) else ():
            if isinstance(size, list) and len(size) > 1 and isinstance(size[1], list) and size[1]:
                return size[1][0] if type(size[1][0]) is int else None
        return None

    def batches(self) -> list[BatchFacts]:
        """How often devices went without rows, a root."""
        found: dict[tuple[str, int], list[tuple[int, int | None, int]]] = {}
        for (process, layout, mode, replicas, _), shared in self._calls.items():
            about = self._layout(process, layout)
            if about is None or len(about[1]) < 2 or MODES[mode] != "dp":
                continue
            by_rows: Counter[int | None] = Counter()
            for (inputs, *_), calls in shared.sizes.items():
                by_rows[self._rows_of(process, inputs)] += calls
            for rows, calls in by_rows.items():
                found.setdefault((about[0], len(about[1])), []).append((replicas, rows, calls))
        facts = []
        for (root, devices), groups in found.items():
            idle = [(calls, rows, devices - replicas) for replicas, rows, calls in groups if replicas < devices]
            calls = sum(calls for _, _, calls in groups)
            if idle:
                _, rows, without = max(idle, key=lambda group: group[0])
                facts.append(BatchFacts(root, devices, calls, sum(count for count, _, _ in idle), rows, without))
            else:
                facts.append(BatchFacts(root, devices, calls, 0, None, 0))
        return facts

    def replicas(self) -> list[ReplicaFacts]:
        """Each replica with its rows and times, without evaluations where others of the layout train."""
        lines: dict[_Replica, _Line] = {}
        trained = {key[:3] for key in self._calls if not key[4]}
        for (process, layout, mode, _, evaluation), shared in self._calls.items():
            about = self._layout(process, layout)
            if about is None or (evaluation and (process, layout, mode) in trained):
                continue
            root, devices = about
            untimed = why_untimed(self._definition(process, layout))
            for index, took in enumerate(shared.took[: len(devices)]):
                line = lines.setdefault((MODES[mode], root, index, devices[index]), _Line())
                line.took.extend(took)
                line.on_device.add(shared.on_device[index], len(took), untimed)
                line.virtual |= (process, layout) in self._virtual and MODES[mode] == "dp"
                for (_, *got), count in shared.sizes.items():
                    line.rows[self._rows_of(process, got[index])] += count
        return [_facts(key, lines[key]) for key in sorted(lines)]


def _facts(key: _Replica, line: _Line) -> ReplicaFacts:
    ordered = sorted(line.took)
    device = median(line.on_device.ms)
    return ReplicaFacts(
        *key,
        calls=len(ordered),
        rows=line.rows.most_common(1)[0][0],
        median_ns=median(ordered),
        p95_ns=percentile(ordered, 0.95),
        virtual=line.virtual,
        device_ns=None if device is None else device * 1e6,
        device_calls=len(line.on_device.ms),
        untimed=line.on_device.untimed,
    )
