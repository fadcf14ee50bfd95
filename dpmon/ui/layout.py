"""The place of each panel on a screen of a given size: open, or folded to its title."""

from __future__ import annotations

from typing import NamedTuple

MIN_WIDTH, MIN_HEIGHT = 40, 10
_WIDE = 110
_BATCH = 9
"""Rows that panel 3 needs for its figures, a history with its axis and the last step."""


class Slot(NamedTuple):
    """A panel's place in cells."""

    x: int
    y: int
    width: int
    height: int

    @property
    def folded(self) -> bool:
        """Whether the panel is one row with its title and main number."""
        return self.height == 1


def is_wide(width: int) -> bool:
    """Whether panels stand side by side."""
    return width >= _WIDE


def arrange(
    width: int, height: int, *, devices: int = 2, replicas: int = 2, batch: int = 11, zoom: str | None = None
) -> dict[str, Slot]:
    """Places of "status", "footer" and the panels, which fill the screen; only "small" if the screen is too small.

    `devices`, `replicas` and `batch`: rows that the content of these panels needs. Panels without a place are hidden.
    """
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return {"small": Slot(0, 0, width, height)}
    head = 2 if is_wide(width) else 3
    slots = {
        "status": Slot(0, 0, width, head),
        "footer": Slot(0, height - 1, width, 1),
    }
    body = height - head - 1
    if zoom is not None:
        slots[zoom] = Slot(0, head, width, body)
    elif is_wide(width):
        slots.update(_two_columns(width, head, body, devices, replicas, batch))
    else:
        slots.update(_one_column(width, head, body, devices, replicas))
    return slots


def _two_columns(width: int, top: int, body: int, devices: int, replicas: int, batch: int) -> dict[str, Slot]:
    half = width // 2
    if body < 24:
        upper = min(max(devices, replicas) + 3, body // 2)
        lower = body - upper
        return {
            "devices": Slot(0, top, half, upper),
            "replicas": Slot(half, top, width - half, upper),
            "batch": Slot(0, top + upper, half, lower),
            "output": Slot(half, top + upper, width - half, lower),
        }
    upper = min(max(devices + 2, replicas + 3, 5), max(body // 3, 7))
    middle = min(max(body * 3 // 8, min(batch + 2, body - upper - 11), 11), 24)
    lower = body - upper - middle
    return {
        "devices": Slot(0, top, half, upper),
        "replicas": Slot(half, top, width - half, upper),
        "batch": Slot(0, top + upper, width, middle),
        "compare": Slot(0, top + upper + middle, half, lower),
        "output": Slot(half, top + upper + middle, width - half, lower),
    }


def _one_column(width: int, top: int, body: int, devices: int, replicas: int) -> dict[str, Slot]:
    slots: dict[str, Slot] = {}
    y = top

    def put(panel: str, height: int) -> None:
        nonlocal y
        if height > 0:
            slots[panel] = Slot(0, y, width, height)
            y += height

    wished = min(max(replicas + 3, 5), 11)
    if body >= 27:
        tall = body >= 40
        put("devices", min(max(devices + 2, 4), 10 if tall else 6))
        put("replicas", wished if tall else min(wished, 8))
        put("batch", min(body // 4, 12) if tall else min(body // 3, 9))
        put("compare", 8 if tall else 0)
    elif body >= 18:
        half = width // 2
        slots["devices"] = Slot(0, y, half, 1)
        slots["compare"] = Slot(half, y, width - half, 1)
        y += 1
        put("replicas", max(min(wished, body - 1 - _BATCH - 4), 5))
        put("batch", min(max(top + body - y - 4, _BATCH), _BATCH + 1))
    elif body >= 11:
        put("replicas", min(wished, 5))
        put("batch", body - min(wished, 5) - 4)
    else:
        put("replicas", body // 2)
    put("output", top + body - y)
    return slots
