"""The command `compare`: what differs between runs, how their figures changed, and a gate for CI."""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import chain

from dpmon.cleaning import json_text
from dpmon.cli.commands import as_text, written
from dpmon.model.compare_gate import Threshold
from dpmon.report.comparison import as_object, document, read
from dpmon.report.comparison import compare as compare_sides
from dpmon.report.page import page
from dpmon.run.rundir import RunError
from dpmon.run.runs import find_run


def compare(options: argparse.Namespace) -> int:
    """Compare runs; the exit status is that of the thresholds, 0 without any."""
    thresholds = []
    if options.fail_if_slower is not None:
        thresholds += [Threshold(phase, options.fail_if_slower) for phase in options.phase or ("step",)]
    if options.memory is not None:
        thresholds.append(Threshold("memory", options.memory))
    directories = [[find_run(name) for name in names] for names in (options.before, options.after)]
    again = [one.name for one, count in Counter(chain.from_iterable(directories)).items() if count > 1]
    if again:
        raise RunError(f"{again[0]} is given twice: a run counts once, on one side")
    before, after = ([read(directory) for directory in side] for side in directories)
    found = compare_sides(before, after, thresholds, anyway=options.anyway)
    if options.html:
        output = options.output or f"{before[0].run.name}-{after[0].run.name}.html"
        written(page(document(found)), output, say=True)
    elif options.json:
        written(json_text(as_object(found), indent=1) + "\n", options.output)
    else:
        written(as_text(document(found), options.output), options.output)
    return found.status
