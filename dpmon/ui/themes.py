"""The palettes: which colour everything has in each theme, and how the script's own colours look in it.

The phases' colours are Okabe and Ito's where they reach (they are told apart in every kind of colour vision). The dark
and the light theme add green and red for good and bad; the colour-blind one does without that pair, for the script's
output too. Colours are never alone: phases have a letter and an order, modes and states their word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from rich.style import Style

from dpmon.model.state import PHASES

__all__ = ["MONO_STYLES", "PALETTES", "Palette", "composed", "styles_of"]

Ansi = tuple[str, str, str, str, str, str, str, str]


@dataclass(frozen=True)
class Palette:
    """A theme's colours as "#rrggbb"; `phases` in the order of PHASES, `ansi` and `bright` the script's sixteen."""

    name: str
    background: str
    text: str
    dim: str
    strong: str
    frame: str
    focus: str
    good: str
    wait: str
    bad: str
    bar: str
    dp: str
    single: str
    phases: tuple[str, ...]
    ansi: Ansi
    bright: Ansi


DARK = Palette(
    name="dark",
    background="#10141a",
    text="#d6dbe1",
    dim="#8b949e",
    strong="#ffffff",
    frame="#3d4650",
    focus="#9fb0c3",
    good="#3fbf8f",
    wait="#f0c05a",
    bad="#ff7b72",
    bar="#8fb8de",
    dp="#c4b5fd",
    single="#5eead4",
    phases=(
        *("#cc79a7", "#f0e442", "#d55e00", "#56b4e9", "#e69f00"),
        *("#a9d6f2", "#3f8fd6", "#009e73", "#7d8590"),
    ),
    ansi=("#5c6370", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", "#c9d1d9"),
    bright=("#8b949e", "#ffa198", "#a5f3b5", "#f2cc60", "#a5d6ff", "#e2c5ff", "#b3f0ff", "#ffffff"),
)
LIGHT = Palette(
    name="light",
    background="#fbfbf9",
    text="#24292f",
    dim="#616a73",
    strong="#000000",
    frame="#bcc4cc",
    focus="#57606a",
    good="#1a7f37",
    wait="#8f5f00",
    bad="#c01c28",
    bar="#4a7fb5",
    dp="#6d28d9",
    single="#0b6e66",
    phases=(
        *("#b0568c", "#8f7d00", "#c45500", "#2385c4", "#b87400"),
        *("#6ea8cf", "#0b5cab", "#007a58", "#6e7781"),
    ),
    ansi=("#24292f", "#c01c28", "#116329", "#7d4e00", "#0969da", "#8250df", "#1b7c83", "#57606a"),
    bright=("#57606a", "#a40e26", "#1a7f37", "#8a6100", "#0550ae", "#6639ba", "#0f6d75", "#24292f"),
)
COLOUR_BLIND = Palette(
    name="colour-blind",
    background="#10141a",
    text="#d6dbe1",
    dim="#8b949e",
    strong="#ffffff",
    frame="#3d4650",
    focus="#9fb0c3",
    good="#56b4e9",
    wait="#f0e442",
    bad="#ff8a3d",
    bar="#8fb8de",
    dp="#e69f00",
    single="#56b4e9",
    phases=(
        *("#cc79a7", "#f0e442", "#d55e00", "#56b4e9", "#e69f00"),
        *("#b9e0f7", "#2a7fd4", "#009e73", "#8b949e"),
    ),
    ansi=("#5c6370", "#ee7733", "#33b899", "#f0e442", "#56b4e9", "#cc79a7", "#99ddff", "#c9d1d9"),
    bright=("#8b949e", "#ff9e66", "#66d9bd", "#f7ef86", "#8dd0f5", "#e3a6c8", "#c2ebff", "#ffffff"),
)
PALETTES: Mapping[str, Palette] = {palette.name: palette for palette in (DARK, LIGHT, COLOUR_BLIND)}


def styles_of(palette: Palette) -> dict[str, Style]:
    """The styles by name, each with its background: the terminal's own colours play no part."""

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
    for name, colour in zip(PHASES, palette.phases, strict=True):
        styles[f"phase.{name}"] = on(colour)
        styles[f"chip.{name}"] = Style(color=palette.background, bgcolor=colour, bold=True)
    return styles


def _mono_styles() -> dict[str, Style]:
    styles = {name: Style() for name in styles_of(DARK)}
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
def composed(name: str, theme: str | None) -> Style:
    """The style of a name that is made of parts: "sgr:<fg>:<bg>:<attributes>", "phase.a/b"; `theme` None: mono."""
    palette = PALETTES.get(theme) if theme is not None else None
    if name.startswith("sgr:"):
        front, back, attributes = name[4:].rsplit(":", 2)
        if palette is None:
            return Style.parse(" ".join(_ATTRIBUTES[a] for a in attributes if a in _ATTRIBUTES))
        bg = _rgb(back, palette) if back else palette.background
        fg = _rgb(front, palette) if front else palette.text
        if not back:  # chosen for another background than ours
            fg = _legible(fg, bg, palette)
        if "d" in attributes:
            fg = _mixed(fg, bg)
        base = Style(color=fg, bgcolor=bg)
        return base + Style.parse(" ".join(_ATTRIBUTES[a] for a in attributes if a in _ATTRIBUTES and a != "d"))
    lower, _, upper = name.partition("/")
    if palette is not None and lower.startswith("phase.") and lower[6:] in PHASES and upper in PHASES:
        colours = dict(zip(PHASES, palette.phases, strict=True))
        return Style(color=colours[lower[6:]], bgcolor=colours[upper])
    return Style(color=palette.text, bgcolor=palette.background) if palette is not None else Style()


def _rgb(name: str, palette: Palette) -> str:
    """ "color(9)" as the palette has it; what is a true colour already stays."""
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
    """Two thirds of one colour and one of the other: what dim looks like, without asking the terminal for it."""
    pairs = zip(_parts(front), _parts(back), strict=True)
    return "#" + "".join(f"{(a * 2 + b) // 3:02x}" for a, b in pairs)


def _legible(front: str, back: str, palette: Palette) -> str:
    """`front` as it is where it stands out from `back`; else drawn towards the theme's text."""
    for _ in range(3):
        if abs(_light(front) - _light(back)) >= 70:
            break
        front = _mixed(front, palette.text)
    return front


def _light(colour: str) -> float:
    """How light a colour looks, 0 to 255 (the weights of ITU-R BT.601)."""
    red, green, blue = _parts(colour)
    return 0.299 * red + 0.587 * green + 0.114 * blue
