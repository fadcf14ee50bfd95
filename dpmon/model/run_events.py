"""Parses a run's event records: processes, mode changes, pauses, warnings, input waits, loader starts.

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
from dpmon.store.events import count_events, read_events

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
    """What each process reported last about itself."""
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
    def read(cls, store: Store, *, read_all: bool = False) -> RunEvents:
        """Read the events up to the time of `store`: the newest of each kind, or (`read_all`) all."""

        def data(kind: str, limit: int) -> Iterator[Mapping[str, object]]:
            return (event.data for event in read_events(store, kind, limit=-1 if read_all else limit))

        of_ranks = _OF_RANK * len(store.ranks)

        processes = _without_none(map(_parse_process, data("process", -1)))
        info = {process.process: process for process in processes}
        warnings = _without_none(map(_parse_warning, data("warning", TEXTS_READ)))
        warning_count = count_events(store, "warning")
        if store.unread_warning is not None:
            warnings = (*warnings, WarningRecord(None, None, store.unread_warning))
            warning_count += 1
        return cls(
            dict(sorted(info.items())),
            _without_none(map(parse_mode_change, data("mode", CHANGES_READ + of_ranks))),
            _without_none(map(parse_pause_change, data("pause", TEXTS_READ))),
            warnings,
            newest_wrappers(data("ddp", WRAPPERS_READ + of_ranks)),
            parse_stalls(data("stall", TEXTS_READ)),
            parse_input_waits(info.values(), data("input", TEXTS_READ)),
            count_events(store, "mode"),
            warning_count,
        )

    @property
    def reasons(self) -> list[str]:
        """The warnings of training processes: those of dpmon itself do not say why a run has no steps."""
        return [warning.text for warning in self.warnings if warning.process is not None]

    @cached_property
    def _mode_changes_by_process(self) -> Mapping[int, Sequence[ModeChange]]:
        """The changes of each process."""
        changes: dict[int, list[ModeChange]] = {}
        for change in self.changes:
            changes.setdefault(change.process, []).append(change)
        return changes

    @cached_property
    def _newest_pause_by_process(self) -> Mapping[int, PauseChange]:
        """The newest pause or resumption of each process."""
        return {change.process: change for change in self.pauses if change.refused is None}

    def active_mode(self, process: int, step: Step | None, call_mode: str) -> ActiveMode:
        """Return the mode of a process after its last step; `call_mode`: the mode of its last call, if it has no step.

        A change after the last step takes effect at once.
        """
        end_ns = -1 if step is None else step.start_ns + step.wall_ns
        changes = self._mode_changes_by_process.get(process, ())
        newer_modes = {change.root: change.mode for change in changes if (change.t_ns or 0) > end_ns}
        mode = step.mode if step is not None else call_mode
        if newer_modes:  # a root that cannot be split stays single next to one that is split
            mode = "dp" if "dp" in newer_modes.values() else "single"
        granted = [change for change in changes if change.refused is None]
        change = next((change for change in reversed(granted) if change.mode == mode), granted[-1] if granted else None)
        if change is None:
            return ActiveMode(mode)
        devices, _ = self.devices_by_mode(process).get(mode, (change.devices, False))
        return ActiveMode(mode, devices, change.virtual, change.reason)

    def devices_by_mode(self, process: int) -> dict[str, tuple[tuple[str, ...], bool]]:
        """Return the last devices of a process, and whether they are virtual, by mode."""
        return {
            change.mode: (change.devices, change.virtual)
            for change in self._mode_changes_by_process.get(process, ())
            if change.refused is None and change.devices
        }

    def refusals_by_root(self, process: int) -> dict[str, ModeRefusal]:
        """Return the refused mode of each root that refused in its last answer, by root."""
        refusals: dict[str, ModeRefusal] = {}
        request_step = 0
        for change in self._mode_changes_by_process.get(process, ()):
            if change.requested_by == "user":
                if (change.step or 0) > request_step + ANSWERING_STEPS:
                    refusals.clear()  # the roots may be gone; those still called answer again
                request_step = max(request_step, change.step or 0)
            refusals.pop(change.root, None)
            if change.refused is not None:
                refusals[change.root] = ModeRefusal("single" if change.mode == "dp" else "dp", change.refused)
        return refusals

    def paused_since(self, process: int, step_ns: int | None) -> int | None:
        """Return the start of a process's pause; `step_ns`: the start of its last step, which ends a pause."""
        newest = self._newest_pause_by_process.get(process)
        if newest is None or not newest.paused:
            return None
        return None if step_ns is not None and step_ns >= newest.t_ns else newest.t_ns

    def input_waits(self, process: int) -> tuple[tuple[int, int], ...]:
        """Return start and end of each wait of a process for a line of input."""
        return tuple((start, end) for waiting, start, end in self.inputs if waiting == process)


def _without_none(records: Iterable[_Read | None]) -> tuple[_Read, ...]:
    return tuple(record for record in records if record is not None)


def parse_stalls(records: Iterable[Mapping[str, object]]) -> tuple[RecordedStall, ...]:
    """Return the stalls in `stall` records. Of several records of one stall, the newest one with ranks describes it."""
    stalls: dict[int, RecordedStall] = {}
    for data in records:
        since_ns, duration_ns = ns_member(data, "since_s"), ns_member(data, "lasted_s")
        if since_ns is None:
            continue
        stall = stalls.get(since_ns, RecordedStall(since_ns, ns_member(data, "t_s") or since_ns))
        if "ranks" in data:
            stall = stall._replace(record=data)
        stalls[since_ns] = stall if duration_ns is None else stall._replace(end_ns=since_ns + duration_ns)
    return tuple(stalls.values())


