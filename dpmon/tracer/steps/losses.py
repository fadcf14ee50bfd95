"""Reads the loss: the single value from which a backward pass begins, at most once per second for each calling line.

On the CPU, the value is read from memory after the pass. On a GPU, it is copied to pinned memory after the pass, and a
later pass reads the copy if its event has completed. Nothing waits for the GPU, and no tensor of the script is kept.
Dispatch and function modes of the script see neither.

The calling line is the innermost line outside torch. Once per second, dpmon reads the losses of MAX_PASSES passes in a
row, so that all lines of a step are read together. Under a GradScaler, a pass begins at a scaled loss. So a wrapper of
`GradScaler.scale` remembers which loss was scaled.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import weakref
from collections import deque
from math import nan
from typing import Any

import torch

from dpmon.record.shared_names import shorten_name
from dpmon.record.span_format import SITE_AT, Kind
from dpmon.tracer.core.hidden_frames import iter_callers, wrap_rare_function
from dpmon.tracer.core.session import Session
from dpmon.tracer.devices.cuda_events import TorchEvents
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

LOSS_INTERVAL_NS = 1_000_000_000
MAX_PASSES = 8
MAX_CALLERS = 16
"""How many lines of a process can have losses."""
MAX_COPIES = 8
"""How many copies from a GPU may be in progress."""
NEVER = 1 << 62
_set_eval_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame
"""Sets how dynamo treats the frames that this thread enters; returns the previous setting."""
_HIDDEN_DIRECTORIES = tuple(
    os.path.dirname(path) + os.sep for path in (torch.__file__, os.path.dirname(os.path.abspath(__file__)))
)
_DTYPE_BYTES = {torch.float64: 8, torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


class BackwardCaller:
    """A line of the script that calls backward."""

    __slots__ = ("definitions", "location", "next_ns")

    def __init__(self, location: str) -> None:
        self.location = location
        self.definitions: dict[bool, int] = {}
        """Number of the definition for its losses (True), and for the first reason why there is no loss (False)."""
        self.next_ns = 0
        """When the next loss may be read (monotonic ns)."""


class PinnedCopy:
    """A piece of pinned memory for a loss and its scale, with the event that completes once they are copied there."""

    __slots__ = ("caller", "cells", "device", "event", "start_ns", "tensors")

    def __init__(self, cells: torch.Tensor) -> None:
        self.cells = cells
        self.event: Any = None
        self.device: int | None = None
        self.tensors: list[torch.Tensor] = []
        """The loss, and its scale if the loss must be divided by it."""
        self.caller: Any = None
        self.start_ns = 0


class LossTracer:
    """The reader of one process's losses."""

    def __init__(self, session: Session, recorder: SpanRecorder, events: TorchEvents | None = None) -> None:
        self._session = session
        self._recorder = recorder
        self._events = events
        self._pending_copies: deque[PinnedCopy] = deque()
        self._free_copies: list[PinnedCopy] | None = None
        """None until pinned memory is allocated."""
        self._guard = session.guard("loss", fatal=False)
        self._wrapped_classes: set[type] = set()
        """Classes with a wrapped `scale`."""
        self._parent_copies: list[object] = []
        """`PinnedCopy` objects of the parent process, which a forked child must keep alive."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._callers: dict[tuple[str, int], BackwardCaller] = {}
        self._second_start_ns = -LOSS_INTERVAL_NS
        """When the first pass of the current second began (monotonic ns)."""
        self._passes_left = 0
        """How many more passes may be read in this second."""
        if self._free_copies is not None:  # this process must not return the parent's events and memory to the driver
            self._parent_copies.append((self._free_copies, self._pending_copies))
            self._free_copies, self._pending_copies = None, deque()
        self._scaled_losses: deque[tuple[Any, Any, Any]] = deque(maxlen=4)
        """Weak references to the last scaled losses, to the unscaled losses, and to their scalers."""
        self._recorder.loss_due = 0 if self._session.config.loss else NEVER
        self._recorder.on_loss = self.on_backward_end

    def install(self) -> None:
        """Wrap GradScaler.scale. The `scale` of a subclass (FSDP has one) is wrapped when its first scaler is made."""
        if self._session.config.loss:
            cls: Any = torch.amp.GradScaler
            self._wrap_scaler(cls)
            cls.__init__ = wrap_rare_function(
                cls.__init__, self._guard, lambda _, __, scaler, *___, **____: self._wrap_scaler(type(scaler))
            )

    def _wrap_scaler(self, scaler_class: type) -> None:
        """Wrap `scale` of a class of scalers and of its bases."""
        classes: Any = scaler_class.__mro__
        for cls in classes:
            if "scale" in vars(cls) and cls not in self._wrapped_classes:
                self._wrapped_classes.add(cls)
                cls.scale = wrap_rare_function(cls.scale, self._guard, self._note_scaled)

    def _note_scaled(self, result: object, _: int, scaler: object, outputs: object) -> None:
        """Remember which loss was scaled, if `scale` was called with a tensor."""
        if result is not outputs and type(result) is torch.Tensor:
            self._scaled_losses.append((weakref.ref(result), weakref.ref(outputs), weakref.ref(scaler)))

    def on_backward_end(self, thread: ThreadState, start_ns: int, args: Any, kwargs: Any) -> None:
        """Read the loss of a backward pass that just ended, if it is due. `args`, `kwargs`: of autograd's engine."""
        recorder = self._recorder
        if thread is not recorder.training_thread or recorder.ring is None:
            return
        dynamo_callback = _set_eval_frame(None)  # else dynamo would try to compile functions that are called below
        try:
            with torch._C.DisableTorchFunction():  # a mode of the script would see our reads
                self._read_copies()
                if start_ns - self._second_start_ns >= LOSS_INTERVAL_NS:
                    self._second_start_ns, self._passes_left = start_ns, MAX_PASSES
                # Other passes are torch.autograd.grad, or a pass across RPC.
                if self._passes_left and kwargs.get("accumulate_grad") and type(args[0]) is tuple and args[0]:
                    self._passes_left -= 1
                    caller = self._find_caller()
                    if caller is not None and start_ns >= caller.next_ns:
                        caller.next_ns = start_ns + LOSS_INTERVAL_NS
                        self._read_or_copy(caller, start_ns, args[0])
        except Exception as error:  # noqa: BLE001 - a loss is lost, the training is not
            self._passes_left = 0
            self._session.count_error("loss", error, fatal=False)
        finally:
            _set_eval_frame(dynamo_callback)
        recorder.loss_due = 0 if self._pending_copies or self._passes_left else self._second_start_ns + LOSS_INTERVAL_NS

    def _find_caller(self) -> BackwardCaller | None:
        """Return the line that called backward; None beyond MAX_CALLERS."""
        for frame in iter_callers(sys._getframe(1)):
            if not frame.f_code.co_filename.startswith(_HIDDEN_DIRECTORIES):
                break
        else:
            return None
        file, line = key = frame.f_code.co_filename, frame.f_lineno
        caller = self._callers.get(key)
        if caller is None and len(self._callers) < MAX_CALLERS:
            location = f"{os.path.basename(file)}:{line}"
            if any(other.location == location for other in self._callers.values()):
                location = f"{file}:{line}"
            caller = self._callers[key] = BackwardCaller(shorten_name(location))
        return caller

    def _read_or_copy(self, caller: BackwardCaller, start_ns: int, roots: tuple[Any, ...]) -> None:
        """Write the loss from which a pass began, or begin to copy it from a GPU. `roots`: where the pass began."""
        root, *_ = roots
        loss, scale = root, None
        for scaled, source, scaler in self._scaled_losses:
            if scaled() is root:
                loss = source()
                if loss is None:  # the script has freed it already
                    loss, scale = root, getattr(scaler(), "_scale", None)
        reason = "the pass begins at several tensors" if len(roots) > 1 else _unreadable_reason(loss)
        if reason is not None:
            self._write(caller, start_ns, nan, reason)
        elif loss.is_cuda:
            self._copy(caller, start_ns, loss, scale)
        else:
            self._write(caller, start_ns, _value(loss) / (1.0 if scale is None else _value(scale)))

    def _write(self, caller: BackwardCaller, start_ns: int, value: float, reason: str | None = None) -> None:
        """Write a loss; or, once for each line, the `reason` why its loss cannot be read."""
        definition = caller.definitions.get(reason is None, 0)
        if definition and reason is not None:
            return
        if not definition:
            definition = self._session.define((caller, reason), lambda: {"place": caller.location, "why": reason})
            caller.definitions[reason is None] = definition
        if definition:
            (bits,) = struct.unpack("=Q", struct.pack("=d", value))
            self._recorder.put(Kind.LOSS | definition << SITE_AT, start_ns, 0, bits)

    # ---------------------------------------------------------------- on a GPU

    def _copy(self, caller: BackwardCaller, start_ns: int, loss: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Begin to copy a loss, unless a CUDA graph is being captured or too many copies are under way."""
        events = self._events = self._events or TorchEvents(self._session)
        if events.is_capturing():
            return
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if self._free_copies is None:
                memory = torch.empty((MAX_COPIES, 2, 8), dtype=torch.uint8, device="cpu", pin_memory=True)
                self._free_copies = list(map(PinnedCopy, memory))
            if not self._free_copies:
                return
            copy = self._free_copies[-1]
            copy.caller, copy.start_ns, copy.tensors = caller, start_ns, []
            for cell, tensor in zip(copy.cells, (loss, scale), strict=True):
                if tensor is not None:
                    target = cell[: _DTYPE_BYTES[tensor.dtype]].view(tensor.dtype)
                    target.copy_(tensor.view(1), non_blocking=True)
                    copy.tensors.append(target)
        device = loss.get_device()
        if copy.device != device:  # an event belongs to one device
            copy.event, copy.device = events.create_event(), device
        events.record(copy.event, device)
        self._pending_copies.append(self._free_copies.pop())

    def _read_copies(self) -> None:
        """Write the losses whose copies have completed."""
        pending, events = self._pending_copies, self._events
        while pending and events is not None and not events.is_capturing() and events.is_done(pending[0].event):
            copy = pending.popleft()
            value, *scales = map(_value, copy.tensors)
            for scale in scales:  # at most one
                value /= scale
            self._write(copy.caller, copy.start_ns, value)
            if self._free_copies is not None:
                self._free_copies.append(copy)

    def at_exit(self) -> None:
        """Write the losses whose copies have completed, because the process ends."""
        self._read_copies()


def _unreadable_reason(loss: Any) -> str | None:
    """Return why a loss cannot be read; None if it can."""
    if getattr(type(loss), "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:  # or a GradientEdge
        return f"the pass begins at a {shorten_name(type(loss).__name__)}, which is not a plain tensor"
    if loss.numel() != 1:
        return f"the pass begins at a tensor of {loss.numel():,} values, not at one value"
    if loss.device.type not in ("cpu", "cuda"):
        return f"dpmon does not read values on a device of type {loss.device.type}"
    if loss.dtype not in _DTYPE_BYTES or loss.layout is not torch.strided or loss.is_neg() or not loss.data_ptr():
        return "the pass begins at a tensor of an unusual type"
    return None


def _value(tensor: torch.Tensor) -> float:
    """Return the value of a tensor with one element in the host's memory."""
    raw = ctypes.string_at(tensor.data_ptr(), _DTYPE_BYTES[tensor.dtype])
    if tensor.dtype == torch.bfloat16:  # the upper half of a float32
        raw = b"\0\0" + raw
    value: float
    (value,) = struct.unpack({2: "=e", 4: "=f", 8: "=d"}[len(raw)], raw)
    return value
