"""The open step: its calls, and the facts by which the rules decide where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpmon.assemble.nesting import LEARNS
from dpmon.assemble.step_totals import StepTotals
from dpmon.record.spans import Span

_SAVED = ("calls", "only_looks", "backward", "module", "look", "first_call")


class OpenStep:
    """A step that has not ended."""

    __slots__ = (*_SAVED, "looked", "part")

    def __init__(self) -> None:
        self.calls = 0
        self.only_looks = True
        """Whether no call in it trains or records gradients."""
        self.backward = False
        """Whether a backward pass ran in it."""
        self.module = self.look = 0
        """`module`: module of its first call. `look`: of its last call that neither trains nor records gradients."""
        self.first_call = 0
        """When its first call began."""
        self.looked: set[int] = set()
        """Modules of all calls that neither train nor record gradients."""
        self.part: StepTotals | None = None
        """Totals of its recorded part; None while all its blocks are held."""

    def called(self, call: Span, module: int) -> bool:
        """Add a call of `module`; return whether the call trains or records gradients."""
        if not self.calls:
            self.module, self.first_call = module, call[6]
        self.calls += 1
        if call[2] & LEARNS:
            self.only_looks = False
            return True
        self.look = module
        self.looked.add(module)
        return False

    def saved(self) -> list[Any] | None:
        """Return the state for `restored`; None while all blocks of the step are held."""
        if self.part is None:
            return None
        return [self.part.saved(), *(getattr(self, name) for name in _SAVED), sorted(self.looked)]

    @classmethod
    def restored(cls, saved: Sequence[Any] | None) -> OpenStep:
        """Restore a saved step; None makes a step without calls."""
        found = cls()
        if saved is not None:
            part, *values, looked = saved
            for name, value in zip(_SAVED, values, strict=True):
                setattr(found, name, value)
            found.looked, found.part = set(looked), StepTotals.restored(part)
        return found
