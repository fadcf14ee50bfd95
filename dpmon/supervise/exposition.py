"""Prometheus' text format, written from its description (prometheus.io, "Exposition formats", 0.0.4)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

MAX_LABEL = 200

_Labels = Mapping[str, str]


def metric(name: str, kind: str, text: str, values: Iterable[tuple[_Labels, float]]) -> list[str]:
    """The lines of one metric, with its help and type; empty if it has no values."""
    samples = [f"dpmon_{name}{_labels(labels)} {_number(value)}" for labels, value in values]
    return [f"# HELP dpmon_{name} {text}", f"# TYPE dpmon_{name} {kind}", *samples] if samples else []


def histogram(
    name: str, text: str, bounds: Sequence[float], series: Iterable[tuple[_Labels, Sequence[int], float]]
) -> list[str]:
    """The lines of a histogram. `series`: labels, counts of each bucket and above the last bound, sum."""
    lines = []
    for labels, buckets, total in series:
        below = 0
        for bound, count in zip((*map(_number, bounds), "+Inf"), buckets, strict=True):
            below += count
            lines.append(f"dpmon_{name}_bucket{_labels({**labels, 'le': bound})} {below}")
        lines.append(f"dpmon_{name}_sum{_labels(labels)} {_number(total)}")
        lines.append(f"dpmon_{name}_count{_labels(labels)} {below}")
    return [f"# HELP dpmon_{name} {text}", f"# TYPE dpmon_{name} histogram", *lines] if lines else []


def _labels(labels: _Labels) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    # Control characters would only disturb a human reader. The format requires escapes for the other three.
    text = re.sub(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "?", value[:MAX_LABEL])
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
