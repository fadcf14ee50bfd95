"""What the store costs: the supervisor's share of a core, and how long a question about a run takes.

    python tests/benchmarks/bench_store.py [--seconds 60] [--only writing reading]

Writing: processes record into rings at a given rate of the run's clock, and a drain takes the records and writes them,
as in the supervisor (bench_supervisor.py measures that as a whole, with its samplers). Counted is the processor time of
the drain: of reading the rings, of making rows and tallies, and of writing them.

Reading: runs of a day at ten steps a second are made by the writer of tallies, process by process, out of minutes that
resemble each other; the last hours have every width. Then windows of them are asked for all of their figures. What is
asked of all ranks together is what the screen asks; "each" has the figures of every rank.

All times are processor time. The yardstick tells how fast the machine was meanwhile, and figures are also given as on
the reference.
"""

from __future__ import annotations

import argparse
import gc
import random
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from yardstick import Yardstick

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from dpmon.record.schema import PHASES  # noqa: E402
from dpmon.record.wire import pack_call, pack_definition, pack_event, pack_step  # noqa: E402
from dpmon.ring import Ring  # noqa: E402
from dpmon.run import drain as drain_module  # noqa: E402
from dpmon.run.drain import Drain  # noqa: E402
from dpmon.run.opened import open_store  # noqa: E402
from dpmon.run.rundir import RunInfo, save  # noqa: E402
from dpmon.store.accounting import Spent  # noqa: E402
from dpmon.store.queries import Store  # noqa: E402
from dpmon.store.tables import HISTORY_FILE, Bounds, size_of  # noqa: E402
from dpmon.store.tally import Key, StepFacts  # noqa: E402
from dpmon.store.window import Window  # noqa: E402
from dpmon.store.writer import Batch, Ended, History  # noqa: E402

SECOND = 1_000_000_000
DAY_S = 86_400
TURNS = 20
"""Drains a second, as the supervisor's."""
PER_SECOND = 10
BUDGETS = {"writing": "3 % of a core", "one": "5 ms for one process", "ranks": "30 ms for 64 ranks"}


def info_of(directory: Path) -> RunInfo:
    """A run that began when its clock did."""
    info = RunInfo("id", "bench", ("x.py",), "x.py", "/", None, 1e9, 0, "", True)
    save(directory, info)
    return info


# ------------------------------------------------------------------------------------------------ writing


