"""The figures of a script over its runs, for `dpmon ls --script`: they show a slow drift."""

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
from dpmon.model.mode_comparison import MIN_STEPS, common_kind
from dpmon.model.run_comparison import NOT_COMPARABLE, format_change, known_metrics
from dpmon.report.comparison_report import SCHEMA, read_compared_run
from dpmon.report.document import Document, Section, Table
from dpmon.report.plain_text import BARS
from dpmon.run.run_directory import RunError
from dpmon.run.run_registry import list_runs
from dpmon.text.formatting import UNKNOWN, format_count_with_noun

MOST_RUNS = 60
"""Most runs to read, the newest."""
_LEAST_RANGE = 0.1
"""A row of bars covers at least this part of the median, so that noise does not look like a drift."""


@dataclass(frozen=True)
class RunTrend:
    """The comparable runs of a script, oldest first, with the values of each known figure."""

    script: str
    runs: Sequence[ComparedRun]
    figures: Sequence[tuple[Metric, Sequence[float | None]]]
    left_out: Counter[str]
    """Number of runs left out, by reason."""


def read_run_trend(script: str) -> RunTrend:
    """Read the runs of a script, given as it was started or by its file name. Raises RunError if there is none."""
    found = [place for place, info in list_runs() if script in (info.script, Path(info.script).name)]
    if not found:
        raise RunError(f"there is no run of {script}; `dpmon ls` lists the runs")
    left_out: Counter[str] = Counter({"older": max(len(found) - MOST_RUNS, 0)})
    runs: list[ComparedRun] = []
    for directory in reversed(found[-MOST_RUNS:]):
        one = None
        with suppress(HistoryError, RunError):
            one = read_compared_run(directory)
        if one is None or max(one.kinds.values(), default=0) < MIN_STEPS:
            left_out["unreadable" if one is None else f"with fewer than {MIN_STEPS} steps"] += 1
            continue
        unlike = [what for what in NOT_COMPARABLE if runs and one.set_up[what] not in (None, runs[0].set_up[what])]
        if unlike:
            left_out[f"with other {unlike[0]}"] += 1
        else:
            runs.append(one)
    runs.reverse()
    kind = common_kind(one.kinds for one in runs) if runs else None
    known = known_metrics(runs, [one.steps(kind) for one in runs])
    return RunTrend(script, runs, list(known), +left_out)


def build_document(found: RunTrend) -> Document:
    """The drift as a document."""
    rows = []
    for figure, values in found.figures:
        known = [value for value in values if value is not None]
        ends = [figure.format(value) for value in (median(known), values[0], values[-1])]
        change = format_change(values[-1] / values[0]) if values[0] and values[-1] else UNKNOWN
        rows.append((figure.label, *ends, change, sparkline(values)))
    days = [time.strftime("%Y-%m-%d %H:%M", time.localtime(one.started_unix)) for one in found.runs]
    outcome = f"{days[0]} to {days[-1]}" if days else "no run has enough steps"
    facts = [f"left out: {', '.join(f'{count} {why}' for why, count in found.left_out.items())}"]
    head = ("", "median", "oldest", "newest", "change", "oldest to newest")
    sections = [Section("Figures", [Table(head, rows)], " of each run: medians of steps")] if rows else []
    runs = format_count_with_noun(len(found.runs), "run")
    return Document(found.script, runs, "compared", outcome, facts if found.left_out else [], sections)


def sparkline(values: Sequence[float | None]) -> str:
    """A bar for each value, between the lowest and the highest one; a space for an unknown value."""
    known = [value for value in values if value is not None]
    low, high = min(known), max(known)
    least = _LEAST_RANGE * median(known)
    if high - low < least:
        low, high = median(known) - least / 2, median(known) + least / 2
    scale = (len(BARS) - 1) / (high - low or 1)
    return "".join(" " if value is None else BARS[min(max(round((value - low) * scale), 0), 7)] for value in values)


def trend_as_json(found: RunTrend) -> dict[str, object]:
    """The drift as an object; docs/json.md describes its members."""
    return {
        "schema": SCHEMA,
        "script": found.script,
        "runs": [{"id": one.id, "started_unix": one.started_unix} for one in found.runs],
        "left_out": dict(found.left_out),
        "figures": {figure.name: figure.as_fields(values=values) for figure, values in found.figures},
    }
