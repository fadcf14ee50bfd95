"""Panel 1 without a GPU: the host's load, the run's part in it, and why there is no GPU."""

from __future__ import annotations

from dpmon.cleaning import clean
from dpmon.record.plainjson import number_in
from dpmon.text.cells import right, wrapped
from dpmon.text.quantities import UNKNOWN, memory, memory_of
from dpmon.ui.chart import area, resampled, spark
from dpmon.ui.device_facts import reasons
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, fit, width_of
from dpmon.ui.scene import Scene

_LEAST_GRAPH = 10
"""Fewest cells for the history of the load beside the run's part of it."""
_LEAST_REASON = 20
"""Fewest cells for the reason beside the run's part; all of it stands in the full-size panel."""


def host(scene: Scene, width: int, height: int, look: Look, tall: bool = False) -> list[Row]:
    """Two rows: the host's load and the run's part, and why there is no GPU; `tall`: at full size, at most `height`."""
    track = scene.state.host
    data = track.data
    if not data:
        return [[("no sample yet", "dim")]]
    cpu, used, total = (number_in(data, key) for key in ("cpu_pct", "mem_used_bytes", "mem_total_bytes"))
    own, held = number_in(data, "run_cpu_pct"), number_in(data, "run_mem_bytes")
    load: Row = [(right(UNKNOWN if cpu is None else f"{cpu:.0f} %", 6), "bold")]
    load += [("  mem ", "dim"), (right(memory_of(used, total), 16), "")]
    of_run: Row = [("  this run", "dim")]
    if scene.over and own is None and held is None:
        of_run.append((" has ended", ""))
    else:
        of_run += [(right(UNKNOWN if own is None else f"{own / 100:.2f}", 5), ""), (" cores", "dim")]
        of_run += [(right(memory(held), 10), "")]
    whole = [*load, *of_run] if tall or width >= width_of([*load, *of_run]) + 9 + _LEAST_GRAPH else load
    graph = max(min(width - 9 - width_of(whole), 60), 6)
    values = resampled(track.util, track.second + 1, scene.device_span_s, graph)
    rows: list[Row] = [[("host cpu ", "dim"), (spark(values, graph, look.glyphs), "bar"), *whole]]
    if tall:
        dots = width * (2 if look.glyphs.braille else 1)
        values = resampled(track.util, track.second + 1, scene.device_span_s, dots)
        rows += [[(text, "bar")] for text in area(values, width, min(max(height - 4, 1), 8), 100.0, look.glyphs)]
    reason = data.get("gpu_absent")
    text = reasons([data])
    if isinstance(reason, str):
        absent = reason if reason.lower().startswith("no gpu") else f"no GPU: {reason}"
        text = f"{absent}; {text}" if text else absent
    short: Row = [("  run", "dim"), *of_run[1:]]
    left = width - width_of(short)
    if whole is load and left >= _LEAST_REASON and not scene.over:
        return [*rows, [*fit([(clean(text, 600), "dim")], left, look.glyphs.more), *short]]
    return rows + _reason(clean(text, 600), width, height - len(rows) if tall else 1, look)


def _reason(text: str, width: int, room: int, look: Look) -> list[Row]:
    """A reason in at most `room` rows; text that does not fit is cut and marked."""
    lines = wrapped(text, width, room, look.glyphs.more) if text and room > 0 else []
    return [[(line, "dim")] for line in lines]
