"""Time ranges: how much of a history a panel draws."""

from __future__ import annotations

from dataclasses import replace

from situations import LOOK, rows_text, scene_of
from synthetic import SECOND, Training, host_event

from dpmon.ui.panels import panel_devices


def test_the_history_of_a_run_that_is_shorter_than_the_range_fills_the_chart() -> None:
    scene = scene_of(Training(), more=[host_event(float(second), cpu_pct=50.0) for second in range(90)])

    def cells(span_s: int, now_s: int = 90) -> int:
        shown = replace(scene, now_ns=now_s * SECOND, view=replace(scene.view, span_s=span_s))
        (row,) = [row for row in rows_text(panel_devices.devices(shown, 60, 8, LOOK)) if row.startswith("host cpu")]
        return len(row[9:40].split()[0])

    assert cells(0) == cells(120) == cells(600) >= 20
    assert cells(600, now_s=300) < cells(120, now_s=300), "samples are missing"
    assert [replace(scene, now_ns=now * SECOND).device_span_s for now in (5, 90, 500)] == [30, 90, 120]
