"""The place of each panel on a screen of a given size: open, folded to its title, or left out.

A scene names its panels in an `Arrangement`. The short forms are placed first, by importance. Then the most important
panel grows to the rows that its content needs, then the others evenly. Panels that can use more rows share the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    name: str
    min_height: int
    """Rows of its short form, with its frame."""
    growth_weight: int = 0
    """Its weight when the rows that no content needs are shared."""
    can_fold: bool = True
    """Whether it folds to its title if its short form does not fit. If not, it is left out."""


class Arrangement(NamedTuple):
    """The panels of a scene, the most important first, and their places in one, two and three columns."""

    members: tuple[ScenePanel, ...]
    one_column: Tree
    two_columns: Tree
    three_columns: Tree

    def only(self, panels: Sequence[str]) -> Arrangement:
        """The arrangement without the other panels."""
        return self._replace(members=tuple(part for part in self.members if part.name in panels))

    @property
    def panels(self) -> tuple[str, ...]:
        """The panels, the most important first."""
        return tuple(part.name for part in self.members)


def is_wide(width: int) -> bool:
    """Whether panels stand side by side."""
    return width >= _TWO_COLUMN_CELLS


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
    tree = (
        arrangement.three_columns
        if width >= _THREE_COLUMN_CELLS
        else arrangement.two_columns
        if is_wide(width)
        else arrangement.one_column
    )
    return slots | _PlacementBuilder(arrangement, wanted, body).place_stacked(tree, body)


class _RowNeed(NamedTuple):
    """What a part of the screen needs, in rows, and the rank of its most important panel."""

    importance: int
    min_height: int
    main_height: int
    """Rows that the content of its most important panel needs."""
    full_height: int
    growth_weight: int
    can_fold: bool
    column_count: int


class _PlacementBuilder:
    """Divides the screen between the panels of an arrangement."""

    def __init__(self, arrangement: Arrangement, wanted: Mapping[str, int], body: Slot) -> None:
        self._main_height, self._max_height = (
            body.height * share // 100 for share in (MAIN_PANEL_SHARE, _MAX_PANEL_SHARE)
        )
        self._needs = {part.name: self._row_need(rank, part, wanted) for rank, part in enumerate(arrangement.members)}

    def _row_need(self, rank: int, part: ScenePanel, wanted: Mapping[str, int]) -> _RowNeed:
        full = wanted.get(part.name, part.min_height - _FRAME_ROWS) + _FRAME_ROWS
        least = min(part.min_height, max(full, _MIN_OPEN_HEIGHT))
        full = max(min(full, self._max_height), least)
        return _RowNeed(rank, least, min(full, self._main_height), full, part.growth_weight, part.can_fold, 1)

    def _combined_need(self, tree: Tree, across: bool) -> _RowNeed:
        """`across`: whether the members of `tree` stand side by side."""
        if isinstance(tree, str):
            return self._needs[tree]
        inside = sorted(self._combined_need(each, not across) for each in tree)
        full, columns = [one.full_height for one in inside], [one.column_count for one in inside]
        most = max(self._max_height, inside[0].min_height)
        grows = max(one.growth_weight for one in inside)
        if across:
            return _RowNeed(
                inside[0].importance,
                inside[0].min_height,
                inside[0].main_height,
                min(max(full), most),
                grows,
                False,
                sum(columns),
            )
        return _RowNeed(
            inside[0].importance,
            inside[0].min_height,
            inside[0].main_height,
            min(sum(full), most),
            grows,
            False,
            max(columns),
        )

    def _without_missing_panels(self, tree: Tree) -> Tree | None:
        """The tree without panels that the arrangement lacks."""
        if isinstance(tree, str):
            return tree if tree in self._needs else None
        inside = tuple(found for each in tree if (found := self._without_missing_panels(each)) is not None)
        return inside or None

    def place_stacked(self, tree: Tree, room: Slot) -> dict[str, Slot]:
        """Places one below the other. Folded panels share the row of the first one."""
        shown = self._without_missing_panels(tree)
        if isinstance(shown, str):
            return {shown: room}
        trees = shown or ()
        heights = _divide_rows([self._combined_need(each, across=True) for each in trees], room)
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
                slots |= self._place_side_by_side(each, Slot(room.x, y, room.width, height))
                y += height
        return slots

    def _place_side_by_side(self, tree: Tree, room: Slot) -> dict[str, Slot]:
        """Places side by side. Widths are proportional to the number of columns inside."""
        if isinstance(tree, str):
            return {tree: room}
        columns = [self._combined_need(each, across=False).column_count for each in tree]
        slots: dict[str, Slot] = {}
        for index, each in enumerate(tree):
            begin, end = (room.width * sum(columns[:i]) // sum(columns) for i in (index, index + 1))
            slots |= self.place_stacked(
                each if isinstance(each, tuple) else (each,), Slot(begin + room.x, room.y, end - begin, room.height)
            )
        return slots


def _divide_rows(sizes: Sequence[_RowNeed], room: Slot) -> list[int]:
    """Rows of parts that stand one below the other. 0: left out; 1: a title in the row that all titles share."""
    order = sorted(range(len(sizes)), key=lambda index: sizes[index].importance)
    rows = [0] * len(sizes)
    left, titles = room.height, max(room.width // _TITLE_CELLS, 1)
    for index in order[:2]:  # the two most important are open on every screen
        rows[index] = left if len(order) == 1 else _MIN_OPEN_HEIGHT if left >= _MIN_OPEN_HEIGHT else 0
        left -= rows[index]
    fits = True
    for index in order:
        size = sizes[index]
        reserved = 0 if index in (order[0], order[-1]) else 1  # for the titles of those that are not open
        fits = fits and rows[index] + left >= size.min_height + reserved
        if fits:
            left -= size.min_height - rows[index]
            rows[index] = size.min_height
        elif not rows[index] and size.can_fold and rows.count(1) < titles and (left or 1 in rows):
            left -= 1 not in rows
            rows[index] = 1
    if (part := next((index for index in order if rows[index] == 1), None)) is not None and left >= _MIN_PARTIAL_HEIGHT:
        rows[part], left = left + (rows.count(1) == 1), 0  # if no other title is left, their row is free
    open_ones = [index for index in order if rows[index] > 1]
    grown = min(max(sizes[order[0]].main_height - rows[order[0]], 0), left)
    rows[order[0]], left = rows[order[0]] + grown, left - grown
    while left and (small := [index for index in open_ones if rows[index] < sizes[index].full_height]):
        grown = min(small, key=lambda index: rows[index] / sizes[index].full_height)
        rows[grown] += 1
        left -= 1
    growing = [index for index in open_ones if sizes[index].growth_weight] or open_ones[-1:]
    shares = sum(max(sizes[index].growth_weight, 1) for index in growing)
    for index in growing:
        share = max(sizes[index].growth_weight, 1)
        extra = left * share // shares
        rows[index], left, shares = rows[index] + extra, left - extra, shares - share
    return rows
