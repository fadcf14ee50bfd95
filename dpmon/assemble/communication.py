"""Collectives of the sampled steps: when each could begin, and the step that was under way at its start.

A collective ends when it pleases, maybe after its step. So its span waits here until a step has ended after its start.
Collectives of one process group run one after the other. So one could begin when it was launched, and those launched
before it had ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from dpmon.assemble.definitions import Definitions
from dpmon.record.spans import Flag, Span
from dpmon.record.wire import Collected, pack_collective

MOST_STEPS = 32
"""Limit of remembered steps: a collective that ends later than this many steps is in no step."""
MOST_WAITING = 1 << 14
MOST_GROUPS = 256
MOST_BEFORE = 64
"""Limit of collectives that one on the same group is compared with."""


class Communication:
    """The collectives of one process."""

    def __init__(self, known: Definitions) -> None:
        self._known = known
        self._steps: deque[tuple[int, int, int]] = deque(maxlen=MOST_STEPS)
        """Start, end and number of the last steps."""
        self._waiting: list[Collected] = []
        """Those that no step has ended after."""
        self._before: dict[str, list[tuple[int, int]]] = {}
        """By group: start and end of the last ones."""
        self._ready: list[Collected] = []

    def take(self, span: Span) -> bool:
        """Take a span; False if nothing defines it."""
        quantity = span.inputs | span.outputs << 32
        unended = span.took if span.flags & Flag.SKIPPED else 0
        took = -1 if unended else span.took
        queued = -1
        if span.site:
            value = self._known.collective(span.site)
            if value is None:
                return False
            if took >= 0 and value["operation"] is not None:
                queued = self._queued(str(value["group"]), span)
        one = Collected(span.number, span.site, span.inside, unended & 0xFF, 0, span.start, took, queued, quantity)
        self._place(one)
        return True

    def _queued(self, group: str, span: Span) -> int:
        """How long a collective waited for those launched before it on its group, which are known by their ends (ns).

        One that ended after it ran beside it.
        """
        before = self._before.setdefault(group, [])
        ends = [end for start, end in before if start <= span.start and span.start < end <= span.end]
        before.append((span.start, span.end))
        del before[:-MOST_BEFORE]
        if len(self._before) > MOST_GROUPS:
            del self._before[next(iter(self._before))]
        return max(ends, default=span.start) - span.start

    def _place(self, one: Collected) -> None:
        if self._steps and self._steps[-1][1] > one.middle:
            self._ready.append(one._replace(step=self._step_at(one.middle)))
        else:
            self._waiting.append(one)
            if len(self._waiting) > MOST_WAITING:
                self._ready.append(self._waiting.pop(0))

    def _step_at(self, time: int) -> int:
        """The step under way at a time; 0 for none."""
        at = bisect_right(self._steps, (time, 1 << 63, 0))
        if at == 0:
            return 0
        _, end, number = self._steps[at - 1]
        return number if time < end else 0

    def step(self, number: int, start: int, end: int) -> None:
        """A step has ended."""
        if self._steps and number <= self._steps[-1][2]:
            return  # a predecessor has said so
        self._steps.append((start, end, number))
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                self._place(one)

    def end(self) -> None:
        """No more steps end."""
        self._ready += self._waiting
        self._waiting.clear()

    def payloads(self) -> list[bytes]:
        """Payloads of the collectives with known steps, each once, with the definitions that they need."""
        found: list[bytes] = []
        for one in self._ready:
            found += self._known.payloads(one.definition)
            found.append(pack_collective(one))
        self._ready.clear()
        return found

    def state(self) -> dict[str, Any]:
        """State for a successor."""
        return {"steps": list(self._steps), "waiting": self._waiting, "before": self._before}

    def go_on(self, state: Mapping[str, Sequence[Any]]) -> None:
        """Go on from a predecessor's state; raises LookupError, TypeError, ValueError or AttributeError."""
        self._steps.extend(tuple(map(int, step)) for step in state["steps"])  # type: ignore[misc]
        self._waiting = [Collected(*map(int, one)) for one in state["waiting"]]
        before: Mapping[str, Any] = state["before"]  # type: ignore[assignment]
        self._before = {str(group): [(int(a), int(b)) for a, b in ones] for group, ones in before.items()}
