"""No query reads a whole large table, and neither a step nor a window costs more in a longer history."""

from __future__ import annotations

import re
from collections.abc import Callable

from dpmon.export.incremental_rows import IncrementalRows
from dpmon.record.history_rows import Row
from dpmon.store.step_stats import StatsWindow
from dpmon.store.store_queries import Store
from dpmon.store.tally_tables import count_steps, read_tally_rows
from support.history_builders import Recording
from support.rank_builders import ddp_rank_rows
from support.record_builders import SECOND, step_row

_LARGE_SCAN = re.compile(r"SCAN (tallies|series|times|pending_steps|finer|wider)\b")


def read_everything(store: Store) -> None:
    """Run each query for tallies and times, of all processes and of one."""
    for process in (None, 1):
        window = StatsWindow(store, 3, 33, process)
        assert window.tallies
        assert window.times
        assert not window.left_out
        assert list(read_tally_rows(store, 3, 33, process=process, widest=10))
        assert list(read_tally_rows(store, process=process, series=("step",), sketches=False))
    assert count_steps(store, 0, 30, [0])
    rows = IncrementalRows(rollups=True)
    for second in (20, 22):
        rows.next_chunk(store, second, is_last=False)


def test_no_query_reads_a_whole_table() -> None:
    recording = Recording()
    rows, _ = ddp_rank_rows(3, slow=2, phase="data", steps=2000)
    for rank, own in rows.items():
        recording.add(own, rank, rank)
    queries: set[str] = set()
    db = recording._db
    db.set_trace_callback(queries.add)
    read_everything(recording.store())
    recording.add([step_row("single", 9999, 40 * SECOND, 10**7, 4, (1, 2, 3, 4), sync=9, synced=1, sync_number=9)], 1)
    db.set_trace_callback(None)
    queries = {query for query in queries if re.match(r"\s*(SELECT|WITH|INSERT|UPDATE|DELETE)\b", query)}
    assert len(queries) > 40
    for query in queries:
        plan = [detail for *_, detail in db.execute(f"EXPLAIN QUERY PLAN {query}")]
        assert not [detail for detail in plan if _LARGE_SCAN.match(detail)], (query, plan)


def instructions(recording: Recording, work: Callable[[], object]) -> int:
    """Return how many instructions of SQLite's virtual machine some work takes."""
    count = 0

    def add() -> None:
        nonlocal count
        count += 1

    recording._db.set_progress_handler(add, 1)
    work()
    recording._db.set_progress_handler(None, 0)
    return count


def steps_from(second: int, count: int) -> list[Row]:
    """Return steps, four in each second."""
    starts = [second * SECOND + index * SECOND // 4 for index in range(count)]
    return [
        step_row("single", 4 * second + index, start, 10**8 + index % 1000, 8, (1, 2, 3, 4))
        for index, start in enumerate(starts)
    ]


def costs(seconds: int) -> tuple[int, int]:
    """Return the cost of a second, and of a window of the last 200 s, in a history of so many seconds."""
    recording = Recording()
    recording.add(steps_from(0, 4 * seconds))
    recording.add(steps_from(seconds + 3, 4))  # closes the wider time buckets
    new = steps_from(seconds + 4, 4)
    write = instructions(recording, lambda: recording.add(new))
    read = instructions(recording, lambda: StatsWindow(recording.store(), seconds - 200, seconds).tallies)
    return write, read


def test_the_time_of_a_step_and_of_a_window_does_not_grow() -> None:
    (write, read), (later_write, later_read) = costs(300), costs(3600)
    assert later_write < 1.3 * write
    assert later_read < 1.3 * read
