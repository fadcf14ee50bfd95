"""Builds the rows and events of a training, without running one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpmon.record.history_rows import Definition, LossRow, Resolver, Row, parse_definition
from dpmon.record.record_types import CallParts, CallRow, Event, Record, Step
from dpmon.record.schema import SPAN_PHASES, STEP_PHASES, TRAINING
from dpmon.record.shared_names import CALL_PHASES, Untimed
from dpmon.record.span_format import Flag

SECOND = 1_000_000_000
TRAINING_FLAGS = Flag.TRAINING | Flag.GRAD
"""The flags of a call that trains."""
STEP_ROW_PHASES = SPAN_PHASES[:4]
"""The phases of `step_row`."""
_KINDS = {Step: "step", Event: "event", Definition: "definition", LossRow: "loss"}


class RowReader(Resolver):
    """Turns all rows of one process into records. `origin`: the time of the rows at the run's start (ns)."""

    def __init__(self, process: int, rank: int | None = None, origin: int = 0) -> None:
        super().__init__(process, rank)
        self._who: dict[str, Any] = {"process": process, "rank": rank}
        self._origin = origin

    def records(self, row: Row) -> list[Record]:
        """Return the records in a row: none for a definition, which is remembered, or if one is lost.

        A step comes after its calls, and has none.
        """
        if isinstance(row, Definition):
            self.definitions.remember(row.number, parse_definition(row.value))
            return []
        if isinstance(row, Event):
            return [row]
        if isinstance(row, Step):
            calls = [call._replace(start=call.start - self._origin) for call in row.calls]
            step = row._replace(**self._who, start_ns=row.start_ns - self._origin, calls=())
            found = [record for call in calls if (record := self.call(step, call)) is not None]
            return [*found, step] if step.takes_time else [*found]
        found_alone: Record | None
        if isinstance(row, LossRow):
            found_alone = self.loss(row._replace(t_ns=row.t_ns - self._origin))
        else:
            found_alone = self.collective(row._replace(start_ns=row.start_ns - self._origin))
        return [] if found_alone is None else [found_alone]

    def record(self, row: Row) -> Record | None:
        """Return the only record in a row; None if there is none."""
        records = self.records(row)
        assert len(records) < 2
        return records[0] if records else None


def records_of_rows(rows: Iterable[Row], process: int = 0, rank: int | None = None, origin_ns: int = 0) -> list[Record]:
    """Return the records in `rows`, as a reader of one process sees them."""
    reader = RowReader(process, rank, origin_ns)
    return [record for row in rows for record in reader.records(row)]


def kind_of(row: Row) -> str:
    """Return the kind of a row: step, event, definition, loss or collective."""
    return _KINDS.get(type(row), "collective")


def flags_of(virtual: bool, training: bool, grad: bool, failed: bool) -> int:
    """Return the flags of a call."""
    return virtual * Flag.VIRTUAL | training * Flag.TRAINING | grad * Flag.GRAD | failed * Flag.FAILED


def parts_of(
    phases: Sequence[int] = (-1, 0) * 4, replicas: Sequence[int] = (), stages: Sequence[int] = ()
) -> CallParts:
    """Return the parts of a call from their numbers.

    `phases`: offset (-1: did not run) and duration of each of CALL_PHASES. `replicas`: inputs, outputs, offset and
    duration of each. `stages`: definition, inputs, outputs, offset and duration (-1: did not end) of each.
    """
    ran = [(at, took) if at >= 0 else None for at, took in zip(phases[::2], phases[1::2], strict=True)]
    each = zip(*(stages[at::5] for at in range(5)), strict=True)
    return CallParts(
        ran,
        list(zip(*(replicas[at::4] for at in range(4)), strict=True)),
        [(*one, took if took >= 0 else None) for *one, took in each],
    )


def call_row(
    mode: str,
    flags: int,
    layout: int,
    call: int,
    start_ns: int,
    wall_ns: int,
    inputs: int,
    outputs: int,
    phases: Sequence[int] = (-1, 0) * 4,
    replicas: Sequence[int] = (),
    stages: Sequence[int] = (),
) -> CallRow:
    """Return a call; for its parts, see `parts_of`."""
    numbers = call, flags | Flag.DP * (mode == "dp"), layout, start_ns, wall_ns, inputs, outputs
    return CallRow(*numbers, parts_of(phases, replicas, stages))


def calls_alone(step: int, *calls: CallRow, kind: int = TRAINING) -> Step:
    """Return calls of a step without the step, as if it had not ended. `step` 0: they ran outside the steps."""
    start_ns = calls[0].start
    wall_ns = calls[-1].end - start_ns
    return Step(0, None, -step, calls[-1].mode, start_ns, wall_ns, None, {}, kind=kind, calls=calls)


