"""The command line in everyday use: help, lists, names, missing terminals, attaching."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest

from dpmon.cli.commands import ListedRun
from dpmon.run import proc
from support.run_harness import Dpmon, Terminal


def test_help_and_version(dpmon: Dpmon) -> None:
    asked = dpmon.run("--help")
    assert (asked.status, asked.err) == (0, b"")
    assert "SCRIPT.py" in asked.text
    alone = dpmon.run()  # without arguments, the command line is wrong
    assert (alone.status, alone.out, alone.err) == (2, b"", asked.out)
    assert dpmon.run("--version").text.startswith("dpmon 0.")
    for command in ("attach", "ls", "stop", "export"):
        assert f"dpmon {command}" in dpmon.run(command, "--help").text


def test_python_m_dpmon_is_dpmon(dpmon: Dpmon) -> None:
    dpmon.script("import sys; print(sys.argv); sys.exit(3)")
    dpmon.script("raise SystemExit('not the standard library')", "json.py")  # -m looks in the current directory first
    module = [dpmon.python, "-m", "dpmon"]
    for words in (["--help"], ["--version"], [], ["--no-such-option"], ["attach", "--help"], ["export", "nothing"]):
        assert dpmon.run(argv=[*module, *words]) == dpmon.run(*words), words
    done = dpmon.run(argv=[*module, "--headless", "script.py", "--lr", "3"])
    assert (done.status, done.text) == (3, "['script.py', '--lr', '3']\n")


def test_a_mistyped_command_is_not_found(dpmon: Dpmon) -> None:
    result = dpmon.run("attch")
    assert (result.status, result.out, result.errors) == (2, b"", "dpmon: command not found: attch\n")
    assert dpmon.runs() == []


@pytest.mark.parametrize(("words", "absent"), [
    (["--help"], {"textual", "torch", "pynvml", "sqlite3", "psutil"}),
    (["ls"], {"textual", "torch", "pynvml", "psutil"}),
    (["script.py"], {"textual", "torch", "pynvml", "psutil"}),
])  # fmt: skip
def test_commands_import_only_the_libraries_that_they_need(dpmon: Dpmon, words: list[str], absent: set[str]) -> None:
    dpmon.script("print(1)")
    code = (
        "import atexit, sys\n"
        "from dpmon.cli.main import entry\n"
        "atexit.register(lambda: print('LOADED', *sorted({m.split('.')[0] for m in sys.modules}), file=sys.stderr))\n"
        "entry()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=dpmon.cwd, env=dpmon.environment(), capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0
    loaded = set(done.stderr.rpartition("LOADED")[2].split())
    assert "dpmon" in loaded
    assert not loaded & absent


def test_detach_returns_immediately_and_all_commands_find_the_run(dpmon: Dpmon) -> None:
    dpmon.waiting("print('out'); print('err', file=sys.stderr); sys.exit(4)")
    result = dpmon.run("--detach", "--name", "mine", "script.py", "--lr", "3")
    assert result.status == 0
    name = result.text.removesuffix("\n")  # only the name, so that `$(dpmon --detach ...)` is a run
    assert re.fullmatch("mine-[0-9a-f]{4}", name)
    assert result.errors.startswith(f"dpmon: attach: dpmon attach {name} ")
    info = dpmon.info()
    assert info["options"]["name"] == "mine"
    dpmon.begun()
    row = dpmon.run("ls").text.splitlines()[1].split()
    assert row[:2] == [name, "starting"]
    dpmon.go()
    assert dpmon.exit()["status"] == 4
    assert (dpmon.last() / "output.log").read_text() == "out\nerr\n"
    run_id = info["id"]
    for what in ("last", "mine", name, run_id, run_id[:20]):
        assert json.loads(dpmon.run("export", what).out.splitlines()[-1])["status"] == 4
    row = dpmon.run("ls").text.splitlines()[1].split()
    assert row[:2] == [name, "failed"]
    assert row[-3:] == ["script.py", "--lr", "3"]


@pytest.mark.parametrize(("state", "shown"), [("stopped", ["rank 0"]), ("failed", ["SignalException", "rank 0"])])
def test_the_own_exception_of_a_stopped_launcher_is_not_listed(state: str, shown: list[str]) -> None:
    run = ListedRun(*[None] * len(ListedRun._fields))  # type: ignore[arg-type]
    assert run._replace(state=state, cause="SignalException", standing="rank 0").detail_lines() == shown


def test_attach_without_a_terminal_follows_to_the_end_or_an_interrupt(dpmon: Dpmon) -> None:
    dpmon.waiting("print('after')\nraise SystemExit(6)", "print('before', flush=True)")
    dpmon.run("--detach", "script.py")
    for interrupted in (True, False):
        process = dpmon.start("attach")
        assert process.stdout is not None
        assert process.stdout.readline() == b"before\n"
        if interrupted:
            process.send_signal(signal.SIGINT)
            assert process.wait(100) == 130
    dpmon.go()
    out, err = process.communicate(timeout=100)
    assert (out, process.returncode) == (b"after\n", 6)
    assert b"exit status 6" in err
    again = dpmon.run("attach")
    assert (again.out, again.status) == (b"before\nafter\n", 6)


def test_attach_without_a_screen_speaks_before_the_script_does(dpmon: Dpmon) -> None:
    """A script that prints nothing must not look like a monitor that does nothing."""
    dpmon.script("import time; time.sleep(300)")
    dpmon.run("--detach", "script.py")
    terminal = Terminal(dpmon, "attach", TERM="dumb", LC_ALL="POSIX")
    terminal.writes("dpmon: the output of the run follows; Ctrl-C detaches, and training continues")
    terminal.type("\x03")
    terminal.wait()
    assert dpmon.run("ls").text.splitlines()[1].split()[1] == "starting"


def test_export_into_a_closed_pipe_is_quiet(dpmon: Dpmon) -> None:
    dpmon.script("pass")
    dpmon.run("script.py")
    words = " ".join(dpmon.words("export", "last"))
    done = subprocess.run(
        ["bash", "-c", f"{words} | true; exit ${{PIPESTATUS[0]}}"],
        cwd=dpmon.cwd, env=dpmon.environment(), capture_output=True, timeout=100,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")


# ------------------------------------------------------------------------------------------------ with a terminal


def test_a_dumb_terminal_gets_no_screen_and_its_lines_reach_the_script(dpmon: Dpmon) -> None:
    dpmon.script(
        "import sys, os\n"
        "print(sys.stdin.isatty(), os.get_terminal_size(0), flush=True)\n"
        "print('got', input('ask: '), flush=True)\n"
        "print('rest', repr(sys.stdin.read()), flush=True)\n"
    )
    terminal = Terminal(dpmon, "script.py", size=(30, 90), TERM="dumb")
    terminal.writes("ask: ")
    assert b"True os.terminal_size(columns=90, lines=30)" in terminal.raw
    terminal.type("an answer\n")
    terminal.writes("got an answer")
    terminal.type("more\n\x04")
    terminal.writes("rest 'more\\n'")
    assert terminal.wait() == 0
    assert b"\x1b" not in terminal.raw


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_stream_that_is_no_terminal_means_no_screen(dpmon: Dpmon, stream: str) -> None:
    dpmon.script("print('out')")
    command = f"{' '.join(dpmon.words('script.py'))} {'1' if stream == 'stdout' else '2'}> file"
    terminal = Terminal(dpmon, argv=["sh", "-c", command], TERM="xterm-256color")
    assert terminal.wait() == 0
    assert b"\x1b" not in terminal.raw + (dpmon.cwd / "file").read_bytes()


def test_the_interrupt_key_reaches_the_script_once(dpmon: Dpmon) -> None:
    dpmon.script(
        "import signal, time\n"
        "n = 0\n"
        "def on(*_):\n    global n\n    n += 1\n"
        "signal.signal(signal.SIGINT, on)\n"
        "print('ready', flush=True)\n"
        "while not n: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "print('count', n)\nraise SystemExit(8)\n"
    )
    terminal = Terminal(dpmon, "--headless", "script.py", TERM="xterm")
    terminal.writes("ready")
    terminal.type("\x03")
    terminal.writes("count 1")
    assert terminal.wait() == 8


def test_a_closed_terminal_leaves_the_training_running(dpmon: Dpmon) -> None:
    dpmon.waiting("print('end')", "print('ready', flush=True)")
    terminal = Terminal(dpmon, "--headless", "script.py", TERM="xterm")
    terminal.writes("ready")
    terminal.hang_up()
    assert terminal.wait() in (-signal.SIGHUP, 128 + signal.SIGHUP)
    dpmon.go()
    assert dpmon.exit()["status"] == 0
    assert (dpmon.last() / "stdout.log").read_text() == "ready\nend\n"


def test_in_the_background_of_a_shell_it_does_not_stop(dpmon: Dpmon) -> None:
    """A job in the background that reads its terminal is stopped by the kernel: it must not try."""
    dpmon.script("import time; time.sleep(0.3); print('fin' + 'ished', flush=True)")
    command = f"set -m; {' '.join(dpmon.words('script.py'))} & wait $!; echo status=$?"
    terminal = Terminal(dpmon, argv=["bash", "-i", "-c", command], TERM="dumb")
    terminal.writes("status=0")
    assert b"finished" in terminal.raw
    terminal.wait()


# ------------------------------------------------------------------------------------------------ with a screen


PRINTS = "print('a line of the script', flush=True)"


def test_leaving_the_screen_leaves_the_training_and_attach_opens_it_again(dpmon: Dpmon) -> None:
    dpmon.waiting("raise SystemExit(3)", PRINTS)
    for words in (["script.py"], ["attach"]):
        terminal = Terminal(dpmon, *words, TERM="xterm-256color")
        terminal.shows("a line of the script")
        terminal.type("q")
        terminal.shows("leave it running")
        terminal.type("l")
        assert terminal.wait() == 0
        assert b"training continues; reattach with: dpmon attach script-" in terminal.raw
        info = dpmon.info()
        assert proc.is_alive(info["command_pid"], info["command_started"])
    dpmon.go()
    assert dpmon.exit()["status"] == 3


def test_stopping_from_the_screen(dpmon: Dpmon) -> None:
    dpmon.waiting("", PRINTS)
    terminal = Terminal(dpmon, "script.py", TERM="xterm-256color")
    terminal.shows("a line of the script")
    terminal.type("q")
    terminal.shows("stop the training")
    terminal.type("x")
    terminal.shows("Stop the training?")
    terminal.type("y")
    assert terminal.wait() == 130
    assert dpmon.exit()["signal"] == "SIGINT"


def test_a_script_that_ends_at_once_still_shows_its_end(dpmon: Dpmon) -> None:
    dpmon.script("raise SystemExit(7)")
    terminal = Terminal(dpmon, "script.py", TERM="xterm-256color")
    terminal.shows("status 7")
    terminal.type("q")
    assert terminal.wait() == 7
