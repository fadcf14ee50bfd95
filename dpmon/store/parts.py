"""The names under which the times of replicas and stages are counted in the tallies of their process."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

__all__ = ["Part", "part_of", "replica_series", "stage_series"]

_DEVICE = "@device"


class Part(NamedTuple):
    """A replica, or a stage of a model on several devices; numbers refer to the definitions of its process."""

    layout: int
    number: int
    stage: int | None
    """The definition of a stage (device and parts); None for a replica."""
    inputs: int
    outputs: int
    on_device: bool


@lru_cache(4096)
def replica_series(layout: int, index: int) -> str:
    """Of the replica at `index` in calls of this layout."""
    return f"replica {layout} {index}"


def stage_series(layout: int, index: int, stage: int, inputs: int, outputs: int) -> str:
    """Of the stage at `index`, in calls in which it got and gave these sizes."""
    return f"stage {layout} {index} {stage} {inputs} {outputs}"


def part_of(series: str) -> Part | None:
    """What a series is of; None if it is no replica's and no stage's."""
    name = series.removesuffix(_DEVICE)
    kind, *words = name.split(" ")
    if kind not in ("replica", "stage") or not all(word.isdecimal() for word in words):
        return None
    numbers = [int(word) for word in words]
    on_device = name != series
    if kind == "replica" and len(numbers) == 2:
        return Part(numbers[0], numbers[1], None, 0, 0, on_device)
    if kind == "stage" and len(numbers) == 5:
        return Part(numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], on_device)
    return None
