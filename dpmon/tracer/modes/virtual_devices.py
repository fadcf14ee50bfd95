"""Runs virtual replicas: torch's own DataParallel code over several virtual devices on one real device.

Only the lowest layer is replaced: splitting a batch (scatter), joining results (gather), copying parameters to the
replicas (broadcast), and the "current device" in a replica's thread. The functions above it are copies of torch's own,
with other globals. Nothing global is changed, so real calls on other threads are not affected.

The semantics are those of GPUs: torch.chunk splits the batch; replica 0 shares its storage with the module (BatchNorm's
running statistics come from its chunk); the other replicas get copies, so their in-place changes are lost; the module
gets the sum of all replicas' gradients; scalars are gathered into a vector, with a warning.

On a GPU, torch's own scatter moves a batch from another device to the GPU, and torch's own gather joins the results:
both accept the same device several times. torch's broadcast does not: a replica on the module's own device would get
the module's own parameters and buffers (torch/csrc/cuda/comm.cpp). torch's scatter does not copy inputs that are
already on the device. In these two cases dpmon makes the copies.
"""

from __future__ import annotations

import importlib
import os
import threading
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch

from dpmon.record.span_format import Kind
from dpmon.tracer.core.hidden_frames import Function
from dpmon.tracer.modes.replica_threads import ReplicaThread

PRIMITIVE_NAMES = ("scatter_kwargs", "replicate", "parallel_apply", "gather")
"""Names of DataParallel's phases in the module that defines it."""
PRIMITIVES = (Kind.SCATTER, Kind.REPLICATE, Kind.PARALLEL_APPLY, Kind.GATHER)
"""Kinds of these phases' spans."""
SCATTER_KWARGS, REPLICATE, PARALLEL_APPLY, GATHER, SCATTER, SCATTER_APPLY, BROADCAST_APPLY, GATHER_APPLY = range(8)
"""Indices of the functions in `TorchOriginals.all` and `VirtualDevices.primitives`."""

_NULL_CONTEXT = nullcontext()


class _Scatter(torch.autograd.Function):
    """The split of a tensor, as in comm.scatter: the first chunk is a view of the tensor, the others are copies."""

    @staticmethod
    def forward(ctx: Any, targets: Sequence[int], sizes: object, dim: int, tensor: torch.Tensor) -> Any:
        ctx.dim = dim
        chunks = tensor.chunk(len(targets), dim) if sizes is None else tensor.split(sizes, dim)  # type: ignore[no-untyped-call]
        return (chunks[0], *(chunk.clone() for chunk in chunks[1:]))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return None, None, None, torch.cat(grads, ctx.dim)


