"""Findings about the time of steps and phases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_advice import copy_advice, data_advice, step_variance_advice, worker_restarts
from dpmon.model.findings.finding_evidence import (
    MIN_DATA_SHARE,
    MIN_STEPS,
    data_share,
    format_elapsed_share,
    format_phase_times,
    format_ratio,
    format_sample_basis,
    is_timed,
    measured_modes,
    mode_suffix,
    most_affected,
    process_suffix,
    rank_suffix,
    time_of_share,
)
from dpmon.model.mode_comparison import verdict_sentence
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.run_analysis import ACTIVE, MAX_LONG_STEPS, RunAnalysis
from dpmon.model.slow_steps import overlap_ns
from dpmon.model.stragglers import Straggler
from dpmon.record.schema import SECOND, STEP, STEP_PHASES
from dpmon.store.steps import StepRow
from dpmon.text.formatting import format_elapsed, format_long_duration, format_percent

if TYPE_CHECKING:
    from dpmon.store.step_stats import StepStats

MIN_COPY_SHARE = 0.2
"""Smallest share of the step to report: for copies to the device, for replicate, and for scatter with gather. The last
two are the cost of DataParallel itself, and DDP usually avoids them."""
MIN_DRIFT_RATIO, MIN_DRIFT_STEPS = 1.2, 150
"""Smallest ratio of the medians of the last and the first third, and fewest steps (50 per third): well above the noise
of a median. Also, the first quartile of the last third must reach the third quartile of the first. Noise rarely
does that."""
MIN_LONG_STEP_RATIO, MIN_LONG_STEP_NS = 10, 500_000_000
"""Smallest ratio of a step to the median, and shortest step: ten times a millisecond does not matter."""
MIN_SPREAD_RATIO, MIN_SPREAD_P95_NS = 10, 50_000_000
"""Smallest ratio of p95 to median, and shortest p95: if 1 in 20 steps takes that long, it is no single long step."""
MIN_LONG_STEPS_SHARE, MIN_LONG_STEPS_NS = 0.02, 5_000_000_000
"""Smallest total of all long steps to report: as a share of step time, or in ns."""
MIN_BETWEEN_SHARE, MIN_BETWEEN_NS = 0.1, 1_000_000_000
"""Smallest share of active time, and shortest total, between steps. The end of an epoch or a checkpoint costs some per
cent; a tenth matters as much as a tenth of every step."""
MIN_EVALUATION_SHARE = 0.2
"""Smallest share of active time to report."""
MIN_WORKERS_SHARE = 0.5
"""If starting workers takes at least this share of the gaps, the finding names it."""

_VIRTUAL_ADVICE = "measure on GPUs first: virtual replicas share the CPU cores of this machine"
_LONG_STEP_ADVICE = {
    "data": "look for what delayed the loader: a cold cache, a slow disk or network",
    "copy": "look at what the copy waited for: the device's other work, or memory to be pinned",
    "forward": "look for a shape seen for the first time (compilation, kernel choice), or for another process on the"
    " device",
    "backward": "look for a shape seen for the first time (compilation, kernel choice), or for another process on the"
    " device",
    "sync": "look for a rank that the others waited for, or a slow network between them",
    "optimizer": "look for a synchronization in the optimizer or its scheduler",
    "other": "look at the script's own work between the phases: a checkpoint, an evaluation, logging, .item() on a GPU",
}


def _is_only_rank_waiting(straggler: Straggler, stats: StepStats) -> bool:
    """Return whether waits for data make the straggler slow, while the other ranks hardly wait for data."""
    if straggler.phase != "data" or straggler.others_ns is None or stats.mean_ns is None or straggler.steps < MIN_STEPS:
        return False
    return straggler.others_ns < MIN_DATA_SHARE * stats.mean_ns


def find_data_waits(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each mode in which the training waits for its loader.

    Device times count if they are known: a device may still have queued work while the host waits.
    """
    communication = run.communication
    straggler = None if communication is None else communication.straggler
    for stats in most_affected(run, data_share, MIN_DATA_SHARE):
        if straggler is not None and _is_only_rank_waiting(straggler, stats):
            continue  # the finding about the slow ranks names the cause
        data, share, device_text = stats.phase("data"), data_share(stats), ""
        if data is not None and is_timed(data):
            device_text = f", on the device median {format_long_duration(data.device_ns)}"
            subject = f"The GPU{rank_suffix(stats)}"
        else:
            name = stats.process_name or "the training"
            subject = name[:1].upper() + name[1:]
        yield Finding(
            "data",
            f"{subject} waits for data{mode_suffix(stats, run)}: {format_percent(share)} of step time.",
            f"data {format_phase_times(stats, 'data')}{device_text};"
            f" {format_sample_basis(stats)}{_affected_processes_text(stats, run)}",
            data_advice(stats, run),
            share,
            time_of_share(stats, share),
        )


