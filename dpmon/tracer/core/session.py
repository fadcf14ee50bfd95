"""This process's record: its ring of spans, its file of lines, and the handling of our faults.

There is one `Session` per process. The ring is opened at the first traced call, so processes that never make a call
(DataLoader workers, compile workers, launchers) have no record. A forked child begins a new record.
"""

from __future__ import annotations

import itertools
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import hide_secrets, shorten_name, to_bounded_json
from dpmon.record.span_format import MAX_SITE
from dpmon.span_ring import SLOTS, SpanRing
from dpmon.tracer.core.exception_text import one_line_text
from dpmon.tracer.core.tensor_sizes import describe_tensors, signature_of_call, signature_of_value
from dpmon.tracer.note_files import append_note, open_file

Tensor = torch.Tensor
count_function_modes = torch._C._len_torch_function_stack
"""Returns the number of function modes, which would see our reads of sizes."""
set_eval_frame: Any = torch._C._dynamo.eval_frame.set_eval_frame
"""Sets how dynamo treats the frames that this thread enters; returns the previous setting."""

MAX_FAULTS = 3
MAX_DEFINITIONS = 1 << 14
MAX_LINES_BYTES = 1 << 26
"""Maximum size of one process's file of lines. Beyond it, new sizes and events are lost."""
MAX_EARLY_EVENTS = 64
MAX_PROCESSES = 512
SMALL_RING_SLOTS = 4 << 10
MAX_LARGE_RINGS = 8
"""How many processes get a full-size ring: hundreds of short-lived forked children must not fill the disk."""


@dataclass(frozen=True)
class TracerConfig:
    """The options of the command line, read from the environment."""

    directory: str
    start_ns: int
    mode: str
    """auto, script, dp or single."""
    replicas: int | None
    devices: tuple[str, ...]
    batch_dim: int = 0
    loss: bool = True
    """Whether the losses are read."""
    replay: int = 0
    """How many batches of each loader to repeat; 0: load all batches as usual."""

    @classmethod
    def from_environment(cls) -> TracerConfig:
        """Read the variables DPMON_*. Raises KeyError or ValueError if the supervisor did not set them."""
        replicas = os.environ.get("DPMON_REPLICAS")
        devices = os.environ.get("DPMON_DEVICES")
        return cls(
            directory=os.environ["DPMON_RUN"],
            start_ns=int(os.environ["DPMON_START_NS"]),
            mode=os.environ.get("DPMON_MODE", "auto"),
            replicas=int(replicas) if replicas else None,
            devices=tuple(name.strip() for name in devices.split(",")) if devices else (),
            batch_dim=int(os.environ.get("DPMON_BATCH_DIM", 0)),
            loss=os.environ.get("DPMON_LOSS") != "False",
            replay=int(os.environ.get("DPMON_REPLAY", 0)),
        )

    @property
    def has_requested_devices(self) -> bool:
        """Whether replicas or devices were requested."""
        return self.replicas is not None or bool(self.devices)


@dataclass(slots=True, eq=False)
class SizeCache:
    """A cache of the last lone tensor's shape and dtype at one place, and of the number of their definition."""

    shape: object = None
    dtype: object = None
    definition: int = 0


@dataclass(eq=False)
class TracerErrorGuard:
    """A context that keeps our faults away from the script: an exception of ours ends the block, and is counted.

    Exceptions of the script's signal handlers, and interrupts, pass through.
    """

    session: Session
    operation: str
    is_fatal: bool

    def __enter__(self) -> None: ...

    def __exit__(self, error_class: type[BaseException] | None, error: Any, traceback: object) -> bool:
        if error_class is None or Exception not in error_class.__mro__:  # the script may have replaced isinstance
            return False
        self.session.count_error(self.operation, error, self.is_fatal)
        return True


class HiddenBlock(TracerErrorGuard):
    """A guard whose block neither dynamo nor a function mode of the script sees."""

    # A generator would not do: dynamo would compile the functions of contextlib that run it.

    def __enter__(self) -> None:
        self.dynamo_callback = set_eval_frame(None)  # else dynamo would try to compile the functions of the block
        self.functions = torch._C.DisableTorchFunction()
        self.functions.__enter__()

    def __exit__(self, error_class: type[BaseException] | None, error: Any, traceback: object) -> bool:
        try:
            self.functions.__exit__(None, None, None)
            return super().__exit__(error_class, error, traceback)
        finally:
            set_eval_frame(self.dynamo_callback)


