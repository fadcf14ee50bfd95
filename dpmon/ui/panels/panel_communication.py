"""Panel 4 of ranks, which have no mode to compare: the time of their communication, and what to try."""

from __future__ import annotations

from dpmon.model.communication import Communication
from dpmon.model.findings.rank_findings import find_rank_problems
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, wrap_text
from dpmon.text.formatting import format_duration, format_percent
from dpmon.ui.panels import panel_ranks
from dpmon.ui.screen_data import RANK_NAMES, ScreenData
from dpmon.ui.styled_rows import Row, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_LABEL = 9
_NOTHING = "no rank has reported yet how it averages its gradients"


def is_shown(facts: ScreenData) -> bool:
    """Whether the training process is a rank, alone or beside others."""
    process = facts.process
    if process is None:
        return False
    return process.distributed is not None or (process.rank is not None and panel_ranks.is_shown(facts))


def preferred_height(facts: ScreenData) -> int:
    """Rows that the whole content needs, with two rows of advice."""
    found = facts.state.communication
    return 1 if found is None else len(found.labeled_texts) + 2


def panel_title(facts: ScreenData, look: TerminalStyle, folded: bool) -> tuple[Row, Row]:
    """The panel's title, and its main number."""
    found = facts.state.communication
    corner: Row = []
    if found is not None and found.exposed_ns is not None:
        corner = [("exposed", "dim"), (align_right(format_duration(found.exposed_ns), 8), "bold")]
        corner += (
            [] if folded else [(align_right(format_percent(found.exposed_share), 6), "bold"), (" of the step", "dim")]
        )
    return [(RANK_NAMES["compare"], "title")], corner


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle, *, advice: bool = True) -> list[Row]:
    """The panel's rows, inside its frame: figures, facts, and below them what to try (`advice`)."""
    found = facts.state.communication
    if found is None:
        return wrap_to_rows(facts.empty_reason(_NOTHING, _NOTHING), width)
    zoomed = facts.view.zoom == "compare"
    above = _facts(found, width, look)
    room = max(height - len(above), 2)
    below = _advice(found, width, None if zoomed else room, look) if advice else []
    if not zoomed and len(above) + len(below) > height:
        above = above[: max(height - len(below), 1)]
    return [*above, *below]


def _facts(found: Communication, width: int, look: TerminalStyle) -> list[Row]:
    rows: list[Row] = []
    for label, text in found.labeled_texts:
        label = sanitize_line(label, 40)
        indent = _LABEL if len(label) < _LABEL else len(label) + 1
        lines = wrap_text(sanitize_line(text, 400), max(width - indent, 10))
        for index, line in enumerate(lines):
            head = label.ljust(indent) if index == 0 else " " * indent
            rows.append([(head, "dim"), (line, "bold" if label == "exposed" else "")])
    return rows


def _advice(found: Communication, width: int, most: int | None, look: TerminalStyle) -> list[Row]:
    """The findings, the most important first, each with what to try; only the first one if space is short."""
    rows: list[Row] = []
    for finding in sorted(find_rank_problems(found), key=lambda one: -one.weight):
        # The first rows of the screen and panel 2 name the straggler.
        text = "" if finding.kind == "straggler" else sanitize_line(finding.text, 400)
        advice = sanitize_line(finding.advice_text, 400)
        own = [*wrap_to_rows(text, width, "wait"), *wrap_to_rows(advice, width, "")]
        if most is not None and len(rows) + len(own) > most:
            return rows or wrap_to_rows(advice, width, "", most, look.glyphs.more)
        rows += own
    return rows
