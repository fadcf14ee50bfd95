"""Panel 2 of a stall: where each rank stands, those that the others wait for first, the waiting ones folded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.model.run_snapshot import RunSnapshot
from dpmon.record.safe_json import int_member, ns_member, number_member, text_member
from dpmon.record.schema import SECOND
from dpmon.record.shared_names import node_suffix
from dpmon.sanitize import sanitize_line
from dpmon.stalls.stall_detection import format_ranges
from dpmon.stalls.why_text import format_reply
from dpmon.text.cells import wrap_text
from dpmon.text.formatting import UNKNOWN, format_clock, format_count, format_count_with_noun, format_percent
from dpmon.ui.screen_data import NAMES, RANK_NAMES, ScreenData, format_devices
from dpmon.ui.styled_rows import Row, row_width, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_KEYS = (("enter", "stacks"), ("w", "stacks now"), ("x", "stop"))
_MOST_CORES = 10_000
_NUMBERS_SHOWN = 40
"""Most cells of the numbers of ranks that are folded into a row."""


class _StalledRank(NamedTuple):
    """What a rank did when the stall was recorded; unknown values are None."""

    number: int | None
    """Its rank; None for a process without one."""
    device: str
    words: str
    step: int | None
    since_ns: int | None
    """Since when, in ns since the run's start."""
    state: str
    cpu: float | None
    waits: bool

    @property
    def details(self) -> str:
        """Its step, state and CPU."""
        since = "no step yet" if self.step is None else f"since step {format_count(self.step)}"
        cpu = f"{format_percent(self.cpu)} CPU" if self.cpu is not None and 0 <= self.cpu < _MOST_CORES else ""
        return ", ".join(part for part in (since, self.state, cpu) if part)


def _parse_stalled_rank(one: Mapping[str, Any], noticed_ns: int, state: RunSnapshot) -> _StalledRank:
    process = state.processes.get(int_member(one, "process") or 0)
    waited = ns_member(one, "for_s")
    return _StalledRank(
        int_member(one, "rank"),
        "" if process is None else f"{format_devices(process.devices)}{node_suffix(process.node)}".strip(),
        sanitize_line(text_member(one, "words") or UNKNOWN, 300),
        int_member(one, "step"),
        None if waited is None else noticed_ns - waited,
        sanitize_line(text_member(one, "state") or "", 20),
        number_member(one, "cpu"),
        one.get("waits") is True,
    )


def _stalled_ranks(facts: ScreenData) -> list[_StalledRank]:
    stall = facts.shown_stall
    if stall is None:
        return []
    noticed_ns = ns_member(stall.record, "t_s") or stall.noticed_ns
    return [_parse_stalled_rank(one, noticed_ns, facts.state) for one in stall.ranks if one.get("apart") is not True]


def preferred_height(facts: ScreenData, _: int = 0) -> int:
    """Rows that the whole content needs, without the two that the layout reserves for others' headings."""
    ranks = _stalled_ranks(facts)
    waiting = len({one.words for one in ranks if one.waits})
    return max(2 * sum(not one.waits for one in ranks) + waiting, 2)


def panel_title(facts: ScreenData, look: TerminalStyle) -> tuple[Row, Row]:
    """The panel's title, and the step in which the run stalled."""
    ranks = _stalled_ranks(facts)
    guilty = [one for one in ranks if not one.waits] or ranks
    steps = [one.step for one in guilty if one.step is not None]
    word = f"stalled at step {format_count(min(steps))}" if steps else "stalled"
    ranked = any(one.number is not None for one in ranks)
    return [((RANK_NAMES if ranked else NAMES)["replicas"], "title")], [(word, "bad")]


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel's rows, inside its frame. What gives way first: the keys, then step, state and CPU of each rank."""
    ranks = _stalled_ranks(facts)
    if not ranks:
        text = "" if facts.shown_stall is None else sanitize_line(facts.shown_stall.text, 400)
        return wrap_to_rows(text or "the record of the stall is damaged", width, "bad", height, look.glyphs.more)
    guilty, waiting = ([one for one in ranks if one.waits is waits] for waits in (False, True))
    below = _waiting_ranks_row(waiting, facts, look)
    detailed, brief = (_blamed_rank_rows(guilty, facts, width, look, details=details) for details in (True, False))
    rows = next((above for above in (detailed, brief) if len(above) + len(below) <= height), None)
    rows = [*(rows if rows is not None else _waiting_ranks_row(guilty, facts, look)), *below]
    keys = _keys(facts)
    if not keys or len(rows) >= height:
        return rows
    return [*rows, [], keys] if len(rows) + 2 <= height else [*rows, keys]


