"""Reads the loss: the single value from which a backward pass began, at most once a second for each calling line.

On the CPU, the value is read from memory after the pass. On a GPU, it is copied to pinned memory after the pass, and a
later pass reads the copy if its event has completed. Nothing waits for the GPU, and no tensor of the script is kept.
Dispatch and function modes of the script see neither.

The line is the innermost one outside torch. Once a second, dpmon looks at PASSES passes in a row, so that all lines of
a step are read together. Under a GradScaler, a pass begins at a scaled loss, so a wrapper of `GradScaler.scale` notes
what was scaled.
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

EVERY_NS = 1_000_000_000
PASSES = 8
MAX_LINES = 16
"""Most lines of a process that have losses."""
MAX_COPIES = 8
"""Most copies from a GPU that are under way."""
NEVER = 1 << 62
_set_eval_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame
"""Sets how dynamo treats the frames that this thread enters; returns the previous setting."""
_HIDDEN = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, os.path.dirname(os.path.abspath(__file__))))
_BYTES = {torch.float64: 8, torch.float32: 4, torch.float16: 2, torch.bfloat16: 2}


class BackwardCaller:
    """A line that calls backward."""

    __slots__ = ("next_ns", "numbers", "place")

    def __init__(self, place: str) -> None:
        self.place = place
        self.numbers: dict[bool, int] = {}
        """Number of its definition for losses (True), and of that for the first reason why there is none (False)."""
        self.next_ns = 0
        """When the next loss may be read (monotonic ns)."""


class PinnedCopy:
    """Pinned memory for a loss and its scale, and the event that completes after they were copied there."""

    __slots__ = ("cells", "copied", "device", "event", "line", "started")

    def __init__(self, cells: torch.Tensor) -> None:
        self.cells = cells
        self.event: Any = None
        self.device: int | None = None
        self.copied: list[torch.Tensor] = []
        """The loss, and its scale if the loss must be divided by it."""
        self.line: Any = None
        self.started = 0


class LossTracer:
    """The losses of one process."""

    def __init__(self, session: Session, recorder: SpanRecorder, events: TorchEvents | None = None) -> None:
        self._session = session
        self._recorder = recorder
        self._events = events
        self._copies: deque[PinnedCopy] = deque()
        self._free: list[PinnedCopy] | None = None
        """None until pinned memory is allocated."""
        self._guard = session.guard("loss", fatal=False)
        self._followed: set[type] = set()
        """Classes with a wrapped `scale`."""
        self._parents: list[object] = []
        """`PinnedCopy` objects of the parent process, which a forked child must keep alive."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, at first and in a forked child."""
        self._lines: dict[tuple[str, int], BackwardCaller] = {}
        self._began = -EVERY_NS
        """When the first pass of this second began (monotonic ns)."""
        self._left = 0
        """Passes of this second that are still to be looked at."""
        if self._free is not None:  # this process must not return the parent's events and memory to the driver
            self._parents.append((self._free, self._copies))
            self._free, self._copies = None, deque()
        self._scaled: deque[tuple[Any, Any, Any]] = deque(maxlen=4)
        """References to the last scaled losses, to what was scaled, and to its scaler."""
        self._recorder.loss_due = 0 if self._session.config.loss else NEVER
        self._recorder.on_loss = self.on_backward_end

    def install(self) -> None:
        """Wrap GradScaler.scale. Wrap that of a subclass (FSDP has one) when its first scaler is made."""
        if self._session.config.loss:
            kind: Any = torch.amp.GradScaler
            self._wrap_scaler(kind)
            kind.__init__ = wrap_rare_function(
                kind.__init__, self._guard, lambda _, __, me, *___, **____: self._wrap_scaler(type(me))
            )

    def _wrap_scaler(self, scaler: type) -> None:
        kinds: Any = scaler.__mro__
        for kind in kinds:
            if "scale" in vars(kind) and kind not in self._followed:
                self._followed.add(kind)
                kind.scale = wrap_rare_function(kind.scale, self._guard, self._note_scaled)

    def _note_scaled(self, result: object, _: int, scaler: object, outputs: object) -> None:
        if result is not outputs and type(result) is torch.Tensor:
            self._scaled.append((weakref.ref(result), weakref.ref(outputs), weakref.ref(scaler)))

    def on_backward_end(self, me: ThreadState, began: int, args: Any, kwargs: Any) -> None:
        """Look at a backward pass that has just ended. `began`: its start; `args`, `kwargs`: of autograd's engine."""
        recorder = self._recorder
        if me is not recorder.training_thread or recorder.ring is None:
            return
        compiles = _set_eval_frame(None)  # else dynamo would try to compile functions that are called below
        try:
            with torch._C.DisableTorchFunction():  # a mode of the script would see our reads
                self._read_copies()
                if began - self._began >= EVERY_NS:
                    self._began, self._left = began, PASSES
                # Other passes are torch.autograd.grad, or a pass across RPC.
                if self._left and kwargs.get("accumulate_grad") and type(args[0]) is tuple and args[0]:
                    self._left -= 1
                    line = self._find_caller()
                    if line is not None and began >= line.next_ns:
                        line.next_ns = began + EVERY_NS
                        self._read_or_copy(line, began, args[0])
        except Exception as error:  # noqa: BLE001 - a loss is lost, the training is not
            self._left = 0
            self._session.count_error("loss", error, fatal=False)
        finally:
            _set_eval_frame(compiles)
        recorder.loss_due = 0 if self._copies or self._left else self._began + EVERY_NS

    def _find_caller(self) -> BackwardCaller | None:
        """Return the line that called the pass; None beyond MAX_LINES."""
        for frame in iter_callers(sys._getframe(1)):
            if not frame.f_code.co_filename.startswith(_HIDDEN):
                break
        else:
            return None
        key = frame.f_code.co_filename, frame.f_lineno
        line = self._lines.get(key)
        if line is None and len(self._lines) < MAX_LINES:
            place = f"{os.path.basename(key[0])}:{key[1]}"
            again = any(one.place == place for one in self._lines.values())
            line = self._lines[key] = BackwardCaller(shorten_name(f"{key[0]}:{key[1]}" if again else place))
        return line

    def _read_or_copy(self, line: BackwardCaller, began: int, roots: tuple[Any, ...]) -> None:
        """Read the loss from which a pass began, or copy it."""
        loss, scale = roots[0], None
        for scaled, source, scaler in self._scaled:
            if scaled() is roots[0]:
                loss = source()
                if loss is None:  # the script has freed it already
                    loss, scale = roots[0], getattr(scaler(), "_scale", None)
        why = "the pass begins at several tensors" if len(roots) > 1 else _unreadable_reason(loss)
        if why is not None:
            self._write(line, began, nan, why)
        elif loss.is_cuda:
            self._copy(line, began, loss, scale)
        else:
            self._write(line, began, _value(loss) / (1.0 if scale is None else _value(scale)))

    def _write(self, line: BackwardCaller, began: int, value: float, why: str | None = None) -> None:
        """Write a loss, or, once for each line, `why` it cannot be read."""
        number = line.numbers.get(why is None, 0)
        if number and why is not None:
            return
        if not number:
            number = self._session.define((line, why), lambda: {"place": line.place, "why": why})
            line.numbers[why is None] = number
        if number:
            (bits,) = struct.unpack("=Q", struct.pack("=d", value))
            self._recorder.put(Kind.LOSS | number << SITE_AT, began, 0, bits)

    # ---------------------------------------------------------------- on a GPU

    def _copy(self, line: BackwardCaller, began: int, loss: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Begin to copy a loss, unless a CUDA graph is being captured or too many copies are under way."""
        events = self._events = self._events or TorchEvents(self._session)
        if events.is_capturing():
            return
        with torch.no_grad(), torch._C._DisableTorchDispatch():
            if self._free is None:
                memory = torch.empty((MAX_COPIES, 2, 8), dtype=torch.uint8, device="cpu", pin_memory=True)
                self._free = list(map(PinnedCopy, memory))
            if not self._free:
                return
            copy = self._free[-1]
            copy.line, copy.started, copy.copied = line, began, []
            for cell, tensor in zip(copy.cells, (loss, scale), strict=True):
                if tensor is not None:
                    target = cell[: _BYTES[tensor.dtype]].view(tensor.dtype)
                    target.copy_(tensor.view(1), non_blocking=True)
                    copy.copied.append(target)
        device = loss.get_device()
        if copy.device != device:  # an event belongs to one device
            copy.event, copy.device = events.create_event(), device
        events.record(copy.event, device)
        self._copies.append(self._free.pop())

    def _read_copies(self) -> None:
        """Write the losses that have arrived."""
        events = self._events
        while self._copies and events is not None and not events.is_capturing() and events.done(self._copies[0].event):
            copy = self._copies.popleft()
            value, *scale = map(_value, copy.copied)
            self._write(copy.line, copy.started, value / (scale[0] if scale else 1.0))
            if self._free is not None:
                self._free.append(copy)

    def at_exit(self) -> None:
        """Write the losses that have arrived, because the process ends."""
        self._read_copies()


def _unreadable_reason(loss: Any) -> str | None:
    """Why a loss cannot be read; None if it can."""
    if getattr(type(loss), "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:  # or a GradientEdge
        return f"the pass begins at a {shorten_name(type(loss).__name__)}, which is no plain tensor"
    if loss.numel() != 1:
        return f"the pass begins at a tensor of {loss.numel():,} values, not at one value"
    if loss.device.type not in ("cpu", "cuda"):
        return f"dpmon does not read values on a device of type {loss.device.type}"
    if loss.dtype not in _BYTES or loss.layout is not torch.strided or loss.is_neg() or not loss.data_ptr():
        return "the pass begins at a tensor of an unusual type"
    return None


def _value(tensor: torch.Tensor) -> float:
    """Return the value of a tensor with one element in the host's memory."""
    raw = ctypes.string_at(tensor.data_ptr(), _BYTES[tensor.dtype])
    if tensor.dtype == torch.bfloat16:  # the upper half of a float32
        raw = b"\0\0" + raw
    form = {2: "=e", 4: "=f", 8: "=d"}[len(raw)]
    value: float = struct.unpack(form, raw)[0]
    return value
