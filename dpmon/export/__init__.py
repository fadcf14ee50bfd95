"""`dpmon export`: writes a run's records, one at a time, in formats that other programs read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TextIO

from dpmon.errors import DpmonError, HistoryError
from dpmon.export.csv_tables import CsvTables
from dpmon.export.perfetto import write_trace
from dpmon.record.jsonl import as_json
from dpmon.record.record_specs import RECORDS
from dpmon.record.record_types import Event, Record, kind_of
from dpmon.run.output_target import check_replaceable, open_replacement, replace_file, utf8_stdout
from dpmon.run.run_directory import load_exit, load_info
from dpmon.sanitize import to_safe_json
from dpmon.store.store_opening import open_store


class ExportError(DpmonError):
    """The export cannot be written; the text is one sentence for the user."""


def export(directory: Path, form: str = "jsonl", output: str | None = None, only: str | None = None) -> None:
    """Write the current records of the run in `directory`, which may still be running.

    `form`: jsonl, csv or perfetto. `output`: a file, "-" or None for standard output; for csv a directory with one file
    per kind, unless `only` (one of RECORDS) selects one kind. A file is replaced in one step, at the end.
    Raises ExportError, or RunError if the directory is not a run.
    """
    piped = output in (None, "-")
    if form == "csv" and only is None and piped:
        raise ExportError("csv writes one file per kind: give a directory with -o, or choose one kind (--kind call)")
    if form == "perfetto" and only is not None:
        raise ExportError("a perfetto trace holds all kinds: --kind is for jsonl and csv")
    try:
        if form == "csv" and only is None:
            _write_tables(directory, Path(str(output)))
            return
        with utf8_stdout() if piped else open_replacement(Path(str(output))) as file:
            _write_one(directory, form, only, file)
    except BrokenPipeError:
        raise
    except OSError as error:
        where = "standard output" if piped else error.filename if form == "csv" and error.filename else output
        raise ExportError(f"{where} cannot be written: {error.strerror or error}") from None


def _write_one(directory: Path, form: str, only: str | None, file: TextIO) -> None:
    if form == "perfetto":
        write_trace(load_info(directory), iter_records(directory), file)
        return
    if form == "jsonl":
        write_jsonl(directory, file, only)
        return
    tables = CsvTables(lambda _: file)
    tables.row_writer(str(only))
    tables.write(record for record in iter_records(directory) if kind_of(record) == only)


def _write_tables(directory: Path, where: Path) -> None:
    """Write one file per kind of record; all files get their names at the end."""
    os.makedirs(where, exist_ok=True)
    for name in RECORDS:  # check all files before writing the first
        check_replaceable(where / f"{name}.csv")
    with contextlib.ExitStack() as files:
        tables = CsvTables(lambda which: files.enter_context(replace_file(where / f"{which}.csv")))
        tables.write(iter_records(directory))


def iter_records(directory: Path) -> Iterator[Record]:
    """All records of the run in `directory`, then one of kind `dropped`, then the exit if the run is over.

    If the history is damaged, a warning says so before `dropped`.

    Raises RunError if the directory is not a run of this user.
    """
    try:
        with open_store(directory) as store:
            for record in store.records():
                if not isinstance(record, Event) or record.kind != "exit":
                    yield record
            damaged, dropped = store.damaged, {"count": store.dropped, "pruned": store.pruned}
    except HistoryError as error:
        damaged, dropped = f"the history cannot be read: {error}", {"count": 0, "pruned": 0}
    if damaged is not None:
        yield Event("warning", {"process": None, "t_s": None, "text": damaged})
    yield Event("dropped", dropped)
    how = load_exit(directory)
    if how is not None:
        data: dict[str, object] = {"status": how.status, "signal": how.signal, "t_s": how.seconds, "by": how.by}
        if how.unknown is not None:
            data["absent"] = {"status": how.unknown}
        if how.cause is not None:
            data["cause"] = how.cause
        yield Event("exit", data)


def write_jsonl(directory: Path, file: IO[str], only: str | None = None) -> None:
    """Write all records of a run (or those of one kind) to `file`, one JSON object per line, in ASCII."""
    for record in iter_records(directory):
        if only is None or kind_of(record) == only:
            file.write(to_safe_json(as_json(record), separators=(",", ":")) + "\n")
