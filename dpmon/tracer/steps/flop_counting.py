"""Counts the FLOPs of one step for each new combination of input sizes, by a dispatch mode of ours during that step.

The operators run unchanged, and the rules of torch.utils.flop_counter say what each of them costs. A span of kind FLOPS
marks the step, which takes longer. The assembler gives the FLOPs to later steps with the same calls.
"""

from __future__ import annotations

import logging
import re
import sys
from itertools import takewhile
from threading import Lock
from time import monotonic_ns
from types import FunctionType
from typing import Any

import torch

from dpmon.record.span_format import Kind
from dpmon.tracer.core.hidden_frames import drop_frames, iter_callers
from dpmon.tracer.core.module_tables import PARAMETERS, is_distributed_class, modules_of, tensors_of
from dpmon.tracer.core.session import raise_from_signal
from dpmon.tracer.steps.span_recorder import SpanRecorder, ThreadState

MAX_COUNTS = 8
"""How many steps of a process are counted, or refused."""
MIN_UPDATES = 2
"""No step is counted before this many optimizer updates, or backward passes without an optimizer."""
_CHEAP_NAMESPACES = ("aten", "prim", "prims", "c10d", "_c10d_functional", "c10d_functional", "profiler")
_COSTLY_NAME = re.compile(r"mm(_|$)|matmul|linear(?!\d)|conv(?!ert)|rnn_|lstm|gru|attention|einsum|mv$|cdist")
"""Operators without a rule are listed if they are of other namespaces, or if this matches their name."""
MAX_OPERATORS = 50_000
"""The count of a step ends with the next call after this many operators. It can take 50 us for each."""
_COSTLY_REASON = f"a step has more than {MAX_OPERATORS:,} operators"
_MODE_REASON = "the script has a dispatch mode or a transform of torch.func of its own"
_SHARDED_CLASSES = ("FSDPModule", "FullyShardedDataParallel", "DTensor")


