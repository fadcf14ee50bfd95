"""The losses of a process over time: one curve for each line of the script that calls backward.

A GAN has a curve for its discriminator and one for its generator. If a library calls backward, as Lightning does, the
line is the one that calls the library. A curve has at most one value a second and the last one, so many steps have no
value. dpmon.tracer.steps.losses says what the value of an update is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median_low
from typing import TYPE_CHECKING

from dpmon.store.loss_table import LossBin, read_first_loss, read_loss_bins, read_loss_sites, read_newest_losses

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

SMOOTHED_LOSSES = 9
"""A smoothed loss is the median of this many values."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The losses of one line that calls backward."""

    process: int
    place: str
    """File and line, such as "train.py:88"."""
    points: tuple[LossBin, ...] = ()
    """One for each interval of `point_s` seconds with a value, oldest first."""
    point_s: int = 1
    """Duration of a point."""
    last: float | None = None
    """The newest value, which may be NaN or infinite; None if there is none: see `why`."""
    smoothed: float | None = None
    """The median of the finite ones of the newest SMOOTHED_LOSSES values; None if none of them is finite."""
    step: int | None = None
    """The step of the newest value; None if unknown."""
    t_ns: int | None = None
    """The time of the newest value."""
    first: float | None = None
    """The first value of the run."""
    why: str | None = None
    """Why there are no values."""


def read_loss_curves(store: Store, process: int, start_s: int, end_s: int, width_s: int) -> tuple[LossCurve, ...]:
    """Return the curves of a process between two times (s), in order of their first value.

    A point covers `width_s` seconds and starts at a multiple of it, as a column of the history does.
    """
    places = read_loss_sites(store, process)
    places_with_values = {place for place, reason in places.values() if reason is None}
    curves = []
    for place_index, (place, reason) in places.items():
        if reason is not None:
            if place not in places_with_values:
                curves.append(LossCurve(process, place, why=reason))
            continue
        rows = read_newest_losses(store, process, place_index, SMOOTHED_LOSSES)
        if rows:
            newest, *_ = rows
            points = tuple(read_loss_bins(store, process, place_index, start_s, end_s, width_s))
            finite = [row.value for row in rows if isfinite(row.value)]
            smoothed = median_low(finite) if finite else None
            last = newest.value, smoothed, newest.step or None, newest.t_ns
            first = read_first_loss(store, process, place_index)
            curves.append(LossCurve(process, place, points, width_s, *last, first))
    return tuple(curves)


def smooth_losses(losses: Sequence[float]) -> list[float]:
    """Return for each loss the median of the newest SMOOTHED_LOSSES up to it; of an even number, the lower middle one.

    A few high losses, such as the first ones of a run, do not raise a median as they raise a mean.
    """
    return [median_low(losses[max(end - SMOOTHED_LOSSES, 0) : end]) for end in range(1, len(losses) + 1)]
