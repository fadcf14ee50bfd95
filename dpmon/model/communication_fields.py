"""The ranks' communication as JSON members, the same in the report and in the lines of `--json`. Pure."""

from __future__ import annotations

from typing import Any

from dpmon.model.communication import Communication, Wrapper
from dpmon.model.stragglers import RankTimes, Straggler, sentence
from dpmon.store.answers import Operation

_WRAPPER = (
    *("process", "rank", "root", "backend", "group_size", "parameter_bytes", "bucket_cap_bytes", "comm_hook"),
    *("find_unused_parameters", "unused_bytes", "gradient_as_bucket_view", "static_graph", "broadcast_buffers"),
    "sync_batch_norm",
)


def rank_fields(times: RankTimes | None) -> dict[str, Any]:
    """The mean times of a rank in ms; null if unknown."""
    phases = times.phases if times is not None else {}
    return {
        **{f"{name}_ms": _ms(phases.get(name)) for name in ("data", "forward", "backward")},
        "exposed_ms": None if times is None else _ms(times.exposed_ns),
        "wait_ms": None if times is None else _ms(times.wait_ns),
        "slowest": None if times is None or not times.joined else times.slowest,
        "joined_steps": 0 if times is None else times.joined,
    }


def communication_fields(found: Communication | None) -> dict[str, Any] | None:
    """The communication as JSON members; None if no ranks train together."""
    if found is None:
        return None
    return {
        "exposed_ms": _ms(found.exposed_ns),
        "exposed_share": found.exposed_share,
        "wait_ms": _ms(found.wait_ns),
        "wait_share": found.wait_share,
        "missing": found.missing,
        "joined_steps": found.joined,
        "synced": found.synced,
        "unsynced": found.unsynced,
        "straggler": _straggler(found.straggler(), found.lately),
        "torch": _torch(found.torch_times),
        "sampled": {
            "samples": found.collectives.samples,
            "one_in": found.one_in,
            "absent": found.collectives.why,
            "operations": [_operation(one) for one in found.collectives.operations],
        },
        "wrappers": [_wrapper(one) for one in found.wrappers],
    }


def _straggler(slow: Straggler | None, lately: bool) -> dict[str, Any] | None:
    if slow is None:
        return None
    return {
        **{name: getattr(slow, name) for name in ("process", "rank", "share", "slowest", "steps", "phase")},
        "ranks": list(slow.ranks),
        "excess_ms": _ms(slow.excess_ns),
        "own_ms": _ms(slow.own_ns),
        "others_ms": _ms(slow.others_ns),
        "sentence": sentence(slow, lately=lately),
    }


def _operation(one: Operation) -> dict[str, Any]:
    bandwidths = {"alg_bytes_s": one.alg_bytes_s, "bus_bytes_s": one.bus_bytes_s}
    names = ("name", "size", "collectives", "bytes", "ended")
    absent = {} if one.no_bandwidth is None else dict.fromkeys(bandwidths, one.no_bandwidth)
    return {**{name: getattr(one, name) for name in names}, **bandwidths, "absent": absent}


def _torch(one: Wrapper | None) -> dict[str, Any] | None:
    if one is None:
        return None
    times = {"comm_ms": _ms(one.comm_ns), "overlap_ms": _ms(one.overlap_ns)}
    return {"process": one.process, "iteration": one.iteration, **times}


def _wrapper(one: Wrapper) -> dict[str, Any]:
    named = {name: getattr(one, name) for name in _WRAPPER}
    return {"wrapper": one.number, **named, "bucket_bytes": list(one.bucket_bytes)}


def _ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6
