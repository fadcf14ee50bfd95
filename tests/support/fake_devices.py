"""Fake devices: NVML and CUDA libraries in C, and a device clock for a process that the test runs phase by phase."""

from __future__ import annotations

import bisect
import importlib.util
import json
import os
import shutil
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import monotonic_ns as clock
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from dpmon.assemble import Assembler
from dpmon.record.record_types import Event
from dpmon.record.safe_json import load_event
from dpmon.record.shared_names import Untimed
from dpmon.record.span_format import FLAGS_AT, INSIDE_AT, SITE_AT, Flag, Kind, unpack_span
from dpmon.span_ring import HeaderWord
from support.run_harness import wait_for
from support.script_simulator import DecodedRows, decode_rows

if TYPE_CHECKING:
    from dpmon.tracer.steps.span_recorder import SpanRecorder

_TESTS = Path(__file__).parents[1]
NVML_SOURCE, NVML_SONAME = _TESTS / "nvml" / "fake_nvml.c", "libnvidia-ml.so.1"
FOREVER = -1.0


@cache
def find_compiler() -> str | None:
    """Return a C compiler, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def compile_fake_library(directory: Path, without: Sequence[str] = ()) -> Path:
    """Compile a fake library that lacks the symbols in `without`; return its directory. Skip the test if impossible."""
    found = find_compiler()
    if found is None:
        pytest.skip("there is no C compiler for the fake library")
    into = directory / "libraries"
    into.mkdir(exist_ok=True)
    words = [found, "-std=gnu11", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{NVML_SONAME}", str(NVML_SOURCE)]
    if without:
        script = into / "symbols.map"
        script.write_text("{ global: nvml*; local: " + " ".join(f"{name};" for name in without) + " *; };\n")
        words.insert(1, f"-Wl,--version-script={script}")
    subprocess.run([*words, "-o", str(into / NVML_SONAME), "-lpthread"], check=True, capture_output=True, text=True)
    return into


@dataclass(frozen=True)
class NvmlCall:
    """One call: seconds (monotonic), thread, function, device (-1: none), returned code."""

    began_s: float
    thread: int
    function: str
    device: int
    code: int
    ended_s: float | None


@dataclass
class FakeNvml:
    """A fake library in use: its control file and its log."""

    directory: Path
    libraries: Path

    def environment(self) -> dict[str, str]:
        """Return variables with which a process loads the fake library."""
        return {
            "LD_LIBRARY_PATH": str(self.libraries),
            "FAKE_NVML_CONTROL": str(self.directory / "control"),
            "FAKE_NVML_LOG": str(self.directory / "log"),
        }

    def tell(self, *lines: str) -> None:
        """Replace all instructions to the library by `lines`."""
        made = self.directory / "control.new"
        made.write_text("".join(f"{line}\n" for line in lines))
        os.replace(made, self.directory / "control")

    def log(self) -> list[str]:
        """Return the lines of its log."""
        try:
            return (self.directory / "log").read_text().splitlines()
        except FileNotFoundError:
            return []

    def fatal(self) -> list[str]:
        """Return calls that would have crashed a real driver."""
        return [line for line in self.log() if line.startswith("FATAL")]

    def asked(self, function: str = "", device: int | None = None) -> list[NvmlCall]:
        """Return the calls so far, in the order of their starts."""
        found: list[list[object]] = []
        waiting: dict[tuple[str, str, str], int] = {}
        for line in self.log():
            words = line.split()
            if len(words) != 6 or words[1] not in "BE":
                continue
            key = (words[2], words[3], words[4])
            if words[1] == "B":
                waiting[key] = len(found)
                found.append([float(words[0]), int(words[2]), words[3], int(words[4]), int(words[5]), None])
            elif key in waiting:
                found[waiting.pop(key)][4:] = [int(words[5]), float(words[0])]
        calls = [NvmlCall(*one) for one in found]  # type: ignore[arg-type]
        return [
            call
            for call in calls
            if (not function or call.function == function) and (device is None or call.device == device)
        ]


class RunSamples:
    """Reads the events of a supervisor from its history while it is written."""

    def __init__(self, history: Path) -> None:
        self._db = sqlite3.connect(f"{history.absolute().as_uri()}?mode=ro", uri=True)
        self._last = 0
        self.events: list[Event] = []
        self._read()

    @classmethod
    def of(cls, run: Callable[[], Path]) -> RunSamples:
        """Open the history of the run in the directory `run()`, after waiting for it."""

        def opened() -> RunSamples | None:
            with suppress(sqlite3.Error, AssertionError):  # not there yet, or being created
                return cls(run() / "history.sqlite")
            return None

        found = wait_for(opened, what="the history")
        assert found is not None
        return found

    def _read(self) -> None:
        query = "SELECT id, json FROM events WHERE process IS NULL AND id > ? ORDER BY id"
        for number, text in self._db.execute(query, (self._last,)).fetchall():
            self._last = number
            self.events.append(Event(*load_event(text)))

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the events of one kind so far."""
        self._read()
        return [dict(event.data) for event in self.events if event.kind == kind]

    def device(self, index: int) -> dict[str, Any]:
        """Return the newest sample of one GPU, or an empty dict."""
        return next((one for one in reversed(self.of_kind("device")) if one["index"] == index), {})

    def warnings(self) -> list[str]:
        """Return the texts of all warnings."""
        return [str(one["text"]) for one in self.of_kind("warning")]

    def until(self, holds: Callable[..., Any], what: str) -> Any:
        """Return the first true value of `holds()`."""
        return wait_for(holds, what=what)


