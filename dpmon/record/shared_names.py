"""The names, numbers and JSON that the training process and the readers of its spans share.

Standard library only, and little of it: the training process imports this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

MODES = ("", "dp", "single")
"""Modes by their number in a ring's header; 0: no mode."""
CALL_PHASES = ("scatter", "replicate", "parallel_apply", "gather")
DDP = "DistributedDataParallel"
FSDP = "fully_shard"
RANK_MODES = {DDP: "ddp", FSDP: "fsdp"}
"""Names of the mode in which ranks train one model together, by the `via` of their calls."""


class Untimed:
    """Reasons for an unknown device time, as numbers; dpmon.record.history_rows.UNTIMED has the texts."""

    NONE, LATE, CAPTURED, NO_EVENT, FAULT, ENDED, RAISED, ON_CPU, CROSSED, TOO_MANY, COPIES, SAMPLED = range(12)


class Unended:
    """Reasons for an unknown end of a collective, as numbers; dpmon.record.history_rows.UNENDED has the texts."""

    NONE, ON_DEVICE, LATE, ENDED, NEVER_REPORTED = range(5)


MORE = "\u2026"
"""As the path of a size, it stands for all tensors that are not listed; that size has no shape, dtype or bytes. At the
end of a name or text, it marks a cut."""
INNER_FRAMES, OUTER_FRAMES, MOST_THREADS = 100, 20, 64
"""The frames of a deep stack that are listed, and the threads of a process."""
MAX_NAME = 200
MAX_JSON = 60_000
"""Most characters of JSON in one line or event."""
_LENGTHS = (4096, 1024, 256, 64, 16)
"""Lengths (characters) to which texts are cut, tried in order until the JSON fits."""
_SECRET = r"(?i:token|key|secret|password)"
"""The end of a name whose value is a secret, as in --api-key, HF_TOKEN and PGPASSWORD."""
_OPTION = rf"(?:^|[\s\0])-[^\s\0=]*{_SECRET}(?:\0|\s+(?!\s))(?!-\D)"
"""An option and what separates it from its value: NUL between words, spaces within the word after `bash -c`."""
_VALUES = re.compile(rf"({_SECRET}=|{_OPTION})[^\0]*")


def rank_name(rank: int, node: str | None = None) -> str:
    """Return the name of a rank: "rank 11"; on one of several machines "rank 11 (gpu-3)"."""
    return f"rank {rank}{node_suffix(node)}"


def node_suffix(node: str | None) -> str:
    """Return what follows the name of a rank or process of a node: " (gpu-3)"; empty on one machine."""
    return f" ({node})" if node else ""


def shorten_name(text: str, most: int = MAX_NAME) -> str:
    """Return a name from the script, cut to `most` characters. A cut name ends with MORE.

    The result is a plain str: records must not keep the script's own subclass of str alive.
    """
    text = "".join((text,))
    return text if len(text) <= most else text[: most - 1] + MORE


def hide_secrets(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of a command with *** for secrets: the values of options and variables such as --api-key.

    *** stands for all text after the name, up to the end of the word.
    """
    return tuple(_VALUES.sub(r"\1***", "\0".join(words)).split("\0"))


def to_bounded_json(value: Any) -> bytes:
    """Return the value as JSON; long texts are cut if it would be longer than MAX_JSON."""
    packed = json.dumps(value, separators=(",", ":"))
    for most in _LENGTHS:
        if len(packed) <= MAX_JSON:
            break
        packed = json.dumps(_shorten_texts(value, most), separators=(",", ":"))
    return packed.encode()


def _shorten_texts(value: Any, most: int) -> Any:
    if isinstance(value, str):
        return shorten_name(value, most)
    if isinstance(value, Mapping):
        return {_shorten_texts(key, most): _shorten_texts(child, most) for key, child in value.items()}
    return [_shorten_texts(child, most) for child in value] if isinstance(value, (list, tuple)) else value
