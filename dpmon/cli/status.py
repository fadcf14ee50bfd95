"""The command `status`: the health of a run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dpmon.cli.messages import print_message, print_unread_warning
from dpmon.cli.status_stream import status_members, step_line
from dpmon.errors import HistoryError
from dpmon.model.findings.all_findings import find_all
from dpmon.model.findings.device_findings import busy_cpus_note
from dpmon.model.findings.finding import Finding
from dpmon.model.recorded_stalls import final_stall, final_stall_sentence
from dpmon.model.run_analysis import EVERYTHING, RunAnalysis, Selection
from dpmon.record.safe_json import replace_nonfinite
from dpmon.record.shared_names import ELSEWHERE
from dpmon.report.health import TIMED_OUT, Health, assess_health, read_health
from dpmon.report.outcome import LOST
from dpmon.report.report_data import analyze_run, open_report_data
from dpmon.report.sections import no_findings_text
from dpmon.report.sentences import basic_facts, setup_facts, time_by_activity_sentences
from dpmon.run.lifecycle import has_succeeded, run_state
from dpmon.run.run_directory import ExitInfo, RunError
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import find_live_run, list_runs, short_name
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.stalls.run_state import ENDED, QUIET, STALLED
from dpmon.store.store_opening import open_store
from dpmon.text.cells import text_for_stream
from dpmon.text.fact_table import fields_of
from dpmon.text.formatting import (
    UNKNOWN,
    format_bytes_of_total,
    format_duration,
    format_percent,
)

SCHEMA = 1
"""The version of the object of `--json`."""
POLL_S = 1.0
MAX_FINDINGS = 3
MAX_EXPLANATION = 40
MAX_PHASES = 5
MAX_DEVICES = 2
"""With more devices, people get only a summary."""


def status(options: argparse.Namespace) -> int:
    """Print the health of a run. Return 0 (fine), 3 (not training), 5 (stalled), 6 (failed) or 124."""
    if options.all:
        return _print_all_runs(options.json)
    directory = find_live_run(options.run)
    wait_status = None if options.wait is None else _wait_for_state(directory, options.wait, options.timeout)
    health, members = read_run_status(directory)
    lines = _status_lines(health, members)
    if options.explain:
        members["explanation"] = lines = explain_run(directory, health, members)
    if options.json:
        print(to_safe_json(members, indent=1))
    else:
        print(text_for_stream("\n".join(lines), sys.stdout))
    return health.exit_status if wait_status is None else wait_status


def explain_run(directory: Path, health: Health, members: dict[str, Any]) -> list[str]:
    """Return a description of a run in at most MAX_EXPLANATION lines. `health`, `members`: from `read_run_status`."""
    headline, *lines = _status_lines(health, members, shows_findings=False)
    with suppress(RunError), open_report_data(directory) as report:
        times = time_by_activity_sentences(report.run, report.run.time_by_activity, has_ended=report.has_ended)
        command = f"command: {' '.join(report.run_info.command)}"
        findings = [finding.whole_text for finding in report.findings]
        findings = [*(findings or [no_findings_text(report)]), *busy_cpus_note(report.run)]
        lines = [command, *setup_facts(report), *basic_facts(report), *times, *lines, *findings]
    commands = {"why": "where each rank is", "report": "the whole report", "export": "every record"}
    if health.end is None:
        commands["profile"] = "the operators of some steps, if forward, backward or optimizer is slow"
    lines = lines[: MAX_EXPLANATION - 1 - len(commands)]
    lines += [f"dpmon {command} {members['name']}: {purpose}" for command, purpose in commands.items()]
    return [headline, *(f"  {sanitize_line(line.strip())}" for line in lines)]


def _print_all_runs(as_json: bool) -> int:
    runs = []
    for directory, _ in list_runs():
        try:
            runs.append(read_run_status(directory))
        except HistoryError as error:
            print_message(f"{directory.name}: {error}")
        except RunError:
            pass  # it was deleted meanwhile
    if as_json:
        print(to_safe_json({"schema": SCHEMA, "runs": [members for _, members in runs]}, indent=1))
    else:
        lines = [_headline(health, members) for health, members in runs] or ["there are no runs"]
        print(text_for_stream("\n".join(lines), sys.stdout))
    return 0


def _wait_for_state(directory: Path, wanted_state: str, timeout: float | None) -> int | None:
    """Wait for a state. Return 0 when it is reached, 124 after the timeout, None if the run ended in another way."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        health = read_health(directory)
        if wanted_state in (health.state, health.end) or (wanted_state == "fine" and health.exit_status == 0):
            return 0
        if health.end is not None:
            return None
        if deadline is not None and time.monotonic() >= deadline:
            return TIMED_OUT
        time.sleep(POLL_S)


