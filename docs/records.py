"""The reference of all records in Markdown: `python docs/records.py > docs/records.md`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpmon.record.record_specs import RECORDS, FieldSpec, RecordSpec
from dpmon.record.schema import PHASES, QUANTITIES, SPAN_PHASES

_HEAD = """\
# Records

This page lists every kind of record that `dpmon export` writes, with its fields. In JSON lines, each record is an
object. In CSV, each kind is a table. [Export](reports-and-exports.md#export) describes the command, and
[Tracing](tracing.md) describes how dpmon gets the values. The page is generated from `dpmon/record/record_specs.py`
with `python docs/records.py > docs/records.md`.

- Every object has a field `kind`. An unknown field is null, and `absent` has the reason.
- A field that ends in `_ms` is in milliseconds, and a time that ends in `_s` in seconds. `t_s` and `start_s` count from
  the run's start, on the monotonic clock.
- The columns of CSV are the same in every run. An empty cell means that a value is unknown or a phase did not run. A
  list or an object is JSON in one cell.
- The column "metric" names what `--metrics` writes: a gauge for a field, a counter for a quantity of a step.
- Earlier development versions also had these fields: `queue_ms`, `alg_bytes_s` and `bus_bytes_s` of `collective`;
  `left_out` and `left_out_s` of `loader`; `shared_bytes`, `shared_files` and `peak_after_step` of `memory`.
"""
_PHASES = """\
## Phases of a step

The phases of a step add up to its `wall_ms`. The phases of its calls lie within `forward`. A phase that did not run is
missing. The metrics are `dpmon_step_phase_seconds_total` and `dpmon_call_phase_seconds_total`, with the label `phase`.
"""
_QUANTITIES = """\
## Quantities of a step
"""


def reference() -> str:
    """Return the text of docs/records.md."""
    parts = [_HEAD, *(_kind(kind) for kind in RECORDS.values()), _PHASES + "\n" + _phases(), _of_quantities()]
    return "\n".join(parts)


def _kind(kind: RecordSpec) -> str:
    head = "field", "type", "unit", "meaning", "in CSV", "metric"
    shown = 6 if any(each.metric for each in kind.fields) else 5
    rows = [_field(each)[:shown] for each in kind.fields]
    return f"## {kind.name}\n\n{kind.meaning[0].upper()}{kind.meaning[1:]}.\n\n{_table(head[:shown], rows)}"


def _field(field: FieldSpec) -> tuple[str, ...]:
    columns = "yes" if field.csv_columns == (field.name,) else ", ".join(f"`{name}`" for name in field.csv_columns)
    metric = f"`dpmon_{field.metric}`" if field.metric else ""
    return f"`{field.name}`", field.type, field.unit, field.meaning, columns or "no column", metric


def _phases() -> str:
    rows = [
        (
            f"`{phase.name}`",
            phase.display_name,
            phase.letter,
            "calls" if phase.of_call else "step",
            phase.meaning,
            "yes" if phase.of_call or phase.name in SPAN_PHASES else "no",
        )
        for phase in PHASES
    ]
    return _table(("phase", "on the screen", "letter", "phase of", "meaning", "timed on GPUs"), rows)


def _of_quantities() -> str:
    rows = [(f"`{each.name}`", each.unit, each.meaning, f"`dpmon_{each.metric}`", each.absent) for each in QUANTITIES]
    return _QUANTITIES + "\n" + _table(("quantity", "unit", "meaning", "metric", "why it may be missing"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


if __name__ == "__main__":
    print(reference(), end="")
