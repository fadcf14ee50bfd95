"""Opens the record of a run for queries (dpmon.store.store_queries).

While a supervisor writes the history, readers query its file. Otherwise the rings may hold more than the history: the
supervisor was killed, or the disk was full. Then the history is copied to memory, and the supervisor's own code adds
the contents of the rings to the copy. A damaged history, and that of another version of dpmon, is refused.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

from dpmon.errors import HistoryError
from dpmon.run.lifecycle import has_live_supervisor
from dpmon.run.proc import is_suspended
from dpmon.run.run_directory import RunError, RunInfo, load_exit, load_info, ring_paths
from dpmon.run.safe_files import check_database
from dpmon.span_ring import RingError
from dpmon.store.history_schema import (
    DAMAGE,
    HISTORY_FILE,
    LARGEST,
    SCHEMA_VERSION,
    BoundedConnection,
    RingRow,
    check_schema,
    database_file_stamps,
    database_size,
    read_ring_rows,
    version_of,
)
from dpmon.store.history_writer import HistoryWriter
from dpmon.store.ring_drain import RingDrain
from dpmon.store.span_source import has_unread_spans
from dpmon.store.store_queries import Store

STALE_S, STARVED_S = 3.0, 10.0
"""A supervisor does not work if it has written nothing for this long: the first if it is suspended, else the second. A
working one samples the host every second. On a busy machine it may be late, and then continues with records that are
older than those in the rings. So readers that had changed to the rings would go back in time."""
_MEMORY = ":memory:"
_NO_LIMIT = 1 << 40


@contextmanager
def open_store(directory: Path, *, as_written: bool = False) -> Iterator[Store]:
    """Open the store of a run as of now.

    Raises RunError if there is no run or another version of dpmon recorded it, HistoryError with a sentence for the
    user if the history is damaged, also while the block reads it.

    `as_written`: query the history's file without a copy; for the supervisor that writes it.
    """
    info = load_info(directory)
    with ExitStack() as stack:
        try:
            try:
                store = _open_best_source(directory, info, stack, as_written)
            except FileNotFoundError:
                if as_written:
                    raise
                store = _store_with_rings(directory, info, stack.enter_context(closing(_connect(_MEMORY))))
            except OSError as error:
                raise HistoryError(error.strerror) from None
            yield store
        except (HistoryError, *DAMAGE) as error:
            raise HistoryError(f"the history is damaged: {error or type(error).__name__}") from error


def _open_best_source(directory: Path, info: RunInfo, stack: ExitStack, as_written: bool) -> Store:
    path = directory / HISTORY_FILE
    db = stack.enter_context(closing(_connect(f"{path.absolute().as_uri()}?mode=ro", path)))
    connection = BoundedConnection(db, database_size(path))
    db.execute("BEGIN")
    if not db.execute("SELECT 1 FROM sqlite_master").fetchone():
        raise FileNotFoundError(path)  # the supervisor is creating it
    check_schema(db)
    if (version := version_of(db)) != SCHEMA_VERSION:
        raise RunError(
            f"{directory.name}: another version of dpmon recorded this run (history {version}; this one reads"
            f" {SCHEMA_VERSION})"
        )
    written = as_written or _is_written(directory, info)
    if written or not _rings_hold_more(directory, read_ring_rows(connection)) or database_size(path) > LARGEST:
        return Store(connection)
    pages, page_bytes = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
    if pages * page_bytes > database_size(path):
        raise HistoryError("it claims more pages than its files have")
    memory = stack.enter_context(closing(_connect(_MEMORY)))
    db.backup(memory)
    return _store_with_rings(directory, info, memory)


def _store_with_rings(directory: Path, info: RunInfo, memory: sqlite3.Connection) -> Store:
    """Make the store of a history in memory, after adding the contents of the rings."""
    history = _history(memory, info)
    drain = RingDrain(directory, info, history=history)
    drain.flush(command_ended=True, is_last=load_exit(directory) is not None)
    drain.close()
    if drain.failure is not None:
        raise drain.failure
    return Store(history.connection)


def _history(memory: sqlite3.Connection, info: RunInfo) -> HistoryWriter:
    return HistoryWriter(memory, {"run": info.id, "start_ns": info.start_ns}, _NO_LIMIT)


def _connect(uri: str, path: Path | None = None) -> sqlite3.Connection:
    if path is not None:
        check_database(path)
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def commit_stamp(directory: Path, info: RunInfo) -> object:
    """Return a stamp that changes with every commit.

    None if no supervisor is writing, because the rings may then hold newer data.
    """
    files = database_file_stamps(directory / HISTORY_FILE) if _is_written(directory, info) else None
    return files and [(file.st_mtime_ns, file.st_size) for file in files]


def _is_written(directory: Path, info: RunInfo) -> bool:
    """Whether a supervisor writes the history. False after the command's end: the history may lack the last records."""
    age_s = time.time() - max((file.st_mtime for file in database_file_stamps(directory / HISTORY_FILE)), default=0.0)
    if age_s >= STARVED_S or not has_live_supervisor(info) or load_exit(directory) is not None:
        return False
    return age_s < STALE_S or not is_suspended(info.supervisor_pid)


def _rings_hold_more(directory: Path, rings: Mapping[str, RingRow]) -> bool:
    """Whether the rings of a run hold more than its history."""
    over = load_exit(directory) is not None
    for path in ring_paths(directory):
        with suppress(RingError, OSError):
            if has_unread_spans(path, rings.get(path.name), over):
                return True
    return False
