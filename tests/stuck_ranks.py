"""Makes runs that stall, and the scenes of their stall, for tests of the screen."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from joined import joined_ranks
from situations import INFO, exit_of
from stored import SUPERVISOR, Recording
from synthetic import SECOND, Training

from dpmon.record.record_types import Event
from dpmon.ui.screen_data import PlaybackPosition, ScreenData

GUILTY = {"words": "in checkpoint (train.py:12)", "place": "train.py:12", "function": "checkpoint", "inside": None}
WAITING = {"words": "in backward (train.py:90)", "place": "train.py:90", "function": "main", "inside": "backward"}
STACKS = {
    False: [["checkpoint", "/job/train.py", 12], ["main", "/job/train.py", 95]],
    True: [["Tensor.backward", "/env/site-packages/torch/_tensor.py", 623], ["main", "/job/train.py", 90]],
}
NOTICED_S, NOW_S, LASTED_S = 10, 27, 35


def standing(rank: int | None, step: int, *, waits: bool, for_s: float = NOTICED_S) -> dict[str, Any]:
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
    ranks = [standing(rank if count > 1 else None, step, waits=rank != 1 and count > 1) for rank in range(count)]
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
        run, end = joined_ranks(count, slow=1, phase="data", steps=160)
    run.add([stall_record(count, end, 160)], SUPERVISOR)
    if over:
        after = end + LASTED_S * SECOND
        run.add([Event("stall", {"t_s": after / SECOND, "since_s": end / SECOND, "lasted_s": LASTED_S})], SUPERVISOR)
    return run, end


def stalled(count: int, **changes: Any) -> ScreenData:
    """Return the live facts of a stall of 27 s."""
    run, end = stalled_run(count)
    return ScreenData(
        **{"state": run.state(), "now_ns": end + NOW_S * SECOND, "run_info": INFO, "is_command_alive": True, **changes}
    )


def stalled_in_playback(count: int) -> ScreenData:
    """Return the facts of a playback at the same time; later, the stall was over."""
    run, end = stalled_run(count, over=True)
    now = end + NOW_S * SECOND
    playing = PlaybackPosition(now, end + 60 * SECOND, False, 1.0)
    return ScreenData(run.state(now), now, INFO, is_command_alive=True, playing=playing)


def ended_in_stall(count: int) -> ScreenData:
    """Return the facts of the end of a run that was stopped in a stall."""
    run, end = stalled_run(count)
    at = end + LASTED_S * SECOND
    return ScreenData(
        run.state(over=True), at, INFO, is_command_alive=False, exit_info=exit_of(130, "SIGINT", at, stopped=True)
    )


def after_stall() -> ScreenData:
    """Return the facts of a run of one process that has trained on after a stall."""
    training = Training(step_ns=16_000_000)
    before = [*training.begin(), *training.run(1000)]
    begin = training.now
    training.now += LASTED_S * SECOND
    run = Recording().add([*before, *training.run(1500)])
    since_s = begin / SECOND
    over = {"t_s": since_s + LASTED_S, "since_s": since_s, "lasted_s": LASTED_S}
    run.add([stall_record(1, begin, 1000), Event("stall", over)], SUPERVISOR)
    return ScreenData(run.state(), training.now, INFO, is_command_alive=True)
