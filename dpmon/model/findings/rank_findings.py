"""Findings about waits and communication between ranks."""

from __future__ import annotations

from collections.abc import Iterator

from dpmon.model.communication import Communication
from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import MIN_STEPS
from dpmon.model.stragglers import delay_sentence, slowest_count_text
from dpmon.record.schema import SECOND
from dpmon.text.formatting import (
    format_bytes,
    format_count,
    format_count_with_noun,
    format_long_duration,
    format_percent,
)

MIN_EXPOSED_SHARE = 0.2
"""Smallest share of the step to report. Some communication is always exposed, such as that of the last bucket."""
MIN_OTHER_PHASE_SHARE = 0.2
"""Smallest share of phase `other` in the step, on every rank, to mention the script's own collectives."""
MIN_ALTERNATING_WAIT_SHARE = 0.1
"""Smallest mean wait as a share of the step to report, if no rank stands out: less is the noise of equal work."""
MIN_LAST_BUCKET_SHARE, MIN_BUCKET_EXPOSED_SHARE = 0.5, 0.1
"""Smallest share of the last bucket in all bytes, and of exposed communication in the step, to report."""
MIN_LAST_BUCKET_BYTES = 8 << 20
"""Smallest last bucket (bytes) for which smaller buckets pay off: each bucket has its own latency."""
MIN_LARGE_BYTES = 1 << 20
"""Smallest size (bytes) of all gradients for which half precision, or a copy less, is worth a try."""
MIN_SYNCS_PER_UPDATE = 1.5
"""Fewest sync passes per update. A script that skips some optimizer steps (overflows of mixed precision) stays
below."""
MIN_ALL_USED = 3
"""Fewest iterations in which all parameters were used: a single one may be an exception."""
_UNKNOWN_WEIGHT = 0.05
"""Weight of a finding if the lost time is unknown."""
_MAX_NAMED_BUCKETS = 4

_SLOW_DEVICE = (
    "give every rank batches of the same size (or sequence length); see whether that rank's device is slower than the"
    " others, or busy with another process"
)
_SLOW_PHASE = {
    "data": "more loader workers on that rank; samples that need equal work on all ranks; check its disk and network",
    "copy": "pinned memory (DataLoader pin_memory); check the link of its GPU (nvidia-smi topo -m)",
    "forward": _SLOW_DEVICE,
    "backward": _SLOW_DEVICE,
    "optimizer": "an optimizer state of the same size on every rank; check whether the CPU cores of its host are busy",
    "other": "if only this rank logs, saves checkpoints or evaluates: do this less often, or in a thread",
}
_NO_PHASE = "look for a difference on that rank: its GPU, clocks, other processes on its host, its share of the data"


def find_rank_problems(communication: Communication | None, steps: float | None = None) -> Iterator[Finding]:
    """Yield all findings about ranks; none for None.

    `steps`: the number of steps of a rank in the whole run. Without it, nothing is said about what they save.
    """
    if communication is not None:
        if steps is not None and communication.unit == "update":  # the means are per update
            steps *= communication.tally.updates / communication.tally.steps
        yield from _find_straggler(communication, steps)
        yield from _find_alternating_waits(communication, steps)
        yield from _find_script_collectives(communication)
        yield from _find_exposed_communication(communication, steps)
        yield from _find_large_last_bucket(communication)
        yield from _find_unneeded_sync(communication, steps)
        yield from _find_needless_unused_search(communication)


def _saved_s(ns_per_step: float | None, steps: float | None) -> float | None:
    """Return the elapsed time (s) that `steps` steps save; None if one of them is unknown. Ranks step together."""
    return None if ns_per_step is None or steps is None else ns_per_step * steps / SECOND


def _find_straggler(communication: Communication, steps: float | None) -> Iterator[Finding]:
    straggler = communication.straggler
    # Over the last steps, a straggler always has enough of them.
    if straggler is None or not (communication.lately or straggler.steps >= MIN_STEPS):
        return
    text, count_text = delay_sentence(straggler), slowest_count_text(straggler, lately=communication.lately)
    mean = f"mean {communication.unit} {format_long_duration(communication.step_ns)}"
    mean += f" on {len(communication.ranks_with_waits)} ranks"
    yield Finding(
        "straggler",
        f"{text[:1].upper()}{text[1:]}.",
        f"{count_text}; {mean}" if count_text else mean,
        _NO_PHASE if straggler.phase is None else _SLOW_PHASE.get(straggler.phase, _NO_PHASE),
        min(straggler.share, 1.0),
        _saved_s(straggler.excess_ns, steps),
    )


