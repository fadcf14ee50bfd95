"""The energy of a run: from counters of GPUs and CPUs, per sample, and its cost."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpmon.gpu import host_sampler
from dpmon.gpu.host_sampler import HostSampler
from dpmon.model.energy import Energy, read_energy
from dpmon.record.record_types import Event
from dpmon.store.store_opening import open_store
from dpmon.store.tally import SeriesStats, Tally
from support.format_readers import report_text
from support.history_builders import write_run_directory
from support.record_builders import Training, device_event, host_event


def counted(watts: float, seconds: int = 61, index: int = 0, start_j: float = 5e6, **more: object) -> list[Event]:
    """Return a sample per second of a GPU whose counter is read every five seconds."""
    return [device_event(float(t), index, energy_j=start_j + watts * (t // 5 * 5), **more) for t in range(seconds)]


def energy_of(state: Path, own: list[Event], *time_range: int) -> Energy:
    with open_store(write_run_directory({0: Training().run(40), -1: own})) as store:
        return read_energy(store, *time_range)


def test_a_run_has_the_energy_of_its_own_gpus(state: Path) -> None:
    own = counted(300.0) + counted(700.0, index=1, of_run=False)
    assert energy_of(state, own) == Energy(300.0 * 60, None, 60.0, 1)
    assert energy_of(state, [*own, *counted(100.0, index=2)]) == Energy(400.0 * 60, None, 60.0, 2)


def test_a_time_range_has_its_own_energy(state: Path) -> None:
    assert energy_of(state, counted(300.0, 121), 60, 90) == Energy(300.0 * 30, None, 30.0, 1)


def test_a_reloaded_driver_and_a_gap_lose_nothing_else(state: Path) -> None:
    own = counted(300.0, 31)  # up to 30 s
    own += [device_event(float(t), 0, energy_j=10.0 + 300.0 * (t - 31)) for t in (31, 32, 60)]
    assert energy_of(state, own) == Energy(300.0 * (30 + 29), None, 60.0, 1)


def test_a_gpu_without_a_counter_has_no_energy(state: Path) -> None:
    assert energy_of(state, [device_event(float(t), 0, energy_j=None) for t in range(60)]) == Energy(None, None, 0.0, 0)


def test_the_cpus_count_if_there_is_no_gpu(state: Path) -> None:
    energy = energy_of(state, [host_event(float(t), energy_j=50.0 * t) for t in range(61)])
    assert (energy, energy.joules) == (Energy(None, 3000.0, 60.0, 0), 3000.0)


def test_energy_per_sample_needs_the_samples_of_most_steps() -> None:
    energy = Energy(1000.0, None, 10.0, 1)
    assert energy.joules_per("samples", Tally(10, stats={"samples": SeriesStats(9, 180)})) == 5.0  # as in 10 steps
    assert energy.joules_per("samples", Tally(10, stats={"samples": SeriesStats(8, 160)})) is None
    assert energy.joules_per("tokens", Tally(10)) is None
    assert Energy(None, None, 0.0, 0).joules_per("samples", Tally(1, stats={"samples": SeriesStats(1, 1)})) is None


def test_the_energy_of_deleted_samples_is_that_of_their_power(state: Path) -> None:
    own = [device_event(float(t), 0, energy_j=600.0 * t, power_w=600.0) for t in range(1, 2401)]
    directory = write_run_directory({-1: own, 0: Training().run(40)}, limit_bytes=700_000)
    with open_store(directory) as store:
        assert store.pruned
        joules = read_energy(store).gpu_joules
    assert joules == pytest.approx(600.0 * 2400, rel=0.05)


def test_a_report_has_the_cost_if_a_price_is_set(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_run_directory({0: Training().run(40), -1: counted(300_000.0)})  # 5 kWh

    def line() -> str:
        return next(line.strip() for line in report_text(directory, 100) if "energy of" in line)

    assert line().startswith("energy of 1 GPU 5 kWh; ")
    assert line().endswith(" J a sample")
    monkeypatch.setenv("DPMON_PRICE_PER_KWH", "0.3")
    assert line().startswith("energy of 1 GPU 5 kWh, 1.50; ")
    monkeypatch.setenv("DPMON_CURRENCY", "EUR")
    assert line().startswith("energy of 1 GPU 5 kWh, 1.50 EUR; ")
    monkeypatch.setenv("DPMON_PRICE_PER_HOUR", "60")  # the run took a minute
    assert line().startswith("energy of 1 GPU 5 kWh, 2.50 EUR; ")
    monkeypatch.setenv("DPMON_REFRESH", "never")
    assert line().startswith("energy of 1 GPU 5 kWh; "), "an invalid setting does not stop a report"


def test_a_report_without_energy_says_nothing_about_it(state: Path) -> None:
    directory = write_run_directory({0: Training().run(40), -1: [device_event(float(t), 0) for t in range(9)]})
    assert not any("energy of" in line for line in report_text(directory, 100))


def test_cpu_packages_are_read_without_their_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_sampler, "_POWERCAP", tmp_path)
    assert HostSampler().sample(None)["absent"]["energy_j"] == "the kernel does not report it"
    for zone, name in {"intel-rapl:0": "package-0", "intel-rapl:1": "package-1", "intel-rapl:0:0": "core"}.items():
        (tmp_path / zone).mkdir()
        (tmp_path / zone / "name").write_text(f"{name}\n")
        (tmp_path / zone / "energy_uj").write_text("1500000\n")
    assert HostSampler().sample(None)["energy_j"] == 3.0
    (tmp_path / "intel-rapl:1" / "energy_uj").unlink()
    assert "cannot be read" in HostSampler().sample(None)["absent"]["energy_j"]
