"""For tests on real hardware: on which device, and the table of what was measured.

`DPMON_CHECK_DEVICE=cpu` rehearses on a machine without a GPU what can be rehearsed there; tests that need the real
thing are skipped then too. `DPMON_CHECK_TABLE` names a file that takes a line of JSON for each row of the table.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "process"))  # tracing.py

Row = Callable[..., None]


@pytest.fixture(scope="session")
def device() -> str:
    """The device to train on; skips the test where there is none."""
    name = os.environ.get("DPMON_CHECK_DEVICE", "cuda:0")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return name


@pytest.fixture
def gpu(device: str) -> str:
    """The same, where only a GPU will do."""
    if not device.startswith("cuda"):
        pytest.skip("needs a GPU, not a rehearsal")
    return device


@pytest.fixture
def row() -> Row:
    """Adds a row to the table, then fails the test if the two figures are further apart than they may be."""

    def add(what: str, ours: float, theirs: float, unit: str, within: float | None = None, share: bool = True) -> None:
        apart = abs(ours - theirs) / abs(theirs) if share and theirs else abs(ours - theirs)
        good = within is None or apart <= within
        line = {"what": what, "dpmon": ours, "reference": theirs, "unit": unit, "good": good}
        line |= {"limit": within, "share": share}
        path = os.environ.get("DPMON_CHECK_TABLE")
        if path:
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
        assert good, f"{what}: {ours} against {theirs} {unit}, more than {within} apart"

    return add
