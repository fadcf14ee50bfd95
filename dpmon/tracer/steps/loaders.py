"""Records how long `DataLoader.__iter__` took, which includes the start of the worker processes.

While starts are rare, each start becomes a `loader` event. A script may make a loader for every step, so the events are
limited, and each event counts the starts left out before it. Fetches are recorded by `recorder`.

The ring is opened at the first call, usually after the first loader has started. Events are kept until then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from time import monotonic_ns
from typing import Any
from weakref import ref

import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from dpmon.tracer.core.frames import Function, followed
from dpmon.tracer.core.module_tables import class_name
from dpmon.tracer.core.session import Session, raise_from_signal

EVERY_NS = 1_000_000_000
"""Shortest time between two events with the same facts."""
MAX_RECENT = 8
"""Most events within EVERY_NS."""
MAX_EARLY = 16
"""Most events that are kept until the ring is open."""
MAX_DEPTH = 8
"""Deepest nesting of samplers and datasets that is searched for a length."""
MAX_KNOWN = 64
"""Most loader objects whose starts are counted; a script may make a loader for every step."""

_ITERABLE = "dpmon does not ask an IterableDataset for its length: torch would warn if it then yields more"


class Loaders:
    """Records the starts of loaders in one process."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        # Reentrant: a signal handler of the script may start a loader while this thread holds the lock.
        self._lock = threading.RLock()
        self._recent: dict[str, int] = {}
        """When the last event with these facts was made."""
        self._early: list[dict[str, Any]] = []
        self._left_out, self._left_out_s = 0, 0.0
        """Number of starts since the last event, and their total time."""
        self._last: dict[str, Any] = {}
        """The last of these starts; it is recorded when the process ends."""
        self._starts: dict[int, tuple[ref[object], int]] = {}
        """By id of a loader: the loader, and how often it has started."""

    def iterating(self, original: Function) -> Function:
        """The traced form of DataLoader.__iter__."""
        return followed(original, self.session.guarded("start of a loader", fatal=False), self._started)

    def opened(self) -> None:
        """Write the events that were kept until the ring was open."""
        with self.session.guarded("start of a loader", fatal=False), self._lock:
            early, self._early = self._early, []
            for event in early:
                self.session.event("loader", **event)

    def at_exit(self) -> None:
        """Write the last start if it was left out. Its event counts the other starts that were left out."""
        with self.session.guarded("start of a loader", fatal=False), self._lock:
            if self._left_out and self.session.ring is not None:
                self._left_out -= 1
                self._left_out_s -= self._last["iter_s"]
                self._write(self._last)

    def _started(self, iterator: object, began_ns: int, loader: object) -> None:
        took_ns = monotonic_ns() - began_ns
        if self.session.off or not issubclass(type(iterator), _BaseDataLoaderIter):
            return
        facts = _facts(iterator.__dict__)
        key = str(facts)
        with self._lock:
            times = {"t_s": (began_ns - self.session.config.start_ns) / 1e9, "iter_s": took_ns / 1e9}
            event = {**facts, **times, "start": self._count(loader)}
            if self._is_wanted(key, began_ns):
                self._recent[key] = began_ns
                self._write(event)
            else:
                self._left_out += 1
                self._left_out_s += event["iter_s"]
                self._last = event

    def _write(self, event: dict[str, Any]) -> None:
        """Write the event of a start, with the starts left out before it; or keep it until there is a ring."""
        event.update(left_out=self._left_out, left_out_s=self._left_out_s)
        self._left_out, self._left_out_s = 0, 0.0
        if self.session.ring is None:
            self._early.append(event)
        else:
            self.session.event("loader", **event)

    def _count(self, loader: object) -> int:
        """Count a start of this loader object; return its number, from 1."""
        known, before = self._starts.pop(id(loader), (None, 0))
        if known is None or known() is not loader:
            known, before = ref(loader), 0
            if len(self._starts) >= MAX_KNOWN:
                del self._starts[next(iter(self._starts))]
        self._starts[id(loader)] = known, before + 1
        return before + 1

    def _is_wanted(self, facts: str, began_ns: int) -> bool:
        if self.session.ring is None and len(self._early) >= MAX_EARLY:
            return False
        before = self._recent.get(facts)
        if before is not None:
            return began_ns - before >= EVERY_NS
        if len(self._recent) >= MAX_RECENT:
            self._recent = {known: at for known, at in self._recent.items() if began_ns - at < EVERY_NS}
        return len(self._recent) < MAX_RECENT


# ------------------------------------------------------------------------------------------------ facts


def _facts(iterator: dict[str, object]) -> dict[str, Any]:
    """Return the facts of a loader, which torch copies to the attributes of its iterator."""
    try:
        batches = _batches(iterator)
    except Exception as error:  # noqa: BLE001 - the script may have changed torch's own objects
        raise_from_signal(error)
        batches = f"it cannot be read ({class_name(error)})"
    workers, known = iterator.get("_num_workers"), isinstance(batches, int)
    return {
        "loader": class_name(iterator.get("_dataset")),
        "batches": batches if known else None,
        "workers": workers if type(workers) is int else None,
        "persistent": iterator.get("_persistent_workers") is True,
        "pinned": iterator.get("_pin_memory") is True,
        "absent": {} if known else {"batches": batches},
    }


def _batches(iterator: dict[str, object]) -> int | str:
    """Return the length of the loader, or why it is unknown. Runs no code of the script."""
    if iterator.get("_dataset_kind") != _DatasetKind.Map:
        return _ITERABLE
    sampler = iterator.get("_index_sampler")
    if type(sampler) is not torch_data.BatchSampler:
        return _length(sampler)
    rows, size = _length(sampler.sampler), sampler.batch_size
    if isinstance(rows, str):
        return rows
    return rows // size if sampler.drop_last else -(-rows // size)


def _length(value: Any) -> int | str:
    """Return the length of a sampler or dataset, or why it is unknown. Reads only built-in types and torch's own."""
    for _ in range(MAX_DEPTH):
        kind = type(value)
        if kind in _SIZED:
            return len(value)
        inside = _INSIDE.get(kind)
        if inside is None:
            return f"the length of {class_name(value)} is computed by the script's code, which dpmon does not run"
        value = inside(value)
        if type(value) is int:
            return int(value)
    return "the dataset is nested too deeply"


def _first_rows(dataset: Any) -> object:
    first = dataset.tensors[0]
    if type(first) is not torch.Tensor:
        return first
    with torch._C.DisableTorchFunction():  # a mode of the script would see our reads
        return first.shape[0]


_SIZED = frozenset((list, tuple, range, dict, str, bytes))
_INSIDE: dict[type, Callable[[Any], object]] = {
    torch_data.SequentialSampler: attrgetter("data_source"),
    torch_data.RandomSampler: lambda known: known.data_source if known._num_samples is None else known._num_samples,
    torch_data.SubsetRandomSampler: attrgetter("indices"),
    torch_data.WeightedRandomSampler: attrgetter("num_samples"),
    torch_data.DistributedSampler: attrgetter("num_samples"),
    torch_data.TensorDataset: _first_rows,
    torch_data.Subset: attrgetter("indices"),
    torch_data.ConcatDataset: lambda dataset: dataset.cumulative_sizes[-1],
}
"""By type of torch's own samplers and datasets: a function that returns the length, or an object of the same length."""
