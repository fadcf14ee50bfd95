"""Compares runs for `dpmon compare`: reads them, says what differs, and makes the document and the JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dpmon.model.compare_gate import Judgement, Threshold, judge, status_of
from dpmon.model.compare_runs import (
    RUN_FIGURES,
    SIDES,
    STEP_FIGURES,
    ComparedFigure,
    ComparedRun,
    Figure,
    RunComparison,
    compare_runs,
    range_of,
    read_run,
    scope,
    sentence,
    signed,
)
from dpmon.model.compare_samples import Change
from dpmon.model.history import Bin
from dpmon.model.json_fields import fields_of, ms
from dpmon.model.run_facts import RunFacts
from dpmon.model.state import ProcessFacts
from dpmon.record.names import RANK_MODES
from dpmon.record.schema import STEP
from dpmon.report.collect import facts_of
from dpmon.report.document import Document, Paragraph, Section, Table
from dpmon.report.plots import plots_of_runs
from dpmon.run.condition import run_state
from dpmon.run.rundir import RunInfo, load_info
from dpmon.run.runs import short_name
from dpmon.store.opened import open_store
from dpmon.store.tally import NO_SAMPLES, OTHER_SIZES
from dpmon.text.quantities import UNKNOWN, count_of, group, percent

SCHEMA = 1
"""Version of the JSON."""
NOT_COMPARABLE = ("arguments", "mode", "ranks", "devices", "hardware", "samples a step")
"""Differences with which a gate does not compare runs."""
_MEASURED: Mapping[str, tuple[float, Callable[[float], str]]] = {
    "clock of the GPUs": (30.0, "{:.0f} MHz".format),
    "throttled": (0.05, percent),
    "processors busy with other work": (0.5, "{:.1f}".format),
}
"""Conditions that were measured: the smallest difference to show, and its words."""
_FINISHED = "finished"


@dataclass(frozen=True)
class ReadRun:
    """One run of a comparison."""

    run: ComparedRun
    info: RunInfo
    directory: Path
    set_up: Mapping[str, str | None]
    """What was run, and on what; None if unknown."""
    measured: Mapping[str, float]
    """The known ones of _MEASURED."""
    bins: Sequence[Bin]


def read(directory: Path) -> ReadRun:
    """Read one run. Raises RunError if it is not a run, HistoryError if its history is damaged."""
    info = load_info(directory)
    state, how = run_state(directory, info)
    with open_store(directory) as store:
        facts = facts_of(store, directory, how)
        run = read_run(short_name(info), facts)
        bins = [one for one in facts.stretches.bins if one.mode == run.mode and not one.evaluation]
        set_up = _set_up(info, facts, run, state)
        return ReadRun(run, info, directory, set_up, _measured(facts), bins)


def _set_up(info: RunInfo, facts: RunFacts, run: ComparedRun, state: str) -> dict[str, str | None]:
    process = next(iter(facts.announced.info.values()), ProcessFacts(0))
    by = facts.layouts.distributed
    began = next((one for one in facts.announced.changes if one.refused is None and one.mode == run.mode), None)
    names = [device.name or "GPU" for device in facts.devices if device.of_run]
    gpus = [f"{names.count(name)} × {name}" for name in dict.fromkeys(names)]
    usual = run.kinds.most_common(1)[0][0].batch if run.kinds else NO_SAMPLES
    return {
        "script": info.script,
        "arguments": " ".join(info.arguments) or "none",
        "directory": info.cwd,
        "mode": RANK_MODES[by] if by and run.mode == "single" else run.mode,
        "ranks": str(process.world or 1),
        "devices": None if began is None else " ".join(began.devices),
        "hardware": None if facts.host is None else ", ".join([*gpus, count_of(facts.host.cpus, "processor")]),
        "samples a step": {NO_SAMPLES: "unknown", OTHER_SIZES: "changing"}.get(usual, str(usual)),
        "machine": info.host or None,
        "Python": process.python,
        "torch": process.torch,
        "dpmon": info.versions.get("dpmon"),
        "state": state,
        "record": facts.store.damaged or "complete",
    }


def _measured(facts: RunFacts) -> dict[str, float]:
    own = [device for device in facts.devices if device.of_run]
    clocks = [clock for device in own for clock in device.clocks]
    seen = sum(device.throttle_samples for device in own)
    found = dict.fromkeys(_MEASURED, None) | {
        "clock of the GPUs": median(clocks) if clocks else None,
        "throttled": sum(device.throttled.total() for device in own) / seen if seen else None,
        "processors busy with other work": None if facts.host is None else facts.host.others,
    }
    return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class RunsCompared:
    """Two sides of runs, their differences, and what the thresholds say."""

    sides: tuple[Sequence[ReadRun], Sequence[ReadRun]]
    found: RunComparison
    differences: Sequence[tuple[str, str, str]]
    """What differs, and how it is on both sides."""
    judgements: Sequence[Judgement]

    @property
    def outcome(self) -> str:
        """The judgements, or without thresholds the result, in a sentence."""
        return "; ".join(one.text for one in self.judgements) or sentence(self.found)

    @property
    def status(self) -> int:
        """The exit status."""
        return status_of(self.judgements)


def compare(
    before: Sequence[ReadRun], after: Sequence[ReadRun], thresholds: Sequence[Threshold] = (), *, anyway: bool = False
) -> RunsCompared:
    """Compare two sides. `anyway`: thresholds also judge runs that are not comparable."""
    found = compare_runs([one.run for one in before], [one.run for one in after])
    differences = [*_differences(before, after)]
    unlike = [] if anyway else [f"{what} ({a}, {b})" for what, a, b in differences if what in NOT_COMPARABLE]
    judgements = [judge(found, threshold, unlike) for threshold in thresholds]
    return RunsCompared((before, after), found, differences, judgements)


def _differences(before: Sequence[ReadRun], after: Sequence[ReadRun]) -> list[tuple[str, str, str]]:
    found = []
    for what in before[0].set_up:
        sides = [dict.fromkeys(value for one in side if (value := one.set_up[what])) for side in (before, after)]
        if len(sides[0] | sides[1]) > 1 or (what == "state" and [*sides[0]] != [_FINISHED]):
            found.append((what, ", ".join(sides[0]) or UNKNOWN, ", ".join(sides[1]) or UNKNOWN))
    for what, (least, words) in _MEASURED.items():
        values = [[one.measured[what] for one in side if what in one.measured] for side in (before, after)]
        if all(values) and abs(median(values[0]) - median(values[1])) >= least:
            found.append((what, words(median(values[0])), words(median(values[1]))))
    return found


# ------------------------------------------------------------------------------------------------ document


def document(comparison: RunsCompared) -> Document:
    """The comparison as a document, for text and page."""
    found, (before, after) = comparison.found, comparison.sides
    scripts = dict.fromkeys(one.info.script for one in (*before, *after))
    names = [", ".join(one.run.name for one in side) for side in comparison.sides]
    differ = [Table(("", *SIDES), comparison.differences, flows=True)] if comparison.differences else []
    drawn = plots_of_runs(
        [(f"{SIDES[side]} {one.run.name}", side, one.bins) for side in (0, 1) for one in comparison.sides[side]]
    )
    sections = (
        Section("What differs", differ or [Paragraph("nothing that dpmon knows")]),
        Section("Time of a step", [*_table(found, STEP_FIGURES), *drawn], ", medians"),
        Section("The runs", _table(found, RUN_FIGURES)),
        Section("Ranks", _stragglers(comparison)),
    )
    facts = [*([sentence(found)] if comparison.judgements else []), *scope(found), *_notes(comparison)]
    there = [section for section in sections if section.parts]
    return Document(
        " against ".join(scripts), f"A: {names[0]}; B: {names[1]}", "compared", comparison.outcome, facts, there
    )


def _notes(comparison: RunsCompared) -> list[str]:
    before, after = comparison.sides
    counts = [group(sum(_steps(one, comparison.found) for one in side)) for side in comparison.sides]
    texts = [f"Compared steps: {counts[0]} in A, {counts[1]} in B."]
    interrupted = sum(one.run.interrupted_steps for one in (*before, *after))
    if interrupted:
        texts.append(f"{count_of(interrupted, 'step')} near a pause or a stall are left out.")
    times = [[one.info.started_unix for one in side] for side in comparison.sides]
    apart = max(times[0]) < min(times[1]) or max(times[1]) < min(times[0])
    if apart and not comparison.found.pair:
        texts.append(
            "All runs of one side came before those of the other, so a change of the machine's load in between looks"
            " like a difference: run them in turn (A B A B)."
        )
    return texts


def _steps(one: ReadRun, found: RunComparison) -> int:
    return 0 if found.kind is None else one.run.kinds[found.kind]


def _table(found: RunComparison, figures: Sequence[Figure]) -> list[Table]:
    rows = [_row(found.compared[figure.name]) for figure in figures if figure.name in found.compared]
    return [Table(("", *SIDES, "change", "95 % interval"), rows)] if rows else []


def _row(row: ComparedFigure) -> tuple[str, ...]:
    values = (row.figure.text(row.typical(side)) for side in (0, 1))
    told = row.change
    if told is None:
        return (row.figure.label, *values, UNKNOWN, row.missing or "")
    # As in benchstat, a tilde stands for a change that may be none.
    shown = signed(told.ratio) if told.sign or told.least is None else "~"
    return (row.figure.label, *values, shown, range_of(told))


def _stragglers(comparison: RunsCompared) -> list[Paragraph]:
    runs = [(side, one.run) for side, runs in zip(SIDES, comparison.sides, strict=True) for one in runs]
    if not any(run.straggler for _, run in runs):
        return []
    return [Paragraph(f"{side} {run.name}: {run.straggler or 'no rank stands out'}") for side, run in runs]


# ------------------------------------------------------------------------------------------------ JSON


def as_object(comparison: RunsCompared) -> dict[str, object]:
    """The comparison as an object; docs/json.md describes its members."""
    found = comparison.found
    step, told = found.compared.get(STEP), found.reason
    return {
        "schema": SCHEMA,
        "outcome": comparison.outcome,
        "status": comparison.status,
        "pair": found.pair,
        "missing": found.missing if found.missing or step is None else step.missing,
        "sides": [
            {"side": name, "spread": found.spread(side), "runs": [_run(one, found) for one in comparison.sides[side]]}
            for side, name in enumerate(SIDES)
        ],
        "differences": [{"what": what, "a": a, "b": b} for what, a, b in comparison.differences],
        "most_changed": None if told is None else {"phase": told[0], "a": ms(told[1]), "b": ms(told[2])},
        "figures": {name: _figure(row) for name, row in found.compared.items()},
        "gate": [
            {**one.threshold._asdict(), "outcome": one.outcome, "text": one.text} for one in comparison.judgements
        ],
    }


def _run(one: ReadRun, found: RunComparison) -> dict[str, object]:
    own = fields_of(one.run, "name", "interrupted_steps", "straggler")
    return {"id": one.info.id, "directory": str(one.directory), "steps": _steps(one, found), **own}


def _figure(row: ComparedFigure) -> dict[str, object]:
    bounds = {name: getattr(row.change, name, None) for name in Change._fields}
    return {**row.figure.as_fields(a=row.values[0], b=row.values[1]), **bounds, "missing": row.missing}
