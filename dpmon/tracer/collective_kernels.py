"""The kernels that see each collective of a sampled step.

Python kernels for the operators of `c10d` are registered at the dispatch key BackendSelect for one sampled step, and
removed after it. That key comes after autograd and before the backends. So the kernels see all collectives: those of
DistributedDataParallel and FSDP2 from C++ or Python, hand-written and functional ones, in compiled functions and in
inference mode. A kernel of the script at another key runs as before. (A kernel at an autograd key would miss functional
collectives and inference mode.) `send` and `recv` have no kernel, because they are not collectives.

From torch 2.14 on, its own hooks take the place of these kernels (collective_hooks).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import torch

from dpmon.tracer.collective_launches import Launches, Seen
from dpmon.tracer.collective_operators import OPERATORS, Operator
from dpmon.tracer.frames import drop_frames

_KEY: Any = torch._C.DispatchKey.BackendSelect


class Kernels(Launches):
    """Sees collectives by kernels for their operators."""

    def missing(self) -> str | None:
        """Return what this torch lacks for recording collectives; None if it has everything."""
        for holder, name in (
            (torch._C, "_dispatch_keyset_full_after"),
            (torch._C, "_dispatch_has_kernel_for_dispatch_key"),
            (_distributed(), "Work"),
        ):
            if not hasattr(holder, name):
                return f"this torch has no {name}, which recording collectives needs"
        if "with_keyset" not in inspect.signature(torch.library.Library.impl).parameters:
            return "kernels of this torch do not get the dispatch keys, which recording collectives needs"
        return None

    def _register(self) -> None:
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        self._registered = library
        below = torch._C._dispatch_keyset_full_after(_KEY)
        for name, operator in OPERATORS.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is None or torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "BackendSelect"):
                continue  # another version of torch, or a kernel of the script
            kernel = self._kernel(packet.default, operator, below)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def _remove(self) -> None:
        if self._registered is not None:
            self._registered._destroy()
            self._registered = None
        self._groups.clear()

    def _kernel(self, op: Any, operator: Operator, below: Any) -> Callable[..., Any]:
        redispatch, clock, fault = op.redispatch, monotonic_ns, self._session.fault

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            began = clock()
            try:
                self._within += 1
                try:
                    result = redispatch(keyset & below, *args, **kwargs)
                finally:
                    self._within -= 1
                if self._sample.on:
                    launched = clock()
                    try:
                        self._called(operator, args, result, began, launched)
                    except Exception as error:  # noqa: BLE001 - the collective is already launched
                        fault("collectives", error, fatal=False)
                    self._sample.own_ns += clock() - launched
                return result
            except BaseException as error:
                drop_frames(error)
                args, kwargs, result = (), {}, None
                raise

        return kernel

    def _called(self, operator: Operator, args: tuple[Any, ...], result: Any, began: int, now: int) -> None:
        """Record the collective of an operator that was just called."""
        with torch._C.DisableTorchFunction():  # hides our reads from the script's modes
            tensors = _flat(args[operator.counted])
            first = tensors[0] if tensors else _flat(args[1 - operator.counted])[0]
            device, dtype = first.device.type, first.dtype
            if device == "meta":
                return  # torch.compile only traces the function
            size = sum([tensor.nbytes for tensor in tensors])
        group = self._group(_distributed().ProcessGroup.unbox(args[operator.group]), device)
        if operator.name == "barrier":
            size = 0  # its tensor only selects the device
        elif operator.by_ranks:
            size *= group.size
        work = result[-1] if isinstance(result, (tuple, list)) else result
        work = None if work is None else _distributed().Work.unbox(work)
        self._launched(Seen(operator.name, size, device, dtype), group, work, began, now)


def _flat(tensors: Any) -> list[Any]:
    """Return the tensors in a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in ((part,) if isinstance(part, torch.Tensor) else part)]


def _distributed() -> Any:
    return torch._C._distributed_c10d
