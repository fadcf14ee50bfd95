"""Findings about the time of steps and phases. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_advice import copy_advice, data_advice, step_variance_advice, worker_restarts
from dpmon.model.findings.finding_evidence import (
    DATA_SHARE,
    MIN_STEPS,
    data_ceiling,
    data_share,
    format_phase_times,
    format_ratio,
    format_sample_basis,
    is_timed,
    measured_modes,
    mode_suffix,
    most_affected,
    process_suffix,
    rank_suffix,
)
from dpmon.model.mode_comparison import verdict_sentence
from dpmon.model.run_analysis import LONGEST, RunAnalysis
from dpmon.model.slow_steps import overlap_ns
from dpmon.model.stragglers import Straggler
from dpmon.record.schema import STEP, STEP_PHASES
from dpmon.text.formatting import format_clock, format_count_with_noun, format_long_duration, format_percent

if TYPE_CHECKING:
    from dpmon.model.mode_stats import ModeStats
    from dpmon.store.query_results import LongStepRow

COPY_SHARE = 0.2
"""Smallest share of the step to report: for copies to the device, for replicate, and for scatter with gather. The last
two are the cost of DataParallel itself, and DDP mostly avoids them."""
DRIFT_RATIO, DRIFT_STEPS = 1.2, 150
"""Smallest ratio of the medians of the last and the first third, and fewest steps (50 per third): well above the noise
of a median. Also, the first quartile of the last third must reach the third quartile of the first. Noise rarely
does that."""
STALL_RATIO, STALL_NS = 10, 500_000_000
"""Smallest ratio of a step to the median, and shortest step: ten times a millisecond does not matter."""
SPREAD_RATIO, SPREAD_NS = 10, 50_000_000
"""Smallest ratio of p95 to median, and shortest p95: if one step in twenty takes that long, it is no single stall."""
STALLS_SHARE, STALLS_NS = 0.02, 5_000_000_000
"""Smallest total of all stalls to report: as a share of the time of steps, or in ns."""
BETWEEN_SHARE, BETWEEN_NS = 0.1, 1_000_000_000
"""Smallest share of the time, and shortest total, between steps. The end of an epoch or a checkpoint costs some per
cent; a tenth matters as much as a tenth of every step."""
EVALUATION_SHARE = 0.2
"""Smallest share of the time to report."""
WORKERS_SHARE = 0.5
"""If starting workers takes at least this share of the gaps, the finding names it."""

_ON_GPUS = "measure on GPUs first: virtual replicas share the processors of this machine"
_STALL_ADVICE = {
    "data": "look for what held up the loader: a cold cache, a slow disk or network",
    "copy": "look at what the copy waited for: the device's other work, or memory to be pinned",
    "forward": "look for a shape seen for the first time (compilation, kernel choice), or for another process on the"
    " device",
    "backward": "look for a shape seen for the first time (compilation, kernel choice), or for another process on the"
    " device",
    "sync": "look for a rank that the others waited for, or a slow network between them",
    "optimizer": "look for a synchronization in the optimizer or its scheduler",
    "other": "look at the script's own work between the phases: a checkpoint, an evaluation, logging, .item() on a GPU",
}


def _is_only_rank_waiting(slow: Straggler, mode: ModeStats) -> bool:
    """Whether waits for data make these ranks slow, while the others hardly wait for data."""
    if slow.phase != "data" or slow.others_ns is None or mode.mean_ns is None or slow.steps < MIN_STEPS:
        return False
    return slow.others_ns < DATA_SHARE * mode.mean_ns


def find_data_waits(facts: RunAnalysis) -> Iterator[Finding]:
    """Waiting for the loader.

    Device times count if they are known: a device may still have queued work while the host waits.
    """
    communication = facts.communication
    slow = None if communication is None else communication.straggler
    for mode in most_affected(facts, data_share, DATA_SHARE):
        if slow is not None and _is_only_rank_waiting(slow, mode):
            continue  # the finding about the slow ranks names the cause
        figures, share, on_device = mode.phase("data"), data_share(mode), ""
        if figures is not None and is_timed(figures):
            on_device = f", on the device median {format_long_duration(figures.device_ns)}"
        who = "The training" if mode.who is None else mode.who[0].upper() + mode.who[1:]
        who = f"The GPU{rank_suffix(mode)}" if on_device else who
        saves = data_ceiling(mode, facts)
        yield Finding(
            "data",
            f"{who} waits for data{mode_suffix(mode, facts)}: {format_percent(share)} of the time of its steps.",
            f"data {format_phase_times(mode, 'data')}{on_device};"
            f" {format_sample_basis(mode)}{_affected_processes_text(mode, facts)}",
            data_advice(mode, facts),
            share,
            saves,
            {} if saves is None else {"data": saves},
        )


def _affected_processes_text(mode: ModeStats, facts: RunAnalysis) -> str:
    """The number of processes in which the wait for data reaches DATA_SHARE, in words; empty for one process."""
    if mode.who is None:
        return ""
    alike = [one.settled_stats for one in (*facts.modes, *facts.other_process_modes) if one.mode == mode.mode]
    many = sum(data_share(one) >= DATA_SHARE for one in alike)
    return f"; {format_percent(DATA_SHARE)} or more in {many:,} of {len(alike):,} processes"


def find_slow_copies(facts: RunAnalysis) -> Iterator[Finding]:
    """Copying batches to the devices, by device time: on the host, a copy may also wait for other work."""

    def copied(mode: ModeStats) -> float:
        figures = mode.phase("copy")
        return (figures.device_share or 0.0) if figures is not None and is_timed(figures) else 0.0

    for mode in most_affected(facts, copied, COPY_SHARE):
        figures, share = mode.phase("copy"), copied(mode)
        assert figures is not None
        yield Finding(
            "copy",
            f"Copying to the GPU{rank_suffix(mode)}{mode_suffix(mode, facts)} takes {format_percent(share)}"
            " of the time of its steps.",
            f"copy on the device median {format_long_duration(figures.device_ns)}, on the host"
            f" {format_phase_times(mode, 'copy')}; {format_sample_basis(mode)}",
            copy_advice(facts, mode.process),
            share,
            share,
            {"copy": share},
        )


def find_slow_dp(facts: RunAnalysis) -> Iterator[Finding]:
    """DataParallel that is slower than one device."""
    found = facts.mode_comparison
    if found is not None and found.speedup is not None and found.speedup.low > 0 and found.speedup.high < 1:
        value, low, high = found.speedup
        times, least, most = 1 / value, 1 / high, 1 / low
        yield Finding(
            "slower",
            verdict_sentence(found) or "",
            f"the median step in dp takes {times:.2f} times as long as in single (95%: {least:.2f} to {most:.2f})",
            _ON_GPUS
            if any(mode.virtual for mode in facts.modes)
            else "one device, or DistributedDataParallel; larger batches give every copy of the model more work, but"
            " change the training itself (learning rate)",
            1 - value,
        )


def find_dp_overhead(facts: RunAnalysis) -> Iterator[Finding]:
    """The cost of DataParallel itself: replicate; scatter and gather."""
    for mode in (one.settled_stats for one in facts.modes):
        if mode.mode != "dp" or mode.steps < MIN_STEPS:
            continue
        share = mode.phase_share("replicate")
        virtual = "  These replicas are virtual: on GPUs the share differs." if mode.virtual else ""
        if share >= COPY_SHARE:
            yield Finding(
                "replicate",
                f"Copying the model to the devices takes {format_percent(share)} of the time of the steps.{virtual}",
                f"replicate {format_phase_times(mode, 'replicate')}; {format_sample_basis(mode)}",
                _ON_GPUS
                if mode.virtual
                else "larger batches mean fewer copies, but change the training itself (learning rate);"
                " DistributedDataParallel copies nothing in a step, and may bring more than that: try it",
                share,
                None if mode.virtual else share,
            )
        share = mode.phase_share("scatter", "gather")
        if share >= COPY_SHARE:
            yield Finding(
                "transfer",
                f"Scattering inputs and gathering outputs takes {format_percent(share)} of the time of the"
                f" steps.{virtual}",
                f"scatter {format_phase_times(mode, 'scatter')}; gather {format_phase_times(mode, 'gather')};"
                f" {format_sample_basis(mode)}",
                _ON_GPUS
                if mode.virtual
                else "compute the loss inside the forward, so that one number is gathered instead of the outputs;"
                " pinned memory; DistributedDataParallel, which may bring more than that",
                share,
                None if mode.virtual else share,
            )


_GROWS = (
    "look for lists or graphs that grow (losses kept with their graph), memory that fills up, heat, a fuller disk,"
    " other work on the machine"
)
_DRIFT_ADVICE = {
    "data": "look at the loader: samples that take longer, a colder cache, a slower disk or network, other work on the"
    " machine",
    "sync": "look at the other ranks, for which these steps wait: one of them may have become slower; or the network",
}
"""Advice by the phase that grew most; _GROWS for the others."""


def find_slowdown(facts: RunAnalysis) -> Iterator[Finding]:
    """Steps that became slower."""
    for mode in facts.modes:
        if mode.steps < DRIFT_STEPS or mode.early is None or mode.late is None:
            continue
        early, late = mode.early.median(STEP), mode.late.median(STEP)
        if not early or not late or late < DRIFT_RATIO * early:
            continue
        if (mode.late.quantile(STEP, 0.25) or 0) < (mode.early.quantile(STEP, 0.75) or 0):
            continue
        ends = {name: (mode.early.median(name), mode.late.median(name)) for name in STEP_PHASES}
        grown = {name: after - (before or 0) for name, (before, after) in ends.items() if after is not None}
        phase = max(grown, key=lambda name: grown[name], default="")
        where = (
            f"; {phase} grew most: {format_long_duration(ends[phase][0])}, then {format_long_duration(ends[phase][1])}"
            if phase
            else ""
        )
        yield Finding(
            "drift",
            f"Steps{rank_suffix(mode)} became slower{mode_suffix(mode, facts)}:"
            f" at the end {format_ratio(late, early)} as long as at first.",
            f"median {format_long_duration(early)} over the first third of {mode.steps:,} steps,"
            f" {format_long_duration(late)} over the last{where}",
            _DRIFT_ADVICE.get(phase, _GROWS),
            1 - early / late,
        )


def find_long_steps(facts: RunAnalysis) -> Iterator[Finding]:
    """Single steps that took very long."""
    medians = {
        (mode.process, mode.mode): mode.median_ns
        for mode in measured_modes(facts)
        if mode.median_ns and _spread_ratio(mode) < SPREAD_RATIO
    }
    total = sum((mode.median_ns or 0) * mode.steps for mode in (*facts.modes, *facts.other_process_modes))
    longest = [step for step in facts.longest_steps[:LONGEST] if not _waits_for_input(step, facts)]
    stalls = [step for step in longest if _is_long_step(step, medians.get((step.process, step.mode)))]
    lost = sum(step.wall_ns for step in stalls)
    if not stalls or (lost < STALLS_SHARE * (total + lost) and lost < STALLS_NS):
        return
    worst = stalls[0]
    median = medians[worst.process, worst.mode]
    # A lower bound if steps were deleted, or if all steps read are stalls.
    least = len(stalls) == len(longest) > 1 or facts.store.pruned > 0
    saves = (lost - sum(medians[step.process, step.mode] or 0 for step in stalls)) / (total + lost)
    phases = Counter[str]()
    for step in stalls:
        phases.update(step.phases)
    count = "one" if len(stalls) == 1 else str(len(stalls))
    count = f"At least {count}" if least else count.capitalize()
    if len(stalls) > 1:
        text = f"{count} steps took more than {STALL_RATIO} times the median: {format_long_duration(lost)} together."
    else:
        text = f"{count} step took {format_long_duration(lost)}, {format_ratio(lost, median)} the median."
    yield Finding(
        "stall",
        text,
        f"the longest: {_step_location(worst, facts)}; median {format_long_duration(median)}",
        _long_step_advice(worst, facts),
        lost / (total + lost),
        None if least else saves,
        {} if least else {name: saves * took / lost for name, took in phases.items()},
    )


def find_recovered_stalls(facts: RunAnalysis) -> Iterator[Finding]:
    """Stalls after which the run went on."""
    lost = facts.time_by_activity.get("stalled", 0)
    over = [stall for stall in facts.announced.stalls if stall.end_ns is not None]
    if not lost or not over:
        return
    steps = facts.stalled_steps
    what = (
        f"{format_count_with_noun(steps, 'step')} with a stall {'are' if steps > 1 else 'is'}"
        if steps
        else "A stall is"
    )
    longest = max(over, key=lambda stall: (stall.end_ns or 0) - stall.since_ns)
    # Ranks of a machine that did not know of the stall count its time as training, so their mean is less.
    whole = max(lost, *(spent.get("stalled", 0) for spent in facts.spent_by_process.values()), 0)
    yield Finding(
        "stall",
        f"{what} left out of the figures: {format_long_duration(whole)}.",
        f"{'the longest ' if len(over) > 1 else ''}stall at {format_clock(longest.since_ns)}: {longest.text}",
        "dpmon why shows the stacks of that time",
        lost / (lost + facts.time_by_activity.get("training", 0)),
    )


def _waits_for_input(step: LongStepRow, facts: RunAnalysis) -> bool:
    """Whether a step mostly waits for a line of input, which is no stall."""
    waits = facts.announced.input_waits(step.process)
    return 2 * overlap_ns(waits, step.start_ns, step.start_ns + step.wall_ns) > step.wall_ns


def _longest_phase(step: LongStepRow) -> str:
    """The phase that took most of a step."""
    return max(step.phases, key=lambda name: step.phases[name], default="other")


def _step_location(step: LongStepRow, facts: RunAnalysis) -> str:
    """The step, its time, and the phase that took most of it."""
    process, phase = process_suffix(step.process, facts), _longest_phase(step)
    where = f"step {step.step}{process} at {format_clock(step.start_ns)}, {format_long_duration(step.wall_ns)}"
    return f"{where}, {format_long_duration(step.phases.get(phase, 0))} in {phase}"


def _long_step_advice(step: LongStepRow, facts: RunAnalysis) -> str:
    phase = _longest_phase(step)
    if phase == "backward" and facts.names:
        return _STALL_ADVICE[phase] + ", or a rank that the others waited for"
    if phase == "data" and worker_restarts(facts, step.process):
        return _STALL_ADVICE[phase] + ", a new epoch that starts its workers again (persistent_workers=True keeps them)"
    return _STALL_ADVICE.get(phase, _STALL_ADVICE["other"])


def find_gaps_between_steps(facts: RunAnalysis) -> Iterator[Finding]:
    """Time between the steps: loaders that start, checkpoints, logging."""
    lost = facts.time_by_activity.get("between", 0)
    whole = lost + facts.time_by_activity.get("training", 0) + facts.time_by_activity.get("evaluation", 0)
    if not facts.gaps or lost < BETWEEN_NS or lost < BETWEEN_SHARE * whole or not list(measured_modes(facts)):
        return
    worst = facts.gaps[0]
    own = [gap for gap in facts.gaps if gap.process == worst.process]
    together = sum(gap.ns for gap in own)
    where = f"after step {worst.after_step}"
    longest = f"{format_long_duration(worst.ns)} {where}"
    text = f"one gap of {longest}" if len(own) == 1 else f"{len(own)} gaps, the longest {longest}"
    again = worker_restarts(facts, worst.process)
    workers = [(one.start_ns, one.start_ns + one.took_ns) for one in again]
    starts = sum(overlap_ns(workers, gap.begin_ns, gap.end_ns) for gap in own)
    share = starts / together if together else 0.0
    # Workers that start again also end, and load their first batch, which a step waits for.
    fetches = max(map(_first_fetches, measured_modes(facts))) if again else 0.0
    apart = _most_spent(facts, "between")
    by = f" Starting the loader's workers takes {format_percent(share)} of it." if share >= WORKERS_SHARE else ""
    yield Finding(
        "between",
        f"{format_percent(lost / whole)} of the time lies between steps: {text}.{by}",
        f"training {format_long_duration(facts.time_by_activity.get('training', 0))},"
        f" between steps {format_long_duration(lost)}; the longest gap at {format_clock(worst.begin_ns)}",
        "DataLoader(persistent_workers=True): the workers then start once, not in every epoch"
        if by
        else "look at the script's own work there: a checkpoint, logging"
        + (", a loader that starts its workers again (persistent_workers=True keeps them)" if again else ""),
        lost / whole,
        apart + fetches,
        {"between": apart, "data": fetches},
    )


def _first_fetches(mode: ModeStats) -> float:
    """The share of the steps' time (0 to 1) that fetches take beyond the usual one, as the first of an epoch do."""
    fetch = mode.phase("data")
    if fetch is None or not fetch.mean_ns or fetch.median_ns is None:
        return 0.0
    return mode.phase_share("data") * max(1 - fetch.median_ns / fetch.mean_ns, 0.0)


