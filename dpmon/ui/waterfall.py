"""The last step over time: a row for the main thread with a name on every phase, and a row for each replica.

Edges lie on eighths of a cell where the glyphs are blocks. Without colour, or in ASCII, each phase starts with its
letter, followed by its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from dpmon.cleaning import clean
from dpmon.model.state import Process
from dpmon.model.step_timeline import Lane, Piece, StepTimeline, last_step_timeline
from dpmon.record.schema import phase_shown
from dpmon.store.answers import LastSample
from dpmon.text.cells import cut, right, span_width
from dpmon.text.quantities import count_of, duration, group
from dpmon.ui.chart import busy_signs, ceiling
from dpmon.ui.look import LETTERS, Glyphs, Look, letter_in
from dpmon.ui.rows import Row, Span, fit, merged, width_of

REST = ("forward rest", "fwd rest", "fwd")
"""Names, from long to short, for the rest of the forward when the call's phases are shown separately."""
_LEFT = " ▏▎▍▌▋▊▉█"
_TOOK = 9


def waterfall(
    timeline: StepTimeline,
    width: int,
    height: int,
    look: Look,
    usual_ns: float | None,
    others: Sequence[Process] = (),
    sample: LastSample | None = None,
    rank: int | None = None,
) -> list[Row]:
    """At most `height` rows of `width` cells. `usual_ns`: a step time that few steps exceed; it keeps the scale steady.

    `others`: other ranks; their last steps replace the lanes. `sample`: the newest step with known collectives.
    `rank`: the step's rank, if there are several.
    """
    if height <= 0:
        return []
    ranks = list(others) if height > 1 else []
    name, label = "last step", 10
    if not ranks:
        label = min(max(label, *(5 + span_width(clean(lane.device, 12)) for lane in timeline.lanes), 0), 14)
        name += "" if rank is None else f", rank {rank}"
        label = label if rank is None else max(label, len(name) + 1)
    room = width - label - _TOOK
    if room < 8:
        return []
    least = 1 + min(len(ranks), 2)  # the first of the others may be the straggler
    with_buckets = bool(timeline.step.buckets) and height > least
    height -= with_buckets
    with_sample = bool(ranks) and sample is not None and height > least
    height -= with_sample
    fit_in = len(ranks) if len(ranks) < height else max(height - 2, 1)
    shown = {f"rank {one.rank}": found for one in ranks[:fit_in] if (found := last_step_timeline(one)) is not None}
    late = {each: _late(timeline, other) for each, other in shown.items()}
    ends = [late[each] + other.step.wall_ns for each, other in shown.items()]
    top = ceiling(max(usual_ns or 0, timeline.step.wall_ns, *ends, 0))
    rows = [_main(name, timeline, label, room, top, look)]
    if with_buckets:
        rows.append(bucket_row(timeline, label, room, top, look))
    if sample is not None and with_sample:
        rows.append(sample_row(sample, label, room, top, look))
    if ranks:
        rows += [_main(each, other, label, room, top, look, late[each]) for each, other in shown.items()]
        times, idle = [one.last_step.wall_ns for one in ranks[fit_in:] if one.last_step is not None], 0
        hidden = height > 1
    else:
        lanes, left = _chosen(timeline.lanes, height - 1)
        rows += [_lane(lane, timeline, label, room, top, look) for lane in lanes]
        times = [lane.took_ns for lane in left if lane.pieces]
        idle, hidden = len(left) - len(times), True
    return [*rows, _condensed(times, idle, label, width, look)] if (hidden and times) or idle else rows


def _main(name: str, timeline: StepTimeline, label: int, room: int, top: float, look: Look, late: int = 0) -> Row:
    """The row of a main thread. Its step begins `late` ns after the start of the scale."""
    pieces = [piece._replace(start_ns=piece.start_ns + late, end_ns=piece.end_ns + late) for piece in timeline.main]
    return [
        *fit([(name, "dim")], label, look.glyphs.more),
        *main_row(pieces, room, top, look, 0 if late else timeline.step.wall_ns),
        (right(duration(timeline.step.wall_ns), _TOOK), "bold"),
    ]


def bucket_row(timeline: StepTimeline, label: int, room: int, top: float, look: Look) -> Row:
    """When each bucket of gradients was ready, and how long the averaging lasted after the last one.

    A digit counts several buckets in one cell. Exposed communication lies at the end of a wait.
    """
    scale = room / top
    marks = Counter(min(int(at * scale), room - 1) for at in timeline.step.buckets)
    cells: list[Span] = [(" ", "")] * room
    syncs = [piece for piece in timeline.main if piece.phase == "sync"]
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
    legend = [(f"{count_of(len(timeline.step.buckets), 'bucket')} ready ", "dim"), (look.glyphs.down, "bold")]
    if timeline.step.exposed_ns is not None:
        legend += [("  wait ", "dim"), wait, (f" {duration(waited)}  exposed ", "dim"), exposed]
        legend.append((f" {duration(timeline.step.exposed_ns)}", "dim"))
    before = min(marks, default=0)
    for text in (legend, legend[:2]):
        if width_of(text) < before:
            cells[: width_of(text)] = text
            break
    return [*fit([("buckets", "dim")], label, look.glyphs.more), *merged(cells[:room]), (" " * _TOOK, "")]


