"""Wording that the text and the page share: how the run ended, what ran, and rows of tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dpmon.model.evidence import DeviceFacts, ModeFacts
from dpmon.model.finding import many, took
from dpmon.model.memory import Held
from dpmon.model.numbers import UNKNOWN, duration, percent
from dpmon.model.state import ModeChange
from dpmon.model.stragglers import RankTimes, sentence
from dpmon.rates import Rate
from dpmon.record.schema import EXPOSED, WAIT
from dpmon.record.wire import RANK_MODES
from dpmon.report.pauses import Paused, PauseTotals
from dpmon.report.story import Story
from dpmon.run.rundir import ExitInfo
from dpmon.store.accounting import ACTIVITIES
from dpmon.text.communicated import communication_facts
from dpmon.text.quantities import clock, memory, memory_of, run_time, samples_rate

ON_DEVICE, FORWARD_ON_DEVICE = "on device", "forward on device"
"""Titles of columns."""

_NOT_SEEN = "sizes not seen"
_PARTS_NAMED = 4
_GAPS_NAMED = 3
_LEAST_SHOWN_NS = 5_000_000
"""Shorter times would read "0.00 s"."""
_ROOTS_NAMED = 8
_STARTS_NAMED = 4
_NO_END = "without an end in the record"


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


_NOT_OVER = {
    "running": "still running",
    "unsupervised": "still running, without a supervisor",
    "starting": "not started yet",
    "ending": "ending",
    "elsewhere": "on another machine; whether it still runs is unknown here",
}


def ended(story: Story) -> str:
    """How the run ended, or its state while it runs."""
    how = story.exit
    if how is None:
        return _NOT_OVER.get(story.state, "how it ended is unknown")
    cause = how.cause or (story.raised if how.signal is None else None)
    return how_it_ended(how, f": {cause}" if cause else "")


def how_it_ended(how: ExitInfo, why: str) -> str:
    """How a run ended, and how long it took; `why` follows a failure."""
    if how.error is not None:
        return how.error
    took = run_time(how.seconds)
    if how.stopped:
        return f"stopped by you after {took}"
    if how.status is None:
        return f"ended after {took}, status unknown: {how.unknown or 'nobody recorded it'}"
    if how.signal is not None:
        return f"killed by {how.signal} after {took}{why}"
    return f"finished in {took}" if how.status == 0 else f"exit status {how.status} after {took}{why}"


def what_ran(story: Story) -> str:
    """Processes, steps by mode if there were several, and the initial mode with its reason."""
    count = story.evidence.processes
    modes: Counter[str] = Counter()
    for facts in (*story.evidence.modes, *story.evaluations):
        modes[RANK_MODES[facts.distributed] if facts.distributed else facts.mode] += facts.steps
    several_modes = len(+modes) > 1
    counted = f"{many(story.steps, 'step')}, {many(story.calls, 'call')}{' in all' if count > 1 else ''}"
    if several_modes:
        counted += f" ({', '.join(f'{steps:,} in {mode}' for mode, steps in modes.items() if steps)})"
    who = f"{count} training processes" if count > 1 else "one training process" if count else "no training process"
    groups: dict[str, list[str]] = {}
    for change in story.changes:
        if change.requested_by == "start" and change.refused is None and change.mode:
            groups.setdefault(_began(change, story.distributed), []).append(change.root or "?")
    several = len(groups) > 1
    began = "began as " if several_modes else ""
    texts = [
        f"{began}{text}: {', '.join(dict.fromkeys(roots[:_ROOTS_NAMED]))}" if several else f"{began}{text}"
        for text, roots in list(groups.items())[:_STARTS_NAMED]
    ]
    return "; ".join([f"{who}, {counted}", *texts])


def _began(change: ModeChange, distributed: str | None) -> str:
    devices = " ".join(change.devices[:8]) + (" ..." if len(change.devices) > 8 else "")
    virtual = "virtual replicas " if change.virtual and change.mode == "dp" else ""
    reason = f" ({change.reason})" if change.reason else ""
    mode = RANK_MODES[distributed] if distributed and change.mode == "single" else change.mode
    return f"{mode} on {virtual}{devices or 'devices unknown'}{reason}"


def machine(story: Story) -> str:
    """The versions of Python, torch and dpmon."""
    process = story.processes[0] if story.processes else None
    python = process.python if process is not None else None
    torch = process.torch if process is not None else None
    return f"Python {python or 'unknown'}, torch {torch or 'unknown'}, dpmon {story.info.versions.get('dpmon', '?')}"


def mode_title(mode: ModeFacts) -> str:
    """A mode's name, with a note for virtual replicas; "ddp" or "fsdp" for ranks, as on the screen."""
    if mode.distributed:
        return RANK_MODES[mode.distributed]
    return f"{mode.mode} (virtual)" if mode.virtual else mode.mode or "mode unknown"


