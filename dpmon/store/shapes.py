"""The table `shapes`: how often a model was called with the same sizes of inputs and outputs."""

from __future__ import annotations

import json
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dpmon.record.history_rows import Layout
from dpmon.record.record_types import CallRow
from dpmon.record.span_format import Flag
from dpmon.store.table import CHANGING, SUM, StoreTable

if TYPE_CHECKING:
    from dpmon.store.store_queries import Store

SCHEMA = """
CREATE TABLE IF NOT EXISTS shapes (
    process INTEGER NOT NULL, mode TEXT NOT NULL,
    kind    INTEGER NOT NULL,  -- flags of their steps; in a training step, calls without gradients evaluate
    layout  INTEGER NOT NULL,
    virtual INTEGER NOT NULL,  -- whether the replicas are virtual
    sizes   TEXT NOT NULL,     -- as JSON: the definitions of inputs and outputs of the call, then those of each
                               -- replica, or stage, inputs and outputs of each stage. 0: unknown, or there are too many
    untimed INTEGER NOT NULL,  -- why a device time is missing: an index of dpmon.record.record_types.UNTIMED
    calls   INTEGER NOT NULL,
    seq     INTEGER NOT NULL,  -- the last transaction that changed this row
    PRIMARY KEY (process, mode, kind, layout, virtual, sizes, untimed)
) WITHOUT ROWID;
"""


class CallShape(NamedTuple):
    """A row of `shapes`. Layout and sizes are numbers of definitions."""

    process: int
    mode: str
    kind: int
    layout: int
    virtual: int
    sizes: str
    untimed: int
    calls: int = 0

    @property
    def inputs(self) -> int:
        """Inputs of the whole call."""
        inputs, *_ = json.loads(self.sizes)
        return int(inputs)

    @property
    def replicas(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of each replica."""
        _, _, *parts = json.loads(self.sizes)
        return tuple(tuple(part) for part in parts if len(part) == 2)

    @property
    def stages(self) -> tuple[tuple[int, int, int], ...]:
        """Definition, inputs and outputs (0: it did not finish) of each stage."""
        _, _, *parts = json.loads(self.sizes)
        return tuple(tuple(part) for part in parts if len(part) == 3)

    @property
    def without_sizes(self) -> CallShape:
        """A copy of the calls with all sizes unknown."""
        _, _, *parts = json.loads(self.sizes)
        return self._replace(sizes=_to_text(0, 0, *((*part[:-2], 0, 0) for part in parts)))


SHAPES = StoreTable("shapes", CallShape, SCHEMA, combined={"calls": SUM}, sent=CHANGING)


def shape_of_call(process: int, call: CallRow, kind: int) -> CallShape:
    """Return the shape of a call, with no calls counted yet. `kind`: the flags for its row."""
    parts = call.parts
    if parts is None:
        sizes, untimed_reason = _to_text(call.inputs, call.outputs, (call.inputs, call.outputs)), 0
    else:
        part_sizes = [*(part[:2] for part in parts.replicas), *(part[:3] for part in parts.stages)]
        sizes = _to_text(call.inputs, call.outputs, *part_sizes)
        untimed_reason = parts.untimed_reason if None in (parts.device_ms or ()) else 0
    return CallShape(process, call.mode, kind, call.layout, int(call.flags & Flag.VIRTUAL > 0), sizes, untimed_reason)


@lru_cache(4096)
def _to_text(*sizes: int | tuple[int, ...]) -> str:
    return json.dumps(sizes, separators=(",", ":"))


def read_shapes(store: Store) -> list[CallShape]:
    """Return the sizes of inputs and outputs of all calls so far, with the number of calls of each."""
    return list(SHAPES.select(store.connection))


def read_wrapper_types(store: Store, process: int) -> set[str]:
    """Return the wrappers through which the process has called its models so far (`via` of their calls)."""
    rows = store.query("SELECT DISTINCT layout FROM shapes WHERE process = ?", (process,))
    values = store.definitions(process, [layout for (layout,) in rows]).values()
    return {value.via for value in values if isinstance(value, Layout) and value.via is not None}
