"""The look of one terminal: its glyphs (Unicode or ASCII), and the theme's styles by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rich.style import Style

from dpmon.config import THEMES
from dpmon.record.schema import PHASES
from dpmon.text.cells import needs_ascii
from dpmon.text.palettes import PALETTES, named
from dpmon.ui.themes import MONO_STYLES, composed, styles_of

LETTERS: Mapping[str, str] = {phase.shown: phase.letter for phase in PHASES}
"""The letter of each phase; "other" has a dot."""


def letter_in(phase: str, word: str) -> int:
    """The position of the phase's letter in one of its names; 0 if it is not there."""
    return max(word.upper().find(LETTERS[phase]), 0)


@dataclass(frozen=True)
class Glyphs:
    """Every sign that is not a letter."""

    frame: tuple[str, str, str, str, str, str]
    """Corners (top left, top right, bottom left, bottom right), horizontal and vertical line."""
    blocks: str
    """Nine blocks from empty to full, filled from below."""
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
    """Whether plots of several rows use braille dots; else they use `blocks`."""


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


COLOUR = styles_of(named("dark"))
MONO = MONO_STYLES


@dataclass(frozen=True)
class Look:
    """Glyphs and styles for one terminal."""

    glyphs: Glyphs
    styles: Mapping[str, Style]
    colour: bool
    theme: str = "dark"
    """One of `dpmon.config.THEMES`."""
    only_ascii: bool = False
    """Whether the terminal shows only ASCII."""
    only_mono: bool = False
    """Whether the terminal has no colours."""
    few: bool = False
    """Whether the terminal has sixteen colours."""

    def style(self, name: str) -> Style:
        """The style of that name; "phase.a/b" is the colour of phase a on a background in the colour of phase b."""
        found = self.styles.get(name)
        return found if found is not None else composed(name, self.theme if self.colour else None, self.few)

    @property
    def background(self) -> str:
        """The colour behind everything; meaningless in mono."""
        return named(self.theme).background

    def next(self) -> Look:
        """The next theme that this terminal can show."""
        rest = THEMES[THEMES.index(self.theme) + 1 :] + THEMES
        possible = (
            theme
            for theme in rest
            if not (self.only_mono and theme in PALETTES) and not (self.only_ascii and theme == "ascii")
        )
        return look(next(possible), only_ascii=self.only_ascii, only_mono=self.only_mono, few=self.few)


def look(theme: str, *, only_ascii: bool = False, only_mono: bool = False, few: bool = False) -> Look:
    """The look of a theme on a terminal, which may have only ASCII, no colours or only sixteen (`few`)."""
    mono = theme == "mono" or only_mono
    glyphs = ASCII if only_ascii or theme == "ascii" else UNICODE
    styles = MONO if mono else styles_of(named(theme, few))
    return Look(glyphs, styles, not mono, theme, only_ascii, only_mono, few)


def choose(environ: Mapping[str, str], encoding: str | None, theme: str | None = None) -> Look:
    """The look for a terminal, from its environment and the encoding of the output stream.

    `theme`: the user's setting, if any. It overrides NO_COLOR (https://no-color.org), which is for programs without
    a setting of their own.
    """
    terminal = environ.get("TERM", "")
    only_ascii = needs_ascii(environ, encoding)
    only_mono = terminal.startswith(("vt1", "vt2", "dumb"))
    if theme is None:
        theme = "mono" if environ.get("NO_COLOR") or only_mono else "dark"
    return look(theme, only_ascii=only_ascii, only_mono=only_mono, few=_few(environ))


def _few(environ: Mapping[str, str]) -> bool:
    """Whether the terminal will get at most sixteen colours, as Rich and Textual 8 decide it."""
    system = environ.get("TEXTUAL_COLOR_SYSTEM", "auto")
    if system in ("standard", "256", "truecolor"):
        return system == "standard"
    if environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return False
    return environ.get("TERM", "").strip().lower().rpartition("-")[2] not in ("256color", "kitty")