class FlopCounter:
    """A dispatch mode that counts the operators under it, and decides in which steps of the process it is active."""

    # See TorchDispatchMode, whose subclasses would import torch._dynamo. torch.compile ignores this mode.
    supports_higher_order_operators = True
    is_infra_mode = ignore_compile_internals = staticmethod(lambda: True)

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self._rules: dict[str, Any] = {}
        """torch's rules by name of the operator."""
        self._figures: dict[str, Any] = {}
        """Fields of the event about the step that is counted."""
        self.reason: str | None = None
        """Why its FLOPs are unknown; None if they are known."""
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._lock = Lock()
        self._stop()
        self.known: Any = set()
        """Layout and input sizes of the calls that need no count; calls with others are passed to `handle_call`."""
        self._counts = 0

    # ---------------------------------------------------------------- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        """Call an operator, and count it. Raises only what the operator raises."""
        kwargs, caller = kwargs or {}, sys._getframe().f_back or sys._getframe()
        code, call_operator = _call.__code__, _call
        if sys.gettrace() is None and sys.getprofile() is None:  # they would see a call in the script's file
            code = code.replace(co_filename=caller.f_code.co_filename, co_firstlineno=caller.f_lineno)
            call_operator = FunctionType(code, caller.f_globals)  # warnings blame the line of the caller
        del caller  # it is this frame on threads of autograd, and the cycle would keep the tensors
        try:
            result = call_operator(getattr(func, "_op", func), args, kwargs)
        except BaseException as error:
            self.reason = "an operator raised an exception"
            drop_frames(error)
            if (entry := error.__traceback__) is not None and entry.tb_frame.f_code is code:
                error.__traceback__ = entry.tb_next
            del args, kwargs, entry
            raise
        if self.reason is not None:
            return result
        name = str(getattr(func, "overloadpacket", func)).replace("_for_cpu", "")
        try:
            with torch._C.DisableTorchFunction(), self._lock:  # hides our reads from the script's modes
                for subclass in set(types) - {torch.Tensor, torch.nn.Parameter}:
                    self.reason = f"the script computes with a subclass of Tensor ({subclass.__name__})"
                is_counted = self._count(name, args, kwargs, result)
        except Exception as error:  # noqa: BLE001 - a rule may not know these arguments
            raise_from_signal(error)
            is_counted = False
        if not is_counted and name not in self._figures["uncounted"]:
            self._figures["uncounted"].append(name)
        return result

    def _count(self, name: str, args: Any, kwargs: Any, result: object) -> bool:
        """Count an operator that has returned `result`. Return whether its FLOPs are known. May raise any exception."""
        figures = self._figures
        figures["operators"] += 1
        if figures["operators"] > MAX_OPERATORS:
            self.reason, self.known = _COSTLY_REASON, set()  # every call is passed to `handle_call` from now on
        if name not in self._rules:
            return name.startswith(_CHEAP_NAMESPACES) and _COSTLY_NAME.search(name) is None
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return False
        flops = self._rules[name](*args, **kwargs, out_val=result)
        dtype = str(tensors[1].dtype).removeprefix("torch.")  # the first tensor may be a bias
        if dtype == "float32" and tensors[1].is_cuda and _allows_tf32(name):
            dtype = "tf32"
        figures["by_dtype"][dtype] = figures["by_dtype"].get(dtype, 0) + flops
        is_in_backward = torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled()
        figures["recomputed_flops" if is_in_backward and _is_in_checkpoint() else "flops"] += flops
        return True

    # ---------------------------------------------------------------- steps

    def handle_call(self, thread: ThreadState, module: object, shape: int) -> None:
        """Begin to count with a top-level call of `module`, or continue. Its `shape` is not in `known`.

        A count begins with the first call of a step. If a later call needs one, it begins with the next step.
        """
        recorder, has_grad = self._recorder, torch.is_grad_enabled()
        updates = recorder.optimizer_steps if recorder.has_optimizer else recorder.backward_passes
        if recorder.counting_mode is not None:
            self.known.add(shape)
            if self.reason == _COSTLY_REASON and thread is recorder.training_thread:
                self.poll(0)
        elif thread is not recorder.training_thread or updates < MIN_UPDATES or recorder.profile is not None:
            return
        elif not recorder.is_between_steps:
            if has_grad:
                self.known.clear()
        elif has_grad or not self.known:
            self.known.add(shape)
            self._figures = {"flops": 0, "recomputed_flops": 0, "by_dtype": {}, "operators": 0, "uncounted": []}
            self.reason = self._find_refusal(module)
            if self.reason is not None:
                self._record()
                return
            logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)  # it warns about a missing triton
            from torch.utils.flop_counter import flop_registry

            self._rules = {str(operator): rule for operator, rule in flop_registry.items()}
            recorder.put(Kind.FLOPS | thread.thread_bits, monotonic_ns(), 0, 0)
            recorder.counting_mode = self
            recorder.poll_due = 0
            torch._C._push_on_torch_dispatch_stack(recorder.counting_mode)

    def _find_refusal(self, module: object) -> str | None:
        """Return why the FLOPs of a step that begins with a call of `module` cannot be counted; None if they can."""
        if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
            return _MODE_REASON
        dynamo: Any = sys.modules.get("torch._dynamo.eval_frame")
        if dynamo is not None and any(backend is not None for backend in dynamo.cached_backends.values()):
            return "torch.compile is in use"
        if self._recorder.session.has_captured_graph:
            return "the script captures CUDA graphs"
        parts = [*modules_of(module), *tensors_of(module, PARAMETERS)]
        is_sharded = any(is_distributed_class(part, name) for part in parts for name in _SHARDED_CLASSES)
        return "the model is sharded (FSDP or DTensor)" if is_sharded else None

    def poll(self, _: int) -> int:
        """End the count, because a step has ended. There is no need to call it again at a certain time."""
        if self._recorder.counting_mode is not None:
            self._stop()
            self._record()
        return 1 << 62

    def _stop(self) -> None:
        """Remove the mode from this thread, and put back the modes that the script put above it."""
        self._recorder.counting_mode = None
        stack = [torch._C._get_dispatch_stack_at(index) for index in range(torch._C._len_torch_dispatch_stack())]
        own = stack[stack.index(self) :] if self in stack else []
        for _ in own:
            torch._C._pop_torch_dispatch_stack(None)
        for other in own[1:]:
            self.reason = _MODE_REASON
            torch._C._push_on_torch_dispatch_stack(other)

    def _record(self) -> None:
        """Record the figures, or the reason for their absence. Then calls of these shapes will be counted again."""
        figures = self._figures
        if self.reason is not None:
            figures = dict.fromkeys(figures)
            self.known.clear()
        self._counts += 1
        if self._counts == MAX_COUNTS or self.reason == _COSTLY_REASON:
            self.known = range(1 << 64)  # contains all of them
        self._recorder.session.record_event("flops", "last", step=None, **figures, reason=self.reason)


def _call(operator: Any, args: Any, kwargs: Any) -> Any:
    return operator(*args, **kwargs)


def _is_in_checkpoint() -> bool:
    """Return whether the code of a checkpoint runs on this thread, inside the backward pass."""
    frames = takewhile(lambda frame: frame.f_code.co_name != "_engine_run_backward", iter_callers(sys._getframe()))
    return any("checkpoint" in f"{frame.f_code.co_filename} {frame.f_code.co_qualname}".lower() for frame in frames)


def _allows_tf32(name: str) -> bool:
    """Return whether torch may compute an operator on float32 tensors with tf32 on a GPU."""
    if "conv" in name:
        return torch._C._get_cudnn_allow_tf32()
    return torch._C._get_float32_matmul_precision() != "highest"
