"""The command `status`: is my training fine?"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dpmon.cli.messages import print_message
from dpmon.cli.status_stream import status_members
from dpmon.errors import HistoryError
from dpmon.model.active_processes import ended_processes
from dpmon.model.all_findings import find_all
from dpmon.model.json_fields import fields_of
from dpmon.model.recorded_stalls import final_stall
from dpmon.model.run_snapshot import RunSnapshot, SnapshotRequest
from dpmon.model.snapshot_builder import SnapshotBuilder
from dpmon.record.safe_json import replace_nonfinite
from dpmon.report.health import LOST, NO_RUN, TIMED_OUT, Health, assess_health, read_health
from dpmon.report.report_data import analyze_run
from dpmon.run.lifecycle import ELSEWHERE, is_live, run_state
from dpmon.run.run_directory import RunError
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import find_run, list_runs, newest_run, short_name
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.stalls.run_state import ENDED, QUIET, STALLED
from dpmon.store.store_opening import open_store
from dpmon.text.cells import encode_for_stream
from dpmon.text.formatting import (
    UNKNOWN,
    format_bytes_of_total,
    format_compact,
    format_count,
    format_count_with_noun,
    format_duration,
    format_percent,
)

SCHEMA = 1
"""The version of the object of `--json`."""
EVERY_S = 1.0
MOST_FINDINGS = 3
MOST_PHASES = 5
MOST_DEVICES = 2
"""Of more devices only a summary is shown to people."""


def status(options: argparse.Namespace) -> int:
    """Print how a run does. Return 0 (fine), 3 (not training), 4 (no such run), 5 (stalled), 6 (failed) or 124."""
    if options.all:
        return _print_all_runs(options.json)
    try:
        directory = newest_run(is_live) if options.run is None else find_run(options.run, goes_on=is_live)
        reached = _wait(directory, options.wait, options.timeout) if options.wait is not None else None
        now, members = read_run_status(directory)
    except RunError as error:
        print_message(str(error))
        return NO_RUN
    print(
        to_safe_json(members, indent=1)
        if options.json
        else encode_for_stream("\n".join(_lines(now, members)), sys.stdout)
    )
    return now.exit_status if reached is None else reached


def _print_all_runs(as_json: bool) -> int:
    runs = []
    for directory, _ in list_runs():
        with suppress(RunError):  # it was deleted meanwhile
            runs.append(read_run_status(directory))
    if as_json:
        print(to_safe_json({"schema": SCHEMA, "runs": [members for _, members in runs]}, indent=1))
    else:
        lines = [_headline(now, members) for now, members in runs] or ["there are no runs"]
        print(encode_for_stream("\n".join(lines), sys.stdout))
    return 0


def _wait(directory: Path, wanted: str, timeout: float | None) -> int | None:
    """Wait until the run is in the wanted state: 0. 124 after the timeout; None if the run ended in another way."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        now = read_health(directory)
        if wanted in (now.state, now.end) or (wanted == "fine" and now.exit_status == 0):
            return 0
        if now.end is not None:
            return None
        if end is not None and time.monotonic() >= end:
            return TIMED_OUT
        time.sleep(EVERY_S)


def read_run_status(directory: Path) -> tuple[Health, dict[str, Any]]:
    """How a run does, and all that `status --json` says about it. RunError if it is not a run."""
    with closing(RunReader(directory)) as reader:
        word, how = run_state(directory, reader.info)
        state, listed, over = RunSnapshot(), [], how is not None or word == LOST
        with suppress(HistoryError, RunError), open_store(directory) as store:
            wanted = SnapshotRequest(span_s=0, over=True) if over else SnapshotRequest()
            state = SnapshotBuilder().build(store, wanted, ended_processes(reader.activities()))
            facts = analyze_run(store, directory, how)
            facts.query_everything()
            listed = [each._asdict() for each in find_all(facts)[:MOST_FINDINGS]]
        now = assess_health(reader, state)
        here = not over and word != ELSEWHERE  # another machine has another monotonic clock
        now_ns = time.monotonic_ns() - reader.info.start_ns if here else max(state.newest_ns, 0)
        now_ns = now_ns if how is None else int(how.seconds * 1e9)
        finished = how is not None and how.status == 0
        stall = state.current_stall if not over else None if finished else final_stall(state.stalls, state.newest_ns)
        lasted_s = None if stall is None else stall.duration_ns(now_ns) / 1e9
        members = {
            "schema": SCHEMA,
            "name": short_name(reader.info),
            **status_members(reader, state, now, now_ns),
            "stall": None if stall is None else {**fields_of(stall, "since_ns", "text", "ranks"), "lasted_s": lasted_s},
            "findings": listed,
            "exit": None if how is None else fields_of(how, "status", "signal", "seconds"),
        }
    return now, {name: replace_nonfinite(value) for name, value in members.items()}


