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
from dpmon.ui.keys import KeyCommand
from dpmon.ui.panel_view import PanelView
from dpmon.ui.styled_rows import Row, draw_frame, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

MAX_LINE_BYTES = 4000
"""Most bytes of a typed line: with its newline it fits one atomic write (PIPE_BUF) and one terminal line (N_TTY)."""


def key_name(event: events.Key) -> str:
    """Return the display name of the pressed key: its character, or its name if the character is not printable."""
    return sanitize_line(event.character if event.is_printable and event.character else event.key, 20)


class Dialog(ModalScreen[str | None]):
    """A framed box in the middle of the screen; subclasses provide its rows.

    The cells at both sides of the box are blank, so that no cut words show there. The panels above and below it stay
    visible.
    """

    DEFAULT_CSS = "Dialog { background: transparent; align: left middle; }"

    screenshot_keys: ClassVar[tuple[str, ...]] = ("s", "ctrl+s")
    keys: Sequence[tuple[str, str]] = ()
    """The keys that work only in this dialog, and their effects."""
    corner = ""
    """The text at the right of the title."""
    preferred_width = 64
    """The preferred width in cells."""

    class Changed(Message):
        """A message: a dialog was opened or closed, or its keys changed."""

    def __init__(self, title: str, style: TerminalStyle) -> None:
        super().__init__()
        self.title_text = title
        self.style = style
        self.box = PanelView(style)
        self.first_row = 0
        """Rows scrolled past."""
        self.pinned_rows = 0
        """Rows that stay at the top during scrolling."""
        self.is_closed = False
        self.message = ""
        """The newest message."""
        self.problem: str | None = None
        """Why there are no rows; None if there are."""

    def on_key(self, event: events.Key) -> None:
        """Handle a key; if the dialog has closed, pass the key to the screen below."""
        event.stop()
        if self.is_closed:
            self.app.post_message(events.Key(event.key, event.character))
        elif event.key in self.screenshot_keys:
            self.app.call_later(self.app.run_action, "save_screenshot")
        else:
            self.message = ""
            self.respond_to_key(event)

    def show_message(self, message: str) -> None:
        """Show a message in the title."""
        self.message = message
        self.draw()

    def respond_to_key(self, event: events.Key) -> None:
        """Act on a key; subclasses define which keys work."""
        raise NotImplementedError

    def footer_keys(self) -> list[tuple[str, str]]:
        """Return the keys that work now and their effects, for the footer."""
        return [*self.keys, (self.screenshot_keys[0], "screenshot")]

    def press(self, key: str) -> None:
        """Act as if a key of `footer_keys` was pressed."""
        name = {"esc": "escape"}.get(key, key)
        if not self.is_closed and any(key == footer_key for footer_key, _ in self.footer_keys()):
            self.on_key(events.Key(name, None))

    def close_once(self, answer: str | None) -> None:
        """Close with the answer. Do nothing the second time, because Textual treats a second dismissal as an error."""
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
        """Return rows of at most `width` cells; `height` rows are visible."""
        raise NotImplementedError

    def draw(self) -> None:
        """Build the rows and place the box."""
        screen_width, screen_height = self.app.size
        width = min(self.preferred_width + 4, screen_width)
        rows = self.build_rows(width - 4, max(screen_height - 2, 1))
        if self.problem is not None:
            rows = wrap_to_rows(self.problem, width - 4, "wait")
        height = min(len(rows) + 2, screen_height)
        corner: Row = [(self.corner, "dim")] if self.corner else []
        if self.message:
            corner = [(truncate(self.message, width - 11), "wait")]
        title: Row = [(truncate(self.title_text, width - 6), "title")]
        framed = draw_frame(
            title,
            corner,
            rows,
            width,
            height,
            focused=True,
            first_row=self.first_row,
            pinned_rows=self.pinned_rows,
        )
        margin = (screen_width - width) // 2
        self.box.show_rows([[(" " * margin, ""), *row, (" " * (screen_width - width - margin), "")] for row in framed])


class Choice(Dialog):
    """A question with a key for each answer. Its result is the name of the answer, or None to stay."""

    def __init__(
        self,
        title: str,
        text: Sequence[str],
        answers: Sequence[tuple[str, str, str]],
        style: TerminalStyle,
    ) -> None:
        """Ask `text`. `answers`: key, name and text of each."""
        super().__init__(title, style)
        self.lines = text
        self.answers = answers
        self.keys = [(key, re.split("[:;,]", text)[0]) for key, _, text in answers]
        self.preferred_width = max(*map(len, text), *(len(answer) + 8 for _, _, answer in answers), 30)

    def build_rows(self, width: int, height: int) -> list[Row]:
        """Return the question, then a row per choice."""
        rows: list[Row] = [*([(truncate(line, width), "")] for line in self.lines), []]
        for key, _, text in self.answers:
            rows.append([("  ", ""), (key.ljust(5), "key"), (" " + truncate(text, width - 8), "")])
        return rows

    def offers(self, name: str) -> bool:
        """Return whether `name` is one of the answers."""
        return any(name == answer_name for _, answer_name, _ in self.answers)

    def respond_to_key(self, event: events.Key) -> None:
        """Close with the answer of the key, or tell the user that the key does nothing here."""
        pressed = "esc" if event.key == "escape" else event.key
        for key, name, _ in self.answers:
            if pressed == key:
                self.close_once(name)
                return
        self.show_message(f"{key_name(event)} does nothing here")


