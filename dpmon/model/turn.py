"""The last step of a process laid out in time: what its main thread did when, and each replica beside it. Pure.

Calls, their phases and their replicas are recorded with their starts. The other phases, such as copies, backward and
optimizer, are recorded with their durations only, so they are laid where they can have been: those before forward (in
the order of a step) before the first call; the others after it, in that order, in the time that no call has.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dpmon.model.process import Process
from dpmon.record.kinds import Call, Step
from dpmon.record.schema import STEP_PHASES, phase_named
from dpmon.record.wire import CALL_PHASES

__all__ = ["Lane", "Piece", "Turn", "is_placed", "last_turn"]

_FORWARD_AT = STEP_PHASES.index("forward")
_BEFORE, _AFTER = STEP_PHASES[1:_FORWARD_AT], STEP_PHASES[_FORWARD_AT + 1 : -1]
"""Phases without a start of their own: between the data and the first call, and after it."""


class Piece(NamedTuple):
    """One phase in time, ns from the step's start."""

    phase: str
    start_ns: int
    end_ns: int


class Lane(NamedTuple):
    """What ran on one device during the calls of a step: a replica, or a stage of a model that is spread."""

    number: int
    device: str
    pieces: tuple[Piece, ...]
    """Empty: idle."""

    @property
    def took_ns(self) -> int:
        """All of its pieces' time."""
        return sum(piece.end_ns - piece.start_ns for piece in self.pieces)


class Turn(NamedTuple):
    """One step. `main` without overlaps, in order of time; what it does not cover is the script's own work."""

    step: int
    mode: str
    start_ns: int
    wall_ns: int
    calls: int
    main: tuple[Piece, ...]
    lanes: tuple[Lane, ...]
    staged: bool = False
    """The lanes are stages."""


def last_turn(process: Process) -> Turn | None:
    """The newest step of `process`; None before its first."""
    step = process.last_step
    if step is None:
        return None
    calls = sorted(process.last_calls, key=lambda call: call.start_ns)
    main: list[Piece] = []
    data = step.phases.get("data", -1)
    if data > 0:
        main.append(Piece("data", 0, min(data, step.wall_ns)))
    first = min((call.start_ns - step.start_ns for call in calls), default=step.wall_ns)
    at = max(data, 0)
    for name in _BEFORE:
        took = max(step.phases.get(name, 0), 0)
        main += _between(name, at, at + took, min(first, step.wall_ns))
        at += took
    for call in calls:
        main += _of_call(call, step)
    main = _apart(main)
    main += _placed(step, main, calls)
    lanes, staged = _lanes(calls, step)
    main.sort(key=lambda piece: piece.start_ns)
    return Turn(step.step, step.mode, step.start_ns, step.wall_ns, len(calls), tuple(main), lanes, staged)


def is_placed(phase: str) -> bool:
    """Whether the phase is recorded with its duration only."""
    return phase in _BEFORE or phase in _AFTER


def _between(phase: str, start: int, end: int, most: int) -> list[Piece]:
    """A piece that was recorded without its place, as far as there is room for it."""
    return [Piece(phase, start, min(end, most))] if min(end, most) > start else []


def _of_call(call: Call, step: Step) -> list[Piece]:
    """The call's phases, and as forward what of it they leave."""
    begin = call.start_ns - step.start_ns
    end = begin + call.wall_ns
    phases = sorted(
        (begin + phase.offset_ns, begin + phase.offset_ns + phase.host_ns, phase_named(name).shown)
        for name in CALL_PHASES
        if (phase := call.phases.get(name)) is not None
    )
    found: list[Piece] = []
    at = begin
    for start, stop, name in phases:
        if start > at:
            found.append(Piece("forward", at, start))
        found.append(Piece(name, start, stop))
        at = max(at, stop)
    if at < end:
        found.append(Piece("forward", at, end))
    clipped = (Piece(p.phase, max(p.start_ns, 0), min(p.end_ns, step.wall_ns)) for p in found)
    return [piece for piece in clipped if piece.end_ns > piece.start_ns]


