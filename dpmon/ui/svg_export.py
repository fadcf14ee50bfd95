"""Draws rows as the text of an SVG file. The file is self-contained: it loads no font."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import groupby

from rich.color import Color
from rich.style import Style

from dpmon.text.cells import span_width
from dpmon.text.palettes import palette_of
from dpmon.ui.chart import DOTS
from dpmon.ui.styled_rows import Row
from dpmon.ui.terminal_style import TerminalStyle

_CELL = 8.43
"""Width of a cell in pixels, as in DejaVu Sans Mono at the size below; other fonts are stretched to it."""
_LINE = 16.4
_BASE = 12.6
"""Pixels from a row's upper edge to the baseline of its text."""
_MARGIN = 10.0
_BLOCKS = "▁▂▃▄▅▆▇█"
_BRAILLE = range(0x2800, 0x2900)
"""Drawn as dots: many fonts lack these characters."""
_FONTS = "'DejaVu Sans Mono','Menlo','Consolas',monospace"


def render_svg(rows: Sequence[Row], look: TerminalStyle, title: str = "") -> str:
    """The rows as one SVG image in the colors of `look`; its cells stay on a grid with any font."""
    page = SvgPage(look)
    columns = max((sum(span_width(text) for text, _ in row) for row in rows), default=0)
    return page.image([piece for y, row in enumerate(rows) for piece in page.row(row, y)], (columns, len(rows)), title)


class SvgPage:
    """Draws rows for one image, and collects the style rules they need."""

    def __init__(self, look: TerminalStyle) -> None:
        palette = palette_of(look.theme)
        self.look = look
        self.fore, self.back = palette.text, palette.background
        self.rules: dict[str, str] = {}

    def image(self, body: Sequence[str], size: tuple[int, int], title: str, more_rules: str = "") -> str:
        """The image: `body` on a screen of `size` (columns, rows), with the rules of the rows drawn so far."""
        width, height = 2 * _MARGIN + _CELL * size[0], 2 * _MARGIN + _LINE * size[1]
        rules = "".join(f".{name}{{{rule}}}" for rule, name in self.rules.items())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
            f"<title>{escape(title)}</title>\n"
            f"<style>text{{font:14px {_FONTS};white-space:pre}}rect{{shape-rendering:crispEdges}}{rules}{more_rules}"
            "</style>\n"
            f'<rect width="100%" height="100%" rx="8" fill="{self.back}"/>\n' + "\n".join(body) + "\n</svg>\n"
        )

    def row(self, row: Row, y: int) -> Iterator[str]:
        """The pieces of one row: its backgrounds, its blocks, its text."""
        x = 0
        top = _MARGIN + y * _LINE
        for name, spans in groupby(row, key=lambda span: span[1]):
            text = "".join(part for part, _ in spans)
            style = self.look.style(name)
            fore, back = self._colors(style)
            wide = span_width(text)
            left = _MARGIN + x * _CELL
            if back != self.back:
                yield f'<rect x="{left:.2f}" y="{top:.1f}" width="{wide * _CELL:.2f}" height="{_LINE}" fill="{back}"/>'
            for drawn, group in groupby(text, key=_glyph_renderer):
                part = "".join(group)
                if drawn is not None:
                    yield from drawn(part, _MARGIN + x * _CELL, top, fore)
                elif part.strip():
                    yield self._text(part, x, top, fore, style)
                x += span_width(part)

    def _colors(self, style: Style) -> tuple[str, str]:
        fore, back = _to_hex_color(style.color) or self.fore, _to_hex_color(style.bgcolor) or self.back
        return (back, fore) if style.reverse else (fore, back)

    def _text(self, text: str, x: int, top: float, fore: str, style: Style) -> str:
        skipped = len(text) - len(text.lstrip(" "))
        shown = text.strip(" ")
        rule = (
            f"fill:{fore}" + (";font-weight:700" if style.bold else "") + (";font-style:italic" if style.italic else "")
        )
        lines = [word for word, on in (("underline", style.underline), ("line-through", style.strike)) if on]
        rule += f";text-decoration:{' '.join(lines)}" if lines else ""
        rule += ";opacity:.65" if style.dim else ""
        name = self.rules.setdefault(rule, f"s{len(self.rules)}")
        return (
            f'<text class="{name}" xml:space="preserve" x="{_MARGIN + (x + skipped) * _CELL:.2f}"'
            f' y="{top + _BASE:.1f}" textLength="{span_width(shown) * _CELL:.2f}" lengthAdjust="spacingAndGlyphs">'
            f"{escape(shown, quote=False)}</text>"
        )


def _glyph_renderer(char: str) -> Callable[[str, float, float, str], Iterator[str]] | None:
    """How a character is drawn; None: as text."""
    return _blocks if char in _BLOCKS else _dots if ord(char) in _BRAILLE else None


def _blocks(text: str, left: float, top: float, fore: str) -> Iterator[str]:
    for char, group in groupby(text):
        wide = _CELL * len(list(group))
        high = _LINE * (_BLOCKS.index(char) + 1) / 8
        yield (
            f'<rect x="{left:.2f}" y="{top + _LINE - high:.2f}" width="{wide:.2f}" height="{high:.2f}" fill="{fore}"/>'
        )
        left += wide


def _dots(text: str, left: float, top: float, fore: str) -> Iterator[str]:
    """Dots in two columns and four rows of each cell: one path of short lines with round ends."""
    places = [
        f"M{left + (cell + x / 2 + 0.25) * _CELL:.1f} {top + (y / 4 + 0.125) * _LINE:.1f}h.01"
        for cell, char in enumerate(text)
        for x, column in enumerate(DOTS)
        for y, dot in enumerate(column)
        if ord(char) & dot
    ]
    yield f'<path d="{"".join(places)}" stroke="{fore}" stroke-width="2.4" stroke-linecap="round"/>'


def _to_hex_color(color: Color | None) -> str | None:
    if color is None or color.is_default:
        return None
    return color.get_truecolor().hex
