"""A span: one phase of a process's work that has ended, as five 64-bit words in a ring.

    w0   kind, lap, flags, enclosing kind, thread, site: see the shifts below
    w1   when it began (monotonic ns)
    w2   how long it took (ns)
    w3   definitions of the inputs (lower half) and the outputs (upper half), 0: not known
    w4   number of the slot plus one

A training process writes a span when a phase ends, and draws no conclusion from it: dpmon.assemble does. A
span that lies within another one on its thread comes before it, and names its kind as the enclosing one.

Standard library only: this module is imported into the training process.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind:
    """What a span is of, as the lowest byte of w0; 0 is none."""

    FETCH = 1
    CALL = 2
    WRAPPED = 3
    SCATTER = 4
    REPLICATE = 5
    PARALLEL_APPLY = 6
    GATHER = 7
    REPLICA = 8
    STAGE = 9
    BACKWARD = 10
    OPTIMIZER = 11
    COPY = 12
    TIME = 13
    PAUSE = 14
    LOOK = 15
    GONE = 16
    AGAIN = 17


DOING = {
    Kind.FETCH: "data",
    Kind.CALL: "forward",
    Kind.WRAPPED: "forward",
    Kind.SCATTER: "forward",
    Kind.REPLICATE: "forward",
    Kind.PARALLEL_APPLY: "forward",
    Kind.GATHER: "forward",
    Kind.REPLICA: "forward",
    Kind.STAGE: "forward",
    Kind.BACKWARD: "backward",
    Kind.OPTIMIZER: "optimizer",
    Kind.COPY: "copy",
    Kind.TIME: "other",
    Kind.PAUSE: "paused",
    Kind.LOOK: "other",
    Kind.GONE: "other",
    Kind.AGAIN: "other",
}
"""Every kind: what a process does while such a span is under way. A phase of a step has its name in the records."""
COUNTED = {Kind.COPY: "copied_bytes"}
"""Kinds with a quantity of the step in the place of their sizes (inputs | outputs << 32)."""


class Flag:
    """What else is known of a span."""

    TRAINING, GRAD, FAILED, VIRTUAL, DP, SINGLE, OVER, TIMED, HAND, SKIPPED = (1 << bit for bit in range(10))


LAP_AT, FLAGS_AT, INSIDE_AT, THREAD_AT, SITE_AT = 8, 16, 26, 31, 40
"""Shifts in w0: lap of the ring (8 bits), flags (10), enclosing kind (5), thread (9), site (24)."""
MAX_THREAD, MAX_SITE = (1 << 9) - 1, (1 << 24) - 1


class Span(NamedTuple):
    """A span, taken apart."""

    number: int
    """Of its slot: spans are numbered from 0 in the order in which they were written, roughly that of their ends."""
    kind: int
    flags: int
    inside: int
    """Kind of the enclosing span, 0 for none."""
    thread: int
    site: int
    """By kind: the definition of a call's layout; a replica's index; an optimizer; a device; 0."""
    start: int
    took: int
    inputs: int
    outputs: int

    @property
    def end(self) -> int:
        """When it ended (monotonic ns)."""
        return self.start + self.took


def unpacked(number: int, head: int, start: int, took: int, sizes: int) -> Span:
    """The span in a slot's words."""
    return Span(
        number,
        head & 0xFF,
        head >> FLAGS_AT & 0x3FF,
        head >> INSIDE_AT & 0x1F,
        head >> THREAD_AT & MAX_THREAD,
        head >> SITE_AT,
        start,
        took,
        sizes & 0xFFFFFFFF,
        sizes >> 32,
    )
