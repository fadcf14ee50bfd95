"""Damaged records, and file types that a test puts where a regular file is expected."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dpmon.record.record_types import Event
from dpmon.record.safe_json import load_event
from support.record_builders import device_event, host_event

EVENTS: dict[str, dict[str, Any]] = {
    "process": {"process": 0, "pid": 1, "rank": 0, "world": 2, "t_s": 0.1, "devices": ["cpu:0"], "torch": "2.13",
                "gpus": [{"index": 0, "uuid": "GPU-0"}], "replicas": 2},
    "mode": {"process": 0, "t_s": 0.2, "mode": "dp", "step": 1, "reason": "x", "refused": None, "virtual": True},
    "memory": {"process": 0, "t_s": 0.3, "step": 1, "devices": [{"device": "cpu:0", "model_bytes": 1,
               "gradient_bytes": 1, "optimizer_bytes": 1, "rest_bytes": 1, "peak_bytes": 1}], "absent": {}},
    "pause": {"process": 0, "t_s": 0.4, "paused": True, "step": 1, "paused_s": 1.0, "reason": None, "refused": None},
    "input": {"process": None, "pid": 1, "t_s": 0.5, "waited_s": 2.0},
    "loader": {"process": 0, "t_s": 0.5, "loader": "D", "batches": 3, "workers": 2, "persistent": True, "iter_s": 0.1,
               "start": 2, "left_out": 0, "left_out_s": 0.0, "absent": {}},
    "warning": {"process": 0, "t_s": 0.6, "text": "x"},
    "oom": {"process": 0, "t_s": 0.7, "device": "cpu:0", "step": 1, "text": "x"},
    "exit": {"status": 0, "signal": None, "t_s": 1.0, "unknown": None, "cause": None},
    "device": dict(device_event(1.0, 0).data),
    "host": dict(host_event(1.0).data),
}  # fmt: skip
DEFINITIONS: tuple[object, ...] = (
    {"root": "M", "via": None, "virtual": True, "devices": ["cpu:0"], "absent": {}},
    {"device": "cpu:0", "parts": ["a"]},
    [["0", [4, 5], "float32", 80]],
)
DAMAGE = {
    "a great number": str(10**400),
    "infinity": "1e999",
    "no number": "NaN",
    "negative": "-7",
    "nested without end": "[" * 20_000 + "]" * 20_000,
    "half a character": '"\\ud800\\u001b[2J"',
    "an object": '{"a": {"b": [1, 2]}}',
    "a list": '[[], {}, "x", -1, null]',
    "a truth": "true",
    "long": '"' + "x" * 30_000 + '"',
}


def damaged_event_texts(damage: str) -> list[str]:
    """Return the JSON of each event with one damaged member."""
    found = []
    for kind, data in EVENTS.items():
        for member in ("kind", *data):
            found.append(json.dumps({"kind": kind, **data, member: "HERE"}).replace('"HERE"', damage))
        found.append(damage)
    return found


def damaged_definition_texts(damage: str) -> list[str]:
    """Return the JSON of each definition with one damaged part."""
    found = []
    for value in DEFINITIONS:
        for part in value if isinstance(value, dict) else range(4):
            changed = {**value, part: "HERE"} if isinstance(value, dict) else [list(value[0])]  # type: ignore[index]
            if isinstance(changed, list):
                changed[0][part] = "HERE"
            found.append(json.dumps(changed).replace('"HERE"', damage))
        found.append(damage)
    return found


def damaged_lines(damage: str) -> bytes:
    """Return lines of a training process with all of them."""
    lines = [f'{{"define": {n}, "value": {text}}}' for n, text in enumerate(damaged_definition_texts(damage), 1000)]
    return "".join(f"{line}\n" for line in [*damaged_event_texts(damage), *lines]).encode()


def damaged_events(damage: str) -> list[Event]:
    """Return the events that can be read as JSON."""
    found = []
    for text in damaged_event_texts(damage):
        with suppress(ValueError):
            found.append(Event(*load_event(text)))
    return found


# ------------------------------------------------------------------------------------------------ file types


def _device(path: Path) -> None:
    # A new device node, so that a faulty check does not replace the machine's null device.
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        os.close(os.open(path, os.O_WRONLY))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")


def _block_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFBLK | 0o600, os.makedev(240, 0))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")


def _link(path: Path) -> None:
    target = path.with_name("precious")
    target.write_text("precious")
    path.symlink_to(target)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = os.getcwd()
        os.chdir(path.parent)  # the path of a socket may have at most 107 bytes
        try:
            made.bind(path.name)
        finally:
            os.chdir(here)


FILE_TYPES: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a symbolic link": _link,
    "a device": _device,
    "a block device": _block_device,
    "a directory": Path.mkdir,
    "a socket": _socket,
}
"""The function that makes each type, by name."""


def create_file_of_type(kind: str, path: Path) -> None:
    """Replace `path` by one of FILE_TYPES."""
    path.unlink(missing_ok=True)
    FILE_TYPES[kind](path)


def file_identity(path: Path) -> tuple[int, ...]:
    """Return values that change if another file replaces the file."""
    info = os.lstat(path)
    return info.st_dev, info.st_ino, info.st_mode, info.st_rdev


def fill_disk(directory: Path) -> None:
    """Fill the disk of a directory by a file `hog`."""
    with open(directory / "hog", "wb", buffering=0) as hog, contextlib.suppress(OSError):
        while True:
            hog.write(bytes(4096))
