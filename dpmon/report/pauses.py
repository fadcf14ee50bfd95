"""When nothing of a run trained, since what would have was paused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dpmon.report.pause_spans import Span, Stretch
from dpmon.store.accounting import union

__all__ = ["any_of", "together", "within"]


def any_of(stretches: Iterable[Stretch], end_ns: int | None) -> list[Span]:
    """When any process was paused; a pause that has not ended goes on until `end_ns`."""
    return union(span for spans in _by_process(stretches, end_ns).values() for span in spans)


def together(stretches: Iterable[Stretch], there: Mapping[int, Span], end_ns: int | None) -> list[Span]:
    """When a process was paused, and no other that was there then was not."""
    paused = {process: union(spans) for process, spans in _by_process(stretches, end_ns).items()}
    busy = [span for process, whole in there.items() for span in _without([whole], paused.get(process, ()))]
    return _without(union(span for spans in paused.values() for span in spans), union(busy))


def _by_process(stretches: Iterable[Stretch], end_ns: int | None) -> dict[int, list[Span]]:
    found: dict[int, list[Span]] = {}
    for one in stretches:
        end = end_ns if one.end_ns is None else one.end_ns
        if end is not None:
            found.setdefault(one.process, []).append((one.start_ns, end))
    return found


def _without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of `spans` is in none of `others`; both as `union` gives them."""
    found: list[Span] = []
    place = 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                found.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if begin < end:
            found.append((begin, end))
    return found


def within(spans: Sequence[Span], begin_ns: int, end_ns: int) -> int:
    """How much of the time from the one to the other they are, ns."""
    return sum(max(min(end, end_ns) - max(begin, begin_ns), 0) for begin, end in spans)
