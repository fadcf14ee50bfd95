"""Compiles the simulated CUDA runtime (cuda/fake_cudart.h), and reads its trace and counts.

A torch built for CUDA runs over it on a machine without a GPU. Times measured this way say nothing about a GPU.
"""

from __future__ import annotations

import bisect
import importlib.util
import json
import subprocess
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fake_nvml import compiler

SOURCES = Path(__file__).parent / "cuda"
WAITING = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemset"),
    *("cudaFree", "cudaFreeHost", "cudaStreamQuery"),
)
"""Functions that wait for a device, or may wait; without cudaMalloc, because its count depends on threads."""

WORK = (
    *("__cudaLaunchKernel", "cudaLaunchKernel", "cublasSgemm_v2", "cublasGemmEx", "cublasLtMatmul"),
    *("cudaMemcpyAsync", "cudaMemsetAsync", "ncclBcast", "ncclReduce"),
)
"""Functions that queue work on a device."""
NO_CUDNN = "import torch; torch.backends.cudnn.enabled = False\n"
"""First lines of a script with recurrent, convolutional or normalizing layers, because cuDNN is not simulated."""


def _headers() -> Path | None:
    """Return the CUDA headers that come with torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parents[1] / "nvidia" / "cu13" / "include"


def _version() -> str | None:
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


def why_not() -> str | None:
    """Return why CUDA cannot be simulated here, or None."""
    version, headers = _version(), _headers()
    if version is None or not version.startswith("13."):
        return "needs torch built for CUDA 13 (no GPU): this one is for " + (version or "CPUs")
    if headers is None or not (headers / "cuda_runtime_api.h").exists():
        return "needs the headers of nvidia-cuda-runtime, which come with torch for CUDA"
    if compiler() is None:
        return "there is no C compiler to make the simulated CUDA runtime with"
    return None


def built(directory: Path) -> Path:
    """Compile the library in `directory`; return its path."""
    directory.mkdir(exist_ok=True)
    # With this name, it is also found by code that loads the driver.
    path, sources = directory / "libcuda.so.1", sorted(map(str, SOURCES.glob("*.c")))
    words = [compiler() or "cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    words += [f"-Wl,-soname,{path.name}", f"-I{SOURCES}", "-isystem", str(_headers()), *sources]
    done = subprocess.run([*words, "-o", str(path), "-lpthread", "-lm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@dataclass(frozen=True)
class Op:
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
class Truth:
    """What the devices did, according to the trace of the simulation."""

    ops: list[Op]
    _streams: dict[int, int] = field(default_factory=dict)
    _lines: dict[tuple[int, int], tuple[list[int], list[int]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Truth:
        """Read the file named by FAKE_CUDART_TRACE."""
        found = []
        for line in path.read_text().splitlines():
            words = line.split("\t")
            found.append(Op(words[0], *map(int, words[1:8]), words[8]))  # type: ignore[arg-type]
        return cls(found)

    def of(self, *kinds: str) -> list[Op]:
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
class Simulated:
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

    def truth(self, of: int | None = None) -> Truth:
        """Return the trace of the newest process, or of process `of`."""
        return Truth.read(self.directory / f"trace-{of or self.made}")

    def counts(self, of: int | None = None) -> dict[str, int]:
        """Return the number of calls of each function."""
        return dict(json.loads((self.directory / f"counts-{of or self.made}").read_text()))
