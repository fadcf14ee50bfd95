"""Opens the record of a run for queries (dpmon.store.store_queries).

Readers query the file of the history, which only a supervisor writes, and say how many records it lacks. If the
supervisor of an ended run was killed, the first reader completes the history with the supervisor's own code. A damaged
history, and that of another version of dpmon, is refused.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

from dpmon.errors import HistoryError
from dpmon.run.lifecycle import (
    has_live_supervisor,
    is_finishing,
    needs_supervisor,
    run_state,
    take_lock,
)
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info, ring_paths
from dpmon.run.safe_files import check_database
from dpmon.store.database import (
    DAMAGE,
    HISTORY_FILE,
    SCHEMA,
    SCHEMA_VERSION,
    HistoryConnection,
    check_schema,
    database_file_stamps,
    prepare_to_read,
    version_of,
)
from dpmon.store.ring_drain import RingDrain
from dpmon.store.rings import read_rings
from dpmon.store.span_source import count_unread_spans
from dpmon.store.store_queries import Store

STARVED_S = 10.0
"""A supervisor does not work if it has written nothing for this long. A working one samples the host every second."""


@contextmanager
def open_store(directory: Path) -> Iterator[Store]:
    """Open the store of a run as of now.

    Raises RunError if there is no run, if it ended without a history or if another version of dpmon recorded it,
    HistoryError with a sentence for the user if the history is damaged, also while the block reads it.
    """
    run_info = load_info(directory)
    try:
        unread_count = _drain_or_count(directory, run_info)
        with _open_history(directory, run_info) as connection:
            yield Store(connection, unread_count)
    except (HistoryError, *DAMAGE) as error:
        raise HistoryError(f"the history is damaged: {error or type(error).__name__}") from error


@contextmanager
def _open_history(directory: Path, run_info: RunInfo) -> Iterator[HistoryConnection]:
    """Open the history of a run for reading, or an empty one while it has none."""
    try:
        connection = HistoryConnection(_open_file(directory), partial(_open_file_again, directory))
    except FileNotFoundError:
        if _has_ended(directory, run_info) and ring_paths(directory):
            raise RunError(f"{directory.name} has no history: the disk was full while it ran") from None
        db = _connect(":memory:")
        db.executescript(SCHEMA)
        connection = HistoryConnection(db)
    with closing(connection):
        yield connection


def _open_file(directory: Path) -> sqlite3.Connection:
    """Open the file of a history in a read transaction, prepared to read.

    Raises FileNotFoundError if there is none, or if the supervisor is creating it, HistoryError if it is not dpmon's,
    RunError if another version of dpmon recorded it.
    """
    path = directory / HISTORY_FILE
    try:
        check_database(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise HistoryError(error.strerror) from None
    with ExitStack() as stack:
        db = stack.enter_context(closing(_connect(f"{path.absolute().as_uri()}?mode=ro")))
        prepare_to_read(db)
        if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise FileNotFoundError
        db.execute("BEGIN")
        check_schema(db)
        if (version := version_of(db)) != SCHEMA_VERSION:
            raise RunError(
                f"{directory.name}: another version of dpmon recorded this run (history {version}; this one reads"
                f" {SCHEMA_VERSION})"
            )
        stack.pop_all()
    return db


def _open_file_again(directory: Path) -> sqlite3.Connection:
    try:
        return _open_file(directory)
    except FileNotFoundError:
        raise HistoryError("it was deleted") from None
    except RunError as error:
        raise HistoryError(str(error)) from None


def _connect(uri: str) -> sqlite3.Connection:
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def _drain_or_count(directory: Path, run_info: RunInfo) -> int:
    """Complete the history of an ended run. Return how many records in the rings of the run are not in its history.

    0 for a live run whose supervisor is writing: these records follow in a moment.
    """
    exit_info = load_exit(directory)
    while exit_info is not None and is_finishing(run_info, exit_info) and run_info.supervisor_pid != os.getpid():
        time.sleep(0.02)
        exit_info = load_exit(directory)
    if _is_written(directory, run_info) if exit_info is None else exit_info.drained:
        return 0
    unread_count = _count_unread(directory, run_info)
    if unread_count and _has_ended(directory, run_info) and needs_supervisor(directory, run_info, exit_info):
        _drain(directory, run_info)
        unread_count = _count_unread(directory, run_info)
    return unread_count


def _count_unread(directory: Path, run_info: RunInfo) -> int:
    if not (paths := ring_paths(directory)):
        return 0
    rows = {}
    with suppress(RunError), _open_history(directory, run_info) as connection:
        rows = read_rings(connection)
    return sum(count_unread_spans(path, rows.get(path.name)) for path in paths)


def _drain(directory: Path, run_info: RunInfo) -> None:
    """Add the contents of the rings to the history, unless another process does or the directory is a copy.

    Nothing else follows from the directory: no command, no path and no signal.
    """
    if directory.lstat().st_ino != run_info.inode:
        return
    lock_fd = take_lock(directory)
    if lock_fd is None:
        return
    try:
        drain = RingDrain(directory, run_info)
        drain.flush(command_ended=True)
        drain.close()
    finally:
        os.close(lock_fd)


def _is_written(directory: Path, run_info: RunInfo) -> bool:
    """Return whether a supervisor writes the history."""
    write_times = (file.st_mtime for file in database_file_stamps(directory / HISTORY_FILE))
    age_s = time.time() - max(write_times, default=run_info.started_unix)
    return age_s < STARVED_S and has_live_supervisor(run_info)


def _has_ended(directory: Path, run_info: RunInfo) -> bool:
    """Return whether the run has ended, also if nobody recorded its end."""
    state, exit_info = run_state(directory, run_info)
    return exit_info is not None or state == "lost"
