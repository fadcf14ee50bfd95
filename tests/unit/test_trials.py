"""Which trials make sense for a run, and the command of each."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dpmon.cli.options import UsageError, parse
from dpmon.cli.trials import CACHED_BATCHES, Trial, TrialResult, _build_document, _with_one_rank, plan_trials
from dpmon.model.compared_run import STEP_METRICS
from dpmon.model.comparison_stats import Change
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_comparison import ComparedMetric
from dpmon.report.plain_text import text_lines
from support.history_builders import open_store_with
from support.rank_builders import record_ddp_ranks
from support.record_builders import Training

MS = 1e6


def names(trials: list[Trial]) -> list[str]:
    return [trial.name for trial in trials]


def test_a_run_under_dp_is_tried_with_cached_batches_and_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    training = Training(mode="dp")
    facts = RunAnalysis(open_store_with([*training.begin(), *training.run(60)]))
    trials, absent = plan_trials(facts, ("train.py",), "8")
    assert names(trials) == ["cached-batches", "single", "threads-1"], "8 threads are what it has"
    assert trials[0].variables == {"DPMON_REPLAY": str(CACHED_BATCHES)}
    assert trials[0].max_saving == pytest.approx(facts.modes[0].settled_stats.phase_share("data"))
    assert absent == {
        "one-rank": "no torchrun with --nproc-per-node and several ranks",
        "threads-8": "OMP_NUM_THREADS is 8",
    }
    assert names(plan_trials(facts, ("train.py",), None, [3])[0])[2:] == ["threads-1", "threads-3", "threads-8"]


def test_ranks_are_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    run, _ = record_ddp_ranks(4, slow=2, phase="data", steps=60)
    facts = RunAnalysis(run.store())
    trials, absent = plan_trials(facts, ("torchrun", "--nproc-per-node", "4", "train.py"), None)
    assert names(trials) == ["cached-batches", "one-rank", "threads-1", "threads-2"]
    assert trials[1].command == ("torchrun", "--nproc-per-node=1", "train.py")
    assert trials[0].max_saving is None
    assert set(absent) == {"single"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("torchrun --nproc_per_node=4 a.py 4", "torchrun --nproc_per_node=1 a.py 4"),
        ("launch --nproc-per-node gpu a.py", "launch --nproc-per-node=1 a.py"),
        ("python a.py", None),
    ],
)  # fmt: skip
def test_the_number_of_ranks_is_replaced(words: str, expected: str | None) -> None:
    assert _with_one_rank(words.split()) == (None if expected is None else tuple(expected.split()))


def test_a_result_says_what_came_and_what_was_promised() -> None:
    figure = next(figure for figure in STEP_METRICS if figure.name == "step")
    row = ComparedMetric(figure, ([10 * MS, 12 * MS], [5 * MS, 6 * MS]), Change(0.5))
    assert TrialResult(Trial("cached-batches", "the data", max_saving=0.4), row).table_cells == (
        "cached-batches", "step", "11.0 ms", "5.50 ms", "-50%", "40%",
    )  # fmt: skip
    slower = TrialResult(
        Trial("threads-1", "OMP_NUM_THREADS"), row._replace(change=Change(1.25, None, None, 1.19, 1.31))
    )
    assert slower.table_cells[4:] == ("+25%", "")
    assert slower.explanation == "threads-1 changes OMP_NUM_THREADS; step +19% to +31% (90%)", "a time, as in the table"
    unsure = TrialResult(Trial("threads-1", "OMP_NUM_THREADS"), row._replace(change=Change(1.02, 0.97, 1.06)))
    assert unsure.table_cells[4] == "~", "as in dpmon compare: the interval includes no change"
    assert TrialResult(Trial("single", "the devices"), None).table_cells == ("single", "–", "–", "–", "–", "")
    base = [SimpleNamespace(name="try-1-as-is-1", set_up={"script": "train.py", "ranks": None})]
    options = SimpleNamespace(rounds=2, steps=200)
    lines = text_lines(_build_document([slower], {"as-is": base}, {}, options))  # type: ignore[dict-item, arg-type]
    assert " ".join(" ".join(lines[:2]).split()).startswith(
        "trials of train.py (2 runs of up to 200 steps each, alternating): dpmon ls lists them"
    )
    assert "max. gain:" not in "\n".join(lines), "nothing is promised"
    told = TrialResult(Trial("cached-batches", "the data", max_saving=0.4), row)
    lines = text_lines(_build_document([told], {"as-is": base}, {}, options))  # type: ignore[dict-item, arg-type]
    assert "max. gain: the largest share of step time" in "\n".join(lines)


def test_the_words_after_the_script_are_the_scripts() -> None:
    command, options = parse(["try", "--steps", "50", "--only", "single", "train.py", "--steps", "7"])
    assert (command, options.steps, options.only, options.words) == (
        "try",
        50,
        ["single"],
        ["train.py", "--steps", "7"],
    )
    for wrong in (
        ["try"],
        ["try", "--steps", "0", "a.py"],
        ["try", "--rounds", "x", "a.py"],
        ["try", "--only", "cached-batchs", "a.py"],
    ):
        with pytest.raises(UsageError):
            parse(wrong)
