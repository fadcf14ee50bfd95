"""Defines a span: one finished phase of a process's work, as five 64-bit words in a ring.

    w0   kind, lap, flags, enclosing kind, thread, site: see the shifts below
    w1   start (monotonic ns)
    w2   duration (ns)
    w3   definitions of the inputs (lower half) and the outputs (upper half), 0: unknown
    w4   number of the slot plus one

A training process writes a span when a phase ends. dpmon.assemble derives steps and calls from the spans. A nested span
comes before the span of the same thread that encloses it. The enclosing kind is the kind of that outer span.

Standard library only: this module is imported into the training process.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind:
    """The kinds of spans, as the lowest byte of w0; 0: none."""

    FETCH = 1
    CALL = 2
    WRAPPED = 3
    """A call through a wrapper such as DataParallel, or of a model that dpmon runs data-parallel."""
    SCATTER = 4
    REPLICATE = 5
    PARALLEL_APPLY = 6
    GATHER = 7
    REPLICA = 8
    STAGE = 9
    BACKWARD = 10
    OPTIMIZER = 11
    COPY = 12
    DEVICE_TIME = 13
    """A device time of an earlier span."""
    PAUSE = 14
    MEMORY = 15
    """A measurement of memory by dpmon itself."""
    OPTIMIZER_FREED = 16
    """An optimizer was freed."""
    RESTARTED = 17
    """A call starts again after dp failed; its earlier parts do not count."""
    SYNC = 18
    BUCKETS = 19
    COLLECTIVE = 20
    LOSS = 21
    """The value from which a backward pass started: a 64-bit float in place of sizes. Its start is that of the pass."""
    CLOSURE = 22
    """The closure of an optimizer step: code of the script, which is no part of the optimizer phase."""
    MASK = 23
    """An attention mask: the number of its nonzero values in place of inputs, that of all values for outputs."""
    FLOPS = 24
    """FLOPs are counted from here until the end of the step."""
    CHECKPOINT = 25
    """Only an activity: a checkpoint is being saved. No span is written."""
    PROFILE = 26
    """torch.profiler started, ran or ended in this step."""


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
    Kind.PAUSE: "paused",
    Kind.SYNC: "sync",
    Kind.CHECKPOINT: "checkpoint",
}
"""Activity of a process during a span, by kind; "other" during spans of all other kinds. Phases of a step have the same
names as in records."""
COUNTED = {Kind.COPY: "copied_bytes"}
"""Kinds of spans that have a quantity of the step in place of sizes (inputs | outputs << 32)."""


class Flag:
    """The flags of a span."""

    TRAINING, GRAD, FAILED, VIRTUAL, DP, SINGLE, EXHAUSTED, TIMED, BY_SCRIPT, UNTIMED = (1 << bit for bit in range(10))
    """EXHAUSTED: the fetch found the loader at its end. BY_SCRIPT: the script calls this primitive itself. UNTIMED: the
    span is not timed on devices, because sampling skips its step."""
    UNSYNCED = UNTIMED
    """The bit of UNTIMED, in a span of kind SYNC, which is never UNTIMED: the pass averaged nothing."""


WRAPPER_AT = 12
"""Shift in the site of a span of kind SYNC or BUCKETS. The bits below it hold the number of buckets (SYNC) or the
number of the first bucket (BUCKETS). The bits above it hold the number of the wrapper, because one backward pass can
run through several wrappers."""
LEAD_NS, MAX_LEAD = 64_000, 65_504.0
"""Unit and limit of leads. The lead of a bucket is how long before the last gradient it was ready. A span of kind
BUCKETS has the leads of four buckets in place of sizes, as half-precision floats: exact to 0.05%, at most 4 s."""
LAP_AT, FLAGS_AT, INSIDE_AT, THREAD_AT, SITE_AT = 8, 16, 26, 31, 40
"""Shifts in w0: lap of the ring (8 bits), flags (10), enclosing kind (5), thread (9), site (24)."""
MAX_THREAD, MAX_SITE = (1 << 9) - 1, (1 << 24) - 1


_new_tuple = tuple.__new__


class Span(NamedTuple):
    """A span. Times in ns."""

    number: int
    """Number of its slot. Spans are numbered from 0 in the order of writing, roughly the order of their ends."""
    kind: int
    flags: int
    inside: int
    """Kind of the enclosing span; 0 for none."""
    thread: int
    site: int
    """Depends on the kind: definition of a layout, stage, collective or loss; number of a replica, optimizer or memory
    measurement; number of the loop over a loader (FETCH, which has dataset and length + 1 in place of sizes; 0:
    unknown); buckets and wrapper (see WRAPPER_AT); device, number of devices and reason (DEVICE_TIME); or 0."""
    start: int
    took: int
    inputs: int
    outputs: int

    @property
    def end(self) -> int:
        """The time at which it ended (monotonic ns)."""
        return self.start + self.took


def unpack_span(number: int, word0: int, start: int, took: int, sizes: int) -> Span:
    """Return the span from the number and the words of its slot."""
    words = (
        number,
        word0 & 0xFF,
        word0 >> FLAGS_AT & 0x3FF,
        word0 >> INSIDE_AT & 0x1F,
        word0 >> THREAD_AT & MAX_THREAD,
        word0 >> SITE_AT,
        start,
        took,
        sizes & 0xFFFFFFFF,
        sizes >> 32,
    )
    return _new_tuple(Span, words)  # half the time of the constructor, and this runs for every span
