"""The last step over time: a row for the main thread with a name on every phase, and a row for each replica.

Edges lie on eighths of a cell where the glyphs are blocks. Without color, or in ASCII, each phase starts with its
letter, followed by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product

from dpmon.model.run_snapshot import Process
from dpmon.model.step_timeline import Lane, Piece, StepTimeline, last_step_timeline
from dpmon.record.schema import phase_by_display_name
from dpmon.sanitize import sanitize_line
from dpmon.store.query_results import LastSample
from dpmon.text.cells import align_right, span_width, truncate
from dpmon.text.formatting import format_count, format_count_with_noun, format_duration
from dpmon.ui.chart import busy_signs, round_up_nice
from dpmon.ui.styled_rows import Row, Span, fit_row, merge_spans, row_width
from dpmon.ui.terminal_style import LETTERS, Glyphs, TerminalStyle, letter_position

OTHER_FORWARD_NAMES = ("forward rest", "fwd rest", "fwd")
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
    look: TerminalStyle,
    ranks: Sequence[Process] = (),
    sample: LastSample | None = None,
) -> list[Row]:
    """At most `height` rows of `width` cells: the scale, then the last step of `process` with a lane a replica.

    `ranks`: all ranks with a step, in the order of their rows, if there are several; they replace the lanes.
    `sample`: the newest step with known collectives. The longest step fills the width.
    """
    own = last_step_timeline(process)
    if own is None or height <= 0:
        return []
    ranks = ranks if height > 1 else ()
    with_scale = height >= _MIN_SCALE_ROWS + bool(ranks) - (not visible_lanes(own) and not own.step.buckets)
    height -= with_scale
    first = "" if with_scale else "last step, "
    names = [f"{'' if at else first}rank {one.rank}" for at, one in enumerate(ranks or (process,))]
    if process.rank is None:
        names = ["main" if with_scale else "last step"]
    label = max(10, len(names[0]) + 1)
    if not ranks:
        label = min(max(label, *(5 + span_width(sanitize_line(lane.device, 12)) for lane in visible_lanes(own)), 0), 18)
    room = width - label - _DURATION_CELLS
    if room < 8:
        return []
    least = min(max(len(ranks), 1), 3)
    with_buckets = bool(own.step.buckets) and height > least
    with_sample = bool(ranks) and sample is not None and height - with_buckets > least
    height -= with_buckets + with_sample
    drawn = ranks if len(ranks) <= height else ranks[: max(height - 1, 1)]
    shown = [(one, found) for one in drawn or [process] if (found := last_step_timeline(one)) is not None]
    begins = _align_sync_ends([timeline for _, timeline in shown])
    top = max(begin + timeline.step.wall_ns for begin, (_, timeline) in zip(begins, shown, strict=True))
    rows = [_scale_row([timeline for _, timeline in shown], label, room, top, look)] if with_scale else []
    for name, (one, timeline), begin in zip(names, shown, begins, strict=False):
        rows.append(
            _main_thread_row(
                name.rjust(label - 1) if ranks and not with_scale else name, timeline, label, room, top, look, begin
            )
        )
        if one is process and with_buckets:
            rows.append(bucket_row(timeline, label, room, top, look, begin))
        if one is process and sample is not None and with_sample:
            rows.append(sample_row(sample, label, room, top, look))
    if ranks:
        left = ranks[len(drawn) :]
        times, idle = [one.last_step.wall_ns for one in left if one.last_step is not None], 0
        hidden = height > 1
    else:
        lanes, unseen = _choose_lanes(visible_lanes(own), height - 1)
        rows += [_replica_row(lane, own, label, room, top, look) for lane in lanes]
        times = [lane.took_ns for lane in unseen if lane.pieces]
        idle, hidden = len(unseen) - len(times), True
    return [*rows, _summary_lane(times, idle, label, width, look)] if (hidden and times) or idle else rows


def visible_lanes(timeline: StepTimeline) -> Sequence[Lane]:
    """The lanes worth a row: a single one would repeat the forward."""
    return timeline.lanes if len(timeline.lanes) > 1 else ()


def _align_sync_ends(timelines: Sequence[StepTimeline]) -> list[int]:
    """Where each step begins (ns) on an axis on which all ranks leave their last synchronized pass together.

    This needs no common clock. A step without a synchronized pass begins at 0.
    """
    synced = [max((piece.end_ns for piece in each.main if piece.phase == "sync"), default=None) for each in timelines]
    last = max((end for end in synced if end is not None), default=0)
    return [0 if end is None else last - end for end in synced]


def _scale_row(timelines: Iterable[StepTimeline], label: int, room: int, top: float, look: TerminalStyle) -> Row:
    """The scale of the rows below, with a tick at round times; at its end, what a dotted row means."""
    step = max(round_up_nice(top * _MIN_TICK_CELLS / room), 1.0)
    tick, line = look.glyphs.tick, look.glyphs.span[1]
    cells = [line] * room
    for number in range(int(top / step) + 1):
        value, unit = format_duration(number * step).split()
        text = f"{tick}{float(value):g} {unit} " if number else f"{tick}0 "
        at = int(number * step / top * room)
        if at + len(text) <= room:
            cells[at : at + len(text)] = text
    rest = any(each.idle_ns for each in timelines)
    legend = align_right(f"{_script_dot(look.glyphs)} script", _DURATION_CELLS) if rest else " " * _DURATION_CELLS
    return [*fit_row([("last step", "dim")], label, look.glyphs.more), ("".join(cells), "dim"), (legend, "dim")]


def _main_thread_row(
    name: str, timeline: StepTimeline, label: int, room: int, top: float, look: TerminalStyle, begin: int
) -> Row:
    """The row of a main thread. Its step begins `begin` ns after the start of the scale."""
    return [
        *fit_row([(name, "dim")], label, look.glyphs.more),
        *main_row(_shift_pieces(timeline.main, begin), room, top, look, (begin, begin + timeline.step.wall_ns)),
        (align_right(format_duration(timeline.step.wall_ns), _DURATION_CELLS), "bold"),
    ]


def _shift_pieces(pieces: Iterable[Piece], begin: int) -> list[Piece]:
    return [piece._replace(start_ns=piece.start_ns + begin, end_ns=piece.end_ns + begin) for piece in pieces]


def bucket_row(
    timeline: StepTimeline, label: int, room: int, top: float, look: TerminalStyle, step_begin: int = 0
) -> Row:
    """When each bucket of gradients was ready, and how long the averaging lasted after the last one.

    A digit counts several buckets in one cell. Exposed communication lies at the end of a wait.
    """
    scale = room / top
    buckets = [at + step_begin for at in timeline.step.buckets]
    marks = Counter(min(int(at * scale), room - 1) for at in buckets)
    cells: list[Span] = [(" ", "")] * room
    syncs = [piece for piece in _shift_pieces(timeline.main, step_begin) if piece.phase == "sync"]
    left = timeline.step.exposed_ns or 0
    (_, exposed, wait) = busy_signs(look.glyphs)
    if timeline.step.exposed_ns is None:
        wait = (look.glyphs.bar[1], "dim")  # unknown split between wait and exposed communication
    for piece in reversed(syncs):
        took = min(left, piece.end_ns - piece.start_ns)
        left -= took
        for begin, end, sign in (
            (piece.start_ns, piece.end_ns - took, wait),
            (piece.end_ns - took, piece.end_ns, exposed),
        ):
            first = round(begin * scale)
            cells[first : round(end * scale)] = [sign] * (min(round(end * scale), room) - first)
    for at, count in marks.items():
        cells[at] = (look.glyphs.down if count == 1 else str(min(count, 9)), "bold")
    waited = sum(piece.end_ns - piece.start_ns for piece in syncs) - (timeline.step.exposed_ns or 0)
    legend = [(f"{format_count_with_noun(len(buckets), 'bucket')} ready ", "dim"), (look.glyphs.down, "bold")]
    if timeline.step.exposed_ns is not None:
        legend += [("  wait ", "dim"), wait, (f" {format_duration(waited)}  exposed ", "dim"), exposed]
        legend.append((f" {format_duration(timeline.step.exposed_ns)}", "dim"))
    before = min(marks, default=0)
    for text in (legend, legend[:2]):
        if row_width(text) < before:
            cells[: row_width(text)] = text
            break
    return [
        *fit_row([("buckets", "dim")], label, look.glyphs.more),
        *merge_spans(cells[:room]),
        (" " * _DURATION_CELLS, ""),
    ]


def sample_row(sample: LastSample, label: int, room: int, top: float, look: TerminalStyle) -> Row:
    """The collectives of a sampled step, each from the first moment it could start until it was complete.

    An arrow is the launch of a collective without a known end.
    """
    ran, launched = [], []
    for one in sample.collectives:
        begin = one.start_ns - sample.start_ns
        if one.host_ns is None:
            launched.append(begin)
        else:
            ran.append(Piece(one.operation, begin + (one.queue_ns or 0), begin + one.host_ns))
    (line, style) = lane_row(ran, room, top, look)[0]
    cells: list[Span] = [(cell, style) for cell in line]
    for begin in launched:
        cells[min(int(begin * room / top), room - 1)] = (look.glyphs.down, "bold")
    counts = Counter((one.operation, one.group_size) for one in sample.collectives).most_common(2)
    step = "" if sample.step is None else f"step {format_count(sample.step)}: "
    whole = step + ", ".join(
        f"{count} {name} of {format_count_with_noun(size, 'rank')}" for (name, size), count in counts
    )
    short = step + ", ".join(f"{count} {name}" for (name, _), count in counts)
    drawn = [at for at, (cell, _) in enumerate(cells) if cell != " "]
    first, last = (drawn[0], drawn[-1]) if drawn else (room, room)
    for text, at in product((whole, short), (0, last + 2)):
        if at + len(text) < (first if at == 0 else room + 1):
            cells[at : at + len(text)] = [(text, "dim")]
            break
    took = align_right(format_duration(sample.wall_ns), _DURATION_CELLS)
    return [*fit_row([("sampled", "dim")], label, look.glyphs.more), *merge_spans(cells), (took, "dim")]


def _choose_lanes(lanes: Sequence[Lane], room: int) -> tuple[list[Lane], list[Lane]]:
    """The lanes to draw and the lanes without a row. If not all fit: the first lane and the slowest of the others."""
    if len(lanes) <= room or room <= 0:
        return list(lanes[:room]) if room > 0 else [], []
    if room == 1:
        return [], list(lanes)
    slowest = sorted(lanes[1:], key=lambda lane: (-lane.took_ns, lane.number))[: room - 2]
    numbers = {lanes[0].number, *(lane.number for lane in slowest)}
    return [lane for lane in lanes if lane.number in numbers], [lane for lane in lanes if lane.number not in numbers]


def _replica_row(lane: Lane, timeline: StepTimeline, label: int, room: int, top: float, look: TerminalStyle) -> Row:
    word = f"{'s' if timeline.staged else 'r'}{lane.number}"
    head = fit_row([(word.ljust(4), "bold"), (sanitize_line(lane.device, 20), "dim")], label - 1, look.glyphs.more)
    if not lane.pieces:
        return [*head, (" ", ""), *fit_row([("idle", "wait")], room + _DURATION_CELLS)]
    return [
        *head,
        (" ", ""),
        *lane_row(lane.pieces, room, top, look),
        (align_right(format_duration(lane.took_ns), _DURATION_CELLS), ""),
    ]


def _summary_lane(times: Sequence[int], idle: int, label: int, width: int, look: TerminalStyle) -> Row:
    """One row for the lanes without a row of their own: their number, and the range of their times (ns)."""
    text = f"{format_count(len(times) + idle)} more {look.glyphs.down}"
    if times:
        text += f"  {format_duration(min(times))} to {format_duration(max(times))}"
    if idle:
        text += f"  {idle} idle"
    return [(" " * label, ""), (truncate(text, width - label, look.glyphs.more), "dim")]


def main_row(pieces: Sequence[Piece], width: int, top: float, look: TerminalStyle, step: tuple[int, int]) -> Row:
    """Pieces (in order, not overlapping) on `width` cells that stand for `top` ns, with their names.

    Uncovered time between the begin and the end of `step` is dotted: the script did something else.
    """
    color, glyphs = look.has_color, look.glyphs
    scale = width / top
    blocks = color and not glyphs.ascii
    cells: list[Span] = []
    first = 0
    for index in range(width):
        low, high = index / scale, (index + 1) / scale
        while first < len(pieces) and pieces[first].end_ns <= low:
            first += 1
        last = first
        while last < len(pieces) and pieces[last].start_ns < high:
            last += 1
        cells.append(_phase_cell(pieces[first:last], low, high, blocks, color, glyphs) if last > first else (" ", ""))
    begin, end = (min(round(at * scale), width) for at in step)
    cells[begin:end] = [(_script_dot(glyphs), "dim") if cell[0] == " " else cell for cell in cells[begin:end]]
    _write_phase_names(cells, blocks, color)
    return merge_spans(cells)


def _script_dot(glyphs: Glyphs) -> str:
    return "." if glyphs.ascii else glyphs.middot  # a dash would look like part of a phase's name


def lane_row(pieces: Sequence[Piece], width: int, top: float, look: TerminalStyle) -> Row:
    """Pieces on `width` cells that stand for `top` ns, as lines that end on half cells: blocks would run together."""
    halves = [False] * (2 * width)
    scale = 2 * width / top
    for piece in pieces:
        first = min(max(round(piece.start_ns * scale), 0), 2 * width - 1)
        for index in range(first, min(max(round(piece.end_ns * scale), first + 1), 2 * width)):
            halves[index] = True
    line = look.glyphs.bar[0]
    signs = {(True, True): line, (True, False): "╸", (False, True): "╺", (False, False): " "}
    if look.glyphs.ascii:
        signs[True, False] = signs[False, True] = line
    text = "".join(signs[halves[i], halves[i + 1]] for i in range(0, 2 * width, 2))
    return [(text, "phase.apply")]


def _phase_cell(pieces: Sequence[Piece], low: float, high: float, blocks: bool, color: bool, glyphs: Glyphs) -> Span:
    """One cell: the two largest pieces in it, and the edge between them."""
    if blocks and len(pieces) == 1 and pieces[0].start_ns <= low and pieces[0].end_ns >= high:
        return ("█", f"phase.{pieces[0].phase}")
    found: list[tuple[float, float, str]] = []
    at = low
    for piece in pieces:
        start, end = max(piece.start_ns, low), min(piece.end_ns, high)
        if end > start:
            if start > at:
                found.append((at, start, ""))
            found.append((start, end, piece.phase))
            at = end
    if not found:
        return (" ", "")
    if at < high:
        found.append((at, high, ""))
    if not blocks:
        largest = max(found, key=lambda part: part[1] - part[0])
        if not largest[2] and (found[0][2] or largest[1] - largest[0] > 0.75 * (high - low)):
            return (" ", "")
        phase = largest[2] or next(part[2] for part in found if part[2])
        return ("#" if glyphs.ascii else "█", f"chip.{phase}" if color else f"phase.{phase}")
    two = sorted(sorted(found, key=lambda part: part[0] - part[1])[:2])
    first, second = two[0][2], two[-1][2]
    if len(two) == 1 or first == second:
        return ("█", f"phase.{first}") if first else (" ", "")
    sizes = [part[1] - part[0] for part in two]
    eighths = min(max(round(8 * sizes[0] / sum(sizes)), 1), 7)
    if not second:
        return (_LEFT_BLOCKS[eighths], f"phase.{first}")
    return (_LEFT_BLOCKS[eighths], f"chip.{second}" if not first else f"phase.{first}/{second}")


def _write_phase_names(cells: list[Span], blocks: bool, color: bool) -> None:
    """Write names over runs of whole cells, as far as they fit; without blocks, dashes fill the rest of a run."""
    start = 0
    while start < len(cells):
        style = cells[start][1]
        end = start + 1
        while end < len(cells) and cells[end] == cells[start]:
            end += 1
        kind, _, phase = style.partition(".")
        if kind in ("phase", "chip") and "/" not in style and cells[start][0] in "█#":
            text = _phase_name_in_cells(phase, end - start, blocks)
            chip = f"chip.{phase}" if color else f"phase.{phase}"
            cells[start:end] = [(char, chip) for char in text]
        start = end


def _phase_name_in_cells(phase: str, room: int, blocks: bool) -> str:
    letter = LETTERS[phase]
    for word in (phase, phase_by_display_name(phase).short_display_name):
        if len(word) + (1 if blocks else 0) <= room:
            at = letter_position(phase, word)
            named = word if letter == "." else word[:at] + letter + word[at + 1 :]
            return (" " + named if blocks and room > len(word) else named).ljust(room, " " if blocks else "-")
    return letter.ljust(room, " " if blocks else "-")