# ------------------------------------------------------------------------------------------------ CUDA

SOURCES = _TESTS / "cuda"
WAITING_FUNCTIONS = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemset"),
    *("cudaFree", "cudaFreeHost", "cudaStreamQuery"),
)
"""Functions that wait for a device, or may wait; without cudaMalloc, because its count depends on threads."""

WORK_FUNCTIONS = (
    *("__cudaLaunchKernel", "cudaLaunchKernel", "cublasSgemm_v2", "cublasGemmEx", "cublasLtMatmul"),
    *("cudaMemcpyAsync", "cudaMemsetAsync", "ncclBcast", "ncclReduce"),
)
"""Functions that queue work on a device."""
NO_CUDNN = "import torch; torch.backends.cudnn.enabled = False\n"
"""First lines of a script with recurrent, convolutional or normalizing layers, because cuDNN is not simulated."""


def _cuda_headers() -> Path | None:
    """Return the CUDA headers that come with torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parents[1] / "nvidia" / "cu13" / "include"


def _cuda_version() -> str | None:
    """Return the CUDA version of torch, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    own = importlib.util.spec_from_file_location("torch_version", Path(spec.origin).parent / "version.py")
    assert own is not None
    assert own.loader is not None
    module = ModuleType("torch_version")
    own.loader.exec_module(module)
    return getattr(module, "cuda", None)


def missing_requirement() -> str | None:
    """Return why CUDA cannot be simulated here, or None."""
    version, headers = _cuda_version(), _cuda_headers()
    if version is None or not version.startswith("13."):
        return "needs torch built for CUDA 13 (no GPU): this one is for " + (version or "CPUs")
    if headers is None or not (headers / "cuda_runtime_api.h").exists():
        return "needs the headers of nvidia-cuda-runtime, which come with torch for CUDA"
    if find_compiler() is None:
        return "there is no C compiler to make the simulated CUDA runtime with"
    return None


