"""The place of each panel on a screen of a given size: open, folded to its title, or left out.

A scene names its panels in an `Arrangement`. The short forms are placed first, by importance. Then the most important
panel grows to the rows that its content needs, then the others evenly. Panels that can use more rows share the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

MIN_WIDTH, MIN_HEIGHT = 40, 10
_WIDE, _WIDER = 110, 180
"""Widths (cells) from which there are two columns, and three."""
_FRAME = 2
_SMALLEST, _LEAST_PART = 3, 4
"""Rows of a panel with one row inside its frame; fewest rows in which a panel shows a part of its short form."""
_TITLE = 26
"""Cells of a folded panel, which shares a row with others."""
FIRST, _MOST = 40, 50
"""Shares of the screen (per cent): how far the most important panel grows before the others, and how far any does."""

Tree: TypeAlias = "str | tuple[Tree, ...]"
"""A panel, or trees one below the other. At each further level, trees are side by side or stacked in turn."""


class Slot(NamedTuple):
    """A panel's place in cells."""

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

    panel: str
    least: int
    """Rows of its short form, with its frame."""
    grows: int = 0
    """Its weight when the rows that no content needs are shared."""
    titled: bool = True
    """Whether it folds to its title if its short form does not fit. If not, it is left out."""


class Arrangement(NamedTuple):
    """The panels of a scene, the most important first, and their places in one, two and three columns."""

    parts: tuple[ScenePanel, ...]
    one: Tree
    two: Tree
    three: Tree

    def only(self, panels: Sequence[str]) -> Arrangement:
        """The arrangement without the other panels."""
        return self._replace(parts=tuple(part for part in self.parts if part.panel in panels))

    @property
    def panels(self) -> tuple[str, ...]:
        """The panels, the most important first."""
        return tuple(part.panel for part in self.parts)


def is_wide(width: int) -> bool:
    """Whether panels stand side by side."""
    return width >= _WIDE


