"""Every key: what it does, what the footer calls it, and when it is possible. Footer, help and palette read this list.

And what the keys that only change the view do to it: functions from view to view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from textual.binding import Binding, BindingType

from dpmon.text.quantities import range_words
from dpmon.ui import panel_communication, panel_ranks
from dpmon.ui.layout import Slot
from dpmon.ui.panel_replicas import choices
from dpmon.ui.scene import NAMES, PANELS, RANGES, RANK_NAMES, Scene, View

__all__ = [
    "BINDINGS",
    "DEEDS",
    "PERIODS",
    "PLAYED",
    "Deed",
    "neighbour",
    "next_panel",
    "other_period",
    "other_range",
    "possible",
    "range_words",
    "to_panel",
    "zoomed",
]

FAR = 1_000_000_000
PERIODS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds between pictures to choose from."""


class Deed(NamedTuple):
    """One thing that can be done."""

    key: str
    """As people write it."""
    names: str
    """As Textual calls the keys, separated by commas."""
    action: str
    word: Callable[[Scene], str | None]
    """What the footer calls it now; None while it is not possible, "" where it has no place in the footer."""
    says: str
    """What help and palette say."""


def _always(word: str) -> Callable[[Scene], str | None]:
    return lambda scene: word


def _when(test: Callable[[Scene], bool], word: str) -> Callable[[Scene], str | None]:
    return lambda scene: word if test(scene) else None


def _other_mode(scene: Scene) -> str | None:
    if not scene.can_toggle or scene.over or scene.closing or scene.process is None:
        return None
    return "→ dp" if scene.process.mode == "single" else "→ single"


def _pause(scene: Scene) -> str | None:
    if not scene.pausing.possible or scene.over or scene.ending:
        return None
    if scene.pausing.wanted:
        return "resume"
    return None if scene.closing else "pause"


def _freeze(scene: Scene) -> str | None:
    if scene.view.frozen:
        return "go on"
    return None if scene.over or scene.playing is not None else "freeze"


def _stoppable(scene: Scene) -> bool:
    return not scene.over and scene.stopping is None and scene.playing is None


def _several_roots(scene: Scene) -> bool:
    return scene.view.focus == "replicas" and len(choices(scene.process)) > 1


def _finding(scene: Scene) -> bool:
    return bool(scene.view.search) and scene.view.focus == "output"


def _communicates(scene: Scene) -> bool:
    return len(scene.state.ranks) > 1 and not scene.over and scene.playing is None


def _behind(scene: Scene) -> str | None:
    """What `end` does where the output is not at its end; after a search nothing else goes back there."""
    if not scene.scrolled_back or "output" not in (scene.view.focus, scene.view.zoom):
        return None
    return "to the end" if scene.over else "follow"


DEEDS: tuple[Deed, ...] = (
    Deed("d", "d", "toggle_mode", _other_mode, "data parallel or single device, from the next batch on"),
    Deed("p", "p", "pause", _pause, "pause the training between two steps, or resume it"),
    Deed("space", "space", "freeze", _freeze, "freeze the picture; the training goes on"),
    Deed(
        "esc",
        "escape",
        "unzoom",
        lambda scene: "all panels" if scene.view.zoom else "end search" if _finding(scene) else None,
        "back to all panels; end a search",
    ),
    Deed("n", "n", "next(1)", _when(_finding, "older"), "in a search, the next older line"),
    Deed("N", "N", "next(-1)", _when(_finding, "newer"), "the next newer one"),
    Deed("end", "end", f"scroll({FAR})", _behind, "to the end of the output, and follow it"),
    Deed(
        "1-5",
        "",
        "",
        lambda scene: None if scene.view.zoom else "panel",
        "go to a panel; once more: full screen and back. tab, arrows and the mouse do so too",
    ),
    Deed(
        "enter",
        "enter",
        "zoom",
        lambda scene: None if scene.view.zoom else "zoom",
        "the panel in focus: full screen; a double click does so, too",
    ),
    Deed(
        "/",
        "slash",
        "find",
        lambda scene: "find" if "output" in (scene.view.focus, scene.view.zoom) else "",
        "find a word in the script's output, the newest line first",
    ),
    Deed("n", "n", "next(1)", _when(_several_roots, "next call"), "in panel 2, the next root or call of a step"),
    Deed(
        "i",
        "i",
        "type_line",
        _when(lambda s: s.can_type and not s.over and not s.ending, "input"),
        "send a line to the script",
    ),
    Deed("c", "c", "sample", _when(_communicates, "collectives"), "record the collectives of a step of all ranks, now"),
    Deed("w", "w", "warnings", _when(lambda s: bool(s.state.warnings), "warnings"), "all warnings that are kept"),
    Deed("[ ]", "", "", _always("range"), "a shorter or longer time range for histories and figures"),
    Deed("s", "s", "picture", _always("picture"), "save a picture of the screen (SVG)"),
    Deed("e", "e", "export", _always("export"), "export all records: JSON, CSV, Perfetto; in the background"),
    Deed("r", "r", "report", _always("report"), "the report: what happened in the run so far"),
    Deed("x", "x", "stop", _when(_stoppable, "stop"), "stop the training; asks first"),
    Deed("t", "t", "theme", _always("theme"), "the next theme: dark, light, colour-blind, mono, ASCII"),
    Deed("+ -", "", "", _always("refresh"), "a picture more or less often"),
    Deed(
        "o",
        "o",
        "next_output",
        _when(lambda s: s.outputs > 1, "output file"),
        "the other file of output",
    ),
    Deed(":", "colon,ctrl+p", "palette", _always("more"), "all that can be done now; type to choose"),
    Deed("?", "question_mark,h,f1", "help", _always("help"), "what the words and keys mean"),
    Deed(
        "q",
        "q",
        "leave",
        lambda scene: "close" if scene.over or scene.playing is not None else "leave",
        "leave the training running, stop it, or stay; ctrl+c too",
    ),
)


