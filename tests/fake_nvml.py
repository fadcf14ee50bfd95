"""Compiles a fake libnvidia-ml.so.1 (nvml/fake_nvml.c), controls it, and reads its log of calls."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from running import wait_for

from dpmon.record.record_types import Event
from dpmon.record.safe_json import load_event

NVML, CUDA = (Path(__file__).parent / "nvml" / name for name in ("fake_nvml.c", "fake_cuda.c"))
SONAMES = {NVML: "libnvidia-ml.so.1", CUDA: "libcuda.so.1"}
FOREVER = -1.0


@cache
def compiler() -> str | None:
    """Return a C compiler, or None."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


def library(directory: Path, without: Sequence[str] = (), source: Path = NVML) -> Path:
    """Compile a fake library that lacks the symbols in `without`; return its directory. Skip the test if impossible."""
    found = compiler()
    if found is None:
        pytest.skip("there is no C compiler for the fake library")
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

    def asked(self, function: str = "", device: int | None = None) -> list[Asked]:
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
        calls = [Asked(*one) for one in found]  # type: ignore[arg-type]
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

    def until(self, holds: Callable[[], Any], what: str) -> Any:
        """Return the first true value of `holds()`."""
        return wait_for(holds, what=what)
