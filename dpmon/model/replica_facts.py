"""The inputs and times of replicas over a run, for findings and tables. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dpmon.model.evidence import BatchFacts, ReplicaFacts
from dpmon.model.layouts import Layouts, most_common, why_untimed
from dpmon.record.schema import EVALUATION, device_series
from dpmon.store.parts import replica_series
from dpmon.store.tally import Key, Stat, Tally


@dataclass(slots=True)
class _Line:
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
    lines: dict[tuple[str, str, int, str], _Line] = {}
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
            line = lines.setdefault((shape.mode, str(layout.get("root")), index, str(devices[index])), _Line())
            line.calls += shape.calls
            line.virtual |= shape.virtual and shape.mode == "dp"
            if reason is not None:
                line.untimed[reason] += shape.calls
        if of not in timed:
            timed.add(of)
            _add_times(lines, of, layout, _of(tallies, of, of in layouts.trained))
    usual = {root: counts.most_common(1)[0][0] for root, counts in splits.items()}
    return [_facts(key, lines[key], usual.get(key[:2], ())) for key in sorted(lines)]


def _of(tallies: Mapping[Key, Tally], of: tuple[int, int, str], trained: bool) -> list[Tally]:
    process, _, mode = of
    return [
        tally
        for key, tally in tallies.items()
        if (key.process, key.mode) == (process, mode) and not (trained and key.kind & EVALUATION)
    ]


def _add_times(
    lines: dict[tuple[str, str, int, str], _Line],
    of: tuple[int, int, str],
    layout: Mapping[str, Any],
    tallies: Sequence[Tally],
) -> None:
    _, number, mode = of
    for index, device in enumerate(layout["devices"]):
        series = replica_series(number, index)
        for tally in tallies:
            if tally.stat(series).count:
                line = lines.setdefault((mode, str(layout.get("root")), index, str(device)), _Line())
                line.time.merge(tally.stat(series))
                line.on_device.merge(tally.stat(device_series(series)))


def _facts(key: tuple[str, str, int, str], line: _Line, usual: Sequence[int | None]) -> ReplicaFacts:
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
