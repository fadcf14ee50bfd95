"""Findings about the time of steps and phases, with advice that the run's metrics support.

Other advice can make a training slower: worker processes for fetches of 100 us, or fewer threads on idle CPU cores.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpmon.model.comparison_stats import share_interval
from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import (
    MIN_DATA_SHARE,
    MIN_STEPS,
    busy_cores_advice,
    data_share,
    format_elapsed_share,
    format_phase_times,
    format_ratio,
    has_idle_core,
    has_varied_inputs,
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
from dpmon.record.schema import SECOND, STEP, STEP_PHASES
from dpmon.store.gaps import Gap
from dpmon.store.steps import StepRow
from dpmon.text.formatting import format_bytes, format_elapsed, format_long_duration, format_percent

if TYPE_CHECKING:
    from dpmon.model.run_events import LoaderStart
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
MIN_SAVING_SHARE, MIN_SAVING_NS = 0.05, 500_000_000
"""Smallest share of active time, and shortest total, of checkpoints to report."""
MIN_EVALUATION_SHARE = 0.2
"""Smallest share of active time to report."""
MIN_WORKERS_SHARE = 0.5
"""If starting workers takes at least this share of the gaps, the finding names it."""
WORTH_A_WORKER_NS = 1_000_000
"""Shortest fetch that justifies a worker: passing a batch between processes takes some hundreds of microseconds."""
MIN_FETCH_CPU_SHARE = 0.5
"""Fetches that compute keep CPU cores busy. If the CPU time of the whole run is less than this share of its time in
fetches, the fetches mostly wait. More workers can then wait at the same time."""
RARE_FETCH_RATIO = 3.0
"""Smallest ratio of mean to median fetch at which a few fetches (the first of each epoch) take most of the time."""
MIN_RECOMPILATIONS = 4
"""Fewest repeated compilations of a function: for evaluation, and for a smaller last batch, up to three are usual."""
MIN_SYNC_SAMPLES, MIN_SYNC_STEPS, MIN_SYNC_SHARE = 3, 0.8, 0.05
"""Fewest sampled steps; smallest share of them with a wait at this line, and of their time. The early steps of a run
or a line that waits every hundredth step are no reason."""


# ------------------------------------------------------------------------------------------------ phases of every step


def _phase_finding(
    kind: str, stats: StepStats, phases: tuple[str, ...], share: float, text: str, advice: str, more: str = ""
) -> Finding:
    """Return a finding about phases that take much of every step of a process. `more`: evidence beside their times."""
    times = "".join(f"{name} {format_phase_times(stats, name)}; " for name in phases)
    steps = f"step median {format_long_duration(stats.median_ns)} over {stats.steps:,} steps{rank_suffix(stats)}"
    return Finding(kind, text, f"{times}{steps}{more}", advice, share, time_of_share(stats, share))


def find_data_waits(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each mode in which the training waits for its loader.

    Device times count if they are known: a device may still have queued work while the host waits.
    """
    for stats in most_affected(run, data_share, MIN_DATA_SHARE):
        if _is_only_straggler_waiting(run, stats):
            continue  # the finding about the slow ranks names the cause
        data, share, more = stats.phase("data"), data_share(stats), ""
        subject = stats.process_name or "the training"
        if data is not None and is_timed(data):
            subject = f"the GPU{rank_suffix(stats)}"
        if stats.process_name is not None:
            modes = [other.settled_stats for other in (*run.modes, *run.other_process_modes)]
            shares = [data_share(other) for other in modes if other.mode == stats.mode]
            affected = sum(other_share >= MIN_DATA_SHARE for other_share in shares)
            more = f"; {format_percent(MIN_DATA_SHARE)} or more in {affected:,} of {len(shares):,} processes"
        text = f"{subject} waits for data{mode_suffix(stats, run)}: {format_percent(share)} of step time"
        (line, cause), advice = _find_slow_function(run, stats), _data_advice(stats, run)
        if line:
            advice = f"a faster {line}; {advice}"
        text = f"{text[:1].upper()}{text[1:]}{cause}."
        yield _phase_finding("data", stats, ("data",), share, text, advice, more)