def _apart(pieces: Iterable[Piece]) -> list[Piece]:
    """In order of time, each from where the one before it ends: calls of several threads may overlap."""
    found: list[Piece] = []
    at = 0
    for piece in sorted(pieces, key=lambda piece: piece.start_ns):
        start = max(piece.start_ns, at)
        if piece.end_ns > start:
            found.append(piece._replace(start_ns=start))
            at = piece.end_ns
    return found


def _placed(step: Step, main: Sequence[Piece], calls: Sequence[Call]) -> list[Piece]:
    """The phases after forward in the time after the first call that no call has.

    Each gap gets its part of the backward. The optimizer, and what follows it, comes in the last gap, if there is room
    for it.
    """
    backward, *others = (max(step.phases.get(name, 0), 0) for name in _AFTER)
    optimizer = sum(others)
    gaps = _gaps(step, main, calls)
    room = sum(end - start for start, end in gaps)
    if not room or not backward + optimizer:
        return []
    last = gaps[-1][1] - gaps[-1][0]
    # All of it behind the last call where it fits: how a step of one call goes, and one of an evaluation before it.
    if backward + optimizer <= last:
        start = gaps[-1][0]
        return _laid(start, backward, optimizer, others)
    found: list[Piece] = []
    scale = min(1.0, room / (backward + optimizer))
    late = optimizer if optimizer <= last else 0
    rest = max(room - late, 1)
    for index, (start, end) in enumerate(gaps):
        here = end - start - (late if index == len(gaps) - 1 else 0)
        ours = int(backward * scale * here / rest)
        then = late if late and index == len(gaps) - 1 else 0 if late else int(optimizer * scale * here / rest)
        found += _laid(start, min(ours, end - start), min(then, max(end - start - ours, 0)), others)
    return found


def _laid(start: int, backward: int, rest: int, others: Sequence[int]) -> list[Piece]:
    """From `start` on the backward, then `rest` ns of the phases after it, in proportion to all of their time."""
    whole = max(sum(others), 1)
    pieces = []
    for name, took in zip(_AFTER, (backward, *(took * rest // whole for took in others)), strict=True):
        pieces.append(Piece(name, start, start + took))
        start += took
    return [piece for piece in pieces if piece.end_ns > piece.start_ns]


def _gaps(step: Step, main: Sequence[Piece], calls: Sequence[Call]) -> list[tuple[int, int]]:
    """The spans from the end of the first call on that are nobody's."""
    first = min((call.start_ns + call.wall_ns - step.start_ns for call in calls), default=0)
    gaps: list[tuple[int, int]] = []
    at = max(first, 0)
    for piece in main:
        if piece.start_ns > at:
            gaps.append((at, piece.start_ns))
        at = max(at, piece.end_ns)
    if at < step.wall_ns:
        gaps.append((at, step.wall_ns))
    return gaps


def _lanes(calls: Sequence[Call], step: Step) -> tuple[tuple[Lane, ...], bool]:
    """A lane a replica, over all calls; of a spread model a lane a stage; whether they are stages."""
    if not any(call.replicas for call in calls) and any(call.stages for call in calls):
        spread = next(call for call in reversed(calls) if call.stages)
        begin = spread.start_ns - step.start_ns
        return tuple(
            Lane(s.stage, s.device, _clipped([(begin + s.offset_ns, s.host_ns or 0)], step.wall_ns))
            for s in spread.stages
        ), True
    devices: dict[int, str] = {}
    spans: dict[int, list[tuple[int, int]]] = {}
    for call in calls:
        if call.mode == "dp":
            devices.update({i: device for i, device in enumerate(call.devices) if i not in devices})
        begin = call.start_ns - step.start_ns
        for replica in call.replicas:
            devices[replica.replica] = replica.device
            spans.setdefault(replica.replica, []).append((begin + replica.offset_ns, replica.host_ns))
    return tuple(Lane(i, devices[i], _clipped(spans.get(i, []), step.wall_ns)) for i in sorted(devices)), False


def _clipped(spans: Iterable[tuple[int, int]], wall_ns: int) -> tuple[Piece, ...]:
    pieces = (Piece("apply", max(start, 0), min(start + took, wall_ns)) for start, took in spans)
    return tuple(piece for piece in pieces if piece.end_ns > piece.start_ns)
