"""The energy that the devices of a run used in a time range."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.schema import SECOND
from dpmon.store.device_rollups import read_device_minutes
from dpmon.store.events import read_energy_use
from dpmon.store.time_buckets import END_S

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store
    from dpmon.store.tally import Tally


class Energy(NamedTuple):
    """The energy of the GPUs of a run, and of all CPU packages, in J; None if unknown. `seconds`: time of the samples.

    Each device has one counter, so what other programs do on it counts, too. `cpu_joules` lacks deleted samples.
    """

    gpu_joules: float | None
    cpu_joules: float | None
    seconds: float
    gpus: int

    @property
    def joules(self) -> float | None:
        """The energy of the GPUs; of the CPU packages, if that of no GPU is known."""
        return self.gpu_joules or self.cpu_joules

    def joules_per(self, quantity: str, tally: Tally) -> float | None:
        """Return `joules` per sample or token of a tally's steps; None if under 90% of the steps have counted them."""
        stats = tally.stat(quantity)
        if self.joules is None or not stats.total or stats.count < 0.9 * tally.steps:
            return None
        return self.joules / stats.total * stats.count / tally.steps


def read_energy(store: Store, start_s: int = 0, end_s: int = END_S) -> Energy:
    """Return the energy from one time (s since the run's start) to another."""
    joules, seconds = dict[int, float](), 0.0
    for device, of_run, used, ns in read_energy_use(store, start_s * SECOND, end_s * SECOND):
        if device < 0 or of_run:
            joules[device], seconds = used, max(seconds, ns / SECOND)
    for row in read_device_minutes(store):  # of deleted samples, one a second
        if row.name == "power_w" and row.device in joules and start_s <= max(row.start_s, 0) < end_s:
            joules[row.device] += row.total
    gpus = [used for device, used in joules.items() if device >= 0]
    return Energy(sum(gpus) or None, sum(joules.values()) - sum(gpus) or None, seconds, len(gpus))
