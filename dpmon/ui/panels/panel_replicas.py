"""Panel 2: the input, output and time of each replica of the last call, or of each stage of a split model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.model.recent_calls import CallTimings
from dpmon.model.run_snapshot import Process
from dpmon.record.record_types import Call, Size, count_rows
from dpmon.record.schema import TRAINING
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, span_width, truncate
from dpmon.text.formatting import UNKNOWN, format_bytes, format_count, format_count_with_noun, format_duration
from dpmon.ui.chart import filled_bar, range_bar
from dpmon.ui.screen_data import NAMES, ScreenData, format_mode_and_devices
from dpmon.ui.styled_rows import Row, TableColumn, table_rows, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle


class CallChoice(NamedTuple):
    """One choice of the panel: a root module, or one of several calls of a root module in each step."""

    track: CallTimings
    nth: int
    per_step: int
    """How often each step calls this root module."""


_RANGE_TITLE = "5 to 95%"
_MAX_UNSEEN_STEPS = 64
"""A call that has not been seen for more than this many steps can no longer be chosen."""


def list_choices(process: Process | None) -> list[CallChoice]:
    """Return all choices, in an order that does not depend on which root module was called last."""
    call_choices: list[CallChoice] = []

    def sort_key(key: tuple[str, str | None]) -> tuple[str, str]:
        root, via = key
        return root, via or ""

    tracks = process.calls if process else {}
    for key in sorted(tracks, key=sort_key):
        track = tracks[key]
        newest_step = track.last.step or 0
        recent_parts = [part for part in track.parts if (part.last.step or 0) >= newest_step - _MAX_UNSEEN_STEPS]
        if len(recent_parts) > 1:
            call_choices += [CallChoice(part, nth, len(recent_parts)) for nth, part in enumerate(recent_parts, 1)]
        else:
            call_choices.append(CallChoice(track, 1, 1))
    return call_choices


def current_choice(screen: ScreenData) -> tuple[CallChoice | None, int, int]:
    """Return the current choice, its number from 1 (0: always the newest call), and the number of choices."""
    process = screen.process
    if process is None or process.last_called_root is None:
        return None, 0, 0
    call_choices = list_choices(process)
    count = len(call_choices)
    if screen.view.call_choice and count > 1:
        index = (screen.view.call_choice - 1) % count
        return call_choices[index], index + 1, count
    return CallChoice(process.last_called_root, 1, 1), 0, count


def shown_call(screen: ScreenData) -> CallTimings | None:
    """Return the call that the panel shows: the newest one, or that of the root module that the user chose."""
    choice, _, _ = current_choice(screen)
    return choice.track if choice is not None else None


def _is_staged(call: Call) -> bool:
    """Return whether the model of the call is split over several devices."""
    return not call.replicas and len(call.devices) > 1 and call.mode != "dp"


def has_stages(process: Process | None) -> bool:
    """Return whether a model of the process is split over several devices."""
    return process is not None and any(_is_staged(track.last) for track in process.calls.values())


def preferred_height(screen: ScreenData, _: int = 0) -> int:
    """Return the number of rows of the whole content."""
    track = shown_call(screen)
    if track is None:
        return 3
    call = track.last
    return len(call.stages) + 2 if _is_staged(call) else max(len(call.devices), len(call.replicas), 1) + 1


def panel_title(screen: ScreenData, style: TerminalStyle) -> tuple[Row, Row]:
    """Return the title and the main number."""
    choice, number, count = current_choice(screen)
    if choice is None:
        return [(NAMES["replicas"], "title")], []
    call = choice.track.last
    dot = f" {style.glyphs.middot} "
    part_text = f"{dot}call {choice.nth} of {choice.per_step} per step" if choice.per_step > 1 else ""
    choice_text = f"{dot}{number} of {count}" if number else ""
    if count > 1 and not number:
        choice_text = f"{dot}newest of {count}"
    corner: Row = [("call", "dim"), (align_right(format_count(call.call), 9), "")]
    title = "2 Stages" if _is_staged(call) else NAMES["replicas"]
    # The names come last, so that they are cut before the number of the choice.
    mark, name = kind_mark(screen, call, style), call_name(call, dot)
    return [(title, "title"), (choice_text + part_text, ""), *mark, (name, "")], corner


def call_name(call: Call, dot: str) -> str:
    """Return the root module of a call and what called it, separated by `dot`."""
    return f"{dot}{sanitize_line(call.root, 60)}{dot}{sanitize_line(call.via, 40) if call.via else 'bare module'}"


def kind_mark(screen: ScreenData, call: Call, style: TerminalStyle) -> Row:
    """Return a mark for a call of another kind than training, without gradients or in eval mode; else empty."""
    if call.kind != TRAINING:
        mark = screen.state.kind_words[call.kind]
    elif not call.grad:
        mark = "no gradients"
    elif not call.training:
        mark = "eval mode"
    else:
        return []
    return [(f" {style.glyphs.middot} ", ""), (mark, "wait")]


def render_panel(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows inside the frame: a header, a row per replica, idle devices, and why values are missing."""
    track = shown_call(screen)
    if track is None:
        return [[(screen.empty_reason("no call was traced", "no call yet"), "dim")]]
    call = track.last
    staged = _is_staged(call)
    rows = _stage_rows(track, width, style) if staged else _replica_rows(track, width, height, style)
    if call.failed:
        rows.append([("the forward raised an exception", "bad")])
    for reason in call.absent.values():
        rows += wrap_to_rows(sanitize_line(reason, 300), width, max_rows=None if staged else 1, more=style.glyphs.more)
    process = screen.process
    if process is not None and call.virtual and len(rows) < height:
        shared = "one GPU" if any(device.startswith("cuda") for device in call.devices) else "this machine's CPU"
        rows.append([(f"virtual: the replicas share {shared}", "dim")] if process.mode == "dp" else [])
    return rows


