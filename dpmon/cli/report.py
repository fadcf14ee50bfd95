"""`dpmon report`: a summary of a run."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from dpmon.cleaning import json_text
from dpmon.run.destination import opened, stdout
from dpmon.run.rundir import RunError, load_info
from dpmon.run.runs import find_run, short_name
from dpmon.text.ascii import in_stream

WIDTH_NO_TERMINAL = 80
WIDEST = 120


def report(options: argparse.Namespace) -> int:
    """Print the report, or write it to the chosen file."""
    directory, output = find_run(options.run), options.output
    if options.html:
        text = _page(directory)
        output = output or f"{short_name(load_info(directory))}.html"
    else:
        text = _json(directory) if options.json else _text(directory, output)
    if output in (None, "-"):
        with stdout() as out:
            out.write(text)
        return 0
    path = Path(output)
    try:
        with opened(path) as file:
            file.write(text)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
    if options.html:
        print(path)
    return 0


def _json(directory: Path) -> str:
    from dpmon.report.asjson import as_object
    from dpmon.report.collect import collect

    return json_text(as_object(collect(directory)), indent=1) + "\n"


def _text(directory: Path, output: str | None) -> str:
    from dpmon.report import report_text

    terminal = output is None and sys.stdout.isatty()
    width = min(shutil.get_terminal_size((WIDTH_NO_TERMINAL, 24)).columns, WIDEST) if terminal else WIDTH_NO_TERMINAL
    lines = report_text(directory, width)
    if terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb":
        lines = [f"\x1b[1m{line}\x1b[0m" if line and not line.startswith(" ") else line for line in lines]
    text = "\n".join(lines) + "\n"
    return in_stream(text, sys.stdout) if terminal else text


def _page(directory: Path) -> str:
    from dpmon.report.collect import collect
    from dpmon.report.page import page
    from dpmon.report.sections import document

    return page(document(collect(directory)))
