"""The last step over time: a row for the main thread with a name on every phase, and a row for each replica.

Edges lie on eighths of a cell where the glyphs are blocks. Without color, or in ASCII, each phase starts with its
letter, followed by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from dpmon.model.run_snapshot import Process
from dpmon.model.step_timeline import Lane, Piece, StepTimeline, last_step_timeline
from dpmon.record.schema import phase_by_display_name
from dpmon.sanitize import sanitize_line
from dpmon.store.collectives import LastSample
from dpmon.text.cells import align_right, span_width, truncate
from dpmon.text.formatting import format_count, format_count_with_noun, format_duration
from dpmon.ui.chart import busy_signs, round_up_nice
from dpmon.ui.styled_rows import Row, Span, fit_row, merge_spans, row_width
from dpmon.ui.terminal_style import LETTERS, Glyphs, TerminalStyle

OTHER_FORWARD_NAMES = ("other forward", "other fwd", "fwd")
"""Names, from long to short, for the rest of the forward when the call's phases are shown separately."""
_LEFT_BLOCKS = " ▏▎▍▌▋▊▉█"
_DURATION_CELLS = 9
_MIN_SCALE_ROWS = 3
"""From this height on, the first row is the scale; with ranks, one row more; one fewer if there is only one row."""
_MIN_TICK_CELLS = 16
"""Cells from one tick of the scale to the next, at least."""


def render_waterfall(
    process: Process,
    width: int,
    height: int,
    style: TerminalStyle,
    kind_words: Mapping[int, str],
    ranks: Sequence[Process] = (),
    sample: LastSample | None = None,
) -> list[Row]:
    """Return the scale, then the last step of `process` with a lane per replica, in at most `height` rows.

    `kind_words`: the word for each kind of steps. `ranks`: all ranks with a step, in the order of their rows, if there
    are several; those whose last step is of the same kind replace the lanes. `sample`: the newest step with known
    collectives. The longest step fills the width.
    """
    own_timeline = last_step_timeline(process)
    if own_timeline is None or height <= 0:
        return []
    kind = own_timeline.step.kind
    ranks = [rank for rank in ranks if rank.last_step is not None and rank.last_step.kind == kind and height > 1]
    with_scale = height >= _MIN_SCALE_ROWS + bool(ranks) - (
        not visible_lanes(own_timeline) and not own_timeline.step.buckets
    )
    height -= with_scale
    is_of_other_kind = kind != process.ranged.kind
    step_word = kind_words[kind] if is_of_other_kind else "last step"
    first_prefix = "" if with_scale else f"{step_word}, "
    names = [
        f"{'' if index else first_prefix}rank {rank_process.rank}"
        for index, rank_process in enumerate(ranks or (process,))
    ]
    if process.rank is None:
        names = ["main" if with_scale else step_word]
    label_cells = max(10, len(step_word) + 1, len(names[0]) + 1)
    if not ranks:
        lane_cells = [5 + span_width(sanitize_line(lane.device, 12)) for lane in visible_lanes(own_timeline)]
        label_cells = min(max([label_cells, *lane_cells]), 20)
    chart_cells = width - label_cells - _DURATION_CELLS
    if chart_cells < 8:
        return []
    min_rank_rows = min(max(len(ranks), 1), 3)
    with_buckets = bool(own_timeline.step.buckets) and height > min_rank_rows
    with_sample = bool(ranks) and sample is not None and not is_of_other_kind and height - with_buckets > min_rank_rows
    height -= with_buckets + with_sample
    drawn_ranks = ranks if len(ranks) <= height else ranks[: max(height - 1, 1)]
    shown_timelines = [
        (rank_process, rank_timeline)
        for rank_process in drawn_ranks or [process]
        if (rank_timeline := last_step_timeline(rank_process)) is not None
    ]
    timelines = [timeline for _, timeline in shown_timelines]
    start_offsets = _align_sync_ends(timelines)
    scale_ns = max(start + timeline.step.wall_ns for start, timeline in zip(start_offsets, timelines, strict=True))
    rows = [_scale_row(step_word, timelines, label_cells, chart_cells, scale_ns, style)] if with_scale else []
    for name, (rank_process, timeline), start_offset in zip(names, shown_timelines, start_offsets, strict=False):
        label = name.rjust(label_cells - 1) if ranks and not with_scale else name
        rows.append(_main_thread_row(label, timeline, label_cells, chart_cells, scale_ns, style, start_offset))
        if rank_process is process and with_buckets:
            rows.append(bucket_row(timeline, label_cells, chart_cells, scale_ns, style, start_offset))
        if rank_process is process and sample is not None and with_sample:
            rows.append(sample_row(sample, label_cells, chart_cells, scale_ns, style))
    if ranks:
        hidden_steps = [rank_process.last_step for rank_process in ranks[len(drawn_ranks) :]]
        hidden_times_ns = [step.wall_ns for step in hidden_steps if step is not None]
        idle_count, has_row_for_hidden = 0, height > 1
    else:
        lanes, hidden_lanes = _choose_lanes(visible_lanes(own_timeline), height - 1)
        rows += [_replica_row(lane, own_timeline, label_cells, chart_cells, scale_ns, style) for lane in lanes]
        hidden_times_ns = [lane.took_ns for lane in hidden_lanes if lane.pieces]
        idle_count, has_row_for_hidden = len(hidden_lanes) - len(hidden_times_ns), True
    if (has_row_for_hidden and hidden_times_ns) or idle_count:
        rows.append(_summary_lane(hidden_times_ns, idle_count, label_cells, width, style))
    return rows


