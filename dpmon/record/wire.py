"""Packs records: dpmon.assemble packs steps and calls of a process, and the supervisor packs its samples.

Facts that do not change from batch to batch (names, devices, shapes) are written once as a *definition*. Records refer
to it by number, so a call over 8 replicas takes 304 bytes. dpmon.record.codec reads these bytes.

Standard library only, and little of it: the training process imports this module for its names and its JSON.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = [
    "BODY_PHASES",
    "CALL_FORMAT",
    "CALL_PHASES",
    "CALL_STAGE",
    "CALL_TAG",
    "COLLECTIVE_TAG",
    "DDP",
    "DEFINE_HEAD",
    "DEFINE_TAG",
    "EVENT_TAG",
    "FAILED",
    "FSDP",
    "GRAD",
    "MAX_JSON",
    "MODES",
    "MORE",
    "PLAIN_FORMAT",
    "PLAIN_TAG",
    "PLAIN_WORDS",
    "RANK_MODES",
    "STEP_BODY",
    "STEP_EXTRA",
    "STEP_EXTRAS",
    "STEP_FORMAT",
    "STEP_TAG",
    "TIMED_HEAD",
    "TIMED_PHASES",
    "TIMED_TAG",
    "TRAINING",
    "VIRTUAL",
    "Collected",
    "Unended",
    "Untimed",
    "call_flags",
    "call_format",
    "mode_number",
    "pack_call",
    "pack_collective",
    "pack_definition",
    "pack_event",
    "pack_step",
    "pack_timed",
    "packed_json",
    "shortened",
    "unpack_collective",
    "with_extras",
]

MODES = ("", "dp", "single")
"""Modes by their number in records and in a ring's header; 0: no mode."""
CALL_PHASES = ("scatter", "replicate", "parallel_apply", "gather")
BODY_PHASES = ("data", "forward", "backward", "optimizer")
"""Phases with a fixed place in the record of every step."""
STEP_EXTRAS = ("copy", "copied_bytes", "sync", "synced", "unsynced", "sync_number")
"""Phases, quantities and numbers that few steps have, in order of their number in a record; append new ones."""
TIMED_PHASES = (*BODY_PHASES, "copy", "sync")
"""Phases of a step that have device times, in the order of a record. A record has no `sync` if it did not run, and no
`copy` if neither ran."""

DEFINE_TAG, CALL_TAG, STEP_TAG, EVENT_TAG, PLAIN_TAG, TIMED_TAG, COLLECTIVE_TAG = 1, 2, 3, 4, 5, 6, 7
VIRTUAL, TRAINING, GRAD, FAILED = 1, 2, 4, 8
DDP = "DistributedDataParallel"
FSDP = "fully_shard"
RANK_MODES = {DDP: "ddp", FSDP: "fsdp"}
"""Names of the mode in which ranks train one model together, by the `via` of their calls."""


class Untimed:
    """Why a device time is unknown, as numbers in records: dpmon.record.payloads.UNTIMED has the texts."""

    NONE, LATE, CAPTURED, NO_EVENT, FAULT, ENDED, RAISED, ON_CPU, CROSSED, TOO_MANY, COPIES, SAMPLED = range(12)


class Unended:
    """Why the end of a collective is unknown, as numbers in records: dpmon.record.codec.UNENDED has the texts."""

    NONE, ON_DEVICE, LATE, ENDED, NEVER_REPORTED = range(5)


class Collected(NamedTuple):
    """A collective, or a sample if `definition` is 0: a period in which all collectives are recorded.

    If the definition has no operation, it gives the reason why there are no samples.
    """

    number: int
    """Number of its span."""
    definition: int
    phase: int
    """Kind of the span in which it was launched; 0 for none."""
    unended: int
    """Why its end is unknown: a number of Unended."""
    step: int
    """The step that ran at its start, or at the middle of a sample; 0 for none."""
    start: int
    """When it was launched (monotonic ns)."""
    took: int
    """ns from the launch to its end; -1 if unknown."""
    queued: int
    """ns from the launch to the end of the collectives launched earlier on its group; -1 if unknown."""
    quantity: int
    """Bytes of a collective, or number of collectives of a sample."""

    @property
    def time_of_step(self) -> int:
        """The time that decides to which step it belongs: the launch of a collective, the middle of a sample."""
        return self.start if self.definition else self.start + self.took // 2


