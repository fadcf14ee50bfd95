"""This process's record: the ring, what has been defined in it, and what becomes of our own faults.

One `Session` a process. The ring is opened at the first traced call, so that processes that never make one (DataLoader
workers, compile workers, launchers) leave no trace; a forked child starts afresh.
"""

from __future__ import annotations

import errno
import itertools
import os
import platform
import signal
import sys
import threading
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import torch

from dpmon.record.wire import PLAIN_WORDS, STEP_WORDS, pack_definition, pack_event, shortened
from dpmon.ring import DEFAULT_CAPACITY, Ring
from dpmon.tracer import sizes
from dpmon.tracer.errors import in_a_line
from dpmon.tracer.inject import note

if TYPE_CHECKING:
    from dpmon.tracer.timing import Timing

__all__ = ["Config", "Local", "Memo", "Session", "raise_from_signal"]

Tensor = torch.Tensor

_IN_ORDER = frozenset(("mode", "pause"))
"""Events that divide the steps before them from those after."""
MAX_FAULTS = 3
MAX_KNOWN = 1 << 14
MAX_PROCESSES = 512
MAX_TRIES = 1 << 14
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
LARGE_RINGS = 8
"""Processes with a ring of full size; a run that forks hundreds of short children must not fill the disk."""


@dataclass(frozen=True)
class Config:
    """What the command line asked for, handed down in the environment."""

    directory: str
    start_ns: int
    mode: str
    """auto, script, dp or single."""
    replicas: int | None
    devices: tuple[str, ...]

    @classmethod
    def from_environment(cls) -> Config:
        """Read DPMON_*; raises KeyError or ValueError if it is not what the supervisor sets."""
        replicas = os.environ.get("DPMON_REPLICAS")
        devices = os.environ.get("DPMON_DEVICES")
        return cls(
            directory=os.environ["DPMON_RUN"],
            start_ns=int(os.environ["DPMON_START_NS"]),
            mode=os.environ.get("DPMON_MODE", "auto"),
            replicas=int(replicas) if replicas else None,
            devices=tuple(name.strip() for name in devices.split(",")) if devices else (),
        )

    @property
    def explicit(self) -> bool:
        """Whether replicas or devices were asked for."""
        return self.replicas is not None or bool(self.devices)


class Memo:
    """The last lone tensor's shape seen at one place, with the number of its definition."""

    __slots__ = ("dtype", "epoch", "number", "rows", "shape")

    def __init__(self) -> None:
        self.shape: Any = None
        self.dtype: Any = None
        self.number = 0
        self.rows = -1
        """Along dimension 0."""
        self.epoch = -1


class Local(threading.local):
    """What a thread is in: how deep in traced calls, and the call whose phases it runs."""

    depth: int = 0
    call: Any = None
    root: Any = None
    verb: bool = False
    """Whether it is in scatter, replicate or gather: what these call of each other is no phase of its own."""
    hand: Any = None
    """What the script has composed by hand so far: see dpmon.tracer.byhand."""
    tried: Any = None
    """What to say of the attempt at dp that has failed for the call under way: see dpmon.tracer.modes."""

    def clear(self) -> None:
        """This thread is in nothing; the wrappers hold this very object, so it is not replaced."""
        self.depth, self.call, self.root, self.verb, self.hand, self.tried = 0, None, None, False, None, None


