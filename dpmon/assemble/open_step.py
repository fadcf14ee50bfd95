"""The open step: its calls, and the facts by which the rules decide where it ends."""

from __future__ import annotations

from dpmon.assemble.nesting import LEARNS
from dpmon.assemble.step_totals import StepTotals
from dpmon.record.spans import Span


class OpenStep:
    """A step that has not ended."""

    __slots__ = (
        *("backward", "calls", "evaluated", "first_call", "last_evaluated", "module", "only_evaluates", "part"),
    )

    def __init__(self) -> None:
        self.calls = 0
        self.only_evaluates = True
        """Whether it has only evaluation calls, which neither train nor record gradients."""
        self.backward = False
        """Whether a backward pass ran in it."""
        self.module = self.last_evaluated = 0
        """`module`: module of its first call. `last_evaluated`: module of its last evaluation call."""
        self.first_call = 0
        """When its first call began."""
        self.evaluated: set[int] = set()
        """Modules of all evaluation calls."""
        self.part: StepTotals | None = None
        """Totals of its recorded part; None while all its blocks are held."""

    def called(self, call: Span, module: int) -> bool:
        """Add a call of `module`; return whether the call trains or records gradients."""
        if not self.calls:
            self.module, self.first_call = module, call[6]
        self.calls += 1
        if call[2] & LEARNS:
            self.only_evaluates = False
            return True
        self.last_evaluated = module
        self.evaluated.add(module)
        return False
