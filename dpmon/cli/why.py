"""The command `why`: where each rank is and what the others wait for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dpmon.cli.messages import print_message
from dpmon.cli.status import explain_run, read_run_status
from dpmon.errors import HistoryError
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.record.shared_names import ELSEWHERE
from dpmon.record.typed_json import to_json
from dpmon.report.health import read_health
from dpmon.report.outcome import LOST
from dpmon.report.report_data import analyze_run
from dpmon.report.sentences import stall_sentences
from dpmon.run.failure_cause import find_first_failure
from dpmon.run.lifecycle import is_command_alive, run_state
from dpmon.run.run_directory import ExitInfo, RunError, RunInfo, load_info
from dpmon.run.run_registry import find_live_run
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.stalls.stall_report import StallReport, parse_report, request_and_wait
from dpmon.stalls.why_text import NOT_STALLED, format_frames, format_report
from dpmon.store.store_opening import open_store
from dpmon.supervise.start_supervisor import ensure_supervisor
from dpmon.text.fact_table import fields_of
from dpmon.text.formatting import format_elapsed


def why(options: argparse.Namespace) -> int:
    """Print what each rank of a live run is doing, or the stalls of an ended run."""
    directory = find_live_run(options.run)
    run_info = load_info(directory)
    state, _ = run_state(directory, run_info)
    # On another machine, and after its end, other processes may have the run's process ids.
    is_alive = state in ("starting", "running", "unsupervised")
    reply = _request_why_reply(directory, run_info) if is_alive else None
    state, exit_info = run_state(directory, run_info)
    has_ended = exit_info is not None or state == LOST
    frames = () if exit_info is None else _read_traceback(directory, run_info, exit_info)
    stalls, sentences = _read_recorded_stalls(directory, exit_info, has_ended)
    explanation: list[str] = []
    if reply is not None and reply.text is None:
        with suppress(HistoryError):  # what each rank is doing is known without it
            explanation = explain_run(directory, *read_run_status(directory))
    if options.json:
        members = [{**fields_of(stall, "since_ns", "end_ns", "text"), "ranks": stall.ranks} for stall in stalls]
        ending = {"cause": exit_info and exit_info.cause, "frames": frames, "explanation": explanation}
        now = to_json(reply)
        print(to_safe_json({"run": run_info.id, "state": state, **ending, "now": now, "stalls": members}, indent=1))
        return 0
    if reply is not None:
        first, *lines = [text for text, _ in format_report(reply, all_threads=options.all)]
        if first == NOT_STALLED:
            first += f": {read_health(directory).sentence(reply.t_s)}"
        print("\n".join((sanitize_line(first), *lines, "", *explanation)).rstrip())
    elif state == ELSEWHERE:
        print(f"{run_info.id} runs on another node ({sanitize_line(run_info.host)}): run this command there")
    elif has_ended:
        print(sanitize_line(f"{run_info.id} has ended: {read_health(directory).sentence(0)}"))
    elif state == "ending":
        print(f"{run_info.id} has ended; its record is being completed")
    if frames:
        print("traceback, innermost call first:")
        print("\n".join(sanitize_line(text) for text, _ in format_frames(frames)))
    for stall, sentence in zip(stalls[-len(sentences) :], sentences, strict=False):
        if has_ended or stall.end_ns is not None:
            print(sanitize_line(sentence))
        if has_ended and (report := parse_report(stall.record)) is not None:
            print(f"what each rank was doing when dpmon detected it, at {format_elapsed(stall.noticed_ns)}:")
            print("\n".join(text for text, _ in format_report(report, all_threads=options.all)[2:]))
    if reply is None and not stalls and state not in ("failed", "killed"):
        print("no stall was recorded")
    return 0


def _request_why_reply(directory: Path, run_info: RunInfo) -> StallReport | None:
    """Return the reply of the supervisor or the mirror; None, with a message, if a live run gives none."""
    try:
        ensure_supervisor(directory)
        reply = request_and_wait(directory)
        if reply is not None or not is_command_alive(load_info(directory)):
            return reply
        problem = "does not reply"
    except (OSError, RunError) as error:
        problem = f"cannot be reached: {error}"
    print_message(f"the {'mirror' if run_info.nodes else 'supervisor'} {problem}")
    return None


def _read_traceback(directory: Path, run_info: RunInfo, exit_info: ExitInfo) -> Sequence[tuple[str, str, int]]:
    """Return function, file and line of the calls in which the run failed, innermost first; empty if not recorded."""
    failure = None if exit_info.stopped else find_first_failure(directory, run_info, exit_info.status)
    return () if failure is None or failure.exception is None else failure.exception.frames


def _read_recorded_stalls(
    directory: Path, exit_info: ExitInfo | None, has_ended: bool
) -> tuple[tuple[RecordedStall, ...], list[str]]:
    """Return the stalls in the history, oldest first, and sentences on the newest ones."""
    with suppress(HistoryError, RunError), open_store(directory) as store:
        run = analyze_run(store, directory, exit_info)
        return run.announced.stalls, stall_sentences(run, exit_info, has_ended=has_ended)
    return (), []
