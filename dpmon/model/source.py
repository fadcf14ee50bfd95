"""The inputs of a snapshot: the queries of a store, and the parts of the picture. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

from dpmon.model.members import SECOND
from dpmon.model.process import Process
from dpmon.record.kinds import Call, Event, Step
from dpmon.store.answers import CallHead, ChartSample, Communicated, LastSample, LongRow, PaceRow, TimeRow
from dpmon.store.tally import Key, Tally
from dpmon.store.window import TallySource

MOST_RANKS = 64
"""Most ranks in a picture without scrolling."""


class Tallies(TallySource, Protocol):
    """The part of dpmon.store.queries.Store that a snapshot uses."""

    def tally_rows(
        self,
        begin_s: int = 0,
        end_s: int = ...,
        *,
        process: int | Collection[int] | None = None,
        sketches: bool = True,
        finest: int = 1,
        widest: int = ...,
        series: Collection[str] | None = None,
    ) -> Iterator[tuple[int, int, Key, Tally]]:
        """Start, width, key and tally of each row in order of time."""

    def tallies(
        self,
        begin_s: int = 0,
        end_s: int = ...,
        *,
        process: int | Collection[int] | None = None,
        sketches: bool = True,
        series: Collection[str] | None = None,
    ) -> dict[Key, Tally]:
        """All tallies between two seconds, by key."""

    def pace_rows(self, begin_s: int, end_s: int, processes: Collection[int]) -> Iterator[PaceRow]:
        """The columns of the one-second tallies that a rate needs, in order of time."""

    def step_counts(self, begin_s: int, end_s: int) -> dict[int, int]:
        """Number of steps in the one-second tallies, by process."""

    def pace_times(
        self, begin_s: int, end_s: int, processes: Collection[int], *, evaluation: bool, widest: int = ...
    ) -> Iterator[tuple[int, int, int, int]]:
        """Process, start, width, and time (ns) of training and between steps; `evaluation`: also of evaluation."""

    def time_rows(
        self,
        begin_s: int = 0,
        end_s: int = ...,
        *,
        finest: int = 1,
        widest: int = ...,
        process: int | Collection[int] | None = None,
    ) -> list[TimeRow]:
        """The time of each process by activity."""


class Rows(Protocol):
    """The part of dpmon.store.store_at.StoreAt that a snapshot uses."""

    until_ns: int
    ranks: dict[int, int | None]
    missed: int
    open_calls: int

    def lasting(self, kind: str, newest: int = -1) -> list[Event]:
        """Events of a kind, in their order."""

    def count(self, kind: str) -> int:
        """Number of events of a kind."""

    def heads(self, process: int, most: int) -> list[CallHead]:
        """The newest calls of a process, the newest first."""

    def last_calls(self, process: int, most: int) -> list[CallHead]:
        """The newest calls of its newest step, the newest first."""

    def call(self, process: int, head: CallHead) -> Call | None:
        """The full call; None if it is damaged."""

    def communicated(self, begin_ns: int, end_ns: int, processes: Collection[int]) -> Communicated:
        """The sampled collectives of these processes between two times."""

    def last_sample(self, process: int, begin_ns: int) -> LastSample | None:
        """The newest step of a process with sampled collectives, if it began after a time."""

    def samples(self, span_ns: int, after_id: int = 0) -> list[ChartSample]:
        """Samples of devices and host, in their order."""

    def sample(self, number: int) -> Event | None:
        """The full sample with this id."""

    def memory(self, process: int, until_ns: int | None = None) -> Event | None:
        """The newest record of a process's device memory."""

    def host_memory(self, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """The peak memory of the run's processes in each minute."""

    @property
    def until_s(self) -> int | None:
        """The first unfinished second; None as of now."""

    def first_ns(self, process: int) -> int | None:
        """Start of the first call or step of a process."""

    def steps(self, process: int, most: int) -> list[Step]:
        """The newest steps of a process, the newest first."""

    def longest(self, process: int, mode: str, most: int, *, of_all: bool = False) -> list[LongRow]:
        """The longest of a process's newest steps in a mode; `of_all`: of all its steps."""

    def last_training_ns(self, process: int) -> int | None:
        """End of a process's last training step."""


class Wanted(NamedTuple):
    """The optional parts of a picture."""

    span_s: int = 120
    """Time range of the histories and figures; 0 is the whole run."""
    first_rank: int = 0
    """The first of the visible ranks."""
    ranks: int = MOST_RANKS
    """Number of visible ranks. The run's first ranks, up to the same number, are also read."""
    over: bool = False
    """Whether the run is over."""
    process: int | None = None
    """The process whose figures the user wants to see; None for the one that represents the run."""


def figures_end_s(rows: Rows, process: Process) -> int:
    """The second before which the figures of a process end; they include its newest step.

    As of a time in the past, they include only whole seconds, unless the process has none yet.
    """
    assert process.last_step is not None
    end_s = (process.last_step.start_ns + process.last_step.wall_ns) // SECOND + 1
    whole_s = rows.until_s
    return end_s if whole_s is None or whole_s <= process.began_ns // SECOND + 1 else min(end_s, whole_s)
