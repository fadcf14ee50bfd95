"""The scene of a run, as a table; and the places of each scene's panels on screens of all sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from types import ModuleType

import pytest

from dpmon.model.epoch_progress import Epoch, Progress
from dpmon.model.run_analysis import RunAnalysis
from dpmon.run.run_reader import PauseState
from dpmon.ui.panel_layout import MIN_HEIGHT, MIN_WIDTH, Tree, place_panels
from dpmon.ui.panels import panel_communication, panel_compare, panel_ranks, panel_replicas, panel_stall
from dpmon.ui.scenes import ARRANGEMENTS, DP, ENDED, MANY, RANKS, SINGLE, STALLED, STARTING, Scene, choose_scene
from dpmon.ui.screen_data import PANELS, ScreenData
from support.history_builders import snapshot_of_rows
from support.rank_builders import record_ddp_ranks
from support.record_builders import SECOND, Training
from support.screen_states import (
    RUN_INFO,
    exit_info_of,
    played_at,
    screen_data_of,
    screen_ended_in_stall,
    screen_in_stall,
    screen_in_stall_playback,
    screen_text,
    situations,
    with_process,
)


def of_ranks(count: int = 2) -> ScreenData:
    run, now = record_ddp_ranks(count, slow=1, steps=20)
    return ScreenData(run.state(), now, RUN_INFO, is_command_alive=True)


def single() -> ScreenData:
    return screen_data_of(Training(mode="single", devices=("cpu:0",)), 5)


def asked() -> ScreenData:
    return ScreenData(RunAnalysis(), SECOND, replace(RUN_INFO, options={"mode": "dp"}), is_command_alive=True)


def learning() -> ScreenData:
    facts = single()
    return with_process(facts, progress=Progress(0, 1, epochs=(Epoch(1, 0, SECOND, 5, 9, 0, None, SECOND),)))


def toggled(first: str) -> ScreenData:
    training = Training(mode=first)
    other = {"dp": "single", "single": "dp"}[first]
    payloads = [*training.begin(), *training.run(5), *training.switch(other), *training.run(5)]
    return ScreenData(snapshot_of_rows(payloads), training.now, RUN_INFO, is_command_alive=True, can_toggle=True)


def played(facts: ScreenData) -> ScreenData:
    return replace(facts, cursor=played_at(facts.now_ns, facts.now_ns // SECOND + 1))


def over(facts: ScreenData) -> ScreenData:
    return replace(facts, exit_info=exit_info_of(0), is_command_alive=False)


ALL = ("batch", "compare", "devices", "output", "replicas")
ONE_DEVICE = ("batch", "devices", "output")
REPLICAS, RANK_TABLE, STANDING = panel_replicas, panel_ranks, panel_stall
MODES, TALK = panel_compare, panel_communication
TABLE: dict[str, tuple[Callable[[], ScreenData], str, tuple[str, ...], ModuleType, ModuleType]] = {
    "nothing known": (lambda: ScreenData(RunAnalysis(), 0), STARTING, ("devices", "output"), REPLICAS, MODES),
    "no step yet": (lambda: screen_data_of(Training(), 0), STARTING, ("devices", "output"), REPLICAS, MODES),
    "a mode asked for": (asked, STARTING, ("devices", "output", "progress"), REPLICAS, MODES),
    "one device": (single, SINGLE, ONE_DEVICE, REPLICAS, MODES),
    "an epoch": (learning, SINGLE, (*ONE_DEVICE, "progress"), REPLICAS, MODES),
    "end of an epoch": (lambda: over(learning()), SINGLE + ENDED, (*ONE_DEVICE, "progress"), REPLICAS, MODES),
    "stages": (lambda: situations()["stages, None"], SINGLE, (*ONE_DEVICE, "replicas"), REPLICAS, MODES),
    "dp": (lambda: screen_data_of(Training(), 5), DP, ALL, REPLICAS, MODES),
    "dp, then single": (lambda: toggled("dp"), DP, ALL, REPLICAS, MODES),
    "single, then dp": (lambda: toggled("single"), DP, ALL, REPLICAS, MODES),
    "2 ranks": (of_ranks, RANKS, ALL, RANK_TABLE, TALK),
    "16 ranks": (lambda: of_ranks(16), RANKS, ALL, RANK_TABLE, TALK),
    "17 ranks": (lambda: of_ranks(17), MANY, ALL, RANK_TABLE, TALK),
    "stall of one process": (lambda: screen_in_stall(1), STALLED, (*ONE_DEVICE, "replicas"), STANDING, MODES),
    "stall of ranks": (lambda: screen_in_stall(2), STALLED, (*ONE_DEVICE, "replicas"), STANDING, TALK),
    "stall in a playback": (lambda: screen_in_stall_playback(2), STALLED, (*ONE_DEVICE, "replicas"), STANDING, TALK),
    "end in a stall": (lambda: screen_ended_in_stall(2), STALLED, (*ONE_DEVICE, "replicas"), STANDING, TALK),
    # A pause is more than a stall.
    "pause in a stall": (
        lambda: screen_in_stall(2, pause_state=PauseState(is_requested=True, since_ns=SECOND)),
        *(RANKS, ALL, RANK_TABLE, TALK),
    ),
    "end of one device": (lambda: over(single()), SINGLE + ENDED, ONE_DEVICE, REPLICAS, MODES),
    "end of dp": (lambda: over(screen_data_of(Training(), 5)), DP + ENDED, ALL, REPLICAS, MODES),
    "end of ranks": (lambda: over(of_ranks()), RANKS + ENDED, ALL, RANK_TABLE, TALK),
    "playback of one device": (lambda: played(single()), SINGLE, ONE_DEVICE, REPLICAS, MODES),
    "playback of ranks": (lambda: played(of_ranks()), RANKS, ALL, RANK_TABLE, TALK),
}  # fmt: skip


@pytest.mark.parametrize("name", list(TABLE))
def test_the_scene_follows_from_the_facts(name: str) -> None:
    make, scene, panels, second, fourth = TABLE[name]
    found = choose_scene(make())
    assert found._replace(panels=tuple(sorted(found.panels))) == Scene(
        scene, tuple(sorted(panels)), second, fourth, scene == STALLED
    )


def panels_in(tree: Tree) -> list[str]:
    return [tree] if isinstance(tree, str) else [panel for each in tree for panel in panels_in(each)]


@pytest.mark.parametrize("name", list(ARRANGEMENTS))
def test_every_panel_of_a_scene_has_one_place_in_each_number_of_columns(name: str) -> None:
    arrangement = ARRANGEMENTS[name]
    for tree in (arrangement.one_column, arrangement.two_columns, arrangement.three_columns):
        assert sorted(panels_in(tree)) == sorted(arrangement.panels)
    assert set(arrangement.panels) <= set(PANELS)


@pytest.mark.parametrize("rows", [1, 2, 8, 64])
@pytest.mark.parametrize("name", list(ARRANGEMENTS))
def test_places_tile_the_screen(name: str, rows: int) -> None:
    arrangement = ARRANGEMENTS[name]
    for width in range(20, 251, 13):
        for height in range(5, 71, 2):
            for zoom in (None, "batch"):
                slots = place_panels(
                    width, height, arrangement, dict.fromkeys(("devices", "replicas", "compare"), rows), zoom
                )
                areas = [(s.x, s.y, s.x + s.width, s.y + s.height) for s in slots.values()]
                assert all(0 <= x < right <= width and 0 <= y < low <= height for x, y, right, low in areas)
                assert sum((right - x) * (low - y) for x, y, right, low in areas) == width * height, "no gap"
                for one, other in combinations(areas, 2):
                    apart_x = one[2] <= other[0] or other[2] <= one[0]
                    assert apart_x or one[3] <= other[1] or other[3] <= one[1], f"{width}x{height}: overlap"
                if width >= MIN_WIDTH and height >= MIN_HEIGHT:
                    assert {"status", "footer"} < set(slots)
                    first = zoom or arrangement.panels[0]
                    assert slots[first].height >= 3, "the most important panel is open on every screen"


@pytest.mark.parametrize("name", list(ARRANGEMENTS))
def test_the_most_important_panel_has_its_short_form_on_every_usual_screen_and_the_next_is_open(name: str) -> None:
    arrangement = ARRANGEMENTS[name]
    for width in (60, 80, 120, 200):
        for height in range(24, 71):
            slots = place_panels(width, height, arrangement, dict.fromkeys(arrangement.panels, 64))
            first, second = arrangement.members[:2]
            assert slots[first.name].height >= first.min_height, f"{width}x{height}"
            assert slots[second.name].height >= 3, f"{width}x{height}"


@pytest.mark.parametrize("size", [(40, 10), (60, 20), (80, 24), (110, 24), (120, 40), (200, 60)])
@pytest.mark.parametrize("make", [screen_in_stall, screen_in_stall_playback, screen_ended_in_stall])
@pytest.mark.parametrize("count", [2, 8])
def test_the_rank_that_the_others_wait_for_has_its_row_in_a_stall_on_every_screen(
    count: int, make: Callable[[int], ScreenData], size: tuple[int, int]
) -> None:
    assert any(line.startswith("│ ▸ 1 ") for line in screen_text(make(count), *size).splitlines())


@pytest.mark.parametrize("count", [2, 16, 64])
def test_the_straggler_has_its_row_on_every_screen(count: int) -> None:
    run, now = record_ddp_ranks(count, slow=1, phase="data", steps=120)
    facts = ScreenData(run.state(), now, RUN_INFO, is_command_alive=True)
    for size in ((60, 20), (80, 24), (110, 24), (120, 40), (200, 60)):
        rows = screen_text(facts, *size).splitlines()
        assert any(line.startswith("│ ▸   1 ") for line in rows), rows
