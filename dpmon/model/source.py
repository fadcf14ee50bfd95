"""What a snapshot is made from: what it asks of a store, and what its picture shows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

from dpmon.model.members import SECOND
from dpmon.model.process import Process
from dpmon.record.kinds import Call, Event, Step
from dpmon.store.answers import CallHead, Communicated, LastSample, LongRow, PaceRow, Sample, TimeRow
from dpmon.store.tally import Key, Tally
from dpmon.store.window import Source

MOST_RANKS = 64
"""Ranks that a picture shows at most without being scrolled."""


class Tallies(Source, Protocol):
    """What a snapshot needs of dpmon.store.queries.Store."""

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
        """By key, all of the time between two seconds."""

    def pace_rows(self, begin_s: int, end_s: int, processes: Collection[int]) -> Iterator[PaceRow]:
        """The tallies of a second each as a rate needs them, in order of time."""

    def step_counts(self, begin_s: int, end_s: int) -> dict[int, int]:
        """By process, the steps in the tallies of a second each."""

    def pace_times(
        self, begin_s: int, end_s: int, processes: Collection[int], *, evaluation: bool, widest: int = ...
    ) -> Iterator[tuple[int, int, int, int]]:
        """Process, start, width, and time (ns) of training and between steps; with `evaluation`, of evaluation too."""

    def time_rows(
        self,
        begin_s: int = 0,
        end_s: int = ...,
        *,
        finest: int = 1,
        widest: int = ...,
        process: int | Collection[int] | None = None,
    ) -> list[TimeRow]:
        """What each process did."""


class Rows(Protocol):
    """What a snapshot needs of dpmon.store.as_of.AsOf."""

    until_ns: int
    ranks: dict[int, int | None]
    missed: int

    def lasting(self, kind: str, newest: int = -1) -> list[Event]:
        """Events of a kind, in their order."""

    def count(self, kind: str) -> int:
        """How many events of a kind there were."""

    def heads(self, process: int, most: int) -> list[CallHead]:
        """The newest calls of a process, the newest first."""

    def last_calls(self, process: int, most: int) -> list[CallHead]:
        """The newest calls of its newest step, the newest first."""

    def call(self, process: int, head: CallHead) -> Call | None:
        """The call itself."""

    def communicated(self, begin_ns: int, end_ns: int, processes: Collection[int]) -> Communicated:
        """The sampled collectives of processes between two times."""

    def last_sample(self, process: int, begin_ns: int) -> LastSample | None:
        """The newest step of a process with sampled collectives, if it began after a time."""

    def samples(self, span_ns: int, after_id: int = 0) -> list[Sample]:
        """Samples of devices and host, in their order."""

    def sample(self, number: int) -> Event | None:
        """The whole sample with this id."""

    def memory(self, process: int, until_ns: int | None = None) -> Event | None:
        """What the memory of the devices of a process held when it was looked at last."""

    def host_memory(self, begin_ns: int, end_ns: int) -> list[tuple[int, int]]:
        """The most memory that the run's processes had in each minute."""

    @property
    def until_s(self) -> int | None:
        """The first second that is not over; None as of now."""

    def first_ns(self, process: int) -> int | None:
        """When the first call or step of a process began."""

    def steps(self, process: int, most: int) -> list[Step]:
        """Its newest steps, the newest first."""

    def longest(self, process: int, mode: str, most: int, *, of_all: bool = False) -> list[LongRow]:
        """The longest of its newest steps in a mode; `of_all`: of all."""

    def last_training_ns(self, process: int) -> int | None:
        """When its last training step ended."""


class Wanted(NamedTuple):
    """What a picture shows, beside what every picture does."""

    span_s: int = 120
    """Time range of the histories and figures; 0 is the whole run."""
    first_rank: int = 0
    """The first of the ranks that are shown."""
    ranks: int = MOST_RANKS
    """How many of them; the first ranks of the run are read, too."""
    over: bool = False
    """Whether the run is over."""


def figures_end_s(rows: Rows, process: Process) -> int:
    """The second with which the figures of a process end: that of its newest step is the last one they hold.

    As of a time in the past only whole seconds are known, unless there is none.
    """
    assert process.last_step is not None
    end_s = (process.last_step.start_ns + process.last_step.wall_ns) // SECOND + 1
    whole_s = rows.until_s
    return end_s if whole_s is None or whole_s <= process.began_ns // SECOND + 1 else min(end_s, whole_s)
