"""Reads the runs of `dpmon compare`, and makes its document and its JSON."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from dpmon.model.compared_run import RUN_METRICS, STEP_METRICS, ComparedRun, Metric, build_compared_run
from dpmon.model.comparison_stats import Change
from dpmon.model.json_fields import fields_of, ms
from dpmon.model.run_comparison import (
    SIDES,
    ComparedMetric,
    Judgment,
    RunComparison,
    compare_runs,
    exit_status_of,
    format_change,
    format_interval,
    outcome_sentence,
    scope_notes,
    step_time_text,
)
from dpmon.record.schema import STEP
from dpmon.report.document import Document, Paragraph, Section, Table
from dpmon.report.plain_text import text_lines
from dpmon.report.plots import plots_of_runs
from dpmon.report.report_data import analyze_run
from dpmon.run.lifecycle import run_state
from dpmon.run.run_directory import load_info
from dpmon.run.run_registry import short_name
from dpmon.store.store_opening import open_store
from dpmon.text.formatting import UNKNOWN, format_count, format_count_with_noun

SCHEMA = 1
"""Version of the JSON."""
_NAMED = 4
"""Most machines of a run that are named."""


def read_compared_run(directory: Path) -> ComparedRun:
    """Read one run. Raises RunError if it is not a run, HistoryError if its history is damaged."""
    info = load_info(directory)
    state, how = run_state(directory, info)
    more = f" and {len(info.nodes) - _NAMED} more" if len(info.nodes) > _NAMED else ""
    given = {
        "script": info.script,
        "arguments": " ".join(info.arguments) or "none",
        "directory": info.cwd,
        "machine": ", ".join(info.nodes[:_NAMED]) + more or info.host or None,
        "dpmon": info.versions.get("dpmon"),
        "state": state,
    }
    with open_store(directory) as store:
        return build_compared_run(
            analyze_run(store, directory, how),
            given,
            id=info.id,
            name=short_name(info),
            directory=str(directory),
            started_unix=info.started_unix,
        )


def read_and_compare(before: Iterable[Path], after: Iterable[Path]) -> RunComparison:
    """Compare the runs in these directories. Raises as `read_compared_run` does."""
    return compare_runs(*([read_compared_run(one) for one in side] for side in (before, after)))


# ------------------------------------------------------------------------------------------------ document


def comparison_text(before: Iterable[Path], after: Iterable[Path], width: int) -> list[str]:
    """The comparison of these runs, in lines of at most `width` cells. Headings do not begin with a space."""
    return text_lines(build_document(read_and_compare(before, after)), width)


def build_document(found: RunComparison, judgments: Sequence[Judgment] = ()) -> Document:
    """The comparison as a document, for text and page."""
    sides = list(zip(SIDES, found.sides, strict=True))
    scripts = dict.fromkeys(one.set_up["script"] or UNKNOWN for _, side in sides for one in side)
    names = [f"{name}: {', '.join(one.name for one in side)}" for name, side in sides]
    differ = [Table(("", *SIDES), found.differences, flows=True)] if found.differences else []
    drawn = [(f"{name} {one.name}", SIDES.index(name), one.bins) for name, side in sides for one in side]
    sections = (
        Section("What differs", differ or [Paragraph("nothing that dpmon knows")]),
        Section("Time of a step", [*_table(found, STEP_METRICS), *plots_of_runs(drawn)], ", medians"),
        Section("The runs", _table(found, RUN_METRICS)),
        Section("Ranks", _stragglers(found)),
    )
    # The judgments are the verdict, so the times come without another one.
    times = step_time_text(found) if judgments else ""
    facts = [*([f"Time: {times}"] if times else []), *scope_notes(found), *_notes(found)]
    there = [section for section in sections if section.parts]
    title, told = " against ".join(scripts), outcome_sentence(found, judgments)
    return Document(title, "; ".join(names), "compared", told, facts, there)


def _notes(found: RunComparison) -> list[str]:
    before, after = found.sides
    counts = [format_count(sum(_steps(one, found) for one in side)) for side in found.sides]
    texts = [f"Compared steps: {counts[0]} in A, {counts[1]} in B."]
    interrupted = sum(one.interrupted_steps for one in (*before, *after))
    if interrupted:
        texts.append(f"{format_count_with_noun(interrupted, 'step')} near a pause or a stall are left out.")
    times = [[one.started_unix for one in side] for side in found.sides]
    apart = max(times[0]) < min(times[1]) or max(times[1]) < min(times[0])
    if apart and not found.is_pair:
        texts.append(
            "All runs of one side came before those of the other, so a change of the machine's load in between looks"
            " like a difference: run them in turn (A B A B)."
        )
    return texts


def _steps(one: ComparedRun, found: RunComparison) -> int:
    return 0 if found.kind is None else one.kinds[found.kind]


def _table(found: RunComparison, figures: Sequence[Metric]) -> list[Table]:
    rows = [_row(found.compared[figure.name]) for figure in figures if figure.name in found.compared]
    return [Table(("", *SIDES, "change", "interval"), rows)] if rows else []


def _row(row: ComparedMetric) -> tuple[str, ...]:
    values = (row.figure.format(row.typical_value(side)) for side in (0, 1))
    told = row.change
    if told is None:
        return (row.figure.label, *values, UNKNOWN, row.missing or "")
    # As in benchstat, a tilde stands for a change that may be none.
    shown = format_change(told.ratio) if told.sign or told.interval is None else "~"
    return (row.figure.label, *values, shown, format_interval(told))


def _stragglers(found: RunComparison) -> list[Paragraph]:
    runs = [(name, one) for name, side in zip(SIDES, found.sides, strict=True) for one in side]
    if not any(one.straggler for _, one in runs):
        return []
    return [
        Paragraph(f"{name} {one.name}: {one.straggler or 'no rank stands out'}{_ranks_seen_note(one)}")
        for name, one in runs
    ]


def _ranks_seen_note(one: ComparedRun) -> str:
    return f" ({one.ranks_seen} ranks were seen)" if one.ranks_seen else ""


# ------------------------------------------------------------------------------------------------ JSON


def comparison_as_json(found: RunComparison, judgments: Sequence[Judgment] = ()) -> dict[str, object]:
    """The comparison as an object; docs/json.md describes its members."""
    step, told = found.compared.get(STEP), found.reason
    return {
        "schema": SCHEMA,
        "outcome": outcome_sentence(found, judgments),
        "status": exit_status_of(judgments),
        "pair": found.is_pair,
        "missing": found.missing if found.missing or step is None else step.missing,
        "sides": [
            {
                "side": name,
                "spread": found.run_to_run_spread(side),
                "runs": [_run(one, found) for one in found.sides[side]],
            }
            for side, name in enumerate(SIDES)
        ],
        "differences": [{"what": what, "a": a, "b": b} for what, a, b in found.differences],
        "most_changed": None if told is None else {"phase": told[0], "a": ms(told[1]), "b": ms(told[2])},
        "figures": {name: _figure(row) for name, row in found.compared.items()},
        "gate": [{**one.threshold._asdict(), "outcome": one.outcome, "text": one.text} for one in judgments],
    }


def _run(one: ComparedRun, found: RunComparison) -> dict[str, object]:
    own = fields_of(one, "id", "name", "directory", "interrupted_steps", "straggler")
    return {**own, "steps": _steps(one, found)}


def _figure(row: ComparedMetric) -> dict[str, object]:
    bounds = {name: getattr(row.change, name, None) for name in Change._fields}
    return {**row.figure.as_fields(a=row.values[0], b=row.values[1]), **bounds, "missing": row.missing}
