"""The plots of a page, as plain data for plotly.js.

Text from outside is escaped, because plotly interprets some HTML in names and labels.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any, NamedTuple

from dpmon.cleaning import clean
from dpmon.record.schema import PHASES
from dpmon.report import sentences
from dpmon.report.story import PARTS, Bin, Story
from dpmon.report.table_rows import mode_title
from dpmon.text.palettes import LIGHT

# The colours of the screen's light theme, because the page has a light background.
_COLOURS = {phase.name: LIGHT.by_phase[phase.shown] for phase in PHASES}
_MODE_COLOURS = {"dp": LIGHT.dp, "single": LIGHT.single}
_ORDER = tuple(phase.name for phase in PHASES)
_LINES = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#000000", "#999999")
_MAX_DEVICES = 16
_MAX_PAUSES = 100


class Plot(NamedTuple):
    """One plot: its title, a line of explanation, its traces and its layout."""

    name: str
    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]


def plots(story: Story) -> list[Plot]:
    """The plots for which the run has data."""
    found = [_step_time(story), _speed(story), _parts_over_time(story), _parts_of_modes(story), _replicas(story)]
    found += [_devices(story, "util_pct"), _devices(story, "mem_bytes")]
    return [plot for plot in found if plot is not None]


def _text(text: object) -> str:
    return html.escape(clean(text))


def _axes(y: str, x: str = "seconds since the run's start", **more: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, "rangemode": "tozero"}, **more}


def _with_pauses(story: Story, layout: dict[str, Any]) -> dict[str, Any]:
    """The layout of a plot over time, with the pauses of the training in grey."""
    until = max((point.t_ns for point in story.points), default=0)
    until = max([until, *(one.end_ns for one in story.bins)])
    shapes = []
    for pause in story.pauses[:_MAX_PAUSES]:
        end = until if pause.on else pause.end_ns
        if pause.refused is None and pause.start_ns is not None and end is not None and end > pause.start_ns:
            place = {"x0": round(pause.start_ns / 1e9, 3), "x1": round(end / 1e9, 3), "y0": 0, "y1": 1}
            look = {"fillcolor": "#999999", "opacity": 0.25, "line": {"width": 0}, "layer": "below"}
            label = {"text": "paused", "textposition": "top center", "font": {"size": 10}}
            shapes.append({"type": "rect", "xref": "x", "yref": "paper", **place, **look, "label": label})
    return {**layout, "shapes": shapes} if shapes else layout


def _seconds(one: Bin) -> float:
    return round(one.start_ns / 1e9, 3)


def _modes(story: Story) -> list[tuple[str, str, list[Bin]]]:
    """Mode, title and stretches of each mode; evaluations of a mode come separately."""
    titles = {mode.mode: mode_title(mode) for mode in story.evidence.modes}
    kinds = sorted({(one.evaluation, one.mode) for one in story.bins})
    return [
        (
            name,
            titles.get(name, name) + (", evaluation" if evaluation else ""),
            [one for one in story.bins if (one.evaluation, one.mode) == (evaluation, name)],
        )
        for evaluation, name in kinds
    ]


def _mode_colour(mode: str, bins: Sequence[Bin], number: int) -> str:
    """The mode's own colour for its training steps; evaluations have other colours."""
    own = None if bins[0].evaluation else _MODE_COLOURS.get(mode)
    return own or _LINES[number % len(_LINES)]


def _with_gaps(bins: Sequence[Bin], values: Sequence[float | None]) -> tuple[list[Any], list[Any]]:
    """x and y of a line with a break wherever no step ran for a whole stretch."""
    x: list[Any] = []
    y: list[Any] = []
    before: Bin | None = None
    for one, value in zip(bins, values, strict=True):
        if before is not None and one.start_ns > before.end_ns:
            x.append(None)
            y.append(None)
        x.append(_seconds(one))
        y.append(None if value is None else round(value, 6))
        before = one
    return x, y


def _step_time(story: Story) -> Plot | None:
    if len(story.bins) < 2:
        return None
    traces: list[dict[str, Any]] = []
    for number, (mode, title, bins) in enumerate(_modes(story)):
        colour = _mode_colour(mode, bins, number)
        x, y = _with_gaps(bins, [one.wall_ns / one.steps / 1e6 for one in bins])
        line = {
            "type": "scatter",
            "mode": "lines+markers",
            "marker": {"size": 4},
            "line": {"color": colour, "shape": "hv"},
        }
        traces.append({**line, "name": f"{_text(title)}: mean", "x": x, "y": y})
        x, y = _with_gaps(bins, [one.longest_ns / 1e6 for one in bins])
        dots = {"type": "scatter", "mode": "markers", "marker": {"size": 4, "color": colour, "opacity": 0.35}}
        # The longest steps would flatten the rest, so they are hidden until a click.
        traces.append({**dots, "name": f"{_text(title)}: longest", "x": x, "y": y, "visible": "legendonly"})
    width = story.bin_ns / 1e9
    layout = _with_pauses(story, _axes("ms a step"))
    note = f"mean over stretches of {width:g} s{sentences.of_whom(story)}"
    return Plot("step-time", "Step time", note, traces, layout)


def _speed(story: Story) -> Plot | None:
    if len(story.bins) < 2 or any(one.samples is None for one in story.bins):
        return None
    traces = []
    for number, (mode, title, bins) in enumerate(_modes(story)):
        x, y = _with_gaps(bins, [(one.samples or 0) / one.elapsed_ns * 1e9 if one.elapsed_ns else None for one in bins])
        # A stretch's value holds until the next one begins, so a long step is drawn at its full length.
        line = {"type": "scatter", "mode": "lines", "line": {"color": _mode_colour(mode, bins, number), "shape": "hv"}}
        traces.append({**line, "name": _text(title), "x": x, "y": y})
    note = f"samples per second of elapsed training time{sentences.of_whom(story)}"
    return Plot("speed", "Speed", note, traces, _with_pauses(story, _axes("samples a second")))