def compile_fake_cuda(directory: Path) -> Path:
    """Compile the library in `directory`; return its path."""
    directory.mkdir(exist_ok=True)
    # With this name, it is also found by code that loads the driver.
    path, sources = directory / "libcuda.so.1", sorted(map(str, SOURCES.glob("*.c")))
    words = [find_compiler() or "cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    words += [f"-Wl,-soname,{path.name}", f"-I{SOURCES}", "-isystem", str(_cuda_headers()), *sources]
    done = subprocess.run([*words, "-o", str(path), "-lpthread", "-lm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@dataclass(frozen=True)
class CudaOperation:
    """One line of the trace: an operation of a stream, a script or the host, with times (ns, monotonic)."""

    kind: str
    device: int
    stream: int
    start: int
    end: int
    host: int
    thread: int
    bytes: int
    name: str


@dataclass
class RecordedCudaTrace:
    """What the devices did, according to the trace of the simulation."""

    ops: list[CudaOperation]
    _streams: dict[int, int] = field(default_factory=dict)
    _lines: dict[tuple[int, int], tuple[list[int], list[int]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> RecordedCudaTrace:
        """Read the file named by FAKE_CUDART_TRACE."""
        found = []
        for line in path.read_text().splitlines():
            words = line.split("\t")
            device, stream, start, end, host, thread, size = map(int, words[1:8])
            found.append(CudaOperation(words[0], device, stream, start, end, host, thread, size, words[8]))
        return cls(found)

    def of(self, *kinds: str) -> list[CudaOperation]:
        """Return operations of these kinds in the order in which they were queued."""
        return [op for op in self.ops if op.kind in kinds]

    def marks(self) -> list[tuple[str, int]]:
        """Return names and times of the marks that the script set."""
        return [(op.name, op.host) for op in self.of("mark")]

    def stream(self, device: int) -> int:
        """Return the stream of a device with most kernels."""
        counted = Counter(op.stream for op in self.of("kernel") if op.device == device)
        return counted.most_common(1)[0][0]

    def clock(self, host: int, device: int) -> int:
        """Return when an event on the device's busiest stream would occur, if the host recorded it at time `host`."""
        if device not in self._streams:
            self._streams[device] = self.stream(device)
        key = device, self._streams[device]
        if key not in self._lines:
            found = [
                op for op in self.ops if (op.device, op.stream) == key and op.kind not in ("event", "wait", "mark")
            ]
            self._lines[key] = [op.host for op in found], [op.end for op in found]
        hosts, ends = self._lines[key]
        place = bisect.bisect_right(hosts, host)
        return max(host, ends[place - 1] if place else 0)

    def behind(self, host: int, devices: Iterable[int]) -> bool:
        """Return whether all these devices still have work at time `host`, so that the host does not delay them."""
        return all(self.clock(host, one) > host for one in devices)

    def spent_ms(self, first: int, last: int, devices: Iterable[int]) -> float:
        """Return the time that passes on the slowest of these devices between two times of the host."""
        return max(self.clock(last, one) - self.clock(first, one) for one in devices) / 1e6


@dataclass
class SimulatedCuda:
    """The library, and the directory for the files of processes that use it."""

    library: Path
    directory: Path
    made: int = 0

    def environment(self, gpus: int = 1, **settings: Any) -> dict[str, str]:
        """Return variables for the next process, with `gpus` GPUs; `settings`: FAKE_CUDART_* in lower case."""
        self.made += 1
        env = {f"FAKE_CUDART_{name.upper()}": str(value) for name, value in settings.items()}
        return {
            "LD_PRELOAD": str(self.library),
            "FAKE_CUDART_DEVICES": str(gpus),
            "FAKE_CUDART_TRACE": str(self.directory / f"trace-{self.made}"),
            "FAKE_CUDART_COUNTS": str(self.directory / f"counts-{self.made}"),
            **env,
        }

    def truth(self, of: int | None = None) -> RecordedCudaTrace:
        """Return the trace of the newest process, or of process `of`."""
        return RecordedCudaTrace.read(self.directory / f"trace-{of or self.made}")

    def counts(self, of: int | None = None) -> dict[str, int]:
        """Return the number of calls of each function."""
        return dict(json.loads((self.directory / f"counts-{of or self.made}").read_text()))


# ------------------------------------------------------------------------------------------------ a device clock

_LAYOUT = 1
_CALL = Kind.CALL | _LAYOUT << SITE_AT | (Flag.TRAINING | Flag.GRAD | Flag.SINGLE) << FLAGS_AT


class DeviceClock:
    """A device whose events get the time `now`; those up to `reached` have occurred."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reached = -1.0
        self.graph = False
        self.made = 0
        self.recorded: list[tuple[int, float]] = []
        self.asked = 0
        self.failure: Exception | None = None

    def is_capturing(self) -> bool:
        return self.graph

    def create_event(self) -> dict[str, Any]:
        self.made += 1
        return {}

    def record(self, event: dict[str, Any], device: int) -> None:
        if self.failure is not None:
            raise self.failure
        assert not self.graph, "it would become part of the graph"
        assert event.setdefault("device", device) == device, "an event belongs to one device"
        event["at"] = self.now
        self.recorded.append((device, self.now))

    def is_done(self, event: dict[str, Any]) -> bool:
        self.asked += 1
        return float(event["at"]) <= self.reached

    def elapsed_ms(self, first: dict[str, Any], last: dict[str, Any]) -> float:
        assert self.is_done(first)
        assert self.is_done(last)
        return float(last["at"] - first["at"])


def _make_optimizer(recorder: SpanRecorder, device: DeviceClock) -> Any:
    """Return an optimizer with a step that takes `ms` on the device, then calls the closure."""
    import torch

    from dpmon.tracer.steps.optimizers import OptimizerTracer

    class ClosureOptimizer(torch.optim.Optimizer):
        ms = 1.0

        def step(self, closure: Any = None) -> Any:
            device.now += self.ms
            return None if closure is None else closure()

    optimizer = ClosureOptimizer([torch.zeros(1)], {})
    before, after = OptimizerTracer(recorder).hooks()
    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(after)
    return optimizer


class SimulatedProcess:
    """A process whose training the test performs phase by phase, on this thread; an assembler reads its spans."""

    def __init__(self) -> None:
        # They import torch, which tests of the fake libraries do not need.
        from dpmon.tracer.core.session import TracerErrorGuard
        from dpmon.tracer.devices.device_timing import DeviceTimer
        from dpmon.tracer.steps.span_recorder import SpanRecorder

        self.device = DeviceClock()
        self.faults: list[Any] = []
        session: Any = SimpleNamespace(is_off=False, count_error=lambda *what, **_: self.faults.append(what))
        session.guard = lambda where, fatal=True: TracerErrorGuard(session, where, fatal)
        self.session = session
        self.recorder = SpanRecorder(session)
        self.spans: list[tuple[int, int, int, int]] = []
        self.recorder.put = self.put
        self.me = self.recorder.current_thread_state()
        self.recorder.training_thread = self.me
        device: Any = self.device
        self.timing = self.recorder.device_timer = DeviceTimer(self.recorder, device)
        self._optimizer = _make_optimizer(self.recorder, self.device)
        self._assembler = Assembler()
        self._layout: Any = {"define": _LAYOUT, "value": {"root": "Net", "via": None, "module": 1, "absent": {}}}
        self._heard = False
        self._fed = 0

    def put(self, head: int, start: int, took: int, sizes: int) -> int:
        """Take the place of SpanRing.put."""
        self.spans.append((head, start, took, sizes))
        return len(self.spans) - 1

    def one_in(self, count: int) -> None:
        """Request device times for one step in `count`."""
        self.recorder.words[HeaderWord.TIMED_ONE_IN] = count

    def phase(self, kind: int, ms: float = 1.0, work: Any = None) -> None:
        """Run a fetch, a backward pass, or a step of the optimizer: `ms` on the device, then `work`."""

        def original(*_: Any) -> None:
            self.device.now += ms
            if work is not None:
                work()

        if kind == Kind.OPTIMIZER:
            self._optimizer.ms = ms
            self._optimizer.step(work)
        else:
            self.recorder.wrap_phase(kind, original)(self)

    @contextmanager
    def call(self, *gpus: int, ms: float = 1.0) -> Iterator[None]:
        """Call the model; phases in the block are nested in the call, and exceptions end there."""
        me, recorder = self.me, self.recorder
        mark = self.timing.begin_call(me, gpus)
        head = _CALL | me.thread_bits | me.open_kind << INSIDE_AT
        inside, me.open_kind = me.open_kind, Kind.CALL
        began = clock()
        self.device.now += ms
        try:
            yield
        except ZeroDivisionError as error:
            me.open_kind = inside
            recorder.write_failed(me, head, began, 0, error, mark)
            return
        me.open_kind = inside
        if mark is not None:
            head |= mark.end()
        number = self.put(head, began, clock() - began, 0)
        if mark is not None:
            mark.set_span_number(number)

    def step(self, *gpus: int) -> None:
        """Run fetch, call, backward pass and optimizer."""
        self.phase(Kind.FETCH, 0.5)
        with self.call(*gpus, ms=2.0):
            pass
        self.phase(Kind.BACKWARD, 3.0)
        self.phase(Kind.OPTIMIZER, 1.0)

    def records(self, *, devices: tuple[str, ...] = ("cuda:0",), end: bool = True) -> DecodedRows:
        """Return the records of the new spans. With `end`, the devices have finished and the process has ended."""
        if end:
            self.device.reached = self.device.now
            self.timing.write_known_times(Untimed.ENDED)
        lines = [] if self._heard else [{**self._layout, "value": {**self._layout["value"], "devices": list(devices)}}]
        self._heard = True
        new = [unpack_span(self._fed + at, *words) for at, words in enumerate(self.spans[self._fed :])]
        self._fed = len(self.spans)
        rows = self._assembler.feed(new, lines)
        if end:
            rows += self._assembler.finish()
        assert self._assembler.dropped == 0
        return decode_rows(rows)
