"""What dpmon says about the calls that a short watch for new models may have missed."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.tracer_harness import run_traced

pytestmark = pytest.mark.slow

SCRIPT = """
import sys, time, torch
from torch import nn
roots = sys.modules["dpmon.tracer.calls.roots"]
class Own(nn.Module):
    "Its class has a __call__ of its own, so that only a watch sees its calls."
    def __init__(self):
        super().__init__()
        self.part = nn.Linear(2, 3)
    def forward(self, x):
        return self.part(x)
    def __call__(self, *args):
        return super().__call__(*args)
known, x = nn.LayerNorm(2), torch.ones(3, 2)
for _ in range(20):
    known(x)  # until the first watch ends
if sys.argv[1] == "missed":
    roots.FREE_WATCHES, roots.MIN_WATCH_INTERVAL_NS = 0, 1 << 62  # no watch begins because a module is made
    roots.MIN_WATCH_WAIT_NS = roots.MAX_WATCH_WAIT_NS = 1 << 62
else:
    roots.MIN_WATCH_WAIT_NS = roots.MAX_WATCH_WAIT_NS = 0  # every other step is watched
    time.sleep(0.2)  # longer than the wait for the first short watch
    for _ in range(int(sys.argv[2])):
        known(x)
own = Own()
for _ in range(3):
    own(x)
    if sys.argv[1] == "missed":
        time.sleep(0.2)
        known(x)
"""


@pytest.mark.parametrize("before", [1, 2, 3, 4])
def test_a_new_model_is_seen_from_its_first_call_whenever_a_watch_ends(tmp_path: Path, before: int) -> None:
    """A watch ends at the beginning of a call; if the model was made during the watch, that is its first call."""
    run = run_traced(tmp_path, SCRIPT, "new", before)
    assert len(run.calls()) == 20 + before + 3
    assert run.complaints == []


def test_a_model_that_was_called_before_the_watch_is_reported(tmp_path: Path) -> None:
    run = run_traced(tmp_path, SCRIPT, "missed")
    assert [call.root for call in run.calls() if call.root == "Own"] != ["Own"] * 3
    (text,) = run.complaints
    assert text.startswith("Own was called by the script at step ")
