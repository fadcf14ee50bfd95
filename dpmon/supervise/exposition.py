"""Prometheus' text format, written from its description (prometheus.io, "Exposition formats", 0.0.4)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dpmon.cleaning import harmless

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
    return harmless(value[:MAX_LABEL]).replace("\\", "\\\\").replace('"', '\\"')  # as the format requires


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))
