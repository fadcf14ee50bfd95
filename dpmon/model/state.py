"""What a picture of a run is drawn from: data only, made anew for each picture by dpmon.model.snapshot.

Times are ns since the run's start. Unknown is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from dpmon.model.communication import Communication, Wrapper, communication
from dpmon.model.process import Process
from dpmon.model.stragglers import RankTimes, Straggler
from dpmon.model.turns import standing_for, taking_turns
from dpmon.store.answers import Communicated, LastSample


class ModeChange(NamedTuple):
    """An acknowledged answer to a request for a mode (or the mode at the start)."""

    process: int
    root: str
    t_ns: int | None
    step: int | None
    mode: str
    requested_by: str
    devices: tuple[str, ...]
    virtual: bool
    reason: str | None
    refused: str | None


class PauseChange(NamedTuple):
    """The training paused after a step, or went on."""

    process: int
    t_ns: int | None
    step: int | None
    paused: bool
    paused_ns: int | None
    """How long it was, where it goes on."""
    reason: str | None
    """Why it went on without having been asked to."""
    refused: str | None
    """Why it did not pause."""


class WarningText(NamedTuple):
    """A warning of ours, from the tracer (process) or from the supervisor (None)."""

    process: int | None
    t_ns: int | None
    text: str


class DeviceTrack(NamedTuple):
    """The newest sample of a GPU, or of the host, and its histories: a value a second, None where it is not known."""

    data: Mapping[str, Any] = {}
    t_ns: int | None = None
    second: int = -1
    """Of the newest value."""
    util: tuple[float | None, ...] = ()
    """Per cent."""
    mem: tuple[float | None, ...] = ()
    """Used memory, per cent of all."""
    power: tuple[float | None, ...] = ()
    """Watts."""


@dataclass(frozen=True)
class State:
    """Everything that is known of a run at one time."""

    processes: Mapping[int, Process] = field(default_factory=dict)
    devices: Mapping[int, DeviceTrack] = field(default_factory=dict)
    host: DeviceTrack = field(default_factory=DeviceTrack)
    mode_changes: tuple[ModeChange, ...] = ()
    """The newest, oldest first; as the other lists."""
    mode_change_count: int = 0
    """Of all."""
    pauses: tuple[PauseChange, ...] = ()
    warnings: tuple[WarningText, ...] = ()
    warning_count: int = 0
    missed: int = 0
    """Records that nobody will read."""
    newest_ns: int = -1
    """When the newest step or call ended."""
    ended: frozenset[int] = frozenset()
    """Processes that train no more, as far as a reader knows; no record says so."""
    over: bool = False
    """Whether the run is over."""
    ranks: tuple[RankTimes, ...] = ()
    """Mean times of the ranks that train together, over their last steps, by rank; empty if there is one process."""
    collectives: Communicated = field(default_factory=Communicated)
    """Of the sampled steps of the ranks, in the last minutes."""
    last_sample: LastSample | None = None
    """The newest sampled step of the process in focus."""
    sampled_of: int = 0
    """Steps of the ranks in that time."""
    wrappers: tuple[Wrapper, ...] = ()
    """The newest facts of each DistributedDataParallel."""

    def training(self) -> list[Process]:
        """Those that train now (`dpmon.model.turns`)."""
        return self._training

    def focus(self) -> Process | None:
        """The process whose numbers stand for the run: the first of those that train now, by rank."""
        return self._focus

    def straggler(self) -> Straggler | None:
        """The ranks that the others wait for."""
        return self._straggler

    def communication(self) -> Communication | None:
        """The communication of the ranks; None if they do not train together."""
        return self._communication

    # A picture asks for them at many places.

    @cached_property
    def _training(self) -> list[Process]:
        return taking_turns(self)

    @cached_property
    def _straggler(self) -> Straggler | None:
        found = self.communication()
        return None if found is None else found.straggler()

    @cached_property
    def _communication(self) -> Communication | None:
        there = {process.process for process in self.training()}
        own = [one for one in self.wrappers if one.process in there]
        return communication(self.ranks, own, self.collectives, self.sampled_of, lately=True)

    @cached_property
    def _focus(self) -> Process | None:
        return standing_for(self)
