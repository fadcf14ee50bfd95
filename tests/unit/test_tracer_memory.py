"""When the memory of a process is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dpmon.tracer.core.session import FaultGuard
from dpmon.tracer.memory.measurement import EVERY_NS, NEVER, Memory


@pytest.mark.parametrize(("error", "due"), [(KeyboardInterrupt, 7 + EVERY_NS), (ZeroDivisionError, NEVER)])
def test_an_interrupt_ends_one_measurement_and_a_fault_ends_all(error: type[BaseException], due: int) -> None:
    session = SimpleNamespace(ring=object(), fault=lambda *_: None)
    session.guarded = lambda where, fatal: FaultGuard(session, where, fatal)  # type: ignore[arg-type]
    recorder = SimpleNamespace(has_run_backward=True, stepped=1, on_backward=None)
    memory: Any = Memory(session, recorder, SimpleNamespace())  # type: ignore[arg-type]

    def raises(*_: object) -> None:
        raise error

    memory._report = raises
    assert [memory.look(1), memory.look(2)] == [0, 0]
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            memory.look(7)
    else:
        assert memory.look(7) == NEVER
    assert memory._due == due
