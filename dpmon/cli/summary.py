"""The summary at the end of a run: how it ended, each mode's speed and phases, each replica's sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from dpmon.cleaning import clean
from dpmon.errors import HistoryError
from dpmon.model.layouts import flow
from dpmon.model.memory import Held, reasons
from dpmon.model.run_facts import ModeFacts, RunFacts
from dpmon.model.stragglers import sentence
from dpmon.record.names import RANK_MODES
from dpmon.record.schema import EVALUATION, STEP
from dpmon.report.collect import facts_of, output_end
from dpmon.report.sentences import ACTIVITY_NAMES, how_it_ended, times_paused, waited
from dpmon.run.activities import why_nothing
from dpmon.run.notes import clean_traceback_line
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, RunInfo, load_info
from dpmon.run.runs import short_name
from dpmon.store.figures import PhaseFigures
from dpmon.store.opened import open_store
from dpmon.text.cells import cut, span_width
from dpmon.text.quantities import (
    calls_so_far,
    count_of,
    duration,
    duration_words,
    group,
    memory,
    quantity_words,
    rate_words,
)

_MAX_REPLICA_LINES = 40
_MAX_SIZES = 3
"""Most sizes of one replica, the most frequent first."""
_MAX_ROWS = 2
"""If not everything fits, longer lines are cut to this many rows, except for the lines about the end and the record."""
_MAX_STAGES = 8
_MAX_WARNINGS = 5
_NOT_TRAINING = 0.05
"""The parts of the elapsed time are shown if more than this share of it was not training."""
_TRIFLE = 0.001
"""Smaller parts are omitted."""
_LARGE = 0.1
"""If space is short, phases of calls with a smaller share of a step are omitted first."""


class SummaryLine(NamedTuple):
    """A line of the summary; lines with a higher number as priority are omitted first if not all fit."""

    priority: int
    text: str


_FIRST, _MODE, _STEP, _LACKS, _PHASE, _WHO, _PART = range(7)
"""Priorities: end and record; what was trained; steps; what is missing; phases; replicas or ranks; the rest."""


def summary_lines(directory: Path, how: ExitInfo | None) -> list[str]:
    """The summary of the run in `directory`, one text per line, safe for a terminal. RunError if it is not a run.

    Medians and p95 (the smallest value that 95 % do not exceed) cover every step of the process that the screen shows,
    and are at most 0.4 % off.
    """
    return [line.text for line in summary(directory, how)]


def summary(directory: Path, how: ExitInfo | None) -> list[SummaryLine]:
    """The lines of `summary_lines` with their priorities."""
    info = load_info(directory)
    lines = [SummaryLine(_FIRST, _outcome(info, how)), *_with_priority(_MODE, _raised(directory, info, how))]
    try:
        with open_store(directory) as store:
            lines += _SummaryLines(facts_of(store, directory, how), info, how).lines(directory)
    except HistoryError as error:
        texts = [f"the history cannot be read: {error}"]
        lines += [_nothing(directory, info, how, texts), *_with_priority(_LACKS, _warnings(texts, short_name(info)))]
    lines.append(SummaryLine(_FIRST, f"record: {directory}  (dpmon export {short_name(info)})"))
    return [SummaryLine(priority, clean(text)) for priority, text in lines]


def _nothing(directory: Path, info: RunInfo, how: ExitInfo | None, warnings: Iterable[str]) -> SummaryLine:
    why = why_nothing(directory, info, how, warnings)
    return SummaryLine(_MODE, f"nothing was traced: {why}" if why else "nothing was traced")


class _SummaryLines:
    """The lines from the store of a run."""

    def __init__(self, facts: RunFacts, info: RunInfo, how: ExitInfo | None) -> None:
        self._facts, self._info, self._how = facts, info, how

    def lines(self, directory: Path) -> list[SummaryLine]:
        """All lines except how it ended and where the record is."""
        facts = self._facts
        warnings = [] if facts.store.damaged is None else [facts.store.damaged]
        warnings += [warning.text for warning in facts.announced.warnings]
        found = _with_priority(_STEP, self._time_lines())
        kinds = facts.store.kinds() | facts.layouts.kinds()
        if facts.open_calls:
            found.append(SummaryLine(_STEP, calls_so_far(facts.open_calls)))
        elif not kinds:
            found.append(_nothing(directory, self._info, self._how, warnings))
        for mode in sorted({mode for mode, _ in kinds}):
            found += self._mode_lines(mode, False)
            if facts.window.trained(mode) and any(kind & EVALUATION for name, kind in kinds if name == mode):
                found += self._mode_lines(mode, True)
        slow = None if facts.communication is None else facts.communication.straggler
        found += [] if slow is None else [SummaryLine(_STEP, f"  {sentence(slow, lately=False)}")]
        found += _with_priority(_WHO, self._rank_lines())
        found += _with_priority(_PART, self._stage_lines())
        found += _with_priority(_WHO, self._replica_lines())
        found += _with_priority(_PART, _memory_lines(facts.memory))
        return found + _with_priority(_LACKS, self._lacks(warnings))

    def _lacks(self, warnings: Iterable[str]) -> list[str]:
        """The gaps in the figures, and warnings."""
        facts = self._facts
        paused = facts.pause_totals
        lacks: list[str] = []
        if paused.times:
            lacks.append(f"{times_paused(paused, self._how is not None)}: that time is in no step and no phase")
        if facts.announced.inputs:
            lacks.append(waited(facts.announced.inputs))
        if dropped := facts.store.dropped:
            lacks.append(f"{group(dropped)} records were lost; the figures cover the rest")
        return [*lacks, *_warnings(warnings, short_name(self._info))]

    # ------------------------------------------------------------------------------------------ time and modes

    def _time_lines(self) -> list[str]:
        """The parts of the elapsed time, if more than _NOT_TRAINING of it was not training."""
        last_ns = self._facts.last_step_ns
        if last_ns is None:
            return []
        parts = self._facts.spent_until(last_ns if self._how is None else int(self._how.seconds * 1e9))
        whole = sum(parts.values())
        if (parts["training"] or parts["evaluation"]) >= (1 - _NOT_TRAINING) * whole:
            return []
        texts = [
            f"{text} {duration_words(parts[name])}{self._longest() if name == 'between' else ''}"
            for name, text in ACTIVITY_NAMES.items()
            if parts[name] > _TRIFLE * whole
        ]
        return [f"time: {', '.join(texts)}"]

    def _longest(self) -> str:
        for gap in self._facts.store.gaps(1):
            who = self._facts.names.get(gap.process)
            of = "" if who is None else f" of {who}"
            return f" (longest {duration_words(gap.ns)} after step {group(gap.after_step)}{of})"
        return ""

    def _mode_name(self, mode: str) -> str:
        """The mode's name as on the screen: ranks have one device each, so they are neither dp nor single."""
        by = self._facts.layouts.distributed
        return RANK_MODES[by] if mode == "single" and by else mode

    def _mode_lines(self, mode: str, evaluation: bool) -> list[SummaryLine]:
        found = self._facts.mode(mode, evaluation)
        title = (
            (self._mode_name(mode) or "mode unknown")
            + (" (virtual replicas)" if found.virtual else "")
            + (", evaluation" if evaluation else "")
        )
        speed = rate_words(found.rate)
        head = f"{title}: {self._steps(mode, evaluation)}"
        return [SummaryLine(_MODE, f"{head}, {speed}" if speed else head), *_phase_lines(found)]

    def _steps(self, mode: str, evaluation: bool) -> str:
        """Steps, calls and processes. Ranks step together; other processes step independently."""
        facts = self._facts
        tallies = [facts.window.tally(mode, evaluation, process) for process in facts.store.processes]
        counts = [tally.steps for tally in tallies if tally.steps]
        calls = count_of(facts.layouts.calls(mode, evaluation, facts.window.trained(mode)), "call")
        if len(counts) < 2:
            return f"{count_of(sum(counts), 'step')}, {calls}"
        ranks = any(facts.rank(process) is not None for process in facts.processes)
        if ranks and len(set(counts)) == 1:
            return f"{count_of(counts[0], 'step')} of each of {len(counts)} ranks, {calls} in all"
        who = "ranks" if ranks else "processes"
        return f"{count_of(sum(counts), 'step')} of {len(counts)} {who} in all, {calls}"

    # ------------------------------------------------------------------------------------------ replicas, ranks, stages

    def _rank_lines(self) -> list[str]:
        """A line for each rank or process, if there are several."""
        ranks = self._facts.ranks
        lines = []
        for one in ranks[:_MAX_REPLICA_LINES]:
            text = f"  {one.label} {one.device}  {flow(one.inputs, one.outputs)}"
            text += f"  {count_of(one.calls, 'call')}, {count_of(one.steps, 'step')}"
            if one.median_ns is not None:
                text += f", step median {duration(one.median_ns)}"
            if one.rate is not None:
                text += f", {rate_words(one.rate)}"
            if one.times is not None and one.times.joined:
                text += f", exposed {duration(one.times.exposed_ns)}, wait {duration(one.times.wait_ns)}"
            lines.append(text)
        lines += _more(len(ranks) - len(lines))
        return ["ranks" if any(one.rank is not None for one in ranks) else "processes", *lines] if lines else []

    def _stage_lines(self) -> list[str]:
        lines = []
        found = self._facts.stages
        shown = [stage for stage in found if stage.stage < _MAX_STAGES]  # a model that alternates devices has many
        for stage in shown[:_MAX_REPLICA_LINES]:
            text = f"  {stage.root} stage {stage.stage} {stage.device}  {stage.named_parts}"
            text += f"  {flow(stage.inputs, stage.outputs, 'not finished')}  {count_of(stage.calls, 'call')}"
            middle = stage.time.median
            lines.append(text if middle is None else f"{text}, host time median {duration(middle)}")
        lines += _more(len(found) - len(lines))
        return ["stages (parts of the model on several devices)", *lines] if lines else []

    def _replica_lines(self) -> list[str]:
        lines: list[str] = []
        replicas = self._facts.sizes
        several = len({one.root for one in replicas}) > 1
        groups = [list(found) for _, found in groupby(replicas, key=lambda one: one[:4])]
        shown = 0
        for found in groups:
            if len(lines) >= _MAX_REPLICA_LINES:
                break
            shown += 1
            for one in found[:_MAX_SIZES]:
                whose = f"{one.root} " if several else ""
                replica = f"replica {one.replica} " if one.mode == "dp" else ""
                who = f"{self._mode_name(one.mode) or '?'} {whose}{replica}{one.device}"
                evaluated = f", {one.evaluations:,} in evaluation" if one.evaluations else ""
                lines.append(f"  {who}  {flow(one.inputs, one.outputs)}  {count_of(one.calls, 'call')}{evaluated}")
            if others := found[_MAX_SIZES:]:
                lines.append(
                    f"    and {count_of(len(others), 'other size')}, {count_of(sum(o.calls for o in others), 'call')}"
                )
        lines += _more(len(groups) - shown)
        return ["replicas", *lines] if lines else []


