"""Finds the modules that a script calls directly without a wrapper: bare roots.

A watch replaces Module.__call__ during the first steps of the loop, whenever modules are made, and from time to time
for one step. The class of every root that the watch finds gets its own `__call__`. Then the watch ends, so that the
hundreds of modules inside a network cost nothing. At the end of a watch, classes of modules that the script may call
later get a `__call__`, too: models that are not part of another model, and their larger parts. Instances are never
changed, so pickles and copies contain only the script's own data.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from types import MethodType
from typing import Any

import torch

from dpmon.tracer.calls.call_wrapper import HIDING_KINDS, CallTracer
from dpmon.tracer.calls.traced_modules import TracedModule
from dpmon.tracer.core import module_tables
from dpmon.tracer.core.hidden_frames import Function, iter_callers
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.module_tables import MODULES, PARAMETERS, class_name, modules_of, tensors_of, values_of
from dpmon.tracer.core.session import Session
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

Module = torch.nn.Module

WATCH_STEPS = 16
"""Steps without a new root after which the watch ends."""
MIN_WATCH_WAIT_NS, MAX_WATCH_WAIT_NS = 20_000_000, 20_000_000_000
"""Waits between short watches of one step each, which find roots that appear later.

The first wait is 2 * MIN_WATCH_WAIT_NS. Each wait is twice as long as the previous one, up to MAX_WATCH_WAIT_NS. A
watch changes torch's class Module, so Python discards its caches for all modules, and dozens of steps are slower.
"""

MAX_LATE_WARNINGS = 8
"""How many warnings say that earlier calls of a class may be missing."""
WRAPPER_ATTRIBUTES = frozenset(("module", "_orig_mod"))
"""Attributes in which wrappers hold their model: `module` in DataParallel, AveragedModel and others, `_orig_mod` in the
wrapper of torch.compile."""
FREE_WATCHES, MIN_WATCH_INTERVAL_NS = 64, 250_000_000
"""Limits of the watches that `watch_one_step` begins, for example at the end of each loop: the first FREE_WATCHES are
unlimited, later ones are at least MIN_WATCH_INTERVAL_NS apart. Epochs may be very short."""


class _RootCall:
    """A descriptor for the `__call__` of a root's class: instances get the traced function, the class the original."""

    def __init__(self, roots: RootFinder) -> None:
        self._traced_call = roots.traced_call
        self._original_call = roots.original_call
        self._watching_call = roots.watching_call
        self._threads = roots.recorder.threads

    def __get__(self, module: object, owner: object = None) -> object:
        current = Module.__call__
        if module is None:  # torch.compile looks here, and expects the class's own function
            return self._original_call if current is self._watching_call else current
        if current is not self._original_call and current is not self._watching_call:
            return MethodType(current, module)  # the script or torch.fx has set its own, which takes precedence
        thread = self._threads.get(get_ident())
        # Most calls are calls of parts inside a model: for them, the traced function would only cost time.
        if thread is None or thread.open_kind not in HIDING_KINDS:
            return MethodType(self._traced_call, module)
        return MethodType(self._original_call, module)

    def __reduce__(self) -> Any:
        # Classes may be pickled by value (cloudpickle), and loaded where dpmon is not installed.
        return getattr, (Module, "__call__")


