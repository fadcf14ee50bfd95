"""The names of the series with the times of replicas and stages in a process's tallies."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

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
    """Return the series name of the replica at `index` in calls of this layout."""
    return f"replica {layout} {index}"


def stage_series(layout: int, index: int, stage: int, inputs: int, outputs: int) -> str:
    """Return the series name of the stage at `index` in calls with these sizes of inputs and outputs."""
    return f"stage {layout} {index} {stage} {inputs} {outputs}"
