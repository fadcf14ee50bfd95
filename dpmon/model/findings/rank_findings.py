"""Findings about waits and communication between ranks. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dpmon.model.communication import Communication
from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import MIN_STEPS
from dpmon.model.stragglers import delay_sentence, slowest_count_text
from dpmon.text.formatting import (
    format_bytes,
    format_count,
    format_count_with_noun,
    format_long_duration,
    format_percent,
)

EXPOSED_SHARE = 0.2
"""Smallest share of the step to report. Some communication is always exposed: nothing can hide the last bucket."""
OWN_SHARE = 0.2
"""Smallest share of phase `other` in the step, on every rank, to mention the script's own collectives."""
TURN_SHARE = 0.1
"""Smallest mean wait as a share of the step to report, if no rank stands out: less is the noise of equal work."""
BUCKET_SHARE, BUCKET_EXPOSED = 0.5, 0.1
"""Smallest share of the last bucket in all bytes, and of exposed communication in the step, to report."""
BUCKET_BYTES = 8 << 20
"""Smallest last bucket (bytes) for which smaller buckets pay off: each bucket has its own latency."""
LARGE_BYTES = 1 << 20
"""Smallest size (bytes) of all gradients for which half precision, or a copy less, is worth a try."""
AVERAGED_TIMES = 1.5
"""Fewest synchronized passes per step with an optimizer step. A script that skips some optimizer steps (overflows of
mixed precision) stays below."""
MIN_ALL_USED = 3
"""Fewest iterations in which all parameters were used: a single one may be an exception."""
_SMALL = 0.05
"""Weight of a finding if the lost time is unknown."""
_BUCKETS_NAMED = 4

_SLOW_DEVICE = (
    "give every rank batches of the same size (or sequence length); see whether that rank's device is slower than the"
    " others, or busy with another process"
)
_SLOW_PHASE = {
    "data": "more loader workers on that rank; samples that need equal work on all ranks; check its disk and network",
    "copy": "pinned memory (DataLoader pin_memory); check the link of its GPU (nvidia-smi topo -m)",
    "forward": _SLOW_DEVICE,
    "backward": _SLOW_DEVICE,
    "optimizer": "an optimizer state of the same size on every rank; check whether the processors of its host are busy",
    "other": "if only this rank logs, saves checkpoints or evaluates: do this less often, or in a thread",
}
_NO_PHASE = "look for a difference on that rank: its GPU, clocks, other processes on its host, its share of the data"


def find_rank_problems(found: Communication | None) -> Iterator[Finding]:
    """All findings about ranks."""
    if found is not None:
        yield from _find_straggler(found)
        yield from _find_alternating_waits(found)
        yield from _find_script_collectives(found)
        yield from _find_exposed_communication(found)
        yield from _find_large_last_bucket(found)
        yield from _find_unneeded_sync(found)
        yield from _find_needless_unused_search(found)


def _find_straggler(found: Communication) -> Iterator[Finding]:
    slow = found.straggler
    if slow is not None and (found.lately or slow.steps >= MIN_STEPS):  # a straggler has enough steps for now
        text, often = delay_sentence(slow), slowest_count_text(slow, lately=found.lately)
        mean = f"mean step {format_long_duration(found.step_ns)} on {len(found.ranks_with_waits)} ranks"
        yield Finding(
            "straggler",
            f"{text[0].upper()}{text[1:]}.",
            f"{often}; {mean}" if often else mean,
            _NO_PHASE if slow.phase is None else _SLOW_PHASE.get(slow.phase, _NO_PHASE),
            min(slow.share, 1.0),
            min(slow.share, 1.0),
            {} if slow.phase is None else {slow.phase: min(slow.share, 1.0)},
        )


def _find_alternating_waits(found: Communication) -> Iterator[Finding]:
    """Waits for a rank that is another one each time. With equal work, all ranks would take the mean of their times."""
    if (
        found.straggler is not None
        or len(found.ranks_with_waits) < 2
        or found.step_count_with_waits < MIN_STEPS
        or not found.step_ns
    ):
        return
    waits = [one.wait_ns or 0.0 for one in found.ranks_with_waits]
    share = sum(waits) / len(waits) / found.step_ns
    if share >= TURN_SHARE:
        yield Finding(
            "in turn",
            f"The ranks wait for each other for {format_percent(share)} of the time of the steps, each time for another"
            " one.",
            f"wait mean {format_long_duration(share * found.step_ns)},"
            f" step mean {format_long_duration(found.step_ns)}"
            f" over {format_count_with_noun(found.step_count_with_waits, 'step')} of {len(waits)} ranks;"
            " no rank is the slowest unusually often",
            "batches of equal work on all ranks: group samples of similar length, or pack them",
            min(share, 1.0),
            min(share, 1.0),
            {"wait": min(share, 1.0)},
        )


def _find_script_collectives(found: Communication) -> Iterator[Finding]:
    """No rank is named: how long a rank was blocked in these collectives is not known."""
    if not found.own_collective_names or min((one.steps for one in found.ranks), default=0) < MIN_STEPS:
        return
    shares = [one.phases.get("other", 0.0) / one.step_ns for one in found.ranks if one.step_ns]
    least = min(shares, default=0.0)
    if len(shares) > 1 and least >= OWN_SHARE:
        yield Finding(
            "own collectives",
            f"The ranks may wait for each other in the script's own {found.own_collective_names}:"
            f" the script's own work (other) takes {format_percent(least)} of the step or more on every rank.",
            f"{found.own_collective_names} outside the phases in the newest sampled steps",
            "compare the times of these collectives between ranks (dpmon export --kind collective, phase other): in a"
            " collective that blocks, the rank with the shortest time came last; with such calls after the optimizer's"
            " step, `wait` shows who is late",
            least / 2,
        )


