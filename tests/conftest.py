"""Fixtures for every test. Its place makes what lies beside it (synthetic, running) importable from all of them."""

from __future__ import annotations

import compileall
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import Dpmon

import dpmon as package

FIRST = (
    *("test_wild_scripts", "test_tracer_containment", "test_tracer_compiled", "test_run_records", "test_examples"),
    *("test_nvml_faults", "test_ranks", "test_ui_terminal", "test_run_past", "test_promise_kill", "test_run_takeover"),
    *("test_run_headless", "test_cli_commands", "test_tracer_endings", "test_promise_end", "test_tracer_interrupts"),
    *("test_nvml_which", "test_run_faults", "test_cli_report", "test_promise_scale", "test_promise_shapes"),
    *("test_run_hostile", "test_tracer_injection", "test_tracer_long", "test_tracer_practice", "test_memory"),
)
"""Files that take ten seconds or more, as measured: at the end of a run nobody should wait for a worker's last file."""


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory of the test's own, for this process and those it starts."""
    directory = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    return directory


@pytest.fixture
def dpmon(state: Path, tmp_path: Path) -> Iterator[Dpmon]:
    """The real command line, in a working directory of its own."""
    cwd = tmp_path / "work"
    cwd.mkdir()
    runner = Dpmon(state, cwd)
    yield runner
    runner.clean_up()


OF_PLUGINS = {
    "pytest_asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
    "pytest_timeout": ("timeout",),
}
"""What pyproject.toml sets for them."""
MISSING = [name for name in ("textual", "pyte", *OF_PLUGINS) if importlib.util.find_spec(name) is None]
"""On a GPU box, where nothing was installed for the tests, what trains on a GPU can be tested all the same."""
collect_ignore_glob = ["unit/*", "process/*"] if MISSING else []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let a pytest without the plugin pass over what pyproject.toml sets for it."""
    for plugin, names in OF_PLUGINS.items():
        for name in names if plugin in MISSING else ():
            parser.addini(name, f"of {plugin}, which is not installed")


def pytest_report_header() -> list[str]:
    """What is not tested, and why."""
    return [f"only tests/gpu: {', '.join(MISSING)} not installed"] if MISSING else []


def pytest_configure(config: pytest.Config) -> None:
    """What holds for this process and those it starts.

    They start many a Python with dpmon in it, and need not each compile it where PYTHONDONTWRITEBYTECODE is set. A
    shell that runs the tests in the background has them, and all that they start, ignore interrupts and quits; nohup
    has them ignore hang-ups.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # pytest-xdist would begin with the files that have the most tests
    if not hasattr(config, "workerinput"):  # once, before there are workers of pytest-xdist
        compileall.compile_dir(Path(package.__file__).parent, quiet=2)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files that take long come first, the others as they are found."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(FIRST)))
