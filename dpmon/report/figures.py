"""The figures of one mode, from every step of it that is in the record, or from the sums of those that were deleted."""

from __future__ import annotations

from array import array

from dpmon.model.evidence import WARM_UP_STEPS, ModeFacts
from dpmon.model.stats import PhaseFigures, median, percentile
from dpmon.record.wire import CALL_PHASES, STEP_PHASES
from dpmon.run.rollup import SERIES
from dpmon.run.totals import Deleted, ModeTotals

__all__ = ["deleted_facts", "mode_facts"]


def mode_facts(name: str, mode: ModeTotals, virtual: bool, distributed: bool = False) -> ModeFacts:
    """Medians, tails and shares of a mode, and how its first and last third differ."""
    total = sum(mode.walls)
    early, late = {}, {}
    early_p75 = late_p25 = None
    columns = {"step": mode.walls, **mode.step_phases}
    for phase, times in columns.items():
        third = len(times) // 3
        # The warm-up belongs to neither.
        if third > WARM_UP_STEPS:
            early[phase] = median(times[WARM_UP_STEPS:third]) or 0.0
            late[phase] = median(times[-third:]) or 0.0
    if early:
        third = len(mode.walls) // 3
        early_p75 = percentile(mode.walls[WARM_UP_STEPS:third], 0.75)
        late_p25 = percentile(mode.walls[-third:], 0.25)
    ordered = sorted(mode.walls)
    phases = {phase: mode.step_phases[phase] for phase in STEP_PHASES if phase in mode.step_phases}
    phases |= {phase: mode.call_phases[phase] for phase in CALL_PHASES if phase in mode.call_phases}
    return ModeFacts(
        mode=name,
        virtual=virtual and name == "dp",
        distributed=distributed and name == "single",
        steps=len(mode.walls),
        median_ns=median(ordered),
        p95_ns=percentile(ordered, 0.95),
        rate=mode.rate(),
        phases=tuple(_figures(phase, times, total, mode) for phase, times in phases.items()),
        early=early,
        late=late,
        early_p75_ns=early_p75,
        late_p25_ns=late_p25,
        mean_ns=total / len(ordered) if ordered else None,
    )


def deleted_facts(name: str, deleted: Deleted, virtual: bool, distributed: bool = False) -> ModeFacts:
    """The same of what was deleted: shares are exact, medians and tails within 3 %."""
    sums = deleted.sums
    total = sums.sums[0]
    phases = []
    for series in (*STEP_PHASES, *CALL_PHASES):
        spent, ran = sums.sums[SERIES.index(series)], sums.ran(series)
        if spent is not None and ran > 0:
            share = spent / total if total else None
            middle, tail = sums.quantile(series, 0.5), sums.quantile(series, 0.95)
            phases.append(PhaseFigures(series, ran, middle, tail, share))
    return ModeFacts(
        mode=name,
        virtual=virtual and name == "dp",
        distributed=distributed and name == "single",
        steps=sums.steps,
        median_ns=sums.quantile("step", 0.5),
        p95_ns=sums.quantile("step", 0.95),
        rate=deleted.rate(),
        phases=tuple(phases),
        early={},
        late={},
        mean_ns=total / sums.steps if total and sums.steps else None,
    )


def _figures(name: str, times: array[int], total: int, mode: ModeTotals) -> PhaseFigures:
    ordered = sorted(times)
    share = sum(ordered) / total if total else None
    found = PhaseFigures(name, len(ordered), median(ordered), percentile(ordered, 0.95), share)
    known = mode.device_ms.get(name)
    middle = median(known or ())
    if not known or middle is None:
        return found
    spent = sum(known) / len(known) * len(ordered) * 1e6
    return found._replace(
        device_ns=middle * 1e6, device_count=len(known), device_share=spent / total if total else None
    )
