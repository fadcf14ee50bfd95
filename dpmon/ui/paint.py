"""Draws the whole screen as rows, place by place, without side effects; widgets and tests both use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dpmon.model.run_snapshot import MOST_RANKS
from dpmon.text.cells import wrap_text
from dpmon.ui.facts import BEFORE_STALL, PANELS, Facts
from dpmon.ui.footer import footer, timeline
from dpmon.ui.layout import FIRST, MIN_HEIGHT, MIN_WIDTH, Slot, arrange
from dpmon.ui.look import Look
from dpmon.ui.panels import panel_batch, panel_devices, panel_output, panel_progress, panel_ranks, panel_standing
from dpmon.ui.panels.panel_output import Output, marked
from dpmon.ui.panels.panel_status import answer, cut_answer, status
from dpmon.ui.rows import Row, box, cropped, dimmed, fit, plain, width_of
from dpmon.ui.scenes import scene_of

_WIDEST = 84
TALL = 50
"""From this many rows on, panel 2 has room for the ranks over time, and panel 6 for the longest steps."""
_SHARE = 2
"""The note covers at most one in this many rows of the screen."""


def places(facts: Facts, width: int, height: int) -> dict[str, Slot]:
    """The current place of each panel."""
    line = 1 if facts.playing is not None and height > MIN_HEIGHT else 0
    scene, tall = scene_of(facts), height >= TALL
    wanted = {
        "devices": panel_devices.wanted_rows(facts),
        "replicas": scene.second.wanted_rows(facts, height * FIRST // 100 - 5 if tall else 0) + 1,
        "batch": panel_batch.wanted_rows(facts),
        "compare": scene.fourth.wanted_rows(facts),
        "progress": panel_progress.wanted_rows(facts, tall),
    }
    slots = arrange(width, height - line, scene.arrangement, wanted, facts.view.zoom)
    if line:
        slots["timeline"] = Slot(0, height - 1, width, 1)
    return slots


def _pinned(panel: str, facts: Facts) -> int:
    """Number of rows of a panel that do not scroll: its column headings, if they are the first row."""
    return int(panel == "replicas" and scene_of(facts).second is not panel_standing and not panel_ranks.mapped(facts))


def paint(
    facts: Facts, output: Output, slots: Mapping[str, Slot], look: Look, *, noted: bool = True
) -> dict[str, list[Row]]:
    """The rows of each place, cut or filled to its size; `noted`: with a note if a message was cut."""
    painted = {panel: _fitted(_one(panel, facts, output, slot, look), slot, look) for panel, slot in slots.items()}
    foot = slots.get("footer")
    if foot is not None and noted:
        rows = toast(facts, foot.width, foot.y, look)
        laid_over(painted, slots, rows, foot.y - len(rows))
    return painted


def _fitted(rows: list[Row], slot: Slot, look: Look) -> list[Row]:
    rows = rows[: slot.height] + [[]] * (slot.height - len(rows))
    return [fit(row, slot.width, look.glyphs.more) for row in rows]


def _one(panel: str, facts: Facts, output: Output, slot: Slot, look: Look) -> list[Row]:
    if panel == "small":
        return [*status(facts, slot.width, 3, look)[: slot.height - 1], [(f"needs {MIN_WIDTH}x{MIN_HEIGHT}", "wait")]]
    if panel == "status":
        return status(facts, slot.width, slot.height, look)
    if panel == "timeline" and facts.playing is not None:
        return timeline(facts.playing, slot.width, look)
    if panel == "footer":
        return footer(facts, slot.width, look)
    title, corner, rows = _content(panel, facts, output, slot, look)
    return box(
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


def rank_room(facts: Facts, slots: Mapping[str, Slot]) -> int:
    """The largest number of ranks that a picture can show in these slots."""
    table = slots["replicas"].height if "replicas" in slots and panel_ranks.applies(facts) else 0
    last_step = slots["batch"].height - panel_batch.WITHOUT_RANKS if "batch" in slots else 0
    return min(max(table, last_step), MOST_RANKS)


def shows_time(facts: Facts, slots: Mapping[str, Slot]) -> bool:
    """Whether panel 2 has room in these slots for slow ranks over time, although the screen is not tall."""
    slot = slots.get("replicas")
    return slot is not None and panel_ranks.shows_time(facts, slot.width - 4, slot.height - 2)


def scroll_room(panel: str, facts: Facts, slot: Slot, look: Look) -> int:
    """How many rows a panel other than the output can scroll in its place."""
    inside = slot.height - 2
    if slot.folded or panel not in PANELS or panel == "output" or inside <= _pinned(panel, facts):
        return 0
    return max(len(_content(panel, facts, Output(), slot, look)[2]) - inside, 0)


def _content(panel: str, facts: Facts, output: Output, slot: Slot, look: Look) -> tuple[Row, Row, list[Row]]:
    width, height = slot.width - 4, max(slot.height - 2, 0)
    zoomed = facts.view.zoom == panel
    if panel == "devices":
        title, corner = panel_devices.title(facts, look, slot.folded)
        drawn = panel_devices.zoomed if zoomed else panel_devices.devices
        return title, corner, drawn(facts, width, height, look)
    if panel == "replicas":
        second = scene_of(facts).second
        title, corner = second.title(facts, look)
        picture = second.zoomed if zoomed else second.table
        return title, corner, picture(facts, width, height, look)
    if panel == "batch":
        title, corner = panel_batch.title(facts, look, slot.width)
        return title, corner, panel_batch.batch(facts, width, height, look)
    if panel == "compare":
        fourth, stale = scene_of(facts).fourth, scene_of(facts).stale
        title, corner = fourth.title(facts, look, slot.folded)
        rows = fourth.table(facts, width, height, look, advice=not stale)
        return (title, [BEFORE_STALL], list(map(dimmed, rows))) if stale else (title, corner, rows)
    if panel == "progress":
        title, corner = panel_progress.title(facts, look, slot.folded)
        return title, corner, panel_progress.table(facts, width, height, look)
    title, corner = panel_output.title(output, facts, slot.width, look)
    search = facts.view.search
    more = look.glyphs.more
    lines = output.visible(height)
    if search:
        title = [*title, (f" {look.glyphs.middot} find ", "dim"), (search, "wait")]
        lines = [marked(line, search) for line in lines]
    if output.left:
        return title, corner, panel_output.shifted(lines, output.left, more)
    return title, corner, [panel_output.narrowed(line, width, more) for line in lines]


def whole(facts: Facts, output: Output, width: int, height: int, look: Look) -> list[Row]:
    """The screen row by row: for tests, and for looking at it without a terminal."""
    slots = places(facts, width, height)
    return joined(slots, paint(facts, output, slots, look))


def joined(slots: Mapping[str, Slot], painted: Mapping[str, list[Row]]) -> list[Row]:
    """The rows of the whole screen, joined from the rows of each place."""
    rows: list[Row] = [[] for _ in range(max((slot.y + slot.height for slot in slots.values()), default=0))]
    for panel, slot in sorted(slots.items(), key=lambda item: item[1].x):
        for index, row in enumerate(painted[panel]):
            rows[slot.y + index] += row
    return rows


def toast(facts: Facts, width: int, height: int, look: Look) -> list[Row]:
    """A framed note with the full text of a message that the first rows had to cut; empty if they show everything."""
    if not cut_answer(facts, width, look):
        return []
    across = min(width, _WIDEST)
    room = max(height // _SHARE - 2, 1)
    lines = wrap_text(plain(answer(facts, look)), across - 4, room, look.glyphs.more)
    rows: list[Row] = [[(line, "")] for line in lines]
    return box([("in full", "wait")], [], rows, across, len(rows) + 2, look.glyphs, focused=True)


def laid_over(painted: dict[str, list[Row]], slots: Mapping[str, Slot], rows: Sequence[Row], y: int) -> None:
    """Put `rows` over the painted screen from row `y` on, at its left."""
    for panel, slot in slots.items():
        for index, row in enumerate(rows, y - slot.y):
            if 0 <= index < len(painted[panel]):
                covered = cropped(row, slot.x, slot.x + slot.width)
                left = cropped(painted[panel][index], width_of(covered), slot.width)
                painted[panel][index] = [*covered, *left]
