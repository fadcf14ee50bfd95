"""The real node_exporter and the real Prometheus, with the rules and the dashboard of docs/prometheus."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from support.format_readers import DOCS
from support.run_harness import Dpmon, end_all, free_ports, wait_for

EXPORTER = shutil.which("prometheus-node-exporter") or shutil.which("node_exporter")
PROMETHEUS = shutil.which("prometheus")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(EXPORTER is None or PROMETHEUS is None, reason="node_exporter or Prometheus is not installed"),
]

SCRIPT = Path(__file__).parent / "scripts" / "slow_then_stuck.py"
_INSTALLED = Path(sys.executable).with_name("torchrun")
TORCHRUN = [_INSTALLED] if _INSTALLED.exists() else ["-m", "torch.distributed.run"]
WITHOUT_DATA = {"Time left in the epoch", "GPU utilization", "GPU memory"}
"""Panels that need a DataLoader or a GPU."""
TRIES = 5
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def got(port: int, path: str) -> bytes:
    with _DIRECT.open(f"http://127.0.0.1:{port}{path}", timeout=30) as reply:
        return bytes(reply.read())


@dataclass
class Servers:
    """node_exporters of two machines, and a Prometheus that asks them every second."""

    place: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = 0
    instances: list[str] = field(default_factory=list)

    def start(self) -> None:
        for machine in self.machines:
            machine.mkdir()
            textfile = [
                "--collector.disable-defaults",
                "--collector.textfile",
                f"--collector.textfile.directory={machine}",
            ]
            port = self._serve(EXPORTER, "/metrics", *textfile)
            self.instances.append(f"127.0.0.1:{port}")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(DOCS / "prometheus" / "rules.yml")],
            "scrape_configs": [{"job_name": "node", "static_configs": [{"targets": self.instances}]}],
        }
        (self.place / "prometheus.yml").write_text(json.dumps(config))
        data = [f"--config.file={self.place / 'prometheus.yml'}", f"--storage.tsdb.path={self.place / 'data'}"]
        self.port = self._serve(PROMETHEUS, "/-/ready", *data)

    @property
    def machines(self) -> list[Path]:
        return [self.place / name for name in ("a", "b")]

    def _serve(self, program: str | None, ready: str, *words: str) -> int:
        """Start a server and wait until it answers; return its port. Another program may take a free port first."""
        assert program is not None
        log = self.place / f"{Path(program).name}.log"
        for _ in range(TRIES):
            (port,) = free_ports(1)
            with open(log, "ab") as out:
                process = subprocess.Popen(
                    [program, f"--web.listen-address=127.0.0.1:{port}", *words], stdout=out, stderr=out, cwd=self.place
                )
            self.processes.append(process)

            def answers(process: subprocess.Popen[bytes] = process, port: int = port) -> bool:
                with suppress(OSError):
                    return process.poll() is not None or bool(got(port, ready))
                return False

            wait_for(answers, what=f"{program} to answer")
            if process.poll() is None:
                return port
        raise AssertionError(log.read_text())

    def stop(self) -> None:
        end_all(reversed(self.processes))

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each series that an expression has now."""
        path = "/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        found = json.loads(got(self.port, path))
        assert found["status"] == "success"
        return [(each["metric"], float(each["value"][1])) for each in found["data"]["result"]]

    def rules(self) -> dict[str, dict[str, Any]]:
        """Return each rule as Prometheus has read it, with its alerts."""
        groups = json.loads(got(self.port, "/api/v1/rules"))["data"]["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    def alerts(self, name: str, run: str) -> list[dict[str, str]]:
        """Return the labels of the alerts about a run, pending or firing."""
        rule = self.rules()[name]
        assert rule["health"] != "err", rule
        return [each["labels"] for each in rule["alerts"] if each["labels"].get("run") == run]

    def only_alert(self, name: str, run: str, **labels: str) -> dict[str, str]:
        """Wait until there is one alert about a run, with these labels; return all its labels.

        The first seconds of a run on a busy machine may look different.
        """

        def only() -> dict[str, str] | None:
            found = self.alerts(name, run)
            return found[0] if len(found) == 1 and labels.items() <= found[0].items() else None

        return wait_for(only, 300, f"{name} with {labels}") or {}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    made = Servers(tmp_path_factory.mktemp("prometheus"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


def start(dpmon: Dpmon, metrics: Path, name: str, *words: object) -> Callable[[], str]:
    """Start a job; return a function that returns the short name of its run."""
    dpmon.start(
        *("--headless", "--name", name, "--metrics", metrics, *TORCHRUN, *words, SCRIPT, "stick", "steps"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def short_name() -> str:
        found = [path.name for path in dpmon.runs() if f"-{name}-" in path.name]
        return found[0][len("20261126-000000-") :] if found else ""

    return short_name


def test_prometheus_names_the_slow_rank_and_the_stall(dpmon: Dpmon, servers: Servers) -> None:
    short_name = start(dpmon, servers.machines[0], "one", "--standalone", "--nproc-per-node", 2)
    run = wait_for(short_name, what="the run")
    servers.only_alert("DpmonStraggler", run, rank="1", instance=servers.instances[0])
    rules = servers.rules()

    def shares() -> list[tuple[str, bool]]:
        found = servers.query(rules["DpmonStraggler"]["query"])
        return [(labels["rank"], 0.5 < share < 1) for labels, share in found if labels["run"] == run]

    wait_for(lambda: shares() == [("1", True)], 300, "the share of the slow rank")
    silent = ("DpmonStalled", "DpmonFailed", "DpmonSilent", "DpmonStragglerOfMachines", "DpmonWaitsForData")
    # A busy machine may have stalled the ranks for some seconds.
    wait_for(lambda: not any(servers.alerts(name, run) for name in silent), 300, "no other alert")
    check_panels(servers)

    (dpmon.cwd / "stick").touch()
    servers.only_alert("DpmonStalled", run, instance=servers.instances[0])
    stalled = rules["DpmonStalled"]["query"]
    wait_for(lambda: run in [labels["run"] for labels, _ in servers.query(stalled)], what="the run in the query")
    counted = int((dpmon.cwd / "steps").read_text())
    steps = f'dpmon_step_duration_seconds_count{{run="{run}"}}'
    wait_for(
        lambda: [value for _, value in servers.query(steps)] == [counted] * 2, what=f"{counted} steps of each rank"
    )

    assert dpmon.run("stop", run).status == 0
    ended = wait_for(lambda: servers.query(f'dpmon_run_exit_status{{run="{run}"}}'), what="the end of the run")
    assert ended[0][0]["end"] == "stopped"
    wait_for(lambda: not servers.alerts("DpmonStalled", run), what="the end of the alert")
    assert servers.alerts("DpmonFailed", run) == []


def check_panels(servers: Servers) -> None:
    """Check that each panel of the dashboard has data."""

    def empty() -> set[str]:
        return {
            panel["title"]
            for panel in json.loads((DOCS / "prometheus" / "dashboard.json").read_text())["panels"]
            for target in panel["targets"]
            if not servers.query(re.sub(r'"\$\w+"', '".*"', target["expr"]).replace("$__rate_interval", "30s"))
        }

    wait_for(lambda: empty() <= WITHOUT_DATA, what="data in the panels")
