"""The summary at the end of a run: how it ended, each mode's speed and phases, each replica's sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from dpmon.cleaning import clean
from dpmon.errors import HistoryError
from dpmon.model.layouts import flow
from dpmon.model.memory import Held, reasons
from dpmon.model.mode_facts import ModeFacts
from dpmon.model.run_facts import RunFacts
from dpmon.model.stragglers import sentence
from dpmon.record.names import RANK_MODES
from dpmon.record.schema import EVALUATION, STEP
from dpmon.report.collect import facts_of, output_end
from dpmon.report.sentences import ACTIVITY_NAMES, how_it_ended, slow_start, stalls, times_paused, waited
from dpmon.run.activities import why_nothing
from dpmon.run.notes import clean_traceback_line
from dpmon.run.reader import RunReader
from dpmon.run.rundir import ExitInfo, RunInfo, load_info
from dpmon.run.runs import short_name
from dpmon.store.figures import PhaseFigures
from dpmon.store.opened import open_store
from dpmon.text.cells import span_width
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
_MAX_STAGES = 8
_MAX_WARNINGS = 5
_NOT_TRAINING = 0.05
"""The parts of the elapsed time are shown if more than this share of it was not training."""
_TRIFLE = 0.001
"""Smaller parts are omitted."""


def summary_lines(directory: Path, how: ExitInfo | None) -> list[str]:
    """The summary of the run in `directory`, one text per line, safe for a terminal. RunError if it is not a run.

    Medians and p95 (the smallest value that 95 % do not exceed) cover every step of the process that the screen shows,
    and are at most 0.4 % off.
    """
    info = load_info(directory)
    lines = [_outcome(info, how), *_raised(directory, info, how)]
    try:
        with open_store(directory) as store:
            lines += _SummaryLines(facts_of(store, directory, how), info, how).lines(directory)
    except HistoryError as error:
        texts = [f"the history cannot be read: {error}"]
        lines += [*_warnings(texts, short_name(info)), _nothing(directory, info, how, texts)]
    lines.append(f"record: {directory}  (dpmon export {short_name(info)})")
    return [clean(text) for text in lines]


def _nothing(directory: Path, info: RunInfo, how: ExitInfo | None, warnings: Iterable[str]) -> str:
    why = why_nothing(directory, info, how, warnings)
    return f"nothing was traced: {why}" if why else "nothing was traced"


class _SummaryLines:
    """The lines from the store of a run."""

    def __init__(self, facts: RunFacts, info: RunInfo, how: ExitInfo | None) -> None:
        self._facts, self._info, self._how = facts, info, how

    def lines(self, directory: Path) -> list[str]:
        """All lines except how it ended and where the record is, the most important first."""
        facts = self._facts
        warnings = [] if facts.store.damaged is None else [facts.store.damaged]
        warnings += [warning.text for warning in facts.announced.warnings]
        stalled = stalls(facts, self._how, over=self._how is not None)
        lines = [*stalled, *self._time_lines(), *self._lacks(warnings)]
        kinds = facts.store.kinds() | facts.layouts.kinds()
        if facts.open_calls:
            lines.append(calls_so_far(facts.open_calls))
        elif not kinds:
            lines.append(_nothing(directory, self._info, self._how, warnings))
        for mode in sorted({mode for mode, _ in kinds}):
            lines += self._mode_lines(mode, False)
            if facts.window.trained(mode) and any(kind & EVALUATION for name, kind in kinds if name == mode):
                lines += self._mode_lines(mode, True)
        slow = None if facts.communication is None else facts.communication.straggler
        lines += [] if slow is None else [f"  {sentence(slow, lately=False)}"]
        lines += [*self._rank_lines(), *self._stage_lines(), *self._replica_lines()]
        return lines + _memory_lines(facts.memory)

    def _lacks(self, warnings: Iterable[str]) -> list[str]:
        """The gaps in the figures, and warnings."""
        facts = self._facts
        paused = facts.pause_totals
        lacks = slow_start(facts)
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

    def _mode_lines(self, mode: str, evaluation: bool) -> list[str]:
        found = self._facts.mode(mode, evaluation)
        title = (
            (self._mode_name(mode) or "mode unknown")
            + (" (virtual replicas)" if found.virtual else "")
            + (", evaluation" if evaluation else "")
        )
        speed = rate_words(found.rate)
        head = f"{title}: {self._steps(mode, evaluation)}"
        return [f"{head}, {speed}" if speed else head, *_phase_lines(found)]

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


def _phase_lines(found: ModeFacts) -> list[str]:
    """The times of steps and of each phase that ran (the phases of calls below forward), then the quantities."""
    if not found.steps:
        return []
    whole = PhaseFigures(STEP, found.steps, found.median_ns, found.p95_ns, found.mean_ns, 1.0)
    lines = [_phase_line("step" if found.who is None else f"step of {found.who}", whole)]
    lines += [_phase_line(f"  {'  ' * depth}{phase.name}", phase) for depth, phase in found.nested_phases()]
    return lines + [f"  {quantity_words(*each, found.steps)}" for each in found.counted]


def _phase_line(label: str, phase: PhaseFigures) -> str:
    text = f"  {label:<18} median {duration(phase.median_ns):>8}   p95 {duration(phase.p95_ns):>8}"
    return text if phase.device_ns is None else f"{text}   on device {duration(phase.device_ns):>8}"


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


def fitted(lines: list[str], rows: int, columns: int, more: str) -> list[str]:
    """The lines, if they fit in `rows`; else the first ones, the number of the others, and the last line.

    `more`: the command that prints all.
    """

    def size(text: str) -> int:
        return max(-(-span_width(text) // columns), 1)

    if len(lines) < 3 or sum(map(size, lines)) <= rows:
        return lines
    shown, room = 0, rows - size(lines[-1]) - size(f"{len(lines)} more lines: {more}")
    while (room := room - size(lines[shown])) >= 0:
        shown += 1
    shown = max(shown, 1)  # how the run ended
    return [*lines[:shown], f"{count_of(len(lines) - shown - 1, 'more line')}: {more}", lines[-1]]


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
