"""Finds runs by their names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from dpmon.run.rundir import ID, INFO_FILE, RunError, RunInfo, check_directory, load_info, runs_directory, stand_ins

_IDS_NAMED = 8


def list_runs(unreadable: list[str] | None = None) -> list[tuple[Path, RunInfo]]:
    """All readable runs of this user, oldest first, including those in replacement directories.

    `unreadable`: a list that receives an error for each run with an unreadable run.json.
    """
    found = []
    for runs in (runs_directory(), *stand_ins()):
        try:
            if runs != runs_directory():
                check_directory(runs.parent)
            names = os.listdir(runs)
        except (OSError, RunError):
            continue
        for name in names:
            if ID.fullmatch(name):
                try:
                    found.append((runs / name, load_info(runs / name)))
                except RunError as error:
                    # Without the file the run is just being created, or was just deleted.
                    if unreadable is not None and os.path.lexists(runs / name / INFO_FILE):
                        unreadable.append(str(error))
    return sorted(found, key=lambda run: (run[1].started_unix, run[0].name))


def short_name(info: RunInfo) -> str:
    """The run's display name: its name and the four digits that distinguish it from others of that name."""
    return f"{info.name}-{info.id[-4:]}"


def newest_run(goes_on: Callable[[RunInfo], bool]) -> Path:
    """The newest live run, else the newest of all; RunError if there is none."""
    going = [directory for directory, info in reversed(list_runs()) if goes_on(info)]
    return going[0] if going else find_run()


def find_run(what: str = "last", *, only: bool = False, goes_on: Callable[[RunInfo], bool] | None = None) -> Path:
    """The run named `what`: `last`, an id, a short name, a name (its latest run), or a unique prefix of one.

    RunError if no run or several runs match. `only`: RunError also if several runs have that name. With `goes_on`, a
    name means its live run; RunError if several are live.
    """
    runs = list_runs()
    if not runs:
        raise RunError(f"there is no run yet in {runs_directory()}")
    if what == "last":
        return runs[-1][0]
    for meaning in (lambda run: run.id, short_name, lambda run: run.name):
        same = [(directory, info) for directory, info in runs if meaning(info) == what]
        if only and len(same) > 1:
            raise RunError(f"{what!r} could be any of {len(same)} runs: {_listed([info.id for _, info in same])}")
        going = [run for run in same if goes_on is not None and goes_on(run[1])] if len(same) > 1 else []
        if len(going) > 1:
            raise RunError(f"{what!r} matches {len(going)} live runs: {_listed([info.id for _, info in going])}")
        if same:
            return (going or same)[-1][0]
    starts = [run for run in runs if what and _begins(run[1], what, only)]
    if len(starts) > 1:
        names = _listed([short_name(info) for _, info in starts])
        raise RunError(f"{what!r} could be any of {len(starts)} runs: {names}")
    if not starts:
        raise RunError(f"there is no run {what!r}; `dpmon ls` lists them")
    return starts[0][0]


def _begins(info: RunInfo, what: str, only: bool) -> bool:
    """Whether the run's id or short name begins with `what`; with `only`, only the id counts."""
    return info.id.startswith(what) or (not only and short_name(info).startswith(what))


def _listed(ids: list[str]) -> str:
    """The newest ids, the newest first."""
    shown = ", ".join(ids[: -_IDS_NAMED - 1 : -1])
    return shown if len(ids) <= _IDS_NAMED else f"{shown} and {len(ids) - _IDS_NAMED} more (dpmon ls lists them)"
