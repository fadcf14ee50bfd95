"""Measures how fast this machine runs Python now, so that figures of different machines and times can be compared.

The piece of code is `total = 0` and `for number in range(10**7): total += number`, at module level. Only processor time
is scaled, because waiting does not get shorter on a faster machine.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

REFERENCE_S = 0.45
"""Processor time of the piece on the reference machine."""
_PARTS = 4
_PIECE = compile(f"for number in range({10**7 // _PARTS}): total += number", "yardstick", "exec")


def processor_s(pid: int) -> float:
    """Return the processor time of a process with its threads, s."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int) -> float:
    """Return the largest resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise ValueError("the kernel does not say")


def _took() -> float:
    """Run a quarter of the piece; return four times its duration."""
    names = {"total": 0}
    began = time.process_time()
    exec(_PIECE, names)
    return (time.process_time() - began) * _PARTS


class Yardstick:
    """Used before and after each measurement, because the speed of a shared machine varies."""

    def __init__(self) -> None:
        self._last = self._ask()

    def _ask(self) -> float:
        return sorted(_took() for _ in range(3))[1]

    def since(self) -> float:
        """Return how much slower than the reference this machine was since the last call."""
        before, self._last = self._last, self._ask()
        return (before + self._last) / 2 / REFERENCE_S

    def state(self) -> str:
        """Return a line about the present speed."""
        return (
            f"yardstick: summing range(10**7) in a for loop takes {self._last:.2f} s of processor time here, "
            f"{REFERENCE_S} s on the reference: this machine is {self._last / REFERENCE_S:.1f} times as slow"
        )
