"""Parses a run's event records: processes, mode changes, pauses, warnings, input waits, loader starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dpmon.model.communication import Wrapper
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.record.schema import SECOND
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


_Row = TypeVar("_Row")


class ProcessInfo(NamedTuple):
    """What a training process reported about itself; None if it did not report it."""

    process: int
    rank: int | None = None
    world: int | None = None
    pid: int | None = None
    python: str | None = None
    torch: str | None = None


class ModeChange(NamedTuple):
    """The reply to a request for a mode, or the mode at the start."""

    process: int
    mode: str
    root: str = ""
    t_ns: int | None = None
    step: int | None = None
    requested_by: str = ""
    devices: tuple[str, ...] = ()
    virtual: bool = False
    reason: str | None = None
    refused: str | None = None


class ModeRefusal(NamedTuple):
    """A mode that a root refused, on request or at its start."""

    mode: str
    reason: str


class PauseChange(NamedTuple):
    """The training paused after a step, or resumed."""

    process: int
    t_ns: int
    step: int | None
    paused: bool
    paused_ns: int | None = None
    """Duration of the pause, for a resumption."""
    reason: str | None = None
    """Why the training resumed without a request."""
    refused: str | None = None
    """Why the training did not pause."""


class WarningRecord(NamedTuple):
    """A warning of dpmon, from the tracer (process) or from the supervisor (None)."""

    process: int | None
    t_ns: int | None
    text: str


class LoaderStart(NamedTuple):
    """A DataLoader that began to iterate: start and duration (ns), and a description."""

    process: int
    start_ns: int
    took_ns: int
    workers: int | None = None
    persistent: bool = False
    pinned: bool = False
    start: int = 1
    """The number of this start of the DataLoader object, from 1."""


class ActiveMode(NamedTuple):
    """The mode of a process, its devices and the reason; the fields are named as in model.run_process.Process."""

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
    checkpoints: tuple[Mapping[str, Any], ...] = ()
    """The data of the `checkpoint` records."""
    warning_count: int = 0
    """Number of all warnings."""
    flops: tuple[Mapping[str, Any], ...] = ()
    """The `flops` records."""

    @classmethod
    def read(cls, store: Store, *, read_all: bool = False) -> RunEvents:
        """Read the events up to the time of `store`: the newest of each kind, or (`read_all`) all."""

        def data(kind: str, limit: int) -> Iterator[Mapping[str, Any]]:
            return (event.data for event in read_events(store, kind, limit=-1 if read_all else limit))

        of_ranks = _OF_RANK * len(store.ranks)

        info = {record["process"]: _from_record(ProcessInfo, record) for record in data("process", -1)}
        warnings = tuple(_from_record(WarningRecord, record) for record in data("warning", TEXTS_READ))
        warning_count = count_events(store, "warning")
        if store.unread_warning is not None:
            warnings = (*warnings, WarningRecord(None, None, store.unread_warning))
            warning_count += 1
        return cls(
            dict(sorted(info.items())),
            tuple(
                _from_record(ModeChange, record, devices=tuple(record.get("devices", ())))
                for record in data("mode", CHANGES_READ + of_ranks)
            ),
            tuple(
                _from_record(PauseChange, record, paused_ns=_ns(record, "paused_s"))
                for record in data("pause", TEXTS_READ)
            ),
            warnings,
            newest_wrappers(data("ddp", WRAPPERS_READ + of_ranks)),
            parse_stalls(data("stall", TEXTS_READ)),
            parse_input_waits(info.values(), data("input", TEXTS_READ)),
            tuple(data("checkpoint", TEXTS_READ + of_ranks)),
            warning_count,
            tuple(data("flops", -1)),
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

    def saves(self, process: int) -> list[tuple[int, int]]:
        """Return start and end (ns) of each save of a checkpoint by a process, oldest first."""
        own = [data for data in self.checkpoints if data["process"] == process]
        return [(int(data["t_s"] * SECOND), int((data["t_s"] + data["save_s"]) * SECOND)) for data in own]


# ------------------------------------------------------------------------------------------------ records


def _from_record(row_class: Callable[..., _Row], data: Mapping[str, Any], **others: object) -> _Row:
    """Return an instance of a NamedTuple from the members of a record that have the names of its fields.

    `others`: fields that differ in name or unit, but for `t_ns`.
    """
    names = row_class._fields  # type: ignore[attr-defined]
    times = {"t_ns": _ns(data, "t_s")} if "t_ns" in names else {}
    return row_class(**{**{name: data[name] for name in names if name in data}, **times, **others})


def _ns(data: Mapping[str, Any], key: str) -> int | None:
    """Return a time or a duration (s) of a record in ns; None if it is unknown."""
    seconds = data.get(key)
    return None if seconds is None else int(seconds * SECOND)


def parse_stalls(records: Iterable[Mapping[str, Any]]) -> tuple[RecordedStall, ...]:
    """Return the stalls in `stall` records. Of several records of one stall, the newest one with ranks describes it."""
    stalls: dict[int, RecordedStall] = {}
    for data in records:
        since_ns, duration_ns = int(data["since_s"] * SECOND), _ns(data, "lasted_s")
        stall = stalls.get(since_ns, RecordedStall(since_ns, _ns(data, "t_s") or since_ns))
        if "ranks" in data:
            stall = stall._replace(record=data)
        stalls[since_ns] = stall if duration_ns is None else stall._replace(end_ns=since_ns + duration_ns)
    return tuple(stalls.values())


def parse_input_waits(
    processes: Iterable[ProcessInfo], records: Iterable[Mapping[str, Any]]
) -> tuple[tuple[int | None, int, int], ...]:
    """Return the waits in `input` records, in order of time: process (None: one that does not train), start, end."""
    process_of_pid = {process.pid: process.process for process in processes if process.pid is not None}
    waits = []
    for data in records:
        start_ns = int(data["t_s"] * SECOND)
        waits.append((process_of_pid.get(data["pid"]), start_ns, start_ns + int(data["waited_s"] * SECOND)))
    return tuple(sorted(waits, key=lambda wait: wait[1:]))


def parse_loader_start(data: Mapping[str, Any]) -> LoaderStart:
    """Return the content of a `loader` record."""
    return _from_record(LoaderStart, data, start_ns=_ns(data, "t_s"), took_ns=_ns(data, "iter_s"))


def newest_wrappers(records: Iterable[Mapping[str, Any]]) -> tuple[Wrapper, ...]:
    """Return the newest of the `ddp` records of each wrapper; `all_used` covers all its records."""
    of_each: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for data in records:
        of_each.setdefault((data["process"], data["wrapper"]), []).append(data)
    return tuple(parse_ddp_wrapper(each[-1])._replace(all_used=_iterations_all_used(each)) for each in of_each.values())


def _iterations_all_used(records: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of iterations that used all parameters; 0 if one was unused in any, or if torch cannot tell."""
    iterations = set()
    for data in records:
        size = data.get("unused_bytes")
        if size or "unused_bytes" in data.get("absent", ()):
            return 0
        if size == 0:
            iterations.add(data.get("iteration"))
    return len(iterations - {None})


def parse_ddp_wrapper(data: Mapping[str, Any]) -> Wrapper:
    """Return the facts in a `ddp` record."""
    ranks = tuple(sorted(data.get("group") or ()))
    every = range(len(ranks))
    return _from_record(
        Wrapper,
        data,
        number=data["wrapper"],
        bucket_bytes=tuple(data.get("bucket_bytes") or ()),
        comm_ns=_ms_as_ns(data.get("comm_ms")),
        overlap_ns=_ms_as_ns(data.get("overlap_ms")),
        no_sync_times=data.get("absent", {}).get("sync"),
        group=(every if ranks == tuple(every) else ranks) if data.get("rank") in ranks else None,
    )


def _ms_as_ns(ms: float | None) -> float | None:
    return None if ms is None else ms * 1e6