class _Gather(torch.autograd.Function):
    """The concatenation of the replicas' tensors along `dim`; zero-dimensional tensors become a vector."""

    @staticmethod
    def forward(ctx: Any, target: object, dim: int, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.dim = dim
        ctx.scalars = dim == 0 and all(tensor.dim() == 0 for tensor in tensors)
        if ctx.scalars:
            # A literal copy of torch's warning (torch.nn.parallel._functions.Gather): scripts filter it by its text.
            warnings.warn(
                "Was asked to gather along dimension 0, but all input tensors were scalars; "
                "will instead unsqueeze and return a vector.",
                stacklevel=2,
            )
            tensors = tuple(tensor.view(1) for tensor in tensors)
        ctx.sizes = [tensor.size(dim) for tensor in tensors]
        return torch.cat(tensors, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        pieces = grad.split(ctx.sizes, ctx.dim)  # type: ignore[no-untyped-call]
        return (None, None, *(piece[0] if ctx.scalars else piece for piece in pieces))


class _Broadcast(torch.autograd.Function):
    """The parameters for every replica: the originals for the first, copies for the others. Gradients are summed."""

    @staticmethod
    def forward(ctx: Any, targets: Sequence[int], *tensors: torch.Tensor) -> Any:
        ctx.count = len(tensors)
        copies = [tensors, *(tuple(tensor.clone() for tensor in tensors) for _ in targets[1:])]
        needs_grad = ctx.needs_input_grad[1:]
        constant = [tensor for copy in copies for tensor, needs in zip(copy, needs_grad, strict=True) if not needs]
        ctx.mark_non_differentiable(*constant)
        return tuple(tensor for copy in copies for tensor in copy)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        sums = []
        for index in range(ctx.count):
            total = grads[index]
            for replica in range(index + ctx.count, len(grads), ctx.count):
                total = total + grads[replica]
            sums.append(total)
        return (None, *sums)


def _broadcast(tensors: Sequence[torch.Tensor], devices: Sequence[int], detach: bool = False) -> Any:
    """Copy parameters and buffers for torch's `replicate`; return a list of tensors per device."""
    if not tensors:
        return []
    if detach:
        return [list(tensors), *([t.detach().clone() for t in tensors] for _ in devices[1:])]
    flat = _Broadcast.apply(devices, *tensors)  # type: ignore[no-untyped-call]
    count = len(tensors)
    return [list(flat[i : i + count]) for i in range(0, len(flat), count)]


class _ModuleOverlay:
    """A module with other members in place of some of its own."""

    def __init__(self, module: object, **members: object) -> None:
        self._module = module
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _SingleDeviceTorch(_ModuleOverlay):
    """The module torch for parallel_apply, with one device for all replicas."""

    def __init__(self, base: torch.device) -> None:
        def on_device(_: object = None) -> Any:
            return torch.cuda.device(base) if base.type == "cuda" else _NULL_CONTEXT

        # A new thread begins on the default stream, but the batch may have been prepared on another stream.
        def stream(_: object = None) -> Any:
            return torch.accelerator.current_stream(base.index) if base.type == "cuda" else _NULL_CONTEXT

        def cuda_stream(_: object = None) -> Any:
            return torch.cuda.current_stream(base) if base.type == "cuda" else _NULL_CONTEXT

        def on_stream(stream: Any) -> Any:
            return torch.cuda.stream(stream) if base.type == "cuda" else _NULL_CONTEXT

        super().__init__(torch)
        self.accelerator = SimpleNamespace(
            is_available=lambda: True,
            current_accelerator=lambda: base,
            current_stream=stream,
            device_index=on_device,
        )
        # Older parallel_apply evaluates the annotation torch.cuda.Stream in each call.
        self.cuda = _ModuleOverlay(torch.cuda, current_stream=cuda_stream, device=on_device, stream=on_stream)
        self.is_autocast_enabled = lambda: torch.is_autocast_enabled(base.type)
        self.amp = _ModuleOverlay(torch.amp, autocast=_autocast_on(base))


def _autocast_on(base: torch.device) -> Function:
    """Return a replacement for torch's autocast, on `base`. Older versions of parallel_apply ask for "cuda"."""

    def autocast(*_: object, enabled: bool = True, **__: object) -> Any:
        return torch.amp.autocast(base.type, enabled=enabled)

    return autocast


def _scatter_on(base: torch.device, torch_apply: Any, copying_scatter: Any) -> SimpleNamespace:
    """Return a replacement for torch's Scatter for replicas that share a GPU. `torch_apply`: torch's own apply."""

    def apply(targets: Sequence[int], sizes: object, dim: int, tensor: torch.Tensor) -> Any:
        if tensor.device == base:
            return copying_scatter.apply(targets, sizes, dim, tensor)
        return torch_apply([base.index] * len(targets), sizes, dim, tensor)

    return SimpleNamespace(apply=apply)


def _gather_on(base: torch.device, torch_apply: Any) -> SimpleNamespace:
    """Return a replacement for torch's Gather for replicas that share a GPU. `torch_apply`: torch's own apply."""

    def apply(target: object, dim: int, *tensors: torch.Tensor) -> Any:
        return torch_apply(base.index, dim, *tensors)

    return SimpleNamespace(apply=apply)


def _index(device: Any, *_: object, **__: object) -> int:
    """Return the index of a virtual device. Replaces torch's _get_device_index."""
    if isinstance(device, (str, torch.device)):
        return torch.device(device).index or 0
    return 0 if device is None else int(device)


def _global_names_used(code: CodeType) -> set[str]:
    """Return the global names and attributes that a function uses, also in functions defined in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _global_names_used(constant)
    return names


def with_globals(function: Function, **new_globals: object) -> Function:
    """Return a copy of a torch function with other globals. Raises TypeError if the function is not as expected."""
    if not isinstance(function, FunctionType):
        raise TypeError(f"{function!r} is not a plain function: this version of torch is not supported")
    missing_names = set(new_globals) - _global_names_used(function.__code__)
    if missing_names:
        names = ", ".join(sorted(missing_names))
        raise TypeError(f"{function.__name__} does not use {names}: this version of torch is not supported")
    copy = FunctionType(
        function.__code__,
        {**function.__globals__, **new_globals},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class VirtualDevices:
    """A set of `count` virtual devices on the real device `base`, with torch's primitives for them."""

    def __init__(self, count: int, base: torch.device, originals: TorchOriginals) -> None:
        self.base = base
        separator = "/" if base.type != "cpu" else ":"
        self.names = tuple(f"{base}{separator}{i}" for i in range(count))
        """The devices as they are named in records, such as cpu:0 and cpu:1, or cuda:0/0 and cuda:0/1."""
        scatter_class: Any = _Scatter
        gather_class: Any = _Gather
        if base.type == "cuda":
            scatter_class = _scatter_on(base, originals.all[SCATTER_APPLY], _Scatter)
            gather_class = _gather_on(base, originals.all[GATHER_APPLY])
        scatter = with_globals(originals.scatter, Scatter=scatter_class)
        replicate = with_globals(originals.replicate, _broadcast_coalesced_reshape=_broadcast, _get_device_index=_index)
        apply_globals: dict[str, Any] = {"torch": _SingleDeviceTorch(base), "_get_device_index": _index}
        if "autocast" in originals.parallel_apply.__globals__:  # torch 2.4
            apply_globals["autocast"] = _autocast_on(base)
        if base.type == "cpu":
            new_thread = partial(ReplicaThread, max(1, len(os.sched_getaffinity(0)) // count))
            apply_globals["threading"] = SimpleNamespace(Thread=new_thread, Lock=threading.Lock)
        phase_functions = (
            with_globals(originals.scatter_kwargs, scatter=scatter),
            replicate,
            with_globals(originals.parallel_apply, **apply_globals),
            with_globals(originals.gather, Gather=gather_class),
        )
        self.primitives: tuple[Function, ...] = (
            *phase_functions,
            scatter,
            scatter_class.apply,
            _Broadcast.apply,
            gather_class.apply,
        )
        """Replacements for each of `TorchOriginals.all`."""
        torch_stand_in = SimpleNamespace(device=lambda *_: base)
        self.functional = with_globals(
            originals.data_parallel, torch=torch_stand_in, _get_available_device_type=lambda: base.type
        )
        """torch's functional data_parallel for these devices."""


class TorchOriginals:
    """torch's own functions, saved before anything is patched. `__init__` raises AttributeError if one is missing."""

    def __init__(self, data_parallel: ModuleType, scatter_gather: ModuleType) -> None:
        self.scatter = scatter_gather.scatter
        self.scatter_kwargs = data_parallel.scatter_kwargs
        self.replicate = data_parallel.replicate
        self.parallel_apply = data_parallel.parallel_apply
        self.gather = data_parallel.gather
        self.data_parallel = data_parallel.data_parallel
        functions: Any = importlib.import_module("torch.nn.parallel._functions")
        self.functions = functions
        self.all: tuple[Function, ...] = (
            self.scatter_kwargs,
            self.replicate,
            self.parallel_apply,
            self.gather,
            self.scatter,
            functions.Scatter.apply,
            functions.Broadcast.apply,
            functions.Gather.apply,
        )
