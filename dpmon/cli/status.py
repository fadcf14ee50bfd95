"""The command `status`: is my training fine?"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from dpmon.cleaning import clean, json_text
from dpmon.cli.lines import Lines
from dpmon.cli.speak import speak
from dpmon.model.findings import findings
from dpmon.record.plainjson import finite
from dpmon.report.health import NO_RUN, TIMED_OUT, Health, health_now
from dpmon.run.condition import goes_on, run_state
from dpmon.run.reader import RunReader
from dpmon.run.rundir import RunError, load_info
from dpmon.run.runs import find_run, list_runs, newest_run, short_name
from dpmon.text.quantities import UNKNOWN, clock, compact, duration, group, memory

SCHEMA = 1
"""The version of the object of `--json`."""
EVERY_S = 0.5
MOST_FINDINGS = 3


def status(options: argparse.Namespace) -> int:
    """Print how a run does. Return 0 (fine), 3 (not training), 4 (no such run), 5 (stalled), 6 (failed) or 124."""
    if options.all:
        every = [object_of(directory) for directory, _ in list_runs()]
        if options.json:
            print(json_text({"schema": SCHEMA, "runs": every}, indent=1))
        for one in every if not options.json else ():
            print(f"{one['name']}: {_headline(one)}")
        return 0
    try:
        directory = find_run(options.run, goes_on=goes_on) if options.run else newest_run(goes_on)
    except RunError as error:
        speak(str(error))
        return NO_RUN
    reached = _waited(directory, options.wait, options.timeout) if options.wait is not None else None
    found = object_of(directory)
    print(json_text(found, indent=1) if options.json else "\n".join(_text(found)))
    if reached is not None:
        return reached
    return Health(*(found["health"][name] for name in Health._fields)).status


def _waited(directory: Path, wanted: str, timeout: float | None) -> int | None:
    """Wait until the run is in the wanted state: 0. 124 after the timeout; None if the run ended in another state."""
    end = None if timeout is None else time.monotonic() + timeout
    while True:
        now = health_now(directory)
        if wanted in (now.state, now.end) or (wanted == "fine" and now.status == 0):
            return 0
        if now.end is not None:
            return None
        if end is not None and time.monotonic() >= end:
            return TIMED_OUT
        time.sleep(EVERY_S)


def object_of(directory: Path) -> dict[str, Any]:
    """All that `status --json` says about a run."""
    from dpmon.report.collect import facts_of
    from dpmon.store.opened import open_store

    info = load_info(directory)
    word, how = run_state(directory, info)
    with closing(RunReader(directory)) as reader:
        lines = Lines(reader, lambda line: True)
        state = lines.taken(over=how is not None or word == "lost")
        members = lines.status()
    del members["kind"]
    stall = state.stall
    try:
        with open_store(directory) as store:
            facts = facts_of(store, directory, how)
            facts.complete()
            listed = [each._asdict() for each in findings(facts)[:MOST_FINDINGS]]
    except RunError:
        listed = []
    members = {
        **members,
        "schema": SCHEMA,
        "name": short_name(info),
        "stall": None if stall is None else {"since_s": stall.since_ns / 1e9, "text": stall.text, "ranks": stall.ranks},
        "findings": listed,
        "exit": None
        if how is None
        else {"state": word, "status": how.status, "signal": how.signal, "seconds": how.seconds},
    }
    return {name: finite(value) for name, value in members.items()}


def _headline(found: Mapping[str, Any]) -> str:
    how = found["health"]
    since = how["since_s"]
    lasted = "" if since is None or how["end"] is not None else f" for {clock(int((found['t_s'] - since) * 1e9))}"
    reason = f": {clean(how['reason'])}" if how["reason"] else ""
    return f"{how['end'] or how['state']}{lasted}{reason}"


def _text(found: Mapping[str, Any]) -> list[str]:
    """About ten lines for people."""
    lines = [f"{clean(found['name'])}  {_headline(found)}"]
    if found["health"]["remedy"]:
        lines.append(f"  try: {clean(found['health']['remedy'])}")
    if found.get("step") is not None:
        mode = clean(found["mode"] or "") + (" (virtual)" if found["virtual"] else "")
        rates = [
            f"{compact(found[name])} {words}"
            for name, words in (("steps_per_s", "steps/s"), ("samples_per_s", "samples/s"))
            if found.get(name) is not None
        ]
        why = found["absent"].get("steps_per_s")
        lines.append("  ".join(["  step", group(found["step"]), mode, *rates, *([why] if why and not rates else [])]))
    if found.get("step_ms"):
        shares = sorted(found["phases"].items(), key=lambda one: -(one[1]["share"] or 0))
        parts = ", ".join(f"{name} {100 * one['share']:.0f} %" for name, one in shares[:5] if one["share"])
        lines.append(f"  step median {duration(found['step_ms']['median_ms'] * 1e6)}: {parts}")
    straggler = (found.get("communication") or {}).get("straggler")
    if straggler:
        lines.append(f"  {clean(straggler['sentence'])}")
    for each in found["findings"]:
        lines.append(f"  {clean(each['text'])}")
    for device in found["devices"]:
        util = device.get("util_pct")
        use = f"{UNKNOWN if util is None else util} %, {memory(device.get('mem_used_bytes'))} used"
        lines.append(f"  GPU {device.get('index')}: {use}")
    return lines
