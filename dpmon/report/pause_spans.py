"""The pauses of a run: when each began, after which step, how long it took, and what all of them come to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.store.accounting import union

if TYPE_CHECKING:
    from dpmon.store.queries import Store

__all__ = ["PauseTotals", "Paused", "Pauses", "Span", "Stretch", "pauses_in"]

KEPT = 1000
"""Rows, those of refusals too."""
STRETCHES = 20_000
_SLACK_NS = 1_000_000_000
"""What is apart by no more is together: the end that a begin has and the one that its time says, or what several
processes do at one request."""

Span = tuple[int, int]
"""Begin and end in ns since the run's start."""


class Paused(NamedTuple):
    """The training paused between two steps (or was asked to and refused); ns since the run's start."""

    process: int
    step: int | None
    """After which it paused."""
    start_ns: int | None
    took_ns: int | None
    """None for one that goes on, was refused, or whose end was not recorded."""
    end_ns: int | None
    """At the latest, where its end was not recorded."""
    on: bool
    """Whether it had not ended when the record did."""
    reason: str | None
    """Why it went on by itself."""
    refused: str | None


class Stretch(NamedTuple):
    """When one process was paused."""

    start_ns: int
    end_ns: int | None
    """None: it had not ended when the record did."""
    process: int
    known: bool
    """Whether it ended then; else then at the latest, which is its start where nothing is known."""


class PauseTotals(NamedTuple):
    """What a run's pauses come to. A time in which several processes were paused is one, however many they were."""

    times: int = 0
    ns: int = 0
    """In pauses whose end is known."""
    unended: int = 0
    """Whose end was not recorded, though they did end."""
    on: bool = False
    """Whether a process was in one when the record ended."""
    unplaced: int = 0
    """Of which it is not known from when to when at most they were."""


class _Open(NamedTuple):
    start_ns: int | None
    row: int | None
    stretch: int | None
    """Places in the lists; None for one that is not in it."""


