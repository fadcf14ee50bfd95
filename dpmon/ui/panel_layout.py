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
    return slots | _PlacementBuilder(arrangement, wanted_rows, body).place_stacked(tree, body)


class _RowNeed(NamedTuple):
    """The rows that a part of the screen needs, and the importance of its most important panel."""

    importance: int
    min_height: int
    main_height: int
    """Rows that the content of its most important panel needs."""
    full_height: int
    growth_weight: int
    can_fold: bool
    column_count: int


class _PlacementBuilder:
    """The division of the screen between the panels of an arrangement."""

    def __init__(self, arrangement: Arrangement, wanted_rows: Mapping[str, int], body: Slot) -> None:
        self._main_height, self._max_height = (
            body.height * share // 100 for share in (MAIN_PANEL_SHARE, _MAX_PANEL_SHARE)
        )
        self._needs = {
            member.name: self._row_need(importance, member, wanted_rows)
            for importance, member in enumerate(arrangement.members)
        }

    def _row_need(self, importance: int, member: ScenePanel, wanted_rows: Mapping[str, int]) -> _RowNeed:
        full_height = wanted_rows.get(member.name, member.min_height - _FRAME_ROWS) + _FRAME_ROWS
        min_height = min(member.min_height, max(full_height, _MIN_OPEN_HEIGHT))
        full_height = max(min(full_height, self._max_height), min_height)
        return _RowNeed(
            importance,
            min_height,
            min(full_height, self._main_height),
            full_height,
            member.growth_weight,
            member.can_fold,
            1,
        )

    def _combined_need(self, tree: Tree, side_by_side: bool) -> _RowNeed:
        """Return what all panels of a tree need together. `side_by_side`: whether its members stand side by side."""
        if isinstance(tree, str):
            return self._needs[tree]
        needs = [self._combined_need(subtree, not side_by_side) for subtree in tree]
        most_important = min(needs)
        full_heights, column_counts = [need.full_height for need in needs], [need.column_count for need in needs]
        full_height = max(full_heights) if side_by_side else sum(full_heights)
        return most_important._replace(
            full_height=min(full_height, max(self._max_height, most_important.min_height)),
            growth_weight=max(need.growth_weight for need in needs),
            can_fold=False,
            column_count=sum(column_counts) if side_by_side else max(column_counts),
        )

    def _without_missing_panels(self, tree: Tree) -> Tree | None:
        """Return the tree without the panels that the arrangement lacks; None if nothing is left."""
        if isinstance(tree, str):
            return tree if tree in self._needs else None
        kept = tuple(
            kept_subtree for subtree in tree if (kept_subtree := self._without_missing_panels(subtree)) is not None
        )
        return kept or None

    def place_stacked(self, tree: Tree, area: Slot) -> dict[str, Slot]:
        """Return places one below the other. Folded panels share the row of the first one."""
        kept = self._without_missing_panels(tree)
        if isinstance(kept, str):
            return {kept: area}
        trees = kept or ()
        heights = _divide_rows([self._combined_need(subtree, side_by_side=True) for subtree in trees], area)
        titles = [
            subtree for subtree, height in zip(trees, heights, strict=True) if height == 1 and isinstance(subtree, str)
        ]
        slots: dict[str, Slot] = {}
        y = area.y
        for subtree, height in zip(trees, heights, strict=True):
            if height == 1 and isinstance(subtree, str):
                for index, title in enumerate(titles):
                    start, end = (area.width * i // len(titles) for i in (index, index + 1))
                    slots[title] = Slot(area.x + start, y, end - start, 1)
                y += len(titles) > 0
                titles = []
            elif height:
                slots |= self._place_side_by_side(subtree, Slot(area.x, y, area.width, height))
                y += height
        return slots

    def _place_side_by_side(self, tree: Tree, area: Slot) -> dict[str, Slot]:
        """Return places side by side. Widths are proportional to the number of columns inside."""
        if isinstance(tree, str):
            return {tree: area}
        columns = [self._combined_need(subtree, side_by_side=False).column_count for subtree in tree]
        slots: dict[str, Slot] = {}
        for index, subtree in enumerate(tree):
            start, end = (area.width * sum(columns[:i]) // sum(columns) for i in (index, index + 1))
            slots |= self.place_stacked(
                subtree if isinstance(subtree, tuple) else (subtree,),
                Slot(start + area.x, area.y, end - start, area.height),
            )
        return slots


def _divide_rows(needs: Sequence[_RowNeed], area: Slot) -> list[int]:
    """Return the rows of parts that stand one below the other.

    0: left out. 1: a title in the row that all titles share.
    """
    order = sorted(range(len(needs)), key=lambda index: needs[index].importance)
    rows = [0] * len(needs)
    free_rows, max_titles = area.height, max(area.width // _TITLE_CELLS, 1)
    for index in order[:2]:  # the two most important are open on every screen
        if len(order) == 1:
            rows[index] = free_rows
        elif free_rows >= _MIN_OPEN_HEIGHT:
            rows[index] = _MIN_OPEN_HEIGHT
        free_rows -= rows[index]
    fits = True
    for index in order:
        need = needs[index]
        reserved = 0 if index in (order[0], order[-1]) else 1  # for the titles of those that are not open
        fits = fits and rows[index] + free_rows >= need.min_height + reserved
        if fits:
            free_rows -= need.min_height - rows[index]
            rows[index] = need.min_height
        elif not rows[index] and need.can_fold and rows.count(1) < max_titles and (free_rows or 1 in rows):
            free_rows -= 1 not in rows
            rows[index] = 1
    first_title = next((index for index in order if rows[index] == 1), None)
    main_part = order[0]
    main_is_complete = rows[main_part] >= needs[main_part].min_height  # else the free rows are for its values
    if first_title is not None and free_rows >= _MIN_PARTIAL_HEIGHT and main_is_complete:
        is_only_title = rows.count(1) == 1  # without other titles, their common row is free
        rows[first_title], free_rows = free_rows + is_only_title, 0
    open_parts = [index for index in order if rows[index] > 1]
    extra = min(max(needs[main_part].main_height - rows[main_part], 0), free_rows)
    rows[main_part] += extra
    free_rows -= extra
    while free_rows and (parts_below_full := [index for index in open_parts if rows[index] < needs[index].full_height]):
        emptiest = min(parts_below_full, key=lambda index: rows[index] / needs[index].full_height)
        rows[emptiest] += 1
        free_rows -= 1
    growing_parts = [index for index in open_parts if needs[index].growth_weight] or open_parts[-1:]
    shares = sum(max(needs[index].growth_weight, 1) for index in growing_parts)
    for index in growing_parts:
        share = max(needs[index].growth_weight, 1)
        extra = free_rows * share // shares
        rows[index], free_rows, shares = rows[index] + extra, free_rows - extra, shares - share
    return rows
