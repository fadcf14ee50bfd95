"""A report as lines of plain text, without colours or control characters."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dpmon.cleaning import clean
from dpmon.model.evidence import ModeFacts
from dpmon.model.finding import of_process
from dpmon.model.memory import reasons
from dpmon.model.numbers import UNKNOWN, duration
from dpmon.report import sentences, table_rows
from dpmon.report.collect import collect
from dpmon.report.story import Story
from dpmon.report.typeset import cut, more, sized_table, table, wrap, wrapped
from dpmon.run.lookup import short_name
from dpmon.text.quantities import clock, memory_of

NARROWEST = 40
MAX_ROWS = 40
MAX_WARNINGS = 8
MAX_CHANGES = 12
_FLOW, _STAGES = "received -> returned", "STAGES (parts of the model on several devices)"
_LABEL = 10
_BARS = "▁▂▃▄▅▆▇█"


def report_text(directory: Path, width: int = 80) -> list[str]:
    """The report of the run in `directory`, in lines of at most `width` cells. Raises RunError if it is not a run.

    Headings do not begin with a space.
    """
    return text_lines(collect(directory), width)


def text_lines(story: Story, width: int = 80) -> list[str]:
    """The report of `story` in at most `width` cells (NARROWEST at least)."""
    width = max(width, NARROWEST)
    sections = (
        _head(story, width),
        _findings(story, width),
        _time(story, width),
        _steps(story, width),
        *(_phases(title, mode, width) for title, mode in table_rows.phase_titles(story)),
        _compared(story, width),
        _sized(
            "REPLICAS", table_rows.replica_rows(story), ("calls", "median", "p95", table_rows.ON_DEVICE), _FLOW, width
        ),
        _sized(
            "RANKS",
            table_rows.rank_rows(story),
            ("steps", "calls", "step", "samples/s", table_rows.FORWARD_ON_DEVICE),
            _FLOW,
            width,
        ),
        _rank_times(story, width),
        _communication(story, width),
        _sized(
            _STAGES,
            table_rows.stage_rows(story),
            ("calls", "host time", table_rows.ON_DEVICE),
            f"parts: {_FLOW}",
            width,
        ),
        _devices(story, width),
        _memory(story, width),
        _changes(story, width),
        _pauses(story, width),
        _warnings(story, width),
        _output(story, width),
        _record(story, width),
    )
    lines: list[str] = []
    for section in sections:
        lines += [*([""] if lines and section else []), *section]
    return lines


# ------------------------------------------------------------------------------------------------ sections


def _head(story: Story, width: int) -> list[str]:
    lines = wrap(f"{story.info.script} ({short_name(story.info)}): {sentences.ended(story)}", width, "", "  ")
    return [*lines, *wrapped(sentences.facts(story), width)]


def _findings(story: Story, width: int) -> list[str]:
    lines = ["FINDINGS"]
    for number, finding in enumerate(story.findings, start=1):
        head = f"{number:>3} "
        lines += wrap(finding.text, width, head, "    ")
        lines += wrap(f"evidence: {finding.ground}", width, "    ", "      ")
        lines += wrap(f"try: {finding.advice}", width, "    ", "      ")
    return lines if story.findings else [*lines, *wrap(sentences.findings_note(story), width)]


def _steps(story: Story, width: int) -> list[str]:
    rows = table_rows.steps_table(story)
    return ["STEPS", *table(rows, width), *_over_time(story, width)] if rows else []


def _time(story: Story, width: int) -> list[str]:
    spent = sentences.time_spent(story)
    return ["TIME", *wrapped(spent, width)] if spent else []


def _over_time(story: Story, width: int) -> list[str]:
    """The mean time of a step over the run, as bars; empty if too little was recorded."""
    bins = [one for one in story.bins if not one.evaluation]
    if len(bins) < 2:
        return []
    first, last = bins[0].start_ns, max(one.end_ns for one in bins)
    cells = min(width - 4, 120, (last - first) // story.bin_ns)
    sums = [[0, 0] for _ in range(cells)]
    for one in bins:
        begin, end = ((at - first) * cells for at in (one.start_ns, one.end_ns))
        for at in range(begin // (last - first), max(-(-end // (last - first)), begin // (last - first) + 1)):
            sums[at][0] += one.wall_ns
            sums[at][1] += one.steps
    means = [wall / steps if steps else None for wall, steps in sums]
    top = max(mean for mean in means if mean is not None)
    bars = "".join(" " if mean is None else _BARS[min(int(mean / top * 8), 7)] for mean in means)
    name = sentences.of_whom(story)
    scale = (
        f"time of a step{name}, mean over each {duration((last - first) / cells)}; the highest bar is {duration(top)}"
    )
    scale += "; no bar where no step ran" if None in means else ""
    ends = clock(first) + clock(last).rjust(max(cells - 8, 9))
    return [*wrap(scale, width), "  " + bars, "  " + ends]


def _phases(title: str, mode: ModeFacts, width: int) -> list[str]:
    return [
        f"PHASES of a step, {clean(title)}",
        *table(table_rows.phase_table(mode), width),
        *wrapped(sentences.phase_notes(mode), width),
    ]


def _compared(story: Story, width: int) -> list[str]:
    found = story.evidence.compared
    return [] if found is None else ["DP AGAINST SINGLE", *wrapped(sentences.comparison(found), width)]


def _sized(title: str, rows: Sequence[table_rows.Row], names: Sequence[str], sizes: str, width: int) -> list[str]:
    """A table of replicas, ranks or stages."""
    if not rows:
        return []
    return [title, *sized_table(table_rows.row_table(rows, names, sizes, MAX_ROWS), width), *more(len(rows), MAX_ROWS)]


def _rank_times(story: Story, width: int) -> list[str]:
    rows = table_rows.rank_times_table(table_rows.rank_rows(story), MAX_ROWS)
    return ["RANKS: where a step goes", *table(rows, width), *more(len(story.ranks), MAX_ROWS)] if rows else []


def _communication(story: Story, width: int) -> list[str]:
    rows = table_rows.communication_rows(story)
    lines = ["COMMUNICATION"]
    for label, text in rows:
        lines += wrap(text, width, f"  {clean(label).ljust(_LABEL)}", " " * (_LABEL + 2))
    return lines if rows else []


def _devices(story: Story, width: int) -> list[str]:
    devices = story.evidence.devices
    if not devices:
        reason = story.gpu_absent
        return ["DEVICES", *wrap(f"no GPU: {reason}" if reason else "no GPU was seen", width), *_host(story, width)]
    rows: list[tuple[str, ...]] = [("", "use", "memory at most", "this run", "°C", "W", "")]
    rows += map(table_rows.device_cells, devices)
    lines = ["DEVICES", *table(rows, width)]
    left = " that are left" if story.pruned else ""
    left += ", without samples during pauses" if story.evidence.paused_ns else ""
    use = f"use (share of time in which a kernel ran): median of the samples{left}"
    lines += wrap(f"{use}; memory, °C and W: the highest", width)
    return [*lines, *_host(story, width)]


def _host(story: Story, width: int) -> list[str]:
    host = story.host
    if host is None:
        return []
    use = UNKNOWN if host.util_median is None else f"{host.util_median:.0f} %"
    many = "one sample" if host.samples == 1 else f"{host.samples:,} samples"
    text = f"host: processors {use} (median of {many}), memory"
    return wrap(f"{text} {memory_of(host.mem_used_max, host.mem_total)} at most", width)


def _memory(story: Story, width: int) -> list[str]:
    held = story.evidence.memory[:MAX_ROWS]
    if not held:
        return []
    lines = ["MEMORY as torch holds it", *table(table_rows.memory_table(held), width)]
    for one in held:
        for names, reason in reasons(one):
            lines += wrap(f"{names} of {one.device}: {reason}", width)
    return lines


def _changes(story: Story, width: int) -> list[str]:
    """Requested changes of mode; the head of the report names the initial mode."""
    asked = [change for change in story.changes if change.requested_by != "start"]
    if not asked:
        return []
    lines = ["MODE CHANGES"]
    for change in asked[:MAX_CHANGES]:
        step = (
            f"step {UNKNOWN if change.step is None else f'{change.step:,}'}{of_process(change.process, story.evidence)}"
        )
        what = f"to {change.mode}" if change.refused is None else f"refused: {change.refused}"
        lines += wrap(f"{clock(change.t_ns)}  {step}  {what}", width, "  ", "      ")
    return [*lines, *more(len(asked), MAX_CHANGES)]


def _pauses(story: Story, width: int) -> list[str]:
    rows = table_rows.pause_rows(story)
    if not rows:
        return []
    lines = ["PAUSES"]
    for row in rows[:MAX_CHANGES]:
        lines += wrap("  ".join(row), width, "  ", "      ")
    lost = sentences.pauses_lost(story)
    return [*lines, *more(len(rows), MAX_CHANGES), *(wrap(lost, width) if lost else ())]


def _warnings(story: Story, width: int) -> list[str]:
    if not story.warnings:
        return []
    lines = ["WARNINGS"]
    for text in story.warnings[:MAX_WARNINGS]:
        lines += wrap(text, width, "  ", "    ")
    return [*lines, *more(len(story.warnings), MAX_WARNINGS)]


def _output(story: Story, width: int) -> list[str]:
    if not story.last_output:
        return []
    return ["LAST OUTPUT", *(cut(f"  {clean(line)}", width) for line in story.last_output)]


def _record(story: Story, width: int) -> list[str]:
    name = short_name(story.info)
    return ["RECORD", *wrapped((f"{story.directory}", f"dpmon attach {name}   dpmon export {name}"), width)]
