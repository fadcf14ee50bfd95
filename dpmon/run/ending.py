"""How a command ended, in the words of exit.json."""

from __future__ import annotations

import signal
import time

from dpmon.run.rundir import ExitInfo, RunInfo

__all__ = ["exit_info", "outcome"]


def exit_info(info: RunInfo, returncode: int, by: str, error: str | None = None) -> ExitInfo:
    """How the run ended just now, from a return code as subprocess gives it (negative: the signal's number)."""
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
    )


def outcome(how: ExitInfo) -> str:
    """One word for an end: finished, stopped (by the user), interrupted (SIGINT), killed (another signal), failed."""
    if how.stopped:
        return "stopped"
    if how.signal is not None:
        return "interrupted" if how.signal == "SIGINT" else "killed"
    return "finished" if how.status == 0 else "failed"
