"""Builds the document of a run: every table, sentence and plot, once for all renderers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from dpmon.model.device_memory import missing_value_reasons
from dpmon.model.findings.device_findings import busy_cpus_note
from dpmon.model.findings.finding_evidence import MIN_STEPS, measured_modes, process_suffix
from dpmon.model.nodes import gpu_name
from dpmon.model.pauses import Pause
from dpmon.model.rank_stats import RankSummary, slowest_first
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.stragglers import straggler_sentence
from dpmon.record.shared_names import CALL_PHASES
from dpmon.report import sentences, tables
from dpmon.report.document import (
    MAX_ROWS,
    Document,
    Findings,
    OutputLines,
    Paragraph,
    Part,
    Section,
    Table,
    TextHistogram,
)
from dpmon.report.health import HAS_FAILED
from dpmon.report.plots import build_plots
from dpmon.report.report_data import ReportData
from dpmon.run.run_registry import short_name
from dpmon.sanitize import sanitize_line
from dpmon.store.step_stats import StepStats
from dpmon.text.fact_table import FactTable
from dpmon.text.formatting import (
    format_count,
    format_elapsed,
    format_long_duration,
)

Row = TypeVar("Row")

_OF_STEPS = "Steps", "Phases", "Ranks", "Calls", "Replicas", "Stages", "Memory", "How good"
SUMMARY_TITLES = ("Findings", "Time", *_OF_STEPS)
"""The first sections, which are the summary at the end of a run."""
MAX_EPOCHS = 12
_MAX_STAGES = 8


def build_document(report: ReportData) -> Document:
    """Build the document of a report, without empty sections."""
    run, name = report.run, short_name(report.run_info)
    plots = {plot.name: [plot] for plot in build_plots(run)}
    step_plots = [plot for name in ("step-time", "speed", "phases") for plot in plots.get(name, ())]
    comparison = run.mode_comparison
    time_sentences = sentences.time_by_activity_sentences(run, run.time_by_activity, has_ended=report.has_ended)
    comparison_sentences = [] if comparison is None else sentences.mode_comparison_sentences(comparison)
    profile_sentences: list[str] = []
    for record in run.memory_events["profile"][-1:]:
        profile_sentences = sentences.profile_sentences(record, report.directory)
    has_replicas = any(replica.mode == "dp" for replica in run.replicas_by_kind)
    record_sentences = (report.directory, f"dpmon attach {name}   dpmon export {name}")
    sections = (
        Section("Findings", _finding_parts(report)),
        Section("Time", _paragraphs(time_sentences)),
        Section("Steps", [*_step_parts(run), *step_plots]),
        *(Section("Phases", _phase_parts(run, stats), _phases_subtitle(stats)) for stats in _stats_of_modes(run)),
        Section("Ranks", [*_rank_tables(run), *plots.get("waits", ())]),
        Section("Ranks", _rank_time_tables(run), ": where step time goes"),
        Section("Replicas" if has_replicas else "Calls", _replica_tables(run)),
        Section("Stages", _stage_parts(run), " (parts of the model on several devices)"),
        Section("Memory", _memory_parts(run), " as torch counts it"),
        Section("How good", _paragraphs([run.whole_efficiency.text] if run.steps else ())),
        Section("Epochs", _epoch_parts(run), process_suffix(run.progress.process, run)),
        Section("Loss", [*_loss_parts(run), *plots.get("loss", ())]),
        Section("Communication", _communication_tables(run)),
        Section("dp vs. single", _paragraphs(comparison_sentences)),
        Section("Devices", [*_device_parts(run), *plots.get("use", ()), *plots.get("memory", ())]),
        Section("Profile", _paragraphs(profile_sentences)),
        Section("Mode switches", _mode_change_tables(run)),
        Section("Pauses", _pause_tables(report)),
        Section("Warnings", _paragraphs(report.warnings)),
        Section("Last output", [OutputLines(report.last_output)] if report.last_output else ()),
        Section("Record", _paragraphs(record_sentences)),
    )
    non_empty = [section for section in sections if section.parts]
    setup, facts = sentences.setup_facts(report), sentences.basic_facts(report)
    return Document(report.run_info.script, name, report.health.word, report.outcome, facts, non_empty, setup)


def _paragraphs(texts: Iterable[str], is_note: bool = False) -> list[Paragraph]:
    return [Paragraph(text, is_note) for text in texts]


def _table(
    table: FactTable[Row], rows: Sequence[Row], labels: Sequence[str] | None = None, head: str | None = None
) -> list[Table]:
    """Return the cells of a table, if it has any values. `labels`: of its rows, if they are not those of the table."""
    columns = table.shown_columns(rows)
    if not rows or not columns:
        return []
    labels = [table.label.cell(row) for row in rows] if labels is None else labels
    cells = [[label, *(column.cell(row) for column in columns)] for label, row in zip(labels, rows, strict=True)]
    headers = [table.label.head if head is None else head, *(column.head for column in columns)]
    return [Table(headers, cells, [index for index, column in enumerate(columns, 1) if column.form.is_text])]


# ------------------------------------------------------------------------------------------------ steps


def _finding_parts(report: ReportData) -> list[Part]:
    notes = _paragraphs(busy_cpus_note(report.run), is_note=True)
    if report.findings:
        return [Findings(report.findings), *notes]
    return [Paragraph(no_findings_text(report)), *notes]


def no_findings_text(report: ReportData) -> str:
    """Return the sentence of a report without findings."""
    if not any(measured_modes(report.run)):
        return _too_few_steps_text(report.run)
    is_problem_said = report.health.exit_status == HAS_FAILED or report.run.announced.stalls
    return "no other findings" if is_problem_said else "no findings"


def _too_few_steps_text(run: RunAnalysis) -> str:
    """Return how many steps of the most frequent mode count, how many are needed, and how many are left out."""
    settled = max((stats.settled_stats for stats in run.modes), key=lambda stats: stats.steps, default=None)
    count, warm_up = (0, 0) if settled is None else (settled.steps, settled.warm_up_steps)
    left_out_text = f", {warm_up} left out as warm-up" if warm_up else ""
    return f"too few steps for findings: {count} counted, {MIN_STEPS} needed{left_out_text}"


def _stats_of_modes(run: RunAnalysis) -> list[StepStats]:
    """Return the stats of each mode: first those of the main kind of steps, then those of others."""
    return [*(stats for stats in run.modes if stats.steps), *run.other_modes]


def _phases_subtitle(stats: StepStats) -> str:
    process = "" if stats.process_name is None else f", {stats.process_name}"
    return f" of a step, {sentences.mode_title(stats)}{process}"


def _step_parts(run: RunAnalysis) -> list[Part]:
    """Return the table of steps by mode. With several processes, its times are those of one; the rest covers all."""
    stats_of_modes = _stats_of_modes(run)
    parts: list[Part] = [
        *_table(tables.mode_table(run), stats_of_modes, list(map(sentences.mode_title, stats_of_modes)))
    ]
    bins = [time_bin for time_bin in run.binned_steps.bins if not time_bin.other_kind]
    if stats_of_modes and len(bins) > 1:
        parts.append(TextHistogram(bins, run.binned_steps.width_ns, sentences.rank_suffix_of_run(run)))
    return parts


def _epoch_parts(run: RunAnalysis) -> list[Part]:
    """Return a table with a row for each epoch of the representative process, without the middle ones of many."""
    parts: list[Part] = []
    for table in _table(tables.EPOCHS, run.progress.epochs):
        omitted_count = len(table.rows) - MAX_EPOCHS
        if omitted_count > 0:
            gap = ["…", *[""] * (len(table.headers) - 1)]
            rows = [*table.rows[: MAX_EPOCHS // 2], gap, *table.rows[-MAX_EPOCHS // 2 :]]
            note = f"{format_count(omitted_count)} epochs omitted; --json has them all"
            parts += [table._replace(rows=rows), Paragraph(note, is_note=True)]
        else:
            parts.append(table)
    return parts


def _loss_parts(run: RunAnalysis) -> list[Part]:
    """Return a table with a row for each line that calls backward: its first, lowest and last loss."""
    notes = [f"{curve.place}: {curve.why}" for curve in run.whole_losses if curve.why is not None]
    if run.whole_losses:
        rank_text = process_suffix(run.whole_losses[0].process, run)
        sampling = f"losses{rank_text}, sampled: at most one per second, and the last"
        passes_text = "the backward passes of an update are added up; of those inside optimizer.step, the first counts"
        notes[:0] = [f"{sampling}; smoothed: the median of the newest nine", passes_text]
    return [*_table(tables.LOSSES, run.whole_losses), *_paragraphs(notes, is_note=True)]


def _phase_parts(run: RunAnalysis, stats: StepStats) -> list[Part]:
    """Return a table with a row per phase: its host time, and its device time if any is known; then notes."""
    steps = run.window.tally(stats.mode, stats.kind).steps
    notes = sentences.phase_notes(stats, run.layouts.calls(stats.mode, stats.kind) / max(steps, 1))
    labels = ["  " * (phase.name in CALL_PHASES) + phase.name for phase in stats.ran_phases]
    return [*_table(tables.PHASES, stats.ran_phases, labels), *_paragraphs(notes, is_note=True)]


# ------------------------------------------------------------------------------------------------ replicas and ranks


def _replica_tables(run: RunAnalysis) -> list[Table]:
    """Return a table with a row per replica, mode and kind of call; empty if the table of ranks has all calls."""
    if len(run.process_numbers) > 1 and run.layouts.have_only_ranks():
        return []
    replicas = [replica for replica in run.replicas_by_kind if replica.calls]
    words = {**run.store.kind_words, run.layouts.main_kind: ""}
    labels = [", ".join(filter(None, (replica.label, words[replica.kind]))) for replica in replicas]
    return _table(tables.REPLICAS, replicas, labels)


def _stage_parts(run: RunAnalysis) -> list[Part]:
    """Return a table with a row per stage of a model on several devices, for its first stages."""
    stages = [stage for stage in run.stages if stage.stage < _MAX_STAGES]
    omitted_count = len(run.stages) - len(stages)
    notes = [f"{omitted_count} further stages: --json has them"] if omitted_count else []
    return [*_table(tables.STAGES, stages), *_paragraphs(notes, is_note=True)]


def _rank_tables(run: RunAnalysis) -> list[Table]:
    """Return a table of the processes, if several have trained.

    Ranks with equal counts, devices and sizes share a row, with the times of the first: the next table has those of
    each rank.
    """
    groups: dict[tuple[object, ...], list[RankSummary]] = {}
    for rank in slowest_first(run.rank_summaries, MAX_ROWS):
        own_row = None if rank.times is not None and rank.times.joined else rank.process
        groups.setdefault((rank.device, rank.steps, rank.calls, rank.flow, own_row), []).append(rank)
    first_ranks = [ranks[0] for ranks in groups.values()]
    labels = [f"{len(ranks)} equal ranks" if len(ranks) > 1 else ranks[0].label for ranks in groups.values()]
    return _table(tables.RANKS, first_ranks, labels)


def _rank_time_tables(run: RunAnalysis) -> list[Table]:
    """Return a table of the parts of each rank's mean step, if any rank's wait is known."""
    ranks = [
        rank for rank in slowest_first(run.rank_summaries, MAX_ROWS) if rank.times is not None and rank.times.joined
    ]
    unit = "step" if run.whole_communication is None else run.whole_communication.unit
    times = [rank.times for rank in ranks if rank.times is not None]
    return _table(tables.RANK_TIMES, times, [rank.label for rank in ranks], f"mean per {unit}")


def _communication_tables(run: RunAnalysis) -> list[Table]:
    """Return the communication of the ranks, and the straggler."""
    communication = run.whole_communication
    if communication is None:
        return []
    straggler = communication.straggler
    straggler_rows = [] if straggler is None else [("straggler", straggler_sentence(straggler, lately=False))]
    rows = [*communication.labeled_texts, *straggler_rows, *(("note", note) for note in communication.other_waits())]
    return [Table(("", ""), rows, (1,))]


# ------------------------------------------------------------------------------------------------ devices, events


def _device_parts(run: RunAnalysis) -> list[Part]:
    """Return a table of the GPUs and the host (of several nodes, of each), and why there is no GPU."""
    devices, parts = [*run.device_usage, *run.samples.hosts], list[Part]()
    if not run.device_usage:
        parts.append(Paragraph(f"no GPU: {run.samples.gpu_absent}" if run.samples.gpu_absent else "no GPU was seen"))
    labels = []
    for device in devices:
        alias = f" ({device.called})" if device.called else ""  # as the run's processes call it
        labels.append(f"{gpu_name(device.index, run.nodes)}{alias} {device.name or ''}".strip())
    parts += _table(tables.DEVICES, devices, labels)
    if devices:
        sample_note = " that are left" if run.store.pruned else ""
        sample_note += ", without samples during pauses" if run.paused else ""
        use_text = (
            "use (of a GPU, the share of time in which a kernel ran; of a host, of its CPUs): median of the samples"
        )
        parts.append(Paragraph(f"{use_text}{sample_note}; memory, °C and W: the highest", is_note=True))
    return parts


def _memory_parts(run: RunAnalysis) -> list[Part]:
    """Return a table of the memory of each device by owner, and the reasons for unknown values."""
    notes = [
        f"{names} of {memory.device}: {reason}"
        for memory in run.device_memory[:MAX_ROWS]
        for names, reason in missing_value_reasons(memory)
    ]
    return [*_table(tables.MEMORY, run.device_memory), *_paragraphs(notes, is_note=True)]


def _event_table(rows: Sequence[tuple[int | None, int | None, str, str]], prefix: str, what: str) -> list[Table]:
    """Return a table of events: their time, step and process, and a text. `prefix`: of the step."""
    cells = [
        (format_elapsed(t_ns), f"{prefix}step {format_count(step)}{process}", text)
        for t_ns, step, process, text in rows
    ]
    return [Table(("time", "where", what), cells, (1, 2))] if rows else []


def _mode_change_tables(run: RunAnalysis) -> list[Table]:
    """Return the requested mode switches; the facts of the report name the initial mode."""
    rows = []
    has_several_roots = len({change.root for change in run.announced.changes}) > 1
    for change in run.announced.changes:
        if change.requested_by != "start":
            change_text = f"to {change.mode}" if change.refused is None else f"refused: {change.refused}"
            change_text = f"{sanitize_line(change.root, 60)}: {change_text}" if has_several_roots else change_text
            rows.append((change.t_ns, change.step, process_suffix(change.process, run), change_text))
    return _event_table(rows, "", "what")


def _pause_tables(report: ReportData) -> list[Table]:
    """Return time, previous step and duration of each pause; with the process if there are several."""
    run = report.run
    rows = [
        (pause.start_ns, pause.step, process_suffix(pause.process, run), _pause_duration_text(pause, report.has_ended))
        for pause in run.pause_list
    ]
    return _event_table(rows, "after ", "duration")


def _pause_duration_text(pause: Pause, has_ended: bool) -> str:
    if pause.refused is not None:
        return f"refused: {pause.refused}"
    if pause.on:
        return "the run ended during it" if has_ended else "paused now"
    if pause.took_ns is None:
        step_text = "" if pause.end_ns is None else f"; a step began at {format_elapsed(pause.end_ns)}"
        return f"its end was not recorded{step_text}"
    reason_text = f", resumed automatically: {pause.reason}" if pause.reason else ""
    return f"for {format_long_duration(pause.took_ns)}{reason_text}"
