"""Situations of a run, and their pictures as text, for tests of the screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from joined import joined_ranks
from stored import state_of
from synthetic import SECOND, Training, device_event, host_event, whole_device_event
from timed import staged, trained

from dpmon.model.run_snapshot import Process, RunSnapshot
from dpmon.record.record_types import Event, Record
from dpmon.run.run_directory import ExitInfo, RunInfo
from dpmon.ui.panels.panel_output import OutputView
from dpmon.ui.screen_data import ModeRequest, ScreenData, View
from dpmon.ui.screen_painter import paint_screen
from dpmon.ui.styled_rows import plain_text
from dpmon.ui.terminal_style import ASCII, COLOR, MONO, UNICODE, TerminalStyle

LOOK = TerminalStyle(UNICODE, COLOR, True)


MONO_ASCII = TerminalStyle(ASCII, MONO, False)


INFO = RunInfo(
    id="20261120-141502-linear-7f3a", name="linear", command=(), script="examples/linear.py", cwd="/",
    python="/usr/bin/python3", started_unix=0.0, start_ns=SECOND, boot_id="", headless=False,
)  # fmt: skip


def exit_of(status: int | None, signal: str | None = None, at_ns: int = 9, **more: Any) -> ExitInfo:
    """Return how a run ended `at_ns` after its start."""
    return ExitInfo(status, signal, 0.0, at_ns, at_ns / 1e9, "supervisor", **more)


def facts_of(training: Training, steps: int = 300, more: Sequence[bytes | Record] = (), **changes: Any) -> ScreenData:
    payloads = [*training.begin(), *training.run(steps), *[host_event(float(i)) for i in range(30)], *more]
    state = state_of(payloads)
    facts = ScreenData(state, training.now + SECOND // 10, INFO, is_command_alive=True, can_toggle=True, can_type=True)
    return replace(facts, **changes)


def gpu_facts(count: int, **more: Any) -> ScreenData:
    training = Training(devices=[f"cuda:{i}" for i in range(2)], virtual=False)
    payloads = [*training.begin(), *training.run(20)]
    for index in range(count):
        payloads += [whole_device_event(float(t), index, util_pct=10 * index % 101, **more) for t in range(20)]
    return ScreenData(state_of(payloads), training.now, INFO, is_command_alive=True)


def focused(facts: ScreenData) -> Process:
    """Return the process that the facts shows."""
    process = facts.process
    assert process is not None
    return process


def with_process(facts: ScreenData, **changes: Any) -> ScreenData:
    """Return the facts with changes of the process that it shows."""
    process = replace(focused(facts), **changes)
    return replace(facts, state=replace(facts.state, processes={**facts.state.processes, process.process: process}))


def with_call(facts: ScreenData, **changes: Any) -> ScreenData:
    """Return the facts with changes of the last call."""
    process = focused(facts)
    key, track = next(iter(process.calls.items()))
    changed = replace(track, last=replace(track.last, **changes))
    return with_process(facts, calls={**process.calls, key: changed})


@cache
def situations() -> dict[str, ScreenData]:
    """Return the named situations. They are made once, because a picture changes nothing."""
    dp = facts_of(Training(devices=[f"cpu:{i}" for i in range(4)]))
    lacking: dict[str, Any] = {"power_w": None, "absent": {"power_w": "not supported"}}
    samples = [device_event(float(t), i, **lacking) for t in range(20) for i in range(8)]
    gpus = facts_of(Training(devices=[f"cuda:{i}" for i in range(8)], virtual=False), more=samples)
    hostile = Training(
        root="Net\x1b]52;c;x\x07\u202e漢字" * 20, via="Sub\x9b31m\x00class", devices=["\x1b[2Jcuda:0", "cuda\u200b:1"]
    )
    single = Training()
    both = [*single.begin(), *single.run(200), *single.switch("single"), *single.run(200)]
    failed = Training()
    sizes = {f"{name}_bytes": 2 << 30 for name in ("model", "gradients", "optimizer", "rest", "peak")}
    held = Event("memory", {"process": 0, "t_s": 2.5, "devices": [{"device": f"cuda:{i}", **sizes} for i in range(8)]})
    zoomed = {
        "gpu memory": facts_of(Training(), 5, [held, *(device_event(2.0, index) for index in range(8))]),
        "memory": facts_of(Training(), 5, [held]),
        "device times": ScreenData(state_of(trained(40)), 3 * SECOND, INFO, is_command_alive=True),
        "stages": ScreenData(state_of(staged(9, None)), SECOND, INFO, is_command_alive=True),
    }
    for count in (2, 64):
        run, now = joined_ranks(count, slow=1, steps=20)
        zoomed[f"{count} ranks"] = ScreenData(run.state(), now, INFO, is_command_alive=True)
    return {
        "nothing": ScreenData(RunSnapshot(), 0),
        "importing": ScreenData(
            RunSnapshot(), 3 * SECOND, INFO, startup_stage=("importing torch", SECOND), is_command_alive=True
        ),
        "dp": dp,
        "gpus": gpus,
        "many replicas": facts_of(Training(devices=[f"cuda:{i}" for i in range(64)], batch=48, virtual=False)),
        "both modes": ScreenData(state_of(both), single.now, INFO, is_command_alive=True, can_toggle=True),
        "pending": replace(dp, mode_request=ModeRequest("single", "pending", dp.now_ns - SECOND)),
        "refused": replace(
            dp, mode_request=ModeRequest("single", "refused", dp.now_ns, reason="spread over devices " * 20)
        ),
        "frozen": replace(dp, view=View(is_frozen=True)),
        "failed": replace(
            dp, exit_info=exit_of(1, None, dp.now_ns), exit_cause="RuntimeError: " + "no " * 100, can_toggle=False
        ),
        "killed": replace(dp, exit_info=exit_of(137, "SIGKILL", dp.now_ns), can_toggle=False),
        "16 GPUs": gpu_facts(16, throttle=["power cap\x1b[2J", "too hot"]),
        "zoom 8 GPUs": replace(gpu_facts(8, name="漢字" * 30 + "\x07"), view=View("devices", "devices")),
        "hostile": facts_of(hostile, 20, run_info=replace(INFO, script="a\x1b[31m/" + "漢" * 100)),
        "failed call": ScreenData(
            state_of([*failed.begin(), *failed.step(failed=True)]), failed.now, INFO, is_command_alive=True
        ),
        **{
            f"zoom {name}": replace(dp, view=View(name, name))
            for name in ("devices", "replicas", "batch", "compare", "output")
        },
        **{
            f"{name}, {zoom}": replace(facts, view=View(zoom=zoom))
            for name, facts in zoomed.items()
            for zoom in (None, "devices" if "memory" in name else "replicas", "batch", "compare")
        },
    }


def text_of(
    facts: ScreenData, width: int, height: int, output: OutputView | None = None, look: TerminalStyle = LOOK
) -> str:
    return "\n".join(plain_text(row) for row in paint_screen(facts, output or OutputView(), width, height, look))


def rows_text(rows: list[Any]) -> list[str]:
    return [plain_text(row).rstrip() for row in rows]