def place_panels(
    width: int, height: int, arrangement: Arrangement, wanted: Mapping[str, int], zoom: str | None = None
) -> dict[str, Slot]:
    """Places of "status", "footer" and the panels, which fill the screen; only "small" if the screen is too small.

    `wanted`: rows that the content of each panel needs. Panels without a place are left out.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return {"small": Slot(0, 0, width, height)}
    head = 2 if is_wide(width) else 3
    slots = {"status": Slot(0, 0, width, head), "footer": Slot(0, height - 1, width, 1)}
    body = Slot(0, head, width, height - head - 1)
    if zoom is not None:
        return {**slots, zoom: body}
    tree = arrangement.three if width >= _WIDER else arrangement.two if is_wide(width) else arrangement.one
    return slots | _PlacementBuilder(arrangement, wanted, body).place_stacked(tree, body)


class _RowNeed(NamedTuple):
    """What a part of the screen needs, in rows, and the rank of its most important panel."""

    rank: int
    least: int
    first: int
    """Rows that the content of its most important panel needs."""
    full: int
    grows: int
    titled: bool
    columns: int


class _PlacementBuilder:
    """Divides the screen between the panels of an arrangement."""

    def __init__(self, arrangement: Arrangement, wanted: Mapping[str, int], body: Slot) -> None:
        self._first, self._most = (body.height * share // 100 for share in (FIRST, _MOST))
        self._sizes = {part.panel: self._of(rank, part, wanted) for rank, part in enumerate(arrangement.parts)}

    def _of(self, rank: int, part: ScenePanel, wanted: Mapping[str, int]) -> _RowNeed:
        full = wanted.get(part.panel, part.least - _FRAME) + _FRAME
        least = min(part.least, max(full, _SMALLEST))
        full = max(min(full, self._most), least)
        return _RowNeed(rank, least, min(full, self._first), full, part.grows, part.titled, 1)

    def _size(self, tree: Tree, across: bool) -> _RowNeed:
        """`across`: whether the members of `tree` stand side by side."""
        if isinstance(tree, str):
            return self._sizes[tree]
        inside = sorted(self._size(each, not across) for each in tree)
        full, columns = [one.full for one in inside], [one.columns for one in inside]
        most = max(self._most, inside[0].least)
        grows = max(one.grows for one in inside)
        if across:
            return _RowNeed(
                inside[0].rank, inside[0].least, inside[0].first, min(max(full), most), grows, False, sum(columns)
            )
        return _RowNeed(
            inside[0].rank, inside[0].least, inside[0].first, min(sum(full), most), grows, False, max(columns)
        )

    def _shown(self, tree: Tree) -> Tree | None:
        """The tree without panels that the arrangement lacks."""
        if isinstance(tree, str):
            return tree if tree in self._sizes else None
        inside = tuple(found for each in tree if (found := self._shown(each)) is not None)
        return inside or None

    def place_stacked(self, tree: Tree, room: Slot) -> dict[str, Slot]:
        """Places one below the other. Folded panels share the row of the first one."""
        shown = self._shown(tree)
        if isinstance(shown, str):
            return {shown: room}
        trees = shown or ()
        heights = _divide_rows([self._size(each, across=True) for each in trees], room)
        titles = [each for each, height in zip(trees, heights, strict=True) if height == 1 and isinstance(each, str)]
        slots: dict[str, Slot] = {}
        y = room.y
        for each, height in zip(trees, heights, strict=True):
            if height == 1 and isinstance(each, str):
                for index, title in enumerate(titles):
                    begin, end = (room.width * i // len(titles) for i in (index, index + 1))
                    slots[title] = Slot(room.x + begin, y, end - begin, 1)
                y += len(titles) > 0
                titles = []
            elif height:
                slots |= self._row(each, Slot(room.x, y, room.width, height))
                y += height
        return slots

    def _row(self, tree: Tree, room: Slot) -> dict[str, Slot]:
        """Places side by side. Widths are proportional to the number of columns inside."""
        if isinstance(tree, str):
            return {tree: room}
        columns = [self._size(each, across=False).columns for each in tree]
        slots: dict[str, Slot] = {}
        for index, each in enumerate(tree):
            begin, end = (room.width * sum(columns[:i]) // sum(columns) for i in (index, index + 1))
            slots |= self.place_stacked(
                each if isinstance(each, tuple) else (each,), Slot(begin + room.x, room.y, end - begin, room.height)
            )
        return slots


def _divide_rows(sizes: Sequence[_RowNeed], room: Slot) -> list[int]:
    """Rows of parts that stand one below the other. 0: left out; 1: a title in the row that all titles share."""
    order = sorted(range(len(sizes)), key=lambda index: sizes[index].rank)
    rows = [0] * len(sizes)
    left, titles = room.height, max(room.width // _TITLE, 1)
    for index in order[:2]:  # the two most important are open on every screen
        rows[index] = left if len(order) == 1 else _SMALLEST if left >= _SMALLEST else 0
        left -= rows[index]
    fits = True
    for index in order:
        size = sizes[index]
        reserved = 0 if index in (order[0], order[-1]) else 1  # for the titles of those that are not open
        fits = fits and rows[index] + left >= size.least + reserved
        if fits:
            left -= size.least - rows[index]
            rows[index] = size.least
        elif not rows[index] and size.titled and rows.count(1) < titles and (left or 1 in rows):
            left -= 1 not in rows
            rows[index] = 1
    if (part := next((index for index in order if rows[index] == 1), None)) is not None and left >= _LEAST_PART:
        rows[part], left = left + (rows.count(1) == 1), 0  # if no other title is left, their row is free
    open_ones = [index for index in order if rows[index] > 1]
    grown = min(max(sizes[order[0]].first - rows[order[0]], 0), left)
    rows[order[0]], left = rows[order[0]] + grown, left - grown
    while left and (small := [index for index in open_ones if rows[index] < sizes[index].full]):
        grown = min(small, key=lambda index: rows[index] / sizes[index].full)
        rows[grown] += 1
        left -= 1
    growing = [index for index in open_ones if sizes[index].grows] or open_ones[-1:]
    shares = sum(max(sizes[index].grows, 1) for index in growing)
    for index in growing:
        share = max(sizes[index].grows, 1)
        extra = left * share // shares
        rows[index], left, shares = rows[index] + extra, left - extra, shares - share
    return rows
