"""Notes the activity of a process before its first call, while it has no ring for records.

A note is a line in stages.log: the current operation and, after a colon, its details. Once the ring exists, no more
notes are written, so later steps pay nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from dpmon.tracer.core.hidden_frames import replace_in_modules, wrap_rare_function
from dpmon.tracer.core.module_tables import class_name
from dpmon.tracer.core.session import Session
from dpmon.tracer.note_files import append_note

IN_SCRIPT = "in the script"
MAX_LOADERS = 16
"""How many loaders get a note of their first batch: a script may read many loaders before it calls a model."""


class StartupNotes:
    """The writer of one process's notes."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._loader_count = 0

    def install(self) -> None:
        """Replace init_process_group wherever torch.distributed exports it, to note its begin and end."""
        original = getattr(torch.distributed, "init_process_group", None)  # some builds lack it
        if original is None:
            return
        wrapped = wrap_rare_function(
            original,
            self.session.guard("startup of the process", fatal=False),
            lambda *_, **__: self.note_end(None),
            before=lambda *args, **kwargs: self._note(lambda: _describe_group(args, kwargs)),
            on_error=lambda error, *_, **__: self.note_end(error),
        )
        replace_in_modules("torch.distributed", "init_process_group", original, wrapped)

    def note_fetch(self, iterator: object) -> bool:
        """Note the first fetch of a loader before the first call. Return whether a note was written."""
        if self._loader_count >= MAX_LOADERS or getattr(iterator, "_num_yielded", None) != 0:
            return False
        if torch.utils.data.get_worker_info() is not None:
            return False
        self._loader_count += 1
        self._note(lambda: _first_batch(iterator))
        return True

    def note_end(self, error: BaseException | None) -> None:
        """Note that the last noted operation has ended. `error`: the exception that ended it, or None."""
        # After an interrupt, the last note stays, because it shows where the process was.
        if error is None or isinstance(error, Exception):
            self._note(lambda: IN_SCRIPT)

    def _note(self, text: Callable[[], str]) -> None:
        with self.session.guard("startup of the process", fatal=False):
            if self.session.ring is None:
                append_note(text())


def _first_batch(iterator: object) -> str:
    """Describe the wait for the first batch of a loader, and count the loader's worker processes."""
    text = f"waiting for data: the first batch of {class_name(getattr(iterator, '_dataset', None))}"
    workers = getattr(iterator, "_num_workers", 0)
    if workers:
        text += f", {workers} worker{'' if workers == 1 else 's'}"
    return text


def _describe_group(args: Any, kwargs: Any) -> str:
    """Describe the process group, as far as the script or its launcher specifies it."""
    backend = kwargs.get("backend", args[0] if args else None)
    rank, world = kwargs.get("rank", -1), kwargs.get("world_size", -1)
    if type(rank) is not int or rank < 0:
        rank = os.environ.get("RANK", "")
    if type(world) is not int or world < 0:
        world = os.environ.get("WORLD_SIZE", "")
    details = [str(backend)] if isinstance(backend, str) else []
    if rank != "" and world != "":
        details.append(f"rank {rank} of {world}{_rendezvous_suffix(args, kwargs)}")
    return "joining the process group" + (f": {', '.join(details)}" if details else "")


def _rendezvous_suffix(args: Any, kwargs: Any) -> str:
    """Return the address at which the ranks meet: " at 127.0.0.1:29500"; empty if they meet in a file or a store."""
    init_method = kwargs.get("init_method", args[1] if len(args) > 1 else None)
    if kwargs.get("store") is None and init_method in (None, "env://"):
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        return f" at {address}:{port}" if address and port else ""
    scheme, _, address = init_method.partition("://") if type(init_method) is str else ("", "", "")
    return f" at {address}" if scheme == "tcp" else ""
