"""The state of a run without a screen, in lines: progress, and with `--json` one object per second for a pipeline.

docs/records.md describes every field of the objects. They go to standard error, because standard output belongs to the
script. `--json=FILE` writes them to a file, a named pipe or a descriptor (`--json=/dev/fd/3`) instead, and leaves
standard error unchanged. A pipe without a reader does not block the run: lines are skipped, and `skipped` in the next
line counts them.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpmon.model.efficiency import Efficiency
from dpmon.model.epoch_progress import NO_STEP, without_time
from dpmon.model.findings.correctness_findings import find_wrong_training
from dpmon.model.nodes import NodeStatus
from dpmon.model.run_analysis import EVERYTHING, MAX_RANKS, RunAnalysis, RunCaches, Selection
from dpmon.model.run_process import Process
from dpmon.model.stragglers import short_sentence
from dpmon.model.throughput import throughput_of
from dpmon.record.safe_json import replace_nonfinite
from dpmon.record.schema import PHASES
from dpmon.report import tables
from dpmon.report.health import Health, assess_health, assess_live_run, read_run
from dpmon.report.report_json import (
    communication_fields,
    efficiency_fields,
    loss_fields,
    memory_trend_fields,
    progress_fields,
    rank_time_members,
)
from dpmon.run.output_target import is_stream, open_stream, open_truncated
from dpmon.run.run_directory import ExitInfo, RunError, is_run_directory
from dpmon.run.run_reader import RunReader
from dpmon.sanitize import to_safe_json
from dpmon.stalls.run_state import ENDED, STALLED
from dpmon.store.step_stats import Rate, StepStats, quantities_to_json, rate_to_json
from dpmon.text.fact_table import fields_of
from dpmon.text.formatting import (
    format_calls_so_far,
    format_compact,
    format_count,
    format_count_with_noun,
    format_rate_note,
    format_updates,
)

INTERVAL_S = 1.0
_RATES = tuple(rate_to_json(None))
_STAT_MEMBERS = ("step_ms", "phases", "call_phases", "quantities")
_HALTED = {STALLED: "the run is stalled", ENDED: "the run is ending"}
"""States without a time left and without a straggler, and the reason."""


class NonBlockingLineFile:
    """A file, pipe or descriptor for lines; writing never waits for the reader."""

    def __init__(self, path: str) -> None:
        """Open the file. RunError if it cannot be written or is part of a run: truncating a ring ends the training."""
        if is_run_directory(Path(os.path.realpath(path)).parent):
            raise RunError(f"{path} is part of a run; give another file")
        try:
            # Opening a named pipe waits for a reader, as in a shell. Only the owner may read a new file, as with all
            # data of a run; an existing file keeps its mode.
            self._fd = open_stream(Path(path)) if is_stream(Path(path)) else open_truncated(Path(path))
        except OSError as error:
            raise RunError(f"{path} cannot be written: {error.strerror or error}") from None
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            os.set_blocking(self._fd, False)
        self._unsent = b""
        self._is_open = True

    def write(self, line: bytes) -> bool:
        """Write a line. Return whether it was not skipped."""
        if self._unsent and not self._send():
            return False
        self._unsent = line
        self._send()
        return True

    def _send(self) -> bool:
        """Write the rest of a line. Return whether nothing is left; drop the rest if the reader has closed the pipe."""
        while self._unsent and self._is_open:
            try:
                self._unsent = self._unsent[os.write(self._fd, self._unsent) :]
            except BlockingIOError:
                return False
            except OSError:
                self._is_open = False
        return True


class StatusStream:
    """The status lines of one run, passed to `write`, which returns whether it accepted them."""

    def __init__(self, reader: RunReader, write: Callable[[bytes], bool]) -> None:
        self._reader = reader
        self._write = write
        self._caches = RunCaches()
        self._due = 0.0
        self._skipped = 0

    def write_if_due(self, now: float) -> None:
        """Write a line if one is due; `now`: monotonic s."""
        if now < self._due:
            return
        # Lines are INTERVAL_S apart, however long one takes. After a longer delay, one line replaces the missed ones.
        self._due = self._due + INTERVAL_S if now < self._due + INTERVAL_S else now + INTERVAL_S
        self._write_status()

    def write_final(self, exit_info: ExitInfo | None) -> None:
        """Write the last lines: the final status and the exit."""
        try:
            self._write_status(has_ended=True)
        finally:
            self._write_exit(exit_info)

    def _write_exit(self, exit_info: ExitInfo | None) -> None:
        members: dict[str, object] = {"kind": "exit", "run": self._reader.info.id}
        members["t_s"] = None if exit_info is None else exit_info.seconds
        members |= {name: getattr(exit_info, name, None) for name in ("status", "signal")}
        if exit_info is None:
            members["absent"] = {"status": "how it ended is unknown"}
        self._write_object(members)
        self._reader.close()

    def _write_status(self, has_ended: bool = False) -> None:
        selection = Selection(span_s=0, over=True) if has_ended else EVERYTHING
        self._write_object({"kind": "status", **read_run(self._reader, self._members, selection, self._caches)})

    def _members(self, run: RunAnalysis) -> dict[str, Any]:
        now_ns = time.monotonic_ns() - self._reader.refresh().start_ns
        return status_members(self._reader, run, assess_health(self._reader, run), now_ns)

    def _write_object(self, members: dict[str, object]) -> None:
        members["skipped"] = self._skipped
        line = to_safe_json(replace_nonfinite(members), separators=(",", ":")).encode() + b"\n"
        self._skipped = 0 if self._write(line) else self._skipped + 1


def status_members(reader: RunReader, run: RunAnalysis, health: Health, now_ns: int) -> dict[str, Any]:
    """Return the members of a status line that describe the run; `now_ns`: the time, in ns since the run's start."""
    members: dict[str, Any] = {"run": reader.info.id, "t_s": round(now_ns / 1e9, 3)}
    members["state"], members["health"] = health.state, health.fields()
    process = run.representative
    progress_members, absent = _progress_members(process, run, now_ns, _since_ns(reader, process))
    members |= progress_members
    progress = NO_STEP if process is None else process.progress
    halt_reason = _HALTED.get(health.state) if health.end is None else None
    members["progress"] = progress_fields(progress if halt_reason is None else without_time(progress, halt_reason))
    efficiency = Efficiency(reason=absent.get("steps_per_s"))
    if members["steps_per_s"] is not None:
        efficiency = run.efficiency
    members["efficiency"] = efficiency_fields(efficiency)
    members["losses"] = [loss_fields(curve) for curve in run.losses]
    if not run.losses:
        absent["losses"] = "no backward pass from one value was seen"
        if reader.info.options.get("loss") is False:
            absent["losses"] = "reading losses is disabled"
    training_processes = run.training_processes
    members["processes"] = len(training_processes)
    if len(training_processes) > 1:
        times_by_process = {rank.process: rank for rank in run.ranks}
        members["ranks"] = [
            {**_rank_members(process), **rank_time_members(times_by_process.get(process.process))}
            for process in run.current_processes(run.order[:MAX_RANKS])
        ]
    if run.nodes:
        members["nodes"] = [_node_members(node, now_ns) for node in run.nodes]
    communication = run.communication
    if communication is not None:
        communication_members = communication_fields(communication) or {}
        if halt_reason is not None:
            communication_members["straggler"], absent["straggler"] = None, halt_reason
        members["communication"] = communication_members
    members["devices"] = [dict(track.data) for _, track in sorted(run.devices.items())]
    members["host"] = dict(run.host.data) or None
    members["memory_trends"] = [memory_trend_fields(trend) for trend in run.memory_trends]
    if not run.memory_trends:
        absent["memory_trends"] = "too few steps, or too few samples of memory (host.absent)"
    members["warnings"] = run.warning_count
    members["dropped"] = run.missed
    members["absent"] = absent
    return members