class Session:
    """The writing side of one traced process."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.local = Local()
        self.off = False
        self.ring: Ring | None = None
        self.timing: Timing | None = None
        """Once a call runs on a GPU: what devices take, and the records that wait for it."""
        self._parents: list[object] = []
        self.process = -1
        self.rank: int | None = None
        self.world: int | None = None
        self.on_open: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None
        """Called when what is remembered of the definitions is void, and when the tracer gives up."""
        self._forget()

    def _forget(self) -> None:
        # A signal handler of the script may call the model while this thread is in here: it must not wait for itself.
        self._lock = threading.RLock()
        self._opening = False
        self._tries = 0
        """How often no file descriptor was free to open the ring; the script may free one later."""
        self._numbers = itertools.count(1)
        self._known: dict[Hashable, int] = {}
        self._live: dict[Hashable, int] = {}
        self._rows: dict[tuple[int, int, int], int] = {}
        self._signatures: dict[int, Hashable] = {}
        self.renew_at = 0
        self.epoch = 0
        """How often the definitions were written afresh; a number remembered from an earlier epoch is to be defined."""
        self._faults: dict[str, int] = {}
        self.ring = None

    def after_fork(self) -> None:
        """In a forked child: a process of its own, which has recorded nothing yet."""
        if self.timing is not None:
            self._parents.append(self.timing)  # its events are not this process's to give back to the driver
            self.timing = None
        self._forget()
        self.local.clear()
        self.off = False

    # ---------------------------------------------------------------- the ring

    def ready(self) -> bool:
        """Open the ring if need be; False where nothing is recorded (a DataLoader worker, no room, given up)."""
        if self.ring is not None:
            return True
        if self.off:
            return False
        if torch.utils.data.get_worker_info() is not None:
            self.off = True
            return False
        with self._lock:
            if self._opening:
                return False
            if self.ring is None:
                self._opening = True
                try:
                    self._open()
                except OSError as error:
                    if error.errno in _NO_DESCRIPTOR and self._tries < MAX_TRIES:
                        self._tries += 1
                        return False
                    self.off = True
                    note(f"no record of process {os.getpid()}: {error}", "warnings.log")
                    return False
                finally:
                    self._opening = False
        self.on_open()
        return True

    def _open(self) -> None:
        self.rank, self.world = rank_and_world()
        for number in range(MAX_PROCESSES):
            path = os.path.join(self.config.directory, f"process-{number}.ring")
            try:
                ring = Ring(
                    path,
                    process=number,
                    rank=-1 if self.rank is None else self.rank,
                    world=-1 if self.world is None else self.world,
                    start_ns=self.config.start_ns,
                    capacity=DEFAULT_CAPACITY if number < LARGE_RINGS else 1 << 18,
                )
            except FileExistsError:
                continue
            self.process = number
            self.renew_at = ring.capacity // 4
            ring.staging(PLAIN_WORDS, STEP_WORDS)
            ring.write(pack_event("process", self._describe(number)))
            self.ring = ring
            return
        raise OSError(f"more than {MAX_PROCESSES} processes in one run")

    def _describe(self, number: int) -> dict[str, Any]:
        return {
            "process": number,
            "rank": self.rank,
            "world": self.world,
            "pid": os.getpid(),
            "argv": [shortened(str(argument)) for argument in sys.argv[:32]],
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            # Asking whether CUDA is available may initialise the driver, which forked children do not survive.
            "device_kind": "cuda" if torch.cuda.is_initialized() else "cpu",  # type: ignore[no-untyped-call]
            "t_s": self.clock_s(),
        }

    def clock_s(self) -> float:
        """Seconds since the run's start."""
        return (monotonic_ns() - self.config.start_ns) / 1e9

    def event(self, kind: str, **data: Any) -> None:
        """Write a rare record of this process."""
        if self.ring is not None:
            common = {"process": self.process, "rank": self.rank, "t_s": self.clock_s()}
            payload = pack_event(kind, {**common, **data})
            if self.timing is not None and kind in _IN_ORDER:
                self.timing.in_order(payload)
            else:
                self.ring.write(payload)

    def warn(self, text: str) -> None:
        """Tell whoever watches; never the script."""
        if self.ring is not None:
            self.event("warning", text=text)
        else:
            note(text, "warnings.log")

    # ---------------------------------------------------------------- definitions

    def inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], memo: Memo) -> int:
        """The number of the definition of these arguments' sizes; 0 if they could not be read."""
        try:
            if torch._C._len_torch_function_stack():
                with torch._C.DisableTorchFunction():  # a mode of the script's would see us look
                    return self._sizes("0", sizes.signature_of_call(args, kwargs), None)
            if len(args) == 1 and not kwargs:
                value = args[0]
                if type(value) is Tensor:
                    shape, dtype = value.shape, value.dtype
                    if shape == memo.shape and dtype is memo.dtype and memo.epoch == self.epoch:
                        return memo.number
                    return self._sizes("0", (shape, dtype), memo)
            return self._sizes("0", sizes.signature_of_call(args, kwargs), None)
        except Exception as error:  # noqa: BLE001 - anything may be passed to a module
            self.fault("sizes", error, fatal=False)
            return 0

    def outputs(self, value: Any, memo: Memo) -> int:
        """The number of the definition of this result's sizes; 0 if they could not be read."""
        try:
            if torch._C._len_torch_function_stack():
                with torch._C.DisableTorchFunction():
                    return self._sizes("", sizes.signature_of_value(value), None)
            if type(value) is Tensor:
                shape, dtype = value.shape, value.dtype
                if shape == memo.shape and dtype is memo.dtype and memo.epoch == self.epoch:
                    return memo.number
                return self._sizes("", (shape, dtype), memo)
            return self._sizes("", sizes.signature_of_value(value), None)
        except Exception as error:  # noqa: BLE001 - anything may be returned by a module
            self.fault("sizes", error, fatal=False)
            return 0

    def sizes(self, lone_path: str, signature: Any) -> int:
        """The number of the definition of a signature (see dpmon.tracer.sizes)."""
        return self._sizes(lone_path, signature, None)

    def _sizes(self, lone_path: str, signature: Any, memo: Memo | None) -> int:
        number = self.define((lone_path, signature), lambda: sizes.spell_out(signature, lone_path))
        self._signatures[number] = signature
        if memo is not None:
            memo.shape, memo.dtype = signature
            memo.number, memo.epoch = number, self.epoch
            memo.rows = memo.shape[0] if memo.shape else -1
        return number

    def rows(self, number: int, dim: int, first: int = 0) -> int:
        """Rows along `dim` of the first tensor of the arguments defined by `number`; -1 if unknown.

        Arguments before number `first` are skipped.
        """
        rows = self._rows.get((number, dim, first))
        if rows is None:
            signature = self._signatures.get(number)
            rows = -1 if signature is None else sizes.first_rows(signature, dim, first)
            self._rows[number, dim, first] = rows
        return rows

    def define(self, key: Hashable, spell: Callable[[], Any]) -> int:
        """The number of what `key` stands for; `spell` makes its definition when it has to be written (again)."""
        number = self._live.get(key)
        if number is not None:
            return number
        with self._lock:
            number = self._known.get(key)
            if number is None:
                if len(self._known) >= MAX_KNOWN:
                    for table in (self._known, self._live, self._rows, self._signatures):
                        table.clear()
                number = self._known[key] = next(self._numbers)
            if key not in self._live and self.ring is not None:
                self.ring.write(pack_definition(number, spell()))
                self._live[key] = number
        return number

    def renew(self) -> None:
        """Write the definitions in use afresh, so that late readers find them; for every quarter of the ring."""
        if self.ring is not None:
            with self._lock:
                self.renew_at = self.ring.head + self.ring.capacity // 4
                self._live.clear()
                self.epoch += 1
            self.on_change()

    # ---------------------------------------------------------------- faults

    def fault(self, where: str, error: BaseException, fatal: bool = True) -> None:
        """Count a fault of ours; the third in one place switches the tracer off if it is `fatal` there.

        Raises nothing but what a signal handler of the script has raised while we were at work.
        """
        raise_from_signal(error)
        try:
            count = self._faults[where] = self._faults.get(where, 0) + 1
            if len(self._faults) == count == 1:  # the first of all: what follows mostly follows from it
                self.warn(
                    f"dpmon's tracer failed while it {_doing(where)}: {in_a_line(error)}."
                    " The training is not affected; the record may be incomplete"
                )
            if fatal and count >= MAX_FAULTS and not self.off:
                self.off = True
                self.on_change()
                self.warn(
                    f"dpmon's tracer gave up after it failed {count} times while it {_doing(where)}:"
                    " nothing more is recorded"
                )
        except Exception:  # noqa: BLE001 - nothing more can be done, and the script must not notice
            self.off = True


