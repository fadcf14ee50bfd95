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

FAR_ROWS = 1_000_000_000
REFRESH_INTERVALS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
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
    textual_names: str = ""
    """Textual's names of the keys, separated by commas, if they differ from `key`."""

    def is_available(self, screen: ScreenData) -> bool:
        """Return whether the key works now."""
        return self.footer_word(screen) is not None

    def is_in_footer(self, screen: ScreenData) -> bool:
        """Return whether the key works now and has a place in the footer."""
        return bool(self.footer_word(screen))


def _always_shown(word: str) -> Callable[[ScreenData], str | None]:
    return lambda screen: word


_NOT_IN_FOOTER = _always_shown("")


def _shown_when(is_available: Callable[[ScreenData], bool], word: str) -> Callable[[ScreenData], str | None]:
    return lambda screen: word if is_available(screen) else None


def _other_mode(screen: ScreenData) -> str | None:
    if not screen.can_toggle or screen.process is None:
        return None
    return "→ dp" if screen.process.mode == "single" else "→ single"


def _pause_label(screen: ScreenData) -> str | None:
    if not screen.can_pause:
        return None
    return "resume" if screen.pause_state.is_requested else "pause"


def _freeze_label(screen: ScreenData) -> str | None:
    if screen.cursor.is_frozen:
        return "resume"
    if screen.cursor.is_looking_back:
        return "play"
    if screen.cursor.is_playback:
        return None
    return "play" if _is_finished(screen) else "freeze"


def _is_finished(screen: ScreenData) -> bool:
    """Return whether the run has ended, whatever time the screen shows."""
    return screen.is_over or screen.cursor.has_ended


def _can_stop(screen: ScreenData) -> bool:
    return not _is_finished(screen) and screen.stop_progress is None


def _why_label(screen: ScreenData) -> str | None:
    return "why" if (_can_stop(screen) and not screen.shows_past) or screen.shown_stall is not None else None


def _has_several_calls(screen: ScreenData) -> bool:
    return screen.view.focus == "replicas" and len(list_choices(screen.process)) > 1


def _look_back_label(screen: ScreenData) -> str | None:
    """Return the word for `<` and `>`; none in a playback, whose time line has its own."""
    if screen.process is None or screen.process.last_step is None:
        return None
    return "" if screen.cursor.is_playback else "time"


def _escape_label(screen: ScreenData) -> str | None:
    """Return the word for `esc`."""
    if screen.cursor.can_return:
        return "now"
    if screen.view.zoom:
        return "all panels"
    if screen.view.node_number is not None:
        return "all nodes"
    return "end search" if _is_searching(screen) else None


def _is_searching(screen: ScreenData) -> bool:
    return bool(screen.view.search) and screen.view.focus == "output"


def node_to_show(screen: ScreenData) -> NodeStatus | None:
    """Return the node that `enter` shows: that of the rank chosen in panel 2; None if no rank is chosen."""
    view = screen.view
    if view.zoom is not None or view.focus != "replicas" or view.process_index is None:
        return None
    return next((node for node in screen.state.nodes if view.process_index in node.processes), None)


def slash_finds_rank(screen: ScreenData) -> bool:
    """Return whether `/` finds a rank."""
    return screen.view.focus == "replicas" and screen.view.zoom != "output" and panel_ranks.shows_map(screen)


def _find_label(screen: ScreenData) -> str:
    if slash_finds_rank(screen):
        return "find rank"
    return "find" if "output" in (screen.view.focus, screen.view.zoom) else ""


def _zoom_label(screen: ScreenData) -> str | None:
    if screen.view.zoom:
        return None
    node = node_to_show(screen)
    return "zoom" if node is None else node.name


def _can_sample_collectives(screen: ScreenData) -> bool:
    return len(screen.state.ranks) > 1 and not screen.is_over and not screen.cursor.is_playback


def _has_ranks(screen: ScreenData) -> bool:
    return len(screen.state.ranks) > 1 and not screen.cursor.is_playback


def _end_key_label(screen: ScreenData) -> str | None:
    """Return the word for `end` if the output is scrolled back, for example after a search."""
    if not screen.is_output_scrolled_back or "output" not in (screen.view.focus, screen.view.zoom):
        return None
    return "to the end" if screen.is_over else "follow"


