"""The assembler in portions, after a predecessor, and with damaged spans and lines."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from dpmon.assemble import Assembler, step_boundaries
from dpmon.record.record_types import Event
from dpmon.record.span_format import Flag, Kind, Span
from support.run_harness import scaled_size
from support.script_simulator import (
    Script,
    assemble_in_portions,
    assemble_with_successor,
    check_numbers,
    check_spans_of_step,
    decode_rows,
    split_definitions,
)

Draw = random.Random


class Chance:
    """A random loop."""

    def __init__(self, seed: int) -> None:
        self.draw = Draw(seed)
        self.script = script = Script()
        self.models = [script.model("Net", module=1), script.model("Net", "DataParallel", ["cpu:0", "cpu:1"], module=1)]
        self.models += [script.model("Other"), script.model("Hand", "data_parallel", ["cpu:0", "cpu:1"])]
        self.timed: list[Span] = []
        if self.draw.random() < 0.5:
            script.makes_optimizer()

    def run(self, phases: int) -> Script:
        for _ in range(phases):
            self.draw.choice(
                [self.epoch, self.epoch, self.steps, self.steps, self.evaluates, self.beside, self.odd, self.by_hand]
            )()
        return self.script

    def call(self) -> None:
        draw, script = self.draw, self.script
        model = draw.choice(self.models[:3])
        if model == self.models[1] and draw.random() < 0.7:
            script.parallel(model, rows=draw.choice([4, 8]), train=draw.random() < 0.8)
            return
        timed = draw.random() < 0.2
        script.call(model, draw.random() < 0.8, rows=draw.choice([4, 8]), failed=draw.random() < 0.03, timed=timed)
        if timed:
            self.timed.append(script.spans[-1])

    def step(self) -> None:
        draw, script = self.draw, self.script
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            self.call()
            if draw.random() < 0.9:
                script.backward()
        if draw.random() < 0.2:
            with script.phase("optimizer", site=1):
                self.call()
                script.backward()
        if draw.random() < 0.8:
            script.optimizer(draw.choice([1, 1, 1, 2]))
        self.others()

    def others(self) -> None:
        draw, script = self.draw, self.script
        if self.timed and draw.random() < 0.5:
            script.times(self.timed.pop(draw.randrange(len(self.timed))), 0, 1.5)
        if draw.random() < 0.15:
            with script.phase("memory"):
                pass
            script.event("memory", "last", step=0, devices=[])
        if draw.random() < 0.1:
            script.event("mode", draw.choice(["next", "last"]), step=None, call=None, text="from call {call} on")
        if draw.random() < 0.1:
            script.event("warning", text="something")
        if draw.random() < 0.4:
            self.communicate()
        if draw.random() < 0.07:
            script.event("pause", "last", paused=True, step=0)
            with script.phase("pause", 20.0):
                pass
            script.event("pause", "last", paused=False, step=0)

    def communicate(self) -> None:
        """Write collectives that were launched at random times; some of them steps ago."""
        draw, script = self.draw, self.script
        for _ in range(draw.randrange(4)):
            group = script.group(draw.choice(["all_reduce", "all_gather"]), draw.choice(["0", "1"]))
            start = script.now - round(draw.choice([0.5, 3, 20]) * draw.random() * 1_000_000)
            script.collective(group, start, (script.now - start) / 1_000_000)
        if draw.random() < 0.3:
            script.sampled(script.now - draw.choice([2_000_000, 9_000_000]), 1000)

    def epoch(self) -> None:
        for _ in range(self.draw.randrange(5)):
            self.script.fetch()
            self.step()
        self.script.fetch(over=True)

    def steps(self) -> None:
        for _ in range(self.draw.randrange(6)):
            self.step()

    def evaluates(self) -> None:
        for _ in range(self.draw.randrange(6)):
            self.script.evaluate(self.draw.choice(self.models[:1] + self.models[2:3]))
            self.others()

    def beside(self) -> None:
        """Run another thread during a call of this one."""
        script = self.script
        with script.phase("call", 1.0, *script.called(self.models[0], True, 8)), script.on_thread(2):
            script.fetch()
            self.call()
            if self.draw.random() < 0.3:
                script.backward()
        with script.on_thread(2), script.phase("call", 1.0, *script.called(self.models[2], True, 8)):
            script.backward()
            with script.on_thread(0):
                script.call(self.models[0])
                script.backward()

    def odd(self) -> None:
        what = self.draw.randrange(4)
        if what == 0:
            self.script.gone(self.draw.choice([1, 2]))
        elif what == 1:
            self.script.fetch(failed=True)
        elif what == 2 and self.script.spans:
            self.script.spans.append(self.script.spans[-1]._replace(number=len(self.script.spans)))
        else:
            self.script.wait(6000)

    def by_hand(self) -> None:
        script = self.script
        kinds = ["scatter", "scatter", "replicate", "parallel_apply", "gather"]
        for name in kinds:
            if self.draw.random() < 0.2:
                continue
            learns = Flag.TRAINING | Flag.GRAD if name == "parallel_apply" else 0
            size = script.sizes(4)
            site = self.models[3] if name == "parallel_apply" else 0
            with script.phase(name, 1.0, Flag.BY_SCRIPT | Flag.DP | learns, site, inputs=size, outputs=size):
                if name == "parallel_apply":
                    for index in (1, 0):
                        script.write(Kind.REPLICA, script.now, 1000, 0, index, inputs=size, outputs=size)
        script.backward()


SEEDS = range(scaled_size(10, 100))


@pytest.fixture(params=["held", "in parts"])
def bound(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are held until they end, and steps that are recorded in parts."""
    if request.param == "in parts":
        monkeypatch.setattr(step_boundaries, "MAX_HELD", 3)