def _ran(bins: Sequence[Bin]) -> list[str]:
    """The parts that took any time, in the order in which they are stacked."""
    return [name for name in _ORDER if any(one.parts[PARTS.index(name)] for one in bins)]


def _label(name: str, names: Sequence[str]) -> str:
    return "forward, the rest" if name == "forward" and "parallel_apply" in names else name


def _parts_over_time(story: Story) -> Plot | None:
    bins = [one for one in story.bins if not one.evaluation]
    if len(bins) < 2:
        return None
    names = _ran(bins)
    # One bar per stretch, whatever its modes: two bars would cover each other.
    stretches: dict[int, list[Bin]] = {}
    for one in bins:
        stretches.setdefault(one.end_ns, []).append(one)
    spans: list[tuple[int, int]] = []
    for end, found in stretches.items():
        begin = min(one.start_ns for one in found)
        spans.append((max(begin, spans[-1][1]) if spans else begin, end))
    steps = [sum(one.steps for one in found) for found in stretches.values()]
    traces = [
        {
            "type": "bar",
            "name": _label(name, names),
            "x": [round(begin / 1e9, 3) for begin, _ in spans],
            "offset": 0,
            "y": [
                round(sum(one.parts[PARTS.index(name)] for one in found) / count / 1e6, 6)
                for found, count in zip(stretches.values(), steps, strict=True)
            ],
            "width": [round((end - begin) / 1e9, 3) for begin, end in spans],
            "marker": {"color": _COLOURS[name], "line": {"width": 0}},
        }
        for name in names
    ]
    note = f"mean of all steps of a stretch{sentences.of_whom(story)}, over stretches of {story.bin_ns / 1e9:g} s"
    layout = _with_pauses(story, _axes("ms a step", barmode="stack", bargap=0))
    return Plot("phases", "Where a step's time goes", note, traces, layout)


def _parts_of_modes(story: Story) -> Plot | None:
    modes = _modes(story)
    if not modes:
        return None
    names = _ran(story.bins)
    traces = []
    for name in names:
        slot = PARTS.index(name)
        means = [sum(one.parts[slot] for one in bins) / sum(one.steps for one in bins) / 1e6 for _, _, bins in modes]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _label(name, names),
                "y": [_text(title) for _, title, _ in modes],
                "x": [round(mean, 6) for mean in means],
                "marker": {"color": _COLOURS[name]},
            }
        )
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "ms a step (mean)"}},
        "yaxis": {"automargin": True},
        "height": 230 + 50 * len(modes),
        "legend": {"orientation": "h", "y": -1.1 / len(modes), "yanchor": "top", "traceorder": "normal"},
    }
    return Plot("modes", "The step by mode", f"mean over all steps of a mode{sentences.of_whom(story)}", traces, layout)


def _replicas(story: Story) -> Plot | None:
    facts = [fact for fact in story.evidence.replicas if fact.mode == "dp" and fact.median_ns is not None]
    if len(facts) < 2:
        return None
    labels = [_text(f"{fact.root} {fact.replica} {fact.device}") for fact in facts]
    middles = [(fact.median_ns or 0) / 1e6 for fact in facts]
    above = [max((fact.p95_ns or 0) / 1e6 - middle, 0) for fact, middle in zip(facts, middles, strict=True)]
    error = {"type": "data", "symmetric": False, "array": above, "arrayminus": [0] * len(above)}
    trace: dict[str, Any] = {
        "type": "bar",
        "x": labels,
        "y": middles,
        "error_y": error,
        "marker": {"color": _COLOURS["parallel_apply"]},
    }
    traces, note = [trace], "median, with a whisker up to the 95th percentile"
    layout = _axes("ms (host)", x="", showlegend=False)
    layout["xaxis"] = {"automargin": True, "type": "category"}
    on_device = [None if fact.device_ns is None else fact.device_ns / 1e6 for fact in facts]
    if any(middle is not None for middle in on_device):
        beside = {"type": "bar", "x": labels, "y": on_device, "marker": {"color": _LINES[1]}, "name": "on device"}
        traces, note = [{**trace, "name": "on the host"}, beside], f"{note} of host times"
        layout |= {"barmode": "group", "showlegend": True, "yaxis": _axes("ms")["yaxis"]}
    return Plot("replicas", "Forward of the replicas", note, traces, layout)


def _devices(story: Story, what: str) -> Plot | None:
    names = {device.index: f"GPU {device.index}" for device in story.evidence.devices[:_MAX_DEVICES]}
    names = names or {-1: "host"}
    traces = []
    for number, (index, name) in enumerate(names.items()):
        points = [point for point in story.points if point.index == index and getattr(point, what) is not None]
        if len(points) < 2:
            continue
        scale = 1 if what == "util_pct" else 1 << 30
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "line": {"color": _LINES[number % len(_LINES)]},
                "name": _text(name),
                "x": [round(point.t_ns / 1e9, 3) for point in points],
                "y": [round(getattr(point, what) / scale, 3) for point in points],
            }
        )
    if not traces:
        return None
    where = "the devices" if story.evidence.devices else "the host (there is no GPU)"
    if what == "util_pct":
        layout = _with_pauses(story, _axes("%"))
        layout["yaxis"]["range"] = [0, 103]
        return Plot("use", "Utilisation", f"of {where}", traces, layout)
    note = f"of {where}, other programs included"
    return Plot("memory", "Memory in use", note, traces, _with_pauses(story, _axes("GiB")))
