"""The comparison of the modes in panel 4, in a run of many hours."""

from __future__ import annotations

from stored import Recording
from synthetic import Training

HOUR_NS = 3600 * 10**9


def test_the_comparison_goes_on_with_the_run() -> None:
    """It is made again when the run has become longer by a sixtieth, after the first hour as before it."""
    training = Training(step_ns=20 * 10**9)
    recording = Recording().add(training.begin())
    while training.now < 3 * HOUR_NS:
        recording.add(training.run(15))  # five minutes
        process = recording.state().focus
        assert process is not None
        assert process.compared is not None
        assert training.steps - process.compared.seen["dp"] <= training.steps / 60 + 1
