"""What the ranks of a run do: the content of a `stall` record, and of the reply to `dpmon why`.

The request for such a reply, and the reply, are two files in the run's directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dpmon.record.safe_json import load_json
from dpmon.record.schema import SECOND
from dpmon.record.typed_json import OMIT_EMPTY, from_json, to_json
from dpmon.run.run_directory import RunInfo
from dpmon.run.safe_files import open_file, read_file, write_atomically
from dpmon.stalls.stacks import ProcessStacks, Stack
from dpmon.stalls.stall_detection import ProcessGroupView, RankActivity, Stall, describe_activity


@dataclass(frozen=True, slots=True)
class GpuUse:
    """The use of one of a rank's GPUs, with torch's name for it."""

    device: str | None
    util_pct: float | None
    power_w: float | None


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank does. dpmon.record.record_specs describes the fields, as `ranks` of a `stall`."""

    process: int | None = None
    node: str | None = field(default=None, metadata=OMIT_EMPTY)
    rank: int | None = None
    pid: int = 0
    step: int | None = None
    doing: str = "other"
    for_s: float | None = None
    waits: bool = False
    words: str = ""
    place: str | None = None
    function: str | None = None
    inside: str | None = None
    state: str = "sleeping"
    cpu: float | None = None
    groups: tuple[ProcessGroupView, ...] = ()
    stacks: tuple[Stack, ...] = field(default=(), metadata=OMIT_EMPTY)
    why_no_stack: str | None = None
    apart: bool = False
    gpus: tuple[GpuUse, ...] = ()


@dataclass(frozen=True, slots=True)
class StallReport:
    """What all ranks do, those first that the others wait for. Times since the run's start."""

    t_s: float
    since_s: float | None
    """When the last progress was made; None without a stall."""
    text: str | None
    """The sentence about the stall; None without one."""
    ranks: tuple[RankReport, ...]
    without: tuple[str, ...] = field(default=(), metadata=OMIT_EMPTY)
    """The nodes that did not answer, and why."""


ASKED_FILE, ANSWER_FILE = "why-asked", "why.json"
STANDING_FILE = "standing.json"
"""The activities of this node's ranks while one makes no progress, for a reader that sees all nodes of their job."""
WAIT_S = 8.0
"""Maximum wait for the supervisor's reply."""
_MAX_BYTES = 64 << 20
_last_parsed: tuple[Mapping[str, object], StallReport | None] = {}, None


def parse_report(record: Mapping[str, object]) -> StallReport | None:
    """Return the report in a `stall` record; None if it describes no ranks, or is not valid.

    The last one is kept, because a screen draws the same record again and again, and one with many stacks is long.
    """
    global _last_parsed
    last_record, report = _last_parsed
    if record is not last_record:
        report = None
        with contextlib.suppress(ValueError):
            report = from_json(StallReport, record)
        _last_parsed = record, report
    return report


def build_report(
    ranks: Sequence[RankActivity],
    dumps: Mapping[int, ProcessStacks],
    stall: Stall | None,
    now_ns: int,
    run_info: RunInfo,
    *,
    text: str = "",
    gpus: Sequence[Mapping[str, Any]] = (),
) -> StallReport:
    """Return what each rank does; the ranks that the others wait for come first.

    `dumps`: the stacks by pid. `text`: the sentence about the stall. `gpus`: the newest sample of each GPU.
    """
    blockers, waiters = ((), ()) if stall is None else (stall.blockers, stall.waiters)
    others = [index for index in range(len(ranks)) if index not in blockers and index not in waiters]
    reports = []
    for index in (*blockers, *waiters, *others):
        rank = ranks[index]
        dump = dumps.get(rank.pid, ProcessStacks())
        report = _report_rank(rank, dump, now_ns, run_info.cwd, is_waiter=index in waiters)
        is_apart = stall is not None and index in others
        reports.append(replace(report, apart=is_apart, gpus=_gpu_use_of(rank, gpus)))
    return StallReport(
        (now_ns - run_info.start_ns) / SECOND,
        None if stall is None else (stall.since_ns - run_info.start_ns) / SECOND,
        None if stall is None else text,
        tuple(reports),
    )


def _gpu_use_of(rank: RankActivity, gpus: Sequence[Mapping[str, Any]]) -> tuple[GpuUse, ...]:
    return tuple(
        GpuUse(ordinal.get("device"), gpu.get("util_pct"), gpu.get("power_w"))
        for gpu in gpus
        for ordinal in gpu.get("ordinals") or ()
        if ordinal.get("process") == rank.process
    )


def _report_rank(
    rank: RankActivity, dump: ProcessStacks, now_ns: int, directory: str, *, is_waiter: bool
) -> RankReport:
    stack = dump.main or rank.stack
    stacks = dump.stacks or (() if stack is None else (stack,))
    if rank.worker is not None and rank.worker.stack is not None:
        stacks += (replace(rank.worker.stack, thread=f"worker of {rank.name} (pid {rank.worker.pid})"),)
    frame = None if stack is None else stack.innermost_script_frame
    return RankReport(
        process=rank.process,
        node=rank.node,
        rank=rank.rank,
        pid=rank.pid,
        step=rank.step,
        doing=rank.doing,
        for_s=(now_ns - rank.since_ns) / SECOND if rank.since_ns else None,
        waits=is_waiter,
        words=describe_activity(rank._replace(stack=stack), directory, is_waiter=is_waiter),
        place=None if frame is None else frame.location(directory),
        function=None if frame is None else frame.function,
        inside=None if stack is None else stack.library_operation,
        state=rank.state,
        cpu=rank.cpu,
        groups=rank.groups,
        stacks=stacks,
        why_no_stack=None if stacks else dump.reason or rank.why_no_stack,
    )


# ------------------------------------------------------------------------------------------------ dpmon why


@dataclass(frozen=True, slots=True)
class _Reply:
    """The content of ANSWER_FILE: a reply and the number of its request."""

    asked: int
    report: StallReport


def request_reply(directory: Path) -> int:
    """Request a reply from the supervisor. Return the number of the request."""
    fd = open_file(directory / ASKED_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        now = time.time_ns()  # the kernel's own times are some ms apart, so two requests could have the same time
        os.utime(fd, ns=(now, now))
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def last_request_number(directory: Path) -> int:
    """Return the number of the last request; 0 if there is none."""
    with contextlib.suppress(OSError):
        return os.lstat(directory / ASKED_FILE).st_mtime_ns
    return 0


def request_and_wait(directory: Path) -> StallReport | None:
    """Request a reply from the supervisor. Return it; None if it does not come. Raises OSError if that fails."""
    with contextlib.suppress(FileNotFoundError):
        (directory / ANSWER_FILE).unlink()  # after the clock was set back, an old reply could pass for a new one
    number = request_reply(directory)
    deadline = time.monotonic() + WAIT_S
    while (reply := read_reply(directory, number)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return reply


def write_reply(directory: Path, number: int, reply: StallReport) -> None:
    """Write the reply to a request in one step."""
    with contextlib.suppress(OSError):
        write_atomically(directory / ANSWER_FILE, json.dumps(to_json(_Reply(number, reply))))


def read_reply(directory: Path, number: int) -> StallReport | None:
    """Return the reply to a request; None while there is none."""
    with contextlib.suppress(OSError, ValueError):
        reply = from_json(_Reply, load_json(read_file(directory / ANSWER_FILE, _MAX_BYTES)))
        if reply.asked >= number:
            return reply.report
    return None
