"""The state of a run without a screen, in lines: progress, and with `--json` one object per second for a pipeline.

docs/json.md describes every field of the objects. They go to standard error, because standard output belongs to the
script. `--json=FILE` writes them to a file, a named pipe or a descriptor (`--json=/dev/fd/3`) instead, and leaves
standard error unchanged. A pipe that nobody reads does not block the run: lines are skipped, and `skipped` in the next
line counts them.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dpmon.errors import HistoryError
from dpmon.model.active_processes import ended_processes
from dpmon.model.epoch_progress import NO_STEP, format_progress, without_time
from dpmon.model.json_fields import (
    communication_fields,
    fields_of,
    loss_fields,
    phase_fields,
    progress_fields,
    rank_fields,
)
from dpmon.model.nodes import NodeStatus
from dpmon.model.run_snapshot import Process, RunSnapshot, SnapshotRequest
from dpmon.model.snapshot_builder import SnapshotBuilder
from dpmon.model.stragglers import short_sentence
from dpmon.model.throughput import throughput_of
from dpmon.record.safe_json import replace_nonfinite
from dpmon.record.schema import PHASES
from dpmon.report.health import Health, assess_health, assess_live_run
from dpmon.run.output_target import is_stream, open_stream, open_truncated
from dpmon.run.run_directory import ExitInfo, RunError, is_run_directory
from dpmon.run.run_reader import RunReader
from dpmon.sanitize import to_safe_json
from dpmon.stalls.run_state import ENDED, STALLED
from dpmon.store.step_stats import StepStats, quantities_to_json, rate_to_json
from dpmon.store.store_opening import open_store
from dpmon.text.formatting import format_calls_so_far, format_compact, format_count, format_rate_within_steps

EVERY_S = 1.0
_RATES = tuple(rate_to_json(None))
_FIGURES = ("step_ms", "phases", "call_phases", "quantities")
_MAX_RANKS = 64
_STILL = {STALLED: "the run is stalled", ENDED: "the run is ending"}
"""States in which no time is left, and no rank holds the others up."""


class NonBlockingLineFile:
    """A file, a pipe or a descriptor for lines; writing never waits for the reader."""

    def __init__(self, path: str) -> None:
        """RunError if the file cannot be written or belongs to a run: truncating a ring would end the training."""
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
        self._rest = b""
        self._open = True

    def write(self, line: bytes) -> bool:
        """Write a line; False if it was skipped."""
        if self._rest and not self._send():
            return False
        self._rest = line
        self._send()
        return True

    def _send(self) -> bool:
        """Write the rest of a line; False if some of it is left. If the reader has closed the pipe, drop the rest."""
        while self._rest and self._open:
            try:
                self._rest = self._rest[os.write(self._fd, self._rest) :]
            except BlockingIOError:
                return False
            except OSError:
                self._open = False
        return True


class StatusStream:
    """Watches one run and passes its lines to `write`, which returns whether it took them."""

    def __init__(self, reader: RunReader, write: Callable[[bytes], bool]) -> None:
        self._reader = reader
        self._write = write
        self._state = RunSnapshot()
        self._snapshots = SnapshotBuilder()
        self._due = 0.0
        self._skipped = 0

    def write_if_due(self, now: float) -> None:
        """Write a line if one is due; `now`: monotonic s."""
        if now < self._due:
            return
        # Lines stay EVERY_S apart, however long one takes. After a longer delay, one line replaces the missed ones.
        self._due = self._due + EVERY_S if now < self._due + EVERY_S else now + EVERY_S
        self._read_snapshot()
        self._write_status()

    def write_final(self, how: ExitInfo | None) -> None:
        """Write the last lines: the final status and the exit."""
        try:
            self._read_snapshot(over=True)
            self._write_status()
        finally:
            self._write_exit(how)

    def _write_exit(self, how: ExitInfo | None) -> None:
        members: dict[str, object] = {"kind": "exit", "run": self._reader.info.id}
        members["t_s"] = None if how is None else how.seconds
        members |= {name: getattr(how, name, None) for name in ("status", "signal")}
        self._write_object({**members, "absent": {"status": "how it ended is unknown"}} if how is None else members)
        self._reader.close()

    def _read_snapshot(self, over: bool = False) -> None:
        with suppress(HistoryError, RunError), open_store(self._reader.directory) as store:
            ended = ended_processes(self._reader.activities())
            self._state = self._snapshots.build(
                store, SnapshotRequest(span_s=0, over=True) if over else SnapshotRequest(), ended
            )

    def _write_status(self) -> None:
        now_ns = time.monotonic_ns() - self._reader.refresh().start_ns
        members = status_members(self._reader, self._state, assess_health(self._reader, self._state), now_ns)
        self._write_object({"kind": "status", **members})

    def _write_object(self, members: dict[str, object]) -> None:
        members["skipped"] = self._skipped
        line = to_safe_json(replace_nonfinite(members), separators=(",", ":")).encode() + b"\n"
        self._skipped = 0 if self._write(line) else self._skipped + 1


def status_members(reader: RunReader, state: RunSnapshot, now: Health, now_ns: int) -> dict[str, object]:
    """The members of a status line that tell how the run does; `now_ns`: the time, in ns since the run's start."""
    members: dict[str, object] = {"run": reader.info.id, "t_s": round(now_ns / 1e9, 3)}
    members["state"], members["health"] = now.state, now.fields()
    progress, absent = _progress(state.representative, state, now_ns, _since_ns(reader, state.representative))
    members |= progress
    found = NO_STEP if state.representative is None else state.representative.progress
    still = _STILL.get(now.state) if now.end is None else None
    members["progress"] = progress_fields(found if still is None else without_time(found, still))
    members["losses"] = [loss_fields(curve) for curve in state.losses]
    if not state.losses:
        off = reader.info.options.get("loss") is False
        absent["losses"] = "dpmon was told not to read losses" if off else "no backward pass from one value was seen"
    trained = state.training_processes
    members["processes"] = len(trained)
    if len(trained) > 1:
        times = {one.process: one for one in state.ranks}
        members["ranks"] = [
            {**_rank(process), **rank_fields(times.get(process.process))} for process in trained[:_MAX_RANKS]
        ]
    if state.nodes:
        members["nodes"] = [_node(node, now_ns) for node in state.nodes]
    communicated = state.communication
    if communicated is not None:
        waits = communication_fields(communicated) or {}
        if still is not None:
            waits["straggler"], absent["straggler"] = None, still
        members["communication"] = waits
    members["devices"] = [dict(track.data) for _, track in sorted(state.devices.items())]
    members["host"] = dict(state.host.data) or None
    members["warnings"] = state.warning_count
    members["dropped"] = state.missed
    members["absent"] = absent
    return members