def step_row(
    mode: str,
    step: int,
    start_ns: int,
    wall_ns: int,
    samples: int | None,
    phases: Sequence[int],
    spans: Iterable[tuple[int, int, int]] = (),
    **more: int,
) -> Step:
    """Return a step.

    `phases`: ns of STEP_ROW_PHASES, -1 if it did not run. `spans`: with absolute starts. `more`: other phases and
    quantities.
    """
    took = {name: ns for name, ns in zip(STEP_ROW_PHASES, phases, strict=True) if ns >= 0}
    took |= {name: ns for name, ns in more.items() if name in SPAN_PHASES}
    counts = {name: count for name, count in more.items() if name not in SPAN_PHASES}
    runs = [(phase, start - start_ns, ns) for phase, start, ns in spans]
    known = None if samples is None or samples < 0 else samples
    return Step(0, None, step, mode, start_ns, wall_ns, known, with_other(took, wall_ns), counts, runs)


def with_other(took: Mapping[str, int], wall_ns: int) -> dict[str, int]:
    """Return the phases of a step in order, and the rest of the step."""
    known = {name: took[name] for name in STEP_PHASES[:-1] if name in took}
    return {**known, "other": max(0, wall_ns - sum(known.values()))}


def runs_of(spans: Iterable[tuple[str, int, int]]) -> list[tuple[int, int, int]]:
    """Return the runs of a step from name, offset and duration of each phase."""
    return [(SPAN_PHASES.index(name), begin, took) for name, begin, took in spans]


def with_event_data(event: Row, **data: Any) -> Event:
    """Return an event with changed data."""
    assert isinstance(event, Event)
    return Event(event.kind, {**event.data, **data})


