"""Epochs from the loops over loaders, the time left in an epoch, and their words."""

from __future__ import annotations

import json
import random
import sqlite3
from pathlib import Path

import pytest

from dpmon.cli.main import main
from dpmon.cli.status_stream import ProgressReporter
from dpmon.model.epoch_progress import ALONE_STEPS, Epoch, Progress, format_progress
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Batches, Event, Step
from dpmon.run.run_reader import RunReader
from dpmon.store.history_writer import HistoryWriter, WriteBatch
from dpmon.store.loops import MAX_DATASETS, LoaderLoop, LoaderLoopTracker, estimate_time_left, read_loops
from dpmon.store.steps import StepRow
from dpmon.supervise.prometheus_file import PrometheusFile
from support.history_builders import Recording, snapshot_of_rows, write_run_directory
from support.record_builders import Training, pause_event

SECOND = 1_000_000_000


class Process:
    """The loops of a process; each of its steps takes a second."""

    def __init__(self, known: LoaderLoopTracker | None = None) -> None:
        self.loops = known or LoaderLoopTracker(0)
        self.rows: dict[int, LoaderLoop] = {}
        self.number = 0
        self.loop = 0

    def start(self, length: int | None, dataset: int = 1) -> int:
        """Start a loader; return the number of the loop."""
        self.loop += 1
        self.rows[self.loop] = LoaderLoop(0, self.loop, dataset, length, 0)
        return self.loop

    def step(self, loop: int | None, fetched: int = 1, *, evaluation: bool = False, over: bool = False) -> int | None:
        """Add a step with batches of a loop; return how many batches of it are used."""
        self.number += 1
        batches = None
        if loop is not None:
            batches = Batches(loop, self.rows[loop].dataset, self.rows[loop].length, fetched, over or not fetched)
        begin = self.number * SECOND
        found = self.loops.add_step(self.number, batches, begin, begin + SECOND, evaluation, SECOND * evaluation)
        self.rows.update(self.loops.changed)
        self.loops.changed.clear()
        return None if found is None else found.batches_used

    def read(self, length: int, dataset: int = 1, *, evaluation: bool = False) -> list[int | None]:
        """Loop over a loader to its end; return the batches used after each step."""
        loop = self.start(length, dataset)
        return [self.step(loop, evaluation=evaluation) for _ in range(length)]

    def resumed(self) -> Process:
        """Return the process with the loops of another supervisor, which goes on."""
        after = Process(LoaderLoopTracker(0))
        after.loops.resume(self.rows.values())
        after.rows, after.number, after.loop = self.rows, self.number, self.loop
        return after

    @property
    def epochs(self) -> list[tuple[int, int]]:
        """Loop and number of each epoch."""
        return [(number, row.epoch) for number, row in self.rows.items() if row.epoch is not None]


def test_each_loop_that_trains_is_an_epoch_and_evaluations_belong_to_the_epoch_before() -> None:
    process = Process()
    process.read(3, 2, evaluation=True)  # a sanity check
    assert process.read(4) == [1, 2, 3, 4]
    process.read(3, 2, evaluation=True)
    train = process.start(6)
    assert [process.step(train) for _ in range(3)] == [1, 2, 3]
    process.read(2, 2, evaluation=True)
    assert [process.step(train) for _ in range(3)] == [4, 5, 6]
    assert process.epochs == [(2, 1), (4, 2)]
    first, second = process.rows[2], process.rows[4]
    assert (first.evaluation_ns, first.after_ns) == (0, 3 * SECOND)
    assert (second.evaluation_ns, second.after_ns) == (2 * SECOND, 0)
    assert (second.end_ns - second.begin_ns, second.trained) == (8 * SECOND, 6)


@pytest.mark.parametrize("loaders", [2, 20])
def test_an_epoch_goes_on_however_many_evaluations_it_has(loaders: int) -> None:
    process = Process()
    train = process.start(1000)
    for evaluations in range(12):  # as minGPT does, which evaluates two splits every 500 iterations
        assert [process.step(train) for _ in range(3)] == [3 * evaluations + number for number in (1, 2, 3)]
        for _ in range(loaders):
            process.read(2, 2, evaluation=True)
        process = process.resumed()
    assert process.step(train) == 37
    assert process.epochs == [(1, 1)]


