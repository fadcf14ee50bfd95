"""Registers the kernels that see each collective of a sampled step.

Python kernels for the operators of `c10d` are registered at the dispatch key BackendSelect for one sampled step, and
removed after it. That key comes after autograd and before the backends. So the kernels see all collectives that
DistributedDataParallel, FSDP2 or the script launches, from C++ or Python. This includes functional collectives,
compiled functions and inference mode. A kernel of the script at another key runs as before. (A kernel at an autograd
key would miss functional collectives and inference mode.) `send` and `recv` have no kernel, because they are not
collectives.

torch 2.14 adds its own hooks at this place (pytorch #186300). dpmon does not use them: torch 2.14.1 crashes if a hook
is removed while another thread is about to enter it, and dpmon cannot detect a thread that launches from C++.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import Any, NamedTuple

import torch

from dpmon.record.span_format import INSIDE_AT, SITE_AT, Kind
from dpmon.tracer.core.hidden_frames import Function, drop_frames, iter_callers
from dpmon.tracer.core.session import Session
from dpmon.tracer.steps.span_recorder import SpanRecorder

DISPATCH_NS = 15_000
"""Cost of a kernel outside its own code: the dispatcher converts the arguments and waits for the GIL."""
MAX_RANKS = 1024
"""Larger groups have no list of ranks in their definition."""
_SWITCH_INTERVAL_S = 1.0
"""Python's thread switch interval during `_change_registration`, which takes 0.1 ms: no other thread runs then."""
_DISTRIBUTED = os.path.dirname(os.path.abspath(torch.distributed.__file__)) + os.sep
_KEY: Any = torch._C.DispatchKey.BackendSelect
_c10d: Any = getattr(torch._C, "_distributed_c10d", None)  # None in a build without it


class OperatorArguments(NamedTuple):
    """The meaning of an operator's arguments."""

    name: str
    """Name in records."""
    group_argument: int
    """Index of the process group."""
    sized_argument: int
    """Index of the tensors that give the size of the collective, by the convention of nccl-tests."""
    counts_ranks: bool = False
    """Whether these tensors are one rank's part: the size is then their bytes times the number of ranks."""


OPERATORS = {
    "allreduce_": OperatorArguments("all_reduce", 1, 0),
    "allreduce_coalesced_": OperatorArguments("all_reduce", 1, 0),
    "broadcast_": OperatorArguments("broadcast", 1, 0),
    "reduce_": OperatorArguments("reduce", 1, 0),
    "allgather_": OperatorArguments("all_gather", 2, 0),
    "_allgather_base_": OperatorArguments("all_gather", 2, 0),
    "allgather_coalesced_": OperatorArguments("all_gather", 2, 0),
    "allgather_into_tensor_coalesced_": OperatorArguments("all_gather", 2, 0),
    "reduce_scatter_": OperatorArguments("reduce_scatter", 2, 1),
    "_reduce_scatter_base_": OperatorArguments("reduce_scatter", 2, 1),
    "reduce_scatter_tensor_coalesced_": OperatorArguments("reduce_scatter", 2, 1),
    "alltoall_": OperatorArguments("all_to_all", 2, 1),
    "alltoall_base_": OperatorArguments("all_to_all", 2, 1),
    "gather_": OperatorArguments("gather", 2, 1, counts_ranks=True),
    "scatter_": OperatorArguments("scatter", 2, 0, counts_ranks=True),
    "barrier": OperatorArguments("barrier", 1, 0),
    "monitored_barrier_": OperatorArguments("barrier", 1, 0),
}
"""The operators that get a kernel, by their names in torch.ops.c10d."""


class _ProcessGroup(NamedTuple):
    """A process group as it is described in records."""

    name: str
    size: int
    ranks: tuple[int, ...] | None
    """None for all ranks or unknown ranks."""
    backend: str | None
    """The backend for the type of the device; None if unknown."""


