"""Numbers the loops over loaders, and records how long `DataLoader.__iter__` took, which starts the worker processes.

A loop is one iteration over a loader. The spans of its fetches, which `span_recorder` writes, contain its number, the
number of the dataset, and the length of the loader. While starts are rare, each start also becomes a `loader` event. A
script may make a loader for every step, so events are limited, and each event counts the starts omitted before it.

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
"""Minimum time between two events with the same facts."""
MAX_RECENT = 8
"""How many events with different facts may be written within EVERY_NS."""
MAX_EARLY = 16
"""How many events are kept until the ring is open."""
MAX_DEPTH = 8
"""How many nested samplers and datasets are searched for a length."""
MAX_KNOWN = 128
"""How many loaders and datasets are remembered; a script may make a loader for every step."""
_MAX_LENGTH = (1 << 32) - 2
"""Largest length that fits into a span."""

_ITERABLE_REASON = "dpmon does not ask an IterableDataset for its length: torch would warn if it then yields more"


class _KnownLoader:
    """A loader or a dataset that has been seen."""

    __slots__ = ("length", "number", "object", "starts")

    def __init__(self, reference: ref[object]) -> None:
        self.object = reference
        self.number = 0
        """The number of a dataset, from 1."""
        self.starts = 0
        """How often a loader has started."""
        self.length: int | str | None = None
        """The result of a loader's `__len__`, or why there is none; None if it was not called yet."""


class LoaderTracer:
    """The recorder of one process's loader starts."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self.session = session
        self._recorder = recorder
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._recorder.loops.clear()
        self._loops, self._datasets = count(1), count(1)
        """The numbers for the next loop and the next dataset."""
        self._is_asking_length = False
        """Whether a loader is being asked for its length, which may start the loader again."""
        # Reentrant: a signal handler of the script may start a loader while this thread holds the lock.
        self._lock = threading.RLock()
        self._recent: dict[str, int] = {}
        """By facts: when the last event with them was made (monotonic ns)."""
        self._early: list[dict[str, Any]] = []
        self._left_out, self._left_out_s = 0, 0.0
        """Number of starts since the last event, and their total time (s)."""
        self._last: dict[str, Any] = {}
        """The event of the last of these starts; it is written when the process ends."""
        self._known_objects: dict[int, _KnownLoader] = {}
        """The loaders and their datasets, by id."""

    def wrap_iter(self, original: Function) -> Function:
        """Return the traced form of DataLoader.__iter__."""
        return wrap_rare_function(original, self.session.guard("start of a loader", fatal=False), self._record_start)

    def flush_kept_events(self) -> None:
        """Write the events that were kept until the ring was open."""
        with self.session.guard("start of a loader", fatal=False), self._lock:
            early, self._early = self._early, []
            for event in early:
                self.session.record_event("loader", **event)

    def at_exit(self) -> None:
        """Write the event of the last start if it was omitted. It counts the other starts that were omitted."""
        with self.session.guard("start of a loader", fatal=False), self._lock:
            if self._left_out and self.session.ring is not None:
                self._left_out -= 1
                self._left_out_s -= self._last["iter_s"]
                self._write(self._last)

    def _record_start(self, iterator: object, start_ns: int, loader: object) -> None:
        """Number the loop over a new iterator of a loader, and record the start unless starts are too frequent."""
        duration_ns = monotonic_ns() - start_ns
        if self.session.is_off or not issubclass(type(iterator), _BaseDataLoaderIter):
            return
        with self._lock:
            known_loader = self._known_object(loader)
            known_loader.starts += 1
            start = known_loader.starts
        # This may run the script's code.
        facts = _loader_facts(iterator.__dict__, loader, lambda: self._reported_length(loader, known_loader))
        key = str(facts)
        with self._lock:
            dataset = self._known_object(iterator.__dict__.get("_dataset"), known_loader)
            dataset.number = dataset.number or next(self._datasets)
            loop = self._assign_loop_number(iterator, dataset.number, facts["batches"])
            times = {"t_s": (start_ns - self.session.config.start_ns) / 1e9, "iter_s": duration_ns / 1e9}
            event = {**facts, **times, "start": start, "loop": loop, "dataset": dataset.number}
            if self._is_wanted(key, start_ns):
                self._recent[key] = start_ns
                self._write(event)
            else:
                self._left_out += 1
                self._left_out_s += event["iter_s"]
                self._last = event

    def _assign_loop_number(self, iterator: object, dataset: int, length: int | None) -> int:
        """Give the loop over an iterator a number, and return it. From now on, the spans of its fetches contain it."""
        loop, key, loops = next(self._loops) & MAX_SITE, id(iterator), self._recorder.loops
        sizes = dataset
        if length is not None and 0 <= length <= _MAX_LENGTH:
            sizes |= length + 1 << 32
        loops[key] = loop << SITE_AT, lambda _: sizes, ref(iterator, lambda _: loops.pop(key, None))
        return loop

    def _known_object(self, instance: object, fallback: _KnownLoader | None = None) -> _KnownLoader:
        """Return the entry of a loader or a dataset. `fallback`: used if it cannot have weak references, as a list."""
        known_loader = self._known_objects.pop(id(instance), None)
        if known_loader is None or known_loader.object() is not instance:
            try:
                known_loader = _KnownLoader(ref(instance))
            except TypeError:
                if fallback is None:
                    raise
                return fallback
            if len(self._known_objects) >= MAX_KNOWN:  # the live ones may start again
                dead_keys = [key for key, entry in self._known_objects.items() if entry.object() is None]
                for key in dead_keys or [next(iter(self._known_objects))]:
                    del self._known_objects[key]
        self._known_objects[id(instance)] = known_loader
        return known_loader

    def _reported_length(self, loader: Any, known_loader: _KnownLoader) -> int | str:
        """Return the length that a loader reports itself, or why it reports none. Its `__len__` is called once."""
        if known_loader.length is None:
            if self._is_asking_length:
                return "its length is being computed"
            self._is_asking_length = True
            try:
                with _preserve_rng_state():
                    known_loader.length = len(loader)
            except Exception as error:  # noqa: BLE001 - the script's own code may fail
                raise_from_signal(error)
                known_loader.length = f"its __len__ raised {class_name(error)}"
            finally:
                self._is_asking_length = False
        return known_loader.length

    def _write(self, event: dict[str, Any]) -> None:
        """Write the event of a start, with the count of starts omitted before it; or keep it until there is a ring."""
        event.update(left_out=self._left_out, left_out_s=self._left_out_s)
        self._left_out, self._left_out_s = 0, 0.0
        if self.session.ring is None:
            self._early.append(event)
        else:
            self.session.record_event("loader", **event)

    def _is_wanted(self, facts: str, start_ns: int) -> bool:
        """Return whether a start with these facts gets an event now."""
        if self.session.ring is None and len(self._early) >= MAX_EARLY:
            return False
        before = self._recent.get(facts)
        if before is not None:
            return start_ns - before >= EVERY_NS
        if len(self._recent) >= MAX_RECENT:
            self._recent = {key: event_ns for key, event_ns in self._recent.items() if start_ns - event_ns < EVERY_NS}
        return len(self._recent) < MAX_RECENT


# ------------------------------------------------------------------------------------------------ facts


@contextmanager
def _preserve_rng_state() -> Iterator[None]:
    """Restore the usual random generators after a block: a sampler may shuffle to count its batches."""
    python_state, torch_state = random.getstate(), torch.default_generator.get_state()
    numpy = sys.modules.get("numpy")
    numpy_state = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.default_generator.set_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


def _loader_facts(
    iterator: dict[str, object], loader: Any, get_reported_length: Callable[[], int | str]
) -> dict[str, Any]:
    """Return the fields of a loader's event. `iterator`: the attributes of its iterator, to which torch copies most.

    `get_reported_length` returns the length that the loader itself reports.
    """
    try:
        batches = _loader_length(iterator)
        if batches is None:
            batches = get_reported_length()
    except Exception as error:  # noqa: BLE001 - the script may have changed torch's own objects
        raise_from_signal(error)
        batches = f"it cannot be read ({class_name(error)})"
    attributes = vars(loader)
    workers, batch_size, sampler = iterator.get("_num_workers"), attributes.get("batch_size"), attributes.get("sampler")
    absent = {"batches": batches} if isinstance(batches, str) else {}
    if type(batch_size) is not int:
        absent["batch_size"] = "its batches are made by a sampler or by the dataset"
    return {
        "loader": class_name(iterator.get("_dataset")),
        "batches": None if isinstance(batches, str) else batches,
        "batch_size": batch_size if type(batch_size) is int else None,
        "distributed": issubclass(type(sampler), torch_data.DistributedSampler),
        "workers": workers if type(workers) is int else None,
        "persistent": iterator.get("_persistent_workers") is True,
        "pinned": iterator.get("_pin_memory") is True,
        "absent": absent,
    }


def _loader_length(iterator: dict[str, object]) -> int | str | None:
    """Return the length of the loader, or why it has none. None: the script's own code computes it."""
    if iterator.get("_dataset_kind") != _DatasetKind.Map:
        return _ITERABLE_REASON
    sampler = iterator.get("_index_sampler")
    if type(sampler) is not torch_data.BatchSampler:
        return _length(sampler)
    row_count, batch_size = _length(sampler.sampler), sampler.batch_size
    if row_count is None:
        return None
    return row_count // batch_size if sampler.drop_last else -(-row_count // batch_size)


