"""Defines every kind of record and its fields: name, type, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from typing import NamedTuple

from dpmon.record.record_types import MAX_SPANS
from dpmon.record.schema import QUANTITIES, SPAN_PHASES, STEP_PHASES
from dpmon.record.shared_names import CALL_PHASES

_SCALES = {"%": 0.01, "ms": 1e-3, "MHz": 1e6}
"""Factors from the units of fields to the units of metrics, where they differ."""


class FieldSpec(NamedTuple):
    """A field of a record."""

    type: str
    """integer, number, text, boolean, list or object. Any field may be null, with the reason in `absent`."""
    unit: str
    """Empty if it has none."""
    name: str
    """Its name in JSON."""
    meaning: str
    columns: tuple[str, ...] | None = None
    """Its columns in CSV; None: one column of the same name."""
    metric: str = ""
    """Its name as a Prometheus gauge; empty if it is not exported as a metric."""

    @property
    def scale(self) -> float:
        """Factor from its unit to the metric's unit."""
        return _SCALES.get(self.unit, 1)

    @property
    def help(self) -> str:
        """Its meaning as a sentence."""
        return f"{self.meaning[:1].upper()}{self.meaning[1:]}."


class RecordSpec(NamedTuple):
    """A kind of record. `name` is its `kind` in JSON; `fields` are in the order of the CSV columns."""

    name: str
    meaning: str
    fields: tuple[FieldSpec, ...]


_integer = partial(FieldSpec, "integer", "")
_bytes = partial(FieldSpec, "integer", "bytes")
_bytes_per_s = partial(FieldSpec, "integer", "bytes/s")
_number = partial(FieldSpec, "number", "")
_seconds = partial(FieldSpec, "number", "s")
_ms = partial(FieldSpec, "number", "ms")
_percent = partial(FieldSpec, "number", "%")
_text = partial(FieldSpec, "text", "")
_boolean = partial(FieldSpec, "boolean", "")
_list = partial(FieldSpec, "list", "")
_object = partial(FieldSpec, "object", "")
_object_of_ms = partial(FieldSpec, "object", "ms")
_list_of_ms = partial(FieldSpec, "list", "ms")

