"""Stacks of processes, as py-spy prints them, and what a stack says about its thread."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dpmon.record.shared_names import INNER_FRAMES, MAX_THREADS, OUTER_FRAMES
from dpmon.run.process_notes import relative_location

_MOST_BYTES = 32 << 20
_LONGEST = 1000
"""Most characters of a name in a stack."""
WAIT_S = 5.0
"""Longest wait for py-spy. One dump takes 11 to 35 ms."""
KILLED_S = 0.5
"""Longest wait for the end of a killed py-spy."""
_NOT_SCRIPT = ("/site-packages/", "/dist-packages/", "/lib/python3.", "/lib64/python3.", "/torchinductor_")
_OURS = "/dpmon/tracer/"
_WRAPPERS = (
    "torch/distributed/c10d_logger.py",
    "torch/distributed/checkpoint/logger.py",
    "torch/distributed/checkpoint/utils.py",
    "torch/utils/_contextlib.py",
)
"""Files whose functions only call another one."""
_INSTALL = "install it beside dpmon: pip install py-spy"
_NO_RIGHT = "in a container: start it with --cap-add SYS_PTRACE; elsewhere see /proc/sys/kernel/yama/ptrace_scope"


_WAITS = (
    "multiprocessing/connection.py",
    "multiprocessing/queues.py",
    "multiprocessing/synchronize.py",
    "selectors.py",
)
"""Files in which a worker without work waits."""


class Frame(NamedTuple):
    """One function call of a stack."""

    function: str
    file: str
    line: int
    """0 in C code."""

    @property
    def is_script(self) -> bool:
        """Whether it belongs to the script, not to an installed package, to Python's library, or to C code."""
        return self.line > 0 and not self.file.startswith("<") and not any(part in self.file for part in _NOT_SCRIPT)

    def location(self, directory: str) -> str:
        """File and line, as seen from `directory`."""
        return relative_location(directory, self.file, self.line)

    def description(self, directory: str) -> str:
        """Function and place: "in save (train.py:88)"; outside of functions "at train.py:88"."""
        place = self.location(directory)
        return f"at {place}" if self.function == "<module>" else f"in {self.function} ({place})"


class Stack(NamedTuple):
    """The calls of one thread, innermost first."""

    frames: tuple[Frame, ...]
    thread: str = ""
    main: bool = True
    """Whether it is the training thread, or the main thread of a data loader's worker."""
    left_out: int = 0
    """Frames between the innermost and the outermost that are not listed."""

    @property
    def innermost_script_frame(self) -> Frame | None:
        """The innermost call of the script; None if there is none."""
        return next((frame for frame in self.frames if frame.is_script), None)

    @property
    def is_idle_worker(self) -> bool:
        """Whether a worker with this stack waits for a request."""
        return self.frames[0].file.endswith(_WAITS)

    @property
    def library_operation(self) -> str | None:
        """What the script does there: "DataLoader.__next__", "forward", "all_reduce"; None if it runs its own code.

        That is the outermost function that people know, else what the script called.
        """
        if self.operation_kind == "compile":
            return "torch.compile"
        found, known = None, False
        for frame in self.frames:
            if frame.is_script:
                break
            name = next((name for end, name in _KNOWN if frame.file.endswith(end)), None)
            if name is not None or not (known or frame.line == 0 or frame.file.endswith(_WRAPPERS)):
                found = name.format(frame.function.rpartition(".")[2]) if name else frame.function
                known = name is not None
        return found

    @property
    def operation_kind(self) -> str:
        """One of collective, backward, data, save, compile, or "" for other work."""
        for frame in self.frames:
            for kind, ends, functions in _KINDS:
                if any(end in frame.file for end in ends) and (not functions or frame.function in functions):
                    return kind
            if frame.is_script:
                break
        return ""