class Pauses:
    """Takes `pause` records and steps, those of one process in their order."""

    def __init__(self) -> None:
        self.found: list[Paused] = []
        """KEPT at most."""
        self.left_out = self.refusals_left_out = 0
        """Beyond KEPT: pauses, and refusals."""
        self.stretches: list[Stretch] = []
        """Of all pauses whose begin is known, STRETCHES at most."""
        self._apart = PauseTotals()
        """Of those that are in no stretch."""
        self._open: dict[int, _Open] = {}
        """By process the pause it is in."""
        self._newest_ns = -1
        """When the last step of any process began."""

    def event(self, data: Mapping[str, Any]) -> tuple[bool, int | None, int | None] | None:
        """Take a `pause` record, which must have a process number. Return whether it began, when, and its length (ns).

        None if the record is not about a pause.
        """
        process, paused = data["process"], data.get("paused")
        if not isinstance(paused, bool):
            return None
        refused, reason = (value if isinstance(value := data.get(key), str) else None for key in ("refused", "reason"))
        at, took = _ns(data.get("t_s")), _ns(data.get("paused_s"))
        step = value if type(value := data.get("step")) is int else None
        if refused is not None:
            self._row(Paused(process, step, at, None, None, False, reason, refused))
            return None
        opened = self._open.pop(process, None)
        if opened is not None and (paused or _is_of_another(opened, at, took)):
            # That it ended was not recorded: it is over, and was so when the next one began.
            self._over(opened, at if paused else (at or 0) - (took or 0))
            opened = None
        if paused:
            self._begin(Paused(process, step, at, None, None, True, reason, None))
        elif opened is not None:
            self._end(opened, at, took, reason)
        elif took is not None:  # that it began was not recorded
            self._begin(Paused(process, step, None if at is None else max(at - took, 0), took, at, False, reason, None))
        return paused, at, took

    def step(self, process: int, start: int) -> None:
        """A step that began after a pause whose end was not recorded: that one is over, and took no longer."""
        self._newest_ns = max(self._newest_ns, start)
        opened = self._open.get(process)
        if opened is not None and opened.start_ns is not None and start >= opened.start_ns:
            del self._open[process]
            self._over(opened, start)

    def settle(self) -> None:
        """There is no more: a pause that has not ended goes on, unless a process that was not asked began a step after
        it; then its own may have been killed in it, and nobody knows when.
        """
        for process, opened in list(self._open.items()):
            if opened.start_ns is None or opened.start_ns + _SLACK_NS < self._newest_ns:
                del self._open[process]
                self._over(opened, None)

    def total(self, end_ns: int | None = None) -> PauseTotals:
        """What they come to; `end_ns`: when the run ended, and with it the pauses that had not."""
        times, ns, unended, on, unplaced = self._apart
        known: list[Span] = []
        reach, ended = -1, True
        for start, end, _, is_known in sorted(self.stretches, key=lambda one: one.start_ns):
            if start >= reach:
                unended += not ended
                times, reach, ended = times + 1, start, False
            if end is None:
                on = True
                reach, ended = 1 << 63, True
                if end_ns is not None:
                    known.append((start, end_ns))
            else:
                reach, ended = max(reach, end), ended or is_known
                unplaced += not is_known and end == start
                if is_known:
                    known.append((start, end))
        ns += sum(end - start for start, end in union(known))
        return PauseTotals(times, ns, unended + (not ended), on, unplaced)

    def _begin(self, pause: Paused) -> None:
        """Of a pause that is over the end is known."""
        row, stretch, start, took = self._row(pause), None, pause.start_ns, pause.took_ns
        if start is not None and len(self.stretches) < STRETCHES:
            stretch = len(self.stretches)
            self.stretches.append(Stretch(start, None if took is None else start + took, pause.process, True))
        else:
            apart = self._apart
            self._apart = apart._replace(
                times=apart.times + 1,
                ns=apart.ns + (took or 0),
                unended=apart.unended + (took is None),
                unplaced=apart.unplaced + 1,
            )
        if pause.on:
            self._open[pause.process] = _Open(start, row, stretch)

    def _row(self, pause: Paused) -> int | None:
        if len(self.found) >= KEPT:
            self.left_out += pause.refused is None
            self.refusals_left_out += pause.refused is not None
            return None
        self.found.append(pause)
        return len(self.found) - 1

    def _end(self, opened: _Open, at: int | None, took: int | None, reason: str | None) -> None:
        began = opened.start_ns
        if took is None and at is not None and began is not None:
            took = max(at - began, 0)
        if took is None:
            self._over(opened, None, reason)
            return
        end = None if began is None else began + took
        self._change(opened, took_ns=took, end_ns=end, on=False, reason=reason)
        if opened.stretch is None:
            apart = self._apart
            self._apart = apart._replace(ns=apart.ns + took, unended=apart.unended - 1)
        else:
            self.stretches[opened.stretch] = self.stretches[opened.stretch]._replace(end_ns=end)

    def _over(self, opened: _Open, at: int | None, reason: str | None = None) -> None:
        """It ended, at that time at the latest (None: nobody knows when)."""
        self._change(opened, end_ns=at, on=False, reason=reason)
        if opened.stretch is not None:
            one = self.stretches[opened.stretch]
            end = one.start_ns if at is None else max(at, one.start_ns)
            self.stretches[opened.stretch] = one._replace(end_ns=end, known=False)

    def _change(self, opened: _Open, **what: Any) -> None:
        if opened.row is not None:
            self.found[opened.row] = self.found[opened.row]._replace(**what)


def pauses_in(store: Store) -> Pauses:
    """All pauses of a run. A pause without an end in the record is over when its process's next step began."""
    found = Pauses()
    unended: dict[int, int] = {}
    """By process, when its newest pause began, if no end has followed."""

    def end(process: int, until: int | None) -> None:
        began = unended.pop(process, None)
        step = None if began is None else store.next_step_ns(process, began)
        if step is not None and (until is None or step < until):
            found.step(process, step)

    for event in store.events("pause"):
        process, at = event.data.get("process"), _ns(event.data.get("t_s"))
        if type(process) is not int:
            continue
        begins = event.data.get("paused") is True
        if event.data.get("refused") is not None:
            begins = False
        elif begins:
            end(process, at)
        else:
            unended.pop(process, None)
        found.event(event.data)
        if begins and at is not None:
            unended[process] = at
    for process in list(unended):
        end(process, None)
    for newest in store.steps(1):
        found.step(newest.process, newest.start_ns)
    found.settle()
    return found


def _is_of_another(opened: _Open, at: int | None, took: int | None) -> bool:
    """Whether an end at that time, of a pause that took so long, is none of this one."""
    known = at is not None and took is not None and opened.start_ns is not None
    return known and (at or 0) - (took or 0) > (opened.start_ns or 0) + _SLACK_NS


def _ns(seconds: object) -> int | None:
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e9:
        return None
    return int(seconds * 1e9)
