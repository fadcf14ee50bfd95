"""The growth of memory that dpmon finds in a real run."""

from __future__ import annotations

import time
from subprocess import DEVNULL

from dpmon.errors import HistoryError
from dpmon.run.run_directory import RunError
from dpmon.store.memory_growth import MemoryTrend, read_memory_trends
from dpmon.store.store_opening import open_store
from support.run_harness import Dpmon, wait_for

_ENV = {"OMP_NUM_THREADS": "1"}


def read_trends(dpmon: Dpmon) -> list[MemoryTrend]:
    """Return the trends of the only run now; none before it has a history."""
    for directory in dpmon.runs():
        try:
            with open_store(directory) as store:
                return read_memory_trends(store)
        except (RunError, HistoryError):
            pass
    return []


def watch(dpmon: Dpmon, *words: object, limit: float) -> MemoryTrend | None:
    """Run a script until there is a finding, and return it; None if the script ends without one.

    Not in a fork of a Python with torch (`Dpmon.warm`), whose memory is not that of the run.
    """
    process = dpmon.start("--headless", *words, env=_ENV, stdout=DEVNULL, stderr=DEVNULL)
    findings: list[MemoryTrend] = []

    def has_finding_or_ended() -> bool:
        time.sleep(0.5)  # there is a sample each second
        findings[:] = [trend for trend in read_trends(dpmon) if trend.matters]
        return bool(findings) or process.poll() is not None

    wait_for(has_finding_or_ended, limit)
    return findings[0] if findings else None
