"""Records with values that no tracer writes."""

from __future__ import annotations

import json

from synthetic import device_event, host_event

from dpmon.record.wire import DEFINE_HEAD, DEFINE_TAG, EVENT_TAG

__all__ = ["DAMAGE", "spoiled"]

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
    "device": json.loads(device_event(1.0, 0)[1:]),
    "host": json.loads(host_event(1.0)[1:]),
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


def spoiled(damage: str) -> list[bytes]:
    """Yield each event with one damaged member, and each definition with one damaged part."""
    found = []
    for kind, data in EVENTS.items():
        for member in ("kind", *data):
            text = json.dumps({"kind": kind, **data, member: "HERE"}).replace('"HERE"', damage)
            found.append(bytes((EVENT_TAG,)) + text.encode())
        found.append(bytes((EVENT_TAG,)) + damage.encode())
    number = 1000
    for value in DEFINITIONS:
        parts = value if isinstance(value, dict) else range(4)
        for part in parts:
            number += 1
            changed = {**value, part: "HERE"} if isinstance(value, dict) else [list(value[0])]  # type: ignore[index]
            if isinstance(changed, list):
                changed[0][part] = "HERE"
            text = json.dumps(changed).replace('"HERE"', damage)
            found.append(DEFINE_HEAD.pack(DEFINE_TAG, number) + text.encode())
        number += 1
        found.append(DEFINE_HEAD.pack(DEFINE_TAG, number) + damage.encode())
    return found
