"""Finds which GPUs CUDA_VISIBLE_DEVICES lets CUDA see, as far as another process can know.

The rules are those of the CUDA programming guide (Environment Variables). Entries are indices, or UUIDs that may be
shortened. Entries after the first invalid one are ignored. A repeated entry hides all GPUs. Indices follow CUDA's
order, which equals NVML's only under CUDA_DEVICE_ORDER=PCI_BUS_ID: by default, the fastest GPUs come first, by an
undocumented rule. So the GPU of an index may stay unknown here; then the training process reports it by UUID
(dpmon.gpu.sample). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"[+-]?[0-9]+")
MAX_ENTRIES = 1024


def bare_uuid(uuid: str) -> str:
    """Return a UUID without its prefix: NVML writes GPU-8932f937-..., torch writes 8932f937-...."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def cuda_order(
    text: str | None, order: str | None, uuids: Sequence[str | None], divided: bool = False
) -> list[int] | list[None] | None:
    """Return NVML's index (None: unknown) for each GPU in CUDA's order; None if even their number is unknown.

    `text`, `order`: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None if not set. `uuids`: of the GPUs in NVML's order;
    None if unknown. `divided`: whether a GPU has MIG instances. CUDA then sees one instance, and an index does not show
    which one.
    """
    if text is not None and text.startswith("GPU-"):
        return _by_uuid(text, uuids)
    if text is not None and text.startswith("MIG-"):
        return None
    numbers = list(range(len(uuids))) if text is None else _numbers(text, len(uuids))
    if not numbers:
        return []
    if divided:
        return None
    return numbers if order == "PCI_BUS_ID" or len(uuids) == 1 else [None] * len(numbers)


def visible_gpus(
    text: str | None, order: str | None, uuids: Sequence[str | None], divided: bool = False
) -> list[bool | None]:
    """Return for each GPU in NVML's order whether CUDA sees it; None if unknown. Parameters as of `cuda_order`."""
    found = cuda_order(text, order, uuids, divided)
    if found is None or (None in found and len(found) < len(uuids)):
        return [None] * len(uuids)
    return [index in found or None in found for index in range(len(uuids))]


def _numbers(text: str, count: int) -> list[int]:
    """Parse indices as C's strtol does (`1abc` is 1), up to the first invalid one; empty if an index is repeated."""
    found: list[int] = []
    for entry in text.split(",")[:MAX_ENTRIES]:
        match = _NUMBER.match(entry.strip())
        number = int(match.group()) if match and len(match.group()) < 10 else -1
        if number in found:
            return []
        if number < 0:
            break
        found.append(number)
    beyond = next((i for i, number in enumerate(found) if number >= count), len(found))
    return found[:beyond]


def _by_uuid(text: str, uuids: Sequence[str | None]) -> list[int] | None:
    """Find the GPUs of full or shortened UUIDs; None if a UUID is unknown."""
    entries: list[str] = []
    for entry in text.split(",")[:MAX_ENTRIES]:
        if entry in entries:
            return []
        if not entry.startswith("GPU-"):
            break
        entries.append(entry)
    if None in uuids:
        return None
    found: list[int] = []
    for entry in entries:
        fitting = [i for i, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
        if len(fitting) != 1:  # no GPU, or several
            break
        if fitting[0] in found:
            return []
        found.append(fitting[0])
    return found
