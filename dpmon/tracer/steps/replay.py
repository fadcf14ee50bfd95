"""Repeats the first batches of each loader, as if loading cost nothing (`--replay`, and `dpmon try`).

Epochs keep their lengths if torch knows them. The training sees few samples, so what it learns is worthless.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from dpmon.tracer.core.hidden_frames import Function

_LOADERS = 8
"""Most loaders with kept batches: a script may make a new loader for each epoch."""


class _KeptBatches:
    def __init__(self, iterator: Any) -> None:
        self.batches: list[Any] = []
        self.length: int | None = None
        """Batches in an epoch; None if unknown, as for an IterableDataset before its end."""
        self.sampler = iterator._index_sampler
        """Shared by all iterators of a loader. It is kept alive, so that no other loader gets its id."""
        with suppress(Exception):  # the script's own sampler may fail
            self.length = len(iterator)


def wrap_next_with_replay(fetch: Function, most: int) -> Function:
    """A `_BaseDataLoaderIter.__next__` that loads at most `most` batches of each loader, and then repeats them."""
    loaders: dict[int, _KeptBatches] = {}

    def __next__(iterator: Any) -> Any:
        key = id(iterator._index_sampler)  # a list has no weak reference and no hash
        known = loaders.get(key)
        if known is None:
            if len(loaders) == _LOADERS:
                del loaders[next(iter(loaders))]
            known = loaders[key] = _KeptBatches(iterator)
        number = iterator._num_yielded  # torch sets it to 0 when a loader with persistent workers starts again
        if number == known.length:
            raise StopIteration
        if number < len(known.batches) or len(known.batches) >= most:
            iterator._num_yielded += 1
            return known.batches[number % len(known.batches)]
        try:
            batch = fetch(iterator)
        except StopIteration:
            known.length = number
            raise
        known.batches.append(batch)
        return batch

    return __next__
