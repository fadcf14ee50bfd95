"""How things look: glyphs (Unicode or ASCII) and styles by name (colour or mono), chosen once for a terminal.

One colour a phase and one a mode, from Okabe and Ito's palette where it reaches (it tells eight apart for every kind of
colour vision); never colour alone: phases have a letter and an order, modes their word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style

from dpmon.model.state import PHASES

__all__ = ["ASCII", "COLOUR", "LETTERS", "MONO", "UNICODE", "Glyphs", "Look", "choose"]

LETTERS: Mapping[str, str] = dict(zip(PHASES, "DSRAGFBO.", strict=True))
"""A letter a phase; what is left over has a dot."""

_PHASE_COLOURS = {
    "data": "#cc79a7",
    "scatter": "#f0e442",
    "replicate": "#d55e00",
    "apply": "#56b4e9",
    "gather": "#e69f00",
    "forward": "#a9d6f2",
    "backward": "#3f8fd6",
    "optimizer": "#009e73",
    "other": "#7d8590",
}
BACKGROUND = "#10141a"
_TEXT = "#d6dbe1"
_DIM = "#8b949e"


@dataclass(frozen=True)
class Glyphs:
    """Every sign that is not a letter."""

    frame: tuple[str, str, str, str, str, str]
    """Corners (top left, top right, bottom left, bottom right), horizontal and vertical line."""
    blocks: str
    """From empty to full, lower part filled: nine, or two."""
    bar: tuple[str, str]
    """A bar's full and empty cell."""
    more: str
    down: str
    focus: str
    dot: str
    ring: str
    cross: str
    arrow: str
    span: tuple[str, str, str, str]
    """A range: left end, line, the median, right end."""
    times: str
    middot: str
    cut_top: str
    ascii: bool
    braille: bool = False
    """Whether plots of several rows are drawn in dots; else in blocks, or in what `blocks` has."""


UNICODE = Glyphs(
    frame=("╭", "╮", "╰", "╯", "─", "│"),
    blocks=" ▁▂▃▄▅▆▇█",
    bar=("━", "─"),
    more="…",
    down="↓",
    focus="▸",
    dot="●",
    ring="○",
    cross="✗",
    arrow="→",
    span=("├", "─", "┼", "┤"),
    times="×",
    middot="·",
    cut_top="▲",
    ascii=False,
    braille=True,
)
ASCII = Glyphs(
    frame=("+", "+", "+", "+", "-", "|"),
    blocks=" .:-=+*#@",
    bar=("=", "."),
    more=">",
    down="v",
    focus=">",
    dot="*",
    ring="o",
    cross="x",
    arrow="->",
    span=("|", "-", "+", "|"),
    times="x",
    middot="-",
    cut_top="^",
    ascii=True,
)


def _colour_styles() -> dict[str, Style]:
    def on(colour: str, bold: bool = False) -> Style:
        return Style(color=colour, bgcolor=BACKGROUND, bold=bold or None)

    styles = {
        "": on(_TEXT),
        "dim": on(_DIM),
        "bold": on("#ffffff", bold=True),
        "title": on("#ffffff", bold=True),
        "frame": on("#3d4650"),
        "frame.focus": on("#9fb0c3"),
        "key": on("#ffffff", bold=True),
        "good": on("#3fbf8f", bold=True),
        "wait": on("#f0c05a", bold=True),
        "bad": on("#ff7b72", bold=True),
        "bar": on("#8fb8de"),
        "mode.dp": on("#c4b5fd", bold=True),
        "mode.single": on("#5eead4", bold=True),
        "mode.": on(_DIM),
    }
    for name, colour in _PHASE_COLOURS.items():
        styles[f"phase.{name}"] = on(colour)
        styles[f"chip.{name}"] = Style(color=BACKGROUND, bgcolor=colour, bold=True)
    return styles