def _time_columns(track: CallTimings, numbers: Sequence[int]) -> list[TableColumn]:
    """Return columns with the median times of replicas or stages: on the host and, if known, on the device."""
    times = [track.times[number] if number < len(track.times) else None for number in numbers]
    host = [format_duration(None if times_ns is None else times_ns.middle) for times_ns in times]
    columns = [TableColumn("host time", 10, host, "bold")]
    if track.device_ns:
        columns.append(TableColumn("on device", 10, [format_duration(track.device_ns.get(n)) for n in numbers], "bold"))
    return columns


def _replica_rows(track: CallTimings, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return a header, a row per replica, and idle devices.

    The widths of the columns depend on the panel's width, on the last call, and on which times are known.
    """
    call = track.last
    numbers = [replica.replica for replica in call.replicas]
    device_width = min(max([span_width(sanitize_line(d, 20)) for d in call.devices] + [6]), 10)
    ins = [size_text(replica.inputs) for replica in call.replicas]
    outs = [size_text(replica.outputs) for replica in call.replicas]
    # Number, device, rows, times and gaps have fixed widths. Sizes get the rest; drawings get what the sizes leave.
    times = _time_columns(track, numbers)
    free_cells = max(width - (3 + device_width + 2 + 2 + 6 + 10 * len(times)), 12)
    longest = max(map(span_width, [*outs, "output"]))
    input_width = min(max(map(span_width, [*ins, "input"])), max(free_cells * 3 // 5, free_cells - longest))
    output_width = min(longest, free_cells - input_width)
    spare_cells = free_cells - input_width - output_width - 3  # a gap before the bar, two before the spread
    bar_width = min(spare_cells * 2 // 5, 24) if spare_cells * 2 // 5 >= len("share") else 0
    counts = [count_rows(replica.inputs, call.dim) for replica in call.replicas]
    columns = [
        TableColumn("#", 2, [str(number) for number in numbers], "bold", gap=1),
        TableColumn(
            "device", device_width, [sanitize_line(replica.device, 40) for replica in call.replicas], left=True, gap=2
        ),
        TableColumn("input", input_width, ins, left=True, gap=2),
        TableColumn("output", output_width, outs, left=True),
        TableColumn("rows", 6, [UNKNOWN if count is None else str(count) for count in counts]),
    ]
    if bar_width:
        shares = [(count / call.rows,) if count is not None and call.rows else None for count in counts]
        bars: list[Row] = [[(" ", ""), *filled_bar(share, bar_width, style.glyphs)] for share in shares]
        columns.append(TableColumn(" " + "share".ljust(bar_width), bar_width + 1, bars))
    columns += times
    if spare_cells >= len("spread"):
        columns.append(_spread_column(track, numbers, min(spare_cells - bar_width, 48), style))
    rows = table_rows(columns, style.glyphs.more)[0 if height > 1 else 1 :] + _idle_device_rows(call, style)
    return rows if call.replicas else [*rows, [("the replicas of this call were not seen", "dim")]]


def _spread_column(track: CallTimings, numbers: Sequence[int], width: int, style: TerminalStyle) -> TableColumn:
    """Return a column with the range of each replica's times, on a scale up to the slowest one.

    The scale starts at the fastest one, unless that would magnify noise.
    """
    spreads = [spread for spread in track.times if spread is not None]
    top = max((spread.high for spread in spreads), default=0.0)
    bottom = min([spread.low for spread in spreads] + [top * 0.7])
    bars: list[Row] = []
    for number in numbers:
        times = track.times[number] if number < len(track.times) else None
        text = " " * width
        if times is not None:
            text = range_bar(times.low, times.middle, times.high, top, width, style.glyphs, bottom)
        bars.append([("  " + text, "bar")])
    return TableColumn("  " + _scale_title(bottom, top, width), width + 2, bars)


def _scale_title(bottom: float, top: float, width: int) -> str:
    """Return the header of the last column: the times at its edges, with its title between them if it fits.

    The right edge is the 95th percentile of the slowest replica.
    """
    start_text, end_text = (format_duration(bottom, ""), format_duration(top, "")) if top else ("", "")
    free_cells = width - len(start_text) - len(end_text)
    if top and free_cells >= 1:
        title = next(word for word in (_RANGE_TITLE, "5-95%", "") if len(word) + 2 <= max(free_cells, 2))
        return start_text + title.center(free_cells) + end_text
    number = start_text.rstrip("nµms")
    unit = start_text[len(number) :]
    if top and end_text.endswith(unit) and len(f"{number}-{end_text}") <= width:
        return f"{number}-{end_text}".rjust(width)
    return (_RANGE_TITLE if width >= len(_RANGE_TITLE) else "spread").ljust(width)


def _stage_rows(track: CallTimings, width: int, style: TerminalStyle) -> list[Row]:
    """Return a header, and a row per stage with its incoming tensors and its time."""
    call = track.last
    device_width = min(max([span_width(sanitize_line(s.device, 20)) for s in call.stages] + [6]), 10)
    ins = [size_text(stage.inputs) for stage in call.stages]
    outs = [size_text(stage.outputs) for stage in call.stages]
    names = [sanitize_line(", ".join(stage.parts), 200) for stage in call.stages]
    free_cells = max(width - 3 - device_width - 2 - 10 - 10 - 4 - (10 if track.device_ns else 0), 18)
    input_width = min(max(map(span_width, [*ins, "input"])), free_cells // 3)
    output_width = min(max(map(span_width, [*outs, "output"])), free_cells // 3)
    names_width = min(max(map(span_width, [*names, "parts"])), free_cells - input_width - output_width)
    columns = [
        TableColumn("#", 2, [str(stage.stage) for stage in call.stages], "bold", gap=1),
        TableColumn(
            "device", device_width, [sanitize_line(stage.device, 20) for stage in call.stages], left=True, gap=2
        ),
        TableColumn("parts", names_width, names, left=True, gap=2),
        TableColumn("input", input_width, ins, left=True, gap=2),
        TableColumn("output", output_width, outs, left=True),
        TableColumn(
            "crossed", 10, ["" if not stage.stage else format_bytes(stage.crossed_bytes) for stage in call.stages]
        ),
        *_time_columns(track, [stage.stage for stage in call.stages]),
    ]
    rows = table_rows(columns, style.glyphs.more)
    if not call.stages:
        rows.append([("no stage of this call was seen", "dim")])
    return rows


def size_text(sizes: tuple[Size, ...] | None) -> str:
    """Return the first size and the number of others, sanitized: "[16, 512] +2"."""
    if sizes is None:
        return UNKNOWN
    if not sizes:
        return "none"
    first_size, *others = sizes
    text = _shape_text(first_size, 12)
    return f"{text} +{len(others)}" if others else text


def all_size_rows(
    inputs: tuple[Size, ...] | None,
    outputs: tuple[Size, ...] | None,
    width: int,
    style: TerminalStyle,
    unseen_text: str = "not seen",
) -> list[Row]:
    """Return a row per input or output size."""
    rows: list[Row] = []
    for label, sizes in (("in ", inputs), ("out", outputs)):
        if sizes is None:
            rows.append([(f"   {label}  {UNKNOWN}  {unseen_text}", "dim")])
        for size in sizes or ():
            rows.append([(f"   {label}  ", "dim"), (truncate(_size_line(size), width - 8, style.glyphs.more), "")])
    return rows


def _size_line(size: Size) -> str:
    """Return everything known of a size, sanitized: "0.mask [16, 512] float32 32.0 KiB"."""
    name = sanitize_line(size.path, 80) + " " if size.path else ""
    return f"{name}{_shape_text(size, 32)} {sanitize_line(size.dtype, 20)} {format_bytes(size.bytes)}"


def _shape_text(size: Size, max_dimensions: int) -> str:
    """Return the first `max_dimensions` of a shape: "[8, 512]"; for a DTensor "[8, 512] of [16, 512]"."""
    shapes = (size.shape,) if size.global_shape is None else (size.shape, size.global_shape)
    return " of ".join("[" + ", ".join(str(extent) for extent in shape[:max_dimensions]) + "]" for shape in shapes)


def _idle_device_rows(call: Call, style: TerminalStyle) -> list[Row]:
    """Return a row for each device that received nothing, with the reason."""
    if call.mode != "dp":
        return []
    chunk_count = len(call.replicas)
    reason = f"idle: a batch of {format_count(call.rows)} makes {format_count_with_noun(chunk_count, 'chunk')}"
    if call.failed:
        reason = "no output: an exception ended the call"
    return [
        [(align_right(str(i), 2) + " ", "dim"), (sanitize_line(device, 20) + "  ", "dim"), (reason, "wait")]
        for i, device in enumerate(call.devices[chunk_count:], chunk_count)
    ]


def _host_times_note(track: CallTimings) -> str:
    """Return a sentence on the host times: how many calls they cover, their range, and how they differ from apply."""
    spreads = [spread for spread in track.times if spread is not None]
    if not spreads:
        return ""
    call_count = max(spread.calls for spread in spreads)
    low, high = min(spread.low for spread in spreads), max(spread.high for spread in spreads)
    note = f"host time: each replica's own forward, the median of {format_count_with_noun(call_count, 'call')};"
    note += f" 5th to 95th percentile: {format_duration(low)} to {format_duration(high)}"
    return note + "; apply, in panels 3 and 4, lasts until the slowest is done" if len(track.times) > 1 else note


def render_full_screen(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows on the full screen: the table, then every size of every replica or stage by its path."""
    rows = render_panel(screen, width, height, style)
    track = shown_call(screen)
    if track is None:
        return rows
    rows.append([])
    if not _is_staged(track.last):
        mode, devices = format_mode_and_devices(screen.process, style.glyphs.times)
        rows.append([(f"mode {mode}  {devices}", "dim")])
        rows += wrap_to_rows(_host_times_note(track), width)
        rows.append([])
    for replica in track.last.replicas:
        rows.append([(f"{align_right(str(replica.replica), 2)} {sanitize_line(replica.device, 40)}", "bold")])
        rows += all_size_rows(replica.inputs, replica.outputs, width, style, "not seen by a forward hook")
    for stage in track.last.stages:
        names = sanitize_line(", ".join(stage.parts), max(width - 20, 10))
        rows.append([(f"{align_right(str(stage.stage), 2)} {sanitize_line(stage.device, 40)}  ", "bold"), (names, "")])
        rows += all_size_rows(stage.inputs, stage.outputs, width, style)
    return rows
