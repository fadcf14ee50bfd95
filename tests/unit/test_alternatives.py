"""The comparison that tests of bit-identity use."""

from __future__ import annotations

from alternatives import as_alone


def test_an_equal_result_needs_no_other_run() -> None:
    assert as_alone(1, 1, lambda: 1 // 0) == 1


def test_a_result_that_torch_also_gives_alone_is_right() -> None:
    runs = iter([1, 1, 2])
    assert as_alone(2, 1, lambda: next(runs)) == 2


def test_a_result_that_torch_never_gives_alone_is_wrong() -> None:
    runs = iter([1, 3, 1])
    assert as_alone(2, 1, lambda: next(runs), tries=3) == 1
    assert list(runs) == []
