"""Reads the events of a run: facts of processes, modes, pauses, warnings, waits for input, loaders. Pure.

Any program may have written an event, so invalid ones are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dpmon.model.communication import Wrapper
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.model.run_snapshot import ModeChange, ModeRefusal, PauseChange, ProcessInfo, WarningRecord
from dpmon.model.stragglers import Group
from dpmon.record.record_specs import RECORDS
from dpmon.record.safe_json import int_member, ns_member, number_member, text_member
from dpmon.record.shared_names import MODES

if TYPE_CHECKING:
    from dpmon.record.record_types import Step
    from dpmon.store.store_queries import Store

CHANGES_READ = 500
"""Most changes of mode to read, and a few for each rank; older ones do not affect the current mode."""
TEXTS_READ = 100
WRAPPERS_READ = 256
"""Most records of wrappers to read in a live run, and a few for each rank, which writes one when its times change."""
_OF_RANK = 4
ANSWERING_STEPS = 100
"""Every root that is still called answers a request within this many steps."""


_Read = TypeVar("_Read")


class LoaderStart(NamedTuple):
    """A DataLoader that began to iterate: start and duration (ns), and a description."""

    process: int
    start_ns: int
    took_ns: int
    workers: int | None
    persistent: bool
    pinned: bool = False
    start: int = 1
    """The number of this start of the DataLoader object, from 1."""


class ActiveMode(NamedTuple):
    """The mode of a process, its devices and the reason; the fields are named as in model.run_snapshot.Process."""

    mode: str
    devices: tuple[str, ...] = ()
    virtual: bool = False
    mode_reason: str | None = None


@dataclass(frozen=True)
class RunEvents:
    """The events of each kind, oldest first."""

    info: Mapping[int, ProcessInfo] = field(default_factory=dict)
    """The newest facts of each process."""
    changes: tuple[ModeChange, ...] = ()
    pauses: tuple[PauseChange, ...] = ()
    warnings: tuple[WarningRecord, ...] = ()
    wrappers: tuple[Wrapper, ...] = ()
    """The newest record of each DistributedDataParallel."""
    stalls: tuple[RecordedStall, ...] = ()
    inputs: tuple[tuple[int | None, int, int], ...] = ()
    """Waits for a line of input: process (None: one that does not train), start, end."""
    change_count: int = 0
    """Number of all changes of mode; `warning_count`: number of all warnings."""
    warning_count: int = 0

    @classmethod
    def read(cls, rows: Store, *, every: bool = False) -> RunEvents:
        """Read the events up to the time of `rows`: the newest of each kind, or (`every`) all."""

        def data(kind: str, most: int) -> Iterator[Mapping[str, object]]:
            return (event.data for event in rows.events(kind, limit=-1 if every else most))

        of_ranks = _OF_RANK * len(rows.ranks)

        info = {facts.process: facts for each in data("process", -1) if (facts := _parse_process(each)) is not None}
        return cls(
            dict(sorted(info.items())),
            _without_none(map(parse_mode_change, data("mode", CHANGES_READ + of_ranks))),
            _without_none(map(parse_pause_change, data("pause", TEXTS_READ))),
            _without_none(map(_parse_warning, data("warning", TEXTS_READ))),
            newest_wrappers(data("ddp", WRAPPERS_READ + of_ranks)),
            parse_stalls(data("stall", TEXTS_READ)),
            parse_input_waits(info.values(), data("input", TEXTS_READ)),
            rows.event_count("mode"),
            rows.event_count("warning"),
        )

    @property
    def reasons(self) -> list[str]:
        """The warnings of training processes: those of dpmon itself do not say why a run has no steps."""
        return [warning.text for warning in self.warnings if warning.process is not None]

    @cached_property
    def _mode_changes_by_process(self) -> Mapping[int, Sequence[ModeChange]]:
        """The changes of each process."""
        found: dict[int, list[ModeChange]] = {}
        for change in self.changes:
            found.setdefault(change.process, []).append(change)
        return found

    @cached_property
    def _newest_pause_by_process(self) -> Mapping[int, PauseChange]:
        """The newest pause or resumption of each process."""
        return {one.process: one for one in self.pauses if one.refused is None}

    def active_mode(self, process: int, step: Step | None, called: str) -> ActiveMode:
        """The mode of a process after its last step; `called`: the mode of its last call.

        A change after the last step takes effect at once.
        """
        end_ns = -1 if step is None else step.start_ns + step.wall_ns
        own = self._mode_changes_by_process.get(process, ())
        since = {change.root: change.mode for change in own if (change.t_ns or 0) > end_ns}
        mode = step.mode if step is not None else called
        if since:  # a root that cannot be split stays single beside one that is split
            mode = "dp" if "dp" in since.values() else "single"
        given = [change for change in own if change.refused is None]
        change = next((change for change in reversed(given) if change.mode == mode), given[-1] if given else None)
        if change is None:
            return ActiveMode(mode)
        devices, _ = self.devices_by_mode(process).get(mode, (change.devices, False))
        return ActiveMode(mode, devices, change.virtual, change.reason)

    def devices_by_mode(self, process: int) -> dict[str, tuple[tuple[str, ...], bool]]:
        """The last devices of a process, and whether they are virtual, by mode."""
        return {
            change.mode: (change.devices, change.virtual)
            for change in self._mode_changes_by_process.get(process, ())
            if change.refused is None and change.devices
        }

    def refusals_by_root(self, process: int) -> dict[str, ModeRefusal]:
        """The refused mode of each root that refused in its last answer, by root."""
        found: dict[str, ModeRefusal] = {}
        answered = 0
        for change in self._mode_changes_by_process.get(process, ()):
            if change.requested_by == "user":
                if (change.step or 0) > answered + ANSWERING_STEPS:
                    found.clear()  # the roots may be gone; those still called answer again
                answered = max(answered, change.step or 0)
            found.pop(change.root, None)
            if change.refused is not None:
                found[change.root] = ModeRefusal("single" if change.mode == "dp" else "dp", change.refused)
        return found

    def paused_since(self, process: int, step_ns: int | None) -> int | None:
        """The start of a process's pause; `step_ns`: the start of its last step, which ends a pause."""
        newest = self._newest_pause_by_process.get(process)
        if newest is None or not newest.paused:
            return None
        return None if step_ns is not None and step_ns >= newest.t_ns else newest.t_ns

    def input_waits(self, process: int) -> tuple[tuple[int, int], ...]:
        """Start and end of each wait of a process for a line of input."""
        return tuple((begin, end) for of, begin, end in self.inputs if of == process)


