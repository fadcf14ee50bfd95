"""`dpmon doctor`: checks whether dpmon works here, and prints the reason and the remedy of each problem.

It traces a child process in a temporary directory, with the environment of a run: the child imports torch and calls a
model twice, and both calls have to be in the record. Meanwhile it samples the devices as a run does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import dpmon
from dpmon.errors import HistoryError
from dpmon.gpu.device_sampler import DeviceSampler
from dpmon.record.record_types import Call
from dpmon.run import proc
from dpmon.run.process_notes import NoteReader
from dpmon.run.run_directory import RunError, RunInfo, write_info
from dpmon.run.run_reader import RunReader
from dpmon.run.run_registry import (
    ROOM_BYTES,
    check_place,
    fallback_directories,
    network_file_system,
    runs_directory,
)
from dpmon.sanitize import sanitize_line
from dpmon.store.events import read_events
from dpmon.store.records import resolve_calls
from dpmon.store.ring_drain import RingDrain
from dpmon.store.steps import read_called_steps
from dpmon.store.store_opening import open_store
from dpmon.supervise.command_process import command_environment
from dpmon.supervise.command_resolver import CommandError, choose_python
from dpmon.text.cells import supports_color, text_for_stream
from dpmon.text.formatting import format_bytes, format_count_with_noun

OK, WARNING, PROBLEM = STATES = ("ok", "warning", "problem")
"""ok: no problem; warning: dpmon works, with limits; problem: dpmon does not work."""
_WIDTH, _STATE_CELLS, _NAME_CELLS = 80, 9, 9
_COLORS = {OK: "32", WARNING: "33", PROBLEM: "31"}
_CHILD_TIMEOUT_S = 120.0
"""Importing torch from a cold network file system is slow."""
_NVML_TIMEOUT_S = 10.0
_MAX_CALLS = 100
"""Most calls to read, although the child makes only two."""
_MIN_TORCH = (2, 4)
_NO_REPLY_YET = "NVML has not answered yet"
_CHILD = """\
import json, sys, torch
facts = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
model = torch.nn.Linear(5, 2)
for _ in range(2):
    model(torch.zeros(3, 5))
