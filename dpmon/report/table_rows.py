"""The tables that the text and the page share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dpmon.model.evidence import DeviceFacts, ModeFacts
from dpmon.model.finding import duration_words, of_process
from dpmon.model.memory import Held
from dpmon.model.numbers import UNKNOWN, duration, percent
from dpmon.model.stragglers import RankTimes, sentence
from dpmon.rates import Rate
from dpmon.record.schema import EXPOSED, WAIT
from dpmon.record.wire import CALL_PHASES, RANK_MODES
from dpmon.report.pauses import Paused
from dpmon.report.sentences import is_over
from dpmon.report.story import Story
from dpmon.store.figures import PhaseFigures
from dpmon.text.communicated import communication_facts
from dpmon.text.quantities import clock, memory, memory_of, samples_rate

ON_DEVICE, FORWARD_ON_DEVICE = "on device", "forward on device"
"""Titles of columns."""

_NOT_SEEN = "sizes not seen"
_PARTS_NAMED = 4


class Row(NamedTuple):
    """A row of the tables of replicas, ranks and stages; times in ns."""

    label: str
    device: str
    calls: int
    steps: int
    median_ns: float | None
    p95_ns: float | None
    rate: Rate | None
    sizes: str
    device_ns: float | None = None
    """Median device time of a call; for a rank, of the forward of a step."""
    times: RankTimes | None = None
    """Mean times of a rank's steps, if its waits are known."""


def mode_title(mode: ModeFacts) -> str:
    """A mode's name, with a note for virtual replicas; "ddp" or "fsdp" for ranks, as on the screen."""
    if mode.distributed:
        return RANK_MODES[mode.distributed]
    return f"{mode.mode} (virtual)" if mode.virtual else mode.mode or "mode unknown"


def step_rows(story: Story) -> list[tuple[str, ModeFacts]]:
    """The figures of each mode with a label: first without evaluations, then the evaluations."""
    rows = [(mode_title(mode), mode) for mode in story.evidence.modes if mode.steps]
    return [*rows, *((f"{mode_title(mode)}, evaluation", mode) for mode in story.evaluations)]


def phase_titles(story: Story) -> list[tuple[str, ModeFacts]]:
    """`step_rows` with the process in each label, if there are several."""
    return [(title if mode.who is None else f"{title}, {mode.who}", mode) for title, mode in step_rows(story)]


def steps_table(story: Story) -> list[tuple[str, ...]]:
    """A row of names, then one row for each of `step_rows`; empty without steps.

    If there are several processes, the times are those of one, and the other columns cover all.
    """
    found = step_rows(story)
    named = any(mode.who is not None for _, mode in found)
    head = ("mode", "steps", *(("times of",) if named else ()), "median", "p95", "samples/s")
    rows: list[tuple[str, ...]] = [head]
    for title, mode in found:
        who = (mode.who or "",) if named else ()
        times = duration(mode.median_ns), duration(mode.p95_ns)
        rows.append((title, f"{mode.all_steps:,}", *who, *times, samples_rate(mode.rate)))
    return rows if len(rows) > 1 else []


def phase_rows(mode: ModeFacts) -> list[tuple[str, PhaseFigures]]:
    """The phases with their labels in a table; phases of the calls are indented below forward."""
    found = {figures.name: figures for figures in mode.phases}
    rows: list[tuple[str, PhaseFigures]] = []
    for name, figures in found.items():
        if name in CALL_PHASES:
            continue
        rows.append((name, figures))
        if name == "forward":
            rows += [(f"  {part}", found[part]) for part in CALL_PHASES if part in found]
    if "forward" not in found:
        rows += [(part, found[part]) for part in CALL_PHASES if part in found]
    return rows


def phase_table(mode: ModeFacts) -> list[tuple[str, ...]]:
    """One row per phase with its host time, and its device time if any is known, below a row of names."""
    found = phase_rows(mode)
    timed = any(figures.device_ns is not None for _, figures in found)
    rows: list[tuple[str, ...]] = [("phase", "share", "median", "p95", *(("on device",) if timed else ()))]
    for label, figures in found:
        device = (duration(figures.device_ns),) if timed else ()
        rows.append((label, percent(figures.share), duration(figures.median_ns), duration(figures.p95_ns), *device))
    return rows


def _flow(inputs: object, outputs: object) -> str:
    return f"{inputs or _NOT_SEEN} -> {outputs or _NOT_SEEN}"


def replica_rows(story: Story) -> list[Row]:
    """One row per replica and mode: its most frequent sizes, and the number of others."""
    groups: dict[tuple[str, str, int, str], list[tuple[int, str]]] = {}
    evaluated: Counter[tuple[str, str, int, str]] = Counter()
    for line in story.replicas:
        key = (line.mode, line.root, line.replica, line.device)
        groups.setdefault(key, []).append((line.calls - line.evaluations, _flow(line.inputs, line.outputs)))
        evaluated[key] += line.evaluations == line.calls
    timed = {(fact.mode, fact.root, fact.replica, fact.device): fact for fact in story.evidence.replicas}
    rows = []
    for (mode, root, replica, device), sizes in groups.items():
        fact = timed.get((mode, root, replica, device))
        label = f"{root} {replica}" if mode == "dp" else f"{root} {mode or '?'}"
        rows.append(
            Row(
                label,
                device,
                fact.calls if fact is not None else sum(calls for calls, _ in sizes),
                0,
                fact.median_ns if fact is not None else None,
                fact.p95_ns if fact is not None else None,
                None,
                _most(sizes, evaluated[mode, root, replica, device]),
                fact.device_ns if fact is not None else None,
            )
        )
    return rows


