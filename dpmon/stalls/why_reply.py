"""The answer to "why is it stuck": what each rank does, as JSON; and the request for it."""

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
from dpmon.run.safe_files import open_file, read_file, remove_file, write_atomically
from dpmon.stalls.stacks import Frame, ProcessStacks, Stack
from dpmon.stalls.stall_detection import LoaderWorker, ProcessGroupView, RankActivity, Stall, describe_activity

ASKED_FILE, ANSWER_FILE = "why-asked", "why.json"
STANDING_FILE = "standing.json"
"""What the ranks of this machine do while one stands still, for a reader that sees all machines of their job."""
NATIVE = b"native"
"""Contents of a request for stacks with C frames."""
WAIT_S = 8.0
"""Longest wait for the supervisor's answer."""
_EVERY_S = 0.02
_MAX_BYTES = 64 << 20


def build_reply(
    ranks: Sequence[RankActivity],
    dumps: Mapping[int, ProcessStacks],
    found: Stall | None,
    now_ns: int,
    info: RunInfo,
    *,
    text: str = "",
    gpus: Sequence[Mapping[str, Any]] = (),
    nccl: Sequence[str] = (),
) -> dict[str, Any]:
    """What each rank does, those that the others wait for first.

    `dumps`: the stacks by pid. `text`: the sentence about the stall. `gpus`: the newest sample of each GPU.
    `nccl`: what NCCL says about its ranks.
    """
    first = [] if found is None else [*found.guilty, *found.waiting]
    order = [*first, *(i for i in range(len(ranks)) if i not in first)]
    return {
        "t_s": (now_ns - info.start_ns) / 1e9,
        "since_s": None if found is None else (found.since_ns - info.start_ns) / 1e9,
        "text": None if found is None else text,
        "nccl": list(nccl),
        "ranks": [
            {
                **_rank(
                    ranks[i],
                    dumps.get(ranks[i].pid, ProcessStacks()),
                    now_ns,
                    info,
                    found is not None and i in found.waiting,
                ),
                "apart": found is not None and i not in first,
                "gpus": _gpu_usage_of(ranks[i], gpus),
            }
            for i in order
        ],
    }


def _gpu_usage_of(rank: RankActivity, gpus: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Use and power of the GPUs of a rank, by torch's name for them."""
    return [
        {"device": use.get("device"), "util_pct": gpu.get("util_pct"), "power_w": gpu.get("power_w")}
        for gpu in gpus
        for use in gpu.get("ordinals") or ()
        if use.get("process") == rank.process
    ]


def _rank(rank: RankActivity, taken: ProcessStacks, now_ns: int, info: RunInfo, waits: bool) -> dict[str, Any]:
    stack = taken.main or rank.stack
    stacks = taken.stacks or (() if stack is None else (stack,))
    if rank.worker is not None and rank.worker.stack is not None:
        stacks += (rank.worker.stack._replace(thread=f"worker of {rank.name} (pid {rank.worker.pid})"),)
    script = None if stack is None else stack.innermost_script_frame
    return {
        "process": rank.process,
        **({} if rank.node is None else {"node": rank.node}),
        "rank": rank.rank,
        "pid": rank.pid,
        "step": rank.step,
        "doing": rank.doing,
        "for_s": (now_ns - rank.since_ns) / 1e9 if rank.since_ns else None,
        "waits": waits,
        "words": describe_activity(rank._replace(stack=stack), info.cwd, waits=waits),
        "place": None if script is None else script.location(info.cwd),
        "function": None if script is None else script.function,
        "inside": None if stack is None else stack.library_operation,
        "state": rank.state,
        "cpu": rank.cpu,
        "groups": [{"group": group.name, "ranks": group.ranks, "sequence": group.sequence} for group in rank.groups],
        **({} if not stacks else {"stacks": [_stack(one) for one in stacks]}),
        "why_no_stack": None if stacks else taken.reason or rank.why_no_stack,
    }


def _stack(one: Stack) -> dict[str, Any]:
    return {"thread": one.thread, "main": one.main, "left_out": one.left_out, "frames": [list(f) for f in one.frames]}


_YES_OR_NO = ("busy", "between_loops", "loop_begins", "namesake")


def describe_ranks(ranks: Sequence[RankActivity], now_ns: int, info: RunInfo) -> dict[str, Any]:
    """All that the verdict about a stall needs to know of these ranks; `parse_rank` reads it."""
    return {
        "t_s": (now_ns - info.start_ns) / 1e9,
        "ranks": [
            {
                **_rank(rank, ProcessStacks(), now_ns, info, False),
                **{name: getattr(rank, name) for name in (*_YES_OR_NO, "world", "job", "raised")},
                "usual_s": rank.usual_ns / 1e9,
                "worker": None if rank.worker is None else {"pid": rank.worker.pid, "words": rank.worker.words},
            }
            for rank in ranks
        ],
    }


def parse_rank(data: Mapping[str, Any], node: str, now_ns: int) -> RankActivity:
    """The rank in a member of `standing`, on the machine `node`; `now_ns`: the time of `t_s` here.

    ValueError if it is none: another machine sent it.
    """
    try:
        pid, since_ns, worker = int_member(data, "pid"), ns_member(data, "for_s"), data.get("worker")
        stack = next((one for one in data.get("stacks") or () if one["main"]), None)
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
                    int_member(each, "group") or 0, int_member(each, "ranks") or 0, int_member(each, "sequence")
                )
                for each in data.get("groups") or ()
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
            **{name: data[name] for name in _YES_OR_NO if isinstance(data.get(name), bool)},
        )
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError("not a rank") from None


def request_reply(directory: Path, *, native: bool = False) -> int:
    """Ask the supervisor for an answer; return the number of the request. `native`: with C frames."""
    fd = open_file(directory / ASKED_FILE, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        os.write(fd, NATIVE if native else b"")
        now = time.time_ns()  # the kernel's own times are some ms apart: two requests could have the same
        os.utime(fd, ns=(now, now))
        return os.fstat(fd).st_mtime_ns
    finally:
        os.close(fd)


def last_request_number(directory: Path) -> int:
    """The number of the last request; 0 without one."""
    with contextlib.suppress(OSError):
        return os.lstat(directory / ASKED_FILE).st_mtime_ns
    return 0


def request_and_wait(directory: Path, *, native: bool = False) -> dict[str, Any] | None:
    """The supervisor's answer, after a wait for it; None if it does not answer. OSError if it cannot be asked."""
    with contextlib.suppress(FileNotFoundError):
        remove_file(directory / ANSWER_FILE)  # after the clock was set back, an old answer could pass for a new one
    serial = request_reply(directory, native=native)
    end = time.monotonic() + WAIT_S
    while (found := read_reply(directory, serial)) is None and time.monotonic() < end:
        time.sleep(_EVERY_S)
    return found


def wants_native(directory: Path) -> bool:
    """Whether the last request wants C frames."""
    with contextlib.suppress(OSError):
        return read_file(directory / ASKED_FILE, len(NATIVE)) == NATIVE
    return False


def write_reply(directory: Path, number: int, found: Mapping[str, Any]) -> None:
    """Write the answer to a request in one step."""
    with contextlib.suppress(OSError):
        write_atomically(directory / ANSWER_FILE, json.dumps({**found, "asked": number}))


def read_reply(directory: Path, asked: int) -> dict[str, Any] | None:
    """The answer to a request; None while there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = load_json(read_file(directory / ANSWER_FILE, _MAX_BYTES))
        if isinstance(found, dict) and isinstance(found.get("asked"), int) and found["asked"] >= asked:
            return found
    return None
