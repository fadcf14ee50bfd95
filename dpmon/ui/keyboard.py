"""Parses a terminal's input into keys, clicks and pastes. Whatever the input is, the next key still works.

Textual's own parser stops at a byte that is not UTF-8, waits forever for the end of a paste, and treats the characters
of an unknown sequence as keys. This parser reads a sequence to its end as a terminal would (ECMA-48). It drops unknown
sequences, and after a moment also incomplete ones. Textual's table says which key a sequence means.

Textual treats an escape and the next character as one key: alt with that character or, if it is a digit, the special
character that some keyboards type with alt and this digit. Here the two usually count as two keys, because no command
uses alt, and a person may press esc and then 2 within a tenth of a second.
"""

from __future__ import annotations

import re
import time
from codecs import getincrementaldecoder
from collections.abc import Callable

from textual import constants, events, messages
from textual._ansi_sequences import ANSI_SEQUENCES_KEYS
from textual._keyboard_protocol import FUNCTIONAL_KEYS
from textual._xterm_parser import XTermParser
from textual.message import Message

ESC = "\x1b"
PASTE_MOST = 1 << 16
"""Most bytes of a paste; the rest is dropped."""
_CUT_S = 1.0
"""Seconds without a byte after which an open sequence or paste counts as cut short."""
_WINDOW_S = 2.0
_WINDOW_BYTES = 64
"""If fewer bytes than this come in `_WINDOW_S` seconds, a person is pressing keys: the end of the paste was lost."""
_LONGEST = 256
"""Most bytes of a sequence; the rest of a longer one is dropped."""
_TO_THE_TRAINING = frozenset("dpx")
"""Keys that switch, pause or stop the training. Together with alt they do nothing."""
_HEARD_ANYWHERE = b"\x03\x1a"
"""ctrl+c and ctrl+z, which also work in an unfinished paste."""
_PASTE = b"\x1b[200~"
_PASTE_END = b"\x1b[201~"

# An X10 mouse report ends with three bytes, each 0x20 or more. The Linux console begins F1 to F5 with two brackets.
_SEQUENCE = re.compile(
    rb"\x1b(?:\[M[\x20-\xff]{3}|\[(?!M)\[?[0-?]*[ -/]*[@-Z\\-~]|O[0-9;]*[ @-~]|\\)",
)
_BEGUN = re.compile(rb"\x1b(?:\[(?:M[\x20-\xff]{0,2}|\[?[0-?]*[ -/]*)|O[0-9;]*|[\]P_^X])?\Z")
_STRING = re.compile(rb"\x1b[\]P_^X](?=.)", re.DOTALL)
"""OSC, DCS, APC, PM and SOS: text up to a terminator."""
_IN_STRING = re.compile(rb"[^\x03\x07\x18\x1a\x1b]*")
_IN_SEQUENCE = re.compile(rb"[ -?]*")
_PAIR = re.compile(
    rb"\x1b([\x00-\x1a\x1c-\x7f]|[\xc2-\xdf][\x80-\xbf]|[\xe0-\xef][\x80-\xbf]{2}|[\xf0-\xf4][\x80-\xbf]{3})"
)
_PAIR_BEGUN = re.compile(rb"\x1b(?:[\xc2-\xdf]|[\xe0-\xef][\x80-\xbf]?|[\xf0-\xf4][\x80-\xbf]{0,2})\Z")

_MOUSE = re.compile(r"\x1b\[<\d{1,4};\d{1,5};\d{1,5}[Mm]")
_MODE_REPORT = re.compile(r"\x1b\[\?2026;[1-4]\$y")
# kitty's protocol and xterm's modifyOtherKeys, which another program may have left on: code, modifiers, event type.
_KITTY = re.compile(r"\x1b\[(?P<code>\d{1,7})(?::\d*)*(?:;(?P<held>\d{0,3})(?::(?P<kind>\d))?)?(?:;[\d:]*)?u")
_OTHER_KEY = re.compile(r"\x1b\[27;(?P<held>\d{1,3});(?P<code>\d{1,7})~")
# A key that is not a character, with modifiers, as xterm sends it.
_MODIFIED = re.compile(r"\x1b\[(?P<number>\d{1,2});\d{1,3}(?P<end>[~ABCDEFHPQS])")
_RELEASED = "3"


