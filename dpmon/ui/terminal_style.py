"""The look of one terminal: whether it shows only ASCII, and the theme's styles by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from rich.color import Color, ColorType, parse_rgb_hex
from rich.style import Style

from dpmon.config import THEMES
from dpmon.record.schema import PHASES
from dpmon.text.cells import needs_ascii
from dpmon.text.palettes import Palette, palette_of

LETTERS: Mapping[str, str] = {phase.display_name: phase.letter for phase in PHASES}
"""The letter of each phase; "other" has a dot."""


def letter_position(phase: str, word: str) -> int:
    """Return the position of the phase's letter in one of its names; 0 if it is not there."""
    return max(word.upper().find(LETTERS[phase]), 0)


def build_styles(palette: Palette, *, fills_chips: bool = True) -> dict[str, Style]:
    """Return the styles by name, each with a background, so that the terminal's own colors are never seen.

    `fills_chips`: put a phase's letters on its color; if False, write them in it.
    """

    def on(color: str, bold: bool = False) -> Style:
        return Style(color=color, bgcolor=palette.background, bold=bold or None)

    styles = {
        "": on(palette.text),
        "dim": on(palette.dim),
        "bold": on(palette.strong, bold=True),
        "title": on(palette.strong, bold=True),
        "frame": on(palette.frame),
        "frame.focus": on(palette.focus),
        "key": on(palette.strong, bold=True),
        "good": on(palette.good, bold=True),
        "wait": on(palette.wait, bold=True),
        "bad": on(palette.bad, bold=True),
        "bar": on(palette.bar),
        "found": Style(color=palette.background, bgcolor=palette.wait),
        "mode.dp": on(palette.dp, bold=True),
        "mode.single": on(palette.single, bold=True),
        "mode.": on(palette.dim),
    }
    for name, color in palette.by_phase.items():
        styles[f"phase.{name}"] = on(color)
        chip = Style(color=palette.background, bgcolor=color, bold=True)
        styles[f"chip.{name}"] = chip if fills_chips else on(color, bold=True)
    return styles


def _mono_styles() -> dict[str, Style]:
    styles = {name: Style() for name in build_styles(palette_of("dark"))}
    for name in ("bold", "title", "key", "mode.dp", "mode.single", "good"):
        styles[name] = Style(bold=True)
    styles["wait"] = Style(underline=True)
    styles["bad"] = Style(bold=True, reverse=True)
    styles["found"] = Style(reverse=True)
    styles["frame.focus"] = Style(bold=True)
    for name in LETTERS:
        styles[f"chip.{name}"] = Style(bold=True, underline=True)
    return styles


_ATTRIBUTES = ("bold", "dim", "italic", "underline", "reverse", "strike")
"""Attributes that the script's output keeps."""


@lru_cache(maxsize=1024)
def parse_composed_style(name: str, theme: str | None, has_few_colors: bool = False) -> Style:
    """Return the style of a composed name: "sgr:<a style as Rich writes it>" or "phase.a/b". `theme` None: mono."""
    palette = palette_of(theme, has_few_colors) if theme is not None else None
    if name.startswith("sgr:"):
        script_style = Style.parse(name[4:])
        attributes = Style(**{word: getattr(script_style, word) for word in _ATTRIBUTES})
        if palette is None:
            return attributes
        background = _rgb(script_style.bgcolor, palette)
        foreground = _rgb(script_style.color, palette) or palette.text
        if background is None:  # the script did not know this background when it chose its color
            background = palette.background
            foreground = _ensure_contrast(foreground, background, palette)
        if script_style.dim:
            foreground = _blend(foreground, background)
        return attributes + Style(color=foreground, bgcolor=background, dim=False)
    lower, _, upper = name.partition("/")
    if palette is not None and lower.startswith("phase.") and lower[6:] in LETTERS and upper in LETTERS:
        return Style(color=palette.by_phase[lower[6:]], bgcolor=palette.by_phase[upper])
    return Style(color=palette.text, bgcolor=palette.background) if palette is not None else Style()


