"""Measures the host memory of a run's processes. A page that several processes share is divided among them.

The kernel calls this the proportional set size (PSS), in `/proc/PID/smaps_rollup`. To compute it, the kernel walks all
pages of the process: 30 to 80 ms for 600 MB, 250 ms for 2.6 GB (measured on slow machines). Meanwhile the process must
wait if it maps memory. So each process is read rarely. Between two readings, growth is taken from its resident memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from dpmon.gpu.sample import Missing

BUDGET_SHARE = 0.01
"""Largest share of one core for readings in the long run."""
BUDGET_MOST_S = 1.0
"""Largest saved budget (s): enough for a training and its workers just after their start."""
AT_ONCE_S = 0.1
"""Most time for readings in one sample (s); further processes wait for the next sample."""
EVERY_S = 5.0
"""Shortest time for which a reading is used (s)."""
REST_FACTOR = 200
"""A reading that took time t is used for at least REST_FACTOR * t, so the process waits at most 0.5 % of the time."""


def read_pss(pid: int) -> int | None:
    """Return the PSS of a process (bytes); None if it has no memory left. Raises OSError if it is not available."""
    with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return None


_Process = tuple[int, float]
"""A process id, and when the process started (s)."""


class ProportionalMemory:
    """Sums the processes of a run within a time budget; for use by one thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, read: Callable[[int], int | None] = read_pss
    ) -> None:
        """`clock` returns monotonic seconds; `read` returns the PSS of a process id in bytes."""
        self._clock = clock
        self._read = read
        self._readings: dict[_Process, tuple[int | Missing, float]] = {}
        """Resident bytes that count for other processes, and when the next reading is due (s)."""
        self._typical: dict[int, float] = {}
        """Per parent: the mean shared part of the children read so far."""
        self._budget_s = BUDGET_MOST_S
        self._at_s = clock()

    def total(self, resident: Mapping[_Process, int], parents: Mapping[_Process, int]) -> int | Missing:
        """Return the bytes of all processes together.

        `resident`: bytes by process. `parents`: ids of the parents. A process without a reading is estimated: its
        shared part is the mean of its siblings.
        """
        began = self._clock()
        self._budget_s = min(self._budget_s + (began - self._at_s) * BUDGET_SHARE, BUDGET_MOST_S)
        self._at_s = began
        self._readings = {key: reading for key, reading in self._readings.items() if key in resident}
        # Unread processes come first, then those that have waited longest.
        due = {key: self._readings[key][1] if key in self._readings else -1.0 for key in resident}
        for key in sorted(due, key=lambda key: (due[key], key)):
            if due[key] > began or self._budget_s <= 0 or self._clock() - began >= AT_ONCE_S:
                break
            self._refresh(key, resident[key])
        self._learn(parents)
        total = unread = 0
        for key, size in resident.items():
            shared = self._readings[key][0] if key in self._readings else self._typical.get(parents[key])
            if isinstance(shared, Missing):
                return shared
            unread += shared is None
            total += max(size - int(shared or 0), 0)
        if unread:
            return Missing(f"the memory of {unread} of {len(resident)} processes has not been read yet")
        return total

    def _refresh(self, process: _Process, resident: int) -> None:
        began = self._clock()
        shared: int | Missing
        try:
            shared = max(resident - (self._read(process[0]) or 0), 0)
        except PermissionError:
            shared = Missing(f"the kernel does not let this user read the memory of process {process[0]}")
        except FileNotFoundError:  # or it has just ended
            shared = Missing(f"the kernel does not report the proportional memory of process {process[0]}")
        except OSError as error:
            shared = Missing(f"the memory of process {process[0]} cannot be read: {error.strerror}")
        ended = self._clock()
        self._budget_s -= ended - began
        self._readings[process] = shared, ended + max(EVERY_S, REST_FACTOR * (ended - began))

    def _learn(self, parents: Mapping[_Process, int]) -> None:
        """Update the mean shared part of each parent's children; keep the old mean while all children are new."""
        by_parent: dict[int, list[int]] = {}
        for process, (shared, _) in self._readings.items():
            if not isinstance(shared, Missing):
                by_parent.setdefault(parents[process], []).append(shared)
        present = set(parents.values())
        self._typical = {parent: mean for parent, mean in self._typical.items() if parent in present}
        self._typical.update({parent: sum(each) / len(each) for parent, each in by_parent.items()})
