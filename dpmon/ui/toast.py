"""The full text of a message that the first rows had to cut: a framed note over the panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpmon.text.cells import wrapped
from dpmon.ui.layout import Slot
from dpmon.ui.look import Look
from dpmon.ui.panel_status import cut_answer
from dpmon.ui.replies import answer
from dpmon.ui.rows import Row, box, cropped, plain, width_of
from dpmon.ui.scene import Scene

_WIDEST = 84
_SHARE = 2
"""The note covers at most one in this many rows of the screen."""


def toast(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """The note's rows for a screen of that size, all of one width; empty if the first rows show everything."""
    if not cut_answer(scene, width, look):
        return []
    across = min(width, _WIDEST)
    room = max(height // _SHARE - 2, 1)
    lines = wrapped(plain(answer(scene, look)), across - 4, room, look.glyphs.more)
    rows: list[Row] = [[(line, "")] for line in lines]
    return box([("in full", "wait")], [], rows, across, len(rows) + 2, look.glyphs, focused=True)


def laid_over(painted: dict[str, list[Row]], slots: Mapping[str, Slot], rows: Sequence[Row], y: int) -> None:
    """Put `rows` over the painted screen from row `y` on, at its left."""
    for panel, slot in slots.items():
        for index, row in enumerate(rows, y - slot.y):
            if 0 <= index < len(painted[panel]):
                covered = cropped(row, slot.x, slot.x + slot.width)
                left = cropped(painted[panel][index], width_of(covered), slot.width)
                painted[panel][index] = [*covered, *left]
