"""Lines that no tracer writes, in stages.log, endings.log and warnings.log, affect neither status nor screen."""

from __future__ import annotations

import json

from support.run_harness import Dpmon, Terminal, wait_for, wait_until_unsupervised

NAMES = ("stages.log", "endings.log", "warnings.log")
DAMAGE = ("7 " + "9" * 5000 + " KeyboardInterrupt {}", "7 " + "9" * 400 + " in the script")


def damage_notes(dpmon: Dpmon) -> None:
    """Damage the notes of the newest run, once its script is under way."""
    dpmon.begun()
    pid = dpmon.info()["command_pid"]
    for name in NAMES:
        with open(dpmon.last() / name, "a") as file:
            for damage in DAMAGE:
                file.write(f"{damage}\n{damage.replace('7', str(pid), 1)}\n")


def test_the_status_of_a_run_whose_notes_are_damaged(dpmon: Dpmon) -> None:
    process = dpmon.start("--headless", f"--json={dpmon.cwd}/lines", dpmon.waiting("sys.exit(5)"))
    damage_notes(dpmon)
    watching = dpmon.start("attach", "--headless")
    report = dpmon.run("report")
    assert report.status == 0, report.errors
    assert dpmon.run("ls").status == 0
    wait_for(lambda: (dpmon.cwd / "lines").read_text().count("status") > 2)
    dpmon.go()
    _, err = process.communicate(timeout=100)
    assert process.returncode == 5, err
    assert b"exit status 5" in err
    _, err = watching.communicate(timeout=100)
    assert watching.returncode == 5, err
    info = dpmon.info()
    wait_until_unsupervised(info)
    assert "Traceback" not in (dpmon.last() / "supervisor.log").read_text()
    for words in (["report"], ["report", "--json"], ["attach"]):
        after = dpmon.run(*words)
        assert after.status == (5 if words == ["attach"] else 0), after.errors
    assert json.loads((dpmon.last() / "exit.json").read_text())["status"] == 5


def test_the_screen_of_a_run_whose_notes_are_damaged(dpmon: Dpmon) -> None:
    terminal = Terminal(dpmon, dpmon.waiting("sys.exit(5)"))
    damage_notes(dpmon)
    terminal.shows("5 Output")
    dpmon.go()
    terminal.shows("close")
    terminal.type("q")
    assert terminal.wait() == 5
