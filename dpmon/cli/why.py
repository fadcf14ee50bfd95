"""The command `why`: which rank stands where, and what the others wait for."""

from __future__ import annotations

import argparse
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dpmon.cleaning import clean, json_text
from dpmon.cli.speak import speak
from dpmon.errors import HistoryError
from dpmon.model.announced import stalls_in
from dpmon.report.health import LOST
from dpmon.run.condition import ELSEWHERE, goes_on, run_state
from dpmon.run.rundir import RunError, load_info
from dpmon.run.runs import find_run, newest_run
from dpmon.stalls.answer import answer, asked
from dpmon.stalls.answer_lines import lines_of
from dpmon.stalls.processes import RankLook
from dpmon.store.opened import open_store
from dpmon.supervise.start import ensure_supervisor
from dpmon.text.quantities import clock


def why(options: argparse.Namespace) -> int:
    """Print what each rank of a live run does now, or the stalls of a finished run."""
    directory = newest_run(goes_on) if options.run is None else find_run(options.run, goes_on=goes_on)
    info = load_info(directory)
    state, how = run_state(directory, info)
    over = how is not None or state == LOST
    # Elsewhere, and after its end, other processes may have the numbers of the run's.
    found = None if over or state == ELSEWHERE else _asked(directory, native=options.native)
    stalls = _recorded(directory)
    if options.json:
        print(json_text({"run": info.id, "state": state, "now": found, "stalls": stalls}, indent=1))
        return 0
    if found is not None:
        print("\n".join(text for text, _ in lines_of(found, every=options.all)))
    elif state == ELSEWHERE:
        print(f"{info.id} runs on another machine ({clean(info.host)}): ask there")
    else:
        print(f"{info.id} is over ({state})")
    for one in stalls_in(stalls):
        lasted = "until its end" if one.end_ns is None else f"for {(one.end_ns - one.since_ns) / 1e9:.0f} s"
        if over or one.end_ns is not None:
            print(f"stalled at {clock(one.since_ns)} {lasted}: {clean(one.text)}")
        if over:
            print("\n".join(text for text, _ in lines_of(one.record, every=options.all)[1:]))
    if found is None and not stalls:
        print("no stall was recorded")
    return 0


def _asked(directory: Path, *, native: bool) -> dict[str, Any] | None:
    """The supervisor's answer; without a supervisor, what this process itself can see."""
    try:
        ensure_supervisor(directory)
        found = asked(directory, native=native)
        if found is not None:
            return found
        speak("the supervisor does not answer; the stacks are taken from here")
    except (OSError, RunError) as error:
        speak(f"the supervisor cannot be asked: {error}")
    info = load_info(directory)
    with closing(RankLook(directory, info.cwd)) as look:
        look.ranks({}, time.monotonic_ns())
        dumps = look.take_stacks(native=native)
        now = time.monotonic_ns()
        return answer(look.with_ends(look.ranks({}, now)), dumps, None, now, info)


def _recorded(directory: Path) -> list[dict[str, Any]]:
    """The stalls in the history, oldest first."""
    with suppress(HistoryError, RunError), open_store(directory) as store:
        return [dict(event.data) for event in store.events("stall")]
    return []