def find_costly_evaluation(facts: RunAnalysis) -> Iterator[Finding]:
    """Evaluations that take much of the time."""
    took = facts.time_by_activity.get("evaluation", 0)
    whole = sum(facts.time_by_activity.get(name, 0) for name in ("training", "between", "evaluation"))
    if took and took >= EVALUATION_SHARE * whole and list(measured_modes(facts)):
        steps = sum(mode.all_steps for mode in facts.evaluations)
        yield Finding(
            "evaluation",
            f"Evaluations take {format_percent(took / whole)} of the time.",
            f"training {format_long_duration(facts.time_by_activity.get('training', 0))},"
            f" evaluation {format_long_duration(took)} in {steps:,} steps",
            "evaluate less often or on fewer samples; larger batches: an evaluation keeps no gradients",
            took / whole,
            # The times before and after an evaluation lie between steps.
            _most_spent(facts, "evaluation", "between"),
            {"between": _most_spent(facts, "between")},
        )


def _most_spent(facts: RunAnalysis, *activities: str) -> float:
    """The largest share of its time (0 to 1) that any process spent on activities: others may wait for it in a step."""
    found = 0.0
    for spent in facts.spent_by_process.values():
        whole = sum(spent.get(name, 0) for name in ("training", "between", "evaluation"))
        found = max(found, sum(spent.get(name, 0) for name in activities) / (whole or 1))
    return found