@pytest.mark.parametrize("begun", [False, True], ids=["one supervisor", "another supervisor goes on"])
def test_epochs_over_a_new_dataset_each_have_one_sequence(begun: bool) -> None:
    process = Process()
    for dataset, length in ((1, 4), (3, 6), (5, 2), (7, 8)):
        process.read(length, dataset)
        process.read(2, 2, evaluation=True)
        if begun:
            process = process.resumed()
    assert [epoch for _, epoch in process.epochs] == [1, 2, 3, 4]


def test_a_script_that_makes_a_dataset_for_each_epoch_does_not_fill_the_memory() -> None:
    process = Process()
    for dataset in range(1, 400):
        loop = process.start(9, dataset)
        for fetched in (2, 1, 1):  # reads a batch ahead
            process.step(loop, fetched)
    assert process.epochs[-1] == (399, 399)
    assert len(process.loops._epochs) == len(process.loops._first_fetches) == MAX_DATASETS


def test_a_loader_that_gives_more_batches_than_its_length_has_none() -> None:
    process = Process()
    loop = process.start(2)
    assert [process.step(loop) for _ in range(3)] == [1, 2, 3]
    assert process.rows[loop].length is None


# ------------------------------------------------------------------------------------------------ time left


def steps(times: list[int], batches: int = 1) -> list[StepRow]:
    """Return steps that end after these times (ns), the newest first."""
    found, at = [], 0
    for number, took in enumerate(times, start=1):
        at += took
        start_ns, wall_ns = at - took // 2, took // 2
        found.append(StepRow(0, 0, number, "", start_ns, wall_ns, 0, 0, (), loop=1, loop_batch=number * batches))
    return found[::-1]


def test_equal_batches_have_no_uncertainty() -> None:
    assert estimate_time_left(steps([SECOND] * 9), 20) == (20 * SECOND, 0)
    assert estimate_time_left(steps([SECOND] * 9, batches=4), 20) == (5 * SECOND, 0)


def test_a_wait_that_returns_counts_and_an_evaluation_in_the_middle_does_not() -> None:
    for times in ([1, 1, 1, 5] * 32, [*[1] * 19, 21] * 12):  # the second: in some blocks only
        found = estimate_time_left(steps([took * SECOND for took in times]), 40)
        assert found is not None
        assert found.left_ns == pytest.approx(80 * SECOND, rel=0.02)
    found = estimate_time_left(steps([*[SECOND] * 60, 500 * SECOND, *[SECOND] * 60]), 40)
    assert found == (40 * SECOND, 0)


def test_uneven_batches_make_the_time_uncertain() -> None:
    chance = random.Random(3)
    times = [int(chance.uniform(1, 3) * SECOND) for _ in range(250)]
    few, many = (estimate_time_left(steps(times[:count]), 100) for count in (8, 250))
    assert few is not None
    assert many is not None
    assert few.error_ns > many.error_ns > 0
    assert abs(many.left_ns - 200 * SECOND) < 3 * many.error_ns


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(), ""),
        (Progress(epoch=3, batch=412, batches=1563, left_ns=130 * SECOND, error_ns=SECOND),
         "epoch 3 · 412/1,563 · 2 min 10 s left in the epoch"),
        (Progress(epoch=3, batch=412, batches=1563, left_ns=130 * SECOND, error_ns=40 * SECOND),
         "epoch 3 · 412/1,563 · 2 min 10 s ± 40 s left in the epoch"),
        (Progress(epoch=1, batch=12), "epoch 1 · batch 12"),
        (Progress(epoch=1, batches=10), "epoch 1"),
        (Progress(epoch=12, batch=10, batches=10), "epoch 12 · 10/10"),
    ],
)  # fmt: skip
def test_the_words(progress: Progress, text: str) -> None:
    assert format_progress(progress) == text


# ------------------------------------------------------------------------------------------------ a run


class Run:
    """The rows of a process whose steps have batches."""

    def __init__(self) -> None:
        self.training = Training(step_ns=SECOND)
        self.rows: list[Row] = self.training.begin()
        self.loops = 0

    def steps(self, count: int, batches: Batches | None, *, evaluation: bool = False) -> Run:
        """Add steps."""
        for _ in range(count):
            for row in self.training.step(evaluates=evaluation):
                self.rows.append(row._replace(batches=batches) if isinstance(row, Step) else row)
        return self

    def read(
        self, count: int, length: int | None, dataset: int = 1, *, evaluation: bool = False, again: bool = False
    ) -> Run:
        """Add steps with batches of a loader; `again`: of the loop before the last one."""
        self.loops += not again
        return self.steps(count, Batches(self.loops - again, dataset, length, 1), evaluation=evaluation)

    def progress(self, t_ns: int | None = None, **wanted: bool) -> Progress:
        """Return the progress now, or at a time."""
        focus = snapshot_of_rows(self.rows, t_ns, **wanted).representative
        assert focus is not None
        return focus.progress

    @property
    def now(self) -> int:
        return self.training.now


