"""Records the checkpoints that the training thread saves: their duration, size, and type of file system."""

from __future__ import annotations

import os
import sys
from functools import partial
from threading import get_ident
from time import monotonic_ns
from typing import Any

from dpmon.record.shared_names import innermost_script_line
from dpmon.record.span_format import Kind
from dpmon.tracer.core.hidden_frames import iter_callers, replace_in_modules, wrap_rare_function
from dpmon.tracer.steps.span_recorder import SpanRecorder

_FUNCTIONS = (
    *("torch.save", "torch.distributed.checkpoint.save", "torch.distributed.checkpoint.async_save"),
    "safetensors.torch.serialize_file",
)
"""The functions that save. The save_file and save_model of safetensors look up serialize_file whenever they run."""
POLL_NS, MIN_SAVE_NS = 1_000_000_000, 10_000_000
"""Interval between searches for new imports. Shorter saves are not recorded: a script may save in every step."""


class CheckpointTracer:
    """The recorder of one process's checkpoints. It replaces torch.save at once, the others once they are imported."""

    def __init__(self, recorder: SpanRecorder) -> None:
        self._recorder = recorder
        self._guard = recorder.session.guard("checkpoint", fatal=False)
        self._missing = set(_FUNCTIONS)
        self._depth = 0
        """Depth of nested saves on the training thread: torch.distributed.checkpoint calls torch.save."""
        self.poll(0)

    def poll(self, now: int) -> int:
        """Replace functions that were imported since the last call, between two steps. Return when to call again."""
        self._depth = 0  # an interrupt may have ended a save before it was counted
        begin, fail = partial(self._change_depth, 1), partial(self._change_depth, -1)
        with self._guard:
            for function in tuple(self._missing):
                module, _, name = function.rpartition(".")
                original = getattr(sys.modules.get(module), name, None)
                if original is not None:
                    self._missing.remove(function)
                    after = partial(self._record, function)
                    wrapper = wrap_rare_function(original, self._guard, after, before=begin, on_error=fail)
                    replace_in_modules(module, name, original, wrapper)
        return now + POLL_NS

    def _change_depth(self, change: int, *_: object, **__: object) -> bool:
        """Note that a save begins (1) or ends (-1). Return whether it was the training thread's outermost save."""
        recorder, thread = self._recorder, self._recorder.threads.get(get_ident())
        if thread is None or thread is not recorder.training_thread:
            return False
        was_saving, self._depth = self._depth > 0, self._depth + change
        if was_saving != (self._depth > 0):
            recorder.words[thread.start_word] = monotonic_ns()
            recorder.open_kinds[thread.number] = thread.open_kind if was_saving else Kind.CHECKPOINT
        return self._depth == 0

    def _record(self, function: str, result: object, start_ns: int, *args: object, **kwargs: object) -> None:
        save_ns, session = monotonic_ns() - start_ns, self._recorder.session
        if self._change_depth(-1) and save_ns >= MIN_SAVE_NS:
            lines = [(frame.f_code.co_filename, frame.f_lineno) for frame in iter_callers(sys._getframe(2))]
            facts = {"function": function, "place": innermost_script_line(lines[::-1]) or "a library"}
            t_s = (start_ns - session.config.start_ns) / 1e9
            facts |= _measure(result, [*args[1:2], *kwargs.values()])
            session.record_event("checkpoint", t_s=t_s, save_s=save_ns / 1e9, **facts)


def _measure(result: Any, targets: list[Any]) -> dict[str, Any]:
    """Return the size of a save and the type of its file system. `targets`: arguments; one of them is or has the path.

    `result`: torch.distributed.checkpoint returns the lengths of the parts of all ranks.
    """
    parts = getattr(result, "storage_data", None) or {}
    for target in targets:
        path = target if isinstance(target, os.PathLike) else getattr(target, "name", getattr(target, "path", target))
        if isinstance(path, (str, os.PathLike)) and (os.path.isfile(path) or (parts and os.path.isdir(path))):
            status = os.stat(path)
            size = sum(part.length for part in parts.values()) or status.st_size
            device = f" {os.major(status.st_dev)}:{os.minor(status.st_dev)} "
            with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
                types = [line.partition(" - ")[2].split()[0] for line in mounts if device in line]
            return {"bytes": size, "filesystem": next(iter(types), "an unknown file system"), "absent": {}}
    reason = "not in a file when the call returned"
    return {"bytes": None, "filesystem": None, "absent": {"bytes": reason, "filesystem": reason}}
