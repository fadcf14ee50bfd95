"""What the screen shows, for what the run is: from the facts of a picture to its scene."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from dpmon.ui.facts import Facts
from dpmon.ui.panels import panel_communication, panel_compare, panel_ranks, panel_replicas, panel_standing

STARTING, SINGLE, DP, RANKS, STALLED, ENDED = "starting", "single", "dp", "ranks", "stalled", "ended"


class Scene(NamedTuple):
    """What the screen shows."""

    name: str
    """starting, single, dp, ranks, stalled or ended."""
    second: ModuleType
    """Draws panel 2: replicas (or stages), ranks, or where each rank stands."""
    fourth: ModuleType
    """Draws panel 4: the comparison of the modes, or communication."""
    stale: bool
    """Whether figures are of the time before a stall: they are dimmed, and there is no advice."""


def scene_of(facts: Facts) -> Scene:
    """What the screen shows. A run that ended in a stall is shown like the stall."""
    stalled, process = facts.stall is not None, facts.process
    ranks = panel_ranks.applies(facts)
    second = panel_standing if stalled else panel_ranks if ranks else panel_replicas
    fourth = panel_communication if panel_communication.applies(facts) else panel_compare
    name = RANKS if ranks else DP if process is not None and process.mode == "dp" else SINGLE
    if process is None or process.seen_ns < 0:
        name = STARTING
    return Scene(ENDED if facts.over else STALLED if stalled else name, second, fourth, stalled)