def _more(count: int) -> list[str]:
    return [f"  and {count} more; dpmon export has them all"] if count > 0 else []


def _phase_lines(found: ModeFacts) -> list[SummaryLine]:
    """The times of steps and of each phase that ran (the phases of calls below forward), then the quantities."""
    if not found.steps:
        return []
    whole = PhaseFigures(STEP, found.steps, found.median_ns, found.p95_ns, found.mean_ns, 1.0)
    lines = [_phase_line(_STEP, "step" if found.who is None else f"step of {found.who}", whole)]
    for depth, phase in found.nested_phases():
        priority = _PHASE if not depth or (phase.share or 0) >= _LARGE else _PART
        lines.append(_phase_line(priority, f"  {'  ' * depth}{phase.name}", phase))
    return lines + [SummaryLine(_PART, f"  {quantity_words(*each, found.steps)}") for each in found.counted]


def _phase_line(priority: int, label: str, phase: PhaseFigures) -> SummaryLine:
    text = f"  {label:<18} median {duration(phase.median_ns):>8}   p95 {duration(phase.p95_ns):>8}"
    return SummaryLine(
        priority, text if phase.device_ns is None else f"{text}   on device {duration(phase.device_ns):>8}"
    )


def _memory_lines(rows: Sequence[Held]) -> list[str]:
    lines = []
    for row in rows[:_MAX_REPLICA_LINES]:
        text = f"  {row.device}  model {memory(row.model)}, gradients {memory(row.gradients)}, "
        text += f"optimizer {memory(row.optimizer)}, rest {memory(row.rest)}, peak {memory(row.peak)}"
        why = "; ".join(f"{names}: {reason}" for names, reason in reasons(row))
        lines.append(f"{text}  ({why})" if why else text)
    return ["memory", *lines] if lines else []


