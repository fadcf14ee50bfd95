"""Defines every kind of record and its fields: name, type, unit and meaning."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.record.field_spec import FieldSpec, RecordSpec, parse_record_spec
from dpmon.record.record_types import MAX_SPANS
from dpmon.record.schema import QUANTITIES, SPAN_PHASES, STEP_PHASES
from dpmon.record.shared_names import CALL_PHASES

_CALL_TIMES = " ".join(f"{phase}_{clock}_ms" for phase in CALL_PHASES for clock in ("host", "device"))
_HOST_TIMES = " ".join(f"{name}_ms" for name in STEP_PHASES)
_DEVICE_TIMES = " ".join(f"{name}_device_ms" for name in STEP_PHASES if name in SPAN_PHASES)
_QUANTITIES = [
    FieldSpec(
        field.name, "integer", field.meaning + f"; missing if {field.absent}" * field.optional, explicit_unit=field.unit
    )
    for field in QUANTITIES
]
RECORDS: Mapping[str, RecordSpec] = {
    field.name: field
    for field in (
        parse_record_spec(f"""
            call: one outermost forward of a model
            process rank
            step, integer: the step of the call; null if it ran outside the steps
            step_kind, text: the kind of that step, or of the call itself: training, evaluation or forward_only
            call, integer: the number of the call in the process, from 1
            root, text: the model: its class without wrappers, and a variable or number if several of the class exist
            via, text: the wrapper of the model: DataParallel, DistributedDataParallel ...; fully_shard under FSDP2;
                null if the model was called directly
            mode
            virtual, boolean: whether the replicas share a device
            training, boolean: whether the model was in training mode
            grad, boolean: whether gradients were recorded
            failed, boolean: whether the call raised an exception [only in CSV]
            start_s wall_ms
            rows, integer: rows of the batch: the length of its first tensor along the batch's dimension [only in CSV]
            devices
            idle_devices, list: the devices for which the batch had no chunk [only in CSV]
            phases, object, ms: for each phase that ran, host_ms and device_ms; device_ms is null if the device time is
                unknown [in CSV: {_CALL_TIMES}]
            inputs outputs
            replicas, list: one object for the share of each device: replica, device, host_ms, device_ms, inputs,
                outputs [in CSV: replicas replica_devices replica_rows replica_host_ms replica_device_ms replica_inputs
                replica_outputs]
            stages, list: one object for each stage of a model on several devices: stage, device, parts, start_ms,
                host_ms, device_ms, from, crossed_bytes, inputs, outputs; missing for other models [in CSV: stages
                stage_devices stage_parts stage_host_ms stage_device_ms stage_crossed_bytes]
            absent
        """),
        parse_record_spec(
            f"""
            step: one step of a loop
            process rank
            step, integer: the number of the step among those of its kind in the process, from 1
            step_kind, text: training (a backward pass or an optimizer step ran in it), evaluation (neither, and all
                its calls were in eval mode or without gradients), or forward_only (neither, in training mode)
            mode start_s wall_ms {" ".join(field.name for field in _QUANTITIES)}
            phases, object, ms: the host time of each phase that ran; these times add up to the step [in CSV:
                {_HOST_TIMES}]
            device_ms, object: the time of each phase on the slowest device (for data: on the device that waits least);
                missing if the step used no GPU [in CSV: {_DEVICE_TIMES}]
            spans, list, ms: the first {MAX_SPANS} spans: phase, start_ms (after the step's start), ms (including nested
                spans: a backward includes its sync; an optimizer excludes its closure). Each span is a phase on the
                training thread. They are in order of start, outer spans before nested ones
            missing_spans, integer: number of spans after the first {MAX_SPANS}; missing if there are none
            buckets_ms, list: time from the step's start until each bucket of gradients was ready, in order of time;
                missing if unknown
            sync_number, integer: the number of the step's last synchronized backward pass, which is the same on all
                ranks; missing if there is none
            exposed_ms, number: communication of the step's synchronized passes that no computation hid: the shortest
                `sync` of all ranks; missing if there are no such passes
            wait_ms, number: the rest of the step's `sync`: the wait for the slowest rank (0 on that rank)
            loop, integer: the number of the loop over a DataLoader that its batches came from (`loop` of a `loader`
                record); missing if they came from none
            batch, integer: number of batches of this loop that were used up to the step's end; missing if unknown
            absent
        """,
            *_QUANTITIES,
        ),
        parse_record_spec("""
            collective: one collective of torch.distributed in a sampled step
            process rank
            step, integer: the step that ran when it was launched; null between two steps
            operation, text: all_reduce, all_gather, reduce_scatter, broadcast, reduce, all_to_all ...
            phase, text: activity of the thread that launched it: data, forward, backward, optimizer, other
            bytes, integer: size of the tensor as counted by nccl-tests: for an all_gather the whole result, for a
                reduce_scatter its input, for a gather or scatter the parts of all ranks
            dtype, text: the dtype of its first tensor
            group, text: torch's name of the process group
            group_size, integer: number of ranks in the group
            ranks, list: the ranks of the group; null for all ranks, or if unknown
            backend, text: the backend of the group: gloo, nccl ...
            device, text: the type of its tensors' device
            start_s, number: time of its launch, since the run's start
            host_ms, number: duration of the call that launched it; the ranks may still communicate after the call
            absent
        """),
        parse_record_spec("""
            sampled: a period, usually one step, in which every collective was recorded
            process rank
            step, integer: the step that ran in the middle of the period; null if none did
            start_s wall_ms
            collectives, integer: number of collectives launched; null if they cannot be recorded
            absent
        """),
        parse_record_spec("""
            loss: the value from which a backward pass started, added up over the passes of an update, of those
                inside optimizer.step only the first; for each line that calls backward, at most once per second, and
                the last one
            process rank
            step, integer: the step of the last pass
            t_s
            place, text: the innermost file and line of the script in the call
            loss, number: the value, before a GradScaler multiplied it -> loss
            absent
        """),
        parse_record_spec("""
            device: one GPU, once per second, as reported by NVML
            t_s
            index, integer: NVML's number, which may differ from CUDA's: see ordinals
            uuid, text: its UUID
            name, text: its name
            of_run, boolean: whether processes of the run hold memory on it
            visible, boolean: whether the command's CUDA_VISIBLE_DEVICES lets CUDA see it
            ordinals, list: torch's name for it in each process of the run: process, device
            util_pct, integer: share of the time in which a kernel ran on the GPU -> device_utilization_ratio
            mem_used_bytes, integer: memory in use on the GPU, other programs included -> device_memory_used_bytes
            mem_total_bytes, integer: memory of the GPU -> device_memory_total_bytes
            mem_reserved_bytes, integer: memory reserved by the driver
            mem_run_bytes, integer: memory that the run's processes hold on the GPU -> device_memory_run_bytes
            mem_others_bytes, integer: memory that other processes hold on the GPU
            mem_torch_bytes, integer: memory that torch's allocators in the run's processes reserve
            temperature_c, integer: temperature of the GPU -> device_temperature_celsius
            temperature_limit_c, integer: temperature at which the GPU is throttled
            power_w, number: power the GPU draws -> device_power_watts
            power_limit_w, number: power limit of the GPU
            energy_j, number: energy since the driver was loaded
            sm_clock_mhz, integer: clock of the GPU's multiprocessors -> device_sm_clock_hertz
            mem_clock_mhz, integer: clock of its memory
            throttle, list: reasons for throttling, in words; empty if the GPU is not throttled
            fan_pct, integer: speed of its fan
            pcie_rx_bytes_s, integer: data received over PCIe
            pcie_tx_bytes_s, integer: data sent over PCIe
            nvlink_rx_bytes_s, integer: data received over NVLink
            nvlink_tx_bytes_s, integer: data sent over NVLink
            ecc_corrected, integer: corrected memory errors since the driver was loaded
            ecc_uncorrected, integer: uncorrected memory errors since the driver was loaded
            retired_pages, integer: pages of memory that were retired
            remapped_rows, integer: rows of memory that were remapped
            xid, integer: the newest XID error since the run's start
            mig, boolean: whether it is divided into MIG instances
            mig_devices, list: the instances: uuid, mem_used_bytes, mem_total_bytes
            persistence, boolean: whether the driver stays loaded while no program uses the GPU
            sm_active_pct, number: share of its multiprocessors that were busy (Hopper and later)
            tensor_active_pct, number: share of the time in which its tensor cores worked
            dram_active_pct, number: share of the time in which its memory was read or written
            processes, list: processes with the most memory, those of the run first: pid, mem_bytes, of_run
            process_count, integer: number of processes that use it
            absent
        """),
        parse_record_spec("""
            host: the host and the run's processes, once per second
            t_s
            cpu_pct, number: share of the host's CPU cores in use -> host_cpu_ratio
            mem_used_bytes, integer: memory in use on the host -> host_memory_used_bytes
            mem_total_bytes, integer: memory of the host -> host_memory_total_bytes
            run_cpu_pct, number: CPU use of the run's processes: 200% is two cores -> run_cpu_cores
            run_mem_bytes, integer: memory of the run's processes; a shared page is divided among its processes ->
                run_memory_bytes
            cpus, integer: CPU cores of the host -> host_cpus
            load_1m, number: threads that run or want to run on the host, averaged over a minute -> host_load
            gpu_absent, text: why there are no device records
            absent
        """),
        parse_record_spec(
            """
            memory: memory of a process's tensors on each device; for a tensor sharded over ranks, only the part on
                this rank
            process rank t_s
            step, integer: the step in which it was measured
            took_ms, number: duration of the measurement [not in CSV]
            devices, list: one object per device, with the fields below and its own `absent` [not in CSV]
            device, text: torch's name of the device
            model_bytes, integer: parameters and buffers
            shared_bytes, integer: the part of `model_bytes` in shared memory of the host [not in CSV]
            shared_files, text: a name of this shared memory, the same in all its processes [not in CSV]
            gradients_bytes, integer: gradients
            optimizer_bytes, integer: states of the optimizers
            rest_bytes, integer: the rest of the allocated memory: activations and similar tensors
            allocated_bytes, integer: memory handed out by torch's allocator
            reserved_bytes, integer: memory that the allocator has reserved on the GPU
            peak_bytes, integer: peak of the allocated memory
            peak_after_step, integer: the last measured step before the peak
            uuid, text: the GPU's UUID [not in CSV]
            inactive_split_bytes, integer: free parts of blocks that are in use: fragments [not in CSV]
            alloc_retries, integer: number of allocations that failed until cached memory was freed [not in CSV]
            ooms, integer: number of out-of-memory errors [not in CSV]
            absent
        """,
            row="device",
        ),
        parse_record_spec("""
            mode: the start of a mode, or a refused request
            process rank t_s
            step, integer: the first step in this mode
            call, integer: the first call in this mode
            root, text: the class of the model [not in CSV]
            mode
            requested_by, text: user, or start if the mode was set when the run started
            devices
            virtual, boolean: whether replicas share a device
            reason, text: the reason for this mode
            refused, text: why the requested mode was refused (`mode` is the one that stays); null if it was not
            absent
        """),
        parse_record_spec("""
            pause: the start or end of a pause, or a refused request
            process rank t_s
            step, integer: the step before the pause
            paused, boolean: whether a pause starts here
            paused_s, number: length of the pause; null at its start
            reason, text: why the training resumed by itself; null if the user resumed it
            refused, text: why the request was refused; null if it was not
        """),
        parse_record_spec("""
            input: a finished wait for a line of input
            pid, integer: the process that waited
            t_s
            waited_s, number: how long it waited
        """),
        parse_record_spec("""
            stall: the start or the end of a stall; also when a different rank is found to delay the others
            t_s
            since_s, number: time of the last progress since the run's start, in all records of the stall
            lasted_s, number: length of the stall; missing at its start
            text, text: where each rank is, and which ranks wait for others
            nccl, list: lines in which NCCL names ranks that are missing, failed or behind; missing at its end [not in
                CSV]
            ranks, list: one object for each rank, those that the others wait for first: process, node (if the run has
                several), rank, pid, step (its last one), doing, for_s (for how long), waits (whether it waits for
                another rank), apart (whether it is not involved in the stall), words, place (file and line of the
                script), function, inside (the function of torch or of a package that it is in), state (of the process),
                cpu (cores in use), groups (for each process group its identity, its ranks and the number of collectives
                that the rank has started, null if the backend does not count them), stacks, why_no_stack, gpus (torch's
                name, util_pct and power_w of each of its GPUs); missing at its end [not in CSV]
        """),
        parse_record_spec("""
            loader: the start of a DataLoader
            process rank t_s
            loader, text: the class of the dataset
            batches, integer: number of batches
            workers, integer: number of worker processes
            persistent, boolean: whether the workers stay for the next start
            pinned, boolean: whether the loader copies its batches to pinned memory
            batch_size, integer: rows of a full batch; null if a sampler or the dataset makes the batches
            distributed, boolean: whether a DistributedSampler gives this rank its part of the dataset
            start, integer: the number of this start among those of the same DataLoader object, from 1
            loop, integer: the number of this start among those of all loaders of the process, from 1
            dataset, integer: the number of the dataset object in the process, from 1
            iter_s, number: duration of the loader's __iter__, which starts the workers
            absent
        """),
        parse_record_spec("""
            ddp: the properties of a DistributedDataParallel, recorded once, and again after each change
            process rank t_s
            wrapper, integer: its number in the process, from 0
            root, text: the class of its model
            backend, text: the backend of its process group
            group_size, integer: number of ranks that average their gradients -> ddp_group_size
            group, list: the ranks that average their gradients
            parameters, integer: number of parameters with averaged gradients
            parameter_bytes, integer: size of the parameters with averaged gradients -> ddp_parameter_bytes
            bucket_bytes, list: the size of each bucket, in the order of averaging
            bucket_cap_bytes, integer: largest size of a bucket -> ddp_bucket_cap_bytes
            find_unused_parameters, boolean: whether it looks for unused parameters in every step
            unused_bytes, integer: size of the parameters that were not used in the last iteration that torch timed ->
                ddp_unused_bytes
            gradient_as_bucket_view, boolean: whether gradients are views of the buckets
            static_graph, boolean: whether the script promises that all steps use the same graph
            comm_hook, text: the name of its communication hook; null if it has none
            broadcast_buffers, boolean: whether the first rank sends its buffers in every forward
            sync_batch_norm, boolean: whether it has a SyncBatchNorm, which makes ranks wait in the forward
            iteration, integer: the last iteration that torch itself timed: the first ten, then one in 100
            comm_ms, number: torch's time of that iteration: the communication of the backward pass ->
                ddp_torch_communication_seconds
            overlap_ms, number: torch's time of that iteration: the part of the communication that computation hid ->
                ddp_torch_overlap_seconds
            absent
        """),
        parse_record_spec("""
            process: a process that started to record
            process rank t_s
            world, integer: number of ranks; null if the process is not a rank
            job, object: what identifies the job on all its nodes: by (slurm, torchelastic or master) and id; null if
                the environment does not tell [not in CSV]
            node, integer: the index of this node in the job; null if the environment does not tell
            pid, integer: the process id
            argv, list: sys.argv of the process; secrets are hidden
            python, text: the version of Python
            torch, text: the version of torch
            device_kind, text: cuda or cpu
            absent
        """),
        parse_record_spec("""
            warning: a message of dpmon
            process rank t_s
            text, text: the message
        """),
        parse_record_spec("""
            oom: the state just before a GPU ran out of memory
            process rank t_s
            device, text: torch's name of the device
            asked_bytes, integer: size of the requested memory
            total_bytes, integer: memory of the GPU
            free_bytes, integer: free memory of the GPU
            allocated_bytes, integer: memory handed out by torch's allocator
            reserved_bytes, integer: memory that the allocator had reserved on the GPU
            inactive_split_bytes, integer: free parts of blocks that were in use: fragments
        """),
        parse_record_spec("""
            dropped: the numbers of lost and deleted records, written before the exit
            count, integer: lost spans and records
            pruned, integer: old records that were deleted to limit the history
        """),
        parse_record_spec("""
            exit: how the command ended
            status, integer: the exit status of the command; null if unknown
            signal, text: the name of the signal that ended the command, such as SIGTERM; null if none did
            t_s
            by, text: the part of dpmon that learned how the command ended: supervisor or foreground (the `dpmon` that
                started the run)
            cause, text: the cause of the end; missing if unknown [not in CSV]
            absent, object: why the status is null; missing if the status is known [not in CSV]
        """),
    )
}
"""All kinds of records by name."""
COLUMNS: Mapping[str, tuple[str, ...]] = {name: field.columns for name, field in RECORDS.items()}
"""The columns of each kind in CSV; the column `more` follows them."""
