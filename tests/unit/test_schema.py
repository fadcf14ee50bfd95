"""The schema has all recorded fields, and the reference in the docs is generated from it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dpmon.gpu.host_sampler import HostSampler
from dpmon.record.jsonl import as_json
from dpmon.record.record_specs import COLUMNS, RECORDS
from dpmon.record.schema import PHASES, STEP_PHASES, phase_by_display_name, phase_by_name
from dpmon.record.shared_names import CALL_PHASES
from support.record_builders import Training, records_of_rows, sample_events

DOCS = Path(__file__).parents[2] / "docs"


def test_the_reference_in_the_docs_is_up_to_date() -> None:
    """If not: python docs/records.py > docs/records.md"""
    made = subprocess.run([sys.executable, DOCS / "records.py"], capture_output=True, encoding="utf-8", check=True)
    assert (DOCS / "records.md").read_text(encoding="utf-8") == made.stdout


def known(record: Mapping[str, Any]) -> set[str]:
    """Return the JSON names of the fields of the record's kind."""
    return {"kind", *(one.name for one in RECORDS[record["kind"]].fields)}


def test_every_member_of_a_recorded_run_is_in_the_schema() -> None:
    training = Training()
    rows = [*training.begin(), *training.run(3), *sample_events()]
    found = [as_json(record) for record in records_of_rows(rows)]
    assert {record["kind"] for record in found} >= {"call", "step", "process", "mode", "host", "device", "memory"}
    for record in found:
        assert set(record) <= known(record), record["kind"]
        if record["kind"] == "memory":
            assert all(set(one) <= known(record) for one in record["devices"])


def test_a_sample_has_the_fields_of_its_kind() -> None:
    """One of a GPU is made from the fields of its kind."""
    assert set(HostSampler().sample(None)) == {one.name for one in RECORDS["host"].fields} - {"t_s", "gpu_absent"}


def test_no_name_stands_twice() -> None:
    for kind in RECORDS.values():
        assert len(set(COLUMNS[kind.name])) == len(COLUMNS[kind.name]), kind.name
        assert len({one.name for one in kind.fields}) == len(kind.fields), kind.name
    for names in zip(*((phase.name, phase.display_name, phase.letter) for phase in PHASES), strict=True):
        assert len(set(names)) == len(PHASES)


def test_phases_are_found_by_both_names() -> None:
    for phase in PHASES:
        assert phase_by_name(phase.name) is phase is phase_by_display_name(phase.display_name)
    assert sorted((*STEP_PHASES, *CALL_PHASES)) == sorted(phase.name for phase in PHASES)
