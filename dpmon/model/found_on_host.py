"""What is worth a look in the machine that a run was on. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from dpmon.model.evidence import Evidence, HostFacts
from dpmon.model.finding import Finding, enough

__all__ = ["busy"]

SAMPLES = 10
"""A second each: less is a start."""
FULL_PCT = 90.0
"""Median use of all processors; below it there is one free for whoever wants it, most of the time."""
OTHERS_SHARE = 0.25
"""Of the processors. A desktop, a monitor and the supervisor itself stay well below it."""
LOAD_RATIO = 2.0
"""Threads that want to run, by processors: then each waits as long as it runs."""


def busy(evidence: Evidence) -> Iterator[Finding]:
    """Processors that others take, or that the run itself has too few of."""
    host = evidence.host
    if host is None or host.samples < SAMPLES or host.cpu_pct < FULL_PCT or not list(enough(evidence)):
        return
    share = host.others / host.cpus
    if share >= OTHERS_SHARE:
        yield Finding(
            "busy",
            f"The machine is busy with other work: {host.others:.1f} of its {_processors(host)} on the median.",
            _ground(host),
            "times on a quieter machine will be others; end what else runs there, or see who it is (top)",
            share / 2,
        )
    elif host.load is not None and host.load >= LOAD_RATIO * host.cpus:
        yield Finding(
            "crowded",
            f"More threads want to run than there are processors: {host.load:.0f} on {_processors(host)}.",
            _ground(host),
            "fewer threads (torch.set_num_threads, OMP_NUM_THREADS) or loader workers; as many as processors in all",
            0.3,
        )


def _processors(host: HostFacts) -> str:
    return "1 processor" if host.cpus == 1 else f"{host.cpus} processors"


def _ground(host: HostFacts) -> str:
    load = f", load {host.load:.1f}" if host.load is not None else ""
    return (
        f"processors {host.cpu_pct:.0f} % in use, {host.own:.1f} of {host.cpus} by this run{load} (medians of"
        f" {host.samples:,} samples)"
    )
