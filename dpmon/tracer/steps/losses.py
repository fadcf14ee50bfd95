"""Reads the losses: the single values from which backward passes begin, for each line that calls backward.

Gradients add up until an optimizer steps. So the losses of a line's passes are added up, too: the sum is the loss of an
update. Of the passes inside `optimizer.step`, only the first counts, because torch's LBFGS returns its loss. The sum is
written at most once per second, and for the last update before the process ends.

A detached tensor of each pass lives until the next update, without the graph. If it is due, its value is read from
memory; on a GPU, it is copied to pinned memory, and a later pass reads the copy if its event has completed. One copy is
under way at a time, and nothing waits for the GPU. Dispatch and function modes of the script see neither. The nonzero
values of attention masks are counted likewise: at the FIRST_MASKS first polls (one per step), then once per second.

The calling line is the innermost one of the script, as for an exception. Under a GradScaler, a pass begins at a scaled
loss. So a wrapper of `GradScaler.scale` remembers what was scaled.
"""

from __future__ import annotations

import os
import struct
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import nan
from time import monotonic_ns, sleep
from typing import Any, NamedTuple

import torch

from dpmon.record.shared_names import find_program_frame, is_script_file, shorten_name
from dpmon.record.span_format import FLAGS_AT, SITE_AT, Flag, Kind
from dpmon.tracer.core.hidden_frames import iter_callers, wrap_rare_function
from dpmon.tracer.core.session import Session, set_eval_frame
from dpmon.tracer.devices.cuda_events import TorchEvents
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

LOSS_INTERVAL_NS = 1_000_000_000
MAX_PASSES = 256
"""The passes of an update are added up if there are at most this many."""
FIRST_MASKS = 64
"""How many masks are counted at the start without delay, so that a run of short steps has enough of them."""
MAX_CALLERS = 16
"""How many lines of a process can have losses."""
MAX_EXIT_WAIT_NS = 100_000_000
"""How long the end of a process may wait for copies from a GPU, which may hang."""
_count_dispatch_modes, _DisableTorchFunction = torch._C._len_torch_dispatch_stack, torch._C.DisableTorchFunction
_HIDDEN_DIRECTORIES = tuple(
    os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(os.path.abspath(__file__)))
)
_OWN_FRAMES = 6
"""From `_find_caller` to the caller of the wrapper of a backward pass: these frames are ours."""
_find_program_frame = lru_cache(maxsize=256)(find_program_frame)
"""For each pass, the stack has files that an earlier pass had, too."""


def _is_hidden(file: str) -> bool:
    """Return whether a file belongs to torch or to this package."""
    return file.startswith(_HIDDEN_DIRECTORIES)


@lru_cache(maxsize=256)
def _is_script_file(file: str) -> bool:
    """Return whether a line of this file may be the script's own call of backward."""
    return is_script_file(file) and not _is_hidden(file)


@dataclass(slots=True, eq=False)
class BackwardCaller:
    """A line of the script that calls backward, itself or through a library."""

    location: str
    has_reason: bool = False
    """Whether the first reason why there is no loss was written."""
    next_ns: int = 0
    """When the next loss may be written (monotonic ns)."""
    losses: list[torch.Tensor] = field(default_factory=list)
    """The detached losses of the passes since the last update."""
    start_ns: int = 0
    """Start of the last pass."""
    was_stepping: bool = False
    """Whether the last pass ran inside an optimizer step."""
    newest: tuple[int, list[torch.Tensor]] | None = None
    """`start_ns` and `losses` of the last update, if they are not written yet."""


class PendingCopy(NamedTuple):
    """Values on their way from a GPU, what to call with them, and the event that completes once they have arrived."""

    values: list[torch.Tensor]
    write: Callable[..., None]
    event: Any


