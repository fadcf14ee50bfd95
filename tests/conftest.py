"""Fixtures for all tests. Because of its place, all tests can import the package `support` beside it."""

from __future__ import annotations

import compileall
import importlib.util
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import dpmon as package
from support.run_harness import Dpmon

FIRST = (
    *("test_tracer_surroundings", "test_tracer_lifetimes", "test_time_accounted", "test_collectives"),
    *("test_getting_started", "test_ui_fuzz", "test_tracer_compiled", "test_uncaught", "test_stragglers", "test_fsdp"),
    *("test_ring_kept_whole", "test_tracer_containment", "test_run_takeover", "test_contributing"),
    *("test_tracer_injection", "test_run_faults", "test_loops", "test_cut_off"),
    *(
        "test_event_commands",
        "test_gradient_sync",
        "test_nvml_faults",
        "test_whom_signalled",
        "test_ui_terminal",
        "test_promise_kill",
    ),
    *(
        "test_machines",
        "test_cables",
        "test_mirror_killed",
        "test_launchers",
        "test_run_deleted",
        "test_run_disk",
        "test_release",
        "test_tracer_long",
        "test_memory",
        "test_run_headless",
    ),
    "test_prometheus_server",
)
"""Files that took ten seconds or more; they run first, so that no worker starts a long file at the end."""


@pytest.fixture(autouse=True)
def screens_save_elsewhere(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give each test of the screen a current directory of its own: a key such as `s` saves a file there."""
    if request.path.name.startswith("test_ui_"):
        monkeypatch.chdir(tmp_path_factory.mktemp("cwd"))


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory for this test, used by this process and its children."""
    directory = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(directory))
    return directory


@pytest.fixture
def dpmon(state: Path, tmp_path: Path) -> Iterator[Dpmon]:
    """The real command line, in its own working directory."""
    cwd = tmp_path / "work"
    cwd.mkdir()
    runner = Dpmon(state, cwd)
    yield runner
    runner.clean_up()


OF_PLUGINS = {
    "pytest_asyncio": ("asyncio_mode", "asyncio_default_fixture_loop_scope"),
    "pytest_timeout": ("timeout",),
}
"""Settings of each plugin in pyproject.toml."""
MISSING = [name for name in ("textual", "pyte", *OF_PLUGINS) if importlib.util.find_spec(name) is None]
"""Without these packages, tests that train on a GPU can still run."""
collect_ignore_glob = ["unit/*", "process/*"] if MISSING else []


def pytest_addoption(parser: pytest.Parser) -> None:
    """Make pytest accept the settings of plugins that are missing."""
    for plugin, names in OF_PLUGINS.items():
        for name in names if plugin in MISSING else ():
            parser.addini(name, f"of {plugin}, which is not installed")


def pytest_report_header() -> list[str]:
    """Say what is not tested, and why."""
    return [f"only tests/gpu: {', '.join(MISSING)} not installed"] if MISSING else []


def pytest_configure(config: pytest.Config) -> None:
    """Compile dpmon, and restore the handling of signals, for this process and its children.

    Tests start many Pythons with PYTHONDONTWRITEBYTECODE set, and each would compile dpmon again. Processes ignore
    interrupts and quits if a shell started the tests in the background, and hang-ups under nohup.
    """
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False  # else pytest-xdist begins with the files with the most tests
    if not hasattr(config, "workerinput"):  # once, before pytest-xdist starts its workers
        compileall.compile_dir(Path(package.__file__).parent, quiet=2)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
        signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files in FIRST before the others."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(FIRST)))
