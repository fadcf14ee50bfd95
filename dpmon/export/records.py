"""Reads all records of a run so far, in order of arrival."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO

from dpmon.cleaning import json_text
from dpmon.record.jsonl import as_json
from dpmon.record.kinds import Call, Collective, Event, Record, Sampled, Step
from dpmon.run.rundir import load_exit
from dpmon.store.opened import open_store
from dpmon.store.tables import HistoryError


def history(directory: Path) -> Iterator[Record]:
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
    for record in history(directory):
        if only is None or kind(record) == only:
            file.write(json_text(as_json(record), separators=(",", ":")) + "\n")


def kind(record: Record) -> str:
    """The record's kind, as in its JSON."""
    return record.kind if isinstance(record, Event) else _KINDS[type(record)]


_KINDS = {Call: "call", Step: "step", Collective: "collective", Sampled: "sampled"}
