"""Dialogs over the screen: leaving, help, warnings, a line of input."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.message import Message
from textual.screen import ModalScreen

from dpmon.sanitize import sanitize_line, strip_control_chars
from dpmon.text.cells import span_width, truncate
from dpmon.ui.panel_view import PanelView
from dpmon.ui.styled_rows import Row, draw_frame
from dpmon.ui.terminal_style import TerminalStyle

MAX_LINE_BYTES = 4000
"""Most bytes of a typed line: with its newline it fits one atomic write (PIPE_BUF) and one terminal line (N_TTY)."""
_STATUS_ROWS = 3
"""Rows above the panels, with messages."""


def key_name(event: events.Key) -> str:
    """The display name of the pressed key: its character, or its name if the character is not printable."""
    return sanitize_line(event.character if event.is_printable and event.character else event.key, 20)


class Dialog(ModalScreen[str | None]):
    """A framed box in the middle; sub-classes provide its rows.

    The cells beside the box are blank, so that no cut words show there; the panels stay visible above and below it.
    """

    DEFAULT_CSS = "Dialog { background: transparent; align: left top; }"

    screenshot_keys: ClassVar[tuple[str, ...]] = ("s", "ctrl+s")
    keys: Sequence[tuple[str, str]] = ()
    """The keys that work only in this dialog, and their effects."""
    corner = ""
    """The text at the right of the title."""
    preferred_width = 64
    """The preferred width in cells."""

    class Changed(Message):
        """A dialog was opened or closed, or its keys changed."""

    def __init__(self, title: str, look: TerminalStyle) -> None:
        super().__init__()
        self.title_text = title
        self.style = look
        self.box = PanelView("dialog", look)
        self.first_row = 0
        """Rows scrolled past."""
        self.pinned_rows = 0
        """Rows that stay at the top during scrolling."""
        self.is_closed = False
        self.message = ""
        """The newest message."""
        self.rows: list[Row] = []
        self.screen_row = 0
        """The drawn rows, each as wide as the screen, and the screen's row of the first."""

    def on_key(self, event: events.Key) -> None:
        """Handle a key; if the dialog has closed, pass the key to the screen below."""
        event.stop()
        if self.is_closed:
            self.app.post_message(events.Key(event.key, event.character))
        elif event.key in self.screenshot_keys:
            self.app.call_later(self.app.run_action, "picture")
        else:
            self.message = ""
            self.respond_to_key(event)

    def show_message(self, remark: str) -> None:
        """Show a message in the title, if the dialog covers the row of messages."""
        self.message = remark
        self.draw()

    def respond_to_key(self, event: events.Key) -> None:
        """Act on a key; sub-classes define which keys work."""
        raise NotImplementedError

    def footer_keys(self) -> list[tuple[str, str]]:
        """The keys that work now and their effects, for the footer."""
        return [*self.keys, (self.screenshot_keys[0], "picture")]

    def press(self, key: str) -> None:
        """Act as if a key of `footer_keys` was pressed."""
        name = {"esc": "escape"}.get(key, key)
        if not self.is_closed and any(key == each for each, _ in self.footer_keys()):
            self.on_key(events.Key(name, None))

    def run_ended(self) -> None:
        """Called at the end of the run: stop offering what is impossible from then on."""

    def close_once(self, answer: str | None) -> None:
        """Close with the answer; do nothing the second time, because Textual treats a second dismissal as an error."""
        if not self.is_closed:
            self.is_closed = True
            self.app.call_later(self.app.post_message, self.Changed())
            self.dismiss(answer)

    def compose(self) -> ComposeResult:
        """Yield the box."""
        yield self.box

    def on_mount(self) -> None:
        """Draw the box and announce the dialog."""
        self.draw()
        self.app.post_message(self.Changed())

    def on_resize(self) -> None:
        """Draw the box again in the middle of the resized screen."""
        self.draw()

    def build_rows(self, width: int, height: int) -> list[Row]:
        """Rows of at most `width` cells; `height` rows fit."""
        raise NotImplementedError

    def draw(self) -> None:
        """Build the rows and place the box."""
        screen_width, screen_height = self.app.size
        width = min(self.preferred_width + 4, screen_width)
        rows = self.build_rows(width - 4, max(screen_height - 2, 1))
        height = min(len(rows) + 2, screen_height)
        self.screen_row = (screen_height - height) // 2
        self.box.set_region(0, self.screen_row, screen_width, height)
        shown = truncate(self.message, width - 11) if self.screen_row < _STATUS_ROWS else ""
        corner: Row = [(shown, "wait")] if shown else [(self.corner, "dim")] if self.corner else []
        title: Row = [(truncate(self.title_text, width - 6), "title")]
        glyphs = self.style.glyphs
        framed = draw_frame(
            title, corner, rows, width, height, glyphs, focused=True, first=self.first_row, pinned=self.pinned_rows
        )
        left = (screen_width - width) // 2
        self.rows = [[(" " * left, ""), *row, (" " * (screen_width - width - left), "")] for row in framed]
        self.box.show_rows(self.rows)