def visible_lanes(timeline: StepTimeline) -> Sequence[Lane]:
    """Return the lanes worth a row: a single one would repeat the forward."""
    return timeline.lanes if len(timeline.lanes) > 1 else ()


def _align_sync_ends(timelines: Sequence[StepTimeline]) -> list[int]:
    """Return where each step starts (ns) on an axis on which all ranks leave their last sync pass together.

    This needs no common clock. A step without a sync pass starts at 0.
    """
    sync_ends = [
        max((piece.end_ns for piece in timeline.main if piece.phase == "sync"), default=None) for timeline in timelines
    ]
    last_end = max((end for end in sync_ends if end is not None), default=0)
    return [0 if end is None else last_end - end for end in sync_ends]


def _scale_row(
    step_word: str,
    timelines: Iterable[StepTimeline],
    label_cells: int,
    chart_cells: int,
    scale_ns: float,
    style: TerminalStyle,
) -> Row:
    """Return the scale of the rows below, with a tick at round times, and at its end the meaning of a dotted row."""
    tick_ns = max(round_up_nice(scale_ns * _MIN_TICK_CELLS / chart_cells), 1.0)
    tick, line_sign = style.glyphs.tick, style.glyphs.span[1]
    cells = [line_sign] * chart_cells
    for tick_number in range(int(scale_ns / tick_ns) + 1):
        value, unit = format_duration(tick_number * tick_ns).split()
        text = f"{tick}{float(value):g} {unit} " if tick_number else f"{tick}0 "
        column = int(tick_number * tick_ns / scale_ns * chart_cells)
        if column + len(text) <= chart_cells:
            cells[column : column + len(text)] = text
    has_script_time = any(timeline.idle_ns for timeline in timelines)
    legend = (
        align_right(f"{_script_dot(style.glyphs)} script", _DURATION_CELLS)
        if has_script_time
        else " " * _DURATION_CELLS
    )
    return [*fit_row([(step_word, "dim")], label_cells, style.glyphs.more), ("".join(cells), "dim"), (legend, "dim")]


def _main_thread_row(
    name: str,
    timeline: StepTimeline,
    label_cells: int,
    chart_cells: int,
    scale_ns: float,
    style: TerminalStyle,
    start_ns: int,
) -> Row:
    """Return the row of a main thread. Its step starts `start_ns` ns after the start of the scale."""
    return [
        *fit_row([(name, "dim")], label_cells, style.glyphs.more),
        *main_row(
            _shift_pieces(timeline.main, start_ns),
            chart_cells,
            scale_ns,
            style,
            (start_ns, start_ns + timeline.step.wall_ns),
        ),
        (align_right(format_duration(timeline.step.wall_ns), _DURATION_CELLS), "bold"),
    ]


def _shift_pieces(pieces: Iterable[Piece], offset_ns: int) -> list[Piece]:
    return [piece._replace(start_ns=piece.start_ns + offset_ns, end_ns=piece.end_ns + offset_ns) for piece in pieces]


