"""The kinds of records about ranks that work together."""

from __future__ import annotations

from dpmon.record.field import ABSENT, START, WALL, WHO, Field, RecordKind, T

COLLECTIVE = RecordKind(
    "collective",
    "one collective of torch.distributed in a sampled step",
    (
        *WHO,
        Field("step", "integer", "the step that ran when it was launched; null between two steps"),
        Field("operation", "text", "all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all ..."),
        Field("phase", "text", "activity of the thread that launched it: data, forward, backward, optimizer, other"),
        Field(
            "bytes",
            "integer",
            "size of the tensor as counted by nccl-tests: for an all_gather the whole result, for a reduce_scatter its"
            " input, for a gather or scatter the parts of all ranks",
            "bytes",
        ),
        Field("dtype", "text", "the dtype of its first tensor"),
        Field("group", "text", "torch's name of the process group"),
        Field("group_size", "integer", "number of ranks in the group"),
        Field("ranks", "list", "the ranks of the group; null for all ranks, or if unknown"),
        Field("backend", "text", "the backend of the group: gloo, nccl ..."),
        Field("device", "text", "the type of its tensors' device"),
        Field("start_s", "number", "time of its launch, since the run's start", "s"),
        Field(
            "host_ms",
            "number",
            "from its launch to its completion; dpmon finds the completion by polling, late by at most 5 % or 0.1 ms,"
            " whichever is larger",
            "ms",
        ),
        Field(
            "queue_ms",
            "number",
            "from its launch until all collectives launched before it on its group were complete",
            "ms",
        ),
        Field(
            "alg_bytes_s",
            "number",
            "algorithm bandwidth: its bytes divided by the time in which it could run; null if this time is below"
            " 0.1 ms",
            "bytes/s",
        ),
        Field(
            "bus_bytes_s",
            "number",
            "bus bandwidth: for n ranks, alg_bytes_s times 2(n-1)/n for all_reduce, (n-1)/n for all_gather,"
            " reduce_scatter, all_to_all, gather and scatter, 1 for others",
            "bytes/s",
        ),
        ABSENT,
    ),
)
SAMPLED = RecordKind(
    "sampled",
    "a period, usually one step, in which every collective was recorded",
    (
        *WHO,
        Field("step", "integer", "the step that ran in the middle of the period; null if none did"),
        START,
        WALL,
        Field("collectives", "integer", "number of collectives launched; null if they cannot be recorded"),
        ABSENT,
    ),
)
DDP = RecordKind(
    "ddp",
    "the properties of a DistributedDataParallel, recorded once, and again after each change",
    (
        *WHO,
        T,
        Field("wrapper", "integer", "its number in the process, from 0"),
        Field("root", "text", "the class of its model"),
        Field("backend", "text", "the backend of its process group"),
        Field("group_size", "integer", "number of ranks that average their gradients", metric="ddp_group_size"),
        Field("group", "list", "the ranks that average their gradients"),
        Field("parameters", "integer", "number of parameters with averaged gradients"),
        Field(
            "parameter_bytes",
            "integer",
            "size of the parameters with averaged gradients",
            "bytes",
            metric="ddp_parameter_bytes",
        ),
        Field("bucket_bytes", "list", "the size of each bucket, in the order of averaging", "bytes"),
        Field("bucket_cap_bytes", "integer", "largest size of a bucket", "bytes", metric="ddp_bucket_cap_bytes"),
        Field("find_unused_parameters", "boolean", "whether it looks for unused parameters in every step"),
        Field(
            "unused_bytes",
            "integer",
            "size of the parameters that were not used in the last iteration that torch timed",
            "bytes",
            metric="ddp_unused_bytes",
        ),
        Field("gradient_as_bucket_view", "boolean", "whether gradients are views of the buckets"),
        Field("static_graph", "boolean", "whether the script promises that all steps are alike"),
        Field("comm_hook", "text", "the name of its communication hook; null if it has none"),
        Field("broadcast_buffers", "boolean", "whether the first rank sends its buffers in every forward"),
        Field(
            "sync_batch_norm",
            "boolean",
            "whether it has a SyncBatchNorm, which makes ranks wait in the forward",
        ),
        Field("iteration", "integer", "the last iteration that torch itself timed: the first ten, then one in 100"),
        Field(
            "comm_ms",
            "number",
            "torch's time of that iteration: the communication of the backward pass",
            "ms",
            metric="ddp_torch_communication_seconds",
            scale=1e-3,
        ),
        Field(
            "overlap_ms",
            "number",
            "torch's time of that iteration: the part of the communication that computation hid",
            "ms",
            metric="ddp_torch_overlap_seconds",
            scale=1e-3,
        ),
        ABSENT,
    ),
)
