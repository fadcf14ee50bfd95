"""Panel 2 of a run of several processes: a row a rank, what it received and returned, and where its step goes."""

from __future__ import annotations

from dpmon.model.numbers import UNKNOWN, duration, group
from dpmon.model.process import CallTrack, Process
from dpmon.model.ranks import training, world
from dpmon.record.kinds import rows_of
from dpmon.record.wire import DDP
from dpmon.text.cells import right, span_width, wrapped
from dpmon.text.cleaning import clean
from dpmon.ui.look import Look
from dpmon.ui.panel_replicas import every_size, kind, shown, size_text
from dpmon.ui.rows import Row, fit
from dpmon.ui.scene import Scene

_NOT_APART = "the ranks average their gradients within the backward pass: a rank that waits for another waits there"


def applies(scene: Scene) -> bool:
    """Whether several processes train side by side, none of them over replicas of its own."""
    processes = training(scene.state)
    if len(processes) < 2:
        return False
    track = shown(scene)
    return track is None or len(track.last.replicas) <= 1


def _rows(scene: Scene, room: int) -> tuple[list[tuple[Process, CallTrack | None]], int]:
    """At most `room` processes, each with its calls of the root that is shown, or else its newest; and their number."""
    processes = training(scene.state)
    track = shown(scene)
    key = (track.last.root, track.last.via) if track is not None else ("", None)
    own = [process.calls.get(process.newest) if process.newest is not None else None for process in processes]
    rows = [(process, process.calls.get(key, newest)) for process, newest in zip(processes, own, strict=True)]
    return rows[: max(room, 1)], len(processes)


def wanted_rows(scene: Scene) -> int:
    """Rows that the panel would like to have for its content."""
    return len(training(scene.state)) + 2


def title(scene: Scene, look: Look) -> tuple[Row, Row]:
    """The panel's title, and the one number that counts."""
    processes = training(scene.state)
    dot = f" {look.glyphs.middot} "
    track = shown(scene)
    name = ""
    of: Row = []
    if track is not None:
        of = kind(track.last, look)
        via = clean(track.last.via, 40) if track.last.via else "bare module"
        name = f"{dot}{clean(track.last.root, 60)}{dot}{via}"
    newest = max((p.last_step.step for p in processes if p.last_step is not None), default=None)
    corner: Row = [("step", "dim"), (right(group(newest), 9), "")]
    return [("2 Ranks", "title"), *of, (name, "")], corner


def table(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """The panel's rows, inside its frame: a header, a row a rank, what is not told apart and why."""
    rows, count = _rows(scene, max(height, 2) + 1 + scene.view.scrolled.get("replicas", 0))
    ins = [size_text(track.last.inputs) if track else UNKNOWN for _, track in rows]
    outs = [size_text(track.last.outputs) if track else UNKNOWN for _, track in rows]
    device = min(max([span_width(_device(track)) for _, track in rows] + [6]), 10)
    cell = 9 if width >= 5 + device + 2 + 6 + 9 * 3 + 18 else 8
    count_room = 6 if cell == 9 else 5
    # Times are never cut: sizes have the room that is left, each cut with a sign of it.
    room = max(width - 5 - device - 1 - 1 - count_room - cell * 3, 4)
    needs = [max(map(span_width, [*texts, word])) for texts, word in ((ins, "input"), (outs, "output"))]
    given = min(needs[0], max(room * 3 // 5, room - needs[1]))
    gave = min(needs[1], room - given)
    more = look.glyphs.more
    drawn: list[Row] = [
        [
            (("rank " if rows and rows[0][0].rank is not None else "proc "), "dim"),
            ("device".ljust(device) + " ", "dim"),
            *fit([("input", "dim")], given, more),
            (" ", ""),
            *fit([("output", "dim")], gave, more),
            (right("rows", count_room), "dim"),
            *((right(word, cell), "dim") for word in ("forward", "backward" if cell == 9 else "backwd", "step")),
        ]
    ]
    for (process, track), got, result in zip(rows, ins, outs, strict=True):
        number = process.process if process.rank is None else process.rank
        batch = rows_of(track.last.inputs) if track else None
        drawn.append(
            [
                (right(str(number), 4) + " ", "bold"),
                *fit([(_device(track), "")], device, more),
                (" ", ""),
                *fit([(got, "")], given, more),
                (" ", ""),
                *fit([(result, "")], gave, more),
                (right(UNKNOWN if batch is None else str(batch), count_room), ""),
                (right(duration(process.figures.forward_ns), cell), ""),
                (right(duration(process.figures.backward_ns), cell), ""),
                (right(duration(process.figures.step_ns), cell), "bold"),
            ]
        )
    drawn += [[] for _ in range(count - len(rows))]  # not drawn, but counted by the frame
    drawn += _missing([process for process, _ in rows], count)
    if any(track is not None and track.last.via == DDP for _, track in rows):
        drawn += [[(line, "dim")] for line in wrapped(_NOT_APART, width)]
    return drawn


def _missing(processes: list[Process], count: int) -> list[Row]:
    """A row that says so, if fewer ranks train than there should be."""
    wanted = max((ranks for process in processes if (ranks := world(process)) is not None), default=count)
    if wanted <= count or any(process.rank is None for process in processes):
        return []
    return [[(f"{count} of {wanted} ranks train in this run", "wait")]]


def _device(track: CallTrack | None) -> str:
    devices = track.last.devices if track is not None else ()
    return clean(devices[0], 20) if devices else UNKNOWN


def zoomed(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """The panel at full size: the table, then every size of every rank by its path."""
    drawn = table(scene, width, height, look)
    rows, _ = _rows(scene, height)
    drawn.append([])
    for process, track in rows:
        pid, ranks = process.info.get("pid"), world(process) or UNKNOWN
        who = f"process {process.process}" if process.rank is None else f"rank {process.rank} of {ranks}"
        drawn.append(
            [(f"{who}  {_device(track)}", "bold"), (f"  pid {pid if isinstance(pid, int) else UNKNOWN}", "dim")]
        )
        drawn += every_size(track.last.inputs, track.last.outputs, width, look) if track is not None else []
    return drawn
