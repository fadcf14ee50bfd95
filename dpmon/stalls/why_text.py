"""Formats the reply of `dpmon why` as lines of text. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dpmon.run.process_notes import shorten_installed_path
from dpmon.sanitize import sanitize_line
from dpmon.stalls.stall_detection import RankActivity, format_rank_names

NOT_STALLED = "not stalled"
Line = tuple[str, str]
"""A line and its style: "", "bold", "bad" or "dim"."""
_OPTIONAL_COLUMNS = (6, 5, 2)
"""Columns that a narrow table omits, in this order: PROCESS, COLLECTIVES, STEP."""
_COLLECTIVES_COLUMN = 5
_IN_COLUMN, _MIN_IN_WIDTH = 4, 36
"""The column IN, and the minimum width to which a narrow table truncates it."""


def format_reply(reply: Mapping[str, Any], *, all_threads: bool = False, width: int | None = None) -> list[Line]:
    """Return the sentence, a table of the ranks, and their stacks. Ranks with the same stacks share them.

    `all_threads`: the stacks of all threads, not only of the main one. `width`: the maximum width of a line; a table
    that would be wider has fewer columns, and of a long path only the last part is shown.
    """
    try:
        return [(sanitize_line(text), style) for text, style in _lines(reply, all_threads, width)]
    except (KeyError, TypeError, ValueError, AttributeError):  # any program may have written the record
        return [("the record of the stall is damaged", "bad")]


def _lines(reply: Mapping[str, Any], all_threads: bool, width: int | None) -> list[Line]:
    ranks = reply["ranks"]
    lines: list[Line] = [(NOT_STALLED if ranks or not reply.get("without") else "no rank has answered", "")]
    if reply.get("text") is not None:
        lines = [(f"stalled for {reply['t_s'] - reply['since_s']:.0f} s: {reply['text']}", "bad")]
    rows: list[tuple[str, ...]] = [("", "RANK", "STEP", "FOR", "IN", "COLLECTIVES", "PROCESS")]
    rows += [_rank_row(rank, stalled=reply.get("text") is not None) for rank in ranks]
    if ranks:
        lines += [("", ""), *_table_lines(rows, width)]
    for names, stacks, reason in _group_equal_stacks(ranks):
        lines += [("", ""), (f"{names}:", "bold")]
        if not stacks:
            lines.append((f"  no stack: {reason or 'none was taken'}", "dim"))
        for index, stack in enumerate(stacks):
            is_worker = index > 0 and stack["main"]
            if index and not (all_threads or is_worker):
                continue
            if is_worker or (all_threads and stack["thread"]):
                lines.append((f"  {'' if is_worker else 'thread '}{stack['thread']}:", "bold"))
            lines += format_frames(stack["frames"], width)
            if stack["left_out"]:
                lines.append((f"  {stack['left_out']:,} more between them", "dim"))
    for title, member in (("NCCL reports", "nccl"), ("no stacks from", "without")):
        if reply.get(member):
            lines += [("", ""), (f"{title}:", "bold"), *((f"  {text}", "") for text in reply[member])]
    return lines


def format_frames(frames: Iterable[Sequence[Any]], width: int | None = None) -> list[Line]:
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


def _rank_row(rank: Mapping[str, Any], *, stalled: bool) -> tuple[str, ...]:
    number = f"pid {rank['pid']}" if rank["rank"] is None else rank["rank"]
    node = f" ({rank['node']})" if rank.get("node") else ""
    seconds = "" if rank["for_s"] is None else f"{max(rank['for_s'], 0):.0f} s"
    cpu = "" if rank["cpu"] is None else f", {100 * rank['cpu']:.0f}% CPU"
    groups = " ".join("-" if group["sequence"] is None else str(group["sequence"]) for group in rank["groups"])
    gpus = "".join(
        f", {gpu['device']} {_format_number(gpu['util_pct'])}% {_format_number(gpu['power_w'])} W"
        for gpu in rank.get("gpus", ())
    )
    words = ("waits " if rank["waits"] else "") + str(rank["words"])
    step = "" if rank["step"] is None else f"{rank['step']:,}"
    process = f"{rank['state']}{cpu}{gpus}"
    return (
        ">" if stalled and not (rank["waits"] or rank.get("apart")) else "",
        f"{number}{node}",
        step,
        seconds,
        words,
        groups,
        process,
    )


def _format_number(value: Any) -> str:
    return "?" if value is None else f"{value:.0f}"


def _group_equal_stacks(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any], str | None]]:
    """Group the ranks with the same stacks. Return for each group its names, the stacks, and why there are none.

    The groups are in the order of the ranks. Stacks are the same if their Python frames are: addresses of C code may
    differ.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        stacks = rank.get("stacks")
        if stacks:
            frames = stacks[0]["frames"]
            key = str([(function, file, line) for function, file, line in frames if line])
        else:
            key = str(rank.get("why_no_stack"))
        groups.setdefault(key, []).append(rank)
    return [
        (
            format_rank_names(
                [RankActivity(pid=rank["pid"], rank=rank["rank"], node=rank.get("node")) for rank in group]
            ),
            group[0].get("stacks") or [],
            group[0].get("why_no_stack"),
        )
        for group in groups.values()
    ]
