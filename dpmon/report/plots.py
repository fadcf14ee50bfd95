"""Makes the plots of a page as plain data: dpmon.report.svg draws them."""

from __future__ import annotations

from collections.abc import Sequence

from dpmon.record.schema import PHASES
from dpmon.report import sentences
from dpmon.report.document import Plot, Values
from dpmon.report.sentences import mode_title
from dpmon.report.story import PARTS, Bin, Story
from dpmon.text.palettes import LIGHT

# The colours of the screen's light theme, because the page has a light background.
_COLOURS = {phase.name: LIGHT.by_phase[phase.shown] for phase in PHASES}
_MODE_COLOURS = {"dp": LIGHT.dp, "single": LIGHT.single}
_ORDER = tuple(phase.name for phase in PHASES)
_LINES = ("#0072B2", "#D55E00", "#E69F00", "#CC79A7", "#009E73", "#56B4E9", "#000000", "#999999")
_WAIT = "#bbbbbb"
_MAX_DEVICES = 16
_MAX_RANKS = 64
_MAX_PAUSES = 100


def plots(story: Story) -> list[Plot]:
    """The plots for which the run has data."""
    found = [_step_time(story), _speed(story), _parts_over_time(story), _parts_of_modes(story), _replicas(story)]
    found += [_ranks(story), _devices(story, "util_pct"), _devices(story, "mem_bytes")]
    return [plot for plot in found if plot is not None]


def _pauses(story: Story) -> list[tuple[float, float, str]]:
    """The pauses of the training in seconds."""
    until = max((point.t_ns for point in story.points), default=0)
    until = max([until, *(one.end_ns for one in story.bins)])
    found = []
    for pause in story.pauses[:_MAX_PAUSES]:
        end = until if pause.on else pause.end_ns
        if pause.refused is None and pause.start_ns is not None and end is not None and end > pause.start_ns:
            found.append((round(pause.start_ns / 1e9, 3), round(end / 1e9, 3), "paused"))
    return found


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


def _with_gaps(
    bins: Sequence[Bin], values: Sequence[float | None], until_end: bool = True
) -> tuple[list[float | None], list[float | None]]:
    """x and y of a line with a break wherever no step ran for a whole stretch; `until_end`: of its last stretch."""
    x: list[float | None] = []
    y: list[float | None] = []
    before: Bin | None = None
    for one, value in zip(bins, values, strict=True):
        if before is not None and one.start_ns > before.end_ns:
            x.append(None)
            y.append(None)
        x.append(_seconds(one))
        y.append(None if value is None else round(value, 6))
        before = one
    if until_end and before is not None:
        x.append(round(before.end_ns / 1e9, 3))
        y.append(y[-1])
    return x, y


def _step_time(story: Story) -> Plot | None:
    if len(story.bins) < 2:
        return None
    series = []
    for number, (mode, title, bins) in enumerate(_modes(story)):
        colour = _mode_colour(mode, bins, number)
        means = _with_gaps(bins, [one.wall_ns / one.steps / 1e6 for one in bins])
        longest = _with_gaps(bins, [one.longest_ns / 1e6 for one in bins], until_end=False)
        series += [
            Values(f"{title}: mean", colour, *means, holds=True),
            Values(f"{title}: longest", colour, *longest, dots=True),
        ]
    note = f"mean over stretches of {story.bin_ns / 1e9:g} s{sentences.of_whom(story)}; dots: the longest step of each"
    return Plot("step-time", "Step time", note, series, "ms a step", spans=_pauses(story))


def _speed(story: Story) -> Plot | None:
    if len(story.bins) < 2 or any(one.samples is None for one in story.bins):
        return None
    series = []
    for number, (mode, title, bins) in enumerate(_modes(story)):
        speeds = [(one.samples or 0) / one.elapsed_ns * 1e9 if one.elapsed_ns else None for one in bins]
        series.append(Values(title, _mode_colour(mode, bins, number), *_with_gaps(bins, speeds), holds=True))
    note = f"samples per second of elapsed training time{sentences.of_whom(story)}"
    return Plot("speed", "Speed", note, series, "samples a second", spans=_pauses(story))


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
    begins, ends = ([round(at / 1e9, 3) for at in ats] for ats in zip(*spans, strict=True))
    series = []
    for name in names:
        slot = PARTS.index(name)
        sums = (
            (sum(one.parts[slot] for one in found), sum(one.steps for one in found)) for found in stretches.values()
        )
        heights = [round(took / steps / 1e6, 6) for took, steps in sums]
        series.append(Values(_label(name, names), _COLOURS[name], begins, heights, ends))
    note = f"mean of all steps of a stretch{sentences.of_whom(story)}, over stretches of {story.bin_ns / 1e9:g} s"
    return Plot("phases", "Where a step's time goes", note, series, "ms a step", spans=_pauses(story))


