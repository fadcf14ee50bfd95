"""How good a training is: its FLOPs per second, and their share of the peak of its GPUs (docs/how-good.md)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from dpmon.model.gpu_peaks import find_peak, short_dtype
from dpmon.text.formatting import format_compact, format_flops, format_percent, format_three_digits

if TYPE_CHECKING:
    from dpmon.model.device_usage import DeviceUsage
    from dpmon.model.run_process import Process
    from dpmon.store.step_stats import Rate, StatsWindow

MIN_KNOWN_SHARE, MIN_DTYPE_SHARE = 0.9, 0.01
"""Smallest share of steps with known FLOPs for a figure; share of the FLOPs below which a dtype is left out."""


class Efficiency(NamedTuple):
    """How good the training of one process is, or of several together; None for unknown values."""

    rate: Rate | None = None
    flops_per_s: float | None = None
    """FLOPs of the model per second of elapsed training time, without those that are computed again."""
    peak_flops_per_s: float | None = None
    """Dense peak of the GPUs in `dtype`."""
    reachable_flops_per_s: float | None = None
    """The peak at the clocks of throttled GPUs."""
    recomputed_share: float = 0.0
    """FLOPs that activation checkpointing computes again, divided by those of the model."""
    dtype: str = ""
    """The dtypes of the matrix products: "bf16", "bf16 + fp32"."""
    is_lower_bound: bool = False
    """Whether there are operators that were not counted."""
    operator_ns: float = 0.0
    """Elapsed time of a step on all GPUs together, divided by the operators in it."""
    reason: str | None = "no step's FLOPs were counted"
    """Why the FLOPs or the peak are unknown."""
    ranks: Mapping[int, float] = {}
    """The FLOPs per second of each process."""
    joules_per_sample: float | None = None
    """Energy of the run's devices, divided by the samples of the same time."""

    @property
    def mfu(self) -> float | None:
        """Share of the peak (0 to 1) that the FLOPs of the model take."""
        return self.flops_per_s / self.peak_flops_per_s if self.flops_per_s and self.peak_flops_per_s else None

    @property
    def hfu(self) -> float | None:
        """The hardware FLOPs utilization: the MFU, with the FLOPs that are computed again."""
        return None if self.mfu is None else self.mfu * (1 + self.recomputed_share)

    @property
    def figure(self) -> str:
        """The MFU, or else the FLOPs per second: "MFU 38%", "≥12.1 GFLOP/s"; empty if unknown."""
        bound = "≥" * self.is_lower_bound
        if self.mfu is not None:
            return f"MFU {bound}{format_percent(self.mfu)}"
        return "" if self.flops_per_s is None else bound + format_flops(self.flops_per_s)

    @property
    def line(self) -> str:
        """All that is known, in one line: "MFU 38% · 412k tokens/s · 0.9 J/sample"; empty if nothing is."""
        parts = [self.figure]
        if self.rate is not None and self.rate.tokens_per_s is not None:
            parts.append(f"{format_compact(self.rate.tokens_per_s)} tokens/s")
        if self.joules_per_sample is not None:
            parts.append(f"{format_compact(self.joules_per_sample)} J/sample")
        return " · ".join(filter(None, parts))

    @property
    def text(self) -> str:
        """The figure with what it comes from, "MFU 38% (bf16, 376 of 989 TFLOP/s)", or why there is no MFU."""
        if self.flops_per_s is None or self.rate is None:
            return f"FLOPs and MFU unknown: {self.reason}"
        notes = [self.dtype, f"{format_flops(self.flops_per_s / self.rate.steps_per_s).removesuffix('/s')} a step"]
        if self.peak_flops_per_s and self.reachable_flops_per_s:
            flops = self.flops_per_s, self.peak_flops_per_s, self.reachable_flops_per_s
            used, peak, reachable = (format_three_digits(each / 1e12) for each in flops)
            notes[1:] = [f"{used} of {peak} TFLOP/s"]
            if reachable != peak:
                notes.append(f"throttled clocks allow {reachable}")
        if self.recomputed_share:
            more = f"{format_percent(self.recomputed_share)} more"
            if self.mfu is not None:
                more = f"HFU {format_percent(self.hfu)}"
            notes.append(f"{more} with what is computed again")
        text = f"{self.figure} ({', '.join(notes)})"
        return text if self.reason is None else f"{text}; MFU unknown: {self.reason}"


def build_efficiency(
    processes: Sequence[Process],
    window: StatsWindow,
    rate: Rate | None,
    records: Sequence[Mapping[str, Any]],
    gpus: Sequence[DeviceUsage],
) -> Efficiency:
    """Return the efficiency of processes that train together, in the steps of a window with their mode.

    `rate`: their common rate. `records`: the `flops` records of the run. `gpus`: with samples of the same time.
    """
    tallies = {process.process: window.tally(process.mode, process=process.process) for process in processes}
    flops = {process: tally.stat("flops") for process, tally in tallies.items()}
    own = [record for record in records if record["process"] in tallies]
    counted = [record for record in own if record["flops"]]
    known_share = min(flops[process].count / max(tally.steps, 1) for process, tally in tallies.items())
    if not counted:
        return Efficiency(rate, reason=next((record["reason"] for record in own), Efficiency().reason))
    if rate is None or known_share < MIN_KNOWN_SHARE:
        reason = "no step with the calls and input shapes of the others could be counted; at most 8 are tried"
        uncounted = ", ".join(sorted({name for record in counted for name in record["uncounted"]}))
        if uncounted:
            reason += f" (operators without a rule: {uncounted})"
        return Efficiency(rate, reason=f"the FLOPs of {format_percent(known_share)} of the steps are known: {reason}")
    by_dtype = sum((Counter(record["by_dtype"]) for record in counted), Counter[str]())
    shares = {dtype: count / by_dtype.total() for dtype, count in by_dtype.most_common()}
    shares = {dtype: share for dtype, share in shares.items() if share >= MIN_DTYPE_SHARE}
    ranks = {process: (stats.mean or 0.0) * rate.steps_per_s for process, stats in flops.items()}
    recomputed = sum(tally.stat("recomputed_flops").total for tally in tallies.values())
    known = Efficiency(
        rate,
        sum(ranks.values()),
        recomputed_share=recomputed / sum(stats.total for stats in flops.values()),
        dtype=" + ".join(map(short_dtype, shares)),
        is_lower_bound=any(record["uncounted"] for record in counted),
        reason="a CPU has no known peak",
        ranks=ranks,
    )
    names = {(each.process, device) for each in processes for device in each.devices if not device.startswith("cpu")}
    used = [gpu for gpu in gpus if names & gpu.ordinals]
    if names.difference(*(gpu.ordinals for gpu in used)):
        return known._replace(reason="a GPU was not sampled, or has MIG instances")
    peak = reachable = 0.0
    for gpu in used:
        gpu_peak, boost_mhz = find_peak(gpu.name, shares)
        if gpu_peak is None:
            return known._replace(reason=f"no peak of {gpu.name} in {known.dtype} is known")
        peak += gpu_peak
        reachable += gpu_peak * gpu.throttled_share(boost_mhz)
    if not used:
        return known
    operators = mean(record["operators"] for record in counted) * len(processes)
    operator_ns = len(used) * 1e9 / rate.steps_per_s / operators
    return known._replace(peak_flops_per_s=peak, reachable_flops_per_s=reachable, operator_ns=operator_ns, reason=None)