def _headline(now: Health, found: dict[str, Any]) -> str:
    return sanitize_line(f"{found['name']}  {now.sentence(found['t_s'])}")


def _lines(now: Health, found: dict[str, Any]) -> list[str]:
    """About ten lines for people."""
    lines = [_headline(now, found)]
    standing = found["stall"] is not None or now.state == QUIET  # then the first line says how long
    past = {"quiet"} if standing else set()
    past |= {"straggler"} if now.end is None and now.state in (STALLED, ENDED) else set()
    if now.remedy:
        lines.append(f"try: {now.remedy}")
    if now.end is not None and found["stall"] is not None:
        stall = found["stall"]
        lines.append(f"ended in a stall of {format_duration(stall['lasted_s'] * 1e9)}: {stall['text']}")
    if found["step"] is not None:
        rates = [f"{format_compact(found[name])} {unit}" for name, unit in _RATES if found[name] is not None]
        mode = f"{found['mode'] or ''}{' (virtual)' if found['virtual'] else ''}"
        if found["processes"] > 1:
            mode = f"{found['processes']} processes"
            mode += f" on {format_count_with_noun(len(found['nodes']), 'node')}" if "nodes" in found else ""
        why = "" if standing else found["absent"].get("steps_per_s") or ""
        step = f"step {format_count(found['step'])}"
        lines.append("  ".join(word for word in (step, found["progress"]["text"], mode, *(rates or [why])) if word))
    told = [f"{one['name']} {one['trouble']}" for one in found.get("nodes", ()) if one["trouble"]]
    lines += [*told[:MOST_FINDINGS], *([f"{len(told) - MOST_FINDINGS} other nodes too"] * (len(told) > MOST_FINDINGS))]
    if found["step_ms"]:
        shares = sorted(((each["share"] or 0, name) for name, each in found["phases"].items()), reverse=True)
        parts = ", ".join(f"{name} {format_percent(share)}" for share, name in shares[:MOST_PHASES] if share)
        lines.append(f"step median {format_duration(found['step_ms']['median_ms'] * 1e6)}: {parts}")
    straggler = (found.get("communication") or {}).get("straggler")
    if straggler and not any(each["kind"] == "straggler" for each in found["findings"]):
        lines.append(straggler["sentence"])
    lines += [each["text"] for each in found["findings"] if each["kind"] not in past]
    devices, node = found["devices"], _node_of(found)
    for device in devices if len(devices) <= MOST_DEVICES else ():
        use = UNKNOWN if device.get("util_pct") is None else f"{device['util_pct']}%"
        memory = format_bytes_of_total(device.get("mem_used_bytes"), device.get("mem_total_bytes"))
        lines.append(f"GPU {device.get('index')}{node}: {use} used, memory {memory}")
    uses = [device["util_pct"] for device in devices if device.get("util_pct") is not None]
    if len(devices) > MOST_DEVICES and uses:
        lines.append(f"{len(devices)} GPUs{node}: {min(uses)} to {max(uses)}% used")
    return [lines[0], *(f"  {sanitize_line(line)}" for line in lines[1:])]


def _node_of(found: dict[str, Any]) -> str:
    """Return " of gpu-1", the node of the shown process and GPUs, if the run has several nodes; else an empty text."""
    ranks = found.get("ranks", ()) if "nodes" in found else ()
    return next((f" of {one['node']}" for one in ranks if one["process"] == found["process"] and one["node"]), "")


_RATES = (("steps_per_s", "steps/s"), ("samples_per_s", "samples/s"))