def _without_none(found: Iterable[_Read | None]) -> tuple[_Read, ...]:
    return tuple(one for one in found if one is not None)


def parse_stalls(records: Iterable[Mapping[str, object]]) -> tuple[RecordedStall, ...]:
    """The stalls in `stall` records. Of several records of one stall, the newest one with ranks describes it."""
    found: dict[int, RecordedStall] = {}
    for data in records:
        since, lasted = ns_member(data, "since_s"), ns_member(data, "lasted_s")
        if since is None:
            continue
        seen = found.get(since, RecordedStall(since, ns_member(data, "t_s") or since))
        if "ranks" in data:
            seen = seen._replace(record=data)
        found[since] = seen if lasted is None else seen._replace(end_ns=since + lasted)
    return tuple(found.values())


def parse_input_waits(
    processes: Iterable[ProcessInfo], records: Iterable[Mapping[str, object]]
) -> tuple[tuple[int | None, int, int], ...]:
    """The waits in `input` records, in order of time: process (None: one that does not train), start, end."""
    numbers = {one.pid: one.process for one in processes if one.pid is not None}
    found = []
    for data in records:
        at, took = ns_member(data, "t_s"), ns_member(data, "waited_s")
        if at is not None and took is not None:
            found.append((numbers.get(int_member(data, "pid") or 0), at, at + took))
    return tuple(sorted(found, key=lambda one: one[1:]))


# ------------------------------------------------------------------------------------------------ records

_READERS: dict[str, Callable[[Mapping[str, object], str], object]] = {
    "integer": int_member,
    "text": text_member,
    "boolean": lambda data, name: data.get(name) is True,
}


@cache
def _same_named_fields(kind: str, facts: Any) -> list[tuple[str, Callable[[Mapping[str, object], str], object]]]:
    """The fields of a record that are facts of the same name, and how they are read: by their types."""
    fields = (each for each in RECORDS[kind].fields if each.name in facts._fields and each.type in _READERS)
    return [(each.name, _READERS[each.type]) for each in fields]


def _parse_record(kind: str, facts: Callable[..., _Read], data: Mapping[str, object], **own: object) -> _Read:
    """The facts of a record, of a class; `own`: the facts that are no field of the same name and type."""
    return facts(**{**{name: read(data, name) for name, read in _same_named_fields(kind, facts)}, **own})