def bucket_row(
    timeline: StepTimeline,
    label_cells: int,
    chart_cells: int,
    scale_ns: float,
    style: TerminalStyle,
    step_start_ns: int = 0,
) -> Row:
    """Return when each bucket of gradients was ready, and how long the averaging lasted after the last one.

    A digit counts several buckets in one cell. Exposed communication lies at the end of a wait.
    """
    cells_per_ns = chart_cells / scale_ns
    buckets = [ready_ns + step_start_ns for ready_ns in timeline.step.buckets]
    marks = Counter(min(int(ready_ns * cells_per_ns), chart_cells - 1) for ready_ns in buckets)
    cells: list[Span] = [(" ", "")] * chart_cells
    syncs = [piece for piece in _shift_pieces(timeline.main, step_start_ns) if piece.phase == "sync"]
    exposed_left_ns = timeline.step.exposed_ns or 0
    (_, exposed, wait) = busy_signs(style.glyphs)
    if timeline.step.exposed_ns is None:
        _, thin_line = style.glyphs.bar
        wait = (thin_line, "dim")  # unknown split between wait and exposed communication
    for piece in reversed(syncs):
        exposed_ns = min(exposed_left_ns, piece.end_ns - piece.start_ns)
        exposed_left_ns -= exposed_ns
        for start_ns, end_ns, sign in (
            (piece.start_ns, piece.end_ns - exposed_ns, wait),
            (piece.end_ns - exposed_ns, piece.end_ns, exposed),
        ):
            first_cell, end_cell = round(start_ns * cells_per_ns), round(end_ns * cells_per_ns)
            cells[first_cell:end_cell] = [sign] * (min(end_cell, chart_cells) - first_cell)
    for cell, count in marks.items():
        cells[cell] = (style.glyphs.down if count == 1 else str(min(count, 9)), "bold")
    wait_ns = sum(piece.end_ns - piece.start_ns for piece in syncs) - (timeline.step.exposed_ns or 0)
    legend = [(f"{format_count_with_noun(len(buckets), 'bucket')} ready ", "dim"), (style.glyphs.down, "bold")]
    if timeline.step.exposed_ns is not None:
        legend += [("  wait ", "dim"), wait, (f" {format_duration(wait_ns)}  exposed ", "dim"), exposed]
        legend.append((f" {format_duration(timeline.step.exposed_ns)}", "dim"))
    first_mark = min(marks, default=0)
    for text in (legend, legend[:2]):
        if row_width(text) < first_mark:
            cells[: row_width(text)] = text
            break
    return [
        *fit_row([("buckets", "dim")], label_cells, style.glyphs.more),
        *merge_spans(cells[:chart_cells]),
        (" " * _DURATION_CELLS, ""),
    ]


def sample_row(sample: LastSample, label_cells: int, chart_cells: int, scale_ns: float, style: TerminalStyle) -> Row:
    """Return the collectives of a sampled step: an arrow where one was launched, a digit where several were."""
    last_cell = chart_cells - 1
    marks = Counter(
        min(int((collective.start_ns - sample.start_ns) * chart_cells / scale_ns), last_cell)
        for collective in sample.collectives
    )
    cells: list[Span] = [(" ", "")] * chart_cells
    for cell, count in marks.items():
        cells[cell] = (style.glyphs.down if count == 1 else str(min(count, 9)), "bold")
    counts = Counter((collective.operation, collective.group_size) for collective in sample.collectives).most_common(2)
    step = "" if sample.step is None else f"step {format_count(sample.step)}: "
    full_text = step + ", ".join(
        f"{count} {name} of {format_count_with_noun(size, 'rank')}" for (name, size), count in counts
    )
    short_text = step + ", ".join(f"{count} {name}" for (name, _), count in counts)
    first_used, last_used = min(marks, default=chart_cells), max(marks, default=chart_cells)
    for text, column in product((full_text, short_text), (0, last_used + 2)):
        if column + len(text) < (first_used if column == 0 else chart_cells + 1):
            cells[column : column + len(text)] = [(text, "dim")]
            break
    duration = align_right(format_duration(sample.wall_ns), _DURATION_CELLS)
    return [*fit_row([("sampled", "dim")], label_cells, style.glyphs.more), *merge_spans(cells), (duration, "dim")]


