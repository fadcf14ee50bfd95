"""Takes the stacks of processes with py-spy, and derives from a stack what its thread is doing."""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpmon.record.shared_names import INNER_FRAMES, MAX_THREADS, OUTER_FRAMES, find_program_frame
from dpmon.run.process_notes import relative_location

_MAX_NAME_CHARS = 1000
"""Maximum length (characters) of a name in a stack."""
MAX_DUMP_S = 5.0
"""Maximum wait for py-spy. One dump takes 11 to 35 ms."""
_WRAPPERS = (
    "torch/distributed/c10d_logger.py",
    "torch/distributed/checkpoint/logger.py",
    "torch/distributed/checkpoint/utils.py",
    "torch/utils/_contextlib.py",
    "runpy.py",
    "<frozen runpy>",
)
"""Files whose functions only call another one."""
_INSTALL_HINT = "install it next to dpmon: pip install py-spy"
_PERMISSION_HINT = (
    "in a container: start it with --cap-add SYS_PTRACE; elsewhere see /proc/sys/kernel/yama/ptrace_scope"
)


_IDLE_WORKER_FILES = (
    "multiprocessing/connection.py",
    "multiprocessing/queues.py",
    "multiprocessing/synchronize.py",
    "selectors.py",
)
"""Files in which an idle worker waits."""


class Frame(NamedTuple):
    """A function call in a stack."""

    function: str
    file: str
    line: int
    """0 in C code."""

    def location(self, directory: str) -> str:
        """Return file and line, as seen from `directory`."""
        return relative_location(directory, self.file, self.line)

    def description(self, directory: str) -> str:
        """Return function and location: "in save (train.py:88)"; outside of functions "at train.py:88"."""
        location = self.location(directory)
        return f"at {location}" if self.function == "<module>" else f"in {self.function} ({location})"


WORK_WAIT = Frame("Work.wait", "torch/csrc/distributed/c10d/Work.cpp", 0)
"""The wait for a collective that runs asynchronously. It is C++ code, which py-spy does not show without C frames."""
_WAIT_CALL = re.compile(r"(?<!\bos)\.wait\b")
"""A method of this name that has no Python frame of its own is torch's: others are written in Python."""


@dataclass(frozen=True, slots=True)
class Stack:
    """The calls of one thread, innermost first."""

    frames: tuple[Frame, ...]
    thread: str = ""
    main: bool = True
    """Whether it is the training thread, or the main thread of a loader worker."""
    left_out: int = 0
    """Number of frames between the innermost and the outermost ones that are not listed."""

    @property
    def innermost_script_frame(self) -> Frame | None:
        """The innermost call of the script, or of the installed package that runs; None if there is none."""
        files = [frame.file if frame.line > 0 else "<C code>" for frame in self.frames]
        index = find_program_frame(files)
        return None if index is None else self.frames[index]

    @property
    def is_idle_worker(self) -> bool:
        """Whether a worker with this stack waits for a request."""
        return self.frames[0].file.endswith(_IDLE_WORKER_FILES)

    @property
    def library_operation(self) -> str | None:
        """The library function that the script is in, such as "DataLoader.__next__", "forward" or "all_reduce".

        It is the outermost well-known function, else the function that the script called. None if the script runs its
        own code.
        """
        if self.operation_kind == "compile":
            return "torch.compile"
        operation, is_known, script_frame = None, False, self.innermost_script_frame
        for frame in self.frames:
            if frame is script_frame:
                break
            template = next((template for suffix, template in _KNOWN_FUNCTIONS if frame.file.endswith(suffix)), None)
            if template is not None or not (is_known or frame.line == 0 or frame.file.endswith(_WRAPPERS)):
                operation = template.format(frame.function.rpartition(".")[2]) if template else frame.function
                is_known = template is not None
        return operation

    @property
    def operation_kind(self) -> str:
        """One of collective (or another wait for ranks), backward, data, save, compile, or "" for other work."""
        script_frame = self.innermost_script_frame
        for frame in self.frames:
            if frame.function == "<module>":  # an import, or the script
                break
            for operation_kind, parts, functions in _OPERATION_KINDS:
                if any(part in frame.file for part in parts) and (not functions or frame.function in functions):
                    return operation_kind
            if frame is script_frame:
                break
        return ""


