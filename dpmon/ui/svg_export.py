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

_CELL_PX = 8.43
"""Width of a cell in pixels, as in DejaVu Sans Mono at the size below; other fonts are stretched to it."""
_ROW_PX = 16.4
_BASELINE_PX = 12.6
"""Pixels from a row's upper edge to the baseline of its text."""
_MARGIN_PX = 10.0
_BLOCKS = "▁▂▃▄▅▆▇█"
_BRAILLE = range(0x2800, 0x2900)
"""Drawn as dots: many fonts lack these characters."""
_FONTS = "'DejaVu Sans Mono','Menlo','Consolas',monospace"


def render_svg(rows: Sequence[Row], style: TerminalStyle, title: str = "") -> str:
    """Return the rows as one SVG image in the colors of `style`; its cells stay on a grid with any font."""
    page = SvgPage(style)
    columns = max((sum(span_width(text) for text, _ in row) for row in rows), default=0)
    return page.render_image(
        [piece for y, row in enumerate(rows) for piece in page.render_row(row, y)], (columns, len(rows)), title
    )


class SvgPage:
    """A page of one image; collects the style rules of the rows drawn on it."""

    def __init__(self, style: TerminalStyle) -> None:
        palette = palette_of(style.theme)
        self.style = style
        self.foreground, self.background = palette.text, palette.background
        self.rules: dict[str, str] = {}

    def render_image(self, body: Sequence[str], size: tuple[int, int], title: str, more_rules: str = "") -> str:
        """Return the image: `body` on a screen of `size` (columns, rows), with the rules of the rows drawn so far."""
        width, height = 2 * _MARGIN_PX + _CELL_PX * size[0], 2 * _MARGIN_PX + _ROW_PX * size[1]
        rules = "".join(f".{name}{{{rule}}}" for rule, name in self.rules.items())
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" role="img">\n'
            f"<title>{escape(title)}</title>\n"
            f"<style>text{{font:14px {_FONTS};white-space:pre}}rect{{shape-rendering:crispEdges}}{rules}{more_rules}"
            "</style>\n"
            f'<rect width="100%" height="100%" rx="8" fill="{self.background}"/>\n' + "\n".join(body) + "\n</svg>\n"
        )

    def render_row(self, row: Row, y: int) -> Iterator[str]:
        """Yield the elements of one row: its backgrounds, its blocks, its text."""
        x = 0
        top = _MARGIN_PX + y * _ROW_PX
        for name, spans in groupby(row, key=lambda span: span[1]):
            text = "".join(part for part, _ in spans)
            style = self.style.rich_style(name)
            foreground, background = self._colors(style)
            cell_count = span_width(text)
            left = _MARGIN_PX + x * _CELL_PX
            if background != self.background:
                width = cell_count * _CELL_PX
                yield f'<rect x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{_ROW_PX}" fill="{background}"/>'
            for draw_glyphs, group in groupby(text, key=_glyph_renderer):
                part = "".join(group)
                if draw_glyphs is not None:
                    yield from draw_glyphs(part, _MARGIN_PX + x * _CELL_PX, top, foreground)
                elif part.strip():
                    yield self._render_text(part, x, top, foreground, style)
                x += span_width(part)

    def _colors(self, style: Style) -> tuple[str, str]:
        foreground = _to_hex_color(style.color) or self.foreground
        background = _to_hex_color(style.bgcolor) or self.background
        return (background, foreground) if style.reverse else (foreground, background)

    def _render_text(self, text: str, x: int, top: float, foreground: str, style: Style) -> str:
        leading_blanks = len(text) - len(text.lstrip(" "))
        visible_text = text.strip(" ")
        lines = [word for word, is_on in (("underline", style.underline), ("line-through", style.strike)) if is_on]
        rule = f"fill:{foreground}"
        if style.bold:
            rule += ";font-weight:700"
        if style.italic:
            rule += ";font-style:italic"
        if lines:
            rule += f";text-decoration:{' '.join(lines)}"
        if style.dim:
            rule += ";opacity:.65"
        name = self.rules.setdefault(rule, f"s{len(self.rules)}")
        return (
            f'<text class="{name}" xml:space="preserve" x="{_MARGIN_PX + (x + leading_blanks) * _CELL_PX:.2f}"'
            f' y="{top + _BASELINE_PX:.1f}" textLength="{span_width(visible_text) * _CELL_PX:.2f}"'
            ' lengthAdjust="spacingAndGlyphs">'
            f"{escape(visible_text, quote=False)}</text>"
        )


def _glyph_renderer(char: str) -> Callable[[str, float, float, str], Iterator[str]] | None:
    """Return the function that draws a character; None if it is drawn as text."""
    if char in _BLOCKS:
        return _draw_blocks
    return _draw_dots if ord(char) in _BRAILLE else None


def _draw_blocks(text: str, left: float, top: float, foreground: str) -> Iterator[str]:
    for char, group in groupby(text):
        width_px = _CELL_PX * len(list(group))
        height_px = _ROW_PX * (_BLOCKS.index(char) + 1) / 8
        y = top + _ROW_PX - height_px
        yield f'<rect x="{left:.2f}" y="{y:.2f}" width="{width_px:.2f}" height="{height_px:.2f}" fill="{foreground}"/>'
        left += width_px


def _draw_dots(text: str, left: float, top: float, foreground: str) -> Iterator[str]:
    """Yield braille dots, in two columns and four rows of each cell: one path of short lines with round ends."""
    dot_paths = [
        f"M{left + (cell + x / 2 + 0.25) * _CELL_PX:.1f} {top + (y / 4 + 0.125) * _ROW_PX:.1f}h.01"
        for cell, char in enumerate(text)
        for x, column in enumerate(DOTS)
        for y, dot in enumerate(column)
        if ord(char) & dot
    ]
    yield f'<path d="{"".join(dot_paths)}" stroke="{foreground}" stroke-width="2.4" stroke-linecap="round"/>'


def _to_hex_color(color: Color | None) -> str | None:
    if color is None or color.is_default:
        return None
    return color.get_truecolor().hex
