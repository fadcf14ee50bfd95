"""Facts of a run without a store, for tests of what is concluded from them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dpmon.model.run_analysis import RunAnalysis
from dpmon.model.run_events import RunEvents

_NOTHING: dict[str, Any] = {
    **dict.fromkeys(("modes", "others", "batches", "replicas", "devices", "memory", "longest", "gaps"), ()),
    **dict.fromkeys(("loaders", "paused", "losses", "unfit", "nodes"), ()),
    **dict.fromkeys(("host", "compared", "communication", "last_step_ns", "end_ns", "death", "raised")),
    "spent": {}, "names": {}, "processes": [], "announced": RunEvents(), "until_ns": 0,
    "store": SimpleNamespace(pruned=0),
}  # fmt: skip


def known(**facts: Any) -> RunAnalysis:
    """Return a run with these facts and no others. A run that has ended lasts until `end_ns`."""
    return changed(object.__new__(RunAnalysis), **{**_NOTHING, **facts})


def changed(before: RunAnalysis, **facts: Any) -> RunAnalysis:
    """Return the facts of a run with some of them replaced."""
    found = object.__new__(RunAnalysis)
    vars(found).update({**vars(before), **facts})
    if "spent" in facts:
        found.spent_by_process = facts.get("spent_by_process", {0: facts["spent"]})
    if facts.get("end_ns") is not None:
        found.until_ns = facts["end_ns"]
    return found