def sample_row(sample: LastSample, label: int, room: int, top: float, look: Look) -> Row:
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
    counts = Counter(one.operation for one in sample.collectives).most_common(2)
    step = "" if sample.step is None else f"step {group(sample.step)}: "
    text = step + ", ".join(f"{count} {name}" for name, count in counts)
    drawn = [at for at, (cell, _) in enumerate(cells) if cell != " "]
    first, last = (drawn[0], drawn[-1]) if drawn else (room, room)
    for at in (0, last + 2):
        if at + len(text) < (first if at == 0 else room + 1):
            cells[at : at + len(text)] = [(text, "dim")]
            break
    took = right(duration(sample.wall_ns), _TOOK)
    return [*fit([("sampled", "dim")], label, look.glyphs.more), *merged(cells), (took, "dim")]


def _late(timeline: StepTimeline, other: StepTimeline) -> int:
    """How much later (ns) another rank began the same step; the ranks of one machine share a clock.

    0 if it began earlier. Also 0 if it began a whole step later, because then the two ranks are not synchronised.
    """
    late = other.step.start_ns - timeline.step.start_ns
    return late if other.step.step == timeline.step.step and 0 < late < timeline.step.wall_ns else 0


def _chosen(lanes: Sequence[Lane], room: int) -> tuple[list[Lane], list[Lane]]:
    """The lanes to draw and the lanes without a row. If not all fit: the first lane and the slowest of the others."""
    if len(lanes) <= room or room <= 0:
        return list(lanes[:room]) if room > 0 else [], []
    if room == 1:
        return [], list(lanes)
    slowest = sorted(lanes[1:], key=lambda lane: (-lane.took_ns, lane.number))[: room - 2]
    numbers = {lanes[0].number, *(lane.number for lane in slowest)}
    return [lane for lane in lanes if lane.number in numbers], [lane for lane in lanes if lane.number not in numbers]


def _lane(lane: Lane, timeline: StepTimeline, label: int, room: int, top: float, look: Look) -> Row:
    word = f"{'s' if timeline.staged else 'r'}{lane.number}"
    head = fit([(word.ljust(4), "bold"), (clean(lane.device, 20), "dim")], label - 1, look.glyphs.more)
    if not lane.pieces:
        return [*head, (" ", ""), *fit([("idle", "wait")], room + _TOOK)]
    return [*head, (" ", ""), *lane_row(lane.pieces, room, top, look), (right(duration(lane.took_ns), _TOOK), "")]


def _condensed(times: Sequence[int], idle: int, label: int, width: int, look: Look) -> Row:
    """One row for the lanes without a row of their own: their number, and the range of their times (ns)."""
    text = f"{group(len(times) + idle)} more {look.glyphs.down}"
    if times:
        text += f"  {duration(min(times))} to {duration(max(times))}"
    if idle:
        text += f"  {idle} idle"
    return [(" " * label, ""), (cut(text, width - label, look.glyphs.more), "dim")]


def main_row(pieces: Sequence[Piece], width: int, top: float, look: Look, until: int) -> Row:
    """Pieces (in order, not overlapping) on `width` cells that stand for `top` ns, with their names.

    Uncovered time before `until`, the step's end, is dotted.
    """
    colour, glyphs = look.colour, look.glyphs
    scale = width / top
    blocks = colour and not glyphs.ascii
    cells: list[Span] = []
    first = 0
    for index in range(width):
        low, high = index / scale, (index + 1) / scale
        while first < len(pieces) and pieces[first].end_ns <= low:
            first += 1
        last = first
        while last < len(pieces) and pieces[last].start_ns < high:
            last += 1
        cells.append(_cell(pieces[first:last], low, high, blocks, colour, glyphs) if last > first else (" ", ""))
    end = min(round(until * scale), width)
    dot = "." if glyphs.ascii else glyphs.middot  # a dash would look like part of a phase's name
    cells[:end] = [(dot, "dim") if cell[0] == " " else cell for cell in cells[:end]]
    _name(cells, blocks, colour)
    return merged(cells)


def lane_row(pieces: Sequence[Piece], width: int, top: float, look: Look) -> Row:
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


def _cell(pieces: Sequence[Piece], low: float, high: float, blocks: bool, colour: bool, glyphs: Glyphs) -> Span:
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
        return ("#" if glyphs.ascii else "█", f"chip.{phase}" if colour else f"phase.{phase}")
    two = sorted(sorted(found, key=lambda part: part[0] - part[1])[:2])
    first, second = two[0][2], two[-1][2]
    if len(two) == 1 or first == second:
        return ("█", f"phase.{first}") if first else (" ", "")
    sizes = [part[1] - part[0] for part in two]
    eighths = min(max(round(8 * sizes[0] / sum(sizes)), 1), 7)
    if not second:
        return (_LEFT[eighths], f"phase.{first}")
    return (_LEFT[eighths], f"chip.{second}" if not first else f"phase.{first}/{second}")


def _name(cells: list[Span], blocks: bool, colour: bool) -> None:
    """Write names over runs of whole cells, as far as they fit; without blocks, dashes fill the rest of a run."""
    start = 0
    while start < len(cells):
        style = cells[start][1]
        end = start + 1
        while end < len(cells) and cells[end] == cells[start]:
            end += 1
        kind, _, phase = style.partition(".")
        if kind in ("phase", "chip") and "/" not in style and cells[start][0] in "█#":
            text = _text(phase, end - start, blocks)
            chip = f"chip.{phase}" if colour else f"phase.{phase}"
            cells[start:end] = [(char, chip) for char in text]
        start = end


def _text(phase: str, room: int, blocks: bool) -> str:
    letter = LETTERS[phase]
    for word in (phase, phase_shown(phase).shortened):
        if len(word) + (1 if blocks else 0) <= room:
            at = letter_in(phase, word)
            named = word if letter == "." else word[:at] + letter + word[at + 1 :]
            return (" " + named if blocks and room > len(word) else named).ljust(room, " " if blocks else "-")
    return letter.ljust(room, " " if blocks else "-")
