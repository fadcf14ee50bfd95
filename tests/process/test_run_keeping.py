"""dpmon keep, rm and ls --json, and the deletion of old runs at the end of a run."""

from __future__ import annotations

import json
from typing import Any

from support.run_harness import Dpmon, wait_until_unsupervised


def finished(dpmon: Dpmon, name: str, **env: str) -> None:
    """Run the script and wait for the supervisor, which deletes old runs last; until it has left, its own run stays."""
    assert dpmon.run("--name", name, "script.py", env=env).status == 0
    info = dpmon.info()
    wait_until_unsupervised(info)


def listed(dpmon: Dpmon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in dpmon.run("ls", "--json").text.splitlines()]


def test_old_runs_are_deleted_except_kept_and_live_ones(dpmon: Dpmon) -> None:
    dpmon.script("pass")
    sleeper = dpmon.start("--name", "running", "sleep", 600)
    dpmon.info()
    for name in ("kept", "a", "b"):
        finished(dpmon, name)
        if name == "kept":
            assert "is kept" in dpmon.run("keep", "kept").text
    finished(dpmon, "c", DPMON_KEEP_RUNS="3")
    assert [run["name"].rpartition("-")[0] for run in listed(dpmon)] == ["running", "kept", "c"]
    assert [(run["state"], run["kept"], run["status"]) for run in listed(dpmon)] == [
        ("starting", False, None),
        ("finished", True, 0),
        ("finished", False, 0),
    ]
    assert "finished, kept" in dpmon.run("ls").text

    refused = dpmon.run("rm", "running")
    assert refused.status == 2
    assert "is running" in refused.errors
    refused = dpmon.run("rm", "c", "kept")
    assert (refused.status, refused.out) == (2, b"")
    kept = listed(dpmon)[1]["id"]
    assert refused.errors == f"dpmon: {kept} is protected: run `dpmon keep --not {kept}` first\n"
    assert len(listed(dpmon)) == 3
    assert dpmon.run("keep", "--not", kept).status == 0
    assert dpmon.run("rm", "kept", "c").status == 0
    assert [run["state"] for run in listed(dpmon)] == ["starting"]
    assert dpmon.run("stop", "running").status == 0
    sleeper.wait(60)
    assert dpmon.run("keep", "--not").status == 0
    assert dpmon.run("rm", "nothing").status == 2
