"""Panel 2 during a stall: where each rank is, the blamed ranks first, the waiting ones grouped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dpmon.record.schema import SECOND
from dpmon.record.shared_names import node_suffix
from dpmon.sanitize import sanitize_line
from dpmon.stalls.stall_detection import format_ranges
from dpmon.stalls.stall_report import RankReport, parse_report
from dpmon.stalls.why_text import format_report
from dpmon.text.formatting import UNKNOWN, format_count, format_count_with_noun, format_elapsed, format_percent
from dpmon.ui.screen_data import NAMES, RANK_NAMES, ScreenData, format_devices
from dpmon.ui.styled_rows import Row, row_width, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_KEY_HINTS = (("enter", "stacks"), ("w", "stacks now"), ("x", "stop"))
_MAX_RANKS_CELLS = 40
"""Most cells for the numbers of ranks that share a row."""


def _stalled_ranks(screen: ScreenData) -> list[RankReport]:
    """Return the ranks of the stall, with clean text, and `for_s` as of the time that the screen shows."""
    report = None if screen.shown_stall is None else parse_report(screen.shown_stall.record)
    if report is None:
        return []
    age_s = screen.elapsed_ns / SECOND - report.t_s
    return [
        replace(
            rank,
            words=sanitize_line(rank.words or UNKNOWN, 300),
            state=sanitize_line(rank.state, 20),
            for_s=None if rank.for_s is None else rank.for_s + age_s,
        )
        for rank in report.ranks
        if not rank.apart
    ]


def _device(rank: RankReport, screen: ScreenData) -> str:
    process = screen.state.processes.get(rank.process or 0)
    return "" if process is None else f"{format_devices(process.devices)}{node_suffix(process.node)}".strip()


def _details(rank: RankReport) -> str:
    """Return the step, state and CPU use of a rank, separated by commas."""
    step = "no step yet" if rank.step is None else f"after step {format_count(rank.step)}"
    cpu = "" if rank.cpu is None else f"{format_percent(rank.cpu)} CPU"
    return ", ".join(part for part in (step, rank.state, cpu) if part)


def stalled_step(screen: ScreenData) -> int | None:
    """Return the last step of the blamed ranks, the lowest of several; None if it is unknown, or without a stall."""
    ranks = _stalled_ranks(screen)
    blamed = [rank for rank in ranks if not rank.waits] or ranks
    return min((rank.step for rank in blamed if rank.step is not None), default=None)


def preferred_height(screen: ScreenData, _: int = 0) -> int:
    """Return the number of rows of the whole content, without the two that the layout reserves for headings."""
    ranks = _stalled_ranks(screen)
    waiting_places = len({rank.words for rank in ranks if rank.waits})
    return max(2 * sum(not rank.waits for rank in ranks) + waiting_places, 2)


def panel_title(screen: ScreenData) -> tuple[Row, Row]:
    """Return the title and the last step before the stall."""
    ranks, step = _stalled_ranks(screen), stalled_step(screen)
    corner_text = "stalled" if step is None else f"stalled after step {format_count(step)}"
    has_ranks = any(rank.rank is not None for rank in ranks)
    return [((RANK_NAMES if has_ranks else NAMES)["replicas"], "title")], [(corner_text, "bad")]


def render_panel(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows inside the frame. A short panel omits the keys, then step, state and CPU of each rank."""
    ranks = _stalled_ranks(screen)
    if not ranks:
        text = "" if screen.shown_stall is None else sanitize_line(screen.shown_stall.text, 400)
        return wrap_to_rows(text or "the record of the stall is damaged", width, "bad", height)
    blamed, waiting = ([rank for rank in ranks if rank.waits is waits] for waits in (False, True))
    waiting_rows = _waiting_ranks_row(waiting)
    detailed, brief = (_blamed_rank_rows(blamed, screen, width, details=details) for details in (True, False))
    grouped = _waiting_ranks_row(blamed)
    max_rows = height - len(waiting_rows)
    blamed_rows = next((rows for rows in (detailed, brief) if len(rows) <= max_rows), grouped)
    rows = [*blamed_rows, *waiting_rows]
    keys = _key_row(screen)
    if not keys or len(rows) >= height:
        return rows
    return [*rows, [], keys] if len(rows) + 2 <= height else [*rows, keys]


