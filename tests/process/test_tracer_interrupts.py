"""Signals during the tracer's code have the same effect on the script as without dpmon."""

from __future__ import annotations

import pytest

from support.tracer_harness import TracedRun, TracedScript, traced_script_text


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TracedRun]:
    """Handlers that call a model, or raise, before each line of the tracer."""
    place = tmp_path_factory.mktemp("interrupts")
    scripts = {how: TracedScript(place, traced_script_text("interrupting"), how) for how in ("calls", "raises")}
    return {how: script.end() for how, script in scripts.items()}


@pytest.mark.parametrize("kind", ["bare", "wrapped", "by hand"])
def test_an_interrupt_handler_that_calls_a_model(runs: dict[str, TracedRun], kind: str) -> None:
    """Losses are the same; nothing blocks and nothing is raised."""
    lines, problems = runs["calls"].printed[kind]
    assert lines > 40
    assert problems == []


@pytest.mark.parametrize("kind", ["bare", "wrapped", "by hand"])
def test_an_interrupt_handler_that_raises(runs: dict[str, TracedRun], kind: str) -> None:
    """The script gets KeyboardInterrupt every time, and can go on."""
    lines, problems = runs["raises"].printed[kind]
    assert lines > 40
    assert problems == []


@pytest.mark.parametrize(("how", "calls_per_line"), [("calls", 1.5), ("raises", 2.3)])
def test_an_interrupt_loses_at_most_a_few_records(runs: dict[str, TracedRun], how: str, calls_per_line: float) -> None:
    """Records are complete. Those of the interrupted step may be lost, but few of the next two steps."""
    run = runs[how]
    assert run.complaints == []
    assert run.err == ""
    assert run.missed < 0.1 * len(run.calls())
    for kind, via in (("bare", None), ("wrapped", "DataParallel"), ("by hand", "data_parallel")):
        lines, _ = run.printed[kind]
        calls = [call for call in run.calls() if call.via == via and call.root != "Other"]
        assert len(calls) > calls_per_line * lines
