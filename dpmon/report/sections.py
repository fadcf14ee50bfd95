"""Makes the document of a run from its story: every table, sentence and plot, once for all renderers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial

from dpmon.model.device_memory import missing_value_reasons
from dpmon.model.device_usage import DeviceUsage
from dpmon.model.findings.all_findings import combined_savings
from dpmon.model.findings.finding import format_gain_limit
from dpmon.model.findings.finding_evidence import MIN_STEPS, measured_modes, process_suffix
from dpmon.model.layouts import format_sizes
from dpmon.model.mode_stats import ModeStats, slowest_first
from dpmon.model.nodes import NodeStatus, gpu_name
from dpmon.model.pauses import Pause
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.stragglers import straggler_sentence
from dpmon.record.schema import EXPOSED, WAIT
from dpmon.report import sentences
from dpmon.report.document import (
    Document,
    Findings,
    LabeledSentences,
    OutputLines,
    Paragraph,
    Part,
    Section,
    Table,
    TextHistogram,
)
from dpmon.report.plots import build_plots
from dpmon.report.report_data import ReportData
from dpmon.run.run_registry import short_name
from dpmon.sanitize import sanitize_line
from dpmon.text.formatting import (
    UNKNOWN,
    format_bytes,
    format_bytes_of_total,
    format_clock,
    format_count,
    format_duration,
    format_long_duration,
    format_loss,
    format_percent,
    format_samples_per_s,
)

MAX_ROWS = 40
MAX_EPOCHS = 12
_MAX_STAGES = 8
_MAX_WARNINGS = 8
_MAX_HOSTS = 16
_MAX_CHANGES = 12
_ON_DEVICE = "on device"
_FLOW = "received -> returned"


def build_document(story: ReportData) -> Document:
    """The report on the run of `story`; parts without data are omitted."""
    drawn = {plot.name: plot for plot in build_plots(story.facts)}
    step_plots, loss_plots, replica_plots, rank_plots, device_plots = (
        [drawn[name] for name in names if name in drawn]
        for names in (
            ("step-time", "speed", "phases", "modes"),
            ("loss",),
            ("replicas",),
            ("waits", "ranks"),
            ("use", "memory"),
        )
    )
    info, compared, name = story.info, story.facts.mode_comparison, short_name(story.info)
    ranks = (
        Section("Ranks", [*_ranks(story.facts), *rank_plots]),
        Section("Ranks", _rank_times(story.facts), ": where a step goes"),
        Section("Communication", _communication(story.facts)),
    )
    split = any(line.mode == "dp" for line in story.facts.sizes)
    sections = (
        Section("Findings", _findings(story)),
        Section(
            "Time",
            _paragraphs(
                sentences.time_by_activity_sentences(
                    story.facts, story.facts.time_by_activity, over=sentences.is_over(story)
                )
            ),
        ),
        Section("Epochs", _epochs(story.facts)),
        Section("Loss", [*_losses(story.facts), *loss_plots]),
        *ranks,
        Section("Steps", [*_steps(story.facts), *step_plots]),
        *(
            Section("Phases", _phases(mode), f" of a step, {title}{'' if mode.who is None else f', {mode.who}'}")
            for title, mode in _step_rows(story.facts)
        ),
        Section(
            "dp against single",
            _paragraphs(sentences.mode_comparison_sentences(compared)) if compared is not None else (),
        ),
        Section("Replicas" if split else "Calls", [*_replicas(story.facts), *replica_plots]),
        Section("Stages", _stages(story.facts), " (parts of the model on several devices)"),
        Section("Devices", [*_devices(story.facts), *device_plots]),
        Section("Memory", _memory(story.facts), " as torch holds it"),
        Section("Mode changes", _changes(story.facts)),
        Section("Pauses", _pauses(story)),
        Section("Warnings", _entries([(text,) for text in story.warnings], _MAX_WARNINGS, 4)),
        Section("Last output", [OutputLines(story.last_output)] if story.last_output else ()),
        Section("Record", _paragraphs((story.directory, f"dpmon attach {name}   dpmon export {name}"))),
    )
    there = [section for section in sections if section.parts]
    return Document(
        info.script, name, story.state, sentences.run_end_sentence(story), sentences.basic_facts(story), there
    )


def detail_sections(facts: RunAnalysis) -> list[Section]:
    """The sections of the report about ranks, replicas, stages and memory, without plots."""
    sections = (
        Section("Ranks", _ranks(facts)),
        Section("Ranks", _rank_times(facts), ": where a step goes"),
        Section("Replicas" if any(line.mode == "dp" for line in facts.sizes) else "Calls", _replicas(facts)),
        Section("Stages", _stages(facts), " (parts of the model on several devices)"),
        Section("Memory", _memory(facts), " as torch holds it"),
    )
    return [section for section in sections if section.parts]


def _paragraphs(texts: Iterable[str], soft: bool = False) -> list[Paragraph]:
    return [Paragraph(text, soft) for text in texts]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], flows: bool = False) -> list[Table]:
    """The table of `rows`, if there are any. A column of device times is omitted if no row has one."""
    rows = list(rows)
    if not rows:
        return []
    kept = [n for n, name in enumerate(head) if not name.endswith(_ON_DEVICE) or any(row[n] != UNKNOWN for row in rows)]
    return [Table([head[n] for n in kept], [[row[n] for n in kept] for row in rows], flows)]


def _entries(rows: Sequence[Sequence[str]], most: int, indent: int, head: Sequence[str] = ()) -> list[LabeledSentences]:
    return [LabeledSentences(rows, most, indent, head)] if rows else []


# ------------------------------------------------------------------------------------------------ steps


def _findings(story: ReportData) -> list[Part]:
    if story.findings:
        saves = combined_savings(story.findings, story.facts)
        more = [] if saves is None else [Paragraph(f"all of it together: the run {format_gain_limit(saves)}")]
        return [Findings(story.findings), *more]
    few = f"too few steps for findings ({MIN_STEPS} in one mode are needed)"
    usual = story.state in ("finished", "running") and not story.facts.announced.stalls
    nothing = "nothing stands out" if usual else "nothing else stands out"
    return [Paragraph(nothing if any(measured_modes(story.facts)) else few)]


def _step_rows(facts: RunAnalysis) -> list[tuple[str, ModeStats]]:
    """The figures of each mode with a label: first without evaluations, then the evaluations."""
    rows = [(sentences.mode_title(mode), mode) for mode in facts.modes if mode.steps]
    return [*rows, *((f"{sentences.mode_title(mode)}, evaluation", mode) for mode in facts.evaluations)]


def _steps(facts: RunAnalysis) -> list[Part]:
    """If there are several processes, the times are those of one, and the other columns cover all."""
    modes = _step_rows(facts)
    named = any(mode.who is not None for _, mode in modes)
    rows = []
    for title, mode in modes:
        who = (mode.who or "",) if named else ()
        times = format_duration(mode.median_ns), format_duration(mode.p95_ns)
        rows.append((title, f"{mode.all_steps:,}", *who, *times, format_samples_per_s(mode.rate)))
    head = ("mode", "steps", *(("times of",) if named else ()), "median", "p95", "samples/s")
    bins = [one for one in facts.stretches.bins if not one.evaluation]
    bars = (
        [TextHistogram(bins, facts.stretches.width_ns, sentences.rank_suffix_of_run(facts))]
        if rows and len(bins) > 1
        else []
    )
    return [*_table(head, rows), *bars]


def _epochs(facts: RunAnalysis) -> list[Part]:
    """One row per epoch of the process that represents the run; in the middle of many, rows are left out."""
    rows: list[Sequence[str]] = []
    for one in facts.progress.epochs:
        batches = (
            format_count(one.batches)
            if one.length in (None, one.batches)
            else f"{format_count(one.batches)}/{format_count(one.length)}"
        )
        times = (
            format_long_duration(one.took_ns),
            format_long_duration(one.evaluation_ns or None),
            format_long_duration(one.pause_ns),
        )
        rows.append((format_count(one.epoch), format_clock(one.begin_ns), batches, *times))
    if not rows:
        return []
    left_out = len(rows) - MAX_EPOCHS
    if left_out > 0:
        rows[MAX_EPOCHS // 2 : -MAX_EPOCHS // 2] = [("…", *[""] * 5)]
    head = ("epoch", "from", "batches", "took", "evaluation", "pause before")
    notes = [f"{format_count(left_out)} epochs are left out; --json has them"] if left_out > 0 else []
    return [*_table(head, rows), *_paragraphs(notes, soft=True)]


def _losses(facts: RunAnalysis) -> list[Part]:
    """One row for each line that calls backward: its first, lowest and newest loss."""
    rows = []
    for curve in facts.losses:
        first = next((point.mean for point in curve.points if point.mean is not None), None)
        lowest = min((point.low for point in curve.points if point.low is not None), default=None)
        values = map(format_loss, (first, lowest, curve.last, curve.smoothed))
        rows.append((curve.place, *values, format_count(curve.step)))
    whys = [f"{curve.place}: {curve.why}" for curve in facts.losses if curve.why is not None]
    head = ("backward called at", "first", "lowest", "last", "smoothed", "at step")
    return [*_table(head, rows), *_paragraphs(whys, soft=True)]


def _phases(mode: ModeStats) -> list[Part]:
    """One row per phase with its host time, and its device time if any is known; then notes."""
    rows = [
        (
            "  " * depth + one.name,
            format_percent(one.share),
            *map(format_duration, (one.median_ns, one.p95_ns, one.device_ns)),
        )
        for depth, one in mode.nested_phases()
    ]
    head = ("phase", "share", "median", "p95", _ON_DEVICE)
    return [*_table(head, rows), *_paragraphs(sentences.phase_notes(mode), soft=True)]


# ------------------------------------------------------------------------------------------------ replicas and ranks


def _replicas(facts: RunAnalysis) -> list[Table]:
    """One row per replica and mode: its most frequent sizes, and the number of others."""
    groups: dict[tuple[str, str, int, str], list[tuple[int, str]]] = {}
    evaluated: Counter[tuple[str, str, int, str]] = Counter()
    for line in facts.sizes:
        key = (line.mode, line.root, line.replica, line.device)
        groups.setdefault(key, []).append((line.calls - line.evaluations, format_sizes(line.inputs, line.outputs)))
        evaluated[key] += line.evaluations == line.calls
    timed = {(fact.mode, fact.root, fact.replica, fact.device): fact for fact in facts.replicas}
    rows = []
    for key, sizes in groups.items():
        mode, root, replica, device = key
        fact = timed.get(key)
        label = f"{root} {replica}" if mode == "dp" else f"{root} {mode or '?'}"
        calls = sum(calls for calls, _ in sizes) if fact is None else fact.calls
        times = (None,) * 3 if fact is None else (fact.time.median, fact.time.quantile(0.95), fact.on_device.median)
        rows.append((label, device, f"{calls:,}", *map(format_duration, times), most_frequent(sizes, evaluated[key])))
    return _table(("", "device", "calls", "median", "p95", _ON_DEVICE, _FLOW), rows, flows=True)


def most_frequent(sizes: Iterable[tuple[int, str]], evaluated: int) -> str:
    """The most frequent size, and the number of others. `evaluated`: the number of sizes only in evaluations."""
    ordered = sorted(sizes, key=lambda one: -one[0])
    others = max(len(ordered) - evaluated, 1) - 1
    more = [f"+{others} other size{'s' if others > 1 else ''}"] if others else []
    more += [f"+{evaluated} in evaluation"] if 0 < evaluated < len(ordered) else []
    return ordered[0][1] + (f" ({', '.join(more)})" if more else "")


def _ranks(facts: RunAnalysis) -> list[Table]:
    """One row per process, if several have trained."""
    rows = [
        (
            line.label,
            line.device,
            f"{line.steps:,}",
            f"{line.calls:,}",
            format_duration(line.median_ns),
            format_samples_per_s(line.rate),
            format_duration(line.forward_ns),
            format_sizes(line.inputs, line.outputs),
        )
        for line in slowest_first(facts.ranks, MAX_ROWS)
    ]
    head = ("", "device", "steps", "calls", "step", "samples/s", f"forward {_ON_DEVICE}", _FLOW)
    return _table(head, rows, flows=True)


def _rank_times(facts: RunAnalysis) -> list[Table]:
    """The parts of each rank's mean step, if any rank's wait is known."""
    rows = []
    for line in slowest_first(facts.ranks, MAX_ROWS):
        times = line.times
        if times is None or not times.joined:
            continue
        phases = (format_duration(times.phases.get(name)) for name in ("data", "forward", "backward"))
        waits = (
            format_duration(times.exposed_ns),
            format_duration(times.wait_ns),
            format_percent(times.slowest / times.joined),
        )
        rows.append((line.label, *phases, *waits))
    return _table(("mean of a step", "data", "forward", "backward", EXPOSED, WAIT, "slowest in"), rows)


def _communication(facts: RunAnalysis) -> list[LabeledSentences]:
    """The communication of the ranks, and the rank that the others wait for."""
    communication = facts.communication
    if communication is None:
        return []
    slow = communication.straggler
    straggler = [] if slow is None else [("straggler", straggler_sentence(slow, lately=False))]
    rows = [*communication.labeled_texts, *straggler, *(("note", note) for note in communication.other_waits())]
    return _entries(rows, MAX_ROWS, 12, ("", ""))


def _stages(facts: RunAnalysis) -> list[Part]:
    """One row per stage of a model on several devices; only the first stages if the model alternates between them."""
    rows = []
    for line in (line for line in facts.stages if line.stage < _MAX_STAGES):
        sizes = f"{line.named_parts}: {format_sizes(line.inputs, line.outputs, 'not finished')}"
        times = format_duration(line.time.median), format_duration(line.on_device.median)
        rows.append((f"{line.root} {line.stage}", line.device, f"{line.calls:,}", *times, sizes))
    more = len(facts.stages) - len(rows)
    notes = [f"{more} further stages are left out; --json has them"] if more else []
    head = ("", "device", "calls", "host time", _ON_DEVICE, f"parts: {_FLOW}")
    return [*_table(head, rows, flows=True), *_paragraphs(notes, soft=True)]


# ------------------------------------------------------------------------------------------------ devices, events


def _devices(facts: RunAnalysis) -> list[Part]:
    parts: list[Part] = []
    if facts.devices:
        head = ("", "use", "memory at most", "this run", "°C", "W", "")
        left = " that are left" if facts.store.pruned else ""
        left += ", without samples during pauses" if facts.paused else ""
        use = f"use (share of time in which a kernel ran): median of the samples{left}"
        parts = [*_table(head, map(partial(_device, facts.nodes), facts.devices))]
        parts.append(Paragraph(f"{use}; memory, °C and W: the highest", soft=True))
    else:
        parts.append(
            Paragraph(f"no GPU: {facts.samples.gpu_absent}" if facts.samples.gpu_absent else "no GPU was seen")
        )
    rows = []
    for host in facts.samples.hosts:
        use = UNKNOWN if host.util_median is None else f"{host.util_median:.0f}%"
        many = "one sample" if host.samples == 1 else f"{host.samples:,} samples"
        most = format_bytes_of_total(host.mem_used_max, host.mem_total)
        name = gpu_name(host.index, facts.nodes)
        rows.append((f"{name}: processors {use} (median of {many}), memory {most} at most",))
    return [*parts, *_entries(rows, _MAX_HOSTS, 2)]


def _device(nodes: Sequence[NodeStatus], device: DeviceUsage) -> tuple[str, ...]:
    called = f" ({device.called})" if device.called else ""  # as the run's processes call it
    number = gpu_name(device.index, nodes) + called
    return (
        f"{number} {device.name}" if device.name else number,
        format_percent(None if device.util_median is None else device.util_median / 100),
        format_bytes_of_total(device.mem_used_max, device.mem_total),
        format_bytes(device.mem_run_max),
        UNKNOWN if device.temperature_max is None else f"{device.temperature_max:.0f}",
        UNKNOWN if device.power_max is None else f"{device.power_max:.0f}",
        "not used by this run" if device.of_run is False else "",
    )


def _memory(facts: RunAnalysis) -> list[Part]:
    """The memory of each device by holder, and the reasons for unknown values."""
    held = facts.memory[:MAX_ROWS]
    rows = [(one.device, *(format_bytes(part) for part in one[1:6])) for one in held]
    notes = (f"{names} of {one.device}: {reason}" for one in held for names, reason in missing_value_reasons(one))
    return [*_table(("", "model", "gradients", "optimizer", "rest", "peak"), rows), *_paragraphs(notes, soft=True)]


def _changes(facts: RunAnalysis) -> list[LabeledSentences]:
    """Requested changes of mode; the facts of the report name the initial mode."""
    rows = []
    several = len({change.root for change in facts.announced.changes}) > 1
    for change in facts.announced.changes:
        if change.requested_by != "start":
            step = UNKNOWN if change.step is None else f"{change.step:,}"
            what = f"to {change.mode}" if change.refused is None else f"refused: {change.refused}"
            what = f"{sanitize_line(change.root, 60)}: {what}" if several else what
            rows.append((format_clock(change.t_ns), f"step {step}{process_suffix(change.process, facts)}", what))
    return _entries(rows, _MAX_CHANGES, 6, ("time", "where", "what"))


def _pauses(story: ReportData) -> list[LabeledSentences]:
    """Time, step before it and duration of each pause; with the process if there are several."""
    rows = []
    for pause in story.facts.pauses:
        step = UNKNOWN if pause.step is None else f"{pause.step:,}"
        after = f"after step {step}{process_suffix(pause.process, story.facts)}"
        rows.append((format_clock(pause.start_ns), after, _pause_duration_text(story, pause)))
    return _entries(rows, _MAX_CHANGES, 6, ("time", "where", "how long"))


def _pause_duration_text(story: ReportData, pause: Pause) -> str:
    if pause.refused is not None:
        return f"refused: {pause.refused}"
    if pause.on:
        return "the run ended in it" if sentences.is_over(story) else "paused now"
    if pause.took_ns is None:
        return "its end was not recorded" + (
            f"; a step began at {format_clock(pause.end_ns)}" if pause.end_ns is not None else ""
        )
    return f"for {format_long_duration(pause.took_ns)}" + (
        f", went on by itself: {pause.reason}" if pause.reason else ""
    )
