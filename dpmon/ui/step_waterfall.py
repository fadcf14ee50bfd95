"""The last step over time: a row for the main thread with a name on every phase, and a row for each replica.

Edges lie on eighths of a cell where the glyphs are blocks. Without color, or in ASCII, each phase starts with its
letter, followed by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from dpmon.model.run_process import Process
from dpmon.model.step_timeline import Lane, Piece, StepTimeline, last_step_timeline
from dpmon.record.schema import phase_by_display_name
from dpmon.sanitize import sanitize_line
from dpmon.text.cells import align_right, span_width
from dpmon.text.formatting import format_count, format_count_with_noun, format_duration
from dpmon.ui.chart import BUSY_SIGNS, largest_parts, round_up_nice
from dpmon.ui.styled_rows import Row, Span, fit_row, merge_spans, row_width
from dpmon.ui.terminal_style import LETTERS, TerminalStyle

OTHER_FORWARD_NAMES = ("other forward", "other fwd", "fwd")
"""Names, from long to short, for the rest of the forward when the call's phases are shown separately."""
_LEFT_BLOCKS = " ▏▎▍▌▋▊▉█"
_DURATION_CELLS = 9
_MIN_SCALE_ROWS = 3
"""From this height on, the first row is the scale; with ranks, one row more; one fewer if there is only one row."""
_MIN_TICK_CELLS = 16
"""Cells from one tick of the scale to the next, at least."""


class _Scale(NamedTuple):
    """The columns of every row: a label, `cells` cells for `length_ns` ns, and a duration."""

    label_cells: int
    cells: int
    length_ns: float
    style: TerminalStyle

    def edge(self, time_ns: float) -> int:
        """Return the first cell after a time."""
        return min(round(time_ns * self.cells / self.length_ns), self.cells)

    def row(self, label: Sequence[Span], chart: Sequence[Span], duration: str = "", duration_style: str = "dim") -> Row:
        """Return a row with its three columns."""
        right_part = (align_right(duration, _DURATION_CELLS), duration_style)
        return [*fit_row(label, self.label_cells), *chart, right_part]

    def mark_times(self, cells: list[Span], times_ns: Iterable[float]) -> list[int]:
        """Put an arrow in the cell of each time, or a digit for several times; return the marked cells in order."""
        counts = Counter(min(int(time_ns * self.cells / self.length_ns), self.cells - 1) for time_ns in times_ns)
        for cell, count in counts.items():
            cells[cell] = ("↓" if count == 1 else str(min(count, 9)), "bold")
        return sorted(counts)


def render_waterfall(
    process: Process,
    own_timeline: StepTimeline,
    width: int,
    height: int,
    style: TerminalStyle,
    kind_words: Mapping[int, str],
    ranks: Sequence[Process] = (),
) -> list[Row]:
    """Return the scale, then the last step of `process`, with a lane per replica, in at most `height` rows.

    `kind_words`: the word for each kind of steps. `ranks`: all ranks with a step, in the order of their rows, if there
    are several; those whose last step is of the same kind replace the lanes. The longest step fills the width.
    """
    kind, lanes = own_timeline.step.kind, visible_lanes(own_timeline)
    ranks = [rank for rank in ranks if rank.last_step is not None and rank.last_step.kind == kind and height > 1]
    with_scale = height >= _MIN_SCALE_ROWS + bool(ranks) - (not lanes and not own_timeline.step.buckets)
    height -= with_scale
    is_of_other_kind = kind != process.ranged.kind
    step_word = kind_words[kind] if is_of_other_kind else "last step"
    names = [f"rank {rank_process.rank}" for rank_process in ranks or (process,)]
    if process.rank is None:
        names = ["main" if with_scale else step_word]
    elif not with_scale:
        names[0] = f"{step_word}, {names[0]}"
    label_cells = max(10, len(step_word) + 1, len(names[0]) + 1)
    if not ranks:
        lane_cells = [5 + span_width(sanitize_line(lane.device, 12)) for lane in lanes]
        label_cells = min(max([label_cells, *lane_cells]), 20)
    chart_cells = width - label_cells - _DURATION_CELLS
    if chart_cells < 8:
        return []
    with_buckets = bool(own_timeline.step.buckets) and height > min(max(len(ranks), 1), 3)
    height -= with_buckets
    drawn_ranks = ranks if len(ranks) <= height else ranks[: max(height - 1, 1)]
    timelines = [timeline for rank in drawn_ranks if (timeline := last_step_timeline(rank)) is not None]
    timelines = timelines or [own_timeline]
    offsets = _align_sync_ends(timelines)
    length_ns = max(offset + timeline.step.wall_ns for offset, timeline in zip(offsets, timelines, strict=True))
    scale = _Scale(label_cells, chart_cells, length_ns, style)
    rows = [_scale_row(scale, step_word, any(timeline.idle_ns for timeline in timelines))] if with_scale else []
    for name, timeline, offset in zip(names, timelines, offsets, strict=False):
        label = name.rjust(label_cells - 1) if ranks and not with_scale else name
        rows.append(_main_thread_row(scale, label, timeline, offset))
        if timeline.step == own_timeline.step and with_buckets:
            rows.append(bucket_row(scale, timeline, offset))
    if ranks:
        hidden_steps = [rank_process.last_step for rank_process in ranks[len(drawn_ranks) :] if height > 1]
        return [*rows, *_summary_rows(scale, [step.wall_ns for step in hidden_steps if step is not None])]
    drawn_lanes, hidden_lanes = _choose_lanes(lanes, height - 1)
    rows += [_lane_row(scale, lane, own_timeline.staged) for lane in drawn_lanes]
    hidden_times_ns = [lane.took_ns for lane in hidden_lanes if lane.pieces]
    return [*rows, *_summary_rows(scale, hidden_times_ns, len(hidden_lanes) - len(hidden_times_ns))]


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


