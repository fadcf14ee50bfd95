"""This process's record: its ring of spans, the lines beside it, and the handling of our faults.

There is one `Session` per process. The ring is opened at the first traced call, so processes that never make one
(DataLoader workers, compile workers, launchers) have no record. A forked child begins a new record.
"""

from __future__ import annotations

import errno
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
from dpmon.tracer.note_files import append_note, append_to, open_to_append

Tensor = torch.Tensor

MAX_FAULTS = 3
MAX_KNOWN = 1 << 14
MAX_BYTES_OF_LINES = 1 << 26
"""Most bytes of lines of one process. Beyond this limit, new sizes and events are lost."""
MAX_UNWRITTEN = 64
RETRY_NS = 1_000_000_000
"""Time between two attempts to write a line after a failure."""
MAX_PROCESSES = 512
MAX_TRIES = 1 << 14
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
SMALL_SLOTS = 4 << 10
LARGE_RINGS = 8
"""Most processes with a full-size ring, because hundreds of short-lived forked children must not fill the disk."""


@dataclass(frozen=True)
class TracerConfig:
    """The options of the command line, passed on in the environment."""

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
    """Batches of each loader to give to the training again and again; 0: none."""

    @classmethod
    def from_environment(cls) -> TracerConfig:
        """Read DPMON_*; raises KeyError or ValueError if the supervisor did not set it."""
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


class SizeCache:
    """Caches shape and dtype of the last lone tensor at one place, and the number of their definition."""

    __slots__ = ("dtype", "number", "shape")

    def __init__(self) -> None:
        self.shape: object = None
        self.dtype: object = None
        self.number = 0


class TracerErrorGuard:
    """Keeps our faults away from the script: an exception of ours ends the block, and is counted.

    Exceptions of the script's signal handlers and interrupts pass.
    """

    def __init__(self, session: Session, where: str, fatal: bool) -> None:
        self._session = session
        self._where = where
        self._fatal = fatal

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: Any, traceback: object) -> bool:
        if kind is None or Exception not in kind.__mro__:  # the script may have replaced isinstance
            return False
        self._session.count_error(self._where, error, self._fatal)
        return True


