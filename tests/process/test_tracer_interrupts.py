"""Signals that come while the tracer's own code runs: the script notices what it would notice alone."""

from __future__ import annotations

import pytest
from tracing import Script, Traced, text_of


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Traced]:
    """A handler that calls a model, and one that raises, before every line of ours, one after the other."""
    place = tmp_path_factory.mktemp("interrupts")
    scripts = {how: Script(place, text_of("interrupting"), how) for how in ("calls", "raises")}
    return {how: script.end() for how, script in scripts.items()}


@pytest.mark.parametrize("kind", ["bare", "wrapped", "by hand"])
def test_an_interrupt_handler_that_calls_a_model(runs: dict[str, Traced], kind: str) -> None:
    """Losses are the same, nothing is waited for, nothing is raised."""
    lines, problems = runs["calls"].said[kind]
    assert lines > 40
    assert problems == []


@pytest.mark.parametrize("kind", ["bare", "wrapped", "by hand"])
def test_an_interrupt_handler_that_raises(runs: dict[str, Traced], kind: str) -> None:
    """The script gets its KeyboardInterrupt, every time, and may go on."""
    lines, problems = runs["raises"].said[kind]
    assert lines > 40
    assert problems == []


@pytest.mark.parametrize("how", ["calls", "raises"])
def test_an_interrupt_loses_at_most_a_few_records(runs: dict[str, Traced], how: str) -> None:
    """Whole records; those of the step that was disturbed may be lost, but of the two that follow it few are."""
    run = runs[how]
    assert run.complaints == []
    assert run.err == ""
    assert run.missed < 0.1 * len(run.calls())
    for kind, via in (("bare", None), ("wrapped", "DataParallel"), ("by hand", "data_parallel")):
        lines, _ = run.said[kind]
        assert len([call for call in run.calls("Linear") if call.via == via]) > 1.5 * lines
