"""Tests Python, torch, the tracer and NVML as a run uses them: traces a child process and samples the devices.

The child runs in a temporary directory, with the environment of a run. It imports torch and calls a model twice. The
check passes if both calls are in the record, with the right sizes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpmon.cli.doctor.local_checks import Check, failed_check, passed_check, warning_check
from dpmon.errors import HistoryError
from dpmon.record.record_types import Call
from dpmon.run import proc
from dpmon.run.process_notes import NoteReader
from dpmon.run.run_directory import RunError, RunInfo, write_info
from dpmon.run.run_reader import RunReader
from dpmon.store.events import read_events
from dpmon.store.records import resolve_calls
from dpmon.store.ring_drain import RingDrain
from dpmon.store.steps import read_called_steps
from dpmon.store.store_opening import open_store
from dpmon.supervise.command_process import command_environment
from dpmon.supervise.command_resolver import CommandError, choose_python

CHILD_TIMEOUT_S = 120.0
"""Time limit of the child in seconds: importing torch from a cold network file system is slow."""
NVML_TIMEOUT_S = 10.0
_MAX_CALLS = 100
"""Most calls to read, although the child makes only two."""
_MIN_TORCH = (2, 4)
_NO_REPLY_YET = "NVML has not answered yet"
_CHILD = """\
import json, sys, torch
facts = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda,
         "hip": getattr(torch.version, "hip", None)}
model = torch.nn.Linear(5, 2)
for _ in range(2):
    model(torch.zeros(3, 5))
facts["available"] = torch.cuda.is_available()
facts["count"] = torch.cuda.device_count() if facts["available"] else 0
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


@dataclass
class _SelfTestResults:
    """The results of the child and the sampler."""

    facts: dict[str, object] = field(default_factory=dict)
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


def run_self_test(python: str | None, environ: Mapping[str, str]) -> Iterator[Check]:
    """Run the test with the Python that would run a script (`python`: the value of --python), and yield its checks."""
    try:
        python_path: str | None = choose_python(python, environ)
    except CommandError as error:
        python_path = None
        problem, _, remedy = str(error).partition(": ")
        yield failed_check("Python", problem, remedy or "choose another with --python")
    try:
        with tempfile.TemporaryDirectory(prefix="dpmon-doctor-") as name:
            results = _run_in_directory(Path(name), python_path, environ)
    except (OSError, RunError) as error:
        yield failed_check("self-test", f"no directory for it: {error}", "free some space in the directory of TMPDIR")
        return
    if python_path is not None:
        yield from _check_python(python_path, results)
    yield _check_nvml(results)
    if results.facts:
        yield from _check_cuda(results)


def _run_in_directory(directory: Path, python: str | None, environ: Mapping[str, str]) -> _SelfTestResults:
    run_info = RunInfo(
        id=directory.name, name="doctor", command=(python or "",), script="doctor", cwd="/", python=python,
        started_unix=time.time(), start_ns=time.monotonic_ns(), boot_id=proc.boot_id(), headless=True,
        options={"mode": "script"},
    )  # fmt: skip
    write_info(directory, run_info)
    from dpmon.gpu.device_sampler import DeviceSampler

    results = _SelfTestResults()
    sampler = DeviceSampler(results.add_sample, lambda: None)
    sampler.start()
    deadline = time.monotonic() + NVML_TIMEOUT_S
    try:
        if python is not None:
            _run_child(results, python, directory, run_info, environ)
        while not results.devices and results.absent == _NO_REPLY_YET and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        sampler.stop()
    _read_record(results, directory, run_info)
    results.warnings += [note.text for note in NoteReader(directory / "warnings.log").read_new()]
    results.stage, _ = RunReader(directory).startup_stage() or (None, 0)
    return results


