"""Numbers the loops over loaders, and records how long `DataLoader.__iter__` took, which starts the worker processes.

A loop is one start of a loader. The spans of its fetches, which `span_recorder` writes, have its number, the number of
the dataset and the length of the loader. While starts are rare, each one also becomes a `loader` event. A script may
make a loader for every step, so the events are limited, and each event counts the starts left out before it.

The ring is opened at the first call, usually after the first loader has started. Events are kept until then.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from operator import attrgetter
from time import monotonic_ns
from typing import Any
from weakref import ref

import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from dpmon.record.span_format import MAX_SITE, SITE_AT
from dpmon.tracer.core.hidden_frames import Function, wrap_rare_function
from dpmon.tracer.core.module_tables import class_name
from dpmon.tracer.core.session import Session, raise_from_signal
from dpmon.tracer.steps.span_recorder import SpanRecorder

EVERY_NS = 1_000_000_000
"""Shortest time between two events with the same facts."""
MAX_RECENT = 8
"""Most events within EVERY_NS."""
MAX_EARLY = 16
"""Most events that are kept until the ring is open."""
MAX_DEPTH = 8
"""Deepest nesting of samplers and datasets that is searched for a length."""
MAX_KNOWN = 128
"""Most loader and dataset objects that are known by number; a script may make a loader for every step."""
_LONGEST = (1 << 32) - 2
"""Largest length that fits into a span."""

_ITERABLE = "dpmon does not ask an IterableDataset for its length: torch would warn if it then yields more"


class _KnownLoader:
    """A loader or a dataset that has been seen."""

    __slots__ = ("length", "number", "object", "starts")

    def __init__(self, known: ref[object]) -> None:
        self.object = known
        self.number = 0
        """The number of a dataset, from 1."""
        self.starts = 0
        """How often a loader has started."""
        self.length: int | str | None = None
        """The answer of a loader's `__len__`, or why there is none; None if it was not asked."""


