"""Compiles the stand-in for libnvidia-ml.so.1 (nvml/fake_nvml.c), tells it what to do, reads what it was asked."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.codec import Decoder
from dpmon.record.kinds import Event
from dpmon.ring_file import RingError
from dpmon.ring_reader import RingReader

__all__ = ["CUDA", "FOREVER", "Asked", "FakeNvml", "GpuRing", "compiler", "library"]

NVML, CUDA = (Path(__file__).parent / "nvml" / name for name in ("fake_nvml.c", "fake_cuda.c"))
SONAMES = {NVML: "libnvidia-ml.so.1", CUDA: "libcuda.so.1"}
FOREVER = -1.0


@cache
def compiler() -> str | None:
    """A C compiler, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def library(directory: Path, without: Sequence[str] = (), source: Path = NVML) -> Path:
    """The directory of a compiled stand-in that lacks the symbols in `without`; skips the test without a compiler."""
    found = compiler()
    if found is None:
        pytest.skip("there is no C compiler to make the stand-in with")
    into, soname = directory / "libraries", SONAMES[source]
    into.mkdir(exist_ok=True)
    words = [found, "-std=gnu11", "-O1", "-fPIC", "-shared", f"-Wl,-soname,{soname}", str(source)]
    if without:
        script = into / "symbols.map"
        script.write_text("{ global: nvml*; local: " + " ".join(f"{name};" for name in without) + " *; };\n")
        words.insert(1, f"-Wl,--version-script={script}")
    subprocess.run([*words, "-o", str(into / soname), "-lpthread"], check=True, capture_output=True, text=True)
    return into


@dataclass(frozen=True)
class Asked:
    """One call: seconds (monotonic), thread, function, device (-1: none), the code it was answered with."""

    began_s: float
    thread: int
    function: str
    device: int
    code: int
    ended_s: float | None


@dataclass
class FakeNvml:
    """One stand-in in use: its control file and its log."""

    directory: Path
    libraries: Path

    def environment(self) -> dict[str, str]:
        """What a process needs to load it in the place of a real one."""
        return {
            "LD_LIBRARY_PATH": str(self.libraries),
            "FAKE_NVML_CONTROL": str(self.directory / "control"),
            "FAKE_NVML_LOG": str(self.directory / "log"),
        }

    def tell(self, *lines: str) -> None:
        """What it is to do from now on, in place of all that it was told before."""
        made = self.directory / "control.new"
        made.write_text("".join(f"{line}\n" for line in lines))
        os.replace(made, self.directory / "control")

    def log(self) -> list[str]:
        """The lines of its log."""
        try:
            return (self.directory / "log").read_text().splitlines()
        except FileNotFoundError:
            return []

    def fatal(self) -> list[str]:
        """What would have crashed a real driver."""
        return [line for line in self.log() if line.startswith("FATAL")]

    def asked(self, function: str = "", device: int | None = None) -> list[Asked]:
        """The calls so far, in the order of their starts."""
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
        calls = [Asked(*one) for one in found]  # type: ignore[arg-type]
        return [
            call
            for call in calls
            if (not function or call.function == function) and (device is None or call.device == device)
        ]


class GpuRing:
    """Reads what a supervisor says in its gpu.ring, as it comes."""

    def __init__(self, path: Path) -> None:
        self._reader = RingReader(str(path))
        self._decoder = Decoder(-1)
        self.events: list[Event] = []

    @classmethod
    def of(cls, run: Callable[[], Path], limit: float = 60.0) -> GpuRing:
        """The ring of the run whose directory `run` gives, once it has been made."""
        deadline = time.monotonic() + limit
        while True:
            try:
                return cls(run() / "gpu.ring")
            except (RingError, OSError, AssertionError):  # it is being made
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        for payload in self._reader.read():
            event = self._decoder.decode(payload)
            assert isinstance(event, Event)
            self.events.append(event)
        return [dict(event.data) for event in self.events if event.kind == kind]

    def device(self, index: int) -> dict[str, Any]:
        """The newest sample of one GPU; empty if there is none."""
        return next((one for one in reversed(self.of_kind("device")) if one["index"] == index), {})

    def warnings(self) -> list[str]:
        """The texts of all warnings."""
        return [str(one["text"]) for one in self.of_kind("warning")]

    def until(self, holds: Callable[[], Any], what: str, limit: float = 90.0) -> Any:
        """The first true value of `holds`; fails after `limit` seconds."""
        deadline = time.monotonic() + limit
        while True:
            found = holds()
            if found:
                return found
            assert time.monotonic() < deadline, f"not within {limit} s: {what}"
            time.sleep(0.05)
