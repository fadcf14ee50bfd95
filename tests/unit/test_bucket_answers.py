"""What was derived from finished time buckets is kept until one of them changes."""

from __future__ import annotations

from dpmon.model.bucket_answers import LATE_S, BucketAnswers
from dpmon.record.record_types import Step
from dpmon.store.store_queries import Store
from dpmon.store.tally_tables import read_tally_rows
from support.history_builders import Recording
from support.record_builders import SECOND, Training


class Reader:
    """A reader that counts the steps of each bucket, and notes which seconds it reads."""

    def __init__(self, run: Recording, width: int) -> None:
        self._run, self._width, self._answers = run, width, BucketAnswers()
        self.seconds: list[int] = []

    def count(self, begin_s: int, end_s: int, at_ns: int | None = None) -> dict[int, int]:
        """Return the steps by bucket; note in `seconds` which were read."""
        store = self._run.store().as_of(at_ns)
        self._answers.start_read(store)
        self.seconds = []

        def read(begin_s: int, end_s: int) -> dict[int, int]:
            self.seconds += range(begin_s, end_s)
            return count_steps(store, begin_s, end_s, self._width)

        return self._answers.read(store, "steps", self._width, begin_s, end_s, read)


def count_steps(store: Store, begin_s: int, end_s: int, width: int) -> dict[int, int]:
    counts: dict[int, int] = {}
    for start_s, _, _, tally in read_tally_rows(store, begin_s, end_s, widest=1):
        bucket_s = store.bucket_start(start_s, width)
        counts[bucket_s] = counts.get(bucket_s, 0) + tally.steps
    return counts


def recorded(seconds: int) -> tuple[Recording, Training]:
    training = Training(step_ns=SECOND // 10, start_ns=SECOND)
    run = Recording().add(training.begin())
    while training.now < seconds * SECOND:
        run.add(training.step())
    return run, training


def test_finished_buckets_are_read_once() -> None:
    run, training = recorded(100)
    reader = Reader(run, 10)
    assert reader.count(0, 200) == count_steps(run.store(), 0, 200, 10)
    newest_s = run.store().newest_s
    while training.now < (newest_s + 8) * SECOND:
        run.add(training.step())
    assert reader.count(0, 200) == count_steps(run.store(), 0, 200, 10)
    assert min(reader.seconds) >= newest_s - 10 - LATE_S


def test_a_bucket_that_changes_late_is_read_again() -> None:
    run, training = recorded(100)
    late = Training(process=1, step_ns=SECOND // 10, start_ns=30 * SECOND)
    reader = Reader(run, 10)
    before = reader.count(0, 90)
    run.add([row for row in late.run(5) if isinstance(row, Step)], 1)
    after = reader.count(0, 90)
    assert after == count_steps(run.store(), 0, 90, 10) != before
    changed = {start_s for start_s in after if after[start_s] != before[start_s]}
    assert set(reader.seconds) == {second for start_s in changed for second in range(start_s, start_s + 10)}
    assert training.now > 0


def test_a_bucket_that_a_range_cuts_is_neither_kept_nor_taken_whole() -> None:
    run, _ = recorded(100)
    reader = Reader(run, 10)
    for end_s in (45, 90, 47, 44):
        assert reader.count(0, end_s, end_s * SECOND) == count_steps(run.store(), 0, end_s, 10)
