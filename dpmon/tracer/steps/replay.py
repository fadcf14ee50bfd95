"""Repeats the first batches of each loader, as if loading cost nothing (for `dpmon try`).

Epochs keep their lengths if torch knows them. The training sees few samples, so the trained model is meaningless.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from dpmon.tracer.core.hidden_frames import Function

_MAX_LOADERS = 8
"""How many loaders can have kept batches: a script may make a new loader for each epoch."""


class _KeptBatches:
    """The kept batches of one loader."""

    def __init__(self, iterator: Any) -> None:
        self.batches: list[Any] = []
        self.length: int | None = None
        """Number of batches in an epoch; None if unknown, as for an IterableDataset before its end."""
        self.sampler = iterator._index_sampler
        """Shared by all iterators of a loader. It is kept alive, so that no other loader gets its id."""
        with suppress(Exception):  # the script's own sampler may fail
            self.length = len(iterator)


def wrap_next_with_replay(fetch: Function, max_batches: int) -> Function:
    """Return a `_BaseDataLoaderIter.__next__` that loads `max_batches` batches of each loader, then repeats them."""
    loaders: dict[int, _KeptBatches] = {}

    def __next__(iterator: Any) -> Any:
        key = id(iterator._index_sampler)  # a list has no weak reference and no hash
        kept = loaders.get(key)
        if kept is None:
            if len(loaders) == _MAX_LOADERS:
                del loaders[next(iter(loaders))]
            kept = loaders[key] = _KeptBatches(iterator)
        index = iterator._num_yielded  # torch sets it to 0 when a loader with persistent workers starts again
        if index == kept.length:
            raise StopIteration
        if index < len(kept.batches) or len(kept.batches) >= max_batches:
            iterator._num_yielded += 1
            return kept.batches[index % len(kept.batches)]
        try:
            batch = fetch(iterator)
        except StopIteration:
            kept.length = index
            raise
        kept.batches.append(batch)
        return batch

    return __next__
