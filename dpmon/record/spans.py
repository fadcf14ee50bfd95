"""A span: one phase of a process's work that has ended, as five 64-bit words in a ring.

    w0   kind, lap, flags, enclosing kind, thread, site: see the shifts below
    w1   when it began (monotonic ns)
    w2   how long it took (ns)
    w3   definitions of the inputs (lower half) and the outputs (upper half), 0: not known
    w4   number of the slot plus one

A training process writes a span when a phase ends, and draws no conclusion from it: dpmon.supervise.assemble does. A
span that lies within another one on its thread comes before it, and names its kind as the enclosing one.

Standard library only: this module is imported into the training process.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FLAGS_AT", "INSIDE_AT", "KINDS", "LAP_AT", "SITE_AT", "THREAD_AT", "Flag", "Kind", "Span", "unpacked"]


class Kind:
    """What a span is of, as the lowest byte of w0; 0 is none."""

    (
        FETCH,
        CALL,
        WRAPPED,
        SCATTER,
        REPLICATE,
        PARALLEL_APPLY,
        GATHER,
        REPLICA,
        STAGE,
        BACKWARD,
        OPTIMIZER,
        COPY,
        TIME,
        PAUSE,
        LOOK,
        GONE,
        AGAIN,
    ) = range(1, 18)


KINDS = (
    "other",
    "data",
    "forward",
    "forward",
    "forward",
    "forward",
    "forward",
    "forward",
    "forward",
    "forward",
    "backward",
    "optimizer",
    "copy",
    "",
    "paused",
    "other",
    "",
    "",
)
"""What a process does while such a span is under way."""


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