def _choose_lanes(lanes: Sequence[Lane], max_rows: int) -> tuple[list[Lane], list[Lane]]:
    """Return the lanes to draw and the lanes without a row.

    If not all fit, draw the first lane and the slowest others.
    """
    if max_rows <= 0:
        return [], []
    if len(lanes) <= max_rows:
        return list(lanes), []
    if max_rows == 1:
        return [], list(lanes)
    slowest = sorted(lanes[1:], key=lambda lane: (-lane.took_ns, lane.number))[: max_rows - 2]
    numbers = {lanes[0].number, *(lane.number for lane in slowest)}
    return [lane for lane in lanes if lane.number in numbers], [lane for lane in lanes if lane.number not in numbers]


def _replica_row(
    lane: Lane, timeline: StepTimeline, label_cells: int, chart_cells: int, scale_ns: float, style: TerminalStyle
) -> Row:
    lane_name = f"{'s' if timeline.staged else 'r'}{lane.number}"
    heading = fit_row(
        [(lane_name.ljust(4), "bold"), (sanitize_line(lane.device, 20), "dim")], label_cells - 1, style.glyphs.more
    )
    if not lane.pieces:
        return [*heading, (" ", ""), *fit_row([("idle", "wait")], chart_cells + _DURATION_CELLS)]
    return [
        *heading,
        (" ", ""),
        *lane_row(lane.pieces, chart_cells, scale_ns, style),
        (align_right(format_duration(lane.took_ns), _DURATION_CELLS), ""),
    ]


def _summary_lane(times_ns: Sequence[int], idle_count: int, label_cells: int, width: int, style: TerminalStyle) -> Row:
    """Return one row for the lanes without a row of their own: their number, and the range of their times (ns)."""
    text = f"{format_count(len(times_ns) + idle_count)} more {style.glyphs.down}"
    if times_ns:
        text += f"  {format_duration(min(times_ns))} to {format_duration(max(times_ns))}"
    if idle_count:
        text += f"  {idle_count} idle"
    return [(" " * label_cells, ""), (truncate(text, width - label_cells, style.glyphs.more), "dim")]


def main_row(pieces: Sequence[Piece], width: int, scale_ns: float, style: TerminalStyle, step: tuple[int, int]) -> Row:
    """Return pieces (in order, not overlapping) on `width` cells that stand for `scale_ns` ns, with their names.

    `step`: start and end of the step. Its uncovered time is dotted: the script did something else.
    """
    has_color, glyphs = style.has_color, style.glyphs
    cells_per_ns = width / scale_ns
    uses_blocks = has_color and not glyphs.ascii
    cells: list[Span] = []
    first_piece = 0
    for index in range(width):
        cell_start_ns, cell_end_ns = index / cells_per_ns, (index + 1) / cells_per_ns
        while first_piece < len(pieces) and pieces[first_piece].end_ns <= cell_start_ns:
            first_piece += 1
        end_piece = first_piece
        while end_piece < len(pieces) and pieces[end_piece].start_ns < cell_end_ns:
            end_piece += 1
        inside = pieces[first_piece:end_piece]
        cells.append(_piece_cell(inside, cell_start_ns, cell_end_ns, uses_blocks, has_color, glyphs))
    start, end = (min(round(time_ns * cells_per_ns), width) for time_ns in step)
    cells[start:end] = [
        (_script_dot(glyphs), "dim") if sign == " " else (sign, cell_style) for sign, cell_style in cells[start:end]
    ]
    _write_phase_names(cells, uses_blocks, has_color)
    return merge_spans(cells)


def _script_dot(glyphs: Glyphs) -> str:
    return "." if glyphs.ascii else glyphs.middot  # a dash would look like part of a phase's name


def lane_row(pieces: Sequence[Piece], width: int, scale_ns: float, style: TerminalStyle) -> Row:
    """Return pieces on `width` cells that stand for `scale_ns` ns, as lines that end on half cells.

    Blocks would run together.
    """
    halves = [False] * (2 * width)
    halves_per_ns = 2 * width / scale_ns
    for piece in pieces:
        first_half = min(max(round(piece.start_ns * halves_per_ns), 0), 2 * width - 1)
        for index in range(first_half, min(max(round(piece.end_ns * halves_per_ns), first_half + 1), 2 * width)):
            halves[index] = True
    line, _ = style.glyphs.bar
    signs = {(True, True): line, (True, False): "╸", (False, True): "╺", (False, False): " "}
    if style.glyphs.ascii:
        signs[True, False] = signs[False, True] = line
    text = "".join(signs[halves[i], halves[i + 1]] for i in range(0, 2 * width, 2))
    return [(text, "phase.apply")]


