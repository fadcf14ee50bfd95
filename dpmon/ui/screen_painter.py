"""Draws the whole screen as rows, place by place, without side effects; widgets and tests both use it."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.text.cells import wrap_text
from dpmon.ui.footer import render_footer, render_timeline
from dpmon.ui.panel_layout import MAIN_PANEL_SHARE, MIN_HEIGHT, MIN_WIDTH, Slot, place_panels
from dpmon.ui.panels import panel_batch, panel_devices, panel_output, panel_progress, panel_ranks, panel_stall
from dpmon.ui.panels.panel_output import OutputView
from dpmon.ui.panels.panel_status import is_reply_cut, render_panel, reply_message
from dpmon.ui.scenes import choose_scene
from dpmon.ui.screen_data import BEFORE_STALL, PANELS, ScreenData
from dpmon.ui.styled_rows import Row, crop_row, dim_row, draw_frame, fit_row, plain_text, row_width
from dpmon.ui.terminal_style import TerminalStyle

_MAX_POPUP_CELLS = 84
TALL_SCREEN_ROWS = 50
"""From this many rows on, panel 2 has room for the ranks over time, and panel 6 for the longest steps."""
_POPUP_SHARE = 2
"""The note covers at most one in this many rows of the screen."""


def panel_slots(screen: ScreenData, width: int, height: int) -> dict[str, Slot]:
    """Return the current place of each panel."""
    timeline_rows = 1 if screen.cursor.is_playback and height > MIN_HEIGHT else 0
    scene, is_tall = choose_scene(screen), height >= TALL_SCREEN_ROWS
    wanted_rows = {
        "devices": panel_devices.preferred_height(screen),
        "replicas": scene.second_panel.preferred_height(screen, height * MAIN_PANEL_SHARE // 100 - 5 if is_tall else 0)
        + 1,
        "batch": panel_batch.preferred_height(screen),
        "compare": scene.fourth_panel.preferred_height(screen),
        "progress": panel_progress.preferred_height(screen, is_tall),
    }
    slots = place_panels(width, height - timeline_rows, scene.arrangement, wanted_rows, screen.view.zoom)
    if timeline_rows:
        slots["timeline"] = Slot(0, height - 1, width, 1)
    return slots


def _pinned_row_count(panel: str, screen: ScreenData) -> int:
    """Return how many rows of a panel do not scroll: its column headings, if they are the first row."""
    return int(
        panel == "replicas"
        and choose_scene(screen).second_panel is not panel_stall
        and not panel_ranks.shows_map(screen)
    )


def paint_screen(
    screen: ScreenData, output: OutputView, slots: Mapping[str, Slot], style: TerminalStyle, *, with_popup: bool = True
) -> list[Row]:
    """Return the rows of the whole screen.

    `with_popup`: show a truncated message in full above the footer.
    """
    rows: list[Row] = [[] for _ in range(max(slot.y + slot.height for slot in slots.values()))]
    for panel, slot in sorted(slots.items(), key=lambda item: item[1].x):
        for y, row in enumerate(paint_panel(panel, screen, output, slot, style), slot.y):
            rows[y] += row
    footer_slot = slots.get("footer")
    if footer_slot is not None and with_popup:
        popup = message_popup(screen, footer_slot.width, footer_slot.y)
        for y, row in enumerate(popup, footer_slot.y - len(popup)):
            rows[y] = [*row, *crop_row(rows[y], row_width(row), footer_slot.width)]
    return rows


def paint_panel(panel: str, screen: ScreenData, output: OutputView, slot: Slot, style: TerminalStyle) -> list[Row]:
    """Return the rows of a panel, truncated or filled to its size."""
    if panel == "small":
        size_row: Row = [(f"needs {MIN_WIDTH}x{MIN_HEIGHT}", "wait")]
        rows = [*render_panel(screen, slot.width, 3)[: slot.height - 1], size_row, *[[]] * slot.height]
        return [fit_row(row, slot.width) for row in rows[: slot.height]]
    if panel == "status":
        return render_panel(screen, slot.width, slot.height)
    if panel == "timeline":
        return render_timeline(screen.cursor, slot.width)
    if panel == "footer":
        return render_footer(screen, slot.width)
    title, corner, rows = _panel_content(panel, screen, output, slot, style)
    return draw_frame(
        title,
        corner,
        rows,
        slot.width,
        slot.height,
        focused=screen.view.focus == panel,
        first_row=screen.view.first_rows.get(panel, 0),
        pinned_rows=_pinned_row_count(panel, screen),
    )


def max_scroll(panel: str, screen: ScreenData, slot: Slot, style: TerminalStyle) -> int:
    """Return how many rows a panel other than the output can scroll in its place."""
    inner_height = slot.height - 2
    if slot.is_folded or panel not in PANELS or panel == "output" or inner_height <= _pinned_row_count(panel, screen):
        return 0
    _, _, rows = _panel_content(panel, screen, OutputView(), slot, style)
    return max(len(rows) - inner_height, 0)


def _panel_content(
    panel: str, screen: ScreenData, output: OutputView, slot: Slot, style: TerminalStyle
) -> tuple[Row, Row, list[Row]]:
    width, height = slot.width - 4, max(slot.height - 2, 0)
    is_zoomed = screen.view.zoom == panel
    if panel == "devices":
        title, corner = panel_devices.panel_title(screen, slot.is_folded)
        render_devices = panel_devices.render_full_screen if is_zoomed else panel_devices.render_panel
        return title, corner, render_devices(screen, width, height, style)
    if panel == "replicas":
        second_panel = choose_scene(screen).second_panel
        title, corner = second_panel.panel_title(screen)
        render_ranks = second_panel.render_full_screen if is_zoomed else second_panel.render_panel
        return title, corner, render_ranks(screen, width, height, style)
    if panel == "batch":
        title, corner = panel_batch.panel_title(screen, slot.width)
        return title, corner, panel_batch.render_panel(screen, width, height, style)
    if panel == "compare":
        fourth_panel, stale = choose_scene(screen).fourth_panel, choose_scene(screen).is_stale
        title, corner = fourth_panel.panel_title(screen, slot.is_folded)
        rows = fourth_panel.render_panel(screen, width, height, style, advice=not stale)
        return (title, [BEFORE_STALL], list(map(dim_row, rows))) if stale else (title, corner, rows)
    if panel == "progress":
        title, corner = panel_progress.panel_title(screen, slot.is_folded)
        return title, corner, panel_progress.render_panel(screen, width, height, style)
    title, corner = panel_output.panel_title(output, screen, slot.width)
    if screen.view.search:
        title = [*title, (" · find ", "dim"), (screen.view.search, "wait")]
    lines = output.visible_rows(height)
    return title, corner, [panel_output.shorten_traceback_path(line, width) for line in lines]


def message_popup(screen: ScreenData, width: int, rows_above: int) -> list[Row]:
    """Return a framed note with the full text of a message that was truncated; empty if none was."""
    if not is_reply_cut(screen, width):
        return []
    popup_width = min(width, _MAX_POPUP_CELLS)
    max_lines = max(rows_above // _POPUP_SHARE - 2, 1)
    lines = wrap_text(plain_text(reply_message(screen)), popup_width - 4, max_lines)
    rows: list[Row] = [[(line, "")] for line in lines]
    return draw_frame([("in full", "wait")], [], rows, popup_width, len(rows) + 2, focused=True)
