"""Records with values that no tracer writes."""

from __future__ import annotations

import json
from contextlib import suppress

from synthetic import device_event, host_event

from dpmon.record.record_types import Event
from dpmon.record.safe_json import load_event

EVENTS: dict[str, dict[str, object]] = {
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
    "nested": "[" * 900 + "]" * 900,
    "nested without end": "[" * 20_000 + "]" * 20_000,
    "half a character": '"\\ud800\\u001b[2J"',
    "an object": '{"a": {"b": [1, 2]}}',
    "a list": '[[], {}, "x", -1, null]',
    "a truth": "true",
    "long": '"' + "x" * 30_000 + '"',
}


def spoiled_events(damage: str) -> list[str]:
    """Return the JSON of each event with one damaged member."""
    found = []
    for kind, data in EVENTS.items():
        for member in ("kind", *data):
            found.append(json.dumps({"kind": kind, **data, member: "HERE"}).replace('"HERE"', damage))
        found.append(damage)
    return found


def spoiled_definitions(damage: str) -> list[str]:
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


def spoiled_lines(damage: str) -> bytes:
    """Return lines of a training process with all of them."""
    lines = [f'{{"define": {n}, "value": {text}}}' for n, text in enumerate(spoiled_definitions(damage), 1000)]
    return "".join(f"{line}\n" for line in [*spoiled_events(damage), *lines]).encode()


def spoiled(damage: str) -> list[Event]:
    """Return the events that can be read as JSON."""
    found = []
    for text in spoiled_events(damage):
        with suppress(ValueError):
            found.append(Event(*load_event(text)))
    return found
