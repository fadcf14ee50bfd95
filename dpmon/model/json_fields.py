"""The fields of facts as members of JSON, the same in the report and in the lines of `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from dpmon.model.communication import Communication, Wrapper
from dpmon.model.epoch_progress import Progress, format_progress
from dpmon.model.loss_curves import LossCurve
from dpmon.model.stragglers import RankTimes, Straggler, straggler_sentence
from dpmon.record.record_types import Operation
from dpmon.store.step_stats import PhaseStats

_SECONDS = {
    "t_ns": "t_s",
    "begin_ns": "t_s",
    "start_ns": "start_s",
    "since_ns": "since_s",
    "end_ns": "end_s",
    "ns": "seconds",
    "took_ns": "seconds",
    **{f"{name}_ns": f"{name}_s" for name in ("left", "error", "evaluation", "pause")},
}
"""The members with a time since the run's start, or with a long duration; other times are in ms."""
_UNITS = {
    **{name: f"{name}_bytes" for name in ("mem_used_max", "mem_run_max", "mem_total")},
    **{name: f"{name}_bytes" for name in ("model", "gradients", "optimizer", "rest", "peak")},
    "util_median": "util_median_pct",
    "temperature_max": "temperature_max_c",
    "power_max": "power_max_w",
    "device_ns": "device_median_ms",
}
_ELSEWHERE = ("number", "iteration", "comm_ns", "overlap_ns", "no_sync_times", "group", "all_used")
_WRAPPER = tuple(name for name in Wrapper._fields if name not in _ELSEWHERE)


def ms(ns: float | None) -> float | None:
    """Return a time in ms instead of ns."""
    return None if ns is None else ns / 1e6


def fields_of(fact: object, *names: str) -> dict[str, object]:
    """Return fields of an object by their names in JSON, with times in s or ms instead of ns."""
    members: dict[str, object] = {}
    for name in names:
        value = getattr(fact, name)
        if name in _SECONDS:
            members[_SECONDS[name]] = None if value is None else value / 1e9
        elif name.endswith("_ns"):
            members[_UNITS.get(name, f"{name[:-3]}_ms")] = ms(value)
        elif isinstance(value, Mapping):
            members[name] = dict(value)
        else:
            members[_UNITS.get(name, name)] = list(value) if isinstance(value, tuple) else value
    return members


def phase_fields(phase: PhaseStats) -> dict[str, object]:
    """Return the times of a phase and its share of the steps."""
    return fields_of(phase, "share", "median_ns", "p95_ns", "device_ns")


def rank_fields(times: RankTimes | None) -> dict[str, object]:
    """Return the mean times of a rank in ms; null if unknown."""
    phases = times.phases if times is not None else {}
    return {
        **{f"{name}_ms": ms(phases.get(name)) for name in ("data", "forward", "backward")},
        "exposed_ms": None if times is None else ms(times.exposed_ns),
        "wait_ms": None if times is None else ms(times.wait_ns),
        "slowest": None if times is None or not times.joined else times.slowest,
        "joined_steps": 0 if times is None else times.joined,
    }


def progress_fields(progress: Progress) -> dict[str, object]:
    """Return epoch and batch of a process, and the time left in the epoch."""
    members = fields_of(progress, "epoch", "batch", "batches", "left_ns", "error_ns", "absent")
    return {**members, "text": format_progress(progress) or None}


def loss_fields(curve: LossCurve) -> dict[str, object]:
    """Return the newest loss of a line that calls backward; null, with a reason, if it is no finite number."""
    is_finite = curve.last is not None and isfinite(curve.last)
    return {
        **fields_of(curve, "place", "step", "t_ns", "smoothed"),
        "loss": curve.last if is_finite else None,
        "absent": {} if is_finite else {"loss": curve.why or repr(curve.last)},
    }


def communication_fields(communication: Communication | None) -> dict[str, object] | None:
    """Return the communication as JSON members; None if no ranks train together."""
    if communication is None:
        return None
    torch_times, collectives = communication.torch_times, communication.collectives
    return {
        **fields_of(communication, "exposed_ns", "exposed_share", "wait_ns", "wait_share", "missing"),
        "joined_steps": communication.step_count_with_waits,
        **fields_of(communication, "synced", "unsynced"),
        "straggler": _straggler(communication.straggler, communication.lately),
        "torch": None if torch_times is None else _torch_times(torch_times),
        "sampled": {
            "samples": collectives.samples,
            "one_in": communication.one_in,
            "absent": collectives.why,
            "operations": [_operation(operation) for operation in collectives.operations],
        },
        "wrappers": [
            {"wrapper": wrapper.number, **fields_of(wrapper, *_WRAPPER)} for wrapper in communication.wrappers
        ],
    }


def _torch_times(wrapper: Wrapper) -> dict[str, object]:
    members = {**fields_of(wrapper, "process", "iteration", "comm_ns", "overlap_ns"), "absent": {}}
    if len(wrapper.bucket_bytes) < 2:
        single = "with a single bucket nothing can be hidden: its communication begins after the last gradient"
        reason = single if wrapper.bucket_bytes else "the buckets are unknown"
        members |= {"overlap_ms": None, "absent": {"overlap_ms": reason}}
    return members


def _straggler(straggler: Straggler | None, lately: bool) -> dict[str, object] | None:
    if straggler is None:
        return None
    names = ("process", "rank", "share", "slowest", "steps", "phase", "ranks", "excess_ns", "own_ns", "others_ns")
    return {**fields_of(straggler, *names), "sentence": straggler_sentence(straggler, lately=lately)}


def _operation(operation: Operation) -> dict[str, object]:
    return fields_of(operation, "name", "size", "collectives", "bytes")
