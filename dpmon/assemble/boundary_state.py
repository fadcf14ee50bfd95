"""The state that decides where steps end: calls of the open step, batches, order of optimizers, and timeout."""

from __future__ import annotations

from dpmon.assemble.nesting import LEARNS
from dpmon.record.record_types import Batches
from dpmon.record.schema import EVALUATION, FORWARD_ONLY, TRAINING
from dpmon.record.span_format import Span


class OpenStep:
    """A step that has not ended."""

    calls = 0
    learns = False
    """Whether one of its calls trains or records gradients."""
    backward = False
    """Whether a backward pass ran in it."""
    trains = False
    """Whether a backward pass or an optimizer step ran in it."""
    could_train = False
    """Whether it has a call in training mode with gradients."""
    module = 0
    """Module of its first call."""
    first_call = 0
    """Start of its first call."""
    last_evaluated = 0
    """Module of its last evaluation call."""
    evaluated: frozenset[int] = frozenset()
    """Modules of all evaluation calls."""

    def add_call(self, call: Span, module: int) -> bool:
        """Add a call of `module`. Return whether the call trains or records gradients."""
        if not self.calls:
            self.module, self.first_call = module, call.start
        self.calls += 1
        self.could_train = self.could_train or kind_of_call(call) == FORWARD_ONLY
        if call.flags & LEARNS:
            self.learns = True
            return True
        self.last_evaluated = module
        self.evaluated |= {module}
        return False

    @property
    def only_evaluates(self) -> bool:
        """Whether it has only evaluation calls so far, and nothing in it trains."""
        return not (self.learns or self.trains)

    @property
    def kind(self) -> int:
        """Its kind so far: a key of dpmon.record.schema.STEP_KINDS."""
        if self.trains:
            return TRAINING
        return FORWARD_ONLY if self.could_train else EVALUATION


def kind_of_call(call: Span) -> int:
    """Return the kind of a call, and of a step with such calls that trains nothing."""
    return FORWARD_ONLY if call.flags & LEARNS == LEARNS else EVALUATION


class OptimizerCycle:
    """The order of the optimizers. When one of them steps for the second time, the one before it ends a step."""

    def __init__(self) -> None:
        self.ends = -1
        """Number of the optimizer that ends a step; -1 while unknown."""
        self.since: dict[int, None] = {}
        """The optimizers that have stepped since the last end of a step, in order."""

    def add_optimizer_step(self, site: int) -> bool | None:
        """Add an optimizer step. Return whether it ends a step of the loop.

        None means that the cycle has changed, so the spans of the open step must be assembled again.
        """
        if site == self.ends:
            self.since.clear()
            return True
        if site not in self.since:
            self.since[site] = None
            return False
        self.close_cycle()
        return None

    def close_cycle(self) -> bool:
        """Treat the optimizers that have stepped as the whole cycle. Return False if there are none."""
        if not self.since:
            return False
        self.ends = list(self.since)[-1]
        self.since.clear()
        return True

    def forget_optimizer(self, site: int) -> None:
        """Forget an optimizer that was freed, because it ends no more steps."""
        self.since.pop(site, None)
        if site == self.ends:
            self.ends = -1


FEW_CALLS, MANY_CALLS = 64, 4096
SOON_NS, LATE_NS = 5_000_000_000, 60_000_000_000
"""Limits since the first call of a step, without and with an optimizer."""
TIMES = 4
"""A step may take this many times the last `pace`, or have this many times the calls of the last step."""


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
        self.pace = max(end - (self.ended or start), 0)
        self.ended = end

    def has_passed(self, calls: int, waited_ns: int, *, has_optimizer: bool, may_learn: bool) -> bool:
        """Return whether to stop waiting in a step with this many calls, the first of them `waited_ns` ago."""
        max_calls = MANY_CALLS if has_optimizer or may_learn else FEW_CALLS
        max_ns = LATE_NS if has_optimizer else SOON_NS
        return calls > max(max_calls, TIMES * self.calls) or waited_ns > max(max_ns, TIMES * self.pace)


class FetchTracker:
    """Counts the batches fetched since the last step, by loader loop."""

    def __init__(self) -> None:
        self._batches_by_loop: dict[int, Batches] = {}
        """In order of the first fetch."""
        self._last_batches: Batches | None = None
        """The batches of the last step that fetched any."""
        self._loader_ended = False
        """Whether the loop has reached the end of its loader, without another fetch since."""
        self._dataset = 0
        """The dataset of the loop that drove the last step with batches of several loops."""

    def add_fetch(self, fetch: Span, ended: bool) -> None:
        """Add a fetch. `ended`: whether it found the loader exhausted, or raised."""
        loop, dataset, length = fetch.site, fetch.inputs, fetch.outputs - 1
        if not loop:
            return
        if ended:
            last_loop = next(iter(self._batches_by_loop), 0 if self._last_batches is None else self._last_batches.loop)
            self._loader_ended = self._loader_ended or loop == last_loop
            return
        previous = self._batches_by_loop.get(loop)
        fetched = 1 if previous is None else previous.fetched + 1
        self._batches_by_loop[loop] = Batches(loop, dataset, length if length >= 0 else None, fetched)
        self._loader_ended = False

    def pop_step_batches(self) -> Batches | None:
        """Return the batches of the step that ends now, and start again; None if it used none.

        If they come from several loops, return those of the loop that drives the training.
        """
        batches_by_loop, self._batches_by_loop = self._batches_by_loop, {}
        if batches_by_loop:
            loop = next(iter(batches_by_loop))
            if len(batches_by_loop) > 1:
                loop = self._find_driving_loop(batches_by_loop)
            self._last_batches = batches_by_loop[loop]
        elif self._loader_ended and self._last_batches is not None:
            self._last_batches = self._last_batches._replace(fetched=0)
        else:
            return None
        return self._last_batches._replace(is_exhausted=True) if self._loader_ended else self._last_batches

    def _find_driving_loop(self, batches_by_loop: dict[int, Batches]) -> int:
        """Return the loop that drives a step with batches of several loops.

        Without an earlier decision, it is the newest loop if the step begins with it: `for` starts its loader after
        those that its body reads. Otherwise it is the shortest one: `zip` may read them in turn, and ends with it.
        """
        newest = max(batches_by_loop)
        driver = max(batches_by_loop.values(), key=lambda batches: (-(batches.length or 1 << 32), batches.loop))
        if next(iter(batches_by_loop)) == newest:
            driver = batches_by_loop[newest]
        same_dataset = (batches for batches in batches_by_loop.values() if batches.dataset == self._dataset)
        driver = max(same_dataset, default=driver)
        if self._last_batches is not None:
            driver = batches_by_loop.get(self._last_batches.loop, driver)
        self._dataset = driver.dataset
        return driver.loop
