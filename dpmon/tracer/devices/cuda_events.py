"""Events of torch.cuda, and the captures of CUDA graphs.

During a capture, no event is recorded or queried: an event would become a part of the graph, and a query would end the
capture.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from functools import cache
from typing import Any

import torch

from dpmon.tracer.core.hidden_frames import wrap_rare_function
from dpmon.tracer.core.session import Session

_cuda: Any = torch.cuda  # its type hints differ between versions of torch
MAX_STREAMS = 256


def watch_captures(kinds: Iterable[Any], guard: AbstractContextManager[object]) -> dict[int, weakref.ref[object]]:
    """Wrap the methods of classes such as torch.cuda.CUDAGraph; return the graphs that are being captured, by id.

    Any thread may begin and end a capture. During a capture in "global" mode, torch's usual mode, CUDA refuses
    cudaEventQuery and ends the capture, even if another thread or another stream queries the event. torch reports only
    the state of the current stream. A deleted graph no longer counts, even if its capture never ended.
    """
    graphs: dict[int, weakref.ref[object]] = {}

    def begins(graph: object, *_: object, **__: object) -> None:
        key = id(graph)
        graphs[key] = weakref.ref(graph, lambda _: graphs.pop(key, None))

    def failed(error: object, graph: object, *_: object, **__: object) -> None:
        graphs.pop(id(graph), None)

    def ended(result: object, began: int, graph: object) -> None:
        graphs.pop(id(graph), None)

    for kind in kinds:
        with suppress(AttributeError):  # another version of torch
            begin, end = kind.capture_begin, kind.capture_end
            # Noted before the capture begins: a query in between would end it.
            kind.capture_begin = wrap_rare_function(begin, guard, lambda *_, **__: None, before=begins, failed=failed)
            kind.capture_end = wrap_rare_function(end, guard, ended, failed=failed)
    return graphs


@cache
def _captures(session: Session) -> dict[int, weakref.ref[object]]:
    """Watch captures from the first call on, before the first timed phase; earlier captures are missed."""
    kinds = (_cuda.CUDAGraph, getattr(getattr(torch, "accelerator", None), "Graph", None))
    return watch_captures(kinds, session.guard("capture of a graph", fatal=False))


class TorchEvents:
    """Events of torch.cuda."""

    def __init__(self, session: Session) -> None:
        self._current: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        """Function that returns the handle of a device's current stream. A stream object costs ten times as much."""
        self._streams: dict[tuple[int, int], object] = {}
        base = getattr(torch._C, "_CudaEventBase", None)
        kind: Any = base if isinstance(base, type) and issubclass(_cuda.Event, base) else _cuda.Event
        # Methods of torch's C class, because those of the Python classes only forward the calls, at twice the cost.
        self._record = kind.record
        self.done: Callable[[Any], bool] = kind.query
        self.between_ms: Callable[[Any, Any], float] = kind.elapsed_time
        self._is_captured = (
            getattr(torch._C, "_cuda_isCurrentStreamCapturing", None) or _cuda.is_current_stream_capturing
        )
        self._captures = _captures(session)

    def is_capturing(self) -> bool:
        """Whether this thread's current stream is being captured, or any graph in this process."""
        return bool(self._captures) or bool(self._is_captured())

    def create_event(self) -> object:
        """An event with timing; CUDA creates it when it is first recorded."""
        return _cuda.Event(enable_timing=True)

    def record(self, event: object, device: int) -> None:
        """Record on this thread's current stream."""
        if self._current is None:
            self._record(event, _cuda.current_stream(device))
            return
        key = device, self._current(device)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                self._streams.clear()
            stream = self._streams[key] = _cuda.current_stream(device)
        self._record(event, stream)
