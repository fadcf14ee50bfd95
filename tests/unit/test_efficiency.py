"""MFU and FLOPs per second: what is counted, the peak of the GPUs, the text, and why a figure is absent."""

from __future__ import annotations

import json
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dpmon.cli.main import main
from dpmon.cli.status import read_run_status
from dpmon.model.efficiency import Efficiency
from dpmon.model.findings.device_findings import find_small_kernels
from dpmon.model.gpu_peaks import PEAKS, find_peak
from dpmon.model.run_analysis import RunAnalysis
from dpmon.record.history_rows import Row
from dpmon.report.document import Paragraph
from dpmon.report.report_json import report_as_json
from dpmon.report.sections import build_document
from dpmon.store.step_stats import Rate
from support.analysis_builders import HEALTHY_RUN, device_usage
from support.format_readers import ROOT, tables
from support.history_builders import read_report, snapshot_of_rows, with_changes, write_run_directory
from support.rank_builders import ddp_rank_rows
from support.record_builders import SECOND, Training, device_event, flops_event, host_event, with_flops

STEP_S = 0.1
FLOPS = 10**13
H100 = "NVIDIA H100 80GB HBM3"


def samples(count: int = 1, process: int = 0, seconds: int = 70, **more: Any) -> list[Row]:
    """Return samples of GPUs that `process` calls cuda:0, cuda:1 ..."""
    return [
        device_event(
            float(second),
            index,
            **{"name": H100, "ordinals": [{"process": process, "device": f"cuda:{index}"}], "util_pct": 98, **more},
        )
        for second in range(seconds)
        for index in range(count)
    ]


def training_rows(
    devices: tuple[str, ...] = ("cuda:0",), flops: int = FLOPS, recomputed: int = 0, every: int = 1, steps: int = 400
) -> list[Row]:
    mode = "dp" if len(devices) > 1 else "single"
    training = Training(mode=mode, devices=devices, via=None, virtual=False, step_ns=int(STEP_S * SECOND))
    return [*training.begin(), *with_flops(training.run(steps), flops, recomputed, every)]


def efficiency_of(*rows: Row, devices: tuple[str, ...] = ("cuda:0",), **more: Any) -> Efficiency:
    """Return the efficiency of the last ten seconds of a run with these other rows."""
    return snapshot_of_rows([*training_rows(devices, **more), *rows]).efficiency


def test_mfu_is_flops_by_elapsed_time_and_the_peak_of_the_gpu() -> None:
    run = snapshot_of_rows([*training_rows(), flops_event(), *samples()])
    rate = run.recent_rate.rate
    assert rate is not None
    efficiency = run.efficiency
    assert efficiency.flops_per_s == pytest.approx(FLOPS * rate.steps_per_s)
    assert efficiency.peak_flops_per_s == efficiency.reachable_flops_per_s == 989e12
    assert efficiency.mfu == efficiency.hfu == pytest.approx(FLOPS * rate.steps_per_s / 989e12)
    assert efficiency.reason is None
    assert efficiency.ranks == {0: efficiency.flops_per_s}
    whole = run.whole_efficiency
    assert whole.mfu == pytest.approx(efficiency.mfu, rel=0.1)


def test_the_text_and_the_line() -> None:
    rate = Rate(10.0, None, 10.0, None)
    known = Efficiency(rate, 376e12, 989e12, 989e12, 0.0, "bf16", reason=None)
    assert known.line == "MFU 38%"
    assert known.text == "MFU 38% (bf16, 376 of 989 TFLOP/s)"
    assert known._replace(is_lower_bound=True).text == "MFU ≥38% (bf16, 376 of 989 TFLOP/s)"
    again = known._replace(recomputed_share=0.25)
    assert again.text == "MFU 38% (bf16, 376 of 989 TFLOP/s, HFU 48% with what is computed again)"
    throttled = known._replace(reachable_flops_per_s=752e12)
    assert throttled.text == "MFU 38% (bf16, 376 of 989 TFLOP/s, throttled clocks allow 752)"
    on_cpu = Efficiency(rate, 12.1e9, dtype="fp32", reason="a CPU has no known peak")
    assert on_cpu.line == "12.1 GFLOP/s"
    assert on_cpu.text == "12.1 GFLOP/s (fp32, 1.21 GFLOP a step); MFU unknown: a CPU has no known peak"
    again = on_cpu._replace(recomputed_share=0.25)
    assert "(fp32, 1.21 GFLOP a step, 25% more with what is computed again)" in again.text
    assert Efficiency().line == ""
    assert Efficiency().text == "FLOPs and MFU unknown: no step's FLOPs were counted"


