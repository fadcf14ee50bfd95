"""Every kind of record and each of its fields: name, type, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpmon.record.schema import QUANTITIES, STEP_PHASES
from dpmon.record.step_spans import MAX_SPANS
from dpmon.record.wire import CALL_PHASES, TIMED_PHASES


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a record, under its name in JSON."""

    name: str
    type: str
    """integer, number, text, boolean, list or object; any may be null where `absent` says why."""
    meaning: str
    unit: str = ""
    columns: tuple[str, ...] | None = None
    """Its columns in CSV; None: one of its name."""
    only_csv: bool = False
    """Whether JSON has it in another form."""
    metric: str = ""
    """Its name as a Prometheus gauge; empty: it is none."""
    scale: float = 1
    """What it is multiplied by to get the metric's unit."""

    @property
    def in_csv(self) -> tuple[str, ...]:
        """The names of its columns in CSV."""
        return (self.name,) if self.columns is None else self.columns

    @property
    def help(self) -> str:
        """Its meaning as a sentence."""
        return f"{self.meaning[0].upper()}{self.meaning[1:]}."


@dataclass(frozen=True, slots=True)
class RecordKind:
    """A kind of record: its name in `kind`, and its fields in the order of its columns in CSV."""

    name: str
    meaning: str
    fields: tuple[Field, ...]
    row: str = "record"
    """What a row of CSV is of."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of its table in CSV."""
        return tuple(name for one in self.fields for name in one.in_csv)


_PROCESS = Field("process", "integer", "the training process, from 0")
_RANK = Field("rank", "integer", "its rank; null if it has none")
_WHO = (_PROCESS, _RANK)
_T = Field("t_s", "number", "when, since the run's start", "s")
_START = Field("start_s", "number", "when it began, since the run's start", "s")
_WALL = Field("wall_ms", "number", "how long it took", "ms")
_MODE = Field("mode", "text", "dp or single; null if unknown")
_ABSENT = Field("absent", "object", "why a field is null or missing, by the field's name")
_DEVICES = Field("devices", "list", "the devices it ran on or could run on, by torch's names")
_SIZES = (
    "path, shape, dtype, bytes. Shape and bytes are those on this rank; a DTensor, which is spread over several"
    " ranks, also has global_shape, the shape of the whole"
)
_INPUTS = Field("inputs", "list", f"each tensor among the arguments: {_SIZES}")
_OUTPUTS = Field("outputs", "list", f"each tensor of the result: {_SIZES}")


def _only_csv(name: str, type_: str, meaning: str, unit: str = "") -> Field:
    return Field(name, type_, meaning, unit, only_csv=True)


