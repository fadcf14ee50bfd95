"""Reads the runs of `dpmon compare`, and builds its document and its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dpmon.model.compared_run import RUN_METRICS, STEP_METRICS, ComparedRun, Metric, build_compared_run
from dpmon.model.comparison_stats import Change
from dpmon.model.run_comparison import (
    SIDES,
    ComparedMetric,
    Judgment,
    RunComparison,
    exit_status_of,
    format_interval,
    outcome_sentence,
    scope_notes,
    step_time_text,
)
from dpmon.record.schema import STEP
from dpmon.report.document import Document, Paragraph, Part, Section, Table
from dpmon.report.report_data import analyze_run
from dpmon.run.lifecycle import run_state
from dpmon.run.run_directory import load_info
from dpmon.run.run_registry import short_name
from dpmon.store.store_opening import open_store
from dpmon.text.fact_table import fields_of, ms
from dpmon.text.formatting import UNKNOWN, format_count

SCHEMA = 1
"""Version of the JSON."""
_RUN_FIELDS = ("id", "name", "directory", "straggler")
_MAX_NODES = 4
"""Most nodes of a run to name."""


def read_compared_run(directory: Path) -> ComparedRun:
    """Read one run. Raises RunError if it is not a run, HistoryError if its history is damaged."""
    run_info = load_info(directory)
    state, exit_info = run_state(directory, run_info)
    more_text = f" and {len(run_info.nodes) - _MAX_NODES} more" if len(run_info.nodes) > _MAX_NODES else ""
    set_up = {
        "script": run_info.script,
        "arguments": " ".join(run_info.arguments) or "none",
        "directory": run_info.cwd,
        "machine": ", ".join(run_info.nodes[:_MAX_NODES]) + more_text or run_info.host or None,
        "dpmon": run_info.versions.get("dpmon"),
        "state": state,
    }
    with open_store(directory) as store:
        return build_compared_run(
            analyze_run(store, directory, exit_info),
            set_up,
            id=run_info.id,
            name=short_name(run_info),
            directory=str(directory),
            started_unix=run_info.started_unix,
        )


def compare_directories(before: Iterable[Path], after: Iterable[Path]) -> RunComparison:
    """Compare the runs in these directories. Raises as `read_compared_run` does."""
    return RunComparison(([*map(read_compared_run, before)], [*map(read_compared_run, after)]))


# ------------------------------------------------------------------------------------------------ document


def build_document(comparison: RunComparison, judgments: Sequence[Judgment] = ()) -> Document:
    """Build the document of a comparison, for text."""
    sides = list(zip(SIDES, comparison.sides, strict=True))
    scripts = dict.fromkeys(run.set_up["script"] or UNKNOWN for _, side in sides for run in side)
    names = [f"{name}: {', '.join(run.name for run in side)}" for name, side in sides]
    differences: list[Part] = [Paragraph("nothing that dpmon knows")]
    if comparison.differences:
        differences = [Table(("", *SIDES), comparison.differences, text_columns=(1, 2))]
    sections = (
        Section("What differs", differences),
        Section(f"Time per {comparison.unit}", _metric_table(comparison, STEP_METRICS)),
        Section("The runs", _metric_table(comparison, RUN_METRICS)),
        Section("Ranks", _straggler_paragraphs(comparison)),
    )
    # The judgments are the verdict. Unless one is about the step time, it is given without a verdict.
    is_time_needed = judgments and all(judgment.figure != STEP for judgment in judgments)
    times = step_time_text(comparison) if is_time_needed else ""
    facts = [*([f"Time: {times}"] if times else []), *scope_notes(comparison), *_fact_sentences(comparison)]
    non_empty = [section for section in sections if section.parts]
    title, outcome = " vs. ".join(scripts), outcome_sentence(comparison, judgments)
    return Document(title, "; ".join(names), "compared", outcome, facts, non_empty)


def _fact_sentences(comparison: RunComparison) -> list[str]:
    """Return sentences about how many steps are compared, and what may distort the comparison."""
    before, after = (format_count(sum(comparison.steps(run).steps for run in side)) for side in comparison.sides)
    texts = [f"Compared steps: {before} in A, {after} in B."]
    if comparison.per_sample:
        texts.append("The steps differ in samples or ranks, so the time per sample of all ranks is compared.")
    texts += [f"{run.name}: {run.unread_warning}." for run in comparison.runs if run.unread_warning is not None]
    starts_before, starts_after = ([run.started_unix for run in side] for side in comparison.sides)
    is_one_side_first = max(starts_before) < min(starts_after) or max(starts_after) < min(starts_before)
    if is_one_side_first and not comparison.is_pair:
        texts.append(
            "All runs of one side came before those of the other, so a change of the machine's load in between would"
            " look like a difference: alternate them (A B A B)."
        )
    return texts


def _metric_table(comparison: RunComparison, metrics: Sequence[Metric]) -> list[Table]:
    known = [row for metric in metrics if (row := comparison.compared.get(metric.name)) is not None]
    rows = [(*row.cells, row.missing or "" if row.change is None else format_interval(row.change)) for row in known]
    return [Table(("", *SIDES, "change", "interval"), rows)] if rows else []


def _straggler_paragraphs(comparison: RunComparison) -> list[Paragraph]:
    runs = [(name, run) for name, side in zip(SIDES, comparison.sides, strict=True) for run in side]
    if not any(run.straggler for _, run in runs):
        return []
    return [Paragraph(f"{name} {run.name}: {run.straggler or 'no straggler'}") for name, run in runs]


# ------------------------------------------------------------------------------------------------ JSON


def comparison_as_json(comparison: RunComparison, judgments: Sequence[Judgment] = ()) -> dict[str, object]:
    """Return the comparison as a JSON object; docs/records.md describes its members."""
    step, most_changed = comparison.compared.get(STEP), None
    if comparison.reason is not None:
        a, b = (ms(comparison.reason.typical_value(side)) for side in (0, 1))
        most_changed = {"phase": comparison.reason.figure.name, "a": a, "b": b}
    return {
        "schema": SCHEMA,
        "outcome": outcome_sentence(comparison, judgments),
        "status": exit_status_of(judgments),
        "pair": comparison.is_pair,
        "per": comparison.unit,
        "missing": comparison.missing if comparison.missing or step is None else step.missing,
        "sides": [
            {
                "side": name,
                "spread": comparison.run_to_run_spread(side),
                "runs": [
                    {**fields_of(run, *_RUN_FIELDS), "steps": comparison.steps(run).steps}
                    for run in comparison.sides[side]
                ],
            }
            for side, name in enumerate(SIDES)
        ],
        "differences": [{"what": field, "a": a, "b": b} for field, a, b in comparison.differences],
        "most_changed": most_changed,
        "figures": {name: _metric_members(row) for name, row in comparison.compared.items()},
        "gate": [judgment._asdict() for judgment in judgments],
    }


def _metric_members(row: ComparedMetric) -> dict[str, object]:
    bounds = {name: getattr(row.change, name, None) for name in Change._fields}
    before, after = row.values
    return {**row.figure.as_fields(a=before, b=after), **bounds, "missing": row.missing}