def render_full_screen(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel at full size: the table, then the stacks of the recorded stall."""
    stall = facts.shown_stall
    found = [] if stall is None else format_reply(stall.record, width=width)
    begin = next((index for index, (text, _) in enumerate(found) if index > 1 and not text), len(found))
    noticed: list[Row] = [] if stall is None else [[(f"as noticed at {format_clock(stall.noticed_ns)}", "dim")]]
    return [
        *render_panel(facts, width, height, look),
        [],
        *noticed,
        *([(text, style)] for text, style in found[begin + 1 :]),
    ]


def _seconds(since_ns: int | None, facts: ScreenData) -> str:
    return UNKNOWN if since_ns is None else f"{max(facts.elapsed_ns - since_ns, 0) / SECOND:,.0f} s"


def _blamed_rank_rows(
    ranks: Sequence[_StalledRank], facts: ScreenData, width: int, look: TerminalStyle, *, details: bool
) -> list[Row]:
    """The rows of the ranks that the others wait for; `details`: also step, state and CPU of each."""
    numbers = ["" if one.number is None else str(one.number) for one in ranks]
    number, device = (max(map(len, texts), default=0) for texts in (numbers, [one.device for one in ranks]))
    rows: list[Row] = []
    for one, text in zip(ranks, numbers, strict=True):
        head: Row = [(f"{look.glyphs.focus} ", "bad"), (text.rjust(number) + " " * bool(number), "bad")]
        head += [(one.device.ljust(device) + "  ", "")] if device else []
        head.append((_seconds(one.since_ns, facts).rjust(6) + "  ", "bold"))
        indent = row_width(head)
        room = max(width - indent, 10)
        if details and len(one.words) + 2 + len(one.details) <= room:
            rows.append([*head, (one.words, "bad"), (f"  {one.details}", "dim")])
            continue
        below = [(line, "bad") for line in wrap_text(one.words, room, 2 if details else 1, look.glyphs.more)]
        below += [(line, "dim") for line in wrap_text(one.details, room, 1, look.glyphs.more) if details]
        rows += [[*([(" " * indent, "")] if index else head), span] for index, span in enumerate(below)]
    return rows


def _waiting_ranks_row(ranks: Sequence[_StalledRank], facts: ScreenData, look: TerminalStyle) -> list[Row]:
    """A row for all ranks that stand in the same place, with the time since the last one came."""
    groups: dict[str, list[_StalledRank]] = {}
    for one in ranks:
        groups.setdefault(one.words, []).append(one)
    rows: list[Row] = []
    for words, own in groups.items():
        numbers = sorted(one.number for one in own if one.number is not None)
        named = format_ranges(numbers, min_length=2)
        if len(numbers) < len(own):
            named = "1 process" if len(own) == 1 else f"{format_count(len(own))} processes"
        named = named if len(named) <= _NUMBERS_SHOWN else format_count_with_noun(len(own), "rank")
        since = max((one.since_ns for one in own if one.since_ns is not None), default=None)
        text = f"{'waits' if len(own) == 1 else 'wait'} {words}" if own[0].waits else words
        mark, style = ("  ", "") if own[0].waits else (f"{look.glyphs.focus} ", "bad")
        rows.append([(mark, style), (named, style), (f" {text}  {_seconds(since, facts)}", "dim")])
    return rows


def _keys(facts: ScreenData) -> Row:
    """The keys that help now."""
    live = not (facts.is_over or facts.is_ending or facts.shows_past)
    here = facts.view.focus == "replicas" and facts.view.zoom is None
    works = (here, live, live and facts.stop_progress is None)
    row: Row = []
    for key, word in (one for one, now in zip(_KEYS, works, strict=True) if now):
        row += [("  " if row else "", ""), (key, "key"), (f" {word}", "dim")]
    return row
