"""The command `why`: which rank stands where, and what the others wait for."""

from __future__ import annotations

import argparse
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dpmon.cli.messages import print_message
from dpmon.errors import HistoryError
from dpmon.model.json_fields import fields_of
from dpmon.model.recorded_stalls import RecordedStall
from dpmon.report.health import LOST, NO_RUN, read_health
from dpmon.report.report_data import analyze_run
from dpmon.report.sentences import stall_sentences
from dpmon.run.lifecycle import ELSEWHERE, is_live, run_state
from dpmon.run.run_directory import ExitInfo, RunError, RunInfo, load_info
from dpmon.run.run_registry import find_run, newest_run
from dpmon.sanitize import sanitize_line, to_safe_json
from dpmon.stalls.rank_inspector import RankInspector
from dpmon.stalls.why_reply import build_reply, request_and_wait
from dpmon.stalls.why_text import NOT_STALLED, format_reply
from dpmon.store.store_opening import open_store
from dpmon.supervise.start_supervisor import ensure_supervisor
from dpmon.text.formatting import format_clock

_ALLOWED_S = 0.5
"""After this time, the training processes have let this one look into them: they look four times a second."""


def why(options: argparse.Namespace) -> int:
    """Print what each rank of a live run does now, or the stalls of a finished run. Return 0, or 4: no such run."""
    try:
        directory = newest_run(is_live) if options.run is None else find_run(options.run, goes_on=is_live)
        info = load_info(directory)
    except RunError as error:
        print_message(str(error))
        return NO_RUN
    state, how = run_state(directory, info)
    over = how is not None or state == LOST
    # Elsewhere, and after its end, other processes may have the numbers of the run's.
    found = None if over or state == ELSEWHERE else _request_why_reply(directory, info, native=options.native)
    seen, sentences = _read_recorded_stalls(directory, how, over)
    if options.json:
        members = [{**fields_of(one, "since_ns", "end_ns", "text"), "ranks": one.ranks} for one in seen]
        print(to_safe_json({"run": info.id, "state": state, "now": found, "stalls": members}, indent=1))
        return 0
    if found is not None:
        first, *lines = [text for text, _ in format_reply(found, every=options.all)]
        if first == NOT_STALLED:
            first += f": {read_health(directory).sentence(found['t_s'])}"
        print("\n".join((sanitize_line(first), *lines)))
    elif state == ELSEWHERE:
        print(f"{info.id} runs on another machine ({sanitize_line(info.host)}): ask there")
    elif over:
        print(f"{info.id} is over ({state})")
    for one, sentence in zip(seen[-len(sentences) :], sentences, strict=False):
        if over or one.end_ns is not None:
            print(sanitize_line(sentence))
        if over:
            print(f"what each rank did when dpmon noticed it, at {format_clock(one.noticed_ns)}:")
            print("\n".join(text for text, _ in format_reply(one.record, every=options.all)[2:]))
    if found is None and not seen:
        print("no stall was recorded")
    return 0


def _request_why_reply(directory: Path, info: RunInfo, *, native: bool) -> dict[str, Any] | None:
    """Return the supervisor's answer. Without one, look at the ranks from this process.

    None for a mirror that does not answer: its ranks run on other machines.
    """
    try:
        ensure_supervisor(directory)
        found = request_and_wait(directory, native=native)
        if found is not None:
            return found
        trouble = "does not answer"
    except (OSError, RunError) as error:
        trouble = f"cannot be asked: {error}"
    if info.nodes:
        print_message(f"the mirror {trouble}")
        return None
    print_message(f"the supervisor {trouble}; the stacks are taken from here")
    with closing(RankInspector(directory, info.cwd, adopted=True)) as look:
        look.inspect_ranks({}, time.monotonic_ns())
        time.sleep(_ALLOWED_S)
        dumps = look.take_stacks(native=native)
        look.query_nccl()
        now = time.monotonic_ns()
        return build_reply(look.with_exceptions(look.inspect_ranks({}, now)), dumps, None, now, info, nccl=look.nccl)


def _read_recorded_stalls(
    directory: Path, how: ExitInfo | None, over: bool
) -> tuple[tuple[RecordedStall, ...], list[str]]:
    """The stalls in the history, oldest first, and the sentences about the newest ones."""
    with suppress(HistoryError, RunError), open_store(directory) as store:
        facts = analyze_run(store, directory, how)
        return facts.announced.stalls, stall_sentences(facts, how, has_ended=over)
    return (), []
