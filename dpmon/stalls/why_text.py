"""Formats what the ranks of a run do as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpmon.record.shared_names import node_suffix
from dpmon.run.process_notes import shorten_installed_path
from dpmon.sanitize import sanitize_line
from dpmon.stalls.stall_detection import RankActivity, format_rank_names
from dpmon.stalls.stall_report import RankReport, StallReport

NOT_STALLED = "not stalled"
Line = tuple[str, str]
"""A line and its style: "", "bold", "bad" or "dim"."""
_OPTIONAL_COLUMNS = (6, 5, 2)
"""Columns that a narrow table omits, in this order: PROCESS, COLLECTIVES, STEP."""
_COLLECTIVES_COLUMN = 5
_IN_COLUMN, _MIN_IN_WIDTH = 4, 36
"""The column IN, and the minimum width to which a narrow table truncates it."""


def format_report(report: StallReport, *, all_threads: bool = False, width: int | None = None) -> list[Line]:
    """Return the sentence, a table of the ranks, and their stacks. Ranks with the same stacks share them.

    `all_threads`: the stacks of all threads, not only of the main one. `width`: the maximum width of a line; a table
    that would be wider has fewer columns, and of a long path only the last part is shown.
    """
    return [(sanitize_line(text), style) for text, style in _lines(report, all_threads, width)]


def _lines(report: StallReport, all_threads: bool, width: int | None) -> list[Line]:
    ranks = report.ranks
    lines: list[Line] = [(NOT_STALLED if ranks or not report.without else "no rank has answered", "")]
    if report.text is not None:
        lines = [(f"stalled for {report.t_s - (report.since_s or 0):.0f} s: {report.text}", "bad")]
    rows: list[tuple[str, ...]] = [("", "RANK", "STEP", "FOR", "IN", "COLLECTIVES", "PROCESS")]
    rows += [_rank_row(rank, stalled=report.text is not None) for rank in ranks]
    if ranks:
        lines += [("", ""), *_table_lines(rows, width)]
    for group in _group_equal_stacks(ranks):
        first, *_ = group
        names = format_rank_names([RankActivity(pid=rank.pid, rank=rank.rank, node=rank.node) for rank in group])
        lines += [("", ""), (f"{names}:", "bold")]
        if not first.stacks:
            lines.append((f"  no stack: {first.why_no_stack or 'none was taken'}", "dim"))
        for index, stack in enumerate(first.stacks):
            is_worker = index > 0 and stack.main
            if index and not (all_threads or is_worker):
                continue
            if is_worker or (all_threads and stack.thread):
                lines.append((f"  {'' if is_worker else 'thread '}{stack.thread}:", "bold"))
            lines += format_frames(stack.frames, width)
            if stack.left_out:
                lines.append((f"  {stack.left_out:,} more between them", "dim"))
    if report.without:
        lines += [("", ""), ("no stacks from:", "bold"), *((f"  {text}", "") for text in report.without)]
    return lines


def format_frames(frames: Iterable[tuple[str, str, int]], width: int | None = None) -> list[Line]:
    """Return a line for each function, file and line. Installed files are dim, and have no directory."""
    lines: list[Line] = []
    for function, file, line in frames:
        path = shorten_installed_path(file)
        location = f"{path}:{line}" if line else path
        if width is not None and len(function) + len(location) + 5 > width:
            _, _, location = location.rpartition("/")
        lines.append((f"  {function} ({location})", "" if path == file else "dim"))
    return lines


def _table_lines(rows: Sequence[tuple[str, ...]], width: int | None) -> list[Line]:
    """Return the lines of the table. The first row is the header; the first cell marks the ranks to look at."""
    header, *rank_rows = rows
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    has_collectives = any(row[_COLLECTIVES_COLUMN] for row in rank_rows)
    shown = [column for column in range(len(header)) if has_collectives or column != _COLLECTIVES_COLUMN]
    if width is not None:
        for column in _OPTIONAL_COLUMNS:
            min_table_width = sum(min(widths[index], _MIN_IN_WIDTH) + 2 for index in shown) - 2
            if column in shown and min_table_width > width:
                shown.remove(column)
        room = width - sum(widths[index] + 2 for index in shown if index != _IN_COLUMN)
        widths[_IN_COLUMN] = min(widths[_IN_COLUMN], max(room, _MIN_IN_WIDTH))
    lines: list[Line] = []
    for row in rows:
        text = "  ".join(_wrap_or_cut(row[column], widths[column]) for column in shown).rstrip()
        mark, *_ = row
        style = "bold" if mark else ""
        lines.append((text, "dim" if row is header else style))
    return lines


def _wrap_or_cut(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def _rank_row(rank: RankReport, *, stalled: bool) -> tuple[str, ...]:
    number = f"pid {rank.pid}" if rank.rank is None else rank.rank
    cpu = "" if rank.cpu is None else f", {100 * rank.cpu:.0f}% CPU"
    gpus = "".join(
        f", {gpu.device} {_format_number(gpu.util_pct)}% {_format_number(gpu.power_w)} W" for gpu in rank.gpus
    )
    return (
        ">" if stalled and not (rank.waits or rank.apart) else "",
        f"{number}{node_suffix(rank.node)}",
        "" if rank.step is None else f"{rank.step:,}",
        "" if rank.for_s is None else f"{max(rank.for_s, 0):.0f} s",
        f"waits {rank.words}" if rank.waits else rank.words,
        " ".join("-" if group.sequence is None else str(group.sequence) for group in rank.groups),
        f"{rank.state}{cpu}{gpus}",
    )


def _format_number(value: float | None) -> str:
    return "?" if value is None else f"{value:.0f}"


def _group_equal_stacks(ranks: Sequence[RankReport]) -> list[list[RankReport]]:
    """Return the groups of ranks with the same stacks, in the order of the ranks."""
    groups: dict[object, list[RankReport]] = {}
    for rank in ranks:
        key: object = rank.why_no_stack
        if rank.stacks:
            key = rank.stacks[0].frames
        groups.setdefault(key, []).append(rank)
    return list(groups.values())
