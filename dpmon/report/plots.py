"""Makes the plots of a page as plain data: `html_page` draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Literal

from dpmon.model.mode_stats import slowest_first
from dpmon.model.nodes import gpu_name
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_snapshot import ModeChange
from dpmon.model.step_history import PARTS, Bin
from dpmon.model.time_marks import EVALUATION, STALLED, TimeMark, epoch_marks, pause_marks, stall_spans
from dpmon.record.schema import PHASES
from dpmon.report import sentences
from dpmon.report.document import Marked, Plot, PlotSeries, TimeSpan
from dpmon.text.palettes import LIGHT

# The colors of the screen's light theme, because the page has a light background.
_COLORS = {phase.name: LIGHT.by_phase[phase.display_name] for phase in PHASES}
_MODE_COLORS = {"dp": LIGHT.dp, "single": LIGHT.single}
_ORDER = tuple(phase.name for phase in PHASES)
_LINES = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#000000", "#999999")
_WAIT = "#bbbbbb"
_MAX_DEVICES = 16
_MAX_RANKS = 64
_MAX_MARKS = 100
_LETTERS = 130
"""So many letters fit below each other's marks in the width of a plot."""


def build_plots(facts: RunAnalysis) -> list[Plot]:
    """The plots for which the run has data."""
    time = _time(facts)
    over_time = [_step_time(facts), _losses(facts), _speed(facts), _parts_over_time(facts), _rank_waits(facts)]
    over_time += [_devices(facts, 1), _devices(facts, 2)]
    every = [_parts_of_modes(facts), _replicas(facts), _ranks(facts)]
    return [plot._replace(time=time) for plot in over_time if plot is not None] + [one for one in every if one]


