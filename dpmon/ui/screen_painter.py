"""Draws the whole screen as rows, place by place, without side effects; widgets and tests both use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpmon.model.run_snapshot import MOST_RANKS
from dpmon.text.cells import wrap_text
from dpmon.ui.footer import render_footer, render_timeline
from dpmon.ui.panel_layout import FIRST, MIN_HEIGHT, MIN_WIDTH, Slot, place_panels
from dpmon.ui.panels import panel_batch, panel_devices, panel_output, panel_progress, panel_ranks, panel_stall
from dpmon.ui.panels.panel_output import OutputView, highlight_matches
from dpmon.ui.panels.panel_status import is_reply_cut, render_panel, reply_message
from dpmon.ui.scenes import choose_scene
from dpmon.ui.screen_data import BEFORE_STALL, PANELS, ScreenData
from dpmon.ui.styled_rows import Row, crop_row, dim_row, draw_frame, fit_row, plain_text, row_width
from dpmon.ui.terminal_style import TerminalStyle

_WIDEST = 84
TALL = 50
"""From this many rows on, panel 2 has room for the ranks over time, and panel 6 for the longest steps."""
_SHARE = 2
"""The note covers at most one in this many rows of the screen."""


def places(facts: ScreenData, width: int, height: int) -> dict[str, Slot]:
    """The current place of each panel."""
    line = 1 if facts.playing is not None and height > MIN_HEIGHT else 0
    scene, tall = choose_scene(facts), height >= TALL
    wanted = {
        "devices": panel_devices.preferred_height(facts),
        "replicas": scene.second.preferred_height(facts, height * FIRST // 100 - 5 if tall else 0) + 1,
        "batch": panel_batch.preferred_height(facts),
        "compare": scene.fourth.preferred_height(facts),
        "progress": panel_progress.preferred_height(facts, tall),
    }
    slots = place_panels(width, height - line, scene.arrangement, wanted, facts.view.zoom)
    if line:
        slots["timeline"] = Slot(0, height - 1, width, 1)
    return slots


def _pinned(panel: str, facts: ScreenData) -> int:
    """Number of rows of a panel that do not scroll: its column headings, if they are the first row."""
    return int(
        panel == "replicas" and choose_scene(facts).second is not panel_stall and not panel_ranks.shows_map(facts)
    )


def paint_panels(
    facts: ScreenData, output: OutputView, slots: Mapping[str, Slot], look: TerminalStyle, *, noted: bool = True
) -> dict[str, list[Row]]:
    """The rows of each place, cut or filled to its size; `noted`: with a note if a message was cut."""
    painted = {
        panel: _fit_to_slot(_paint_panel(panel, facts, output, slot, look), slot, look) for panel, slot in slots.items()
    }
    foot = slots.get("footer")
    if foot is not None and noted:
        rows = message_popup(facts, foot.width, foot.y, look)
        overlay_rows(painted, slots, rows, foot.y - len(rows))
    return painted


def _fit_to_slot(rows: list[Row], slot: Slot, look: TerminalStyle) -> list[Row]:
    rows = rows[: slot.height] + [[]] * (slot.height - len(rows))
    return [fit_row(row, slot.width, look.glyphs.more) for row in rows]


def _paint_panel(panel: str, facts: ScreenData, output: OutputView, slot: Slot, look: TerminalStyle) -> list[Row]:
    if panel == "small":
        return [
            *render_panel(facts, slot.width, 3, look)[: slot.height - 1],
            [(f"needs {MIN_WIDTH}x{MIN_HEIGHT}", "wait")],
        ]
    if panel == "status":
        return render_panel(facts, slot.width, slot.height, look)
    if panel == "timeline" and facts.playing is not None:
        return render_timeline(facts.playing, slot.width, look)
    if panel == "footer":
        return render_footer(facts, slot.width, look)
    title, corner, rows = _content(panel, facts, output, slot, look)
    return draw_frame(
        title,
        corner,
        rows,
        slot.width,
        slot.height,
        look.glyphs,
        focused=facts.view.focus == panel,
        first=facts.view.scrolled.get(panel, 0),
        pinned=_pinned(panel, facts),
    )


def max_visible_ranks(facts: ScreenData, slots: Mapping[str, Slot]) -> int:
    """The largest number of ranks that a picture can show in these slots."""
    table = slots["replicas"].height if "replicas" in slots and panel_ranks.is_shown(facts) else 0
    last_step = slots["batch"].height - panel_batch.ROWS_WITHOUT_RANKS if "batch" in slots else 0
    return min(max(table, last_step), MOST_RANKS)


def shows_time(facts: ScreenData, slots: Mapping[str, Slot]) -> bool:
    """Whether panel 2 has room in these slots for slow ranks over time, although the screen is not tall."""
    slot = slots.get("replicas")
    return slot is not None and panel_ranks.shows_time(facts, slot.width - 4, slot.height - 2)


def max_scroll(panel: str, facts: ScreenData, slot: Slot, look: TerminalStyle) -> int:
    """How many rows a panel other than the output can scroll in its place."""
    inside = slot.height - 2
    if slot.is_folded or panel not in PANELS or panel == "output" or inside <= _pinned(panel, facts):
        return 0
    return max(len(_content(panel, facts, OutputView(), slot, look)[2]) - inside, 0)


def _content(
    panel: str, facts: ScreenData, output: OutputView, slot: Slot, look: TerminalStyle
) -> tuple[Row, Row, list[Row]]:
    width, height = slot.width - 4, max(slot.height - 2, 0)
    zoomed = facts.view.zoom == panel
    if panel == "devices":
        title, corner = panel_devices.panel_title(facts, look, slot.is_folded)
        drawn = panel_devices.render_full_screen if zoomed else panel_devices.render_panel
        return title, corner, drawn(facts, width, height, look)
    if panel == "replicas":
        second = choose_scene(facts).second
        title, corner = second.panel_title(facts, look)
        picture = second.render_full_screen if zoomed else second.render_panel
        return title, corner, picture(facts, width, height, look)
    if panel == "batch":
        title, corner = panel_batch.panel_title(facts, look, slot.width)
        return title, corner, panel_batch.render_panel(facts, width, height, look)
    if panel == "compare":
        fourth, stale = choose_scene(facts).fourth, choose_scene(facts).stale
        title, corner = fourth.panel_title(facts, look, slot.is_folded)
        rows = fourth.render_panel(facts, width, height, look, advice=not stale)
        return (title, [BEFORE_STALL], list(map(dim_row, rows))) if stale else (title, corner, rows)
    if panel == "progress":
        title, corner = panel_progress.panel_title(facts, look, slot.is_folded)
        return title, corner, panel_progress.render_panel(facts, width, height, look)
    title, corner = panel_output.panel_title(output, facts, slot.width, look)
    search = facts.view.search
    more = look.glyphs.more
    lines = output.visible_rows(height)
    if search:
        title = [*title, (f" {look.glyphs.middot} find ", "dim"), (search, "wait")]
        lines = [highlight_matches(line, search) for line in lines]
    if output.left:
        return title, corner, panel_output.scroll_sideways(lines, output.left, more)
    return title, corner, [panel_output.shorten_traceback_path(line, width, more) for line in lines]


def paint_screen(facts: ScreenData, output: OutputView, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The screen row by row: for tests, and for looking at it without a terminal."""
    slots = places(facts, width, height)
    return join_panels(slots, paint_panels(facts, output, slots, look))


