"""Reads everything from a store, in a form that can be compared."""

from __future__ import annotations

from typing import Any

from dpmon.store.store_queries import Store

_ALL = 1 << 40


def everything(store: Store) -> dict[str, Any]:
    """Return the rows of each query. Rows of different processes may interleave in any order, so they are sorted."""
    kinds = ("process", "mode", "pause", "input", "host", "device", "warning", "exit")
    everybody = sorted({ring.process for ring in store.rings.values()})
    return {
        "tallies": {process: dict(sorted(store.tallies(process=process).items())) for process in everybody},
        "seconds": {
            (start, key): tally
            for process in everybody
            for start, _, key, tally in store.tally_rows(process=process, widest=1)
        },
        "times": _sorted(store.time_rows()),
        "seconds of times": _sorted(store.time_rows(widest=1)),
        "gaps": _sorted(store.gaps(_ALL)),
        "shapes": _sorted(store.shapes()),
        "steps": {process: store.steps(_ALL, process=process) for process in everybody},
        "calls": {process: store.calls(_ALL, process=process) for process in everybody},
        "events": {kind: _sorted(store.events(kind)) for kind in kinds},
        "dropped": store.dropped,
        "processes": store.processes,
    }


def _sorted(rows: Any) -> list[str]:
    return sorted(map(repr, rows))


def alike(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Assert that the answers of all queries are equal."""
    for name in wanted:
        assert found[name] == wanted[name], name
