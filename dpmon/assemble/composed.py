"""Composes calls from a script's own use of scatter, replicate, parallel_apply and gather.

Such a call has one parallel_apply, the scatters and replicates before it in the same step, and the next gather in that
step. It lasts from the first of these to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dpmon.assemble.call_parts import unnumbered_call
from dpmon.assemble.definitions import KnownDefinitions
from dpmon.assemble.device_waits import Pending
from dpmon.record.kinds import Size
from dpmon.record.spans import Flag, Kind, Span

_NOT_SCATTERED = "the script did not scatter in this step"
_NO_INPUTS = "the script did not scatter: only the inputs of the replicas are known"
_NOT_REPLICATED = "the script did not replicate in this step"
_NOT_GATHERED = "the script did not gather the outputs of the replicas"
_MAX_LEAVES = 512
"""Most sizes in one call."""


class _PartialCall:
    """The unfinished call of one thread."""

    __slots__ = ("apply", "primitives", "replicas")

    def __init__(self) -> None:
        self.primitives: list[Span] = []
        self.apply: Span | None = None
        self.replicas: Sequence[Span] = ()


class Composer:
    """Composes the calls of one process and passes each complete call to `finish`."""

    def __init__(self, known: KnownDefinitions, finish: Callable[[Pending], None]) -> None:
        self._known = known
        self._finish = finish
        self._partial: dict[int, _PartialCall] = {}

    def take(self, span: Span, replicas: Sequence[Span]) -> int:
        """Take the span of a primitive, and the spans of its `replicas` if it is a parallel_apply.

        Return the definition of the call's inputs for a parallel_apply, if it is known; else 0.
        """
        kind, thread = span.kind, span.thread
        partial = self._partial.get(thread)
        if partial is not None and partial.apply is not None and kind != Kind.GATHER:
            self.flush(thread)
            partial = None
        if partial is not None and partial.primitives and partial.primitives[0].inside != span.inside:
            del self._partial[thread]
            partial = None
        failed = span.flags & Flag.FAILED
        if kind == Kind.GATHER:
            if partial is not None and partial.apply is not None and not failed:
                partial.primitives.append(span)
                self.flush(thread)
            return 0
        if kind == Kind.PARALLEL_APPLY or not failed:
            if partial is None:
                partial = self._partial[thread] = _PartialCall()
            partial.primitives.append(span)
        if kind != Kind.PARALLEL_APPLY or partial is None:
            return 0
        partial.apply, partial.replicas = span, replicas
        inputs = self._inputs(partial)
        if failed:
            self.flush(thread)
        return inputs

    def flush(self, thread: int) -> None:
        """Finish the call of a thread: it has its gather, or no gather follows."""
        partial = self._partial.pop(thread, None)
        if partial is not None and partial.apply is not None and partial.apply.site in self._known.layouts:
            self._finish(self._composed_call(partial, partial.apply))

    def flush_all(self) -> None:
        """Finish all calls, because the step is over."""
        for thread in list(self._partial):
            self.flush(thread)

    def _inputs(self, partial: _PartialCall) -> int:
        """Return the sizes of all scattered inputs. Argument numbers continue from one scatter to the next."""
        numbers = [self._known.known_sizes(one.inputs) for one in partial.primitives if one.kind == Kind.SCATTER]
        numbers = [number for number in numbers if number]
        if len(numbers) <= 1:
            return numbers[0] if numbers else 0
        leaves: list[Size] = []
        given = 0
        for number in numbers:
            last = -1
            for size in self._known.sizes[number]:
                argument, dot, below = size.path.partition(".")
                if argument.isdecimal() and len(argument) < 9:
                    last = max(last, int(argument))
                    size = replace(size, path=f"{given + int(argument)}{dot}{below}")
                leaves.append(size)
            given += last + 1
        return self._known.add_own(tuple(leaves[:_MAX_LEAVES]))

    def _composed_call(self, partial: _PartialCall, apply: Span) -> Pending:
        start, last = partial.primitives[0].start, partial.primitives[-1]
        outputs = self._known.known_sizes(last.outputs) if last.kind == Kind.GATHER else 0
        absent = _absent(partial, bool(outputs), bool(apply.flags & Flag.FAILED))
        layout = self._known.with_absent(apply.site, absent)
        took = max(last.end - start, 0)
        whole = apply._replace(start=start, took=took, inputs=self._inputs(partial), outputs=outputs)
        replicas = [one for one in partial.replicas if one.kind == Kind.REPLICA]
        return unnumbered_call(self._known, whole, layout, [*partial.primitives, *replicas])


def _absent(partial: _PartialCall, gathered: bool, failed: bool) -> dict[str, str]:
    """Return the reasons for missing parts."""
    kinds = {one.kind for one in partial.primitives}
    absent = {}
    if Kind.SCATTER not in kinds:
        absent["scatter"] = _NOT_SCATTERED
        absent["inputs"] = _NO_INPUTS
    if Kind.REPLICATE not in kinds:
        absent["replicate"] = _NOT_REPLICATED
    if not gathered and not failed:
        absent["gather"] = absent["outputs"] = _NOT_GATHERED
    return absent
