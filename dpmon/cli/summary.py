"""What a run did, as text for its end: how it ended, each mode's speed and phases, each replica's sizes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from dpmon.model.finding import many
from dpmon.model.memory import held, reasons
from dpmon.model.numbers import duration, group
from dpmon.model.stats import median, percentile
from dpmon.record.wire import CALL_PHASES, STEP_PHASES
from dpmon.report.said import waited
from dpmon.report.words import times_paused
from dpmon.run.add_up import add_up, why_nothing
from dpmon.run.files import read_tail
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, RunInfo, load_info, short_name
from dpmon.run.totals import Deleted, ModeTotals, Totals
from dpmon.text.cells import cut, span_width
from dpmon.text.cleaning import clean
from dpmon.text.last_words import READ_BYTES, last_words
from dpmon.text.quantities import memory, rate_words, run_time

__all__ = ["Line", "ending_line", "fitted", "summary", "summary_lines"]

_MAX_REPLICA_LINES = 40
_MAX_SIZES = 3
"""Sizes told of one replica, those of most calls."""
_MAX_ROWS = 2
"""Rows of the terminal that a line may take where there is no room for all; but for how it ended and where it is."""
_MAX_STAGES = 8
_MAX_WARNINGS = 5


class Line(NamedTuple):
    """A line of the summary; the higher its rank, the sooner it gives way where there is no room for all."""

    rank: int
    text: str


_FIRST, _MODE, _STEP, _LACKS, _PHASE, _WHO, _PART = range(7)
"""How it ended and where the record is; what was trained; its steps; what is missing; phases; who did it; the rest."""


def summary_lines(directory: Path, how: ExitInfo | None) -> list[str]:
    """The summary of the run in `directory`, a line each, safe for a terminal. RunError if it is no run.

    Medians are the middle value, p95 the nearest rank (the smallest value that 95 % do not exceed), over every step
    that is still in the record.
    """
    return [line.text for line in summary(directory, how)]


def summary(directory: Path, how: ExitInfo | None) -> list[Line]:
    """The same, each line with its rank."""
    reader = RunReader(directory)
    info = reader.info
    totals = add_up(directory)
    lines = [Line(_FIRST, _outcome(info, how)), *_ranked(_MODE, _raised(reader, how))]
    if not any(mode.walls or mode.calls for mode in totals.modes.values()):
        why = why_nothing(totals, reader)
        lines.append(Line(_MODE, f"nothing was traced: {why}" if why else "nothing was traced"))
    for name, mode in sorted(totals.modes.items()):
        lines += _mode_lines(name, "", mode, totals)
        if name in totals.evaluations:
            lines += _mode_lines(name, ", evaluation", totals.evaluations[name], totals)
    gone = ((name, gone) for name, gone in sorted(totals.deleted.items()) if gone.sums.steps)
    lines += _ranked(_STEP, (_deleted_line(*each, totals) for each in gone))
    lines += _ranked(_WHO, _rank_lines(totals))
    lines += _ranked(_PART, _stage_lines(totals))
    lines += _ranked(_WHO, _replica_lines(totals))
    lines += _ranked(_PART, _memory_lines(totals))
    paused = totals.pauses.total(int(how.seconds * 1e9) if how is not None and how.by == "supervisor" else None)
    lacks: list[str] = []
    if paused.times:
        lacks.append(f"{times_paused(paused, how is not None)}: that time is in no step and no phase")
    if inputs := totals.inputs.spans():
        lacks.append(waited([(process, *span) for process, span in inputs]))
    if totals.pruned:
        pruned = group(totals.pruned)
        lacks.append(f"{pruned} older records were deleted to bound the history: the figures are of the rest")
    if totals.dropped:
        lacks.append(f"{group(totals.dropped)} records were dropped: the figures are of the rest")
    lacks += _warnings(totals, short_name(info))
    lines += _ranked(_LACKS, lacks)
    lines.append(Line(_FIRST, f"record: {directory}  (dpmon export {short_name(info)})"))
    return [Line(rank, clean(text)) for rank, text in lines]


def _warnings(totals: Totals, name: str) -> list[str]:
    """The first few warnings, then how many more there are and which command lists them."""
    texts = list(dict.fromkeys(totals.warnings))
    said = [f"warning: {text}" for text in texts[:_MAX_WARNINGS]]
    if more := len(texts) - len(said):
        said.append(f"{many(more, 'more warning')}: dpmon export {name} --kind warning lists all {len(texts)}")
    return said


def _ranked(rank: int, texts: Iterable[str]) -> list[Line]:
    return [Line(rank, text) for text in texts]


def fitted(lines: list[Line], rows: int, columns: int, more: str) -> list[str]:
    """Those of the lines that have room in so many rows, the ones of the lowest ranks, in their order.

    Where some are left out, how many is said with `more` before the last line, in a row that is one of `rows`.
    """

    def size(text: str) -> int:
        return max(-(-span_width(text) // max(columns, 1)), 1)

    sizes = [size(line.text) for line in lines]
    if sum(sizes) <= rows:
        return [line.text for line in lines]
    # One long line is not worth all those that would have had room instead.
    lines = [line._replace(text=cut(line.text, _MAX_ROWS * columns)) if line.rank else line for line in lines]
    sizes = [size(line.text) for line in lines]
    room = rows - size(f"{many(len(lines), 'more line')}: {more}")
    kept: set[int] = set()
    for index in sorted(range(len(lines)), key=lambda index: lines[index].rank):
        if lines[index].rank and sizes[index] > room:
            break  # what follows is worth less, or goes on with this one
        room -= sizes[index]
        kept.add(index)
    shown = [i for i in sorted(kept) if not _heads(lines, i) or i + 1 in kept]
    said = f"{many(len(lines) - len(shown), 'more line')}: {more}"
    return [*(lines[i].text for i in shown[:-1]), said, lines[shown[-1]].text]


def _heads(lines: list[Line], index: int) -> bool:
    """Whether a line says nothing without those under it."""
    return lines[index].rank >= _WHO and not lines[index].text.startswith(" ")


def ending_line(directory: Path, how: ExitInfo | None) -> str:
    """How the run in `directory` ended, and how to read more of it; safe for a terminal. RunError if it is no run."""
    info = load_info(directory)
    return clean(f"{_outcome(info, how)}  (dpmon report {short_name(info)})")


def _outcome(info: RunInfo, how: ExitInfo | None) -> str:
    name = f"{info.script} ({short_name(info)})"
    if how is None:
        return f"{name}: how it ended is not known"
    if how.error is not None:
        return f"{name}: {how.error}"
    took = run_time(how.seconds)
    if how.stopped:
        return f"{name}: stopped by you after {took}" + (f", exit status {how.status}" if how.status else "")
    if how.status is None:
        return f"{name}: ended after {took}, status unknown: {how.unknown or 'nobody recorded it'}"
    if how.signal is not None:
        return f"{name}: killed by {how.signal} after {took}" + (f" ({how.cause})" if how.cause else "")
    why = f": {how.cause}" if how.cause else ""
    return f"{name}: finished in {took}" if how.status == 0 else f"{name}: exit status {how.status} after {took}{why}"


def _raised(reader: RunReader, how: ExitInfo | None) -> list[str]:
    """What a script that failed under the screen has raised: its output went with the screen."""
    if how is None or not how.status or how.stopped or how.cause or len(reader.output_paths) > 1:
        return []
    try:
        last = last_words(read_tail(reader.output_paths[0], READ_BYTES))
    except OSError:
        return []
    return [] if last is None else [f"its last words: {last}  (dpmon report {short_name(reader.info)})"]


def _mode_name(name: str, totals: Totals) -> str:
    """The mode's name as on the screen: ranks have one device each, so they are neither dp nor single."""
    return "ddp" if name == "single" and totals.distributed else name


