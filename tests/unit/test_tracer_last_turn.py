"""The turn under way when Python comes to its end: it is written, unless an exception has cut it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from dpmon.tracer.steps import Steps
from rings import everything, opened

from dpmon.record.codec import kind_of
from dpmon.ring import Ring


@pytest.mark.parametrize(
    ("error", "samples", "backward", "written"),
    [
        (KeyboardInterrupt, 16, 0, 0),  # it was to learn, and did not come to that: no evaluation of 16 samples
        (KeyboardInterrupt, -1, 0, 0),
        (KeyboardInterrupt, 16, 5, 1),
        (KeyboardInterrupt, -3 - 16, 0, 1),  # an evaluation
        (None, 16, 0, 1),
    ],
)
def test_the_last_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Any, samples: int, backward: int, written: int
) -> None:
    monkeypatch.setenv("DPMON_RUN", str(tmp_path))
    monkeypatch.delattr(sys, "last_type", raising=False)
    if error is not None:
        monkeypatch.setattr(sys, "last_type", error, raising=False)
    ring = Ring(str(tmp_path / "ring"), process=0)
    session: Any = SimpleNamespace(
        ring=ring, timing=None, off=False, renew_at=1 << 60, fault=pytest.fail, local=SimpleNamespace(depth=0)
    )
    steps = Steps(session)
    steps.attach(ring)
    steps._begin(1)
    steps.calls, steps.samples, steps.backward, steps.forward, steps.last = 1, samples, backward, 20, 50
    steps.at_exit()
    with opened(str(tmp_path / "ring")) as reader:
        assert [kind_of(payload) for payload in everything(reader)] == ["step"] * written
