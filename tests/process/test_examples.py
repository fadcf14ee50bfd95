"""The examples under dpmon without a screen, and their records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.baseline_comparison import ROOT, SideBySide, closest_baseline, records_of_kind
from support.run_harness import Dpmon

LINEAR = str(ROOT / "examples" / "linear.py")
TUTORIAL = str(ROOT / "examples" / "tutorial.py")
WEIGHED = Path(__file__).resolve().parent / "scripts" / "weighed.py"


@pytest.fixture
def place(dpmon: Dpmon) -> SideBySide:
    return SideBySide(dpmon)


def test_the_main_job(place: SideBySide) -> None:
    steps = 700  # an epoch is 667 batches, the last of 20 rows: its end is among them
    outcome = place.under(LINEAR, "--steps", steps, "--print-every", 100, fresh=True)  # in a fresh Python, as usual
    assert outcome.status == 0, outcome.stderr
    losses = [float(loss) for loss in re.findall(rb"step +\d+  loss ([\d.]+)", outcome.stdout)]
    assert len(losses) == 7
    assert losses[-1] < losses[0]
    assert outcome.stdout.decode().splitlines()[-1] == f"final loss {losses[-1]:.5f}"

    records = place.dpmon.records()
    calls, step_records = records_of_kind(records, "call"), records_of_kind(records, "step")
    assert [call["call"] for call in calls] == list(range(1, steps + 1))
    assert [each["step"] for each in step_records] == list(range(1, steps + 1))
    assert [call["step"] for call in calls] == list(range(1, steps + 1))
    assert [each["samples"] for each in step_records] == [30] * 666 + [20] + [30] * 33
    for call in calls:
        assert (call["root"], call["via"], call["mode"], call["virtual"]) == ("Model", "DataParallel", "dp", True)
        assert (call["training"], call["grad"]) == (True, True)
        assert set(call["phases"]) == {"scatter", "replicate", "parallel_apply", "gather"}
        assert len(call["replicas"]) == 2
    for each in step_records:
        assert set(each["phases"]) == {"data", "forward", "backward", "optimizer", "other"}
        assert all(took >= 0 for took in each["phases"].values())
        assert sum(each["phases"].values()) == pytest.approx(each["wall_ms"], rel=1e-6)
    (mode,) = records_of_kind(records, "mode")
    assert (mode["mode"], mode["virtual"], mode["requested_by"]) == ("dp", True, "start")
    assert "no GPU" in mode["reason"]
    (process,) = records_of_kind(records, "process")
    assert process["rank"] is None
    (dropped,) = records_of_kind(records, "dropped")
    assert dropped["count"] == 0
    (ended,) = records_of_kind(records, "exit")
    assert (ended["status"], ended["signal"]) == (0, None)
    hosts = records_of_kind(records, "host")
    assert hosts
    assert hosts[0]["gpu_absent"]
    assert records_of_kind(records, "warning") == []


def test_the_examples_are_deterministic_and_know_nothing_of_dpmon(place: SideBySide) -> None:
    words = [LINEAR, "--steps", 60, "--print-every", 20, "--seed"]
    first = place.alone(*words, 1, fresh=True)  # forks of one process have the same hashes of strings
    assert first.status == 0
    assert first == place.alone(*words, 1)
    for path in (LINEAR, TUTORIAL):
        assert "import dpmon" not in Path(path).read_text()


EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


@pytest.fixture(scope="module")
def weighed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All examples, each in a child of one script, with and without dpmon (--mode script): output and calls."""
    directory = tmp_path_factory.mktemp("weighed")
    (directory / "work").mkdir()
    dpmon = Dpmon(directory / "state", directory / "work")
    place = SideBySide(dpmon)
    words: list[str] = []
    for name in EXAMPLES:
        words += ["--", str(ROOT / "examples" / f"{name}.py")]
        if name != "tutorial":
            words += ["--steps", "30"]
        if name == "linear":
            words += ["--print-every", "10"]  # by default it prints at certain times

    def alone() -> dict[str, tuple[str, int, str]]:
        return parts(place.alone(WEIGHED, *words).stdout)

    first = alone()
    traced = place.under(WEIGHED, *words, options=("--mode", "script"))
    records = dpmon.records()
    dpmon.clean_up()
    return {"alone": first, "traced": parts(traced.stdout), "records": records, "again": alone}


def parts(out: bytes) -> dict[str, tuple[str, int, str]]:
    """Return, by example: its output, process id and exit status."""
    found = {}
    *texts, rest = re.split(r"(?m)^===== (.*)$\n", out.decode())
    assert rest == ""
    for said, end in zip(texts[::2], texts[1::2], strict=True):
        path, pid, status = end.split()
        found[Path(path).stem] = said, int(pid), status
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_mode_script_changes_no_bit_of_any_example(weighed: dict[str, Any], name: str) -> None:
    """Output, weights and the random state at the end are the same."""
    said, pid, status = weighed["traced"][name]
    assert status == "0"
    steps, _, digest = said.splitlines()[-1].rpartition(" steps, ")
    assert len(digest) == 64
    assert int(steps) == 0 if name == "tutorial" else int(steps) >= 30
    assert said == closest_baseline(said, weighed["alone"][name][0], lambda: weighed["again"]()[name][0])
    assert weighed["alone"][name][2] == "0"
    (process,) = [r["process"] for r in records_of_kind(weighed["records"], "process") if r["pid"] == pid]
    calls = [call for call in records_of_kind(weighed["records"], "call") if call["process"] == process]
    assert calls
    assert not any(call["virtual"] for call in calls)


def test_a_step_has_the_mode_of_the_dataparallel_inside_its_model(dpmon: Dpmon) -> None:
    """Nothing is refused, because the inner DataParallel can switch."""
    result = dpmon.run(*dpmon.warm(), "--replicas", "3", str(ROOT / "examples" / "nested.py"), "--steps", "10")
    assert result.status == 0, result.errors
    records = dpmon.records()
    assert {len(call["replicas"]) for call in records_of_kind(records, "call")} == {3}
    assert records_of_kind(records, "warning") == []
    assert [mode["refused"] for mode in records_of_kind(records, "mode")] == [None] * len(
        records_of_kind(records, "mode")
    )
    assert "10 steps, 20 calls" in result.errors
    assert " 0.00 samples/s" not in result.errors


@pytest.mark.parametrize("phase", ["data", "forward", "backward"])
def test_a_rank_can_be_made_slow(place: SideBySide, phase: str) -> None:
    """It is slow in one phase of every step, and in no other; its losses do not change."""
    words = str(ROOT / "examples" / "ddp.py"), "--steps", 8
    slow = place.under(*words, "--slow-rank", 0, "--slow-phase", phase, "--slow-ms", 40)
    assert (slow.status, slow.stdout) == (0, place.alone(*words).stdout)
    steps = records_of_kind(place.dpmon.records(), "step")
    assert len(steps) == 8
    assert all(step["phases"][phase] >= 40 for step in steps)
    for other in {"data", "forward", "backward"} - {phase}:
        assert min(step["phases"][other] for step in steps) < 20
