"""Every second belongs to one activity. Random loops are accounted for exactly, however late waits are reported."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dpmon.record.record_types import Event
from dpmon.record.schema import EVALUATION, TRAINING
from dpmon.store import time_accounting
from dpmon.store.step_stats import StatsWindow, account_for_elapsed
from dpmon.store.steps import read_longest_steps
from dpmon.store.store_opening import open_store
from dpmon.store.time_accounting import ActivityInterval, TimeAccount
from support.history_builders import account_step, write_run_directory
from support.record_builders import Training, step_row

MS = 1_000_000
SECOND = 1000 * MS


class Stretch(NamedTuple):
    """The true activity from `begin` to `end`."""

    begin: int
    end: int
    activity: str
    mode: str


class Loop:
    """A random loop of one process, and its true account."""

    def __init__(self, seed: int, *, least_ns: int = 25 * MS, losses: bool = True) -> None:
        self.chance = random.Random(seed)
        self.least = least_ns
        self.losses = losses
        self.now = self.begin = self.chance.randrange(3 * SECOND)
        self.account = TimeAccount(self.begin)
        self.truth: list[Stretch] = []
        self.spent: list[ActivityInterval] = []
        self.numbers = {False: 0, True: 0}
        """Number of the last step, by whether it is an evaluation."""
        self.evaluation: bool | None = None
        self.mode = "dp"
        self.late: list[tuple[int, int]] = []
        """Waits not reported yet."""

    def some(self, most_ns: int = SECOND) -> int:
        """Return a random duration that is long enough for a late wait."""
        return self.least + self.chance.randrange(most_ns)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            for wait in [wait for wait in self.late if self.chance.random() < 0.3]:
                self.late.remove(wait)
                self.spent += self.account.add_input_wait(*wait)
        for wait in self.late:
            self.spent += self.account.add_input_wait(*wait)
        self.spent += self.account.finish(self.now)

    def step(self) -> None:
        """Write the time before a step, and the step."""
        evaluation = self.chance.random() < 0.4
        mode = "single" if self.chance.random() < 0.1 else self.mode
        missed = self.losses and self.evaluation is not None and self.chance.random() < 0.1
        self.numbers[evaluation] += self.chance.randrange(2, 9) if missed else 1
        if self.evaluation is None:
            activity = "startup"
        elif missed:
            activity = "missed"
        else:
            activity = "evaluation" if evaluation else "between"
        begin = self.now
        for _ in range(self.chance.choice((0, 1, 1, 2, 3))):
            what = self.chance.choice(("work", "work", "pause", "wait"))
            if what == "pause":
                self.pause(mode)
            elif what == "wait":
                self.wait(activity, mode)
            else:
                self.stretch(activity, mode, self.some())
        if self.chance.random() < 0.1:  # a pause up to the step; its end is not recorded
            self.account.note_pause(True, self.now, None)
            self.stretch("paused", mode, self.some())
        start = self.now
        inside = "evaluation" if evaluation else "training"
        for _ in range(self.chance.choice((1, 1, 1, 3))):
            self.stretch(inside, mode, self.some())
            if self.chance.random() < 0.15:
                self.wait(inside, mode)
        spent, gap, _ = self.account.add_step(
            *account_step(self.numbers[evaluation], mode, start, self.now - start, evaluation)
        )
        self.spent += spent
        if gap is not None:
            assert (gap.begin_ns, gap.end_ns, gap.after_step) == (begin, start, self.numbers[False] - (not evaluation))
            assert activity == "between"
        self.evaluation, self.mode = evaluation, mode

    def stretch(self, activity: str, mode: str, took: int) -> None:
        self.truth.append(Stretch(self.now, self.now + took, activity, mode))
        self.now += took

    def pause(self, mode: str) -> None:
        begin = self.now
        self.account.note_pause(True, begin, None)
        self.stretch("paused", mode, self.some())
        took = self.chance.choice((None, self.now - begin))
        self.account.note_pause(False, self.now, took)

    def wait(self, activity: str, mode: str) -> None:
        """Add a wait for input within another activity; it is reported immediately or later."""
        self.stretch(activity, mode, self.some())
        begin = self.now
        self.stretch("input", mode, self.some())
        self.stretch(activity, mode, self.some())
        wait = begin, self.truth[-2].end
        if self.chance.random() < 0.5:
            self.spent += self.account.add_input_wait(*wait)
        else:
            self.late.append(wait)


def sums(spent: Iterable[ActivityInterval]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for one in spent:
        found[one.activity, one.mode] += one.sign * (one.end - one.begin)
        assert one.end > one.begin
    return +found


@pytest.mark.parametrize("seed", range(60))
def test_random_loops_are_accounted_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_accounting, "_SLOW_RATIO", 1 << 62)
    loop = Loop(seed)
    loop.run(40)
    truth: Counter[tuple[str, str]] = Counter()
    for stretch in loop.truth:
        truth[stretch.activity, stretch.mode] += stretch.end - stretch.begin
    assert sums(loop.spent) == +truth
    assert sum(sums(loop.spent).values()) == loop.now - loop.begin


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_reported_the_time_adds_up(seed: int) -> None:
    """With any durations, and waits outside of any activity, reported twice, or over many steps."""
    chance = random.Random(seed)
    loop = Loop(seed, least_ns=1)
    for _ in range(200):
        loop.step()
        if chance.random() < 0.3:
            begin = loop.now + chance.randrange(-5 * SECOND, 2 * SECOND)
            wait = begin, begin + chance.randrange(4 * SECOND)
            for _ in range(chance.randrange(3)):
                loop.spent += loop.account.add_input_wait(*wait)
        if chance.random() < 0.1:
            loop.account.note_pause(chance.random() < 0.5, loop.now + chance.randrange(-SECOND, SECOND), None)
    loop.run(0)
    found = sums(loop.spent)
    assert sum(found.values()) == loop.now - loop.begin
    total: Counter[tuple[str, str]] = Counter()
    for one in loop.spent:
        total[one.activity, one.mode] += one.sign * (one.end - one.begin)
    assert min(total.values()) >= 0


@pytest.mark.parametrize("told", range(4))
def test_a_wait_across_several_steps(told: int) -> None:
    """It begins in the first step and ends in the third; it is reported before, between or after them."""
    account, wait, spent = TimeAccount(), (SECOND + 20 * MS, SECOND + 330 * MS), []
    for number in range(1, 4):
        if told == number - 1:
            spent += account.add_input_wait(*wait)
        spent += account.add_step(*account_step(number, "dp", SECOND + (number - 1) * 150 * MS, 100 * MS, False))[0]
    if told == 3:
        spent += account.add_input_wait(*wait)
    assert sums(spent) == {("startup", "dp"): SECOND, ("training", "dp"): 90 * MS, ("input", "dp"): 310 * MS}


def test_after_the_last_step_only_pauses_count() -> None:
    account = TimeAccount(SECOND)
    account.note_pause(True, 2 * SECOND, None)
    assert sums(account.finish(3 * SECOND)) == {("paused", ""): SECOND}


def stalled_steps(account: TimeAccount, *steps: tuple[int, int]) -> list[ActivityInterval]:
    """Add steps (start, duration in s) that the account may leave out."""
    spent: list[ActivityInterval] = []
    for number, (start, wall) in enumerate(steps, 1):
        spent += account.add_step(*account_step(number, "dp", start * SECOND, wall * SECOND, False))[0]
    return spent


@pytest.mark.parametrize(
    ("noticed", "spent"),
    [
        (13, {"startup": 1, "stalled": 20, "training": 20, "between": 4}),  # in the first step
        (31, {"startup": 1, "stalled": 20, "training": 20, "between": 4}),  # in the second one
        (23, {"startup": 1, "stalled": 4, "training": 40}),  # between them
        (46, {"startup": 1, "training": 40, "between": 4}),  # in none: it was noticed after the last step
    ],
)
def test_a_stall_takes_the_whole_step_or_gap_in_which_it_was_noticed(noticed: int, spent: dict[str, int]) -> None:
    since = max(end for end in (1, 21, 25, 45) if end <= noticed)
    account = TimeAccount(0, 0, [(since * SECOND, noticed * SECOND)])
    found = stalled_steps(account, (1, 20), (25, 20))
    assert sums(found) == {(name, "dp"): seconds * SECOND for name, seconds in spent.items()}


def test_no_figure_has_the_step_in_which_the_run_stalled(state: Path) -> None:
    """The stall is noticed in step 30, by two records; step 31 begins before its end is recorded."""
    walls = [(20 + number % 7) * MS for number in range(60)]
    walls[29] = 40 * SECOND
    starts = [2 * SECOND + sum(walls[:number]) for number in range(60)]
    body = (2 * MS, 5 * MS, 5 * MS, 1 * MS)
    steps = [step_row("dp", number + 1, starts[number], walls[number], 8, body) for number in range(60)]
    since = starts[29] + MS
    stall: dict[str, Any] = {"since_s": since / SECOND, "text": "rank 1 is stopped", "ranks": []}
    noted = [Event("stall", {**stall, "t_s": since / SECOND + after}) for after in (11, 12)]
    with open_store(write_run_directory({-1: noted, 0: steps})) as store:
        window = StatsWindow(store)
        found, rest = window.step_stats("dp"), walls[:29] + walls[30:]
        assert (found.steps, found.mean_ns) == (59, sum(rest) / 59)
        assert found.rate is not None
        assert found.rate.steps_per_s == pytest.approx(59 * SECOND / sum(rest))
        assert max(step.wall_ns for step in read_longest_steps(store, 5, "dp")) < 30 * MS
        assert (window.time_by_activity["stalled"], window.time_by_activity["training"]) == (walls[29], sum(rest))
        assert [(tally.steps, tally.last_step) for tally in window.left_out.values()] == [(1, 30)]
        assert window.step_intervals == {0: (starts[0], starts[59] + walls[59])}


@pytest.mark.parametrize("waits", [{}, {"sync": 20 * SECOND}])
def test_a_first_step_that_waits_long_is_start_up(state: Path, waits: dict[str, int]) -> None:
    """For its first batch, or for the first batch of another rank."""
    walls = [20 * SECOND + 30 * MS, *[(20 + number % 7) * MS for number in range(40)]]
    starts = [2 * SECOND + sum(walls[:number]) for number in range(41)]
    first = (5 * MS if waits else 20 * SECOND, 5 * MS, 5 * MS, 1 * MS)
    steps = [step_row("dp", 1, starts[0], walls[0], 8, first, (), **waits)]
    steps += [
        step_row("dp", number + 1, starts[number], walls[number], 8, (5 * MS,) * 3 + (MS,)) for number in range(1, 41)
    ]
    with open_store(write_run_directory({0: steps})) as store:
        window = StatsWindow(store)
        found = window.step_stats("dp")
        assert (found.steps, found.mean_ns) == (40, sum(walls[1:]) / 40)
        assert found.rate is not None
        assert found.rate.steps_per_s == pytest.approx(40 * SECOND / sum(walls[1:]))
        assert (window.time_by_activity["startup"], window.time_by_activity["training"]) == (
            2 * SECOND + walls[0],
            sum(walls[1:]),
        )


def test_steps_that_overlap_count_once() -> None:
    account = TimeAccount()
    spent = account.add_step(*account_step(1, "dp", SECOND, SECOND, False))[0]
    spent += account.add_step(*account_step(2, "dp", SECOND + 500 * MS, SECOND, False))[0]
    assert sums(spent) == {("startup", "dp"): SECOND, ("training", "dp"): 1500 * MS}


def spent_on(account: TimeAccount, evaluation: bool, *walls: int, begin: int, data_ns: int = 0) -> Counter[str]:
    """Add steps that follow each other from `begin` on (ms); return the ms of each activity."""
    found: Counter[str] = Counter()
    for wall in walls:
        number = account._last_steps.get(EVALUATION if evaluation else TRAINING, 0) + 1
        step, start_ns = account_step(number, "dp", begin * MS, wall * MS, evaluation)
        intervals, *_ = account.add_step(step._replace(phases={"data": data_ns}), start_ns)
        for interval in intervals:
            found[interval.activity] += interval.sign * (interval.end - interval.begin) // MS
        begin, data_ns = begin + wall, 0
    return +found


def test_what_the_first_steps_of_a_kind_take_longer_is_start_up() -> None:
    """A first compilation of 3 s, another one of 2 s for another shape, then a slow step later."""
    account = TimeAccount()
    training = spent_on(account, False, 3000, 2000, 50, 50, 60, 5000, begin=1000)
    assert training == {"startup": 1000 + 2950 + 1950, "training": 4 * 50 + 60 + 5000}
    evaluation = spent_on(account, True, 4000, 500, 500, 400, 500, 5000, begin=11_160)
    assert evaluation == {"startup": 3600, "evaluation": 4000 - 3600 + 1900 + 5000}


def test_steps_that_vary_or_wait_for_their_first_batch_are_no_start_up() -> None:
    account = TimeAccount()
    assert spent_on(account, False, 70, 50, 20, 30, begin=0) == {"training": 170}
    assert spent_on(account, True, 900, 30, 30, begin=170, data_ns=870 * MS) == {"evaluation": 960}


def test_the_time_before_a_step_belongs_to_its_kind() -> None:
    """900 ms before an evaluation, and 990 ms before the next training step."""
    account = TimeAccount()
    account.add_step(*account_step(1, "dp", 0, 100 * MS, False))
    spent, gap, _ = account.add_step(*account_step(1, "dp", SECOND, 10 * MS, True))
    assert (sums(spent), gap) == ({("evaluation", "dp"): 910 * MS}, None)
    spent, gap, _ = account.add_step(*account_step(2, "dp", 2 * SECOND, 100 * MS, False))
    assert sums(spent) == {("between", "dp"): 990 * MS, ("training", "dp"): 100 * MS}
    assert gap == (0, 1, "dp", SECOND + 10 * MS, 2 * SECOND, 990 * MS)


@pytest.mark.parametrize("has_ranks", [True, False])
def test_the_time_of_a_rank_after_its_last_step_is_the_end_of_the_run(state: Path, has_ranks: bool) -> None:
    """Two processes train, then one evaluates, and the run ends 1 s later. Only ranks are all there until then."""
    trainings = [Training(process=number, step_ns=100 * MS) for number in range(2)]
    rows = {training.process: [*training.begin(), *training.run(100)] for training in trainings}
    first, second = trainings
    rows[0] += [row for _ in range(60) for row in first.step(evaluates=True)]
    evaluation_ns, end_ns = first.now - second.now, first.now + SECOND
    with open_store(write_run_directory(rows)) as store:
        window = StatsWindow(store)
        window.ranks = {0: 0, 1: 1} if has_ranks else {}
        spent = account_for_elapsed(window.time_by_activity, end_ns, window.alive_intervals)
    ended_ns = evaluation_ns / 2 if has_ranks else 0
    # In the second in which the training ends, its time and that of the evaluation are not told apart exactly.
    assert spent["evaluation"] == pytest.approx(evaluation_ns - ended_ns, abs=SECOND // 2)
    assert spent["ending"] == pytest.approx(SECOND + ended_ns, abs=MS)
    assert sum(spent.values()) == pytest.approx(end_ns, abs=MS)