def test_a_run_without_a_step_or_a_loader_has_no_progress() -> None:
    assert set(Run().progress().absent.values()) == {"no step has finished yet"}
    found = Run().steps(5, None).progress()
    assert set(found.absent.values()) == {"the newest step took no batch from a DataLoader on the training thread"}
    assert format_progress(found) == ""
    found = Run().read(5, 10, evaluation=True).progress()
    assert found.absent["epoch"] == "no step with a batch of a DataLoader has trained yet"
    run = Run()
    for _ in range(5):
        run.read(1, 10)
    assert run.progress().absent["epoch"] == "the script takes only one batch from each start of its DataLoader"


def test_the_progress_of_an_epoch_now_and_at_a_time() -> None:
    run = Run().read(20, 20)
    end = run.now
    found = run.read(3, 5, 2, evaluation=True).read(12, 20).progress()
    assert (found.epoch, found.batch, found.batches, found.at_ns) == (2, 12, 20, run.now)
    assert found.left_ns is not None
    assert found.error_ns is not None
    assert abs(found.left_ns - 8 * SECOND) < SECOND
    assert 0 < found.error_ns < SECOND
    first, second = found.epochs
    assert first == Epoch(1, 2 * SECOND, end, 20, 20, first.evaluation_ns, None, end - 2 * SECOND)
    assert (second.epoch, second.batches, second.pause_ns) == (2, 12, 0)
    assert first.evaluation_ns is not None
    assert first.evaluation_ns == pytest.approx(second.begin_ns - end, rel=0.01)
    before = run.progress(2 * SECOND + (end - 2 * SECOND) // 2)
    assert (before.epoch, before.batches) == (1, 20)
    assert before.batch is not None
    assert 8 <= before.batch <= 12
    assert before.left_ns == pytest.approx((20 - before.batch) * SECOND, rel=0.1)
    assert before.epochs == (
        first._replace(
            end_ns=before.at_ns, batches=before.batch, evaluation_ns=None, took_ns=before.at_ns - 2 * SECOND
        ),
    )
    assert run.progress(end + SECOND).absent["left_s"] == "the epoch has used all batches"


def test_a_pause_of_the_user_is_in_no_epochs_time() -> None:
    """One pause lies in the first epoch, one between the two; another process pauses, too."""
    run = Run().read(4, 10)
    for loop, steps in ((1, 6), (2, 10)):
        start_s = run.now / SECOND
        run.rows += [pause_event(start_s, 1), pause_event(start_s + 600, 1, 600.0)]
        run.rows += [pause_event(start_s, 1, process=5), pause_event(start_s + 7, 1, 7.0, process=5)]
        run.training.now += 600 * SECOND
        run.steps(steps, Batches(loop, 1, 10, 1))
    first, second = run.progress().epochs
    assert first.end_ns - first.begin_ns == pytest.approx(610 * SECOND, rel=0.01)
    assert [first.took_ns, second.took_ns] == [pytest.approx(10 * SECOND, rel=0.05)] * 2
    assert second.pause_ns is not None
    assert second.pause_ns < SECOND / 2


def test_the_progress_in_an_evaluation_is_that_of_the_epoch() -> None:
    run = Run().read(12, 20).read(3, 5, 2, evaluation=True)
    during, found = run.progress(), run.read(2, 20, again=True).progress()
    assert (during.epoch, during.batch) == (1, 12)
    assert (during.evaluated, during.evaluated_of) == (3, 5), "those of the evaluation's own loader"
    assert (found.evaluated, found.evaluated_of) == (None, None)
    assert (found.epoch, found.batch) == (1, 14)
    assert during.left_ns == pytest.approx(8 * SECOND, rel=0.1)
    assert run.progress(during.at_ns + SECOND).batch == 12


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (Run().read(3, 20), "too few batches yet"),
        (Run().read(8, None), "the length of the loader is unknown"),
        (Run().read(8, 10**9), "more than 100 days"),
        (Run().read(8, 20).read(6, 20), "the previous epoch ended after 8 of 20 batches"),
    ],
)
def test_the_time_left_is_unknown_with_a_reason(run: Run, why: str) -> None:
    found = run.progress()
    assert (found.left_ns, found.error_ns) == (None, None)
    assert found.absent["left_s"] == found.absent["error_s"] == why
    assert run.progress(over=True).absent["left_s"] == "the run has ended"


