"""Tracks the CUDA graphs that are being captured in this process, on any thread.

During a capture in "global" mode, torch's usual mode, CUDA refuses cudaEventQuery and ends the capture, even if another
thread or another stream queries the event. torch reports only the state of the current stream, so the tracer tracks all
captures itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dpmon.tracer.frames import drop_frames, named_like


class Captures:
    """True while a graph is being captured. Any thread may begin and end a capture."""

    def __init__(self) -> None:
        self._graphs: dict[int, weakref.ref[Any]] = {}
        """Graphs being captured, by id. A deleted graph no longer counts, even if its capture never ended."""

    def __bool__(self) -> bool:
        return bool(self._graphs)

    def watch(self, kind: Any) -> None:
        """Wrap the methods of a graph class such as torch.cuda.CUDAGraph. Raises AttributeError if torch lacks them."""
        begin, end = kind.capture_begin, kind.capture_end
        kind.capture_begin, kind.capture_end = self._beginning(begin), self._ending(end)

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            key, graphs = id(graph), self._graphs
            try:
                # Set before the capture begins: a query in between would end it.
                graphs[key] = weakref.ref(graph, lambda _: graphs.pop(key, None))
                return original(graph, *args, **kwargs)
            except BaseException as error:
                graphs.pop(key, None)
                drop_frames(error)
                graph, args, kwargs = None, (), {}
                raise

        return named_like(capture_begin, original)

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_end(graph: Any, *args: Any, **kwargs: Any) -> Any:
            key = id(graph)
            try:
                return original(graph, *args, **kwargs)
            except BaseException as error:
                drop_frames(error)
                graph, args, kwargs = None, (), {}
                raise
            finally:
                self._graphs.pop(key, None)

        return named_like(capture_end, original)
