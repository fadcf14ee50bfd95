"""The colors of each theme, for the screen and the report; data only.

Most phases have colors from the palette of Okabe and Ito, which people with any color vision can tell apart. The dark
and the light theme add green and red for good and bad; the color-blind theme avoids this pair, also in the script's
output. Nothing is shown by color alone: phases also have a letter and an order, and modes and states have a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import cycle

from dpmon.record.schema import PHASES

_COLORED = (
    *("data", "copy", "scatter", "replicate", "apply", "gather", "forward", "backward", "sync", "optimizer", "other"),
)
"""Phases with a color of their own, by their names on the screen."""
Ansi = tuple[str, str, str, str, str, str, str, str]


@dataclass(frozen=True)
class Palette:
    """A theme's colors as "#rrggbb". `phases` has the order of _COLORED; `ansi` and `bright` color script output."""

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
    spare: tuple[str, ...]
    """Colors to use in turn for phases that are not in _COLORED."""
    ansi: Ansi
    bright: Ansi

    @property
    def by_phase(self) -> Mapping[str, str]:
        """The color of each phase, by the phase's name on the screen."""
        colors = dict(zip(_COLORED, self.phases, strict=True))
        others = (phase.display_name for phase in PHASES if phase.display_name not in colors)
        return colors | dict(zip(others, cycle(self.spare), strict=False))


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
        *("#cc79a7", "#e8dcc0", "#f0e442", "#d55e00", "#56b4e9", "#e69f00"),
        *("#a9d6f2", "#3f8fd6", "#b39ddb", "#009e73", "#7d8590"),
    ),
    spare=("#c5b358", "#e8a0a0"),
    ansi=("#767f8f", "#ff7b72", "#7ee787", "#e3b341", "#79c0ff", "#d2a8ff", "#76e3ea", "#c9d1d9"),
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
    bar="#4576a8",
    dp="#6d28d9",
    single="#0b6e66",
    phases=(
        *("#af538a", "#5f4b32", "#837200", "#be5200", "#1277bd", "#a26600"),
        *("#1b7a8e", "#0b4f9e", "#6a51a3", "#007a58", "#6b747e"),
    ),
    spare=("#7a6a1f", "#a8505a"),
    ansi=("#24292f", "#c01c28", "#116329", "#7d4e00", "#0969da", "#8250df", "#1b7c83", "#57606a"),
    bright=("#57606a", "#a40e26", "#1a7f37", "#8a6100", "#0550ae", "#6639ba", "#0f6d75", "#24292f"),
)
COLOR_BLIND = replace(
    DARK,
    name="color-blind",
    good="#56b4e9",
    wait="#f0e442",
    bad="#ff8a3d",
    dp="#e69f00",
    single="#56b4e9",
    phases=(
        *("#cc79a7", "#e8dcc0", "#f0e442", "#d55e00", "#56b4e9", "#e69f00"),
        *("#b9e0f7", "#2d81d5", "#b39ddb", "#009e73", "#8b949e"),
    ),
    ansi=("#767f8f", "#ee7733", "#33b899", "#f0e442", "#56b4e9", "#cc79a7", "#99ddff", "#c9d1d9"),
    bright=("#8b949e", "#ff9e66", "#66d9bd", "#f7ef86", "#8dd0f5", "#e3a6c8", "#c2ebff", "#ffffff"),
)
PALETTES: Mapping[str, Palette] = {palette.name: palette for palette in (DARK, LIGHT, COLOR_BLIND)}

# The sixteen colors of a limited terminal, with the values that Rich maps to themselves.
_LOW = ("#000000", "#aa0000", "#00aa00", "#aa5500", "#0000aa", "#aa00aa", "#00aaaa", "#aaaaaa")
_HIGH = ("#555555", "#ff5555", "#55ff55", "#ffff55", "#5555ff", "#ff55ff", "#55ffff", "#ffffff")


def _for_sixteen_colors(
    palette: Palette, phases: tuple[int, ...], spare: tuple[int, ...], dp: int, single: int
) -> Palette:
    """Return `palette` for a terminal of sixteen colors, on which the phases' own colors would not stay distinct."""
    sixteen = (*_LOW, *_HIGH)
    shown, others = (tuple(sixteen[number] for number in numbers) for numbers in (phases, spare))
    name = f"{palette.name}/16"
    return replace(palette, name=name, phases=shown, spare=others, dp=sixteen[dp], single=sixteen[single])


FEW: Mapping[str, Palette] = {
    palette.name: palette
    for palette in (
        _for_sixteen_colors(DARK, (5, 15, 11, 9, 14, 3, 6, 12, 7, 10, 8), (2,), 13, 14),
        _for_sixteen_colors(LIGHT, (13, 0, 3, 9, 12, 1, 6, 4, 7, 2, 8), (10,), 5, 4),
        _for_sixteen_colors(COLOR_BLIND, (5, 15, 11, 9, 14, 3, 7, 12, 2, 6, 8), (4,), 13, 14),
    )
}


def palette_of(theme: str, few: bool = False) -> Palette:
    """Return the palette of `theme`, by default the dark one. `few`: for a terminal with sixteen colors."""
    palette = PALETTES.get(theme, DARK)
    return FEW[f"{palette.name}/16"] if few else palette