def chunks(rows: int, devices: int) -> list[int]:
    """Return the rows of each replica, divided like torch.chunk."""
    size = -(-rows // devices)
    return [min(size, rows - start) for start in range(0, rows, size)]


def consecutive_spans(start_ns: int, took: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the spans of a step whose phases (in the order of STEP_ROW_PHASES) follow each other directly."""
    for phase, ns in enumerate(took):
        if ns >= 0:
            yield phase, start_ns, ns
            start_ns += ns


class Training:
    """Makes the rows of one process step by step, with random variations of given times."""

    def __init__(
        self,
        *,
        process: int = 0,
        rank: int | None = None,
        devices: Sequence[str] = ("cpu:0", "cpu:1"),
        virtual: bool = True,
        root: str = "Model",
        via: str | None = "DataParallel",
        batch: int = 30,
        features: tuple[int, int] = (5, 2),
        step_ns: int = 2_400_000,
        start_ns: int = 2 * SECOND,
        mode: str = "dp",
        seed: int = 1,
    ) -> None:
        self.process, self.rank = process, rank
        self.devices, self.virtual = tuple(devices), virtual
        self.root, self.via = root, via
        self.batch, self.features = batch, features
        self.step_ns = step_ns
        self.now = start_ns
        """Monotonic clock at the start of the next step."""
        self.mode = mode
        self.steps = 0
        self.random = random.Random(seed)
        self.defined: dict[Any, int] = {}
        self.shares = {
            "dp": {
                "data": 3,
                "scatter": 4,
                "replicate": 31,
                "parallel_apply": 22,
                "gather": 2,
                "rest": 1,
                "backward": 28,
                "optimizer": 8,
            },
            "single": {"data": 5, "rest": 40, "backward": 40, "optimizer": 13},
        }

    def begin(self) -> list[Row]:
        """Return what a process writes first: the records of the process and of its first mode."""
        who = {"process": self.process, "rank": self.rank, "t_s": self.now / SECOND}
        facts = {"world": None, "pid": 4242, "argv": ["linear.py"], "python": "3.11.2", "torch": "2.13.0"}
        return [Event("process", {**who, **facts, "device_kind": "cpu"}), self.mode_event("start")]

    def mode_event(self, requested_by: str, refused: str | None = None) -> Event:
        """Return the record of the mode in force, as the tracer writes it."""
        data = {
            "process": self.process,
            "rank": self.rank,
            "t_s": self.now / SECOND,
            "step": self.steps + 1,
            "call": self.steps + 1,
            "mode": self.mode,
            "requested_by": requested_by,
            "devices": list(self.devices) if self.mode == "dp" else list(self.devices[:1]),
            "virtual": self.virtual,
            "reason": "no GPU on this machine" if self.virtual else None,
            "refused": refused,
        }
        return Event("mode", data)

    def switch(self, mode: str) -> list[Row]:
        """Change the mode; return its record, as after a request of the user."""
        self.mode = mode
        return [self.mode_event("user")]

    def _define(self, rows: list[Row], value: Any) -> int:
        key = repr(value)
        if key not in self.defined:
            self.defined[key] = len(self.defined) + 1
            rows.append(Definition(self.defined[key], value))
        return self.defined[key]

    def _sizes(self, out: list[Row], rows: int, columns: int, path: str) -> int:
        return self._define(out, [[path, [rows, columns], "float32", rows * columns * 4]])

    def _wobble(self, ns: float) -> int:
        return int(ns * self.random.uniform(0.85, 1.2))

    def step(self, rows: int | None = None, failed: bool = False, evaluates: bool = False) -> list[Row]:
        """Return the rows of one step: new definitions, the step with its call. `evaluates`: without training."""
        rows = self.batch if rows is None else rows
        self.steps += 1
        out: list[Row] = []
        shares = self.shares[self.mode]
        took = {name: self._wobble(self.step_ns * share / 100) for name, share in shares.items()}
        call_start = self.now + took["data"]
        dp = self.mode == "dp"
        layout: dict[str, Any] = {
            "root": self.root,
            "via": self.via,
            "devices": list(self.devices),
            "absent": {},
        }
        layout_number = self._define(out, layout)
        inputs = self._sizes(out, rows, self.features[0], "0")
        outputs = self._sizes(out, rows, self.features[1], "")
        phases: list[int] = []
        at = 0
        apply_at = 0
        for name in CALL_PHASES:
            if name in took:
                apply_at = at if name == "parallel_apply" else apply_at
                phases += [at, took[name]]
                at += took[name]
            else:
                phases += [-1, 0]
        forward = at + took["rest"]
        replicas: list[int] = []
        for share in chunks(rows, len(self.devices)) if dp else [rows]:
            inside = took["parallel_apply"] if dp else took["rest"]
            got, gave = (
                self._sizes(out, share, width, path) for width, path in zip(self.features, ("0", ""), strict=True)
            )
            replicas += [got, gave, apply_at, self._wobble(inside * 0.9)]
        flags = flags_of(self.virtual and dp, not evaluates, not evaluates, failed)
        numbers = layout_number, self.steps, call_start, forward, inputs, outputs
        call = call_row(self.mode, flags, *numbers, phases, replicas)
        rest = [-1, -1] if evaluates else [took["backward"], took["optimizer"]]
        parts = [took["data"], forward, *rest]
        wall = int(sum(max(ns, 0) for ns in parts) * 1.01)
        spans = consecutive_spans(self.now, parts)
        out.append(step_row(self.mode, self.steps, self.now, wall, rows, parts, spans)._replace(calls=[call]))
        self.now += wall
        return out

    def run(self, steps: int) -> list[Row]:
        """Return the rows of several steps."""
        return [row for _ in range(steps) for row in self.step()]


def pause_event(at_s: float, step: int, took_s: float | None = None, *, process: int = 0, **more: Any) -> Event:
    """Return the beginning of a pause, or with `took_s` its end, as the tracer writes it."""
    data = {"process": process, "rank": None, "t_s": at_s, "step": step, "paused": took_s is None, "paused_s": took_s}
    return Event("pause", {**data, "reason": None, "refused": None, **more})


def host_event(
    t_s: float, cpu: float | None = 43.0, gpu_absent: str | None = "NVML library not found", **more: Any
) -> Event:
    """Return a sample of the host, as the supervisor writes it."""
    data: dict[str, Any] = {
        "t_s": t_s,
        "cpu_pct": cpu,
        "mem_used_bytes": 2_300_000_000,
        "mem_total_bytes": 24_800_000_000,
        "run_cpu_pct": 180.0,
        "run_mem_bytes": 812_000_000,
        "gpu_absent": gpu_absent,
        "absent": {},
    }
    return Event("host", {**data, **more})


def device_event(t_s: float, index: int, **more: Any) -> Event:
    """Return a sample of one GPU, as the supervisor writes it."""
    data = {
        "t_s": t_s,
        "index": index,
        "uuid": f"GPU-{index:04d}",
        "name": "NVIDIA H200",
        "of_run": True,
        "util_pct": 97 - 10 * index,
        "mem_used_bytes": 71 << 30,
        "mem_total_bytes": 141 << 30,
        "mem_run_bytes": 66 << 30,
        "temperature_c": 64,
        "power_w": 612.0,
        "power_limit_w": 700.0,
        "sm_clock_mhz": 1980,
        "absent": {},
    }
    return Event("device", {**data, **more})


def whole_device_event(t_s: float, index: int, **more: Any) -> Event:
    """Return a sample of one GPU with values in all fields that NVML can fill."""
    known = {
        "visible": True,
        "ordinals": [{"process": 0, "device": f"cuda:{index}"}],
        "mem_reserved_bytes": 1 << 30,
        "mem_others_bytes": 5 << 30,
        "mem_torch_bytes": 60 << 30,
        "temperature_limit_c": 90,
        "energy_j": 7.2e6,
        "mem_clock_mhz": 3201,
        "throttle": [],
        "fan_pct": None,
        "pcie_rx_bytes_s": 120_000_000,
        "pcie_tx_bytes_s": 80_000_000,
        "nvlink_rx_bytes_s": 4_000_000_000,
        "nvlink_tx_bytes_s": 4_100_000_000,
        "pcie_gen": 5,
        "pcie_gen_max": 5,
        "pcie_width": 16,
        "pcie_width_max": 16,
        "nvlinks_down": 0,
        "nvlink_errors": 0,
        "ecc_corrected": 0,
        "ecc_uncorrected": 0,
        "retired_pages": None,
        "remapped_rows": 0,
        "xid": None,
        "mig": False,
        "mig_devices": [],
        "persistence": True,
        "sm_active_pct": 83.0,
        "tensor_active_pct": 41.0,
        "dram_active_pct": 30.0,
        "processes": [
            {"pid": 4242, "mem_bytes": 66 << 30, "of_run": True},
            {"pid": 77, "mem_bytes": 5 << 30, "of_run": False},
        ],
        "process_count": 2,
        "absent": {"fan_pct": "not supported", "retired_pages": "not supported"},
    }
    return device_event(t_s, index, **{**known, **more})


# ------------------------------------------------------------------------------------------------ device times

GPUS = ("cuda:0", "cuda:1")
CALL_TIMES_MS = (0.5, 1.0, 2.0, 0.25)
STEP_TIMES_MS = (0.25, 4.0, 3.0, 0.5)
HOST_ONLY = "the devices are CPUs: host time is all there is"


def with_device_times(
    rows: Sequence[Row],
    replicas: Callable[[int], Sequence[float | None]] = lambda number: (1.5, 1.75),
    why: int = Untimed.NONE,
    of_step: Sequence[float | None] = STEP_TIMES_MS,
    of_call: Sequence[float | None] = CALL_TIMES_MS,
) -> list[Row]:
    """Return the records with device times; `replicas`: times of the replicas in call `number`, ms."""
    found: list[Row] = []
    number = 0
    for row in rows:
        if isinstance(row, Step):
            calls = []
            for call in row.calls:
                number += 1
                calls.append(call.with_device_times((*of_call, *replicas(number)), why))
            row = row.with_device_times(of_step, why)._replace(calls=calls)
        found.append(row)
    return found


def growing_times(number: int) -> tuple[float, float]:
    """Return 1, 2, 3 ... ms for the first replica, and twice that for the second."""
    return float(number), 2.0 * number


def timed_training(steps: int = 9, replicas: Any = growing_times, **how: Any) -> list[Row]:
    made = Training(devices=GPUS, virtual=False)
    return [*made.begin(), *with_device_times(made.run(steps), replicas, **how)]


def staged_calls(calls: int, took: Callable[[int], Sequence[float | None]] | None) -> list[Row]:
    """Return calls of a model with two stages; calls with an even number have another size."""
    absent = {"device_ms": HOST_ONLY}
    layout = {"root": "Toy", "via": None, "devices": list(GPUS), "absent": absent}
    found: list[Row] = [
        Definition(1, layout),
        Definition(2, [["0", [30, 8], "int64", 1920]]),
        Definition(3, [["", [30, 5], "float32", 600]]),
        Definition(4, {"device": "cuda:0", "parts": ["embedding"]}),
        Definition(5, {"device": "cuda:1", "parts": ["rnn"]}),
        Definition(6, [["", [15, 5], "float32", 300]]),
    ]
    for number in range(1, calls + 1):
        gave = 6 if number % 2 == 0 else 3
        stages = (4, 2, 3, 0, 2_000_000, 5, 3, gave, 2_000_000, 5_000_000)
        numbers = 1, number, number * 10**7, 9_000_000, 2, gave
        call = call_row("single", TRAINING_FLAGS, *numbers, stages=stages)
        if took is not None:
            call = call.with_device_times((*[None] * 4, *took(number)), Untimed.LATE)
        phases = (-1, 9_000_000, -1, -1)
        found.append(step_row("single", number, number * 10**7, 9_500_000, 30, phases)._replace(calls=[call]))
    return found


# ------------------------------------------------------------------------------------------------ more trainings


def eventful_training(chance: random.Random, process: int) -> Iterator[list[Row]]:
    """Yield a few records at a time of a training with all activities."""
    training = Training(process=process, rank=process, step_ns=75_000_000, batch=30, seed=process)
    first, *others = training.begin()
    yield [with_event_data(first, pid=4242 + process), *others]
    yield [
        Event(
            "ddp",
            {
                "process": process,
                "rank": process,
                "wrapper": 0,
                "root": "Model",
                "t_s": training.now / SECOND,
                "group": [0, 1],
            },
        )
    ]
    passes = 0
    for number in range(150):
        what = chance.random()
        if what < 0.05:
            yield training.switch("single" if training.mode == "dp" else "dp")
        elif what < 0.1:
            training.now += chance.randrange(SECOND // 50, SECOND)  # a checkpoint
        elif what < 0.15:
            began = training.now
            training.now += chance.randrange(2 * SECOND)
            yield [pause_event(began / SECOND, 1, process=process)]
            if what < 0.13:  # else the record of its end was lost
                took = (training.now - began) / SECOND
                yield [pause_event(training.now / SECOND, 1, took, process=process)]
        elif what < 0.2:
            training.steps += chance.randrange(1, 3)  # missed
        elif what < 0.3:
            yield training.step(evaluates=True)
        records = training.step(rows=chance.choice([30, 30, 30, number + 2]))
        if what > 0.35:  # a synchronized backward pass
            passes += 1
            sync = {"sync": chance.randrange(1, 9_000_000), "synced": 1, "sync_number": passes}
            row = records[-1]
            assert isinstance(row, Step)
            phases = with_other({**row.phases, "sync": sync.pop("sync")}, row.wall_ns)
            records[-1] = row._replace(phases=phases, counts={**row.counts, **sync})
        if what < 0.45:
            last = records[-1]
            assert isinstance(last, Step)
            records[-1] = last.with_device_times((None, 1.5, 2.5, None, None, 3.5), 3)
        yield from ([record] for record in records) if what > 0.6 else [records]


class EvenTraining(Training):
    """A training with steps of equal duration."""

    def _wobble(self, ns: float) -> int:
        return int(ns)


def even_training_rows() -> list[Row]:
    training = EvenTraining()
    return [*training.begin(), *training.run(20), *training.switch("single"), *training.run(5)]


def sample_events() -> list[Row]:
    found = [host_event(float(t)) for t in range(3)]
    found += [device_event(float(t), index) for t in range(3) for index in (0, 1)]
    found.append(device_event(3.0, 0, util_pct=None, absent={"util_pct": "the GPU is lost"}))
    memory: dict[str, Any] = {"process": 0, "rank": None, "t_s": 2.5, "step": 9, "took_ms": 0.1}
    memory["absent"] = {"devices": "too many"}
    memory["devices"] = [
        {
            "device": "cuda:0",
            "model_bytes": 100,
            "gradients_bytes": 50,
            "peak_bytes": None,
            "absent": {"peak_bytes": "x"},
        },
        {"device": "cuda:1", "model_bytes": 10},
    ]
    return [*found, Event("memory", memory), Event("warning", {"process": None, "t_s": None, "text": "a\nb"})]


# ------------------------------------------------------------------------------------------------ FLOPs


def flops_event(process: int = 0, **more: Any) -> Event:
    """Return the record of a counted step, as the tracer writes it."""
    data: dict[str, Any] = {
        "process": process,
        "rank": None,
        "t_s": 2.0,
        "step": 1,
        "flops": 3 * 10**12,
        "recomputed_flops": 0,
        "by_dtype": {"bfloat16": 3 * 10**12},
        "operators": 900,
        "uncounted": [],
        "reason": None,
        "absent": {},
    }
    return Event("flops", {**data, **more})


def with_flops(rows: Iterable[Row], flops: int, recomputed: int = 0, every: int = 1) -> list[Row]:
    """Return the rows with the FLOPs of each step, or of one in `every`."""
    counts = {"flops": flops, **({"recomputed_flops": recomputed} if recomputed else {})}
    return [
        row._replace(counts={**row.counts, **counts}) if isinstance(row, Step) and row.step % every == 0 else row
        for row in rows
    ]
