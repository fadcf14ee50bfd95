"""The command `compare`: what differs between runs, how their metrics changed, and a gate for CI."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import chain

from dpmon.cli.commands import render_document, write_output
from dpmon.model.run_comparison import Threshold, exit_status_of, judge_threshold
from dpmon.report.comparison_report import build_document, comparison_as_json, read_and_compare
from dpmon.report.html_page import render_page
from dpmon.run.run_directory import RunError
from dpmon.run.run_registry import find_run
from dpmon.sanitize import to_safe_json


def compare(options: argparse.Namespace) -> int:
    """Compare runs; return the exit status of the thresholds, 0 without any."""
    thresholds = []
    if options.fail_if_slower is not None:
        thresholds += [Threshold(phase, options.fail_if_slower) for phase in options.phase or ("step",)]
    if options.memory is not None:
        thresholds.append(Threshold("memory", options.memory))
    directories = [[find_run(name, unique=True) for name in names] for names in (options.before, options.after)]
    for directory, count in Counter(chain.from_iterable(directories)).items():
        if count > 1:
            raise RunError(f"{directory.name} is given twice: a run can be on one side only, once")
    comparison = read_and_compare(*directories)
    judgments = [judge_threshold(comparison, threshold) for threshold in thresholds]
    if options.html:
        output = options.output or "-".join(side[0].name for side in comparison.sides) + ".html"
        write_output(render_page(build_document(comparison, judgments)), output, print_path=True)
    elif options.json:
        write_output(to_safe_json(comparison_as_json(comparison, judgments), indent=1) + "\n", options.output)
    else:
        write_output(render_document(build_document(comparison, judgments), options.output), options.output)
    return exit_status_of(judgments)