class Session:
    """The writer of one traced process's record."""

    def __init__(self, config: TracerConfig) -> None:
        self.config = config
        self.process_index = -1
        self.rank: int | None = None
        self.world_size: int | None = None
        self.on_open: Callable[[SpanRing], None] = lambda ring: None
        """Called with the ring when it is opened."""
        self.on_give_up: Callable[[], None] = lambda: None
        """Called when the tracer gives up."""
        self._lines_file: tuple[int, Any] = -1, None
        """Descriptor and status of the open file of lines. A process that changes its user could not open it again."""
        self.reset()

    def reset(self) -> None:
        """Begin a new record; also called in a forked child."""
        self.is_off = False
        """Whether nothing is recorded (or nothing more)."""
        # Reentrant: a signal handler of the script may call the model while this thread holds the lock.
        self._lock = threading.RLock()
        self._is_opening = False
        self._layout_numbers, self._size_numbers = itertools.count(1), itertools.count(MAX_SITE + 1)
        """Numbers of definitions. Numbers of layouts, stages and collectives must fit into a span's site."""
        self._definitions: dict[Hashable, int] = {}
        if self._has_lines_fd():  # the parent's
            fd, _ = self._lines_file
            os.close(fd)
        self._early_events: list[tuple[str, dict[str, Any]]] = []
        """Kind and fields of the events before the ring was open."""
        self._fault_counts: dict[str, int] = {}
        self.has_captured_graph = False
        """Whether the script has captured a CUDA graph, as far as it was seen."""
        self.ring: SpanRing | None = None
        self._is_open = False
        """Whether the ring is open and `on_open` has run."""

    # ---------------------------------------------------------------- the ring

    def ensure_open(self) -> bool:
        """Open the ring if necessary; return False if nothing is recorded (DataLoader worker, full disk, gave up)."""
        if self._is_open:
            return True
        if self.is_off:
            return False
        if torch.utils.data.get_worker_info() is not None:
            self.is_off = True
            return False
        with self._lock:
            if self._is_opening:
                return False
            if not self._is_open:
                self._is_opening = True
                try:
                    self._finish_opening()
                except OSError as error:
                    self.is_off = True
                    append_note(f"no record of process {os.getpid()}: {error}", "warnings.log")
                    return False
                finally:
                    self._is_opening = False
        return True

    def _finish_opening(self) -> None:
        """Open the ring, or complete an earlier attempt that an interrupt or another exception ended."""
        if self.ring is None:
            ring = self._create_ring()
            with self.guard("description of the process", fatal=False):
                self._early_events.insert(0, ("process", self._describe_process()))
            self.ring = ring
        while self._early_events:
            kind, data = self._early_events.pop(0)
            self.record_event(kind, **data)
        self.on_open(self.ring)
        self._is_open = True

    def _create_ring(self) -> SpanRing:
        """Create the ring under the first free process index. Raises OSError."""
        self.rank, self.world_size = rank_and_world()
        for process_index in range(MAX_PROCESSES):
            try:
                ring = SpanRing(
                    os.path.join(self.config.directory, f"process-{process_index}.ring"),
                    process=process_index,
                    rank=-1 if self.rank is None else self.rank,
                    world=-1 if self.world_size is None else self.world_size,
                    start_ns=self.config.start_ns,
                    slots=SLOTS if process_index < MAX_LARGE_RINGS else SMALL_RING_SLOTS,
                )
            except FileExistsError:
                continue
            self.process_index = process_index
            return ring
        raise OSError(f"more than {MAX_PROCESSES} processes in one run")

    def _describe_process(self) -> dict[str, Any]:
        """Return the fields of the process event."""
        return {
            "world": self.world_size,
            **job_and_node(os.environ, self.world_size),
            "pid": os.getpid(),
            "argv": [shorten_name(word) for word in hide_secrets(map(str, sys.argv[:32]))],
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            # torch.cuda.is_available() may initialize the driver. Forked children do not survive that.
            "device_kind": "cuda" if torch.cuda.is_initialized() else "cpu",  # type: ignore[no-untyped-call]
        }

    # ---------------------------------------------------------------- lines

    def _append_line(self, value: Mapping[str, object]) -> bool:
        """Append a line to the process's file. Return False if it cannot be written, as on a full disk."""
        line = to_bounded_json(value) + b"\n"
        try:
            fd = self._lines_fd()
            size = os.fstat(fd).st_size
            if size + len(line) > MAX_LINES_BYTES:
                return False
            if os.write(fd, line) == len(line):
                return True
            os.ftruncate(fd, size)  # no other line may follow an incomplete one
        except Exception as error:  # noqa: BLE001 - a full disk, a deleted directory
            raise_from_signal(error)
        return False

    def _lines_fd(self) -> int:
        """Return the descriptor of the file of lines. Raises OSError."""
        if not self._has_lines_fd():
            fd = open_file(self.config.directory, f"process-{self.process_index}.jsonl", os.O_APPEND)
            self._lines_file = fd, os.fstat(fd)
        fd, _ = self._lines_file
        return fd

    def _has_lines_fd(self) -> bool:
        """Return whether the file of lines is open. The script may close any descriptor and reuse its number."""
        fd, opened_stat = self._lines_file
        with suppress(OSError):
            return os.path.samestat(os.fstat(fd), opened_stat)
        return False

    def write_line(self, **data: object) -> None:
        """Write a line for the assembler only."""
        if self.ring is not None:
            with self._lock:
                self._append_line(data)

    def record_event(self, kind: str, call_reference: str | None = None, **data: object) -> None:
        """Write an event of this process, or keep it until the ring is open. `data`: its fields.

        `call_reference`: the call whose step and call numbers the event gets, "next" or "last"; None for none.
        """
        if self.ring is None:
            if len(self._early_events) < MAX_EARLY_EVENTS:
                self._early_events.append((kind, data))
            return
        now = monotonic_ns()
        common: dict[str, object] = {"kind": kind, "process": self.process_index, "rank": self.rank}
        common["t_s"] = (now - self.config.start_ns) / 1e9
        line = {**common, **data, "at": now}
        if call_reference is not None:
            line["fill"] = call_reference
        with self._lock:
            self._append_line(line)

    def warn(self, text: str, call_reference: str | None = None) -> None:
        """Write a warning for the user of dpmon. The script does not see it."""
        if self.ring is not None:
            self.record_event("warning", call_reference, text=text)
        else:
            append_note(text, "warnings.log")

    # ---------------------------------------------------------------- definitions

    def input_definition(self, args: tuple[object, ...], kwargs: Mapping[str, object], size_cache: SizeCache) -> int:
        """Return the number of the definition for the sizes of a call's arguments; 0 if they could not be read."""
        value = args[0] if len(args) == 1 and not kwargs else None
        try:
            if (
                type(value) is Tensor
                and not count_function_modes()
                and value.shape == size_cache.shape
                and value.dtype is size_cache.dtype
            ):
                return size_cache.definition
            return self._new_definition("0", value, size_cache, signature_of_call, args, kwargs)
        except Exception as error:  # noqa: BLE001 - anything may be passed to a module
            return self._count_size_error(error)

    def output_definition(self, value: object, size_cache: SizeCache) -> int:
        """Return the number of the definition for the sizes of a result; 0 if they could not be read."""
        try:
            if (
                type(value) is Tensor
                and not count_function_modes()
                and value.shape == size_cache.shape
                and value.dtype is size_cache.dtype
            ):
                return size_cache.definition
            return self._new_definition("", value, size_cache, signature_of_value, value, "")
        except Exception as error:  # noqa: BLE001 - anything may be returned by a module
            return self._count_size_error(error)

    def _count_size_error(self, error: Exception) -> int:
        """Count an error while sizes were read; return 0."""
        self.count_error("sizes of inputs and outputs", error, fatal=False)
        return 0

    def _new_definition(
        self,
        lone_path: str,
        lone_value: object,
        size_cache: SizeCache,
        signature_of: Callable[..., object],
        *values: object,
    ) -> int:
        """Return the number of the definition for sizes that are not in the cache. May raise any exception."""
        with torch._C.DisableTorchFunction():  # hides our reads from the script's modes
            if type(lone_value) is not Tensor:
                return self.size_definition(lone_path, signature_of(*values))
            shape, dtype = lone_value.shape, lone_value.dtype
            definition = self.size_definition(lone_path, (shape, dtype))
        if definition:
            size_cache.shape, size_cache.dtype, size_cache.definition = shape, dtype, definition
        return definition

    def size_definition(self, lone_path: str, signature: object) -> int:
        """Return the number of the definition of a signature (see dpmon.tracer.core.tensor_sizes)."""
        return self.define((lone_path, signature), lambda: describe_tensors(signature, lone_path), self._size_numbers)

    def define(self, key: Hashable, describe: Callable[[], object], numbers: Iterator[int] | None = None) -> int:
        """Return the number of the definition of `key`, made by `describe` if it is new; 0 if it cannot be written."""
        definition = self._definitions.get(key)
        if definition is not None:
            return definition
        with self._lock:
            definition = self._definitions.get(key)
            if definition is None and self.ring is not None:
                if len(self._definitions) >= MAX_DEFINITIONS:
                    self._definitions.clear()
                definition = next(self._layout_numbers if numbers is None else numbers)
                if not self._append_line({"define": definition, "value": describe()}):
                    return 0
                self._definitions[key] = definition
        return definition or 0

    # ---------------------------------------------------------------- faults

    def guard(self, operation: str, fatal: bool = True) -> TracerErrorGuard:
        """Return a guard for a block; the warning names its `operation`. Hot code uses `try` and `count_error`."""
        return TracerErrorGuard(self, operation, fatal)

    def hidden(self, operation: str) -> HiddenBlock:
        """Return a guard for a block that runs rarely, which also hides it from the script; see `guard`."""
        return HiddenBlock(self, operation, is_fatal=False)

    def count_error(self, operation: str, error: BaseException, fatal: bool = True) -> None:
        """Count a fault of ours. With `fatal`, the third fault in the same operation switches the tracer off.

        Raises only exceptions of the script's signal handlers.
        """
        raise_from_signal(error)
        try:
            count = self._fault_counts[operation] = self._fault_counts.get(operation, 0) + 1
            if len(self._fault_counts) == count == 1:  # later faults usually follow from the first
                self.warn(
                    f"dpmon's tracer failed ({operation}): {one_line_text(error)}."
                    " The training is not affected; the record may be incomplete"
                )
            if fatal and count >= MAX_FAULTS and not self.is_off:
                self.is_off = True
                self.on_give_up()
                self.warn(
                    f"dpmon's tracer gave up after it failed {count} times ({operation}): nothing more is recorded"
                )
        except Exception:  # noqa: BLE001 - the fault cannot be reported, and must not reach the script
            self.is_off = True


