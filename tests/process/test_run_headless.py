"""A run without a screen has the same output, exit status and environment as the script alone."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest

from dpmon.run.run_directory import load_info
from dpmon.run.run_registry import short_name
from support.baseline_comparison import SideBySide, closest_baseline
from support.ring_writers import TESTS
from support.run_harness import Dpmon, wait_for

# Variables that dpmon adds to the environment of the command (see docs/what-to-do.md).
OURS = {"PYTHONPATH", "PYTHONUNBUFFERED"}

SEEN = """\
import json, os, resource, signal, sys
def fds():
    found = []
    for fd in range(3, 64):
        try:
            found.append((fd, os.readlink(f"/proc/self/fd/{fd}")))
        except OSError:
            pass
    return found
print(json.dumps({
    "argv": sys.argv, "cwd": os.getcwd(), "path": sys.path, "main": __name__, "file": __file__,
    "environ": dict(os.environ), "umask": os.umask(0), "nice": os.nice(0),
    "signals": {s.name: str(signal.getsignal(s)) for s in signal.Signals},
    "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "fds": fds(),
    "modules": sorted(m for m in sys.modules if "site" in m),
    "meta_path": len(sys.meta_path), "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
}))
"""


def alone(dpmon: Dpmon, *words: str, **more: Any) -> subprocess.CompletedProcess[bytes]:
    """Run the script without dpmon."""
    env = dpmon.environment()
    return subprocess.run([sys.executable, *words], cwd=dpmon.cwd, env=env, capture_output=True, **more)


@pytest.mark.parametrize("status", [0, 137, 255])
def test_exit_status_is_the_scripts_own(dpmon: Dpmon, status: int) -> None:
    dpmon.script(f"import sys; sys.exit({status})")
    assert dpmon.run("script.py").status == status
    assert dpmon.exit()["status"] == status


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM", "SIGSEGV", "SIGINT", "SIGHUP", "SIGRTMIN"])
def test_death_by_a_signal_is_128_plus_its_number(dpmon: Dpmon, name: str) -> None:
    number = int(getattr(signal, name))
    dpmon.script(
        "import os, resource, signal\n"
        "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))\n"
        f"signal.signal({number}, signal.SIG_DFL) if {number} != signal.SIGKILL else None\n"
        f"os.kill(os.getpid(), {number})\nsignal.pause()\n"
    )
    result = dpmon.run("script.py")
    assert result.status == 128 + number
    found = dpmon.exit()
    assert found["status"] == 128 + number
    assert found["signal"] == name


def test_the_script_sees_the_same_environment_as_without_dpmon(dpmon: Dpmon) -> None:
    dpmon.script(SEEN)
    words = ["script.py", "--lr", "0.1", "--replicas", "x", "--", "-m", "", "ü\udcff", "a b"]
    one = json.loads(alone(dpmon, *words, stdin=subprocess.DEVNULL).stdout)
    two = json.loads(dpmon.run(*words).out)
    new = {name for name in two["environ"] if name not in one["environ"]}
    assert new - OURS == {name for name in new if name.startswith("DPMON_")}
    for name in new | OURS:
        one["environ"].pop(name, None)
        two["environ"].pop(name, None)
    # A C locale is coerced by the first Python in the chain and inherited from there on.
    two["environ"].pop("LC_CTYPE", None)
    one["environ"].pop("LC_CTYPE", None)
    assert two.pop("meta_path") == one.pop("meta_path") + 1  # the import hook that waits for torch
    assert "sitecustomize" not in set(two.pop("modules")) - set(one.pop("modules"))
    assert two == one


def test_a_script_that_trains_sees_the_same_surroundings_as_without_dpmon(dpmon: Dpmon) -> None:
    """Bit for bit, over two virtual replicas."""
    script, place = Path(__file__).parent / "scripts" / "surroundings.py", SideBySide(dpmon)
    by_itself, found = place.alone(script, fresh=True), place.under(script, fresh=True)
    assert found.status == 0
    assert found == closest_baseline(found, by_itself, lambda: place.alone(script, fresh=True))
    assert found.stdout.endswith(b"registered last, runs first\nregistered first, runs last\n")


def test_a_script_that_asks_stty_for_its_width_gets_that_of_a_terminal(dpmon: Dpmon, tmp_path: Path) -> None:
    script = tmp_path / "width.py"
    script.write_text(
        "import os, sys\n"
        "rows, columns = os.popen('stty size', 'r').read().split()\n"
        "print(rows, columns, os.get_terminal_size(0).columns, sys.stdin.isatty(), flush=True)\n"
    )
    master, slave = pty.openpty()
    try:
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
        assert SideBySide(dpmon).alone(script, stdin=slave, fresh=True).stdout == b"33 111 111 True\n"
        under = dpmon.run(script, stdin=slave)
        assert under.status == 0
        # It gets the size of the terminal of dpmon; here there is none.
        assert re.fullmatch(rb"(\d+) (\d+) \2 True\n", under.out)
    finally:
        os.close(master)
        os.close(slave)


def test_inherited_descriptors_reach_the_script_and_are_not_held(dpmon: Dpmon) -> None:
    dpmon.script("import os, time\nprint(os.read(int(os.environ['FD']), 100).decode())\n")
    reading, writing = os.pipe()
    os.write(writing, b"through a pipe")
    os.close(writing)
    result = dpmon.run("script.py", env={"FD": str(reading)}, pass_fds=[reading])
    os.close(reading)
    assert result.text == "through a pipe\n"


def test_a_passed_pipe_ends_with_the_script_not_with_the_supervisor(dpmon: Dpmon) -> None:
    dpmon.script("import os, time\nos.close(int(os.environ['FD']))\ntime.sleep(60)\n")
    reading, writing = os.pipe()
    process = dpmon.start("--detach", "script.py", env={"FD": str(writing)}, pass_fds=[writing])
    os.close(writing)
    process.wait()
    os.set_blocking(reading, False)

    def ended() -> bool:
        try:
            return os.read(reading, 1) == b""
        except BlockingIOError:
            return False

    wait_for(ended, what="the last writer of the pipe to let go")
    os.close(reading)


def test_megabytes_pass_through_unchanged(dpmon: Dpmon, tmp_path: Path) -> None:
    dpmon.script(
        "import os, random, sys\n"
        "r = random.Random(1)\n"
        "for _ in range(20):\n"
        "    os.write(1, r.randbytes(1 << 20))\n"
        "os.write(2, bytes(range(256)) * 4)\n"
    )
    out, err = alone(dpmon, "script.py").stdout, alone(dpmon, "script.py").stderr
    result = dpmon.run("script.py")
    assert result.status == 0
    assert len(result.out) == 20 << 20
    assert result.out == out
    assert result.err.startswith(err)
    assert all(line.startswith(b"dpmon: ") for line in result.err[len(err) :].splitlines() if line)


def test_output_arrives_while_the_script_runs(dpmon: Dpmon) -> None:
    dpmon.script("print('first'); import time; time.sleep(60)")
    process = dpmon.start("script.py")
    assert process.stdout is not None
    assert process.stdout.readline() == b"first\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(100) == 128 + signal.SIGTERM


def test_piped_input_reaches_the_script(dpmon: Dpmon) -> None:
    dpmon.script("import sys; print(len(sys.stdin.buffer.read()))")
    assert dpmon.run("script.py", input=b"x" * 3_000_000).text == "3000000\n"


def test_without_input_the_script_reads_end_of_file(dpmon: Dpmon) -> None:
    dpmon.script("import sys; print(repr(sys.stdin.read()))")
    assert dpmon.run("script.py").text == "''\n"


def test_closed_input_and_output_do_no_harm(dpmon: Dpmon) -> None:
    dpmon.script("import sys, os; os.write(1, b'x'); sys.exit(4)")
    shell = f"exec {' '.join(dpmon.words('script.py'))} <&- >&- 2>&-"
    done = subprocess.run(["sh", "-c", shell], cwd=dpmon.cwd, env=dpmon.environment(), timeout=100)
    assert done.returncode == 4
    assert (dpmon.last() / "stdout.log").read_bytes() == b"x"


@pytest.mark.parametrize("text", ["print('a'\n", "def f():\n    raise ValueError('no')\nf()\n"])
def test_an_error_gives_pythons_own_report(dpmon: Dpmon, text: str) -> None:
    dpmon.script(text)
    bare, result = alone(dpmon, "script.py"), dpmon.run("script.py")
    assert result.status == bare.returncode == 1
    assert result.err.startswith(bare.stderr)


def test_a_script_that_trains_nothing_gets_a_message(dpmon: Dpmon) -> None:
    dpmon.script("pass")
    result = dpmon.run("script.py")
    assert result.status == 0
    assert "nothing was traced: no Python process of the run imported torch" in result.errors


def test_a_reader_that_leaves_does_not_stop_the_training(dpmon: Dpmon) -> None:
    dpmon.script(
        "import pathlib, time\n"
        "for i in range(2000): print(i)\n"
        "time.sleep(0.3)\n"
        "for i in range(2000): print(i)\n"
        "pathlib.Path('done').touch()\n"
    )
    process = dpmon.start("script.py")
    assert process.stdout is not None
    assert process.stdout.readline() == b"0\n"
    process.stdout.close()
    assert process.wait(100) == 0
    assert (dpmon.cwd / "done").exists()
    assert len((dpmon.last() / "stdout.log").read_bytes().splitlines()) == 4000


def test_files_beside_the_script_are_the_scripts_only(dpmon: Dpmon) -> None:
    beside = ("random", "json", "argparse", "subprocess", "textwrap", "torch", "signal", "select", "dpmon")
    for name in beside:
        dpmon.script("print('mine', __name__)\nraise SystemExit(9)\n", f"{name}.py")
    dpmon.script("print('hello')", "hello.py")
    for words in (dpmon.words("hello.py"), [sys.executable, "-m", "dpmon", "hello.py"]):
        result = dpmon.run(argv=words)
        assert (result.status, result.text) == (0, "hello\n"), result.errors
        (dpmon.cwd / "dpmon.py").unlink(missing_ok=True)  # `python -m dpmon` runs it
    # signal and select are loaded before any script; dpmon is the package that the tracer comes from.
    for name in beside[:-3]:
        dpmon.script(f"import {name}")
        assert dpmon.run("script.py").status == 9, name


def test_a_module_is_run_with_its_own_arguments(dpmon: Dpmon) -> None:
    package = dpmon.cwd / "pkg"
    package.mkdir()
    (package / "__main__.py").write_text("import sys; print(sys.argv[1:], __package__)")
    result = dpmon.run("-m", "pkg", "--mode", "x", "-m", "y")
    assert result.text == "['--mode', 'x', '-m', 'y'] pkg\n"


def test_any_launcher_is_run_as_it_is(dpmon: Dpmon) -> None:
    result = dpmon.run("sh", "-c", 'echo "$0 $*"; exit 5', "a", "--replicas", "b c")
    assert (result.status, result.text) == (5, "a --replicas b c\n")


def test_the_record_is_closed_to_others(dpmon: Dpmon) -> None:
    dpmon.script("import os; os.umask(0); print(1)")
    before = os.umask(0)
    try:
        dpmon.run("script.py")
    finally:
        os.umask(before)
    runs = dpmon.last().parent
    for directory in (runs.parent, runs, dpmon.last()):
        assert directory.stat().st_mode & 0o777 == 0o700, directory
    for path in dpmon.last().iterdir():
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_a_status_line_never_splits_a_line_of_the_script(dpmon: Dpmon) -> None:
    dpmon.script("import sys; sys.stderr.write('half a line'); sys.stderr.flush()")
    assert dpmon.run("script.py").err.startswith(b"half a line\ndpmon: ")


# ------------------------------------------------------------------------------------------------ what dpmon says

OFTEN = "import dpmon.cli.headless as h; h.STATUS_S = 0.2; from dpmon.cli.main import entry; entry()"
TRAINS = f"""
import pathlib, sys
sys.path.insert(0, {str(TESTS)!r})
from support.ring_writers import write_run
write_run(100_000, 400, 3, lambda _: pathlib.Path("go").exists() and sys.exit())
"""


def often(dpmon: Dpmon, enough: Callable[[list[str]], object]) -> list[str]:
    """Return the lines on stderr of a run that prints a status line every 0.2 s and ends when the lines are enough."""
    said = dpmon.cwd / "said"
    with open(said, "wb") as file:
        process = dpmon.start(argv=[sys.executable, "-c", OFTEN, "script.py"], stderr=file)
    wait_for(lambda: enough(said.read_text().splitlines()), what="its lines")
    dpmon.go()
    assert process.wait(100) == 0
    return said.read_text().splitlines()


def in_status(lines: list[str]) -> list[list[str]]:
    """Return the words of each status line with a rate."""
    lines = [line.partition("  (run ")[0] for line in lines]
    return [line.split() for line in lines if line.startswith("dpmon: step ") and "steps/s" in line]


def goes_on(lines: list[str]) -> bool:
    """Return whether three status lines show progress; on a busy machine, it may take more than three."""
    status = in_status(lines)
    return len(status) >= 3 and status[0][2] != status[-1][2]


def test_a_line_of_progress_is_printed_now_and_then(dpmon: Dpmon) -> None:
    dpmon.script(TRAINS)
    lines = often(dpmon, goes_on)
    named = [line for line in lines if "  (run " in line]
    assert named == [line for line in lines if line.startswith("dpmon: ")][:1]
    assert named[0].endswith(f"  (run {short_name(load_info(dpmon.last()))})")
    status = in_status(lines)
    steps = [int(fields[2]) for fields in status]
    assert steps == sorted(steps)
    assert 1 <= steps[0] < steps[-1]
    for fields in status:
        # With much time between steps, the speed within steps is shown beside the rate.
        within = [fields[7], "within", "steps)"] if "within" in fields else []
        assert fields[4:] == ["steps/s", fields[5], "samples/s", *within, "dp", "(virtual)"]
        # The first line may follow the first step at once: the step of the writer takes microseconds.
        steps_s, samples_s = (float(field.replace("k", "e3").replace("M", "e6")) for field in (fields[3], fields[5]))
        assert steps_s > 0  # their number in 0.2 s depends on the machine
        assert samples_s == pytest.approx(24 * steps_s, rel=0.1)


def test_a_line_of_the_script_is_never_cut_by_one_of_ours(dpmon: Dpmon) -> None:
    dpmon.waiting(
        begin="for n in range(2):\n"
        "    sys.stderr.write(f'begun {n} '); sys.stderr.flush(); time.sleep(0.5)\n"
        "    sys.stderr.write('ended\\n'); sys.stderr.flush(); time.sleep(0.3)\n"
    )
    lines = often(dpmon, lambda lines: "dpmon: starting" in lines)
    assert [line for line in lines if not line.startswith("dpmon: ")] == [f"begun {n} ended" for n in range(2)]
    assert "dpmon: starting" in lines


def test_no_line_is_empty_behind_a_script_whose_last_line_has_no_end(dpmon: Dpmon) -> None:
    dpmon.script("print('no end', end='', flush=True)")
    out = dpmon.run("script.py", stderr=subprocess.STDOUT).out.decode().splitlines()
    assert out[0] == "no end"
    assert len(out) > 2
    assert all(line.startswith("dpmon: ") for line in out[1:])


def test_faults_of_the_tracer_are_reported(dpmon: Dpmon) -> None:
    """With an unknown torch or a full disk, the tracer writes a line, and the run has a warning."""
    dpmon.script(
        "import os, time\n"
        "with open(os.environ['DPMON_RUN'] + '/warnings.log', 'a') as file:\n"
        "    print(os.getpid(), time.monotonic_ns(), 'this torch (9.9) cannot be traced: \\x1b[31mno', file=file)\n"
        "    print('no line of the tracer', end='', file=file)\n"
    )
    result = dpmon.run("script.py")
    assert "nothing was traced: this torch (9.9) cannot be traced" in result.errors
    assert "\x1b" not in result.errors
    warnings = [record for record in dpmon.records() if record["kind"] == "warning" and "9.9" in record["text"]]
    assert len(warnings) == 1
    assert warnings[0]["process"] is None


def test_color_is_forced_only_where_a_screen_shows_the_output(dpmon: Dpmon) -> None:
    dpmon.script("import os; print({n: os.environ.get(n) for n in ('FORCE_COLOR', 'CLICOLOR_FORCE', 'NO_COLOR')})")
    nothing = {"FORCE_COLOR": None, "CLICOLOR_FORCE": None, "NO_COLOR": None}
    assert dpmon.run("script.py").text.strip() == str(nothing)
    for env, expected in (
        ({}, {**nothing, "FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}),
        ({"NO_COLOR": "1"}, {**nothing, "NO_COLOR": "1"}),
        ({"FORCE_COLOR": "3"}, {**nothing, "FORCE_COLOR": "3"}),
    ):
        dpmon.run("--detach", "script.py", env=env)
        dpmon.exit()
        assert (dpmon.last() / "output.log").read_text().strip() == str(expected)


# ------------------------------------------------------------------------------------------------ readers that stop

FLOOD = """\
import os, pathlib, signal, sys, time
def ends(*_):
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    sys.exit(3)
if "survives" in sys.argv:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
if "ends slowly" in sys.argv:
    signal.signal(signal.SIGTERM, ends)
