"""Panel 3 as strings: the phases, their figures and reasons, the history as columns."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from dpmon.model.run_process import PHASES
from dpmon.model.step_history import Column
from dpmon.record.history_rows import Row
from dpmon.record.shared_names import Untimed
from dpmon.store.tally import Tally
from dpmon.ui.chart import BLOCKS, stacked_columns
from dpmon.ui.panels import panel_batch
from dpmon.ui.panels.panel_batch import missing_phase_notes
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import plain_text
from dpmon.ui.terminal_style import TerminalStyle
from support.history_builders import snapshot_of_rows
from support.record_builders import GPUS, Training, with_device_times
from support.screen_states import (
    MONO_ASCII,
    RUN_INFO,
    STYLE,
    exit_info_of,
    rows_text,
    screen_data_of,
    screen_text,
    shown_process,
    with_call,
)

MONO = TerminalStyle("mono")


def alternating(long_ns: int = 40_000_000, every: int = 4, steps: int = 400) -> ScreenData:
    """Return steps with a loader that delivers several batches together: one step waits, the others do not."""
    training = Training(step_ns=1_000_000)
    payloads = training.begin()
    shares = training.shares["dp"]
    for index in range(steps):
        shares["data"] = long_ns // 10_000 if index % every == 0 else 3
        payloads += training.step()
    return ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True)


def test_panel_3_keeps_its_steps_until_the_first_of_another_mode() -> None:
    """For example after a toggle, or when a call that cannot be split runs on one device and also fails there."""
    training = Training()
    payloads = [*training.begin(), *training.run(100), *training.switch("single")]
    facts = ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True)
    for seen in (facts, replace(facts, exit_info=exit_info_of(1, None, training.now))):
        text = screen_text(seen, 120, 40)
        assert "3 Batch · dp ×2 · last 2 min" in text
        assert "no step" not in text
    later = replace(facts, state=snapshot_of_rows([*payloads, *training.run(3)]))
    assert "3 Batch · single · last 2 min" in screen_text(later, 120, 40)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_if_few_steps_take_most_time_the_mean_comes_first(size: tuple[int, int]) -> None:
    facts = alternating()
    lines = screen_text(facts, *size).splitlines()
    (panel,) = (line for line in lines if "3 Batch" in line)
    mean, middle = (float(panel.split(word)[1].split()[0]) for word in ("mean ", "median"))
    assert middle < 1.5
    assert 9 < mean < 14
    header = lines[0] if size[0] >= 110 else lines[1]
    steps_per_s = float(header.split("steps/s")[0].split()[-1])
    assert steps_per_s == pytest.approx(1000 / mean, rel=0.05), "what leads is what the speed in the header says"


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_a_script_that_never_was_in_dp_has_no_columns_for_its_phases(size: tuple[int, int]) -> None:
    text = screen_text(screen_data_of(Training(mode="single", devices=("cpu",), virtual=False), 100), *size)
    assert "Forward" in text
    assert not any(word in text for word in ("–", "catter", "eplicate", "ather", "one device"))


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_panel_3_says_of_how_many_steps_the_devices_times_are(size: tuple[int, int]) -> None:
    training = Training(devices=GPUS, virtual=False)
    payloads = training.begin()
    for index in range(64):
        known = (1.0, 1.5, 0.7, 0.1) if index % 8 == 3 else (None,) * 4
        payloads += with_device_times(training.run(1), of_step=known, why=Untimed.SAMPLED)
    facts = ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True)
    assert "for 8 of the 64 steps (1 in 8)" in screen_text(facts, *size)


def test_the_reason_for_a_dash_is_that_of_the_record() -> None:
    facts = screen_data_of(Training(), 40)
    process = facts.process
    assert process is not None
    numbers = panel_batch.shown_stats(facts)
    assert missing_phase_notes(process, numbers) == []
    none = replace(numbers, tally=Tally())

    def said(**changes: Any) -> str:
        return " | ".join(missing_phase_notes(shown_process(with_call(facts, **changes)), none))

    own = (
        "no data: no DataLoader | no scatter to gather: {} | no forward: no model was called | no backward: no backward"
    )
    assert said(phases={}).startswith(own.format("it did not run"))
    assert "no optimizer: no optimizer step | no other:" in said()
    assert "ran during backward and cannot be separated" in said()
    assert "no scatter to gather: one device" in said(mode="single")
    reason = "Own has its own gather and does not use torch's gather"
    text = said(mode="single", absent={"gather": reason + "\x1b[2J"})
    assert f"no scatter to apply: one device | no gather: {reason}" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(("look", "mark"), [(STYLE, "▁"), (MONO_ASCII, "f"), (MONO, "f")])
def test_a_column_of_short_steps_has_the_lowest_mark_and_one_without_steps_has_none(
    look: TerminalStyle, mark: str
) -> None:
    """Steps of 5 ms beside those of 200 ms are visible, however small; a blank column means "no steps"."""
    phases = [0] * len(PHASES)
    phases[PHASES.index("data")], phases[PHASES.index("forward")] = 1_000_000, 4_000_000
    long, short, shorter, none = (
        Column(number, "single", count, 0, 0, tuple(int(took * share * count) for took in phases))
        for number, (count, share) in enumerate(((2, 40.0), (3, 1.0), (3, 0.001), (0, 0.0)))
    )
    for height in (1, 5, 6):
        rows = stacked_columns([long, short, shorter, none, short], 6, height, 200_000_000, look)
        text = [plain_text(row) for row in rows]
        phases_shown = height >= 6
        lowest = mark if phases_shown else "▁"
        assert text[-1][0] not in (" ", lowest), text
        assert text[-1][1:] == f"{lowest}{lowest} {lowest} ", text
        assert all(not row[1:].strip() for row in text[:-1]), text
        assert [style for cell, style in rows[-1] if lowest in cell] == ["phase.forward"] * 2


@pytest.mark.parametrize("height", range(6, 13))
def test_a_chart_of_phases_shows_true_shares(height: int) -> None:
    draw = random.Random(height)
    for _ in range(400):
        usual = ("data", "forward", "backward", "sync", "optimizer", "other")
        phases = [int(1e6 * draw.random() ** 2) * (name in usual) for name in PHASES]
        column = Column(0, "dp", 1, 0, 0, tuple(phases))
        shown = dict.fromkeys(PHASES, 0)
        for row in stacked_columns([column], 1, height, sum(phases) / draw.uniform(0.75, 1.0), STYLE):
            ((text, style),) = row
            lower, _, upper = style.removeprefix("phase.").partition("/")
            if style.startswith("phase."):
                shown[lower] += BLOCKS.index(text)
                shown[upper or lower] += 8 - BLOCKS.index(text) if upper else 0
        both = [(a / sum(shown.values()), b / sum(phases)) for a, b in zip(shown.values(), phases, strict=True)]
        assert max(abs(drawn - share) for drawn, share in both) < 0.15, both


@pytest.mark.parametrize("height", [8, 14, 24])
def test_an_evaluation_under_the_figures_of_the_training_has_its_word(height: int) -> None:
    training = Training(mode="single", devices=("cpu:0",))
    payloads = [*training.begin(), *training.run(60)]

    def labels(more: list[Row]) -> list[str]:
        rows = rows_text(panel_batch.render_panel(screen_data_of(training, 0, [*payloads, *more]), 116, height, STYLE))
        return [word for word in ("last step ", "evaluation ") for row in rows if row.startswith(word)]

    def has_sizes(more: list[Row]) -> bool:
        title, _ = panel_batch.panel_title(screen_data_of(training, 0, [*payloads, *more]), 116)
        return "[30, 5]" in plain_text(title)

    assert labels([]) == ["last step "]
    assert has_sizes([])
    evaluation = training.step(evaluates=True)
    assert labels(evaluation) == ["evaluation "]
    assert not has_sizes(evaluation), "the figures beside them are of the training"


def test_the_longest_step_is_named_with_its_time_if_it_stands_out() -> None:
    training = Training(mode="single", devices=("cpu",), virtual=False, step_ns=16_000_000)
    payloads = [*training.begin(), *training.run(300)]
    even = ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True)
    assert "longest step" not in screen_text(even, 120, 40)
    training.step_ns = 900_000_000
    payloads += training.run(1)
    training.step_ns = 16_000_000
    payloads += training.run(300)
    facts = ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True)
    for size in ((80, 24), (120, 40), (200, 60)):
        words = r"longest step: (9\d\d m|1\.\d\d )s at 00:0[67], \d{3} ms more than usual in (for|back)ward"
        assert re.search(words, screen_text(facts, *size))
