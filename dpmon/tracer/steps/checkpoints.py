"""Records the checkpoints that the training thread saves: their duration, size, and type of file system."""

from __future__ import annotations

import os
import sys
from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import Any

from dpmon.record.shared_names import find_program_frame
from dpmon.record.span_format import Kind
from dpmon.tracer.core.hidden_frames import iter_callers, replace_in_modules, wrap_rare_function
from dpmon.tracer.steps.span_recorder import SpanRecorder

_FUNCTIONS = (
    "torch.save",
    "torch.distributed.checkpoint.save",
    "torch.distributed.checkpoint.async_save",
    "safetensors.torch.serialize_file",
)
"""The functions that save. The save_file and save_model of safetensors look up serialize_file whenever they run."""
POLL_NS, MIN_SAVE_NS = 1_000_000_000, 10_000_000
"""Shorter saves are not recorded, so that one in every step does not fill the record."""


class CheckpointTracer:
    """The recorder of one process's checkpoints. It replaces torch.save at once, the others once they are imported."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self._guard = recorder.session.guard("checkpoint", fatal=False)
        self._missing = set(_FUNCTIONS)
        self._depth = 0
        """Number of saves that the training thread is in: torch.distributed.checkpoint calls torch.save."""
        self.poll(0)

    def poll(self, now: int) -> int:
        """Replace functions that were imported since the last call, between two steps. Return when to call again."""
        self._depth = 0  # an interrupt may have ended a save before it was counted
        with self._guard:
            for function in tuple(self._missing):
                module, _, name = function.rpartition(".")
                original = getattr(sys.modules.get(module), name, None)
                if original is not None:
                    self._missing.remove(function)
                    after, on_error = partial(self._end, function), partial(self._end, None, None, 0)
                    wrapper = wrap_rare_function(original, self._guard, after, before=self._begin, on_error=on_error)
                    replace_in_modules(module, name, original, wrapper)
        return now + POLL_NS

    def _begin(self, *_: object, **__: object) -> None:
        recorder, thread = self._recorder, self._recorder.threads.get(get_ident())
        if thread is not None and thread is recorder.training_thread:
            self._depth += 1
            recorder.words[thread.start_word] = monotonic_ns()
            recorder.open_kinds[thread.number] = Kind.CHECKPOINT

    def _end(self, function: str | None, result: object, start_ns: int, *args: object, **kwargs: object) -> None:
        """Record the end of a save. `function`: None if it raised."""
        end_ns, recorder, thread = monotonic_ns(), self._recorder, self._recorder.threads.get(get_ident())
        if thread is None or thread is not recorder.training_thread:
            return
        self._depth -= 1
        if self._depth == 0:
            recorder.words[thread.start_word] = end_ns
            recorder.open_kinds[thread.number] = thread.open_kind
        if self._depth != 0 or function is None or end_ns - start_ns < MIN_SAVE_NS:
            return
        places = [(frame.f_code.co_filename, frame.f_lineno) for frame in iter_callers(sys._getframe(2))]
        file, line = places[find_program_frame([file for file, _ in places]) or 0]
        facts = {"function": function, "place": f"{os.path.basename(file)}:{line}", **_measure(result, args, kwargs)}
        t_s = (start_ns - recorder.session.config.start_ns) / 1e9
        recorder.session.record_event("checkpoint", t_s=t_s, save_s=(end_ns - start_ns) / 1e9, **facts)


def _measure(result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return size and type of file system of what was saved, or why they are unknown."""
    named = (kwargs.get(name) for name in ("f", "filename", "checkpoint_id", "storage_writer"))
    target = next((value for value in (*args[1:2], *named) if value is not None), None)
    path = target if isinstance(target, (str, os.PathLike)) else getattr(target, "name", getattr(target, "path", None))
    if not isinstance(path, (str, os.PathLike)) or not os.path.exists(path):
        reason = f"saved to {type(target).__name__}, which is not in a file system"
        return {"bytes": None, "filesystem": None, "absent": {"bytes": reason, "filesystem": reason}}
    status, parts = os.stat(path), getattr(result, "storage_data", None) or {}  # the parts of all ranks
    size = status.st_size if os.path.isfile(path) else sum(getattr(part, "length", 0) for part in parts.values())
    device = f" {os.major(status.st_dev)}:{os.minor(status.st_dev)} "
    with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as file:
        types = [line.partition(" - ")[2].split()[0] for line in file if device in line]
    facts = {"bytes": size or None, "filesystem": next(iter(types), None)}
    reasons = {"bytes": "it is still being written", "filesystem": "it is not among the mounts of the process"}
    return {**facts, "absent": {name: reason for name, reason in reasons.items() if facts[name] is None}}
