"""Makes steps for tests of dpmon.store, and the answers that the store should give."""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from steps import StepFacts, quantities

from dpmon.record.schema import EVALUATION, PHASES, WARM_UP
from dpmon.store.history_schema import HISTORY_FILE, LARGEST, CheckedConnection
from dpmon.store.store_queries import Store
from dpmon.store.tally import WIDTHS, Tally, TallyKey
from dpmon.store.write_batch import WriteBatch

SECOND = 1_000_000_000
_KINDS = (0, EVALUATION, WARM_UP, EVALUATION | WARM_UP)


class OneStep(NamedTuple):
    """A step, its start (ns), and the key of its tally."""

    key: TallyKey
    start: int
    facts: StepFacts

    @property
    def end(self) -> int:
        """Return the end, ns."""
        return self.start + self.facts.wall

    def add_to(self, batch: WriteBatch) -> None:
        """Add the step to a batch."""
        batch.add_step(self.key, self.end, self.facts.row(self.start, self.key), self.facts.series)


def some_facts(chance: random.Random, number: int, wall: int, samples: int | None = 8) -> StepFacts:
    """Return a step with random phases, device times and replicas."""
    phases = [None if chance.random() < 0.2 else int(wall * chance.random()) for _ in PHASES]
    parts = [(f"replica 1 {index}", int(wall * chance.random())) for index in range(chance.randrange(3))]
    device = {"forward": int(wall * chance.random())} if chance.random() < 0.5 else {}
    rest = None if chance.random() < 0.5 else wall // 3
    copied = chance.choice((None, 4096))
    counted = quantities(samples=samples, copied_bytes=copied)
    return StepFacts(number, wall, counted, phases, rest, chance.randrange(3), device, parts)


def some_steps(
    chance: random.Random, count: int, seconds: float, processes: Sequence[int] = (0,), begin: float = 0.0
) -> list[OneStep]:
    """Return random steps of some processes between two times, ordered by number and time."""
    found = []
    ends = sorted(int((begin + chance.random() * (seconds - begin)) * SECOND) for _ in range(count))
    for number, end in enumerate(ends, start=1):
        wall = min(int(chance.lognormvariate(18, 1)), end)
        samples = chance.choice((None, 8, 16))
        batch = -1 if samples is None else samples
        key = TallyKey(chance.choice(processes), chance.choice(("dp", "single")), chance.choice(_KINDS), batch)
        found.append(OneStep(key, end - wall, some_facts(chance, number, wall, samples)))
    return found


def expected(steps: Iterable[OneStep]) -> dict[int, dict[tuple[int, TallyKey], Tally]]:
    """Return, by width, the tally of each start and key."""
    found: dict[int, dict[tuple[int, TallyKey], Tally]] = {width: defaultdict(Tally) for width in WIDTHS}
    for step in steps:
        for width in WIDTHS:
            start = step.end // SECOND // width * width
            found[width][start, step.key].add([step.facts.row(step.start)], step.facts.series)
    return found


def store_of(db: sqlite3.Connection) -> Store:
    """Return the store of a history without a limit on reading."""
    return Store(CheckedConnection(db, LARGEST))


@contextmanager
def opened(directory: Path) -> Iterator[Store]:
    """Open the store of a history."""
    with closing(sqlite3.connect(directory / HISTORY_FILE, isolation_level=None)) as db:
        db.execute("BEGIN")
        yield store_of(db)