COMMANDS: tuple[KeyCommand, ...] = (
    KeyCommand("d", "toggle_mode", _other_mode, "data parallel or single device, from the next batch on"),
    KeyCommand("p", "pause", _pause_label, "pause the training between two steps, or resume it"),
    KeyCommand(
        "space",
        "freeze",
        _freeze_label,
        "freeze the screen; at an earlier time, play on from there. The training continues",
    ),
    KeyCommand(
        "esc", "unzoom", _escape_label, "back to now; back to all panels, or to all nodes; end a search", "escape"
    ),
    KeyCommand("n", "next(1)", _shown_when(_is_searching, "older"), "during a search: the next older match"),
    KeyCommand("N", "next(-1)", _shown_when(_is_searching, "newer"), "during a search: the next newer match"),
    KeyCommand("end", f"scroll({FAR_ROWS})", _end_key_label, "to the end of the output, and follow it"),
    KeyCommand(
        "1-6",
        "",
        lambda screen: None if screen.view.zoom else "panel",
        "go to a panel; press again to zoom it, and back (a folded one is zoomed at once). tab, arrows, the mouse: too",
    ),
    KeyCommand(
        "enter",
        "zoom",
        _zoom_label,
        "zoom the panel in focus, or show the node of the chosen rank; a double click does the same",
    ),
    KeyCommand(
        "/",
        "find",
        _find_label,
        "find a word in the script's output, the newest line first; in a map of ranks, a rank or a node",
        "slash",
    ),
    KeyCommand(
        "n", "next(1)", _shown_when(_has_several_calls, "next call"), "in panel 2: the next root or call of a step"
    ),
    KeyCommand(
        "i",
        "type_line",
        _shown_when(lambda s: s.can_type and not s.is_over and not s.is_ending, "input"),
        "send a line to the script",
    ),
    KeyCommand(
        ".", "rank(1)", _shown_when(_has_ranks, "rank"), "panel 3 of the straggler, then of the next rank", "full_stop"
    ),
    KeyCommand(",", "rank(-1)", _shown_when(_has_ranks, ""), "panel 3 of the previous rank", "comma"),
    KeyCommand("w", "why", _why_label, "what costs time or is wrong, and what each rank does now, with its stack"),
    KeyCommand(
        "l",
        "slowest",
        lambda screen: "slow steps" if _look_back_label(screen) is not None else None,
        "the longest steps of the time range, and what was long in them; enter goes there",
    ),
    KeyCommand("[ ]", "", _always_shown("range"), "a shorter or longer time range for histories and metrics"),
    KeyCommand("< >", "", _look_back_label, "look back in time, and forward again; all panels show that time"),
    KeyCommand("s", "save_screenshot", _always_shown("screenshot"), "save a screenshot (SVG); ctrl+s while typing"),
    KeyCommand("x", "stop", _shown_when(_can_stop, "stop"), "stop the training; asks first"),
    KeyCommand("t", "theme", _always_shown("theme"), "the next theme: dark, light, color-blind, mono, ASCII"),
    KeyCommand(":", "palette", _always_shown("more"), "search all commands, also those without a key", "colon,ctrl+p"),
    KeyCommand("?", "help", _always_shown("help"), "help: words and keys", "question_mark"),
    KeyCommand(
        "q",
        "leave",
        lambda screen: "close" if _is_finished(screen) else "leave",
        "leave the training running, stop it, or stay; ctrl+c too",
    ),
)


def _playback_command(key: str, action: str, description: str, names: str = "") -> KeyCommand:
    return KeyCommand(key, action, lambda screen: "" if screen.cursor.is_playback else None, description, names)


PLAYBACK_COMMANDS: tuple[KeyCommand, ...] = (
    _playback_command("space", "play", "play or pause; at the end, start again"),
    _playback_command(".", "step(1)", "next step", "full_stop"),
    _playback_command(",", "step(-1)", "previous step", "comma"),
    _playback_command("f", "seek(10)", "10 seconds forward"),
    _playback_command("b", "seek(-10)", "10 seconds back"),
    _playback_command("g", "seek_to(0.0)", "to the beginning"),
    _playback_command("G", "seek_to(1.0)", "to the end"),
)
"""Commands of a playback; the time line shows some of their keys."""


def _look_back_in_palette(screen: ScreenData) -> str | None:
    return None if _look_back_label(screen) is None else ""