_KNOWN_FUNCTIONS = (
    ("torch/utils/data/dataloader.py", "DataLoader.{}"),
    ("torch/_tensor.py", "backward"),
    ("torch/autograd/__init__.py", "backward"),
    ("torch/nn/modules/module.py", "forward"),
    ("torch/optim/optimizer.py", "optimizer.step"),
    ("torch/serialization.py", "torch.{}"),
    ("torch/distributed/checkpoint/state_dict_saver.py", "torch.distributed.checkpoint.{}"),
    ("torch/distributed/checkpoint/state_dict_loader.py", "torch.distributed.checkpoint.{}"),
    ("torch/distributed/distributed_c10d.py", "{}"),
    (WORK_WAIT.file, WORK_WAIT.function),
)
"""Familiar names for functions of torch, by the end of the file's path; {}: the function's own name."""
_OPERATION_KINDS: Sequence[tuple[str, Sequence[str], Sequence[str]]] = (
    ("compile", ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py", "/triton/compiler/"), ()),
    ("backward", ("torch/autograd/graph.py",), ("_engine_run_backward",)),
    ("data", ("torch/utils/data/dataloader.py",), ()),
    ("save", ("torch/serialization.py", "torch/distributed/checkpoint/", "/safetensors/"), ()),
    # They compute when they are the innermost frames of torch, as below the forward of DDP or of a DTensor.
    ("", ("torch/nn/modules/", "torch/optim/", "torch/distributed/tensor/", "torch/distributed/elastic/"), ()),
    ("collective", ("torch/distributed/", "torch/csrc/distributed/", "torch/nn/parallel/distributed.py"), ()),
)
"""Kinds of operations: name, parts of the file's path, and function names (none: all in the file). Inner calls decide
first."""


class ProcessStacks(NamedTuple):
    """The stacks of one process, the main thread's first; or the reason why there are none."""

    stacks: tuple[Stack, ...] = ()
    reason: str | None = None

    @property
    def main(self) -> Stack | None:
        """The main thread's stack; None if there is none."""
        return next((stack for stack in self.stacks if stack.main), None)


def find_py_spy() -> str | None:
    """Return the path of py-spy: next to the Python that runs dpmon, or on PATH; None if it is not installed."""
    own_path = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return own_path if os.access(own_path, os.X_OK) else shutil.which("py-spy")


def dump_stacks(main_threads_by_pid: Mapping[int, int]) -> dict[int, ProcessStacks]:
    """Take the stacks of several processes at the same time, within MAX_DUMP_S. Return them by pid.

    `main_threads_by_pid`: the kernel's id of the main thread of each process.
    """
    py_spy_path = find_py_spy()
    if py_spy_path is None:
        return dict.fromkeys(main_threads_by_pid, ProcessStacks(reason=f"py-spy is not installed; {_INSTALL_HINT}"))
    processes = {}
    dumps: dict[int, ProcessStacks] = {}
    for pid in main_threads_by_pid:
        try:
            command = [py_spy_path, "dump", "--nonblocking", "--json", "--pid", str(pid)]
            pipe = subprocess.PIPE
            processes[pid] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        except OSError as error:
            dumps[pid] = ProcessStacks(reason=f"py-spy cannot be started: {error.strerror or error}")
    deadline = time.monotonic() + MAX_DUMP_S
    for pid, process in processes.items():
        try:
            output, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it may wait in the kernel for the process's memory
                process.wait(0.5)
            for stream in (process.stdout, process.stderr):  # not read to the end, because a child may hold them open
                if stream is not None:
                    stream.close()
            dumps[pid] = ProcessStacks(reason=f"py-spy gave no answer within {MAX_DUMP_S:.0f} s")
            continue
        dumps[pid] = (
            parse_py_spy_json(output, main_threads_by_pid[pid])
            if process.returncode == 0
            else ProcessStacks(reason=_explain_failure(errors))
        )
    return dumps


def _explain_failure(message: bytes) -> str:
    """Return why py-spy failed, and the remedy if it is known."""
    text = message[-_MAX_NAME_CHARS:].decode("utf-8", "replace").strip()
    line = next((line for line in text.splitlines() if line.startswith("Error:")), text.partition("\n")[0])
    if "ermission" in text or "not permitted" in text:
        return f"py-spy may not look into the process; {_PERMISSION_HINT}"
    return f"py-spy failed: {line.removeprefix('Error: ')[:200] or 'without a message'}"


def parse_py_spy_json(output: bytes, main_tid: int) -> ProcessStacks:
    """Return the stacks in py-spy's JSON (`dump --json`). `main_tid`: the kernel's id of the main thread."""
    try:
        stacks = parse_threads(json.loads(output), main_tid)
    except (ValueError, RecursionError):
        return ProcessStacks(reason="unexpected py-spy output (different version?)")
    return ProcessStacks(stacks, None if stacks else "py-spy found no Python thread")


def parse_threads(threads: Any, main_tid: int | None = None) -> tuple[Stack, ...]:
    """Return the stacks of threads in py-spy's format, the main thread's first. Raises ValueError for anything else."""
    try:
        # Older Pythons do not report the kernel's ids.
        has_main_tid = any(main_tid is not None and thread["os_thread_id"] == main_tid for thread in threads)
        key, value = ("os_thread_id", main_tid) if has_main_tid else ("thread_name", "MainThread")
        stacks = [_stack(thread, thread[key] == value) for thread in threads[:MAX_THREADS]]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ValueError("not stacks") from None
    return tuple(sorted((stack for stack in stacks if stack.frames), key=lambda stack: not stack.main))


def _stack(thread: Mapping[str, Any], is_main: bool) -> Stack:
    frames = [frame for frame in thread["frames"] if "/dpmon/tracer/" not in frame["filename"]]
    kept = frames if len(frames) <= INNER_FRAMES + OUTER_FRAMES else [*frames[:INNER_FRAMES], *frames[-OUTER_FRAMES:]]
    named_frames = tuple(
        Frame(str(frame["name"])[:_MAX_NAME_CHARS], str(frame["filename"])[:_MAX_NAME_CHARS], int(frame["line"]))
        for frame in kept
    )
    if is_main and _calls_wait(named_frames):
        named_frames = (WORK_WAIT, *named_frames)
    return Stack(
        named_frames,
        str(thread["thread_name"] or "")[:_MAX_NAME_CHARS],
        is_main,
        len(frames) - len(kept) + int(thread.get("left_out") or 0),
    )


def _calls_wait(frames: tuple[Frame, ...]) -> bool:
    """Return whether the innermost Python frame is in the C++ function `wait` of an object, by its line of source."""
    return bool(frames) and _WAIT_CALL.search(linecache.getline(frames[0].file, frames[0].line)) is not None
