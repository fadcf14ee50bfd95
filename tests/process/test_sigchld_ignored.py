"""dpmon is started with SIGCHLD ignored: the kernel would reap children itself, and their status would be lost."""

from __future__ import annotations

from support.run_harness import Dpmon, Terminal

IGNORED = "trap '' CHLD"


def test_the_status_is_known(dpmon: Dpmon) -> None:
    run = dpmon.run("--headless", dpmon.script("raise SystemExit(7)"), before=IGNORED)
    assert (run.status, dpmon.exit()["status"], dpmon.exit()["by"]) == (7, 7, "supervisor")
    assert "killed" not in run.errors


def test_the_status_if_the_supervisor_is_killed(dpmon: Dpmon) -> None:
    process = dpmon.start(dpmon.waiting("sys.exit(6)"), before=IGNORED)
    dpmon.begun()
    dpmon.kill_supervisor()
    dpmon.go()
    assert process.wait(100) == 6
    assert dpmon.exit()["status"] == 6


def test_the_status_of_a_run_with_a_screen(dpmon: Dpmon) -> None:
    words = dpmon.words(dpmon.script("raise SystemExit(7)"))
    terminal = Terminal(dpmon, argv=["bash", "-c", f'{IGNORED}\nexec "$@"', "bash", *words])
    terminal.shows("close")
    terminal.type("q")
    assert terminal.wait() == 7