class Process:
    """Writes calls and steps into a ring of its own."""

    def __init__(self, directory: Path, number: int, ranks: int, replicas: int) -> None:
        rank = number if ranks > 1 else -1
        path = str(directory / f"process-{number}.ring")
        self.ring = Ring(path, process=number, rank=rank, world=ranks, start_ns=0, capacity=1 << 20)
        self._replicas = replicas
        self._chance = random.Random(number)
        self._step = 0
        pid = 100_000 + number
        self.ring.write(pack_event("process", {"process": number, "rank": rank, "pid": pid, "t_s": 0.0}))
        devices = [f"cpu:{index}" for index in range(max(replicas, 1))]
        via = "DataParallel" if replicas else None
        layout = {"root": "Model", "via": via, "virtual": replicas > 1, "devices": devices, "absent": {}}
        self.ring.write(pack_definition(1, layout))
        for which, rows in ((2, 64), (3, 8), (4, 8)):
            self.ring.write(pack_definition(which, [["0", [rows, 5], "float32", 20 * rows]]))

    def step(self, start: int, wall: int) -> None:
        """Write a call and a step."""
        self._step += 1
        wobble = self._chance.gauss(1, 0.05)
        call = int(wall * 0.5 * wobble)
        if self._replicas:
            phases = [0, call // 20, call // 20, call // 5, call // 4, call // 2, call * 9 // 10, call // 20]
            parts = [part for _ in range(self._replicas) for part in (3, 4, 1000, call // 3 + self._step % 1000)]
            self.ring.write(pack_call(1, 7, 1, self._step, self._step, start, call, 2, 4, phases, parts))
        else:
            self.ring.write(pack_call(2, 6, 1, self._step, self._step, start, call, 2, 4, (-1, 0) * 4, (2, 4, 0, call)))
        phases = (wall // 50, call + call // 50, int(wall * 0.3 * wobble), wall // 50)
        self.ring.write(pack_step(1 if self._replicas else 2, self._step, start, wall, 64, phases))


@contextmanager
def without_rollups(without: bool) -> Iterator[None]:
    """Leave out the rollups that are still written beside the tallies."""
    before = History._add_rollups
    if without:
        History._add_rollups = lambda self, batch: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        History._add_rollups = before  # type: ignore[method-assign]


def share(directory: Path, ranks: int, per_second: float, replicas: int, seconds: int) -> float:
    """Percent of a core that the drain takes."""
    drain = Drain(directory, info_of(directory), print)
    processes = [Process(directory, number, ranks, replicas) for number in range(ranks)]
    took = 0.0
    period = SECOND / per_second
    due = 0
    for turn in range(seconds * TURNS):
        until = (turn + 1) * SECOND // TURNS
        while (start := int(due * period)) + int(period * 0.98) <= until:
            for process in processes:
                process.step(start, int(period * 0.98))
            due += 1
        began = time.process_time()
        while drain.drain(until / 1e9):
            pass
        if turn >= TURNS:  # its start is not what is measured
            took += time.process_time() - began
    drain.close()
    return took / (seconds - 1) * 100


def writing(seconds: int) -> None:
    """Print a table."""
    print(f"\nthe drain, of a core (budget: {BUDGETS['writing']} with the samplers)")
    yardstick = Yardstick()
    for name, ranks, per_second, replicas in (
        ("1,000 records/s", 1, 500, 0),
        ("1,000 records/s, 8 replicas", 1, 500, 8),
        ("1,000 steps/s", 1, 1000, 0),
        ("64 ranks x 10 steps/s", 64, 10, 0),
        ("64 ranks x 10 steps/s, 8 replicas each", 64, 10, 8),
    ):
        for without in (False, True):
            with tempfile.TemporaryDirectory() as place, without_rollups(without):
                percent = share(Path(place), ranks, per_second, replicas, seconds)
            slower = yardstick.since()
            label = "without rollups" if without else "with rollups"
            print(f"{name:40} {label:16} {percent:6.2f} %  ({percent / slower:5.2f} % on the reference)", flush=True)


# ------------------------------------------------------------------------------------------------ reading


def minute(chance: random.Random) -> list[StepFacts]:
    """A minute's steps, each of which took about a tenth of a second."""
    found = []
    for _ in range(60 * PER_SECOND):
        parts = {"data": 0.02, "forward": 0.45, "backward": 0.4, "optimizer": 0.1, "other": 0.03}
        wall = {name: int(SECOND / PER_SECOND * 0.98 * part * chance.lognormvariate(0, 0.05))
                for name, part in parts.items()}  # fmt: skip
        phases = [wall.get(phase.name) for phase in PHASES]
        call = [("replica 1 0", int(wall["forward"] * 0.95))]
        found.append(StepFacts(1, sum(wall.values()), (64, None), phases, wall["forward"], 1, {}, call))
    return found


def a_day(directory: Path, ranks: int, fine_s: int = 2 * 3600) -> None:
    """Write a run of a day whose first and last `fine_s` seconds have tallies a second.

    Between them, a minute's steps are written as if all had ended in its first second, and of 64 ranks every fifth.
    """
    chance = random.Random(1)
    minutes = [minute(chance) for _ in range(8)]
    info_of(directory)
    history = History.open(directory, {"run": "id", "start_ns": 0}, 1 << 40)
    step = SECOND // PER_SECOND
    at = 0
    while at < DAY_S:
        fine = at < fine_s or at >= DAY_S - fine_s
        width = 1 if fine else 60
        batch = Batch()
        for second in range(at, at + 60, width):
            for process in range(ranks):
                source = minutes[(second // 60 + process) % len(minutes)]
                first = (second * 7 + process) % (len(source) - PER_SECOND)
                steps = source[first : first + PER_SECOND] if fine else source[:: 1 if ranks == 1 else 5]
                numbered = steps[-1]._replace(number=(second + width) * PER_SECOND)
                ended = Ended([*steps[:-1], numbered], second * SECOND, (second + width) * SECOND - 1)
                batch.tallied[second, Key(process, "single", 0, 64)] = ended
                for part in range(0, width * SECOND, width * SECOND // 2):
                    begin = second * SECOND + part
                    middle, end = begin + int(width * SECOND * 0.49), begin + width * SECOND // 2
                    batch.spend(process, [Spent("training", "single", begin, middle)])
                    batch.spend(process, [Spent("between", "single", middle, end)])
        history.write(batch)
        at += 60
    rows = [
        (number + 1, 0, number + 1, "single", number * step, step, 64, step, 0, 1, 0)
        for number in range((DAY_S - 60) * PER_SECOND, DAY_S * PER_SECOND)
    ]
    history._db.executemany(
        "INSERT INTO steps (id, process, step, mode, start_ns, wall_ns, samples, forward_ns, kind, calls, rest_ns)"
        " VALUES (?,?,?,?,?,?,?,?,?,?,?)",
        rows,
    )
    history.close()


def of_all(window: Window) -> None:
    """What the screen shows of a time."""
    for mode, evaluation in window.modes:
        window.figures(mode, evaluation)
    window.spent  # noqa: B018


def of_each(window: Window) -> None:
    """The figures of every process."""
    for mode, evaluation in window.modes:
        for process in window._source.processes:
            window.figures(mode, evaluation, process)


def milliseconds(ask: Callable[[], object], turns: int) -> tuple[float, float]:
    """The median processor time, and the longest."""
    took = []
    for _ in range(turns):
        began = time.process_time()
        ask()
        took.append((time.process_time() - began) * 1e3)
    return statistics.median(took), max(took)


def reading(turns: int) -> None:
    """Print a table."""
    print(f"\nquestions, ms of processor time (budget: {BUDGETS['one']}, {BUDGETS['ranks']})")
    for ranks in (1, 64):
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            a_day(directory, ranks)
            size = (directory / HISTORY_FILE).stat().st_size / (1 << 20)
            gc.collect()
            print(f"{ranks} process{'es' if ranks > 1 else ''} over a day ({size:.0f} MiB)")
            _questions(directory, ranks, turns)


def _questions(directory: Path, ranks: int, turns: int) -> None:
    yardstick = Yardstick()

    def show(name: str, ask: Callable[[], object], times: int = turns) -> None:
        middle, longest = milliseconds(ask, times)
        slower = yardstick.since()
        print(f"  {name:44} {middle:8.2f}  longest {longest:8.2f}  ({middle / slower:8.2f} on the reference)",
              flush=True)  # fmt: skip

    def opened() -> None:
        with open_store(directory) as store:
            of_all(Window(store, DAY_S - 120, DAY_S))

    show("opening, and a window of 2 min", opened)
    show("opening, and the whole run", lambda: _whole(directory))
    with sqlite3.connect(directory / HISTORY_FILE, isolation_level=None) as db:
        db.execute("BEGIN")
        store = Store(db, Bounds(db, size_of(directory / HISTORY_FILE)))
        for name, seconds in (("2 min", 120), ("1 h", 3600), ("24 h", DAY_S)):
            for end, when in ((DAY_S, "up to the end"), (DAY_S - 3666, "up to an hour and 66 s ago")):
                begin = max(end - seconds, 17)
                show(f"{name} {when}", lambda begin=begin, end=end: of_all(Window(store, begin, end)))
                if ranks > 1:
                    each = lambda begin=begin, end=end: of_each(Window(store, begin, end))  # noqa: E731
                    show(f"{name} {when}, each rank", each, max(turns // 5, 3))
    db.close()


def _whole(directory: Path) -> None:
    with open_store(directory) as store:
        of_all(Window(store))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="of the run's clock, in each case of writing")
    parser.add_argument("--turns", type=int, default=15, help="how often each question is asked")
    parser.add_argument("--only", nargs="*", choices=("writing", "reading"), default=("writing", "reading"))
    options = parser.parse_args()
    print(Yardstick().state(), f"python {sys.version.split()[0]}, SQLite {sqlite3.sqlite_version}", sep="\n")
    assert drain_module.COMMIT_S <= 1.0, "the cost of a commit would be measured too seldom"
    if "writing" in options.only:
        writing(options.seconds)
    if "reading" in options.only:
        reading(options.turns)


if __name__ == "__main__":
    main()