def _scale_row(scale: _Scale, step_word: str, has_script_time: bool) -> Row:
    """Return the scale of the rows below, with a tick at round times, and at its end the meaning of a dotted row."""
    tick_ns = max(round_up_nice(scale.length_ns * _MIN_TICK_CELLS / scale.cells), 1.0)
    cells = ["─"] * scale.cells
    for tick_number in range(int(scale.length_ns / tick_ns) + 1):
        value, unit = format_duration(tick_number * tick_ns).split()
        text = f"├{float(value):g} {unit} " if tick_number else "├0 "
        column = int(tick_number * tick_ns / scale.length_ns * scale.cells)
        if column + len(text) <= scale.cells:
            cells[column : column + len(text)] = text
    legend = f"{_script_dot(scale.style)} script" if has_script_time else ""
    return scale.row([(step_word, "dim")], [("".join(cells), "dim")], legend)


def _main_thread_row(scale: _Scale, name: str, timeline: StepTimeline, start_ns: int) -> Row:
    """Return the row of a main thread. Its step starts `start_ns` ns after the start of the scale."""
    step_ns = timeline.step.wall_ns
    pieces = _shift_pieces(timeline.main, start_ns)
    chart = main_row(pieces, scale.cells, scale.length_ns, scale.style, (start_ns, start_ns + step_ns))
    return scale.row([(name, "dim")], chart, format_duration(step_ns), "bold")


def _shift_pieces(pieces: Iterable[Piece], offset_ns: int) -> list[Piece]:
    return [piece._replace(start_ns=piece.start_ns + offset_ns, end_ns=piece.end_ns + offset_ns) for piece in pieces]


def bucket_row(scale: _Scale, timeline: StepTimeline, step_start_ns: int = 0) -> Row:
    """Return when each bucket of gradients was ready, and how long the averaging lasted after the last one.

    A digit counts several buckets in one cell. Exposed communication lies at the end of a wait.
    """
    step = timeline.step
    cells: list[Span] = [(" ", "")] * scale.cells
    syncs = [piece for piece in _shift_pieces(timeline.main, step_start_ns) if piece.phase == "sync"]
    exposed_left_ns = step.exposed_ns or 0
    (_, exposed, wait) = BUSY_SIGNS
    if step.exposed_ns is None:
        wait = ("─", "dim")  # unknown split between wait and exposed communication
    for piece in reversed(syncs):
        exposed_ns = min(exposed_left_ns, piece.end_ns - piece.start_ns)
        exposed_left_ns -= exposed_ns
        start, middle, end = map(scale.edge, (piece.start_ns, piece.end_ns - exposed_ns, piece.end_ns))
        cells[start:end] = [wait] * (middle - start) + [exposed] * (end - middle)
    marks = scale.mark_times(cells, [ready_ns + step_start_ns for ready_ns in step.buckets])
    legend = [(f"{format_count_with_noun(len(step.buckets), 'bucket')} ready ", "dim"), ("↓", "bold")]
    full_legend = legend
    if step.exposed_ns is not None:
        wait_ns = sum(piece.end_ns - piece.start_ns for piece in syncs) - step.exposed_ns
        wait_text = format_duration(wait_ns) if wait_ns else "0"
        full_legend = [*legend, ("  wait ", "dim"), wait, (f" {wait_text}  exposed ", "dim"), exposed]
        full_legend.append((f" {format_duration(step.exposed_ns)}", "dim"))
    for text in (full_legend, legend):
        if row_width(text) < min(marks, default=0):
            cells[: row_width(text)] = text
            break
    return scale.row([("buckets", "dim")], merge_spans(cells))


def _choose_lanes(lanes: Sequence[Lane], max_rows: int) -> tuple[list[Lane], list[Lane]]:
    """Return the lanes to draw and the lanes without a row.

    If not all fit, draw the first lane and the slowest others, and leave a row for their summary.
    """
    if max_rows <= 0 or len(lanes) <= max_rows:
        return list(lanes[: max(max_rows, 0)]), []
    slowest = sorted(lanes[1:], key=lambda lane: (-lane.took_ns, lane.number))[: max(max_rows - 2, 0)]
    numbers = {lane.number for lane in (*lanes[:1], *slowest) if max_rows > 1}
    return [lane for lane in lanes if lane.number in numbers], [lane for lane in lanes if lane.number not in numbers]