def _parts_of_modes(story: Story) -> Plot | None:
    modes = _modes(story)
    if not modes:
        return None
    names = _ran(story.bins)
    series = []
    for name in names:
        slot = PARTS.index(name)
        means = [sum(one.parts[slot] for one in bins) / sum(one.steps for one in bins) / 1e6 for _, _, bins in modes]
        series.append(Values(_label(name, names), _COLOURS[name], y=[round(mean, 6) for mean in means]))
    note = f"mean over all steps of a mode{sentences.of_whom(story)}"
    return Plot("modes", "The step by mode", note, series, "ms a step (mean)", [title for _, title, _ in modes])


def _replicas(story: Story) -> Plot | None:
    facts = [fact for fact in story.evidence.replicas if fact.mode == "dp" and fact.median_ns is not None]
    if len(facts) < 2:
        return None
    facts = facts[:_MAX_RANKS]
    on_device = all(fact.device_ns is not None for fact in facts)
    middles = [((fact.device_ns if on_device else fact.median_ns) or 0) / 1e6 for fact in facts]
    above = () if on_device else [None if fact.p95_ns is None else fact.p95_ns / 1e6 for fact in facts]
    name = "on device" if on_device else "on the host"
    note = "median of device times" if on_device else "median of host times, with a whisker up to the 95th percentile"
    labels = [f"{fact.root} {fact.replica} {fact.device}" for fact in facts]
    series = [Values(name, _COLOURS["parallel_apply"], y=middles, whiskers=above)]
    return Plot("replicas", "Forward of the replicas", note, series, "ms", labels)


def _ranks(story: Story) -> Plot | None:
    ranks = [line for line in story.ranks if line.times is not None and line.times.step_ns][:_MAX_RANKS]
    if len(ranks) < 2:
        return None
    known = [line.times for line in ranks if line.times is not None]
    series = []
    for name in ("data", "copy", "forward", "backward", "optimizer", "other"):
        values = [round(one.phases.get(name, 0.0) / 1e6, 6) for one in known]
        if any(values):
            series.append(Values(name, _COLOURS[name], y=values))
    for name, colour in (("exposed", _COLOURS["sync"]), ("wait", _WAIT)):
        values = [round((getattr(one, f"{name}_ns") or 0.0) / 1e6, 6) for one in known]
        series.append(Values(name, colour, y=values))
    labels = [f"rank {line.rank}" for line in ranks]
    note = "mean step of each rank: the others wait for the rank with the shortest wait"
    return Plot("ranks", "Where a step of each rank goes", note, series, "ms a step (mean)", labels)


def _devices(story: Story, what: str) -> Plot | None:
    names = {device.index: f"GPU {device.index}" for device in story.evidence.devices[:_MAX_DEVICES]}
    names = names or {-1: "host"}
    scale = 1 if what == "util_pct" else 1 << 30
    series = []
    for number, (index, name) in enumerate(names.items()):
        points = [point for point in story.points if point.index == index and getattr(point, what) is not None]
        if len(points) >= 2:
            x = [round(point.t_ns / 1e9, 3) for point in points]
            y = [round(getattr(point, what) / scale, 3) for point in points]
            series.append(Values(name, _LINES[number % len(_LINES)], x, y))
    if not series:
        return None
    where = "the devices" if story.evidence.devices else "the host (there is no GPU)"
    if what == "util_pct":
        return Plot("use", "Utilisation", f"of {where}", series, "%", spans=_pauses(story), top=100.0)
    return Plot("memory", "Memory in use", f"of {where}, other programs included", series, "GiB", spans=_pauses(story))
