"""The place of each panel on a screen of a given size: open, folded to its title, or left out.

A scene names its panels in an `Arrangement`. The short forms are placed first, by importance. Then the most important
panel grows to the rows that its content needs, then the others evenly. Panels that can use more rows share the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

MIN_WIDTH, MIN_HEIGHT = 40, 10
_TWO_COLUMN_CELLS, _THREE_COLUMN_CELLS = 110, 180
"""Widths (cells) from which there are two columns, and three."""
_FRAME_ROWS = 2
_MIN_OPEN_HEIGHT, _MIN_PARTIAL_HEIGHT = 3, 4
"""Rows of a panel with one row inside its frame; fewest rows in which a panel shows a part of its short form."""
_TITLE_CELLS = 26
"""Cells of a folded panel, which shares a row with others."""
MAIN_PANEL_SHARE, _MAX_PANEL_SHARE = 40, 50
"""Shares of the screen (per cent): how far the most important panel grows before the others, and how far any does."""

Tree: TypeAlias = "str | tuple[Tree, ...]"
"""A panel, or trees one below the other. At each further level, trees are side by side or stacked in turn."""


class Slot(NamedTuple):
    """The place of a panel, in cells."""

    x: int
    y: int
    width: int
    height: int

    @property
    def is_folded(self) -> bool:
        """Whether the panel is one row with its title and main number."""
        return self.height == 1


class ScenePanel(NamedTuple):
    """A panel of a scene."""

    name: str
    min_height: int
    """Rows of its short form, with its frame."""
    grows: bool = False
    """Whether it shares the rows that no content needs."""


class Arrangement(NamedTuple):
    """The panels of a scene, the most important first, and their places in one, two and three columns."""

    members: tuple[ScenePanel, ...]
    one_column: Tree
    two_columns: Tree
    three_columns: Tree

    def only(self, panels: Sequence[str]) -> Arrangement:
        """Return the arrangement without the panels that are not in `panels`."""
        return self._replace(members=tuple(member for member in self.members if member.name in panels))

    @property
    def panels(self) -> tuple[str, ...]:
        """The panels, the most important first."""
        return tuple(member.name for member in self.members)


def is_wide(width: int) -> bool:
    """Return whether panels stand side by side."""
    return width >= _TWO_COLUMN_CELLS


def place_panels(
    width: int, height: int, arrangement: Arrangement, wanted_rows: Mapping[str, int], zoomed_panel: str | None = None
) -> dict[str, Slot]:
    """Return the places of "status", "footer" and the panels, which fill the screen; only "small" if it is too small.

    `wanted_rows`: rows that the content of each panel needs. Panels without a place are left out.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return {"small": Slot(0, 0, width, height)}
    header_rows = 2 if is_wide(width) else 3
    slots = {"status": Slot(0, 0, width, header_rows), "footer": Slot(0, height - 1, width, 1)}
    body = Slot(0, header_rows, width, height - header_rows - 1)
    if zoomed_panel is not None:
        return {**slots, zoomed_panel: body}
    if width >= _THREE_COLUMN_CELLS:
        tree = arrangement.three_columns
    else:
        tree = arrangement.two_columns if is_wide(width) else arrangement.one_column
    max_height = body.height * _MAX_PANEL_SHARE // 100
    panels = {
        member.name: _panel_part(importance, member, wanted_rows, body.height)
        for importance, member in enumerate(arrangement.members)
    }
    whole = _build_part(tree, panels, max_height, is_stack=True)
    return slots if whole is None else slots | _place_stacked(whole.parts, body)


class _Part(NamedTuple):
    """A part of the screen: a panel, or several parts. Its rows are first of all for its most important panel."""

    importance: int
    min_height: int
    main_height: int
    """Rows that it gets before other parts grow."""
    full_height: int
    """Rows that its content needs."""
    grows: bool
    column_count: int = 1
    panel: str = ""
    """The panel, which folds to its title if its short form does not fit; "" if the part is no panel."""
    parts: Sequence[_Part] = ()