def _affected_processes_text(stats: StepStats, run: RunAnalysis) -> str:
    """Return in how many processes the wait for data reaches MIN_DATA_SHARE; empty for one process."""
    if stats.process_name is None:
        return ""
    same_mode = [other.settled_stats for other in (*run.modes, *run.other_process_modes) if other.mode == stats.mode]
    affected = sum(data_share(other) >= MIN_DATA_SHARE for other in same_mode)
    return f"; {format_percent(MIN_DATA_SHARE)} or more in {affected:,} of {len(same_mode):,} processes"


def find_slow_copies(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each mode in which copying batches to the devices takes long.

    Only device times count: on the host, a copy may also wait for other work.
    """

    def copy_share(mode: StepStats) -> float:
        phase = mode.phase("copy")
        return (phase.device_share or 0.0) if phase is not None and is_timed(phase) else 0.0

    for stats in most_affected(run, copy_share, MIN_COPY_SHARE):
        copy, share = stats.phase("copy"), copy_share(stats)
        assert copy is not None
        yield Finding(
            "copy",
            f"Copying to the GPU{rank_suffix(stats)}{mode_suffix(stats, run)} takes {format_percent(share)} of step"
            " time.",
            f"copy on the device median {format_long_duration(copy.device_ns)}, on the host"
            f" {format_phase_times(stats, 'copy')}; {format_sample_basis(stats)}",
            copy_advice(run, stats.process),
            share,
            time_of_share(stats, share),
        )


def find_slow_dp(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if DataParallel is slower than one device."""
    comparison = run.mode_comparison
    if comparison is None or comparison.speedup is None:
        return
    value, low, high = comparison.speedup
    if not 0 < low <= high < 1:
        return
    advice = (
        "one device, or DistributedDataParallel; larger batches give every copy of the model more work, but change the"
        " training itself (learning rate)"
    )
    yield Finding(
        "slower",
        verdict_sentence(comparison) or "",
        f"the median step in dp takes {1 / value:.2f}× as long as in single (95%: {1 / high:.2f} to {1 / low:.2f})",
        _VIRTUAL_ADVICE if any(stats.virtual for stats in run.modes) else advice,
        1 - value,
    )


def find_dp_overhead(run: RunAnalysis) -> Iterator[Finding]:
    """Yield findings about the cost of DataParallel itself: replicate; scatter and gather."""
    for stats in (stats.settled_stats for stats in run.modes):
        if stats.mode != "dp" or stats.steps < MIN_STEPS:
            continue
        share = stats.phase_share("replicate")
        virtual_note = "  These replicas are virtual: on GPUs the share differs." if stats.virtual else ""
        if share >= MIN_COPY_SHARE:
            yield Finding(
                "replicate",
                f"Copying the model to the devices takes {format_percent(share)} of step time.{virtual_note}",
                f"replicate {format_phase_times(stats, 'replicate')}; {format_sample_basis(stats)}",
                _VIRTUAL_ADVICE
                if stats.virtual
                else "larger batches mean fewer copies, but change the training itself (learning rate);"
                " DistributedDataParallel copies nothing in a step, and may save more than that: try it",
                share,
                None if stats.virtual else time_of_share(stats, share),
            )
        share = stats.phase_share("scatter", "gather")
        if share >= MIN_COPY_SHARE:
            yield Finding(
                "transfer",
                f"Scattering inputs and gathering outputs takes {format_percent(share)} of step time.{virtual_note}",
                f"scatter {format_phase_times(stats, 'scatter')}; gather {format_phase_times(stats, 'gather')};"
                f" {format_sample_basis(stats)}",
                _VIRTUAL_ADVICE
                if stats.virtual
                else "compute the loss inside the forward, so that one number is gathered instead of the outputs;"
                " pinned memory; DistributedDataParallel, which may save more than that",
                share,
                None if stats.virtual else time_of_share(stats, share),
            )


_GROWTH_ADVICE = (
    "look for lists or graphs that grow (losses kept with their graph), memory that fills up, heat, a fuller disk,"
    " other work on the machine"
)
_DRIFT_ADVICE = {
    "data": "look at the loader: samples that take longer, a colder cache, a slower disk or network, other work on the"
    " machine",
    "sync": "look at the other ranks, for which these steps wait: one of them may have become slower; or the network",
}
"""Advice by the phase that grew most; _GROWTH_ADVICE for the others."""


def find_slowdown(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each mode whose steps slowed down."""
    for stats in run.modes:
        if stats.steps < MIN_DRIFT_STEPS or stats.early is None or stats.late is None:
            continue
        early, late = stats.early.median(STEP), stats.late.median(STEP)
        if not early or not late or late < MIN_DRIFT_RATIO * early:
            continue
        if (stats.late.quantile(STEP, 0.25) or 0) < (stats.early.quantile(STEP, 0.75) or 0):
            continue
        medians = {name: (stats.early.median(name), stats.late.median(name)) for name in STEP_PHASES}
        growth_ns = {name: after - (before or 0) for name, (before, after) in medians.items() if after is not None}
        phase = max(growth_ns, key=lambda name: growth_ns[name], default="")
        phase_text = ""
        if phase:
            before, after = medians[phase]
            phase_text = f"; {phase} grew most: {format_long_duration(before)}, then {format_long_duration(after)}"
        yield Finding(
            "drift",
            f"Steps{rank_suffix(stats)} slowed down{mode_suffix(stats, run)}:"
            f" {format_ratio(late, early)} the initial time by the end.",
            f"median {format_long_duration(early)} over the first third of {stats.steps:,} steps,"
            f" {format_long_duration(late)} over the last{phase_text}",
            _DRIFT_ADVICE.get(phase, _GROWTH_ADVICE),
            1 - early / late,
        )


def find_long_steps(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if single steps took very long, for the process to blame for most of their time."""
    by_mode = [(stats, _long_steps(stats, run)) for stats in measured_modes(run)]
    stats, long_steps = max(by_mode, key=lambda item: sum(step.blame_weight_ns for step in item[1]), default=(None, []))
    if stats is None or not long_steps:
        return
    long_ns = sum(step.wall_ns for step in long_steps)
    median_ns = stats.median_ns or 0.0
    typical_ns = median_ns * stats.steps
    if long_ns < MIN_LONG_STEPS_SHARE * (typical_ns + long_ns) and long_ns < MIN_LONG_STEPS_NS:
        return
    worst, count, total = long_steps[0], len(long_steps), format_long_duration(long_ns)
    # A lower bound if steps were deleted, or if all steps that were read are long.
    is_lower_bound = count == len(_longest_steps(stats, run)) > 1 or run.store.pruned > 0
    if count > 1:
        count_text = f"At least {count}" if is_lower_bound else str(count)
        text = f"{count_text} steps took more than {MIN_LONG_STEP_RATIO}× the median: {total} together."
    else:
        count_text = "At least one" if is_lower_bound else "One"
        text = f"{count_text} step took {total}, {format_ratio(long_ns, median_ns)} the median."
    yield Finding(
        "long steps",
        text,
        f"the longest: {_step_location(worst, run)}; median {format_long_duration(median_ns)}",
        _long_step_advice(worst, run),
        long_ns / (typical_ns + long_ns),
        None if is_lower_bound else (long_ns - count * median_ns) / SECOND,
    )


def _longest_steps(stats: StepStats, run: RunAnalysis) -> list[StepRow]:
    """Return the longest steps of a process in a mode, the longest first, without those that wait for input."""
    steps = run.longest_steps[:MAX_LONG_STEPS]
    own_steps = [step for step in steps if (step.process, step.mode) == (stats.process, stats.mode)]
    return [step for step in own_steps if not _waits_for_input(step, run)]


def _long_steps(stats: StepStats, run: RunAnalysis) -> list[StepRow]:
    """Return those of the longest steps that are far above the median; none if the steps vary widely anyway."""
    if not stats.median_ns or _spread_ratio(stats) >= MIN_SPREAD_RATIO:
        return []
    least_ns = max(MIN_LONG_STEP_RATIO * stats.median_ns, MIN_LONG_STEP_NS)
    return [step for step in _longest_steps(stats, run) if step.wall_ns >= least_ns]


def find_recovered_stalls(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding about stalls after which the run continued."""
    last_stall = final_stall(run.announced.stalls, run.last_step_ns or 0)
    stalls = [stall for stall in run.announced.stalls if stall.end_ns is not None and stall is not last_stall]
    # The ranks of a node that did not know of the stall count its time as training.
    stalled_ns = max((spent.get("stalled", 0) for spent in run.spent_by_process.values()), default=0)
    if not stalled_ns or not stalls:
        return
    steps = run.stalled_steps
    subject = {0: "A stall is", 1: "A step with a stall is"}.get(steps, f"{steps:,} steps with a stall are")
    longest = max(stalls, key=lambda stall: (stall.end_ns or 0) - stall.since_ns)
    yield Finding(
        "stall",
        f"{subject} left out of the metrics: {format_long_duration(stalled_ns)}.",
        f"{'the longest ' if len(stalls) > 1 else ''}stall at {format_elapsed(longest.since_ns)}: {longest.text}",
        "dpmon why shows the stacks of that time",
        stalled_ns / (stalled_ns + run.time_by_activity.get("training", 0)),
        stalled_ns / SECOND,
    )


def _waits_for_input(step: StepRow, run: RunAnalysis) -> bool:
    """Return whether a step mostly waits for a line of input, which is no stall."""
    waits = run.announced.input_waits(step.process)
    return 2 * overlap_ns(waits, step.start_ns, step.start_ns + step.wall_ns) > step.wall_ns


def _longest_phase(step: StepRow) -> str:
    """Return the phase that took most of a step."""
    return max(step.phases, key=lambda name: step.phases[name], default="other")


def _step_location(step: StepRow, run: RunAnalysis) -> str:
    """Return the step, its time, and the phase that took most of it, as text."""
    process_text, phase = process_suffix(step.process, run), _longest_phase(step)
    step_text = (
        f"step {step.step}{process_text} at {format_elapsed(step.start_ns)}, {format_long_duration(step.wall_ns)}"
    )
    return f"{step_text}, {format_long_duration(step.phases.get(phase, 0))} in {phase}"


def _long_step_advice(step: StepRow, run: RunAnalysis) -> str:
    phase = _longest_phase(step)
    if phase == "backward" and run.names:
        return _LONG_STEP_ADVICE[phase] + ", or a rank that the others waited for"
    if phase == "data" and worker_restarts(run, step.process):
        return (
            _LONG_STEP_ADVICE[phase]
            + ", a new epoch that starts its workers again (persistent_workers=True keeps them)"
        )
    return _LONG_STEP_ADVICE.get(phase, _LONG_STEP_ADVICE["other"])


def find_gaps_between_steps(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if a process spends much time between steps: loaders that start, checkpoints, logging."""
    process, between_ns, active_ns = _most_spent(run, "between")
    process_gaps = [gap for gap in run.gaps if gap.process == process]
    if not process_gaps or between_ns < max(MIN_BETWEEN_NS, MIN_BETWEEN_SHARE * active_ns):
        return
    longest, gap_ns = process_gaps[0], sum(gap.ns for gap in process_gaps)
    text = "one gap of" if len(process_gaps) == 1 else f"{len(process_gaps)} gaps, the longest"
    text += f" {format_long_duration(longest.ns)} after step {longest.after_step}"
    restarts = worker_restarts(run, process)
    restart_intervals = [(start.start_ns, start.start_ns + start.took_ns) for start in restarts]
    restart_ns = sum(overlap_ns(restart_intervals, gap.begin_ns, gap.end_ns) for gap in process_gaps)
    restart_share = restart_ns / gap_ns if gap_ns else 0.0
    workers_text = ""
    advice = "look at the script's own work there: a checkpoint, logging"
    if restart_share >= MIN_WORKERS_SHARE:
        workers_text = f" Starting the loader's workers takes {format_percent(restart_share)} of it."
        advice = "DataLoader(persistent_workers=True): the workers then start once, not in every epoch"
    elif restarts:
        advice += ", a loader that starts its workers again (persistent_workers=True keeps them)"
    # Workers that start again also load their first batch, for which a step waits.
    own_modes = [stats for stats in measured_modes(run) if stats.process == process]
    fetches_s = sum(map(_slow_fetches_s, own_modes)) if restarts else 0.0
    fetches_text = f" and slow fetches {format_long_duration(fetches_s * SECOND)}" if fetches_s else ""
    yield Finding(
        "between",
        f"The time between steps{process_suffix(process, run)} takes {format_elapsed_share(between_ns, run)}:"
        f" {text}.{workers_text}",
        f"between steps {format_long_duration(between_ns)}{fetches_text} of {format_long_duration(run.until_ns)};"
        f" the longest gap at {format_elapsed(longest.begin_ns)}",
        advice,
        between_ns / active_ns,
        between_ns / SECOND + fetches_s,
    )


def _slow_fetches_s(stats: StepStats) -> float:
    """Return the time (s) by which fetches exceed the median, such as the first of each epoch."""
    fetch = stats.phase("data")
    if fetch is None or not fetch.mean_ns or fetch.median_ns is None:
        return 0.0
    return time_of_share(stats, stats.phase_share("data") * max(1 - fetch.median_ns / fetch.mean_ns, 0.0))


def find_costly_evaluation(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if the evaluations of a process take much of its time; others may wait for it.

    A single evaluation after the last update cannot be made less often.
    """
    process, evaluation_ns, active_ns = _most_spent(run, "evaluation")
    least_ns = MIN_EVALUATION_SHARE * active_ns
    generates_data = "evaluation" in run.store.between_activities
    if not evaluation_ns or generates_data or evaluation_ns < least_ns:
        return
    if evaluation_ns - run.final_evaluation_ns(process) >= least_ns:
        yield Finding(
            "evaluation",
            f"Evaluations{process_suffix(process, run)} take {format_elapsed_share(evaluation_ns, run)}.",
            f"evaluation {format_long_duration(evaluation_ns)} of {format_long_duration(run.until_ns)}",
            "evaluate less often or on fewer samples; larger batches: an evaluation keeps no gradients",
            evaluation_ns / active_ns,
            evaluation_ns / SECOND,
        )


def _most_spent(run: RunAnalysis, activity: str) -> tuple[int, int, int]:
    """Return the training process that spent most time on an activity, that time (ns), and its active time (ns)."""
    largest = (0, 0, 0)
    for process in {stats.process for stats in measured_modes(run)}:
        spent = run.spent_by_process.get(process, {})
        if spent.get(activity, 0) > largest[1]:
            active_ns = sum(spent.get(name, 0) for name in ACTIVE)
            largest = process, spent[activity], active_ns
    return largest


def _spread_ratio(stats: StepStats) -> float:
    return (stats.p95_ns or 0.0) / stats.median_ns if stats.median_ns else 0.0


def find_uneven_steps(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each mode whose step times vary widely."""
    for stats in most_affected(run, _spread_ratio, MIN_SPREAD_RATIO):
        # If 1 in 20 steps waited for input, that alone explains the p95.
        is_input_wait = len(run.announced.inputs) >= stats.steps / 20
        if (stats.p95_ns or 0) >= MIN_SPREAD_P95_NS and not is_input_wait:
            share, phase = max(((phase.share or 0.0, phase.name) for phase in stats.ran_phases), default=(0.0, "none"))
            yield Finding(
                "spread",
                f"Step times{rank_suffix(stats)} vary widely{mode_suffix(stats, run)}: 1 in 20 steps takes at least"
                f" {format_ratio(stats.p95_ns, stats.median_ns)} the median.",
                f"median {format_long_duration(stats.median_ns)}, p95 {format_long_duration(stats.p95_ns)} over"
                f" {stats.steps:,} steps{rank_suffix(stats)}; {phase} takes {format_percent(share)} of step time",
                step_variance_advice(run, stats.process, phase),
                0.3,
            )
