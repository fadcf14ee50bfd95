"""The command `compare`: what differs between runs, how their metrics changed, and a gate for CI."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import chain

from dpmon.cli.commands import render_document, write_output
from dpmon.model.run_comparison import exit_status_of, judge_metric
from dpmon.report.comparison_report import build_document, compare_directories, comparison_as_json
from dpmon.run.run_directory import RunError
from dpmon.run.run_registry import find_run
from dpmon.sanitize import to_safe_json


def compare(options: argparse.Namespace) -> int:
    """Compare runs; return the exit status of the gate, 0 without one."""
    directories = [[find_run(name, unique=True) for name in names] for names in (options.before, options.after)]
    for directory, count in Counter(chain.from_iterable(directories)).items():
        if count > 1:
            raise RunError(f"{directory.name} is given twice: a run can be on one side only, once")
    comparison = compare_directories(*directories)
    limit = options.fail_if_slower
    phases = () if limit is None else options.phase or ("step",)
    judgments = [judge_metric(comparison, phase, limit) for phase in phases]
    if options.json:
        text = to_safe_json(comparison_as_json(comparison, judgments), indent=1) + "\n"
    else:
        text = render_document(build_document(comparison, judgments), options.output)
    write_output(text, options.output)
    return exit_status_of(judgments)
