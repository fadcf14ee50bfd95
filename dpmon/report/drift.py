"""The metrics of a script over its runs, for `dpmon ls --script`: they show a slow drift."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dpmon.errors import HistoryError
from dpmon.model.compared_run import ComparedRun, Metric
from dpmon.model.mode_comparison import MIN_STEPS
from dpmon.model.run_comparison import format_change, known_metrics
from dpmon.report.comparison_report import SCHEMA, read_compared_run
from dpmon.report.document import Document, Section, Table
from dpmon.report.plain_text import BAR_CHARS
from dpmon.run.run_directory import RunError
from dpmon.run.run_registry import list_runs
from dpmon.text.formatting import UNKNOWN, format_count_with_noun

MAX_RUNS = 60
"""How many of the newest runs to read."""
_EQUAL_LABELS = ("arguments", "mode", "ranks", "devices", "hardware", "samples a step")
"""Setup that is the same in all runs of a trend."""
_MIN_RANGE = 0.1
"""A row of bars covers at least this part of the median, so that noise does not look like drift."""


@dataclass(frozen=True)
class RunTrend:
    """The comparable runs of a script, oldest first, with the values of each known metric."""

    script: str
    runs: Sequence[ComparedRun]
    metrics: Sequence[tuple[Metric, Sequence[float | None]]]
    excluded: Counter[str]
    """Number of excluded runs by reason."""


def read_run_trend(script: str) -> RunTrend:
    """Read the runs of a script, given as it was started or by its file name. Raises RunError if there is none."""
    directories = [directory for directory, info in list_runs() if script in (info.script, Path(info.script).name)]
    if not directories:
        raise RunError(f"there is no run of {script}; `dpmon ls` lists the runs")
    excluded: Counter[str] = Counter({"older": max(len(directories) - MAX_RUNS, 0)})
    runs: list[ComparedRun] = []
    for directory in reversed(directories[-MAX_RUNS:]):
        run = None
        with suppress(HistoryError, RunError):
            run = read_compared_run(directory)
        if run is None or max(run.steps_by_batch.values(), default=0) < MIN_STEPS:
            excluded["unreadable" if run is None else f"with fewer than {MIN_STEPS} steps"] += 1
            continue
        newest = runs[0] if runs else run
        fields = (field for field in _EQUAL_LABELS if run.set_up[field] not in (None, newest.set_up[field]))
        differing_field = next(fields, None)
        if differing_field is None:
            runs.append(run)
        else:
            excluded[f"with other {differing_field}"] += 1
    runs.reverse()
    metrics = known_metrics(runs, [run.steps(run.main_batch) for run in runs])
    return RunTrend(script, runs, list(metrics), +excluded)


def build_document(trend: RunTrend) -> Document:
    """Build the document of a trend."""
    rows = []
    for metric, values in trend.metrics:
        known_values = [value for value in values if value is not None]
        oldest, newest = values[0], values[-1]
        value_texts = [metric.format(value) for value in (median(known_values), oldest, newest)]
        change = format_change(newest / oldest) if oldest and newest else UNKNOWN
        rows.append((metric.label, *value_texts, change, sparkline(values)))
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_unix)) for run in trend.runs]
    outcome = f"{days[0]} to {days[-1]}" if days else "no run has enough steps"
    facts = [f"excluded: {', '.join(f'{count} {reason}' for reason, count in trend.excluded.items())}"]
    headers = ("", "median", "oldest", "newest", "change", "oldest to newest")
    sections = [Section("Metrics", [Table(headers, rows)], " of each run")] if rows else []
    runs = format_count_with_noun(len(trend.runs), "run")
    return Document(trend.script, runs, "compared", outcome, facts if trend.excluded else [], sections)


def sparkline(values: Sequence[float | None]) -> str:
    """Return a bar for each value, between the lowest and the highest one; a space for an unknown value."""
    known_values = [value for value in values if value is not None]
    low, high = min(known_values), max(known_values)
    min_range = _MIN_RANGE * median(known_values)
    if high - low < min_range:
        low, high = median(known_values) - min_range / 2, median(known_values) + min_range / 2
    scale = (len(BAR_CHARS) - 1) / (high - low or 1)

    def bar(value: float) -> str:
        return BAR_CHARS[min(max(round((value - low) * scale), 0), 7)]

    return "".join(" " if value is None else bar(value) for value in values)


def trend_as_json(trend: RunTrend) -> dict[str, object]:
    """Return the trend as a JSON object; docs/json.md describes its members."""
    return {
        "schema": SCHEMA,
        "script": trend.script,
        "runs": [{"id": run.id, "started_unix": run.started_unix} for run in trend.runs],
        "left_out": dict(trend.excluded),
        "figures": {metric.name: metric.as_fields(values=values) for metric, values in trend.metrics},
    }