def test_recomputed_flops_count_for_hfu_only() -> None:
    efficiency = efficiency_of(flops_event(), *samples(), recomputed=FLOPS // 4)
    assert efficiency.mfu is not None
    assert efficiency.hfu == pytest.approx(1.25 * efficiency.mfu)


def test_each_dtype_counts_with_its_own_peak() -> None:
    by_dtype = {"bfloat16": 900, "float32": 95, "float64": 5}
    efficiency = efficiency_of(flops_event(by_dtype=by_dtype), *samples())
    assert efficiency.dtype == "bf16 + fp32"
    assert efficiency.peak_flops_per_s == pytest.approx(1e12 / (0.9 / 989 + 0.095 / 67))


def test_tf32_has_its_own_peak() -> None:
    assert efficiency_of(flops_event(by_dtype={"tf32": 1}), *samples()).peak_flops_per_s == 495e12
    assert efficiency_of(flops_event(by_dtype={"float32": 1}), *samples()).peak_flops_per_s == 67e12


def test_a_process_has_the_peak_of_all_its_gpus() -> None:
    devices = ("cuda:0", "cuda:1")
    efficiency = efficiency_of(flops_event(), *samples(3), devices=devices)
    assert efficiency.peak_flops_per_s == 2 * 989e12


def test_throttled_clocks_lower_the_reachable_peak() -> None:
    throttled: dict[str, Any] = {"throttle": ["power limit"], "sm_clock_mhz": 1464}
    efficiency = efficiency_of(flops_event(), *samples(**throttled))
    assert efficiency.peak_flops_per_s == 989e12
    assert efficiency.reachable_flops_per_s == pytest.approx(0.8 * 989e12)
    others: tuple[dict[str, Any], ...] = (
        {"throttle": []},
        {"util_pct": 10},
        {"sm_clock_mhz": 1980},
        {"name": "NVIDIA B200"},
    )
    for more in others:
        same = efficiency_of(flops_event(), *samples(**{**throttled, **more}))
        assert same.reachable_flops_per_s == same.peak_flops_per_s


@pytest.mark.parametrize(
    ("records", "more", "gpu", "reason"),
    [
        ([], {}, {}, "no step's FLOPs were counted"),
        (
            [flops_event()],
            {"every": 2},
            {},
            "the FLOPs of 50% of the steps are known: no step with the calls and input shapes of the others could"
            " be counted; at most 8 are tried",
        ),
        (
            [flops_event(flops=None, by_dtype=None, operators=None, reason="torch.compile is in use")],
            {"every": 10**6},
            {},
            "torch.compile is in use",
        ),
        ([flops_event()], {}, {"name": "NVIDIA X"}, "no peak of NVIDIA X in bf16 is known"),
        ([flops_event()], {}, {"name": "Tesla T4"}, "no peak of Tesla T4 in bf16 is known"),
        ([flops_event()], {}, {"mig": True}, "a GPU was not sampled, or has MIG instances"),
        ([flops_event()], {}, {"process": 7}, "a GPU was not sampled, or has MIG instances"),
        ([flops_event()], {"devices": ("cpu",)}, {}, "a CPU has no known peak"),
    ],
)
def test_without_mfu_there_is_a_reason(records: list[Row], more: Any, gpu: Any, reason: str) -> None:
    efficiency = efficiency_of(*records, *samples(**gpu), **more)
    assert (efficiency.mfu, efficiency.hfu, efficiency.reason) == (None, None, reason)
    assert (efficiency.flops_per_s is None) == any(word in reason for word in ("steps are known", "counted", "compile"))


def test_uncounted_operators_make_it_a_lower_bound() -> None:
    efficiency = efficiency_of(flops_event(), flops_event(uncounted=["my::scan"]), *samples())
    assert efficiency.is_lower_bound
    assert efficiency.figure.startswith("MFU ≥")


def rank_rows(count: int = 2) -> dict[int, list[Row]]:
    """Return ranks on one GPU each; the FLOPs of rank 1 are half of the others'."""
    rows, _ = ddp_rank_rows(count, steps=200)
    found = {
        rank: [*with_flops(own, FLOPS // 100 // (1 + rank % 2)), flops_event(rank, rank=rank)]
        for rank, own in rows.items()
        if rank >= 0
    }
    ordinals = [[{"process": rank, "device": f"cuda:{rank}"}] for rank in range(count)]
    found[-1] = [
        device_event(float(second), rank, name=H100, ordinals=ordinals[rank], util_pct=98)
        for second in range(10)
        for rank in range(count)
    ]
    return found


def test_ranks_have_their_own_figures_and_a_sum() -> None:
    rows = rank_rows()
    run = snapshot_of_rows(rows)
    devices = {process.process: process.devices for process in run.training_processes}
    efficiency = run.efficiency
    assert [*efficiency.ranks] == [0, 1], devices
    first, second = efficiency.ranks.values()
    assert second == pytest.approx(first / 2)
    assert efficiency.flops_per_s == pytest.approx(first + second)
    assert efficiency.peak_flops_per_s == 2 * 989e12


def test_a_gpu_that_ranks_share_counts_once() -> None:
    rows = rank_rows()
    ordinals = [{"process": rank, "device": f"cuda:{rank}"} for rank in range(2)]
    rows[-1] = [device_event(float(second), 0, name=H100, ordinals=ordinals) for second in range(10)]
    assert snapshot_of_rows(rows).efficiency.peak_flops_per_s == 989e12


def test_report_status_and_json_have_it(state: Path) -> None:
    directory = write_run_directory({0: [*training_rows(), flops_event()], -1: samples()})
    report = read_report(directory)
    (section,) = [section for section in build_document(report).sections if section.title == "How good"]
    (paragraph,) = section.parts
    assert isinstance(paragraph, Paragraph)
    assert paragraph.text.startswith("MFU ")
    assert "of 989 TFLOP/s" in paragraph.text
    found = json.loads(json.dumps(report_as_json(report)))["efficiency"]
    assert found["mfu"] == pytest.approx(found["flops_per_s"] / 989e12)
    _, members = read_run_status(directory)
    assert members["efficiency"]["mfu"] == found["mfu"]
    assert members["efficiency"]["text"] == report.run.whole_efficiency.figure


def test_the_reason_is_in_report_and_json_only(state: Path) -> None:
    reason: dict[str, Any] = {"flops": None, "by_dtype": None, "operators": None, "reason": "torch.compile is in use"}
    directory = write_run_directory({0: [*training_rows(every=10**6), flops_event(**reason)], -1: [host_event(1.0)]})
    report = read_report(directory)
    assert "torch.compile is in use" in report.run.whole_efficiency.text
    _, members = read_run_status(directory)
    assert members["efficiency"]["text"] is None
    assert "torch.compile is in use" in members["efficiency"]["absent"]["mfu"]


def test_steps_of_more_than_ten_seconds_have_it() -> None:
    training = Training(mode="single", devices=("cuda:0",), via=None, virtual=False, step_ns=15 * SECOND)
    rows = [*training.begin(), *with_flops(training.run(8), 100 * FLOPS), flops_event(), *samples(seconds=130)]
    assert snapshot_of_rows(rows).efficiency.mfu == pytest.approx(100 * FLOPS / 15 / 989e12, rel=0.2)


def test_a_comparison_has_a_row(state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, flops in (("before", FLOPS), ("after", 3 * FLOPS)):
        rows = training_rows(flops=flops, steps=100)
        write_run_directory({0: [*rows, flops_event()], -1: samples(seconds=10)}, name=name)
    assert main(["compare", "before", "after"]) == 0
    (row,) = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("MFU ")]
    assert row[1:4] == ["10%", "30%", "3.00×"]


# ------------------------------------------------------------------------------------------------ peaks


def peak_of(name: str | None, dtype: str) -> float | None:
    """Return the peak of a GPU in one dtype, in TFLOP/s."""
    peak, _ = find_peak(name, {dtype: 1.0})
    return None if peak is None else round(peak / 1e12, 3)


def test_peaks_are_dense_and_by_exact_name() -> None:
    assert peak_of(H100, "bfloat16") == 989
    assert peak_of(H100, "float8_e4m3fn") == 1979
    assert peak_of("NVIDIA H100 PCIe", "float16") == 756
    assert peak_of("NVIDIA GeForce RTX 4090", "tf32") == 82.6
    for name, dtype in (
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "tf32"),
        ("Tesla T4", "bfloat16"),
        (H100, "float64"),
        (None, "float32"),
    ):
        assert peak_of(name, dtype) is None
    clocks = [find_peak(name, {"float16": 1.0})[1] for name in ("Tesla T4", "NVIDIA B200", "GPU")]
    assert clocks == [1590, None, None]


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_of_a_gpu_agree_with_each_other(name: str) -> None:
    """A wrong digit, or a figure with sparsity, would break these ratios, which hold for all of these GPUs."""
    dtypes = ("bfloat16", "float16", "tf32", "float32", "float8_e5m2")
    bf16, fp16, tf32, fp32, fp8 = (peak_of(name, dtype) for dtype in dtypes)
    assert fp16 is not None
    assert bf16 in (fp16, None)
    assert tf32 == pytest.approx(fp16 / 2, rel=0.015) or tf32 == fp32, "GPUs without tf32 use fp32"
    assert fp8 is None or fp8 == pytest.approx(2 * fp16, rel=0.015)
    assert fp32 is None or 1.9 < fp16 / fp32 < 20


def test_the_page_has_the_table() -> None:
    (rows,) = [rows for head, rows in tables(ROOT / "docs" / "how-good.md") if head[1:3] == ["bf16", "fp16"]]
    written = {tuple(row) for row in rows}
    wanted = {
        (name, *("–" if value is None else f"{value:,}" for value in tflops)) for name, (_, *tflops) in PEAKS.items()
    }
    assert written == wanted


# ------------------------------------------------------------------------------------------------ small kernels


def busy_run(**more: Any) -> RunAnalysis:
    """Return a run at an MFU of 12%, on a GPU that is busy 98% of the time."""
    efficiency = Efficiency(None, 118e12, 989e12, 989e12, 0.0, "bf16", operator_ns=9_000, reason=None)
    gpu: dict[str, Any] = {
        "util": array("d", [98.0] * 60),
        "sm_active": array("d", [21.0] * 60),
        "throttled": Counter(),
    }
    changes = {name: more.pop(name) for name in [*more] if name in (*gpu, "of_run")}
    efficiency = efficiency._replace(**more)
    return with_changes(HEALTHY_RUN, whole_efficiency=efficiency, device_usage=(device_usage(0, **gpu | changes),))


def test_small_kernels_are_proved_by_the_active_multiprocessors() -> None:
    (finding,) = find_small_kernels(busy_run())
    assert finding.text == "MFU 12%: the GPU is busy 98% of the time with small kernels."
    assert finding.ground == "21% of the multiprocessors are active (median of 60 samples)"


def test_small_kernels_are_proved_by_the_number_of_operators() -> None:
    (finding,) = find_small_kernels(busy_run(sm_active=array("d")))
    assert finding.ground == "an operator takes 8.82 µs of GPU time, as a mean"


@pytest.mark.parametrize(
    "more",
    [
        {"sm_active": array("d"), "operator_ns": 40_000.0},  # no proof
        {"sm_active": array("d", [75.0] * 60), "operator_ns": 40_000.0},
        {"util": array("d", [60.0] * 60)},  # it is not the GPU that is slow
        {"util": array("d", [98.0] * 5)},
        {"flops_per_s": 400e12},  # a usual MFU
        {"peak_flops_per_s": None},
        {"is_lower_bound": True},  # the true MFU may be higher
        {"of_run": False},
    ],
)
def test_there_is_no_finding_without_proof(more: Any) -> None:
    assert [*find_small_kernels(busy_run(**more))] == []