class Keyboard:
    """Takes bytes in pieces of any size and returns Textual's messages."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, escape_s: float = constants.ESCAPE_DELAY) -> None:
        """`escape_s`: how long an escape waits for the rest of a sequence."""
        self._clock = clock
        self._escape_s = escape_s
        self._table = XTermParser()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._rest = b""
        """Bytes of a sequence that is still incomplete."""
        self._inside: re.Pattern[bytes] | None = None
        """The pattern of the bytes to drop, while a sequence is being dropped."""
        self._paste: bytearray | None = None
        self._tail = b""
        """The last byte of the paste so far."""
        self._last = 0.0
        """When the last byte came."""
        self._window = (0.0, 0)
        """The start of the current window of `_WINDOW_S` seconds, and the number of bytes in it."""

    @property
    def waiting(self) -> bool:
        """Whether `tick` may have something to do."""
        return bool(self._rest) or self._inside is not None or self._paste is not None or self._cut_character()

    def feed(self, data: bytes) -> list[Message]:
        """The messages for these bytes."""
        self._last = self._clock()
        since, count = self._window
        self._window = (since, count + len(data))
        self._rest += data
        return self._take()

    def tick(self) -> list[Message]:
        """The messages that are certain because no more bytes came. Call this every few hundredths of a second."""
        now = self._clock()
        quiet = now - self._last
        if self._paste is not None:
            return self._tick_paste(now, quiet)
        if self._inside is not None and not self._rest:
            if quiet >= _CUT_S or self._by_hand(now):
                self._inside = None
        elif self._rest and quiet >= (self._escape_s if len(self._rest) <= 2 else _CUT_S):
            self._inside = None
            begun, self._rest = self._rest, b""
            return self._as_keys(begun)
        elif quiet >= self._escape_s and self._cut_character():
            self._decoder.reset()
        return []

    # ------------------------------------------------------------------------------------------ taking apart

    def _take(self) -> list[Message]:
        found: list[Message] = []
        before: tuple[object, ...] = ()
        while self._rest and (now := (len(self._rest), self._inside, self._paste is None)) != before:
            before = now
            if self._paste is not None:
                found += self._take_paste()
            elif self._inside is not None:
                self._drop(self._inside)
            elif self._rest[:1] != b"\x1b":
                text, escape, more = self._rest.partition(b"\x1b")
                self._rest = escape + more
                found += self._characters(text, final=bool(escape))
            else:
                found += self._escape()
        return found

    def _escape(self) -> list[Message]:
        """Take one sequence, or leave it if it is incomplete."""
        rest = self._rest
        if match := _SEQUENCE.match(rest):
            self._rest = rest[match.end() :]
            if match[0] == _PASTE:
                self._paste, self._tail = bytearray(), b""
                self._window = (self._clock(), len(self._rest))
                return []
            return self._meaning(match[0].decode("latin-1"))
        if match := _STRING.match(rest):
            self._begin_to_drop(_IN_STRING, rest[match.end() :])
            return []
        if _BEGUN.match(rest) or _PAIR_BEGUN.match(rest):
            if len(rest) > _LONGEST:
                self._begin_to_drop(_IN_SEQUENCE, b"")
            return []
        if (match := _PAIR.match(rest)) and match[1] not in (b"[", b"O"):
            self._rest = rest[match.end() :]
            return self._pair(match[1].decode("utf-8", "replace"))
        # Interrupted by a byte that is not part of the sequence, such as another escape or ctrl+c.
        begun = rest[: max(_begun_length(rest), 1)]
        self._rest = rest[len(begun) :]
        return self._as_keys(begun)

    def _begin_to_drop(self, inside: re.Pattern[bytes], rest: bytes) -> None:
        self._inside, self._rest = inside, rest
        self._window = (self._clock(), len(rest))

    def _drop(self, inside: re.Pattern[bytes]) -> None:
        """Drop the bytes of the sequence; at its end continue with the bytes after it."""
        match = inside.match(self._rest)
        self._rest = self._rest[match.end() if match else 0 :]
        last = self._rest[:1]
        if not last or (self._rest == b"\x1b" and inside is _IN_STRING):
            return
        self._inside = None
        if inside is _IN_SEQUENCE:
            self._rest = self._rest[1:] if b"@" <= last <= b"~" else self._rest
        elif last in b"\x07\x18":
            self._rest = self._rest[1:]
        # Otherwise a key, another sequence, or ST, which means nothing alone: it is parsed like any input.

    def _take_paste(self) -> list[Message]:
        assert self._paste is not None
        text, end, more = self._rest.partition(_PASTE_END)
        if end:
            self._rest = more
            return self._pasted(text)
        keep = next((n for n in range(len(_PASTE_END) - 1, 0, -1) if text.endswith(_PASTE_END[:n])), 0)
        self._rest = text[len(text) - keep :]
        self._paste += text[: len(text) - keep][: PASTE_MOST - len(self._paste)]
        self._tail = text[-1:]
        return []

    def _pasted(self, text: bytes = b"") -> list[Message]:
        pasted = bytes((self._paste or b"") + text)[:PASTE_MOST]
        self._paste = None
        return [events.Paste(pasted.decode("utf-8", "replace").replace("\x00", ""))]

    def _tick_paste(self, now: float, quiet: float) -> list[Message]:
        """End an unfinished paste: drop it at a final ctrl+c or ctrl+z, or deliver it if its end was lost."""
        if self._tail in _HEARD_ANYWHERE and self._tail and quiet >= self._escape_s:
            self._paste, self._rest = None, b""
            return self._characters(self._tail)
        if quiet < _CUT_S and not self._by_hand(now):
            return []
        rest, self._rest = self._rest, b""
        return self._pasted(rest)

    def _by_hand(self, now: float) -> bool:
        """Whether so few bytes come that a person may be pressing keys."""
        since, count = self._window
        if now - since < _WINDOW_S:
            return False
        self._window = (now, 0)
        return count < _WINDOW_BYTES

    # ------------------------------------------------------------------------------------------ meaning

    def _cut_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _characters(self, data: bytes, final: bool = False) -> list[Message]:
        found: list[Message] = []
        for char in self._decoder.decode(data, final):
            if char != "\N{REPLACEMENT CHARACTER}":
                found += self._keys(char)
        return found

    def _keys(self, sequence: str) -> list[events.Key]:
        if len(sequence) == 1:
            return list(self._table._sequence_to_key_events(sequence))
        known = ANSI_SEQUENCES_KEYS.get(sequence)
        # Some keyboards send a sign for alt with a digit; Textual's table has these signs.
        return [events.Key(key.value, None) for key in known] if isinstance(known, tuple) else []

    def _pair(self, char: str) -> list[Message]:
        """The messages for an escape that is directly followed by a character."""
        if "\N{REPLACEMENT CHARACTER}" in char:  # not a valid character
            return [events.Key("escape", ESC)]
        if char in _TO_THE_TRAINING:
            return [events.Key(f"alt+{char}", char)]
        known = [] if char.isalnum() else self._keys(ESC + char)
        return [*known] if known else [events.Key("escape", ESC), *self._keys(char)]

    def _as_keys(self, begun: bytes) -> list[Message]:
        """The keys of an incomplete sequence: an escape, with or without one character; anything longer is dropped."""
        if len(begun) == 1:
            return [events.Key("escape", ESC)]
        return self._pair(begun[1:].decode("latin-1")) if len(begun) == 2 and begun[1] < 0x80 else []

    def _meaning(self, sequence: str) -> list[Message]:
        """The messages for a complete sequence; none if the sequence does not matter here."""
        if sequence in ("\x1b[I", "\x1b[O"):
            return [events.AppFocus() if sequence == "\x1b[I" else events.AppBlur()]
        if _MODE_REPORT.fullmatch(sequence):
            return [messages.TerminalSupportsSynchronizedOutput()]
        if _MOUSE.fullmatch(sequence):
            event = self._table.parse_mouse_code(sequence)
            return [event] if event is not None and not isinstance(event, events.MouseMove) else []
        if match := _KITTY.fullmatch(sequence) or _OTHER_KEY.fullmatch(sequence):
            return self._coded(**match.groupdict())
        match = _MODIFIED.fullmatch(sequence)
        if match and match["number"] + match["end"] in FUNCTIONAL_KEYS:
            return self._extended(sequence)
        return [*self._keys(sequence)]

    def _coded(self, code: str, held: str | None, kind: str | None = None) -> list[Message]:
        """A key by the number of its character, with the modifiers held down."""
        number = int(code)
        if kind == _RELEASED or number > 0x10FFFF or 0xD800 <= number < 0xE000:
            return []
        return self._extended(f"\x1b[{number};{held or 1}u")

    def _extended(self, sequence: str) -> list[Message]:
        # Copies, because Textual caches the events that it returns.
        return [key.copy() for key in self._table._parse_extended_key(sequence) or []]


def _begun_length(data: bytes) -> int:
    """The number of bytes at the start of `data` that could begin a sequence."""
    low, high = 1, min(len(data), _LONGEST)
    while low < high and _BEGUN.match(data[: low + 1]):
        low += 1
    return low
