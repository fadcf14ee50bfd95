"""Finding the modules that a script calls itself: bare roots, which no wrapper announces.

For the first turns of the loop, and for one turn now and then, Module.__call__ itself is watched; the class of every
root that turns up gets a `__call__` of its own, and the watch ends, so that the hundreds of modules inside a network
cost nothing. Nothing is put on an instance: what is pickled or copied is the script's alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from time import monotonic_ns
from types import MethodType
from typing import Any

import torch

from dpmon.tracer.calls import Calls
from dpmon.tracer.frames import first_argument, named_like
from dpmon.tracer.names import class_name
from dpmon.tracer.plain import short_way
from dpmon.tracer.session import Session
from dpmon.tracer.tables import modules_of, parameters_of

__all__ = ["Roots"]

Module = torch.nn.Module

WATCH_TURNS = 16
"""Turns without a new root after which the watch ends."""
WATCH_EVERY, WATCH_EVERY_SHORT = 256, 4096
"""Turns between two short watches, for roots that appear later: more of them if they are short, up to a second's worth.

A watch changes the class of all modules, and Python looks up anew what it knew of them: some turns are slower for it.
"""


EXPECTED, EXPECT_NS = 64, 250_000_000
"""So many times a watch begins whenever a loop is over, and then not again so soon: epochs may be very short."""


class _RootCall:
    """The `__call__` of a root's class: on an instance the traced call, on the class what was there before."""

    __slots__ = ("_called", "_original", "_watcher")

    def __init__(self, roots: Roots) -> None:
        self._called, self._original, self._watcher = roots.called, roots.original, roots.watcher

    def __get__(self, module: Any, owner: Any = None) -> Any:
        now = Module.__call__
        if module is None:  # torch.compile looks here, and takes what it gets for a part of the class
            return self._original if now is self._watcher else now
        if now is not self._original and now is not self._watcher:
            return MethodType(now, module)  # the script, or torch.fx, has put its own there: it comes first
        return MethodType(self._called, module)

    def __reduce__(self) -> Any:
        # Classes may be pickled by value (cloudpickle): where they are read, dpmon need not exist.
        return getattr, (Module, "__call__")


