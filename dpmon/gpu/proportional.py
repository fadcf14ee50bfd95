"""Measures the host memory of a run's processes. A page that several processes share is divided among them.

The kernel calls this the proportional set size (PSS), in `/proc/PID/smaps_rollup`. To compute it, the kernel walks all
pages of the process: 30 to 80 ms for 600 MB, 250 ms for 2.6 GB (measured on slow machines). Meanwhile the process must
wait if it maps memory. So each process is read rarely. Between two readings, growth is taken from its resident memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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


@dataclass(slots=True)
class _Reading:
    shared: int
    """Resident bytes that count for other processes."""
    due_s: float
    why: str | None = None
    """Why there is no reading."""


class ProportionalMemory:
    """Sums the processes of a run within a time budget; for use by one thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, read: Callable[[int], int | None] = read_pss
    ) -> None:
        """`clock` returns monotonic seconds; `read` returns the PSS of a process id in bytes."""
        self._clock = clock
        self._read = read
        self._readings: dict[tuple[int, float], _Reading] = {}
        self._typical: dict[int, float] = {}
        """Per parent: the mean shared part of the children read so far."""
        self._budget_s = BUDGET_MOST_S
        self._at_s = clock()

    def total(
        self, resident: Mapping[tuple[int, float], int], parents: Mapping[tuple[int, float], int] | None = None
    ) -> tuple[int | None, str | None]:
        """Return (bytes of all processes together, None), or (None, the reason).

        `resident`: bytes by process id and start. `parents`: ids of the known parents. A process without a reading is
        estimated: its shared part is the mean of its siblings.
        """
        parents = parents or {}
        now = self._clock()
        self._budget_s = min(self._budget_s + (now - self._at_s) * BUDGET_SHARE, BUDGET_MOST_S)
        self._at_s = now
        self._readings = {key: known for key, known in self._readings.items() if key in resident}
        # Unread processes come first, then those that have waited longest.
        due = [(self._due(key), key) for key in resident if self._due(key) <= now]
        for _, key in sorted(due):
            if self._budget_s <= 0 or self._clock() - now >= AT_ONCE_S:
                break
            self._refresh(key, resident[key])
        self._learn(parents)
        return self._sum(resident, parents)

    def _due(self, key: tuple[int, float]) -> float:
        known = self._readings.get(key)
        return -1.0 if known is None else known.due_s

    def _refresh(self, key: tuple[int, float], resident: int) -> None:
        began = self._clock()
        why = None
        pss: int | None = 0
        try:
            pss = self._read(key[0])
        except PermissionError:
            why = f"the kernel does not let this user read the memory of process {key[0]}"
        except FileNotFoundError:
            why = f"the kernel does not report the proportional memory of process {key[0]}"  # or it has just ended
        except OSError as error:
            why = f"the memory of process {key[0]} cannot be read: {error.strerror}"
        ended = self._clock()
        took = ended - began
        self._budget_s -= took
        shared = max(resident - (pss or 0), 0) if pss is not None else resident
        self._readings[key] = _Reading(shared, ended + max(EVERY_S, REST_FACTOR * took), why)

    def _learn(self, parents: Mapping[tuple[int, float], int]) -> None:
        """Update the mean shared part of each parent's children; keep the old mean while all children are new."""
        shared: dict[int, list[int]] = {}
        present = set(parents.values())
        for key, parent in parents.items():
            known = self._readings.get(key)
            if known is not None and known.why is None:
                shared.setdefault(parent, []).append(known.shared)
        self._typical = {parent: mean for parent, mean in self._typical.items() if parent in present}
        self._typical.update({parent: sum(each) / len(each) for parent, each in shared.items()})

    def _sum(
        self, resident: Mapping[tuple[int, float], int], parents: Mapping[tuple[int, float], int]
    ) -> tuple[int | None, str | None]:
        total = 0
        unread = 0
        for key, size in resident.items():
            known = self._readings.get(key)
            if known is None:
                typical = self._typical.get(parents.get(key, -1))
                unread += typical is None
                total += max(size - int(typical or 0), 0)
            elif known.why is not None:
                return None, known.why
            else:
                total += max(size - known.shared, 0)
        if unread:
            return None, f"the memory of {unread} of {len(resident)} processes has not been read yet"
        return total, None
