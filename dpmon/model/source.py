"""What a snapshot is made from: what it asks of a store, and what its picture shows. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple, Protocol

from dpmon.model.announced import EventSource
from dpmon.model.calls_seen import CallSource
from dpmon.model.devices import SampleSource
from dpmon.record.kinds import Step
from dpmon.store.answers import LongRow, PaceRow, TimeRow
from dpmon.store.tally import Key, Tally
from dpmon.store.window import Source

__all__ = ["MOST_RANKS", "Rows", "Tallies", "Wanted"]


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

    def pace_rows(self, begin_s: int, end_s: int, process: int | Collection[int]) -> Iterator[PaceRow]:
        """What a rate takes of the tallies of a second each, in order of time."""

    def step_counts(self, begin_s: int, end_s: int) -> dict[int, int]:
        """By process, the steps in the tallies of a second each."""

    def pace_times(
        self, begin_s: int, end_s: int, process: int | Collection[int], *, evaluation: bool, widest: int = ...
    ) -> Iterator[tuple[int, int, int, int]]:
        """Process, start, width and time (ns) of training and between steps, or of evaluation too."""

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


class Rows(CallSource, SampleSource, EventSource, Protocol):
    """What a snapshot needs of dpmon.store.as_of.AsOf."""

    ranks: dict[int, int | None]
    missed: int

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
