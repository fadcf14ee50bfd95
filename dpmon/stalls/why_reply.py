"""Builds the reply to `dpmon why` as JSON: what each rank does. Also requests it and reads it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpmon.record.safe_json import int_member, load_json, ns_member, number_member, text_member
from dpmon.run.run_directory import RunInfo
from dpmon.run.safe_files import open_file, read_file, write_atomically
from dpmon.stalls.stacks import Frame, ProcessStacks, Stack
from dpmon.stalls.stall_detection import LoaderWorker, ProcessGroupView, RankActivity, Stall, describe_activity

ASKED_FILE, ANSWER_FILE = "why-asked", "why.json"
STANDING_FILE = "standing.json"
"""The activities of this node's ranks while one makes no progress, for a reader that sees all nodes of their job."""
NATIVE = b"native"
"""Contents of a request for stacks with C frames."""
WAIT_S = 8.0
"""Maximum wait for the supervisor's reply."""
_POLL_S = 0.02
_MAX_BYTES = 64 << 20


def build_reply(
    ranks: Sequence[RankActivity],
    dumps: Mapping[int, ProcessStacks],
    stall: Stall | None,
    now_ns: int,
    run_info: RunInfo,
    *,
    text: str = "",
    gpus: Sequence[Mapping[str, Any]] = (),
    nccl: Sequence[str] = (),
) -> dict[str, Any]:
    """Return what each rank does, as JSON; the ranks that the others wait for come first.

    `dumps`: the stacks by pid. `text`: the sentence about the stall. `gpus`: the newest sample of each GPU.
    `nccl`: NCCL's report about its ranks.
    """
    involved = [] if stall is None else [*stall.blockers, *stall.waiters]
    order = [*involved, *(index for index in range(len(ranks)) if index not in involved)]
    return {
        "t_s": (now_ns - run_info.start_ns) / 1e9,
        "since_s": None if stall is None else (stall.since_ns - run_info.start_ns) / 1e9,
        "text": None if stall is None else text,
        "nccl": list(nccl),
        "ranks": [
            {
                **_rank(
                    ranks[index],
                    dumps.get(ranks[index].pid, ProcessStacks()),
                    now_ns,
                    run_info,
                    is_waiter=stall is not None and index in stall.waiters,
                ),
                "apart": stall is not None and index not in involved,
                "gpus": _gpu_usage_of(ranks[index], gpus),
            }
            for index in order
        ],
    }


