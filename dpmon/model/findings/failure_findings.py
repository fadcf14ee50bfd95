"""Findings about a run that failed, became idle, or has a loss that is NaN or infinite."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import measured_modes, process_suffix
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.slow_steps import WAITING_TEXT, overlap_ns
from dpmon.text.formatting import format_elapsed, format_long_duration

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis

MIN_QUIET_NS, MIN_QUIET_SHARE = 30_000_000_000, 0.1
"""Shortest time without a step at the end, and its smallest share of the run: saving and evaluating take some time."""
_MIN_QUIET_STEPS = 3
"""A live run counts as idle only after the time of this many median steps, and after MIN_QUIET_NS."""
INVALID_LOSS_TEXTS = {"nan": "not a number (NaN)", "inf": "infinite", "-inf": "minus infinity"}
"""The text for each loss that is not finite, by its repr()."""


def find_quiet_end(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if the run continued long after its last step, or if a live run is stalled for long."""
    measured = list(measured_modes(run))
    if run.last_step_ns is None or not measured:
        return
    # Pauses and waits for input do not count as idle.
    paused_ns = overlap_ns(run.paused, run.last_step_ns, run.until_ns)
    waited_ns = overlap_ns([(start, end) for _, start, end in run.announced.inputs], run.last_step_ns, run.until_ns)
    quiet_ns = run.until_ns - run.last_step_ns - paused_ns - waited_ns
    quiet_text = format_long_duration(run.until_ns - run.last_step_ns)
    exclusions = f", {format_long_duration(paused_ns)} of it paused" if paused_ns else ""
    exclusions += f", {format_long_duration(waited_ns)} of it {WAITING_TEXT}" if waited_ns else ""
    evidence = f"the last one at {format_elapsed(run.last_step_ns)}{_positions(run)}"
    stall = final_stall(run.announced.stalls, run.last_step_ns)
    if run.end_ns is None:
        longest_median_ns = max(mode.median_ns or 0 for mode in measured)
        if stall is None or stall.end_ns is not None:
            return
        if quiet_ns >= max(MIN_QUIET_NS, _MIN_QUIET_STEPS * longest_median_ns):
            text, advice = f"No step has finished for {quiet_text}{exclusions}.", "dpmon why shows the stack of each"
            yield Finding("quiet", text, f"{evidence}; {stall.text}", f"{advice} process, the odd one first", 1.0)
        return
    run_ns = run.end_ns - sum(end - start for start, end in run.paused)
    if quiet_ns >= max(MIN_QUIET_NS, MIN_QUIET_SHARE * run_ns):
        evidence += f", the end at {format_elapsed(run.end_ns)}"
        advice = "the end of the script's output says whether it saved, evaluated or hung"
        if stall is not None:
            evidence += f"; {stall.text}"
            advice = "dpmon why shows the stack of each process at that time, the odd one first"
        text = f"No step finished in the last {quiet_text} of the run{exclusions}."
        yield Finding("quiet", text, evidence, advice, quiet_ns / run_ns)


def find_failure(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for the exception that ended the run, or for a rank that ended it without one."""
    if run.death is not None:
        yield Finding(
            "failed",
            f"A rank ended without an exception: {run.death}.",
            "the status that the kernel gave; another rank's exception at that time is usually a consequence"
            f"{_positions(run)}",
            "read what this rank wrote before its end: gloo, NCCL and CUDA give a reason before they abort a process;"
            " after SIGKILL, look for a lack of memory (dmesg)",
            1.0,
        )
    elif run.raised is not None:
        advice = "read the traceback at the end of the output"
        if "was killed by SIGKILL" in run.raised:
            advice = "SIGKILL usually comes from the kernel's OOM killer (see dmesg): use fewer workers"
        elif "no gradient for" in run.raised:
            advice = "find_unused_parameters=True, or a loss that depends on these parameters in every step"
        yield Finding(
            "failed",
            f"An exception ended the run: {run.raised}.",
            "the first exception that was not caught; later ones are usually consequences of it"
            f"{_memory_note(run)}{_positions(run)}",
            advice,
            1.0,
        )


def _positions(run: RunAnalysis) -> str:
    """Return where ranks were: "; rank 1 left its loop after batch 34; rank 0 was in batch 35"; empty if all alike."""
    if not run.last_times:
        return ""
    names = defaultdict[str, list[str]](list)
    for process in run.training_processes:
        step, (span_ns, loop_end_ns) = process.last_step, run.last_times.get(process.process, (-1, -1))
        if step is None or not step.batch or span_ns < 0:
            continue
        end_ns = step.start_ns + step.wall_ns
        place = f"was in batch {step.batch + (span_ns >= end_ns)}"
        if loop_end_ns >= end_ns:
            place = f"left its loop after batch {step.batch}"
        if step.loop is not None and step.loop > 1:
            place += f" of loop {step.loop}"
        names[place].append(run.names.get(process.process, ""))
    parts = [f"; {', '.join(same[:4])}{' ...' * (len(same) > 4)} {place}" for place, same in sorted(names.items())]
    return "".join(parts) if len(parts) > 1 else ""


def _memory_note(run: RunAnalysis) -> str:
    """Return what the supervisor recorded about a lack of memory at the end, after "; "; empty for another cause."""
    causes = [data.get("cause") or "" for data in run.memory_events["exit"]]
    return next((cause.removeprefix(run.raised or "") for cause in causes if cause.startswith(f"{run.raised}; ")), "")


def find_invalid_losses(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for the first loss that is NaN or infinite.

    Only one value per second is read, so earlier losses may also be.
    """
    if not run.first_invalid_losses:
        return
    first, names = run.first_invalid_losses[0], [process_suffix(loss.process, run) for loss in run.first_invalid_losses]
    step = "a step" if first.step is None else f"step {first.step:,}"
    others = ",".join(sorted({*names} - {names[0]}))
    yield Finding(
        "loss",
        f"The loss{names[0]} is {INVALID_LOSS_TEXTS[repr(first.loss)]}: seen at {step} ({first.place}).",
        f"at {format_elapsed(first.t_ns)}; at most one loss per second is read, so an earlier step may be the first"
        + (f"; also seen in losses{others}" if others else ""),
        "look at the last steps before it: the learning rate, a division by zero or log(0), half precision without"
        " a GradScaler; torch.autograd.set_detect_anomaly(True) names the operation",
        1.0,
    )


FINDERS = (find_failure, find_quiet_end, find_invalid_losses)