class LoaderTracer:
    """Records the starts of loaders in one process."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self.session = session
        self._recorder = recorder
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._recorder.loops.clear()
        self._loops, self._datasets = count(1), count(1)
        """The next numbers of a loop and of a dataset."""
        self._asks = False
        """Whether a loader is being asked for its length, which may start the loader again."""
        # Reentrant: a signal handler of the script may start a loader while this thread holds the lock.
        self._lock = threading.RLock()
        self._recent: dict[str, int] = {}
        """When the last event with these facts was made."""
        self._early: list[dict[str, Any]] = []
        self._left_out, self._left_out_s = 0, 0.0
        """Number of starts since the last event, and their total time."""
        self._last: dict[str, Any] = {}
        """The last of these starts; it is recorded when the process ends."""
        self._known: dict[int, _KnownLoader] = {}
        """The loaders and their datasets, by id."""

    def wrap_iter(self, original: Function) -> Function:
        """The traced form of DataLoader.__iter__."""
        return wrap_rare_function(original, self.session.guard("start of a loader", fatal=False), self._record_start)

    def flush_kept_events(self) -> None:
        """Write the events that were kept until the ring was open."""
        with self.session.guard("start of a loader", fatal=False), self._lock:
            early, self._early = self._early, []
            for event in early:
                self.session.record_event("loader", **event)

    def at_exit(self) -> None:
        """Write the last start if it was left out. Its event counts the other starts that were left out."""
        with self.session.guard("start of a loader", fatal=False), self._lock:
            if self._left_out and self.session.ring is not None:
                self._left_out -= 1
                self._left_out_s -= self._last["iter_s"]
                self._write(self._last)

    def _record_start(self, iterator: object, began_ns: int, loader: object) -> None:
        took_ns = monotonic_ns() - began_ns
        if self.session.off or not issubclass(type(iterator), _BaseDataLoaderIter):
            return
        with self._lock:
            known = self._known_object(loader)
            known.starts += 1
            start = known.starts
        facts = _loader_facts(
            iterator.__dict__, loader, lambda: self._reported_length(loader, known)
        )  # may run the script's code
        key = str(facts)
        with self._lock:
            dataset = self._known_object(iterator.__dict__.get("_dataset"), known)
            dataset.number = dataset.number or next(self._datasets)
            loop = self._assign_loop_number(iterator, dataset.number, facts["batches"])
            times = {"t_s": (began_ns - self.session.config.start_ns) / 1e9, "iter_s": took_ns / 1e9}
            event = {**facts, **times, "start": start, "loop": loop, "dataset": dataset.number}
            if self._is_wanted(key, began_ns):
                self._recent[key] = began_ns
                self._write(event)
            else:
                self._left_out += 1
                self._left_out_s += event["iter_s"]
                self._last = event

    def _assign_loop_number(self, iterator: object, dataset: int, length: int | None) -> int:
        """Give the loop over an iterator a number; from now on, its fetches have it."""
        loop, key, loops = next(self._loops) & MAX_SITE, id(iterator), self._recorder.loops
        sizes = dataset | (0 if length is None or not 0 <= length <= _LONGEST else length + 1) << 32
        loops[key] = loop << SITE_AT, lambda _: sizes, ref(iterator, lambda _: loops.pop(key, None))
        return loop

    def _known_object(self, found: object, instead: _KnownLoader | None = None) -> _KnownLoader:
        """Return what is known about a loader or a dataset; `instead`: about one without weak references (a list)."""
        known = self._known.pop(id(found), None)
        if known is None or known.object() is not found:
            try:
                known = _KnownLoader(ref(found))
            except TypeError:
                if instead is None:
                    raise
                return instead
            if len(self._known) >= MAX_KNOWN:  # the live ones may start again
                dead = [key for key, one in self._known.items() if one.object() is None]
                for key in dead or [next(iter(self._known))]:
                    del self._known[key]
        self._known[id(found)] = known
        return known

    def _reported_length(self, loader: Any, known: _KnownLoader) -> int | str:
        """Return the length that a loader reports itself, or why it does not. It is asked once."""
        if known.length is None:
            if self._asks:
                return "its length is being computed"
            self._asks = True
            try:
                with _preserve_rng_state():
                    known.length = len(loader)
            except Exception as error:  # noqa: BLE001 - the script's own code may fail
                raise_from_signal(error)
                known.length = f"its __len__ raised {class_name(error)}"
            finally:
                self._asks = False
        return known.length

    def _write(self, event: dict[str, Any]) -> None:
        """Write the event of a start, with the starts left out before it; or keep it until there is a ring."""
        event.update(left_out=self._left_out, left_out_s=self._left_out_s)
        self._left_out, self._left_out_s = 0, 0.0
        if self.session.ring is None:
            self._early.append(event)
        else:
            self.session.record_event("loader", **event)

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


@contextmanager
def _preserve_rng_state() -> Iterator[None]:
    """Undo what a block does to the usual random generators: a sampler may shuffle to count its batches."""
    numpy, state, torchs = sys.modules.get("numpy"), random.getstate(), torch.default_generator.get_state()
    numpys = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        torch.default_generator.set_state(torchs)
        if numpy is not None:
            numpy.random.set_state(numpys)


def _loader_facts(iterator: dict[str, object], loader: Any, ask: Callable[[], int | str]) -> dict[str, Any]:
    """Return the facts of a loader, which torch copies to the attributes of its iterator.

    `ask` returns the length that the loader reports.
    """
    try:
        batches = _loader_length(iterator)
        if batches is None:
            batches = ask()
    except Exception as error:  # noqa: BLE001 - the script may have changed torch's own objects
        raise_from_signal(error)
        batches = f"it cannot be read ({class_name(error)})"
    own = vars(loader)
    workers, size, sampler = iterator.get("_num_workers"), own.get("batch_size"), own.get("sampler")
    absent = {"batches": batches} if isinstance(batches, str) else {}
    if type(size) is not int:
        absent["batch_size"] = "its batches are made by a sampler or by the dataset"
    return {
        "loader": class_name(iterator.get("_dataset")),
        "batches": None if isinstance(batches, str) else batches,
        "batch_size": size if type(size) is int else None,
        "distributed": issubclass(type(sampler), torch_data.DistributedSampler),
        "workers": workers if type(workers) is int else None,
        "persistent": iterator.get("_persistent_workers") is True,
        "pinned": iterator.get("_pin_memory") is True,
        "absent": absent,
    }


def _loader_length(iterator: dict[str, object]) -> int | str | None:
    """Return the length of the loader, or why it has none. None: the script's own code computes it."""
    if iterator.get("_dataset_kind") != _DatasetKind.Map:
        return _ITERABLE
    sampler = iterator.get("_index_sampler")
    if type(sampler) is not torch_data.BatchSampler:
        return _length(sampler)
    rows, size = _length(sampler.sampler), sampler.batch_size
    if rows is None:
        return None
    return rows // size if sampler.drop_last else -(-rows // size)


def _length(value: Any) -> int | None:
    """Return the length of a sampler or dataset, which may change. None unless it is a built-in type or torch's own."""
    for _ in range(MAX_DEPTH):
        kind = type(value)
        if kind in _SIZED:
            return len(value)
        inside = _INSIDE.get(kind)
        if inside is None:
            return None
        value = inside(value)
        if type(value) is int:
            return int(value)
    return None


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