PALETTE_COMMANDS: tuple[KeyCommand, ...] = (
    KeyCommand("[", "range(-1)", _NOT_IN_FOOTER, "a shorter time range", "left_square_bracket"),
    KeyCommand("]", "range(1)", _NOT_IN_FOOTER, "a longer time range", "right_square_bracket"),
    KeyCommand("<", "time(-1)", _look_back_in_palette, "look back in time", "less_than_sign"),
    KeyCommand(">", "time(1)", _look_back_in_palette, "forward in time, up to now", "greater_than_sign"),
    KeyCommand("", "refresh(-1)", _NOT_IN_FOOTER, "a shorter refresh interval"),
    KeyCommand("", "refresh(1)", _NOT_IN_FOOTER, "a longer refresh interval"),
    _playback_command("", "change_speed(1)", "play faster, up to 100 times"),
    _playback_command("", "change_speed(-1)", "play slower, down to 0.1 times"),
    KeyCommand("", "warnings", _shown_when(lambda s: bool(s.state.warnings), ""), "show the newest warnings"),
    KeyCommand("", "next_output", _shown_when(lambda s: s.output_file_count > 1, ""), "show the other output file"),
    KeyCommand(
        "",
        "sample",
        _shown_when(_can_sample_collectives, ""),
        "record the collectives of one of the next steps",
    ),
)
"""Commands that only the palette lists: each of a pair of keys, and commands without a key."""
_PANEL_KEYS = tuple((str(digit), f"panel('{name}')", name) for digit, name in enumerate(PANELS, start=1))


ACTIONS: dict[str, str] = {
    name: action
    for names, action in (
        *(
            (command.textual_names or command.key, command.action)
            for command in (*COMMANDS, *PALETTE_COMMANDS)
            if command.key and command.action
        ),
        *((key, action) for key, action, _ in _PANEL_KEYS),
        ("up", "arrow('up')"),
        ("down", "arrow('down')"),
        ("left", "arrow('left')"),
        ("right", "arrow('right')"),
        ("pageup", "scroll_page(-1)"),
        ("pagedown", "scroll_page(1)"),
        ("home", f"scroll(-{FAR_ROWS})"),
        ("tab", "next_panel(1)"),
        ("shift+tab", "next_panel(-1)"),
        ("ctrl+z", "suspend_process"),
        ("ctrl+c", "leave(True)"),
    )
    for name in names.split(",")
}
"""The action of each key, by Textual's name of the key."""
PLAYBACK_ACTIONS = ACTIONS | {command.textual_names or command.key: command.action for command in PLAYBACK_COMMANDS}
"""The action of each key in a playback."""


def available_commands(screen: ScreenData) -> list[KeyCommand]:
    """Return every command that works now, for the palette."""
    commands = [
        command._replace(description="close this screen") if command.footer_word(screen) == "close" else command
        for command in (*PLAYBACK_COMMANDS, *COMMANDS, *PALETTE_COMMANDS)
        if command.action not in ("", "palette") and command.is_available(screen)
    ]
    for key, action, name in _PANEL_KEYS:
        commands.append(KeyCommand(key, action, _NOT_IN_FOOTER, f"go to panel {panel_name(screen, name)}"))
    return commands


def panel_name(screen: ScreenData, panel: str) -> str:
    """Return the current name of a panel."""
    ranked = panel_communication.is_shown(screen) if panel == "compare" else panel_ranks.is_shown(screen)
    return RANK_NAMES.get(panel, NAMES[panel]) if ranked else NAMES[panel]


# ------------------------------------------------------------------------------------------------ the view


def focus_neighbor(view: View, slots: Mapping[str, Slot], direction: str) -> View:
    """Return the view with the focus on the nearest panel in a direction; the same view if there is none."""
    focused = slots.get(view.focus)
    if focused is None:
        return view

    def distance(panel: str) -> int:
        """Return the cells between the panel in focus and a panel in this direction; negative if it is not there."""
        slot = slots[panel]
        distances = {
            "left": focused.x - slot.x - slot.width,
            "right": slot.x - focused.x - focused.width,
            "up": focused.y - slot.y - slot.height,
            "down": slot.y - focused.y - focused.height,
        }
        across = ("up", "down") if direction in ("left", "right") else ("left", "right")
        return -1 if any(distances[side] >= 0 for side in across) else distances[direction]

    panels = [panel for panel in PANELS if panel in slots and panel != view.focus and distance(panel) >= 0]
    return replace(view, focus=min(panels, key=distance, default=view.focus))


def next_time_range(view: View, offset: int) -> View:
    """Return the view with the next longer (or shorter) time range; the last one stays."""
    index = RANGES.index(view.range_s) if view.range_s in RANGES else 0
    return replace(view, range_s=RANGES[min(max(index + offset, 0), len(RANGES) - 1)])


def next_refresh_interval(current_s: float, offset: int) -> float:
    """Return the next longer (or shorter) time between frames, in seconds; the last one stays."""
    if offset > 0:
        return next((interval for interval in REFRESH_INTERVALS_S if interval > current_s * 1.001), current_s)
    return next((interval for interval in reversed(REFRESH_INTERVALS_S) if interval < current_s * 0.999), current_s)
