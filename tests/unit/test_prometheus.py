"""The alert rules and the dashboard in docs/prometheus use only metrics and labels that dpmon writes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from dpmon.record.history_rows import Definition, LossRow
from dpmon.record.record_types import Batches, Event, Step
from dpmon.run.run_directory import load_exit
from dpmon.run.run_registry import create_run
from dpmon.supervise.prometheus_file import PrometheusFile
from support.format_readers import DOCS
from support.history_builders import make_run_info, write_run_directory
from support.rank_builders import ManyNodes, ddp_rank_rows
from support.record_builders import host_event, whole_device_event, with_event_data

RULES = DOCS / "prometheus" / "rules.yml"
DASHBOARD = json.loads((DOCS / "prometheus" / "dashboard.json").read_text())
OF_OTHERS = {"dpmon:sync:ratio5m": {"run", "rank", "job_id"}, "node_textfile_mtime_seconds": {"file"}}
"""Labels of a recorded series, and of a metric that node_exporter adds."""
OF_PROMETHEUS = {"instance", "job"}
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def rules() -> list[str]:
    """Return the rules, without comments and line breaks."""
    text = re.sub(r"^ *#.*", "", RULES.read_text(), flags=re.M)
    return [" ".join(rule.split()) for rule in re.split(r"^      - ", text, flags=re.M)[1:]]


@pytest.fixture
def schema(state: Path, tmp_path: Path) -> dict[str, set[str]]:
    """The labels of each sample of runs that have everything."""
    rows, _ = ddp_rank_rows(2, slow=1, steps=60)
    read = [row._replace(batches=Batches(1, 1, 100, 1)) if isinstance(row, Step) else row for row in rows[0]]
    in_job = {"job": {"by": "slurm", "id": "12.0"}, "node": 0}
    rows[0] = [
        with_event_data(row, **in_job) if isinstance(row, Event) and row.kind == "process" else row for row in read
    ]
    rows[0] += [Definition(3000, {"place": "train.py:88", "why": None}), LossRow(3000, 60, 10**9, 0.5)]
    rows[-1] = [host_event(1.0), whole_device_event(1.0, 0)]
    found: dict[str, set[str]] = {}
    of_attach, _ = create_run(make_run_info(nodes=("gpu-0", "gpu-1")))
    ManyNodes(2, directory=of_attach).run(0, 5)
    for directory in (write_run_directory(rows, status=None), write_run_directory(rows, status=0), of_attach):
        metrics = PrometheusFile(tmp_path / "it.prom", directory, print)
        for family in text_string_to_metric_families(metrics.build_text(load_exit(directory))):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found | OF_OTHERS


def used(text: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric of an expression, with the labels that select its series."""
    for name, _, selected in re.findall(r"\b((?:dpmon|node)[_:][a-z_0-9:]+)(\{([^}]*)\})?", text):
        yield name, set(re.findall(r"(\w+)=", selected))


def grouped(text: str) -> set[str]:
    """Return the labels that an expression, or a text with its results, names without a metric."""
    lists = re.findall(r"\b(?:by|on|ignoring|group_left|group_right)\s*\(([^)]*)\)", text)
    return {word for each in lists for word in re.findall(r"\w+", each)} | set(re.findall(r"\$labels\.(\w+)", text))


@pytest.mark.parametrize("text", [*rules(), *EXPRESSIONS])
def test_every_metric_and_label_exists(schema: dict[str, set[str]], text: str) -> None:
    metrics = list(used(text))
    assert metrics
    known = OF_PROMETHEUS.union(*(schema[name] for name, _ in metrics))
    for name, labels in metrics:
        assert labels <= schema[name] | OF_PROMETHEUS, name
    assert grouped(text) <= known


def test_every_rule_is_described() -> None:
    page = (DOCS / "reports-and-exports.md").read_text()
    alerts = re.findall(r"alert: (\w+)", RULES.read_text())
    assert re.findall(r"^\| `(Dpmon\w+)` \|", page, re.M) == alerts
    assert len(alerts) == len(set(alerts)) > 0


def test_every_metric_is_described(schema: dict[str, set[str]]) -> None:
    page, records = (DOCS / "reports-and-exports.md").read_text(), (DOCS / "records.md").read_text()
    described = set(re.findall(r"`([a-z_.]+)`", page)) | set(re.findall(r"`dpmon_([a-z_]+)`", records))
    names = {
        re.sub("_(bucket|count|sum)$", "", name).removeprefix("dpmon_") for name in schema if name not in OF_OTHERS
    }
    assert not {name for name in names if name not in described}


# ------------------------------------------------------------------------------------------------ the dashboard


def test_what_a_panel_names_is_a_label_of_its_result(schema: dict[str, set[str]]) -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            by = re.search(r"sum by \(([^)]*)\)|max by \(([^)]*)\)", target["expr"])
            metric = next(used(target["expr"]))[0]
            of_result = set(re.findall(r"\w+", by[0])) if by else schema[metric] | OF_PROMETHEUS
            assert labels <= of_result, target["expr"]


# ------------------------------------------------------------------------------------------------ promtool


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is not installed")
def test_prometheus_accepts_and_tests_the_rules(tmp_path: Path) -> None:
    every = [{"record": f"panel:{number}", "expr": filled(text)} for number, text in enumerate(EXPRESSIONS)]
    (tmp_path / "panels.yml").write_text(json.dumps({"groups": [{"name": "panels", "rules": every}]}))
    for words in (
        ["check", "rules", RULES, tmp_path / "panels.yml"],
        ["test", "rules", RULES.with_name("rules_test.yml")],
    ):
        done: Any = subprocess.run(["promtool", *map(str, words)], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr


def filled(expression: str) -> str:
    """Return an expression of the dashboard as Grafana sends it."""
    return re.sub(r'"\$\w+"', '".*"', expression).replace("$__rate_interval", "1m")
