"""Panel 2: the input, output and time of each replica of the last call, or of each stage of a split model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.model.run_snapshot import CallTimings, Process
from dpmon.record.record_types import Call, Size, count_rows
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, span_width, truncate
from dpmon.text.formatting import UNKNOWN, format_bytes, format_count, format_count_with_noun, format_duration
from dpmon.ui.chart import filled_bar, range_bar
from dpmon.ui.screen_data import NAMES, ScreenData, format_mode_and_devices
from dpmon.ui.styled_rows import Row, TableColumn, table_rows, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle


class CallChoice(NamedTuple):
    """One choice of the panel: a root, or one of several calls of a root in each step."""

    track: CallTimings
    nth: int
    of: int


_RANGE = "5 to 95%"
_FRESH = 64
"""A call that was not seen for more than this many steps can no longer be chosen."""


def choices(process: Process | None) -> list[CallChoice]:
    """All choices, in an order that stays the same while roots take turns."""
    found: list[CallChoice] = []
    for _, track in sorted(process.calls.items(), key=lambda item: (item[0][0], item[0][1] or "")) if process else ():
        parts = [part for part in track.parts if part.last.step >= track.last.step - _FRESH]
        if len(parts) > 1:
            found += [CallChoice(part, nth, len(parts)) for nth, part in enumerate(parts, 1)]
        else:
            found.append(CallChoice(track, 1, 1))
    return found


def current_choice(facts: ScreenData) -> tuple[CallChoice | None, int, int]:
    """The current choice, its number from 1 (0: always the root called last), and the number of choices."""
    process = facts.process
    if process is None or process.last_called_root is None:
        return None, 0, 0
    all_of_them = choices(process)
    count = len(all_of_them)
    if facts.view.call_choice and count > 1:
        index = (facts.view.call_choice - 1) % count
        return all_of_them[index], index + 1, count
    return CallChoice(process.last_called_root, 1, 1), 0, count


def shown_call(facts: ScreenData) -> CallTimings | None:
    """The root that the panel shows: the one called last, or the one that the user chose."""
    choice = current_choice(facts)[0]
    return choice.track if choice is not None else None


def _is_staged(call: Call) -> bool:
    """Whether the model of the call is split over several devices."""
    return not call.replicas and len(call.devices) > 1 and call.mode != "dp"


def has_stages(process: Process | None) -> bool:
    """Whether a model of the process is split over several devices."""
    return process is not None and any(_is_staged(track.last) for track in process.calls.values())


def preferred_height(facts: ScreenData, _: int = 0) -> int:
    """Rows that the whole content needs."""
    track = shown_call(facts)
    if track is None:
        return 3
    call = track.last
    return len(call.stages) + 2 if _is_staged(call) else max(len(call.devices), len(call.replicas), 1) + 1


def panel_title(facts: ScreenData, look: TerminalStyle) -> tuple[Row, Row]:
    """The panel's title, and its main number."""
    choice, which, count = current_choice(facts)
    if choice is None:
        return [(NAMES["replicas"], "title")], []
    call = choice.track.last
    dot = f" {look.glyphs.middot} "
    part = f"{dot}call {choice.nth} of {choice.of} a step" if choice.of > 1 else ""
    many = f"{dot}newest of {count}" if count > 1 and not which else f"{dot}{which} of {count}" if which else ""
    corner: Row = [("call", "dim"), (align_right(format_count(call.call), 9), "")]
    head = "2 Stages" if _is_staged(call) else NAMES["replicas"]
    # The names come last, so that they are cut before the number of the choice.
    return [(head, "title"), (many + part, ""), *evaluation_mark(call, look), (name_of(call, dot), "")], corner


def name_of(call: Call, dot: str) -> str:
    """The root of a call, and what calls it; `dot` separates them."""
    return f"{dot}{sanitize_line(call.root, 60)}{dot}{sanitize_line(call.via, 40) if call.via else 'bare module'}"


def evaluation_mark(call: Call, look: TerminalStyle) -> Row:
    """A mark for a call of an evaluation, without gradients or in eval mode; empty for training."""
    word = (
        "evaluation"
        if call.is_evaluation
        else "no gradients"
        if not call.grad
        else ""
        if call.training
        else "eval mode"
    )
    return [(f" {look.glyphs.middot} ", ""), (word, "wait")] if word else []