class LossTracer:
    """The reader of one process's losses."""

    def __init__(self, session: Session, recorder: SpanRecorder, events: TorchEvents | None = None) -> None:
        self._session = session
        self._recorder = recorder
        self._events = events
        self._pinned_memory: torch.Tensor | None = None
        """A row for each pass of an update; None until a loss is on a GPU."""
        self._pending_copy: PendingCopy | None = None
        self._guard = session.guard("loss", fatal=False)
        self._wrapped_classes: set[type] = set()
        """Classes of scalers that were wrapped, with their bases."""
        self._parent_copies: list[object] = []
        """Memory and events of the parent process, which a forked child must not return to the driver."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._callers: dict[tuple[str, int], BackwardCaller] = {}
        self._parent_copies.append((self._pinned_memory, self._pending_copy))
        self._pinned_memory = self._pending_copy = None
        self._polls = 0
        self.poll(0)
        self._scaled_losses: deque[tuple[Any, torch.Tensor]] = deque(maxlen=4)
        """Weak references to the last scaled losses, with the detached unscaled losses."""
        if self._session.config.loss:
            self._recorder.on_loss, self._recorder.on_update = self.on_backward_end, self.end_update

    def install(self) -> None:
        """Wrap GradScaler.scale and .update, those of a subclass (FSDP has one) when its first scaler is made."""
        if self._session.config.loss:
            cls: Any = torch.amp.GradScaler
            self._wrap_scaler(cls)
            cls.__init__ = wrap_rare_function(
                cls.__init__, self._guard, lambda _, __, scaler, *___, **____: self._wrap_scaler(type(scaler))
            )

    def _wrap_scaler(self, scaler_class: type) -> None:
        """Wrap `scale` and `update` (which may follow a skipped step) of a class of scalers and of its bases."""
        classes: Any = scaler_class.__mro__
        note_scaled = partial(self._run_hidden, self._note_scaled)
        for cls in classes:
            if cls not in self._wrapped_classes:
                self._wrapped_classes.add(cls)
                for name, after in (("scale", note_scaled), ("update", lambda *_, **__: self.end_update())):
                    if name in vars(cls):
                        setattr(cls, name, wrap_rare_function(getattr(cls, name), self._guard, after))

    def _note_scaled(self, result: object, _: int, scaler: object, outputs: Any) -> None:
        """Remember which loss was scaled, if `scale` was called with a tensor."""
        if result is not outputs and type(result) is torch.Tensor and unreadable_reason(outputs) is None:
            self._scaled_losses.append((weakref.ref(result), _detach(outputs)))

    def on_backward_end(self, thread: ThreadState, start_ns: int, args: Any, kwargs: Any) -> None:
        """Note the loss of a backward pass that just ended. `args`, `kwargs`: of autograd's engine."""
        recorder = self._recorder
        if thread is recorder.training_thread and recorder.ring is not None:
            if self._pending_copy is not None:
                self._run_hidden(self._read_copy, self._pending_copy)
            # Other passes are torch.autograd.grad, or a pass across RPC.
            if kwargs.get("accumulate_grad") and type(args[0]) is tuple and args[0]:
                self._run_hidden(self._add_pass, start_ns, args[0], len(thread.open_steps) > 0)

    def _run_hidden(self, method: Callable[..., None], *args: object) -> None:
        """Call a method of ours so that neither dynamo nor a function mode of the script sees what it does."""
        dynamo_callback = set_eval_frame(None)  # else dynamo would try to compile functions that are called below
        try:
            with _DisableTorchFunction():
                method(*args)
        except Exception as error:  # noqa: BLE001 - a loss is lost, the training is not
            self._session.count_error("loss", error, fatal=False)
        finally:
            set_eval_frame(dynamo_callback)

    def _find_caller(self) -> BackwardCaller | None:
        """Return the line that called backward; None beyond MAX_CALLERS."""
        innermost = frame = sys._getframe(_OWN_FRAMES)
        while frame is not None and not _is_script_file(frame.f_code.co_filename):
            frame = frame.f_back  # type: ignore[assignment]  # None above the outermost frame
        if frame is None:  # an installed program
            frames = [frame for frame in iter_callers(innermost) if not _is_hidden(frame.f_code.co_filename)]
            if not frames:
                return None
            frame = frames[_find_program_frame(tuple(frame.f_code.co_filename for frame in frames)) or 0]
        file, line = key = frame.f_code.co_filename, frame.f_lineno
        caller = self._callers.get(key)
        if caller is None and len(self._callers) < MAX_CALLERS:
            location = f"{os.path.basename(file)}:{line}"
            if any(other.location == location for other in self._callers.values()):
                location = f"{file}:{line}"
            caller = self._callers[key] = BackwardCaller(shorten_name(location))
        return caller

    def _add_pass(self, start_ns: int, roots: tuple[Any, ...], is_stepping: bool) -> None:
        """Add the loss of a pass to its update. `roots`: where the pass began. `is_stepping`: in an optimizer step."""
        caller = self._find_caller()
        if caller is None:
            return
        loss = roots[0]
        if self._scaled_losses:
            loss = next((unscaled for scaled, unscaled in self._scaled_losses if scaled() is loss), loss)
        if len(roots) > 1 or type(loss) is not torch.Tensor or loss.numel() != 1:
            reason = "the pass begins at several tensors" if len(roots) > 1 else unreadable_reason(loss)
            if reason is not None:
                self._write(caller, start_ns, nan, reason)
                return
        if caller.losses and caller.was_stepping and is_stepping:
            return  # a closure that the optimizer calls again begins with gradients of zero
        caller.losses.append(_detach(loss))
        caller.start_ns, caller.was_stepping = start_ns, is_stepping
        if len(caller.losses) > MAX_PASSES or not self._recorder.has_optimizer:
            del caller.losses[:-1]
            self.end_update()

    def losses_of_update(self) -> list[torch.Tensor]:
        """Return the loss of each line's last pass since the last update, if it can be read."""
        losses = [caller.losses[-1] for caller in self._callers.values() if caller.losses]
        return [loss for loss in losses if unreadable_reason(loss) is None]

    def end_update(self) -> None:
        """Write the losses of the passes since the last update, if they are due; keep them until the next update."""
        for caller in tuple(self._callers.values()):
            if caller.losses:
                caller.newest, caller.losses = (caller.start_ns, caller.losses), []
                if caller.start_ns >= caller.next_ns:
                    self._run_hidden(self._write_update, caller, *caller.newest)

    def _write_update(self, caller: BackwardCaller, start_ns: int, losses: list[torch.Tensor]) -> None:
        """Write the loss of a line's last update, or begin to copy it from a GPU."""
        reason = next(filter(None, map(unreadable_reason, losses)), None)
        if reason is not None:
            self._write(caller, start_ns, nan, reason)
        elif not self.read_values(losses, lambda *values: self._write(caller, start_ns, sum(values))):
            return  # the loss of a later update is written
        caller.newest, caller.next_ns = None, start_ns + LOSS_INTERVAL_NS

    def _write(self, caller: BackwardCaller, start_ns: int, value: float, reason: str | None = None) -> None:
        """Write a loss; or, once for each line, the `reason` why its loss cannot be read."""
        if reason is not None and caller.has_reason:
            return
        definition = self._session.define((caller, reason), lambda: {"place": caller.location, "why": reason})
        if definition:
            caller.has_reason |= reason is not None
            (bits,) = struct.unpack("=Q", struct.pack("=d", value))
            self._recorder.put(Kind.LOSS | definition << SITE_AT, start_ns, 0, bits)

    # ---------------------------------------------------------------- attention masks

    def poll(self, now: int) -> int:
        """Count the attention mask of the next call, if it has one. Return when to call again (monotonic ns)."""
        self._recorder.on_inputs = partial(self._run_hidden, self._count_mask)
        self._polls += 1
        return now + LOSS_INTERVAL_NS * (self._polls > FIRST_MASKS)

    def _count_mask(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count the nonzero values of the attention mask among the arguments of a call."""
        self._recorder.on_inputs = None
        if self._pending_copy is not None:
            self._read_copy(self._pending_copy)
        named = args[0] if len(args) == 1 and isinstance(args[0], Mapping) else kwargs
        mask: Any = named.get("attention_mask")
        if type(mask) is torch.Tensor and mask.dim() == 2 and (mask.is_cpu or mask.is_cuda):
            put, start_ns, elements = self._recorder.put, monotonic_ns(), mask.numel() << 32
            word = Kind.MASK | Flag.GRAD * torch.is_grad_enabled() << FLAGS_AT
            self.read_values([mask], lambda count: put(word, start_ns, 0, int(count) | elements), torch.count_nonzero)

    # ---------------------------------------------------------------- on a GPU

    def read_values(self, tensors: list[torch.Tensor], write: Callable[..., Any], reduce: Any = torch.detach) -> bool:
        """Reduce each tensor to a value, and call `write` with these floats: now, or from a GPU in a later pass.

        Return False if a CUDA graph is being captured, or another copy is pending.
        """
        if not any(tensor.is_cuda for tensor in tensors):
            write(*_numbers_of(map(reduce, tensors)))
            return True
        events = self._events = self._events or TorchEvents(self._session)
        if self._pending_copy is not None or events.is_capturing():
            return False
        copies = []
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if self._pinned_memory is None:
                self._pinned_memory = torch.empty((MAX_PASSES, 8), dtype=torch.uint8, device="cpu", pin_memory=True)
            for row, value in zip(self._pinned_memory, map(reduce, tensors), strict=False):
                copies.append(row[: value.dtype.itemsize].view(value.dtype))
                copies[-1].copy_(value.view(1), non_blocking=True)
        event = events.create_event()
        events.record(event, max(tensor.get_device() for tensor in tensors))
        self._pending_copy = PendingCopy(copies, write, event)
        return True

    def _read_copy(self, copy: PendingCopy) -> None:
        """Write the values of a copy if it has completed."""
        events = self._events
        if events is not None and not events.is_capturing() and events.is_done(copy.event):
            self._pending_copy = None
            copy.write(*_numbers_of(copy.values))

    def at_exit(self) -> None:
        """Write the losses of the last update, because the process ends."""
        end_ns = monotonic_ns() + MAX_EXIT_WAIT_NS
        for caller in (None, *self._callers.values()):
            if caller is not None and caller.newest is not None:
                self._run_hidden(self._write_update, caller, *caller.newest)
            while self._pending_copy is not None and monotonic_ns() < end_ns:
                self._run_hidden(self._read_copy, self._pending_copy)
                sleep(0.001)


def _detach(loss: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the value of a loss, without its graph. No dispatch mode sees it."""
    if not _count_dispatch_modes():  # the usual case; the block below costs more than the rest
        return loss.detach()
    with torch._C._DisableTorchDispatch():
        return loss.detach()


def unreadable_reason(loss: Any) -> str | None:
    """Return why a loss cannot be read; None if it can."""
    if getattr(type(loss), "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:  # or a GradientEdge
        return f"the pass begins at a {shorten_name(type(loss).__name__)}, which is not a plain tensor"
    if loss.numel() != 1:
        return f"the pass begins at a tensor of {loss.numel():,} values, not at one value"
    if loss.device.type not in ("cpu", "cuda"):
        return f"dpmon does not read values on a device of type {loss.device.type}"
    if not loss.is_floating_point() or loss.layout is not torch.strided or loss.is_neg() or not loss.data_ptr():
        return "the pass begins at a tensor of an unusual type"
    return None


def _numbers_of(values: Iterable[torch.Tensor]) -> list[float]:
    """Return the values of tensors with one element each in the host's memory."""
    with torch._C._DisableTorchDispatch():
        return [float(value.item()) for value in values]
