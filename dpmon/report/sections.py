"""Builds the document of a run: every table, sentence and plot, once for all renderers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from dpmon.model.device_memory import missing_value_reasons
from dpmon.model.device_usage import DeviceUsage
from dpmon.model.findings.device_findings import busy_cpus_note
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
    format_count,
    format_duration,
    format_elapsed,
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
_FLOW_TITLE = "received -> returned"


def build_document(report: ReportData) -> Document:
    """Build the document of a report, without empty sections."""
    plots_by_name = {plot.name: plot for plot in build_plots(report.run)}
    step_plots, loss_plots, replica_plots, rank_plots, device_plots = (
        [plots_by_name[name] for name in names if name in plots_by_name]
        for names in (
            ("step-time", "speed", "phases", "modes"),
            ("loss",),
            ("replicas",),
            ("waits", "ranks"),
            ("use", "memory"),
        )
    )
    run_info, comparison, name = report.run_info, report.run.mode_comparison, short_name(report.run_info)
    ranks = (
        Section("Ranks", [*_rank_tables(report.run), *rank_plots]),
        Section("Ranks", _rank_time_tables(report.run), ": where step time goes"),
        Section("Communication", _communication_rows(report.run)),
    )
    time_sentences = sentences.time_by_activity_sentences(
        report.run, report.run.time_by_activity, has_ended=sentences.is_over(report)
    )
    comparison_sentences = [] if comparison is None else sentences.mode_comparison_sentences(comparison)
    has_replicas = any(size_row.mode == "dp" for size_row in report.run.sizes)
    sections = (
        Section("Findings", _finding_parts(report)),
        Section("Time", _make_paragraphs(time_sentences)),
        Section("Epochs", _epoch_parts(report.run), process_suffix(report.run.progress.process, report.run)),
        Section("Loss", [*_loss_parts(report.run), *loss_plots]),
        *ranks,
        Section("Steps", [*_step_parts(report.run), *step_plots]),
        *(
            Section("Phases", _phase_parts(report.run, stats), f" of a step, {title}{_process_text(stats)}")
            for title, stats in _titled_mode_stats(report.run)
        ),
        Section("dp vs. single", _make_paragraphs(comparison_sentences)),
        Section("Replicas" if has_replicas else "Calls", [*_replica_tables(report.run), *replica_plots]),
        Section("Stages", _stage_parts(report.run), " (parts of the model on several devices)"),
        Section("Devices", [*_device_parts(report.run), *device_plots]),
        Section("Memory", _memory_parts(report.run), " as torch counts it"),
        Section("Mode switches", _mode_change_rows(report.run)),
        Section("Pauses", _pause_rows(report)),
        Section("Warnings", _labeled_sentences([(text,) for text in report.warnings], _MAX_WARNINGS, 4)),
        Section("Last output", [OutputLines(report.last_output)] if report.last_output else ()),
        Section("Record", _make_paragraphs((report.directory, f"dpmon attach {name}   dpmon export {name}"))),
    )
    non_empty = [section for section in sections if section.parts]
    outcome, facts = sentences.run_end_sentence(report), sentences.basic_facts(report)
    return Document(run_info.script, name, report.state, outcome, facts, non_empty)


def detail_sections(run: RunAnalysis) -> list[Section]:
    """Return the sections of the report on ranks, replicas, stages and memory, without plots."""
    sections = (
        Section("Ranks", _rank_tables(run)),
        Section("Ranks", _rank_time_tables(run), ": where step time goes"),
        Section("Replicas" if any(size_row.mode == "dp" for size_row in run.sizes) else "Calls", _replica_tables(run)),
        Section("Stages", _stage_parts(run), " (parts of the model on several devices)"),
        Section("Memory", _memory_parts(run), " as torch counts it"),
    )
    return [section for section in sections if section.parts]


def _make_paragraphs(texts: Iterable[str], is_note: bool = False) -> list[Paragraph]:
    return [Paragraph(text, is_note) for text in texts]


def _make_table(headers: Sequence[str], rows: Iterable[Sequence[str]], has_text_columns: bool = False) -> list[Table]:
    """Return a table of `rows`, if there are any. A column of device times is omitted if no row has one."""
    rows = list(rows)
    if not rows:
        return []
    kept_columns = [
        column
        for column, name in enumerate(headers)
        if not name.endswith(_ON_DEVICE) or any(row[column] != UNKNOWN for row in rows)
    ]
    return [
        Table(
            [headers[column] for column in kept_columns],
            [[row[column] for column in kept_columns] for row in rows],
            has_text_columns,
        )
    ]


def _labeled_sentences(
    rows: Sequence[Sequence[str]], max_rows: int, indent: int, headers: Sequence[str] = ()
) -> list[LabeledSentences]:
    return [LabeledSentences(rows, max_rows, indent, headers)] if rows else []


# ------------------------------------------------------------------------------------------------ steps


def _finding_parts(report: ReportData) -> list[Part]:
    notes = _make_paragraphs(busy_cpus_note(report.run), is_note=True)
    if report.findings:
        return [Findings(report.findings), *notes]
    if not any(measured_modes(report.run)):
        return [Paragraph(_too_few_steps_text(report.run))]
    has_no_problem = report.state in ("finished", "running") and not report.run.announced.stalls
    return [Paragraph("no findings" if has_no_problem else "no other findings"), *notes]


def _too_few_steps_text(run: RunAnalysis) -> str:
    """Return how many steps of the most frequent mode count, how many are needed, and how many are left out."""
    settled = max((stats.settled_stats for stats in run.modes), key=lambda stats: stats.steps, default=None)
    count, warm_up = (0, 0) if settled is None else (settled.steps, settled.warm_up_steps)
    left_out_text = f", {warm_up} left out as warm-up" if warm_up else ""
    return f"too few steps for findings: {count} counted, {MIN_STEPS} needed{left_out_text}"


def _titled_mode_stats(run: RunAnalysis) -> list[tuple[str, ModeStats]]:
    """Return the stats of each mode with a title: first those of the main kind of steps, then those of others."""
    rows = [(sentences.mode_title(stats), stats) for stats in run.modes if stats.steps]
    return [*rows, *((sentences.mode_title(stats), stats) for stats in run.other_modes)]


def _step_parts(run: RunAnalysis) -> list[Part]:
    """Return the table of steps by mode. With several processes, its times are those of one; the rest covers all."""
    titled_stats = _titled_mode_stats(run)
    has_names = any(stats.process_name is not None for _, stats in titled_stats)
    rows = []
    for title, stats in titled_stats:
        name_cells = (stats.process_name or "",) if has_names else ()
        times = format_duration(stats.median_ns), format_duration(stats.p95_ns)
        steps_text = f"{run.window.step_counts(stats.kind, stats.mode)[0]:,}"
        rows.append((title, steps_text, *name_cells, *times, format_samples_per_s(stats.rate)))
    headers = ("mode", "steps", *(("times of",) if has_names else ()), "median", "p95", "samples/s")
    bins = [time_bin for time_bin in run.binned_steps.bins if not time_bin.other_kind]
    parts: list[Part] = [*_make_table(headers, rows)]
    if rows and len(bins) > 1:
        parts.append(TextHistogram(bins, run.binned_steps.width_ns, sentences.rank_suffix_of_run(run)))
    return parts


def _epoch_parts(run: RunAnalysis) -> list[Part]:
    """Return a table with a row per epoch of the representative process, without the middle ones of many.

    Empty without epochs.
    """
    rows: list[Sequence[str]] = []
    for epoch in run.progress.epochs:
        batches = format_count(epoch.batches)
        if epoch.length not in (None, epoch.batches):
            batches += f"/{format_count(epoch.length)}"
        times = (
            format_long_duration(epoch.took_ns),
            format_long_duration(epoch.evaluation_ns or None),
            format_long_duration(epoch.pause_ns),
        )
        rows.append((format_count(epoch.epoch), format_elapsed(epoch.begin_ns), batches, *times))
    if not rows:
        return []
    omitted_count = len(rows) - MAX_EPOCHS
    if omitted_count > 0:
        rows[MAX_EPOCHS // 2 : -MAX_EPOCHS // 2] = [("…", *[""] * 5)]
    headers = ("epoch", "from", "batches", "took", "evaluation", "gap before")
    notes = [f"{format_count(omitted_count)} epochs omitted; --json has them all"] if omitted_count > 0 else []
    return [*_make_table(headers, rows), *_make_paragraphs(notes, is_note=True)]


def _loss_parts(run: RunAnalysis) -> list[Part]:
    """Return a table with a row for each line that calls backward: its first, lowest and last loss."""
    rows = []
    for curve in run.losses:
        lowest = min((point.low for point in curve.points if point.low is not None), default=None)
        first, lowest_text, smoothed, last = map(format_loss, (curve.first, lowest, curve.smoothed, curve.last))
        step_text = "" if curve.step is None else f" at step {format_count(curve.step)}"
        rows.append((curve.place, first, lowest_text, smoothed, last + step_text))
    notes = [f"{curve.place}: {curve.why}" for curve in run.losses if curve.why is not None]
    if rows:
        rank_text = process_suffix(run.losses[0].process, run)
        sampling = f"losses{rank_text}, sampled: at most one per second, and the last"
        passes_text = "the backward passes of an update are added up; of those inside optimizer.step, the first counts"
        notes[:0] = [f"{sampling}; smoothed: the median of the newest nine", passes_text]
    headers = ("backward called at", "first", "lowest sampled", "smoothed", "last")
    return [*_make_table(headers, rows), *_make_paragraphs(notes, is_note=True)]


def _process_text(stats: ModeStats) -> str:
    """Return ", " and the process that the times describe; empty for one process."""
    return "" if stats.process_name is None else f", {stats.process_name}"


def _phase_parts(run: RunAnalysis, stats: ModeStats) -> list[Part]:
    """Return a table with a row per phase: its host time, and its device time if any is known; then notes."""
    steps = run.window.tally(stats.mode, stats.kind).steps
    notes = sentences.phase_notes(stats, run.layouts.calls(stats.mode, stats.kind) / max(steps, 1))
    rows = []
    for depth, phase in stats.nested_phases():
        times = map(format_duration, (phase.median_ns, phase.p95_ns, phase.device_ns))
        rows.append(("  " * depth + phase.name, format_percent(phase.share), *times))
    headers = ("phase", "share", "median", "p95", _ON_DEVICE)
    return [*_make_table(headers, rows), *_make_paragraphs(notes, is_note=True)]


# ------------------------------------------------------------------------------------------------ replicas and ranks


def _replica_tables(run: RunAnalysis) -> list[Table]:
    """Return a table with a row per replica, mode and kind of call: its most frequent sizes, and how many others."""
    groups: dict[tuple[str, str, int, str, int], list[tuple[int, str]]] = {}
    for size_row in run.sizes:
        key = size_row.mode, size_row.root, size_row.replica, size_row.device, size_row.kind
        groups.setdefault(key, []).append((size_row.calls, format_sizes(size_row.inputs, size_row.outputs)))
    replica_times = {(row.mode, row.root, row.replica, row.device, row.kind): row for row in run.replicas_by_kind}
    rows = []
    for key, sizes in groups.items():
        mode, root, replica, device, kind = key
        stats = replica_times.get(key)
        label = f"{root} {replica}" if mode == "dp" else f"{root} {mode or '?'}"
        if kind != run.layouts.main_kind:
            label += f", {run.store.kind_words[kind]}"
        calls = sum(calls for calls, _ in sizes) if stats is None else stats.calls
        times = (None,) * 3 if stats is None else (stats.time.median, stats.time.quantile(0.95), stats.on_device.median)
        rows.append((label, device, f"{calls:,}", *map(format_duration, times), most_frequent(sizes)))
    return _make_table(("", "device", "calls", "median", "p95", _ON_DEVICE, _FLOW_TITLE), rows, has_text_columns=True)


def most_frequent(sizes: Iterable[tuple[int, str]]) -> str:
    """Return the most frequent size and the number of others."""
    (_, text), *others = sorted(sizes, key=lambda size: -size[0])
    if not others:
        return text
    return f"{text} (+{len(others)} other size{'s' if len(others) > 1 else ''})"


def _rank_tables(run: RunAnalysis) -> list[Table]:
    """Return a table of the processes, if several have trained.

    Ranks with equal counts, devices and sizes share a row, with the times of the first: the next table has those of
    each rank.
    """
    groups: dict[tuple[object, ...], list[tuple[str, ...]]] = {}
    for rank_row in slowest_first(run.ranks, MAX_ROWS):
        sizes = format_sizes(rank_row.inputs, rank_row.outputs)
        cells = (
            rank_row.label,
            rank_row.device,
            f"{rank_row.steps:,}",
            f"{rank_row.calls:,}",
            format_duration(rank_row.median_ns),
            format_samples_per_s(rank_row.rate),
            format_duration(rank_row.forward_ns),
            sizes,
        )
        own_row = None if rank_row.times is not None and rank_row.times.joined else rank_row.process
        groups.setdefault((rank_row.device, rank_row.steps, rank_row.calls, sizes, own_row), []).append(cells)
    rows = []
    for (label, *texts), *others in groups.values():
        rows.append((f"{len(others) + 1} equal ranks" if others else label, *texts))
    headers = ("", "device", "steps", "calls", "step", "samples/s", f"forward {_ON_DEVICE}", _FLOW_TITLE)
    return _make_table(headers, rows, has_text_columns=True)


def _rank_time_tables(run: RunAnalysis) -> list[Table]:
    """Return a table of the parts of each rank's mean step, if any rank's wait is known."""
    rows = []
    for rank_row in slowest_first(run.ranks, MAX_ROWS):
        times = rank_row.times
        if times is None or not times.joined:
            continue
        phase_cells = (format_duration(times.phases.get(name)) for name in ("data", "forward", "backward"))
        wait_cells = (
            format_duration(times.exposed_ns),
            format_duration(times.wait_ns),
            format_percent(times.slowest / times.joined),
        )
        rows.append((rank_row.label, *phase_cells, *wait_cells))
    unit = "step" if run.communication is None else run.communication.unit
    return _make_table((f"mean per {unit}", "data", "forward", "backward", EXPOSED, WAIT, "slowest in"), rows)


def _communication_rows(run: RunAnalysis) -> list[LabeledSentences]:
    """Return the communication of the ranks, and the straggler."""
    communication = run.communication
    if communication is None:
        return []
    straggler = communication.straggler
    straggler_rows = [] if straggler is None else [("straggler", straggler_sentence(straggler, lately=False))]
    rows = [*communication.labeled_texts, *straggler_rows, *(("note", note) for note in communication.other_waits())]
    return _labeled_sentences(rows, MAX_ROWS, 12, ("", ""))


def _stage_parts(run: RunAnalysis) -> list[Part]:
    """Return a table with a row per stage of a model on several devices, at most _MAX_STAGES."""
    rows = []
    for stage_row in (stage_row for stage_row in run.stages if stage_row.stage < _MAX_STAGES):
        sizes = f"{stage_row.named_parts}: {format_sizes(stage_row.inputs, stage_row.outputs, 'not finished')}"
        times = format_duration(stage_row.time.median), format_duration(stage_row.on_device.median)
        rows.append((f"{stage_row.root} {stage_row.stage}", stage_row.device, f"{stage_row.calls:,}", *times, sizes))
    omitted_count = len(run.stages) - len(rows)
    notes = [f"{omitted_count} further stages omitted; --json has them all"] if omitted_count else []
    headers = ("", "device", "calls", "host time", _ON_DEVICE, f"parts: {_FLOW_TITLE}")
    return [*_make_table(headers, rows, has_text_columns=True), *_make_paragraphs(notes, is_note=True)]


# ------------------------------------------------------------------------------------------------ devices, events


def _device_parts(run: RunAnalysis) -> list[Part]:
    parts: list[Part] = []
    if run.devices:
        headers = ("", "use", "max. memory", "this run", "°C", "W", "")
        sample_note = " that are left" if run.store.pruned else ""
        sample_note += ", without samples during pauses" if run.paused else ""
        use_text = f"use (share of time in which a kernel ran): median of the samples{sample_note}"
        parts = [*_make_table(headers, map(partial(_device_row, run.nodes), run.devices))]
        parts.append(Paragraph(f"{use_text}; memory, °C and W: the highest", is_note=True))
    else:
        parts.append(Paragraph(f"no GPU: {run.samples.gpu_absent}" if run.samples.gpu_absent else "no GPU was seen"))
    rows = []
    for host in run.samples.hosts:
        use_text = UNKNOWN if host.util_median is None else f"{host.util_median:.0f}%"
        sample_text = "one sample" if host.samples == 1 else f"{host.samples:,} samples"
        memory_text = format_bytes_of_total(host.mem_used_max, host.mem_total)
        name = gpu_name(host.index, run.nodes)
        rows.append((f"{name}: CPU {use_text} (median of {sample_text}), max. memory {memory_text}",))
    return [*parts, *_labeled_sentences(rows, _MAX_HOSTS, 2)]


def _device_row(nodes: Sequence[NodeStatus], device: DeviceUsage) -> tuple[str, ...]:
    alias = f" ({device.called})" if device.called else ""  # as the run's processes call it
    label = gpu_name(device.index, nodes) + alias
    return (
        f"{label} {device.name}" if device.name else label,
        format_percent(None if device.util_median is None else device.util_median / 100),
        format_bytes_of_total(device.mem_used_max, device.mem_total),
        format_bytes(device.mem_run_max),
        UNKNOWN if device.temperature_max is None else f"{device.temperature_max:.0f}",
        UNKNOWN if device.power_max is None else f"{device.power_max:.0f}",
        "not used by this run" if device.of_run is False else "",
    )


def _memory_parts(run: RunAnalysis) -> list[Part]:
    """Return a table of the memory of each device by owner, and the reasons for unknown values."""
    rows, notes = [], []
    for memory in run.memory[:MAX_ROWS]:
        parts = (memory.model, memory.gradients, memory.optimizer, memory.rest, memory.peak)
        rows.append((memory.label, *map(format_bytes, parts)))
        notes += [f"{names} of {memory.device}: {reason}" for names, reason in missing_value_reasons(memory)]
    headers = ("", "model", "gradients", "optimizer", "rest", "peak")
    return [*_make_table(headers, rows), *_make_paragraphs(notes, is_note=True)]


def _mode_change_rows(run: RunAnalysis) -> list[LabeledSentences]:
    """Return the requested mode switches; the facts of the report name the initial mode."""
    rows = []
    has_several_roots = len({change.root for change in run.announced.changes}) > 1
    for change in run.announced.changes:
        if change.requested_by != "start":
            step = UNKNOWN if change.step is None else f"{change.step:,}"
            change_text = f"to {change.mode}" if change.refused is None else f"refused: {change.refused}"
            change_text = f"{sanitize_line(change.root, 60)}: {change_text}" if has_several_roots else change_text
            rows.append((format_elapsed(change.t_ns), f"step {step}{process_suffix(change.process, run)}", change_text))
    return _labeled_sentences(rows, _MAX_CHANGES, 6, ("time", "where", "what"))


def _pause_rows(report: ReportData) -> list[LabeledSentences]:
    """Return time, previous step and duration of each pause; with the process if there are several."""
    rows = []
    for pause in report.run.pauses:
        step = UNKNOWN if pause.step is None else f"{pause.step:,}"
        place_text = f"after step {step}{process_suffix(pause.process, report.run)}"
        rows.append((format_elapsed(pause.start_ns), place_text, _pause_duration_text(report, pause)))
    return _labeled_sentences(rows, _MAX_CHANGES, 6, ("time", "where", "duration"))


def _pause_duration_text(report: ReportData, pause: Pause) -> str:
    if pause.refused is not None:
        return f"refused: {pause.refused}"
    if pause.on:
        return "the run ended during it" if sentences.is_over(report) else "paused now"
    if pause.took_ns is None:
        step_text = "" if pause.end_ns is None else f"; a step began at {format_elapsed(pause.end_ns)}"
        return f"its end was not recorded{step_text}"
    reason_text = f", resumed automatically: {pause.reason}" if pause.reason else ""
    return f"for {format_long_duration(pause.took_ns)}{reason_text}"
