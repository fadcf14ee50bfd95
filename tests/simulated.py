"""Compiles the simulated CUDA runtime (cuda/fake_cudart.h), says where it is, and reads what it has written.

torch's own CUDA build runs over it on a machine without a GPU. No time that is measured so is a GPU's.
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

__all__ = ["NO_CUDNN", "WAITING", "WORK", "Op", "Simulated", "Truth", "built", "why_not"]

SOURCES = Path(__file__).parent / "cuda"
WAITING = (
    *("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy", "cudaMemset"),
    *("cudaFree", "cudaFreeHost", "cudaStreamQuery"),
)
"""Functions that wait for a device, or may. (How often torch's allocator asks for memory hangs on how threads meet.)"""

WORK = (
    *("__cudaLaunchKernel", "cudaLaunchKernel", "cublasSgemm_v2", "cublasGemmEx", "cublasLtMatmul"),
    *("cudaMemcpyAsync", "cudaMemsetAsync", "ncclBcast", "ncclReduce"),
)
"""Functions that give a device something to do."""
NO_CUDNN = "import torch; torch.backends.cudnn.enabled = False\n"
"""What a script with recurrent, convolutional or normalising layers begins with here: cuDNN is not simulated."""


def _headers() -> Path | None:
    """Those of the wheel that torch's CUDA build comes with."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parents[1] / "nvidia" / "cu13" / "include"


def _version() -> str | None:
    """torch's CUDA version, without importing it."""
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
    """Why nothing can be simulated here; None where it can."""
    version, headers = _version(), _headers()
    if version is None or not version.startswith("13."):
        return "needs torch built for CUDA 13 (no GPU): this one is for " + (version or "CPUs")
    if headers is None or not (headers / "cuda_runtime_api.h").exists():
        return "needs the headers of nvidia-cuda-runtime, which come with torch for CUDA"
    if compiler() is None:
        return "there is no C compiler to make the simulated CUDA runtime with"
    return None


def built(directory: Path) -> Path:
    """The compiled library, in `directory`."""
    directory.mkdir(exist_ok=True)
    # By this name it is found, too, by whoever asks for the driver.
    path, sources = directory / "libcuda.so.1", sorted(map(str, SOURCES.glob("*.c")))
    words = [compiler() or "cc", "-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    words += [f"-Wl,-soname,{path.name}", f"-I{SOURCES}", "-isystem", str(_headers()), *sources]
    done = subprocess.run([*words, "-o", str(path), "-lpthread", "-lm"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@dataclass(frozen=True)
class Op:
    """One line of the trace: what a stream did and when, or when a script or the host did something (ns, monotonic)."""

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
    """What the devices did, as the simulation itself has written it down."""

    ops: list[Op]
    _streams: dict[int, int] = field(default_factory=dict)
    _lines: dict[tuple[int, int], tuple[list[int], list[int]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Truth:
        """From the file that FAKE_CUDART_TRACE named."""
        found = []
        for line in path.read_text().splitlines():
            words = line.split("\t")
            found.append(Op(words[0], *map(int, words[1:8]), words[8]))  # type: ignore[arg-type]
        return cls(found)

    def of(self, *kinds: str) -> list[Op]:
        """Those of these kinds, as they were queued."""
        return [op for op in self.ops if op.kind in kinds]

    def marks(self) -> list[tuple[str, int]]:
        """What the script marked, and when."""
        return [(op.name, op.host) for op in self.of("mark")]

    def stream(self, device: int) -> int:
        """The stream of a device that most of its kernels ran on."""
        counted = Counter(op.stream for op in self.of("kernel") if op.device == device)
        return counted.most_common(1)[0][0]

    def clock(self, host: int, device: int) -> int:
        """When an event would come about that is recorded at this time of the host, on the device's busiest stream."""
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
        """Whether all of these have work left at this time of the host, so that it has no share in what they take."""
        return all(self.clock(host, one) > host for one in devices)

    def spent_ms(self, first: int, last: int, devices: Iterable[int]) -> float:
        """What passes on the slowest of these devices between two times of the host."""
        return max(self.clock(last, one) - self.clock(first, one) for one in devices) / 1e6


@dataclass
class Simulated:
    """The library, and the directory into which a process that runs over it writes."""

    library: Path
    directory: Path
    made: int = 0

    def environment(self, gpus: int = 1, **settings: Any) -> dict[str, str]:
        """For a process with so many GPUs, which `truth` and `counts` are of; settings: FAKE_CUDART_* in lower case."""
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
        """What the last process (or another one) has had its devices do."""
        return Truth.read(self.directory / f"trace-{of or self.made}")

    def counts(self, of: int | None = None) -> dict[str, int]:
        """How often it called what."""
        return dict(json.loads((self.directory / f"counts-{of or self.made}").read_text()))
