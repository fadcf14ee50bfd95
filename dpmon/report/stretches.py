"""Steps over time, for charts: at most about BINS stretches of equal width, whatever the length of the run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from dpmon.model.members import SECOND
from dpmon.record.schema import EVALUATION, REST, STEP_PHASES
from dpmon.record.wire import CALL_PHASES
from dpmon.report.story import PARTS, Bin
from dpmon.store.queries import Store
from dpmon.store.sums import END
from dpmon.store.tally import WIDTHS, Tally

BINS = 400
_SECONDS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600)
"""Widths that are easy to read. Longer runs use whole hours."""
_SERIES = {name: REST if name == "forward" else name for name in PARTS}
assert set(PARTS) == {*STEP_PHASES, *CALL_PHASES}


@dataclass(slots=True)
class _StretchSum:
    """Steps of one kind that ended in one stretch, and their time."""

    tally: Tally = field(default_factory=Tally)
    end_s: int = 0
    within_ns: int = 0
    """Time within such steps in this stretch, whether or not they ended in it."""
    between_ns: int = 0


def stretches(
    store: Store, first_ns: int, last_ns: int, median_ns: float, shown: Mapping[tuple[str, bool], int]
) -> tuple[int, tuple[Bin, ...]]:
    """The width in ns and the stretches with steps, in order.

    `shown`: by (mode, evaluation), the process with the steps that the stretches cover. `median_ns`: the
    median step, which is the least width of a stretch. A stretch begins earlier if a step of its kind was already
    running and no other one ended. All other time without steps is a gap.
    """
    seconds = _width(max(last_ns - first_ns, 0) / SECOND, median_ns / SECOND)
    sums = _sums(store, seconds, shown)
    found = []
    for (mode, evaluation), slots in sums.items():
        for slot, one in sorted(slots.items()):
            if not one.tally.steps:
                continue
            first, elapsed = slot, one.within_ns + one.between_ns
            while (before := slots.get(first - 1)) is not None and not before.tally.steps and before.within_ns > 0:
                first -= 1
                elapsed += before.within_ns
            begin = max(first * seconds, first_ns // SECOND)  # a wide tally in place of deleted ones may begin earlier
            found.append(_bin(begin, max((slot + 1) * seconds, one.end_s), mode, evaluation, one, elapsed))
    return seconds * SECOND, tuple(sorted(found, key=lambda one: (one.end_ns, one.mode, one.evaluation)))


def _width(span_s: float, step_s: float) -> int:
    least = max(span_s / BINS, min(step_s, span_s))
    hours = -(-least // 3600)
    return next((seconds for seconds in _SECONDS if seconds >= least), int(hours) * 3600)


def _sums(
    store: Store, seconds: int, shown: Mapping[tuple[str, bool], int]
) -> dict[tuple[str, bool], dict[int, _StretchSum]]:
    """The sums by (mode, evaluation), then by number of the stretch. A mode that never trains has no evaluations."""
    trained = {mode for mode, kind in store.kinds() if not kind & EVALUATION}
    width = max(width for width in WIDTHS if seconds % width == 0)
    found: dict[tuple[str, bool], dict[int, _StretchSum]] = defaultdict(lambda: defaultdict(_StretchSum))
    there = sorted(set(shown.values()))
    for start, wide, key, tally in store.tally_rows(0, END, process=there, sketches=False, finest=width, widest=width):
        kind = key.mode, bool(key.kind & EVALUATION) and key.mode in trained
        if shown.get(kind) == key.process:
            one = found[kind][start // seconds]
            one.tally.merge(tally)
            one.end_s = max(one.end_s, start + wide)
    for row in store.time_rows(0, END, finest=width, widest=width, process=there):
        slot, spent = row.start_s // seconds, row.spent
        if shown.get((row.mode, False)) == row.process:
            training = found[row.mode, False][slot]
            training.within_ns += max(spent["training"], 0)
            training.between_ns += max(spent["between"], 0)
        kind = row.mode, row.mode in trained
        if shown.get(kind) == row.process:
            found[kind][slot].within_ns += max(spent["evaluation"], 0)
    return {kind: dict(slots) for kind, slots in found.items()}


def _bin(start_s: int, end_s: int, mode: str, evaluation: bool, one: _StretchSum, elapsed_ns: int) -> Bin:
    tally = one.tally
    samples = tally.sum("samples")
    return Bin(
        start_ns=start_s * SECOND,
        end_ns=end_s * SECOND,
        mode=mode,
        steps=tally.steps,
        wall_ns=tally.stat("step").total,
        longest_ns=tally.high_ns or 0,
        samples=samples.total if samples.count == tally.steps else None,
        parts=tuple(tally.stat(_SERIES[name]).total for name in PARTS),
        evaluation=evaluation,
        elapsed_ns=elapsed_ns,
    )
