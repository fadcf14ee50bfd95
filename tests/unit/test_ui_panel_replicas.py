"""Panel 2 as strings: sizes, shares, idle devices, several calls."""

from __future__ import annotations

from dataclasses import replace

from dpmon.record.history_rows import Row
from dpmon.record.record_types import CallRow, Size, Step
from dpmon.record.span_format import Flag
from dpmon.text.formatting import format_duration
from dpmon.ui.panels import panel_replicas
from dpmon.ui.screen_data import ScreenData, View
from dpmon.ui.screen_painter import max_scroll, panel_slots
from dpmon.ui.styled_rows import plain_text
from support.history_builders import snapshot_of_rows
from support.record_builders import Training
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
        snapshot_of_rows([*training.begin(), *training.step(rows=10)]), training.now, RUN_INFO, is_command_alive=True
    )
    rows = rows_text(panel_replicas.render_panel(facts, 70, 12, STYLE))
    assert rows[6:9] == [f" {i}  cpu:{i}  idle: a batch of 10 makes 5 chunks" for i in (5, 6, 7)]


def test_virtual_replicas_name_what_they_share() -> None:
    for devices, shared in ((("cpu:0", "cpu:1"), "this machine's CPU"), (("cuda:0/0", "cuda:0/1"), "one GPU")):
        facts = screen_data_of(Training(devices=devices, virtual=True), 1)
        rows = rows_text(panel_replicas.render_panel(facts, 70, 9, STYLE))
        assert rows[3].rstrip() == f"virtual: the replicas share {shared}"


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
    assert "#  device" in text, "the names of the columns stay"
    assert " 20  cuda:20 " in text
    end = screen_text(replace(facts, view=View(first_rows={"replicas": 10_000})), 80, 24)
    assert "61 above" in end
    assert "63  cuda:63  idle" in end
    assert max_scroll("devices", facts, panel_slots(facts, 80, 24)["devices"], STYLE) == 0


def test_the_spread_has_a_scale_and_full_screen_says_what_the_times_are() -> None:
    facts = screen_data_of(Training(devices=[f"cpu:{i}" for i in range(2)]))
    (track,) = shown_process(facts).calls.values()
    times = [part.time for part in track.timed]
    slowest = max(time.quantile(0.95) or 0.0 for time in times)
    header = rows_text(panel_replicas.render_panel(facts, 90, 9, STYLE))[0]
    fastest = min(time.quantile(0.05) or 0.0 for time in times)
    low, *what, high = header.split()[-5:]
    assert (" ".join(what), high) == ("5 to 95%", format_duration(slowest, ""))
    assert low == format_duration(min(fastest, slowest * 0.7), ""), "the left edge"
    said = " ".join(rows_text(panel_replicas.render_full_screen(facts, 100, 40, STYLE)))
    assert f"the median of {times[0].count} calls" in said
    assert f" to {format_duration(slowest)}; apply, in panels 3 and 4, lasts until the slowest is done" in said


def several_calls() -> ScreenData:
    """Return steps with two calls of a critic, with different batch sizes, and a call of a generator."""
    real, generator = Training(root="Critic", batch=30), Training(root="Generator", batch=64, seed=3)
    fakes = Training(root="Critic", batch=12, seed=2)
    rows = real.begin()
    for number in range(40):
        calls: list[CallRow] = []
        for training in (real, fakes, generator):
            training.defined, training.now = real.defined, real.now
        steps = [training.step() for training in (real, fakes, generator)]
        for *definitions, step in steps:
            assert isinstance(step, Step)
            rows += definitions
            calls += [step.calls[0]._replace(call=3 * number + len(calls) + 1)]
        whole = steps[0][-1]
        assert isinstance(whole, Step)
        rows.append(whole._replace(calls=calls))
    return ScreenData(snapshot_of_rows(rows), real.now, RUN_INFO, is_command_alive=True)


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
        titles.append(plain_text(panel_replicas.panel_title(shown)[0]))
        rows = rows_text(panel_replicas.render_panel(shown, 70, 9, STYLE))
        assert rows[1].split()[6] == {0: "32", 1: "15", 2: "6", 3: "32"}[root]
    assert titles[0] == "2 Replicas · newest of 3 · Generator · DataParallel"
    assert titles[2] == "2 Replicas · 2 of 3 · call 2 of 2 per step · Critic · DataParallel"


def test_sizes_of_an_evaluation_say_that_they_are() -> None:
    """The last calls of a run are often those of an evaluation, with other sizes and times than the training."""
    training = Training(batch=30)
    rows = [*training.begin(), *training.run(50)]

    def shown(*more: Row) -> ScreenData:
        return screen_data_of(Training(), 1, state=snapshot_of_rows([*rows, *more]))

    def told(facts: ScreenData) -> str:
        return plain_text(panel_replicas.panel_title(facts)[0])

    assert told(shown()) == "2 Replicas · Model · DataParallel"
    training.batch, training.step_ns = 8, 20_000_000
    later = [row for _ in range(3) for row in training.step(evaluates=True)]
    evaluated = shown(*later)
    assert told(evaluated) == "2 Replicas · evaluation · Model · DataParallel"
    assert "evaluation" in screen_text(evaluated, 80, 24)
    table = rows_text(panel_replicas.render_panel(evaluated, 70, 9, STYLE))
    assert "[4, 5]" in table[1]
    assert float(table[1].split()[8]) > 2.0, "its own times, not the median of fifty steps of the training"
    *definitions, frozen = training.step()
    assert isinstance(frozen, Step)
    frozen = frozen._replace(calls=[call._replace(flags=call.flags & ~Flag.GRAD) for call in frozen.calls])
    assert "no gradients · Model" in told(shown(*later, *definitions, frozen))
    training.batch, training.step_ns = 30, 2_400_000
    again = shown(*later, *training.run(1))
    (track,) = again.state.processes[0].calls.values()
    assert [part.time.count for part in track.timed] == [51, 51], "the training's times are there again"
