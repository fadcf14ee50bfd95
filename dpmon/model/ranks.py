"""The processes of a distributed run side by side: who trains, over what, and where each one's step goes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import NamedTuple

from dpmon.model.state import PHASES, CallTrack, Process, State, StepSample
from dpmon.model.stats import Speed, median
from dpmon.record.wire import DDP

__all__ = [
    "FORWARD",
    "RankRow",
    "distributed",
    "forward_of",
    "rank_rows",
    "speed_together",
    "toggle_refusal",
    "training",
    "world",
]

STEPS_COUNTED = 128
FORWARD = (PHASES.index("scatter"), PHASES.index("replicate"), PHASES.index("apply"), PHASES.index("gather"),
            PHASES.index("forward"))  # fmt: skip
_BACKWARD = PHASES.index("backward")


class RankRow(NamedTuple):
    """One process of several; times are medians over its newest steps in ns, None where there is none."""

    process: int
    rank: int | None
    world: int | None
    track: CallTrack | None
    """Its calls of the root that is shown; None if it has not called that one."""
    step: int | None
    step_ns: float | None
    forward_ns: float | None
    backward_ns: float | None


def training(state: State) -> list[Process]:
    """The processes that train now (`State.training`), by rank, the newest of each.

    A job that was started again (torchrun after a failure) has several processes of one rank.
    """
    found: dict[tuple[bool, int], Process] = {}
    for process in state.training():
        key = (True, process.process) if process.rank is None else (False, process.rank)
        if key not in found or process.seen_ns > found[key].seen_ns:
            found[key] = process
    return [found[key] for key in sorted(found)]


def speed_together(process: Process, state: State, speed_of: Callable[[Process], Speed]) -> Speed:
    """The speed of a process or, if it is a rank, of all ranks: they step together, and their samples add up.

    Samples are None where those of one rank are not known. `speed_of`: the speed of one process.
    """
    own = speed_of(process)
    others = [one for one in training(state) if one is not process and one.rank is not None]
    if process.rank is None or not others or own.rate is None:
        return own
    rates = [own.rate, *(speed_of(other).rate for other in others)]
    samples, within = (
        None if None in found else sum(each for each in found if each is not None)
        for found in (
            [None if rate is None else rate.samples_per_s for rate in rates],
            [None if rate is None else rate.samples_within for rate in rates],
        )
    )
    return Speed(own.rate._replace(samples_per_s=samples, samples_within=within), own.reason)


def world(process: Process) -> int | None:
    """How many ranks there are, as the process itself was told; None outside torch.distributed."""
    value = process.info.get("world")
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def distributed(process: Process) -> bool:
    """Whether it trains by DistributedDataParallel, whatever else it calls."""
    return any(via == DDP for _, via in process.calls)


def toggle_refusal(state: State) -> str | None:
    """Why the mode cannot be switched now, whatever is asked for; None if it may be possible."""
    process = state.focus()
    if process is None:
        return "no training process is known yet"
    if distributed(process):
        return "the ranks train by DistributedDataParallel: a process that split its model by itself would leave them"
    return None


def rank_rows(processes: Iterable[Process], key: tuple[str, str | None] | None) -> list[RankRow]:
    """A row for each process; `key`: the root (name, via) whose sizes are shown, each one's newest where it is None."""
    return [_row(process, key) for process in processes]


def _row(process: Process, key: tuple[str, str | None] | None) -> RankRow:
    track = process.calls.get(key) if key is not None else None
    if track is None and process.newest is not None:
        track = process.calls.get(process.newest)
    steps: list[StepSample] = []
    mode = process.modes.get(process.mode)
    if mode is not None:
        steps = list(islice(reversed(mode.steps), STEPS_COUNTED))
    last = process.last_step
    return RankRow(
        process.process,
        process.rank,
        world(process),
        track,
        last.step if last is not None else None,
        median(step.wall_ns for step in steps),
        median(took for step in steps if (took := forward_of(step)) >= 0),
        median(step.phases[_BACKWARD] for step in steps if step.phases[_BACKWARD] >= 0),
    )


def forward_of(step: StepSample) -> int:
    """The whole forward of a step in ns, the phases of its calls within; -1 if none ran."""
    parts = [step.phases[i] for i in FORWARD if step.phases[i] >= 0]
    return sum(parts) if parts else -1
