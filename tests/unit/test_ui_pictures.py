"""Pictures as strings: what each panel says of named situations, and every row exactly as wide as the screen."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from synthetic import SECOND, Training, decoded, device_event, host_event, whole_device_event

from dpmon.model import State, fold
from dpmon.model.compare import Interval
from dpmon.model.history import pictured
from dpmon.records import Call, Event, Size
from dpmon.ui import panel_batch, panel_compare, panel_devices, panel_replicas
from dpmon.ui.batch_notes import missing
from dpmon.ui.chart import stacked
from dpmon.ui.footer import keys
from dpmon.ui.layout import MIN_HEIGHT, MIN_WIDTH, arrange
from dpmon.ui.look import ASCII, COLOUR, LETTERS, MONO, UNICODE, Look
from dpmon.ui.paint import places, scroll_room, whole
from dpmon.ui.panel_output import Output
from dpmon.ui.panel_status import status
from dpmon.ui.rows import plain, width_of
from dpmon.ui.scene import Ended, Facts, Pausing, Playing, Scene, Toggle, View, devices_in_short, life
from dpmon.ui.tail import Tail
from dpmon.ui.toast import cropped

LOOK = Look(UNICODE, COLOUR, True)
MONO_ASCII = Look(ASCII, MONO, False)
FACTS = Facts("20261120-141502-linear-7f3a", "examples/linear.py", SECOND, "auto", "/usr/bin/python3")
SIZES = [
    (80, 24),
    (120, 40),
    (160, 50),
    (200, 60),
    (40, 10),
    (60, 20),
    (100, 30),
    (110, 25),
    (250, 70),
    (90, 45),
    (20, 5),
]


def state_of(payloads: list[bytes]) -> State:
    state = State()
    for record in decoded(payloads):
        state = fold(state, record)
    return state


def scene_of(training: Training, steps: int = 300, **changes: Any) -> Scene:
    payloads = [*training.begin(), *training.run(steps), *[host_event(float(i)) for i in range(30)]]
    state = state_of(payloads)
    scene = Scene(state, training.now + SECOND // 10, FACTS, alive=True, can_toggle=True, can_type=True)
    return replace(scene, **changes)


def gpu_scene(count: int, *, width_of_names: bool = False, **more: Any) -> Scene:
    training = Training(devices=[f"cuda:{i}" for i in range(2)], virtual=False)
    payloads = [*training.begin(), *training.run(20)]
    for index in range(count):
        other: dict[str, Any] = {"name": f"NVIDIA Model {index}"} if width_of_names else {}
        payloads += [
            whole_device_event(float(t), index, util_pct=10 * index % 101, **{**other, **more}) for t in range(20)
        ]
    return Scene(state_of(payloads), training.now, FACTS, alive=True)


@cache
def situations() -> dict[str, Scene]:
    """Named situations, as many as the screen has to be right in; made once, for a picture changes nothing."""
    dp = scene_of(Training(devices=[f"cpu:{i}" for i in range(4)]))
    gpus = scene_of(Training(devices=[f"cuda:{i}" for i in range(8)], virtual=False))
    for i in range(8):
        for t in range(20):
            for record in decoded([device_event(float(t), i, power_w=None, absent={"power_w": "not supported"})]):
                fold(gpus.state, record)
    hostile = Training(
        root="Net\x1b]52;c;x\x07\u202e漢字" * 20, via="Sub\x9b31m\x00class", devices=["\x1b[2Jcuda:0", "cuda\u200b:1"]
    )
    single = Training()
    both = [*single.begin(), *single.run(200), *single.switch("single"), *single.run(200)]
    failed = Training()
    return {
        "nothing": Scene(State(), 0),
        "importing": Scene(State(), 3 * SECOND, FACTS, stage=("importing torch", SECOND), alive=True),
        "dp": dp,
        "gpus": gpus,
        "many replicas": scene_of(Training(devices=[f"cuda:{i}" for i in range(64)], batch=48, virtual=False)),
        "both modes": Scene(state_of(both), single.now, FACTS, alive=True, can_toggle=True),
        "pending": replace(dp, toggle=Toggle("single", "pending", dp.now_ns - SECOND)),
        "refused": replace(dp, toggle=Toggle("single", "refused", dp.now_ns, reason="spread over devices " * 20)),
        "frozen": replace(dp, view=View(frozen=True)),
        "failed": replace(dp, ended=Ended(1, None, dp.now_ns, "RuntimeError: " + "no " * 100), can_toggle=False),
        "killed": replace(dp, ended=Ended(137, "SIGKILL", dp.now_ns), can_toggle=False),
        "16 GPUs": gpu_scene(16, throttle=["power cap\x1b[2J", "too hot"]),
        "zoom 8 GPUs": replace(gpu_scene(8, name="漢字" * 30 + "\x07"), view=View("devices", "devices")),
        "hostile": scene_of(hostile, 20, facts=FACTS._replace(script="a\x1b[31m/" + "漢" * 100)),
        "failed call": Scene(state_of([*failed.begin(), *failed.step(failed=True)]), failed.now, FACTS, alive=True),
        **{
            f"zoom {name}": replace(dp, view=View(name, name))
            for name in ("devices", "replicas", "batch", "compare", "output")
        },
    }


@pytest.fixture
def output(tmp_path: Path) -> Output:
    path = tmp_path / "output.log"
    path.write_bytes(
        b"".join(
            b"\x1b[32mstep %d\x1b[0m loss 0.4 \xe6\xbc\xa2\xe5\xad\x97 \x1b]52;c;x\x07%s\n" % (i, b"w" * i)
            for i in range(300)
        )
    )
    tail = Tail(path)
    tail.refresh()
    return Output([tail])


@pytest.mark.parametrize("look", [LOOK, MONO_ASCII], ids=["colour", "mono ascii"])
@pytest.mark.parametrize("name", list(situations()))
def test_every_row_is_exactly_as_wide_as_the_screen(name: str, look: Look, output: Output) -> None:
    scene = situations()[name]
    for width, height in SIZES:
        rows = whole(scene, output, width, height, look)
        assert len(rows) == height
        assert {width_of(row) for row in rows} == {width}, f"{width}x{height}"
        text = "\n".join(plain(row) for row in rows)
        assert not any((ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160 or c == "\u202e" for c in text)


@pytest.mark.parametrize("devices", [0, 1, 2, 8, 16])
@pytest.mark.parametrize("replicas", [1, 2, 8, 64])
def test_places_tile_the_screen(devices: int, replicas: int) -> None:
    for width in range(20, 251, 13):
        for height in range(5, 71):
            for zoom in (None, "batch"):
                slots = arrange(width, height, devices=devices, replicas=replicas, zoom=zoom)
                areas = [(s.x, s.y, s.x + s.width, s.y + s.height) for s in slots.values()]
                assert all(0 <= x < right <= width and 0 <= y < low <= height for x, y, right, low in areas)
                assert sum((right - x) * (low - y) for x, y, right, low in areas) == width * height, "no gap"
                for one, other in combinations(areas, 2):
                    apart_x = one[2] <= other[0] or other[2] <= one[0]
                    assert apart_x or one[3] <= other[1] or other[3] <= one[1], f"{width}x{height}: overlap"
                if width >= MIN_WIDTH and height >= MIN_HEIGHT:
                    assert {"status", "footer"} < set(slots)


def text_of(scene: Scene, width: int, height: int, output: Output | None = None, look: Look = LOOK) -> str:
    return "\n".join(plain(row) for row in whole(scene, output or Output(), width, height, look))


def rows_text(rows: list[Any]) -> list[str]:
    return [plain(row).rstrip() for row in rows]


# ------------------------------------------------------------------------------------------------ the words


def test_the_first_seconds_tell_what_happens() -> None:
    before = Scene(State(), 2 * SECOND, FACTS)
    assert life(before) == ("starting", "wait", "2 s")
    assert life(replace(before, alive=True)).word == "starting python"
    importing = replace(before, alive=True, stage=("importing torch", SECOND))
    assert life(importing) == ("importing torch", "wait", "1 s")
    imported = replace(before, alive=True, stage=("torch imported", SECOND))
    assert life(imported) == ("waiting for the first batch", "wait", "1 s")
    assert "importing torch 1 s" in text_of(importing, 80, 24)


def test_a_script_that_waits_for_a_line_is_said_to_and_how_to_give_it_one() -> None:
    before = Scene(State(), 5 * SECOND, FACTS, alive=True, stage=("torch imported", SECOND), reads_since_ns=2 * SECOND)
    assert life(before) == ("waiting for input", "wait", "3 s")
    assert life(replace(before, can_type=True)).detail == "3 s: i types"
    worked = scene_of(Training())
    training = replace(worked, now_ns=worked.now_ns + 3 * SECOND, reads_since_ns=worked.now_ns)
    assert life(training).word == "waiting for input"
    assert "i input" in text_of(training, 80, 24).splitlines()[-1]
    assert life(replace(training, reads_since_ns=None)).word == "running"


def test_a_wait_for_input_is_said_after_a_second_only_and_not_once_a_step_has_ended() -> None:
    """One that reads its input line by line waits for a moment again and again; a watch that stopped says what was."""
    training = scene_of(Training())
    later = replace(training, now_ns=training.now_ns + 3 * SECOND)
    for scene, since in ((training, training.now_ns - SECOND // 2), (later, SECOND), (later, later.now_ns + SECOND)):
        seen = replace(scene, reads_since_ns=since)
        assert life(seen).word == "running"
        assert seen.input_wait_ns is None


def test_waiting_for_data_is_said_after_a_second_only() -> None:
    scene = scene_of(Training())
    assert life(replace(scene, activities={0: ("data", scene.now_ns - SECOND // 2)})).word == "running"
    waiting = replace(scene, now_ns=scene.now_ns + 4 * SECOND, activities={0: ("data", scene.now_ns)})
    assert life(waiting) == ("waiting for data", "wait", "4 s")
    stuck = replace(scene, now_ns=scene.now_ns + 9 * SECOND, activities={0: ("backward", scene.now_ns)})
    assert life(stuck) == ("in backward", "wait", "9 s")


@pytest.mark.parametrize(
    ("ended", "said"),
    [
        (Ended(0, None, 9), "finished status 0"),
        (Ended(3, None, 9), "failed status 3"),
        (Ended(137, "SIGKILL", 9), "killed by SIGKILL perhaps out of memory"),
        (Ended(139, "SIGSEGV", 9), "killed by SIGSEGV"),
        (Ended(130, "SIGINT", 9), "interrupted SIGINT"),
        (Ended(130, "SIGINT", 9, stopped=True), "stopped by you"),
        (Ended(1, None, 9, stopped=True), "stopped by you"),
    ],
)
def test_the_end_stays_with_its_outcome(ended: Ended, said: str) -> None:
    scene = replace(scene_of(Training()), ended=ended)
    text = text_of(scene, 160, 50)
    assert said in text
    assert "q close" in text
    assert "d single" not in text
    assert "dpmon export 20261120-141502-linear-7f3a" in text


def test_the_median_of_the_header_is_that_of_panel_3() -> None:
    training = Training(step_ns=2_000_000)
    payloads = [*training.begin(), *training.run(200), *training.switch("single"), *training.run(5)]
    training.step_ns = 40_000_000
    payloads += [*training.switch("dp"), *training.run(20)]
    scene = Scene(state_of(payloads), training.now, FACTS, alive=True)
    for span in (30, 0):
        lines = text_of(replace(scene, view=View(span_s=span)), 80, 24).splitlines()
        (panel,) = (line for line in lines if "3 Batch" in line)
        assert lines[1].split("median")[1].split()[:2] == panel.split("median")[1].split()[:2], (lines[1], panel)


def alternating(long_ns: int = 40_000_000, every: int = 4, steps: int = 400) -> Scene:
    """A loader whose workers bring batches by the handful: one step waits, the others do not."""
    training = Training(step_ns=1_000_000)
    payloads = training.begin()
    shares = training.shares["dp"]
    for index in range(steps):
        shares["data"] = long_ns // 10_000 if index % every == 0 else 3
        payloads += training.step()
    return Scene(state_of(payloads), training.now, FACTS, alive=True)


def test_panel_3_keeps_its_steps_until_the_first_of_another_mode() -> None:
    """As after a toggle, or when a call that cannot be split runs on one device and fails there too."""
    training = Training()
    payloads = [*training.begin(), *training.run(100), *training.switch("single")]
    scene = Scene(state_of(payloads), training.now, FACTS, alive=True)
    for seen in (scene, replace(scene, ended=Ended(1, None, training.now, "RuntimeError: no"))):
        text = text_of(seen, 120, 40)
        assert "3 Batch · dp ×2 · last 2 min" in text
        assert "no step" not in text
    for record in decoded([*payloads, *training.run(3)]):
        fold(scene.state, record)
    assert "3 Batch · single · last 2 min" in text_of(scene, 120, 40)


def test_of_a_run_that_is_over_the_host_panel_has_no_dashes() -> None:
    scene = scene_of(Training())
    fold(scene.state, Event("host", {"t_s": 31.0, "cpu_pct": 5.0, "run_cpu_pct": None, "run_mem_bytes": None}))
    assert "has ended" not in text_of(scene, 120, 40)
    assert "this run has ended" in text_of(replace(scene, ended=Ended(0, None, 5)), 120, 40)


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
def test_where_few_steps_take_the_time_the_mean_leads_and_the_median_has_a_word(size: tuple[int, int]) -> None:
    scene = alternating()
    lines = text_of(scene, *size).splitlines()
    (panel,) = (line for line in lines if "3 Batch" in line)
    mean, middle = (float(panel.split(word)[1].split()[0]) for word in ("mean ", "median"))
    assert middle < 1.5
    assert 9 < mean < 14
    header = lines[0] if size[0] >= 110 else lines[1]
    steps_per_s = float(header.split("steps/s")[0].split()[-1])
    assert steps_per_s == pytest.approx(1000 / mean, rel=0.05), "what leads is what the speed in the header says"
    (said,) = (line for line in lines if "uneven steps" in line)
    assert re.search(r"uneven steps: about [23]\d % take 9\d % of the time, longer by data", said), said


def test_even_steps_have_no_such_word() -> None:
    assert "uneven" not in text_of(scene_of(Training()), 120, 40)
    few = panel_batch.figures(alternating(every=50, long_ns=2_000_000))
    assert few.uneven is None


def test_a_failure_shows_the_last_line_of_the_traceback() -> None:
    scene = replace(scene_of(Training()), ended=Ended(1, None, 5, "RuntimeError: no"))
    assert "RuntimeError: no" in text_of(scene, 80, 24)


def test_gone_without_a_record_is_said_and_no_status_invented() -> None:
    text = text_of(replace(scene_of(Training()), alive=False), 160, 50)
    assert "nobody recorded its exit status" in text
    assert "ended status unknown" in text
    assert "status 0" not in text


def test_a_toggle_is_pending_then_done_or_refused() -> None:
    scene = scene_of(Training())
    pending = replace(scene, toggle=Toggle("single", "pending", scene.now_ns - 2 * SECOND))
    assert "→ single pending 2 s: the training answers at its next batch" in text_of(pending, 80, 24)
    paused = replace(pending, pausing=Pausing(possible=True, wanted=True, since_ns=scene.now_ns - SECOND))
    assert "→ single pending 2 s: the training answers once it goes on (p)" in text_of(paused, 80, 24)
    done = replace(scene, toggle=Toggle("single", "done", scene.now_ns, step=12_340))
    assert "single done since step 12,340" in text_of(done, 80, 24)
    refused = replace(scene, toggle=Toggle("single", "refused", scene.now_ns, reason="it is DDP"))
    assert "single refused: it is DDP" in text_of(refused, 80, 24)


def test_the_status_says_mode_devices_and_that_they_are_virtual_with_the_reason() -> None:
    text = text_of(scene_of(Training(devices=[f"cpu:{i}" for i in range(4)])), 120, 40)
    assert "dp ×4  cpu:0-3 virtual" in text
    assert "virtual replicas: no GPU on this machine" in text
    assert "examples" not in text.splitlines()[0]
    assert "linear.py" in text.splitlines()[0]


@pytest.mark.parametrize("width", [120, 160, 200])
def test_the_status_row_is_not_cut(width: int) -> None:
    scene = scene_of(Training(devices=[f"cuda:{i}" for i in range(8)], virtual=False))
    assert "…" not in plain(status(scene, width, 2, LOOK)[0])


def test_dropped_records_are_counted_on_the_screen() -> None:
    assert "1,234 records dropped" in text_of(replace(scene_of(Training()), missed=1234), 80, 24)
    assert "dropped" not in text_of(scene_of(Training()), 80, 24)


def test_warnings_are_shown_and_have_a_key() -> None:
    scene = scene_of(Training())
    fold(
        scene.state,
        Event("warning", {"process": 0, "t_s": scene.now_ns / SECOND, "text": "the hook\x1b[2J took itself out"}),
    )
    text = text_of(scene, 120, 40)
    assert "warning: the hook\ufffd[2J took itself out" in text
    assert ("w", "warnings") in keys(scene)


@pytest.mark.parametrize(
    ("devices", "short"),
    [
        (("cuda:0", "cuda:1", "cuda:2"), "cuda:0-2"),
        (("cuda:0", "cuda:2"), "cuda:0,2"),
        (("cpu",), "cpu"),
        (("cpu:0", "cuda:0", "cuda:1"), "cpu:0 cuda:0-1"),
        (("cuda:0", "cuda:0"), "cuda:0,0"),
        ((), ""),
    ],
)
def test_devices_in_short(devices: tuple[str, ...], short: str) -> None:
    assert devices_in_short(devices) == short


# ------------------------------------------------------------------------------------------------ panels


def test_replicas_show_the_sizes_of_the_seeds() -> None:
    scene = scene_of(Training(devices=("cpu:0", "cpu:1", "cpu:2"), batch=30), 1)
    rows = rows_text(panel_replicas.replicas(scene, 70, 9, LOOK))
    assert rows[0].split() == ["#", "device", "input", "output", "rows", "share", "host", "time", "5", "to", "95", "%"]
    assert [row.split()[:7] for row in rows[1:4]] == [
        [str(i), f"cpu:{i}", "[10,", "5]", "[10,", "2]", "10"] for i in range(3)
    ]


def test_idle_devices_are_shown_idle_with_the_reason() -> None:
    training = Training(devices=[f"cpu:{i}" for i in range(8)])
    scene = Scene(state_of([*training.begin(), *training.step(rows=10)]), training.now, FACTS, alive=True)
    rows = rows_text(panel_replicas.replicas(scene, 70, 12, LOOK))
    assert rows[6:9] == [f" {i} cpu:{i}  idle: a batch of 10 makes 5 chunks" for i in (5, 6, 7)]


def test_a_replica_whose_sizes_were_not_seen_has_dashes() -> None:
    scene = scene_of(Training(), 1)
    process = scene.process
    assert process is not None
    (track,) = process.calls.values()
    blind = tuple(r._replace(inputs=None, outputs=None) for r in track.last.replicas)
    track.last = replace(track.last, replicas=blind, absent={"sizes": "not seen by a forward hook"})
    rows = rows_text(panel_replicas.replicas(scene, 70, 9, LOOK))
    assert rows[1].split()[:5] == ["0", "cpu:0", "–", "–", "–"]
    assert "not seen by a forward hook" in rows


def test_several_inputs_are_counted_and_listed_when_zoomed() -> None:
    scene = scene_of(Training(), 1)
    process = scene.process
    assert process is not None
    (track,) = process.calls.values()
    sizes = (Size("0", (8, 5), "float32", 160), Size("1.mask", (8,), "bool", 8), Size("labels", (8,), "int64", 64))
    track.last = replace(track.last, replicas=tuple(r._replace(inputs=sizes) for r in track.last.replicas))
    assert any("[8, 5] +2" in row for row in rows_text(panel_replicas.replicas(scene, 70, 9, LOOK)))
    zoomed = rows_text(panel_replicas.zoomed(scene, 100, 40, LOOK))
    assert "   in   1.mask [8] bool 8 B" in zoomed
    assert "   in   labels [8] int64 64 B" in zoomed


def test_more_replicas_than_rows_are_announced_and_can_be_scrolled() -> None:
    scene = situations()["many replicas"]
    assert "61 more ↓" in text_of(scene, 80, 24)
    slot = places(scene, 80, 24)["replicas"]
    room = scroll_room("replicas", scene, slot, LOOK)
    assert room == 61
    scrolled = replace(scene, view=View(scrolled={"replicas": 20}))
    text = text_of(scrolled, 80, 24)
    assert "20 above, 41 more ↓" in text
    assert "# device" in text, "the names of the columns stay"
    assert " 20 cuda:20 " in text
    end = text_of(replace(scene, view=View(scrolled={"replicas": 10_000})), 80, 24)
    assert "61 above" in end
    assert "63 cuda:63  idle" in end
    assert scroll_room("devices", scene, places(scene, 80, 24)["devices"], LOOK) == 0


def test_the_share_and_the_spread_have_room_at_120_columns() -> None:
    scene = scene_of(Training(devices=[f"cpu:{i}" for i in range(4)], batch=26))
    rows = rows_text(panel_replicas.replicas(scene, 56, 9, LOOK))
    assert [row.split()[6] for row in rows[1:5]] == ["7", "7", "7", "5"]
    assert all("┼" in row and "├" in row for row in rows[1:5])
    assert "spread" in rows[0] or "5 to 95 %" in rows[0]
    for width in range(40, 120):
        header, row, *_ = rows_text(panel_replicas.replicas(scene, width, 9, LOOK))
        assert ("━" in row) == ("share" in header), "no column without its heading"
        assert ("├" in row) == ("spread" in header or "5 to 95 %" in header)


def several_calls() -> Scene:
    """A critic that is called twice a step, with batches of different sizes, and a generator."""
    state, steps = State(), 40
    real, generator = Training(root="Critic", batch=30), Training(root="Generator", batch=64, seed=3)
    fakes = Training(root="Critic", batch=12, seed=2)
    for training in (real, fakes, generator):
        training.now = real.now
    records = [decoded([*real.begin()])]
    streams = [decoded(each.run(steps)) for each in (real, fakes, generator)]
    by_step: list[Any] = []
    for number in range(steps):
        calls = [next(r for r in stream if isinstance(r, Call) and r.step == number + 1) for stream in streams]
        by_step += calls
        by_step.append(next(r for r in streams[0] if not isinstance(r, (Call, Event)) and r.step == number + 1))
    for record in [*records[0], *by_step]:
        state = fold(state, record)
    return Scene(state, real.now, FACTS, alive=True)


def test_several_calls_of_a_step_and_several_roots_can_be_chosen() -> None:
    scene = several_calls()
    picked = panel_replicas.choices(scene.process)
    assert [(c.track.last.root, c.nth, c.of, c.track.last.rows) for c in picked] == [
        ("Critic", 1, 2, 30),
        ("Critic", 2, 2, 12),
        ("Generator", 1, 1, 64),
    ]
    titles = []
    for root in range(4):
        shown = replace(scene, view=View(root=root))
        titles.append(plain(panel_replicas.title(shown, LOOK)[0]))
        rows = rows_text(panel_replicas.replicas(shown, 70, 9, LOOK))
        assert rows[1].split()[6] == {0: "32", 1: "15", 2: "6", 3: "32"}[root]
    assert titles[0] == "2 Replicas · newest of 3 · Generator · DataParallel"
    assert titles[2] == "2 Replicas · 2 of 3 · call 2 of 2 a step · Critic · DataParallel"


def test_a_call_that_steps_no_longer_make_cannot_be_chosen_any_more() -> None:
    scene = several_calls()
    process = scene.process
    assert process is not None
    last = next(call for call in reversed(process.calls_kept) if call.root == "Critic")
    for number in range(100):
        fold(scene.state, replace(last, step=100 + number, call=1000 + number))
    assert [c.of for c in panel_replicas.choices(process)] == [1, 1]


def test_the_batch_panel_has_share_median_and_p95_of_each_phase() -> None:
    scene = scene_of(Training(), 500)
    rows = rows_text(panel_batch.batch(scene, 116, 10, LOOK, panel_batch.figures(scene)))
    assert rows[0].split() == [
        "Data",
        "Scatter",
        "Replicate",
        "Apply",
        "Gather",
        "Forward",
        "Backward",
        "Optimizer",
        "other",
        "step",
    ]
    shares = rows[1].replace(" %", "%").split()
    assert shares[:4] == ["share", "3%", "4%", "31%"]
    assert rows[2].startswith("median")
    assert rows[3].startswith("p95")
    assert rows[2].count("ms") + rows[2].count("µs") == 10


def test_phases_that_do_not_run_have_dashes_not_zeros() -> None:
    training = Training(mode="single", devices=("cpu",), virtual=False)
    scene = scene_of(training, 100)
    rows = rows_text(panel_batch.batch(scene, 116, 10, LOOK, panel_batch.figures(scene)))
    assert rows[1].replace(" %", "%").split()[1:7] == ["5%", "–", "–", "–", "–", "41%"]
    assert "0%" not in rows[1].replace(" %", "%").split()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
def test_every_dash_of_panel_3_has_its_reason_on_the_last_line(size: tuple[int, int]) -> None:
    scene = scene_of(Training(mode="single", devices=("cpu",), virtual=False), 100)
    slot = places(scene, *size)["batch"]
    lines = text_of(scene, *size).splitlines()[slot.y : slot.y + slot.height]
    assert "–" in "".join(lines)
    assert "no scatter to gather: one device" in lines[-2]
    assert "uneven" not in lines[-2]


def test_why_a_phase_has_a_dash_is_what_the_record_says() -> None:
    scene = scene_of(Training(), 40)
    process = scene.process
    assert process is not None
    numbers = panel_batch.figures(scene)
    assert missing(process, numbers.phases) == []
    none = [phase._replace(ran=0, share=None, median_ns=None) for phase in numbers.phases]

    def said(**changes: Any) -> str:
        assert process is not None
        assert process.newest is not None
        track = process.calls[process.newest]
        before, track.last = track.last, replace(track.last, **changes)
        text = " | ".join(missing(process, none))
        track.last = before
        return text

    own = (
        "no data: no DataLoader | no scatter to gather: {} | no forward: no model was called | no backward: no backward"
    )
    assert said(phases={}).startswith(own.format("it did not run"))
    assert "no optimizer: no optimizer step | no other:" in said()
    assert "it cannot be told apart from forward" in said()
    assert "no scatter to gather: one device" in said(mode="single")
    reason = "Own has its own gather and does not use torch's gather"
    text = said(mode="single", absent={"gather": reason + "\x1b[2J"})
    assert f"no scatter to apply: one device | no gather: {reason}" in text
    assert "\x1b" not in text
    rare = [numbers.phases[0]._replace(median_ns=None), *numbers.phases[1:]]
    assert missing(process, rare) == ["no data: in none of the steps drawn for medians"]


LONG = (
    "the module's parts lie on several devices (cuda:0, cuda:1, 中文字 and the processor): dp would copy each of them "
    "whole to every device, which is not what the script says; the toggle is for modules on one device"
)


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (160, 50), (81, 30)])
@pytest.mark.parametrize("which", ["toggle", "pause", "message"])
def test_a_refusal_that_has_no_room_in_its_row_stands_in_full_below_it(which: str, size: tuple[int, int]) -> None:
    scene = scene_of(Training())
    plain_rows = whole(scene, Output(), *size, LOOK)
    if which == "toggle":
        scene = replace(scene, toggle=Toggle("single", "refused", scene.now_ns, None, LONG))
    elif which == "pause":
        fold(
            scene.state, Event("pause", {"process": 0, "t_s": scene.now_ns / SECOND, "paused": False, "refused": LONG})
        )
    else:
        scene = replace(scene, view=View(message=LONG, message_ns=scene.now_ns))
    rows = whole(scene, Output(), *size, LOOK)
    assert [width_of(row) for row in rows] == [size[0]] * size[1]
    at = next(index for index, row in enumerate(rows) if "in full" in plain(row))
    note = [plain(row).split("│")[1].strip() for row in rows[at + 1 : at + 10] if "│" in plain(row)]
    assert LONG in " ".join(note)
    assert plain(rows[-1]) == plain(plain_rows[-1])
    later = replace(scene, now_ns=scene.now_ns + 20 * SECOND)
    assert "in full" not in "".join(plain(row) for row in whole(later, Output(), *size, LOOK))


def test_a_note_too_long_for_the_screen_says_so_and_a_short_answer_makes_none() -> None:
    scene = scene_of(Training(), toggle=Toggle("single", "refused", 0, None, LONG), now_ns=SECOND)
    text = text_of(scene, 40, 10)
    assert "in full" in text
    assert "…" in text.split("in full")[1]
    short = replace(scene, toggle=Toggle("single", "refused", 0, None, "no"))
    assert "in full" not in text_of(short, 80, 24)


def test_a_warning_that_is_cut_says_where_all_of_it_is() -> None:
    scene = scene_of(Training())
    fold(scene.state, Event("warning", {"process": 0, "t_s": scene.now_ns / SECOND, "text": LONG}))
    for size in ((80, 24), (120, 40)):
        row = next(line for line in text_of(scene, *size).splitlines() if "warning:" in line)
        assert row.rstrip().endswith("w: all of it")
        assert "…" in row
    assert "all of it" not in text_of(scene, 250, 70)


def test_a_row_is_cropped_by_cells() -> None:
    row = [("ab", "x"), ("中c", "y")]
    assert cropped(row, 1, 4) == [("b", "x"), ("中", "y")]
    assert cropped(row, 0, 3) == [("ab", "x"), (" ", "y")]
    assert cropped(row, 3, 9) == [(" c", "y")]


def test_host_times_are_called_host() -> None:
    text = text_of(scene_of(Training()), 120, 40)
    assert "host mean" in text
    assert "host time" in text


def test_the_history_stacks_phases_in_their_order_and_marks_modes() -> None:
    training = Training(step_ns=50_000_000)
    payloads = [*training.begin(), *training.run(200), *training.switch("single"), *training.run(200)]
    scene = Scene(state_of(payloads), training.now, FACTS, alive=True)
    rows = panel_batch.batch(scene, 116, 20, LOOK, panel_batch.figures(scene))
    (axis,) = (line for line in map(plain, rows) if "dp ─" in line)
    assert "│single " in axis
    process = scene.process
    assert process is not None
    drawn = stacked(process.columns, len(process.columns), 16, 62_000_000, LOOK)
    first = [next(style for text, style in row) for row in reversed(drawn) if row[0][0].strip()]
    order = list(LETTERS)
    seen = [order.index(style.removeprefix("phase.").split("/")[0]) for style in first]
    assert seen == sorted(seen), "from below in the order of the phases"
    letters = [
        "".join(plain(row)[0])
        for row in reversed(stacked(process.columns, len(process.columns), 16, 62_000_000, MONO_ASCII))
    ]
    assert "".join(letters).replace(" ", "").startswith("S"), letters
    assert "R" in letters
    assert "B" in letters


def compare_text(scene: Scene, width: int, height: int) -> list[str]:
    return rows_text(panel_compare.compare(scene, width, height, panel_compare.figures(scene), LOOK))


def test_both_modes_stand_side_by_side_with_what_dp_is_worth() -> None:
    training = Training(devices=("cuda:0", "cuda:1"), virtual=False, step_ns=16_000_000)
    payloads = [*training.begin(), *training.run(400)]
    training.step_ns = 10_000_000
    payloads += [*training.switch("single"), *training.run(600)]
    scene = Scene(state_of(payloads), training.now, FACTS, alive=True, can_toggle=True)
    rows = compare_text(scene, 60, 12)
    assert rows[0].split() == ["single", "dp", "×2", "speed-up", "(95", "%)"]
    assert rows[1].split()[:2] == ["median", "step"]
    assert rows[1].split()[6].startswith("0.6")
    assert rows[2].endswith("% efficiency")
    text = " ".join(rows)
    assert "DataParallel over 2 is 0.6" in text
    assert "× as fast as one device: replicate takes 3" in text
    assert rows[-1] == "medians of 512 steps drawn evenly of each mode", "600 steps were taken in single"
    title, corner = panel_compare.title(panel_compare.figures(scene), LOOK, folded=False)
    assert plain(title) == "4 dp against single"
    assert plain(corner).split()[1:] == ["as", "fast", "as", "one", "device"]


def test_a_comparison_says_what_it_lacks() -> None:
    one = scene_of(Training())
    only = compare_text(one, 60, 12)
    assert only[1].split()[2] == "–"
    assert only[-1] == "single was not seen yet: d switches the running job"
    over = replace(one, ended=Ended(0, None, 9), can_toggle=False)
    assert compare_text(over, 60, 12)[-1] == "single was not seen"
    played = replace(over, playing=Playing(5, 9, False, 1.0))
    assert compare_text(played, 62, 12)[-1] == "single was not seen until then"
    training = Training()
    payloads = [*training.begin(), *training.run(60), *training.switch("single"), *training.run(15)]
    few = compare_text(Scene(state_of(payloads), training.now, FACTS, alive=True), 60, 12)
    assert any(line.startswith("no verdict yet: it needs 10 more steps in single") for line in few)
    assert not any("×" in line for line in few[1:])


def test_no_ratio_is_shown_without_a_verdict() -> None:
    """What the title says of the modes is what the sentence below says."""
    training = Training(devices=("cuda:0", "cuda:1"), virtual=False, step_ns=10_000_000)
    payloads = [*training.begin(), *training.run(60)]
    payloads += [*training.switch("single"), *training.run(60)]
    scene = Scene(state_of(payloads), training.now, FACTS, alive=True)
    found = panel_compare.figures(scene)
    assert found.speedup is not None
    found = replace(found, outcome="even", speedup=Interval(0.34, 0.2, 1.2), ground=None, cost=None)
    rows = rows_text(panel_compare.compare(scene, 60, 12, found, LOOK))
    title, corner = panel_compare.title(found, LOOK, folded=False)
    assert plain(title) == "4 dp against single"
    assert plain(corner) == "no difference shows"
    assert plain(panel_compare.title(found, LOOK, folded=True)[0]) == "4 dp against single"
    text = " ".join(rows)
    assert "0.34" not in text
    assert "efficiency" not in text
    assert rows[1].endswith("0.20 to 1.20×")
    assert "makes no difference that shows (0.20× to 1.20× as fast as one device)" in text


def test_virtual_replicas_are_no_measure_of_speed() -> None:
    training = Training(step_ns=20_000_000)
    payloads = [*training.begin(), *training.run(300), *training.switch("single"), *training.run(300)]
    scene = Scene(state_of(payloads), training.now, FACTS, alive=True, can_toggle=True)
    text = " ".join(compare_text(scene, 60, 14))
    assert "virtual replicas show behaviour, not speed" in text
    zoomed = " ".join(compare_text(replace(scene, view=View(zoom="compare")), 76, 20))
    assert "this shows how dp behaves, not how fast it would be" in zoomed
    assert "without the 5 after each switch" in zoomed
    assert "efficiency" not in text


def test_without_a_gpu_the_host_is_shown_and_why() -> None:
    rows = rows_text(panel_devices.devices(scene_of(Training()), 60, 8, LOOK))
    assert rows[0].endswith("43 %")
    assert "2.14 / 23.1 GiB" in rows[1]
    assert "━" in rows[2]
    assert "╍" in rows[2], "what is not this run's"
    assert rows[4] == "no GPU: NVML library not found"


def test_gpus_have_a_row_each_and_absent_values_say_why() -> None:
    scene = situations()["gpus"]
    rows = rows_text(panel_devices.devices(scene, 100, 12, LOOK))
    assert len(rows) == 9
    assert rows[0].startswith(" 0 ")
    assert "97 %" in rows[0]
    assert "71.0 / 141 GiB" in rows[0]
    assert " – W " in rows[0]
    assert rows[8] == "power: not supported"
    assert plain(panel_devices.title(scene, LOOK)[0]) == "1 Devices · 8 × H200"
    two = rows_text(panel_devices.devices(scene, 56, 19, LOOK))
    assert "–/700 W" in two[1]
    assert two[1].startswith("mem ")


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("width", [36, 56, 76, 96])
def test_no_gpu_is_left_out_without_a_sign(count: int, width: int) -> None:
    scene = gpu_scene(count)
    for height in (3, 5, 8, 12, 20):
        rows = rows_text(panel_devices.devices(scene, width, height, LOOK))
        text = "\n".join(rows)
        shown = [i for i in range(count) if any(row.startswith(f"{i:2d} ") for row in rows) or f"  {i:2d} " in text]
        assert len(shown) == count, "each has its row; those beyond the height are announced by the frame"
        if width >= 52 and height >= 12:
            assert len(rows) <= height
        assert all(width_of([(row, "")]) <= width for row in rows)


def test_the_gpus_of_the_run_come_first_and_others_are_dim() -> None:
    state = gpu_scene(4).state
    for index in (0, 2):
        record = {**state.devices[index].data, "of_run": False, "mem_run_bytes": 0}
        fold(state, Event("device", record))
    rows = panel_devices.devices(Scene(state, 0, FACTS), 60, 6, LOOK)
    assert [plain(row)[:2] for row in rows[:4]] == [" 1", " 3", " 0", " 2"]
    assert "dim" not in {style for text, style in rows[0] if "%" in text}
    assert {style for text, style in rows[2] if "%" in text or "GiB" in text} == {"dim"}


def test_what_holds_the_clocks_down_is_said_for_which_gpu() -> None:
    scene = gpu_scene(2, throttle=["power cap", "too\x1b hot"])
    rows = rows_text(panel_devices.devices(scene, 76, 9, LOOK))
    assert any(row.startswith("clocks held down power cap:  0  1; too") for row in rows)
    assert "\x1b" not in "".join(rows)


def test_a_gpu_is_called_what_the_run_calls_it_where_that_differs() -> None:
    scene = gpu_scene(1, ordinals=[{"process": 0, "device": "cuda:3"}])
    assert rows_text(panel_devices.devices(scene, 76, 9, LOOK))[0].startswith(" 0 cuda:3 ")


def test_zoomed_a_gpu_tells_everything_and_every_dash_its_reason() -> None:
    scene = gpu_scene(2, throttle=["power cap"])
    text = "\n".join(rows_text(panel_devices.zoomed(scene, 116, 35, LOOK)))
    for said in ("SM      83 %", "tensor      41 %", "PCIe in", "NVLink in", "ECC corrected", "this run  66.0 GiB"):
        assert said in text
    for said in ("others  5.00 GiB", "held down by power cap", "energy  2.00 kWh", "processes 4242 66.0 GiB this run"):
        assert said in text
    assert "fan         –" in text
    assert "fan, retired pages: not supported" in text
    assert "⣿" in text, "histories in braille"
    bare = gpu_scene(1, **dict.fromkeys(("processes", "mig", "xid", "throttle"), 3))
    assert panel_devices.zoomed(bare, 76, 20, MONO_ASCII), "values of the wrong type are no values"


@pytest.mark.parametrize(
    ("absent", "shown"),
    [
        ({}, "none"),
        ({"xid": "no XID error since the run's start"}, "none"),
        ({"xid": "not supported"}, "–"),
    ],
)
def test_no_xid_is_none_and_an_unknown_one_a_dash(absent: dict[str, str], shown: str) -> None:
    scene = gpu_scene(1, xid=None, absent=absent)
    text = "\n".join(rows_text(panel_devices.zoomed(scene, 116, 35, LOOK)))
    found = re.search(r"newest XID +(none|–)", text)
    assert found is not None
    assert found.group(1) == shown
    assert "since the run's start" not in text
    assert ("xid: not supported" in text) == (absent == {"xid": "not supported"})


def test_an_unknown_utilisation_is_a_dash() -> None:
    state = state_of([device_event(1.0, 0, util_pct=None, mem_used_bytes=None, absent={"util_pct": "GPU is lost"})])
    rows = rows_text(panel_devices.devices(Scene(state, 0, FACTS), 80, 6, LOOK))
    assert " – " in rows[0]
    assert "– / 141 GiB" in rows[0]
    assert "utilisation: GPU is lost" in rows


def test_a_call_with_no_replicas_says_so() -> None:
    call = Call(0, None, 1, 1, "Net", None, "single", False, True, True, False, 0, 10, ("cpu",), {}, (), None, None)
    state = fold(State(), call)
    rows = rows_text(panel_replicas.replicas(Scene(state, 0, FACTS), 60, 6, LOOK))
    assert "the replicas of this call were not seen" in rows


def test_columns_stay_in_place_until_a_quarter_has_to_go() -> None:
    training = Training(step_ns=1_000_000_000)
    state = state_of(training.begin())
    begun: list[int] = []
    for made in range(1, 110):
        for record in decoded(training.step()):
            state = fold(state, record)
        process = state.focus()
        assert process is not None
        shown = [c.number for c in pictured(process, 40, 40).columns]
        assert shown[-1] == process.columns_made - 1, "the newest is always there"
        assert shown == list(range(shown[0], shown[-1] + 1))
        assert shown[0] % 10 == 0
        assert len(shown) > 30 or made < 40
        begun.append(shown[0])
        training.defined.clear()
    assert len(set(begun)) < 10
