"""Numbers the loops over loaders, and records how long `DataLoader.__iter__` took, which starts the worker processes.

A loop is one iteration over a loader. The spans of its fetches, which `span_recorder` writes, contain its number, the
number of the dataset, and the length of the loader. A start also becomes a `loader` event, but at most one per second
after the first starts: a script may make a loader for every step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from signal import Signals
from time import monotonic_ns
from typing import Any
from weakref import ref

import torch
from torch.utils import data as torch_data
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from dpmon.record.span_format import MAX_SITE, SITE_AT
from dpmon.tracer.core.hidden_frames import Function, wrap_rare_function
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.module_tables import class_name
from dpmon.tracer.core.session import Session, raise_from_signal
from dpmon.tracer.steps.span_recorder import SpanRecorder

FREE_EVENTS, MIN_EVENT_INTERVAL_NS = 64, 1_000_000_000
"""The first FREE_EVENTS starts have an event; later events are at least MIN_EVENT_INTERVAL_NS apart."""
_MAX_LENGTH = (1 << 32) - 2
"""Largest length that fits into a span."""
_ITERABLE_REASON = "dpmon does not ask an IterableDataset for its length: torch would warn if it then yields more"


@dataclass(eq=False)
class SeenObject:
    """A loader or a dataset that has been seen."""

    number: int = 0
    """The number of a dataset, from 1."""
    starts: int = 0
    """How often a loader has started."""
    length: int | str | None = None
    """The number of a loader's batches, or why it is unknown; None until the loader was asked."""


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
        self._event_count = self._last_event_ns = 0
        self._seen: IdentityTable[SeenObject] = IdentityTable()
        """The living loaders and their datasets."""

    def wrap_iter(self, original: Function) -> Function:
        """Return the traced form of DataLoader.__iter__."""
        return wrap_rare_function(original, self.session.guard("start of a loader", fatal=False), self._record_start)

    def _record_start(self, iterator: object, start_ns: int, loader: object) -> None:
        """Number the loop over a new iterator of a loader, and record the start."""
        iter_s = (monotonic_ns() - start_ns) / 1e9
        if self.session.is_off or not issubclass(type(iterator), _BaseDataLoaderIter):
            return
        seen_loader = self._see(loader)
        seen_loader.starts += 1
        try:
            dataset = self._see(iterator.__dict__.get("_dataset"))
        except TypeError:  # for example a list, which has no weak references
            dataset = seen_loader
        dataset.number = dataset.number or next(self._datasets)
        facts = _loader_facts(iterator.__dict__, loader, self.length_of(iterator, seen_loader))
        facts["start"], facts["dataset"] = seen_loader.starts, dataset.number
        facts["loop"] = self._assign_loop_number(iterator, dataset.number, facts["batches"])
        if self._event_count < FREE_EVENTS or start_ns - self._last_event_ns >= MIN_EVENT_INTERVAL_NS:
            self._event_count += 1
            self._last_event_ns = start_ns
            t_s = (start_ns - self.session.config.start_ns) / 1e9
            self.session.record_event("loader", t_s=t_s, iter_s=iter_s, **facts)

    def _assign_loop_number(self, iterator: object, dataset: int, length: int | None) -> int:
        """Give the loop over an iterator a number, and return it. From now on, the spans of its fetches contain it."""
        loop, key, loops = next(self._loops) & MAX_SITE, id(iterator), self._recorder.loops
        sizes = dataset
        if length is not None and 0 <= length <= _MAX_LENGTH:
            sizes |= length + 1 << 32
        loops[key] = loop << SITE_AT, lambda _: sizes, ref(iterator, lambda _: loops.pop(key, None))
        return loop

    def describe_killed_worker(self) -> str | None:
        """Return which signal killed a worker of a running loop, and the peak memory of ended children; or None."""
        for _, _, reference in self._recorder.loops.values():
            iterator: Any = reference()  # type: ignore[operator]
            for worker in getattr(iterator, "_workers", ()):
                if (worker.exitcode or 0) < 0:
                    from resource import RUSAGE_CHILDREN, getrusage  # a module that torch does not import

                    name, peak_mib = Signals(-worker.exitcode).name, getrusage(RUSAGE_CHILDREN).ru_maxrss >> 10
                    where = f"before batch {iterator._rcvd_idx + 1}, with at most {peak_mib:,} MiB resident"
                    return f"a DataLoader worker (pid {worker.pid}) was killed by {name} {where}"
        return None

    def _see(self, instance: object) -> SeenObject:
        """Return the entry of a loader or a dataset. Raises TypeError if it cannot have weak references."""
        return self._seen.get(instance) or self._seen.set(instance, SeenObject())

    def length_of(self, iterator: Any, seen_loader: SeenObject) -> int | str:
        """Return the number of batches of an iterator, or why it is unknown. Each loader is asked once.

        This may run the script's `__len__` of a sampler or a dataset.
        """
        if iterator.__dict__.get("_dataset_kind") != _DatasetKind.Map:
            return _ITERABLE_REASON
        if seen_loader.length is None:
            try:
                with _preserve_rng_state(), torch._C.DisableTorchFunction():  # hides the call from the script's modes
                    seen_loader.length = len(iterator)
            except Exception as error:  # noqa: BLE001 - the script's own code may fail
                raise_from_signal(error)
                seen_loader.length = f"its __len__ raised {class_name(error)}"
        return seen_loader.length


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


def _loader_facts(iterator: dict[str, object], loader: Any, batches: int | str) -> dict[str, Any]:
    """Return the fields of a loader's event. `iterator`: the attributes of its iterator, to which torch copies most."""
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