def _steps(mode: ModeTotals, totals: Totals) -> str:
    """Steps, calls and processes. Ranks step together; other processes step independently."""
    counts = [count for count in mode.steps.values() if count]
    calls = many(mode.calls, "call")
    if len(counts) < 2:
        return f"{many(sum(counts), 'step')}, {calls}"
    ranks = any(line.rank is not None for line in totals.ranks)
    if ranks and len(set(counts)) == 1:
        return f"{many(counts[0], 'step')} of each of {len(counts)} ranks, {calls} in all"
    who = "ranks" if ranks else "processes"
    return f"{many(sum(counts), 'step')} of {len(counts)} {who} in all, {calls}"


def _mode_lines(name: str, kind: str, mode: ModeTotals, totals: Totals) -> list[Line]:
    title = (
        (_mode_name(name, totals) or "mode unknown")
        + (" (virtual replicas)" if name == "dp" and totals.virtual else "")
        + kind
    )
    speed = rate_words(mode.rate())
    head = f"{title}: {_steps(mode, totals)}"
    if speed:
        head += f", {speed}"
    rows = [(_STEP, "step", mode.walls)]
    for phase in STEP_PHASES:
        if phase in mode.step_phases:
            rows.append((_PHASE, f"  {phase}", mode.step_phases[phase]))
        if phase == "forward":
            rows += [(_PART, f"    {part}", mode.call_phases[part]) for part in CALL_PHASES if part in mode.call_phases]
    times = mode.device_ms
    return [
        Line(_MODE, head),
        *(Line(rank, _phase_line(label, took, times.get(label.strip()))) for rank, label, took in rows if took),
    ]