def _mono_styles() -> dict[str, Style]:
    styles = {name: Style() for name in _colour_styles()}
    for name in ("bold", "title", "key", "mode.dp", "mode.single", "good"):
        styles[name] = Style(bold=True)
    styles["wait"] = Style(underline=True)
    styles["bad"] = Style(bold=True, reverse=True)
    styles["frame.focus"] = Style(bold=True)
    for name in _PHASE_COLOURS:
        styles[f"chip.{name}"] = Style(reverse=True)
    return styles


@dataclass(frozen=True)
class Look:
    """Glyphs and styles for one terminal."""

    glyphs: Glyphs
    styles: Mapping[str, Style]
    colour: bool

    def style(self, name: str) -> Style:
        """The style of that name; between two phases, "phase.a/b" is the colour of a upon that of b."""
        found = self.styles.get(name)
        if found is not None:
            return found
        return _composed(name, self.colour)


_ATTRIBUTES = {"b": "bold", "d": "dim", "i": "italic", "u": "underline", "r": "reverse", "s": "strike"}
_ANSI = (
    *("#5c6370", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", "#c9d1d9"),
    *("#8b949e", "#ffa198", "#a5f3b5", "#f2cc60", "#a5d6ff", "#e2c5ff", "#b3f0ff", "#ffffff"),
)
"""The sixteen colours that a script may ask for, legible on our background."""
_LEVELS = (0, 95, 135, 175, 215, 255)


def _ansi(name: str) -> str:
    """ "color(9)" as "#ffa198"; what is a true colour already stays. So no terminal's own palette plays a part."""
    if not name.startswith("color("):
        return name
    number = int(name[6:-1])
    if number < 16:
        return _ANSI[number]
    if number >= 232:
        grey = 8 + 10 * (number - 232)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    red, rest = divmod(number - 16, 36)
    green, blue = divmod(rest, 6)
    return f"#{_LEVELS[red]:02x}{_LEVELS[green]:02x}{_LEVELS[blue]:02x}"


def _mixed(front: str, back: str) -> str:
    """The colour between two: what dim looks like, without asking the terminal for it."""
    pairs = zip((front[1:3], front[3:5], front[5:7]), (back[1:3], back[3:5], back[5:7]), strict=True)
    return "#" + "".join(f"{(int(a, 16) * 2 + int(b, 16)) // 3:02x}" for a, b in pairs)


@lru_cache(maxsize=1024)
def _composed(name: str, colour: bool) -> Style:
    if name.startswith("sgr:"):
        front, back, attributes = name[4:].rsplit(":", 2)
        if not colour:
            return Style.parse(" ".join(_ATTRIBUTES[a] for a in attributes if a in _ATTRIBUTES))
        fg, bg = _ansi(front) if front else _TEXT, _ansi(back) if back else BACKGROUND
        if "d" in attributes:
            fg = _mixed(fg, bg)
        base = Style(color=fg, bgcolor=bg)
        return base + Style.parse(" ".join(_ATTRIBUTES[a] for a in attributes if a in _ATTRIBUTES and a != "d"))
    lower, _, upper = name.partition("/")
    if colour and lower.startswith("phase.") and upper in _PHASE_COLOURS:
        return Style(color=_PHASE_COLOURS[lower[6:]], bgcolor=_PHASE_COLOURS[upper])
    return COLOUR[""] if colour else Style()


COLOUR = _colour_styles()
MONO = _mono_styles()


def choose(environ: Mapping[str, str], encoding: str | None) -> Look:
    """The look for a terminal, from its environment and the encoding of the stream that is drawn to."""
    utf8 = (encoding or "").lower().replace("-", "").replace("_", "") == "utf8"
    plain_terminal = environ.get("TERM", "").startswith(("linux", "vt1", "vt2", "dumb"))
    glyphs = UNICODE if utf8 and not plain_terminal else ASCII
    mono = bool(environ.get("NO_COLOR")) or environ.get("TERM", "").startswith(("vt1", "vt2", "dumb"))
    return Look(glyphs, MONO if mono else COLOUR, not mono)
