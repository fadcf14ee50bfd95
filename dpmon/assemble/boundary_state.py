"""What the rules know about the open step and the loop: calls, batches, the order of optimizers, and the pace."""

from __future__ import annotations

from dpmon.assemble.nesting import LEARNS
from dpmon.assemble.step_totals import StepTotals
from dpmon.record.record_types import Batches
from dpmon.record.span_format import Span


class OpenStep:
    """A step that has not ended."""

    calls = 0
    only_evaluates = True
    """Whether it has only evaluation calls, which neither train nor record gradients."""
    backward = False
    """Whether a backward pass ran in it."""
    module = 0
    """Module of its first call."""
    first_call = 0
    """When its first call began."""
    last_evaluated = 0
    """Module of its last evaluation call."""
    evaluated: frozenset[int] = frozenset()
    """Modules of all evaluation calls."""
    part: StepTotals | None = None
    """Totals of its recorded part; None while all its blocks are held."""

    def add_call(self, call: Span, module: int) -> bool:
        """Add a call of `module`; return whether the call trains or records gradients."""
        if not self.calls:
            self.module, self.first_call = module, call[6]
        self.calls += 1
        if call[2] & LEARNS:
            self.only_evaluates = False
            return True
        self.last_evaluated = module
        self.evaluated |= {module}
        return False


_MAX_OPTIMIZERS = 4096


class OptimizerCycle:
    """The order in which optimizers step. When one steps for the second time, the optimizer before it ends a step."""

    def __init__(self) -> None:
        self.ends = -1
        """Number of the optimizer that ends a step; -1 while unknown."""
        self.since: dict[int, None] = {}
        """The optimizers that have stepped since the last end of a step, in order."""

    def add_optimizer_step(self, site: int) -> bool | None:
        """Take an optimizer step; return whether it ends a step of the loop.

        None means that the cycle has changed: spans assembled under the old cycle must be assembled again.
        """
        if site == self.ends:
            self.since.clear()
            return True
        if site not in self.since:
            if len(self.since) < _MAX_OPTIMIZERS:
                self.since[site] = None
            return False
        self.close_cycle()
        return None

    def close_cycle(self) -> bool:
        """Treat the optimizers that have stepped as the whole cycle; False if there are none."""
        if not self.since:
            return False
        self.ends = list(self.since)[-1]
        self.since.clear()
        return True

    def forget_optimizer(self, site: int) -> None:
        """Forget a freed optimizer, which ends no more steps."""
        self.since.pop(site, None)
        if site == self.ends:
            self.ends = -1


FEW_CALLS, MANY_CALLS = 64, 4096
SOON_NS, LATE_NS = 5_000_000_000, 60_000_000_000
"""Limits since the first call of a step, without and with an optimizer."""
TIMES = 4
"""A step may take this many times the last `pace`, or have this many times the calls of the last step."""
MAX_PACE = 3_600_000_000_000


class BoundaryTimeout:
    """Tracks time and number of calls between optimizer steps."""

    def __init__(self) -> None:
        self.pace = 0
        """ns between the last two optimizer steps that ended a step of the loop."""
        self.ended = 0
        """End of the last of these steps; 0 for none."""
        self.calls = 0
        """Calls between the last two of these steps, or before the first."""
        self.calls_before = 0
        """Calls of the process up to the last of these steps."""

    def add_optimizer_step(self, start: int, end: int, calls: int) -> None:
        """Note that an optimizer ended the step that began at `start`. `calls`: calls of the process so far."""
        self.calls, self.calls_before = max(calls - self.calls_before, 0), calls
        self.pace = min(max(end - (self.ended or start), 0), MAX_PACE)
        self.ended = end

    def has_too_many_calls(self, calls: int, many: bool) -> bool:
        """Whether to stop waiting in a step with this many calls. `many`: allow MANY_CALLS instead of FEW_CALLS."""
        return calls > max(MANY_CALLS if many else FEW_CALLS, TIMES * self.calls)

    def has_waited_too_long(self, took: int, made: bool) -> bool:
        """Whether to stop waiting `took` ns after the first call of a step. `made`: whether an optimizer exists."""
        return took > max(LATE_NS if made else SOON_NS, TIMES * self.pace)


class FetchTracker:
    """The batches fetched since the last step, by loop over a loader."""

    def __init__(self) -> None:
        self._found: dict[int, Batches] = {}
        """In order of the first fetch."""
        self._last: Batches | None = None
        """Those of the last step that fetched any."""
        self._over = False
        """Whether the loop has reached the end of its loader, without another fetch since."""
        self._dataset = 0
        """The dataset of the loop that drove the last step with batches of several loops."""

    def add_fetch(self, fetch: Span, failed: bool) -> None:
        """Note a fetch; `failed`: it found the loader at its end, or raised."""
        loop, dataset, length = fetch.site, fetch.inputs, fetch.outputs - 1
        if not loop:
            return
        if failed:
            last = next(iter(self._found), 0 if self._last is None else self._last.loop)
            self._over = self._over or loop == last
            return
        before = self._found.get(loop)
        fetched = 1 if before is None else before.fetched + 1
        self._found[loop] = Batches(loop, dataset, length if length >= 0 else None, fetched)
        self._over = False

    def pop_step_batches(self) -> Batches | None:
        """Take the batches of the step that ends now. Of several loops, one drives the training loop."""
        found, self._found = self._found, {}
        if found:
            self._last = found[next(iter(found)) if len(found) == 1 else self._find_driving_loop(found)]
        elif self._over and self._last is not None:
            self._last = self._last._replace(fetched=0)
        else:
            return None
        return self._last._replace(is_exhausted=True) if self._over else self._last

    def _find_driving_loop(self, found: dict[int, Batches]) -> int:
        """Return the loop that drives a step with batches of several loops: at first the newest one or the shortest.

        It is the newest one if the step begins with it: `for` starts its loader after those that its body reads. Else
        `zip` may read them in turn, and ends with the shortest.
        """
        newest = max(found)
        driver = max(found.values(), key=lambda each: (-(each.length or 1 << 32), each.loop))
        if next(iter(found)) == newest:
            driver = found[newest]
        driver = max((each for each in found.values() if each.dataset == self._dataset), default=driver)
        if self._last is not None:
            driver = found.get(self._last.loop, driver)
        self._dataset = driver.dataset
        return driver.loop
