"""Every key with its effect, its word in the footer, and whether it works now. Footer, help and palette use this list.

The functions below the list are for keys that only change the view: they take a view and return the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

from dpmon.model.nodes import NodeStatus
from dpmon.ui.panel_layout import Slot
from dpmon.ui.panels import panel_communication, panel_ranks
from dpmon.ui.panels.panel_replicas import list_choices
from dpmon.ui.screen_data import NAMES, PANELS, RANGES, RANK_NAMES, ScreenData, View

FAR = 1_000_000_000
PERIODS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""Seconds between pictures to choose from."""


class KeyCommand(NamedTuple):
    """A command of the user."""

    key: str
    """The key as people write it."""
    action: str
    footer_word: Callable[[ScreenData], str | None]
    """The word for the command in the footer; None if the key does not work now, "" if the footer omits it."""
    description: str
    """The text in the help and the palette."""
    names: str = ""
    """Textual's names of the keys, separated by commas, if they differ from `key`."""


def _always_shown(word: str) -> Callable[[ScreenData], str | None]:
    return lambda facts: word


def _shown_when(test: Callable[[ScreenData], bool], word: str) -> Callable[[ScreenData], str | None]:
    return lambda facts: word if test(facts) else None


def _other_mode(facts: ScreenData) -> str | None:
    if not facts.can_toggle or facts.process is None:
        return None
    return "→ dp" if facts.process.mode == "single" else "→ single"


def _pause_label(facts: ScreenData) -> str | None:
    if not facts.can_pause:
        return None
    return "resume" if facts.pausing.wanted else "pause"


def _freeze_label(facts: ScreenData) -> str | None:
    if facts.view.frozen:
        return "go on" if facts.past is None else None
    return None if facts.is_over or facts.playing is not None else "freeze"


def _is_finished(facts: ScreenData) -> bool:
    """Whether the run is over, whatever time the picture shows."""
    return facts.is_over or facts.playing is not None or (facts.past is not None and facts.past.now_ns is None)


def _can_stop(facts: ScreenData) -> bool:
    return not _is_finished(facts) and facts.stopping is None


def _why_label(facts: ScreenData) -> str | None:
    return "why" if (_can_stop(facts) and facts.past is None) or facts.shown_stall is not None else None


def _several_roots(facts: ScreenData) -> bool:
    return facts.view.focus == "replicas" and len(list_choices(facts.process)) > 1


def _look_back_label(facts: ScreenData) -> str | None:
    """The word for `<` and `>`; the time line of a playback has its own."""
    if facts.process is None or facts.process.last_step is None:
        return None
    return "time" if facts.playing is None else ""


def _escape_label(facts: ScreenData) -> str | None:
    """The word for `esc`."""
    if facts.past is not None:
        return "now"
    if facts.view.zoom:
        return "all panels"
    return "all nodes" if facts.view.node is not None else "end search" if _is_searching(facts) else None


def _is_searching(facts: ScreenData) -> bool:
    return bool(facts.view.search) and facts.view.focus == "output"


def node_to_show(facts: ScreenData) -> NodeStatus | None:
    """The node that `enter` shows: that of the chosen rank, in panel 2."""
    view = facts.view
    if view.zoom is not None or view.focus != "replicas" or view.process is None:
        return None
    return next((one for one in facts.state.nodes if view.process in one.processes), None)


def slash_finds_rank(facts: ScreenData) -> bool:
    """Whether `/` finds a rank."""
    return facts.view.focus == "replicas" and facts.view.zoom != "output" and panel_ranks.shows_map(facts)


def _find_label(facts: ScreenData) -> str:
    if slash_finds_rank(facts):
        return "find rank"
    return "find" if "output" in (facts.view.focus, facts.view.zoom) else ""


def _zoom_label(facts: ScreenData) -> str | None:
    node = node_to_show(facts)
    return None if facts.view.zoom else "zoom" if node is None else node.name


def _can_sample_collectives(facts: ScreenData) -> bool:
    return len(facts.state.ranks) > 1 and not facts.is_over and facts.playing is None


def _ranks(facts: ScreenData) -> bool:
    return len(facts.state.ranks) > 1 and facts.playing is None


def _end_key_label(facts: ScreenData) -> str | None:
    """The word for `end` if the output is scrolled back, for example after a search."""
    if not facts.scrolled_back or "output" not in (facts.view.focus, facts.view.zoom):
        return None
    return "to the end" if facts.is_over else "follow"


