"""`dpmon doctor`: checks whether dpmon works here, and prints the reason and the remedy of each problem.

It records a run of a script that imports torch and calls a model twice: both calls have to be in the record, and what
NVML says.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import dpmon
from dpmon.errors import HistoryError
from dpmon.record.record_types import Call
from dpmon.run.activities import nothing_traced_reason
from dpmon.run.retention import delete_run
from dpmon.run.run_directory import RunError, load_exit, load_info
from dpmon.run.run_registry import check_usable, fallback_directories, find_run, runs_directory
from dpmon.run.run_signals import stop_run
from dpmon.sanitize import sanitize_line
from dpmon.store.events import read_events
from dpmon.store.records import resolve_calls
from dpmon.store.steps import read_called_steps
from dpmon.store.store_opening import open_store
from dpmon.supervise.command_resolver import CommandError, choose_python
from dpmon.text.cells import supports_color, text_for_stream
from dpmon.text.formatting import format_count_with_noun

OK, WARNING, PROBLEM = STATES = ("ok", "warning", "problem")
"""ok: no problem; warning: dpmon works, with limits; problem: dpmon does not work."""
_WIDTH, _STATE_CELLS, _NAME_CELLS = 80, 9, 9
_COLORS = {OK: "32", WARNING: "33", PROBLEM: "31"}
_TIMEOUT_S = 120.0
"""Importing torch from a cold network file system is slow."""
_MAX_CALLS = 100
"""Most calls to read, although the script makes only two."""
_MIN_TORCH = (2, 4)
_SCRIPT = """\
import json, sys, time, torch
facts = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
model = torch.nn.Linear(5, 2)
for _ in range(2):
    model(torch.zeros(3, 5))
facts["count"] = torch.cuda.device_count() if torch.cuda.is_available() else 0
time.sleep(1)  # until the GPUs were sampled
print(json.dumps(facts))
"""
_REMEDIES = (
    ("libnvidia-ml", "with an NVIDIA GPU: install its driver; in a container: start it with --gpus all"),
    ("not loaded", "load the driver (modprobe nvidia); nvidia-smi shows details"),
    ("differ in version", "restart the machine"),
    ("permission", "check who may open /dev/nvidiactl and /dev/nvidia0 (groups video, render)"),
    ("nvidia-ml-py", "pip install nvidia-ml-py"),
    ("not answered", "if nvidia-smi hangs too, the driver is stuck: restart the machine"),
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
    yield _check_state_directory()
    yield from _run_self_test(python)


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
            try:
                existing = check_usable(runs)
                if not os.access(existing, os.W_OK | os.X_OK):
                    raise RunError(f"{existing} is not writable")
            except (OSError, RunError) as error:
                problems.append(str(error))
                continue
            if problems:
                return Check("state", WARNING, f"{problems[0]}: runs are kept in {runs}", remedy)
            return Check("state", OK, f"runs are kept in {runs}")
    except RunError as error:  # there is no home directory
        problems.append(str(error))
    return Check("state", PROBLEM, f"{problems[0]}, and no other directory can be used", remedy)


# ------------------------------------------------------------------------------------------------ self-test


@dataclass
class _SelfTest:
    """What the script printed, and what is in the record of its run."""

    facts: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""
    calls: list[Call] = field(default_factory=list)
    untraced_reason: str | None = None
    devices: dict[int, str] = field(default_factory=dict)
    gpu_absent: str | None = None

    def run(self, python: str) -> None:
        """Record a run of the script, in the directory of runs that XDG_STATE_HOME names. Raises RunError."""
        script = Path(os.environ["XDG_STATE_HOME"]) / "doctor.py"
        script.write_text(_SCRIPT)
        words = ["--headless", "--mode", "script", "--python", python, str(script)]
        start_s = time.monotonic()
        try:
            done = subprocess.run(
                [sys.executable, "-m", "dpmon", *words],
                cwd=script.parent,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            self.failure = f"no answer within {_TIMEOUT_S:.0f} s"
            for _ in stop_run(find_run()):
                pass
            return
        self.seconds = time.monotonic() - start_s
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if not line.startswith(b"dpmon: ")]
            text = b"".join(lines[-1:]).decode("utf-8", "replace")
            self.failure = f"it exited with status {done.returncode}: {text[:200]}"
            return
        try:
            self.facts = json.loads(done.stdout.strip().split(b"\n")[-1])
        except ValueError:
            self.failure = "its output contains other text: this Python prints something at startup"

    def read_record(self, directory: Path) -> None:
        """Read the record of the run. Raises HistoryError."""
        with open_store(directory) as store:
            processes = {ring.process for ring in store.rings.values() if ring.process >= 0}
            steps = [step for process in processes for step in read_called_steps(store, process, _MAX_CALLS)]
            self.calls = [call for step in steps for call in resolve_calls(store, step)]
            warnings = [str(event.data.get("text")) for event in read_events(store, "warning")]
            for event in read_events(store, "device"):
                self.devices[event.data["index"]] = event.data["name"] or "GPU without a name"
            for event in read_events(store, "host"):
                self.gpu_absent = event.data["gpu_absent"]
        self.untraced_reason = nothing_traced_reason(directory, load_info(directory), load_exit(directory), warnings)


def _run_self_test(python: str | None) -> Iterator[Check]:
    """Record a short run with the Python of a script (`python`: the value of --python), and yield its checks."""
    try:
        python_path = choose_python(python, os.environ)
    except CommandError as error:
        problem, _, remedy = str(error).partition(": ")
        yield Check("Python", PROBLEM, problem, remedy or "choose another with --python")
        return
    test = _SelfTest()
    try:
        with tempfile.TemporaryDirectory(prefix="dpmon-doctor-") as name:
            # The run has neither the user's settings nor a place among the user's runs.
            os.environ |= {"XDG_STATE_HOME": name, "XDG_CONFIG_HOME": name, "DPMON_METRICS": ""}
            test.run(python_path)
            directory = find_run()
            test.read_record(directory)
            delete_run(directory, load_info(directory))
    except (OSError, RunError, HistoryError) as error:
        yield Check("self-test", PROBLEM, f"no run can be recorded: {error}", "free some space in TMPDIR")
        return
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
        text = f"the calls of a short run are in its record ({test.seconds:.1f} s, with the import of torch)"
        return Check("tracing", OK, text)
    remedy = (
        "PYTHONPATH must reach the script: use neither -I nor -E, nor a wrapper that clears the environment;"
        " else report this as a bug, with the output of `pip list`"
    )
    return Check("tracing", PROBLEM, f"nothing was traced: {test.untraced_reason}", remedy)


def _check_nvml(test: _SelfTest) -> Check:
    if test.devices:
        names = [f"{index}: {name}" for index, name in sorted(test.devices.items())]
        return Check("NVML", OK, ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else ""))
    reason = test.gpu_absent or "NVML lists no GPU"
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