def raise_from_signal(error: BaseException) -> None:
    """Raise an error again if a signal handler of the script raised it. Otherwise the caller may suppress it."""
    if _is_from_signal_handler(error):
        raise error


def _is_from_signal_handler(error: BaseException) -> bool:
    """Return whether a signal handler of the script raised the error, which can happen at any of our instructions."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(handler, "__func__", handler) for handler in handlers]
    codes = {getattr(function, "__code__", None) for function in functions} - {None}
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code in codes:
            return True
        traceback = traceback.tb_next
    return False


def rank_and_world() -> tuple[int | None, int | None]:
    """Return this process's rank and the world size; None for both if the process is not a rank."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None, None


def job_and_node(environment: Mapping[str, str], world_size: int | None) -> dict[str, Any]:
    """Return the identity of the job, equal in all its ranks on all nodes, and the number of this node in the job.

    Each is None if the environment does not contain it. torchrun's own id is "none" if the user gave none.
    """
    slurm_step, port = environment.get("SLURM_STEP_ID"), environment.get("MASTER_PORT")
    elastic_id = environment.get("TORCHELASTIC_RUN_ID")
    job = None
    if "SLURM_JOB_ID" in environment:
        slurm = environment["SLURM_JOB_ID"]
        job = {"by": "slurm", "id": f"{slurm}.{slurm_step}" if slurm_step else slurm}
    elif elastic_id not in (None, "", "none"):
        job = {"by": "torchelastic", "id": elastic_id}
    elif world_size is not None and port and (address := environment.get("MASTER_ADDR")):
        # On another node, "localhost" means another job.
        if address in ("localhost", "::1") or address.startswith("127."):
            address = platform.node()
        job = {"by": "master", "id": f"{address}:{port}/{world_size}"}
    numbers = (environment.get(name, "") for name in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID"))
    return {"job": job, "node": next((int(number) for number in numbers if number.isdecimal()), None)}
