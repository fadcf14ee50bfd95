"""Panel 2 of a model split over several devices: a row per stage with its incoming tensors and its time."""

from __future__ import annotations

from dpmon.cleaning import clean
from dpmon.text.cells import cut, right, span_width, wrapped
from dpmon.text.quantities import memory
from dpmon.ui.look import Look
from dpmon.ui.panels.panel_replicas import device_time, every_size, host_time, shown, size_text
from dpmon.ui.panels.panel_replicas import title as replicas_title
from dpmon.ui.rows import Row, fit
from dpmon.ui.scene import Scene


def applies(scene: Scene) -> bool:
    """Whether the visible root lies on several devices."""
    track = shown(scene)
    return track is not None and not track.last.replicas and len(track.last.devices) > 1 and track.last.mode != "dp"


def wanted_rows(scene: Scene) -> int:
    """Rows that the whole content needs."""
    track = shown(scene)
    return 3 if track is None else len(track.last.stages) + 2


def title(scene: Scene, look: Look) -> tuple[Row, Row]:
    """The panel's title, and its main number."""
    (_, style), *rest = replicas_title(scene, look)[0]
    return [("2 Stages", style), *rest], replicas_title(scene, look)[1]


def table(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """The panel's rows, inside its frame: a header, a row per stage, and why values are missing."""
    track = shown(scene)
    if track is None:
        return []
    call = track.last
    more = look.glyphs.more
    device = min(max([span_width(clean(s.device, 20)) for s in call.stages] + [6]), 10)
    ins = [size_text(stage.inputs) for stage in call.stages]
    outs = [size_text(stage.outputs) for stage in call.stages]
    names = [clean(", ".join(stage.parts), 200) for stage in call.stages]
    room = max(width - 3 - device - 2 - 10 - 10 - 4 - (10 if track.device_ns else 0), 18)
    given = min(max(map(span_width, [*ins, "input"])), room // 3)
    gave = min(max(map(span_width, [*outs, "output"])), room // 3)
    parts = min(max(map(span_width, [*names, "parts"])), room - given - gave)
    rows: list[Row] = [
        [
            (" # ", "dim"),
            ("device".ljust(device) + "  ", "dim"),
            *fit([("parts", "dim")], parts + 2, more),
            *fit([("input", "dim")], given + 2, more),
            *fit([("output", "dim")], gave, more),
            ("   crossed", "dim"),
            (" host time", "dim"),
            (" on device" if track.device_ns else "", "dim"),
        ]
    ]
    for stage, got, result, name in zip(call.stages, ins, outs, names, strict=True):
        rows.append(
            [
                (right(str(stage.stage), 2) + " ", "bold"),
                *fit([(clean(stage.device, 20), "")], device + 2, more),
                *fit([(cut(name, parts, more), "")], parts + 2, more),
                *fit([(cut(got, given, more), "")], given + 2, more),
                *fit([(cut(result, gave, more), "")], gave, more),
                (right("" if stage.stage == 0 else memory(stage.crossed), 10), ""),
                (right(host_time(track, stage.stage), 10), "bold"),
                (right(device_time(track, stage.stage), 10) if track.device_ns else "", "bold"),
            ]
        )
    if not call.stages:
        rows.append([("no stage of this call was seen", "dim")])
    if call.failed:
        rows.append([("the forward raised an exception", "bad")])
    for reason in call.absent.values():
        rows += [[(line, "dim")] for line in wrapped(clean(reason, 300), width)]
    return rows


def zoomed(scene: Scene, width: int, height: int, look: Look) -> list[Row]:
    """The panel at full size: the table, then every size of every stage by its path."""
    rows = [*table(scene, width, height, look), []]
    track = shown(scene)
    for stage in track.last.stages if track is not None else ():
        names = clean(", ".join(stage.parts), max(width - 20, 10))
        rows.append([(f"{right(str(stage.stage), 2)} {clean(stage.device, 40)}  ", "bold"), (names, "")])
        rows += every_size(stage.inputs, stage.outputs, width, look)
    return rows
