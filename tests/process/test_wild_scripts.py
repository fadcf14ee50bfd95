"""Typical scripts do the same under dpmon as without it: output, status, files.

By default a DataParallel is spread over two virtual replicas on a machine without GPUs, where a sum may differ in its
last bit; scripts that show it are compared under `--mode script`, the others as dpmon runs them by default.
"""

from __future__ import annotations

import os
import pty
import re
import struct
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
from alternatives import as_alone
from running import Dpmon
from sidebyside import Outcome, SideBySide, of_kind

pytestmark = pytest.mark.slow

WILD = Path(__file__).resolve().parent / "wild"


@pytest.fixture
def place(dpmon: Dpmon) -> SideBySide:
    return SideBySide(dpmon, WILD)


def check(place: SideBySide, *words: object, script: bool = False, fresh: bool = False) -> Outcome:
    """Check that a script has bit for bit the same results with and without dpmon; return them."""
    alone = place.alone(*words, fresh=fresh)
    found = place.under(*words, options=("--mode", "script") if script else (), fresh=fresh)
    assert found == as_alone(found, alone, lambda: place.alone(*words, fresh=fresh))
    return found


def test_arguments_siblings_and_files_beside_it(place: SideBySide) -> None:
    outcome = check(place, "classify.py", "--epochs", 2, "-m", "0.5", "--", "-x", "two words", "")
    assert outcome.status == 0
    assert set(outcome.files) == {"losses.json", "weights.pt"}
    assert b"['classify.py', '--epochs', '2', '-m', '0.5', '--', '-x', 'two words', '']" in outcome.stdout


def test_the_surroundings_are_the_same(place: SideBySide) -> None:
    outcome = check(place, "surroundings.py", fresh=True)
    assert outcome.status == 0
    assert outcome.stdout.endswith(b"registered last, runs first\nregistered first, runs last\n")


def test_a_module_with_relative_imports(place: SideBySide) -> None:
    outcome = check(place, "-m", "pkg.train", "1", "--two", script=True)
    assert outcome.status == 0
    assert b"pkg.train ['1', '--two'] train.py" in outcome.stdout


def test_a_sitecustomize_of_the_users_own(dpmon: Dpmon, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "sitecustomize.py").write_text("import builtins\nbuiltins.marker = [__name__, __file__]\n")
    source = tmp_path / "source"
    source.mkdir()
    (source / "look.py").write_text(
        "import sys, torch\nimport sitecustomize\n"
        "print(marker, sitecustomize.__file__, sys.path, 'site-path' in str(sys.path))\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
    )
    place = SideBySide(dpmon, source, {"PYTHONPATH": str(mine)})
    outcome = check(place, "look.py", fresh=True)
    assert outcome.status == 0, outcome.stderr
    assert str(mine / "sitecustomize.py").encode() in outcome.stdout
    assert len(of_kind(dpmon.records(), "call")) == 1


def test_stty_size_on_standard_input(dpmon: Dpmon, tmp_path: Path) -> None:
    """Scripts that ask for the width of their terminal get the same as without dpmon."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "width.py").write_text(
        "import os, sys, torch\n"
        "rows, columns = os.popen('stty size', 'r').read().split()\n"
        "print(rows, columns, os.get_terminal_size(0).columns, sys.stdin.isatty(), flush=True)\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
    )
    master, slave = pty.openpty()
    try:
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
        place = SideBySide(dpmon, source)
        alone = place.alone("width.py", stdin=slave)
        assert alone.stdout == b"33 111 111 True\n"
        under = place.under("width.py", stdin=slave)
        assert under.status == 0
        # It gets the size of the terminal of dpmon; here there is none.
        assert re.fullmatch(rb"(\d+) (\d+) \2 True\n", under.stdout)
    finally:
        os.close(master)
        os.close(slave)
