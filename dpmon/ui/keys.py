"""The keys, and what those that only change the view do to it: functions from view to view."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from textual.binding import Binding, BindingType

from dpmon.ui.layout import Slot
from dpmon.ui.scene import PANELS, View

__all__ = ["BINDINGS", "next_panel", "to_panel", "zoomed"]

_FAR = 1_000_000_000
BINDINGS: list[BindingType] = [
    Binding("ctrl+c,ctrl+q", "leave", priority=True, show=False),
    Binding("q", "leave", show=False),
    Binding("d", "toggle_mode", show=False),
    Binding("question_mark,h,f1", "help", show=False),
    Binding("space", "freeze", show=False),
    # Before Textual moves a focus that nothing here has.
    Binding("tab", "next_panel(1)", priority=True, show=False),
    Binding("shift+tab", "next_panel(-1)", priority=True, show=False),
    *(Binding(str(i + 1), f"panel('{name}')", show=False) for i, name in enumerate(PANELS)),
    Binding("enter", "zoom", show=False),
    Binding("escape", "unzoom", show=False),
    Binding("up", "scroll(-1)", show=False),
    Binding("down", "scroll(1)", show=False),
    Binding("pageup", "scroll_page(-1)", show=False),
    Binding("pagedown", "scroll_page(1)", show=False),
    Binding("home", f"scroll(-{_FAR})", show=False),
    Binding("end", f"scroll({_FAR})", show=False),
    Binding("left", "shift(-8)", show=False),
    Binding("right", "shift(8)", show=False),
    Binding("n", "next_root", show=False),
    Binding("i", "type_line", show=False),
    Binding("w", "warnings", show=False),
    Binding("o", "next_output", show=False),
    Binding("ctrl+z", "suspend_process", show=False),
]


def to_panel(view: View, slots: Mapping[str, Slot], name: str) -> View:
    """Go to a panel; when one is there already, or it has no place of its own: full screen and back."""
    if view.zoom is not None:
        return replace(view, focus=name, zoom=None if view.zoom == name else name)
    if view.focus == name or name not in slots or slots[name].folded:
        return replace(view, focus=name, zoom=name)
    return replace(view, focus=name)


def next_panel(view: View, slots: Mapping[str, Slot], by: int) -> View:
    """Go to the next panel on the screen; while one is full screen, show the next one so."""
    here = PANELS.index(view.focus)
    order = [PANELS[(here + by * i) % len(PANELS)] for i in range(1, len(PANELS) + 1)]
    if view.zoom is not None:
        return replace(view, focus=order[0], zoom=order[0])
    return replace(view, focus=next((panel for panel in order if panel in slots), view.focus))


def zoomed(view: View) -> View:
    """The panel in focus: full screen and back."""
    return replace(view, zoom=None if view.zoom is not None else view.focus)