class RootFinder:
    """The finder of one process's bare roots."""

    def __init__(self, session: Session, recorder: SpanRecorder, call_tracer: CallTracer) -> None:
        self.session = session
        self.recorder = recorder
        self.call_tracer = call_tracer
        self._guard = session.guard("new models", fatal=False)
        self.original_call: Function = torch.nn.Module.__call__
        self.traced_call = call_tracer.wrap_call(self.original_call, self._trace_root, root=True)
        """The traced `__call__` of a root's class."""
        self.watching_call = call_tracer.wrap_call(self.original_call, self._trace_root, root=True)
        """The traced `__call__` of all modules: Module.__call__ during a watch."""
        self._traced_classes: IdentityTable[bool] = IdentityTable()
        """The classes of roots. Strong references would keep the globals of `__main__` alive through the methods of a
        class, so their finalizers would not run at exit."""
        self._watching = False
        self._steps_left = WATCH_STEPS
        """Steps until the watch ends if no new root appears."""
        self._watch_due = 0
        """When to watch again (monotonic ns)."""
        self._wait_ns = MIN_WATCH_WAIT_NS
        self._short_watches = 0
        """Number of watches begun by `watch_one_step`."""
        self._short_watch_ns = 0
        """When `watch_one_step` last began a watch (monotonic ns)."""
        self._has_warned = False
        """Whether a warning about unseen calls was given."""
        self._has_new_root = True
        """Whether a root appeared since the last poll."""
        self._cannot_end = False
        """Whether a root's class has its own `__call__`, so that the watch cannot end."""
        self._new_modules: IdentityTable[bool] = IdentityTable()
        """Modules that got a parameter or a submodule since the last watch ended."""
        self._new_in_watch: IdentityTable[bool] = IdentityTable()
        """The modules that were made during the last watch. It may end when a call that it still sees begins."""
        self._may_have_missed_calls = False
        """Whether roots that this watch finds may have been called before it began."""
        self._late_warnings = 0
        self.synced_names: list[str] | None = None
        """Names of parameters by their index in the only DistributedDataParallel; empty for several, None for none."""
        self.on_new_module: Callable[[], object] = lambda: None
        """Called when a module is made while no watch is active."""

    def _trace_root(self, module: object, thread: ThreadState) -> TracedModule | None:
        """Begin to trace a bare root; return None if the module's calls are not recorded."""
        if not self._is_root(module) or not self.session.ensure_open():
            return None
        cls = type(module)
        if not self._traced_classes.get(cls):
            self._has_new_root = True
            is_new = self._new_modules.get(module) or self._new_in_watch.get(module)
            if self._may_have_missed_calls and self._late_warnings < MAX_LATE_WARNINGS and not is_new:
                self._late_warnings += 1
                self.session.warn(
                    f"{class_name(module)} was called by the script at step {{step}}, the first call that dpmon saw: "
                    "earlier calls of it, if any, are not in the record",
                    "next",
                )
            self._register(cls, called=True)
        return self.call_tracer.traced_modules.register(self.call_tracer.traced_modules.make_for_root(module))

    def _is_root(self, module: object) -> bool:
        """Return whether calls of a module are recorded; warn if it is only a part of a model that is called."""
        if "_is_replica" in module.__dict__ or not _is_model(module):
            return False
        if not self._has_warned:
            self._warn_if_parent_bypassed(module)
        return True

    def _warn_if_parent_bypassed(self, module: object) -> None:
        """Warn if the script calls the forward of an enclosing module directly, so that dpmon sees only its parts."""
        for frame in iter_callers(sys._getframe(1)):
            if frame.f_code.co_name == "forward":
                owner = frame.f_locals.get("self")
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
        """Warn about unseen calls."""
        self._has_warned = True
        if self.session.ensure_open():
            self.session.warn(text)

    def _register(self, cls: type, *, called: bool = False) -> None:
        """Trace all calls of a class from now on, even without a watch. `called`: whether a call has just begun."""
        if self._traced_classes.get(cls):
            return
        self._traced_classes.set(cls, True)
        if any(isinstance(base.__dict__.get("__call__"), _RootCall) for base in cls.__mro__):
            return  # it inherits the `__call__` of a root's class
        try:
            current = cls.__call__
            if current is not self.watching_call and current is not self.original_call:
                raise TypeError("a __call__ of its own")
            cls.__call__ = _RootCall(self)  # type: ignore[method-assign, assignment]  # a descriptor
        except Exception:  # noqa: BLE001 - a class may refuse in any way; the watch continues
            if called:
                self._cannot_end = True
                self.watch()  # the watch may just have ended
            else:
                self._traced_classes.pop(cls)

    # ---------------------------------------------------------------- models that are made

    def install_registration_hooks(self) -> None:
        """Make torch call us when a module gets a parameter or a submodule."""
        registering = torch.nn.modules.module
        registering.register_module_parameter_registration_hook(self._on_registration)
        registering.register_module_module_registration_hook(self._on_registration)

    def _on_registration(self, module: object, name: str, part: object) -> None:
        """Note a module that gets a parameter or a submodule, and trace the model inside a wrapper."""
        with self._guard:
            if self._new_modules.get(module) or "_is_replica" in module.__dict__:
                return
            self._new_modules.set(module, True)
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                ignored = part.__dict__.get("_ddp_params_and_buffers_to_ignore", ())
                names = [name for name in module_tables.names_of_parameters(part).values() if name not in ignored]
                self.synced_names = names if self.synced_names is None else []
            if self._watching:
                self._new_in_watch.set(module, True)
            if name in WRAPPER_ATTRIBUTES and _is_model(part):
                self._register(type(part))
            if not self._watching:
                self.on_new_module()

    def _trace_future_roots(self) -> None:
        """Trace the modules that the script may call later: models that were made, and submodules with submodules."""
        with self._guard:
            modules = [module for module, _ in self._new_modules.items()]
            self._new_modules.clear()
            part_ids = {id(part) for module in modules for part in values_of(module, MODULES)}
            for module in modules:
                if id(module) in part_ids:
                    continue
                large_parts = [part for part in values_of(module, MODULES) if values_of(part, MODULES)]
                for candidate in (module, *large_parts):
                    if _is_model(candidate):
                        self._register(type(candidate))

    # ---------------------------------------------------------------- the watch

    def watch(self, missed: bool = False) -> None:
        """Watch every module from now on. `missed`: modules that it finds may have been called before."""
        if not self._watching and torch.nn.Module.__call__ is self.original_call:
            self._watching = True
            self._may_have_missed_calls = missed
            self._new_in_watch.clear()
            torch.nn.Module.__call__ = self.watching_call  # type: ignore[method-assign]

    def end_watch(self) -> None:
        """End the watch. Its roots stay traced, and models that the script may call later are now traced, too."""
        if self._watching and not self._cannot_end and torch.nn.Module.__call__ is self.watching_call:
            self._trace_future_roots()
            self._watching = False
            torch.nn.Module.__call__ = self.original_call  # type: ignore[method-assign]

    def watch_one_step(self, missed: bool = False) -> bool:
        """Watch one step, because another model may follow. Return whether a watch begins. `missed`: see `watch`."""
        now = monotonic_ns()
        is_too_soon = self._short_watches >= FREE_WATCHES and now - self._short_watch_ns < MIN_WATCH_INTERVAL_NS
        if self._watching or self.session.is_off or is_too_soon:
            return False
        self._short_watches += 1
        self._short_watch_ns = now
        self.watch(missed)
        self._steps_left = 1
        return self._watching

    def poll(self, now: int) -> int:
        """Start or end a watch if it is due. Called when a step may have ended; returns when to call again (ns)."""
        if self._watching:
            if self._has_new_root:
                self._has_new_root = False
                self._steps_left = WATCH_STEPS
            self._steps_left -= 1
            if self._steps_left > 0:
                return 0
            self.end_watch()
            self._wait_ns = min(2 * self._wait_ns, MAX_WATCH_WAIT_NS)
            self._watch_due = now + self._wait_ns
        elif now >= self._watch_due:
            self.watch(missed=True)
            self._steps_left = 1
            return 0
        return self._watch_due


def _is_model(module: object) -> bool:
    """Return whether calls of a module are recorded as calls of a bare root.

    Modules without parameters (a loss, a transform) are not. A DataParallel is traced through its forward, and a model
    that gets its weights as arguments (`make_functional`) through the module inside, which has the weights during the
    call.
    """
    if isinstance(module, torch.nn.DataParallel) or type(module).__module__.startswith("torch._functorch"):
        return False
    return next(tensors_of(module, PARAMETERS), None) is not None
