"""Chooses what the screen shows: from the facts of a picture to its scene."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from dpmon.ui.panel_layout import Arrangement, ScenePanel, Tree
from dpmon.ui.panels import (
    panel_communication,
    panel_compare,
    panel_progress,
    panel_ranks,
    panel_replicas,
    panel_stall,
)
from dpmon.ui.screen_data import ScreenData

STARTING, SINGLE, DP, RANKS, MANY, NODES = "starting", "single", "dp", "ranks", "many ranks", "nodes"
STALLED, ENDED = "stalled", " ended"
"""ENDED follows the name of the scene in which the run ended."""

_OUTPUT, _BATCH = ScenePanel("output", 4, grows=True), ScenePanel("batch", 9, grows=True)
"""Nine rows have room for the figures of panel 3, a history with its axis, and the last step."""
_DEVICES, _COMPARE, _PROGRESS = (
    ScenePanel("devices", 4),
    ScenePanel("compare", 6),
    ScenePanel("progress", 4, grows=True),
)
_REPLICAS, _RANKS, _STALLED_RANKS = ScenePanel("replicas", 5), ScenePanel("replicas", 7), ScenePanel("replicas", 7)
_NODES = ScenePanel("replicas", 10)
_ENDED_PROGRESS = ScenePanel("progress", 7, grows=True)

_RANK_ARRANGEMENT = Arrangement(
    (_RANKS, _OUTPUT, _BATCH, _PROGRESS, _COMPARE, _DEVICES),
    one_column=("devices", "compare", "replicas", "progress", "batch", "output"),
    two_columns=("replicas", "batch", (("devices", "compare", "progress"), "output")),
    three_columns=((("replicas", "batch", ("devices", "compare")), ("progress", "output")),),
)


def _put_findings_first(running: Arrangement) -> Arrangement:
    """Return the arrangement after the end: the findings and losses first, then the others in the same order."""

    def remove_progress(tree: Tree) -> Tree:
        return tree if isinstance(tree, str) else tuple(remove_progress(part) for part in tree if part != "progress")

    others = [member for member in running.members if member.name not in ("progress", "output")]
    trees = (running.one_column, running.two_columns, running.three_columns)
    one_column, two_columns, three_columns = (("progress", *remove_progress(tree)) for tree in trees)
    return Arrangement((_ENDED_PROGRESS, _OUTPUT, *others), one_column, two_columns, three_columns)


_ARRANGEMENTS_WITHOUT_STALL: Mapping[str, Arrangement] = {
    STARTING: Arrangement(
        (_OUTPUT, _PROGRESS._replace(grows=False), _DEVICES),
        one_column=("progress", "devices", "output"),
        two_columns=(("progress", "devices"), "output"),
        three_columns=(("progress", "devices"), "output"),
    ),
    SINGLE: _RANK_ARRANGEMENT._replace(
        members=(_BATCH, _OUTPUT, _PROGRESS, _DEVICES, _REPLICAS, _COMPARE),
        three_columns=((("replicas", "batch", ("devices", "output")), ("progress", "compare")),),
    ),
    DP: Arrangement(
        (_REPLICAS, _OUTPUT, _BATCH, _PROGRESS, _COMPARE, _DEVICES),
        one_column=("devices", "replicas", "progress", "batch", "compare", "output"),
        two_columns=(("devices", "replicas"), "batch", (("compare", "output"), "progress")),
        three_columns=(((("devices", "replicas"), "batch", "output"), ("progress", "compare")),),
    ),
    RANKS: _RANK_ARRANGEMENT,
    MANY: _RANK_ARRANGEMENT,
    NODES: _RANK_ARRANGEMENT._replace(
        members=(_NODES, _OUTPUT, _BATCH, _PROGRESS, _COMPARE, _DEVICES),
        two_columns=("replicas", (("batch", "devices"), ("compare", "progress", "output"))),
    ),
}
ARRANGEMENTS: Mapping[str, Arrangement] = {
    **_ARRANGEMENTS_WITHOUT_STALL,
    **{name + ENDED: _put_findings_first(running) for name, running in _ARRANGEMENTS_WITHOUT_STALL.items()},
    STALLED: Arrangement(
        (_STALLED_RANKS, _OUTPUT, _BATCH, _PROGRESS, _DEVICES),
        one_column=("devices", "replicas", "progress", "batch", "output"),
        two_columns=("replicas", "batch", (("devices", "progress"), "output")),
        three_columns=("replicas", "batch", (("devices", "progress"), "output")),
    ),
}
"""The panels of each scene. A scene leaves out those that can have no value in a run."""


class Scene(NamedTuple):
    """The panels that the screen shows, and who draws them."""

    name: str
    """A key of ARRANGEMENTS."""
    panels: tuple[str, ...]
    """The panels that can have values, the most important first."""
    second_panel: ModuleType
    """Draws panel 2: replicas (or stages), ranks, or where each rank stands."""
    fourth_panel: ModuleType
    """Draws panel 4: the comparison of the modes, or communication."""
    is_stale: bool
    """Whether the figures are from before a stall: then they are dimmed, and there is no advice."""

    @property
    def arrangement(self) -> Arrangement:
        """The panels and their places."""
        return ARRANGEMENTS[self.name].only(self.panels)


def choose_scene(screen: ScreenData) -> Scene:
    """Return what to show. A run that ended in a stall is shown like the stall."""
    is_stalled, process = screen.shown_stall is not None, screen.process
    has_ranks, compares_modes = panel_ranks.is_shown(screen), panel_compare.is_shown(screen)
    second_panel = panel_ranks if has_ranks else panel_replicas
    if is_stalled:
        second_panel = panel_stall
    fourth_panel = panel_communication if panel_communication.is_shown(screen) else panel_compare
    if is_stalled:
        name = STALLED
    elif screen.state.nodes:
        name = NODES
    elif process is None or process.seen_ns < 0:
        name = STARTING
    elif has_ranks:
        name = MANY if panel_ranks.shows_map(screen) else RANKS
    else:
        name = DP if compares_modes else SINGLE
    if screen.is_over and not is_stalled:
        name += ENDED
    empty_panels = set()
    if not (is_stalled or has_ranks or compares_modes or panel_replicas.has_stages(process)):
        empty_panels.add("replicas")
    if fourth_panel is panel_compare and not compares_modes:
        empty_panels.add("compare")
    if not panel_progress.is_shown(screen) or (is_stalled and not screen.is_over):
        empty_panels.add("progress")
    panels = tuple(panel for panel in ARRANGEMENTS[name].panels if panel not in empty_panels)
    return Scene(name, panels, second_panel, fourth_panel, is_stalled)