def _time(facts: RunAnalysis) -> TimeSpan:
    """The time from the first step to the end of the last, of a stall or of a pause, with the marks of the screen."""
    last = facts.last_step_ns or 0
    until = max(facts.until_ns, last)
    stalls = (span for span in stall_spans(facts.announced.stalls, until) if span[0] < span[1])
    marks = pause_marks(facts.pauses[:_MAX_MARKS], until) + [TimeMark(*span, STALLED, STALLED) for span in stalls]
    end = max([last, *(mark.end_ns or 0 for mark in marks)]) if last and facts.end_ns is not None else until
    begin, trained = facts.first_step_ns, {one.end_ns for one in facts.stretches.bins if not one.evaluation}
    marks += _evaluations([one for one in facts.stretches.bins if one.evaluation and one.end_ns not in trained])
    length, toggles = max(end - begin, 1), filter(_mode_change_mark, facts.announced.changes)
    drawn: list[Marked] = []
    drawn += ((_seconds(each.t_ns or 0), None, each.mode) for each in islice(toggles, _MAX_MARKS))
    drawn += ((_seconds(one.begin_ns), _seconds(one.end_ns), one.word) for one in marks if one.end_ns)
    for one in epoch_marks(facts.progress.epochs, lambda at: (at - begin) * _LETTERS // length):
        drawn.append((_seconds(max(one.begin_ns, begin)), None, one.word))
    return TimeSpan(_seconds(begin), _seconds(end), drawn)


def _evaluations(bins: Sequence[Bin]) -> list[TimeMark]:
    """The times of evaluations: neighboring stretches become one."""
    found: list[TimeMark] = []
    for one in sorted(bins, key=lambda each: each.start_ns):
        if found and one.start_ns <= (found[-1].end_ns or 0):
            found[-1] = found[-1]._replace(end_ns=max(found[-1].end_ns or 0, one.end_ns))
        else:
            found.append(TimeMark(one.start_ns, one.end_ns, EVALUATION, EVALUATION))
    return found[:_MAX_MARKS]


def _mode_change_mark(change: ModeChange) -> bool:
    return change.t_ns is not None and change.requested_by != "start" and change.refused is None


def _modes(facts: RunAnalysis) -> list[tuple[str, str, list[Bin]]]:
    """Title, color and stretches of each mode; evaluations of a mode come separately, in other colors."""
    titles = {mode.mode: sentences.mode_title(mode) for mode in facts.modes}
    modes = []
    for number, (evaluation, name) in enumerate(sorted({(one.evaluation, one.mode) for one in facts.stretches.bins})):
        title = titles.get(name, name) + (", evaluation" if evaluation else "")
        own = None if evaluation else _MODE_COLORS.get(name)
        bins = [one for one in facts.stretches.bins if (one.evaluation, one.mode) == (evaluation, name)]
        modes.append((title, own or _LINES[number % len(_LINES)], bins))
    return modes


def _width(facts: RunAnalysis) -> str:
    return f"{facts.stretches.width_ns / 1e9:g} s"


def _seconds(ns: int) -> float:
    return round(ns / 1e9, 3)


def _over_time(bins: Sequence[Bin], value: Callable[[Bin], float]) -> list[tuple[float, float, float]]:
    return [(_seconds(one.start_ns), _seconds(one.end_ns), round(value(one), 6)) for one in bins]


def _step_time(facts: RunAnalysis) -> Plot | None:
    if len(facts.stretches.bins) < 2:
        return None
    series = []
    for title, color, bins in _modes(facts):
        means = _over_time(bins, lambda one: one.wall_ns / one.steps / 1e6)
        longest = _over_time(bins, lambda one: one.longest_ns / 1e6)
        series.append(PlotSeries(f"{title}: mean", color, means, "steps"))
        series.append(PlotSeries(f"{title}: longest", color, longest, "dots"))
    note = (
        f"mean over stretches of {_width(facts)}{sentences.rank_suffix_of_run(facts)}; dots: the longest step of each"
    )
    return Plot("step-time", "Step time", note, series, "ms a step")


def _losses(facts: RunAnalysis) -> Plot | None:
    series = []
    for number, curve in enumerate(facts.losses):
        points = [
            (at, at, round(mean, 6)) for at, mean in ((p.second, p.mean) for p in curve.points) if mean is not None
        ]
        series.append(PlotSeries(curve.place, _LINES[number % len(_LINES)], points, "line"))
    if not any(len(one.points) >= 2 for one in series):
        return None
    width = f", means over {facts.losses[0].point_s} s" if facts.losses[0].point_s > 1 else ""
    note = f"at most one value a second{width}{sentences.rank_suffix_of_run(facts)}"
    return Plot("loss", "Loss", note, series, "loss")


def _speed(facts: RunAnalysis) -> Plot | None:
    if len(facts.stretches.bins) < 2 or any(one.samples is None for one in facts.stretches.bins):
        return None
    series = []
    for title, color, bins in _modes(facts):
        timed = [one for one in bins if one.elapsed_ns]
        speeds = _over_time(timed, lambda one: (one.samples or 0) / one.elapsed_ns * 1e9)
        series.append(PlotSeries(title, color, speeds, "steps"))
    note = f"samples per second of elapsed training time{sentences.rank_suffix_of_run(facts)}"
    return Plot("speed", "Speed", note, series, "samples a second")


def _parts(places: Sequence[tuple[float, float]], groups: Sequence[Sequence[Bin]]) -> list[PlotSeries]:
    """A bar at each place for each part of a step that took any time: the mean over all steps of the group."""
    names = [name for name in _ORDER if any(one.parts[PARTS.index(name)] for bins in groups for one in bins)]
    series = []
    for name in names:
        slot = PARTS.index(name)
        means = (sum(one.parts[slot] for one in bins) / sum(one.steps for one in bins) for bins in groups)
        points = [(*place, round(mean / 1e6, 6)) for place, mean in zip(places, means, strict=True)]
        label = "forward, the rest" if name == "forward" and "parallel_apply" in names else name
        series.append(PlotSeries(label, _COLORS[name], points, "bars"))
    return series


def _parts_over_time(facts: RunAnalysis) -> Plot | None:
    # One bar per stretch, whatever its modes: two bars would cover each other.
    stretches: dict[int, list[Bin]] = {}
    for one in facts.stretches.bins:
        if not one.evaluation:
            stretches.setdefault(one.end_ns, []).append(one)
    if sum(map(len, stretches.values())) < 2:
        return None
    places: list[tuple[float, float]] = []
    for end, bins in stretches.items():
        begin = _seconds(min(one.start_ns for one in bins))
        places.append((max(begin, places[-1][1]) if places else begin, _seconds(end)))
    note = f"mean of all steps of a stretch{sentences.rank_suffix_of_run(facts)}, over stretches of {_width(facts)}"
    series = _parts(places, list(stretches.values()))
    return Plot("phases", "Where a step's time goes", note, series, "ms a step")


def _parts_of_modes(facts: RunAnalysis) -> Plot | None:
    modes = _modes(facts)
    if not modes:
        return None
    note = f"mean over all steps of a mode{sentences.rank_suffix_of_run(facts)}"
    series = _parts([(row, row) for row in range(len(modes))], [bins for _, _, bins in modes])
    return Plot("modes", "The step by mode", note, series, "ms a step (mean)", [title for title, _, _ in modes])


def plots_of_runs(runs: Sequence[tuple[str, int, Sequence[Bin]]]) -> list[Plot]:
    """Several runs in one plot over time, and one by phase. `runs`: label, side (0 or 1) and stretches of each."""
    runs = [run for run in runs if run[2]]
    if not runs:
        return []
    series = [
        PlotSeries(label, _LINES[side], _over_time(bins, lambda one: one.wall_ns / one.steps / 1e6), "steps")
        for label, side, bins in runs
    ]
    over_time = Plot("step-time", "Step time", "mean over stretches of each run", series, "ms a step")
    parts = _parts([(row, row) for row in range(len(runs))], [bins for _, _, bins in runs])
    note, labels = "mean over all steps of each run", [label for label, _, _ in runs]
    return [over_time, Plot("runs", "Where a step's time goes", note, parts, "ms a step (mean)", labels)]


def _bars_per_row(
    name: str, color: str, times_ns: Iterable[float | None], kind: Literal["bars", "whisker"]
) -> PlotSeries:
    points = [(row, row, round((ns or 0.0) / 1e6, 6)) for row, ns in enumerate(times_ns)]
    return PlotSeries(name, color, points, kind)


def _replicas(facts: RunAnalysis) -> Plot | None:
    shown = [fact for fact in facts.replicas if fact.mode == "dp" and fact.time.count][:_MAX_RANKS]
    if len(shown) < 2:
        return None
    on_device = all(fact.on_device.count for fact in shown)
    medians = [(fact.on_device if on_device else fact.time).median for fact in shown]
    series = [_bars_per_row("on device" if on_device else "on the host", _COLORS["parallel_apply"], medians, "bars")]
    if not on_device:
        series.append(
            _bars_per_row("", _COLORS["parallel_apply"], [fact.time.quantile(0.95) for fact in shown], "whisker")
        )
    note = "median of device times" if on_device else "median of host times, with a whisker up to the 95th percentile"
    labels = [f"{fact.root} {fact.replica} {fact.device}" for fact in shown]
    return Plot("replicas", "Forward of the replicas", note, series, "ms", labels)


def _ranks(facts: RunAnalysis) -> Plot | None:
    ranks = [line for line in slowest_first(facts.ranks, _MAX_RANKS) if line.times is not None and line.times.step_ns]
    if len(ranks) < 2:
        return None
    ranks, left_out = ranks[:_MAX_RANKS], _omitted_ranks_note(ranks)
    known = [line.times for line in ranks if line.times is not None]
    series = [
        _bars_per_row(name, _COLORS[name], [one.phases.get(name) for one in known], "bars")
        for name in ("data", "copy", "forward", "backward", "optimizer", "other")
        if any(one.phases.get(name) for one in known)
    ]
    series.append(_bars_per_row("exposed", _COLORS["sync"], [one.exposed_ns for one in known], "bars"))
    series.append(_bars_per_row("wait", _WAIT, [one.wait_ns for one in known], "bars"))
    labels = [f"rank {line.rank}" for line in ranks]
    note = f"mean step of each rank: the others wait for the rank with the shortest wait{left_out}"
    return Plot("ranks", "Where a step of each rank goes", note, series, "ms a step (mean)", labels)


def _rank_waits(facts: RunAnalysis) -> Plot | None:
    """A row for each rank: how long the others waited for it."""
    width, shares = facts.rank_waits
    known = {line.rank: line for line in facts.ranks if line.rank is not None and shares.get(line.rank)}
    ranks = [line.rank for line in slowest_first([*known.values()], _MAX_RANKS) if line.rank is not None]
    of_rank = ((rank, _merge_equal_shares(shares[rank], width)) for rank in ranks[:_MAX_RANKS])
    series = [PlotSeries(f"rank {rank}", LIGHT.bad, cells, "cells") for rank, cells in of_rank]
    if not any(value for one in series for _, _, value in one.points):
        return None
    note = "how long the others waited for each rank, as a part of its step: 0 to 100%; right: the mean"
    note += _omitted_ranks_note(ranks)
    return Plot("waits", "Who was slowest, when", note, series, "", [one.name for one in series])


def _omitted_ranks_note(ranks: Sequence[object]) -> str:
    more = len(ranks) - _MAX_RANKS
    return f"; ranks left out: {more:,}" if more > 0 else ""


def _merge_equal_shares(shares: Mapping[int, float], width: int) -> list[tuple[float, float, float]]:
    """The shares in tenths; neighbors with the same one become one cell."""
    found: list[tuple[float, float, float]] = []
    for begin, share in sorted(shares.items()):
        tenth = round(share, 1)
        if found and found[-1][1:] == (begin, tenth):
            found[-1] = found[-1][0], begin + width, tenth
        else:
            found.append((begin, begin + width, tenth))
    return found


def _devices(facts: RunAnalysis, what: Literal[1, 2]) -> Plot | None:
    """The use (1) or the memory (2) of the GPUs, or of the host if there are none."""
    scale = 1 if what == 1 else 1 << 30
    series = []
    for number, device in enumerate((facts.devices or facts.samples.hosts)[:_MAX_DEVICES]):
        known = [(_seconds(point[0]), point[what]) for point in device.points()]
        points = [(at, at, round(value / scale, 3)) for at, value in known if value is not None]
        if len(points) >= 2:
            name = gpu_name(device.index, facts.nodes)
            series.append(PlotSeries(name, _LINES[number % len(_LINES)], points, "line"))
    if not series:
        return None
    where = "the devices" if facts.devices else "the host (there is no GPU)"
    if what == 1:
        return Plot("use", "Utilization", f"of {where}", series, "%", top=100.0)
    return Plot("memory", "Memory in use", f"of {where}, other programs included", series, "GiB")
