"""Which CUDA graphs are being captured in this process, by whichever thread.

CUDA ends a capture when another thread, or another stream of its own thread, asks whether an event has come
(cudaEventQuery is refused while a capture in "global" mode, torch's usual one, is under way). So it has to be known of
all of them; the current stream can only be asked for itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from dpmon.tracer.frames import drop_frames, named_like


class Captures:
    """True while a graph is being captured. Any thread may begin and end one."""

    def __init__(self) -> None:
        self._graphs: dict[int, weakref.ref[Any]] = {}
        """By id; one that is gone, and never said that it ended, is no capture any more."""

    def __bool__(self) -> bool:
        return bool(self._graphs)

    def watch(self, kind: Any) -> None:
        """Be told by this class of graphs (torch.cuda.CUDAGraph); AttributeError if it is of another torch."""
        begin, end = kind.capture_begin, kind.capture_end
        kind.capture_begin, kind.capture_end = self._beginning(begin), self._ending(end)

    def _beginning(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> Any:
            key, graphs = id(graph), self._graphs
            try:
                # Before it begins: a question between the two would end it.
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