def test_the_reason_for_an_unknown_length_is_that_of_the_loader() -> None:
    run = Run().read(8, None)
    assert run.progress().absent["batches"] == "the loader does not tell its length, or gave more batches"
    run.rows.append(Event("loader", {"process": 0, "t_s": 1.0, "dataset": 1, "absent": {"batches": "it raised"}}))
    assert run.progress().absent["batches"] == "it raised"


def test_a_training_that_goes_on_without_the_loader_has_left_its_epoch() -> None:
    run = Run().read(20, 20).steps(ALONE_STEPS, None)
    assert run.progress().epoch == 1
    found = run.steps(1, None).progress()
    assert found.absent["epoch"] == "the training continues without a batch of the loader"
    assert [one.epoch for one in found.epochs] == [1]


def test_each_rank_has_its_progress() -> None:
    recording = Recording()
    for rank in range(2):
        run = Run()
        run.training.process, run.training.rank = rank, rank
        recording.add(run.read(6 + rank, 20).rows, rank, rank)
    found = recording.state().processes
    assert [found[rank].progress.batch for rank in range(2)] == [6, 7]
    assert found[1].progress.absent["left_s"] == "only the process that represents the run has it"


# ------------------------------------------------------------------------------------------------ places


def test_every_place_tells_the_same(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run().read(20, 20).read(3, 5, 2, evaluation=True).read(12, 20)
    directory = write_run_directory({0: run.rows}, status=None)
    progress = run.progress()
    said = format_progress(progress)
    assert said.startswith("epoch 2 · 12/20 · 8 s")

    metrics = PrometheusFile(directory / "it.prom", directory, print).build_text(None).splitlines()
    values = {line.split("{")[0]: line.split()[-1] for line in metrics if line.startswith("dpmon_epoch")}
    assert (values["dpmon_epoch"], values["dpmon_epoch_batch"], values["dpmon_epoch_batches"]) == ("2", "12", "20")
    assert progress.left_ns is not None
    assert float(values["dpmon_epoch_left_seconds"]) == progress.left_ns / 1e9

    assert said in ProgressReporter(RunReader(directory)).line()

    def told(*command: str) -> str:
        capsys.readouterr()
        main([*command, directory.name])
        return capsys.readouterr().out

    status = json.loads(told("status", "--json"))["progress"]  # the run is lost: nothing is left
    assert (status["text"], status["epoch"], status["left_s"]) == ("epoch 2 · 12/20", 2, None)
    assert "epoch 2 · 12/20" in told("status")
    report = json.loads(told("report", "--json"))
    assert [(one["epoch"], one["batches"], one["length"]) for one in report["epochs"]] == [(1, 20, 20), (2, 12, 20)]
    table = told("report")
    assert "took  evaluation  gap before" in table, "the time between steps, in TIME, is another one"
    at = table.index("EPOCHS")
    rows = [line.split()[:3] for line in table[at:].splitlines()[2:4]]
    assert rows == [["1", "00:00:02", "20"], ["2", "00:00:24", "12/20"]]
    steps = [json.loads(line) for line in told("export", "--kind", "step").splitlines()]
    assert [(one["loop"], one["batch"]) for one in steps[18:26]] == [
        (1, 19), (1, 20), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (3, 3),
    ]  # fmt: skip


def test_of_many_epochs_the_report_shows_the_first_and_the_last(
    state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run()
    for _ in range(30):
        run.read(2, 2)
    main(["report", write_run_directory({0: run.rows}).name])
    text = capsys.readouterr().out
    rows = [line.split()[0] for line in text[text.index("EPOCHS") :].splitlines()[2:15]]
    assert rows == ["1", "2", "3", "4", "5", "6", "…", "25", "26", "27", "28", "29", "30"]
    assert "18 epochs omitted" in text


def test_a_full_history_keeps_the_newest_loops_of_each_process() -> None:
    """A script may start a loader for every step."""
    history = HistoryWriter(sqlite3.connect(":memory:", isolation_level=None), {"run": "test", "start_ns": 0}, 1 << 16)
    numbers = [(0, number) for number in range(1, 10_021)] + [(1, 1), (1, 2)]
    history.write(WriteBatch(loops={key: LoaderLoop(*key, 1, 10, 0, ahead=0, epoch=1) for key in numbers}))
    assert [len(read_loops(history.connection, process)) for process in (0, 1)] == [10_000, 2]
    assert read_loops(history.connection, 0)[0].loop == 21
