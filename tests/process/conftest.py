"""Fixtures for tests of the screen in a real terminal."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
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


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Mount a file system of a given size (MiB); skip the test if this is not possible here."""
    place = tmp_path / "disk"

    def made(size: int, options: str = "rw") -> Path:
        place.mkdir()
        words = ["mount", "-t", "tmpfs", "-o", f"size={size}m,{options}", "tmpfs", str(place)]
        if subprocess.run(words, capture_output=True).returncode:
            pytest.skip("no file system can be mounted here")
        return place

    yield made
    if place.exists():
        subprocess.run(["umount", "-l", str(place)], check=False, capture_output=True)
