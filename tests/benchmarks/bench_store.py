"""The cost of the store: the supervisor's share of a core, and the queries of a refresh of the screen.

    python tests/benchmarks/bench_store.py [--seconds 60] [--refreshes 15] [--only writing reading]

Writing: rows of processes appear at a given rate of the run's clock, and a drain takes the records and writes them,
as in the supervisor (bench_supervisor.py measures that as a whole, with its samplers).

Reading: a run of a day at ten steps a second is made by the writer of tallies out of minutes that resemble each other;
its last minutes are recorded by processes and a drain, second by second, and each second the state of the run is taken
as the screen takes it (dpmon.model.run_analysis). "First" is the first picture after an attach, or of a playback.

All times are processor time, of this process alone. The yardstick tells how fast the machine was meanwhile; figures are
given as measured, and in brackets as on the reference, which the budgets are for.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from yardstick import Yardstick

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))


from dpmon.model.run_analysis import RunAnalysis, RunCaches, Selection  # noqa: E402
from dpmon.record.history_rows import Definition  # noqa: E402
from dpmon.record.record_types import CallRow, Event  # noqa: E402
from dpmon.record.schema import PHASES  # noqa: E402
from dpmon.run import proc  # noqa: E402
from dpmon.run.run_directory import RunInfo, write_info  # noqa: E402
from dpmon.store.history_writer import HistoryWriter, WriteBatch  # noqa: E402
from dpmon.store.ring_drain import RingDrain  # noqa: E402
from dpmon.store.store_opening import open_store  # noqa: E402
from dpmon.store.tally_keys import TallyKey  # noqa: E402
from dpmon.store.tally_tables import SecondOfSteps  # noqa: E402
from dpmon.store.time_accounting import ActivityInterval  # noqa: E402
from dpmon.supervise.start_supervisor import COLLECTION_THRESHOLD  # noqa: E402
from dpmon.ui.panels.panel_output import OutputView  # noqa: E402
from dpmon.ui.screen_data import ScreenData  # noqa: E402
from support.history_builders import StepFacts, quantities  # noqa: E402
from support.record_builders import TRAINING_FLAGS, call_row, consecutive_spans, step_row  # noqa: E402
from support.ring_writers import RowRing, use_row_rings  # noqa: E402
from support.screen_states import RUN_INFO, STYLE, paint_screen  # noqa: E402

SECOND = 1_000_000_000
DAY_S = 86_400
LOOKS = 20
"""Number of reads of the drain per second, as in the supervisor."""
PER_SECOND = 10
LIVE_S = 150
"""Seconds of the day that are recorded before the first query."""
WRITING = 3.0
"""Budget: per cent of a core, with the samplers."""
READING = {1: 5.0, 64: 30.0}
"""Budget: ms of a refresh, by processes."""
SPANS = {"2 min": 120, "10 min": 600, "1 h": 3600, "24 h": DAY_S, "the whole run": 0}


def info_of(directory: Path) -> RunInfo:
    """Return a run that began at clock 0."""
    own: dict[str, Any] = {"supervisor_pid": os.getpid(), "supervisor_started": proc.start_time_s(os.getpid())}
    info = RunInfo("id", "bench", ("x.py",), "x.py", "/", None, 1e9, 0, proc.boot_id(), True, **own)
    write_info(directory, info)
    return info


# ------------------------------------------------------------------------------------------------ writing


class Process:
    """Writes calls and steps into its own ring of rows, as an assembler makes them."""

    def __init__(self, directory: Path, number: int, ranks: int, replicas: int) -> None:
        rank = number if ranks > 1 else None
        self.ring = RowRing(directory / f"process-{number}.ring", 8000)
        self._replicas = replicas
        self._chance = random.Random(number)
        self._step = 0
        pid = 100_000 + number
        self.ring.write(Event("process", {"process": number, "rank": rank, "pid": pid, "t_s": 0.0}))
        devices = [f"cpu:{index}" for index in range(max(replicas, 1))]
        via = "DataParallel" if replicas else None
        layout: dict[str, Any] = {
            "root": "Model",
            "via": via,
            "devices": devices,
            "absent": {},
        }
        self.ring.write(Definition(1, layout))
        for which, rows in ((2, 64), (3, 8), (4, 8)):
            self.ring.write(Definition(which, [["0", [rows, 5], "float32", 20 * rows]]))

    def step(self, start: int, wall: int) -> None:
        """Write a call and a step."""
        self._step += 1
        wobble = self._chance.gauss(1, 0.05)
        call = int(wall * 0.5 * wobble)
        if self._replicas:
            call_phases = [0, call // 20, call // 20, call // 5, call // 4, call // 2, call * 9 // 10, call // 20]
            parts = [part for _ in range(self._replicas) for part in (3, 4, 1000, call // 3 + self._step % 1000)]
            row = call_row("dp", TRAINING_FLAGS, 1, self._step, start, call, 2, 4, call_phases, parts)
        else:
            row = CallRow(self._step, TRAINING_FLAGS, 1, start, call, 2, 4)
        phases = (wall // 50, call + call // 50, int(wall * 0.3 * wobble), wall // 50)
        mode = "dp" if self._replicas else "single"
        step = step_row(mode, self._step, start, wall, 64, phases, consecutive_spans(start, phases))
        self.ring.write(step._replace(calls=[row]))


def share(directory: Path, ranks: int, per_second: float, replicas: int, seconds: int) -> float:
    """Return the share of a core that the drain takes, per cent."""
    drain = RingDrain(directory, info_of(directory))
    processes = [Process(directory, number, ranks, replicas) for number in range(ranks)]
    took = 0.0
    period = SECOND / per_second
    due = 0
    for look in range(seconds * LOOKS):
        until = (look + 1) * SECOND // LOOKS
        while (start := int(due * period)) + int(period * 0.98) <= until:
            for process in processes:
                process.step(start, int(period * 0.98))
            due += 1
        began = time.process_time()
        while drain.poll(until / 1e9):
            pass
        if look >= LOOKS:  # do not measure its start
            took += time.process_time() - began
    drain.close()
    return took / (seconds - 1) * 100


def writing(seconds: int) -> None:
    """Print a table."""
    print("\nthe drain, per cent of a core")
    yardstick = Yardstick()
    for name, ranks, per_second, replicas in (
        ("1,000 records/s", 1, 500, 0),
        ("1,000 records/s again", 1, 500, 0),
        ("1,000 records/s, 8 replicas", 1, 500, 8),
        ("1,000 steps/s", 1, 1000, 0),
        ("64 ranks x 10 steps/s", 64, 10, 0),
        ("64 ranks x 10 steps/s again", 64, 10, 0),
        ("64 ranks x 10 steps/s, 8 replicas each", 64, 10, 8),
    ):
        with tempfile.TemporaryDirectory() as place:
            percent = share(Path(place), ranks, per_second, replicas, seconds)
        scaled = percent / yardstick.since()
        print(f"  {name:40} {percent:6.2f}  ({scaled:5.2f})  budget {WRITING:.0f}", flush=True)


# ------------------------------------------------------------------------------------------------ reading


def minute(chance: random.Random) -> list[StepFacts]:
    """Return steps of about 0.1 s for a minute."""
    found = []
    for _ in range(60 * PER_SECOND):
        parts = {"data": 0.02, "forward": 0.45, "backward": 0.4, "optimizer": 0.1, "other": 0.03}
        wall = {name: int(SECOND / PER_SECOND * 0.98 * part * chance.lognormvariate(0, 0.05))
                for name, part in parts.items()}  # fmt: skip
        phases = [wall.get(phase.name) for phase in PHASES]
        call = [("replica 1 0", int(wall["forward"] * 0.95))]
        found.append(StepFacts(1, sum(wall.values()), quantities(samples=64), phases, wall["forward"], 1, {}, call))
    return found


def a_day(directory: Path, ranks: int) -> None:
    """Write tallies and times of a day up to LIVE_S before its end; a second each in its last quarter of an hour.

    Before that, a minute's steps are written as if all had ended in its first second, and of 64 ranks every fifth.
    """
    chance = random.Random(1)
    minutes = [minute(chance) for _ in range(8)]
    history = HistoryWriter.open(directory, {"run": "id"}, 1 << 40)
    for at in range(0, DAY_S - LIVE_S, 60):
        fine = at >= DAY_S - 900
        width = 1 if fine else 60
        batch = WriteBatch()
        for second in range(at, min(at + 60, DAY_S - LIVE_S), width):
            for process in range(ranks):
                source = minutes[(second // 60 + process) % len(minutes)]
                first = (second * 7 + process) % (len(source) - PER_SECOND)
                steps = source[first : first + PER_SECOND] if fine else source[:: 1 if ranks == 1 else 5]
                begin, end = second * SECOND, (second + width) * SECOND
                key = TallyKey(process, "single", 0, 64)
                rows = [step.row(begin, key) for step in steps]
                series = [one for step in steps for one in step.series]
                batch.steps_by_tally[second, key] = SecondOfSteps(rows, series)
                middle = begin + (end - begin) * 98 // 100
                spent = (
                    ActivityInterval("training", "single", begin, middle),
                    ActivityInterval("between", "single", middle, end),
                )
                batch.add_activity_time(process, spent)
        history.write(batch)
    history.close()


class Live:
    """A live run after a day, recorded second by second."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory = directory
        info = info_of(directory)
        a_day(directory, ranks)
        self._processes = [Process(directory, number, ranks, 0) for number in range(ranks)]
        self._drain = RingDrain(directory, info, 1 << 40)
        self._second = DAY_S - LIVE_S
        for _ in range(LIVE_S):
            self.go_on()

    def go_on(self) -> None:
        """Record another second."""
        for part in range(PER_SECOND):
            start = self._second * SECOND + part * SECOND // PER_SECOND
            for process in self._processes:
                process.step(start, int(SECOND * 0.98) // PER_SECOND)
        self._second += 1
        self._drain.flush()

    def milliseconds(self, caches: RunCaches, selection: Selection, t_s: int | None = None) -> float:
        """Return the processor time of drawing its state, ms."""
        began = time.process_time()
        with open_store(self.directory) as store:
            state = RunAnalysis(store.as_of(None if t_s is None else t_s * SECOND), selection, caches=caches)
            paint_screen(ScreenData(state, state.newest_ns, RUN_INFO), OutputView(), 120, 40, STYLE)
        took = (time.process_time() - began) * 1e3
        assert state.representative is not None
        return took


def reading(refreshes: int) -> None:
    """Print a table."""
    print("\nthe facts and the drawing of a refresh, ms: median and longest")
    for ranks, budget in READING.items():
        with tempfile.TemporaryDirectory() as place:
            live = Live(Path(place), ranks)
            yardstick = Yardstick()
            for span, seconds in SPANS.items():
                selection, caches = Selection(seconds), RunCaches()
                first = live.milliseconds(caches, selection)
                took = []
                for _ in range(refreshes):
                    live.go_on()
                    took.append(live.milliseconds(caches, selection))
                back = live.milliseconds(RunCaches(), selection, DAY_S - LIVE_S // 2)
                middle, slower = statistics.median(took), yardstick.since()
                print(f"  {ranks:2} processes, {span:14} {middle:7.2f} {max(took):7.2f}  ({middle / slower:6.2f})"
                      f"  budget {budget:.0f};  first {first:7.2f}, in the past {back:7.2f}", flush=True)  # fmt: skip


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="of the run's clock, in each case of writing")
    parser.add_argument("--refreshes", type=int, default=15, help="number of refreshes of each kind")
    parser.add_argument("--only", nargs="*", choices=("writing", "reading"), default=("writing", "reading"))
    options = parser.parse_args()
    use_row_rings(pytest.MonkeyPatch())
    gc.set_threshold(COLLECTION_THRESHOLD)
    print(Yardstick().state())
    if "writing" in options.only:
        writing(options.seconds)
    if "reading" in options.only:
        reading(options.refreshes)


if __name__ == "__main__":
    main()