def parse_input_waits(
    processes: Iterable[ProcessInfo], records: Iterable[Mapping[str, object]]
) -> tuple[tuple[int | None, int, int], ...]:
    """Return the waits in `input` records, in order of time: process (None: one that does not train), start, end."""
    process_of_pid = {process.pid: process.process for process in processes if process.pid is not None}
    waits = []
    for data in records:
        start_ns, took_ns = ns_member(data, "t_s"), ns_member(data, "waited_s")
        if start_ns is not None and took_ns is not None:
            waits.append((process_of_pid.get(int_member(data, "pid") or 0), start_ns, start_ns + took_ns))
    return tuple(sorted(waits, key=lambda wait: wait[1:]))


# ------------------------------------------------------------------------------------------------ records

_READERS: dict[str, Callable[[Mapping[str, object], str], object]] = {
    "integer": int_member,
    "text": text_member,
    "boolean": lambda data, name: data.get(name) is True,
}


@cache
def _same_named_fields(kind: str, row_class: Any) -> list[tuple[str, Callable[[Mapping[str, object], str], object]]]:
    """Return the record fields that are also fields of `row_class`, each with the function that reads its type."""
    fields = (spec for spec in RECORDS[kind].fields if spec.name in row_class._fields and spec.type in _READERS)
    return [(spec.name, _READERS[spec.type]) for spec in fields]


def _parse_record(kind: str, row_class: Callable[..., _Read], data: Mapping[str, object], **others: object) -> _Read:
    """Build an instance of `row_class` from a record. `others`: fields that differ in name or type."""
    return row_class(**{**{name: read(data, name) for name, read in _same_named_fields(kind, row_class)}, **others})


def parse_loader_start(data: Mapping[str, object]) -> LoaderStart | None:
    """Return the content of a `loader` record; None if process, time or duration is missing."""
    process, start_ns, took_ns = int_member(data, "process"), ns_member(data, "t_s"), ns_member(data, "iter_s")
    if process is None or start_ns is None or took_ns is None:
        return None
    return _parse_record(
        "loader", LoaderStart, data, start_ns=start_ns, took_ns=took_ns, start=int_member(data, "start") or 1
    )


def _parse_process(data: Mapping[str, object]) -> ProcessInfo | None:
    return None if int_member(data, "process") is None else _parse_record("process", ProcessInfo, data)


def parse_mode_change(data: Mapping[str, object]) -> ModeChange | None:
    """Return the content of a `mode` record; None if process or mode is missing."""
    if int_member(data, "process") is None or data.get("mode") not in MODES:
        return None
    root, requested_by = text_member(data, "root") or "", text_member(data, "requested_by") or ""
    listed = data.get("devices")
    devices = tuple(str(name) for name in listed) if isinstance(listed, list) else ()
    return _parse_record(
        "mode", ModeChange, data, root=root, t_ns=ns_member(data, "t_s"), requested_by=requested_by, devices=devices
    )


def parse_pause_change(data: Mapping[str, object]) -> PauseChange | None:
    """Return the content of a `pause` record; None if `process`, `t_s` or `paused` is missing."""
    t_ns = ns_member(data, "t_s")
    if int_member(data, "process") is None or t_ns is None or not isinstance(data.get("paused"), bool):
        return None
    return _parse_record("pause", PauseChange, data, t_ns=t_ns, paused_ns=ns_member(data, "paused_s"))


def _parse_warning(data: Mapping[str, object]) -> WarningRecord | None:
    return (
        None
        if text_member(data, "text") is None
        else _parse_record("warning", WarningRecord, data, t_ns=ns_member(data, "t_s"))
    )


def newest_wrappers(records: Iterable[Mapping[str, object]]) -> tuple[Wrapper, ...]:
    """Return the newest of the `ddp` records of each wrapper; `all_used` covers all its records."""
    of_each: dict[tuple[int | None, int | None], list[Mapping[str, object]]] = {}
    for data in records:
        of_each.setdefault((int_member(data, "process"), int_member(data, "wrapper")), []).append(data)
    found = ((parse_ddp_wrapper(each[-1]), _iterations_all_used(each)) for each in of_each.values())
    return tuple(wrapper._replace(all_used=count) for wrapper, count in found if wrapper is not None)


def _iterations_all_used(records: Iterable[Mapping[str, object]]) -> int:
    """Return the number of iterations that used all parameters; 0 if one was unused in any, or if torch cannot tell."""
    iterations = set()
    for data in records:
        size, absent = int_member(data, "unused_bytes"), data.get("absent")
        if size or (isinstance(absent, Mapping) and "unused_bytes" in absent):
            return 0
        if size == 0:
            iterations.add(int_member(data, "iteration"))
    return len(iterations - {None})


def parse_ddp_wrapper(data: Mapping[str, object]) -> Wrapper | None:
    """Return the facts in a `ddp` record; None if it names no process."""
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
    """Return the process group of a wrapper; None if it is unknown or invalid."""
    listed, rank = data.get("group"), int_member(data, "rank")
    if not isinstance(listed, list) or set(map(type, listed)) != {int} or rank not in listed:
        return None
    ranks, every = tuple(sorted(listed)), range(len(listed))
    return every if ranks == tuple(every) else ranks


def _ms_member_as_ns(data: Mapping[str, object], key: str) -> float | None:
    value = number_member(data, key)
    return value * 1e6 if value is not None and 0 <= value < 1e9 else None