def _rgb(color: Color | None, palette: Palette) -> str | None:
    """Return the color as "#rrggbb", the first sixteen colors as in the palette; None for the terminal's default."""
    if color is None or color.is_default:
        return None
    if color.type is ColorType.STANDARD and color.number is not None:
        return (*palette.ansi, *palette.bright)[color.number]
    return color.get_truecolor().hex


def _blend(foreground: str, background: str) -> str:
    """Return a mix of two thirds of `foreground` and one third of `background`: the color of dim text."""
    pairs = zip(parse_rgb_hex(foreground[1:]), parse_rgb_hex(background[1:]), strict=True)
    return "#" + "".join(f"{(a * 2 + b) // 3:02x}" for a, b in pairs)


def _ensure_contrast(foreground: str, background: str, palette: Palette) -> str:
    """Return `foreground` if it stands out from `background`, else a mix with the theme's text color."""
    for _ in range(3):
        if abs(_brightness(foreground) - _brightness(background)) >= 70:
            break
        foreground = _blend(foreground, palette.text)
    return foreground


def _brightness(color: str) -> float:
    """Return the brightness of a color, 0 to 255 (the weights of ITU-R BT.601)."""
    red, green, blue = parse_rgb_hex(color[1:])
    return 0.299 * red + 0.587 * green + 0.114 * blue


MONO = _mono_styles()


class TerminalStyle:
    """The styles of a theme (one of `dpmon.config.THEMES`) on one terminal."""

    def __init__(self, theme: str, *, only_ascii: bool = False, has_few_colors: bool = False) -> None:
        """`only_ascii`, `has_few_colors`: whether the terminal shows only ASCII, or only sixteen colors."""
        self.theme, self.only_ascii, self.has_few_colors = theme, only_ascii, has_few_colors
        self.has_color = theme != "mono"
        self.is_ascii = only_ascii or theme == "ascii"
        """Whether the screen shows only ASCII: `PanelView` replaces all other signs."""
        self.styles = MONO
        if self.has_color:
            self.styles = build_styles(palette_of(theme, has_few_colors), fills_chips=not self.is_ascii)

    def rich_style(self, name: str) -> Style:
        """Return the style of that name. "phase.a/b": the color of phase a on the color of phase b."""
        style = self.styles.get(name)
        if style is not None:
            return style
        return parse_composed_style(name, self.theme if self.has_color else None, self.has_few_colors)

    @property
    def background(self) -> str:
        """The color behind everything; meaningless in mono."""
        return palette_of(self.theme).background

    def with_next_theme(self) -> TerminalStyle:
        """Return the style of the next theme."""
        next_theme = THEMES[(THEMES.index(self.theme) + 1) % len(THEMES)]
        return TerminalStyle(next_theme, only_ascii=self.only_ascii, has_few_colors=self.has_few_colors)


def choose_style(environ: Mapping[str, str], encoding: str | None, theme: str | None = None) -> TerminalStyle:
    """Return the style for a terminal, from its environment and the encoding of the output stream.

    `theme`: the user's setting, if any. It overrides NO_COLOR (https://no-color.org), which is for programs without a
    setting of their own.
    """
    terminal = environ.get("TERM", "")
    if theme is None:
        theme = "mono" if environ.get("NO_COLOR") or terminal.startswith(("vt1", "vt2", "dumb")) else "dark"
    return TerminalStyle(theme, only_ascii=needs_ascii(environ, encoding), has_few_colors=_has_sixteen_colors(environ))


def _has_sixteen_colors(environ: Mapping[str, str]) -> bool:
    """Return whether the terminal will get at most sixteen colors, as Rich and Textual 8 decide it."""
    system = environ.get("TEXTUAL_COLOR_SYSTEM", "auto")
    if system in ("standard", "256", "truecolor"):
        return system == "standard"
    if environ.get("COLORTERM", "").strip().lower() in ("truecolor", "24bit"):
        return False
    return environ.get("TERM", "").strip().lower().rpartition("-")[2] not in ("256color", "kitty")
