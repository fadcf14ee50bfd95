"""Fixtures for tests on real hardware: the device, and the table of measurements.

`DPMON_CHECK_DEVICE=cpu` runs the tests on a machine without a GPU, and skips the tests that need one.
`DPMON_CHECK_TABLE` names a file to which each row of the table is added as a line of JSON.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
import torch

Row = Callable[..., None]


@pytest.fixture(scope="session")
def device() -> str:
    """The device to train on; skip the test if there is none."""
    name = os.environ.get("DPMON_CHECK_DEVICE", "cuda:0")
    if name.startswith("cuda") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    return name


@pytest.fixture
def gpu(device: str) -> str:
    """The device, for tests that need a GPU."""
    if not device.startswith("cuda"):
        pytest.skip("needs a GPU, not a rehearsal")
    return device


@pytest.fixture
def row() -> Row:
    """A function that adds a row to the table, and fails if the two figures differ too much."""

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
