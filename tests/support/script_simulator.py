"""Simulates a training script: writes its spans and lines as the tracer would, and decodes the resulting records."""

from __future__ import annotations

import random
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

from dpmon.assemble import Assembler
from dpmon.record.history_rows import CollectiveRow, Definition, LossRow, Row
from dpmon.record.record_types import Call, Collective, Event, Sampled, Step
from dpmon.record.schema import STEP_KINDS
from dpmon.record.span_format import Flag, Kind, Span
from dpmon.span_ring import SpanRing
from support.record_builders import RowReader
from support.ring_writers import Lines, write_span

MS = 1_000_000
START_NS = 5_000_000_000
SPAN_KINDS = {
    "fetch": Kind.FETCH,
    "call": Kind.CALL,
    "wrapped": Kind.WRAPPED,
    "scatter": Kind.SCATTER,
    "replicate": Kind.REPLICATE,
    "parallel_apply": Kind.PARALLEL_APPLY,
    "gather": Kind.GATHER,
    "backward": Kind.BACKWARD,
    "optimizer": Kind.OPTIMIZER,
    "closure": Kind.CLOSURE,
    "copy": Kind.COPY,
    "pause": Kind.PAUSE,
    "memory": Kind.MEMORY,
}
_WORD = re.compile(r"([a-zD@)])([A-Z]?)(\d*)(?:=([\d.]+))?(!?)(\(?)")
_NESTING = {"d": "fetch", "f": "call", "b": "backward", "o": "optimizer", "k": "closure"}