def join_panels(slots: Mapping[str, Slot], painted: Mapping[str, list[Row]]) -> list[Row]:
    """The rows of the whole screen, joined from the rows of each place."""
    rows: list[Row] = [[] for _ in range(max((slot.y + slot.height for slot in slots.values()), default=0))]
    for panel, slot in sorted(slots.items(), key=lambda item: item[1].x):
        for index, row in enumerate(painted[panel]):
            rows[slot.y + index] += row
    return rows


def message_popup(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """A framed note with the full text of a message that the first rows had to cut; empty if they show everything."""
    if not is_reply_cut(facts, width, look):
        return []
    across = min(width, _WIDEST)
    room = max(height // _SHARE - 2, 1)
    lines = wrap_text(plain_text(reply_message(facts, look)), across - 4, room, look.glyphs.more)
    rows: list[Row] = [[(line, "")] for line in lines]
    return draw_frame([("in full", "wait")], [], rows, across, len(rows) + 2, look.glyphs, focused=True)


def overlay_rows(painted: dict[str, list[Row]], slots: Mapping[str, Slot], rows: Sequence[Row], y: int) -> None:
    """Put `rows` over the painted screen from row `y` on, at its left."""
    for panel, slot in slots.items():
        for index, row in enumerate(rows, y - slot.y):
            if 0 <= index < len(painted[panel]):
                covered = crop_row(row, slot.x, slot.x + slot.width)
                left = crop_row(painted[panel][index], row_width(covered), slot.width)
                painted[panel][index] = [*covered, *left]
