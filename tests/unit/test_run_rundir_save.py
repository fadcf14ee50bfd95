"""If a supervisor was killed, two processes write exit.json at the end: the first one must win."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpmon.run.rundir import EXIT_FILE, ExitInfo, load_exit, save


def ended(status: int) -> ExitInfo:
    return ExitInfo(
        status=status, signal=None, unknown=None, cause=None, ended_unix=1e9, end_ns=1, seconds=1.0, by="foreground"
    )


@pytest.mark.parametrize("links", [True, False])
def test_a_file_that_is_written_anew_replaces_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:  # as on some file systems

        def refused(*_: object, **__: object) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "link", refused)
    save(tmp_path, ended(1), anew=True)
    assert load_exit(tmp_path) == ended(1)
    if links:
        with pytest.raises(FileExistsError):
            save(tmp_path, ended(2), anew=True)
        assert load_exit(tmp_path) == ended(1)
    save(tmp_path, ended(3))
    assert load_exit(tmp_path) == ended(3)
    assert os.listdir(tmp_path) == [EXIT_FILE]