facts["count"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(json.dumps(facts))
"""
_REMEDIES = (
    ("libnvidia-ml", "with an NVIDIA GPU: install its driver; in a container: start it with --gpus all"),
    ("not loaded", "load the driver (modprobe nvidia); nvidia-smi shows details"),
    ("differ in version", "restart the machine"),
    ("permission", "check who may open /dev/nvidiactl and /dev/nvidia0 (groups video, render)"),
    ("nvidia-ml-py", "pip install nvidia-ml-py"),
    ("not answer", "if nvidia-smi hangs too, the driver is stuck: restart the machine"),
)


class Check(NamedTuple):
    """One check: its name, state, result, and remedy (None if ok)."""

    name: str
    state: str
    found: str
    remedy: str | None = None


def doctor(options: argparse.Namespace) -> int:
    """Run all checks and print them; return 1 if there is a problem, else 0."""
    checks = []
    for check in _run_checks(options.python):
        checks.append(check)
        if not options.json:
            lines = _check_lines(check, with_color=supports_color(sys.stdout, os.environ))
            print(text_for_stream("\n".join(lines), sys.stdout), flush=True)
    worst = max((check.state for check in checks), key=STATES.index, default=OK)
    if options.json:
        print(json.dumps({"state": worst, "checks": [check._asdict() for check in checks]}, indent=1))
    else:
        counts = {state: sum(check.state == state for check in checks) for state in (WARNING, PROBLEM)}
        parts = [format_count_with_noun(count, state) for state, count in counts.items() if count]
        print(f"{' and '.join(parts)}; all other checks passed" if parts else "all checks passed")
    return int(worst == PROBLEM)


def _run_checks(python: str | None) -> Iterator[Check]:
    yield Check("dpmon", OK, f"{dpmon.__version__}, with textual {version('textual')}")
    yield from _run_self_test(python)
    yield _check_state_directory()


def _check_lines(check: Check, *, with_color: bool) -> list[str]:
    """Return the check in lines of at most _WIDTH cells: state, name and result, then the remedy."""
    state = check.state.ljust(_STATE_CELLS)
    if with_color:
        state = f"\x1b[{_COLORS[check.state]}m{state}\x1b[0m"
    indent_cells = _STATE_CELLS + _NAME_CELLS
    text = textwrap.TextWrapper(_WIDTH - indent_cells, break_on_hyphens=False)
    first, *more_lines = text.wrap(sanitize_line(check.found)) or [""]
    if check.remedy is not None:
        text.subsequent_indent = "   "
        more_lines += text.wrap(sanitize_line(f"-> {check.remedy}"))
    return [f"{state}{check.name:<{_NAME_CELLS}}{first}", *(" " * indent_cells + line for line in more_lines)]


def _check_state_directory() -> Check:
    """Check where runs are stored; nothing is created. The choice is that of `create_run`."""
    remedy = "set XDG_STATE_HOME to a directory of yours on a local disk"
    problems: list[str] = []
    try:
        for runs in (runs_directory(), *fallback_directories()):
            problem = _find_problem(runs)
            if problem is None and problems:
                return Check("state", WARNING, f"{problems[0]}: runs are kept in {runs}", remedy)
            if problem is None:
                return Check("state", OK, f"runs are kept in {runs}")
            problems.append(problem)
    except RunError as error:  # there is no home directory
        problems.append(str(error))
    return Check("state", PROBLEM, f"{problems[0]}, and no other directory can be used", remedy)


def _find_problem(runs: Path) -> str | None:
    """Return why no run can be kept in a directory; None if one can."""
    directory = next(path for path in (runs, *runs.parents) if path.exists())
    try:
        check_place(runs)
        free = shutil.disk_usage(directory).free
    except (OSError, RunError) as error:
        return str(error)
    if (fs_type := network_file_system(runs)) is not None:
        return f"{runs} is on a network file system ({fs_type})"
    if not os.access(directory, os.W_OK | os.X_OK):
        return f"{directory} is not writable"
    return f"{runs} has only {format_bytes(free)} left" if free < ROOM_BYTES else None


# ------------------------------------------------------------------------------------------------ self-test


@dataclass
class _SelfTest:
    """The results of the child and of the sampler."""

    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
    calls: list[Call] = field(default_factory=list)
    stage: str | None = None
    warnings: list[str] = field(default_factory=list)
    devices: dict[int, str] = field(default_factory=dict)
    absent: str | None = _NO_REPLY_YET

    def add_sample(self, kind: str, data: Mapping[str, Any]) -> None:
        """Add a sample of the host or a GPU; called on a thread of the sampler."""
        if kind == "device":
            self.devices[data["index"]] = data["name"] or "GPU without a name"
        elif kind == "host":
            self.absent = data["gpu_absent"]

    def run(self, directory: Path, python: str | None) -> None:
        """Trace the child in `directory`, if there is a Python, and sample the devices."""
        run_info = RunInfo(
            id=directory.name, name="doctor", command=(python or "",), script="doctor", cwd="/", python=python,
            started_unix=time.time(), start_ns=time.monotonic_ns(), boot_id=proc.boot_id(), headless=True,
            options={"mode": "script"},
        )  # fmt: skip
        write_info(directory, run_info)
        sampler = DeviceSampler(self.add_sample, lambda: None)
        sampler.start()
        deadline = time.monotonic() + _NVML_TIMEOUT_S
        try:
            if python is not None:
                self._run_child(python, directory, run_info)
            while not self.devices and self.absent == _NO_REPLY_YET and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            sampler.stop()
        self._read_record(directory, run_info)

    def _run_child(self, python: str, directory: Path, run_info: RunInfo) -> None:
        start_s = time.monotonic()
        try:
            done = subprocess.run(
                [python, "-c", _CHILD],
                cwd=directory,
                env=command_environment(run_info, directory, os.environ),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_CHILD_TIMEOUT_S,
            )
            self.seconds = time.monotonic() - start_s
            lines = done.stderr.decode("utf-8", "replace").strip().split("\n")
            self.failure = f"it exited with status {done.returncode}: {lines[-1][:200]}" if done.returncode else ""
            self.facts = {} if done.returncode else json.loads(done.stdout.strip().split(b"\n")[-1])
        except subprocess.TimeoutExpired:
            self.failure = f"no answer within {_CHILD_TIMEOUT_S:.0f} s"
        except OSError as error:
            self.failure = error.strerror or str(error)
        except ValueError:
            self.failure = "its output contains other text: this Python prints something at startup"

    def _read_record(self, directory: Path, run_info: RunInfo) -> None:
        drain = RingDrain(directory, run_info)
        drain.flush(command_ended=True)
        drain.close()
        with suppress(HistoryError), open_store(directory) as store:
            processes = {ring.process for ring in store.rings.values() if ring.process >= 0}
            steps = [step for process in processes for step in read_called_steps(store, process, _MAX_CALLS)]
            self.calls = [call for step in steps for call in resolve_calls(store, step)]
            self.warnings = [str(event.data.get("text")) for event in read_events(store, "warning")]
        self.warnings += [note.text for note in NoteReader(directory / "warnings.log").read_new()]
        self.stage, _ = RunReader(directory).startup_stage() or (None, 0)


def _run_self_test(python: str | None) -> Iterator[Check]:
    """Run the test with the Python that would run a script (`python`: the value of --python), and yield its checks."""
    python_path = None
    try:
        python_path = choose_python(python, os.environ)
    except CommandError as error:
        problem, _, remedy = str(error).partition(": ")
        yield Check("Python", PROBLEM, problem, remedy or "choose another with --python")
    test = _SelfTest()
    try:
        with tempfile.TemporaryDirectory(prefix="dpmon-doctor-") as name:
            test.run(Path(name), python_path)
    except (OSError, RunError) as error:
        yield Check("self-test", PROBLEM, f"no directory for it: {error}", "free some space in the directory of TMPDIR")
        return
    if python_path is not None:
        yield from _check_python(python_path, test)
    yield _check_nvml(test)
    if test.facts:
        yield _check_cuda(test)


def _check_python(python_path: str, test: _SelfTest) -> Iterator[Check]:
    if test.failure:
        yield Check("Python", PROBLEM, f"{python_path}: {test.failure}", "try PYTHON -c 'import torch'")
        return
    yield Check("Python", OK, f"{test.facts.get('python')} ({python_path})")
    torch_version = str(test.facts.get("torch"))
    if tuple(int(part) for part in torch_version.split("+")[0].split(".")[:2] if part.isdecimal()) < _MIN_TORCH:
        text = f"{torch_version} is older than {'.'.join(map(str, _MIN_TORCH))}: tracing may fail"
        yield Check("torch", WARNING, text, "install a newer torch")
    else:
        yield Check("torch", OK, torch_version)
    yield _check_tracing(test)


def _check_tracing(test: _SelfTest) -> Check:
    if [(call.root, call.rows) for call in test.calls] == [("Linear", 3)] * 2:
        text = f"a child's calls are in its record ({test.seconds:.1f} s, with the import of torch)"
        return Check("tracing", OK, text)
    if test.warnings:
        remedy = "install a version of dpmon that supports this torch"
        return Check("tracing", PROBLEM, test.warnings[0], remedy)
    if test.stage is None:
        remedy = "PYTHONPATH must reach the child: use neither -I nor -E, nor a wrapper that clears the environment"
        return Check("tracing", PROBLEM, "dpmon's sitecustomize did not run in the child", remedy)
    text = f"the child ran ({test.stage}), but its calls are not in the record"
    return Check("tracing", PROBLEM, text, "report this as a bug, with the output of `pip list`")


def _check_nvml(test: _SelfTest) -> Check:
    if test.devices:
        names = [f"{index}: {name}" for index, name in sorted(test.devices.items())]
        return Check("NVML", OK, ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else ""))
    reason = test.absent or "NVML lists no GPU"
    if reason == _NO_REPLY_YET:
        reason = f"NVML did not answer within {_NVML_TIMEOUT_S:.0f} s"
    remedy = next((text for words, text in _REMEDIES if words in reason), "nvidia-smi may show details")
    return Check("NVML", WARNING, f"no GPU to watch: {reason}", remedy)


def _check_cuda(test: _SelfTest) -> Check:
    count = test.facts.get("count") or 0
    if count:
        return Check("CUDA", OK, f"torch sees {format_count_with_noun(count, 'GPU')}")
    if not test.devices:
        return Check("CUDA", OK, "torch sees no GPU: dpmon runs data parallelism over virtual replicas on the CPU")
    if not test.facts.get("cuda"):
        return Check(
            "CUDA", WARNING, "there are GPUs, but this torch is built for CPUs only", "install torch with CUDA"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible_text = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
    remedy = "python -c 'import torch as t; t.cuda.init()' prints why"
    return Check("CUDA", WARNING, f"there are GPUs, but torch sees none{visible_text}", remedy)