def _find_alternating_waits(communication: Communication, steps: float | None) -> Iterator[Finding]:
    """Yield a finding if ranks wait, but for a different rank each time.

    With equal work, every rank would take the mean time.
    """
    if (
        communication.straggler is not None
        or len(communication.ranks_with_waits) < 2
        or communication.step_count_with_waits < MIN_STEPS
        or not communication.step_ns
    ):
        return
    waits = [rank.wait_ns or 0.0 for rank in communication.ranks_with_waits]
    share = sum(waits) / len(waits) / communication.step_ns
    if share >= MIN_ALTERNATING_WAIT_SHARE:
        yield Finding(
            "in turn",
            f"The ranks wait for each other for {format_percent(share)} of step time, not always for the same rank.",
            f"wait mean {format_long_duration(share * communication.step_ns)},"
            f" {communication.unit} mean {format_long_duration(communication.step_ns)}"
            f" over {communication.text_of_known_waits} of {len(waits)} ranks;"
            " no rank is the slowest unusually often",
            "batches of equal work on all ranks: group samples of similar length, or pack them",
            min(share, 1.0),
            _saved_s(share * communication.step_ns, steps),
        )


def _find_script_collectives(communication: Communication) -> Iterator[Finding]:
    """Yield a finding about the script's own collectives.

    It names no rank, because the time that a rank was blocked in them is unknown.
    """
    if (
        not communication.own_collective_names
        or min((rank.steps for rank in communication.ranks), default=0) < MIN_STEPS
    ):
        return
    shares = [rank.phases.get("other", 0.0) / rank.step_ns for rank in communication.ranks if rank.step_ns]
    min_share = min(shares, default=0.0)
    if len(shares) > 1 and min_share >= MIN_OTHER_PHASE_SHARE:
        yield Finding(
            "own collectives",
            f"The ranks may wait for each other in the script's own {communication.own_collective_names}:"
            f" the script's own work (other) takes at least {format_percent(min_share)} of the step on every rank.",
            f"{communication.own_collective_names} outside the phases in the newest sampled steps",
            "compare when the ranks launched these collectives (dpmon export --kind collective, phase other): the rank"
            " that launched one last (start_s) made the others wait; with such calls after the optimizer's step, `wait`"
            " shows who is late",
            min_share / 2,
        )


def _find_exposed_communication(communication: Communication, steps: float | None) -> Iterator[Finding]:
    share = communication.exposed_share
    if share is None or share < MIN_EXPOSED_SHARE or communication.step_count_with_waits < MIN_STEPS:
        return
    advice = ["larger batches (they change the training itself: learning rate)"]
    if not communication.unsynced:
        advice.append("gradient accumulation under no_sync")
    large = sum(wrapper.parameter_bytes or 0 for wrapper in communication.wrappers) >= MIN_LARGE_BYTES
    # torch's documentation of bf16_compress_hook: it needs NCCL.
    if large and all(wrapper.comm_hook is None and wrapper.backend == "nccl" for wrapper in communication.wrappers):
        advice.append("gradients in half precision (bf16_compress_hook)")
    if large and any(not wrapper.gradient_as_bucket_view for wrapper in communication.wrappers):
        advice.append("gradient_as_bucket_view=True, which saves a copy")
    if any(len(wrapper.bucket_bytes) > 1 for wrapper in communication.wrappers):
        advice.append("another bucket_cap_mb")
    yield Finding(
        "exposed",
        f"Exposed communication takes {format_percent(share)} of step time.",
        f"exposed mean {format_long_duration(communication.exposed_ns)},"
        f" {communication.unit} mean {format_long_duration(communication.step_ns)}"
        f" over {communication.text_of_known_waits} of {len(communication.ranks_with_waits)} ranks",
        "; ".join(advice),
        min(share, 1.0),
        _saved_s(communication.exposed_ns, steps),
    )