def render_panel(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel's rows, inside its frame: a header, a row per replica, idle devices, missing values and why."""
    track = shown_call(facts)
    if track is None:
        return [[(facts.empty_reason("no call was traced", "no call yet"), "dim")]]
    call = track.last
    staged = _is_staged(call)
    rows = _stages(track, width, look) if staged else _replicas(track, width, height, look)
    if call.failed:
        rows.append([("the forward raised an exception", "bad")])
    for reason in call.absent.values():
        rows += wrap_to_rows(sanitize_line(reason, 300), width, max_rows=None if staged else 1, more=look.glyphs.more)
    process = facts.process
    if process is not None and call.virtual and len(rows) < height:
        shared = "one GPU" if any(device.startswith("cuda") for device in call.devices) else "this machine's processor"
        rows.append([(f"virtual: the replicas share {shared}", "dim")] if process.mode == "dp" else [])
    return rows


def _times(track: CallTimings, numbers: Sequence[int]) -> list[TableColumn]:
    """The median times of replicas or stages: on the host and, if they are known, on the device."""
    times = [track.times[number] if number < len(track.times) else None for number in numbers]
    host = [format_duration(None if each is None else each.middle) for each in times]
    columns = [TableColumn("host time", 10, host, "bold")]
    if track.device_ns:
        columns.append(TableColumn("on device", 10, [format_duration(track.device_ns.get(n)) for n in numbers], "bold"))
    return columns


def _replicas(track: CallTimings, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """A header, a row per replica, and idle devices.

    The widths of the columns depend on the panel's width, on the last call, and on which times are known.
    """
    call = track.last
    numbers = [replica.replica for replica in call.replicas]
    device = min(max([span_width(sanitize_line(d, 20)) for d in call.devices] + [6]), 10)
    ins = [size_text(replica.inputs) for replica in call.replicas]
    outs = [size_text(replica.outputs) for replica in call.replicas]
    # Number, device, rows, times and gaps have fixed widths. Sizes get the rest; drawings get what the sizes leave.
    times = _times(track, numbers)
    room = max(width - (3 + device + 2 + 2 + 6 + 10 * len(times)), 12)
    longest = max(map(span_width, [*outs, "output"]))
    given = min(max(map(span_width, [*ins, "input"])), max(room * 3 // 5, room - longest))
    gave = min(longest, room - given)
    left = room - given - gave - 3  # a gap before the bar, two before the spread
    bar = min(left * 2 // 5, 24) if left * 2 // 5 >= len("share") else 0
    counts = [count_rows(replica.inputs, call.dim) for replica in call.replicas]
    columns = [
        TableColumn("#", 2, [str(number) for number in numbers], "bold", gap=1),
        TableColumn(
            "device", device, [sanitize_line(replica.device, 40) for replica in call.replicas], left=True, gap=2
        ),
        TableColumn("input", given, ins, left=True, gap=2),
        TableColumn("output", gave, outs, left=True),
        TableColumn("rows", 6, [UNKNOWN if count is None else str(count) for count in counts]),
    ]
    if bar:
        shares = [(count / call.rows,) if count is not None and call.rows else None for count in counts]
        bars: list[Row] = [[(" ", ""), *filled_bar(share, bar, look.glyphs)] for share in shares]
        columns.append(TableColumn(" " + "share".ljust(bar), bar + 1, bars))
    columns += times
    if left >= len("spread"):
        columns.append(_spreads(track, numbers, min(left - bar, 48), look))
    rows = table_rows(columns, look.glyphs.more)[0 if height > 1 else 1 :] + _idle_device_rows(call, look)
    return rows if call.replicas else [*rows, [("the replicas of this call were not seen", "dim")]]


def _spreads(track: CallTimings, numbers: Sequence[int], width: int, look: TerminalStyle) -> TableColumn:
    """The range of each replica's times, on a scale up to the slowest one.

    The scale starts at the fastest one, unless that would magnify noise.
    """
    known = [spread for spread in track.times if spread is not None]
    top = max((spread.high for spread in known), default=0.0)
    base = min([spread.low for spread in known] + [top * 0.7])
    drawn: list[Row] = []
    for number in numbers:
        times = track.times[number] if number < len(track.times) else None
        text = " " * width if times is None else range_bar(*times[:3], top, width, look.glyphs, base)
        drawn.append([("  " + text, "bar")])
    return TableColumn("  " + _scale(base, top, width), width + 2, drawn)


def _scale(base: float, top: float, width: int) -> str:
    """The scale of the last column: the times at its edges, with its title between them if it fits.

    The right edge is the 95th percentile of the slowest replica.
    """
    begin, end = (format_duration(base, ""), format_duration(top, "")) if top else ("", "")
    room = width - len(begin) - len(end)
    if top and room >= 1:
        between = next(word for word in (_RANGE, "5-95%", "") if len(word) + 2 <= max(room, 2))
        return begin + between.center(room) + end
    number = begin.rstrip("nµms")
    unit = begin[len(number) :]
    if top and end.endswith(unit) and len(f"{number}-{end}") <= width:
        return f"{number}-{end}".rjust(width)
    return (_RANGE if width >= len(_RANGE) else "spread").ljust(width)


def _stages(track: CallTimings, width: int, look: TerminalStyle) -> list[Row]:
    """A header, and a row per stage with its incoming tensors and its time."""
    call = track.last
    device = min(max([span_width(sanitize_line(s.device, 20)) for s in call.stages] + [6]), 10)
    ins = [size_text(stage.inputs) for stage in call.stages]
    outs = [size_text(stage.outputs) for stage in call.stages]
    names = [sanitize_line(", ".join(stage.parts), 200) for stage in call.stages]
    room = max(width - 3 - device - 2 - 10 - 10 - 4 - (10 if track.device_ns else 0), 18)
    given = min(max(map(span_width, [*ins, "input"])), room // 3)
    gave = min(max(map(span_width, [*outs, "output"])), room // 3)
    parts = min(max(map(span_width, [*names, "parts"])), room - given - gave)
    columns = [
        TableColumn("#", 2, [str(stage.stage) for stage in call.stages], "bold", gap=1),
        TableColumn("device", device, [sanitize_line(stage.device, 20) for stage in call.stages], left=True, gap=2),
        TableColumn("parts", parts, names, left=True, gap=2),
        TableColumn("input", given, ins, left=True, gap=2),
        TableColumn("output", gave, outs, left=True),
        TableColumn(
            "crossed", 10, ["" if not stage.stage else format_bytes(stage.crossed_bytes) for stage in call.stages]
        ),
        *_times(track, [stage.stage for stage in call.stages]),
    ]
    rows = table_rows(columns, look.glyphs.more)
    if not call.stages:
        rows.append([("no stage of this call was seen", "dim")])
    return rows


def size_text(sizes: tuple[Size, ...] | None) -> str:
    """The first size and the number of others: "[16, 512] +2"; clean."""
    if sizes is None:
        return UNKNOWN
    if not sizes:
        return "none"
    first = _shape(sizes[0], 12)
    return first if len(sizes) == 1 else f"{first} +{len(sizes) - 1}"


def every_size(
    inputs: tuple[Size, ...] | None,
    outputs: tuple[Size, ...] | None,
    width: int,
    look: TerminalStyle,
    unseen: str = "not seen",
) -> list[Row]:
    """One row per input or output size."""
    rows: list[Row] = []
    for word, sizes in (("in ", inputs), ("out", outputs)):
        if sizes is None:
            rows.append([(f"   {word}  {UNKNOWN}  {unseen}", "dim")])
        for size in sizes or ():
            rows.append([(f"   {word}  ", "dim"), (truncate(_size_line(size), width - 8, look.glyphs.more), "")])
    return rows


def _size_line(size: Size) -> str:
    """Everything about one size: "0.mask [16, 512] float32 32.0 KiB"; clean."""
    name = sanitize_line(size.path, 80) + " " if size.path else ""
    return f"{name}{_shape(size, 32)} {sanitize_line(size.dtype, 20)} {format_bytes(size.bytes)}"


def _shape(size: Size, most: int) -> str:
    """The shape of this rank's tensor, at most `most` dimensions: "[8, 512]"; for a DTensor "[8, 512] of [16, 512]"."""
    shapes = (size.shape,) if size.global_shape is None else (size.shape, size.global_shape)
    return " of ".join("[" + ", ".join(str(extent) for extent in shape[:most]) + "]" for shape in shapes)


def _idle_device_rows(call: Call, look: TerminalStyle) -> list[Row]:
    """A row for each device that received nothing, with the reason."""
    if call.mode != "dp":
        return []
    used = len(call.replicas)
    rows = call.rows
    why = f"idle: a batch of {rows} makes {used} chunks" if rows is not None else f"idle: {used} chunks"
    return [
        [(align_right(str(i), 2) + " ", "dim"), (sanitize_line(device, 20) + "  ", "dim"), (why, "wait")]
        for i, device in enumerate(call.devices[used:], used)
    ]


def _host_times_note(track: CallTimings) -> str:
    """A sentence about the host times: how many calls they cover, their range, and how they differ from apply."""
    known = [spread for spread in track.times if spread is not None]
    if not known:
        return ""
    calls = max(spread.calls for spread in known)
    low, high = min(spread.low for spread in known), max(spread.high for spread in known)
    spread_note = f"host time: each replica's own forward, the median of {format_count_with_noun(calls, 'call')};"
    spread_note += f" 5th to 95th percentile: {format_duration(low)} to {format_duration(high)}"
    return (
        spread_note + "; apply, in panels 3 and 4, lasts until the slowest is done"
        if len(track.times) > 1
        else spread_note
    )


def render_full_screen(facts: ScreenData, width: int, height: int, look: TerminalStyle) -> list[Row]:
    """The panel at full size: the table, then every size of every replica or stage by its path."""
    rows = render_panel(facts, width, height, look)
    track = shown_call(facts)
    if track is None:
        return rows
    rows.append([])
    if not _is_staged(track.last):
        mode, where = format_mode_and_devices(facts.process, look.glyphs.times)
        rows.append([(f"mode {mode}  {where}", "dim")])
        rows += wrap_to_rows(_host_times_note(track), width)
        rows.append([])
    for replica in track.last.replicas:
        rows.append([(f"{align_right(str(replica.replica), 2)} {sanitize_line(replica.device, 40)}", "bold")])
        rows += every_size(replica.inputs, replica.outputs, width, look, "not seen by a forward hook")
    for stage in track.last.stages:
        names = sanitize_line(", ".join(stage.parts), max(width - 20, 10))
        rows.append([(f"{align_right(str(stage.stage), 2)} {sanitize_line(stage.device, 40)}  ", "bold"), (names, "")])
        rows += every_size(stage.inputs, stage.outputs, width, look)
    return rows
