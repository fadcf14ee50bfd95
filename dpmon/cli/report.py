"""`dpmon report`: a summary of a run."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dpmon.cleaning import json_text
from dpmon.run.destination import opened, stdout
from dpmon.run.rundir import RunError, load_info
from dpmon.run.runs import find_run, short_name
from dpmon.text.cells import has_colours, in_stream

if TYPE_CHECKING:
    from dpmon.report.document import Document

WIDTH_NO_TERMINAL = 80
WIDEST = 120


def report(options: argparse.Namespace) -> int:
    """Print the report, or write it to the chosen file."""
    from dpmon.report.asjson import as_object
    from dpmon.report.collect import collect
    from dpmon.report.page import page
    from dpmon.report.sections import document

    directory, output = find_run(options.run), options.output
    story = collect(directory)
    if options.html:
        text = page(document(story))
        output = output or f"{short_name(load_info(directory))}.html"
    elif options.json:
        text = json_text(as_object(story), indent=1) + "\n"
    else:
        text = _text(document(story), on_terminal=output is None and sys.stdout.isatty())
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


def _text(made: Document, *, on_terminal: bool) -> str:
    from dpmon.report.text import text_lines

    if not on_terminal:
        return "\n".join(text_lines(made, WIDTH_NO_TERMINAL)) + "\n"
    lines = text_lines(made, min(shutil.get_terminal_size((WIDTH_NO_TERMINAL, 24)).columns, WIDEST))
    if has_colours(sys.stdout, os.environ):
        lines = [f"\x1b[1m{line}\x1b[0m" if line and not line.startswith(" ") else line for line in lines]
    return in_stream("\n".join(lines) + "\n", sys.stdout)