def _run_child(
    results: _SelfTestResults, python: str, directory: Path, run_info: RunInfo, environ: Mapping[str, str]
) -> None:
    script = directory / "child.py"
    script.write_text(_CHILD)
    start_s = time.monotonic()
    try:
        done = subprocess.run(
            [python, str(script)],
            cwd=directory,
            env=command_environment(run_info, directory, environ),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CHILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        results.failure = f"no answer within {CHILD_TIMEOUT_S:.0f} s"
        return
    except OSError as error:
        results.failure = error.strerror or str(error)
        return
    results.seconds = time.monotonic() - start_s
    if done.returncode:
        lines = done.stderr.decode("utf-8", "replace").strip().split("\n")
        results.failure = f"it exited with status {done.returncode}: {lines[-1][:200]}"
        return
    try:
        results.facts = json.loads(done.stdout.decode().strip().split("\n")[-1])
    except (ValueError, UnicodeDecodeError):
        results.failure = "its output contains other text: this Python prints something at startup"


def _read_record(results: _SelfTestResults, directory: Path, run_info: RunInfo) -> None:
    drain = RingDrain(directory, run_info)
    drain.flush(command_ended=True)
    drain.close()
    with suppress(HistoryError), open_store(directory) as store:
        processes = {ring.process for ring in store.rings.values() if ring.process >= 0}
        steps = [step for process in processes for step in read_called_steps(store, process, _MAX_CALLS)]
        results.calls = [call for step in steps for call in resolve_calls(store, step)]
        results.warnings = [str(event.data.get("text")) for event in read_events(store, "warning")]


# ------------------------------------------------------------------------------------------------ results


def _check_python(python_path: str, results: _SelfTestResults) -> Iterator[Check]:
    if results.failure:
        yield failed_check("Python", f"{python_path}: {results.failure}", "try PYTHON -c 'import torch'")
        return
    facts = results.facts
    yield passed_check("Python", f"{facts.get('python')} ({python_path})")
    version = str(facts.get("torch"))
    if _version_tuple(version) < _MIN_TORCH:
        yield warning_check("torch", f"{version} is older than 2.4: tracing may fail", "install a newer torch")
    else:
        yield passed_check("torch", version)
    if [(call.root, call.rows) for call in results.calls] == [("Linear", 3)] * 2:
        yield passed_check(
            "tracing", f"a child's calls are in its record ({results.seconds:.1f} s, with the import of torch)"
        )
    elif results.warnings:
        first_warning, *_ = results.warnings
        yield failed_check("tracing", first_warning, "install a version of dpmon that supports this torch")
    elif results.stage is None:
        yield failed_check(
            "tracing",
            "dpmon's sitecustomize did not run in the child",
            "PYTHONPATH must reach the child: use neither -I nor -E, nor a wrapper that clears the environment",
        )
    else:
        yield failed_check(
            "tracing",
            f"the child ran ({results.stage}), but its calls are not in the record",
            "report this as a bug, with the output of `pip list`",
        )


def _version_tuple(version: str) -> tuple[int, ...]:
    release, _, _ = version.partition("+")
    parts = release.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal())


def _check_nvml(results: _SelfTestResults) -> Check:
    if results.devices:
        names = ", ".join(f"{index}: {name}" for index, name in sorted(results.devices.items())[:8])
        more_text = f" and {len(results.devices) - 8} more" if len(results.devices) > 8 else ""
        return passed_check("NVML", f"{names}{more_text}")
    reason = results.absent or "NVML lists no GPU"
    if reason == _NO_REPLY_YET:
        reason = f"NVML did not answer within {NVML_TIMEOUT_S:.0f} s"
    remedy = next((text for words, text in _REMEDIES if words in reason), "nvidia-smi may show details")
    return warning_check("NVML", f"no GPU to watch: {reason}", remedy)


def _check_cuda(results: _SelfTestResults) -> Iterator[Check]:
    facts = results.facts
    count = facts.get("count") or 0
    if count:
        yield passed_check("CUDA", f"torch sees {count} GPU{'s' if count != 1 else ''}")
    elif results.devices and not facts.get("cuda") and not facts.get("hip"):
        yield warning_check("CUDA", "there are GPUs, but this torch is built for CPUs only", "install torch with CUDA")
    elif results.devices:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        visible_text = f" (CUDA_VISIBLE_DEVICES is {visible!r})" if visible is not None else ""
        yield warning_check(
            "CUDA",
            f"there are GPUs, but torch sees none{visible_text}",
            "python -c 'import torch as t; t.cuda.init()' prints why",
        )
    elif shutil.which("rocm-smi") and facts.get("hip"):
        yield warning_check("CUDA", "dpmon cannot watch an AMD GPU, only NVIDIA GPUs", "the training itself is traced")
    else:
        yield passed_check("CUDA", "torch sees no GPU: dpmon runs data parallelism over virtual replicas on the CPU")