_CALL_TIMES = tuple(f"{phase}_{clock}_ms" for phase in CALL_PHASES for clock in ("host", "device"))
_HOST_TIMES = tuple(f"{name}_ms" for name in STEP_PHASES)
_DEVICE_TIMES = tuple(f"{name}_device_ms" for name in STEP_PHASES if name in SPAN_PHASES)
_QUANTITIES = [
    FieldSpec("integer", field.unit, field.name, field.meaning + f"; missing if {field.absent}" * field.absent_is_zero)
    for field in QUANTITIES
]
_PROCESS = _integer("process", "the training process, from 0")
_RANK = _integer("rank", "the rank of the process; null if it has none")
_T_S = _seconds("t_s", "time since the run's start")
_START_S = _seconds("start_s", "time of its start, since the run's start")
_WALL_MS = _ms("wall_ms", "its duration")
_MODE = _text("mode", "dp (over several devices) or single (one device, as on every rank); null if unknown")
_ABSENT = _object("absent", "why a field is null or missing, by the field's name")
_DEVICES = _list("devices", "the devices available to it, by torch's names")
_INPUTS = _list(
    "inputs", "each tensor in the arguments: path, shape, dtype, bytes (on this rank); of a DTensor also global_shape"
)
_OUTPUTS = _list("outputs", "each tensor of the result, as in inputs")
_IN_PROCESS = (_PROCESS, _RANK, _T_S)
_CALL_FIELDS = (
    _PROCESS,
    _RANK,
    _integer("step", "the step of the call; null if it ran outside the steps"),
    _text("step_kind", "the kind of that step, or of the call itself: training, evaluation or forward_only"),
    _integer("call", "the number of the call in the process, from 1"),
    _text("root", "the model: its class without wrappers, and a variable or number if several of the class exist"),
    _text(
        "via",
        "the wrapper of the model: DataParallel, DistributedDataParallel ...; fully_shard under FSDP2; null if the "
        "model was called directly",
    ),
    _MODE,
    _boolean("virtual", "whether the replicas share a device"),
    _boolean("training", "whether the model was in training mode"),
    _boolean("grad", "whether gradients were recorded"),
    _START_S,
    _WALL_MS,
    _DEVICES,
    _object_of_ms("phases", "for each phase that ran, host_ms and device_ms (null if unknown)", columns=_CALL_TIMES),
    _INPUTS,
    _OUTPUTS,
    _list("replicas", "the share of each device: replica, device, host_ms, device_ms, inputs, outputs"),
    _list(
        "stages",
        "each stage of a model on several devices: stage, device, parts, start_ms, host_ms, device_ms, from, "
        "crossed_bytes, inputs, outputs; missing for other models",
    ),
    _ABSENT,
)
_STEP_FIELDS = (
    _PROCESS,
    _RANK,
    _integer("step", "the number of the step among those of its kind in the process, from 1"),
    _text(
        "step_kind",
        "training (with a backward pass or an optimizer step), evaluation (neither, and all its calls in eval mode or "
        "without gradients) or forward_only (neither, in training mode)",
    ),
    _MODE,
    _START_S,
    _WALL_MS,
    *_QUANTITIES,
    _object_of_ms(
        "phases", "the host time of each phase that ran; these times add up to the step", columns=_HOST_TIMES
    ),
    _object_of_ms(
        "device_ms",
        "the time of each phase on the slowest device (for data: on the device that waits least); missing without GPUs",
        columns=_DEVICE_TIMES,
    ),
    _list_of_ms(
        "spans",
        f"the first {MAX_SPANS} phases on the training thread: phase, start_ms (after the step's start), ms (with "
        "nested ones, but an optimizer without its closure); in order of start, outer ones first",
    ),
    _integer("missing_spans", "number of further spans; missing if there are none"),
    _list_of_ms(
        "buckets_ms", "time from the step's start until each bucket of gradients was ready; missing if unknown"
    ),
    _integer(
        "sync_number",
        "the number of the step's last synchronized backward pass, the same on all ranks; missing if there is none",
    ),
    _ms(
        "exposed_ms",
        "communication that no computation hid: the shortest `sync` of all ranks; missing without synchronized passes",
    ),
    _ms("wait_ms", "the rest of the step's `sync`: the wait for the slowest rank (0 on that rank)"),
    _integer(
        "loop",
        "the loop over a DataLoader that its batches came from (`loop` of a `loader` record); missing if there is none",
    ),
    _integer("batch", "batches of this loop that were used up to the step's end; missing if unknown"),
    _ABSENT,
)
_COLLECTIVE_FIELDS = (
    _PROCESS,
    _RANK,
    _integer("step", "the step that ran when it was launched; null between two steps"),
    _text("operation", "all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all ..."),
    _text("phase", "activity of the thread that launched it: data, forward, backward, optimizer, other"),
    _bytes(
        "bytes",
        "size as counted by nccl-tests: of an all_gather the whole result, of a reduce_scatter its input, of a gather "
        "or scatter the parts of all ranks",
    ),
    _text("dtype", "the dtype of its first tensor"),
    _text("group", "torch's name of the process group"),
    _integer("group_size", "number of ranks in the group"),
    _list("ranks", "the ranks of the group; null for all ranks, or if unknown"),
    _text("backend", "the backend of the group: gloo, nccl ..."),
    _text("device", "the type of its tensors' device"),
    _seconds("start_s", "time of its launch, since the run's start"),
    _ms("host_ms", "duration of the call that launched it; the ranks may still communicate after the call"),
    _ABSENT,
)
_SAMPLED_FIELDS = (
    _PROCESS,
    _RANK,
    _integer("step", "the step that ran in the middle of the period; null if none did"),
    _START_S,
    _WALL_MS,
    _integer("collectives", "number of collectives launched; null if they cannot be recorded"),
    _ABSENT,
)
_LOSS_FIELDS = (
    _PROCESS,
    _RANK,
    _integer("step", "the step of the last pass"),
    _T_S,
    _text("place", "the innermost line of the script that led to the call"),
    _number("loss", "the value, before a GradScaler multiplied it", metric="loss"),
    _ABSENT,
)
_DEVICE_FIELDS = (
    _T_S,
    _integer("index", "NVML's number, which may differ from CUDA's"),
    _text("uuid", "its UUID"),
    _text("name", "its name"),
    _boolean("of_run", "whether processes of the run hold memory on it"),
    _boolean("visible", "whether CUDA_VISIBLE_DEVICES lets the command see it"),
    _list("ordinals", "its name in torch in each process: process, device"),
    FieldSpec(
        "integer",
        "%",
        "util_pct",
        "share of the time in which a kernel ran on the GPU",
        metric="device_utilization_ratio",
    ),
    _bytes("mem_used_bytes", "memory in use on the GPU, other programs included", metric="device_memory_used_bytes"),
    _bytes("mem_total_bytes", "memory of the GPU", metric="device_memory_total_bytes"),
    _bytes("mem_reserved_bytes", "memory reserved by the driver"),
    _bytes("mem_run_bytes", "memory that the run's processes hold on the GPU", metric="device_memory_run_bytes"),
    _bytes("mem_others_bytes", "memory of other processes"),
    _bytes("mem_torch_bytes", "memory that torch's allocators reserve"),
    FieldSpec(
        "integer", "degrees Celsius", "temperature_c", "temperature of the GPU", metric="device_temperature_celsius"
    ),
    FieldSpec("integer", "degrees Celsius", "temperature_limit_c", "temperature at which the GPU is throttled"),
    FieldSpec("number", "W", "power_w", "power the GPU draws", metric="device_power_watts"),
    FieldSpec("number", "W", "power_limit_w", "power limit of the GPU"),
    FieldSpec("number", "J", "energy_j", "energy since the driver was loaded"),
    FieldSpec("integer", "MHz", "sm_clock_mhz", "clock of the GPU's multiprocessors", metric="device_sm_clock_hertz"),
    FieldSpec("integer", "MHz", "mem_clock_mhz", "clock of its memory"),
    _list("throttle", "reasons for throttling, in words"),
    FieldSpec("integer", "%", "fan_pct", "speed of its fan"),
    _bytes_per_s("pcie_rx_bytes_s", "data received over PCIe"),
    _bytes_per_s("pcie_tx_bytes_s", "data sent over PCIe"),
    _bytes_per_s("nvlink_rx_bytes_s", "data received over NVLink"),
    _bytes_per_s("nvlink_tx_bytes_s", "data sent over NVLink"),
    _integer("pcie_gen", "generation of its PCIe link now; lower while the GPU is idle"),
    _integer("pcie_width", "number of lanes of this link now"),
    _integer("pcie_gen_max", "the highest generation that the GPU and the system can reach together"),
    _integer("pcie_width_max", "the most lanes that they can use together"),
    _integer("pcie_slow_readings", "readings in a row, one a minute, of a slower link while the GPU is busy"),
    _integer("nvlinks_down", "NVLinks that are down while others of the GPU are up"),
    _integer("nvlink_errors", "replays and recoveries of all its NVLinks since the run's start"),
    _integer("ecc_corrected", "corrected memory errors since the driver was loaded"),
    _integer("ecc_uncorrected", "uncorrected memory errors since the driver was loaded"),
    _integer("retired_pages", "pages of memory that were retired"),
    _integer("remapped_rows", "rows of memory that were remapped"),
    _integer("xid", "the newest XID error since the run's start"),
    _boolean("mig", "whether it is divided into MIG instances"),
    _list("mig_devices", "the instances: uuid, mem_used_bytes, mem_total_bytes"),
    _boolean("persistence", "whether the driver stays loaded while no program uses the GPU"),
    _percent("sm_active_pct", "share of its multiprocessors that were busy (Hopper and later)"),
    _percent("tensor_active_pct", "share of the time in which its tensor cores worked"),
    _percent("dram_active_pct", "share of the time in which its memory was read or written"),
    _list("processes", "those with the most memory, the run's first: pid, mem_bytes, of_run"),
    _integer("process_count", "number of processes that use it"),
    _ABSENT,
)
_HOST_FIELDS = (
    _T_S,
    _percent("cpu_pct", "share of the host's CPU cores in use", metric="host_cpu_ratio"),
    _bytes("mem_used_bytes", "memory in use on the host", metric="host_memory_used_bytes"),
    _bytes("mem_total_bytes", "memory of the host", metric="host_memory_total_bytes"),
    _percent("run_cpu_pct", "CPU use of the run's processes: 200% is two cores", metric="run_cpu_cores"),
    _bytes(
        "run_mem_bytes",
        "memory of the run's processes; a shared page is divided among its processes",
        metric="run_memory_bytes",
    ),
    _text("mem_limit", "what limits the memory of the run most closely: host, cgroup, RLIMIT_AS or RLIMIT_DATA"),
    _bytes("mem_limit_bytes", "this limit"),
    _bytes("mem_room_bytes", "memory that is left until this limit"),
    _bytes("shm_used_bytes", "memory in use in /dev/shm"),
    _bytes("shm_total_bytes", "size of /dev/shm, through which loader workers send batches"),
    FieldSpec("number", "J", "energy_j", "energy of the CPU packages, often readable by root only; it wraps around"),
    _integer("cpus", "CPU cores of the host", metric="host_cpus"),
    _number("load_1m", "threads that run or want to run on the host, averaged over a minute", metric="host_load"),
    _text("gpu_absent", "why there are no device records"),
    _ABSENT,
)
_MEMORY_FIELDS = (
    *_IN_PROCESS,
    _integer("step", "the step in which it was measured"),
    _ms("took_ms", "duration of the measurement"),
    _list("devices", "one object per device, with the fields below and its own `absent`"),
    _text("device", "torch's name of the device", columns=()),
    _bytes("model_bytes", "parameters and buffers", columns=()),
    _bytes("gradients_bytes", "gradients", columns=()),
    _bytes("optimizer_bytes", "states of the optimizers", columns=()),
    _bytes("rest_bytes", "the rest of the allocated memory, such as activations", columns=()),
    _bytes("allocated_bytes", "memory handed out by torch's allocator", columns=()),
    _bytes("reserved_bytes", "memory that the allocator has reserved on the GPU", columns=()),
    _bytes("peak_bytes", "peak of the allocated memory", columns=()),
    _text("uuid", "the GPU's UUID", columns=()),
    _bytes("inactive_split_bytes", "fragments: free parts of blocks in use", columns=()),
    _integer("alloc_retries", "allocations that failed until cached memory was freed", columns=()),
    _integer("ooms", "number of out-of-memory errors", columns=()),
    _ABSENT,
)
_MODE_FIELDS = (
    *_IN_PROCESS,
    _integer("step", "the first step in this mode"),
    _integer("call", "the first call in this mode"),
    _text("root", "the class of the model"),
    _MODE,
    _text("requested_by", "user, or start if the mode was set when the run started"),
    _DEVICES,
    _boolean("virtual", "whether replicas share a device"),
    _text("reason", "the reason for this mode"),
    _text("refused", "why the request was refused (`mode` is the one that stays)"),
    _ABSENT,
)
_PAUSE_FIELDS = (
    *_IN_PROCESS,
    _integer("step", "the step before the pause"),
    _boolean("paused", "whether a pause starts here"),
    _seconds("paused_s", "length of the pause; null at its start"),
    _text("reason", "why the training resumed by itself"),
    _text("refused", "why the request was refused"),
)
_INPUT_FIELDS = (_integer("pid", "the process that waited"), _T_S, _seconds("waited_s", "how long it waited"))
_STALL_FIELDS = (
    _T_S,
    _seconds("since_s", "time of the last progress"),
    _seconds("lasted_s", "length of the stall; missing at its start"),
    _text("text", "where each rank is"),
    _list(
        "ranks",
        "each rank, those that the others wait for first: process, node, rank, pid, step (its last one), doing, for_s, "
        "waits (whether for another rank), apart (whether not involved in the stall), words, place (file and line), "
        "function, inside (the function of torch or of a package), state (of the process), cpu (cores in use), groups "
        "(of each process group its identity, its ranks and the number of started collectives), stacks, why_no_stack, "
        "gpus (torch's name, util_pct, power_w); missing at its end",
    ),
)
_LOADER_FIELDS = (
    *_IN_PROCESS,
    _text("loader", "the class of the dataset"),
    _integer("batches", "number of batches"),
    _integer("workers", "number of worker processes"),
    _boolean("persistent", "whether the workers stay for the next start"),
    _boolean("pinned", "whether batches are copied to pinned memory"),
    _integer("batch_size", "rows of a full batch; null if a sampler or the dataset makes the batches"),
    _boolean("distributed", "whether it has a DistributedSampler"),
    _integer("start", "the number of this start of the DataLoader object, from 1"),
    _integer("loop", "the number of this start of any loader in the process, from 1"),
    _integer("dataset", "the number of the dataset object in the process, from 1"),
    _seconds("iter_s", "duration of __iter__, which starts the workers"),
    _ABSENT,
)
_LOADER_LINES_FIELDS = (
    *_IN_PROCESS,
    _seconds("took_s", "duration of the sampling"),
    _object("lines", "number of samples by function and line of the script; the 50 lines with the most"),
)
_CHECKPOINT_FIELDS = (
    *_IN_PROCESS,
    _text("function", "the function that saved: torch.save, torch.distributed.checkpoint.save ..."),
    _text("place", "the innermost line of the script that led to the call"),
    _seconds("save_s", "its duration, from `t_s` on"),
    _bytes("bytes", "size of the file, or of the parts that all ranks saved"),
    _text("filesystem", "the type of its file system: ext4, nfs4 ..."),
    _ABSENT,
)
_DDP_FIELDS = (
    *_IN_PROCESS,
    _integer("wrapper", "its number in the process, from 0"),
    _text("root", "the class of its model"),
    _text("backend", "the backend of its process group"),
    _integer("group_size", "number of ranks that average their gradients", metric="ddp_group_size"),
    _list("group", "the ranks that average their gradients"),
    _integer("parameters", "number of parameters with averaged gradients"),
    _bytes("parameter_bytes", "size of the parameters with averaged gradients", metric="ddp_parameter_bytes"),
    FieldSpec("list", "bytes", "bucket_bytes", "the size of each bucket, in the order of averaging"),
    _bytes("bucket_cap_bytes", "largest size of a bucket", metric="ddp_bucket_cap_bytes"),
    _boolean("find_unused_parameters", "whether it looks for unused parameters in every step"),
    _bytes(
        "unused_bytes",
        "size of the parameters that were not used in the last iteration that torch timed",
        metric="ddp_unused_bytes",
    ),
    _boolean("gradient_as_bucket_view", "whether gradients are views of the buckets"),
    _boolean("static_graph", "whether all steps use the same graph"),
    _text("comm_hook", "the name of its communication hook; null if it has none"),
    _boolean("broadcast_buffers", "whether the first rank sends its buffers in every forward"),
    _boolean("sync_batch_norm", "whether it has a SyncBatchNorm, which makes ranks wait in the forward"),
    _integer("iteration", "the last iteration that torch itself timed: the first ten, then one in 100"),
    _ms(
        "comm_ms",
        "torch's time of that iteration: the communication of the backward pass",
        metric="ddp_torch_communication_seconds",
    ),
    _ms(
        "overlap_ms",
        "torch's time of that iteration: the part of the communication that computation hid",
        metric="ddp_torch_overlap_seconds",
    ),
    _ABSENT,
)
_PROCESS_FIELDS = (
    *_IN_PROCESS,
    _integer("world", "number of ranks; null if the process is not a rank"),
    _object(
        "job", "what identifies the job on all its nodes: by (slurm, torchelastic or master) and id; null if unknown"
    ),
    _integer("node", "the index of this node in the job; null if unknown"),
    _integer("pid", "the process id"),
    _list("argv", "sys.argv of the process; secrets are hidden"),
    _text("python", "the version of Python"),
    _text("torch", "the version of torch"),
    _text("device_kind", "cuda or cpu"),
    _ABSENT,
)
_OOM_FIELDS = (
    *_IN_PROCESS,
    _text("device", "torch's name of the device"),
    _bytes("asked_bytes", "size of the requested memory"),
    _bytes("total_bytes", "memory of the GPU"),
    _bytes("free_bytes", "free memory of the GPU"),
    _bytes("allocated_bytes", "memory handed out by torch's allocator"),
    _bytes("reserved_bytes", "memory that the allocator had reserved on the GPU"),
    _bytes("inactive_split_bytes", "fragments: free parts of blocks in use"),
)
_GROWTH_FIELDS = (
    *_IN_PROCESS,
    _integer("step", "the step before the record"),
    _integer("steps", "fewest steps that were taken between the two looks"),
    _list(
        "names",
        "what grew, at most five: name, function (of a variable in one), place (file and line where it grows; null "
        "unless there is just one), type (graph, or the class of a container), count (graphs or items), before (the "
        "length at the first look), items (the class of the newest item), device, graphs (whether it keeps autograd "
        "graphs), new_bytes (of the new items; null if unknown), length (of a graph: operations in a row), is_cut "
        "(whether the graph is longer)",
    ),
    _list("allocations", "lines that allocated memory on GPUs in between that was not freed: place, bytes"),
    _list("omitted", "what was not looked at"),
    _ABSENT,
)
_FLOPS_FIELDS = (
    *_IN_PROCESS,
    _integer("step", "the step that was counted; it took longer, and counts as a warm-up step"),
    _integer("flops", "FLOPs of its forward and backward passes, without recomputation"),
    _integer("recomputed_flops", "further FLOPs, which activation checkpointing repeated in the backward pass"),
    _object("by_dtype", "all these FLOPs by the dtype of the operands"),
    _integer("operators", "number of torch's operators that ran in the step"),
    _list("uncounted", "names of operators without a counting rule; if there are any, the FLOPs are a lower bound"),
    _text("reason", "why the FLOPs could not be counted; null if they were"),
)
_PROFILE_FIELDS = (
    *_IN_PROCESS,
    _integer("step", "the last step before the record"),
    _integer("request", "the number of the request"),
    _integer("steps", "number of profiled steps; missing, as the next two, if there is no profile"),
    _list("operators", "those with the most self time: on (host or device), name, calls, ms"),
    _text("file", "the trace, in the directory of the run"),
    _text("refused", "why there is no profile; missing if there is one"),
)
_COMPILES_FIELDS = (
    *_IN_PROCESS,
    _integer("compilations", "number of frames that torch.compile has compiled until now"),
    _seconds("seconds", "time to compile them and their backward graphs"),
    _seconds("seconds_again", "the part of it that followed a failed guard, in the last 64 compilations"),
    _list("again", "lines compiled again most often in the last 64: place, guard (newest of its form), number"),
    _list("graph_breaks", "lines that broke a graph: place, reason"),
    _ABSENT,
)
_HOST_SYNCS_FIELDS = (
    *_IN_PROCESS,
    _WALL_MS,
    _object("lines", "time (ns) in calls that waited, by line of the script and function"),
)
_CHECK_FIELDS = (
    *_IN_PROCESS,
    _integer("update", "number of optimizer steps in the process, including this one"),
    _text("optimizer_class", "the class of the optimizer"),
    _list("roots", "the names of the called models that it trains"),
    _boolean("idle", "whether no parameter belongs to a called model, and none has ever had a gradient"),
    _list("no_gradient", "names of up to 8 parameters that never had a gradient, if it has a state for others"),
    _boolean("has_rate", "whether a learning rate of its parameters is not 0, or not a plain number"),
    _boolean("evaluating", "whether the models are in eval mode, although they have Dropout or trained BatchNorm"),
    _boolean("single_rows", "whether a BatchNorm got one row of a split batch in the last call"),
    _boolean("has_wrapper", "whether the process has a DistributedDataParallel, even if it is never called"),
    _list("weights", "one value from each of up to 8 parameters; empty if it could not be read"),
    _list("losses", "the loss of the last backward pass of each line that calls backward"),
)
_DROPPED_FIELDS = (
    _integer("count", "lost spans and records"),
    _integer("pruned", "old records that were deleted to limit the history"),
)
_EXIT_FIELDS = (
    _integer("status", "the exit status of the command; null if unknown"),
    _text("signal", "the name of the signal that ended the command; null if none did"),
    _T_S,
    _text("by", "who learned how the command ended: supervisor or foreground (the `dpmon` that started the run)"),
    _text("cause", "the cause of the end; missing if unknown"),
    _object("absent", "why the status is null; missing if the status is known"),
)
RECORDS: Mapping[str, RecordSpec] = {
    record.name: record
    for record in (
        RecordSpec("call", "one outermost forward of a model", _CALL_FIELDS),
        RecordSpec("step", "one step of a loop", _STEP_FIELDS),
        RecordSpec("collective", "one collective of torch.distributed in a sampled step", _COLLECTIVE_FIELDS),
        RecordSpec("sampled", "a period, usually one step, in which every collective was recorded", _SAMPLED_FIELDS),
        RecordSpec(
            "loss",
            "the loss of an update, for each line that calls backward: at most once per second, and the last one",
            _LOSS_FIELDS,
        ),
        RecordSpec("device", "one GPU, once per second, as reported by NVML", _DEVICE_FIELDS),
        RecordSpec("host", "the host and the run's processes, once per second", _HOST_FIELDS),
        RecordSpec(
            "memory",
            "memory of a process's tensors on each device; for a tensor sharded over ranks, only the part on this rank",
            _MEMORY_FIELDS,
        ),
        RecordSpec("mode", "the start of a mode, or a refused request", _MODE_FIELDS),
        RecordSpec("pause", "the start or end of a pause, or a refused request", _PAUSE_FIELDS),
        RecordSpec("input", "a finished wait for a line of input", _INPUT_FIELDS),
        RecordSpec(
            "stall",
            "the start or the end of a stall; also when a different rank is found to delay the others",
            _STALL_FIELDS,
        ),
        RecordSpec("loader", "the start of a DataLoader", _LOADER_FIELDS),
        RecordSpec("loader_lines", "where a loader makes the batches that the training awaits", _LOADER_LINES_FIELDS),
        RecordSpec("checkpoint", "a save of a checkpoint that took at least 10 ms", _CHECKPOINT_FIELDS),
        RecordSpec(
            "ddp",
            "the properties of a DistributedDataParallel, recorded once, and again after each change",
            _DDP_FIELDS,
        ),
        RecordSpec("process", "a process that started to record", _PROCESS_FIELDS),
        RecordSpec("warning", "a message of dpmon", (*_IN_PROCESS, _text("text", "the message"))),
        RecordSpec("oom", "the state just before a GPU ran out of memory", _OOM_FIELDS),
        RecordSpec("growth", "what keeps more and more memory alive, once memory grows", _GROWTH_FIELDS),
        RecordSpec("flops", "the FLOPs of one step, counted for each new combination of input sizes", _FLOPS_FIELDS),
        RecordSpec("profile", "a profile by torch.profiler, or why there is none", _PROFILE_FIELDS),
        RecordSpec("compiles", "what torch.compile has compiled so far, after it compiled more", _COMPILES_FIELDS),
        RecordSpec("host_syncs", "where the host waited for a GPU in a sampled step", _HOST_SYNCS_FIELDS),
        RecordSpec("check", "the state of an optimizer and its models, about once a minute", _CHECK_FIELDS),
        RecordSpec("dropped", "the numbers of lost and deleted records, written before the exit", _DROPPED_FIELDS),
        RecordSpec("exit", "how the command ended", _EXIT_FIELDS),
    )
}
"""All kinds of records by name."""
COLUMNS: Mapping[str, tuple[str, ...]] = {
    name: tuple(
        chain.from_iterable((field.name,) if field.columns is None else field.columns for field in record.fields)
    )
    for name, record in RECORDS.items()
}
"""The columns of each kind in CSV; the column `more` follows them."""
