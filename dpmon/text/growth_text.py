"""What keeps memory alive, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dpmon.text.formatting import format_bytes, format_count_with_noun

_COUNTED = ("tensor", "list", "dict", "tuple")
"""Classes of items that readers know by name."""


def describe_growth(data: Mapping[str, Any]) -> list[str]:
    """Return a sentence for each name and each line of a `growth` record, then what was not looked at.

    "`kept` (train.py:6) keeps 296 graphs alive", "list `history` (train.py:14) holds 1,200 tensors (cuda:0)".
    """
    texts = [_describe_name(entry) for entry in data["names"]]
    texts += [f"{line['place']} keeps {format_bytes(line['bytes'])} on GPUs" for line in data["allocations"]]
    return [*texts, f"not looked at: {', '.join(data['omitted'])}"] if data["omitted"] else texts


def _describe_name(entry: Mapping[str, Any]) -> str:
    place = "" if entry.get("place") is None else f" ({entry['place']})"
    count, name, items = entry["count"], f"`{entry['name']}`{place}", entry.get("items", "")
    if entry["type"] == "graph":
        least = "at least " * entry["is_cut"]
        kept = f"{count:,} graphs" if count > 1 else f"a graph of {entry['length']:,} operations in a row"
        return f"{name} keeps {least}{kept} alive"
    device = f" ({entry['device']})" if entry["device"] else ""
    graphs = " and their graphs" * entry["graphs"]
    if items in _COUNTED:
        held = format_count_with_noun(count, items)
    else:
        held = f"{format_count_with_noun(count, 'object')} ({items})"
    return f"{entry['type']} {name} holds {held}{device}{graphs}"