def _since_ns(reader: RunReader, process: Process | None) -> int:
    """When the process began what it does now, in ns since the run's start; 0 if unknown."""
    _, since = ("", 0) if process is None else reader.activities().get(process.process, ("", 0))
    return since - reader.info.start_ns if since else 0


def _progress(
    focus: Process | None, state: RunSnapshot, now_ns: int, since_ns: int
) -> tuple[dict[str, object], dict[str, str]]:
    """Step, rates and times of the process that represents the run; and the reasons for null values, by name."""
    absent: dict[str, str] = {}
    if focus is None or focus.last_step is None:
        names = ("process", "rank", "step", *_RATES, "mode", "virtual", *_FIGURES)
        why = format_calls_so_far(state.open_calls) if state.open_calls else "no step has finished yet"
        absent.update(dict.fromkeys(names, why))
        return dict.fromkeys(names), absent
    fast = throughput_of(focus, state, now_ns, since_ns)
    if fast.reason is not None:
        absent.update(dict.fromkeys(_RATES, fast.reason))
    elif fast.samples_per_s is None:
        absent.update(dict.fromkeys(_RATES[1::2], "the steps have no sample count"))
    ranged = focus.ranged
    found = ranged if ranged.steps and ranged.mode == focus.mode and not ranged.evaluation else None
    if found is None:
        absent.update(dict.fromkeys(_FIGURES, "no step in this mode yet"))
    elif not any(phase.device_count for phase in found.phases):
        reason = _why_untimed(focus)
        absent |= {} if reason is None else {"device_median_ms": reason}
    members: dict[str, object] = {
        "process": focus.process,
        "rank": focus.rank,
        "step": focus.last_step.step,
        **rate_to_json(fast.rate),
        "mode": focus.mode or None,
        "virtual": focus.virtual,
        "step_ms": None if found is None else fields_of(found, "median_ns", "p95_ns"),
        "phases": None if found is None else _phases(found, of_call=False),
        "call_phases": None if found is None else _phases(found, of_call=True),
        "quantities": None if found is None else quantities_to_json(found.known_quantities),
    }
    return members, absent


