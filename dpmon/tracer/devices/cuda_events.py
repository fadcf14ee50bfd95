"""Records and queries torch.cuda's events, except while a CUDA graph is captured.

An event recorded during a capture would become a part of the graph, and a query would end the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from dpmon.tracer.core.hidden_frames import wrap_rare_function
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.session import Session

_cuda: Any = torch.cuda  # its type hints differ between versions of torch
MAX_STREAMS = 256


def watch_captures(classes: Iterable[Any], session: Session) -> IdentityTable[bool]:
    """Wrap the methods of classes such as torch.cuda.CUDAGraph; return the graphs that are being captured.

    Any thread may begin and end a capture. During a capture in "global" mode, torch's usual mode, CUDA refuses
    cudaEventQuery and ends the capture, even if another thread or another stream queries the event. torch reports only
    the state of the current stream. A deleted graph no longer counts, even if its capture never ended.
    """
    graphs: IdentityTable[bool] = IdentityTable()
    guard = session.guard("capture of a graph", fatal=False)

    def on_begin(graph: object, *_: object, **__: object) -> None:
        session.has_captured_graph = True
        graphs.set(graph, True)

    def on_error(error: object, graph: object, *_: object, **__: object) -> None:
        graphs.pop(graph)

    def on_end(result: object, start_ns: int, graph: object) -> None:
        graphs.pop(graph)

    for cls in classes:
        with suppress(AttributeError):  # another version of torch
            begin, end = cls.capture_begin, cls.capture_end
            # Noted before the capture begins: a query in between would end it.
            cls.capture_begin = wrap_rare_function(
                begin, guard, lambda *_, **__: None, before=on_begin, on_error=on_error
            )
            cls.capture_end = wrap_rare_function(end, guard, on_end, on_error=on_error)
    return graphs


@cache
def _captures(session: Session) -> IdentityTable[bool]:
    """Watch captures from the first call on, before the first timed phase; earlier captures are missed."""
    classes = (_cuda.CUDAGraph, getattr(getattr(torch, "accelerator", None), "Graph", None))
    return watch_captures(classes, session)


class TorchEvents:
    """The events of torch.cuda, and the streams on which they are recorded."""

    def __init__(self, session: Session) -> None:
        self._current_handle = torch._C._cuda_getCurrentRawStream
        """Returns the handle of a device's current stream. To make a stream object costs ten times as much."""
        self._streams: dict[tuple[int, int], Any] = {}
        # Methods of torch's C class, because those of the Python classes only forward the calls, at twice the cost.
        event_class = torch._C._CudaEventBase
        self._record = event_class.record
        self.is_done: Callable[[Any], bool] = event_class.query
        self.elapsed_ms: Callable[[Any, Any], float] = event_class.elapsed_time
        self._is_captured = torch._C._cuda_isCurrentStreamCapturing
        self._captures = _captures(session)

    def is_capturing(self) -> bool:
        """Return whether this thread's current stream, or any graph in this process, is being captured."""
        return len(self._captures) > 0 or bool(self._is_captured())

    def create_event(self) -> object:
        """Return an event with timing. CUDA creates it when it is first recorded."""
        return _cuda.Event(enable_timing=True)

    def record(self, event: Any, device: int) -> None:
        """Record an event on this thread's current stream of a device."""
        key = device, self._current_handle(device)
        stream = self._streams.get(key)
        if stream is None:
            if len(self._streams) >= MAX_STREAMS:
                self._streams.clear()
            stream = self._streams[key] = _cuda.current_stream(device)
        self._record(event, stream)