def _since_ns(reader: RunReader, process: Process | None) -> int:
    """Return when the current activity of the process began, in ns since the run's start; 0 if unknown."""
    _, since = ("", 0) if process is None else reader.activities().get(process.process, ("", 0))
    return since - reader.info.start_ns if since else 0


def _progress_members(
    process: Process | None, run: RunAnalysis, now_ns: int, since_ns: int
) -> tuple[dict[str, object], dict[str, str]]:
    """Return step, rates and times of the process that represents the run; and the reasons for null values, by name."""
    absent: dict[str, str] = {}
    if process is None or process.last_step is None:
        names = ("process", "rank", "step", "step_kind", "steps", "updates", *_RATES, "mode", "virtual", *_STAT_MEMBERS)
        open_calls = run.open_calls
        text = format_calls_so_far(open_calls) if open_calls else "no step has finished yet"
        absent.update(dict.fromkeys(names, text))
        return dict.fromkeys(names), absent
    throughput = throughput_of(process, run, now_ns, since_ns)
    rates = rate_to_json(throughput.rate)
    absent_reason = throughput.reason or "most steps have no such count"
    absent.update(dict.fromkeys((name for name in rates if rates[name] is None), absent_reason))
    range_stats = process.ranged
    stats = None
    if range_stats.steps and range_stats.mode == process.mode and range_stats.kind == run.main_kind:
        stats = range_stats
    if stats is None:
        absent.update(dict.fromkeys(_STAT_MEMBERS, "no step in this mode yet"))
    elif not any(phase.device_count for phase in stats.phases):
        reason = _untimed_reason(process)
        if reason is not None:
            absent["device_median_ms"] = reason
    members: dict[str, object] = {
        "process": process.process,
        "rank": process.rank,
        "step": process.step_number,
        "step_kind": process.last_step.step_kind,
        "steps": process.trained[0],
        "updates": process.trained[1],
        **rates,
        "mode": process.mode or None,
        "virtual": process.virtual,
        "step_ms": None if stats is None else fields_of(stats, "median_ns", "p95_ns"),
        "phases": None if stats is None else _phase_members(stats, of_call=False),
        "call_phases": None if stats is None else _phase_members(stats, of_call=True),
        "quantities": None if stats is None else quantities_to_json(stats.known_quantities),
    }
    return members, absent