class Session:
    """Writes the record of one traced process."""

    def __init__(self, config: TracerConfig) -> None:
        self.config = config
        self.process = -1
        self.rank: int | None = None
        self.world: int | None = None
        self.on_open: Callable[[SpanRing], None] = lambda ring: None
        """Called with the new ring."""
        self.on_off: Callable[[], None] = lambda: None
        """Called when the tracer gives up."""
        self._lines: tuple[int, Any] = -1, None
        """The open file of lines, and its identity. A process that changes its user could not open it again."""
        self.reset()

    def reset(self) -> None:
        """Begin a new record, also in a forked child."""
        self.off = False
        """Whether nothing is recorded (any more)."""
        # Reentrant: a signal handler of the script may call the model while this thread holds the lock.
        self._lock = threading.RLock()
        self._opening = False
        self._tries = 0
        """Attempts to open the ring that found no free file descriptor; the script may free one later."""
        self._layouts, self._sizes = itertools.count(1), itertools.count(MAX_SITE + 1)
        """Numbers of definitions. Numbers of layouts, stages and collectives must fit into a span's site."""
        self._known: dict[Hashable, int] = {}
        self._retry_ns = 0
        """When a line may be written again (monotonic ns)."""
        if self._has_lines_fd():  # that of the parent
            os.close(self._lines[0])
        self._torn = False
        """Whether the last line may be incomplete."""
        self._unwritten: list[bytes] = []
        """Events that could not be written; they are written before the next line."""
        self._faults: dict[str, int] = {}
        self.ring: SpanRing | None = None
        self._described = False
        """Whether the process event was written."""
        self._opened = False
        """Whether the ring is open and `on_open` has run."""

    # ---------------------------------------------------------------- the ring

    def ensure_open(self) -> bool:
        """Open the ring if necessary; return False if nothing is recorded (a DataLoader worker, no room, given up)."""
        if self._opened:
            return True
        if self.off:
            return False
        if torch.utils.data.get_worker_info() is not None:
            self.off = True
            return False
        with self._lock:
            if self._opening:
                return False
            if not self._opened:
                self._opening = True
                try:
                    self._finish_opening()
                except OSError as error:
                    if error.errno in _NO_DESCRIPTOR and self._tries < MAX_TRIES:
                        self._tries += 1
                        return False
                    self.off = True
                    append_note(f"no record of process {os.getpid()}: {error}", "warnings.log")
                    return False
                finally:
                    self._opening = False
        return True

    def _finish_opening(self) -> None:
        """Open the ring, or complete an earlier attempt that an interrupt or another exception broke off."""
        if self.ring is None:
            self.ring = self._open()
        if not self._described:
            with self.guard("description of the process", fatal=False):
                self.record_event("process", **self._describe())
            self._described = True
        self.on_open(self.ring)
        self._opened = True

    def _open(self) -> SpanRing:
        self.rank, self.world = rank_and_world()
        for number in range(MAX_PROCESSES):
            try:
                ring = SpanRing(
                    os.path.join(self.config.directory, f"process-{number}.ring"),
                    process=number,
                    rank=-1 if self.rank is None else self.rank,
                    world=-1 if self.world is None else self.world,
                    start_ns=self.config.start_ns,
                    slots=SLOTS if number < LARGE_RINGS else SMALL_SLOTS,
                )
            except FileExistsError:
                continue
            self.process = number
            return ring
        raise OSError(f"more than {MAX_PROCESSES} processes in one run")

    def _describe(self) -> dict[str, Any]:
        return {
            "world": self.world,
            **job_and_node(os.environ, self.world),
            "pid": os.getpid(),
            "argv": [shorten_name(word) for word in hide_secrets(map(str, sys.argv[:32]))],
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            # torch.cuda.is_available() may initialize the driver. Forked children do not survive that.
            "device_kind": "cuda" if torch.cuda.is_initialized() else "cpu",  # type: ignore[no-untyped-call]
        }

    # ---------------------------------------------------------------- lines

    def _append_line(self, value: Mapping[str, object], keep: bool = False) -> bool:
        """Append a line to the process's file; return False on failure. With `keep`, the line is then written later."""
        now = monotonic_ns()
        line = to_bounded_json(value) + b"\n"
        if now >= self._retry_ns:
            data = (b"\n" if self._torn else b"") + b"".join(self._unwritten) + line
            self._torn = True  # until the line is known to be complete
            try:
                if append_to(self._lines_fd(), data, MAX_BYTES_OF_LINES):
                    self._torn = False
                    self._unwritten.clear()
                    return True
            except Exception as error:  # noqa: BLE001 - a full disk, a deleted directory
                raise_from_signal(error)
            self._retry_ns = now + RETRY_NS
        if keep and len(self._unwritten) < MAX_UNWRITTEN:
            self._unwritten.append(line)
        return False

    def _lines_fd(self) -> int:
        """Return the descriptor of the file of lines. Raises OSError."""
        if not self._has_lines_fd():
            fd = open_to_append(self.config.directory, f"process-{self.process}.jsonl")
            self._lines = fd, os.fstat(fd)
        return self._lines[0]

    def _has_lines_fd(self) -> bool:
        """Whether the file of lines is open. The script may close any descriptor and reuse its number."""
        fd, opened = self._lines
        with suppress(OSError):
            return os.path.samestat(os.fstat(fd), opened)
        return False

    def write_line(self, **data: object) -> None:
        """Write a line for the assembler only."""
        if self.ring is not None:
            with self._lock:
                self._retry_ns = 0
                self._append_line(data)

    def record_event(self, kind: str, fill: str | None = None, **data: object) -> None:
        """Write a rare record of this process.

        `fill`: whether it gets the step and call numbers of the "next" or the "last" call; None for neither.
        """
        if self.ring is not None:
            now = monotonic_ns()
            common: dict[str, object] = {"kind": kind, "process": self.process, "rank": self.rank}
            common["t_s"] = (now - self.config.start_ns) / 1e9
            line = {**common, **data, "at": now}
            if fill is not None:
                line["fill"] = fill
            with self._lock:
                self._append_line(line, keep=True)

    def warn(self, text: str, fill: str | None = None) -> None:
        """Write a warning for the user of dpmon. The script does not see it."""
        if self.ring is not None:
            self.record_event("warning", fill, text=text)
        else:
            append_note(text, "warnings.log")

    # ---------------------------------------------------------------- definitions

    def input_definition(self, args: tuple[object, ...], kwargs: Mapping[str, object], memo: SizeCache) -> int:
        """Return the number of the definition for the sizes of a call's arguments; 0 if they could not be read."""
        lone = args[0] if len(args) == 1 and not kwargs else None
        return self._sizes_of("0", lone, memo, lambda: signature_of_call(args, kwargs))

    def output_definition(self, value: object, memo: SizeCache) -> int:
        """Return the number of the definition for the sizes of a result; 0 if they could not be read."""
        return self._sizes_of("", value, memo, lambda: signature_of_value(value, ""))

    def _sizes_of(self, lone_path: str, lone: object, memo: SizeCache, signature: Callable[[], object]) -> int:
        """Return the number of the definition of a signature. The memo caches it if `lone` is a plain tensor."""
        try:
            if torch._C._len_torch_function_stack():
                with torch._C.DisableTorchFunction():  # a mode of the script would see our reads
                    return self.size_definition(lone_path, signature())
            if type(lone) is not Tensor:
                return self.size_definition(lone_path, signature())
            shape, dtype = lone.shape, lone.dtype
            if shape != memo.shape or dtype is not memo.dtype:
                number = self.size_definition(lone_path, (shape, dtype))
                if not number:
                    return 0
                memo.shape, memo.dtype, memo.number = shape, dtype, number
            return memo.number
        except Exception as error:  # noqa: BLE001 - anything may be passed to a module, and returned by it
            self.count_error("sizes of inputs and outputs", error, fatal=False)
            return 0

    def size_definition(self, lone_path: str, signature: object) -> int:
        """Return the number of the definition of a signature (see dpmon.tracer.core.tensor_sizes)."""
        return self.define((lone_path, signature), lambda: describe_tensors(signature, lone_path), self._sizes)

    def define(self, key: Hashable, spell: Callable[[], object], numbers: Iterator[int] | None = None) -> int:
        """Return the number of the definition for `key`, made by `spell` if it is new; 0 if it cannot be written."""
        number = self._known.get(key)
        if number is not None:
            return number
        with self._lock:
            number = self._known.get(key)
            if number is None and self.ring is not None:
                if len(self._known) >= MAX_KNOWN:
                    self._known.clear()
                number = next(self._layouts if numbers is None else numbers)
                if not self._append_line({"define": number, "value": spell()}):
                    return 0
                self._known[key] = number
        return number or 0

    # ---------------------------------------------------------------- faults

    def guard(self, where: str, fatal: bool = True) -> TracerErrorGuard:
        """Return a guard of a block; `where` names it in the warning. The hot path uses `try` and `count_error`."""
        return TracerErrorGuard(self, where, fatal)

    def count_error(self, where: str, error: BaseException, fatal: bool = True) -> None:
        """Count a fault of ours. With `fatal`, the third fault at the same place switches the tracer off.

        Raises only exceptions of the script's signal handlers.
        """
        raise_from_signal(error)
        try:
            count = self._faults[where] = self._faults.get(where, 0) + 1
            if len(self._faults) == count == 1:  # later faults mostly follow from the first
                self.warn(
                    f"dpmon's tracer failed ({where}): {one_line_text(error)}."
                    " The training is not affected; the record may be incomplete"
                )
            if fatal and count >= MAX_FAULTS and not self.off:
                self.off = True
                self.on_off()
                self.warn(f"dpmon's tracer gave up after it failed {count} times ({where}): nothing more is recorded")
        except Exception:  # noqa: BLE001 - the fault cannot be reported, and must not reach the script
            self.off = True