def _panel_part(importance: int, member: ScenePanel, wanted_rows: Mapping[str, int], body_height: int) -> _Part:
    full_height = wanted_rows.get(member.name, member.min_height - _FRAME_ROWS) + _FRAME_ROWS
    min_height = min(member.min_height, max(full_height, _MIN_OPEN_HEIGHT))
    full_height = max(min(full_height, body_height * _MAX_PANEL_SHARE // 100), min_height)
    main_height = min(full_height, body_height * MAIN_PANEL_SHARE // 100)
    return _Part(importance, min_height, main_height, full_height, member.grows, panel=member.name)


def _build_part(tree: Tree, panels: Mapping[str, _Part], max_height: int, is_stack: bool) -> _Part | None:
    """Return the part of a tree, without the panels that the arrangement lacks; None if none is left.

    `is_stack`: whether its members stand one below the other.
    """
    if isinstance(tree, str):
        return panels.get(tree)
    members = [_build_part(subtree, panels, max_height, not is_stack) for subtree in tree]
    parts = [member for member in members if member is not None]
    if not parts:
        return None
    most_important = min(parts)
    heights, columns = [part.full_height for part in parts], [part.column_count for part in parts]
    full_height = min(sum(heights) if is_stack else max(heights), max(max_height, most_important.min_height))
    return most_important._replace(
        full_height=full_height,
        grows=any(part.grows for part in parts),
        column_count=max(columns) if is_stack else sum(columns),
        panel="",
        parts=parts,
    )


def _place_stacked(parts: Sequence[_Part], area: Slot) -> dict[str, Slot]:
    """Return places one below the other. Folded panels share the row of the first one."""
    heights = _divide_rows(parts, area)
    titles = [part for part, height in zip(parts, heights, strict=True) if height == 1 and part.panel]
    slots: dict[str, Slot] = {}
    y = area.y
    for part, height in zip(parts, heights, strict=True):
        row = area._replace(y=y, height=height)
        if part not in titles:
            slots |= _place_side_by_side([part] if part.panel else part.parts, row) if height else {}
            y += height
        elif part is titles[0]:
            slots |= _place_side_by_side(titles, row)
            y += 1
    return slots


def _place_side_by_side(parts: Sequence[_Part], area: Slot) -> dict[str, Slot]:
    """Return places side by side. Widths are proportional to the number of columns inside."""
    columns = [0, *accumulate(part.column_count for part in parts)]
    edges = [area.x + area.width * column // columns[-1] for column in columns]
    slots: dict[str, Slot] = {}
    for part, (start, end) in zip(parts, pairwise(edges), strict=True):
        place = area._replace(x=start, width=end - start)
        slots |= {part.panel: place} if part.panel else _place_stacked(part.parts, place)
    return slots


def _divide_rows(parts: Sequence[_Part], area: Slot) -> list[int]:
    """Return the rows of parts that stand one below the other.

    0: left out. 1: a title in the row that all titles share.
    """
    order = sorted(range(len(parts)), key=lambda index: parts[index].importance)
    main_part, rows, free_rows = order[0], [0] * len(parts), area.height
    if len(parts) == 1:
        return [free_rows]
    for index in order[:2]:  # the two most important are open on every screen
        if free_rows >= _MIN_OPEN_HEIGHT:
            rows[index] = _MIN_OPEN_HEIGHT
            free_rows -= _MIN_OPEN_HEIGHT
    max_titles = max(area.width // _TITLE_CELLS, 1)
    fits = True
    for index in order:
        part = parts[index]
        reserved = 0 if index in (order[0], order[-1]) else 1  # for the titles of those that are not open
        fits = fits and rows[index] + free_rows >= part.min_height + reserved
        if fits:
            free_rows -= part.min_height - rows[index]
            rows[index] = part.min_height
        elif not rows[index] and part.panel and rows.count(1) < max_titles and (free_rows or 1 in rows):
            free_rows -= 1 not in rows
            rows[index] = 1
    main_is_complete = rows[main_part] >= parts[main_part].min_height  # else the free rows are for its values
    if 1 in rows and free_rows >= _MIN_PARTIAL_HEIGHT and main_is_complete:
        first_title = next(index for index in order if rows[index] == 1)
        is_only_title = rows.count(1) == 1  # without other titles, their common row is free
        rows[first_title], free_rows = free_rows + is_only_title, 0
    open_parts = [index for index in order if rows[index] > 1]
    extra = min(max(parts[main_part].main_height - rows[main_part], 0), free_rows)
    rows[main_part] += extra
    free_rows -= extra
    while free_rows and (below_full := [index for index in open_parts if rows[index] < parts[index].full_height]):
        rows[min(below_full, key=lambda index: rows[index] / parts[index].full_height)] += 1
        free_rows -= 1
    growing_parts = [index for index in open_parts if parts[index].grows] or open_parts[-1:]
    for count, index in enumerate(growing_parts):
        extra = free_rows // (len(growing_parts) - count)
        rows[index] += extra
        free_rows -= extra
    return rows
