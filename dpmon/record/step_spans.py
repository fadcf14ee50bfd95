"""Packs start and duration of a step's phases into words, which the history keeps unchanged, and reads them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from dpmon.record.kinds import PhaseSpan
from dpmon.record.schema import SPAN_PHASES

MAX_SPANS = 256
"""Most recorded spans in one step; later spans are only counted."""
SPAN_PHASE = 15
"""Mask of the phase in a word of spans. If all these bits are set, the word is not a span but a head."""
BUCKET = 14
"""Used in place of a phase to mark when the last gradient of a bucket was ready; without a duration."""
SPAN_WORD = 30
"""Bits of a start and of a duration if both are in one word: phase | start << 4 | duration << 34."""
SPAN_HEAD, SPAN_HEAD_WIDE = 8, 16
"""A step without spans, with missing spans or with large numbers begins with a head: SPAN_PHASE | wide | missing spans
<< SPAN_HEAD. If `wide` is SPAN_HEAD_WIDE, each span has two words: phase | start << 4, and its duration."""
_SPAN_START = (1 << 4 + SPAN_WORD) - 1
"""Mask of phase and start in a word of spans."""
_made = tuple.__new__

assert len(SPAN_PHASES) <= BUCKET, "too many phases for a word of spans"


def span_words(spans: Sequence[Sequence[int]], start_ns: int, wall_ns: int, missing: int = 0) -> list[int]:
    """Return the spans of a step's phases for `pack_step`: one word per span, or two if a number is large.

    `spans`: phase, start (monotonic ns) and duration of each, in order of start, outer before nested ones, at most
    MAX_SPANS. A phase is an index in dpmon.record.schema.SPAN_PHASES, or BUCKET. `missing`: number of spans left out.
    """
    words = []
    bits = 0
    for phase, start, took in spans:
        start -= start_ns
        bits |= start | took
        words.append(phase | start << 4 | took << 34)
    if bits >> SPAN_WORD:  # a large number, or a negative one
        words = _wide_words(spans, start_ns, wall_ns)
        return [SPAN_PHASE | SPAN_HEAD_WIDE | missing << SPAN_HEAD, *words]
    return [SPAN_PHASE | missing << SPAN_HEAD, *words] if missing or not words else words


def _wide_words(spans: Sequence[Sequence[int]], start_ns: int, wall_ns: int) -> list[int]:
    """Return two words per span. Damaged spans are cut at the limits of the step."""
    words: list[int] = []
    for phase, start, took in spans:
        begin = min(max(start - start_ns, 0), wall_ns)
        words += (phase | begin << 4, min(took, wall_ns - begin))
    return words


class KeptSpans(NamedTuple):
    """The unpacked spans of a step."""

    spans: tuple[PhaseSpan, ...]
    missing: int
    """Number of spans and buckets beyond the limit, which were only counted."""
    buckets: tuple[int, ...]
    """When each bucket of gradients was ready, in ns after the step's start; in order of time."""


def kept_spans(packed: bytes) -> KeptSpans:
    """Return the spans of a step from `StepFields.spans`. Raises struct.error if they are damaged."""
    if len(packed) % 8 or len(packed) > 8 * (1 + 2 * MAX_SPANS):
        raise struct.error("spans of a step are cut off, or too many")
    words = struct.unpack(f"<{len(packed) // 8}Q", packed)
    wide, missing = 0, 0
    if words and words[0] & SPAN_PHASE == SPAN_PHASE:
        wide, missing = words[0] & SPAN_HEAD_WIDE, words[0] >> SPAN_HEAD
        words = words[1:]
    if wide:
        starts, durations = words[::2], words[1::2]
    else:
        starts = tuple([word & _SPAN_START for word in words])
        durations = tuple([word >> 4 + SPAN_WORD for word in words])
    buckets: tuple[int, ...] = ()
    pairs = list(zip(starts, durations, strict=True))
    if any(at & SPAN_PHASE == BUCKET for at in starts):
        buckets = tuple([at >> 4 for at in starts if at & SPAN_PHASE == BUCKET])
        pairs = [(at, took) for at, took in pairs if at & SPAN_PHASE != BUCKET]
    spans = tuple([_made(PhaseSpan, (SPAN_PHASES[at & SPAN_PHASE], at >> 4, took)) for at, took in pairs])
    return KeptSpans(spans, missing, buckets)