class CollectiveKernels:
    """The kernels of one process; they record each collective that is launched during a sample."""

    def __init__(self, session: Session, recorder: SpanRecorder) -> None:
        self._session = session
        self._recorder = recorder
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child, where the parent's kernels stay but only forward calls."""
        self.inherited: Any = getattr(self, "_library", None) or getattr(self, "inherited", None)
        """The library with the parent's kernels, kept alive because deleting it would remove them; or None."""
        self._library: Any = None
        """The library with this process's kernels, while they are registered."""
        self._shared = False
        """Whether other threads launch collectives, so that the kernels must stay."""
        self._within = 0
        """Number of kernels that are running."""
        self._groups: dict[tuple[object, str], _ProcessGroup] = {}
        """By process group and type of the device, for one sample."""
        self.is_on = False
        """Whether a sample is running."""
        self.start_ns = self._own_ns = 0
        """Start of the sample (monotonic ns), and time that it has cost so far (ns)."""
        self.launches: list[None] = []
        """One entry for each collective. Threads that add entries at the same time lose none; a sum could lose some."""

    def begin_sample(self, begin_ns: int) -> None:
        """Begin a sample with the registered kernels. `begin_ns`: when their registration began (monotonic ns)."""
        self.launches = []
        self.start_ns = monotonic_ns()
        self._own_ns = self.start_ns - begin_ns
        self.is_on = True

    def cost_ns(self) -> int:
        """Return the cost of the sample so far (ns)."""
        return self._own_ns + len(self.launches) * DISPATCH_NS

    def register(self) -> bool:
        """Register the kernels; return False if that is not possible now."""
        return self._change_registration(self._register)

    def remove(self) -> bool:
        """Remove the kernels; return False if that is not possible now."""
        return self._change_registration(self._remove)

    def _change_registration(self, change: Callable[[], None]) -> bool:
        """Register or remove the kernels; return False if another thread may launch a collective at the same time.

        torch's table of kernels must not change while another thread reads it. So no other thread runs Python code
        here, and no other thread may already be in torch.distributed. If another thread launches a collective during a
        sample, the kernels stay for good.
        """
        if self._shared:
            return True
        if self._within > 0:
            return False
        interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        try:
            if _others_communicate():
                return False
            change()
        finally:
            sys.setswitchinterval(interval)
        return True

    def _register(self) -> None:
        library: Any = torch.library.Library("c10d", "IMPL")  # type: ignore[no-untyped-call]
        self._library = library
        lower_keys = torch._C._dispatch_keyset_full_after(_KEY)
        for name, operator in OPERATORS.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is None or torch._C._dispatch_has_kernel_for_dispatch_key(f"c10d::{name}", "BackendSelect"):
                continue  # another version of torch, or a kernel of the script
            kernel = self._kernel(packet.default, operator, lower_keys)
            library.impl(name, kernel, "BackendSelect", with_keyset=True)

    def _remove(self) -> None:
        if self._library is not None:
            self._library._destroy()
            self._library = None
        self._groups.clear()

    def _kernel(self, overload: Any, operator: OperatorArguments, lower_keys: object) -> Function:
        redispatch, clock, count_error = overload.redispatch, monotonic_ns, self._session.count_error

        def kernel(keyset: Any, *args: object, **kwargs: object) -> object:
            start_ns = clock()
            try:
                self._within += 1
                try:
                    result = redispatch(keyset & lower_keys, *args, **kwargs)
                finally:
                    self._within -= 1
                launches = self.launches  # another thread may end this sample, or begin one, at any time
                if self.is_on and start_ns >= self.start_ns:
                    launch_ns = clock()
                    try:
                        self._record_launch(operator, args, start_ns, launch_ns, launches)
                    except Exception as error:  # noqa: BLE001 - the collective is already launched
                        count_error("collectives of a step", error, fatal=False)
                    self._own_ns += clock() - launch_ns
                return result
            except BaseException as error:
                drop_frames(error)
                args, kwargs, result = (), {}, None
                raise

        return kernel

    def _record_launch(
        self, operator: OperatorArguments, args: tuple[object, ...], start_ns: int, launch_ns: int, launches: list[None]
    ) -> None:
        """Record a collective that was just launched, and count it in `launches`."""
        recorder = self._recorder
        thread = recorder.threads.get(get_ident()) or recorder.current_thread_state()
        with torch._C.DisableTorchFunction():  # hides our reads from the script's modes
            tensors = _flatten_tensors(args[operator.sized_argument])
            first = tensors[0] if tensors else _flatten_tensors(args[1 - operator.sized_argument])[0]
            device, dtype = first.device.type, first.dtype
            if device == "meta":
                return  # torch.compile only traces the function
            size = sum([tensor.nbytes for tensor in tensors])
        group = self._group(args[operator.group_argument], device)
        if operator.name == "barrier":
            size = 0  # its tensor only selects the device
        elif operator.counts_ranks:
            size *= group.size
        if thread is not recorder.training_thread and recorder.training_thread is not None:
            # With GPUs, autograd launches the collectives of a backward pass on its own threads.
            self._shared = self._shared or recorder.open_kinds[recorder.training_thread.number] != Kind.BACKWARD
        launches.append(None)
        definition = self._site(operator.name, group, device, dtype)
        if definition:
            first_word = Kind.COLLECTIVE | thread.thread_bits | thread.open_kind << INSIDE_AT | definition << SITE_AT
            recorder.put(first_word, start_ns, launch_ns - start_ns, size)

    def _group(self, boxed_group: object, device: str) -> _ProcessGroup:
        group = _c10d.ProcessGroup.unbox(boxed_group)
        process_group = self._groups.get((group, device))
        if process_group is None:
            size = group.size()
            ranks = backend = None
            if size != torch.distributed.get_world_size() and size <= MAX_RANKS:
                with suppress(KeyError, ValueError, RuntimeError):  # the script made it without torch.distributed
                    ranks = tuple(torch.distributed.get_process_group_ranks(group))
            with suppress(RuntimeError):
                backend = str(group._get_backend(torch.device(device)).name())
            process_group = self._groups[group, device] = _ProcessGroup(str(group.group_name), size, ranks, backend)
        return process_group

    def _site(self, operation: str, group: _ProcessGroup, device: str, dtype: object) -> int:
        key = "collective", operation, group, device, dtype

        def spell() -> dict[str, object]:
            ranks = None if group.ranks is None else list(group.ranks)
            dtype_name = str(dtype).removeprefix("torch.")
            facts = {"operation": operation, "group": group.name, "size": group.size, "ranks": ranks}
            return {**facts, "dtype": dtype_name, "backend": group.backend, "device": device}

        return self._session.define(key, spell)


def _others_communicate() -> bool:
    """Return whether another thread is in torch.distributed, and may launch a collective at any time."""
    thread = get_ident()
    return any(
        frame.f_code.co_filename.startswith(_DISTRIBUTED)
        for ident, innermost in sys._current_frames().items()
        if ident != thread
        for frame in iter_callers(innermost)
    )


def _flatten_tensors(tensors: Any) -> list[Any]:
    """Return the tensors in a tensor, a list, or a list of lists."""
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for part in tensors for tensor in ((part,) if isinstance(part, torch.Tensor) else part)]
