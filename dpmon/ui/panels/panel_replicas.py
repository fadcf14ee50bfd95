"""Panel 2: the input, output and time of each replica of the last call, or of each stage of a split model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dpmon.model.recent_calls import CallTimings, TimedPart
from dpmon.model.run_process import Process
from dpmon.record.record_types import Call, Size, Stage, count_rows
from dpmon.record.schema import TRAINING
from dpmon.report.tables import PART_TIMES
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, truncate
from dpmon.text.formatting import UNKNOWN, format_bytes, format_count, format_count_with_noun, format_duration
from dpmon.ui.chart import filled_bar, range_bar
from dpmon.ui.panel_table import PanelColumn, draw_table, fact_columns
from dpmon.ui.screen_data import NAMES, ScreenData, format_mode_and_devices
from dpmon.ui.styled_rows import Row, fit_row, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle


class CallChoice(NamedTuple):
    """One choice of the panel: a root module, or one of several calls of a root module in each step."""

    track: CallTimings
    nth: int
    per_step: int
    """How often each step calls this root module."""


_RANGE_TITLE = "5 to 95%"
_LOW, _HIGH = 0.05, 0.95
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


def panel_title(screen: ScreenData) -> tuple[Row, Row]:
    """Return the title and the main number."""
    choice, number, count = current_choice(screen)
    if choice is None:
        return [(NAMES["replicas"], "title")], []
    call = choice.track.last
    part_text = f" · call {choice.nth} of {choice.per_step} per step" if choice.per_step > 1 else ""
    choice_text = f" · {number} of {count}" if number else ""
    if count > 1 and not number:
        choice_text = f" · newest of {count}"
    corner: Row = [("call", "dim"), (align_right(format_count(call.call), 9), "")]
    title = "2 Stages" if _is_staged(call) else NAMES["replicas"]
    # The names come last, so that they are cut before the number of the choice.
    mark, name = kind_mark(screen, call), call_name(call)
    return [(title, "title"), (choice_text + part_text, ""), *mark, (name, "")], corner


def call_name(call: Call) -> str:
    """Return the root module of a call and what called it, each after a dot."""
    return f" · {sanitize_line(call.root, 60)} · {sanitize_line(call.via, 40) if call.via else 'bare module'}"


def kind_mark(screen: ScreenData, call: Call) -> Row:
    """Return a mark for a call of another kind than training, without gradients or in eval mode; else empty."""
    if call.kind != TRAINING:
        mark = screen.state.kind_words[call.kind]
    elif not call.grad:
        mark = "no gradients"
    elif not call.training:
        mark = "eval mode"
    else:
        return []
    return [(" · ", ""), (mark, "wait")]


def render_panel(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows inside the frame: a header, a row per replica, idle devices, and why values are missing."""
    track = shown_call(screen)
    if track is None:
        return [[(screen.empty_reason("no call was traced", "no call yet"), "dim")]]
    call = track.last
    staged, rows = _is_staged(call), _part_table(track, width)[0 if height > 1 else 1 :]
    if not call.stages if staged else not call.replicas:
        rows.append([(f"no {'stage' if staged else 'replica'} of this call was seen", "dim")])
    rows += _idle_device_rows(call)
    if call.failed:
        rows.append([("the forward raised an exception", "bad")])
    for reason in call.absent.values():
        rows += wrap_to_rows(sanitize_line(reason, 300), width, max_rows=None if staged else 1)
    process = screen.process
    if process is not None and call.virtual and len(rows) < height:
        shared = "one GPU" if any(device.startswith("cuda") for device in call.devices) else "this machine's CPU"
        rows.append([(f"virtual: the replicas share {shared}", "dim")] if process.mode == "dp" else [])
    return rows


def _part_table(track: CallTimings, width: int) -> list[Row]:
    """Return a header, and a row per replica with its share of the batch, or per stage with its incoming tensors."""
    call, parts = track.last, track.timed
    device, *times = fact_columns(PART_TIMES, parts, dict.fromkeys(("host time", "on device"), "bold"))
    columns = [PanelColumn("#", [str(part.number) for part in parts], "bold", min_width=2), device]
    if _is_staged(call):
        names = [sanitize_line(", ".join(stage.parts), 200) for stage in call.stages]
        columns.append(PanelColumn("parts", names, is_text=True))
    columns.append(PanelColumn("input", [size_text(part.part.inputs) for part in parts], is_text=True))
    columns.append(PanelColumn("output", [size_text(part.part.outputs) for part in parts], is_text=True))
    if _is_staged(call):
        crossed = [format_bytes(stage.crossed_bytes) if stage.stage else "" for stage in call.stages]
        return draw_table([*columns, PanelColumn("crossed", crossed, min_width=8), *times], width)
    counts = [count_rows(part.part.inputs, call.dim) for part in parts]
    columns.append(PanelColumn("rows", [UNKNOWN if count is None else str(count) for count in counts], min_width=4))

    def share_bars(bar_width: int) -> Sequence[str | Row]:
        shares = [(count / call.rows,) if count is not None and call.rows else None for count in counts]
        return ["share".ljust(bar_width), *(filled_bar(share, bar_width) for share in shares)]

    def spread_bars(bar_width: int) -> Sequence[str | Row]:
        return _spread_bars(parts, bar_width)

    columns.append(PanelColumn(cells=[""] * len(parts), rank=2, min_width=len("share"), draw=share_bars))
    spread = PanelColumn(cells=[""] * len(parts), rank=1, min_width=len("spread"), draw=spread_bars, max_width=48)
    spread = spread._replace(wanted_width=len("1.25ms 4.19ms"))
    return draw_table([*columns, *times, spread], width)


