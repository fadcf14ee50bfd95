"""Runs on several nodes: their names, their states, and what the screen shows of them."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli.main import main
from dpmon.model.communication import Wrapper, build_communication
from dpmon.model.nodes import NodeStatus
from dpmon.model.run_analysis import MAX_FULLY_READ, RunAnalysis, Selection
from dpmon.model.stragglers import delay_shares, straggler_sentence
from dpmon.record.record_types import Event
from dpmon.record.schema import STEP
from dpmon.run.mirror_state import NodeReplies
from dpmon.run.run_reader import PauseState
from dpmon.run.run_registry import create_run
from dpmon.store.tally import Tally
from dpmon.store.tally_keys import read_keys
from dpmon.ui.dialogs import Choice
from dpmon.ui.panels import panel_ranks
from dpmon.ui.panels.rank_map import rows_by_rank
from dpmon.ui.scenes import NODES, RANKS, choose_scene
from dpmon.ui.screen_data import ModeRequest, ScreenData, View
from dpmon.ui.screen_painter import TALL_SCREEN_ROWS
from dpmon.ui.styled_rows import plain_text
from support.format_readers import documented_json_paths
from support.history_builders import make_run_info
from support.rank_builders import ManyNodes
from support.record_builders import SECOND
from support.screen_harness import open_screen
from support.screen_states import MONO_ASCII, RUN_INFO, STYLE, screen_text

NODE = NodeStatus(3, "gpu-3", "connected", None, SECOND, 10 * SECOND, None, ())


@lru_cache(maxsize=4)
def run_of(count: int, each: int = 8) -> ManyNodes:
    return ManyNodes(count, each, slow=11).run(0, 24)


def facts_of(run: ManyNodes, now_s: int = 12, view: View | None = None, **selected: Any) -> ScreenData:
    return ScreenData(
        run.state(**selected), now_s * SECOND + SECOND // 4, RUN_INFO, view or View(), is_command_alive=True
    )


@pytest.mark.parametrize(
    ("changes", "words", "brief"),
    [
        ({}, None, ""),
        ({"heard_ns": 4 * SECOND}, "slow for 8 s: nothing was heard", "slow 8 s"),
        ({"state": "cut", "why": "timed out"}, "disconnected for 2 s: timed out", "cut 2 s"),
        ({"state": "cut", "heard_ns": None}, "disconnected for 11 s", "cut 11 s"),
        ({"state": "connecting", "heard_ns": None}, "connecting for 11 s", "connect"),
        ({"state": "refused", "why": "it has no dpmon"}, "given up: it has no dpmon", "given up"),
        ({"state": "ended", "status": 0}, "ended", "ended"),
        ({"state": "ended", "status": 3}, "failed: status 3", "failed"),
        ({"state": "ended", "status": 1, "stopped": True}, "stopped", "stopped"),
        ({"state": "cut", "since_ns": 13 * SECOND}, None, ""),
    ],
)
def test_a_node_in_trouble_is_described_with_the_time(changes: dict[str, Any], words: str | None, brief: str) -> None:
    trouble = NODE._replace(**changes).problem_at(12 * SECOND)
    assert (None if trouble is None else trouble.words(12 * SECOND)) == words
    assert trouble is None or trouble.brief(12 * SECOND, 8).startswith(brief)


def test_the_sentence_names_the_node_of_the_slow_rank() -> None:
    state = facts_of(run_of(4)).state
    assert state.straggler is not None
    assert straggler_sentence(state.straggler, lately=True).startswith("rank 11 (gpu-1) delays the others by ")
    assert (state.straggler.rank, state.straggler.nodes) == (11, ("gpu-1",))


@pytest.mark.parametrize(
    ("ranks", "nodes", "name"),
    [
        ((11,), (None,), "rank 11"),
        ((11,), ("b",), "rank 11 (b)"),
        ((8, 9), ("b", "b"), "ranks 8 and 9 (b)"),
        ((1, 9), ("a", "b"), "ranks 1 (a) and 9 (b)"),
        ((8, 9, 10, 11), ("b",) * 4, "ranks 8, 9 and 2 more (b)"),
    ],
)
def test_slow_ranks_are_named_with_their_nodes(ranks: tuple[int, ...], nodes: tuple[str, ...], name: str) -> None:
    slow = run_of(4).state().straggler
    assert slow is not None
    assert slow._replace(ranks=ranks, processes=ranks, nodes=nodes).name == name


def test_each_rank_has_its_node_and_the_devices_are_those_of_the_node_in_focus() -> None:
    run = run_of(4)
    for chosen in (0, 11):
        state = run.state(process=chosen)
        assert state.representative is not None
        assert state.representative.name == f"rank {chosen} (gpu-{chosen // 8})"
        assert sorted(state.devices) == list(range(8))
        known = {track.data["node"] for track in state.devices.values() if "node" in track.data}
        assert known <= {chosen // 8}
        assert state.devices[3].data["index"] == chosen // 8 * 1000 + 3
    assert [len(node.processes) for node in run.state().nodes] == [8] * 4


def test_a_row_a_node_and_several_in_a_row_where_there_is_no_room() -> None:
    text = screen_text(facts_of(run_of(4)), 120, 40).splitlines()
    assert [line[2:20] for line in text if line.startswith("│ gpu-")] == [
        "gpu-0 ········  0-", "gpu-1 ···▸····  8-", "gpu-2 ········  16", "gpu-3 ········  24",
    ]  # fmt: skip
    (row,) = (line for line in screen_text(facts_of(run_of(4)), 80, 18).splitlines() if line.startswith("│ gpu-"))
    assert row.startswith("│ gpu-0 ········ ···▸···· ········ ········ "), row


def test_the_scene_and_the_header_count_the_nodes() -> None:
    facts = facts_of(run_of(4))
    assert choose_scene(facts).name == NODES
    first, second, *_ = screen_text(facts, 120, 40).splitlines()
    assert "ddp ×32  4 nodes" in first
    assert "others wait for rank 11 (gpu-1)" in second
    quiet = replace(facts, state=facts.state.with_facts(communication=None))
    assert "4 nodes, 32 ranks" in screen_text(quiet, 120, 40).splitlines()[1]


def test_a_node_alone_is_shown_as_on_its_own_screen() -> None:
    facts = facts_of(run_of(4), node=1)
    assert choose_scene(facts).name == RANKS
    assert [process.rank for process in facts.state.training_processes] == list(range(8, 16))
    assert "2 Ranks · Model" in screen_text(facts, 120, 40)
    assert {process.node for process in facts.state.training_processes} == {"gpu-1"}


def test_nodes_in_trouble_are_told_first_and_keep_their_place() -> None:
    run = ManyNodes(16, slow=11).run(0, 24)
    run.silent = {9}
    run.run(24, 28)
    run.node(9, "cut", "the connection timed out", 26.0, heard_ns=24 * SECOND)
    facts = facts_of(run, 28)
    text = screen_text(facts, 120, 40)
    assert "gpu-9 disconnected for 4 s: the connection timed out" in text.splitlines()[1]
    assert "········ cut 4 s" in text
    assert "others wait for rank 11 (gpu-1)" in text, "panel 2 has the sentence that the header has no room for"
    run.node(7, "cut", None, 27.0, heard_ns=25 * SECOND)
    assert "2 nodes disconnected (gpu-7, gpu-9)" in screen_text(facts_of(run, 28), 120, 40)
    assert "cut 4 s" in screen_text(facts, 80, 24, look=MONO_ASCII)


def test_the_ranks_of_a_node_that_is_cut_off_are_unknown_but_the_slow_one_is_named() -> None:
    run = ManyNodes(4, slow=11).run(0, 12)
    for number in (1, 2):
        run.node(number, "cut", None, 12.0, heard_ns=11 * SECOND)
    text = screen_text(facts_of(run), 120, 40)
    assert "gpu-1 ???▸????  8-15  disconnected for 1 s" in text
    assert "gpu-2 ????????  16-23  disconnected for 1 s" in text


def test_a_node_that_never_answered_has_its_row() -> None:
    run = ManyNodes(2)
    run.node(0, "connecting")
    run.node(1, "refused", "\x1b]0;x\x07it has no dpmon")
    text = screen_text(ScreenData(run.state(), 4 * SECOND, RUN_INFO, is_command_alive=True), 120, 40, look=STYLE)
    assert "gpu-0 ????????  0-7  connecting for 4 s" in text
    assert "gpu-1 ????????  8-15  given up: " in text
    assert "it has no dpmon" in text
    assert "\x1b" not in text


def test_report_and_status_name_the_nodes(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory, _ = create_run(make_run_info(start_ns=time.monotonic_ns() - 12 * SECOND))
    run = ManyNodes(2, slow=11, directory=directory).run(0, 12)
    run.node(0, "cut", "the connection timed out", 3.0, heard_ns=2 * SECOND)
    run.close()
    assert main(["report", "last"]) == 0
    report = capsys.readouterr().out
    assert "rank 11 (gpu-1) delays the others" in report
    assert "rank 11 of 16 (gpu-1)" in report
    assert "GPU 3 (gpu-1)" in report
    for name in ("gpu-0", "gpu-1"):
        assert f"host ({name}) 40% " in " ".join(report.split())
    main(["report", "last", "--json"])
    assert json.loads(capsys.readouterr().out)["host"] is None, "it would be one machine's"
    main(["status", "last"])
    status = capsys.readouterr().out
    assert "16 processes on 2 nodes" in status
    assert "gpu-0 disconnected for " in status
    assert "Rank 11 (gpu-1) delays the others" in status
    assert "57.0 steps/s  27.4k samples/s" in status
    main(["status", "last", "--json"])
    members = json.loads(capsys.readouterr().out)
    described = {
        path.removeprefix("nodes[].") for path in documented_json_paths("dpmon --json") if path.startswith("nodes[]")
    }
    assert all(set(node) == described for node in members["nodes"])
    assert [node["state"] for node in members["nodes"]] == ["cut", "connected"]
    assert members["ranks"][11]["node"] == "gpu-1"


async def test_a_rank_is_found_and_its_node_shown_alone_and_all_again(tmp_path: Path) -> None:
    async with open_screen(tmp_path, steps=0) as on:
        on.app.live_run._open_store = lambda: nullcontext(run_of(4).store())
        await on.shows("2 Ranks on 4 nodes")
        assert "/ find rank" in on.text()
        await on.press("slash", *"21", "enter")
        await on.shows("3 Batch · rank 21 (gpu-2)")
        assert "enter gpu-2" in on.text()
        await on.press("enter")
        await on.shows("2 Ranks on gpu-2 ")
        assert "gpu-1" not in on.text().replace("(gpu-1)", "")
        assert "ddp ×32  gpu-2" in on.text()
        assert on.reader.asked == ["records of [16, 17, 18, 19, 20, 21, 22, 23]"]
        await on.press("escape")
        await on.shows("2 Ranks on 4 nodes")
        assert on.reader.asked[1:] == ["records of []"]
        await on.press("slash", *"gpu-1", "enter")
        await on.shows("3 Batch · rank 11 (gpu-1)")
        await on.press("slash", *"gpu-9", "enter")
        await on.shows("there is no rank or node gpu-9")


def test_a_pending_request_says_how_many_nodes_have_answered() -> None:
    facts = replace(facts_of(run_of(4)), node_replies=NodeReplies(3, 4), mode_request=ModeRequest("dp", 11 * SECOND))
    assert "pending 1 s: takes effect at the next call; 3 of 4 nodes answered" in screen_text(facts, 120, 40)
    pausing = replace(facts, mode_request=None, pause_state=PauseState(is_requested=True, is_pending=True))
    assert "the training pauses after the step it is in; 3 of 4 nodes answered" in screen_text(pausing, 120, 40)


@pytest.mark.parametrize(("node", "verdict"), [(0, "others wait for rank 11 (gpu-1)"), (1, "rank 11 (gpu-1)")])
def test_a_node_alone_speaks_of_its_own_ranks_and_counts_no_others(node: int, verdict: str) -> None:
    facts = facts_of(run_of(4), node=node, view=View(node_number=node))
    text = screen_text(facts, 120, 40)
    assert verdict in text
    assert "ranks train in this run" not in text
    assert "8 of 32 ranks train in this run" in screen_text(replace(facts, view=View()), 120, 40)


def test_a_node_alone_names_no_rank_of_its_own_while_the_slow_one_is_elsewhere() -> None:
    """A rank that waits less than its neighbors, also where the ranks wait for each other in the forward."""
    (eleven,) = [one for one in run_of(4).state().ranks if one.rank == 11]
    own = [one for one in run_of(4).state().ranks if one.node == "gpu-0"]
    own[1] = own[1]._replace(wait_ns=3e6, phases={**own[1].phases, "data": 3.4e6})
    wrapper = Wrapper(0, 0, 0, "Model", sync_batch_norm=True)
    for elsewhere, slow in (([], 1), ([eleven], 11)):
        found = build_communication(own, [wrapper], elsewhere=elsewhere, tally=Tally(), lately=True)
        assert found is not None
        assert found.straggler is not None
        assert (found.straggler.rank, len(found.ranks)) == (slow, 8)


@pytest.mark.parametrize("nodes", [(), ("gpu-1", "gpu-2")])
async def test_the_question_before_a_stop_says_that_all_nodes_stop(tmp_path: Path, nodes: tuple[str, ...]) -> None:
    async with open_screen(tmp_path) as on:
        on.reader.info = replace(on.reader.info, nodes=nodes)
        await on.press("x")
        dialog = on.app.screen
        assert isinstance(dialog, Choice)
        assert ("It stops on all 2 nodes." in dialog.lines) == bool(nodes)


@pytest.mark.parametrize(("nodes", "each", "shown"), [(2, 2, "0123"), (4, 8, "11"), (125, 8, "11")])
def test_ranks_of_nodes_are_shown_over_time_but_only_the_slow_one_of_many(nodes: int, each: int, shown: str) -> None:
    slow = min(11, nodes * each - 1)
    facts = facts_of(ManyNodes(nodes, each, slow=slow).run(0, 24))
    height = 40 if nodes < 100 else TALL_SCREEN_ROWS
    rows = [row for row in screen_text(facts, 120, height).splitlines() if row.startswith("│") and row.endswith("% │")]
    assert [row[3:10].strip() for row in rows] == (list(shown) if nodes == 2 else [shown])
    (row,) = [row for row in rows if row[2] == "▸"]
    assert (row[3:10].strip(), set(row[11:-9].strip()), row[-7:-2]) == (str(slow), {"3"}, "  34%"), row
    calm = facts_of(ManyNodes(4, slow=-1).run(0, 12))
    assert not any(row.endswith("% │") for row in screen_text(calm, 120, 40).splitlines())


def test_a_cell_shows_how_long_the_others_waited_for_its_rank() -> None:
    first = facts_of(run_of(4)).state.ranks[:6]
    waits = zip(first, (5, 5, 5, 2.6, 0, 5), strict=True)
    ranks = [one._replace(wait_ns=wait * 1e6, step_ns=10e6) for one, wait in waits]
    assert {process: round(share, 2) for process, share in delay_shares(ranks).items()} == {3: 0.24, 4: 0.5}
    (row,) = rows_by_rank(ranks, None, 56, STYLE)
    assert plain_text(row).rstrip() == "   0 ···25·"
    halves = [one._replace(group=(0, 1, 2) if at < 3 else (3, 4, 5)) for at, one in enumerate(ranks)]
    assert {process: round(share, 2) for process, share in delay_shares(halves).items()} == {4: 0.38}


def lengthen(run: ManyNodes, at: tuple[tuple[int, int], ...], processes: range, more_ns: int) -> None:
    """Make a step of these processes longer, in the tallies of these widths and seconds."""
    for process, (width, second) in product(processes, at):
        (number,) = read_keys(run.store().connection, [process])
        where = f"width = {width} AND start_s = {second} AND key = {number}"
        assert run._db.execute(f"UPDATE tallies SET high_ns = {more_ns} WHERE {where}").rowcount == 1
        run._db.execute(f"UPDATE series SET total = total + {more_ns} WHERE {where} AND name = '{STEP}'")


def test_after_a_stall_all_machines_are_compared_by_the_steps_after_it() -> None:
    """Only the machine of the rank that stood still leaves the step out of its tallies."""

    def means(facts: ScreenData) -> set[int]:
        return {round((one.step_ns or 0) / 1e6) for one in facts.state.ranks}

    run = ManyNodes(2, slow=-1).run(0, 20)
    lengthen(run, ((1, 17), (10, 10)), range(8), 6 * SECOND)
    facts = ScreenData(RunAnalysis(run.store()), 20 * SECOND, RUN_INFO, is_command_alive=True)
    assert len(means(facts)) == 2
    run._event(Event("stall", {"t_s": 15.0, "since_s": 11.0, "ranks": [], "text": "rank 9"}), None)
    run._event(Event("stall", {"t_s": 17.5, "since_s": 11.0, "lasted_s": 6.5, "text": "rank 9"}), None)
    for process in (0, 9):
        state = RunAnalysis(run.store(), Selection(process=process))
        facts = ScreenData(state, 20 * SECOND, RUN_INFO, View(process_index=process), is_command_alive=True)
        assert len(means(facts)) == 1
        assert facts.state.ranks[0].steps == 5 * 57, "as many seconds as without the stall"


def test_a_picture_of_very_many_ranks_has_recent_waits_and_the_newest_facts_of_those_it_shows() -> None:
    run = ManyNodes(20, slow=11).run(0, 24)
    assert run.ranks > MAX_FULLY_READ
    recent: list[object] = []
    for second in range(24, 44):
        run.slow = 11 if second < 30 else 150
        run.second(second)
        kept = run.state()
        first = RunAnalysis(run.store())
        waits, newest = (
            [(one.rank, one.joined, one.wait_ns, one.exposed_ns, one.slowest, one.group) for one in state.ranks]
            for state in (kept, first)
        )
        recent = [*recent[-7:], newest]
        assert waits in recent, "they are less than eight seconds old"
        assert kept.straggler is not None or second < 38, "a rank that others wait for is shown soon"
        for number in (0, 11, 150):
            (one,), (other,) = kept.current_processes([number]), first.current_processes([number])
            assert one.last_step == other.last_step
            assert one.calls
        assert [one.process for one in kept.training_processes] == [one.process for one in first.training_processes]
        assert kept.representative is not None
        assert kept.representative.recent.rate is not None
        assert kept.representative.recent.rate.samples_per_s == pytest.approx(run.ranks * 30 * 57.0, rel=0.05)
    assert kept.straggler is not None
    assert kept.straggler.ranks == (150,)
    ended = run.state(ended={5})
    assert [one.process for one in ended.training_processes] == [one.process for one in first.training_processes]
    assert ended.ended == {5}, "it is known at once"


@pytest.mark.parametrize(("away", "who"), [((1,), "gpu-1"), ((1, 2), "gpu-1 and 1 other")])
def test_unknown_waits_are_shown_with_the_nodes_that_send_nothing(away: tuple[int, ...], who: str) -> None:
    """As after another start of the mirror."""
    facts = facts_of(run_of(4))
    ranks = [one._replace(joined=0) for one in facts.state.ranks]
    found = build_communication(ranks, [Wrapper(0, 0, 0, "Model", group_size=32)], tally=Tally(), lately=True)
    nodes = [node._replace(state="cut") if node.number in away else node for node in facts.state.nodes]
    state = facts.state.with_facts(communication=found, nodes=tuple(nodes))
    rows = panel_ranks.render_panel(replace(facts, state=state), 200, 60, STYLE)
    text = "no step is recorded yet in which all ranks averaged their gradients"
    assert plain_text(rows[-1]) == f"{text} (no records arrive from {who})"
    later = [node._replace(since_ns=facts.elapsed_ns + SECOND, heard_ns=None) for node in nodes]
    before = replace(facts, state=state.with_facts(nodes=tuple(later)))
    assert plain_text(panel_ranks.render_panel(before, 200, 60, STYLE)[-1]) == text, "in a playback of the time before"
