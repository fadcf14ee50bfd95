"""The comparison that tests of bit-identity rest on."""

from __future__ import annotations

from alternatives import as_alone


def test_the_same_needs_no_other_run() -> None:
    assert as_alone(1, 1, lambda: 1 // 0) == 1


def test_what_torch_gives_alone_too_is_right() -> None:
    runs = iter([1, 1, 2])
    assert as_alone(2, 1, lambda: next(runs)) == 2


def test_what_torch_never_gives_alone_is_wrong() -> None:
    runs = iter([1, 3, 1])
    assert as_alone(2, 1, lambda: next(runs), tries=3) == 1
    assert list(runs) == []