class Script:
    """A simulated script: each phase takes 1 ms by default, followed by 0.1 ms of other code."""

    def __init__(self) -> None:
        self.now = START_NS
        self.spans: list[Span] = []
        self.lines: list[tuple[int, dict[str, Any]]] = []
        """Each with the number of spans written before it."""
        self._thread = 0
        self._around: dict[int, list[int]] = {}
        self._defined: dict[Any, int] = {}
        self._modules = 0
        self._models: dict[str, int] = {}

    # -------------------------------------------------------------------------------------------- lines

    def line(self, **line: Any) -> None:
        self.lines.append((len(self.spans), line))

    def event(self, kind: str, fill: str | None = None, **data: Any) -> None:
        self.line(kind=kind, at=self.now, **data, **({} if fill is None else {"fill": fill}))
        self.wait(0.01)

    def define(self, value: Any) -> int:
        key = repr(value)
        number = self._defined.get(key)
        if number is None:
            number = self._defined[key] = len(self._defined) + 1
            self.line(define=number, value=value)
        return number

    def sizes(self, *rows: int, path: str = "0") -> int:
        parts = [[path if len(rows) == 1 else str(at), [n, 4], "float32", 16 * n] for at, n in enumerate(rows)]
        return self.define(parts)

    def model(self, root: str = "Net", via: str | None = None, devices: Sequence[str] = ("cpu",), **more: Any) -> int:
        """Define the layout of a new module; with `module=`, another layout of that module."""
        self._modules += 1
        more.setdefault("module", self._modules)
        more.setdefault("absent", {})
        return self.define({"root": root, "via": via, "devices": list(devices), **more})

    def makes_optimizer(self, number: int = 1) -> None:
        self.line(optimizer=number)

    # -------------------------------------------------------------------------------------------- spans

    def wait(self, ms: float) -> None:
        self.now += round(ms * MS)

    def write(self, kind: int, start: int, took: int, flags: int = 0, site: int = 0, **more: int) -> Span:
        inside = more.pop("inside", None)
        if inside is None:
            around = self._around.get(self._thread, [])
            inside = around[-1] if around else 0
        sizes = more.pop("inputs", 0), more.pop("outputs", 0)
        span = Span(len(self.spans), kind, flags, inside, more.pop("thread", self._thread), site, start, took, *sizes)
        assert not more
        self.spans.append(span)
        return span

    @contextmanager
    def phase(self, name: str, ms: float = 1.0, flags: int = 0, site: int = 0, **more: int) -> Iterator[None]:
        """Write a phase that takes `ms` itself; phases written in the block are nested in it."""
        kind = SPAN_KINDS[name]
        around = self._around.setdefault(self._thread, [])
        start = self.now
        self.wait(ms / 2)
        around.append(kind)
        yield
        around.pop()
        self.wait(ms / 2)
        self.write(kind, start, self.now - start, flags, site, **more)
        self.wait(0.1)

    def fetch(self, ms: float = 1.0, over: bool = False, failed: bool = False) -> None:
        flags = Flag.FAILED | Flag.EXHAUSTED if over else Flag.FAILED * failed
        with self.phase("fetch", ms, flags):
            pass

    def call(
        self,
        model: int,
        train: bool = True,
        rows: int = 8,
        ms: float = 1.0,
        grad: bool | None = None,
        failed: bool = False,
        timed: bool = False,
    ) -> None:
        with self.phase("call", ms, *self.called(model, train, rows, grad, failed, timed)):
            pass
        self._sized(rows, failed)

    def _sized(self, rows: int, failed: bool) -> None:
        inputs, outputs = self.sizes(rows), 0 if failed else self.sizes(rows, path="")
        self.spans[-1] = self.spans[-1]._replace(inputs=inputs, outputs=outputs)

    def called(
        self, model: int, train: bool, rows: int, grad: bool | None = None, failed: bool = False, timed: bool = False
    ) -> tuple[int, int]:
        """Return flags and site of a call."""
        self.sizes(rows), self.sizes(rows, path="")
        learns = Flag.TRAINING * train | Flag.GRAD * (train if grad is None else grad)
        return learns | Flag.SINGLE | Flag.FAILED * failed | Flag.TIMED * timed, model

    def parallel(self, model: int, rows: int = 8, train: bool = True, replicas: int = 2, kind: str = "wrapped") -> None:
        """Write a data-parallel call."""
        learns = (Flag.TRAINING | Flag.GRAD) * train
        share, back = self.sizes(rows // replicas), self.sizes(rows // replicas, path="")
        whole, out = self.sizes(rows), self.sizes(rows, path="")
        with self.phase(kind, 1.0, learns | Flag.DP, model, inputs=whole, outputs=out):
            for primitive in ("scatter", "replicate"):
                with self.phase(primitive):
                    pass
            with self.phase("parallel_apply", 2.0):
                for index in reversed(range(replicas)):
                    self.write(
                        Kind.REPLICA, self.now, MS // 2, 0, index, inside=SPAN_KINDS[kind], inputs=share, outputs=back
                    )
            with self.phase("gather"):
                pass

    def backward(self, ms: float = 1.0, failed: bool = False) -> None:
        with self.phase("backward", ms, Flag.FAILED * failed):
            pass

    def optimizer(self, number: int = 1, ms: float = 1.0, failed: bool = False) -> None:
        with self.phase("optimizer", ms, Flag.FAILED * failed, number):
            pass

    def copy(self, size: int = 1024) -> None:
        with self.phase("copy", inputs=size & 0xFFFFFFFF, outputs=size >> 32):
            pass

    def gone(self, number: int) -> None:
        self.write(Kind.OPTIMIZER_FREED, self.now, 0, 0, number)

    def times(self, span: Span, device: int, ms: float, of: int = 1, why: int = 0) -> None:
        """Write the device time of a span."""
        site = device | of << 8 | why << 16
        low, high = span.number & 0xFFFFFFFF, span.number >> 32
        self.write(Kind.DEVICE_TIME, self.now, round(ms * MS), 0, site, inside=0, inputs=low, outputs=high)

    def group(self, operation: str = "all_reduce", name: str = "0", size: int = 4, **more: Any) -> int:
        """Define the collectives of one operation on a process group."""
        facts = {"operation": operation, "group": name, "size": size, "ranks": None, "dtype": "float32"}
        return self.define({**facts, "backend": "gloo", "device": "cpu", **more})

    def collective(self, group: int, start: int, ms: float, size: int = 1000, inside: int = 0) -> Span:
        """Write a collective that was launched at `start`."""
        return self.write(Kind.COLLECTIVE, start, round(ms * MS), 0, group, inside=inside, inputs=size)

    def loss_line(self, place: str, why: str | None = None) -> int:
        """Define a line that calls backward."""
        return self.define({"place": place, "why": why})

    def loss(self, line: int, start: int, value: float) -> Span:
        """Write the loss of a backward pass that began at `start`."""
        (bits,) = struct.unpack("=Q", struct.pack("=d", value))
        return self.write(Kind.LOSS, start, 0, 0, line, inside=0, inputs=bits & 0xFFFFFFFF, outputs=bits >> 32)

    def sampled(self, start: int, collectives: int) -> Span:
        """Write the end of a sample that began at `start`."""
        return self.write(Kind.COLLECTIVE, start, self.now - start, inside=0, inputs=collectives)

    def learn(self, model: int, optimizer: int = 1, rows: int = 8) -> None:
        """Write call, backward pass and optimizer step."""
        self.call(model, rows=rows)
        self.backward()
        self.optimizer(optimizer)

    def evaluate(self, model: int, rows: int = 8) -> None:
        """Write a call of an evaluation."""
        self.call(model, train=False, rows=rows)

    def play(self, loop: str) -> Script:
        """Write a loop in short form: words of an operation, a model (a capital), rows or another number, ms, failure.

        d: fetch, D: fetch that finds the end, f: call, n: call without gradients, e: evaluation, b: backward pass, o:
        optimizer step, l: f b o, c: copy, m: an optimizer is made, g: it is gone, p: pause, r: measurement of memory,
        w: wait, @: go on in another thread. `fA10=2!`: a call of model A with 10 rows that takes 2 ms and fails. `o(`
        has the words up to `)` nested in it, `k(` is a closure. W is the DataParallel wrapper of V.
        """
        nested = [ExitStack()]
        for word in loop.split():
            match = _WORD.fullmatch(word)
            assert match, word
            what, name, digits, took, fails, opens = match.groups()
            number, ms, failed = int(digits or 1), float(took or 1.0), bool(fails)
            if what == ")":
                nested.pop().close()
            elif opens:
                flags, site = self.called(self._model(name), True, 8) if what == "f" else (Flag.FAILED * failed, number)
                nested.append(ExitStack())
                if what == "f":
                    nested[-1].callback(self._sized, 8, False)
                nested[-1].enter_context(self.phase(_NESTING[what], ms, flags, 0 if what in "dbk" else site))
            elif what in "fnel":
                rows = int(digits or 8)
                self.call(self._model(name), what != "e", rows, ms, what in "fl", failed)
                if what == "l":
                    self.backward()
                    self.optimizer()
            elif what in "dDpr":
                flags = Flag.FAILED | Flag.EXHAUSTED if what == "D" else Flag.FAILED * failed
                with self.phase({"p": "pause", "r": "memory"}.get(what, "fetch"), ms, flags):
                    pass
            elif what == "b":
                self.backward(ms, failed)
            elif what == "o":
                self.optimizer(number, ms, failed)
            elif what == "@":
                self._thread = number
            else:
                actions: dict[str, Callable[[int], None]]
                actions = {"c": self.copy, "m": self.makes_optimizer, "g": self.gone, "w": self.wait}
                actions[what](number)
        assert len(nested) == 1
        return self

    def _model(self, name: str) -> int:
        """Return the number of a model of `play`, which is defined at its first use."""
        if name not in self._models:
            more: dict[str, dict[str, Any]] = {"W": {"via": "DataParallel", "module": 7}, "V": {"module": 7}}
            self._models[name] = self.model(name or "Net", **more.get(name, {}))
        return self._models[name]

    @contextmanager
    def on_thread(self, thread: int) -> Iterator[None]:
        was, self._thread = self._thread, thread
        yield
        self._thread = was

    # -------------------------------------------------------------------------------------------- reading

    def needed(self, spans: int) -> int:
        """Return the number of lines that a reader of this many spans has certainly read."""
        return sum(1 for before, _ in self.lines if before < spans)

    def lines_between(self, first: int, last: int) -> list[dict[str, Any]]:
        return [line for _, line in self.lines[first:last]]

    def write_to(self, ring: SpanRing, lines: Lines, first: int = 0, last: int = 1 << 30) -> None:
        """Write a part of the spans into a ring, and the lines that a reader of this part needs."""
        for line in self.lines_between(self.needed(first), self.needed(last)):
            lines.put(**line)
        for span in self.spans[first:last]:
            write_span(ring, span)


class DecodedRows(NamedTuple):
    """The records in rows, by kind."""

    calls: list[Call]
    steps: list[Step]
    events: list[Event]
    collectives: list[Collective]
    samples: list[Sampled]

    def shape(self) -> list[tuple[int | None, str, int]]:
        """Return, per numbered step: samples, first letters of its phases, number of calls."""
        counted = Counter((call.kind, call.step) for call in self.calls)
        numbered = (step for step in self.steps if step.step)
        return [(step.samples, phase_letters(step), counted[step.kind, step.step]) for step in numbered]


def check_numbers(steps: Sequence[Step]) -> None:
    """Assert that the steps of each kind are numbered from 1, except those outside a loop."""
    for kind in STEP_KINDS:
        numbers = [step.step for step in steps if step.kind == kind and step.step]
        assert numbers == list(range(1, len(numbers) + 1)), kind


def phase_letters(step: Step) -> str:
    """Return the phases that ran, except other: d(ata) c(opy) f(orward) b(ackward) o(ptimizer)."""
    return "".join(name[0] for name in ("data", "copy", "forward", "backward", "optimizer") if name in step.phases)


def decode_rows(rows: Sequence[Row]) -> DecodedRows:
    resolver = RowReader(0)
    found = DecodedRows([], [], [], [], [])
    for record in (record for row in rows for record in resolver.records(row)):
        if isinstance(record, Call):
            found.calls.append(record)
        elif isinstance(record, Step):
            found.steps.append(record)
        elif isinstance(record, Collective):
            found.collectives.append(record)
        elif isinstance(record, Sampled):
            found.samples.append(record)
        else:
            found.events.append(record)
    return found


def split_definitions(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Separate rows of steps from definitions, collectives and losses, which can be anywhere among them."""
    return [row for row in rows if not _is_free(row)], sorted(str(row) for row in rows if _is_free(row))


def _is_free(row: Row) -> bool:
    return isinstance(row, (Definition, CollectiveRow, LossRow))


def assemble_in_portions(script: Script, cuts: Sequence[int], lines: Sequence[int] | None = None) -> list[Row]:
    """Return the rows if a reader stops at each span in `cuts`, with as many lines read as `lines` says."""
    assembler = Assembler()
    out: list[Row] = []
    before = lines_read = 0
    for at, cut in enumerate([*cuts, len(script.spans)]):
        until = script.needed(cut) if lines is None else max(lines[at], script.needed(cut))
        until = len(script.lines) if cut == len(script.spans) else max(until, lines_read)
        out += assembler.feed(script.spans[before:cut], script.lines_between(lines_read, until))
        before, lines_read = cut, until
    out += assembler.finish()
    assert assembler.dropped == 0
    return out


def assemble_script(script: Script) -> DecodedRows:
    """Return the records of a script, after a check that spans read in any portions give the same."""
    whole = assemble_in_portions(script, [])
    assert split_definitions(assemble_in_portions(script, range(1, len(script.spans)))) == split_definitions(whole)
    draw = random.Random(len(script.spans))
    for _ in range(5):
        cuts = sorted(draw.sample(range(len(script.spans)), min(4, len(script.spans))))
        assert split_definitions(assemble_in_portions(script, cuts)) == split_definitions(whole)
    return decode_rows(whole)


def without_definitions(rows: Sequence[Row]) -> list[Row]:
    """Leave out definitions, which a successor writes again."""
    return [row for row in rows if not isinstance(row, Definition)]


def assemble_with_successor(script: Script, cut: int) -> tuple[list[Row], list[Row]]:
    """Return the rows of an assembler that stops at span `cut`, and those of its successor."""
    first = Assembler()
    lines = script.needed(cut)
    out = first.feed(script.spans[:cut], script.lines_between(0, lines))
    kept = decode_rows(out)
    second = Assembler()
    steps = {step.kind: step.step for step in kept.steps}
    last_call = max((call.call for call in kept.calls), default=0)
    second.resume(script.lines_between(0, lines), len(kept.events), steps, last_call)
    more: list[Row] = []
    at = cut
    while at < len(script.spans):
        until = min(at + 3, len(script.spans))
        known, lines = lines, max(lines, script.needed(until))
        more += second.feed(script.spans[at:until], script.lines_between(known, lines))
        at = until
    more += second.feed([], script.lines_between(lines, len(script.lines)))
    return out, more + second.finish()


def check_spans_of_step(step: Step) -> None:
    """Check that spans are in order, nested or separate, and add up to the phases of the step."""
    assert step.spans is not None
    assert list(step.spans) == sorted(step.spans, key=lambda span: (span.offset_ns, -span.host_ns))
    own: dict[str, int] = {}
    around: list[tuple[str, int]] = []
    for name, at, took in step.spans:
        assert 0 <= at <= at + took <= step.wall_ns
        while around and around[-1][1] <= at:
            around.pop()
        if around:
            assert at + took <= around[-1][1]
            own[around[-1][0]] -= took
        own[name] = own.get(name, 0) + took
        around.append((name, at + took))
    if not step.missing_spans:
        assert own == {name: took for name, took in step.phases.items() if name != "other"}
