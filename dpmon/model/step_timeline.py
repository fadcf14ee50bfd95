"""The timeline of a process's last step: its main thread, and a lane for each replica.

The record of a step has the times of its phases. A nested phase is shown in place of the one around it. The phases of
its calls are shown in place of forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.record_types import Call, Step
from dpmon.record.schema import phase_by_name

if TYPE_CHECKING:
    from dpmon.model.run_process import Process


class Piece(NamedTuple):
    """One span of a phase, in ns from the step's start."""

    phase: str
    start_ns: int
    end_ns: int


class Lane(NamedTuple):
    """The work of one device during the calls of a step: a replica, or a stage of a model on several devices."""

    number: int
    device: str
    pieces: tuple[Piece, ...]
    """Empty if the device was idle."""

    @property
    def took_ns(self) -> int:
        """Total time of its pieces."""
        return sum(piece.end_ns - piece.start_ns for piece in self.pieces)


class StepTimeline(NamedTuple):
    """One step. `main` has no overlaps and is in order of time; the script's own work fills its gaps."""

    step: Step
    main: tuple[Piece, ...]
    lanes: tuple[Lane, ...]
    staged: bool = False
    """Whether the lanes are stages."""

    @property
    def idle_ns(self) -> int:
        """Time of the step outside all phases: the script did something else."""
        return self.step.wall_ns - sum(piece.end_ns - piece.start_ns for piece in self.main)


def last_step_timeline(process: Process) -> StepTimeline | None:
    """Return the newest step of `process`; None before its first."""
    step = process.last_step
    if step is None:
        return None
    calls = sorted(process.last_calls, key=lambda call: call.start_ns)
    spans = [Piece(name, start, start + took) for name, start, took in step.spans]
    lanes, staged = _lanes(calls, step)
    main = tuple(_flatten_pieces([*spans, *_phases(calls, step)], step.wall_ns))
    return StepTimeline(step, main, lanes, staged)


def _phases(calls: Iterable[Call], step: Step) -> Iterator[Piece]:
    """Yield the phases of the training thread's calls. Each such call begins together with a forward of the step."""
    forward_offsets = {span.offset_ns for span in step.spans if span.phase == "forward"}
    for call in calls:
        call_offset = call.start_ns - step.start_ns
        for name, (offset, took, _) in call.phases.items() if call_offset in forward_offsets else ():
            yield Piece(phase_by_name(name).display_name, call_offset + offset, call_offset + offset + took)


def _flatten_pieces(pieces: Iterable[Piece], wall_ns: int) -> list[Piece]:
    """Return pieces without overlaps, in order of time. Of overlapping pieces, the one that began last is kept."""
    inside = (piece._replace(start_ns=max(piece.start_ns, 0), end_ns=min(piece.end_ns, wall_ns)) for piece in pieces)
    flat: list[Piece] = []
    open_pieces: list[Piece] = []
    at = 0

    def until(end: int) -> None:
        """End the last of `around` at `end`."""
        nonlocal at
        phase = open_pieces[-1].phase
        if end <= at:
            return
        if flat and flat[-1].phase == phase and flat[-1].end_ns == at:
            flat[-1] = flat[-1]._replace(end_ns=end)
        else:
            flat.append(Piece(phase, at, end))
        at = end

    for piece in sorted(inside, key=lambda piece: (piece.start_ns, -piece.end_ns)):
        while open_pieces and open_pieces[-1].end_ns <= piece.start_ns:
            until(open_pieces[-1].end_ns)
            open_pieces.pop()
        if open_pieces:
            until(piece.start_ns)
        at = max(at, piece.start_ns)
        open_pieces.append(piece)
    while open_pieces:
        until(open_pieces[-1].end_ns)
        open_pieces.pop()
    return flat


def _lanes(calls: Sequence[Call], step: Step) -> tuple[tuple[Lane, ...], bool]:
    """Return the lanes and whether they are stages: one lane per replica, or per stage of a split model."""
    if not any(call.replicas for call in calls) and any(call.stages for call in calls):
        last_call = next(call for call in reversed(calls) if call.stages)
        call_offset = last_call.start_ns - step.start_ns
        return tuple(
            Lane(s.stage, s.device, _clip_to_step([(call_offset + s.offset_ns, s.host_ns or 0)], step.wall_ns))
            for s in last_call.stages
        ), True
    devices: dict[int, str] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    for call in calls:
        if call.mode == "dp":
            devices.update({i: device for i, device in enumerate(call.devices) if i not in devices})
        call_offset = call.start_ns - step.start_ns
        for replica in call.replicas:
            devices[replica.replica] = replica.device
            spans.setdefault(replica.replica, []).append((call_offset + replica.offset_ns, replica.host_ns))
    return tuple(Lane(i, devices[i], _clip_to_step(spans.get(i, []), step.wall_ns)) for i in sorted(devices)), False


def _clip_to_step(spans: Iterable[tuple[int, int]], wall_ns: int) -> tuple[Piece, ...]:
    pieces = (Piece("apply", max(start, 0), min(start + took, wall_ns)) for start, took in spans)
    return tuple(piece for piece in pieces if piece.end_ns > piece.start_ns)