class Roots:
    """The watch over one process's modules."""

    def __init__(self, session: Session, calls: Calls) -> None:
        self.session = session
        self.calls = calls
        self.original: Callable[..., Any] = torch.nn.Module.__call__
        self.called = short_way(calls, self.original, self._slow)
        self.watcher = named_like(short_way(calls, self.original, self._slow), self.original)
        self._classes: dict[int, Any] = {}
        """By id, weak references to the classes of the roots that were found.

        Not a WeakSet: a metaclass may compare and hash as it likes. Not the classes: the methods of one refer to the
        globals of `__main__`. Whoever holds these when Python ends keeps the script's objects from their finalisers.
        """
        self._verdicts: dict[int, tuple[Any, bool]] = {}
        self._watching = False
        self._rested = (0, 0)
        """Turn and time (monotonic, ns) of the last end of a watch."""
        self._expected = 0
        """How often another model was expected, and (monotonic, ns) when it was last."""
        self._expected_ns = 0
        self._told = False
        """Whether a warning has said that calls are not seen, and why."""
        self._found = True
        """Whether a root turned up since the last look."""
        self._always = False
        """A root's class has a `__call__` of its own: the watch cannot end."""

    def _slow(self, module: Any, args: Any, kwargs: Any) -> Any:
        """A module's call that the short way does not take; the caller takes our frames out of a traceback."""
        try:
            root = self._starts_call(module)
        except Exception as error:  # noqa: BLE001 - ours must not reach the script
            self.session.fault("roots", error)
            root = False
        if root:
            return self.calls.root_call(self.original, module, args, kwargs)
        if "_is_replica" not in module.__dict__:
            return self.original(module, *args, **kwargs)
        local = self.session.local
        local.depth += 2  # inside a replica nothing is a root
        try:
            return self.original(module, *args, **kwargs)
        finally:
            local.depth -= 2

    def _starts_call(self, module: Any) -> bool:
        """Whether this is the outermost call of a module worth recording."""
        session, steps = self.session, self.calls.steps
        if session.local.depth or session.off or steps.inside() or torch._C._current_graph_task_id() != -1:
            return False  # the last: autograd runs it again for a checkpoint, on whichever thread
        if not self._is_root(module):
            return False
        self._register(type(module))
        return True

    def _is_root(self, module: Any) -> bool:
        known = self._verdicts.get(id(module))
        if known is not None and known[0]() is module:
            return known[1]
        if "_is_replica" in module.__dict__:
            return False
        # A DataParallel is traced by its forward. A module without parameters is a loss or a transform.
        verdict = not isinstance(module, torch.nn.DataParallel) and (next(parameters_of(module), None) is not None)
        if len(self._verdicts) > 4096:
            self._verdicts.clear()
        self._verdicts[id(module)] = (weakref.ref(module), verdict)
        if verdict and not self._told:
            self._look_above(module)
        return verdict

    def _look_above(self, module: Any) -> None:
        """Say, once, if `module` is a part of one whose forward the script calls itself: only the parts are seen."""
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_name == "forward":
                owner = first_argument(frame)
                parts = modules_of(owner) if isinstance(owner, torch.nn.Module) else ()
                if owner is not module and any(part is module for part in parts):
                    self._tell(
                        f"{class_name(owner)}.forward() is called directly, past Module.__call__, where a call "
                        "cannot be seen: the calls of the modules in it are recorded in its place"
                    )
                    return
            frame = frame.f_back

    def unseen(self) -> None:
        """Say that a training goes on and no call of a module was ever seen in it."""
        self._tell(
            "an optimizer steps, but no call of a module was seen: one whose forward() is called directly, or by a "
            "compiled function, cannot be traced"
        )

    def _tell(self, text: str) -> None:
        self._told = True
        if self.session.ready():
            self.session.warn(text)

    def _register(self, kind: type) -> None:
        key = id(kind)
        known = self._classes.get(key)
        if known is not None and known() is kind:
            return
        self._found = True
        self._classes[key] = weakref.ref(kind, self._class_gone(key))
        if any(isinstance(base.__dict__.get("__call__"), _RootCall) for base in kind.__mro__):
            return  # it derives from a root's class and has its call
        try:
            if kind.__call__ is not self.watcher:
                raise TypeError("a __call__ of its own")
            kind.__call__ = _RootCall(self)  # type: ignore[method-assign, assignment]  # a descriptor
        except Exception:  # noqa: BLE001 - a class may refuse in any way; then the watch simply goes on
            self._always = True

    def _class_gone(self, key: int) -> Callable[[Any], object]:
        classes = self._classes
        return lambda _: classes.pop(key, None)

    # ---------------------------------------------------------------- the watch

    def watch(self) -> None:
        """Watch every module from now on."""
        if not self._watching and torch.nn.Module.__call__ is self.original:
            self._watching = True
            torch.nn.Module.__call__ = self.watcher  # type: ignore[method-assign]

    def rest(self) -> None:
        """End the watch; roots found so far go on being traced."""
        if self._watching and not self._always and torch.nn.Module.__call__ is self.watcher:
            self._watching = False
            torch.nn.Module.__call__ = self.original  # type: ignore[method-assign]

    def expect(self) -> bool:
        """Watch for a turn, for another model may come; whether that watch begins now."""
        now = monotonic_ns()
        often = self._expected >= EXPECTED and now - self._expected_ns < EXPECT_NS
        if self._watching or self.session.off or often:
            return False
        self._expected += 1
        self._expected_ns = now
        self.watch()
        return self._watching

    def turns_closed(self) -> int:
        """Called after some turns of the loop, to start or end a watch; returns after how many to be called again."""
        if self._watching and self._found:
            self._found = False
            return WATCH_TURNS
        if self._watching:
            self.rest()
            return max(WATCH_EVERY, min(WATCH_EVERY_SHORT, self._turns_a_second()))
        self.watch()
        return 1

    def _turns_a_second(self) -> int:
        steps = self.calls.steps
        turns, since = self._rested
        self._rested = steps.number, steps.start
        return (steps.number - turns) * 1_000_000_000 // max(steps.start - since, 1)