def _length(value: Any) -> int | None:
    """Return the length of a sampler or dataset, which may change. None unless it is a built-in type or torch's own."""
    for _ in range(MAX_DEPTH):
        value_type = type(value)
        if value_type in _SIZED_TYPES:
            return len(value)
        get_inner = _LENGTH_SOURCES.get(value_type)
        if get_inner is None:
            return None
        value = get_inner(value)
        if type(value) is int:
            return int(value)
    return None


def _row_source(dataset: Any) -> object:
    """Return the number of rows of a TensorDataset, or an object of this length."""
    first = dataset.tensors[0]
    if type(first) is not torch.Tensor:
        return first
    with torch._C.DisableTorchFunction():  # a mode of the script would see our reads
        row_count, *_ = first.shape
        return row_count


_SIZED_TYPES = frozenset((list, tuple, range, dict, str, bytes))
_LENGTH_SOURCES: dict[type, Callable[[Any], object]] = {
    torch_data.SequentialSampler: attrgetter("data_source"),
    torch_data.RandomSampler: lambda sampler: (
        sampler.data_source if sampler._num_samples is None else sampler._num_samples
    ),
    torch_data.SubsetRandomSampler: attrgetter("indices"),
    torch_data.WeightedRandomSampler: attrgetter("num_samples"),
    torch_data.DistributedSampler: attrgetter("num_samples"),
    torch_data.TensorDataset: _row_source,
    torch_data.Subset: attrgetter("indices"),
    torch_data.ConcatDataset: lambda dataset: dataset.cumulative_sizes[-1],
}
"""By type of torch's own samplers and datasets: a function that returns the length or an object of the same length."""
