"""Defines every kind of record and its fields: name, type, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.record.device_fields import DEVICE, HOST, MEMORY, OOM
from dpmon.record.field import ABSENT, DEVICES, INPUTS, MODE, OUTPUTS, START, WALL, WHO, Field, RecordKind, T, only_csv
from dpmon.record.kinds import MAX_SPANS
from dpmon.record.names import CALL_PHASES
from dpmon.record.schema import QUANTITIES, SPAN_PHASES, STEP_PHASES

_COLLECTIVE = RecordKind(
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
            odd_unit="bytes",
        ),
        Field("dtype", "text", "the dtype of its first tensor"),
        Field("group", "text", "torch's name of the process group"),
        Field("group_size", "integer", "number of ranks in the group"),
        Field("ranks", "list", "the ranks of the group; null for all ranks, or if unknown"),
        Field("backend", "text", "the backend of the group: gloo, nccl ..."),
        Field("device", "text", "the type of its tensors' device"),
        Field("start_s", "number", "time of its launch, since the run's start"),
        Field(
            "host_ms",
            "number",
            "from its launch to its completion; dpmon finds the completion by polling, late by at most 5 % or 0.1 ms,"
            " whichever is larger",
        ),
        Field(
            "queue_ms", "number", "from its launch until all collectives launched before it on its group were complete"
        ),
        Field(
            "alg_bytes_s",
            "number",
            "algorithm bandwidth: its bytes divided by the time in which it could run; null if this time is below"
            " 0.1 ms",
        ),
        Field(
            "bus_bytes_s",
            "number",
            "bus bandwidth: for n ranks, alg_bytes_s times 2(n-1)/n for all_reduce, (n-1)/n for all_gather,"
            " reduce_scatter, all_to_all, gather and scatter, 1 for others",
        ),
        ABSENT,
    ),
)
_SAMPLED = RecordKind(
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
_DDP = RecordKind(
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
            "parameter_bytes", "integer", "size of the parameters with averaged gradients", metric="ddp_parameter_bytes"
        ),
        Field("bucket_bytes", "list", "the size of each bucket, in the order of averaging"),
        Field("bucket_cap_bytes", "integer", "largest size of a bucket", metric="ddp_bucket_cap_bytes"),
        Field("find_unused_parameters", "boolean", "whether it looks for unused parameters in every step"),
        Field(
            "unused_bytes",
            "integer",
            "size of the parameters that were not used in the last iteration that torch timed",
            metric="ddp_unused_bytes",
        ),
        Field("gradient_as_bucket_view", "boolean", "whether gradients are views of the buckets"),
        Field("static_graph", "boolean", "whether the script promises that all steps are alike"),
        Field("comm_hook", "text", "the name of its communication hook; null if it has none"),
        Field("broadcast_buffers", "boolean", "whether the first rank sends its buffers in every forward"),
        Field("sync_batch_norm", "boolean", "whether it has a SyncBatchNorm, which makes ranks wait in the forward"),
        Field("iteration", "integer", "the last iteration that torch itself timed: the first ten, then one in 100"),
        Field(
            "comm_ms",
            "number",
            "torch's time of that iteration: the communication of the backward pass",
            metric="ddp_torch_communication_seconds",
        ),
        Field(
            "overlap_ms",
            "number",
            "torch's time of that iteration: the part of the communication that computation hid",
            metric="ddp_torch_overlap_seconds",
        ),
        ABSENT,
    ),
)


_CALL = RecordKind(
    "call",
    "one outermost forward of a model",
    (
        *WHO,
        Field("step", "integer", "the step of the call"),
        Field("call", "integer", "the number of the call in the process, from 1"),
        Field(
            "root",
            "text",
            "the model: its class without wrappers, and a variable or number if several of the class live",
        ),
        Field(
            "via",
            "text",
            "the wrapper of the model: DataParallel, DistributedDataParallel ...; fully_shard under FSDP2; null if the"
            " model was called directly",
        ),
        MODE,
        Field("virtual", "boolean", "whether the replicas share a device"),
        Field("training", "boolean", "whether the model was in training mode"),
        Field("grad", "boolean", "whether gradients were recorded"),
        only_csv("failed", "boolean", "whether the call raised an exception"),
        START,
        WALL,
        only_csv("rows", "integer", "rows of the batch: the length of its first tensor along the batch's dimension"),
        DEVICES,
        only_csv("idle_devices", "list", "the devices for which the batch had no chunk"),
        Field(
            "phases",
            "object",
            "for each phase that ran, host_ms and device_ms; device_ms is null if the device time is unknown",
            odd_unit="ms",
            columns=tuple(f"{phase}_{clock}_ms" for phase in CALL_PHASES for clock in ("host", "device")),
        ),
        INPUTS,
        OUTPUTS,
        Field(
            "replicas",
            "list",
            "one object for the share of each device: replica, device, host_ms, device_ms, inputs, outputs",
            columns=(
                *("replicas", "replica_devices", "replica_rows", "replica_host_ms", "replica_device_ms"),
                *("replica_inputs", "replica_outputs"),
            ),
        ),
        Field(
            "stages",
            "list",
            "one object for each stage of a model on several devices: stage, device, parts, start_ms, host_ms,"
            " device_ms, from, crossed_bytes, inputs, outputs; missing for other models",
            columns=(
                *("stages", "stage_devices", "stage_parts", "stage_host_ms", "stage_device_ms"),
                "stage_crossed_bytes",
            ),
        ),
        ABSENT,
    ),
)
_STEP = RecordKind(
    "step",
    "one step of the training loop; an evaluation step has neither `backward` nor `optimizer` in `phases`",
    (
        *WHO,
        Field("step", "integer", "the number of the step in the process, from 1"),
        MODE,
        START,
        WALL,
        *(
            Field(
                each.name,
                "integer",
                each.meaning + (f"; missing if {each.absent}" if each.optional else ""),
                odd_unit=each.unit,
            )
            for each in QUANTITIES
        ),
        Field(
            "phases",
            "object",
            "the host time of each phase that ran; these times add up to the step",
            odd_unit="ms",
            columns=tuple(f"{name}_ms" for name in STEP_PHASES),
        ),
        Field(
            "device_ms",
            "object",
            "the time of each phase on the slowest device (for data: on the device that waits least); missing if the"
            " step used no GPU",
            columns=tuple(f"{name}_device_ms" for name in STEP_PHASES if name in SPAN_PHASES),
        ),
        Field(
            "spans",
            "list",
            f"the first {MAX_SPANS} spans: phase, start_ms (after the step's start), ms (including nested spans: a"
            " backward includes its sync). Each span is a phase on the training thread. They are in order of start,"
            " outer spans before nested ones",
            odd_unit="ms",
        ),
        Field("missing_spans", "integer", f"number of spans after the first {MAX_SPANS}; missing if there are none"),
        Field(
            "buckets_ms",
            "list",
            "time from the step's start until each bucket of gradients was ready, in order of time; missing if unknown",
        ),
        Field(
            "sync_number",
            "integer",
            "the number of the step's last synchronised backward pass, which is the same on all ranks; missing if there"
            " is none",
        ),
        Field(
            "exposed_ms",
            "number",
            "communication of the step's synchronised passes that no computation hid: the shortest `sync` of all ranks;"
            " missing if there are no such passes",
        ),
        Field("wait_ms", "number", "the rest of the step's `sync`: the wait for the slowest rank (0 on that rank)"),
        ABSENT,
    ),
)
_MODE_CHANGE = RecordKind(
    "mode",
    "the start of a mode, or a refused request",
    (
        *WHO,
        T,
        Field("step", "integer", "the first step in this mode"),
        Field("call", "integer", "the first call in this mode"),
        Field("root", "text", "the class of the model", columns=()),
        MODE,
        Field("requested_by", "text", "user, or start if the mode was set when the run began"),
        DEVICES,
        Field("virtual", "boolean", "whether replicas share a device"),
        Field("reason", "text", "the reason for this mode"),
        Field(
            "refused", "text", "why the requested mode was refused (`mode` is the one that stays); null if it was not"
        ),
        ABSENT,
    ),
)
_PAUSE = RecordKind(
    "pause",
    "the start or end of a pause, or a refused request",
    (
        *WHO,
        T,
        Field("step", "integer", "the step before the pause"),
        Field("paused", "boolean", "whether a pause begins here"),
        Field("paused_s", "number", "length of the pause; null at its start"),
        Field("reason", "text", "why the training resumed by itself; null if the user resumed it"),
        Field("refused", "text", "why the request was refused; null if it was not"),
    ),
)
_INPUT = RecordKind(
    "input",
    "a finished wait for a line of input",
    (Field("pid", "integer", "the process that waited"), T, Field("waited_s", "number", "how long it waited")),
)
_LOADER = RecordKind(
    "loader",
    "the start of a DataLoader",
    (
        *WHO,
        T,
        Field("loader", "text", "the class of the dataset"),
        Field("batches", "integer", "number of batches"),
        Field("workers", "integer", "number of worker processes"),
        Field("persistent", "boolean", "whether the workers stay for the next start"),
        Field("pinned", "boolean", "whether the loader copies its batches to pinned memory"),
        Field("start", "integer", "the number of this start of the DataLoader object, from 1"),
        Field("iter_s", "number", "duration of the loader's __iter__, which starts the workers"),
        Field("left_out", "integer", "number of earlier starts that have no record"),
        Field("left_out_s", "number", "total duration of these starts"),
        ABSENT,
    ),
)
_PROCESS_START = RecordKind(
    "process",
    "a process that began to record",
    (
        *WHO,
        T,
        Field("world", "integer", "number of ranks; null if the process is not a rank"),
        Field("pid", "integer", "the process id"),
        Field("argv", "list", "sys.argv of the process"),
        Field("python", "text", "the version of Python"),
        Field("torch", "text", "the version of torch"),
        Field("device_kind", "text", "cuda or cpu"),
        ABSENT,
    ),
)
_WARNING = RecordKind("warning", "a message of dpmon", (*WHO, T, Field("text", "text", "the message")))
_DROPPED = RecordKind(
    "dropped",
    "the number of lost and deleted records, written before the exit",
    (
        Field("count", "integer", "lost spans and records"),
        Field("pruned", "integer", "old records that were deleted to limit the history"),
    ),
)
_EXIT = RecordKind(
    "exit",
    "how the command ended",
    (
        Field("status", "integer", "the exit status of the command; null if unknown"),
        Field("signal", "text", "the name of the signal that ended the command, such as SIGTERM; null if none did"),
        Field("t_s", "number", "time since the run's start"),
        Field(
            "by",
            "text",
            "the part of dpmon that learned how the command ended: supervisor, foreground (the `dpmon` that started the"
            " run) or tracer",
        ),
        Field("cause", "text", "the cause of the end; missing if unknown", columns=()),
        Field("absent", "object", "why the status is null; missing if the status is known", columns=()),
    ),
)
RECORDS: Mapping[str, RecordKind] = {
    kind.name: kind
    for kind in (
        _CALL,
        _STEP,
        _COLLECTIVE,
        _SAMPLED,
        DEVICE,
        HOST,
        MEMORY,
        _MODE_CHANGE,
        _PAUSE,
        _INPUT,
        _LOADER,
        _DDP,
        _PROCESS_START,
        _WARNING,
        OOM,
        _DROPPED,
        _EXIT,
    )
}
"""All kinds of records by name."""
COLUMNS: Mapping[str, tuple[str, ...]] = {name: kind.columns for name, kind in RECORDS.items()}
"""The columns of each kind in CSV; the column `more` follows them."""


def metrics_of(kind: str) -> tuple[Field, ...]:
    """Return the fields of a kind that are Prometheus gauges."""
    return tuple(field for field in RECORDS[kind].fields if field.metric)
