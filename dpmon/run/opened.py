"""Opens what a run has recorded, to be asked (dpmon.store.queries)."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dpmon.run.files import check_database
from dpmon.run.rundir import RunError, load_info
from dpmon.store.queries import Store
from dpmon.store.tables import HISTORY_FILE, Bounds, HistoryError, check_schema, check_version

__all__ = ["can_be_opened", "open_store"]


@contextmanager
def open_store(directory: Path) -> Iterator[Store]:
    """The store of a run as of now. RunError if the directory is no run, HistoryError if it cannot be read."""
    info = load_info(directory)
    path = directory / HISTORY_FILE
    try:
        check_database(path)
        db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
    except (sqlite3.Error, OSError) as error:
        raise HistoryError(str(error)) from None
    try:
        db.text_factory = partial(str, encoding="utf-8", errors="replace")
        Bounds(db, path)
        db.execute("BEGIN")
        check_schema(db)
        check_version(db)
        yield Store(db, info.start_ns)
    except (sqlite3.Error, OverflowError) as error:
        raise HistoryError(str(error)) from None
    finally:
        db.close()


def can_be_opened(directory: Path) -> bool:
    """Whether there is something recorded of a run that can be read."""
    try:
        with open_store(directory):
            return True
    except (HistoryError, RunError):
        return False