_KNOWN = (
    ("torch/utils/data/dataloader.py", "DataLoader.{}"),
    ("torch/_tensor.py", "backward"),
    ("torch/autograd/__init__.py", "backward"),
    ("torch/nn/modules/module.py", "forward"),
    ("torch/optim/optimizer.py", "optimizer.step"),
    ("torch/serialization.py", "torch.{}"),
    ("torch/distributed/checkpoint/state_dict_saver.py", "torch.distributed.checkpoint.{}"),
    ("torch/distributed/checkpoint/state_dict_loader.py", "torch.distributed.checkpoint.{}"),
    ("torch/distributed/distributed_c10d.py", "{}"),
)
"""Names that people know for functions of torch, by the end of the file's path; {}: the function's own name."""
_KINDS: Sequence[tuple[str, Sequence[str], Sequence[str]]] = (
    ("compile", ("torch/_dynamo/convert_frame.py", "torch/_inductor/compile_fx.py", "/triton/compiler/"), ()),
    ("collective", ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py"), ()),
    ("backward", ("torch/autograd/graph.py",), ("_engine_run_backward",)),
    ("data", ("torch/utils/data/dataloader.py",), ()),
    ("save", ("torch/serialization.py", "torch/distributed/checkpoint/", "/safetensors/"), ()),
)
"""Kinds of work, by parts of a file's path and names of functions (none: all in the file). Inner calls decide first."""


class ProcessStacks(NamedTuple):
    """The stacks of one process, the main thread's first; or none, and why."""

    stacks: tuple[Stack, ...] = ()
    reason: str | None = None

    @property
    def main(self) -> Stack | None:
        """The main thread's stack."""
        return next((stack for stack in self.stacks if stack.main), None)


def py_spy() -> str | None:
    """The path of py-spy: beside the Python that runs dpmon, or on PATH; None if it is not installed."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def dump_stacks(threads: Mapping[int, int], *, native: bool = False) -> dict[int, ProcessStacks]:
    """Take the stacks of processes, all at once. Takes at most WAIT_S.

    `threads`: the kernel's number of the main thread of each process, by pid. `native`: also C frames; py-spy then
    stops each process for about 50 ms.
    """
    program = py_spy()
    if program is None:
        return dict.fromkeys(threads, ProcessStacks(reason=f"py-spy is not installed; {_INSTALL}"))
    how = "--native" if native else "--nonblocking"
    started = {}
    found: dict[int, ProcessStacks] = {}
    for pid in threads:
        try:
            command = [program, "dump", how, "--json", "--pid", str(pid)]
            pipe = subprocess.PIPE
            started[pid] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
        except OSError as error:
            found[pid] = ProcessStacks(reason=f"py-spy cannot be started: {error.strerror or error}")
    end = time.monotonic() + WAIT_S
    for pid, process in started.items():
        try:
            out, err = process.communicate(timeout=max(end - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the kernel, it may wait for the process's memory
                process.wait(KILLED_S)
            for stream in (process.stdout, process.stderr):  # not read to their ends: a child may hold them open
                if stream is not None:
                    stream.close()
            found[pid] = ProcessStacks(reason=f"py-spy gave no answer within {WAIT_S:.0f} s")
            continue
        found[pid] = (
            parse_py_spy_json(out, threads[pid])
            if process.returncode == 0
            else ProcessStacks(reason=_explain_failure(err))
        )
    return found


def _explain_failure(said: bytes) -> str:
    """Why py-spy failed, and the remedy if it is known."""
    text = said[-_LONGEST:].decode("utf-8", "replace").strip()
    line = next((line for line in text.splitlines() if line.startswith("Error:")), text.partition("\n")[0])
    if "ermission" in text or "not permitted" in text:
        return f"py-spy may not look into the process; {_NO_RIGHT}"
    return f"py-spy failed: {line.removeprefix('Error: ')[:200] or 'without a message'}"


def parse_py_spy_json(out: bytes, main: int) -> ProcessStacks:
    """The stacks in py-spy's JSON (`dump --json`). `main`: the kernel's number of the main thread."""
    if len(out) > _MOST_BYTES:
        return ProcessStacks(reason=f"py-spy printed more than {_MOST_BYTES >> 20} MiB")
    try:
        stacks = parse_threads(json.loads(out), main)
    except (ValueError, RecursionError):
        return ProcessStacks(reason="py-spy printed something else than stacks: another version?")
    return ProcessStacks(stacks, None if stacks else "py-spy saw no Python thread")


def parse_threads(threads: Any, main: int | None = None) -> tuple[Stack, ...]:
    """The stacks of threads in the form of py-spy, the main thread's first; ValueError if they have another one."""
    try:
        # Older Pythons do not know the kernel's numbers.
        known = any(main is not None and thread["os_thread_id"] == main for thread in threads)
        key, value = ("os_thread_id", main) if known else ("thread_name", "MainThread")
        stacks = [_stack(thread, thread[key] == value) for thread in threads[:MAX_THREADS]]
    except (TypeError, KeyError, AttributeError, ValueError):
        raise ValueError("not stacks") from None
    return tuple(sorted((stack for stack in stacks if stack.frames), key=lambda stack: not stack.main))


def _stack(thread: Mapping[str, Any], main: bool) -> Stack:
    frames = [each for each in thread["frames"] if _OURS not in each["filename"]]
    kept = frames if len(frames) <= INNER_FRAMES + OUTER_FRAMES else [*frames[:INNER_FRAMES], *frames[-OUTER_FRAMES:]]
    # py-spy knows the lines of C code only if it has debug information; without them, a line says that it is Python.
    lines = [0 if each.get("module") else int(each["line"]) for each in kept]
    return Stack(
        tuple(
            Frame(str(each["name"])[:_LONGEST], str(each["filename"])[:_LONGEST], line)
            for each, line in zip(kept, lines, strict=True)
        ),
        str(thread["thread_name"] or "")[:_LONGEST],
        main,
        len(frames) - len(kept) + int(thread.get("left_out") or 0),
    )