def _played(key: str, names: str, action: str, says: str) -> Deed:
    return Deed(key, names, action, lambda scene: None if scene.playing is None else "", says)


PLAYED: tuple[Deed, ...] = (
    _played("space", "space", "play", "play, or stop; at the end from the beginning"),
    _played(".", "full_stop", "step(1)", "to the next step"),
    _played(",", "comma", "step(-1)", "to the step before"),
    _played("f", "f", "seek(10)", "10 seconds on"),
    _played("b", "b", "seek(-10)", "10 seconds back"),
    _played("F", "F", "seek(60)", "a minute on"),
    _played("B", "B", "seek(-60)", "a minute back"),
    _played(">", "greater_than_sign", "faster(1)", "play faster, up to 100 times"),
    _played("<", "less_than_sign", "faster(-1)", "play slower, down to 0.1 times"),
    _played("g", "g", "seek_to(0.0)", "to the beginning"),
    _played("G", "G", "seek_to(1.0)", "to the end"),
)
"""What is there only while a run that is over is played back; the time line names some of them."""
_PAIRS: tuple[tuple[str, str, str, str], ...] = (
    ("[", "left_square_bracket", "range(-1)", "a shorter time range"),
    ("]", "right_square_bracket", "range(1)", "a longer time range"),
    ("+", "plus,equals_sign", "refresh(-1)", "pictures more often"),
    ("-", "minus,underscore", "refresh(1)", "pictures less often"),
)
_PANEL_KEYS = tuple((str(number), f"panel('{name}')", name) for number, name in enumerate(PANELS, start=1))


def _bindings() -> list[BindingType]:
    found: dict[str, str] = {deed.names: deed.action for deed in DEEDS if deed.names}
    found |= {names: action for _, names, action, _ in _PAIRS}
    found |= {key: action for key, action, _ in _PANEL_KEYS}
    found |= {
        "up": "arrow('up')",
        "down": "arrow('down')",
        "left": "arrow('left')",
        "right": "arrow('right')",
        "pageup": "scroll_page(-1)",
        "pagedown": "scroll_page(1)",
        "home": f"scroll(-{FAR})",
        "ctrl+z": "suspend_process",
    }
    return [
        Binding("ctrl+c,ctrl+q", "leave(True)", priority=True, show=False),
        # Before Textual moves a focus that nothing here has.
        Binding("tab", "next_panel(1)", priority=True, show=False),
        Binding("shift+tab", "next_panel(-1)", priority=True, show=False),
        *(Binding(names, action, show=False) for names, action in found.items()),
    ]


BINDINGS: list[BindingType] = _bindings()


def possible(scene: Scene) -> list[tuple[str, str, str]]:
    """Key, sentence and action for everything that can be done now, for the palette."""
    found = [
        (d.key, "close this screen" if word == "close" else d.says, d.action)
        for d in (*PLAYED, *DEEDS)
        if d.names and d.action != "palette" and (word := d.word(scene)) is not None
    ]
    found += [(key, says, action) for key, _, action, says in _PAIRS]
    return found + [(key, f"go to panel {panel_name(scene, name)}", action) for key, action, name in _PANEL_KEYS]


def panel_name(scene: Scene, panel: str) -> str:
    """What a panel is called now."""
    ranked = panel_communication.applies(scene) if panel == "compare" else panel_ranks.applies(scene)
    return RANK_NAMES.get(panel, NAMES[panel]) if ranked else NAMES[panel]


# ------------------------------------------------------------------------------------------------ the view


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


def neighbour(view: View, slots: Mapping[str, Slot], way: str) -> View:
    """Go to the panel that lies up, down, left or right of the one in focus, if there is one."""
    here = slots.get(view.focus)
    if here is None:
        return view
    found: list[tuple[int, int, str]] = []
    for name in PANELS:
        slot = slots.get(name)
        if slot is None or name == view.focus:
            continue
        if way in ("left", "right"):
            gap = here.x - (slot.x + slot.width) if way == "left" else slot.x - (here.x + here.width)
            aside = max(slot.y - (here.y + here.height), here.y - (slot.y + slot.height)) + 1
        else:
            gap = here.y - (slot.y + slot.height) if way == "up" else slot.y - (here.y + here.height)
            aside = max(slot.x - (here.x + here.width), here.x - (slot.x + slot.width)) + 1
        if gap >= 0 and aside <= 0:
            found.append((gap, PANELS.index(name), name))
    return replace(view, focus=min(found)[2]) if found else view


def zoomed(view: View) -> View:
    """The panel in focus: full screen and back."""
    return replace(view, zoom=None if view.zoom is not None else view.focus)


def other_range(view: View, by: int) -> View:
    """The next longer (or shorter) time range; the last one stays."""
    here = RANGES.index(view.span_s) if view.span_s in RANGES else 0
    return replace(view, span_s=RANGES[min(max(here + by, 0), len(RANGES) - 1)])


def other_period(period: float, by: int) -> float:
    """The next longer (or shorter) time between pictures."""
    longer = [each for each in PERIODS if each > period * 1.001]
    shorter = [each for each in PERIODS if each < period * 0.999]
    if by > 0:
        return longer[0] if longer else period
    return shorter[-1] if shorter else period
