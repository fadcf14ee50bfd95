"""Sentences, and tables of steps and phases, that the text and the page share."""

from __future__ import annotations

import time
from collections.abc import Sequence

from dpmon.model.compare import Comparison
from dpmon.model.evidence import ModeFacts
from dpmon.model.finding import took
from dpmon.model.findings import MIN_STEPS
from dpmon.model.numbers import duration, percent
from dpmon.model.phase_notes import host_waits, partly_timed
from dpmon.model.verdict import sentence
from dpmon.record.wire import CALL_PHASES
from dpmon.report.story import Story
from dpmon.report.waits import KEPT
from dpmon.report.words import (
    machine,
    mode_title,
    paused,
    what_ran,
)
from dpmon.store.figures import PhaseFigures
from dpmon.text.quantities import quantity_words, samples_rate


def facts(story: Story) -> list[str]:
    """The basic facts: times and programs, and what is missing from the record."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(story.info.started_unix))
    found = [f"began {began} in {story.info.cwd or 'a directory that is gone'}", what_ran(story), machine(story)]
    if story.nothing is not None:
        found.append(f"nothing was traced: {story.nothing}")
    if story.standing is not None:
        found.append(story.standing)
    pauses = paused(story)
    if pauses is not None:
        found.append(pauses)
    if story.evidence.inputs:
        found.append(waited(story.evidence.inputs))
    if story.pruned:
        found.append(pruned(story))
    if story.dropped:
        found.append(f"{story.dropped:,} records were lost; the figures cover the rest")
    return found


def waited(inputs: Sequence[tuple[int | None, int, int]]) -> str:
    """The number and time of waits for a line of input, and where that time counts."""
    times = "once" if len(inputs) == 1 else f"{len(inputs):,} times"
    times = times if len(inputs) < KEPT else f"at least {times}"
    in_all = sum(end - begin for _, begin, end in inputs)
    where = ""
    if any(who is not None for who, _, _ in inputs):
        where = ": step times include that time, rates do not"
    return f"waited for a line of input {times}, for {took(in_all)}{' in all' if 1 < len(inputs) < KEPT else ''}{where}"


def pruned(story: Story) -> str:
    """The deleted records and the effect on the figures."""
    return (
        f"{story.pruned:,} older records were deleted to bound the history: the figures cover all steps, but single"
        " steps and samples of that time are gone"
    )


def step_rows(story: Story) -> list[tuple[str, ModeFacts]]:
    """The figures of each mode with a label: first without evaluations, then the evaluations."""
    rows = [(mode_title(mode), mode) for mode in story.evidence.modes if mode.steps]
    return [*rows, *((f"{mode_title(mode)}, evaluation", mode) for mode in story.evaluations)]


def steps_table(story: Story) -> list[tuple[str, ...]]:
    """A row of names, then one row for each of `step_rows`; empty without steps."""
    rows: list[tuple[str, ...]] = [("mode", "steps", "median", "p95", "samples/s")]
    for title, mode in step_rows(story):
        times = duration(mode.median_ns), duration(mode.p95_ns)
        rows.append((title, f"{mode.steps:,}", *times, samples_rate(mode.rate)))
    return rows if len(rows) > 1 else []


def findings_note(story: Story) -> str:
    """The text in place of findings."""
    if any(mode.steps >= MIN_STEPS for mode in story.evidence.modes):
        return "nothing stands out"
    return f"too few steps for findings ({MIN_STEPS} in one mode are needed)"


def phase_rows(mode: ModeFacts) -> list[tuple[str, PhaseFigures]]:
    """The phases with their labels in a table; phases of the calls are indented below forward."""
    found = {figures.name: figures for figures in mode.phases}
    rows: list[tuple[str, PhaseFigures]] = []
    for name, figures in found.items():
        if name in CALL_PHASES:
            continue
        rows.append((name, figures))
        if name == "forward":
            rows += [(f"  {part}", found[part]) for part in CALL_PHASES if part in found]
    if "forward" not in found:
        rows += [(part, found[part]) for part in CALL_PHASES if part in found]
    return rows


def phase_table(mode: ModeFacts) -> list[tuple[str, ...]]:
    """One row per phase with its host time, and its device time if any is known, below a row of names."""
    found = phase_rows(mode)
    timed = any(figures.device_ns is not None for _, figures in found)
    rows: list[tuple[str, ...]] = [("phase", "share", "median", "p95", *(("on device",) if timed else ()))]
    for label, figures in found:
        device = (duration(figures.device_ns),) if timed else ()
        rows.append((label, percent(figures.share), duration(figures.median_ns), duration(figures.p95_ns), *device))
    return rows


def phase_notes(mode: ModeFacts) -> list[str]:
    """Notes below the table of phases: about their times, and the quantities of the steps."""
    said = [] if mode.distributed is None else ["the steps of all ranks together"]
    said += [*host_waits(mode.phases), *partly_timed(mode.phases)]
    return said + [quantity_words(*each, mode.steps) for each in mode.counted]


def comparison(found: Comparison) -> list[str]:
    """dp against single in sentences."""
    if found.speedup is None:
        return [found.missing or "no verdict"]
    value, low, high = found.speedup
    text = f"speed-up {value:.2f} (95 %: {low:.2f} to {high:.2f})"
    if found.efficiency is not None:
        text += f", {percent(found.efficiency)}  per device"
    steps = " and ".join(f"{side.steps:,} in {mode}" for mode, side in found.sides.items())
    without = "not counting the first steps after a change of mode, and steps of another batch size or kind"
    return [sentence(found) or "", f"{text}; of {steps}, {without}"]
