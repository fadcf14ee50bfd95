"""Errors in one line."""

from __future__ import annotations

import re
from pathlib import Path

from dpmon.tracer.core.exceptions import in_a_line
from dpmon.tracer.core.session import _DOING

RETOLD = """Caught {kind} in replica 1 on device 1.
Original Traceback (most recent call last):
  File "parallel_apply.py", line 97, in _worker
    output = module(*input, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^
{raised}
"""


class AcceleratorError(RuntimeError):
    """Has the name of torch's exception."""


def test_an_error_is_quoted_by_its_first_line() -> None:
    error = AcceleratorError("CUDA error: invalid device ordinal\nGPU device may be out of range\nFor more, look there")
    assert in_a_line(error) == "AcceleratorError: CUDA error: invalid device ordinal"


def test_an_error_of_a_replica_is_quoted_as_raised() -> None:
    raised = "ValueError: as it pleases\nand as it goes on"
    assert in_a_line(ValueError(RETOLD.format(kind="ValueError", raised=raised))) == "ValueError: as it pleases"
    raised = "torch.AcceleratorError: CUDA error: no room\nFor more, look there"
    told = in_a_line(AcceleratorError(RETOLD.format(kind="AcceleratorError", raised=raised)))
    assert told == "torch.AcceleratorError: CUDA error: no room"


def test_an_error_that_says_nothing_or_too_much() -> None:
    assert in_a_line(KeyError()) == "KeyError without a message"
    assert len(in_a_line(ValueError("x" * 1000))) == 300
    assert in_a_line(ValueError("Caught it")) == "ValueError: Caught it"


def test_a_replica_without_parameters_is_explained() -> None:
    """`next(self.parameters())` raises an exception without a message in a replica."""
    told = in_a_line(StopIteration(RETOLD.format(kind="StopIteration", raised="StopIteration")))
    assert told.startswith("StopIteration (next() found nothing: a replica has no parameters")
    assert (
        in_a_line(ValueError(RETOLD.format(kind="ValueError", raised="ValueError"))) == "ValueError without a message"
    )


def test_every_guarded_place_names_what_dpmon_was_doing() -> None:
    """The warning about a fault names what dpmon was doing, not a place in its code."""
    places = {
        match
        for path in (Path(__file__).parents[2] / "dpmon" / "tracer").rglob("*.py")
        for match in re.findall(r"\b(?:_?fault|guarded|followed)\((?:\w+, \w+, )?\"([^\"]+)\"", path.read_text())
    }
    assert len(places) > 20
    assert places == set(_DOING)
