"""The sizes of a DTensor: shape and bytes on one rank, and the global shape, from a definition to what people read."""

from __future__ import annotations

from dataclasses import replace

from situations import LOOK, focused, rows_text, scene_of, with_call
from synthetic import RowReader, Training

from dpmon.assemble.definitions import KnownDefinitions
from dpmon.export import table
from dpmon.model.layouts import Layouts
from dpmon.record.fields import COLUMNS
from dpmon.record.jsonl import as_json
from dpmon.record.kinds import Size
from dpmon.store.answers import Shape
from dpmon.ui.panels import panel_replicas

WRITTEN = [["0", [4, 8], "float32", 128, [8, 8]], ["mask", [8], "bool", 8]]
SIZES = (Size("0", (4, 8), "float32", 128, (8, 8)), Size("mask", (8,), "bool", 8))


def test_a_definition_keeps_the_global_shape() -> None:
    definitions = KnownDefinitions()
    assert definitions.add({"define": 7, "value": WRITTEN})
    assert definitions.sizes[7] == SIZES
    assert not KnownDefinitions().add({"define": 7, "value": [["0", [4], "float32", 16, ["4"]]]})
    resolver = RowReader(0)
    for row in definitions.rows([7]):
        resolver.record(row)
    assert resolver.definitions.sizes[7] == SIZES


def test_json_csv_report_and_screen_say_both_shapes() -> None:
    scene = scene_of(Training(), 1)
    (track,) = focused(scene).calls.values()
    call = replace(track.last, inputs=SIZES)
    first, second = as_json(call)["inputs"]
    assert first == {"path": "0", "shape": [4, 8], "dtype": "float32", "bytes": 128, "global_shape": [8, 8]}
    assert "global_shape" not in second
    (row,) = table.row(call)
    assert row[COLUMNS["call"].index("inputs")] == "0:4x8:float32:128:8x8 mask:8:bool:8"

    resolver = RowReader(0)
    resolver.define(1, {"root": "Model", "via": None, "devices": ["cpu"], "absent": {}})
    resolver.define(7, WRITTEN)
    layouts = Layouts([Shape(0, "single", 0, 1, False, 7, 7, ((7, 7),), (), 0, 5)], {0: resolver.definitions})
    assert layouts.of_process(0)[1] == "[4, 8] of [8, 8], mask [8]"

    scene = with_call(scene, replicas=tuple(each._replace(inputs=SIZES) for each in call.replicas))
    assert any("[4, 8] of [8, 8] +1" in text for text in rows_text(panel_replicas.table(scene, 100, 9, LOOK)))
    zoomed = rows_text(panel_replicas.zoomed(scene, 100, 40, LOOK))
    assert "   in   0 [4, 8] of [8, 8] float32 128 B" in zoomed
