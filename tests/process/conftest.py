"""Fixtures for tests of real runs: a screen in a real terminal, an unrelated process, a file system."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.screen_harness import StartTerminal, TerminalRun, screen_terminals


@pytest.fixture
def run(tmp_path: Path) -> Iterator[TerminalRun]:
    """A run whose records the test writes itself."""
    made = TerminalRun(tmp_path)
    yield made
    made.log.close()


@pytest.fixture
def terminal(run: TerminalRun) -> Iterator[StartTerminal]:
    """Start terminals that show the screen of `run`."""
    yield from screen_terminals(run)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process that belongs to no run, and is no child of the commands under test."""
    words = [sys.executable, "-c", "print(1, flush=True); import time; time.sleep(600)"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


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
