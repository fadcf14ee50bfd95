"""dp against single over a whole run: the steps that `dpmon.model.compare` is given, and what it makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappush, heapreplace

from dpmon.model.compare import compare, sentence
from dpmon.model.evidence import WARM_UP_STEPS, ModeFacts
from dpmon.model.finding import many, took
from dpmon.model.phases import add_call, with_calls
from dpmon.model.state import NOT_RUN, StepSample
from dpmon.model.stats import median
from dpmon.report.story import Compared, Deleted, ModeChange
from dpmon.run.draws import ALL_DRAWN
from dpmon.run.kept import chance

__all__ = ["Settled", "compared"]

KEPT = ALL_DRAWN


class Settled:
    """Steps of each mode of one process (the first that trains), without those after a change of mode: all of them, or
    KEPT that are drawn evenly from the whole record.
    """

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[int, int, StepSample]]] = {}
        """By mode a heap of its steps, that which goes first on top: as the screen draws them."""
        self._settled: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.process: int | None = None
        """Whose steps they are."""
        self._mode: str | None = None
        self._since = 0
        self._open: dict[int, list[int]] = {}

    def call(self, process: int, step: int, phases: Sequence[int]) -> None:
        """A call; `phases`: offset (-1: did not run) and duration for each of CALL_PHASES."""
        if self.process not in (None, process) or max(phases[::2]) < 0:
            return
        pairs = zip(phases[::2], phases[1::2], strict=True)
        add_call(self._open, step, [took if offset >= 0 else NOT_RUN for offset, took in pairs])

    def step(
        self,
        process: int,
        number: int,
        mode: str,
        start: int,
        wall: int,
        samples: int | None,
        phases: Sequence[int | None],
    ) -> None:
        """A step; `phases` as in STEP_PHASES."""
        if self.process is None:
            self.process = process
        if process != self.process:
            return
        inside = self._open.pop(number, None)
        self._since = self._since + 1 if mode == self._mode else 0
        self._mode = mode
        self.seen[mode] = self.seen.get(mode, 0) + 1
        if self._since < WARM_UP_STEPS:
            return
        kept = self._kept.setdefault(mode, [])
        count = self._settled[mode] = self._settled.get(mode, 0) + 1
        place = -chance(number)
        if len(kept) >= KEPT and place <= kept[0][0]:
            return
        slots = with_calls((NOT_RUN if took is None else took for took in phases), inside)
        entry = (place, count, StepSample(number, start + wall, wall, samples, slots))
        if len(kept) < KEPT:
            heappush(kept, entry)
        else:
            heapreplace(kept, entry)

    @property
    def steps(self) -> dict[str, list[StepSample]]:
        """By mode, in the order of time."""
        return {
            mode: sorted((step for _, _, step in kept), key=lambda each: each.end_ns)
            for mode, kept in self._kept.items()
        }

    def drawn(self) -> tuple[tuple[str, int, int], ...]:
        """Of modes of which not all steps were kept: how many were, and of how many."""
        return tuple((mode, KEPT, count) for mode, count in self._settled.items() if count > KEPT)


def compared(
    settled: Settled,
    virtual: bool,
    changes: Sequence[ModeChange],
    deleted: Sequence[Deleted] = (),
    inputs: Sequence[tuple[int | None, tuple[int, int]]] = (),
) -> Compared | None:
    """The verdict; None where not both modes were seen. Deleted steps have no part in it; its note tells of them."""
    gone = {one.facts.mode: one.facts for one in deleted}
    if not {"dp", "single"} <= settled.seen.keys() | gone.keys():
        return None
    lost = [mode for mode in ("dp", "single") if mode not in settled.seen]
    note = _deleted(settled, gone)
    if lost:
        missing = f"no verdict: the steps in {' and '.join(lost)} were deleted"
        return Compared(None, missing, None, None, None, None, None, tuple(settled.seen.items()), note=note)
    devices = next((change.devices for change in changes if change.mode == "dp" and change.refused is None), ())
    waits = [span for process, span in inputs if process == settled.process]
    found = compare(settled.steps, seen=settled.seen, devices=devices, virtual=virtual, waits=waits)
    speedup = found.speedup
    return Compared(
        sentence=sentence(found),
        missing=found.missing,
        speedup=None if speedup is None else speedup.value,
        low=None if speedup is None else speedup.low,
        high=None if speedup is None else speedup.high,
        efficiency=found.efficiency,
        outcome=found.outcome,
        steps=tuple((mode, side.steps) for mode, side in found.sides.items()),
        by_mean=found.by_mean,
        note=note,
        drawn=settled.drawn(),
    )


def _deleted(settled: Settled, gone: Mapping[str, ModeFacts]) -> str | None:
    """What is known of the steps that have no part in a verdict since they were deleted; None if none were."""
    if not any(mode in gone for mode in ("dp", "single")):
        return None
    texts = []
    for mode in ("dp", "single"):
        left = median([step.wall_ns for step in settled.steps.get(mode, ())])
        parts = []
        if mode in gone:
            parts.append(f"{took(gone[mode].median_ns)} over {many(gone[mode].steps, 'step')} that were deleted")
        if left is not None:
            parts.append(f"{took(left)} over those that are left")
        if parts:
            texts.append(f"{mode} {' and '.join(parts)}")
    return (
        "a verdict is of the steps that are left only. Medians, by the sums of the deleted ones (within 3 %,"
        f" evaluations and the first after a change among them): {'; '.join(texts)}"
    )