_DOING = {
    "begin": "noted the beginning of a call",
    "before": "noted the beginning of a call",
    "end": "noted the end of a call",
    "success": "noted the end of a call",
    "place": "noted the end of a call",
    "view": "prepared the model for the replicas",
    "inside": "looked for a DataParallel inside the model",
    "functional": "noted a call of data_parallel",
    "by hand": "noted a scatter, replicate, parallel_apply or gather",
    "phases": "timed the phases of a call",
    "take over": "split a call over replicas",
    "fall back": "let a call run on one device after dp had failed",
    "replicas": "timed the replicas",
    "hooks": "noted what a replica received and returned",
    "sizes": "noted the sizes of inputs and outputs",
    "stages": "noted the stages of a model that lies on several devices",
    "roots": "looked for the modules that the script calls",
    "fetch": "noted a fetched batch",
    "loader": "noted the start of a loader",
    "backward": "noted a backward pass",
    "optimizer": "noted a step of an optimizer",
    "optimizers": "looked for the script's optimizers",
    "copy": "noted a copy to a device",
    "look": "looked at the state of the training between two steps",
    "memory": "measured the memory of the devices",
    "events": "timed work on a device",
    "out of memory": "noted an out-of-memory error",
    "construct": "noted that a DataParallel was made",
    "dynamo": "told torch.compile to skip dpmon's own functions",
    "pause": "waited for the end of a pause",
    "startup": "noted what the process does before its first call",
    "modules": "noted which models the script makes",
    "let go": "forgot the replicas of a call",
    "ending": "noted the exception that ends the process",
    "exit": "wrote the last step at the end of the process",
}
"""What the tracer did, for each place that reports a fault."""


def _doing(where: str) -> str:
    return _DOING.get(where, f"followed the training ({where})")


def raise_from_signal(error: BaseException) -> None:
    """Raise it again if a signal handler of the script has raised it while we were at work; ours to swallow else."""
    if _from_a_signal(error):
        raise error


def _from_a_signal(error: BaseException) -> bool:
    """Whether a signal handler of the script raised it, which may happen at any of our instructions."""
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
    """This process's rank and the number of ranks; None if it is not a rank."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None, None
