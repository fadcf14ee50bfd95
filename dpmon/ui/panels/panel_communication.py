"""Panel 4 for ranks, which have no modes to compare: their communication time, and what to try."""

from __future__ import annotations

from dpmon.model.communication import Communication
from dpmon.model.findings.rank_findings import find_rank_problems
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right
from dpmon.text.formatting import format_duration, format_percent
from dpmon.ui.panels import panel_ranks
from dpmon.ui.screen_data import RANK_NAMES, ScreenData
from dpmon.ui.styled_rows import Row, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_LABEL_CELLS = 9
_NO_RANK_TEXT = "no rank has reported yet how it averages gradients"


def is_shown(screen: ScreenData) -> bool:
    """Return whether the training process is a rank, alone or with others."""
    process = screen.process
    if process is None:
        return False
    return process.distributed is not None or (process.rank is not None and panel_ranks.is_shown(screen))


def preferred_height(screen: ScreenData) -> int:
    """Return the number of rows of the whole content, with two rows of advice."""
    communication = screen.state.communication
    return 1 if communication is None else len(communication.labeled_texts) + 2


def panel_title(screen: ScreenData, folded: bool) -> tuple[Row, Row]:
    """Return the title and the main number."""
    communication = screen.state.communication
    corner: Row = []
    if communication is not None and communication.exposed_ns is not None:
        corner = [("exposed", "dim"), (align_right(format_duration(communication.exposed_ns), 8), "bold")]
        if not folded:
            share = format_percent(communication.exposed_share)
            corner += [(align_right(share, 6), "bold"), (f" of the {communication.unit}", "dim")]
    return [(RANK_NAMES["compare"], "title")], corner


def render_panel(
    screen: ScreenData, width: int, height: int, style: TerminalStyle, *, advice: bool = True
) -> list[Row]:
    """Return the rows inside the frame: metrics, facts and, with `advice`, what to try."""
    communication = screen.state.communication
    if communication is None:
        return wrap_to_rows(screen.empty_reason(_NO_RANK_TEXT, _NO_RANK_TEXT), width)
    is_full_screen = screen.view.zoom == "compare"
    fact_rows = _fact_rows(communication, width)
    max_rows = max(height - len(fact_rows), 2)
    advice_rows: list[Row] = []
    if advice:
        advice_rows = _advice_rows(communication, width, None if is_full_screen else max_rows)
    if not is_full_screen and len(fact_rows) + len(advice_rows) > height:
        fact_rows = fact_rows[: max(height - len(advice_rows), 1)]
    return [*fact_rows, *advice_rows]


def _fact_rows(communication: Communication, width: int) -> list[Row]:
    rows: list[Row] = []
    for label, text in communication.labeled_texts:
        label = sanitize_line(label, 40)
        text_style = "bold" if label == "exposed" else ""
        label_span = (f"{label} ".ljust(_LABEL_CELLS), "dim")
        rows += wrap_to_rows(sanitize_line(text, 400), width, text_style, label=[label_span])
    return rows


def _advice_rows(communication: Communication, width: int, max_rows: int | None) -> list[Row]:
    """Return the findings by weight, each with what to try; only the first one's advice if space is short."""
    rows: list[Row] = []
    for finding in sorted(find_rank_problems(communication), key=lambda finding: -finding.weight):
        # The first rows of the screen and panel 2 name the straggler.
        text = "" if finding.kind == "straggler" else sanitize_line(finding.text, 400)
        advice = sanitize_line(finding.advice_text, 400)
        finding_rows = [*wrap_to_rows(text, width, "wait"), *wrap_to_rows(advice, width, "")]
        if max_rows is not None and len(rows) + len(finding_rows) > max_rows:
            return rows or wrap_to_rows(advice, width, "", max_rows)
        rows += finding_rows
    return rows