def raise_from_signal(error: BaseException) -> None:
    """Raise an error again if a signal handler of the script raised it. Otherwise the caller may suppress it."""
    if _from_a_signal(error):
        raise error


def _from_a_signal(error: BaseException) -> bool:
    """Whether a signal handler of the script raised the error, which can happen at any of our instructions."""
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
    """Return this process's rank and the number of ranks; None for both if it is not a rank."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None, None


def job_and_node(environment: Mapping[str, str], world: int | None) -> dict[str, Any]:
    """Return what is equal in all ranks of one job, on all its machines, and the number of this machine among them.

    None if the environment does not tell. torchrun's own id is "none" if the user gave none.
    """
    step, elastic, port = (environment.get(name) for name in ("SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT"))
    job = None
    if "SLURM_JOB_ID" in environment:
        slurm = environment["SLURM_JOB_ID"]
        job = {"by": "slurm", "id": f"{slurm}.{step}" if step else slurm}
    elif elastic not in (None, "", "none"):
        job = {"by": "torchelastic", "id": elastic}
    elif world is not None and port and (address := environment.get("MASTER_ADDR")):
        # On another machine, "localhost" is another job.
        if address in ("localhost", "::1") or address.startswith("127."):
            address = platform.node()
        job = {"by": "master", "id": f"{address}:{port}/{world}"}
    numbers = (environment.get(name, "") for name in ("GROUP_RANK", "NODE_RANK", "SLURM_NODEID"))
    return {"job": job, "node": next((int(number) for number in numbers if number.isdecimal()), None)}
