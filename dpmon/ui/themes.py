"""The styles of each theme by name, from its palette, and how the script's own colours look in it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from rich.style import Style

from dpmon.model.process import PHASES
from dpmon.text.palettes import Palette, named


def styles_of(palette: Palette) -> dict[str, Style]:
    """The styles by name, each with a background, so that the terminal's own colours are never seen."""

    def on(colour: str, bold: bool = False) -> Style:
        return Style(color=colour, bgcolor=palette.background, bold=bold or None)

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
    for name, colour in palette.by_phase.items():
        styles[f"phase.{name}"] = on(colour)
        styles[f"chip.{name}"] = Style(color=palette.background, bgcolor=colour, bold=True)
    return styles


def _mono_styles() -> dict[str, Style]:
    styles = {name: Style() for name in styles_of(named("dark"))}
    for name in ("bold", "title", "key", "mode.dp", "mode.single", "good"):
        styles[name] = Style(bold=True)
    styles["wait"] = Style(underline=True)
    styles["bad"] = Style(bold=True, reverse=True)
    styles["found"] = Style(reverse=True)
    styles["frame.focus"] = Style(bold=True)
    for name in PHASES:
        styles[f"chip.{name}"] = Style(reverse=True)
    return styles


MONO_STYLES: Mapping[str, Style] = _mono_styles()
_ATTRIBUTES = {"b": "bold", "d": "dim", "i": "italic", "u": "underline", "r": "reverse", "s": "strike"}
_LEVELS = (0, 95, 135, 175, 215, 255)


@lru_cache(maxsize=1024)
def composed(name: str, theme: str | None, few: bool = False) -> Style:
    """The style of a composed name: "sgr:<fg>:<bg>:<attributes>" or "phase.a/b"; `theme` None: mono."""
    palette = named(theme, few) if theme is not None else None
    if name.startswith("sgr:"):
        front, back, attributes = name[4:].rsplit(":", 2)
        if palette is None:
            return Style.parse(" ".join(_ATTRIBUTES[a] for a in attributes if a in _ATTRIBUTES))
        bg = _rgb(back, palette) if back else palette.background
        fg = _rgb(front, palette) if front else palette.text
        if not back:  # the script did not know this background when it chose its colour
            fg = _legible(fg, bg, palette)
        if "d" in attributes:
            fg = _mixed(fg, bg)
        base = Style(color=fg, bgcolor=bg)
        return base + Style.parse(" ".join(_ATTRIBUTES[a] for a in attributes if a in _ATTRIBUTES and a != "d"))
    lower, _, upper = name.partition("/")
    if palette is not None and lower.startswith("phase.") and lower[6:] in PHASES and upper in PHASES:
        return Style(color=palette.by_phase[lower[6:]], bgcolor=palette.by_phase[upper])
    return Style(color=palette.text, bgcolor=palette.background) if palette is not None else Style()


def _rgb(name: str, palette: Palette) -> str:
    """The colour as "#rrggbb": "color(9)" is looked up in the palette; a true colour stays as it is."""
    if not name.startswith("color("):
        return name
    number = int(name[6:-1])
    if number < 16:
        return (*palette.ansi, *palette.bright)[number]
    if number >= 232:
        grey = 8 + 10 * (number - 232)
        return f"#{grey:02x}{grey:02x}{grey:02x}"
    red, rest = divmod(number - 16, 36)
    green, blue = divmod(rest, 6)
    return f"#{_LEVELS[red]:02x}{_LEVELS[green]:02x}{_LEVELS[blue]:02x}"


def _parts(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def _mixed(front: str, back: str) -> str:
    """Two thirds of `front` and one third of `back`; for dim text, it replaces the terminal's own attribute."""
    pairs = zip(_parts(front), _parts(back), strict=True)
    return "#" + "".join(f"{(a * 2 + b) // 3:02x}" for a, b in pairs)


def _legible(front: str, back: str, palette: Palette) -> str:
    """`front` if it stands out from `back`; else a mix with the theme's text colour."""
    for _ in range(3):
        if abs(_light(front) - _light(back)) >= 70:
            break
        front = _mixed(front, palette.text)
    return front


def _light(colour: str) -> float:
    """The brightness of a colour, 0 to 255 (the weights of ITU-R BT.601)."""
    red, green, blue = _parts(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue
