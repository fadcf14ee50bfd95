"""The operators of torch.ops.c10d that dpmon records, and the meaning of their arguments."""

from __future__ import annotations

from typing import NamedTuple


class Operator(NamedTuple):
    """Meaning of the arguments of an operator."""

    name: str
    """Name in records."""
    group: int
    """Index of the process group."""
    counted: int
    """Index of the tensors that give the size of the collective, by the convention of nccl-tests."""
    by_ranks: bool = False
    """Whether these tensors are one rank's part: the size is then their bytes times the number of ranks."""


OPERATORS = {
    "allreduce_": Operator("all_reduce", 1, 0),
    "allreduce_coalesced_": Operator("all_reduce", 1, 0),
    "broadcast_": Operator("broadcast", 1, 0),
    "reduce_": Operator("reduce", 1, 0),
    "allgather_": Operator("all_gather", 2, 0),
    "_allgather_base_": Operator("all_gather", 2, 0),
    "allgather_coalesced_": Operator("all_gather", 2, 0),
    "allgather_into_tensor_coalesced_": Operator("all_gather", 2, 0),
    "reduce_scatter_": Operator("reduce_scatter", 2, 1),
    "_reduce_scatter_base_": Operator("reduce_scatter", 2, 1),
    "reduce_scatter_tensor_coalesced_": Operator("reduce_scatter", 2, 1),
    "alltoall_": Operator("all_to_all", 2, 1),
    "alltoall_base_": Operator("all_to_all", 2, 1),
    "gather_": Operator("gather", 2, 1, by_ranks=True),
    "scatter_": Operator("scatter", 2, 0, by_ranks=True),
    "barrier": Operator("barrier", 1, 0),
    "monitored_barrier_": Operator("barrier", 1, 0),
}
"""The operators that get a kernel, by their names in torch.ops.c10d."""
