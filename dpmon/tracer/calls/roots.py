"""Finds the modules that a script calls directly: bare roots, which have no wrapper.

A watch replaces Module.__call__ during the first steps of the loop, whenever modules are made, and from time to time
for one step. The class of every root that the watch finds gets its own `__call__`. Then the watch ends, so that the
hundreds of modules inside a network cost nothing. At the end of a watch, classes of modules that the script may call
later get a `__call__`, too: models that are not part of another model, and their larger parts. Instances are never
changed, so pickles and copies hold only the script's own data.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from types import MethodType
from typing import Any

import torch

from dpmon.tracer.calls.call_wrapper import HIDING, CallTracer
from dpmon.tracer.calls.traced_modules import TracedModule
from dpmon.tracer.core.hidden_frames import Function, first_argument, iter_callers
from dpmon.tracer.core.module_tables import MODULES, PARAMETERS, class_name, modules_of, tensors_of, values_of
from dpmon.tracer.core.session import Session
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

Module = torch.nn.Module

WATCH_STEPS = 16
"""Steps without a new root after which the watch ends."""
WATCH_SOON_NS, WATCH_EVERY_NS = 20_000_000, 20_000_000_000
"""Waits between short watches of one step each, which find roots that appear later.

The first wait is 2 * WATCH_SOON_NS. Each wait is twice as long as the one before, up to WATCH_EVERY_NS. A watch changes
torch's class Module, so Python discards its caches for all modules, and dozens of steps are slower.
"""

MAX_MADE = 1 << 14
"""Most modules remembered (weakly) between two watches; the oldest are forgotten first."""
MAX_LATE = 8
"""Limit of the number of warnings that say that earlier calls of a class may be missing."""
WRAPPED = frozenset(("module", "_orig_mod"))
"""Attributes in which wrappers hold their model: `module` in DataParallel, AveragedModel and others, `_orig_mod` in the
wrapper of torch.compile."""
EXPECTED, EXPECT_NS = 64, 250_000_000
"""Limits of the watches that `watch_one_step` begins, for example at the end of each loop: the first EXPECTED are
unlimited, later ones are at least EXPECT_NS apart. Epochs may be very short."""


class _RootCall:
    """Descriptor for the `__call__` of a root's class: instances get the traced function, the class the original."""

    def __init__(self, roots: RootFinder) -> None:
        self._called, self._original, self._watcher = roots.called, roots.original, roots.watcher
        self._threads = roots.recorder.threads

    def __get__(self, module: object, owner: object = None) -> object:
        now = Module.__call__
        if module is None:  # torch.compile looks here, and expects the class's own function
            return self._original if now is self._watcher else now
        if now is not self._original and now is not self._watcher:
            return MethodType(now, module)  # the script or torch.fx has set its own, which takes precedence
        me = self._threads.get(get_ident())
        # Most calls are those of parts inside a model: for them, the traced function would only cost time.
        return MethodType(self._called if me is None or me.inside not in HIDING else self._original, module)

    def __reduce__(self) -> Any:
        # Classes may be pickled by value (cloudpickle), and read where dpmon is not installed.
        return getattr, (Module, "__call__")


