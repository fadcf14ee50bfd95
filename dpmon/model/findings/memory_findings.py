"""Finds memory that grows from step to step until it reaches its limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import process_suffix
from dpmon.store.memory_growth import HOST_NAME, MemoryTrend
from dpmon.text.formatting import format_bytes, format_bytes_of_total, format_count, format_count_with_noun
from dpmon.text.growth_text import describe_growth

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis

KIND = "memory"
_MAX_NAMES = 3
_FULL_SHARE = 0.9
"""/dev/shm is nearly full from this share on."""
_ADVICE = (
    "look for what each step adds to: sums and lists of losses or outputs that keep their graph (.item(), .detach()),"
    " caches without a limit, buffers of hooks"
)


def memory_owner(trend: MemoryTrend) -> str:
    """Return whose memory it is: "memory of the run", "memory on cuda:0"."""
    if trend.device != HOST_NAME:
        return f"memory on {trend.device}"
    return "memory of the run" if trend.node is None else f"memory of the run on node {trend.node}"


def time_until_limit(trend: MemoryTrend) -> str:
    """Return the time until growing memory reaches its limit: "40 min"."""
    seconds = trend.seconds_left or 0.0
    for unit_s, unit in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit_s:
            return f"{seconds / unit_s:.0f} {unit}"
    return f"{seconds:.0f} s"


def find_memory_growth(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for the memory that grows and reaches its limit first."""
    trends = [trend for trend in run.memory_trends if trend.matters]
    for trend in sorted(trends, key=lambda trend: trend.seconds_left or 0.0)[:1]:
        growth, owner = trend.growth, memory_owner(trend).capitalize()
        if trend.process is not None and run.names:
            owner += f" of {run.names.get(trend.process, f'process {trend.process}')}"
        named = _found_names(run, trend)
        cause, others = "".join(f": {name}" for name in named[:1]), "".join(f"{name}; " for name in named[1:])
        tense = "is" if run.end_ns is None else "would be"
        steps_left = trend.steps_left or 0
        steps_text = format_count(round(steps_left, 2 - len(str(steps_left))))  # the growth is not known more exactly
        low, high = format_bytes(growth.low_bytes), format_bytes(growth.high_bytes)
        yield Finding(
            KIND,
            f"{owner} grows {format_bytes(growth.step_bytes)} per step{cause}; the limit"
            f" ({format_bytes(trend.limit_bytes)}; {trend.limit}) {tense} reached in about {steps_text} steps,"
            f" {time_until_limit(trend)}.",
            f"{others}95%: {low} to {high} per step; {format_bytes(growth.added_bytes)} more over"
            f" {format_count_with_noun(int(growth.steps), 'step')}, now {format_bytes(trend.used_bytes)}",
            _ADVICE,
            1.0,
        )


def _found_names(run: RunAnalysis, trend: MemoryTrend) -> list[str]:
    """Return what the training processes found to grow, by name, _MAX_NAMES at most; empty if it is not known."""
    newest = {data["process"]: data for data in run.memory_events["growth"]}
    texts = [
        f"{text}{process_suffix(process, run)}"
        for process, data in sorted(newest.items())
        for text in describe_growth(data)
        if trend.process in (None, process) and (data["names"] or data["allocations"])
    ]
    return texts[:_MAX_NAMES]


def find_full_shared_memory(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding if /dev/shm is nearly full while loader workers, which send batches through it, run."""
    workers = max((loader.workers or 0 for loader in run.loaders), default=0)
    samples = run.memory_events["host"]
    used_bytes = max((sample.get("shm_used_bytes") or 0 for sample in samples), default=0)
    total_bytes = next((sample.get("shm_total_bytes") for sample in reversed(samples)), None)
    if workers and total_bytes and used_bytes >= _FULL_SHARE * total_bytes:
        yield Finding(
            KIND,
            f"/dev/shm is nearly full: {format_bytes_of_total(used_bytes, total_bytes)}. A loader worker that finds no"
            " room there ends with a bus error.",
            f"the most in the last {format_count_with_noun(len(samples), 'sample')}; up to"
            f" {format_count_with_noun(workers, 'worker')} of a loader send batches through it",
            "a larger /dev/shm (docker run --shm-size 8g, or --ipc=host), fewer workers, a smaller prefetch_factor",
            1.0,
        )


FINDERS = (find_memory_growth, find_full_shared_memory)
