"""The answer to "why is it stuck" in lines for people. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from dpmon.sanitize import sanitize_line
from dpmon.stalls.stall_detection import RankActivity, format_rank_names

NOT_STALLED = "not stalled"
Line = tuple[str, str]
"""A line and its style: "", "bold", "bad" or "dim"."""
_FIRST_TO_GO = (6, 5, 2)
"""Columns that a narrow table leaves out, in this order: PROCESS, COLLECTIVES, STEP."""
_IN, _LEAST_IN = 4, 36
"""The column IN, and the least width to which a narrow table cuts it."""
_INSTALLED = re.compile(r"\A.*(/(site|dist)-packages/|/lib/python3\.\d+/)")


def format_reply(found: Mapping[str, Any], *, every: bool = False, width: int | None = None) -> list[Line]:
    """The sentence, a table of the ranks, and their stacks; ranks with equal stacks share one.

    `every`: the stacks of all threads, not only of the main one. `width`: most cells of a line; a table that would be
    wider has fewer columns, and a long path only its last part.
    """
    try:
        return [(sanitize_line(text), style) for text, style in _lines(found, every, width)]
    except (KeyError, TypeError, ValueError, AttributeError):  # any program may have written the record
        return [("the record of the stall is damaged", "bad")]


def _lines(found: Mapping[str, Any], every: bool, width: int | None) -> list[Line]:
    ranks = found["ranks"]
    lines: list[Line] = [(NOT_STALLED if ranks or not found.get("without") else "no rank has answered", "")]
    if found.get("text") is not None:
        lines = [(f"stalled for {found['t_s'] - found['since_s']:.0f} s: {found['text']}", "bad")]
    rows: list[tuple[str, ...]] = [("", "RANK", "STEP", "FOR", "IN", "COLLECTIVES", "PROCESS")]
    rows += [_row(rank, stalled=found.get("text") is not None) for rank in ranks]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    shown = [column for column in range(len(widths)) if column != 5 or any(row[column] for row in rows[1:])]
    if width is not None:
        for column in _FIRST_TO_GO:
            if column in shown and sum(min(widths[one], _LEAST_IN) + 2 for one in shown) - 2 > width:
                shown.remove(column)
        widths[_IN] = max(
            min(widths[_IN], width - sum(widths[one] + 2 for one in shown if one != _IN)), min(widths[_IN], _LEAST_IN)
        )
    lines += [("", "")] if ranks else []
    for row in rows if ranks else ():
        text = "  ".join(_wrap_or_cut(row[column], widths[column]) for column in shown).rstrip()
        lines.append((text, "dim" if row is rows[0] else "bold" if row[0] else ""))
    for who, stacks, reason in _group_equal_stacks(ranks):
        lines += [("", ""), (f"{who}:", "bold")]
        if not stacks:
            lines.append((f"  no stack: {reason or 'none was taken'}", "dim"))
        for index, stack in enumerate(stacks):
            worker = index > 0 and stack["main"]
            if index and not (every or worker):
                continue
            if worker or (every and stack["thread"]):
                lines.append((f"  {'' if worker else 'thread '}{stack['thread']}:", "bold"))
            for function, file, line in stack["frames"]:
                place = f"{_shorten_path(file)}:{line}" if line else _shorten_path(file)
                if width is not None and len(function) + len(place) + 5 > width:
                    place = place.rpartition("/")[2]
                lines.append((f"  {function} ({place})", "" if _shorten_path(file) == file else "dim"))
            if stack["left_out"]:
                lines.append((f"  {stack['left_out']:,} more between them", "dim"))
    for title, member in (("NCCL says", "nccl"), ("no stacks from", "without")):
        if found.get(member):
            lines += [("", ""), (f"{title}:", "bold"), *((f"  {text}", "") for text in found[member])]
    return lines


def _wrap_or_cut(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}…"


def _shorten_path(file: str) -> str:
    """The path of a file without the place of installed packages and of Python's own modules."""
    return _INSTALLED.sub("", file)


def _row(rank: Mapping[str, Any], *, stalled: bool) -> tuple[str, ...]:
    number = f"pid {rank['pid']}" if rank["rank"] is None else rank["rank"]
    node = f" ({rank['node']})" if rank.get("node") else ""
    seconds = "" if rank["for_s"] is None else f"{max(rank['for_s'], 0):.0f} s"
    cpu = "" if rank["cpu"] is None else f", {100 * rank['cpu']:.0f}% CPU"
    groups = " ".join("-" if group["sequence"] is None else str(group["sequence"]) for group in rank["groups"])
    gpus = "".join(
        f", {gpu['device']} {_figure(gpu['util_pct'])}% {_figure(gpu['power_w'])} W" for gpu in rank.get("gpus", ())
    )
    words = ("waits " if rank["waits"] else "") + str(rank["words"])
    step = "" if rank["step"] is None else rank["step"]
    process = f"{rank['state']}{cpu}{gpus}"
    return (
        ">" if stalled and not (rank["waits"] or rank.get("apart")) else "",
        f"{number}{node}",
        str(step),
        seconds,
        words,
        groups,
        process,
    )


def _figure(value: Any) -> str:
    return "?" if value is None else f"{value:.0f}"


def _group_equal_stacks(ranks: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any], str | None]]:
    """Ranks with equal stacks: their names, the stacks, and why there are none; in the order of the ranks.

    Of C code, the addresses may differ.
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for rank in ranks:
        stacks = rank.get("stacks")
        python = [frame for frame in stacks[0]["frames"] if frame[2]] if stacks else rank.get("why_no_stack")
        groups.setdefault(str(python), []).append(rank)
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
