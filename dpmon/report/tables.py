"""The tables of a run, each declared once: panels, the text report, its page and JSON show their columns.

A new column here is shown in all of them. A fact comes from dpmon.model.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from dpmon.record.schema import EXPOSED, WAIT
from dpmon.text.fact_table import BYTES, COUNT, LONG_DURATION, NUMBER, SHARE, TEXT, FactColumn, FactTable, Form, ms
from dpmon.text.formatting import (
    format_bytes_of_total,
    format_compact,
    format_count,
    format_duration,
    format_elapsed,
    format_loss,
    format_percent,
    format_samples_per_s,
)

if TYPE_CHECKING:
    from dpmon.model.device_memory import DeviceMemory
    from dpmon.model.device_usage import DeviceUsage
    from dpmon.model.epoch_progress import Epoch
    from dpmon.model.layouts import ReplicaStats, StageSizes
    from dpmon.model.loss_curves import LossCurve
    from dpmon.model.rank_stats import RankSummary
    from dpmon.model.run_analysis import RunAnalysis
    from dpmon.model.stragglers import RankTimes
    from dpmon.store.step_stats import PhaseStats, StepStats

_ON_DEVICE, _FLOW = "on device", "received -> returned"
_DEVICE_MS = "device_median_ms"
_RATE, _COMPACT = Form(format_samples_per_s), Form(format_compact)
_WAIT = Form(lambda ns: format_duration(ns) if ns else "0", ms)
_LOSS = Form(format_loss)
_YES_NO = Form(lambda is_so: "yes" if is_so else "no")
_CLOCK = Form(format_elapsed)


def _epoch_batches(epoch: Epoch) -> str:
    length = "" if epoch.length in (None, epoch.batches) else f"/{format_count(epoch.length)}"
    return format_count(epoch.batches) + length


EPOCHS: FactTable[Epoch] = FactTable(
    FactColumn("epoch", lambda epoch: epoch.epoch, COUNT),
    (
        FactColumn("from", lambda epoch: epoch.begin_ns, _CLOCK, on_screen=False),
        FactColumn("batches", _epoch_batches, Form(str), on_screen=False),
        FactColumn("took", lambda epoch: epoch.took_ns, LONG_DURATION),
        FactColumn("evaluation", lambda epoch: epoch.evaluation_ns or None, LONG_DURATION, is_optional=True),
        FactColumn("gap before", lambda epoch: epoch.pause_ns, LONG_DURATION, is_optional=True),
    ),
    ("epoch", "begin_ns", "end_ns", "batches", "length", "evaluation_ns", "pause_ns", "took_ns"),
)


def _lowest_loss(curve: LossCurve) -> float | None:
    return min((point.low for point in curve.points if point.low is not None), default=None)


def _last_loss(curve: LossCurve) -> str:
    return format_loss(curve.last) + ("" if curve.step is None else f" at step {format_count(curve.step)}")


LOSSES: FactTable[LossCurve] = FactTable(
    FactColumn("backward called at", lambda curve: curve.place, TEXT),
    (
        FactColumn("first", lambda curve: curve.first, _LOSS),
        FactColumn("lowest sampled", _lowest_loss, _LOSS),
        FactColumn("smoothed", lambda curve: curve.smoothed, _LOSS),
        FactColumn("last", _last_loss, Form(str)),
    ),
)


def mode_table(run: RunAnalysis) -> FactTable[StepStats]:
    """Return the table of steps by mode. With several processes, its times are those of one; the rest covers all."""
    return FactTable(
        FactColumn("mode", lambda stats: stats.mode, TEXT),
        (
            FactColumn("steps", lambda stats: run.window.step_counts(stats.kind, stats.mode)[0], COUNT, "steps"),
            FactColumn("times of", lambda stats: stats.process_name, Form(str), is_optional=True),
            FactColumn("median", lambda stats: stats.median_ns, member="median_ms"),
            FactColumn("p95", lambda stats: stats.p95_ns, member="p95_ms"),
            FactColumn("samples/s", lambda stats: stats.rate, _RATE),
            FactColumn("tokens/s", lambda stats: stats.rate and stats.rate.tokens_per_s, _COMPACT, is_optional=True),
        ),
        ("virtual", "process"),
    )


PHASES: FactTable[PhaseStats] = FactTable(
    FactColumn("phase", lambda phase: phase.name, TEXT),
    (
        FactColumn("share", lambda phase: phase.share, SHARE, "share"),
        FactColumn("median", lambda phase: phase.median_ns, member="median_ms"),
        FactColumn("p95", lambda phase: phase.p95_ns, member="p95_ms"),
        FactColumn(_ON_DEVICE, lambda phase: phase.device_ns, member=_DEVICE_MS, short="device", is_optional=True),
    ),
)


# The columns of replicas and stages, over a run or in the last calls.
_DEVICE: FactColumn[Any] = FactColumn("device", lambda part: part.device, TEXT)
_HOST_TIME: FactColumn[Any] = FactColumn("host time", lambda part: part.host_ns, member="median_ms")
_DEVICE_TIME: FactColumn[Any] = FactColumn(
    _ON_DEVICE,
    lambda part: part.device_ns,
    member=_DEVICE_MS,
    why=lambda part: part.untimed,
    is_optional=True,
)
PART_TIMES: FactTable[Any] = FactTable(_DEVICE, (_DEVICE, _HOST_TIME, _DEVICE_TIME))
REPLICAS: FactTable[ReplicaStats] = FactTable(
    FactColumn("", lambda replica: replica.label, TEXT),
    (
        _DEVICE,
        FactColumn("calls", lambda replica: replica.calls, COUNT),
        _HOST_TIME,
        FactColumn("p95", lambda replica: replica.time.quantile(0.95), member="p95_ms"),
        _DEVICE_TIME,
        FactColumn(_FLOW, lambda replica: replica.flow, TEXT),
    ),
    ("mode", "root", "replica", "device", "virtual", "calls", "rows", "device_calls"),
)
STAGES: FactTable[StageSizes] = FactTable(
    FactColumn("", lambda stage: f"{stage.root} {stage.stage}", TEXT),
    (
        _DEVICE,
        FactColumn("calls", lambda stage: stage.calls, COUNT),
        _HOST_TIME,
        _DEVICE_TIME,
        FactColumn(f"parts: {_FLOW}", lambda stage: stage.flow, TEXT),
    ),
    ("root", "stage", "device", "parts", "inputs", "outputs", "calls", "device_calls"),
)
RANKS: FactTable[RankSummary] = FactTable(
    FactColumn("", lambda rank: rank.label, TEXT),
    (
        FactColumn("device", lambda rank: rank.device, TEXT),
        FactColumn("steps", lambda rank: rank.steps, COUNT),
        FactColumn("calls", lambda rank: rank.calls, COUNT),
        FactColumn("step", lambda rank: rank.median_ns),
        FactColumn("samples/s", lambda rank: rank.rate, _RATE),
        FactColumn("tokens/s", lambda rank: rank.rate and rank.rate.tokens_per_s, _COMPACT, is_optional=True),
        FactColumn(
            f"forward {_ON_DEVICE}",
            lambda rank: rank.forward_ns,
            member="forward_device_median_ms",
            why=lambda rank: rank.untimed,
            is_optional=True,
        ),
        FactColumn(_FLOW, lambda rank: rank.flow, TEXT),
    ),
    ("process", "rank", "node", "world", "device", "inputs", "outputs", "calls", "steps", "median_ns"),
)


def _phase(name: str) -> Callable[[RankTimes], float | None]:
    return lambda rank: rank.phases.get(name)


RANK_TIMES: FactTable[RankTimes] = FactTable(
    FactColumn("rank", lambda rank: rank.rank, COUNT),
    (
        FactColumn("data", _phase("data"), member="data_ms"),
        FactColumn("forward", _phase("forward"), member="forward_ms", short="forw"),
        FactColumn("backward", _phase("backward"), member="backward_ms", short="back"),
        FactColumn(EXPOSED, lambda rank: rank.exposed_ns, _WAIT, "exposed_ms", short="expos"),
        FactColumn(WAIT, lambda rank: rank.wait_ns, _WAIT, "wait_ms"),
        FactColumn(
            "slowest in", lambda rank: rank.slowest / rank.joined if rank.joined else None, SHARE, on_screen=False
        ),
    ),
)


def _memory(owner: str, short: str = "") -> FactColumn[DeviceMemory]:
    member = f"{owner}_bytes"

    def find_reason(memory: DeviceMemory) -> str | None:
        return memory.absent.get(member)

    return FactColumn(owner, attrgetter(owner), BYTES, member, find_reason, short, is_optional=True)


MEMORY: FactTable[DeviceMemory] = FactTable(
    FactColumn("", lambda memory: memory.label, TEXT),
    (_memory("model"), _memory("gradients", "grads"), _memory("optimizer", "optim"), _memory("rest"), _memory("peak")),
    ("device", "processes"),
)
DEVICES: FactTable[DeviceUsage] = FactTable(
    FactColumn("", lambda device: device.name, TEXT),
    (
        FactColumn("use", lambda device: device.util_median, Form(lambda pct: format_percent(pct / 100))),
        FactColumn(
            "max. memory", lambda device: format_bytes_of_total(device.mem_used_max, device.mem_total), Form(str)
        ),
        FactColumn("this run", lambda device: device.mem_run_max, BYTES, is_optional=True),
        FactColumn("°C", lambda device: device.temperature_max, NUMBER, is_optional=True),
        FactColumn("W", lambda device: device.power_max, NUMBER, is_optional=True),
        FactColumn("of run", lambda device: device.of_run, _YES_NO, is_optional=True),
    ),
    (
        *("index", "name", "uuid", "called", "of_run", "samples", "util_median", "mem_used_max", "mem_run_max"),
        *("mem_total", "temperature_max", "power_max", "throttled"),
    ),
)
