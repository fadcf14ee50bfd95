"""The local run that mirrors the runs of other machines."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from dpmon.run import proc
from dpmon.run.mirror_state import MirrorState
from dpmon.run.run_directory import ID, RunError, RunInfo, count_file, deleted_bytes, load_exit
from dpmon.run.run_registry import JOB, create_run, list_runs, short_name
from dpmon.run.safe_files import open_file, write_atomically
from dpmon.sanitize import sanitize_line

OUTPUT_BYTES = 8 << 20
"""When the output has more bytes, its older half is deleted."""


def find_or_create_mirror(
    name: str, machines: Sequence[list[str]], age_s: float = 0.0, metrics: str | None = None
) -> Path:
    """The directory of the run that mirrors these runs of other machines; it is created if there is none.

    `machines`: for each, its name, the id of its run (JOB and the job if it could not be reached), and the words that
    run dpmon there. `age_s`: how long ago the first of their runs began. `metrics`: the file for Prometheus.
    `ensure_supervisor` starts the mirror, with the same `machines`. RunError if no directory can be created, or if
    there is a mirror without this file.
    """
    for directory, info in reversed(list_runs()):
        known = info.options.get("machines", ()) if info.nodes and info.boot_id == proc.boot_id() else ()
        same = len(known) == len(machines) and all(map(_is_same_run, known, machines)) and load_exit(directory) is None
        if same and not MirrorState(directory, info.start_ns).state.get("refused"):  # it does not try these again
            if metrics not in (None, info.options.get("metrics")):
                name = short_name(info)
                raise RunError(f"{name} mirrors these runs without --metrics: end it first, as `dpmon rm {name}` says")
            return directory
    draft = RunInfo(
        id="", name=name, command=(), script=name, cwd="/", python=None, started_unix=time.time() - age_s,
        start_ns=time.monotonic_ns() - int(age_s * 1e9), boot_id=proc.boot_id(), headless=False,
        options={"machines": machines, "metrics": metrics}, nodes=tuple(machine for machine, *_ in machines),
    )  # fmt: skip
    return create_run(draft)[0]


def _is_same_run(one: Sequence[str], other: Sequence[str]) -> bool:
    """Whether both are the same machine and run, as far as is known."""
    return one == other or (one[0] == other[0] and any(each[1].startswith(JOB) for each in (one, other)))


def stream_command(words: list[str], known: str | None = None) -> list[str]:
    """The command that prints the rows of a machine.

    `words`: its name, its run or the job of its run, and the words that run dpmon there. `known`: its run, once it is
    known, from a history that may come from another person: ssh gives the words to a shell.
    """
    _, run, *before = words
    is_known = known is not None and ID.fullmatch(known) and run.startswith(JOB)
    return [*before, "export", known if known and is_known else run, "--follow", "--rollups"]


def append_output(directory: Path, name: str, text: str) -> None:
    """Append the output of a machine to the run's, with its name before each line."""
    lines = "".join(f"{name}: {sanitize_line(line)}\n" for line in text[: 1 << 16].splitlines())
    path = directory / "output.log"
    with contextlib.suppress(OSError), open(open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size > OUTPUT_BYTES:
            file.seek(size - OUTPUT_BYTES // 2)
            rest = file.read().partition(b"\n")[2]
            write_atomically(count_file(path), f"{deleted_bytes(path) + size - len(rest):020d}")
            file.truncate(0)
            file.write(rest)
        file.write(lines.encode("utf-8", "replace"))
