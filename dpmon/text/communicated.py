"""Sentences about the ranks' communication, the same on the screen and in the report."""

from __future__ import annotations

from itertools import groupby

from dpmon.model.communication import Communication, Wrapper
from dpmon.model.numbers import count_of, duration, group, percent, three
from dpmon.text.quantities import memory

_OPERATIONS = 4
"""Most kinds of collectives to name."""
_RUNS = 4
"""Most runs of equal buckets to name."""


def communication_facts(traffic: Communication) -> list[tuple[str, str]]:
    """Labels and texts, the most important first."""
    rows: list[tuple[str, str]] = []
    if traffic.exposed_ns is not None:
        steps = f"{'last ' * traffic.lately}{count_of(traffic.joined, 'step')}"
        rows.append(
            ("exposed", f"{duration(traffic.exposed_ns)} a step, {percent(traffic.exposed_share)} of it; {steps}")
        )
        who = count_of(len(traffic.waiting), "rank" if len(traffic.waiting) == len(traffic.known) else "waiting rank")
        rows.append(("wait", f"{duration(traffic.wait_ns)}, {percent(traffic.wait_share)}; mean of {who}"))
    if traffic.missing is not None:
        rows.append(("wait", f"unknown: {traffic.missing}"))
    if traffic.torch_times is not None and traffic.hidden_share is not None:
        rows.append(("hidden", _hidden(traffic, traffic.torch_times)))
    rows += [("" if row else "sampled", text) for row, text in enumerate(operations(traffic))]
    several = len(traffic.wrappers) > 1
    for one in traffic.wrappers:
        rows.append((f"buckets{f' {one.root}' if several else ''}", buckets(one)))
    if traffic.wrappers:
        rows.append(("group", _group(traffic.wrappers[0])))
    if traffic.synced:
        under = f", {three(traffic.unsynced)} under no_sync" if traffic.unsynced else ""
        rows.append(("passes", f"{three(traffic.synced)} synchronised a step{under}"))
    return rows


def operations(traffic: Communication) -> list[str]:
    """A line for each kind of collective in the sampled steps: number, size, speed."""
    collectives = traffic.collectives
    if collectives.why is not None and not collectives.samples:
        return [f"collectives: {collectives.why}"]
    lines = []
    of = "" if traffic.one_in is None else f"; 1 step in {group(traffic.one_in)}"
    for one in collectives.operations[:_OPERATIONS]:
        count = three(one.collectives / collectives.samples) if collectives.samples else group(one.collectives)
        size = f" of {memory(one.bytes / one.collectives)}" if one.bytes else ""
        bus = one.bus_bytes_s
        why = one.no_bandwidth if one.bytes or not one.ended else None  # a barrier has none
        fast = f", {bandwidth(bus)} bus" if bus is not None else "" if why is None else f", {why.partition(':')[0]}"
        lines.append(f"{one.name} {count} a step{size}{fast}{of}")
    return lines


def bandwidth(bytes_s: float) -> str:
    """Three digits in GB/s, or MB/s below one: "187 GB/s"."""
    return f"{three(bytes_s / 1e9)} GB/s" if bytes_s >= 1e9 else f"{three(bytes_s / 1e6)} MB/s"


def _hidden(traffic: Communication, one: Wrapper) -> str:
    """The share of communication that the backward pass hid, from torch's own times of one iteration."""
    who = "" if one.rank is None else f", rank {one.rank}"
    return f"{percent(traffic.hidden_share)} of {duration(one.comm_ns)} (torch: iteration {group(one.iteration)}{who})"


def buckets(one: Wrapper) -> str:
    """The number of buckets, and their sizes in the order of averaging: "6: 1.00 MiB, 25.0 MiB ×5"."""
    if not one.bucket_bytes:
        return "unknown so far"
    runs = [(size, sum(1 for _ in same)) for size, same in groupby(map(memory, one.bucket_bytes))]
    named = ", ".join(size if count == 1 else f"{size} ×{count}" for size, count in runs[:_RUNS])
    return f"{len(one.bucket_bytes)}: {named}{' ...' if len(runs) > _RUNS else ''}"


def _group(one: Wrapper) -> str:
    parts = [
        "size unknown" if one.group_size is None else count_of(one.group_size, "rank"),
        one.backend or "backend unknown",
    ]
    if one.comm_hook:
        parts.append(f"communication hook {one.comm_hook}")
    if one.gradient_as_bucket_view:
        parts.append("gradients are views of buckets")
    if one.static_graph:
        parts.append("static graph")
    if one.find_unused_parameters:
        parts.append("finds unused parameters")
    return ", ".join(parts)
