"""Findings about a run that failed, became idle, or has a loss that is NaN or infinite."""

from __future__ import annotations

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
    """Yield a finding if the run continued (or still continues) long after its last step."""
    measured = list(measured_modes(run))
    if run.last_step_ns is None or not measured:
        return
    until_ns = run.until_ns
    # Pauses and waits for input do not count as idle.
    input_waits = [(start, end) for _, start, end in run.announced.inputs]
    waited_ns = overlap_ns(input_waits, run.last_step_ns, until_ns)
    paused_ns = overlap_ns(run.paused, run.last_step_ns, until_ns)
    quiet_ns = until_ns - run.last_step_ns - paused_ns - waited_ns
    exclusions = f", {format_long_duration(paused_ns)} of it paused" if paused_ns else ""
    exclusions += f", {format_long_duration(waited_ns)} of it {WAITING_TEXT}" if waited_ns else ""
    last_step_text = f"the last one at {format_elapsed(run.last_step_ns)}"
    stall = final_stall(run.announced.stalls, run.last_step_ns)
    if stall is not None and run.end_ns is None and stall.end_ns is not None:
        stall = None
    if run.end_ns is None:
        longest_median_ns = max(mode.median_ns or 0 for mode in measured)
        if stall is not None and quiet_ns >= max(MIN_QUIET_NS, _MIN_QUIET_STEPS * longest_median_ns):
            yield Finding(
                "quiet",
                f"No step has finished for {format_long_duration(until_ns - run.last_step_ns)}{exclusions}.",
                f"{last_step_text}; {stall.text}",
                "dpmon why shows the stack of each process, the odd one first",
                1.0,
            )
        return
    run_ns = run.end_ns - sum(end - start for start, end in run.paused)
    if quiet_ns >= max(MIN_QUIET_NS, MIN_QUIET_SHARE * run_ns):
        stall_text = "" if stall is None else f"; {stall.text}"
        yield Finding(
            "quiet",
            f"No step finished in the last {format_long_duration(until_ns - run.last_step_ns)} of the run{exclusions}.",
            f"{last_step_text}, the end at {format_elapsed(run.end_ns)}{stall_text}",
            "the end of the script's output says whether it saved, evaluated or hung"
            if stall is None
            else "dpmon why shows the stack of each process at that time, the odd one first",
            quiet_ns / run_ns,
        )


def find_failure(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for the exception that ended the run, or for a rank that ended it without one."""
    if run.death is not None:
        yield Finding(
            "failed",
            f"A rank ended without an exception: {run.death}.",
            "the status that the kernel gave; another rank's exception at that time is usually a consequence",
            "read what this rank wrote before its end: gloo, NCCL and CUDA give a reason before they abort a process;"
            " after SIGKILL, look for a lack of memory (dmesg)",
            1.0,
        )
    elif run.raised is not None:
        yield Finding(
            "failed",
            f"An exception ended the run: {run.raised}.",
            f"the first exception that was not caught; later ones are usually consequences of it{_memory_note(run)}",
            "read the traceback at the end of the output",
            1.0,
        )


def _memory_note(run: RunAnalysis) -> str:
    """Return what the supervisor recorded about a lack of memory at the end, after "; "; empty for another cause."""
    causes = [data.get("cause") or "" for data in run.memory_events["exit"]]
    return next((cause.removeprefix(run.raised or "") for cause in causes if cause.startswith(f"{run.raised}; ")), "")


def find_invalid_losses(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for the first loss that is NaN or infinite.

    Only one value per second is read, so earlier losses may also be.
    """
    for first in run.first_invalid_losses[:1]:
        step = "a step" if first.step is None else f"step {first.step:,}"
        others = {process_suffix(loss.process, run) for loss in run.first_invalid_losses} - {
            process_suffix(first.process, run)
        }
        others_text = f"; also seen in losses{','.join(sorted(others))}" if others else ""
        yield Finding(
            "loss",
            f"The loss{process_suffix(first.process, run)} is {INVALID_LOSS_TEXTS[repr(first.loss)]}: seen at {step}"
            f" ({first.place}).",
            f"at {format_elapsed(first.t_ns)}; at most one loss per second is read, so an earlier step may be the"
            f" first{others_text}",
            "look at the last steps before it: the learning rate, a division by zero or log(0), half precision without"
            " a GradScaler; torch.autograd.set_detect_anomaly(True) names the operation",
            1.0,
        )
