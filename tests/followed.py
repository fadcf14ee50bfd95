"""Reads the rows of a run as a mirror does, from a command that may end at any time; and looks them up there."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

from dpmon.mirror.node_links import LineReceived, LinkClosed, LinkOpened, NodeLinks, Report

TRAINING = """\
import time, pathlib, torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
while not pathlib.Path("go").exists():
    optimizer.zero_grad()
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


class Reader:
    """Reads the rows of a run over links as a mirror does: whole chunks, each row above what it has."""

    def __init__(self, words: list[str], run: str, *others: list[str]) -> None:
        """`others`: commands of more machines, whose rows do not count."""
        self.offset = 0
        self.ids: list[int] = []
        self.closed: list[LinkClosed] = []
        self.opened = 0
        self._chunk: list[int] = []
        self.ended = False
        ways = [words, *others]
        self.links = NodeLinks(
            len(ways), lambda node: [*ways[node], "export", run, "--follow", "--from", str(self.offset)]
        )

    def poll(self) -> list[Report]:
        """Take what has come."""
        reports = self.links.poll(0.05)
        for report in reports:
            if isinstance(report, LinkOpened) and report.node == 0:
                self.opened += 1
                self._chunk = []
            elif isinstance(report, LinkClosed):
                self.closed.append(report)
            elif isinstance(report, LineReceived) and report.node == 0:
                self._take(json.loads(report.text))
        return reports

    def _take(self, line: dict[str, object]) -> None:
        if "beat" in line:
            self.ids += self._chunk
            self._chunk = []
            self.offset = int(str(line["offset"]))
            self.ended = "exit" in line
        elif line.get("table") in ("steps", "calls", "events", "losses"):
            columns, rows = line["columns"], line["rows"]
            assert isinstance(columns, list)
            assert isinstance(rows, list)
            self._chunk += [row[columns.index("id")] for row in rows]


def ids_of(directory: Path) -> list[int]:
    """Return the ids of all rows of a finished run, but for its end, which comes with the last chunk."""
    with closing(sqlite3.connect(directory / "history.sqlite")) as history:
        return sorted(
            number
            for table in ("steps", "calls", "events", "losses")
            for (number,) in history.execute(
                f"SELECT id FROM {table} WHERE {'kind' if table == 'events' else 0} != 'exit'"
            )
        )