@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("seed", SEEDS)
def test_any_portions_give_the_same_payloads(seed: int) -> None:
    script = Chance(seed).run(12)
    draw = Draw(seed)
    whole = assemble_in_portions(script, [])
    assert split_definitions(assemble_in_portions(script, range(1, len(script.spans)))) == split_definitions(whole)
    for _ in range(5):
        cuts = sorted(draw.sample(range(len(script.spans)), min(6, len(script.spans))))
        assert split_definitions(assemble_in_portions(script, cuts)) == split_definitions(whole)
    result = decode_rows(whole)
    for one in result.steps:
        check_spans_of_step(one)
    check_numbers(result.steps)
    assert [call.call for call in result.calls] == list(range(1, len(result.calls) + 1))
    written = sum("kind" in line for _, line in script.lines)
    assert len(result.events) == written
    assert len(result.collectives) + len(result.samples) == sum(span.kind == Kind.COLLECTIVE for span in script.spans)


def told(events: list[Event]) -> Counter[str]:
    """Count events by kind, but not the warning about the open step."""
    return Counter(event.kind for event in events if "The last step is incomplete" not in str(event.data))


@pytest.mark.usefixtures("bound")
@pytest.mark.parametrize("seed", SEEDS)
def test_a_successor_repeats_nothing_and_loses_what_was_held_at_most(seed: int) -> None:
    """The open step is held, and the first steps of a loop until its rule is known."""
    script = Chance(seed).run(8)
    expected = decode_rows(assemble_in_portions(script, []))
    for cut in range(len(script.spans) + 1):
        first, second = (decode_rows(payloads) for payloads in assemble_with_successor(script, cut))
        calls, steps = [*first.calls, *second.calls], [*first.steps, *second.steps]
        assert [call.call for call in calls] == list(range(1, len(calls) + 1)), cut
        check_numbers(steps)
        for step in steps:
            check_spans_of_step(step)
        starts = Counter(call.start_ns for call in calls)
        assert max(starts.values(), default=1) == 1, cut
        read_ns = max((span.end for span in script.spans[:cut]), default=0)
        later = {call.start_ns for call in expected.calls if call.start_ns >= read_ns}
        assert len(later - starts.keys()) <= 2, "primitives that the script calls itself may begin another call"
        assert told([*first.events, *second.events]).total() == told(expected.events).total(), cut


# ------------------------------------------------------------------------------------------ damage


def test_a_lost_span_does_not_affect_other_steps() -> None:
    """A span is missing, so parts of a call have no call around them."""
    script = Script()
    net = script.model(via="DataParallel", devices=["cpu:0", "cpu:1"])
    for _ in range(4):
        script.fetch()
        script.parallel(net)
        script.backward()
        script.optimizer()
    wrapped = [span for span in script.spans if span.kind == Kind.WRAPPED]
    script.spans.remove(wrapped[1])
    assembler = Assembler()
    out = assembler.feed(script.spans, script.lines_between(0, len(script.lines))) + assembler.finish()
    result = decode_rows(out)
    # A step without a call is not recorded.
    assert [call.step for call in result.calls] == [1, 2, 3]
    assert all(len(call.phases) == 4 and len(call.replicas) == 2 for call in result.calls)
    assert assembler.dropped == 0  # an interrupt also leaves such parts


def test_spans_that_wait_for_others_are_bounded() -> None:
    spans = [Span(at, Kind.GATHER, 0, Kind.CALL, at % 400, 0, at, 1, 0, 0) for at in range(20_000)]
    assembler = Assembler()
    assembler.feed(spans, [])
    assert assembler.dropped == 1 << 14


def test_calls_of_an_unknown_layout_are_counted_and_their_time_is_kept() -> None:
    script = Script().play("d f")
    script.call(999)
    script.backward()
    assembler = Assembler()
    rows = assembler.feed(script.spans, script.lines_between(0, len(script.lines)))
    result = decode_rows(rows + assembler.finish())
    assert assembler.dropped == 1
    assert [call.root for call in result.calls] == ["Net"]
    assert result.steps[0].phases["forward"] == 2_000_000
