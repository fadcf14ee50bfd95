"""torch's own hooks around each collective of a sampled step, from torch 2.14 on (pytorch #186300).

The hooks of a process group are called before and after each collective that is launched through it, in C++ or Python.
They are registered on all process groups for one sampled step, and removed after it. A group that is made during the
step is not seen.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any, NamedTuple

import torch

from dpmon.tracer.collective_launches import Launches, Seen
from dpmon.tracer.frames import drop_frames

HOOK = 0x64706D6F6E
"""Number of our hooks; those of others have other numbers."""


class _Operation(NamedTuple):
    """Meaning of the tensors of a collective."""

    name: str
    """In records."""
    outputs: bool = False
    """Whether its outputs count, by the convention of nccl-tests; else its inputs."""
    by_ranks: bool = False
    """Whether each rank has only its part of these bytes."""


OPERATIONS = {
    "ALLREDUCE": _Operation("all_reduce"),
    "BROADCAST": _Operation("broadcast"),
    "REDUCE": _Operation("reduce"),
    "ALLGATHER": _Operation("all_gather", outputs=True),
    "REDUCE_SCATTER": _Operation("reduce_scatter"),
    "ALLTOALL": _Operation("all_to_all"),
    "GATHER": _Operation("gather", by_ranks=True),
    "SCATTER": _Operation("scatter", outputs=True, by_ranks=True),
    "BARRIER": _Operation("barrier"),
}
"""By torch's name of the operation (HookOpName). Others are not collectives."""


class _Begun(NamedTuple):
    """A collective that is being launched."""

    seen: Seen
    began: int


class Hooks(Launches):
    """Sees collectives by torch's own hooks."""

    def reset(self) -> None:
        """Start afresh, as after a fork."""
        super().reset()
        self._begun: dict[tuple[Any, int], _Begun] = {}
        """By process group and torch's number of the collective."""

    def _register(self) -> None:
        self._registered = []
        groups: list[Any] = list(torch.distributed.distributed_c10d._world.pg_map)
        for group in groups:
            self._registered.append(group)
            before, after = self._hooks(group)
            group.register_pre_hook(HOOK, before)
            group.register_post_hook(HOOK, after)

    def _remove(self) -> None:
        for group in self._registered or ():
            group.unregister_pre_hook(HOOK)
            group.unregister_post_hook(HOOK)
        self._registered = None
        self._begun.clear()
        self._groups.clear()

    def _hooks(self, group: Any) -> tuple[Any, Any]:
        """Our functions before and after each collective of a group."""
        clock, fault = monotonic_ns, self._session.fault

        def before(args: Any) -> None:
            began = clock()
            try:
                if self._sample.on:
                    seen = _seen(args, group)
                    if seen is not None:
                        self._begun[group, args.op_id] = _Begun(seen, began)
                    self._sample.own_ns += clock() - began
            except Exception as error:  # noqa: BLE001 - the collective must be launched
                fault("collectives", error, fatal=False)
            except BaseException as error:
                drop_frames(error)
                raise

        def after(args: Any) -> None:
            now = clock()
            try:
                begun = self._begun.pop((group, args.op_id), None)
                if begun is not None and self._sample.on:
                    seen = begun.seen
                    self._launched(seen, self._group(group, seen.device), args.work, begun.began, now)
                    self._sample.own_ns += clock() - now
            except Exception as error:  # noqa: BLE001 - the collective is already launched
                fault("collectives", error, fatal=False)
            except BaseException as error:
                drop_frames(error)
                raise

        return before, after


def available() -> bool:
    """Whether this torch has the hooks."""
    group = getattr(getattr(torch._C, "_distributed_c10d", None), "ProcessGroup", None)
    return hasattr(group, "register_pre_hook") and hasattr(group, "register_post_hook")


def _seen(args: Any, group: Any) -> Seen | None:
    """Facts about a collective that is about to be launched; None if it is none, or torch.compile only traces it."""
    operation = OPERATIONS.get(args.name.name)
    if operation is None:
        return None
    if operation.name == "barrier":
        # Its tensor, which hooks do not get, only selects the device.
        return Seen("barrier", 0, torch.distributed.distributed_c10d._get_object_coll_device(group), torch.uint8)
    with torch._C.DisableTorchFunction():  # hides our reads from the script's modes
        inputs, outputs = args.input_tensors, args.output_tensors
        counted = outputs if operation.outputs else inputs
        first = (counted or inputs or outputs)[0]
        device = first.device.type
        if device == "meta":
            return None
        size = sum([tensor.nbytes for tensor in counted])
    return Seen(operation.name, size * (group.size() if operation.by_ranks else 1), device, first.dtype)