def _spread_ratio(mode: ModeStats) -> float:
    return (mode.p95_ns or 0.0) / mode.median_ns if mode.median_ns else 0.0


def find_uneven_steps(facts: RunAnalysis) -> Iterator[Finding]:
    """Step times that vary widely."""
    for mode in most_affected(facts, _spread_ratio, SPREAD_RATIO):
        # If one step in twenty waited for input, that alone explains the p95.
        typed = len(facts.announced.inputs) >= mode.steps / 20
        if (mode.p95_ns or 0) >= SPREAD_NS and not typed:
            share, phase = max(((phase.share or 0.0, phase.name) for phase in mode.phases), default=(0.0, "none"))
            yield Finding(
                "spread",
                f"Step times{rank_suffix(mode)} are spread wide{mode_suffix(mode, facts)}: one in twenty takes"
                f" {format_ratio(mode.p95_ns, mode.median_ns)} the median or more.",
                f"median {format_long_duration(mode.median_ns)}, p95 {format_long_duration(mode.p95_ns)} over"
                f" {mode.steps:,} steps{rank_suffix(mode)}; {phase} takes most of the time ({format_percent(share)})",
                step_variance_advice(facts, phase),
                0.3,
            )


def _is_long_step(step: LongStepRow, median_ns: float | None) -> bool:
    return median_ns is not None and step.wall_ns >= max(STALL_RATIO * median_ns, STALL_NS)
