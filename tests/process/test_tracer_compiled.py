"""Compiled models run as they are written: never split, never compiled once more because of us."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tracing import Script, Traced, text_of

from dpmon.records import mode_number

KINDS = ("Half", "inside", "a_part", "in_place", "outside", "bare", "bare_in_place")
TURNS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Traced, dict[str, Any]]]:
    """Each kind of model called four times, alone and traced; dp is asked for after the second call of the first."""
    place = tmp_path_factory.mktemp("compiled")
    scripts = {name: Script(place, text_of("compiling"), *KINDS, run=name == "traced") for name in ("alone", "traced")}
    found = {}
    for name, script in scripts.items():
        told = {}
        for kind in KINDS:
            for turn in range(TURNS):
                if (name, kind, turn) == ("traced", "Half", 2):
                    reader = script.ring()
                    reader.request(mode_number("dp"))
                    reader.close()
                script.go_on()
                assert script.line() == str(turn + 1), script.end().err
            told[kind] = json.loads(script.line())
        found[name] = (script.end(), told)
    return found


@pytest.mark.parametrize(
    "kind",
    [
        "Half",
        "inside",
        "a_part",
        "in_place",
        "outside",
        "bare",
        "bare_in_place",
    ],
)
def test_a_compiled_model(runs: dict[str, tuple[Traced, dict[str, Any]]], kind: str) -> None:
    """Results, how often it was compiled, and its parameters are as without us."""
    expected, found = runs["alone"][1][kind], runs["traced"][1][kind]
    assert expected[0] == [[6, 3]] * TURNS
    assert found == expected


def test_what_is_recorded_of_it(runs: dict[str, tuple[Traced, dict[str, Any]]]) -> None:
    run, _ = runs["traced"]
    assert run.complaints == []
    assert [(call.via, call.mode, call.failed) for call in run.calls()] == [
        *[(None, "single", False)] * TURNS,
        *[("DataParallel", "single", False)] * 3 * TURNS,
        *[(None, "single", False)] * 3 * TURNS,
    ]
    refused = [event.data["refused"] for event in run.events("mode") if event.data["refused"]]
    assert all("compile" in reason for reason in refused)
    assert len(refused) >= 4


def test_nothing_is_said_that_is_not_said_alone(runs: dict[str, tuple[Traced, dict[str, Any]]]) -> None:
    def lines(text: str) -> list[str]:
        return [line.partition("]")[2] for line in text.splitlines()]

    assert lines(runs["traced"][0].err) == lines(runs["alone"][0].err)
