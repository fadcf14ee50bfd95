"""The processes of a distributed run side by side: which ones train, their figures, their sampled collectives. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from dpmon.model.process import Process, figures_end_s
from dpmon.model.state import State
from dpmon.model.stragglers import SERIES as STRAGGLER_SERIES
from dpmon.model.stragglers import RankTimes, rank_times
from dpmon.record.names import RANK_MODES
from dpmon.record.schema import SECOND, STEP
from dpmon.store.figures import Figures, Rate, figures, merged, trains
from dpmon.store.tally import Key, Tally

if TYPE_CHECKING:
    from dpmon.store.store_at import StoreAt

_MINUTE_S = 60
RANK_STEPS, RANK_S = 50, 5
"""Fewest steps and seconds for a comparison of the ranks."""
COLLECTIVES_S = 300
"""Seconds of sampled collectives to show; only some steps are sampled."""
_RANK_SERIES = (STEP, "forward", "backward")


class RankLine(NamedTuple):
    """One process of several: the most frequent inputs and outputs of its calls, and its steps; None if unknown.

    `steps` excludes evaluations of modes that otherwise train; `calls` includes them.
    """

    process: int
    rank: int | None
    world: int | None
    device: str
    inputs: str | None
    outputs: str | None
    calls: int
    steps: int
    median_ns: float | None
    rate: Rate | None
    forward_ns: float | None
    """Median device time of the forward of a step, on the slowest device."""
    untimed: str | None
    """Why `forward_ns` is unknown, if the record has a reason."""
    times: RankTimes | None = None
    """Mean times of training steps, without the first ones, of all processes with its rank. None without a rank."""

    @property
    def label(self) -> str:
        """Its rank, or its process: "rank 0 of 2", "process 1"."""
        return f"process {self.process}" if self.rank is None else f"rank {self.rank} of {self.world or '?'}"


def training(state: State) -> list[Process]:
    """The processes that train now (`State.training`), by rank, the newest of each.

    A restarted job (torchrun after a failure) has several processes of one rank.
    """
    found: dict[tuple[bool, int], Process] = {}
    for process in state.training():
        key = (True, process.process) if process.rank is None else (False, process.rank)
        if key not in found or process.seen_ns > found[key].seen_ns:
            found[key] = process
    return [found[key] for key in sorted(found)]


def world(process: Process) -> int | None:
    """The number of ranks, as the process reported it; None outside torch.distributed."""
    value = process.info.world
    return value if value is not None and value > 0 else None


def distributed(process: Process) -> str | None:
    """How the process trains one model together with other ranks (a key of RANK_MODES); None if it does not."""
    return next((via for _, via in process.calls if via in RANK_MODES), None)


def toggle_refusal(state: State) -> str | None:
    """Why the mode cannot be switched now, in either direction; None if it may be possible."""
    process = state.focus()
    if process is None:
        return "no training process is known yet"
    by = distributed(process)
    if by is not None:
        return f"the ranks train by {by}: one rank cannot switch its mode alone"
    if process.rank is not None and (world(process) or 1) > 1:
        return "several ranks train, each on its own device"
    return None


# ------------------------------------------------------------------------------------------------ in a snapshot


def with_ranks(rows: StoreAt, state: State, focus: Process, others: Sequence[Process]) -> State:
    """Add the mean times of the ranks, and the collectives of sampled steps."""
    end_ns = state.newest_ns + 1
    begin_s = max(end_ns // SECOND - COLLECTIVES_S, 0)
    numbers = [process.process for process in (focus, *others)]
    found = rows.communicated(begin_s * SECOND, end_ns, numbers)
    steps, last = 0, None
    if found.samples:
        last = rows.last_sample(focus.process, begin_s * SECOND)
        sums = rows.store.sums(begin_s, end_ns // SECOND + 1)
        steps = sum(tally.steps for key, tally in sums.items() if key.process in numbers)
    times = _rank_times(rows, focus, others)
    return replace(state, ranks=times, collectives=found, last_sample=last, sampled_of=steps)


def _rank_times(rows: StoreAt, focus: Process, others: Sequence[Process]) -> tuple[RankTimes, ...]:
    """The mean times of all ranks over about RANK_STEPS steps, in whole seconds."""
    if focus.last_step is None:
        return ()
    ranks = sorted((focus, *others), key=lambda process: (process.rank is None, process.rank or 0))
    end_s = max(figures_end_s(rows, one) for one in ranks if one.last_step is not None)
    step_ns = focus.recent.step_ns or focus.last_step.wall_ns
    begin_s = max(end_s - max(-(-RANK_STEPS * step_ns // SECOND), RANK_S), 0)
    numbers = tuple(one.process for one in ranks)
    found = rows.store.tallies(begin_s, end_s, process=numbers, sketches=False, series=STRAGGLER_SERIES)
    mode = focus.last_step.mode
    trained = mode in trains((key.mode, key.kind) for key in found)
    by_process = _by_process(found, numbers)
    return tuple(
        rank_times(one.process, one.rank, merged(by_process[one.process], mode, False, trained, settled=True))
        for one in ranks
    )


def rank_figures(rows: StoreAt, processes: Iterable[Process]) -> Iterator[Process]:
    """The processes with their figures over the current minute and the one before."""
    alike: dict[int, dict[int, Process]] = {}
    for process in processes:
        if process.last_step is not None:
            alike.setdefault(figures_end_s(rows, process), {})[process.process] = process
    for end_s, those in alike.items():
        begin_s = max(end_s // _MINUTE_S - 1, 0) * _MINUTE_S  # each minute has its own tally
        found = _by_process(rows.store.tallies(begin_s, end_s, process=tuple(those), series=_RANK_SERIES), those)
        for number, process in those.items():
            yield replace(process, figures=_figured(found[number], process))


def _by_process(tallies: Mapping[Key, Tally], processes: Iterable[int]) -> dict[int, dict[Key, Tally]]:
    """The tallies of each of these processes."""
    found: dict[int, dict[Key, Tally]] = {process: {} for process in processes}
    for key, tally in tallies.items():
        found[key.process][key] = tally
    return found


def _figured(tallies: Mapping[Key, Tally], process: Process) -> Figures:
    assert process.last_step is not None
    mode = process.last_step.mode
    tally = merged(tallies, mode, False, mode in trains((key.mode, key.kind) for key in tallies))
    return figures(mode, False, tally, None)
