"""The local run that mirrors the runs of other nodes: its directory, its output and the commands it needs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from dpmon.run import proc
from dpmon.run.mirror_state import MirrorState
from dpmon.run.run_directory import ID, RunError, RunInfo, load_exit
from dpmon.run.run_registry import JOB, create_run, list_runs, short_name
from dpmon.run.safe_files import open_file
from dpmon.sanitize import sanitize_line
from dpmon.supervise.output_space import delete_beginning

MAX_OUTPUT_BYTES = 8 << 20
"""When the output is larger than this, its older half is deleted."""


def find_or_create_mirror(
    name: str, node_commands: Sequence[list[str]], age_s: float = 0.0, metrics: str | None = None
) -> Path:
    """Return the directory of the run that mirrors these runs of other nodes. Create it if there is none.

    `node_commands`: for each node, its name, the id of its run (JOB and the job if the node could not be reached), and
    the words that run dpmon there. `age_s`: how long ago the first run began. `metrics`: the file for Prometheus.
    `ensure_supervisor` starts the mirror, with the same `node_commands`. Raises RunError if no directory can be created
    or there is a mirror without this metrics file.
    """
    for directory, run_info in reversed(list_runs()):
        if not run_info.nodes or run_info.boot_id != proc.boot_id() or load_exit(directory) is not None:
            continue
        known = run_info.options.get("machines", ())
        is_same = len(known) == len(node_commands) and all(map(_is_same_run, known, node_commands))
        # A mirror that was refused by a node does not try again.
        if is_same and not MirrorState(directory, run_info.start_ns).state.get("refused"):
            if metrics not in (None, run_info.options.get("metrics")):
                name = short_name(run_info)
                raise RunError(f"{name} mirrors these runs without --metrics: end it first, as `dpmon rm {name}` says")
            return directory
    draft = RunInfo(
        id="", name=name, command=(), script=name, cwd="/", python=None, started_unix=time.time() - age_s,
        start_ns=time.monotonic_ns() - int(age_s * 1e9), boot_id=proc.boot_id(), headless=False,
        options={"machines": node_commands, "metrics": metrics}, nodes=tuple(node for node, *_ in node_commands),
    )  # fmt: skip
    directory, *_ = create_run(draft)
    return directory


def _is_same_run(command: Sequence[str], other_command: Sequence[str]) -> bool:
    """Return whether both commands are for the same node and run, as far as is known."""
    (name, run, *_), (other_name, other_run, *_) = command, other_command
    return command == other_command or (name == other_name and (run.startswith(JOB) or other_run.startswith(JOB)))


def stream_command(node_command: list[str], known_run: str | None = None) -> list[str]:
    """Return the command that prints the rows of a node's run.

    `node_command`: the node's name, its run or the job of its run, and the words that run dpmon there. `known_run`: the
    id of its run, once it is known. It is checked, because it may come from another person's history, and ssh passes it
    to a shell.
    """
    _, run, *dpmon_words = node_command
    if known_run is not None and ID.fullmatch(known_run) and run.startswith(JOB):
        run = known_run
    return [*dpmon_words, "export", run, "--follow", "--rollups"]


def append_output(directory: Path, name: str, text: str) -> None:
    """Append output of a node to the run's output, with the node's name before each line."""
    lines = "".join(f"{name}: {sanitize_line(line)}\n" for line in text[: 1 << 16].splitlines())
    path = directory / "output.log"
    with contextlib.suppress(OSError), open(open_file(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if os.fstat(file.fileno()).st_blocks * 512 > MAX_OUTPUT_BYTES:
            delete_beginning(file.fileno(), size - MAX_OUTPUT_BYTES // 2)
        file.write(lines.encode("utf-8", "replace"))