class TextPages(Dialog):
    """Rows to read. Arrows and page keys scroll; any other key closes the dialog."""

    keys = (("arrows", "scroll"), ("esc", "close"))
    corner = "arrows scroll  s screenshot  esc closes"
    preferred_width = 112

    def __init__(self, title: str, make_rows: Callable[[int], list[Row]], style: TerminalStyle) -> None:
        """Show the rows that `make_rows` returns for a width in cells."""
        super().__init__(title, style)
        self.make_rows = make_rows
        self.visible_rows = 1

    def build_rows(self, width: int, height: int) -> list[Row]:
        """Return all rows. The frame shows those at the scroll position and counts the rows above and below."""
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


class LineInput(Dialog):
    """One line to type. Its result is the line, or None."""

    screenshot_keys = ("ctrl+s",)
    keys: Sequence[tuple[str, str]] = (("enter", "done"), ("esc", "cancel"))

    def __init__(
        self, title: str, note: str, style: TerminalStyle, typed_text: str = "", hides_text: bool = False
    ) -> None:
        """Show `note` below the line. `hides_text`: show stars instead of the text."""
        super().__init__(title, style)
        self.note, self.typed_text, self.hides_text = note, typed_text, hides_text

    def build_rows(self, width: int, height: int) -> list[Row]:
        """Return the typed line and the note."""
        return [self.input_row(width), [], [(truncate(self.note, width), "dim")]]

    def input_row(self, width: int) -> Row:
        """Return the end of the typed line, with a cursor."""
        visible_text = self.typed_text[-width:]
        visible_text = "*" * len(visible_text) if self.hides_text else visible_text
        while visible_text and span_width(visible_text) > width - 3:
            visible_text = visible_text[1:]
        return [("> ", "key"), (visible_text, ""), ("▏", "key")]

    def add_text(self, text: str) -> None:
        """Add typed text, up to the limit."""
        text_bytes = (self.typed_text + strip_control_chars(text)).encode()
        self.typed_text = text_bytes[:MAX_LINE_BYTES].decode("utf-8", "ignore")
        self.draw()

    def respond_to_key(self, event: events.Key) -> None:
        """Send the line, edit it, or cancel."""
        if event.key in ("escape", "ctrl+c"):
            self.close_once(None)
        elif event.key == "enter":
            self.close_once(self.typed_text)
        elif event.key in ("backspace", "ctrl+h"):
            self.typed_text = self.typed_text[:-1]
            self.draw()
        elif event.key == "ctrl+u":
            self.typed_text = ""
            self.draw()
        elif event.is_printable and event.character:
            self.add_text(event.character)

    def on_paste(self, event: events.Paste) -> None:
        """Add the first line of pasted text."""
        event.stop()
        if not self.is_closed:
            self.add_text((event.text.splitlines() or [""])[0])


class CommandPalette(LineInput):
    """A list of commands, filtered by typing. Its result is the action of the chosen command, or None."""

    keys = (("arrows", "choose"), ("enter", "do it"), ("esc", "close"))
    corner = "enter does it"

    def __init__(self, list_commands: Callable[[], Sequence[KeyCommand]], style: TerminalStyle) -> None:
        """Show what `list_commands` returns: the commands that can run now."""
        super().__init__("Commands", "", style)
        self.list_commands = list_commands
        self.command_count = len(list_commands())
        """Number of commands without a filter."""
        self.preferred_width = max(span_width(command.description) for command in list_commands()) + 10
        self.shown_commands: list[KeyCommand] = []
        """The drawn commands; the possible ones may have changed since then."""
        self.chosen_index = 0
        self.pinned_rows = 1

    def matching_commands(self) -> list[KeyCommand]:
        """Return the commands that contain every typed word; the command whose key was typed comes first."""
        words = self.typed_text.lower().split()
        matching = []
        for command in self.list_commands():
            text = f"{command.key} {command.description}".lower()
            if all(word in text for word in words):
                matching.append(command)
        return sorted(matching, key=lambda command: not self.typed_text or command.key != self.typed_text)

    def build_rows(self, width: int, height: int) -> list[Row]:
        """Return the typed text, then the commands with the chosen one marked.

        The box keeps its height during typing.
        """
        commands = self.shown_commands = self.matching_commands()
        self.chosen_index = min(max(self.chosen_index, 0), max(len(commands) - 1, 0))
        visible_count = max(height - 1, 1)
        self.first_row = max(self.chosen_index - visible_count + 1, 0)
        rows: list[Row] = [self.input_row(width)]
        for index, command in enumerate(commands):
            mark, style = ("▸ ", "bold") if index == self.chosen_index else ("  ", "")
            text = truncate(command.description, width - 8)
            rows.append([(mark, "key"), (command.key.ljust(6), "key"), (text, style)])
        if not commands:
            rows.append([("  no command matches now", "dim")])
        return [*rows, *[[]] * (min(self.command_count, visible_count) + 1 - len(rows))]

    def respond_to_key(self, event: events.Key) -> None:
        """Choose, filter the list, or cancel. A marked command that has become impossible is not run."""
        moves = {"up": -1, "down": 1, "pageup": -8, "pagedown": 8, "tab": 1, "shift+tab": -1}
        if event.key in moves:
            self.chosen_index += moves[event.key]
            self.draw()
        elif event.key != "enter":
            super().respond_to_key(event)
        elif not self.shown_commands:
            self.close_once(None)
        elif (command := self.shown_commands[self.chosen_index]) in self.list_commands():
            self.close_once(command.action)
        else:
            self.draw()

    def add_text(self, text: str) -> None:
        """Filter by more text and choose the first match."""
        self.chosen_index = 0
        super().add_text(text)
