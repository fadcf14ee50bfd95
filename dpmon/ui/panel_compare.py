"""Panel 4: dp and single side by side, as far as both were seen. Figures only, no verdict."""

from __future__ import annotations

from collections.abc import Mapping

from dpmon.model.state import PHASES
from dpmon.model.stats import Summary
from dpmon.ui.format import UNKNOWN, compact, group, ms
from dpmon.ui.rows import Row, right
from dpmon.ui.scene import Scene

__all__ = ["compare", "title"]

_MODES = ("single", "dp")


def title(seen: Mapping[str, Summary], folded: bool) -> tuple[Row, Row]:
    """The panel's title, and the numbers that count."""
    corner: Row = []
    for mode, numbers in ((mode, seen[mode]) for mode in _MODES if mode in seen):
        corner += [("  " if corner else "", ""), (mode, f"mode.{mode}"), (right(ms(numbers.median_ns), 8), "")]
    # Folded there is room for the figures or for the name, and the figures name the modes.
    return [("4 Step" if folded and corner else "4 dp against single", "title")], corner


def compare(scene: Scene, width: int, height: int, seen: Mapping[str, Summary]) -> list[Row]:
    """The panel's rows, inside its frame."""
    if not seen:
        return [[("no step was traced" if scene.over else "no step has ended yet", "dim")]]
    cell = min((width - 14) // 2, 14)

    def line(word: str, values: dict[str, str], style: str = "") -> Row:
        return [(word.ljust(14), "dim"), *((right(values.get(mode, UNKNOWN), cell), style) for mode in _MODES)]

    rows: list[Row] = [
        [(" " * 14, ""), *((right(mode, cell), f"mode.{mode}") for mode in _MODES)],
        line("step median", {m: ms(s.median_ns) for m, s in seen.items()}, "bold"),
        line("step p95", {m: ms(s.p95_ns) for m, s in seen.items()}),
        line("samples/s", {m: compact(s.samples_per_s) for m, s in seen.items()}, "bold"),
        line("over steps", {m: group(s.steps) for m, s in seen.items()}, "dim"),
    ]
    if height >= len(rows) + len(PHASES) + 2:
        rows.append([("median of", "dim")])
        for index, name in enumerate(PHASES):
            rows.append(line("  " + name, {m: ms(s.phases[index].median_ns) for m, s in seen.items()}))
    missing = [mode for mode in _MODES if mode not in seen]
    if missing and scene.can_toggle and not scene.over:
        rows.append([(f"{missing[0]} was not seen yet: ", "dim"), ("d", "key"), (" switches the running job", "dim")])
    elif missing:
        rows.append([(f"{missing[0]} was not seen", "dim")])
    else:
        rows.append([("each over its newest steps; samples per second of step time", "dim")])
    return rows