def _find_exposed_communication(found: Communication) -> Iterator[Finding]:
    share = found.exposed_share
    if share is None or share < EXPOSED_SHARE or found.step_count_with_waits < MIN_STEPS:
        return
    advice = ["larger batches (they change the training itself: learning rate)"]
    if not found.unsynced:
        advice.append("gradient accumulation under no_sync")
    large = sum(one.parameter_bytes or 0 for one in found.wrappers) >= LARGE_BYTES
    # torch's documentation of bf16_compress_hook: it needs NCCL.
    if large and all(one.comm_hook is None and one.backend == "nccl" for one in found.wrappers):
        advice.append("gradients in half precision (bf16_compress_hook)")
    if large and any(not one.gradient_as_bucket_view for one in found.wrappers):
        advice.append("gradient_as_bucket_view=True, which saves a copy")
    if any(len(one.bucket_bytes) > 1 for one in found.wrappers):
        advice.append("another bucket_cap_mb")
    yield Finding(
        "exposed",
        f"Communication that nothing hides takes {format_percent(share)} of the time of the steps.",
        f"exposed mean {format_long_duration(found.exposed_ns)}, step mean {format_long_duration(found.step_ns)} over"
        f" {format_count_with_noun(found.step_count_with_waits, 'step')} of {len(found.ranks_with_waits)} ranks",
        "; ".join(advice),
        min(share, 1.0),
        min(share, 1.0),
        {"exposed": min(share, 1.0)},
    )


def _find_large_last_bucket(found: Communication) -> Iterator[Finding]:
    """The last bucket is averaged after the whole computation, so its communication stays exposed."""
    share = found.exposed_share
    if share is None or share < BUCKET_EXPOSED or found.step_count_with_waits < MIN_STEPS or len(found.wrappers) != 1:
        return
    (one,) = found.wrappers
    sizes, whole = one.bucket_bytes, sum(one.bucket_bytes)
    if not whole or sizes[-1] < max(BUCKET_SHARE * whole, BUCKET_BYTES):
        return
    if one.bucket_cap_bytes is not None and sizes[-1] >= 2 * one.bucket_cap_bytes:
        return  # torch closes a bucket at its cap: a parameter larger than the cap, which no cap divides
    named = ", ".join(map(format_bytes, sizes[-_BUCKETS_NAMED:]))
    named = named if len(sizes) <= _BUCKETS_NAMED else f"... {named}"
    cap = "unknown" if one.bucket_cap_bytes is None else format_bytes(one.bucket_cap_bytes)
    yield Finding(
        "bucket",
        f"The last bucket has {format_percent(sizes[-1] / whole)} of the gradients,"
        " and no computation is left to hide it."
        if len(sizes) > 1
        else "All gradients are in one bucket, and no computation is left to hide it.",
        f"{format_count_with_noun(len(sizes), 'bucket')}: {named};"
        f" exposed mean {format_long_duration(found.exposed_ns)}, {format_percent(share)} of the step",
        f"a smaller bucket_cap_mb (now {cap}), so that averaging begins earlier and the last bucket is small",
        share / 2,
    )


def _find_unneeded_sync(found: Communication) -> Iterator[Finding]:
    """Gradients averaged several times per optimizer step. Only for one model: several models need several passes."""
    _, synced, unsynced, optimized = found.passes
    each = optimized // max(len(found.ranks), 1)
    if len(found.wrappers) != 1 or each < MIN_STEPS or synced < AVERAGED_TIMES * optimized:
        return
    times = synced / optimized
    # A rank that is always slow stays slow; waits for changing ranks may even out over the passes.
    waits = 0.0 if found.straggler is not None else found.wait_share or 0.0
    parts = {"exposed": (found.exposed_share or 0.0) * (1 - 1 / times), "wait": waits}
    lost = sum(parts.values())
    yield Finding(
        "accumulation",
        f"Gradients are averaged {times:.1f} times for each step of the optimizer.",
        f"{format_count(synced)} synchronized backward passes, {format_count(unsynced)} under no_sync,"
        f" {format_count(optimized)} steps with an optimizer step",
        "if gradients accumulate: no_sync() around all backward passes but the last before the optimizer's step",
        min(max(lost, _SMALL), 1.0),
        min(lost, 1.0) if found.step_count_with_waits >= MIN_STEPS else None,
        parts if found.step_count_with_waits >= MIN_STEPS else {},
    )


def _find_needless_unused_search(found: Communication) -> Iterator[Finding]:
    for one in found.wrappers:
        if one.find_unused_parameters and one.all_used >= MIN_ALL_USED and found.steps >= MIN_STEPS:
            named = f" of {one.root}" if len(found.wrappers) > 1 else ""
            yield Finding(
                "unused",
                f"find_unused_parameters{named} is on, although every parameter is used.",
                f"0 bytes unused in {format_count_with_noun(one.all_used, 'iteration')} checked by torch,"
                f" up to iteration {format_count(one.iteration)}; {format_count_with_noun(found.steps, 'step')}",
                "find_unused_parameters=False, if every step uses them all: it saves a search of the graph in each",
                _SMALL,
            )