class _CellInterval(NamedTuple):
    """A part of a cell, in time, with the phase that it belongs to; "" if none does."""

    start_ns: float
    end_ns: float
    phase: str

    @property
    def duration_ns(self) -> float:
        """Length of the part."""
        return self.end_ns - self.start_ns


def _divide_cell(pieces: Sequence[Piece], cell_start_ns: float, cell_end_ns: float) -> list[_CellInterval]:
    """Return the parts of a cell in order, without a gap; none if no piece lies in it."""
    parts: list[_CellInterval] = []
    time_ns = cell_start_ns
    for piece in pieces:
        start_ns, end_ns = max(piece.start_ns, cell_start_ns), min(piece.end_ns, cell_end_ns)
        if end_ns > start_ns:
            if start_ns > time_ns:
                parts.append(_CellInterval(time_ns, start_ns, ""))
            parts.append(_CellInterval(start_ns, end_ns, piece.phase))
            time_ns = end_ns
    if parts and time_ns < cell_end_ns:
        parts.append(_CellInterval(time_ns, cell_end_ns, ""))
    return parts


def _piece_cell(
    pieces: Sequence[Piece],
    cell_start_ns: float,
    cell_end_ns: float,
    uses_blocks: bool,
    has_color: bool,
    glyphs: Glyphs,
) -> Span:
    """Return one cell: the two largest parts of it, and the edge between them."""
    parts = _divide_cell(pieces, cell_start_ns, cell_end_ns)
    if not parts:
        return (" ", "")
    if not uses_blocks:
        largest = max(parts, key=lambda part: part.duration_ns)
        is_mostly_empty = largest.duration_ns > 0.75 * (cell_end_ns - cell_start_ns)
        if not largest.phase and (parts[0].phase or is_mostly_empty):
            return (" ", "")
        phase = largest.phase or next(part.phase for part in parts if part.phase)
        return ("#" if glyphs.ascii else "█", f"chip.{phase}" if has_color else f"phase.{phase}")
    largest_two = sorted(sorted(parts, key=lambda part: -part.duration_ns)[:2])
    left, right = largest_two[0], largest_two[-1]
    if left.phase == right.phase:
        return ("█", f"phase.{left.phase}") if left.phase else (" ", "")
    left_eighths = min(max(round(8 * left.duration_ns / (left.duration_ns + right.duration_ns)), 1), 7)
    if not right.phase:
        return (_LEFT_BLOCKS[left_eighths], f"phase.{left.phase}")
    if not left.phase:
        return (_LEFT_BLOCKS[left_eighths], f"chip.{right.phase}")
    return (_LEFT_BLOCKS[left_eighths], f"phase.{left.phase}/{right.phase}")


def _write_phase_names(cells: list[Span], uses_blocks: bool, has_color: bool) -> None:
    """Write names over runs of whole cells, as far as they fit; without blocks, dashes fill the rest of a run."""
    start = 0
    while start < len(cells):
        sign, style = cells[start]
        end = start + 1
        while end < len(cells) and cells[end] == cells[start]:
            end += 1
        style_kind, _, phase = style.partition(".")
        if style_kind in ("phase", "chip") and "/" not in style and sign in "█#":
            text = _phase_name_in_cells(phase, end - start, uses_blocks)
            chip = f"chip.{phase}" if has_color else f"phase.{phase}"
            cells[start:end] = [(char, chip) for char in text]
        start = end


def _phase_name_in_cells(phase: str, cell_count: int, uses_blocks: bool) -> str:
    letter = LETTERS[phase]
    for word in (phase, phase_by_display_name(phase).short_display_name):
        if len(word) + (1 if uses_blocks else 0) <= cell_count:
            marked_name = letter + word[1:] if word.upper().startswith(letter) else word
            return (" " + marked_name if uses_blocks and cell_count > len(word) else marked_name).ljust(
                cell_count, " " if uses_blocks else "-"
            )
    return letter.ljust(cell_count, " " if uses_blocks else "-")