def _find_large_last_bucket(communication: Communication) -> Iterator[Finding]:
    """Yield a finding if the last bucket is large.

    It is averaged after the whole computation, so its communication stays exposed.
    """
    share = communication.exposed_share
    if (
        share is None
        or share < MIN_BUCKET_EXPOSED_SHARE
        or communication.step_count_with_waits < MIN_STEPS
        or len(communication.wrappers) != 1
    ):
        return
    (wrapper,) = communication.wrappers
    sizes, total = wrapper.bucket_bytes, sum(wrapper.bucket_bytes)
    if not total or sizes[-1] < max(MIN_LAST_BUCKET_SHARE * total, MIN_LAST_BUCKET_BYTES):
        return
    if wrapper.bucket_cap_bytes is not None and sizes[-1] >= 2 * wrapper.bucket_cap_bytes:
        return  # torch closes a bucket at its cap: a parameter larger than the cap, which no cap divides
    sizes_text = ", ".join(map(format_bytes, sizes[-_MAX_NAMED_BUCKETS:]))
    sizes_text = sizes_text if len(sizes) <= _MAX_NAMED_BUCKETS else f"... {sizes_text}"
    cap_text = "unknown" if wrapper.bucket_cap_bytes is None else format_bytes(wrapper.bucket_cap_bytes)
    yield Finding(
        "bucket",
        f"The last bucket has {format_percent(sizes[-1] / total)} of the gradients,"
        " and no computation is left to hide it."
        if len(sizes) > 1
        else "All gradients are in one bucket, and no computation is left to hide it.",
        f"{format_count_with_noun(len(sizes), 'bucket')}: {sizes_text};"
        f" exposed mean {format_long_duration(communication.exposed_ns)}, {format_percent(share)} of the step",
        f"a smaller bucket_cap_mb (now {cap_text}), so that averaging begins earlier and the last bucket is small",
        share / 2,
    )


def _find_unneeded_sync(communication: Communication, steps: float | None) -> Iterator[Finding]:
    """Yield a finding if gradients are averaged several times per update.

    Only for a single model, because several models need several passes.
    """
    tally = communication.tally
    synced, unsynced, updates = tally.stat("synced").total, tally.stat("unsynced").total, tally.updates
    if len(communication.wrappers) != 1 or updates < MIN_STEPS or synced < MIN_SYNCS_PER_UPDATE * updates:
        return
    passes_per_update = synced / updates
    # A rank that is always slow stays slow; waits for changing ranks may even out over the passes.
    waits = 0.0 if communication.straggler is not None else communication.wait_share or 0.0
    share = min((communication.exposed_share or 0.0) * (1 - 1 / passes_per_update) + waits, 1.0)
    has_times = communication.step_count_with_waits >= MIN_STEPS and communication.step_ns is not None
    yield Finding(
        "accumulation",
        f"Gradients are averaged {passes_per_update:.1f} times per update.",
        f"{format_count(synced)} backward passes that synced gradients, {format_count(unsynced)} under no_sync,"
        f" {format_count(updates)} updates of the optimizer",
        "if gradients accumulate: no_sync() around all backward passes but the last before the optimizer's step",
        max(share, _UNKNOWN_WEIGHT),
        _saved_s(share * (communication.step_ns or 0.0), steps) if has_times else None,
    )


def _find_needless_unused_search(communication: Communication) -> Iterator[Finding]:
    steps = communication.tally.steps
    for wrapper in communication.wrappers:
        if wrapper.find_unused_parameters and wrapper.all_used >= MIN_ALL_USED and steps >= MIN_STEPS:
            root_text = f" of {wrapper.root}" if len(communication.wrappers) > 1 else ""
            yield Finding(
                "unused",
                f"find_unused_parameters{root_text} is on, although every parameter is used.",
                f"0 bytes unused in {format_count_with_noun(wrapper.all_used, 'iteration')} checked by torch,"
                f" up to iteration {format_count(wrapper.iteration)};"
                f" {format_count_with_noun(steps, 'step')}",
                "find_unused_parameters=False, if every step uses them all: it saves a search of the graph in each",
                _UNKNOWN_WEIGHT,
            )