def _untimed_reason(process: Process) -> str | None:
    """Return the reason for missing device times that the newest step or call recorded; None without one."""
    if process.last_step is not None and process.last_step.untimed is not None:
        return process.last_step.untimed
    return None if process.last_called_root is None else process.last_called_root.last.absent.get("device_ms")


def _phase_members(stats: StepStats, *, of_call: bool) -> dict[str, object]:
    """Return the phases that ran: those of the calls if `of_call`, else those of the step."""
    phases = {definition.name: stats.phase(definition.name) for definition in PHASES if definition.of_call == of_call}
    return {name: tables.PHASES.as_json(phase) for name, phase in phases.items() if phase is not None}


def _node_members(node: NodeStatus, now_ns: int) -> dict[str, object]:
    problem = node.problem_at(now_ns)
    members = fields_of(node, "number", "name", "state")
    return {**members, "trouble": None if problem is None else problem.words(now_ns)}


def _rank_members(process: Process) -> dict[str, object]:
    stats = process.figures
    step = process.step_number if process.last_step is not None else None
    return {
        "process": process.process,
        "rank": process.rank,
        "node": process.node,
        "step": step,
        "progress": progress_fields(process.progress),
        **fields_of(stats, "median_ns", "p95_ns"),
    }


# ------------------------------------------------------------------------------------------------ progress


class ProgressReporter:
    """The progress lines of one run, with the metrics that a screen would show."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._caches = RunCaches()
        self._last_ns = 0
        """End of the newest step (ns since the run's start); 0 before the first step."""

    def line(self) -> str:
        """Return the run's progress and rates; without a new step since the last line, the state and its reason."""
        return read_run(self._reader, self._line, caches=self._caches)

    def wrong_trainings(self) -> list[str]:
        """Return a sentence for each reason why the training is wrong."""
        return read_run(self._reader, self._wrong_trainings, caches=self._caches)

    def _wrong_trainings(self, run: RunAnalysis) -> list[str]:
        if run.representative is None:  # perhaps there is no record yet
            return []
        return [finding.text for finding in find_wrong_training(run)]

    def _line(self, run: RunAnalysis) -> str:
        process, now_ns = run.representative, time.monotonic_ns() - self._reader.info.start_ns
        step = None if process is None else process.last_step
        health = assess_live_run(self._reader, run, now_ns)
        if step is None or step.start_ns + step.wall_ns <= self._last_ns:
            return health.sentence(now_ns / 1e9)
        self._last_ns = step.start_ns + step.wall_ns
        line = step_line(status_members(self._reader, run, health, now_ns))
        return line if run.straggler is None else f"{line}  {short_sentence(run.straggler)}"


def step_line(members: dict[str, Any]) -> str:
    """Return the step, progress, rates and mode of a run with steps, from the members of its status."""
    texts = [f"step {format_count(members['step'])}{format_updates(members['steps'], members['updates'], ' · ')}"]
    texts.append(members["progress"]["text"])
    if members["processes"] > 1:
        nodes = f" on {format_count_with_noun(len(members['nodes']), 'node')}" if "nodes" in members else ""
        texts.append(f"{members['processes']} processes{nodes}")
    if members["steps_per_s"] is None:
        texts.append(members["absent"].get("steps_per_s"))
    else:
        rate = Rate(*(members[name] for name in _RATES))
        texts.append(f"{format_compact(rate.steps_per_s)} steps/s")
        for per_s, unit in ((rate.samples_per_s, "samples/s"), (rate.tokens_per_s, "tokens/s")):
            texts += [] if per_s is None else [f"{format_compact(per_s)} {unit}"]
        texts[-1] += format_rate_note(rate)
    if members["rank"] is None or members["mode"] == "dp":
        is_virtual = members["virtual"] and members["mode"] == "dp"
        texts.append(f"{members['mode'] or ''}{' (virtual)' if is_virtual else ''}")
    return "  ".join(filter(None, texts))