def _spread_bars(parts: Sequence[TimedPart], width: int) -> Sequence[str | Row]:
    """Return a title and the range of each replica's times, on a scale up to the slowest one.

    The scale starts at the fastest one, unless that would magnify noise.
    """
    ranges = [[part.time.quantile(fraction) or 0.0 for fraction in (_LOW, 0.5, _HIGH)] for part in parts]
    top = max([high for _, _, high in ranges], default=0.0)
    bottom = min([low for low, _, _ in ranges if low] + [top * 0.7])
    bars: list[str | Row] = [_scale_title(bottom, top, width)]
    for part, (low, _, high) in zip(parts, ranges, strict=True):
        text = " " * width
        if part.host_ns is not None:
            text = range_bar(low, part.host_ns, high, top, width, bottom)
        bars.append([(text, "bar")])
    return bars


def _scale_title(bottom: float, top: float, width: int) -> str:
    """Return the header of the last column: the times at its edges, with its title between them if it fits.

    The right edge is the 95th percentile of the slowest replica.
    """
    start_text, end_text = format_duration(bottom, ""), format_duration(top, "")
    free_cells = width - len(start_text) - len(end_text)
    if not top or free_cells < 1:
        return "spread".ljust(width)
    return start_text + (_RANGE_TITLE if free_cells >= len(_RANGE_TITLE) + 2 else "").center(free_cells) + end_text


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
) -> list[Row]:
    """Return a row per input or output size."""
    rows: list[Row] = []
    for label, sizes in (("in ", inputs), ("out", outputs)):
        if sizes is None:
            rows.append([(f"   {label}  {UNKNOWN}  not seen", "dim")])
        for size in sizes or ():
            rows.append([(f"   {label}  ", "dim"), (truncate(_size_line(size), width - 8), "")])
    return rows


def _size_line(size: Size) -> str:
    """Return everything known of a size, sanitized: "0.mask [16, 512] float32 32.0 KiB"."""
    name = sanitize_line(size.path, 80) + " " if size.path else ""
    return f"{name}{_shape_text(size, 32)} {sanitize_line(size.dtype, 20)} {format_bytes(size.bytes)}"


def _shape_text(size: Size, max_dimensions: int) -> str:
    """Return the first `max_dimensions` of a shape: "[8, 512]"; for a DTensor "[8, 512] of [16, 512]"."""
    shapes = (size.shape,) if size.global_shape is None else (size.shape, size.global_shape)
    return " of ".join("[" + ", ".join(str(extent) for extent in shape[:max_dimensions]) + "]" for shape in shapes)


def _idle_device_rows(call: Call) -> list[Row]:
    """Return a row for each device that received nothing, with the reason."""
    if call.mode != "dp":
        return []
    chunk_count = len(call.replicas)
    reason = f"idle: a batch of {format_count(call.rows)} makes {format_count_with_noun(chunk_count, 'chunk')}"
    if call.failed:
        reason = "no output: an exception ended the call"
    return [
        [(align_right(str(i), 2) + "  ", "dim"), (sanitize_line(device, 20) + "  ", "dim"), (reason, "wait")]
        for i, device in enumerate(call.devices[chunk_count:], chunk_count)
    ]


def _host_times_note(track: CallTimings) -> str:
    """Return a sentence on the host times: how many calls they cover, their range, and how they differ from apply."""
    times = [part.time for part in track.timed if part.time.count]
    if not times:
        return ""
    low, high = min(time.quantile(_LOW) or 0.0 for time in times), max(time.quantile(_HIGH) or 0.0 for time in times)
    calls_text = format_count_with_noun(max(time.count for time in times), "call")
    note = f"host time: each replica's own forward, the median of {calls_text};"
    note += f" 5th to 95th percentile: {format_duration(low)} to {format_duration(high)}"
    return note + "; apply, in panels 3 and 4, lasts until the slowest is done" if len(track.timed) > 1 else note


def render_full_screen(screen: ScreenData, width: int, height: int, style: TerminalStyle) -> list[Row]:
    """Return the rows on the full screen: the table, then every size of every replica or stage by its path."""
    rows = render_panel(screen, width, height, style)
    track = shown_call(screen)
    if track is None:
        return rows
    rows.append([])
    if not _is_staged(track.last):
        mode, devices = format_mode_and_devices(screen.process)
        rows.append([(f"mode {mode}  {devices}", "dim")])
        rows += wrap_to_rows(_host_times_note(track), width)
        rows.append([])
    for part in track.timed:
        names = sanitize_line(", ".join(part.part.parts), 200) if isinstance(part.part, Stage) else ""
        heading: Row = [(f"{part.number:2} {part.device}  ", "bold"), (names, "")]
        rows.append(fit_row(heading, width))
        rows += all_size_rows(part.part.inputs, part.part.outputs, width)
    return rows
