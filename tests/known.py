"""Facts of a run without a store, for tests of what is concluded from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import RunEvents

_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("modes", "other_process_modes", "batches", "replicas", "devices", "memory", "longest_steps"), ()),
    **dict.fromkeys(("gaps", "loaders", "paused", "losses", "first_invalid_losses", "nodes"), ()),
    **dict.fromkeys(("host", "mode_comparison", "communication", "last_step_ns", "end_ns", "death", "raised")),
    "time_by_activity": {}, "names": {}, "processes": [], "announced": RunEvents(), "until_ns": 0,
    "store": SimpleNamespace(pruned=0),
}  # fmt: skip


def known(**facts: Any) -> RunAnalysis:
    """Return a run with these facts and no others. A run that has ended lasts until `end_ns`."""
    return changed(object.__new__(RunAnalysis), **{**_NOTHING, **facts})


def changed(before: RunAnalysis, **facts: Any) -> RunAnalysis:
    """Return the facts of a run with some of them replaced."""
    found = object.__new__(RunAnalysis)
    vars(found).update({**vars(before), **facts})
    if "time_by_activity" in facts:
        found.spent_by_process = facts.get("spent_by_process", {0: facts["time_by_activity"]})
    if facts.get("end_ns") is not None:
        found.until_ns = facts["end_ns"]
    return found
