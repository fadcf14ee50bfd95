"""dp against single over a whole run: the steps that `dpmon.model.compare` is given, and what it makes of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from dpmon.model.compare import compare, sentence
from dpmon.model.evidence import WARM_UP_STEPS
from dpmon.model.state import NOT_RUN, PHASES, StepSample
from dpmon.records import CALL_PHASES, STEP_PHASES
from dpmon.report.story import Compared, ModeChange

__all__ = ["Settled", "compared"]

KEPT = 4096
OPEN_STEPS_KEPT = 64
_CALL_AT = PHASES.index("scatter")
_FORWARD = PHASES.index("forward")
_SLOTS = tuple(PHASES.index(name) for name in STEP_PHASES)


class Settled:
    """The newest steps of each mode of one process (the first that trains), without those after a change of mode."""

    def __init__(self) -> None:
        self.steps: dict[str, deque[StepSample]] = {}
        self.seen: dict[str, int] = {}
        self._process: int | None = None
        self._mode: str | None = None
        self._since = 0
        self._open: dict[int, list[int]] = {}

    def call(self, process: int, step: int, phases: Sequence[int]) -> None:
        """A call; `phases`: offset (-1: did not run) and duration for each of CALL_PHASES."""
        if self._process not in (None, process) or max(phases[::2]) < 0:
            return
        sums = self._open.get(step)
        if sums is None:
            if len(self._open) >= OPEN_STEPS_KEPT:
                del self._open[next(iter(self._open))]
            sums = self._open[step] = [NOT_RUN] * len(CALL_PHASES)
        for index in range(len(CALL_PHASES)):
            if phases[2 * index] >= 0 and phases[2 * index + 1] >= 0:
                sums[index] = max(sums[index], 0) + phases[2 * index + 1]

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
        if self._process is None:
            self._process = process
        if process != self._process:
            return
        inside = self._open.pop(number, None)
        self._since = self._since + 1 if mode == self._mode else 0
        self._mode = mode
        self.seen[mode] = self.seen.get(mode, 0) + 1
        if self._since < WARM_UP_STEPS:
            return
        slots = [NOT_RUN] * len(PHASES)
        for slot, took in zip(_SLOTS, phases, strict=True):
            slots[slot] = NOT_RUN if took is None else took
        # As in dpmon.model.fold: the phases of the calls take their part out of forward, where they fit into it.
        if inside is not None and sum(took for took in inside if took > 0) <= slots[_FORWARD]:
            slots[_CALL_AT : _CALL_AT + len(CALL_PHASES)] = inside
            slots[_FORWARD] -= sum(took for took in inside if took > 0)
        kept = self.steps.setdefault(mode, deque(maxlen=KEPT))
        kept.append(StepSample(number, start + wall, wall, samples, tuple(slots)))


def compared(settled: Settled, virtual: bool, changes: Sequence[ModeChange]) -> Compared | None:
    """The verdict; None where not both modes were seen."""
    if not {"dp", "single"} <= settled.seen.keys():
        return None
    devices = next((change.devices for change in changes if change.mode == "dp" and change.refused is None), ())
    steps = {mode: list(found) for mode, found in settled.steps.items()}
    found = compare(steps, seen=settled.seen, devices=devices, virtual=virtual)
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
    )