class RootFinder:
    """Watches the modules of one process."""

    def __init__(self, session: Session, recorder: SpanRecorder, calls: CallTracer) -> None:
        self.session = session
        self.recorder = recorder
        self.calls = calls
        self._guard = session.guard("new models", fatal=False)
        self.original: Function = torch.nn.Module.__call__
        self.called = calls.wrap_call(self.original, self._site_of, root=True)
        """Traces the calls of a root's class."""
        self.watcher = calls.wrap_call(self.original, self._site_of, root=True)
        """The same for all modules, as Module.__call__ during a watch."""
        self._classes: dict[int, Any] = {}
        """Weak references to the classes of the roots that were found, by id.

        A WeakSet would call the metaclass's own comparison and hash. Strong references would keep the globals of
        `__main__` alive through the methods of a class, so their finalizers would not run at exit.
        """
        self._watching = False
        self._left = WATCH_STEPS
        """Steps until the watch ends if no new root appears."""
        self._due = 0
        """When to watch again (monotonic ns)."""
        self._wait_ns = WATCH_SOON_NS
        self._expected = 0
        """Number of watches begun by `watch_one_step`."""
        self._expected_ns = 0
        """When `watch_one_step` last began a watch (monotonic ns)."""
        self._warned = False
        """Whether a warning about unseen calls was given."""
        self._found = True
        """Whether a root appeared since the last look."""
        self._always = False
        """Whether a root's class has its own `__call__`, so that the watch cannot end."""
        self._made: dict[int, weakref.ref[object]] = {}
        """Modules that got a parameter or a submodule since the last watch ended, by id."""
        self._made_in_watch: set[int] = set()
        """Ids of the modules that were made during the last watch, which ends at the beginning of a call it still
        sees."""
        self._missed = False
        """Whether roots that this watch finds may have been called before it began."""
        self._late = 0
        self.on_made: Callable[[], object] = lambda: None
        """Called when a module is made while no watch is active."""

    def _site_of(self, module: object, me: ThreadState) -> TracedModule | None:
        """The site of a module; None if its calls are not recorded."""
        if not self._is_root(module) or not self.session.ensure_open():
            return None
        kind = type(module)
        if not self._is_known(kind):
            self._found = True
            new = id(module) in self._made or id(module) in self._made_in_watch
            if self._missed and self._late < MAX_LATE and not new:
                self._late += 1
                self.session.warn(
                    f"{class_name(module)} was called by the script at step {{step}}, the first call that dpmon saw: "
                    "earlier calls of it, if any, are not in the record",
                    "next",
                )
            self._register(kind, called=True)
        return self.calls.sites.register(self.calls.sites.of_root(module))

    def _is_root(self, module: object) -> bool:
        if "_is_replica" in module.__dict__ or not _is_model(module):
            return False
        if not self._warned:
            self._warn_if_parent_bypassed(module)
        return True

    def _warn_if_parent_bypassed(self, module: object) -> None:
        """Warn if the script calls the forward of an enclosing module directly, so that only its parts are seen."""
        for frame in iter_callers(sys._getframe(1)):
            if frame.f_code.co_name == "forward":
                owner = first_argument(frame)
                parts = modules_of(owner) if isinstance(owner, Module) and _is_model(owner) else ()
                if owner is not module and any(part is module for part in parts):
                    self._warn_unseen(
                        f"{class_name(owner)}.forward() is called directly, without Module.__call__, so dpmon cannot "
                        "see the call: the calls of the modules in it are recorded instead"
                    )
                    return

    def warn_no_call_seen(self) -> None:
        """Warn that an optimizer steps but no call of a module was seen."""
        self._warn_unseen(
            "an optimizer steps, but no call of a module was seen: a module cannot be traced if its forward() is "
            "called directly or by a compiled function"
        )

    def _warn_unseen(self, text: str) -> None:
        self._warned = True
        if self.session.ensure_open():
            self.session.warn(text)

    def _is_known(self, kind: type) -> bool:
        known = self._classes.get(id(kind))
        return known is not None and known() is kind

    def _register(self, kind: type, *, called: bool = False) -> None:
        """Trace all calls of a class from now on, even without a watch. `called`: whether a call has just begun."""
        if self._is_known(kind):
            return
        key = id(kind)
        classes = self._classes
        classes[key] = weakref.ref(kind, lambda _: classes.pop(key, None))
        if any(isinstance(base.__dict__.get("__call__"), _RootCall) for base in kind.__mro__):
            return  # it inherits the `__call__` of a root's class
        try:
            now = kind.__call__
            if now is not self.watcher and now is not self.original:
                raise TypeError("a __call__ of its own")
            kind.__call__ = _RootCall(self)  # type: ignore[method-assign, assignment]  # a descriptor
        except Exception:  # noqa: BLE001 - a class may refuse in any way; the watch continues
            if called:
                self._always = True
                self.watch()  # the watch may just have ended
            else:
                del self._classes[key]

    # ---------------------------------------------------------------- models that are made

    def install_registration_hooks(self) -> None:
        """Make torch call us when a module gets a parameter or a submodule."""
        registering = torch.nn.modules.module
        registering.register_module_parameter_registration_hook(self._on_registration)
        registering.register_module_module_registration_hook(self._on_registration)

    def _on_registration(self, module: object, name: str, part: object) -> None:
        """Note a module that gets a parameter or a submodule, and trace the model inside a wrapper."""
        with self._guard:
            known = self._made.get(id(module))
            if (known is not None and known() is module) or "_is_replica" in module.__dict__:
                return
            if len(self._made) >= MAX_MADE:
                del self._made[next(iter(self._made))]
            self._made[id(module)] = weakref.ref(module)
            if self._watching and len(self._made_in_watch) < MAX_MADE:
                self._made_in_watch.add(id(module))
            if name in WRAPPED and _is_model(part):
                self._register(type(part))
            if not self._watching:
                self.on_made()

    def _trace_future_roots(self) -> None:
        """Trace the modules that the script may call later: models that were made, and submodules with submodules."""
        with self._guard:
            made = [module for known in list(self._made.values()) if (module := known()) is not None]
            self._made.clear()
            parts = {id(part) for module in made for part in values_of(module, MODULES)}
            for module in made:
                if id(module) in parts:
                    continue
                for part in (module, *(part for part in values_of(module, MODULES) if values_of(part, MODULES))):
                    if _is_model(part):
                        self._register(type(part))

    # ---------------------------------------------------------------- the watch

    def watch(self, missed: bool = False) -> None:
        """Watch every module from now on. `missed`: modules that it finds may have been called before."""
        if not self._watching and torch.nn.Module.__call__ is self.original:
            self._watching = True
            self._missed = missed
            self._made_in_watch.clear()
            torch.nn.Module.__call__ = self.watcher  # type: ignore[method-assign]

    def end_watch(self) -> None:
        """End the watch. Roots that it found stay traced; models that the script may call later are now traced, too."""
        if self._watching and not self._always and torch.nn.Module.__call__ is self.watcher:
            self._trace_future_roots()
            self._watching = False
            torch.nn.Module.__call__ = self.original  # type: ignore[method-assign]

    def watch_one_step(self, missed: bool = False) -> bool:
        """Watch one step, because another model may follow. Return whether a watch begins. `missed`: see `watch`."""
        now = monotonic_ns()
        often = self._expected >= EXPECTED and now - self._expected_ns < EXPECT_NS
        if self._watching or self.session.off or often:
            return False
        self._expected += 1
        self._expected_ns = now
        self.watch(missed)
        self._left = 1
        return self._watching

    def poll(self, now: int) -> int:
        """Start or end a watch when a step may have ended. Return when to call again (monotonic ns)."""
        if self._watching:
            if self._found:
                self._found = False
                self._left = WATCH_STEPS
            self._left -= 1
            if self._left > 0:
                return 0
            self.end_watch()
            self._wait_ns = min(2 * self._wait_ns, WATCH_EVERY_NS)
            self._due = now + self._wait_ns
        elif now >= self._due:
            self.watch(missed=True)
            self._left = 1
            return 0
        return self._due


def _is_model(module: object) -> bool:
    """Whether calls of a module are recorded. Modules without parameters (a loss, a transform) are not.

    A DataParallel is traced through its forward, and a model that gets its weights as arguments (`make_functional`)
    through the module inside, which has the weights during the call.
    """
    if isinstance(module, torch.nn.DataParallel) or type(module).__module__.startswith("torch._functorch"):
        return False
    return next(tensors_of(module, PARAMETERS), None) is not None
