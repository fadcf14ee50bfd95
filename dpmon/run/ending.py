"""The end of a command, in the form of exit.json."""

from __future__ import annotations

import signal
import time

from dpmon.run.rundir import ExitInfo, RunInfo


def exit_info(info: RunInfo, returncode: int, by: str, error: str | None = None, *, drained: bool = True) -> ExitInfo:
    """The end of a run that ended just now; `returncode` as in subprocess (negative: the number of a signal)."""
    name = None
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:  # a real-time signal
            name = f"signal {-returncode}"
    end = time.monotonic_ns()
    return ExitInfo(
        status=returncode & 0xFF if returncode >= 0 else 128 - returncode,
        signal=name,
        ended_unix=time.time(),
        end_ns=end,
        seconds=(end - info.start_ns) / 1e9,
        by=by,
        error=error,
        drained=drained,
    )


def unknown_exit(info: RunInfo, by: str, why: str, end_ns: int, *, ended_unix: float | None = None) -> ExitInfo:
    """An end without a known status, at `end_ns` (monotonic, as precise as possible)."""
    seconds = max(end_ns - info.start_ns, 0) / 1e9
    return ExitInfo(
        status=None,
        signal=None,
        ended_unix=info.started_unix + seconds if ended_unix is None else ended_unix,
        end_ns=end_ns,
        seconds=seconds,
        by=by,
        unknown=why,
    )


def outcome(how: ExitInfo) -> str:
    """One word for an end: finished, stopped (by the user), interrupted (SIGINT), killed (another signal), failed.

    "ended" if the status is unknown.
    """
    if how.stopped:
        return "stopped"
    if how.status is None:
        return "ended"
    if how.signal is not None:
        return "interrupted" if how.signal == "SIGINT" else "killed"
    return "finished" if how.status == 0 else "failed"