def _gpu_usage_of(rank: RankActivity, gpus: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return utilization and power of a rank's GPUs, with torch's names for them."""
    return [
        {"device": ordinal.get("device"), "util_pct": gpu.get("util_pct"), "power_w": gpu.get("power_w")}
        for gpu in gpus
        for ordinal in gpu.get("ordinals") or ()
        if ordinal.get("process") == rank.process
    ]


def _rank(
    rank: RankActivity, dump: ProcessStacks, now_ns: int, run_info: RunInfo, *, is_waiter: bool
) -> dict[str, Any]:
    stack = dump.main or rank.stack
    stacks = dump.stacks or (() if stack is None else (stack,))
    if rank.worker is not None and rank.worker.stack is not None:
        stacks += (rank.worker.stack._replace(thread=f"worker of {rank.name} (pid {rank.worker.pid})"),)
    frame = None if stack is None else stack.innermost_script_frame
    return {
        "process": rank.process,
        **({} if rank.node is None else {"node": rank.node}),
        "rank": rank.rank,
        "pid": rank.pid,
        "step": rank.step,
        "doing": rank.doing,
        "for_s": (now_ns - rank.since_ns) / 1e9 if rank.since_ns else None,
        "waits": is_waiter,
        "words": describe_activity(rank._replace(stack=stack), run_info.cwd, is_waiter=is_waiter),
        "place": None if frame is None else frame.location(run_info.cwd),
        "function": None if frame is None else frame.function,
        "inside": None if stack is None else stack.library_operation,
        "state": rank.state,
        "cpu": rank.cpu,
        "groups": [{"group": group.name, "ranks": group.ranks, "sequence": group.sequence} for group in rank.groups],
        **({} if not stacks else {"stacks": [_stack(each_stack) for each_stack in stacks]}),
        "why_no_stack": None if stacks else dump.reason or rank.why_no_stack,
    }


def _stack(stack: Stack) -> dict[str, Any]:
    frames = [list(frame) for frame in stack.frames]
    return {"thread": stack.thread, "main": stack.main, "left_out": stack.left_out, "frames": frames}


_BOOL_FIELDS = ("busy", "between_loops", "loop_begins", "namesake")


def describe_ranks(ranks: Sequence[RankActivity], now_ns: int, run_info: RunInfo) -> dict[str, Any]:
    """Return the JSON from which stalls are detected on another node; `parse_rank` reads it."""
    return {
        "t_s": (now_ns - run_info.start_ns) / 1e9,
        "ranks": [
            {
                **_rank(rank, ProcessStacks(), now_ns, run_info, is_waiter=False),
                **{name: getattr(rank, name) for name in (*_BOOL_FIELDS, "world", "job", "raised")},
                "usual_s": rank.usual_ns / 1e9,
                "worker": None if rank.worker is None else {"pid": rank.worker.pid, "words": rank.worker.description},
            }
            for rank in ranks
        ],
    }


def parse_rank(data: Mapping[str, Any], node: str, now_ns: int) -> RankActivity:
    """Return the rank in an entry of `ranks` of `describe_ranks`. `node`: its node. `now_ns`: its `t_s` on our clock.

    Raises ValueError if the entry is invalid, because another machine sent it.
    """
    try:
        pid, since_ns, worker = int_member(data, "pid"), ns_member(data, "for_s"), data.get("worker")
        stack = next((each_stack for each_stack in data.get("stacks") or () if each_stack["main"]), None)
        return RankActivity(
            pid or 0,
            int_member(data, "process"),
            int_member(data, "rank"),
            int_member(data, "world") or 1,
            text_member(data, "doing") or "other",
            0 if since_ns is None else now_ns - since_ns,
            int_member(data, "step"),
            tuple(
                ProcessGroupView(
                    int_member(group, "group") or 0, int_member(group, "ranks") or 0, int_member(group, "sequence")
                )
                for group in data.get("groups") or ()
            ),
            text_member(data, "state") or "sleeping",
            number_member(data, "cpu"),
            job=int_member(data, "job") or 0,
            stack=stack
            and Stack(tuple(Frame(str(name), str(file), int(line)) for name, file, line in stack["frames"])),
            why_no_stack=text_member(data, "why_no_stack"),
            raised=text_member(data, "raised"),
            worker=worker and LoaderWorker(int_member(worker, "pid") or 0, text_member(worker, "words") or "?"),
            node=node,
            usual_ns=ns_member(data, "usual_s") or 0,
            **{name: data[name] for name in _BOOL_FIELDS if isinstance(data.get(name), bool)},
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError("not a rank") from None


def request_reply(directory: Path, *, native: bool = False) -> int:
    """Request a reply from the supervisor. Return the number of the request. `native`: with C frames."""
    fd = open_file(directory / ASKED_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, NATIVE if native else b"")
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


def request_and_wait(directory: Path, *, native: bool = False) -> dict[str, Any] | None:
    """Request a reply from the supervisor. Return it; None if it does not come. Raises OSError if that fails."""
    with contextlib.suppress(FileNotFoundError):
        (directory / ANSWER_FILE).unlink()  # after the clock was set back, an old reply could pass for a new one
    number = request_reply(directory, native=native)
    deadline = time.monotonic() + WAIT_S
    while (reply := read_reply(directory, number)) is None and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return reply


def wants_native(directory: Path) -> bool:
    """Return whether the last request is for C frames, too."""
    with contextlib.suppress(OSError):
        return read_file(directory / ASKED_FILE, len(NATIVE)) == NATIVE
    return False


def write_reply(directory: Path, number: int, reply: Mapping[str, Any]) -> None:
    """Write the reply to a request in one step."""
    with contextlib.suppress(OSError):
        write_atomically(directory / ANSWER_FILE, json.dumps({**reply, "asked": number}))


def read_reply(directory: Path, number: int) -> dict[str, Any] | None:
    """Return the reply to a request; None while there is none."""
    with contextlib.suppress(OSError, ValueError):
        reply = load_json(read_file(directory / ANSWER_FILE, _MAX_BYTES))
        if isinstance(reply, dict) and isinstance(reply.get("asked"), int) and reply["asked"] >= number:
            return reply
    return None
