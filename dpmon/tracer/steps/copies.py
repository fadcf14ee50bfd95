"""Records copies from the host to a GPU by `Tensor.to` and `Tensor.cuda`, as a phase of the step.

The two methods are replaced right after the import of torch, if torch was built for GPUs. Some code compares methods by
identity (a subclass in its `__torch_function__`, torch.overrides). This still works: torch passes the replacements to
such code, too, because torch/csrc/utils/python_arg_parser.cpp looks the method up in torch.Tensor. Until a call has run
on a GPU, the replacements only call the originals.

The time of a copy is subtracted from the enclosing phase. Only copies that the training thread makes in a step count.
Scattered batches, replicated parameters, `Tensor.copy_` and tensors made on a GPU do not count. Tensors of a class with
its own `__torch_dispatch__` do not count either (torch.compile traces with such classes).
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from types import MethodDescriptorType, MethodType
from typing import Any

import torch

from dpmon.record.span_format import INSIDE_AT, Kind
from dpmon.tracer.core.hidden_frames import Function, drop_frames
from dpmon.tracer.core.module_tables import dense_parts
from dpmon.tracer.core.session import Session, raise_from_signal
from dpmon.tracer.steps.span_recorder import SpanRecorder

_DeviceFinder = Callable[[tuple[object, ...], dict[str, object]], object]
_GPU = "cuda"
_MOVING_KINDS = frozenset((Kind.COPY, Kind.SCATTER, Kind.REPLICATE, Kind.GATHER))
"""Spans that move tensors to devices themselves."""
_PYTHON_KEY: Any = torch._C.DispatchKey.Python


class CopyTracer:
    """The tracer of one process's copies to GPUs. Its own code never raises."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session = session
        self._recorder = recorder

    def install(self, tensor_class: Any = torch.Tensor) -> None:
        """Put the traced methods into torch's tensor class, if torch was built for GPUs."""
        if torch.version.cuda is None and torch.version.hip is None:
            return
        tensor_class.to = self.wrap_copy_method(tensor_class.to, target_of_to)
        tensor_class.cuda = self.wrap_copy_method(tensor_class.cuda, target_of_cuda)

    def wrap_copy_method(self, original: Function, find_device: _DeviceFinder) -> Function:
        """Return the traced form of a method that copies. `find_device`: finds the target device in its arguments."""
        session, recorder = self._session, self._recorder
        name = original.__name__

        def method(tensor: object, *args: object, **kwargs: object) -> object:
            try:
                thread, timer = recorder.threads.get(get_ident()), recorder.device_timer
                if timer is None or thread is None or thread is not recorder.training_thread:
                    return original(tensor, *args, **kwargs)
                if thread.open_kind in _MOVING_KINDS or session.is_off:
                    return original(tensor, *args, **kwargs)
                gpu = self._target_gpu(tensor, find_device, args, kwargs)
                if gpu < 0:
                    return original(tensor, *args, **kwargs)
                phase_timer = timer.begin_copy(thread, gpu)
                first_word = Kind.COPY | thread.thread_bits | thread.open_kind << INSIDE_AT
                return recorder.run_in_span(thread, first_word, phase_timer, _bytes, original, (tensor, *args), kwargs)
            except BaseException as error:
                drop_frames(error)
                tensor, args, kwargs = None, (), {}
                raise

        method.__module__, method.__name__, method.__qualname__ = "torch", name, f"Tensor.{name}"
        return TracedMethod(original, method, recorder)

    def _target_gpu(
        self, tensor: Any, find_device: _DeviceFinder, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> int:
        """Return the index of the GPU that a host tensor is copied to; -1 for any other call."""
        try:
            device = find_device(args, kwargs)
            if device is None or type(device) is torch.dtype or torch._C._get_tracing_state() is not None:
                return -1  # torch.jit.trace would record our reads
            with torch._C.DisableTorchFunction():  # hides our reads from subclasses and modes
                if torch._C._dispatch_keys(tensor).has(_PYTHON_KEY) or not tensor.is_cpu:
                    return -1
                if isinstance(device, torch.Tensor):
                    device = device.device
                elif isinstance(device, str):
                    device = torch.device(device)
            index: Any = device
            if not isinstance(device, int) or isinstance(device, bool):
                if not isinstance(device, torch.device) or device.type != _GPU:
                    return -1
                index = torch.cuda.current_device() if device.index is None else device.index
            return index if index < torch.cuda.device_count() else -1
        except Exception as error:  # noqa: BLE001 - the original reports faulty arguments
            raise_from_signal(error)
            return -1


class TracedMethod:
    """The replacement for a method of torch.Tensor. It is a descriptor as the original is: torch.compile checks that.

    It equals the original, so that it is found in tables that were made before the replacement.
    """

    __objclass__ = torch._C.TensorBase

    def __init__(self, original: Any, function: Function, recorder: SpanRecorder) -> None:
        self.__module__ = "torch"
        self.__name__ = original.__name__
        self.__qualname__ = f"Tensor.{original.__name__}"
        self.__doc__ = original.__doc__
        self.__wrapped__ = original
        self._function = function
        self._recorder = recorder

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return MethodDescriptorType

    def __get__(self, tensor: object, tensor_class: object = None) -> object:
        if tensor is None:
            return self
        if self._recorder.device_timer is None:  # no call has run on a GPU yet
            return self.__wrapped__.__get__(tensor, tensor_class)
        return MethodType(self._function, tensor)

    @property
    def __call__(self) -> Function:
        return self._function  # without a frame of its own

    def __eq__(self, other: object) -> bool:
        return other is self or other is self.__wrapped__

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __repr__(self) -> str:
        return repr(self.__wrapped__)

    def __reduce__(self) -> str:
        return self.__qualname__  # pickle finds this name in torch, with or without dpmon


def _bytes(result: object) -> int:
    """Return the number of bytes copied; 0 if unknown. It is the size of the result, as the host converts the dtype."""
    try:
        with torch._C.DisableTorchFunction():
            return sum(part.nelement() * part.element_size() for part in dense_parts(result))
    except Exception as error:  # noqa: BLE001 - the copy is already made
        raise_from_signal(error)
        return 0


def target_of_to(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return the first argument of to(device, ...), to(other, ...) or to(dtype, ...), by position or by name."""
    return args[0] if args else kwargs.get("device", kwargs.get("other"))


def target_of_cuda(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Return the device argument of cuda(device=None, ...)."""
    device = args[0] if args else kwargs.get("device")
    return _GPU if device is None else device
