"""Records the start of a DataLoader: how long its `__iter__` took, which starts the worker processes.

Each start is an event `loader`, as long as starts are rare. A script may make a loader for every step, so the events
are limited, and each event counts the starts left out before it. Fetches are not touched.

The ring is opened at the first call, usually after the first loader has started: events wait for the ring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from operator import attrgetter
from time import monotonic_ns
from typing import Any

import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from dpmon.tracer.frames import drop_frames, named_like
from dpmon.tracer.names import class_name
from dpmon.tracer.session import Session, raise_from_signal

EVERY_NS = 1_000_000_000
"""Starts of loaders with the same facts are recorded once in this time."""
MAX_RECENT = 8
"""Largest number of events in this time, however many different loaders are started."""
MAX_EARLY = 16
"""Largest number of events that wait for the ring."""
MAX_DEPTH = 8
"""Limit of nested samplers and datasets that are searched for a length."""

_ITERABLE = "an IterableDataset is not asked for its length: torch would warn if it then yields more"


# Plain tuples: torch.compile would compile the constructors of classes that are made at run time.
_Facts = tuple[str, int | str, int | None, bool]
"""A loader: its dataset's class, the number of batches or why that is unknown, workers, whether these persist."""
_Start = tuple[_Facts, int, int]
"""The start of a loader: its facts, when it began, how long it took (ns)."""


class Loaders:
    """The loaders that one process starts."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.reset()

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        # Reentrant: a signal handler of the script may start a loader while this thread holds the lock.
        self._lock = threading.RLock()
        self._recent: dict[_Facts, int] = {}
        """When the last event with these facts was made."""
        self._early: list[dict[str, Any]] = []
        self._left_out = self._left_out_ns = 0
        """Number of starts since the last event, and how long they took."""
        self._last: _Start | None = None
        """The last of these; it is recorded when the process ends."""

    def iterating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """The traced form of DataLoader.__iter__."""
        is_compiling = torch.compiler.is_dynamo_compiling

        def __iter__(loader: Any) -> Any:
            if is_compiling():
                return original(loader)
            began = monotonic_ns()
            try:
                iterator = original(loader)
            except BaseException as error:
                drop_frames(error)
                loader = None
                raise
            try:
                self._started(iterator, began, monotonic_ns() - began)
            except Exception as error:  # noqa: BLE001 - the loader has started anyway
                self.session.fault("loader", error, fatal=False)
            return iterator

        return named_like(__iter__, original)

    def opened(self) -> None:
        """The ring was opened: write the events that waited for it."""
        try:
            with self._lock:
                early, self._early = self._early, []
                for data in early:
                    self.session.event("loader", **data)
        except Exception as error:  # noqa: BLE001 - our fault must not reach the script
            self.session.fault("loader", error, fatal=False)

    def at_exit(self) -> None:
        """The process ends: write the last start that was left out, which counts those before it."""
        try:
            with self._lock:
                if self._last is not None and self.session.ring is not None:
                    self._left_out -= 1
                    self._left_out_ns -= self._last[2]
                    self.session.event("loader", **self._data(*self._last))
        except Exception as error:  # noqa: BLE001 - the interpreter is ending
            self.session.fault("loader", error, fatal=False)

    def _started(self, iterator: Any, began_ns: int, took_ns: int) -> None:
        session = self.session
        if session.off or not issubclass(type(iterator), _BaseDataLoaderIter):
            return
        facts = _facts(iterator.__dict__)
        with self._lock:
            if not self._is_wanted(facts, began_ns):
                self._left_out += 1
                self._left_out_ns += took_ns
                self._last = facts, began_ns, took_ns
                return
            self._recent[facts] = began_ns
            data = self._data(facts, began_ns, took_ns)
            if session.ring is None:
                self._early.append(data)
            else:
                session.event("loader", **data)

    def _is_wanted(self, facts: _Facts, began_ns: int) -> bool:
        if self.session.ring is None and len(self._early) >= MAX_EARLY:
            return False
        before = self._recent.get(facts)
        if before is not None:
            return began_ns - before >= EVERY_NS
        if len(self._recent) >= MAX_RECENT:
            self._recent = {known: at for known, at in self._recent.items() if began_ns - at < EVERY_NS}
        return len(self._recent) < MAX_RECENT

    def _data(self, facts: _Facts, began_ns: int, took_ns: int) -> dict[str, Any]:
        """The event of a start, with the count of those that were left out before it; the count begins again."""
        loader, batches, workers, persistent = facts
        known = isinstance(batches, int)
        left_out, left_out_ns = self._left_out, self._left_out_ns
        self._left_out = self._left_out_ns = 0
        self._last = None
        return {
            "t_s": (began_ns - self.session.config.start_ns) / 1e9,
            "loader": loader,
            "batches": batches if known else None,
            "workers": workers,
            "persistent": persistent,
            "iter_s": took_ns / 1e9,
            "left_out": left_out,
            "left_out_s": left_out_ns / 1e9,
            "absent": {} if known else {"batches": batches},
        }


# ------------------------------------------------------------------------------------------------ facts


def _facts(iterator: dict[str, Any]) -> _Facts:
    """The facts of a loader from the attributes of its iterator, where torch has copied them."""
    try:
        batches = _batches(iterator)
    except Exception as error:  # noqa: BLE001 - the script may have changed torch's own objects
        raise_from_signal(error)
        batches = f"it cannot be read ({class_name(error)})"
    workers = iterator.get("_num_workers")
    dataset, persistent = class_name(iterator.get("_dataset")), iterator.get("_persistent_workers") is True
    return dataset, batches, workers if type(workers) is int else None, persistent


def _batches(iterator: dict[str, Any]) -> int | str:
    """The length of the loader, or why it is unknown. Runs no code of the script."""
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
    """The length of a sampler or a dataset, or why it is unknown. Asks only built-in types and torch's own classes."""
    for _ in range(MAX_DEPTH):
        kind = type(value)
        if kind in _SIZED:
            return len(value)
        inside = _INSIDE.get(kind)
        if inside is None:
            return f"the length of {class_name(value)} is computed by code that is not torch's, which is not run"
        value = inside(value)
        if type(value) is int:
            return int(value)
    return "the dataset is nested too deeply"


def _first_rows(dataset: Any) -> Any:
    first = dataset.tensors[0]
    if type(first) is not torch.Tensor:
        return first
    with torch._C.DisableTorchFunction():  # a mode of the script's would see us look
        return first.shape[0]


def _total(dataset: Any) -> Any:
    return dataset.cumulative_sizes[-1]


def _drawn(sampler: Any) -> Any:
    return sampler.data_source if sampler._num_samples is None else sampler._num_samples


_SIZED = frozenset((list, tuple, range, dict, str, bytes))
_INSIDE: dict[type, Callable[[Any], Any]] = {
    torch_data.SequentialSampler: attrgetter("data_source"),
    torch_data.RandomSampler: _drawn,
    torch_data.SubsetRandomSampler: attrgetter("indices"),
    torch_data.WeightedRandomSampler: attrgetter("num_samples"),
    torch_data.DistributedSampler: attrgetter("num_samples"),
    torch_data.TensorDataset: _first_rows,
    torch_data.Subset: attrgetter("indices"),
    torch_data.ConcatDataset: _total,
}
"""The length of torch's own samplers and datasets: a number, or another object with the same length."""