COLLECTIVE = struct.Struct("<BBBxIQQqqqQ")
"""COLLECTIVE_TAG, unended, phase, definition, number, step, start, took, queued, quantity: see Collected."""
TIMED_HEAD = struct.Struct("<BBHI")
"""TIMED_TAG, why a time is missing, number of times, bytes of the call or step. The call or step follows, then its
times (ms, NaN if unknown)."""

DEFINE_HEAD = struct.Struct("<B3xI")
PLAIN_FORMAT = "<BBBBIQQqqII"
"""A call without phases, with one replica that takes the whole call: PLAIN_TAG, mode, flags, number of stages (0), then
the parameters of pack_call from `layout` to `outputs`."""
PLAIN_WORDS = "<QQQqqQ"
"""The same bytes as fewer numbers: tag | mode << 8 | flags << 16 | layout << 32, step, call, start, wall,
inputs | outputs << 32."""
CALL_FORMAT = PLAIN_FORMAT + "qq" * len(CALL_PHASES)
CALL_STAGE = struct.Struct("<IIIxxxxqq")
STEP_FORMAT = "<BBBxIQqqqqqqq"
"""STEP_TAG, mode, number of extras, number of words of spans, step, start, wall, samples, BODY_PHASES: see pack_step.
The words of its spans follow, then its extras."""
_STEP_WORDS = "<QQqqqqqqq"
"""The same bytes as fewer numbers: tag | mode << 8 | words of spans << 32, then step and the others."""
STEP_BODY = struct.Struct(STEP_FORMAT)
STEP_EXTRA = struct.Struct("<Bq")
"""One extra: its number in STEP_EXTRAS, then the ns of a phase or the value of a quantity."""
_EXTRA_NUMBERS = {name: number for number, name in enumerate(STEP_EXTRAS)}
_call_structs: dict[int, struct.Struct] = {}
_step_structs: dict[int, struct.Struct] = {}
_time_structs: dict[int, struct.Struct] = {}
_NAN = float("nan")

MORE = "\u2026"
"""As the path of a size, it stands for all tensors that are not listed; that size has no shape, dtype or bytes. At the
end of a name or text, it marks a cut."""
MAX_NAME = 200
MAX_JSON = 60_000
"""Most bytes of JSON in one record. A record is never larger than a block of the ring."""
_LENGTHS = (4096, 1024, 256, 64, 16)
"""Lengths (characters) to which texts are cut, tried in order until the record fits."""


def mode_number(mode: str) -> int:
    """Return the number of a mode. Raises ValueError for an unknown name."""
    return MODES.index(mode)


def shortened(text: str, most: int = MAX_NAME) -> str:
    """Return a name from the script, cut to `most` characters. A cut name ends with MORE.

    The result is a plain str: records must not keep the script's own subclass of str alive.
    """
    text = "".join((text,))
    return text if len(text) <= most else text[: most - 1] + MORE


def packed_json(value: Any) -> bytes:
    """Return the value as JSON; long texts are cut if the record would not fit into the ring."""
    packed = json.dumps(value, separators=(",", ":"))
    for most in _LENGTHS:
        if len(packed) <= MAX_JSON:
            break
        packed = json.dumps(_cut(value, most), separators=(",", ":"))
    return packed.encode()


