"""Finds which GPUs CUDA_VISIBLE_DEVICES lets CUDA see, as far as another process can know.

The rules are those of the CUDA programming guide (Environment Variables). Entries are indices, or UUIDs that may be
shortened. Entries after the first invalid one are ignored. A repeated entry hides all GPUs. Indices follow CUDA's
order, which equals NVML's only under CUDA_DEVICE_ORDER=PCI_BUS_ID: by default, the fastest GPUs come first, by an
undocumented rule. So the GPU of an index may stay unknown here; then the training process reports it by UUID
(dpmon.gpu.sample). Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from dataclasses import dataclass

_NUMBER = re.compile(r"[+-]?[0-9]+")
MAX_ENTRIES = 1024


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU in NVML's order: its UUID, if known, and the bare UUIDs of the GPU and its MIG instances."""

    uuid: str | None
    uuids: Set[str] = frozenset()

    @property
    def divided(self) -> bool:
        """Whether it has MIG instances. CUDA then sees one instance, and an index does not show which one."""
        return len(self.uuids) > 1


def bare_uuid(uuid: str) -> str:
    """Return a UUID without its prefix: NVML writes GPU-8932f937-..., torch writes 8932f937-...."""
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()


def cuda_order(text: str | None, order: str | None, gpus: Sequence[Gpu]) -> list[int | None] | None:
    """Return NVML's index (None: unknown) for each GPU in CUDA's order; None if even their number is unknown.

    `text`, `order`: CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER; None if not set.
    """
    if text is not None and text.startswith(("GPU-", "MIG-")):
        return _by_uuid(text, gpus)
    numbers = list(range(len(gpus))) if text is None else _numbers(text, len(gpus))
    if not numbers:
        return []
    if any(gpu.divided for gpu in gpus):
        return None
    if order == "PCI_BUS_ID" or len(gpus) == 1:
        return list(numbers)
    return [None] * len(numbers)


def visible_gpus(text: str | None, order: str | None, gpus: Sequence[Gpu]) -> list[bool | None]:
    """Return for each GPU in NVML's order whether CUDA sees it; None if unknown."""
    found = cuda_order(text, order, gpus)
    if found is None:
        return [None] * len(gpus)
    if None not in found or len(found) >= len(gpus):
        return [index in found or None in found for index in range(len(gpus))]
    return [True if index in found else None for index in range(len(gpus))]


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


def _by_uuid(text: str, gpus: Sequence[Gpu]) -> list[int | None] | None:
    """Find the GPUs of full or shortened UUIDs; the prefix of the first entry selects GPUs or MIG instances."""
    entries: list[str] = []
    for entry in text.split(",")[:MAX_ENTRIES]:
        if entry in entries:
            return []
        if not entry.startswith(text[:4]):
            break
        entries.append(entry)
    if text.startswith("MIG-"):
        return _by_instance(entries, gpus)
    if any(gpu.uuid is None for gpu in gpus):
        return None
    found: list[int | None] = []
    for entry in entries:
        fitting = [i for i, gpu in enumerate(gpus) if gpu.uuid is not None and gpu.uuid.startswith(entry)]
        if len(fitting) != 1:  # no GPU, or several
            break
        if fitting[0] in found:
            return []
        found.append(fitting[0])
    return found


def _by_instance(entries: Sequence[str], gpus: Sequence[Gpu]) -> list[int | None] | None:
    """Find the GPU of the first instance. Only newer drivers show the further ones, so these stay unknown (None)."""
    fitting = _instances(entries[0], gpus)
    if len(fitting) == 1:
        return [fitting[0], None] if len(entries) > 1 else [fitting[0]]
    if fitting or any(gpu.divided for gpu in gpus):
        return []
    return None  # the instances may not have been read yet


def _instances(entry: str, gpus: Sequence[Gpu]) -> list[int]:
    """Return the GPUs with an instance of this name: MIG-<uuid>, or MIG-GPU-<uuid of the GPU>/<instance>/<instance>."""
    if entry.startswith("MIG-GPU-"):
        name = entry.removeprefix("MIG-").partition("/")[0]
        return [i for i, gpu in enumerate(gpus) if gpu.uuid is not None and gpu.uuid.startswith(name)]
    name = bare_uuid(entry)
    return [i for i, gpu in enumerate(gpus) if any(uuid.startswith(name) for uuid in gpu.uuids)]
