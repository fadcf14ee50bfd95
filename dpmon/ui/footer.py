"""The last row: the keys that work now, the most useful first."""

from __future__ import annotations

from dpmon.ui.look import Look
from dpmon.ui.panel_replicas import choices
from dpmon.ui.rows import Row, fit, width_of
from dpmon.ui.scene import Scene

__all__ = ["footer", "keys"]


def keys(scene: Scene) -> list[tuple[str, str]]:
    """Key and word for everything that can be done now."""
    view = scene.view
    found: list[tuple[str, str]] = []
    if scene.can_toggle and not scene.over and scene.process is not None:
        found.append(("d", "dp" if scene.process.mode == "single" else "single"))
    if view.frozen or not scene.over:
        found.append(("space", "go on" if view.frozen else "freeze"))
    found.append(("esc", "all panels") if view.zoom else ("1-5", "panel"))
    if not view.zoom:
        found.append(("enter", "zoom"))
    if view.focus == "output" or view.zoom == "output":
        found.append(("pgup pgdn", "scroll"))
    if view.focus == "replicas" and len(choices(scene.process)) > 1:
        found.append(("n", "next call"))
    if scene.can_type and not scene.over:
        found.append(("i", "input"))
    if scene.state.warnings:
        found.append(("w", "warnings"))
    found.append(("?", "help"))
    found.append(("q", "close" if scene.over else "leave"))
    return found


def footer(scene: Scene, width: int, look: Look) -> list[Row]:
    """One row of `width` cells; what has no room gives way to the sign for more, help and leave stay."""
    pairs = keys(scene)
    always = pairs[-2:]
    tail: Row = []
    for key, word in always:
        tail += [("  ", ""), (key, "key"), (" " + word, "dim")]
    row: Row = []
    room = width - width_of(tail) - 1
    for key, word in pairs[:-2]:
        piece: Row = [("  " if row else " ", ""), (key, "key"), (" " + word, "dim")]
        if width_of(piece) > room - 2:
            row.append((" " + look.glyphs.more, "dim"))
            break
        row += piece
        room -= width_of(piece)
    return [fit([*row, *tail], width, look.glyphs.more)]
