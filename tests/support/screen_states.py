"""The `ScreenData` of typical situations and of stalls, and their frames as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

from dpmon.model.epoch_progress import Epoch, Progress
from dpmon.model.findings.finding import Finding
from dpmon.model.loss_curves import LossCurve
from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_process import Process
from dpmon.record.history_rows import Row
from dpmon.record.record_types import Event, Replica, Stage
from dpmon.run.run_directory import ExitInfo, RunInfo
from dpmon.store.loss_table import LossBin
from dpmon.ui import screen_painter
from dpmon.ui.panel_view import to_ascii_row
from dpmon.ui.panels.panel_output import OutputView
from dpmon.ui.screen_data import ModeRequest, ScreenData, View
from dpmon.ui.screen_painter import panel_slots
from dpmon.ui.styled_rows import Row as StyledRow
from dpmon.ui.styled_rows import plain_text
from dpmon.ui.terminal_style import TerminalStyle
from dpmon.ui.time_cursor import TimeCursor
from support.history_builders import SUPERVISOR, Recording, snapshot_of_rows
from support.rank_builders import record_ddp_ranks
from support.record_builders import (
    SECOND,
    Training,
    device_event,
    host_event,
    staged_calls,
    timed_training,
    whole_device_event,
)

STYLE = TerminalStyle("dark")


MONO_ASCII = TerminalStyle("mono", only_ascii=True)


def paint_screen(
    screen: ScreenData, output: OutputView, width: int, height: int, style: TerminalStyle
) -> list[StyledRow]:
    """Return all rows of the screen."""
    return screen_painter.paint_screen(screen, output, panel_slots(screen, width, height), style)


RUN_INFO = RunInfo(
    id="20261120-141502-linear-7f3a", name="linear", command=(), script="examples/linear.py", cwd="/",
    python="/usr/bin/python3", started_unix=0.0, start_ns=SECOND, boot_id="", headless=False,
)  # fmt: skip


def exit_info_of(status: int | None, signal: str | None = None, at_ns: int = 9, **more: Any) -> ExitInfo:
    """Return how a run ended `at_ns` after its start."""
    return ExitInfo(status, signal, 0.0, at_ns, at_ns / 1e9, "supervisor", **more)


def played_at(time_ns: int, length_s: int, **changes: Any) -> TimeCursor:
    """Return the cursor of a playback of a run of `length_s` seconds at a time."""
    return TimeCursor(time_ns, is_playback=True, present_ns=length_s * SECOND, has_ended=True, **changes)


def screen_data_of(training: Training, steps: int = 300, more: Sequence[Row] = (), **changes: Any) -> ScreenData:
    payloads = [*training.begin(), *training.run(steps), *[host_event(float(i)) for i in range(30)], *more]
    state = snapshot_of_rows(payloads)
    facts = ScreenData(
        state, training.now + SECOND // 10, RUN_INFO, is_command_alive=True, can_toggle=True, can_type=True
    )
    return replace(facts, **changes)


def gpu_screen_data(count: int, **more: Any) -> ScreenData:
    training = Training(devices=[f"cuda:{i}" for i in range(2)], virtual=False)
    payloads = [*training.begin(), *training.run(20)]
    for index in range(count):
        payloads += [whole_device_event(float(t), index, util_pct=10 * index % 101, **more) for t in range(20)]
    return ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True)


def shown_process(facts: ScreenData) -> Process:
    """Return the process that the facts shows."""
    process = facts.process
    assert process is not None
    return process


def with_mode_reply(facts: ScreenData, mode: str = "dp", **changes: Any) -> ScreenData:
    """Return the facts after a reply to a request for a mode: `mode` is in force."""
    event = Event("mode", {"process": 0, "t_s": facts.now_ns / SECOND, "mode": mode, "requested_by": "user", **changes})
    state = snapshot_of_rows([event])
    return replace(facts, state=facts.state.with_facts(mode_changes=state.mode_changes))


def all_facts(process: Process | None) -> dict[str, Any]:
    """Return all facts of a process."""
    names = {**vars(Process), **vars(process)}
    return {name: getattr(process, name) for name in names if not name.startswith("_")}


def with_process(facts: ScreenData, **changes: Any) -> ScreenData:
    """Return the facts with changes of the process that it shows."""
    process = shown_process(facts).with_facts(**changes)
    return replace(facts, state=facts.state.with_facts(processes={**facts.state.processes, process.process: process}))


def with_call(facts: ScreenData, **changes: Any) -> ScreenData:
    """Return the facts with changes of the last call."""
    process = shown_process(facts)
    key, track = next(iter(process.calls.items()))
    last = replace(track.last, **changes)
    parts: Sequence[Replica | Stage] = last.replicas or last.stages
    timed = (replace(timed, part=part) for timed, part in zip(track.timed, parts, strict=False))
    changed = replace(track, last=last, timed=tuple(timed))
    return with_process(facts, calls={**process.calls, key: changed})


@cache
def situations() -> dict[str, ScreenData]:
    """Return the named situations. They are made once, because a picture changes nothing."""
    dp = screen_data_of(Training(devices=[f"cpu:{i}" for i in range(4)]))
    lacking: dict[str, Any] = {"power_w": None, "absent": {"power_w": "not supported"}}
    samples = [device_event(float(t), i, **lacking) for t in range(20) for i in range(8)]
    gpus = screen_data_of(Training(devices=[f"cuda:{i}" for i in range(8)], virtual=False), more=samples)
    hostile = Training(
        root="Net\x1b]52;c;x\x07\u202e漢字" * 20, via="Sub\x9b31m\x00class", devices=["\x1b[2Jcuda:0", "cuda\u200b:1"]
    )
    single = Training()
    both = [*single.begin(), *single.run(200), *single.switch("single"), *single.run(200)]
    failed = Training()
    sizes = {f"{name}_bytes": 2 << 30 for name in ("model", "gradients", "optimizer", "rest", "peak")}
    held = Event("memory", {"process": 0, "t_s": 2.5, "devices": [{"device": f"cuda:{i}", **sizes} for i in range(8)]})
    zoomed = {
        "gpu memory": screen_data_of(Training(), 5, [held, *(device_event(2.0, index) for index in range(8))]),
        "memory": screen_data_of(Training(), 5, [held]),
        "device times": ScreenData(snapshot_of_rows(timed_training(40)), 3 * SECOND, RUN_INFO, is_command_alive=True),
        "stages": ScreenData(snapshot_of_rows(staged_calls(9, None)), SECOND, RUN_INFO, is_command_alive=True),
    }
    for count in (2, 64):
        run, now = record_ddp_ranks(count, slow=1, steps=20)
        zoomed[f"{count} ranks"] = ScreenData(run.state(), now, RUN_INFO, is_command_alive=True)
    return {
        "nothing": ScreenData(RunAnalysis(), 0),
        "importing": ScreenData(
            RunAnalysis(), 3 * SECOND, RUN_INFO, startup_stage=("importing torch", SECOND), is_command_alive=True
        ),
        "dp": dp,
        "gpus": gpus,
        "many replicas": screen_data_of(Training(devices=[f"cuda:{i}" for i in range(64)], batch=48, virtual=False)),
        "both modes": ScreenData(snapshot_of_rows(both), single.now, RUN_INFO, is_command_alive=True, can_toggle=True),
        "pending": replace(dp, mode_request=ModeRequest("single", dp.now_ns - SECOND)),
        "refused": with_mode_reply(dp, refused="spread over devices " * 20),
        "frozen": replace(dp, cursor=TimeCursor(dp.now_ns, dp.now_ns)),
        "failed": replace(
            dp, exit_info=exit_info_of(1, None, dp.now_ns, cause="RuntimeError: " + "no " * 100), can_toggle=False
        ),
        "killed": replace(dp, exit_info=exit_info_of(137, "SIGKILL", dp.now_ns), can_toggle=False),
        "16 GPUs": gpu_screen_data(16, throttle=["power cap\x1b[2J", "too hot"]),
        "zoom 8 GPUs": replace(gpu_screen_data(8, name="漢字" * 30 + "\x07"), view=View("devices", "devices")),
        "hostile": screen_data_of(hostile, 20, run_info=replace(RUN_INFO, script="a\x1b[31m/" + "漢" * 100)),
        "failed call": ScreenData(
            snapshot_of_rows([*failed.begin(), *failed.step(failed=True)]),
            failed.now,
            RUN_INFO,
            is_command_alive=True,
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


def screen_text(
    facts: ScreenData, width: int, height: int, output: OutputView | None = None, look: TerminalStyle = STYLE
) -> str:
    rows = paint_screen(facts, output or OutputView(), width, height, look)
    return "\n".join(plain_text(to_ascii_row(row) if look.is_ascii else row) for row in rows)


def rows_text(rows: list[Any]) -> list[str]:
    return [plain_text(row).rstrip() for row in rows]


# ------------------------------------------------------------------------------------------------ stalls

GUILTY = {"words": "in checkpoint (train.py:12)", "place": "train.py:12", "function": "checkpoint", "inside": None}
WAITING = {"words": "in backward (train.py:90)", "place": "train.py:90", "function": "main", "inside": "backward"}
STACKS = {
    False: [["checkpoint", "/job/train.py", 12], ["main", "/job/train.py", 95]],
    True: [["Tensor.backward", "/env/site-packages/torch/_tensor.py", 623], ["main", "/job/train.py", 90]],
}
NOTICED_S, NOW_S, LASTED_S = 10, 27, 35


def stalled_rank(rank: int | None, step: int, *, waits: bool, for_s: float = NOTICED_S) -> dict[str, Any]:
    """Return what a rank does, as in a `stall` record."""
    stack = {"thread": "MainThread", "main": True, "left_out": 0, "frames": STACKS[waits]}
    return {
        "process": rank or 0, "rank": rank, "pid": 4000 + (rank or 0), "step": step, "doing": "other", "for_s": for_s,
        "waits": waits, "state": "sleeping", "cpu": 0.0, "groups": [{"group": 1, "ranks": 2, "sequence": step}],
        "stacks": [stack], "why_no_stack": None, **(WAITING if waits else GUILTY),
    }  # fmt: skip


def stall_record(count: int, since_ns: int, step: int) -> Event:
    """Return the record of a stall of ranks, rank 1 of which the others wait for; one process has no rank."""
    since_s = since_ns / SECOND
    ranks = [stalled_rank(rank if count > 1 else None, step, waits=rank != 1 and count > 1) for rank in range(count)]
    ranks.sort(key=lambda one: one["waits"])
    text = {1: "in checkpoint (train.py:12)"}.get(
        count, "rank 1 in checkpoint (train.py:12); rank 0 waits in backward (train.py:90)"
    )
    if count > 2:
        text = f"rank 1 in checkpoint (train.py:12); the other {count - 1} wait for it in backward (train.py:90)"
    return Event("stall", {"t_s": since_s + NOTICED_S, "since_s": since_s, "text": text, "ranks": ranks})


@lru_cache(maxsize=8)
def stalled_run(count: int, *, over: bool = False) -> tuple[Recording, int]:
    """Return a run that stalls at its last step, and the time of that. `over`: the stall is over; a step followed."""
    if count == 1:
        training = Training()
        run, end = Recording().add([*training.begin(), *training.run(160)]), training.now
    else:
        run, end = record_ddp_ranks(count, slow=1, phase="data", steps=160)
    run.add([stall_record(count, end, 160)], SUPERVISOR)
    if over:
        after = end + LASTED_S * SECOND
        run.add([Event("stall", {"t_s": after / SECOND, "since_s": end / SECOND, "lasted_s": LASTED_S})], SUPERVISOR)
    return run, end


def screen_in_stall(count: int, **changes: Any) -> ScreenData:
    """Return the live facts of a stall of 27 s."""
    run, end = stalled_run(count)
    return ScreenData(
        **{
            "state": run.state(),
            "now_ns": end + NOW_S * SECOND,
            "run_info": RUN_INFO,
            "is_command_alive": True,
            **changes,
        }
    )


def screen_in_stall_playback(count: int) -> ScreenData:
    """Return the facts of a playback at the same time; later, the stall was over."""
    run, end = stalled_run(count, over=True)
    now = end + NOW_S * SECOND
    cursor = played_at(now, end // SECOND + 60)
    return ScreenData(run.state(now), now, RUN_INFO, is_command_alive=True, cursor=cursor)


def screen_ended_in_stall(count: int) -> ScreenData:
    """Return the facts of the end of a run that was stopped in a stall."""
    run, end = stalled_run(count)
    at = end + LASTED_S * SECOND
    return ScreenData(
        run.state(over=True),
        at,
        RUN_INFO,
        is_command_alive=False,
        exit_info=exit_info_of(130, "SIGINT", at, stopped=True),
    )


def screen_after_stall() -> ScreenData:
    """Return the facts of a run of one process that has trained on after a stall."""
    training = Training(step_ns=16_000_000)
    before = [*training.begin(), *training.run(1000)]
    begin = training.now
    training.now += LASTED_S * SECOND
    run = Recording().add([*before, *training.run(1500)])
    since_s = begin / SECOND
    over = {"t_s": since_s + LASTED_S, "since_s": since_s, "lasted_s": LASTED_S}
    run.add([stall_record(1, begin, 1000), Event("stall", over)], SUPERVISOR)
    return ScreenData(run.state(), training.now, RUN_INFO, is_command_alive=True)


_EPOCHS = (
    Epoch(1, 0, 175 * SECOND, 1563, 1563, 12 * SECOND, None, 175 * SECOND),
    Epoch(2, 187 * SECOND, 358 * SECOND, 1563, 1563, 12 * SECOND, SECOND // 2, 171 * SECOND),
    Epoch(3, 371 * SECOND, 420 * SECOND, 412, 1563, 0, SECOND // 2, 49 * SECOND),
)


def progress_in_epochs(**changes: Any) -> Progress:
    found = Progress(0, 3, 412, 1563, 130e9, 4e9, 420 * SECOND, _EPOCHS)
    return replace(found, **changes)


def loss_curve(place: str = "train.py:88", last: float = 0.4121, bad: int | None = None) -> LossCurve:
    bins = [
        LossBin(at, 1, value, value, value, 0) if at != bad else LossBin(at, 0, None, None, None, 1)
        for at in range(30)
        for value in [2.3 * 0.9**at]
    ]
    return LossCurve(0, place, tuple(bins), 1, last, 0.4309, 300, 30 * SECOND)


TWO_FINDINGS = (
    Finding("data", "The steps wait for data for 34% of their time.", "34%", "more workers", 0.34, 33.0, 97.0),
    Finding("spread", "Step times vary.", "p95", "batches of one size", 0.1),
)
