"""What an exception says, in one line."""

from __future__ import annotations

__all__ = ["in_a_line"]

MAX_CHARACTERS = 300


def in_a_line(error: Exception | str) -> str:
    """Its kind and the first line of what it says; of one that torch retells with its traceback, those of that one.

    torch's errors say first what has happened and then where to look further; parallel_apply raises a replica's error
    again, under "Caught ...", with the whole traceback in its text.
    """
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    indented = [number for number, line in enumerate(lines) if line.startswith(" ")]
    retold = lines[0].startswith("Caught ") and bool(indented)
    text = lines[min(indented[-1] + 1, len(lines) - 1) if retold else 0]
    if retold and text.partition(": ")[0].rpartition(".")[2] == kind:
        return text[:MAX_CHARACTERS]
    return f"{kind}: {text}"[:MAX_CHARACTERS]
