"""The cores that a process may use: its affinity, capped by the quota of its cgroups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpmon.tracer.modes.replica_threads import available_cores

HERE = "0::/batch/job\n"


@pytest.fixture(autouse=True)
def six_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))


def cores(place: Path, membership: str, files: dict[str, str]) -> int:
    for name, text in files.items():
        path = place / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (place / "membership").write_text(membership)
    return available_cores(place / "cgroup", place / "membership")


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (HERE, {}, 6),
        (HERE, {"batch/job/cpu.max": "max 100000\n"}, 6),
        (HERE, {"batch/job/cpu.max": "200000 100000\n"}, 2),
        (HERE, {"batch/job/cpu.max": "max 100000\n", "batch/cpu.max": "300000 100000\n"}, 3),
        (HERE, {"batch/job/cpu.max": "50000 100000\n"}, 1),
        (HERE, {"batch/job/cpu.max": "900000 100000\n"}, 6),
        (HERE, {"batch/job/cpu.max": "garbage\n"}, 6),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 1),
        ("nonsense", {}, 6),
    ],
)
def test_the_quota_caps_the_affinity(tmp_path: Path, membership: str, files: dict[str, str], expected: int) -> None:
    assert cores(tmp_path, membership, files) == expected


def test_without_cgroups(tmp_path: Path) -> None:
    assert available_cores(tmp_path, tmp_path / "none") == 6
