"""Fixtures for tests of the screen in a real terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from screens import Run, Start, terminals


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run whose records the test writes itself."""
    made = Run(tmp_path)
    yield made
    made.log.close()


@pytest.fixture
def terminal(run: Run) -> Iterator[Start]:
    """Start terminals that show the screen of `run`."""
    yield from terminals(run)
