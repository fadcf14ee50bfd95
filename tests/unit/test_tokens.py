"""Tokens: which input has them, how masks change their number, and where their rate is shown."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dpmon.cli.status_stream import step_line
from dpmon.record.record_types import Size, Step, count_tokens
from dpmon.record.span_format import Flag, Kind
from dpmon.store.step_stats import Rate, rate_to_json
from dpmon.tracer.core.session import Session, TracerConfig
from dpmon.tracer.steps import losses
from dpmon.tracer.steps.losses import LossTracer
from dpmon.tracer.steps.span_recorder import SpanRecorder
from dpmon.ui.panels.panel_status import render_panel
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import plain_text
from support.history_builders import snapshot_of_rows
from support.record_builders import Training
from support.screen_states import RUN_INFO, screen_text
from support.script_simulator import Script, assemble_script


def sizes(*described: str) -> list[Size]:
    """Return sizes from texts such as "input_ids 8x64 int64"."""
    words = [text.split() for text in described]
    return [Size(path, tuple(map(int, shape.split("x"))), dtype, 0) for path, shape, dtype in words]


@pytest.mark.parametrize(
    ("inputs", "outputs", "tokens"),
    [
        (["0 8x64 int64"], ["0 8x64x100 bfloat16"], 512),
        (["0.input_ids 8x64 int64", "0.labels 8x64 int64"], [" 1x1 float32"], 512),
        (["input_ids 8x64 int32", "decoder_input_ids 8x9 int64"], ["logits 8x9x100 float32"], 512),
        (["0 8x64 int64", "1 8x9 int64"], [" 8x9x100 float32"], 72),
        (["input_ids 8x64x5 float32"], [" 8x64x100 float32"], 0),
        (["decoder_input_ids 8x64 int64"], [" 8 float32"], 0),
        (["x 100x16 float32", "edge_index 2x900 int64"], [" 100x7 float32"], 0),
        (["x 2x16 float32", "edge_index 2x900 int64"], [" 2x7x3 float32"], 0),
        (["0 64x26 int64"], [" 64x1 float32"], 0),
        (["0 64x1 int64"], [" 64x1x16 float32"], 0),
        (["0 8x3x32x32 float32"], [" 8x10x4x4 float32"], 0),
        (["0 8x64 int64"], [" 8x64x3 int64"], 0),
        ([], [], 0),
    ],
)
def test_the_input_that_has_tokens(inputs: list[str], outputs: list[str], tokens: int) -> None:
    outputs = [f"out{text}" if text.startswith(" ") else text for text in outputs]
    assert count_tokens(sizes(*inputs), sizes(*outputs)) == tokens


def texts(script: Script, *, has_mask: bool, masks: list[tuple[int, int]], is_training: bool = True) -> None:
    """Write a step whose call has 8 texts of 64 tokens, after these masks (nonzero values, all values)."""
    names = ["input_ids", "attention_mask"] if has_mask else ["input_ids"]
    script.fetch()
    for nonzero, elements in masks:
        script.write(Kind.MASK, script.now, 0, Flag.GRAD * is_training, inside=0, inputs=nonzero, outputs=elements)
    inputs = script.define([[name, [8, 64], "int64", 4096] for name in names])
    with script.phase("call", 1.0, (Flag.TRAINING | Flag.GRAD) * is_training, script._model("A"), inputs=inputs):
        pass
    if is_training:
        script.backward()
        script.optimizer()


def test_padding_is_estimated_from_the_newest_masks() -> None:
    script = Script()
    script.makes_optimizer()
    texts(script, has_mask=True, masks=[])
    texts(script, has_mask=True, masks=[(256, 512)])
    texts(script, has_mask=False, masks=[])
    texts(script, has_mask=True, masks=[(256, 512)] * 60)
    texts(script, has_mask=True, masks=[(64, 64)] * 400)
    texts(script, has_mask=True, masks=[(128, 512)], is_training=False)
    texts(script, has_mask=True, masks=[])
    script.fetch(over=True)
    tokens = [step.quantity("tokens") for step in assemble_script(script).steps]
    assert tokens == [512, 256, 512, 256, pytest.approx(512, abs=2), 128, tokens[4]]


def test_an_empty_mask_hides_no_tokens_later() -> None:
    script = Script()
    script.makes_optimizer()
    for masks in ([(0, 0)], [(512, 512)] * 60):
        texts(script, has_mask=True, masks=masks)
    script.fetch(over=True)
    assert assemble_script(script).steps[-1].quantity("tokens") == pytest.approx(512, rel=0.01)


# ------------------------------------------------------------------------------------------ in the tracer


@pytest.fixture
def recorder() -> SpanRecorder:
    session = Session(TracerConfig("", 0, "auto", None, ()))
    return SpanRecorder(session)


def test_a_mask_is_counted_once_per_poll(recorder: SpanRecorder) -> None:
    written: list[tuple[int, int]] = []
    tracer = LossTracer(recorder.session, recorder)
    recorder.put = lambda word, start, took, counts: written.append((word, counts)) or 0  # type: ignore[func-returns-value]
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    unusable: list[Any] = [((mask,), {}), ((), {"attention_mask": None}), (({"attention_mask": mask[None]},), {})]
    for args, kwargs in unusable:
        tracer.poll(0)
        call(recorder, args, kwargs)
    assert not written
    usable: list[Any] = [((), {"attention_mask": mask}), (({"attention_mask": mask.bool()},), {})]
    for args, kwargs in usable:
        tracer.poll(0)
        call(recorder, args, kwargs)
        assert recorder.on_inputs is None
    with torch.no_grad():
        tracer.poll(0)
        call(recorder, (), {"attention_mask": mask.float()})
    assert [(word & 0xFF, counts) for word, counts in written] == [(Kind.MASK, 3 | 6 << 32)] * 3
    assert [bool(word >> 16 & Flag.GRAD) for word, _ in written] == [True, True, False]


def call(recorder: SpanRecorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert recorder.on_inputs is not None
    recorder.on_inputs(args, kwargs)


def test_after_the_first_steps_a_mask_is_counted_once_per_second(recorder: SpanRecorder) -> None:
    tracer = LossTracer(recorder.session, recorder)
    dues = [tracer.poll(5) for _ in range(losses.FIRST_MASKS + 1)]
    assert dues[: losses.FIRST_MASKS - 1] == [5] * (losses.FIRST_MASKS - 1)
    assert dues[-1] == 5 + 1_000_000_000


# ------------------------------------------------------------------------------------------ shown


def language_model() -> ScreenData:
    training = Training(mode="single", devices=("cpu:0",), via=None, step_ns=20_000_000)
    rows = [*training.begin(), *training.run(400)]
    rows = [row._replace(counts={**row.counts, "tokens": 30 * 64}) if isinstance(row, Step) else row for row in rows]
    return ScreenData(snapshot_of_rows(rows), training.now, RUN_INFO, is_command_alive=True)


def test_where_room_is_short_tokens_replace_the_samples() -> None:
    facts = language_model()
    for width in range(50, 120):
        text = " ".join(plain_text(row) for row in render_panel(facts, width, 3)[:2])
        shown = [unit for unit in ("tokens/s", "steps/s", "samples/s") if unit in text]
        assert shown == ["tokens/s", "steps/s", "samples/s"][: len(shown)]
    assert text.index("samples/s") < text.index("tokens/s") < text.index("steps/s")
    _, after = screen_text(facts, 160, 40).split("3 Batch")
    assert "tokens/s" in after, "in the line of the panel"


def test_the_progress_line_has_the_tokens_after_the_samples() -> None:
    members = {"step": 7, "steps": 7, "updates": 7, "progress": {"text": ""}, "processes": 1, "rank": None}
    members |= {"mode": "single", "virtual": False, "absent": {}}
    rate = Rate(10.0, 320.0, 10.0, 320.0, 0, 412_000.0)
    assert step_line({**members, **rate_to_json(rate)}) == (
        "step 7  10.0 steps/s  320 samples/s  412k tokens/s  single"
    )
