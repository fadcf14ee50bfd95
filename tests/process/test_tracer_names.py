"""The script's names may have any length: records hold their beginning, and no record is dropped."""

from __future__ import annotations

from pathlib import Path

from support.tracer_harness import run_traced, traced_script_text

SHORT = "N" * 199 + "\u2026"


def test_names_of_a_megabyte_are_shortened(tmp_path: Path) -> None:
    run = run_traced(tmp_path, traced_script_text("named"))
    assert run.status == 1
    assert (run.missed, run.unreadable, run.warnings) == (0, (), ())
    calls = run.calls()
    assert [call.root for call in calls] == [*[SHORT] * 8, "Linear"]
    assert [call.via for call in calls[5:8]] == [SHORT] * 3
    assert {len(stage.parts) > 0 for call in calls[:3] for stage in call.stages or ()} == {True}
    first = calls[0].inputs
    assert first is not None
    assert first[1].path.endswith("\u2026")
    assert [size.path for size in first][-1] == "\u2026"
    assert calls[4].inputs is not None
    assert calls[4].inputs[0].path == "\u2026"  # more extents than fit into a record
    (process,) = run.events("process")
    assert len(process.data["argv"]) == 32
    assert process.data["argv"][1].endswith("\u2026")
    assert any(SHORT[:100] in text and "called directly" in text for text in run.complaints)
    assert all(len(text) < 5000 for text in run.complaints)
    assert (run.directory / "endings.log").stat().st_size < 5000
