"""Builds the plots of a page as plain data, which `html_page` draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Literal

from dpmon.model.nodes import gpu_name
from dpmon.model.rank_stats import slowest_first
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import ModeChange
from dpmon.model.step_history import Column
from dpmon.model.time_marks import EVALUATION, STALLED, TimeMark, pause_marks, stall_spans, start_marks
from dpmon.record.schema import PHASES
from dpmon.report import sentences
from dpmon.report.document import Plot, PlotMark, PlotSeries, TimeSpan
from dpmon.text.palettes import LIGHT

# The colors of the screen's light theme, because the page has a light background.
_COLORS = {phase.name: LIGHT.by_phase[phase.display_name] for phase in PHASES}
_MODE_COLORS = {"dp": LIGHT.dp, "single": LIGHT.single}
_PHASE_ORDER = tuple(phase.name for phase in PHASES)
_LINE_COLORS = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#000000", "#999999")
_MAX_DEVICES = 16
_MAX_RANKS = 64
_MAX_MARKS = 100
_PLOT_LETTERS = 130
"""About how many letters fit in the width of a plot, for the labels of epochs."""


def build_plots(run: RunAnalysis) -> list[Plot]:
    """Return the plots for which the run has data."""
    time_span = _time_span(run)
    time_plots = [_step_time_plot(run), _loss_plot(run), _throughput_plot(run), _parts_plot(run), _rank_wait_plot(run)]
    time_plots += [_device_plot(run, "use"), _device_plot(run, "memory")]
    return [plot._replace(time_span=time_span) for plot in time_plots if plot is not None]


def _time_span(run: RunAnalysis) -> TimeSpan:
    """Return the time from the first step to the end of the last step, stall or pause, with the marks of the screen."""
    last_ns = run.last_step_ns or 0
    until_ns = max(run.until_ns, last_ns)
    marks = pause_marks(run.pause_list[:_MAX_MARKS], until_ns)
    for stall_start_ns, stall_end_ns in stall_spans(run.announced.stalls, until_ns):
        if stall_start_ns < stall_end_ns:
            marks.append(TimeMark(stall_start_ns, stall_end_ns, STALLED, STALLED))
    start_ns, end_ns, bins = run.first_step_ns, until_ns, run.binned_steps.bins
    if last_ns and run.end_ns is not None:
        end_ns = max([last_ns, *(mark.end_ns or 0 for mark in marks)])
    training_ends = {time_bin.end_ns for time_bin in bins if not time_bin.other_kind}
    marks += _other_kind_marks([b for b in bins if b.other_kind and b.end_ns not in training_ends])
    length_ns, mode_changes = max(end_ns - start_ns, 1), filter(_is_mode_switch, run.announced.changes)
    plot_marks: list[PlotMark] = []
    plot_marks += ((_to_seconds(change.t_ns or 0), None, change.mode) for change in islice(mode_changes, _MAX_MARKS))
    plot_marks += ((_to_seconds(mark.begin_ns), _to_seconds(mark.end_ns), mark.word) for mark in marks if mark.end_ns)
    saves = run.announced.saves(run.representative_trainer)
    for mark in start_marks(run.progress.epochs, saves, lambda ns: (ns - start_ns) * _PLOT_LETTERS // length_ns):
        plot_marks.append((_to_seconds(max(mark.begin_ns, start_ns)), None, mark.word))
    return TimeSpan(_to_seconds(start_ns), _to_seconds(end_ns), plot_marks)


def _other_kind_marks(bins: Sequence[Column]) -> list[TimeMark]:
    """Return the times of steps of other kinds than the main kind, in which adjacent bins are merged."""
    marks: list[TimeMark] = []
    for time_bin in sorted(bins, key=lambda time_bin: time_bin.start_ns):
        if marks and time_bin.start_ns <= (marks[-1].end_ns or 0):
            marks[-1] = marks[-1]._replace(end_ns=max(marks[-1].end_ns or 0, time_bin.end_ns))
        else:
            marks.append(TimeMark(time_bin.start_ns, time_bin.end_ns, EVALUATION, time_bin.other_kind))
    return marks[:_MAX_MARKS]


def _is_mode_switch(change: ModeChange) -> bool:
    return change.t_ns is not None and change.requested_by != "start" and change.refused is None


def _bins_by_mode(run: RunAnalysis) -> list[tuple[str, str, list[Column]]]:
    """Return title, color and bins of each mode; other kinds of steps are separate, in other colors."""
    all_stats = (*run.modes, *run.other_modes)
    titles = {(stats.other_kind, stats.mode): sentences.mode_title(stats) for stats in all_stats}
    modes = []
    keys = sorted({(time_bin.other_kind, time_bin.mode) for time_bin in run.binned_steps.bins})
    for index, (other_kind, name) in enumerate(keys):
        title = titles.get((other_kind, name), name)
        mode_color = None if other_kind else _MODE_COLORS.get(name)
        bins = [b for b in run.binned_steps.bins if (b.other_kind, b.mode) == (other_kind, name)]
        modes.append((title, mode_color or _LINE_COLORS[index % len(_LINE_COLORS)], bins))
    return modes


def _bin_width_text(run: RunAnalysis) -> str:
    return f"{run.binned_steps.width_ns / 1e9:g} s"


def _to_seconds(ns: int) -> float:
    return round(ns / 1e9, 3)


def _points_over_time(bins: Sequence[Column], value: Callable[[Column], float]) -> list[tuple[float, float, float]]:
    return [(_to_seconds(b.start_ns), _to_seconds(b.end_ns), round(value(b), 6)) for b in bins]


def _step_time_plot(run: RunAnalysis) -> Plot | None:
    if len(run.binned_steps.bins) < 2:
        return None
    series = []
    for title, color, bins in _bins_by_mode(run):
        means = _points_over_time(bins, lambda time_bin: time_bin.wall_ns / time_bin.count / 1e6)
        longest = _points_over_time(bins, lambda time_bin: time_bin.longest_ns / 1e6)
        series.append(PlotSeries(f"{title}: mean", color, means, "steps"))
        series.append(PlotSeries(f"{title}: longest", color, longest, "dots"))
    suffix = sentences.rank_suffix_of_run(run)
    note = f"mean over intervals of {_bin_width_text(run)}{suffix}; dots: the longest step of each"
    return Plot("step-time", "Step time", note, series, "ms per step")


def _loss_plot(run: RunAnalysis) -> Plot | None:
    series = []
    for index, curve in enumerate(run.whole_losses):
        points = [(p.second, p.second, round(p.mean, 6)) for p in curve.points if p.mean is not None]
        series.append(PlotSeries(curve.place, _LINE_COLORS[index % len(_LINE_COLORS)], points, "line"))
    if not any(len(curve_series.points) >= 2 for curve_series in series):
        return None
    first_curve, *_ = run.whole_losses
    width = f", means over {first_curve.point_s} s" if first_curve.point_s > 1 else ""
    note = f"at most one value per second{width}{sentences.rank_suffix_of_run(run)}"
    return Plot("loss", "Loss", note, series, "loss")


def _throughput_plot(run: RunAnalysis) -> Plot | None:
    if sum(time_bin.samples is not None for time_bin in run.binned_steps.bins) < 2:
        return None
    series = []
    for title, color, bins in _bins_by_mode(run):
        timed_bins = [time_bin for time_bin in bins if time_bin.elapsed_ns and time_bin.samples is not None]
        speeds = _points_over_time(timed_bins, lambda time_bin: (time_bin.samples or 0) / time_bin.elapsed_ns * 1e9)
        series.append(PlotSeries(title, color, speeds, "steps"))
    note = f"samples per second of elapsed training time{sentences.rank_suffix_of_run(run)}"
    return Plot("speed", "Throughput", note, series, "samples per second")


def _parts_plot(run: RunAnalysis) -> Plot | None:
    # One bar per interval, whatever its modes: two bars would cover each other.
    bins_by_end: dict[int, list[Column]] = {}
    for time_bin in run.binned_steps.bins:
        if not time_bin.other_kind:
            bins_by_end.setdefault(time_bin.end_ns, []).append(time_bin)
    if sum(map(len, bins_by_end.values())) < 2:
        return None
    points_by_part: dict[str, list[tuple[float, float, float]]] = {name: [] for name in _PHASE_ORDER}
    previous_end = 0.0
    for end_ns, bins in bins_by_end.items():
        start, end, steps = _to_seconds(min(b.start_ns for b in bins)), _to_seconds(end_ns), sum(b.count for b in bins)
        for part, name in enumerate(_PHASE_ORDER):
            mean_ns = sum(b.phases[part] for b in bins) / steps
            points_by_part[name].append((max(start, previous_end), end, round(mean_ns / 1e6, 6)))
        previous_end = end
    shown = {name: points for name, points in points_by_part.items() if any(mean for _, _, mean in points)}
    labels = {"forward": "other forward"} if "parallel_apply" in shown else {}
    series = [PlotSeries(labels.get(name, name), _COLORS[name], points, "bars") for name, points in shown.items()]
    width, suffix = _bin_width_text(run), sentences.rank_suffix_of_run(run)
    note = f"mean of all steps of an interval{suffix}, over intervals of {width}"
    return Plot("phases", "Where step time goes", note, series, "ms per step")


def _rank_wait_plot(run: RunAnalysis) -> Plot | None:
    """Return a plot with a row for each rank: how long the others waited for it."""
    width, shares = run.whole_rank_waits
    rows_by_rank = {row.rank: row for row in run.rank_summaries if row.rank is not None and shares.get(row.rank)}
    slowest_rows = slowest_first([*rows_by_rank.values()], _MAX_RANKS)
    ranks = [row.rank for row in slowest_rows if row.rank is not None]
    cells_by_rank = ((rank, _merge_equal_shares(shares[rank], width)) for rank in ranks[:_MAX_RANKS])
    series = [PlotSeries(f"rank {rank}", LIGHT.bad, cells, "cells") for rank, cells in cells_by_rank]
    if not any(value for rank_series in series for _, _, value in rank_series.points):
        return None
    note = "how long the others waited for each rank, as a share of its step; right: the mean"
    if len(ranks) > _MAX_RANKS:
        note += f"; {len(ranks) - _MAX_RANKS:,} ranks omitted"
    return Plot("waits", "Who was slowest, when", note, series, "")


def _merge_equal_shares(shares: Mapping[int, float], width: int) -> list[tuple[float, float, float]]:
    """Return the shares in tenths, with equal adjacent ones merged into one cell."""
    cells: list[tuple[float, float, float]] = []
    for start, share in sorted(shares.items()):
        tenth = round(share, 1)
        if cells:
            previous_start, previous_end, previous_tenth = cells[-1]
            if (previous_end, previous_tenth) == (start, tenth):
                cells[-1] = previous_start, start + width, tenth
                continue
        cells.append((start, start + width, tenth))
    return cells


def _device_plot(run: RunAnalysis, quantity: Literal["use", "memory"]) -> Plot | None:
    """Return a plot of the utilization or memory of the GPUs, or of the host if there are none."""
    is_use = quantity == "use"
    scale = 1 if is_use else 1 << 30
    series = []
    for index, device in enumerate((run.device_usage or run.samples.hosts)[:_MAX_DEVICES]):
        points = []
        for time_ns, utilization, memory in device.points():
            value, second = utilization if is_use else memory, _to_seconds(time_ns)
            if value is not None:
                points.append((second, second, round(value / scale, 3)))
        if len(points) >= 2:
            name = gpu_name(device.index, run.nodes)
            series.append(PlotSeries(name, _LINE_COLORS[index % len(_LINE_COLORS)], points, "line"))
    if not series:
        return None
    owner = "the devices" if run.device_usage else "the host (there is no GPU)"
    if is_use:
        return Plot(quantity, "Utilization", f"of {owner}", series, "%", axis_end=100.0)
    return Plot(quantity, "Memory in use", f"of {owner}, other programs included", series, "GiB")