def read_run_status(directory: Path) -> tuple[Health, dict[str, Any]]:
    """Return the health of a run and the members of `status --json`. RunError if it is not a run."""
    with closing(RunReader(directory)) as reader:
        word, exit_info = run_state(directory, reader.info)
        has_ended = exit_info is not None or word == LOST
        with suppress(RunError), open_store(directory) as store:
            print_unread_warning(reader.info, store)
            selection = Selection(span_s=0, over=True) if has_ended else EVERYTHING
            run = analyze_run(store, directory, exit_info, selection=selection)
            return _status_of(reader, run, find_all(run)[:MAX_FINDINGS], word, exit_info)
        return _status_of(reader, RunAnalysis(), [], word, exit_info)


def _status_of(
    reader: RunReader, run: RunAnalysis, findings: Sequence[Finding], word: str, exit_info: ExitInfo | None
) -> tuple[Health, dict[str, Any]]:
    """Return the health of a run and the members of `status --json`. `word`: its state (`run_state`)."""
    has_ended = exit_info is not None or word == LOST
    health = assess_health(reader, run)
    is_local = not has_ended and word != ELSEWHERE  # another machine has another monotonic clock
    now_ns = time.monotonic_ns() - reader.info.start_ns if is_local else max(run.newest_ns, 0)
    if exit_info is not None:
        now_ns = int(exit_info.seconds * 1e9)
    stall = run.current_stall
    if has_ended:
        stall = final_stall(run.stalls, run.newest_ns, has_succeeded(exit_info))
    stall_members = None
    if stall is not None:
        stall_members = fields_of(stall, "since_ns", "text", "ranks")
        stall_members["lasted_s"] = stall.duration_ns(now_ns) / 1e9
    members = {
        "schema": SCHEMA,
        "name": short_name(reader.info),
        **status_members(reader, run, health, now_ns),
        "stall": stall_members,
        "findings": [finding._asdict() for finding in findings],
        "exit": None if exit_info is None else fields_of(exit_info, "status", "signal", "seconds"),
    }
    return health, {name: replace_nonfinite(value) for name, value in members.items()}


def _headline(health: Health, members: dict[str, Any]) -> str:
    return sanitize_line(f"{members['name']}  {health.sentence(members['t_s'])}")


def _status_lines(health: Health, members: dict[str, Any], *, shows_findings: bool = True) -> list[str]:
    """Return about ten lines for people."""
    lines = [_headline(health, members)]
    is_halted = members["stall"] is not None or health.state == QUIET  # then the first line gives the duration
    hidden_kinds = {"quiet"} if is_halted else set()
    if health.end is None and health.state in (STALLED, ENDED):
        hidden_kinds.add("straggler")
    if health.remedy:
        lines.append(f"try: {health.remedy}")
    if health.end is not None and members["stall"] is not None:
        lines.append(final_stall_sentence(members["stall"]["lasted_s"] * 1e9, members["stall"]["text"]))
    if members["step"] is not None:
        lines += filter(None, [step_line(members), members["efficiency"]["text"]])
    troubled = [node for node in members.get("nodes", ()) if node["trouble"]]
    lines += [f"{node['name']} {node['trouble']}" for node in troubled[:MAX_FINDINGS]]
    if len(troubled) > MAX_FINDINGS:
        lines.append(f"{len(troubled) - MAX_FINDINGS} other nodes too")
    if members["step_ms"]:
        shares = sorted(((phase["share"] or 0, name) for name, phase in members["phases"].items()), reverse=True)
        parts = ", ".join(f"{name} {format_percent(share)}" for share, name in shares[:MAX_PHASES] if share)
        lines.append(f"step median {format_duration(members['step_ms']['median_ms'] * 1e6)}: {parts}")
    straggler = (members.get("communication") or {}).get("straggler")
    if straggler and not any(finding["kind"] == "straggler" for finding in members["findings"]):
        lines.append(straggler["sentence"])
    findings = members["findings"] if shows_findings else ()
    lines += [finding["text"] for finding in findings if finding["kind"] not in hidden_kinds]
    devices, node_text = members["devices"], _node_suffix(members)
    for device in devices if len(devices) <= MAX_DEVICES else ():
        use = UNKNOWN if device.get("util_pct") is None else f"{device['util_pct']}%"
        memory = format_bytes_of_total(device.get("mem_used_bytes"), device.get("mem_total_bytes"))
        lines.append(f"GPU {device.get('index')}{node_text}: {use} used, memory {memory}")
    utilizations = [device["util_pct"] for device in devices if device.get("util_pct") is not None]
    if len(devices) > MAX_DEVICES and utilizations:
        lines.append(f"{len(devices)} GPUs{node_text}: {min(utilizations)} to {max(utilizations)}% used")
    headline, *details = lines
    return [headline, *(f"  {sanitize_line(line)}" for line in details)]


def _node_suffix(members: dict[str, Any]) -> str:
    """Return " of gpu-1", the node of the shown process and GPUs, if the run has several nodes; else an empty text."""
    ranks = members.get("ranks", ()) if "nodes" in members else ()
    return next((f" of {rank['node']}" for rank in ranks if rank["process"] == members["process"] and rank["node"]), "")