COMMANDS: tuple[KeyCommand, ...] = (
    KeyCommand("d", "toggle_mode", _other_mode, "data parallel or single device, from the next batch on"),
    KeyCommand("p", "pause", _pause_label, "pause the training between two steps, or resume it"),
    KeyCommand("space", "freeze", _freeze_label, "freeze the picture; the training goes on"),
    KeyCommand(
        "esc", "unzoom", _escape_label, "back to now; back to all panels, or to all nodes; end a search", "escape"
    ),
    KeyCommand("n", "next(1)", _shown_when(_is_searching, "older"), "during a search: the next older line"),
    KeyCommand("N", "next(-1)", _shown_when(_is_searching, "newer"), "during a search: the next newer line"),
    KeyCommand("end", f"scroll({FAR})", _end_key_label, "to the end of the output, and follow it"),
    KeyCommand(
        "1-6",
        "",
        lambda facts: None if facts.view.zoom else "panel",
        "go to a panel; press again for full screen and back. tab, arrows and the mouse work too",
    ),
    KeyCommand(
        "enter",
        "zoom",
        _zoom_label,
        "show the panel in focus on the full screen, or the node of the chosen rank; a double click does the same",
    ),
    KeyCommand(
        "/",
        "find",
        _find_label,
        "find a word in the script's output, the newest line first; in a map of ranks, a rank or a node",
        "slash",
    ),
    KeyCommand("n", "next(1)", _shown_when(_several_roots, "next call"), "in panel 2: the next root or call of a step"),
    KeyCommand(
        "i",
        "type_line",
        _shown_when(lambda s: s.can_type and not s.is_over and not s.ending, "input"),
        "send a line to the script",
    ),
    KeyCommand(
        "c",
        "sample",
        _shown_when(_can_sample_collectives, "collectives"),
        "record the collectives of one of the next steps",
    ),
    KeyCommand(
        ".", "rank(1)", _shown_when(_ranks, "rank"), "panel 3 of the straggler, then of the next rank", "full_stop"
    ),
    KeyCommand(",", "rank(-1)", _shown_when(_ranks, ""), "panel 3 of the rank before", "comma"),
    KeyCommand("w", "why", _why_label, "what each rank does now, with its stack, and who waits for whom"),
    KeyCommand(
        "l",
        "slowest",
        lambda facts: "slow steps" if _look_back_label(facts) is not None else None,
        "the longest steps of the time range, and what was long in them; enter goes there",
    ),
    KeyCommand("W", "warnings", _shown_when(lambda s: bool(s.state.warnings), "warnings"), "show the newest warnings"),
    KeyCommand("[ ]", "", _always_shown("range"), "a shorter or longer time range for histories and figures"),
    KeyCommand("< >", "", _look_back_label, "look back in time, and forward again; all panels show that time"),
    KeyCommand("s", "picture", _always_shown("picture"), "save a picture of the screen (SVG); ctrl+s while typing"),
    KeyCommand("e", "export", _always_shown("export"), "export all records: JSON, CSV, Perfetto; in the background"),
    KeyCommand("r", "report", _always_shown("report"), "the report: what happened in the run so far"),
    KeyCommand(
        "C",
        "compare",
        lambda facts: "compare" if _is_finished(facts) else "",
        "compare this run with others: did it get faster?",
    ),
    KeyCommand("x", "stop", _shown_when(_can_stop, "stop"), "stop the training; asks first"),
    KeyCommand("t", "theme", _always_shown("theme"), "the next theme: dark, light, color-blind, mono, ASCII"),
    KeyCommand("+ -", "", _always_shown("refresh"), "draw the screen more or less often"),
    KeyCommand("o", "next_output", _shown_when(lambda s: s.outputs > 1, "output file"), "show the other output file"),
    KeyCommand(
        ":", "palette", _always_shown("more"), "list everything that can be done now; type to filter", "colon,ctrl+p"
    ),
    KeyCommand("?", "help", _always_shown("help"), "show what the words and keys mean", "question_mark,h,f1"),
    KeyCommand(
        "q",
        "leave",
        lambda facts: "close" if _is_finished(facts) else "leave",
        "leave the training running, stop it, or stay; ctrl+c too",
    ),
)


def _playback_command(key: str, action: str, description: str, names: str = "") -> KeyCommand:
    return KeyCommand(key, action, lambda facts: None if facts.playing is None else "", description, names)