def _flow(inputs: object, outputs: object) -> str:
    return f"{inputs or _NOT_SEEN} -> {outputs or _NOT_SEEN}"


def replica_rows(story: Story) -> list[Row]:
    """One row per replica and mode: its most frequent sizes, and the number of others."""
    groups: dict[tuple[str, str, int, str], list[tuple[int, str]]] = {}
    for line in story.replicas:
        key = (line.mode, line.root, line.replica, line.device)
        groups.setdefault(key, []).append((line.calls, _flow(line.inputs, line.outputs)))
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
                _most(sizes),
                fact.device_ns if fact is not None else None,
            )
        )
    return rows


def _most(sizes: Iterable[tuple[int, str]]) -> str:
    ordered = sorted(sizes, key=lambda one: -one[0])
    others = len(ordered) - 1
    return ordered[0][1] + (f" (+{others} other{'s' if others > 1 else ''})" if others else "")


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
    in_forward = found.waits_in_forward()
    if in_forward is not None:
        rows.append(("note", in_forward))
    return rows


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


def paused(story: Story) -> str | None:
    """The number and time of pauses in a sentence, and where that time counts; None without pauses."""
    total = story.paused
    if not total.times:
        return None
    nowhere = "that time is in no step, no phase and no figure"
    if story.paused_alone_ns:
        nowhere = (
            f"that time is in no step and no phase; for {took(story.paused_alone_ns)} of it another process was not"
            " paused, and the figures of devices include that part"
        )
    elif total.unplaced:
        nowhere = (
            "that time is in no step and no phase; some pauses have no known start or end, so the figures of devices"
            " may include a part of it"
        )
    return f"{times_paused(total, _is_over(story))}: {nowhere}"


def times_paused(total: PauseTotals, over: bool) -> str:
    """The number and time of pauses. `over`: whether the run is over."""
    times = "once" if total.times == 1 else f"{total.times:,} times"
    several = total.times > 1
    parts = [f"for {took(total.ns)}{' in all' if several else ''}"] if total.ns else []
    if total.unended:
        parts.append(f"{total.unended:,} of them without an end in the record" if several else _NO_END)
    if total.on:
        parts.append("and was paused when it ended" if over else "and is paused now")
    return f"paused {', '.join([times, *parts])}"


def _is_over(story: Story) -> bool:
    return story.exit is not None or story.state not in _NOT_OVER


ACTIVITY_NAMES = {
    **{name: name for name in ACTIVITIES},
    "startup": "start-up",
    "between": "between steps",
    "input": "waiting for input",
    "missed": "not recorded",
    "ending": "end",
}
"""Words for the activities of dpmon.store.accounting."""


def time_spent(story: Story) -> list[str]:
    """The run's time by activity and its longest gaps between steps, in sentences; empty without steps."""
    spent = story.evidence.spent
    parts = [f"{ACTIVITY_NAMES[name]} {took(ns)}" for name, ns in spent.items() if ns >= _LEAST_SHOWN_NS]
    if not parts:
        return []
    said = [f"elapsed {took(sum(spent.values()))}: {', '.join(parts)}"]
    gaps = story.evidence.gaps[:_GAPS_NAMED]
    if gaps and spent["between"] >= _LEAST_SHOWN_NS:
        several = len(story.processes) > 1
        named = [
            f"{took(gap.ns)} after step {gap.after_step:,}{f' of process {gap.process}' if several else ''}"
            f" ({clock(gap.begin_ns)})"
            for gap in gaps
        ]
        said.append(f"the longest gaps between steps: {', '.join(named)}")
    return said


def pause_rows(story: Story) -> list[tuple[str, str, str]]:
    """Time, step before it and duration of each pause; with the process if there are several."""
    several = len(story.processes) > 1
    rows = []
    for pause in story.pauses:
        step = UNKNOWN if pause.step is None else f"{pause.step:,}"
        after = f"after step {step}" + (f" (process {pause.process})" if several else "")
        rows.append((clock(pause.start_ns), after, _how_long(story, pause)))
    return rows


def pauses_lost(story: Story) -> str | None:
    """The number of pauses and refusals that `pause_rows` omits; None if it omits none."""
    left = [(story.pauses_left_out, "pause"), (story.refusals_left_out, "refusal")]
    said = " and ".join(many(count, what) for count, what in left if count)
    return f"not listed here: {said}" if said else None


def _how_long(story: Story, pause: Paused) -> str:
    if pause.refused is not None:
        return f"refused: {pause.refused}"
    if pause.on:
        return "the run ended in it" if _is_over(story) else "paused now"
    if pause.took_ns is None:
        return "its end was not recorded" + (
            f"; a step began at {clock(pause.end_ns)}" if pause.end_ns is not None else ""
        )
    return f"for {took(pause.took_ns)}" + (f", went on by itself: {pause.reason}" if pause.reason else "")


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
        "not of this run" if device.of_run is False else "",
    )
