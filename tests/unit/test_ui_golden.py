"""Compares panels in named situations, text and styles of each cell, with golden pictures.

The pictures are in tests/golden. After an intended change, write them again and look at the difference:

    DPMON_GOLDEN=write pytest tests/unit/test_ui_golden.py
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from string import ascii_letters, digits
from typing import Any

import pytest

from dpmon.model.epoch_progress import Progress
from dpmon.model.findings.finding import Finding
from dpmon.record.history_rows import Row as RecordedRow
from dpmon.record.record_types import Event
from dpmon.ui.panel_view import to_ascii_row
from dpmon.ui.panels.panel_output import OutputView
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.screen_painter import paint_panel, panel_slots
from dpmon.ui.styled_rows import Row, plain_text
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_cursor import TimeCursor
from support.history_builders import snapshot_of_rows
from support.rank_builders import ManyNodes, record_ddp_ranks
from support.record_builders import SECOND, Training, flops_event, host_event, whole_device_event, with_flops
from support.screen_states import (
    MONO_ASCII,
    RUN_INFO,
    STYLE,
    TWO_FINDINGS,
    exit_info_of,
    loss_curve,
    played_at,
    progress_in_epochs,
    screen_after_stall,
    screen_ended_in_stall,
    screen_in_stall,
    screen_in_stall_playback,
    shown_process,
    with_process,
)

GOLDEN = Path(__file__).parent.parent / "golden"
PANELS = ("devices", "replicas", "batch", "compare", "progress")


def memory(training: Training, peaks: list[dict[str, Any]]) -> Event:
    return Event("memory", {"process": 0, "rank": None, "t_s": training.now / SECOND, "devices": peaks})


def starting() -> ScreenData:
    info = replace(RUN_INFO, options={"mode": "auto", "replicas": 2})
    return ScreenData(
        snapshot_of_rows([host_event(1.0)]),
        3 * SECOND,
        info,
        startup_stage=("importing torch", SECOND),
        is_command_alive=True,
    )


@lru_cache(maxsize=16)
def gpus(count: int, *, both: bool = False, replicas: int | None = None, batch: int = 60) -> ScreenData:
    """Return dp over GPUs with all fields known; `both`: after steps in single."""
    devices = [f"cuda:{i}" for i in range(replicas or count)]
    training = Training(devices=devices, virtual=False, batch=batch, features=(512, 10), step_ns=16_000_000)
    payloads = training.begin()
    peaks = [{"device": "cuda:0", "peak_bytes": 3 << 30}]
    if both:
        training.mode = "single"
        payloads = [*training.begin(), *training.run(2000)]
        payloads.append(memory(training, peaks))
        training.step_ns = 26_000_000
        payloads += training.switch("dp")
    payloads += training.run(1500 if len(devices) <= 8 else 200)
    if both:
        peaks = [*peaks, *({"device": d, "peak_bytes": 1 << 30} for d in devices[1:])]
        payloads.append(memory(training, peaks))
    payloads += samples(count, len(devices))
    return ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True, can_toggle=True)


def samples(count: int, ours: int, least_gib: int = 20) -> list[RecordedRow]:
    """Return the samples of GPUs, `ours` of them used by the run. They hold more each second."""
    return [
        whole_device_event(
            float(second),
            index,
            util_pct=40 + (second * 7 + index * 13) % 60,
            mem_used_bytes=(least_gib + second // 2 + index) << 30,
            mem_run_bytes=(least_gib - 5 + second // 2) << 30,
            power_w=300.0 + 3 * (second % 50),
            of_run=index < ours,
            throttle=["power cap"] if index == 1 else [],
        )
        for second in range(70)
        for index in range(count)
    ]


@lru_cache(maxsize=4)
def ranks(count: int) -> ScreenData:
    """Return ranks, one of them with long data waits."""
    recording, now = record_ddp_ranks(count, slow=min(5, count - 1), phase="data", steps=160)
    return ScreenData(recording.state(), now, RUN_INFO, is_command_alive=True)


@lru_cache(maxsize=4)
def nodes(count: int) -> ScreenData:
    """Return a run on nodes of eight ranks, one of them with long data waits; some nodes send nothing."""
    run = ManyNodes(count, slow=11).run(0, 30)
    run.silent = {count - 1}
    run.run(30, 42)
    run.node(count - 1, "cut", "the connection timed out", 35.0, heard_ns=30 * SECOND)
    run.node(3, "connected", heard_ns=37 * SECOND)
    run.node(5, "refused", "it has no dpmon", 1.0)
    now_ns = 42 * SECOND + SECOND // 4
    return ScreenData(run.state(), now_ns, RUN_INFO, is_command_alive=True)


def looked_back() -> ScreenData:
    """Return the recorded run at an earlier time, with the histories of its end."""
    now, then = recorded(1.0), recorded(0.8)
    cursor = TimeCursor(then.now_ns, now.now_ns, present_ns=now.now_ns + 3 * SECOND)
    state = then.state.with_histories(now.state)
    return replace(then, state=state, cursor=cursor, history_state=now.state)


def changing_ranks() -> ScreenData:
    """Return eight ranks on the full screen; another one becomes the slowest after half of the time."""
    recording, now = record_ddp_ranks(8, slow=2, steps=1000, then=(500, 5))
    state = recording.state()
    return ScreenData(state, now, RUN_INFO, View("replicas", "replicas"), is_command_alive=True)


@lru_cache(maxsize=1)
def _both_modes() -> tuple[RecordedRow, ...]:
    """Return a run on the CPU: 60 steps in dp, 90 in single, 40 in dp, in the order in which a screen reads them."""
    training = Training(devices=("cpu:0", "cpu:1", "cpu:2"), step_ns=1_400_000_000)
    rows = training.begin()
    for mode, steps in (("", 60), ("single", 90), ("dp", 40)):
        training.step_ns = 900_000_000 if mode == "single" else 1_400_000_000
        rows += training.switch(mode) if mode else []
        for _ in range(steps):
            rows += [*training.step(), host_event(training.now / SECOND, cpu=40.0 + training.steps * 7 % 50)]
            if training.steps == 3:
                rows.append(memory(training, [{"device": "cpu", "model_bytes": 4096, "gradients_bytes": 4096}]))
    return tuple(rows)


@lru_cache(maxsize=4)
def recorded(part: float, span_s: int = 120) -> ScreenData:
    """Return the recorded run after this part of it, with a time range."""
    rows = _both_modes()
    state = snapshot_of_rows(rows[: int(len(rows) * part)], span_s=span_s)
    return ScreenData(state, state.newest_ns, RUN_INFO, is_command_alive=True, can_toggle=True)


def one_device() -> ScreenData:
    """Return a script that never trained in dp."""
    training = Training(mode="single", devices=("cpu:0",), via=None)
    samples = [host_event(float(t), cpu_pct=40.0 + t * 7 % 50) for t in range(10)]
    return ScreenData(
        snapshot_of_rows([*training.begin(), *training.run(3000), *samples]),
        training.now,
        RUN_INFO,
        is_command_alive=True,
    )


def evaluated() -> ScreenData:
    """Return a script during an evaluation, after dp was refused for its model."""
    training = Training(mode="single", devices=("cpu:0",), via=None)
    payloads = [*training.begin(), *training.run(300)]
    payloads.append(training.mode_event("user", "a module compiled by torch.compile cannot be replicated"))
    payloads += [row for _ in range(20) for row in training.step(evaluates=True)]
    return ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True, can_toggle=True)


def learning(progress: Progress | None = None, **changes: Any) -> ScreenData:
    """Return a run with epochs and a loss that was NaN once."""
    return learned(recorded(0.3), progress, bad=20, **changes)


def learned(facts: ScreenData, progress: Progress | None = None, bad: int | None = None, **changes: Any) -> ScreenData:
    """Return the facts with epochs and a loss of each second."""
    facts, found = with_process(facts, progress=progress or progress_in_epochs()), loss_curve(bad=bad)
    begin_s = shown_process(facts).began_ns // SECOND
    points = tuple(point._replace(second=point.second + begin_s) for point in found.points)
    points = tuple(point for point in points if point.second <= facts.now_ns // SECOND)
    return replace(facts, state=facts.state.with_facts(losses=(replace(found, points=points),)), **changes)


def one_gpu() -> ScreenData:
    """Return a script that trains on one GPU, whose memory is almost full."""
    training = Training(mode="single", devices=("cuda:0",), via=None, virtual=False, step_ns=16_000_000)
    records = [*training.begin(), *training.run(4000), *samples(1, 1, 102)]
    return learned(ScreenData(snapshot_of_rows(records), training.now, RUN_INFO, is_command_alive=True))


def efficient() -> ScreenData:
    """Return a script that trains on one GPU, with counted FLOPs."""
    training = Training(mode="single", devices=("cuda:0",), via=None, virtual=False, step_ns=160_000_000)
    records = [*training.begin(), *with_flops(training.run(400), 60 * 10**12), flops_event(), *samples(1, 1)]
    return learned(ScreenData(snapshot_of_rows(records), training.now, RUN_INFO, is_command_alive=True))


@lru_cache(maxsize=2)
def ranks_on_gpus(count: int) -> ScreenData:
    """Return ranks on eight GPUs, after 26 s; another one becomes the slowest after half of the time."""
    recording, now = record_ddp_ranks(count, slow=2, phase="data", steps=12_000 // count, then=(6000 // count, 5))
    state = recording.state().with_facts(devices=gpus(8).state.devices)
    return learned(ScreenData(state, now, RUN_INFO, is_command_alive=True))


def stalled_on_gpus() -> ScreenData:
    """Return a stall of eight ranks on GPUs."""
    facts = screen_in_stall(8)
    return replace(facts, state=facts.state.with_facts(devices=gpus(8).state.devices))


def played_back() -> ScreenData:
    """Return the recorded run in a playback."""
    facts = learning()
    return replace(
        facts, is_command_alive=None, can_toggle=False, cursor=played_at(facts.now_ns, 285, is_playing=True, speed=4.0)
    )


def happened() -> ScreenData:
    """Return such a run after its end."""
    why = "RuntimeError: no such token: 17 (train.py:88)"
    over = exit_info_of(1, None, 107 * SECOND, cause=why)
    failed = Finding("failed", f"An exception ended the run: {why}.", "", "read the traceback at the end", 1.0)
    ended = {
        "exit_info": over,
        "is_command_alive": False,
        "can_toggle": False,
        "findings": (failed, *TWO_FINDINGS),
    }
    return learning(progress_in_epochs(left_ns=None, error_ns=None), **ended)


SCENES: dict[str, Callable[[], ScreenData]] = {
    "starting": starting,
    "single": one_gpu,
    "dp": lambda: learned(gpus(8)),
    "toggled": lambda: learned(gpus(2, both=True)),
    "ranks on GPUs": lambda: ranks_on_gpus(8),
    "many ranks": lambda: ranks_on_gpus(64),
    "stalled": stalled_on_gpus,
    "happened": happened,
    "playback": played_back,
}
"""Every scene of the screen, drawn in the two usual sizes."""
SIZES = ((80, 24), (120, 40))
LARGE = (("dp", 160, 50), ("ranks on GPUs", 160, 50), ("happened", 160, 50), ("many ranks", 200, 60))


SITUATIONS: dict[str, tuple[Callable[[], ScreenData], int, int, TerminalStyle]] = {
    **{f"{name} {w}x{h}": (make, w, h, STYLE) for name, make in SCENES.items() for w, h in SIZES},
    **{f"{name} {w}x{h}": (SCENES[name], w, h, STYLE) for name, w, h in LARGE},
    "toggled to single 120x40": (lambda: recorded(0.6), 120, 40, STYLE),
    "MFU 80x24": (efficient, 80, 24, STYLE),
    "MFU 120x40": (efficient, 120, 40, STYLE),
    "MFU 200x60": (efficient, 200, 60, STYLE),
    "one device 120x40": (one_device, 120, 40, STYLE),
    "one device 80x24": (one_device, 80, 24, STYLE),
    "comparison 80x24 zoomed": (
        lambda: replace(gpus(4, both=True), view=View("compare", "compare")), 80, 24, STYLE,
    ),
    "no GPU 120x40": (lambda: recorded(1.0), 120, 40, STYLE),
    "no GPU 80x24": (lambda: recorded(1.0), 80, 24, STYLE),
    "no GPU 120x40 ascii": (lambda: recorded(1.0), 120, 40, MONO_ASCII),
    "batch zoomed 120x40": (lambda: replace(recorded(1.0, 0), view=View("batch", "batch", range_s=0)), 120, 40, STYLE),
    "failed 120x40": (
        lambda: replace(recorded(0.3), exit_info=exit_info_of(1, None, 9 * SECOND), can_toggle=False),
        120, 40, STYLE,
    ),
    "16 GPUs 120x40": (lambda: gpus(16, replicas=8), 120, 40, STYLE),
    "devices zoomed 120x40": (lambda: replace(gpus(2), view=View("devices", "devices")), 120, 40, STYLE),
    "devices zoomed 80x24 ascii": (lambda: replace(gpus(2), view=View("devices", "devices")), 80, 24, MONO_ASCII),
    "progress 80x24 ascii": (learning, 80, 24, MONO_ASCII),
    "ranks 120x40": (lambda: ranks(4), 120, 40, STYLE),
    "ranks 80x24": (lambda: ranks(4), 80, 24, STYLE),
    "looked back 120x40": (looked_back, 120, 40, STYLE),
    "ranks over time 120x40": (changing_ranks, 120, 40, STYLE),
    "ranks over time 80x24 ascii": (changing_ranks, 80, 24, MONO_ASCII),
    **{
        f"nodes {count} {width}x{height}": (partial(nodes, count), width, height, STYLE)
        for count in (16, 125)
        for width, height in ((80, 24), (120, 40))
    },
    "nodes 16 80x24 ascii": (lambda: nodes(16), 80, 24, MONO_ASCII),
    "evaluated and refused 120x40": (evaluated, 120, 40, STYLE),
    **{
        f"stall of 2 {name} {width}x{height}": (partial(make, 2), width, height, STYLE)
        for name, make in (
            ("live", screen_in_stall),
            ("in playback", screen_in_stall_playback),
            ("at the end", screen_ended_in_stall),
        )
        for width, height in ((80, 24), (120, 40))
    },
    "stall of 2 live 80x24 ascii": (lambda: screen_in_stall(2), 80, 24, MONO_ASCII),
    "stall before 120x40": (screen_after_stall, 120, 40, STYLE),
}  # fmt: skip


def drawn(rows: list[Row], look: TerminalStyle, legend: dict[str, str]) -> list[str]:
    """Return the text of each row, and below it a letter per cell for its style (see `legend`)."""
    lines: list[str] = []
    for row in rows:
        shown = to_ascii_row(row) if look.is_ascii else row
        lines.append("|" + plain_text(shown) + "|")
        marks = ""
        for text, style in shown:
            marks += legend.setdefault(style, (ascii_letters + digits)[len(legend)]) * len(text)
        lines.append(" " + marks)
    return lines


def picture(name: str) -> str:
    make, width, height, look = SITUATIONS[name]
    facts = make()
    panels = (*PANELS, "status") if name.startswith((*SCENES, "stall", "progress", "nodes")) else PANELS
    slots = {panel: slot for panel, slot in panel_slots(facts, width, height).items() if panel in panels}
    legend: dict[str, str] = {}
    lines: list[str] = []
    for panel, slot in slots.items():
        rows = paint_panel(panel, facts, OutputView(), slot, look)
        lines += ["", f"{panel} {slot.width}x{slot.height}", *drawn(rows, look, legend)]
    styles = [f"{mark} {style or 'plain'}" for style, mark in legend.items()]
    return "\n".join([name, *lines, "", *styles, ""])


@pytest.mark.parametrize("name", list(SITUATIONS))
def test_each_situation_matches_its_golden_picture(name: str) -> None:
    path = GOLDEN / (name.replace(" ", "-") + ".txt")
    found = picture(name)
    if os.environ.get("DPMON_GOLDEN") == "write":
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")


def test_no_picture_is_left_of_a_situation_that_is_gone() -> None:
    named = {name.replace(" ", "-") + ".txt" for name in SITUATIONS}
    assert {path.name for path in GOLDEN.iterdir()} == named