def _find_slow_function(run: RunAnalysis, stats: StepStats) -> tuple[str, str]:
    """Return the line in a loader's slowest function, and the end of a sentence about it; empty if none stands out."""
    records = [data for data in run.memory_events["loader_lines"] if data["process"] == stats.process]
    if not records:
        return "", ""
    lines, functions = Counter[str](records[-1]["lines"]), Counter[str]()
    for line, samples in lines.items():
        functions[line.rpartition(":")[0]] += samples
    function, samples = functions.most_common(1)[0]
    steps = records[-1]["took_s"] * SECOND / (stats.mean_ns or SECOND)  # samples within the batch of a step are alike
    share, low, high = share_interval(samples / lines.total(), min(steps, lines.total()))
    if low < MIN_DATA_SHARE:
        return "", ""
    line = next(line for line, _ in lines.most_common() if line.startswith(f"{function}:"))
    interval = f"{format_percent(low)} to {format_percent(high)}"
    return line, f"; {format_percent(share)} ({interval}) of the loader's time is in {line}"


def _is_only_straggler_waiting(run: RunAnalysis, stats: StepStats) -> bool:
    """Return whether waits for data make the straggler slow, while the other ranks hardly wait for data."""
    straggler = None if run.whole_communication is None else run.whole_communication.straggler
    if straggler is None or straggler.phase != "data" or straggler.steps < MIN_STEPS:
        return False
    if straggler.others_ns is None or stats.mean_ns is None:
        return False
    return straggler.others_ns < MIN_DATA_SHARE * stats.mean_ns


def _data_advice(stats: StepStats, run: RunAnalysis) -> str:
    fetch = stats.phase("data")
    median = None if fetch is None else fetch.median_ns
    mean = None if fetch is None or fetch.share is None or stats.mean_ns is None else fetch.share * stats.mean_ns
    if median and mean and mean >= RARE_FETCH_RATIO * median:
        times = f"mean {format_long_duration(mean)}, median {format_long_duration(median)}"
        few_fetches = f"a few fetches take most of the time ({times})"
        if _worker_restarts(run, stats.process):
            return (
                f"{few_fetches}, such as the first of each epoch, for which workers start:"
                " persistent_workers=True keeps them"
            )
        return f"{few_fetches}: look for samples that take longer, a cold cache, a slow disk or network"
    if median is not None and median < WORTH_A_WORKER_NS:
        return (
            "not more workers: passing a batch between processes costs more than a fetch of"
            f" {format_long_duration(median)}; fetch larger batches, or index tensors in memory without a DataLoader"
        )
    host, workers = run.host_usage, "more workers (DataLoader num_workers)"
    condition = "" if host is not None else ", if CPU cores are idle"
    keeping = ", with persistent_workers=True" if _later_starts(run, stats.process) else ""
    if host is None or has_idle_core(host):
        return f"{workers}{condition}{keeping}; less work per sample; data on a faster disk"
    in_use = f"the CPU is {format_percent(host.cpu_pct / 100)} in use"
    if host.own < MIN_FETCH_CPU_SHARE * stats.phase_share("data") * max(len(run.process_numbers), 1):
        return (
            f"{workers}{keeping} if the fetches wait for a disk or network; otherwise end other work: {in_use}, but"
            f" this run uses only {host.own:.1f} of {host.cpus} cores"
        )
    return (
        f"less work per sample (decoding, augmentation), or data prepared beforehand: {in_use}, so more workers help"
        " only if the fetches wait for a disk or network"
    )


