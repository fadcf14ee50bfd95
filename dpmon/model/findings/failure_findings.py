"""Findings about a run that failed, went quiet, or has a loss that is no finite number. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import measured_modes, process_suffix
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.slow_steps import WAITING_TEXT, overlap_ns
from dpmon.text.formatting import format_clock, format_long_duration

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis

QUIET_NS, QUIET_SHARE = 30_000_000_000, 0.1
"""Shortest time without a step at the end, and its smallest share of the run: saving and evaluating take some time."""
_LONG_STEPS = 3
"""A live run is quiet only after the time of this many median steps, and after QUIET_NS."""
LOSS_WORDS = {"nan": "not a number (NaN)", "inf": "infinite", "-inf": "minus infinity"}
"""What a loss is that is no finite number."""


def find_quiet_end(facts: RunAnalysis) -> Iterator[Finding]:
    """A run that continued, or continues, long after its last step."""
    measured = list(measured_modes(facts))
    if facts.last_step_ns is None or not measured:
        return
    until = facts.until_ns
    # Pauses and waits for input do not count as quiet.
    waits = [(begin, end) for _, begin, end in facts.announced.inputs]
    waited = overlap_ns(waits, facts.last_step_ns, until)
    paused_ns = overlap_ns(facts.paused, facts.last_step_ns, until)
    quiet = until - facts.last_step_ns - paused_ns - waited
    paused = f", {format_long_duration(paused_ns)} of it paused" if paused_ns else ""
    paused += f", {format_long_duration(waited)} of it {WAITING_TEXT}" if waited else ""
    last = f"the last one at {format_clock(facts.last_step_ns)}"
    stall = final_stall(facts.announced.stalls, facts.last_step_ns)
    if stall is not None and facts.end_ns is None and stall.end_ns is not None:
        stall = None
    if facts.end_ns is None:
        usual = max(mode.median_ns or 0 for mode in measured)
        if stall is not None and quiet >= max(QUIET_NS, _LONG_STEPS * usual):
            yield Finding(
                "quiet",
                f"No step has ended for {format_long_duration(until - facts.last_step_ns)}{paused}.",
                f"{last}; {stall.text}",
                "dpmon why shows the stack of each process, the odd one first",
                1.0,
            )
        return
    whole = facts.end_ns - sum(end - begin for begin, end in facts.paused)
    if quiet >= max(QUIET_NS, QUIET_SHARE * whole):
        where = "" if stall is None else f"; {stall.text}"
        yield Finding(
            "quiet",
            f"No step ended in the last {format_long_duration(until - facts.last_step_ns)} of the run{paused}.",
            f"{last}, the end at {format_clock(facts.end_ns)}{where}",
            "the end of the script's output says whether it saved, evaluated or hung"
            if stall is None
            else "dpmon why shows the stack of each process at that time, the odd one first",
            quiet / whole,
        )


def find_failure(facts: RunAnalysis) -> Iterator[Finding]:
    """The exception that ended the run, or a rank that ended it without one."""
    if facts.death is not None:
        yield Finding(
            "failed",
            f"A rank ended without an exception: {facts.death}.",
            "the status that the kernel gave; another rank's exception at that time is mostly a consequence",
            "read what this rank wrote before its end: gloo, NCCL and CUDA give a reason before they abort a process;"
            " after SIGKILL, look for a lack of memory (dmesg)",
            1.0,
        )
    elif facts.raised is not None:
        yield Finding(
            "failed",
            f"An exception ended the run: {facts.raised}.",
            "the first exception that was not caught; those of other ranks after it are mostly consequences",
            "read the traceback at the end of the output",
            1.0,
        )


def find_invalid_losses(facts: RunAnalysis) -> Iterator[Finding]:
    """A loss that is NaN or infinite. Only one value a second is read, so it may have begun before."""
    for first in facts.first_invalid_losses[:1]:
        step = "a step" if first.step is None else f"step {first.step:,}"
        others = {process_suffix(one.process, facts) for one in facts.first_invalid_losses} - {
            process_suffix(first.process, facts)
        }
        also = f"; also seen in losses{','.join(sorted(others))}" if others else ""
        yield Finding(
            "loss",
            f"The loss{process_suffix(first.process, facts)} is {LOSS_WORDS[repr(first.loss)]}: seen at {step}"
            f" ({first.place}).",
            f"at {format_clock(first.t_ns)}; at most one loss a second is read, so an earlier step may be the"
            f" first{also}",
            "look at the last steps before it: the learning rate, a division by zero or log(0), half precision without"
            " a GradScaler; torch.autograd.set_detect_anomaly(True) names the operation",
            1.0,
        )