def _warnings(warnings: Iterable[str], name: str) -> list[str]:
    """The first few warnings, then the number of others and the command that lists them."""
    texts = list(dict.fromkeys(warnings))
    lines = [f"warning: {text}" for text in texts[:_MAX_WARNINGS]]
    if more := len(texts) - len(lines):
        lines.append(f"{count_of(more, 'more warning')}: dpmon export {name} --kind warning lists all {len(texts)}")
    return lines


def _with_priority(priority: int, texts: Iterable[str]) -> list[SummaryLine]:
    return [SummaryLine(priority, text) for text in texts]


def fitted(lines: list[SummaryLine], rows: int, columns: int, more: str) -> list[str]:
    """The lines with the lowest priority numbers that fit into `rows`, in their order.

    If lines are omitted, a row before the last line gives their number, and `more`, the command that prints them.
    """

    def size(text: str) -> int:
        return max(-(-span_width(text) // max(columns, 1)), 1)

    sizes = [size(line.text) for line in lines]
    if sum(sizes) <= rows:
        return [line.text for line in lines]
    # One long line must not displace several shorter ones.
    lines = [line._replace(text=cut(line.text, _MAX_ROWS * columns)) if line.priority else line for line in lines]
    sizes = [size(line.text) for line in lines]
    room = rows - size(f"{count_of(len(lines), 'more line')}: {more}")
    kept: set[int] = set()
    for index in sorted(range(len(lines)), key=lambda index: lines[index].priority):
        if lines[index].priority and sizes[index] > room:
            break  # later lines are less important, or continue this one
        room -= sizes[index]
        kept.add(index)
    shown = [i for i in sorted(kept) if not _heads(lines, i) or i + 1 in kept]
    omitted = f"{count_of(len(lines) - len(shown), 'more line')}: {more}"
    return [*(lines[i].text for i in shown[:-1]), omitted, lines[shown[-1]].text]


def _heads(lines: list[SummaryLine], index: int) -> bool:
    """Whether a line is only the heading of the lines below it."""
    return lines[index].priority >= _WHO and not lines[index].text.startswith(" ")


def ending_line(directory: Path, how: ExitInfo | None) -> str:
    """How the run in `directory` ended, and the command for more; safe for a terminal. RunError if it is not a run."""
    info = load_info(directory)
    return clean(f"{_outcome(info, how)}  (dpmon report {short_name(info)})")


def _outcome(info: RunInfo, how: ExitInfo | None) -> str:
    name = f"{info.script} ({short_name(info)})"
    if how is None:
        return f"{name}: how it ended is unknown"
    why = "" if not how.cause else f" ({how.cause})" if how.signal is not None else f": {how.cause}"
    return f"{name}: {how_it_ended(how, why)}" + (f", exit status {how.status}" if how.stopped and how.status else "")


def _raised(directory: Path, info: RunInfo, how: ExitInfo | None) -> list[str]:
    """The exception that ended a script under a screen, because the script's output disappeared with the screen."""
    reader = RunReader(directory)
    if how is None or not how.status or how.stopped or how.cause or len(reader.output_paths) > 1:
        return []
    last = clean_traceback_line(output_end(reader))
    return [] if last is None else [f"exception: {last}  (dpmon report {short_name(info)})"]
