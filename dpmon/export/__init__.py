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
from dpmon.store.database import DAMAGE
from dpmon.store.records import read_records
from dpmon.store.store_opening import open_store


class ExportError(DpmonError):
    """An export that cannot be written; the text is one sentence for the user."""


def export(
    directory: Path, format_name: str = "jsonl", output: str | None = None, only_kind: str | None = None
) -> None:
    """Write the current records of the run in `directory`, which may still be running.

    `format_name`: jsonl, csv or perfetto. `output`: a file, or "-" or None for standard output. For csv, a directory
    that gets one file per kind, unless `only_kind` (one of RECORDS) selects a kind. Files are replaced atomically.
    Raises ExportError, or RunError if the directory is not a run.
    """
    to_stdout = output in (None, "-")
    if format_name == "csv" and only_kind is None and to_stdout:
        raise ExportError("csv writes one file per kind: give a directory with -o, or choose one kind (--kind call)")
    if format_name == "perfetto" and only_kind is not None:
        raise ExportError("a perfetto trace holds all kinds: --kind is for jsonl and csv")
    try:
        if format_name == "csv" and only_kind is None:
            _write_csv_files(directory, Path(str(output)))
            return
        with utf8_stdout() if to_stdout else open_replacement(Path(str(output))) as file:
            _write_single_file(directory, format_name, only_kind, file)
    except BrokenPipeError:
        raise
    except DAMAGE as error:
        raise HistoryError(f"the history is damaged: {error or type(error).__name__}") from error
    except OSError as error:
        file_name = (error.filename if format_name == "csv" else None) or output
        target = "standard output" if to_stdout else file_name
        raise ExportError(f"{target} cannot be written: {error.strerror or error}") from None


def _write_single_file(directory: Path, format_name: str, only_kind: str | None, file: TextIO) -> None:
    if format_name == "perfetto":
        write_trace(load_info(directory), iter_records(directory), file)
        return
    if format_name == "jsonl":
        write_jsonl(directory, file, only_kind)
        return
    tables = CsvTables(lambda _: file)
    tables.row_writer(str(only_kind))
    tables.write(record for record in iter_records(directory) if kind_of(record) == only_kind)


def _write_csv_files(directory: Path, output_directory: Path) -> None:
    """Write one file per kind of record. All files get their names at the end."""
    os.makedirs(output_directory, exist_ok=True)
    for name in RECORDS:  # check all files before writing the first
        check_replaceable(output_directory / f"{name}.csv")
    with contextlib.ExitStack() as files:
        tables = CsvTables(lambda name: files.enter_context(replace_file(output_directory / f"{name}.csv")))
        tables.write(iter_records(directory))


def iter_records(directory: Path) -> Iterator[Record]:
    """Yield all records of the run in `directory`, then one of kind `dropped`, then the exit if the run has ended.

    Raises RunError if the directory is not a run of this user, HistoryError if the history is damaged.
    """
    with open_store(directory) as store:
        for record in read_records(store):
            if not isinstance(record, Event) or record.kind != "exit":
                yield record
        if store.unread_warning is not None:
            yield Event("warning", {"process": None, "t_s": None, "text": store.unread_warning})
        dropped = {"count": store.dropped, "pruned": store.pruned}
    yield Event("dropped", dropped)
    exit_info = load_exit(directory)
    if exit_info is not None:
        data: dict[str, object] = {
            "status": exit_info.status,
            "signal": exit_info.signal,
            "t_s": exit_info.seconds,
            "by": exit_info.by,
        }
        if exit_info.unknown is not None:
            data["absent"] = {"status": exit_info.unknown}
        if exit_info.cause is not None:
            data["cause"] = exit_info.cause
        yield Event("exit", data)


def write_jsonl(directory: Path, file: IO[str], only_kind: str | None = None) -> None:
    """Write all records of a run, or those of one kind, to `file`: one JSON object per line, in ASCII."""
    for record in iter_records(directory):
        if only_kind is None or kind_of(record) == only_kind:
            file.write(to_safe_json(as_json(record), separators=(",", ":")) + "\n")