def _lane_row(scale: _Scale, lane: Lane, is_stage: bool) -> Row:
    name = f"{'s' if is_stage else 'r'}{lane.number}"
    label = fit_row([(name.ljust(4), "bold"), (sanitize_line(lane.device, 20), "dim")], scale.label_cells - 1)
    if not lane.pieces:
        return scale.row(label, [("idle".ljust(scale.cells), "wait")])
    chart = lane_row(lane.pieces, scale.cells, scale.length_ns)
    return scale.row(label, chart, format_duration(lane.took_ns), "")


def _summary_rows(scale: _Scale, times_ns: Sequence[int], idle_count: int = 0) -> list[Row]:
    """Return a row for the lanes without a row of their own: their number, and the range of their times (ns)."""
    if not times_ns and not idle_count:
        return []
    text = f"{format_count(len(times_ns) + idle_count)} more ↓"
    if times_ns:
        text += f"  {format_duration(min(times_ns))} to {format_duration(max(times_ns))}"
    if idle_count:
        text += f"  {idle_count} idle"
    return [[(" " * scale.label_cells, ""), (text, "dim")]]


def main_row(pieces: Sequence[Piece], width: int, scale_ns: float, style: TerminalStyle, step: tuple[int, int]) -> Row:
    """Return pieces (in order, not overlapping) on `width` cells that stand for `scale_ns` ns, with their names.

    `step`: start and end of the step. Its uncovered time is dotted: the script did something else.
    """
    has_color = style.has_color
    uses_blocks = has_color and not style.is_ascii
    eighths = _phase_of_parts(pieces, 8 * width, scale_ns)
    cells = [_piece_cell(eighths[start : start + 8], uses_blocks, has_color) for start in range(0, 8 * width, 8)]
    start, end = (min(round(time_ns * width / scale_ns), width) for time_ns in step)
    cells[start:end] = [
        (_script_dot(style), "dim") if sign == " " else (sign, cell_style) for sign, cell_style in cells[start:end]
    ]
    return merge_spans(_write_phase_names(cells, uses_blocks, has_color))


def _phase_of_parts(pieces: Iterable[Piece], part_count: int, scale_ns: float) -> list[str]:
    """Return the phase of each of `part_count` equal parts of `scale_ns` ns; "" without one. A piece has a part."""
    phases = [""] * part_count
    for piece in pieces:
        start = min(max(round(piece.start_ns * part_count / scale_ns), 0), part_count - 1)
        end = min(max(round(piece.end_ns * part_count / scale_ns), start + 1), part_count)
        phases[start:end] = [piece.phase] * (end - start)
    return phases


def _script_dot(style: TerminalStyle) -> str:
    return "." if style.is_ascii else "·"  # a dash would look like part of a phase's name


def lane_row(pieces: Sequence[Piece], width: int, scale_ns: float) -> Row:
    """Return pieces on `width` cells that stand for `scale_ns` ns, as lines that end on half cells.

    Blocks would run together.
    """
    halves = list(map(bool, _phase_of_parts(pieces, 2 * width, scale_ns)))
    signs = {(True, True): "━", (True, False): "╸", (False, True): "╺", (False, False): " "}
    return [("".join(map(signs.__getitem__, zip(halves[::2], halves[1::2], strict=True))), "phase.apply")]


def _piece_cell(eighths: Sequence[str], uses_blocks: bool, has_color: bool) -> Span:
    """Return one cell, given the phases of its eighths: the two largest parts of it, and the edge between them."""
    if not uses_blocks:
        phase = max(eighths, key=eighths.count)
        return ("█", f"chip.{phase}" if has_color else f"phase.{phase}") if phase else (" ", "")
    left, right, left_eighths = largest_parts(eighths)
    if left == right:
        return ("█", f"phase.{left}") if left else (" ", "")
    sign = _LEFT_BLOCKS[left_eighths]
    if not left:
        return (sign, f"chip.{right}")
    return (sign, f"phase.{left}/{right}" if right else f"phase.{left}")


def _write_phase_names(cells: Iterable[Span], uses_blocks: bool, has_color: bool) -> Row:
    """Return cells with names over runs of whole cells, as far as they fit; without blocks, dashes fill the rest."""
    row: Row = []
    for (sign, style), same in groupby(cells):
        cell_count = len(list(same))
        style_kind, _, phase = style.partition(".")
        if style_kind in ("phase", "chip") and "/" not in style and sign == "█":
            chip = f"chip.{phase}" if has_color else f"phase.{phase}"
            row.append((_phase_name_in_cells(phase, cell_count, uses_blocks), chip))
        else:
            row.append((sign * cell_count, style))
    return row


def _phase_name_in_cells(phase: str, cell_count: int, uses_blocks: bool) -> str:
    letter = LETTERS[phase]
    for word in (phase, phase_by_display_name(phase).short_display_name):
        if len(word) + (1 if uses_blocks else 0) <= cell_count:
            marked_name = letter + word[1:] if word.upper().startswith(letter) else word
            return (" " + marked_name if uses_blocks and cell_count > len(word) else marked_name).ljust(
                cell_count, " " if uses_blocks else "-"
            )
    return letter.ljust(cell_count, " " if uses_blocks else "-")
