"""The table `definitions`: layouts, sizes, stages, collectives and script lines, to which rows refer by number."""

from __future__ import annotations

import json
from typing import NamedTuple

from dpmon.record.history_rows import Defined, parse_definition
from dpmon.store.table import CHANGING, StoreTable

SCHEMA = """
CREATE TABLE IF NOT EXISTS definitions (
    process INTEGER NOT NULL, number INTEGER NOT NULL,
    value   TEXT NOT NULL,     -- as JSON: see dpmon.record.history_rows.Definition
    seq     INTEGER NOT NULL,  -- the last transaction that changed this row
    PRIMARY KEY (process, number)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS changed_definitions ON definitions (seq);
"""


class DefinitionRow(NamedTuple):
    """A row of `definitions`."""

    process: int
    number: int
    value: str

    @property
    def parsed(self) -> Defined:
        """The object that it defines."""
        return parse_definition(json.loads(self.value))


DEFINITIONS = StoreTable("definitions", DefinitionRow, SCHEMA, insertion="INSERT OR REPLACE", sent=CHANGING)
