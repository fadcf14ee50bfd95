"""Errors in one line."""

from __future__ import annotations

import pytest

from dpmon.tracer.core.exception_text import one_line_text

RETOLD = """Caught {kind} in replica 1 on device 1.
Original Traceback (most recent call last):
  File "parallel_apply.py", line 97, in _worker
    output = module(*input, **kwargs)
             ^^^^^^^^^^^^^^^^^^^^^^^^
{raised}
"""


class AcceleratorError(RuntimeError):
    """Has the name of torch's exception."""


def retold(kind: type[BaseException], raised: str) -> BaseException:
    """Return the exception that torch raises for one of a replica."""
    return kind(RETOLD.format(kind=kind.__name__, raised=raised))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (AcceleratorError("CUDA error: no device\nFor more, look there"), "AcceleratorError: CUDA error: no device"),
        (retold(ValueError, "ValueError: as it pleases\nand as it goes on"), "ValueError: as it pleases"),
        (
            retold(AcceleratorError, "torch.AcceleratorError: CUDA error: no room\nFor more, look there"),
            "torch.AcceleratorError: CUDA error: no room",
        ),
        (KeyError(), "KeyError without a message"),
        (ValueError("Caught it"), "ValueError: Caught it"),
        (retold(ValueError, "ValueError"), "ValueError without a message"),
    ],
)
def test_an_error_is_quoted_by_its_first_line_as_it_was_raised(error: BaseException, line: str) -> None:
    assert one_line_text(error) == line
    assert len(one_line_text(ValueError("x" * 1000))) == 300


def test_a_replica_without_parameters_is_explained() -> None:
    """`next(self.parameters())` raises an exception without a message in a replica."""
    told = one_line_text(retold(StopIteration, "StopIteration"))
    assert told.startswith("StopIteration (next() found nothing: a replica has no parameters")