def _deleted_line(name: str, gone: Deleted, totals: Totals) -> str:
    """What is left of the steps of a mode that were deleted."""
    middle, tail = (gone.sums.quantile("step", fraction) or 0 for fraction in (0.5, 0.95))
    speed = rate_words(gone.rate())
    said = f", {speed}" if speed else ""
    head = f"{_mode_name(name, totals) or 'mode unknown'}, deleted: {many(gone.sums.steps, 'step')}{said}"
    return f"{head}, median {duration(middle)}, p95 {duration(tail)} (within 3 %)"


def _phase_line(label: str, values: array[int], device: array[float] | None) -> str:
    ordered = sorted(values)
    middle, tail = median(ordered) or 0, percentile(ordered, 0.95) or 0
    text = f"  {label:<18} median {duration(middle):>8}   p95 {duration(tail):>8}"
    on_device = median(device or ())
    return text if on_device is None else f"{text}   on device {duration(on_device * 1e6):>8}"


def _memory_lines(totals: Totals) -> list[str]:
    lines = []
    for row in held(totals.memory.values())[:_MAX_REPLICA_LINES]:
        text = f"  {row.device}  model {memory(row.model)}, gradients {memory(row.gradients)}, "
        text += f"optimizer {memory(row.optimizer)}, rest {memory(row.rest)}, peak {memory(row.peak)}"
        why = "; ".join(f"{names}: {reason}" for names, reason in reasons(row))
        lines.append(f"{text}  ({why})" if why else text)
    return ["memory", *lines] if lines else []


def _stage_lines(totals: Totals) -> list[str]:
    lines = []
    shown = [line for line in totals.stages if line.stage < _MAX_STAGES]  # a model that goes to and fro has many
    for line in shown[:_MAX_REPLICA_LINES]:
        names = ", ".join(line.parts[:4]) + (f" and {len(line.parts) - 4} more" if len(line.parts) > 4 else "")
        text = f"  {line.root} stage {line.stage} {line.device}  {names}  {line.inputs or 'sizes not seen'} -> "
        text += f"{line.outputs or 'not finished'}  {many(line.calls, 'call')}"
        middle = median(line.walls)
        lines.append(text if middle is None else f"{text}, host time median {duration(middle)}")
    more = len(totals.stages) - len(lines)
    if more > 0:
        lines.append(f"  and {more} more; dpmon export has them all")
    return ["stages (parts of the model on several devices)", *lines] if lines else []


def _rank_lines(totals: Totals) -> list[str]:
    lines = []
    for line in totals.ranks[:_MAX_REPLICA_LINES]:
        who = f"process {line.process}" if line.rank is None else f"rank {line.rank} of {line.world or '?'}"
        text = f"  {who} {line.device}  {line.inputs or 'sizes not seen'} -> {line.outputs or 'sizes not seen'}"
        text += f"  {many(line.calls, 'call')}, {many(line.steps, 'step')}"
        middle = median(line.walls)
        if middle is not None:
            text += f", step median {duration(middle)}"
        if line.rate is not None:
            text += f", {rate_words(line.rate)}"
        lines.append(text)
    more = len(totals.ranks) - len(lines)
    if more > 0:
        lines.append(f"  and {more} more; dpmon export has them all")
    title = "ranks" if any(line.rank is not None for line in totals.ranks) else "processes"
    return [title, *lines] if lines else []


def _replica_lines(totals: Totals) -> list[str]:
    lines: list[str] = []
    several = len({line.root for line in totals.replicas}) > 1
    groups = [list(found) for _, found in groupby(totals.replicas, key=lambda line: line[:4])]
    told = 0
    for found in groups:
        if len(lines) >= _MAX_REPLICA_LINES:
            break
        told += 1
        for line in found[:_MAX_SIZES]:
            whose = f"{line.root} " if several else ""
            sizes = f"{line.inputs or 'sizes not seen'} -> {line.outputs or 'sizes not seen'}"
            replica = f"replica {line.replica} " if line.mode == "dp" else ""
            who = f"{_mode_name(line.mode, totals) or '?'} {whose}{replica}{line.device}"
            lines.append(f"  {who}  {sizes}  {many(line.calls, 'call')}")
        if others := found[_MAX_SIZES:]:
            lines.append(f"    and {many(len(others), 'other size')}, {many(sum(o.calls for o in others), 'call')}")
    if told < len(groups):
        lines.append(f"  and {len(groups) - told} more; dpmon export has them all")
    return ["replicas", *lines] if lines else []