def _later_starts(run: RunAnalysis, process: int) -> list[LoaderStart]:
    """Return the second and later starts of loaders that keep no workers.

    A loader that is created again for each epoch starts only once, and could not keep its workers.
    """
    return [start for start in run.loaders if start.process == process and start.start > 1 and not start.persistent]


def _worker_restarts(run: RunAnalysis, process: int) -> list[LoaderStart]:
    """Return the starts at which a loader of the process started its workers again."""
    return [start for start in _later_starts(run, process) if start.workers]


def find_slow_copies(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each mode in which copying batches to the devices takes long.

    Only device times count: on the host, a copy may also wait for other work.
    """

    def copy_share(stats: StepStats) -> float:
        copy = stats.phase("copy")
        return (copy.device_share or 0.0) if copy is not None and is_timed(copy) else 0.0

    for stats in most_affected(run, copy_share, MIN_COPY_SHARE):
        share, where = copy_share(stats), f"{rank_suffix(stats)}{mode_suffix(stats, run)}"
        text = f"Copying to the GPU{where} takes {format_percent(share)} of step time."
        advice = ".to(..., non_blocking=True); fewer bytes: copy as uint8 or half precision, and convert on the GPU"
        loaders = [loader for loader in run.loaders if loader.process == stats.process]
        if not loaders or not all(loader.pinned for loader in loaders):
            advice = f"pinned memory (DataLoader pin_memory) with {advice}"
        yield _phase_finding("copy", stats, ("copy",), share, text, advice)


_VIRTUAL_ADVICE = "measure on GPUs first: virtual replicas share the CPU cores of this machine"
_DP_PHASES = {
    "replicate": (
        ("replicate",),
        "Copying the model to the devices",
        "larger batches mean fewer copies, but change the training itself (learning rate); DistributedDataParallel"
        " copies nothing in a step, and may save more than that: try it",
    ),
    "transfer": (
        ("scatter", "gather"),
        "Scattering inputs and gathering outputs",
        "compute the loss inside the forward, so that one number is gathered instead of the outputs; pinned memory;"
        " DistributedDataParallel, which may save more than that",
    ),
}
"""The cost of DataParallel itself, by kind of finding: its phases, their work in words, and what to try."""


def find_dp_overhead(run: RunAnalysis) -> Iterator[Finding]:
    """Yield findings about the cost of DataParallel itself: replicate; scatter and gather."""
    settled = (stats.settled_stats for stats in run.modes if stats.mode == "dp")
    for stats in settled:
        for kind, (phases, work, advice) in _DP_PHASES.items():
            share = stats.phase_share(*phases)
            if stats.steps < MIN_STEPS or share < MIN_COPY_SHARE:
                continue
            text = f"{work} takes {format_percent(share)} of step time."
            finding = _phase_finding(kind, stats, phases, share, text, advice)
            if stats.virtual:
                text += "  These replicas are virtual: on GPUs the share differs."
                finding = finding._replace(text=text, advice=_VIRTUAL_ADVICE, saves_s=None)
            yield finding


def find_slow_dp(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if DataParallel is slower than one device."""
    comparison = run.mode_comparison
    if comparison is None or comparison.speedup is None or comparison.speedup.sign >= 0:
        return
    value, low, high = comparison.speedup
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


# ------------------------------------------------------------------------------------------------ lines of the script


def find_compilations(run: RunAnalysis) -> Iterator[Finding]:
    """Yield findings for a line that torch.compile compiles again and again, and for lines that break a graph."""
    records = [data for data in run.memory_events["compiles"] if not data["absent"]]
    for data in sorted(records, key=lambda data: (data["seconds_again"], data["compilations"]))[-1:]:
        who, again_ns = f"torch.compile{process_suffix(data['process'], run)}", data["seconds_again"] * SECOND
        evidence = (
            f"{data['compilations']:,} compilations took {format_long_duration(data['seconds'] * SECOND)}; among the"
            f" last 64, repeated ones took {format_long_duration(again_ns)}, {format_elapsed_share(again_ns, run)}"
        )
        for place, guard, count in data["again"][:1]:
            text = f"{who} compiled {place} again {count:,} times after a guard like `{guard}` had failed."
            advice = (
                "keep what the guard compares constant, or pass it as a tensor; if it is a size: batches of one size"
                " (drop_last=True, a padded last batch) or torch._dynamo.mark_dynamic"
            )
            if count >= MIN_RECOMPILATIONS:
                yield Finding("recompiled", text, evidence, advice, again_ns / run.until_ns, again_ns / SECOND)
        breaks = [f"{place} ({reason})" for place, reason in data["graph_breaks"]]
        if breaks:
            text, evidence = f"{who} breaks its graph at {breaks[-1]}.", f"{len(breaks)} found: {'; '.join(breaks)}"
            yield Finding("graph break", text, evidence, "move the line out of the compiled function", 0.001)


def find_host_syncs(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for the line that waits longest for a GPU in (nearly) every sampled step of a process.

    The GPU's work is waited for anyway. At most its idle time can be saved: if that is not known, there is no finding.
    """
    walls_ns, waits_ns = defaultdict[int, list[float]](list), defaultdict[tuple[int, str], list[float]](list)
    for data in run.memory_events["host_syncs"]:
        walls_ns[data["process"]].append(data["wall_ms"] * 1e6)
        for line, ns in data["lines"].items():
            waits_ns[data["process"], line].append(ns)
    if not waits_ns:
        return
    busy_pct = [usage.util_median for usage in run.device_usage if usage.of_run and usage.util_median is not None]
    idle = 1 - max(busy_pct, default=100) / 100
    for (process, line), times_ns in sorted(waits_ns.items(), key=lambda item: -sum(item[1])):
        count, steps, share = len(times_ns), len(walls_ns[process]), sum(times_ns) / sum(walls_ns[process])
        if count >= max(MIN_SYNC_SAMPLES, MIN_SYNC_STEPS * steps) and min(share, idle) >= MIN_SYNC_SHARE:
            yield Finding(
                "sync",
                f"{line} waits {format_long_duration(sum(times_ns) / count)} for the GPU in every step"
                f"{process_suffix(process, run)}: {format_percent(share)} of step time.",
                f"in {count} of {steps} sampled steps; the GPU is idle {format_percent(idle)}",
                "read the value every n steps, or keep the sum on the GPU (detach) and read it once an epoch; the GPU's"
                " own work is waited for anyway, so this saves at most the time for which the GPU is idle",
                share,
                min(share, idle) * run.active_ns / SECOND,
            )
            return


# ------------------------------------------------------------------------------------------------ steps that differ

_DRIFT_ADVICE = {
    "data": "look at the loader: samples that take longer, a colder cache, a slower disk or network, other work on the"
    " machine",
    "sync": "look at the other ranks, for which these steps wait: one of them may have become slower; or the network",
    "other": "look for lists or graphs that grow (losses kept with their graph), memory that fills up, heat, a fuller"
    " disk, other work on the machine",
}
"""Advice by the phase that grew most; that of `other` for all other phases."""
_COMPUTED_SLOWLY = (
    "look for a shape seen for the first time (compilation, kernel choice), or for another process on the device; dpmon"
    " profile names the operators"
)
_LONG_STEP_ADVICE = {
    "data": "look for what delayed the loader: a cold cache, a slow disk or network",
    "copy": "look at what the copy waited for: the device's other work, or memory to be pinned",
    "forward": _COMPUTED_SLOWLY,
    "backward": _COMPUTED_SLOWLY,
    "sync": "look for a rank that the others waited for, or a slow network between them",
    "optimizer": "look for a synchronization in the optimizer or its scheduler",
    "other": "look at the script's own work between the phases: a checkpoint, an evaluation, logging, .item() on a GPU",
}


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
        phase, phase_text = max(growth_ns, key=lambda name: growth_ns[name], default="other"), ""
        if phase in growth_ns:
            before, after = map(format_long_duration, medians[phase])
            phase_text = f"; {phase} grew most: {before}, then {after}"
        yield Finding(
            "drift",
            f"Steps{rank_suffix(stats)} slowed down{mode_suffix(stats, run)}:"
            f" {format_ratio(late, early)} the initial time by the end.",
            f"median {format_long_duration(early)} over the first third of {stats.steps:,} steps,"
            f" {format_long_duration(late)} over the last{phase_text}",
            _DRIFT_ADVICE.get(phase, _DRIFT_ADVICE["other"]),
            1 - early / late,
        )


def find_long_steps(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if single steps took very long, for the process to blame for most of their time."""
    by_mode = [(stats, _long_steps(stats, run)) for stats in measured_modes(run)]
    stats, long_steps = max(by_mode, key=lambda item: sum(step.blame_weight_ns for step in item[1]), default=(None, []))
    if stats is None or not long_steps:
        return
    worst, count, long_ns = long_steps[0], len(long_steps), sum(step.wall_ns for step in long_steps)
    median_ns = stats.median_ns or 0.0
    share = long_ns / (median_ns * stats.steps + long_ns)
    if share < MIN_LONG_STEPS_SHARE and long_ns < MIN_LONG_STEPS_NS:
        return
    # A lower bound if steps were deleted, or if all steps that were read are long.
    is_lower_bound = count == len(_longest_steps(stats, run)) > 1 or run.store.pruned > 0
    if count > 1:
        text = (
            f"{count} steps took more than {MIN_LONG_STEP_RATIO}× the median: {format_long_duration(long_ns)} together."
        )
    else:
        text = f"one step took {format_long_duration(long_ns)}, {format_ratio(long_ns, median_ns)} the median."
    phase = max(worst.phases, key=lambda name: worst.phases[name], default="other")
    advice = _LONG_STEP_ADVICE.get(phase, _LONG_STEP_ADVICE["other"])
    if phase == "backward" and run.names:
        advice += ", or a rank that the others waited for"
    elif phase == "data" and _worker_restarts(run, worst.process):
        advice += ", a new epoch that starts its workers again (persistent_workers=True keeps them)"
    yield Finding(
        "long steps",
        f"At least {text}" if is_lower_bound else text[:1].upper() + text[1:],
        f"the longest: step {worst.step}{process_suffix(worst.process, run)} at {format_elapsed(worst.start_ns)},"
        f" {format_long_duration(worst.wall_ns)}, {format_long_duration(worst.phases.get(phase, 0))} in {phase};"
        f" median {format_long_duration(median_ns)}",
        advice,
        share,
        None if is_lower_bound else (long_ns - count * median_ns) / SECOND,
    )


def _longest_steps(stats: StepStats, run: RunAnalysis) -> list[StepRow]:
    """Return the longest steps of a process in a mode, the longest first, but not those that mostly wait or save."""
    steps = [
        step for step in run.longest_steps[:MAX_LONG_STEPS] if (step.process, step.mode) == (stats.process, stats.mode)
    ]
    if not steps:  # as for most of many ranks: the records below are those of all ranks
        return []
    waits = [*run.announced.input_waits(stats.process), *run.announced.saves(stats.process)]
    return [
        step for step in steps if 2 * overlap_ns(waits, step.start_ns, step.start_ns + step.wall_ns) <= step.wall_ns
    ]


def _long_steps(stats: StepStats, run: RunAnalysis) -> list[StepRow]:
    """Return those of the longest steps that are far above the median; none if the steps vary widely anyway."""
    if not stats.median_ns or _spread_ratio(stats) >= MIN_SPREAD_RATIO:
        return []
    least_ns = max(MIN_LONG_STEP_RATIO * stats.median_ns, MIN_LONG_STEP_NS)
    return [step for step in _longest_steps(stats, run) if step.wall_ns >= least_ns]


def _spread_ratio(stats: StepStats) -> float:
    return (stats.p95_ns or 0.0) / stats.median_ns if stats.median_ns else 0.0


def find_uneven_steps(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each mode whose step times vary widely."""
    for stats in most_affected(run, _spread_ratio, MIN_SPREAD_RATIO):
        # If 1 in 20 steps waited for input, that alone explains the p95.
        is_input_wait = len(run.announced.inputs) >= stats.steps / 20
        if (stats.p95_ns or 0) < MIN_SPREAD_P95_NS or is_input_wait:
            continue
        share, phase = max(((phase.share or 0.0, phase.name) for phase in stats.phases), default=(0.0, "none"))
        sizes = "batches of similar size; " if has_varied_inputs(run, stats.process) else ""
        yield Finding(
            "spread",
            f"Step times{rank_suffix(stats)} vary widely{mode_suffix(stats, run)}: 1 in 20 steps takes at least"
            f" {format_ratio(stats.p95_ns, stats.median_ns)} the median.",
            f"median {format_long_duration(stats.median_ns)}, p95 {format_long_duration(stats.p95_ns)} over"
            f" {stats.steps:,} steps{rank_suffix(stats)}; {phase} takes {format_percent(share)} of step time",
            busy_cores_advice(run) or f"{sizes}the longest steps show what {phase} waited for",
            0.3,
        )


# ------------------------------------------------------------------------------------------------ outside the steps


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
    longest = max(stalls, key=lambda stall: stall.duration_ns(0))
    yield Finding(
        "stall",
        f"{subject} left out of the metrics: {format_long_duration(stalled_ns)}.",
        f"{'the longest ' if len(stalls) > 1 else ''}stall at {format_elapsed(longest.since_ns)}: {longest.text}",
        "dpmon why shows the stacks of that time",
        stalled_ns / (stalled_ns + run.time_by_activity.get("training", 0)),
        stalled_ns / SECOND,
    )


def find_gaps_between_steps(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if a process spends much time between steps: loaders that start, checkpoints, logging."""
    process, between_ns, active_ns = _most_spent(run, "between")
    whole_gaps, saves = [gap for gap in run.gaps if gap.process == process], run.announced.saves(process)
    gaps = sorted((_without_saves(gap, saves) for gap in whole_gaps), key=lambda gap: -gap.ns)
    between_ns -= sum(gap.ns for gap in whole_gaps) - sum(gap.ns for gap in gaps)
    if not gaps or between_ns < max(MIN_BETWEEN_NS, MIN_BETWEEN_SHARE * active_ns):
        return
    longest, restarts = gaps[0], _worker_restarts(run, process)
    starting = [(start.start_ns, start.start_ns + start.took_ns) for start in restarts]
    starting_ns = sum(overlap_ns(starting, gap.begin_ns, gap.end_ns) for gap in gaps)
    starting_share = starting_ns / max(sum(gap.ns for gap in gaps), 1)
    workers_text, advice = "", "look at the script's own work there: a checkpoint, logging"
    if starting_share >= MIN_WORKERS_SHARE:
        workers_text = f" Starting the loader's workers takes {format_percent(starting_share)} of it."
        advice = "DataLoader(persistent_workers=True): the workers then start once, not in every epoch"
    elif restarts:
        advice += ", a loader that starts its workers again (persistent_workers=True keeps them)"
    # Workers that start again also load their first batch, for which a step waits.
    own_modes = [stats for stats in measured_modes(run) if stats.process == process]
    fetches_s = sum(map(_slow_fetches_s, own_modes)) if restarts else 0.0
    fetches_text = f" and slow fetches {format_long_duration(fetches_s * SECOND)}" if fetches_s else ""
    count_text = "one gap of" if len(gaps) == 1 else f"{len(gaps)} gaps, the longest"
    yield Finding(
        "between",
        f"The time between steps{process_suffix(process, run)} takes {format_elapsed_share(between_ns, run)}:"
        f" {count_text} {format_long_duration(longest.ns)} after step {longest.after_step}.{workers_text}",
        f"between steps {format_long_duration(between_ns)}{fetches_text} of {format_long_duration(run.until_ns)};"
        f" the longest gap at {format_elapsed(longest.begin_ns)}",
        advice,
        between_ns / active_ns,
        between_ns / SECOND + fetches_s,
    )


def _without_saves(gap: Gap, saves: Sequence[tuple[int, int]]) -> Gap:
    """Return a gap without its checkpoints, which have a finding. `saves`: start and end of each (ns), oldest first."""
    own_saves = saves[bisect(saves, (gap.begin_ns, 0)) : bisect(saves, (gap.end_ns, 0))]
    return gap._replace(ns=max(gap.ns - overlap_ns(own_saves, gap.begin_ns, gap.end_ns), 0))


def _slow_fetches_s(stats: StepStats) -> float:
    """Return the time (s) by which fetches exceed the median, such as the first of each epoch."""
    fetch = stats.phase("data")
    if fetch is None or not fetch.mean_ns or fetch.median_ns is None:
        return 0.0
    return time_of_share(stats, stats.phase_share("data") * max(1 - fetch.median_ns / fetch.mean_ns, 0.0))


def find_costly_checkpoints(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for the line that spends most time on checkpoints, if that is a considerable share."""
    lines: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for data in run.announced.checkpoints:
        lines.setdefault((data["process"], data["place"]), []).append(data)
    saves = max(lines.values(), key=lambda saves: sum(data["save_s"] for data in saves), default=[])
    save_s = sum(data["save_s"] for data in saves)
    if not run.active_ns or save_s * SECOND < max(MIN_SAVING_NS, MIN_SAVING_SHARE * run.active_ns):
        return
    last, size = saves[-1], sum(data["bytes"] or 0 for data in saves)
    text = f"{format_bytes(size / len(saves))} each at {format_bytes(size / save_s)}/s to {last['filesystem']}"
    if not size:
        text = last["absent"].get("bytes", "of unknown size")
    yield Finding(
        "checkpoints",
        f"Checkpoints{process_suffix(last['process'], run)} take {format_elapsed_share(save_s * SECOND, run)}:"
        f" {text} ({last['place']}).",
        f"{len(saves):,} times {last['function']}, {format_long_duration(save_s * SECOND)} together",
        "save less often; torch.distributed.checkpoint.async_save, which writes in the background; a local disk",
        min(save_s * SECOND / run.active_ns, 1.0),
        save_s,
    )


def find_costly_evaluation(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if the evaluations of a process take much of its time; others may wait for it.

    A single evaluation after the last update cannot be made less often. Evaluations before nearly every update generate
    its data.
    """
    process, evaluation_ns, active_ns = _most_spent(run, "evaluation")
    least_ns = MIN_EVALUATION_SHARE * active_ns
    if not evaluation_ns or evaluation_ns < least_ns or "evaluation" in run.store.between_activities:
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
    spent_by_process = {stats.process: run.spent_by_process.get(stats.process, {}) for stats in measured_modes(run)}
    process = max(spent_by_process, key=lambda process: spent_by_process[process].get(activity, 0), default=0)
    spent = spent_by_process.get(process, {})
    return process, spent.get(activity, 0), sum(spent.get(name, 0) for name in ACTIVE)


FINDERS = (
    *(find_data_waits, find_slow_copies, find_slow_dp, find_dp_overhead, find_slowdown, find_recovered_stalls),
    *(find_long_steps, find_uneven_steps, find_gaps_between_steps, find_costly_evaluation, find_costly_checkpoints),
    *(find_compilations, find_host_syncs),
)