def _why_untimed(focus: Process) -> str | None:
    """The reason for missing device times that the newest step or call recorded; None without one."""
    if focus.last_step is not None and focus.last_step.untimed is not None:
        return focus.last_step.untimed
    return None if focus.last_called_root is None else focus.last_called_root.last.absent.get("device_ms")


def _phases(figures: StepStats, *, of_call: bool) -> dict[str, object]:
    """The phases that ran: the phases of the calls if `of_call`, else the phases of the step."""
    phases = {named.name: figures.phase(named.name) for named in PHASES if named.of_call == of_call}
    return {name: phase_fields(phase) for name, phase in phases.items() if phase is not None}


def _node(node: NodeStatus, now_ns: int) -> dict[str, object]:
    trouble = node.problem_at(now_ns)
    members = fields_of(node, "number", "name", "state")
    return {**members, "trouble": None if trouble is None else trouble.words(now_ns)}


def _rank(process: Process) -> dict[str, object]:
    figures = process.figures
    step = process.last_step.step if process.last_step is not None else None
    return {
        "process": process.process,
        "rank": process.rank,
        "node": process.node,
        "step": step,
        "progress": progress_fields(process.progress),
        **fields_of(figures, "median_ns", "p95_ns"),
    }


# ------------------------------------------------------------------------------------------------ progress


class ProgressReporter:
    """Makes lines of progress, with the figures that a screen would show."""

    def __init__(self, reader: RunReader) -> None:
        self._reader = reader
        self._snapshots = SnapshotBuilder()
        self._last_ns = 0
        """End of the newest step (ns since the run's start); 0 before the first step."""

    def line(self) -> str:
        """The run's progress and its speed; if there is no new step since the last line, the reason."""
        activities, state = self._reader.activities(), RunSnapshot()
        with suppress(HistoryError, RunError), open_store(self._reader.directory) as store:
            state = self._snapshots.build(store, SnapshotRequest(), ended_processes(activities))
        focus, now_ns = state.representative, time.monotonic_ns() - self._reader.info.start_ns
        step = None if focus is None else focus.last_step
        if focus is None or step is None or step.start_ns + step.wall_ns <= self._last_ns:
            return assess_live_run(self._reader, state, now_ns).sentence(now_ns / 1e9)
        self._last_ns = step.start_ns + step.wall_ns
        return self._format_step_line(state, focus, step.step)

    def _format_step_line(self, state: RunSnapshot, focus: Process, step: int) -> str:
        where = format_progress(focus.progress)
        parts = [f"step {format_count(step)}", *([where] if where else [])]
        if (count := len(state.training_processes)) > 1:
            parts.append(f"{count} processes")
        now_ns = time.monotonic_ns() - self._reader.info.start_ns
        found = throughput_of(focus, state, now_ns, _since_ns(self._reader, focus))
        if found.rate is None:
            parts.append(found.reason or "")
        else:
            parts.append(f"{format_compact(found.rate.steps_per_s)} steps/s")
            if found.rate.samples_per_s is not None:
                parts.append(f"{format_compact(found.rate.samples_per_s)} samples/s")
            parts[-1] += format_rate_within_steps(found.rate)
        ranks = (focus.info.world or 0) > 1
        if focus.mode and not (ranks and focus.mode == "single"):
            parts.append(focus.mode + (" (virtual)" if focus.virtual and focus.mode == "dp" else ""))
        slow = state.straggler
        return "  ".join(parts if slow is None else [*parts, short_sentence(slow)])
