"""Findings about waits and communication between ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpmon.model.communication import Communication
from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import MIN_STEPS, busy_cores_advice, has_varied_inputs
from dpmon.model.stragglers import delay_sentence, slowest_count_text
from dpmon.record.schema import SECOND
from dpmon.text.formatting import (
    format_bytes,
    format_count,
    format_count_with_noun,
    format_long_duration,
    format_percent,
)

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis

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
    " others, or busy with another process; dpmon profile names its operators"
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


def find_rank_problems(communication: Communication | None, run: RunAnalysis | None = None) -> list[Finding]:
    """Return all findings about ranks; none without communication.

    `run`: if `communication` is that of the whole run. Else, nothing is said about what the findings save.
    """
    return [] if communication is None else [finding for find in _FINDERS for finding in find(communication, run)]


def _saved_s(communication: Communication, ns_per_step: float | None, run: RunAnalysis | None) -> float | None:
    """Return the elapsed time (s) that all steps of a rank save; None if it is unknown. Ranks step together."""
    if ns_per_step is None or run is None:
        return None
    tally = communication.tally
    updates_per_step = tally.updates / tally.steps if communication.unit == "update" else 1  # the means are per update
    return ns_per_step * run.steps * updates_per_step / SECOND


def _has_enough_waits(communication: Communication) -> bool:
    return communication.step_count_with_waits >= MIN_STEPS


def _mean_of_step(communication: Communication, name: str, ns: float | None) -> str:
    """Return the mean of a time beside that of a step, with the number of steps and ranks, as evidence."""
    unit, ranks = communication.unit, len(communication.ranks_with_waits)
    means = f"{name} mean {format_long_duration(ns)}, {unit} mean {format_long_duration(communication.step_ns)}"
    return f"{means} over {communication.text_of_known_waits} of {ranks} ranks"


def _find_straggler(communication: Communication, run: RunAnalysis | None) -> Iterator[Finding]:
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
        _SLOW_PHASE.get(straggler.phase or "", _NO_PHASE),
        min(straggler.share, 1.0),
        _saved_s(communication, straggler.excess_ns, run),
    )


def _find_alternating_waits(communication: Communication, run: RunAnalysis | None) -> Iterator[Finding]:
    """Yield a finding if ranks wait, but for a different rank each time.

    With equal work, every rank would take the mean time.
    """
    share = communication.wait_share or 0.0
    if communication.straggler is not None or len(communication.ranks_with_waits) < 2:
        return
    if share >= MIN_ALTERNATING_WAIT_SHARE and _has_enough_waits(communication):
        advice = "" if run is None else busy_cores_advice(run)
        if not advice and run is not None and has_varied_inputs(run, communication.ranks_with_waits[0].process):
            advice = "batches of equal work on all ranks: group samples of similar length, or pack them"
        yield Finding(
            "in turn",
            f"The ranks wait for each other for {format_percent(share)} of step time, not always for the same rank.",
            f"{_mean_of_step(communication, 'wait', communication.wait_ns)}; no rank is the slowest unusually often",
            advice or "equal work on all ranks, with idle CPU cores; the longest steps show which phase varies",
            min(share, 1.0),
            _saved_s(communication, communication.wait_ns, run),
        )


def _find_script_collectives(communication: Communication, _: RunAnalysis | None) -> Iterator[Finding]:
    """Yield a finding about the script's own collectives.

    It names no rank, because the time that a rank was blocked in them is unknown.
    """
    names = communication.own_collective_names
    shares = [rank.phases.get("other", 0.0) / rank.step_ns for rank in communication.ranks if rank.step_ns]
    if not names or len(shares) < 2 or min(rank.steps for rank in communication.ranks) < MIN_STEPS:
        return
    if min(shares) >= MIN_OTHER_PHASE_SHARE:
        yield Finding(
            "own collectives",
            f"The ranks may wait for each other in the script's own {names}: the script's own work (other) takes at"
            f" least {format_percent(min(shares))} of the step on every rank.",
            f"{names} outside the phases in the newest sampled steps",
            "compare when the ranks launched these collectives (dpmon export --kind collective, phase other): the rank"
            " that launched one last (start_s) made the others wait; with such calls after the optimizer's step, `wait`"
            " shows who is late",
            min(shares) / 2,
        )


def _find_exposed_communication(communication: Communication, run: RunAnalysis | None) -> Iterator[Finding]:
    share, wrappers = communication.exposed_share, communication.wrappers
    if share is None or share < MIN_EXPOSED_SHARE or not _has_enough_waits(communication):
        return
    is_large = sum(wrapper.parameter_bytes or 0 for wrapper in wrappers) >= MIN_LARGE_BYTES
    advice = {
        "larger batches (they change the training itself: learning rate)": True,
        "gradient accumulation under no_sync": not communication.unsynced,
        # torch's documentation of bf16_compress_hook: it needs NCCL.
        "gradients in half precision (bf16_compress_hook)": is_large
        and all(wrapper.comm_hook is None and wrapper.backend == "nccl" for wrapper in wrappers),
        "gradient_as_bucket_view=True, which saves a copy": is_large
        and not all(wrapper.gradient_as_bucket_view for wrapper in wrappers),
        "another bucket_cap_mb": any(len(wrapper.bucket_bytes) > 1 for wrapper in wrappers),
    }
    yield Finding(
        "exposed",
        f"Exposed communication takes {format_percent(share)} of step time.",
        _mean_of_step(communication, "exposed", communication.exposed_ns),
        "; ".join(text for text, applies in advice.items() if applies),
        min(share, 1.0),
        _saved_s(communication, communication.exposed_ns, run),
    )


def _find_large_last_bucket(communication: Communication, _: RunAnalysis | None) -> Iterator[Finding]:
    """Yield a finding if the last bucket is large.

    It is averaged after the whole computation, so its communication stays exposed.
    """
    share = communication.exposed_share or 0.0
    if share < MIN_BUCKET_EXPOSED_SHARE or not _has_enough_waits(communication) or len(communication.wrappers) != 1:
        return
    (wrapper,) = communication.wrappers
    sizes, total, cap = wrapper.bucket_bytes, sum(wrapper.bucket_bytes), wrapper.bucket_cap_bytes
    if not total or sizes[-1] < max(MIN_LAST_BUCKET_SHARE * total, MIN_LAST_BUCKET_BYTES):
        return
    if cap is not None and sizes[-1] >= 2 * cap:
        return  # torch closes a bucket at its cap: a parameter larger than the cap, which no cap divides
    held_text = f"The last bucket has {format_percent(sizes[-1] / total)} of the gradients,"
    if len(sizes) == 1:
        held_text = "All gradients are in one bucket,"
    more = "... " if len(sizes) > _MAX_NAMED_BUCKETS else ""
    sizes_text = ", ".join(map(format_bytes, sizes[-_MAX_NAMED_BUCKETS:]))
    yield Finding(
        "bucket",
        f"{held_text} and no computation is left to hide it.",
        f"{format_count_with_noun(len(sizes), 'bucket')}: {more}{sizes_text};"
        f" exposed mean {format_long_duration(communication.exposed_ns)}, {format_percent(share)} of the step",
        f"a smaller bucket_cap_mb (now {'unknown' if cap is None else format_bytes(cap)}), so that averaging begins"
        " earlier and the last bucket is small",
        share / 2,
    )


def _find_unneeded_sync(communication: Communication, run: RunAnalysis | None) -> Iterator[Finding]:
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
    saved_ns = None
    if _has_enough_waits(communication) and communication.step_ns is not None:
        saved_ns = share * communication.step_ns
    yield Finding(
        "accumulation",
        f"Gradients are averaged {passes_per_update:.1f} times per update.",
        f"{format_count(synced)} backward passes that synced gradients, {format_count(unsynced)} under no_sync,"
        f" {format_count(updates)} updates of the optimizer",
        "if gradients accumulate: no_sync() around all backward passes but the last before the optimizer's step",
        max(share, _UNKNOWN_WEIGHT),
        _saved_s(communication, saved_ns, run),
    )


def _find_needless_unused_search(communication: Communication, _: RunAnalysis | None) -> Iterator[Finding]:
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


_FINDERS = (
    *(_find_straggler, _find_alternating_waits, _find_script_collectives, _find_exposed_communication),
    *(_find_large_last_bucket, _find_unneeded_sync, _find_needless_unused_search),
)