def parse_loader_start(data: Mapping[str, object]) -> LoaderStart | None:
    """The content of a `loader` record; None if process, time or duration is missing."""
    process, at, took = int_member(data, "process"), ns_member(data, "t_s"), ns_member(data, "iter_s")
    if process is None or at is None or took is None:
        return None
    return _parse_record("loader", LoaderStart, data, start_ns=at, took_ns=took, start=int_member(data, "start") or 1)


def _parse_process(data: Mapping[str, object]) -> ProcessInfo | None:
    return None if int_member(data, "process") is None else _parse_record("process", ProcessInfo, data)


def parse_mode_change(data: Mapping[str, object]) -> ModeChange | None:
    """The content of a `mode` record; None if process or mode is missing."""
    if int_member(data, "process") is None or data.get("mode") not in MODES:
        return None
    root, by, listed = text_member(data, "root") or "", text_member(data, "requested_by") or "", data.get("devices")
    devices = tuple(str(name) for name in listed) if isinstance(listed, list) else ()
    return _parse_record(
        "mode", ModeChange, data, root=root, t_ns=ns_member(data, "t_s"), requested_by=by, devices=devices
    )


def parse_pause_change(data: Mapping[str, object]) -> PauseChange | None:
    """The content of a `pause` record; None if its process, its time, or whether it paused or resumed, is missing."""
    at = ns_member(data, "t_s")
    if int_member(data, "process") is None or at is None or not isinstance(data.get("paused"), bool):
        return None
    return _parse_record("pause", PauseChange, data, t_ns=at, paused_ns=ns_member(data, "paused_s"))


def _parse_warning(data: Mapping[str, object]) -> WarningRecord | None:
    return (
        None
        if text_member(data, "text") is None
        else _parse_record("warning", WarningRecord, data, t_ns=ns_member(data, "t_s"))
    )


def newest_wrappers(records: Iterable[Mapping[str, object]]) -> tuple[Wrapper, ...]:
    """The newest record of each wrapper, from a run's `ddp` records in order; `all_used` covers all its records."""
    of_each: dict[tuple[int | None, int | None], list[Mapping[str, object]]] = {}
    for data in records:
        of_each.setdefault((int_member(data, "process"), int_member(data, "wrapper")), []).append(data)
    found = ((parse_ddp_wrapper(each[-1]), _iterations_all_used(each)) for each in of_each.values())
    return tuple(one._replace(all_used=count) for one, count in found if one is not None)


def _iterations_all_used(records: Iterable[Mapping[str, object]]) -> int:
    """In how many iterations all parameters were used; 0 if one was unused in any, or if torch cannot tell."""
    iterations = set()
    for data in records:
        size, absent = int_member(data, "unused_bytes"), data.get("absent")
        if size or (isinstance(absent, Mapping) and "unused_bytes" in absent):
            return 0
        if size == 0:
            iterations.add(int_member(data, "iteration"))
    return len(iterations - {None})


def parse_ddp_wrapper(data: Mapping[str, object]) -> Wrapper | None:
    """The facts in a `ddp` record; None if it names no process."""
    if int_member(data, "process") is None:
        return None
    sizes, absent = data.get("bucket_bytes"), data.get("absent")
    return _parse_record(
        "ddp",
        Wrapper,
        data,
        number=int_member(data, "wrapper") or 0,
        root=text_member(data, "root") or "",
        bucket_bytes=tuple(size for size in sizes if type(size) is int) if isinstance(sizes, list) else (),
        comm_ns=_ms_member_as_ns(data, "comm_ms"),
        overlap_ns=_ms_member_as_ns(data, "overlap_ms"),
        no_sync_times=text_member(absent, "sync") if isinstance(absent, Mapping) else None,
        group=_parse_process_group(data),
    )


def _parse_process_group(data: Mapping[str, object]) -> Group | None:
    """The process group of a wrapper; None if it is unknown or invalid."""
    listed, rank = data.get("group"), int_member(data, "rank")
    if not isinstance(listed, list) or set(map(type, listed)) != {int} or rank not in listed:
        return None
    ranks, every = tuple(sorted(listed)), range(len(listed))
    return every if ranks == tuple(every) else ranks


def _ms_member_as_ns(data: Mapping[str, object], key: str) -> float | None:
    value = number_member(data, key)
    return value * 1e6 if value is not None and 0 <= value < 1e9 else None
