"""Stages and global shapes from the ring to the screen: read, exported and drawn."""

from __future__ import annotations

import json
from dataclasses import replace

from dpmon.assemble import Assembler
from dpmon.export import csv_tables
from dpmon.model.layouts import CallLayouts
from dpmon.record.history_rows import Definition, Row
from dpmon.record.jsonl import as_json
from dpmon.record.record_specs import COLUMNS
from dpmon.record.record_types import Call, Record, Size
from dpmon.store.shapes import CallShape
from dpmon.ui.panels import panel_replicas
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import plain_text
from support.history_builders import snapshot_of_rows
from support.record_builders import SECOND, TRAINING_FLAGS, RowReader, Training, call_row, calls_alone
from support.screen_states import RUN_INFO, STYLE, rows_text, screen_data_of, screen_text, shown_process, with_call

ABSENT = {"device_ms": "cpu: host time is all there is; cuda:0: device times are not recorded by this version"}
DEFINITIONS = [
    Definition(1, {"root": "Toy", "via": None, "devices": ["cpu", "cuda:0"], "absent": ABSENT}),
    Definition(2, [["0", [30, 8], "int64", 1920]]),
    Definition(3, [["", [30, 8, 32], "float32", 30720]]),
    Definition(4, [["", [30, 5], "float32", 600]]),
    Definition(5, {"device": "cpu", "parts": ["embedding"]}),
    Definition(6, {"device": "cuda:0", "parts": ["rnn", "classes"]}),
]
STAGES = [5, 2, 3, 100, 2_000_000, 6, 3, 4, 2_500_000, 5_000_000]


def call(number: int, stages: list[int]) -> Row:
    numbers = 1, number, number * 10_000_000, 9_000_000, 2, 4
    return calls_alone(number, call_row("single", TRAINING_FLAGS, *numbers, stages=stages))


def decoded(*rows: Row) -> list[Record]:
    resolver = RowReader(0)
    return [record for row in (*DEFINITIONS, *rows) if (record := resolver.record(row)) is not None]


def test_a_call_with_stages_has_what_its_row_says() -> None:
    (found,) = decoded(call(1, STAGES))
    assert isinstance(found, Call)
    assert found.replicas == ()
    one, two = found.stages
    assert (one.device, one.parts, one.offset_ns, one.host_ns) == ("cpu", ("embedding",), 100, 2_000_000)
    assert (two.device, two.parts, two.crossed_bytes) == ("cuda:0", ("rnn", "classes"), 30720)
    record = as_json(found)
    assert record["stages"][1] == {
        "stage": 1,
        "device": "cuda:0",
        "parts": ["rnn", "classes"],
        "start_ms": 2.5,
        "host_ms": 5.0,
        "device_ms": None,
        "from": "cpu",
        "crossed_bytes": 30720,
        "inputs": [{"path": "", "shape": [30, 8, 32], "dtype": "float32", "bytes": 30720}],
        "outputs": [{"path": "", "shape": [30, 5], "dtype": "float32", "bytes": 600}],
    }
    assert record["absent"] == ABSENT


def staged(*rows: Row) -> ScreenData:
    return ScreenData(snapshot_of_rows([*DEFINITIONS, *rows]), SECOND, RUN_INFO, is_command_alive=True)


def test_the_screen_has_a_row_a_stage_and_what_could_not_be_measured() -> None:
    slower = [*STAGES[:-1], 7_000_000]
    facts = staged(call(1, STAGES), call(2, slower), call(3, slower))
    text = [plain_text(row) for row in panel_replicas.render_panel(facts, 100, 10, STYLE)]
    assert text[1].split() == ["0", "cpu", "embedding", "[30,", "8]", "[30,", "8,", "32]", "2.00", "ms"]
    assert text[2].split()[:4] == ["1", "cuda:0", "rnn,", "classes"]
    assert text[2].split()[-4:] == ["30.0", "KiB", "7.00", "ms"], "what crossed, and the median"
    assert "device times are not recorded" in " ".join(text[3:])
    assert "2 Stages" in screen_text(facts, 80, 24)


def test_a_stage_that_did_not_end_has_a_dash() -> None:
    broken = [*STAGES[:-3], 0, 2_500_000, -1]
    facts = staged(call(1, broken))
    text = [plain_text(row) for row in panel_replicas.render_panel(facts, 100, 10, STYLE)]
    assert text[2].split()[-1] == "–"


WRITTEN = [["0", [4, 8], "float32", 128, [8, 8]], ["mask", [8], "bool", 8]]
SIZES = (Size("0", (4, 8), "float32", 128, (8, 8)), Size("mask", (8,), "bool", 8))


def test_a_definition_keeps_the_global_shape() -> None:
    resolver = RowReader(0)
    for row in Assembler().feed([], [{"define": 7, "value": WRITTEN}]):
        resolver.record(row)
    assert resolver.definitions.sizes[7] == SIZES


def test_json_csv_report_and_screen_say_both_shapes() -> None:
    facts = screen_data_of(Training(), 1)
    (track,) = shown_process(facts).calls.values()
    call = replace(track.last, inputs=SIZES)
    first, second = as_json(call)["inputs"]
    assert first == {"path": "0", "shape": [4, 8], "dtype": "float32", "bytes": 128, "global_shape": [8, 8]}
    assert "global_shape" not in second
    row = csv_tables.csv_row(call)
    assert json.loads(row[COLUMNS["call"].index("inputs")]) == [first, second]

    resolver = RowReader(0)
    resolver.record(Definition(1, {"root": "Model", "via": None, "devices": ["cpu"], "absent": {}}))
    resolver.record(Definition(7, WRITTEN))
    layouts = CallLayouts([CallShape(0, "single", 0, 1, 0, "[7,7,[7,7]]", 0, 5)], {0: resolver.definitions})
    assert layouts.of_process(0)[1] == "[4, 8] of [8, 8], mask [8]"

    facts = with_call(facts, replicas=tuple(each._replace(inputs=SIZES) for each in call.replicas))
    assert any("[4, 8] of [8, 8] +1" in text for text in rows_text(panel_replicas.render_panel(facts, 100, 9, STYLE)))
    zoomed = rows_text(panel_replicas.render_full_screen(facts, 100, 40, STYLE))
    assert "   in   0 [4, 8] of [8, 8] float32 128 B" in zoomed