def _cut(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return shortened(value, most)
    if isinstance(value, Mapping):
        return {_cut(key, most): _cut(child, most) for key, child in value.items()}
    return [_cut(child, most) for child in value] if isinstance(value, (list, tuple)) else value


def pack_definition(number: int, value: Any) -> bytes:
    """Pack a definition: a layout (root, via, devices, absent), a stage (device, parts), a collective or sizes.

    A size is (path, shape, dtype, bytes), and the global shape for a DTensor. A collective is (operation, group, size,
    ranks, dtype, backend, device), or (operation None, why) if collectives cannot be recorded.
    """
    return DEFINE_HEAD.pack(DEFINE_TAG, number) + packed_json(value)


def pack_event(kind: str, data: Mapping[str, Any]) -> bytes:
    """Pack an event as JSON; `data` without its kind."""
    return bytes((EVENT_TAG,)) + packed_json({"kind": kind, **data})


def call_flags(virtual: bool, training: bool, grad: bool, failed: bool) -> int:
    """Return the flag byte of a call."""
    return virtual * VIRTUAL | training * TRAINING | grad * GRAD | failed * FAILED


def call_format(replicas: int) -> str:
    """Return the struct format of a call without stages, over this many replicas.

    CALL_TAG, mode, flags, number of stages, then the other parameters of pack_call.
    """
    return CALL_FORMAT + "IIqq" * replicas


def pack_call(
    mode: int,
    flags: int,
    layout: int,
    step: int,
    call: int,
    start_ns: int,
    wall_ns: int,
    inputs: int,
    outputs: int,
    phases: Sequence[int],
    replicas: Sequence[int],
    stages: Sequence[int] = (),
) -> bytes:
    """Pack a call.

    `phases`: offset and duration (ns) for each of CALL_PHASES, offset -1 if it did not run. `replicas`: four numbers
    per replica: inputs, outputs (definitions, 0 unknown), offset, duration. `stages`: five numbers per stage, at most
    255 stages: device and parts (a definition), then the numbers of a replica, duration -1 if it did not end. Times are
    monotonic ns.
    """
    count = len(replicas) >> 2
    packer = _call_structs.get(count)
    if packer is None:
        packer = _call_structs[count] = struct.Struct(call_format(count))
    last = len(stages) // 5
    head = packer.pack(
        CALL_TAG, mode, flags, last, layout, step, call, start_ns, wall_ns, inputs, outputs, *phases, *replicas
    )
    return head + b"".join(CALL_STAGE.pack(*stages[5 * i : 5 * i + 5]) for i in range(last))


def pack_step(
    mode: int,
    step: int,
    start_ns: int,
    wall_ns: int,
    samples: int,
    phases: Sequence[int],
    spans: Sequence[int] = (),
) -> bytes:
    """Pack a step without extras; `samples` -1 if unknown.

    `phases`: ns for each of BODY_PHASES, -1 if it did not run. `spans`: words from dpmon.record.step_spans; empty if
    unknown.
    """
    count = len(spans)
    packer = _step_structs.get(count)
    if packer is None:
        packer = _step_structs[count] = struct.Struct(f"{_STEP_WORDS}{count}Q")
    head = STEP_TAG | mode << 8 | count << 32
    return packer.pack(head, step, start_ns, wall_ns, samples, *phases, *spans)


def with_extras(step: bytes, extras: Mapping[str, int]) -> bytes:
    """Add phases (ns) and quantities of STEP_EXTRAS to a step from `pack_step`."""
    found = bytearray(step)
    found[2] = len(extras)
    for name, value in extras.items():
        found += STEP_EXTRA.pack(_EXTRA_NUMBERS[name], value)
    return bytes(found)


def pack_collective(collected: Collected) -> bytes:
    """Pack a collective or a sample."""
    number, definition, phase, unended, *rest = collected
    return COLLECTIVE.pack(COLLECTIVE_TAG, unended, phase, definition, number, *rest)


def unpack_collective(payload: bytes) -> Collected:
    """Unpack a payload of `pack_collective`. Raises struct.error if it is damaged."""
    _, unended, phase, definition, number, *rest = COLLECTIVE.unpack(payload)
    return Collected(number, definition, phase, unended, *rest)


def pack_timed(record: bytes, times: Sequence[float | None], why: int) -> bytes:
    """Add device times (ms) to a packed call or step. `why`: the reason for times that are None, a number of Untimed.

    Times of a call: each of CALL_PHASES, then each replica or stage. Times of a step: the first ones or all of
    TIMED_PHASES.
    """
    count = len(times)
    packer = _time_structs.get(count)
    if packer is None:
        packer = _time_structs[count] = struct.Struct(f"<{count}f")
    known = [_NAN if time is None else time for time in times]
    return TIMED_HEAD.pack(TIMED_TAG, why, count, len(record)) + record + packer.pack(*known)
