"""What a report, the lines of a headless run, its metrics and the findings say of devices' times: synthetic records."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from kept import keep
from synthetic import Training

from dpmon.cli.lines import Lines
from dpmon.records import (
    CALL_PHASES,
    UNTIMED,
    Untimed,
    call_head,
    kind_of,
    pack_call,
    pack_definition,
    pack_step,
    pack_timed,
)
from dpmon.report import collect, report_text
from dpmon.report.asjson import as_object
from dpmon.report.page import page
from dpmon.report.plots import plots

GPUS = ("cuda:0", "cuda:1")
OF_CALL = (0.5, 1.0, 2.0, 0.25)
OF_STEP = (0.25, 4.0, 3.0, 0.5)
HOST_ONLY = "the devices are CPUs: host time is all there is"


def timed(
    payloads: Sequence[bytes],
    replicas: Callable[[int], Sequence[float | None]] = lambda number: (1.5, 1.75),
    why: int = Untimed.NONE,
    of_step: Sequence[float | None] = OF_STEP,
) -> list[bytes]:
    """The records of a process whose devices are timed; `replicas`: what each took in the call of this number."""
    found, number = [], 0
    for payload in payloads:
        kind = kind_of(payload)
        number += kind == "call"
        if kind == "call":
            payload = pack_timed(payload, (*OF_CALL, *replicas(number)), why)
        elif kind == "step":
            payload = pack_timed(payload, of_step, why)
        found.append(payload)
    return found


def growing(number: int) -> tuple[float, float]:
    """1, 2, 3 ... ms for the first replica, twice that for the second."""
    return float(number), 2.0 * number


def trained(steps: int = 9, replicas: Any = growing, **how: Any) -> list[bytes]:
    made = Training(devices=GPUS, virtual=False)
    return [*made.begin(), *timed(made.run(steps), replicas, **how)]


def cells(lines: Sequence[str], title: str) -> list[list[str]]:
    """The rows of a table by its heading, as words; sizes that went to lines of their own are left out."""
    begin = next(number for number, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((number for number in range(begin, len(lines)) if not lines[number]), len(lines))
    head, *rows = lines[begin:end]
    return [head.split(), *(line.split() for line in rows if not line.startswith("      "))]


# ------------------------------------------------------------------------------------------------ the report


@pytest.mark.parametrize("drained", [True, False])
def test_a_replica_has_the_median_of_its_device_beside_that_of_the_host(state: Path, drained: bool) -> None:
    directory = keep({0: trained()}, drained=drained)
    first, second = as_object(collect(directory))["replicas"]
    assert (first["device_median_ms"], first["device_calls"], first["calls"], first["absent"]) == (5.0, 9, 9, {})
    assert second["device_median_ms"] == 10.0
    assert 0 < first["median_ms"] < 1, "that of the host is another"
    head, one, two = cells(report_text(directory, 64), "REPLICAS")
    assert head[:6] == ["device", "calls", "median", "p95", "on", "device"]
    assert (one[2], one[-2:]) == ("cuda:0", ["5.00", "ms"])
    assert (two[2], two[-2:]) == ("cuda:1", ["10.0", "ms"])
    wide = [line for line in report_text(directory, 120) if "Model 1" in line]
    assert wide[0].endswith("10.0 ms  [15, 5] -> [15, 2]"), "before the sizes"


def test_a_replica_whose_device_is_known_in_some_calls_says_in_how_many(state: Path) -> None:
    directory = keep({0: trained(replicas=lambda n: (float(n) if n > 6 else None, None), why=Untimed.CAPTURED)})
    first, second = as_object(collect(directory))["replicas"]
    assert (first["device_median_ms"], first["device_calls"], first["absent"]) == (8.0, 3, {})
    assert (second["device_median_ms"], second["device_calls"]) == (None, 0)
    assert second["absent"] == {"device_median_ms": UNTIMED[Untimed.CAPTURED]}
    _, one, two = cells(report_text(directory, 64), "REPLICAS")
    assert (one[-2:], two[-1]) == (["8.00", "ms"], "–")


def test_calls_of_evaluations_are_in_neither_median(state: Path) -> None:
    made = Training(devices=GPUS, virtual=False)
    payloads = made.run(8)
    flags = {number: payload for number, payload in enumerate(payloads) if kind_of(payload) == "call"}
    for number in list(flags)[4:]:  # without training and grad
        payloads[number] = payloads[number][:2] + b"\0" + payloads[number][3:]
    first, second = as_object(collect(keep({0: timed(payloads, growing)})))["replicas"]
    assert (first["calls"], first["device_calls"]) == (4, 4)
    assert (first["device_median_ms"], second["device_median_ms"]) == (2.5, 5.0)


def test_a_page_has_the_column_and_the_bars(state: Path) -> None:
    story = collect(keep({0: trained()}))
    (plot,) = [plot for plot in plots(story) if plot.name == "replicas"]
    host, device = plot.traces
    assert (host["name"], device["name"], device["y"]) == ("on the host", "on device", [5.0, 10.0])
    assert host["y"] == [(fact.median_ns or 0) / 1e6 for fact in story.evidence.replicas]
    assert (plot.layout["showlegend"], plot.layout["yaxis"]["title"]["text"]) == (True, "ms")
    pytest.importorskip("plotly")
    text = page(story)
    table = text[text.index("<h2>Replicas") :]
    assert "<th>p95</th><th>on device</th><th class=text>received" in table
    row = table[table.index("Model 1") : table.index("</tr>", table.index("Model 1"))]
    assert row.endswith("<td>10.0 ms</td><td class=text>[15, 5] -&gt; [15, 2]</td>")


def staged(process: int, calls: int, took: Callable[[int], Sequence[float | None]] | None) -> list[bytes]:
    """Calls of a model of two stages; those of an even number met another size."""
    absent = {"device_ms": HOST_ONLY}
    layout = {"root": "Toy", "via": None, "virtual": False, "devices": list(GPUS), "absent": absent}
    found = [
        pack_definition(1, layout),
        pack_definition(2, [["0", [30, 8], "int64", 1920]]),
        pack_definition(3, [["", [30, 5], "float32", 600]]),
        pack_definition(4, {"device": "cuda:0", "parts": ["embedding"]}),
        pack_definition(5, {"device": "cuda:1", "parts": ["rnn"]}),
        pack_definition(6, [["", [15, 5], "float32", 300]]),
    ]
    for number in range(1, calls + 1):
        gave = 6 if number % 2 == 0 else 3
        stages = (4, 2, 3, 0, 2_000_000, 5, 3, gave, 2_000_000, 5_000_000)
        call = pack_call(2, 6, 1, number, number, number * 10**7, 9_000_000, 2, gave, (-1, 0) * 4, (), stages)
        found.append(call if took is None else pack_timed(call, (*[None] * 4, *took(number)), Untimed.LATE))
        found.append(pack_step(2, number, number * 10**7, 9_500_000, 30, (-1, 9_000_000, -1, -1)))
    return found


def test_a_stage_has_the_median_of_its_device(state: Path) -> None:
    """Two processes have the same stages: their calls are in one line."""
    directory = keep({0: staged(0, 4, growing), 1: staged(1, 3, lambda n: (9.0, None))})
    lines = as_object(collect(directory))["stages"]
    found = {(line["stage"], line["outputs"]): line for line in lines}
    assert len(found) == len(lines) == 3
    first = found[0, "[30, 5]"]
    assert (first["calls"], first["device_calls"]) == (7, 7)
    assert (first["device_median_ms"], first["median_ms"]) == (4.0, 2.0), "of 1 2 3 4 9 9 9"
    whole, half = found[1, "[30, 5]"], found[1, "[15, 5]"]
    assert (whole["calls"], whole["device_calls"], whole["device_median_ms"]) == (4, 2, 4.0), "of 2 6"
    assert (half["calls"], half["device_calls"], half["device_median_ms"], half["absent"]) == (3, 2, 6.0, {})
    head, *rows = cells(report_text(directory, 64), "STAGES")
    assert head[:6] == ["device", "calls", "host", "time", "on", "device"]
    assert [row[-2:] for row in rows] == [["4.00", "ms"], ["4.00", "ms"], ["6.00", "ms"]]


@pytest.mark.parametrize(("took", "reason"), [(None, HOST_ONLY), (lambda number: (None, None), UNTIMED[Untimed.LATE])])
def test_stages_without_times_of_devices_have_no_column_but_the_reason(state: Path, took: Any, reason: str) -> None:
    directory = keep({0: staged(0, 3, took)})
    for line in as_object(collect(directory))["stages"]:
        assert (line["device_median_ms"], line["device_calls"]) == (None, 0)
        assert line["absent"] == {"device_median_ms": reason}
    assert "on device" not in "\n".join(report_text(directory, 120))


def test_a_rank_has_what_its_device_took_for_the_forward(state: Path) -> None:
    ranks = {}
    for number in range(3):
        made = Training(process=number, rank=number, devices=(f"cuda:{number}",), virtual=False, mode="single",
                        via="DistributedDataParallel")  # fmt: skip
        took = (0.25, None if number == 2 else 4.0 + number, 3.0, 0.5)
        ranks[number] = [*made.begin(), *timed(made.run(5), lambda _: (9.0,), Untimed.FAULT, took)]
    directory = keep(ranks)
    found = as_object(collect(directory))["ranks"]
    assert [one["forward_device_median_ms"] for one in found] == [4.0, 5.0, None]
    assert [one["absent"] for one in found[1:]] == [{}, {"forward_device_median_ms": UNTIMED[Untimed.FAULT]}]
    lines = report_text(directory, 80)
    assert any(line.rstrip().endswith("samples/s  forward on device") for line in lines)
    rows = [line for line in lines if line.startswith("  rank ")]
    assert [row.split()[-2:] for row in rows[:2]] == [["4.00", "ms"], ["5.00", "ms"]]
    assert rows[2].endswith("–")


def test_without_times_of_devices_nothing_is_said_of_them(state: Path) -> None:
    made = Training()
    directory = keep({0: [*made.begin(), *made.run(40)], 1: Training(process=1).run(40)})
    story = collect(directory)
    said = as_object(story)
    for line in (*said["replicas"], *said["ranks"]):
        assert line["absent"] == {}, "the record does not say"
    assert {line["device_median_ms"] for line in said["replicas"]} == {None}
    assert {line["forward_device_median_ms"] for line in said["ranks"]} == {None}
    assert "on device" not in "\n".join(report_text(directory, 200))
    (plot,) = [plot for plot in plots(story) if plot.name == "replicas"]
    assert (len(plot.traces), "name" in plot.traces[0], plot.layout["showlegend"]) == (1, False, False)
    assert plot.note == "median, the whisker to the 95th percentile"
    assert json.loads(json.dumps(said)) == said


# ------------------------------------------------------------------------------------------------ the lines of --json


def line_of(payloads: Sequence[bytes]) -> dict[str, Any]:
    """What a headless run says of these records."""
    said: list[bytes] = []
    lines = Lines(keep({0: payloads}, status=None, drained=False), lambda line: bool(said.append(line)) or True)
    lines.tick(1e9)
    lines.end(None)
    found: dict[str, Any] = json.loads(said[0])
    return found


def on_device(phases: dict[str, dict[str, float | None]]) -> dict[str, float | None]:
    return {name: phase["device_median_ms"] for name, phase in phases.items()}


def test_a_line_has_the_device_beside_the_host_of_the_same_thing(state: Path) -> None:
    said = line_of(trained(40))
    # Whole, as the host's: the model has the phases of the calls apart, of which 0.25 ms would be left.
    assert on_device(said["phases"]) == {
        "data": 0.25, "forward": 4.0, "backward": 3.0, "optimizer": 0.5, "other": None,
    }  # fmt: skip
    assert on_device(said["call_phases"]) == dict(zip(CALL_PHASES, OF_CALL, strict=True))
    whole = said["phases"]["forward"]["median_ms"]
    assert whole > sum(phase["median_ms"] for phase in said["call_phases"].values()) * 0.9
    assert "device_median_ms" not in said["absent"]


def test_a_line_is_of_the_mode_in_force_and_of_its_newest_steps(state: Path) -> None:
    made = Training(devices=GPUS, virtual=False)
    payloads = timed(made.run(10), of_step=(0.25, 9.0, 3.0, 0.5)) + made.switch("single")
    payloads += timed(made.run(5), lambda _: (2.0,), of_step=(None, 7.0, 3.0, 0.5), why=Untimed.LATE)
    payloads += timed(made.run(128), lambda _: (2.0,), of_step=(None, 2.0, 1.0, 0.5), why=Untimed.LATE)
    said = line_of(payloads)
    assert (said["mode"], said["call_phases"]) == ("single", {})
    assert on_device(said["phases"]) == {
        "data": None, "forward": 2.0, "backward": 1.0, "optimizer": 0.5, "other": None,
    }  # fmt: skip


def test_several_calls_of_a_step_count_together_as_on_the_host(state: Path) -> None:
    made = Training(devices=GPUS, virtual=False)
    payloads: list[bytes] = []
    for _ in range(20):
        call = [payload for payload in made.step() if kind_of(payload) != "step"]
        number = made.steps
        made.steps -= 1
        again = made.step()
        assert made.steps == number
        # Their forward on the host is that of both calls.
        took = sum(call_head(payload)[7] for payload in (*call, *again) if kind_of(payload) == "call")
        step = pack_step(1, number, made.now, 3 * took, 60, (-1, took, took, -1))
        payloads += timed([*call, *again[:-1], step], of_step=(None, 8.0, 3.0, None))
    said = line_of([*made.begin(), *payloads])
    assert on_device(said["call_phases"]) == {name: 2 * took for name, took in zip(CALL_PHASES, OF_CALL, strict=True)}
    assert on_device(said["phases"]) == {"forward": 8.0, "backward": 3.0, "other": None}


@pytest.mark.parametrize(("took", "reason"), [(None, HOST_ONLY), (lambda number: (None, None), UNTIMED[Untimed.LATE])])
def test_a_line_that_knows_no_device_says_why(state: Path, took: Any, reason: str) -> None:
    said = line_of(staged(0, 9, took))
    assert on_device(said["phases"]) == {"forward": None, "other": None}
    assert said["absent"]["device_median_ms"] == reason