PLAYED: tuple[KeyCommand, ...] = (
    _playback_command("space", "play", "play or stop; at the end, start again"),
    _playback_command(".", "step(1)", "to the next step", "full_stop"),
    _playback_command(",", "step(-1)", "to the step before", "comma"),
    _playback_command("f", "seek(10)", "10 seconds on"),
    _playback_command("b", "seek(-10)", "10 seconds back"),
    _playback_command("F", "seek(60)", "a minute on"),
    _playback_command("B", "seek(-60)", "a minute back"),
    _playback_command("}", "change_speed(1)", "play faster, up to 100 times", "right_curly_bracket"),
    _playback_command("{", "change_speed(-1)", "play slower, down to 0.1 times", "left_curly_bracket"),
    _playback_command("g", "seek_to(0.0)", "to the beginning"),
    _playback_command("G", "seek_to(1.0)", "to the end"),
)
"""Commands of a playback; the time line shows some of their keys."""
_PAIRS: tuple[tuple[str, str, str, str], ...] = (
    ("[", "left_square_bracket", "range(-1)", "a shorter time range"),
    ("]", "right_square_bracket", "range(1)", "a longer time range"),
    ("<", "less_than_sign", "time(-1)", "look back in time"),
    (">", "greater_than_sign", "time(1)", "forward in time, at last to now"),
    ("+", "plus,equals_sign", "refresh(-1)", "draw the screen more often"),
    ("-", "minus,underscore", "refresh(1)", "draw the screen less often"),
)
_PANEL_KEYS = tuple((str(number), f"panel('{name}')", name) for number, name in enumerate(PANELS, start=1))


ACTIONS: dict[str, str] = {
    name: action
    for names, action in (
        *((command.names or command.key, command.action) for command in COMMANDS if command.action),
        *((names, action) for _, names, action, _ in _PAIRS),
        *((key, action) for key, action, _ in _PANEL_KEYS),
        ("up", "arrow('up')"),
        ("down", "arrow('down')"),
        ("left", "arrow('left')"),
        ("right", "arrow('right')"),
        ("pageup", "scroll_page(-1)"),
        ("pagedown", "scroll_page(1)"),
        ("home", f"scroll(-{FAR})"),
        ("tab", "next_panel(1)"),
        ("shift+tab", "next_panel(-1)"),
        ("ctrl+z", "suspend_process"),
        ("ctrl+c,ctrl+q", "leave(True)"),
    )
    for name in names.split(",")
}
"""The action of each key, by Textual's name of the key."""
ANYWHERE = ("ctrl+c", "ctrl+q")
"""Keys that have their action in dialogs, too."""
PLAYED_ACTIONS = ACTIONS | {command.names or command.key: command.action for command in PLAYED}
"""The action of each key in a playback."""


def available_commands(facts: ScreenData) -> list[tuple[str, str, str]]:
    """Key, sentence and action for everything that can be done now, for the palette."""
    found = [
        (d.key, "close this screen" if word == "close" else d.description, d.action)
        for d in (*PLAYED, *COMMANDS)
        if d.action not in ("", "palette") and (word := d.footer_word(facts)) is not None
    ]
    found += [(key, description, action) for key, _, action, description in _PAIRS]
    return found + [(key, f"go to panel {panel_name(facts, name)}", action) for key, action, name in _PANEL_KEYS]


def panel_name(facts: ScreenData, panel: str) -> str:
    """The current name of a panel."""
    ranked = panel_communication.is_shown(facts) if panel == "compare" else panel_ranks.is_shown(facts)
    return RANK_NAMES.get(panel, NAMES[panel]) if ranked else NAMES[panel]


# ------------------------------------------------------------------------------------------------ the view


def focus_neighbor(view: View, slots: Mapping[str, Slot], way: str) -> View:
    """Go to the panel above, below, left or right of the one in focus, if there is one."""
    here = slots.get(view.focus)
    if here is None:
        return view
    across = ("up", "down") if way in ("left", "right") else ("left", "right")
    found: list[tuple[int, int, str]] = []
    for index, name in enumerate(PANELS):
        slot = slots.get(name)
        if slot is None or name == view.focus:
            continue
        beyond = {
            "left": here.x - (slot.x + slot.width),
            "right": slot.x - (here.x + here.width),
            "up": here.y - (slot.y + slot.height),
            "down": slot.y - (here.y + here.height),
        }
        if beyond[way] >= 0 and all(beyond[side] < 0 for side in across):
            found.append((beyond[way], index, name))
    return replace(view, focus=min(found)[2]) if found else view


def next_time_range(view: View, by: int) -> View:
    """Choose the next longer (or shorter) time range; stay at the last one."""
    here = RANGES.index(view.span_s) if view.span_s in RANGES else 0
    return replace(view, span_s=RANGES[min(max(here + by, 0), len(RANGES) - 1)])


def next_refresh_interval(period: float, by: int) -> float:
    """The next longer (or shorter) time between pictures, in seconds."""
    if by > 0:
        return next((each for each in PERIODS if each > period * 1.001), period)
    return next((each for each in reversed(PERIODS) if each < period * 0.999), period)