class Choice(Dialog):
    """A question with a key for each answer; returns the answer's name, or None to stay."""

    def __init__(
        self,
        title: str,
        text: Sequence[str],
        answers: Sequence[tuple[str, str, str]],
        look: TerminalStyle,
        on_pointless: Callable[[], None] | None = None,
    ) -> None:
        """`answers`: key; name; text.

        `on_pointless`: tells the user that the dialog closed because the question is pointless after the run's end.
        """
        super().__init__(title, look)
        self.on_pointless = on_pointless
        self.lines = text
        self.answers = answers
        self.keys = [(key, re.split("[:;,]", text)[0]) for key, _, text in answers]
        self.preferred_width = max(*map(len, text), *(len(answer) + 8 for _, _, answer in answers), 30)
        self.key_note = ""
        """A note about the last key, if it was no answer."""

    def build_rows(self, width: int, height: int) -> list[Row]:
        """The text, then a row per answer."""
        rows: list[Row] = [[(truncate(line, width), "")] for line in self.lines]
        rows.append([(truncate(self.key_note, width), "dim")])
        for key, _, text in self.answers:
            rows.append([("  ", ""), (key.ljust(5), "key"), (" " + truncate(text, width - 8), "")])
        return rows

    def run_ended(self) -> None:
        """Close if the question is now pointless."""
        if self.on_pointless is not None and not self.is_closed:
            self.close_once(None)
            self.on_pointless()

    def offers(self, name: str) -> bool:
        """Whether `name` is one of the answers."""
        return any(name == each for _, each, _ in self.answers)

    def respond_to_key(self, event: events.Key) -> None:
        """Return the answer of the key, or tell the user that the key does nothing here."""
        pressed = "esc" if event.key == "escape" else event.key
        for key, name, _ in self.answers:
            if pressed == key:
                self.close_once(name)
                return
        self.key_note = f"{key_name(event)} does nothing here"
        self.draw()


class TextPages(Dialog):
    """Rows to read. Arrows and page keys scroll; any other key closes the dialog."""

    keys = (("arrows", "scroll"), ("esc", "close"))
    corner = "arrows scroll  s picture  esc closes"
    preferred_width = 112

    def __init__(self, title: str, make: Callable[[int], list[Row]], look: TerminalStyle) -> None:
        """`make` returns the rows for a width in cells."""
        super().__init__(title, look)
        self.make_rows = make
        self.visible_rows = 1

    def build_rows(self, width: int, height: int) -> list[Row]:
        """All rows; the frame shows the rows at the scroll position and counts the rows above and below."""
        rows = self.make_rows(width)
        self.visible_rows = height
        self.first_row = max(min(self.first_row, len(rows) - height), 0)
        return rows

    def respond_to_key(self, event: events.Key) -> None:
        """Scroll, or close."""
        moves = {
            "up": -1,
            "down": 1,
            "pageup": -self.visible_rows,
            "pagedown": self.visible_rows,
            "home": -1 << 30,
            "end": 1 << 30,
        }
        if event.key in moves:
            self.first_row += moves[event.key]
            self.draw()
        else:
            self.close_once(None)


class _TextInput(Dialog):
    """A dialog with a line to type; esc gives up."""

    screenshot_keys = ("ctrl+s",)
    typed_text = ""
    hides_text = False
    """Whether the line shows stars instead of the text."""

    def input_row(self, width: int) -> Row:
        """The end of the typed line, with a cursor."""
        shown = self.typed_text[-width:]
        shown = "*" * len(shown) if self.hides_text else shown
        while shown and span_width(shown) > width - 3:
            shown = shown[1:]
        return [("> ", "key"), (shown, ""), ("_" if self.style.glyphs.ascii else "▏", "key")]

    def add_text(self, text: str) -> None:
        """Add typed text, up to the limit."""
        whole = (self.typed_text + strip_control_chars(text)).encode()
        self.typed_text = whole[:MAX_LINE_BYTES].decode("utf-8", "ignore")
        self.draw()

    def respond_to_key(self, event: events.Key) -> None:
        """Edit, or give up."""
        if event.key in ("escape", "ctrl+c"):
            self.close_once(None)
        elif event.key in ("backspace", "ctrl+h"):
            self.typed_text = self.typed_text[:-1]
            self.draw()
        elif event.key == "ctrl+u":
            self.typed_text = ""
            self.draw()
        elif event.is_printable and event.character:
            self.add_text(event.character)

    def on_paste(self, event: events.Paste) -> None:
        """Take the first line of pasted text."""
        event.stop()
        if not self.is_closed:
            self.add_text((event.text.splitlines() or [""])[0])


