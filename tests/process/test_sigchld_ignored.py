"""dpmon is started with SIGCHLD ignored: the kernel would reap children itself, and their status would be lost."""

from __future__ import annotations

import sys

from support.run_harness import Dpmon, Terminal

SCRIPT = "import signal, sys\nprint(signal.getsignal(signal.SIGCHLD).name, flush=True)\nsys.exit(7)\n"
IGNORED = "trap '' CHLD"


def test_the_status_is_known_and_the_script_has_what_it_has_alone(dpmon: Dpmon) -> None:
    script = dpmon.script(SCRIPT)
    alone = dpmon.run(argv=[sys.executable, str(script)], before=IGNORED)
    assert (alone.status, alone.out) == (7, b"SIG_IGN\n")
    traced = dpmon.run("--headless", script, before=IGNORED)
    assert (traced.status, traced.out) == (7, alone.out), traced.errors
    assert "killed" not in traced.errors
    assert (dpmon.exit()["status"], dpmon.exit()["by"]) == (7, "supervisor")
    assert dpmon.run("--headless", script).out == b"SIG_DFL\n"


def test_the_status_if_the_supervisor_is_killed(dpmon: Dpmon) -> None:
    process = dpmon.start(dpmon.waiting("sys.exit(6)"), before=IGNORED)
    dpmon.begun()
    dpmon.kill_supervisor()
    dpmon.go()
    assert process.wait(100) == 6
    assert dpmon.exit()["status"] == 6


def test_the_status_of_a_run_with_a_screen(dpmon: Dpmon) -> None:
    words = dpmon.words(dpmon.script(SCRIPT))
    terminal = Terminal(dpmon, argv=["bash", "-c", f'{IGNORED}\nexec "$@"', "bash", *words])
    terminal.shows("close")
    terminal.type("q")
    assert terminal.wait() == 7