os.write(2, b"e" * 100)
for _ in range(64):
    os.write(1, b"x" * 65536)
pathlib.Path("printed").touch()
while "stays" in sys.argv:
    signal.pause()
"""


def flood(
    dpmon: Dpmon, *words: str, give_up_s: float = 0.5, last_s: float = 0.1, **more: Any
) -> subprocess.Popen[bytes]:
    """Start a script that prints 4 MiB, wait until it has printed them, and read nothing."""
    dpmon.script(FLOOD)
    times = f"import dpmon.cli.headless as h; h.GIVE_UP_S, h.LAST_S = {give_up_s}, {last_s}"
    entry = f"{times}; from dpmon.cli.main import entry; entry()"
    process = dpmon.start(argv=[sys.executable, "-c", entry, "--headless", *words], **more)
    wait_for((dpmon.cwd / "printed").exists, what="the output")
    return process


def rest_of(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Return the exit status of a foreground that must not wait for its reader, then what it wrote to stderr."""
    status = process.wait(60)
    assert process.stdout is not None
    assert process.stderr is not None
    err = process.stderr.read().decode()
    passed = len(process.stdout.read())
    (told,) = re.findall(r"dpmon: ([\d,]+) bytes of the script's output were not copied", err)
    assert passed + int(told.replace(",", "")) == 64 * 65536
    return status, err


def test_a_signal_ends_a_foreground_whose_reader_has_stopped(dpmon: Dpmon) -> None:
    """While the script runs, and after its end."""
    process = flood(dpmon, "script.py", "stays")
    process.send_signal(signal.SIGTERM)
    status, err = rest_of(process)
    assert status == 128 + signal.SIGTERM
    assert err.startswith("e" * 100)
    assert "killed by SIGTERM" in err
    assert dpmon.exit()["signal"] == "SIGTERM"

    (dpmon.cwd / "printed").unlink()
    process = flood(dpmon, "script.py")
    dpmon.exit()
    process.send_signal(signal.SIGTERM)
    assert rest_of(process)[0] == 0


def test_a_terminal_that_takes_no_output_holds_nobody_up(dpmon: Dpmon) -> None:
    terminal, slave = pty.openpty()
    process = flood(dpmon, "script.py", "stays", stdout=slave, stderr=slave)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert os.get_blocking(slave), "the terminal is also the shell's"
    os.close(slave)
    os.close(terminal)
