"""Panel 2 as strings: sizes, shares, idle devices, several calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dpmon.record.record_types import Call, Event, Record, Size, Step
from dpmon.text.formatting import format_duration
from dpmon.ui.panels import panel_replicas
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.screen_painter import max_scroll, panel_slots
from dpmon.ui.styled_rows import plain_text
from support.history_builders import snapshot_of_records
from support.record_builders import Training, records_of_rows
from support.screen_states import (
    RUN_INFO,
    STYLE,
    rows_text,
    screen_data_of,
    screen_text,
    shown_process,
    situations,
    with_call,
)


def test_idle_devices_are_shown_idle_with_the_reason() -> None:
    training = Training(devices=[f"cpu:{i}" for i in range(8)])
    facts = ScreenData(
        snapshot_of_records([*training.begin(), *training.step(rows=10)]), training.now, RUN_INFO, is_command_alive=True
    )
    rows = rows_text(panel_replicas.render_panel(facts, 70, 12, STYLE))
    assert rows[6:9] == [f" {i} cpu:{i}  idle: a batch of 10 makes 5 chunks" for i in (5, 6, 7)]


def test_a_call_that_was_interrupted_says_nothing_about_idle_devices() -> None:
    facts = screen_data_of(Training(devices=("cpu:0", "cpu:1")), 1)
    (track,) = shown_process(facts).calls.values()
    idle = rows_text(panel_replicas.render_panel(with_call(facts, replicas=track.last.replicas[:1]), 70, 9, STYLE))
    assert idle[2].split(maxsplit=2) == ["1", "cpu:1", "idle: a batch of 30 makes 1 chunk"]
    facts = with_call(facts, replicas=track.last.replicas[:1], failed=True)
    rows = rows_text(panel_replicas.render_panel(facts, 70, 9, STYLE))
    assert rows[2].split(maxsplit=2) == ["1", "cpu:1", "no output: an exception ended the call"]


def test_virtual_replicas_name_what_they_share() -> None:
    for devices, shared in ((("cpu:0", "cpu:1"), "this machine's CPU"), (("cuda:0/0", "cuda:0/1"), "one GPU")):
        facts = screen_data_of(Training(devices=devices, virtual=True), 1)
        rows = rows_text(panel_replicas.render_panel(facts, 70, 9, STYLE))
        assert rows[3].rstrip() == f"virtual: the replicas share {shared}"


def test_a_replica_whose_sizes_were_not_seen_has_dashes() -> None:
    facts = screen_data_of(Training(), 1)
    (track,) = shown_process(facts).calls.values()
    blind = tuple(r._replace(inputs=None, outputs=None) for r in track.last.replicas)
    facts = with_call(facts, replicas=blind, absent={"sizes": "not seen by a forward hook"})
    rows = rows_text(panel_replicas.render_panel(facts, 70, 9, STYLE))
    assert rows[1].split()[:5] == ["0", "cpu:0", "–", "–", "–"]
    assert "not seen by a forward hook" in rows


def test_several_inputs_are_counted_and_listed_when_zoomed() -> None:
    facts = screen_data_of(Training(), 1)
    (track,) = shown_process(facts).calls.values()
    sizes = (Size("0", (8, 5), "float32", 160), Size("1.mask", (8,), "bool", 8), Size("labels", (8,), "int64", 64))
    facts = with_call(facts, replicas=tuple(r._replace(inputs=sizes) for r in track.last.replicas))
    assert any("[8, 5] +2" in row for row in rows_text(panel_replicas.render_panel(facts, 70, 9, STYLE)))
    zoomed = rows_text(panel_replicas.render_full_screen(facts, 100, 40, STYLE))
    assert "   in   1.mask [8] bool 8 B" in zoomed
    assert "   in   labels [8] int64 64 B" in zoomed


def test_more_replicas_than_rows_are_announced_and_can_be_scrolled() -> None:
    facts = situations()["many replicas"]
    assert "61 more ↓" in screen_text(facts, 80, 24)
    slot = panel_slots(facts, 80, 24)["replicas"]
    room = max_scroll("replicas", facts, slot, STYLE)
    assert room == 61
    scrolled = replace(facts, view=View(first_rows={"replicas": 20}))
    text = screen_text(scrolled, 80, 24)
    assert "20 above, 41 more ↓" in text
    assert "# device" in text, "the names of the columns stay"
    assert " 20 cuda:20 " in text
    end = screen_text(replace(facts, view=View(first_rows={"replicas": 10_000})), 80, 24)
    assert "61 above" in end
    assert "63 cuda:63  idle" in end
    assert max_scroll("devices", facts, panel_slots(facts, 80, 24)["devices"], STYLE) == 0


def scaled(header: str) -> bool:
    """Return whether a scale is above the whiskers, or a title if there is no room for the scale."""
    return "spread" in header or "5 to 95%" in header or header.split()[-1][-2:] in ("ns", "µs", "ms")


def test_the_share_and_the_spread_have_room_at_120_columns() -> None:
    facts = screen_data_of(Training(devices=[f"cpu:{i}" for i in range(4)], batch=26))
    rows = rows_text(panel_replicas.render_panel(facts, 56, 9, STYLE))
    assert [row.split()[6] for row in rows[1:5]] == ["7", "7", "7", "5"]
    assert all("●" in row and "╶" in row for row in rows[1:5])
    assert scaled(rows[0])
    for width in range(40, 120):
        header, row, *_ = rows_text(panel_replicas.render_panel(facts, width, 9, STYLE))
        assert ("━" in row) == ("share" in header), "no column without its heading"
        assert ("╶" in row) == scaled(header)


def test_the_spread_has_a_scale_and_full_screen_says_what_the_times_are() -> None:
    facts = screen_data_of(Training(devices=[f"cpu:{i}" for i in range(2)]))
    (track,) = shown_process(facts).calls.values()
    times = [spread for spread in track.times if spread is not None]
    slowest = max(spread.high for spread in times)
    header = rows_text(panel_replicas.render_panel(facts, 90, 9, STYLE))[0]
    fastest = min(spread.low for spread in times)
    low, *what, high = header.split()[-5:]
    assert (" ".join(what), high) == ("5 to 95%", format_duration(slowest, ""))
    assert low == format_duration(min(fastest, slowest * 0.7), ""), "the left edge"
    said = " ".join(rows_text(panel_replicas.render_full_screen(facts, 100, 40, STYLE)))
    assert f"the median of {times[0].calls} calls" in said
    assert f" to {format_duration(slowest)}; apply, in panels 3 and 4, lasts until the slowest is done" in said


def several_calls(more: Sequence[Record] = ()) -> ScreenData:
    """Return steps with two calls of a critic, with different batch sizes, and a call of a generator."""
    steps = 40
    real, generator = Training(root="Critic", batch=30), Training(root="Generator", batch=64, seed=3)
    fakes = Training(root="Critic", batch=12, seed=2)
    for training in (real, fakes, generator):
        training.now = real.now
    records = [records_of_rows([*real.begin()])]
    streams = [records_of_rows(each.run(steps)) for each in (real, fakes, generator)]
    by_step: list[Any] = []
    for number in range(steps):
        calls = [next(r for r in stream if isinstance(r, Call) and r.step == number + 1) for stream in streams]
        by_step += [replace(call, call=3 * number + place) for place, call in enumerate(calls, start=1)]
        by_step.append(next(r for r in streams[0] if not isinstance(r, (Call, Event)) and r.step == number + 1))
    return ScreenData(snapshot_of_records([*records[0], *by_step, *more]), real.now, RUN_INFO, is_command_alive=True)


def test_several_calls_of_a_step_and_several_roots_can_be_chosen() -> None:
    facts = several_calls()
    picked = panel_replicas.list_choices(facts.process)
    assert [(c.track.last.root, c.nth, c.per_step, c.track.last.rows) for c in picked] == [
        ("Critic", 1, 2, 30),
        ("Critic", 2, 2, 12),
        ("Generator", 1, 1, 64),
    ]
    titles = []
    for root in range(4):
        shown = replace(facts, view=View(call_choice=root))
        titles.append(plain_text(panel_replicas.panel_title(shown, STYLE)[0]))
        rows = rows_text(panel_replicas.render_panel(shown, 70, 9, STYLE))
        assert rows[1].split()[6] == {0: "32", 1: "15", 2: "6", 3: "32"}[root]
    assert titles[0] == "2 Replicas · newest of 3 · Generator · DataParallel"
    assert titles[2] == "2 Replicas · 2 of 3 · call 2 of 2 per step · Critic · DataParallel"


def test_a_call_that_steps_no_longer_make_cannot_be_chosen_any_more() -> None:
    last = next(call for call in reversed(shown_process(several_calls()).last_calls) if call.root == "Critic")
    more = [replace(last, step=100 + number, call=1000 + number) for number in range(100)]
    assert [c.per_step for c in panel_replicas.list_choices(several_calls(more).process)] == [1, 1]


def test_a_call_with_no_replicas_says_so() -> None:
    call = Call(0, None, 1, 1, "Net", None, "single", False, True, True, False, 0, 10, ("cpu",), {}, (), None, None)
    state = snapshot_of_records([call])
    rows = rows_text(panel_replicas.render_panel(ScreenData(state, 0, RUN_INFO), 60, 6, STYLE))
    assert "the replicas of this call were not seen" in rows


def without_training(record: Record) -> Record:
    if isinstance(record, Call):
        return replace(record, training=False, grad=False)
    if isinstance(record, Step):
        kept = {name: took for name, took in record.phases.items() if name not in ("backward", "optimizer")}
        return record._replace(phases=kept)
    return record


def test_sizes_of_an_evaluation_say_that_they_are() -> None:
    """The last calls of a run are often those of an evaluation, with other sizes and times than the training."""
    training = Training(batch=30)
    records = records_of_rows([*training.begin(), *training.run(50)])
    before = screen_data_of(Training(), 1, state=snapshot_of_records(records))

    def more(steps: int) -> list[Record]:
        training.defined.clear()  # for a reader of its own
        return records_of_rows(training.run(steps))

    def told(facts: ScreenData) -> str:
        return plain_text(panel_replicas.panel_title(facts, STYLE)[0])

    assert told(before) == "2 Replicas · Model · DataParallel"
    training.batch, training.step_ns = 8, 20_000_000
    later = [without_training(each) for each in more(3)]
    evaluated = screen_data_of(Training(), 1, state=snapshot_of_records(records + later))
    assert told(evaluated) == "2 Replicas · evaluation · Model · DataParallel"
    assert "evaluation" in screen_text(evaluated, 80, 24)
    rows = rows_text(panel_replicas.render_panel(evaluated, 70, 9, STYLE))
    assert "[4, 5]" in rows[1]
    assert float(rows[1].split()[8]) > 2.0, "its own times, not the median of fifty steps of the training"
    frozen = [replace(each, grad=False) if isinstance(each, Call) else each for each in more(1)]
    assert "no gradients · Model" in told(screen_data_of(Training(), 1, state=snapshot_of_records(records + frozen)))
    training.batch, training.step_ns = 30, 2_400_000
    again = screen_data_of(Training(), 1, state=snapshot_of_records(records + later + more(1)))
    (track,) = again.state.processes[0].calls.values()
    assert [spread.calls for spread in track.times if spread] == [51, 51], "the training's times are there again"
