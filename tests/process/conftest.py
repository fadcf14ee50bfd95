"""Fixtures for tests of the screen in a real terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from screens import Run, Start, terminals


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run that the test conducts."""
    made = Run(tmp_path)
    yield made
    made.log.close()


@pytest.fixture
def terminal(run: Run) -> Iterator[Start]:
    """Opens terminals with the screen of `run` in them."""
    yield from terminals(run)