class LineInput(_TextInput):
    """One line to type; returns it, or None."""

    keys: Sequence[tuple[str, str]] = (("enter", "done"), ("esc", "cancel"))

    def __init__(
        self,
        title: str,
        note: str,
        look: TerminalStyle,
        typed: str = "",
        hidden: bool = False,
        over_note: str | None = None,
    ) -> None:
        """`hidden`: show stars instead of the text. `over_note`: the note after the run's end."""
        super().__init__(title, look)
        self.ended_note = over_note
        self.can_send = True
        self.note = note
        self.typed_text = typed
        self.hides_text = hidden

    def run_ended(self) -> None:
        """Keep the typed text visible, but do not send it."""
        if self.ended_note is not None:
            self.note, self.can_send, self.keys = self.ended_note, False, [("esc", "close")]
            self.draw()
            self.app.post_message(self.Changed())

    def build_rows(self, width: int, height: int) -> list[Row]:
        """The typed line, and what enter will do."""
        return [self.input_row(width), [], [(truncate(self.note, width), "dim")]]

    def respond_to_key(self, event: events.Key) -> None:
        """Send, edit, or give up."""
        if event.key == "enter":
            self.close_once(self.typed_text if self.can_send else None)
        else:
            super().respond_to_key(event)


class CommandPalette(_TextInput):
    """A list to choose from, filtered by typing; returns the chosen action, or None."""

    keys = (("arrows", "choose"), ("enter", "do it"), ("esc", "close"))
    corner = "enter does it"

    def __init__(self, possible: Callable[[], Sequence[tuple[str, str, str]]], look: TerminalStyle) -> None:
        """`possible` returns the commands that can run now: key, sentence, action."""
        super().__init__("What can be done now", look)
        self.list_commands = possible
        self.command_count = len(possible())
        """Number of commands without a filter."""
        self.preferred_width = max(span_width(text) for _, text, _ in possible()) + 10
        self.shown_commands: list[tuple[str, str, str]] = []
        """The drawn commands; the possible ones may have changed since then."""
        self.chosen_command: tuple[str, str, str] | None = None
        """The chosen command; the first one before a choice, or if it is not listed any more."""
        self.pinned_rows = 1

    def run_ended(self) -> None:
        """List the commands that are still possible."""
        self.draw()

    def matching_commands(self) -> list[tuple[str, str, str]]:
        """The commands that contain every typed word; one whose key was typed comes first."""
        words = self.typed_text.lower().split()
        found = [each for each in self.list_commands() if all(word in f"{each[0]} {each[1]}".lower() for word in words)]
        return sorted(found, key=lambda each: each[0] != self.typed_text)

    def build_rows(self, width: int, height: int) -> list[Row]:
        """The typed text, then the commands with the chosen one marked; the box keeps its height during typing."""
        found = self.shown_commands = self.matching_commands()
        at = self._chosen_index()
        rows: list[Row] = [self.input_row(width)]
        room = max(height - 1, 1)
        self.first_row = max(at - room + 1, 0)
        for index, (key, text, _) in enumerate(found):
            mark = self.style.glyphs.focus if index == at else " "
            style = "bold" if index == at else ""
            rows.append([(mark + " ", "key"), (key.ljust(6), "key"), (truncate(text, width - 8), style)])
        if not found:
            rows.append([("  no command matches now", "dim")])
        return [*rows, *[[]] * (min(self.command_count, room) - len(found))][: max(len(found), room) + 1]

    def _chosen_index(self) -> int:
        """The position of the chosen command in the list."""
        return self.shown_commands.index(self.chosen_command) if self.chosen_command in self.shown_commands else 0

    def respond_to_key(self, event: events.Key) -> None:
        """Choose, filter the list, or give up. A marked command that has become impossible is not done."""
        moves = {"up": -1, "down": 1, "pageup": -8, "pagedown": 8, "tab": 1, "shift+tab": -1}
        found, at = self.shown_commands, self._chosen_index()
        if event.key == "enter" and (not found or found[at] in self.matching_commands()):
            self.close_once(found[at][2] if found else None)
        elif event.key == "enter":
            self.draw()
        elif event.key in moves:
            self.chosen_command = found[min(max(at + moves[event.key], 0), len(found) - 1)] if found else None
            self.draw()
        else:
            super().respond_to_key(event)

    def add_text(self, text: str) -> None:
        """Filter by more text; the first match is chosen."""
        self.chosen_command = None
        super().add_text(text)
