"""Panel 1 without a GPU: the host's load, the run's part in it, and why there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.cleaning import clean
from dpmon.model.members import number_in
from dpmon.model.numbers import UNKNOWN
from dpmon.text.cells import right, wrapped
from dpmon.text.quantities import memory, memory_of
from dpmon.ui.chart import area, bar, parts_bar, resampled, spark
from dpmon.ui.device_facts import reasons
from dpmon.ui.look import Look
from dpmon.ui.rows import Row
from dpmon.ui.scene import Scene


def _of_run(own: float | None, held: float | None) -> Row:
    """The run's part in the host's load."""
    return [
        ("this run ", "dim"),
        (right(UNKNOWN if own is None else f"{own:.0f} % of a core", 16), ""),
        (right(memory(held), 12), ""),
        (" of memory", "dim"),
    ]


def host(scene: Scene, width: int, height: int, look: Look, tall: bool = False) -> list[Row]:
    """At most `height` rows: load, memory, the run's part, why there is no GPU; `tall`: histories in several rows."""
    track = scene.state.host
    data = track.data
    if not data:
        return [[("no sample yet", "dim")]]
    cpu, used, total = (number_in(data, key) for key in ("cpu_pct", "mem_used_bytes", "mem_total_bytes"))
    own, held = number_in(data, "run_cpu_pct"), number_in(data, "run_mem_bytes")
    span = scene.device_span_s
    figures = 23
    graph = max(min(width - 9 - figures, 120 if tall else 60), 6)
    rows: list[Row] = []

    def line(word: str, values: Sequence[float | None], figure: str, style: str) -> None:
        if not tall:
            drawn = [spark(resampled(values, track.second + 1, span, graph), graph, look.glyphs)]
        else:
            dots = graph * (2 if look.glyphs.braille else 1)
            high = min(max((height - 6) // 2, 1), 8)
            drawn = area(resampled(values, track.second + 1, span, dots), graph, high, 100.0, look.glyphs)
        for index, text in enumerate(drawn):
            last = index == len(drawn) - 1
            head: Row = [((word if last else "").ljust(9), "dim"), (text, "bar")]
            rows.append([*head, (right(figure, figures), style)] if last else head)

    line("host cpu", track.util, UNKNOWN if cpu is None else f"{cpu:.0f} %", "bold")
    line("host mem", track.mem, memory_of(used, total), "")
    share = used / total if used is not None and total else None
    ours = min(held, used) if held is not None and used is not None else None
    if share is not None and ours is not None and total:
        rows.append([(" " * 9, ""), *parts_bar((ours / total, share - ours / total), graph, look.glyphs)])
    else:
        rows.append([(" " * 9, ""), *bar(share, graph, look.glyphs)])
    if scene.over and own is None and held is None:
        rows.append([("this run ", "dim"), ("has ended", "")])
    else:
        rows.append(_of_run(own, held))
    reason = data.get("gpu_absent")
    if isinstance(reason, str):
        text = reason if reason.lower().startswith("no gpu") else f"no GPU: {reason}"
        if len(rows) >= height:
            del rows[2]  # the bar, which repeats the figure above it
        rows += _reason(clean(text, 300), width, max(height - len(rows), 1), look)
    rows += _reason(reasons([data]), width, height - len(rows), look)
    return rows


def _reason(text: str, width: int, room: int, look: Look) -> list[Row]:
    """A reason in at most `room` rows; text that does not fit is cut and marked."""
    lines = wrapped(text, width, room, look.glyphs.more) if text and room > 0 else []
    return [[(line, "dim")] for line in lines]
