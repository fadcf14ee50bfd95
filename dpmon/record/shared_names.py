"""The names, numbers and JSON that the training process and the readers of its spans share.

Standard library only, and as little of it as possible: the training process imports this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MODES = ("", "dp", "single")
"""Modes by their number in a ring's header; 0: no mode."""
CALL_PHASES = ("scatter", "replicate", "parallel_apply", "gather")
DDP = "DistributedDataParallel"
FSDP = "fully_shard"
RANK_MODES = {DDP: "ddp", FSDP: "fsdp"}
"""The mode in which ranks train one model together, by the `via` of their calls."""
ELSEWHERE = "elsewhere"
"""State of a run that another node supervises."""


class Untimed:
    """Reasons for an unknown device time, as numbers; dpmon.record.record_types.UNTIMED has the texts."""

    NONE, LATE, CAPTURED, NO_EVENT, FAULT, ENDED, ON_CPU, CROSSED, TOO_MANY, COPIES, SAMPLED = range(11)


MORE = "\u2026"
"""As the path of a size, it stands for all tensors that are not listed; that size has no shape, dtype or bytes. At the
end of a name or text, it shows that the text was truncated."""
INNER_FRAMES, OUTER_FRAMES, MAX_THREADS = 100, 20, 64
"""How many innermost and outermost frames of a deep stack are listed, and how many threads of a process."""
MAX_NAME = 200
"""Maximum length (characters) of a name from the script."""
MAX_JSON = 60_000
"""Maximum length (characters) of the JSON of one line or event."""
_TEXT_LENGTHS = (4096, 1024, 256, 64, 16)
"""Lengths (characters) to which texts are truncated, tried in order until the JSON fits."""
_NOT_SCRIPT = re.compile("^<|/(site-packages|dist-packages|dpmon/tracer)/|/lib(64)?/python3[.]|/torchinductor_")
"""Files of installed packages, of Python's library, of dpmon, and of generated code."""
_PACKAGE = re.compile(r"/(?:site|dist)-packages/(?!torch/|dpmon/)([^/]+)")
"""The package or module of an installed file; torch runs scripts (in a spawned process), but is no program itself."""
_COMMAND = re.compile(r"/bin/[^/.]+$")
"""A command of an installed package, which only calls a function in it."""
_SECRET_NAME = r"(?i:token|key|secret|password)"
"""The last part of a name whose value is a secret, as in --api-key, HF_TOKEN and PGPASSWORD."""
_SECRET_OPTION = rf"(?:^|[\s\0])-[^\s\0=]*{_SECRET_NAME}(?:\0|\s+(?!\s))(?!-\D)"
"""An option and the separator before its value: NUL between words, spaces within the word after `bash -c`."""
_SECRET_VALUES = re.compile(rf"({_SECRET_NAME}=|{_SECRET_OPTION})[^\0]*")


def rank_name(rank: int, node: str | None = None) -> str:
    """Return the name of a rank: "rank 11"; in a run on several nodes "rank 11 (gpu-3)"."""
    return f"rank {rank}{node_suffix(node)}"


def node_suffix(node: str | None) -> str:
    """Return the suffix that names the node of a rank or process: " (gpu-3)"; empty in a run on one machine."""
    return f" ({node})" if node else ""


def is_script_file(file: str) -> bool:
    """Return whether a file is neither part of an installed package nor a command of one."""
    return not (_NOT_SCRIPT.search(file) or _COMMAND.search(file))


def innermost_script_line(lines: Iterable[tuple[str, Any]]) -> str | None:
    """Return the last of some files and lines that is the script's, as "model.py:12"; None if there is none."""
    places = [f"{file.rpartition('/')[2]}:{line}" for file, line in lines if is_script_file(file)]
    return shorten_name(places[-1]) if places else None


def find_program_frame(files: Sequence[str]) -> int | None:
    """Return the index of the innermost frame of the program, given the files of a stack, innermost first.

    The program is the script. If no file of it is on the stack (`python -m PACKAGE`), or only a command that starts an
    installed package, the program is the outermost package.
    """
    packages = [(index, match[1]) for index, file in enumerate(files) if (match := _PACKAGE.search(file))]
    packaged = [index for index, name in packages if name == packages[-1][1]]
    commands = [index for index, file in enumerate(files) if not _NOT_SCRIPT.search(file)]
    scripts = [index for index in commands if is_script_file(files[index])]
    return next(iter(scripts or packaged or commands), None)


def shorten_name(text: str, max_chars: int = MAX_NAME) -> str:
    """Return a name from the script, truncated to `max_chars` characters. A truncated name ends with MORE.

    The result is a plain str: records must not keep the script's own subclass of str alive.
    """
    text = "".join((text,))
    return text if len(text) <= max_chars else text[: max_chars - 1] + MORE


def hide_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of a command with *** in place of secrets: the values of names such as --api-key.

    *** replaces all text after the name, up to the end of the word.
    """
    return tuple(_SECRET_VALUES.sub(r"\1***", "\0".join(words)).split("\0"))


def to_bounded_json(value: Any) -> bytes:
    """Return the value as JSON. Long texts are truncated if it would be longer than MAX_JSON."""
    text = json.dumps(value, separators=(",", ":"))
    for max_chars in _TEXT_LENGTHS:
        if len(text) <= MAX_JSON:
            break
        text = json.dumps(_shorten_texts(value, max_chars), separators=(",", ":"))
    return text.encode()


def _shorten_texts(value: Any, max_chars: int) -> Any:
    if isinstance(value, str):
        return shorten_name(value, max_chars)
    if isinstance(value, Mapping):
        return {_shorten_texts(key, max_chars): _shorten_texts(child, max_chars) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return [_shorten_texts(child, max_chars) for child in value]
    return value
