"""Long runs: a ring that wraps around, repeated definitions, no object kept alive."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest

from dpmon.record.record_types import Call, Record, Step
from support.record_builders import RowReader
from support.script_simulator import check_numbers
from support.tracer_harness import ScriptRing, TracedRun, TracedScript, traced_script_text

pytestmark = pytest.mark.slow

CALLS = 57_000


@pytest.fixture(scope="module")
def tailed(tmp_path_factory: pytest.TempPathFactory) -> tuple[TracedRun, list[Record], ScriptRing]:
    """A run, all that a concurrent reader read, and that reader."""
    place = tmp_path_factory.mktemp("long")
    (place / "read").write_text("0")
    script = TracedScript(place, traced_script_text("long"))
    reader = script.ring()
    until = time.monotonic() + 250
    resolver = RowReader(0)
    found: list[Record] = []
    over = False
    while not over and time.monotonic() < until:
        over = script.process.poll() is not None
        while rows := reader.read():
            found += [record for row in rows for record in resolver.records(row)]
            calls = next((record.call for record in reversed(found) if isinstance(record, Call)), 0)
            (place / "new").write_text(str(calls))
            (place / "new").replace(place / "read")
        time.sleep(0.005)
    return script.end(), found, reader


def test_a_reader_that_reads_along_sees_everything(tailed: tuple[TracedRun, list[Record], ScriptRing]) -> None:
    run, found, reader = tailed
    assert run.status == 0, run.err
    assert reader.missed() == 0
    assert reader.laps() > 1  # it has wrapped around
    calls = [record for record in found if isinstance(record, Call) and record.root == "Model"]
    steps = [record for record in found if isinstance(record, Step)]
    assert [call.call for call in calls] == list(range(1, CALLS + 1))
    assert [call.rows for call in calls] == [*range(17_000), *[3] * 40_000]
    check_numbers(steps)
    # Nothing ends the last step, so later calls of the script belong to it.
    assert [step.samples for step in steps[: CALLS - 1]] == [call.rows for call in calls[:-1]]


def test_a_reader_that_comes_late_finds_what_it_needs(tailed: tuple[TracedRun, list[Record], ScriptRing]) -> None:
    """Definitions are never overwritten, so everything still in the ring can be decoded."""
    run, found, _ = tailed
    assert run.unreadable == ()
    assert run.missed > 0, "the ring went round"
    calls = [record for record in run.records if isinstance(record, Call) and record.root == "Model"]
    assert len(calls) > 10_000
    seen = [record for record in found if isinstance(record, Call) and record.root == "Model"][-len(calls) + 1 :]
    assert [call.inputs for call in calls[1:]] == [call.inputs for call in seen]


def test_no_object_of_the_script_is_kept_alive(tailed: tuple[TracedRun, list[Record], ScriptRing]) -> None:
    """Tensors and models are freed when the script drops them."""
    run, _, _ = tailed
    assert run.printed
    for soon, late in run.printed.values():
        assert soon
        assert all(soon)
        assert late
        assert all(late)


def test_the_current_phase_of_the_training_is_known(tmp_path: Path) -> None:
    """Another process reads it in every phase of a bare and of a wrapped model."""
    script = TracedScript(tmp_path, traced_script_text("activities"), replicas=1)
    seen: Counter[str] = Counter()
    where = last = script.line()
    assert where == "forward"  # the first call: the ring exists and has its phase
    while where:
        reader = script.ring()
        what, since = reader.activity()
        reader.close()
        if where == "other":  # the last phase stays until another one begins
            assert what in ("other", last)
        else:
            assert what == where
            last = where
        assert script.start_ns < since <= time.monotonic_ns()
        seen[where] += 1
        script.go_on()
        where = script.line()
    run = script.end()
    assert run.status == 0, run.err
    assert seen == {"forward": 6, "other": 18, "data": 4, "backward": 4, "optimizer": 4}
    reader = script.ring()
    assert reader.activity()[0] == "ended"
    reader.close()
