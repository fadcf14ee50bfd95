"""Reads events of processes and of the supervisor: facts of a process, modes, pauses, warnings and waits. Pure.

Any program may have written an event, so invalid ones are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.model.communication import WRAPPERS_READ, Wrapper, newest_wrappers
from dpmon.model.members import ns_in, text_in, whole_in
from dpmon.model.process import Refusal
from dpmon.model.state import ModeChange, PauseChange, WarningText
from dpmon.record.kinds import Event
from dpmon.record.wire import MODES

if TYPE_CHECKING:
    from dpmon.store.store_at import StoreAt

CHANGES_READ = 500
"""Most changes of mode to read; older ones do not affect the current mode."""
TEXTS_READ = 100
ROOTS_KEPT = 32
DEVICES_READ = 4096
ANSWERING_STEPS = 100
"""Every root that is still called answers a request within this many steps."""


class InForce(NamedTuple):
    """The mode of a process, its devices, and the reason."""

    mode: str
    devices: tuple[str, ...]
    virtual: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Announced:
    """The newest events of each kind, oldest first."""

    info: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Data of the newest `process` event, by process."""
    changes: tuple[ModeChange, ...] = ()
    pauses: tuple[PauseChange, ...] = ()
    warnings: tuple[WarningText, ...] = ()
    wrappers: tuple[Wrapper, ...] = ()
    """The newest record of each DistributedDataParallel."""
    _waits: tuple[tuple[int, int, int], ...] = ()
    """Pid, start and end of each wait for a line of input."""

    @classmethod
    def read(cls, rows: StoreAt) -> Announced:
        """Read the events up to the time of `rows`."""
        info = {
            number: event.data
            for event in rows.lasting("process")
            if (number := whole_in(event.data, "process")) is not None
        }
        texts = rows.lasting("warning", TEXTS_READ)
        return cls(
            info,
            _known(mode_change(event.data) for event in rows.lasting("mode", CHANGES_READ)),
            _known(pause_change(event.data) for event in rows.lasting("pause", TEXTS_READ)),
            _known(_warning(event) for event in texts),
            newest_wrappers(event.data for event in rows.lasting("ddp", WRAPPERS_READ)),
            _known(_wait(event) for event in rows.lasting("input", TEXTS_READ)),
        )

    def rank_of(self, process: int) -> int | None:
        """The rank that a process reported."""
        return whole_in(self.info.get(process, {}), "rank")

    def in_force(self, process: int, step: tuple[str, int] | None, called: str) -> InForce:
        """The mode of a process; `step`: mode and end of its last step, `called`: the mode of its last call.

        A change after the last step takes effect at once.
        """
        own = [change for change in self.changes if change.process == process]
        since = {change.root: change.mode for change in own if step is None or (change.t_ns or 0) > step[1]}
        mode = step[0] if step is not None else called
        if since:  # a root that cannot be split stays single beside one that is split
            mode = "dp" if "dp" in since.values() else "single"
        given = [change for change in own if change.refused is None]
        change = next((change for change in reversed(given) if change.mode == mode), given[-1] if given else None)
        if change is None:
            return InForce(mode, (), False, None)
        devices = next((each.devices for each in reversed(given) if each.mode == mode and each.devices), change.devices)
        return InForce(mode, devices, change.virtual, change.reason)

    def devices_of(self, process: int) -> dict[str, tuple[tuple[str, ...], bool]]:
        """The last devices of a process, and whether they are virtual, by mode."""
        return {
            change.mode: (change.devices, change.virtual)
            for change in self.changes
            if change.process == process and change.refused is None and change.devices
        }

    def refusals_of(self, process: int) -> dict[str, Refusal]:
        """The refused mode of each root that refused in its last answer, by root."""
        found: dict[str, Refusal] = {}
        answered = 0
        for change in self.changes:
            if change.process != process:
                continue
            if change.requested_by == "user":
                if (change.step or 0) > answered + ANSWERING_STEPS:
                    found.clear()  # the roots may be gone; those still called answer again
                answered = max(answered, change.step or 0)
            found.pop(change.root, None)
            if change.refused is not None and len(found) < ROOTS_KEPT:
                found[change.root] = Refusal("single" if change.mode == "dp" else "dp", change.refused)
        return found

    def paused_since(self, process: int, step_ns: int | None) -> int | None:
        """The start of a process's pause; `step_ns`: the start of its last step, which ends a pause."""
        newest = next((one for one in reversed(self.pauses) if one.process == process and one.refused is None), None)
        if newest is None or not newest.paused or newest.t_ns is None:
            return None
        return None if step_ns is not None and step_ns >= newest.t_ns else newest.t_ns

    def waits_of(self, process: int) -> tuple[tuple[int, int], ...]:
        """Start and end of each wait of a process for a line of input."""
        pid = whole_in(self.info.get(process, {}), "pid")
        return tuple((begin, end) for of, begin, end in self._waits if of == pid)


def _known(found: Any) -> tuple[Any, ...]:
    return tuple(one for one in found if one is not None)


def mode_change(data: Mapping[str, Any]) -> ModeChange | None:
    """The content of a `mode` record; None if process or mode is missing."""
    number, mode = whole_in(data, "process"), text_in(data, "mode")
    if number is None or mode not in MODES:
        return None
    listed = data.get("devices")
    return ModeChange(
        number,
        text_in(data, "root") or "",
        ns_in(data, "t_s"),
        whole_in(data, "step"),
        mode,
        text_in(data, "requested_by") or "",
        tuple(str(name) for name in listed[:DEVICES_READ]) if isinstance(listed, list) else (),
        data.get("virtual") is True,
        text_in(data, "reason"),
        text_in(data, "refused"),
    )


def pause_change(data: Mapping[str, Any]) -> PauseChange | None:
    """The content of a `pause` record; None if its process, or whether it paused or resumed, is missing."""
    number, paused = whole_in(data, "process"), data.get("paused")
    if number is None or not isinstance(paused, bool):
        return None
    at, step, took = ns_in(data, "t_s"), whole_in(data, "step"), ns_in(data, "paused_s")
    return PauseChange(number, at, step, paused, took, text_in(data, "reason"), text_in(data, "refused"))


def _wait(event: Event) -> tuple[int, int, int] | None:
    at, waited, pid = ns_in(event.data, "t_s"), ns_in(event.data, "waited_s"), whole_in(event.data, "pid")
    return None if at is None or waited is None or pid is None else (pid, at, at + waited)


def _warning(event: Event) -> WarningText | None:
    text = text_in(event.data, "text")
    return None if text is None else WarningText(whole_in(event.data, "process"), ns_in(event.data, "t_s"), text)