_CALL = RecordKind(
    "call",
    "one outermost forward of a model",
    (
        *_WHO,
        Field("step", "integer", "the step that it belongs to"),
        Field("call", "integer", "its number in the process, from 1"),
        Field("root", "text", "the class of the model, as the script wrote it"),
        Field(
            "via",
            "text",
            "what called it: DataParallel, DistributedDataParallel ...; fully_shard if that was applied to it (FSDP2);"
            " null if it was called itself",
        ),
        _MODE,
        Field("virtual", "boolean", "whether its replicas share a device"),
        Field("training", "boolean", "whether the model was in training mode"),
        Field("grad", "boolean", "whether gradients were recorded"),
        _only_csv("failed", "boolean", "whether it raised an exception"),
        _START,
        _WALL,
        _only_csv("rows", "integer", "rows of the batch: the first dimension of its first tensor"),
        _DEVICES,
        _only_csv("idle_devices", "list", "the devices for which the batch had no chunk"),
        Field(
            "phases",
            "object",
            "by phase that ran: host_ms, and device_ms, which is null where the device's time is not known",
            "ms",
            tuple(f"{phase}_{clock}_ms" for phase in CALL_PHASES for clock in ("host", "device")),
        ),
        _INPUTS,
        _OUTPUTS,
        Field(
            "replicas",
            "list",
            "of each device's share of the batch: replica, device, host_ms, device_ms, inputs, outputs",
            columns=(
                *("replicas", "replica_devices", "replica_rows", "replica_host_ms", "replica_device_ms"),
                *("replica_inputs", "replica_outputs"),
            ),
        ),
        Field(
            "stages",
            "list",
            "of a model that is spread over devices, what each did: stage, device, parts, start_ms, host_ms, device_ms,"
            " from, crossed_bytes, inputs, outputs; missing for any other model",
            columns=(
                *("stages", "stage_devices", "stage_parts", "stage_host_ms", "stage_device_ms"),
                "stage_crossed_bytes",
            ),
        ),
        _ABSENT,
    ),
)
_STEP = RecordKind(
    "step",
    "one turn of the training loop",
    (
        *_WHO,
        Field("step", "integer", "its number in the process, from 1"),
        _MODE,
        _START,
        _WALL,
        *(
            Field(each.name, "integer", each.meaning + ("; missing if there are none" * each.optional), each.unit)
            for each in QUANTITIES
        ),
        Field(
            "phases",
            "object",
            "the time of each phase that ran, on the host; they add up to the step",
            "ms",
            tuple(f"{name}_ms" for name in STEP_PHASES),
        ),
        Field(
            "device_ms",
            "object",
            "the time of each phase on the slowest device; missing if no device was timed",
            "ms",
            tuple(f"{name}_device_ms" for name in STEP_PHASES if name in TIMED_PHASES),
        ),
        Field(
            "spans",
            "list",
            "each time that a phase ran on the thread that trains: phase, start_ms (after the step's start), ms (with"
            f" what lies within it); in order of start, nested ones after the one around them; the first {MAX_SPANS}",
            "ms",
        ),
        Field("missing_spans", "integer", f"how many spans came after the first {MAX_SPANS}; missing if none did"),
        Field(
            "buckets_ms",
            "list",
            "when each bucket of gradients was ready, after the step's start; in order of time; missing if not known",
            "ms",
        ),
        Field(
            "sync_number",
            "integer",
            "the number of its last synchronised backward pass, which is the same on all ranks; missing if it has none",
        ),
        Field(
            "exposed_ms",
            "number",
            "communication of its synchronised passes that nothing hid: the least `sync` of all ranks; missing if it"
            " has none",
            "ms",
        ),
        Field("wait_ms", "number", "what else of its `sync` it waited for the slowest rank, whose wait is 0", "ms"),
        _ABSENT,
    ),
)
_COLLECTIVE = RecordKind(
    "collective",
    "one collective of torch.distributed in a sampled step",
    (
        *_WHO,
        Field("step", "integer", "the step under way when it was launched; null between two steps"),
        Field("operation", "text", "all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all ..."),
        Field("phase", "text", "what the thread that launched it was doing: data, forward, backward, optimizer, other"),
        Field(
            "bytes",
            "integer",
            "as nccl-tests counts them: the tensor; of an all_gather all that was gathered, of a reduce_scatter its"
            " input, of a gather or scatter the parts of all ranks",
            "bytes",
        ),
        Field("dtype", "text", "the dtype of its first tensor"),
        Field("group", "text", "torch's name of the process group"),
        Field("group_size", "integer", "how many ranks the group has"),
        Field("ranks", "list", "the ranks of the group; null if it has all of them, or they are not known"),
        Field("backend", "text", "the backend of the group: gloo, nccl ..."),
        Field("device", "text", "the type of the device that its tensors are on"),
        Field("start_s", "number", "when it was launched, since the run's start", "s"),
        Field(
            "host_ms",
            "number",
            "from its launch until it was complete; found by queries, up to 5 % or 0.1 ms late",
            "ms",
        ),
        Field("queue_ms", "number", "from its launch until those launched before it on its group were complete", "ms"),
        Field("alg_bytes_s", "number", "algorithm bandwidth: its bytes over the time in which it could run", "bytes/s"),
        Field(
            "bus_bytes_s",
            "number",
            "bus bandwidth: of n ranks, alg_bytes_s times 2(n-1)/n for all_reduce, (n-1)/n for all_gather,"
            " reduce_scatter, all_to_all, gather and scatter, 1 for others",
            "bytes/s",
        ),
        _ABSENT,
    ),
)
_SAMPLED = RecordKind(
    "sampled",
    "a time, mostly one step, in which every collective was recorded",
    (
        *_WHO,
        Field("step", "integer", "the step under way at its middle; null if there is none"),
        _START,
        _WALL,
        Field("collectives", "integer", "how many were launched; null if they cannot be recorded"),
        _ABSENT,
    ),
)
_DEVICE = RecordKind(
    "device",
    "one GPU, each second, as NVML tells it",
    (
        _T,
        Field("index", "integer", "NVML's number, which is not CUDA's: see ordinals"),
        Field("uuid", "text", "its UUID"),
        Field("name", "text", "its name"),
        Field("of_run", "boolean", "whether processes of the run hold memory on it"),
        Field("visible", "boolean", "whether CUDA_VISIBLE_DEVICES, as the command had it, lets CUDA see it"),
        Field("ordinals", "list", "what the run's processes call it, by UUID: process, device"),
        Field(
            "util_pct",
            "integer",
            "share of the time in which a kernel ran on the GPU",
            "%",
            metric="device_utilization_ratio",
            scale=0.01,
        ),
        Field(
            "mem_used_bytes",
            "integer",
            "memory in use on the GPU, other programs included",
            "bytes",
            metric="device_memory_used_bytes",
        ),
        Field("mem_total_bytes", "integer", "memory of the GPU", "bytes", metric="device_memory_total_bytes"),
        Field("mem_reserved_bytes", "integer", "memory that the driver keeps for itself", "bytes"),
        Field(
            "mem_run_bytes",
            "integer",
            "memory that the run's processes hold on the GPU",
            "bytes",
            metric="device_memory_run_bytes",
        ),
        Field("mem_others_bytes", "integer", "memory that other processes hold on the GPU", "bytes"),
        Field("mem_torch_bytes", "integer", "memory that torch's allocators in the run's processes reserve", "bytes"),
        Field(
            "temperature_c", "integer", "temperature of the GPU", "degrees Celsius", metric="device_temperature_celsius"
        ),
        Field("temperature_limit_c", "integer", "temperature at which the clocks are lowered", "degrees Celsius"),
        Field("power_w", "number", "power the GPU draws", "W", metric="device_power_watts"),
        Field("power_limit_w", "number", "power that it may draw", "W"),
        Field("energy_j", "number", "energy since the driver was loaded", "J"),
        Field(
            "sm_clock_mhz",
            "integer",
            "clock of the GPU's multiprocessors",
            "MHz",
            metric="device_sm_clock_hertz",
            scale=1e6,
        ),
        Field("mem_clock_mhz", "integer", "clock of its memory", "MHz"),
        Field(
            "throttle", "list", "why the clocks are lower than they could be, in words; empty if nothing lowers them"
        ),
        Field("fan_pct", "integer", "speed of its fan", "%"),
        Field("pcie_rx_bytes_s", "integer", "what it receives over PCIe", "bytes/s"),
        Field("pcie_tx_bytes_s", "integer", "what it sends over PCIe", "bytes/s"),
        Field("nvlink_rx_bytes_s", "integer", "what it receives over NVLink", "bytes/s"),
        Field("nvlink_tx_bytes_s", "integer", "what it sends over NVLink", "bytes/s"),
        Field("ecc_corrected", "integer", "corrected memory errors since the driver was loaded"),
        Field("ecc_uncorrected", "integer", "uncorrected memory errors since the driver was loaded"),
        Field("retired_pages", "integer", "pages of memory that were retired"),
        Field("remapped_rows", "integer", "rows of memory that were remapped"),
        Field("xid", "integer", "the newest XID error since the run's start"),
        Field("mig", "boolean", "whether it is divided into MIG instances"),
        Field("mig_devices", "list", "the instances: uuid, mem_used_bytes, mem_total_bytes"),
        Field("persistence", "boolean", "whether the driver stays loaded without programs"),
        Field("sm_active_pct", "number", "share of its multiprocessors that were busy (Hopper and later)", "%"),
        Field("tensor_active_pct", "number", "share of the time in which its tensor cores worked", "%"),
        Field("dram_active_pct", "number", "share of the time in which its memory was read or written", "%"),
        Field("processes", "list", "those that hold most memory, the run's first: pid, mem_bytes, of_run"),
        Field("process_count", "integer", "how many processes use it"),
        _ABSENT,
    ),
)
_HOST = RecordKind(
    "host",
    "the machine and the run's processes, each second",
    (
        _T,
        Field("cpu_pct", "number", "share of the host's processors in use", "%", metric="host_cpu_ratio", scale=0.01),
        Field("mem_used_bytes", "integer", "memory in use on the host", "bytes", metric="host_memory_used_bytes"),
        Field("mem_total_bytes", "integer", "memory of the host", "bytes", metric="host_memory_total_bytes"),
        Field(
            "run_cpu_pct",
            "number",
            "processors that the run's processes use",
            "% of one",
            metric="run_cpu_cores",
            scale=0.01,
        ),
        Field(
            "run_mem_bytes",
            "integer",
            "memory of the run's processes; a shared page is divided among its processes",
            "bytes",
            metric="run_memory_bytes",
        ),
        Field("cpus", "integer", "processors of the host", metric="host_cpus"),
        Field("load_1m", "number", "threads that run or want to run on the host, mean of a minute", metric="host_load"),
        Field("gpu_absent", "text", "why there are no device records"),
        _ABSENT,
    ),
)
_MEMORY = RecordKind(
    "memory",
    "what a process's tensors take on each device; of a tensor that is sharded over ranks, the part on this rank",
    (
        *_WHO,
        _T,
        Field("step", "integer", "the step after which it was measured"),
        Field("turns", "integer", "over how many steps the measurement was spread", columns=()),
        Field("took_ms", "number", "how long the measurement took", "ms", columns=()),
        Field("devices", "list", "an object a device, with the fields below and an `absent` of its own", columns=()),
        Field("device", "text", "torch's name of the device"),
        Field("model_bytes", "integer", "parameters and buffers", "bytes"),
        Field("gradients_bytes", "integer", "gradients", "bytes"),
        Field("optimizer_bytes", "integer", "states of the optimizers", "bytes"),
        Field("rest_bytes", "integer", "what else the allocator has handed out: activations and the like", "bytes"),
        Field("allocated_bytes", "integer", "what torch's allocator has handed out", "bytes"),
        Field("reserved_bytes", "integer", "what it has taken from the GPU", "bytes"),
        Field("peak_bytes", "integer", "the most it had handed out", "bytes"),
        Field("peak_after_step", "integer", "the last measured step before the peak"),
        Field("uuid", "text", "the GPU's UUID", columns=()),
        Field(
            "inactive_split_bytes", "integer", "free parts of blocks that are in use: fragments", "bytes", columns=()
        ),
        Field("alloc_retries", "integer", "how often it had to give memory back to find some", columns=()),
        Field("ooms", "integer", "how often it found none", columns=()),
        _ABSENT,
    ),
    row="device",
)
_MODE_CHANGE = RecordKind(
    "mode",
    "a mode that began, or a request that was refused",
    (
        *_WHO,
        _T,
        Field("step", "integer", "the step that it began with"),
        Field("call", "integer", "the call that it began with"),
        Field("root", "text", "the class of the model", columns=()),
        _MODE,
        Field("requested_by", "text", "user or start"),
        _DEVICES,
        Field("virtual", "boolean", "whether replicas share a device"),
        Field("reason", "text", "why it is this mode"),
        Field("refused", "text", "why the requested mode was refused; null if it was not"),
        _ABSENT,
    ),
)
_PAUSE = RecordKind(
    "pause",
    "a pause that began or ended, or a request that was refused",
    (
        *_WHO,
        _T,
        Field("step", "integer", "the step after which it is"),
        Field("paused", "boolean", "whether the training pauses from here on"),
        Field("paused_s", "number", "how long it has paused; null at the beginning", "s"),
        Field("reason", "text", "why it goes on by itself; null if somebody asked for it"),
        Field("refused", "text", "why the request was refused; null if it was not"),
    ),
)
_INPUT = RecordKind(
    "input",
    "a wait for a line of input that is over",
    (Field("pid", "integer", "the process that waited"), _T, Field("waited_s", "number", "how long it waited", "s")),
)
_LOADER = RecordKind(
    "loader",
    "the start of a DataLoader",
    (
        *_WHO,
        _T,
        Field("loader", "text", "the class of its dataset"),
        Field("batches", "integer", "how many batches it has"),
        Field("workers", "integer", "how many worker processes it has"),
        Field("persistent", "boolean", "whether these stay for the next start"),
        Field("iter_s", "number", "how long its __iter__ took, which starts the workers", "s"),
        Field("left_out", "integer", "starts before this one that have no record"),
        Field("left_out_s", "number", "how long these took together", "s"),
        _ABSENT,
    ),
)
_DDP = RecordKind(
    "ddp",
    "what a DistributedDataParallel does, at first and whenever that changes",
    (
        *_WHO,
        _T,
        Field("wrapper", "integer", "its number in the process, from 0"),
        Field("root", "text", "the class of its model"),
        Field("backend", "text", "the backend of its process group"),
        Field("group_size", "integer", "how many ranks average their gradients", metric="ddp_group_size"),
        Field("group", "list", "their ranks"),
        Field("parameters", "integer", "how many parameters it averages"),
        Field(
            "parameter_bytes",
            "integer",
            "size of the parameters that are averaged",
            "bytes",
            metric="ddp_parameter_bytes",
        ),
        Field("bucket_bytes", "list", "the size of each bucket, in the order in which they are averaged", "bytes"),
        Field("bucket_cap_bytes", "integer", "the size that a bucket may have", "bytes", metric="ddp_bucket_cap_bytes"),
        Field("find_unused_parameters", "boolean", "whether it looks for unused parameters in every step"),
        Field(
            "unused_bytes",
            "integer",
            "parameters that the last sampled step did not use",
            "bytes",
            metric="ddp_unused_bytes",
        ),
        Field("gradient_as_bucket_view", "boolean", "whether gradients are views of the buckets"),
        Field("static_graph", "boolean", "whether the script promises that all steps are alike"),
        Field("comm_hook", "text", "the name of its communication hook; null if it has none"),
        Field("broadcast_buffers", "boolean", "whether the first rank sends its buffers in every forward"),
        Field("sync_batch_norm", "boolean", "whether it has a SyncBatchNorm, whose ranks wait in the forward"),
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
            "torch's time of that iteration: what computation hid of it",
            "ms",
            metric="ddp_torch_overlap_seconds",
            scale=1e-3,
        ),
        _ABSENT,
    ),
)
_PROCESS_START = RecordKind(
    "process",
    "a process that began to record",
    (
        *_WHO,
        _T,
        Field("world", "integer", "how many ranks there are; null if it is none"),
        Field("pid", "integer", "its process id"),
        Field("argv", "list", "its sys.argv"),
        Field("python", "text", "the version of Python"),
        Field("torch", "text", "the version of torch"),
        Field("device_kind", "text", "cuda or cpu"),
        _ABSENT,
    ),
)
_WARNING = RecordKind("warning", "a message of dpmon", (*_WHO, _T, Field("text", "text", "the message")))
_OOM = RecordKind(
    "oom",
    "the state just before a GPU ran out of memory",
    (
        *_WHO,
        _T,
        Field("device", "text", "torch's name of the device"),
        Field("asked_bytes", "integer", "what was asked for", "bytes"),
        Field("total_bytes", "integer", "memory of the GPU", "bytes"),
        Field("free_bytes", "integer", "what was free", "bytes"),
        Field("allocated_bytes", "integer", "what torch's allocator had handed out", "bytes"),
        Field("reserved_bytes", "integer", "what it had taken from the GPU", "bytes"),
        Field("inactive_split_bytes", "integer", "free parts of blocks that were in use: fragments", "bytes"),
    ),
)
_DROPPED = RecordKind(
    "dropped",
    "what the record lacks; it comes before the exit",
    (
        Field("count", "integer", "spans and records that were lost"),
        Field("pruned", "integer", "older records that were deleted to bound the history"),
    ),
)
_EXIT = RecordKind(
    "exit",
    "how the command ended",
    (
        Field("status", "integer", "its exit status; null if it is not known"),
        Field("signal", "integer", "the signal that ended it; null if none did"),
        Field("t_s", "number", "when, since the run's start", "s"),
        Field("by", "text", "who saw it end"),
        Field("cause", "text", "what ended it, where that is known; else missing", columns=()),
        Field("absent", "object", "why the status is null; missing if it is known", columns=()),
    ),
)
RECORDS: Mapping[str, RecordKind] = {
    kind.name: kind
    for kind in (
        *(
            _CALL,
            _STEP,
            _COLLECTIVE,
            _SAMPLED,
            _DEVICE,
            _HOST,
            _MEMORY,
            _MODE_CHANGE,
            _PAUSE,
            _INPUT,
            _LOADER,
            _DDP,
            _PROCESS_START,
            _WARNING,
            _OOM,
        ),
        *(_DROPPED, _EXIT),
    )
}
"""Every kind of record by its name."""
COLUMNS: Mapping[str, tuple[str, ...]] = {name: kind.columns for name, kind in RECORDS.items()}
"""The columns of each kind in CSV; `more` follows them."""


def metrics_of(kind: str) -> tuple[Field, ...]:
    """The fields of a kind that are Prometheus gauges."""
    return tuple(one for one in RECORDS[kind].fields if one.metric)