def _most(sizes: Iterable[tuple[int, str]], evaluated: int) -> str:
    """The most frequent size, and the number of others. `evaluated`: how many sizes occur only in evaluations."""
    ordered = sorted(sizes, key=lambda one: -one[0])
    others = max(len(ordered) - evaluated, 1) - 1
    more = [f"+{others} other size{'s' if others > 1 else ''}"] if others else []
    more += [f"+{evaluated} in evaluation"] if 0 < evaluated < len(ordered) else []
    return ordered[0][1] + (f" ({', '.join(more)})" if more else "")


def rank_rows(story: Story) -> list[Row]:
    """One row per process, if several have trained."""
    rows = []
    for line in story.ranks:
        label = f"process {line.process}" if line.rank is None else f"rank {line.rank} of {line.world or '?'}"
        flow = _flow(line.inputs, line.outputs)
        about = (label, line.device, line.calls, line.steps, line.median_ns, None, line.rate)
        times = line.times if line.times is not None and line.times.joined else None
        rows.append(Row(*about, flow, line.forward_ns, times))
    return rows


def rank_times_table(rows: Sequence[Row], most: int) -> list[tuple[str, ...]]:
    """The parts of each rank's mean step; the first row has the names. Empty if no rank's wait is known."""
    known = [(row.label, row.times) for row in rows if row.times is not None][:most]
    head = ("mean of a step", "data", "forward", "backward", EXPOSED, WAIT, "slowest in")
    found: list[tuple[str, ...]] = [head]
    for label, times in known:
        phases = (duration(times.phases.get(name)) for name in ("data", "forward", "backward"))
        often = percent(times.slowest / times.joined)
        found.append((label, *phases, duration(times.exposed_ns), duration(times.wait_ns), often))
    return found if known else []


def communication_rows(story: Story) -> list[tuple[str, str]]:
    """Labels and texts about the communication of the ranks, and about the rank that the others wait for."""
    found = story.evidence.communication
    if found is None:
        return []
    rows = communication_facts(found)
    slow = found.straggler()
    if slow is not None:
        rows.append(("straggler", sentence(slow, lately=False)))
    return [*rows, *(("note", note) for note in found.other_waits())]


def stage_rows(story: Story) -> list[Row]:
    """One row per stage of a model that lies on several devices."""
    rows = []
    for line in story.stages:
        parts = ", ".join(line.parts[:_PARTS_NAMED])
        if len(line.parts) > _PARTS_NAMED:
            parts += f" and {len(line.parts) - _PARTS_NAMED} more"
        flow = f"{parts}: {line.inputs or _NOT_SEEN} -> {line.outputs or 'not finished'}"
        label = f"{line.root} {line.stage}"
        rows.append(Row(label, line.device, line.calls, 0, line.time.median, None, None, flow, line.on_device.median))
    return rows


_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "calls": lambda row: f"{row.calls:,}",
    "steps": lambda row: f"{row.steps:,}",
    **dict.fromkeys(("median", "step", "host time"), lambda row: duration(row.median_ns)),
    "p95": lambda row: duration(row.p95_ns),
    "samples/s": lambda row: samples_rate(row.rate),
    **dict.fromkeys((ON_DEVICE, FORWARD_ON_DEVICE), lambda row: duration(row.device_ns)),
}


def row_table(rows: Sequence[Row], names: Sequence[str], sizes: str, most: int) -> list[tuple[str, ...]]:
    """A row of names, then the first `most` rows. The columns `names` come between device and sizes.

    The column of device times is omitted if no row has one.
    """
    timed = any(row.device_ns is not None for row in rows)
    shown = [name for name in names if timed or name not in (ON_DEVICE, FORWARD_ON_DEVICE)]
    cells = [(row.label, row.device, *(_COLUMNS[name](row) for name in shown), row.sizes) for row in rows[:most]]
    return [("", "device", *shown, sizes), *cells]


def memory_table(rows: Iterable[Held]) -> list[tuple[str, ...]]:
    """The memory of each device by holder; the first row has the names of the columns."""
    head = ("", "model", "gradients", "optimizer", "rest", "peak")
    return [head, *((one.device, *(memory(part) for part in one[1:6])) for one in rows)]


def pause_rows(story: Story) -> list[tuple[str, str, str]]:
    """Time, step before it and duration of each pause; with the process if there are several."""
    rows = []
    for pause in story.pauses:
        step = UNKNOWN if pause.step is None else f"{pause.step:,}"
        after = f"after step {step}{of_process(pause.process, story.evidence)}"
        rows.append((clock(pause.start_ns), after, _how_long(story, pause)))
    return rows


def _how_long(story: Story, pause: Paused) -> str:
    if pause.refused is not None:
        return f"refused: {pause.refused}"
    if pause.on:
        return "the run ended in it" if is_over(story) else "paused now"
    if pause.took_ns is None:
        return "its end was not recorded" + (
            f"; a step began at {clock(pause.end_ns)}" if pause.end_ns is not None else ""
        )
    return f"for {duration_words(pause.took_ns)}" + (f", went on by itself: {pause.reason}" if pause.reason else "")


def device_cells(device: DeviceFacts) -> tuple[str, ...]:
    """A GPU's cells in the table of devices: name, use, peak memory, this run's, temperature, power, a note."""
    number = f"GPU {device.index}" + (f" ({device.called})" if device.called else "")  # as the run's processes call it
    return (
        f"{number} {device.name}" if device.name else number,
        percent(None if device.util_median is None else device.util_median / 100),
        memory_of(device.mem_used_max, device.mem_total),
        memory(device.mem_run_max),
        UNKNOWN if device.temperature_max is None else f"{device.temperature_max:.0f}",
        UNKNOWN if device.power_max is None else f"{device.power_max:.0f}",
        "not used by this run" if device.of_run is False else "",
    )