def render_full_screen(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows on the full screen: the table, then the stacks of the recorded stall."""
    stall = screen.shown_stall
    report = None if stall is None else parse_report(stall.record)
    reply_lines = [] if report is None else format_report(report, width=width)
    blank_lines = (index for index, (text, _) in enumerate(reply_lines) if index > 1 and not text)
    stack_lines = reply_lines[next(blank_lines, len(reply_lines)) + 1 :]
    rows = [*render_panel(screen, width, height, style), []]
    if stall is not None:
        rows.append([(f"as detected at {format_elapsed(stall.noticed_ns)}", "dim")])
    return [*rows, *([(text, text_style)] for text, text_style in stack_lines)]


def _format_duration(seconds: float | None) -> str:
    return UNKNOWN if seconds is None else f"{max(seconds, 0):,.0f} s"


def _blamed_rank_rows(ranks: Sequence[RankReport], screen: ScreenData, width: int, *, details: bool) -> list[Row]:
    """Return the rows of the blamed ranks; `details`: also step, state and CPU of each."""
    numbers = ["" if rank.rank is None else str(rank.rank) for rank in ranks]
    number_width = max(map(len, numbers), default=0)
    devices = [_device(rank, screen) for rank in ranks]
    device_width = max(map(len, devices), default=0)
    rows: list[Row] = []
    for rank, number, device in zip(ranks, numbers, devices, strict=True):
        rank_details = _details(rank)
        lead: Row = [("▸ ", "bad"), (number.rjust(number_width) + " " * bool(number_width), "bad")]
        lead += [(device.ljust(device_width) + "  ", "")] if device_width else []
        lead.append((_format_duration(rank.for_s).rjust(6) + "  ", "bold"))
        row: Row = [*lead, (rank.words, "bad"), (f"  {rank_details}", "dim")]
        if details and row_width(row) <= width:
            rows.append(row)
            continue
        rows += wrap_to_rows(rank.words, width, "bad", 2 if details else 1, label=lead)
        if details:
            rows += wrap_to_rows(rank_details, width, "dim", 1, label=[(" " * row_width(lead), "")])
    return rows


def _waiting_ranks_row(ranks: Sequence[RankReport]) -> list[Row]:
    """Return a row for all ranks at the same location, with the time since the last one arrived there."""
    groups: dict[str, list[RankReport]] = {}
    for rank in ranks:
        groups.setdefault(rank.words, []).append(rank)
    rows: list[Row] = []
    for words, members in groups.items():
        numbers = sorted(rank.rank for rank in members if rank.rank is not None)
        ranks_text = format_ranges(numbers, min_length=2)
        if len(numbers) < len(members):
            ranks_text = "1 process" if len(members) == 1 else f"{format_count(len(members))} processes"
        ranks_text = ranks_text if len(ranks_text) <= _MAX_RANKS_CELLS else format_count_with_noun(len(members), "rank")
        for_s = min((rank.for_s for rank in members if rank.for_s is not None), default=None)
        mark, text_style = "▸ ", "bad"
        if any(rank.waits for rank in members):  # then all of them wait
            mark, text_style = "  ", ""
            words = f"{'waits' if len(members) == 1 else 'wait'} {words}"
        details = (f" {words}  {_format_duration(for_s)}", "dim")
        rows.append([(mark, text_style), (ranks_text, text_style), details])
    return rows


def _key_row(screen: ScreenData) -> Row:
    """Return the keys that can help now."""
    is_live = not (screen.is_over or screen.is_ending or screen.shows_past)
    is_focused = screen.view.focus == "replicas" and screen.view.zoom is None
    usable = (is_focused, is_live, is_live and screen.stop_progress is None)
    row: Row = []
    for (key, word), is_usable in zip(_KEY_HINTS, usable, strict=True):
        if not is_usable:
            continue
        row += [("  " if row else "", ""), (key, "key"), (f" {word}", "dim")]
    return row
