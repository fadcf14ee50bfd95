"""Threads of virtual replicas are kept between calls, and use a share of the cores each."""

from __future__ import annotations

import os
from typing import Any

import pytest

from support.tracer_harness import TracedScript, traced_script_text

CORES = len(os.sched_getaffinity(0))
ASKED = 2 * CORES
"""Number of threads that the script's own parallel regions take."""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The output of the script."""
    run = TracedScript(
        tmp_path_factory.mktemp("threads"), traced_script_text("replica_threads"), ASKED, replicas=2
    ).end(120)
    assert run.complaints == []
    assert run.err == ""
    return run.printed


def test_each_replica_takes_its_share_of_the_cores(said: Any) -> None:
    """Parallel regions of a replica take at most its share of threads, and start no further threads."""
    share = max(1, CORES // 2)
    assert all(1 <= number <= share for number, _ in said["in replicas"])
    assert len(said["in replicas"]) == 10
    if share == 1:
        assert [new for _, new in said["in replicas"]] == [0] * 10


def test_the_script_keeps_its_number(said: Any) -> None:
    assert said["at first"] == said["alone afterwards"] == ASKED
    assert [number for number, _ in said["in replicas of a script that takes one"]] == [1, 1]


def test_replicas_run_at_the_same_time(said: Any) -> None:
    assert said["at the same time"] == [0, 1]


def test_threads_are_kept(said: Any) -> None:
    assert said["threads"] == 2


def test_each_replica_finds_an_empty_context(said: Any) -> None:
    assert said["state"] == ["default"] * 6
    assert said["current"] == [True] * 4


def test_the_script_finds_no_thread_of_ours(said: Any) -> None:
    assert said["left"] == []


def test_a_replica_that_raises(said: Any) -> None:
    assert said["error"] == "a bad batch"
    assert said["after an error"] == 2


def test_a_forked_child_makes_threads_of_its_own(said: Any) -> None:
    assert said["in a child"] == 6


def test_a_debugger_sees_replicas(said: Any) -> None:
    assert said["traced"]


def test_the_end_waits_for_replicas(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = TracedScript(
        tmp_path_factory.mktemp("end"), traced_script_text("replica_threads"), "interrupted", replicas=2
    ).end(120)
    assert run.out == "ran to its end\n" * 2
    assert run.err.splitlines()[-1] == "KeyboardInterrupt"
    assert run.status == -2
