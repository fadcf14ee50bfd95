"""Panel 1 as strings: each GPU's row and its reasons, zoomed too; the host where there is none."""

from __future__ import annotations

import re

import pytest

from dpmon.ui.panels import panel_devices
from dpmon.ui.screen_data import ScreenData
from dpmon.ui.styled_rows import plain_text, row_width
from support.analysis_builders import GROWING_MEMORY
from support.history_builders import snapshot_of_rows
from support.record_builders import Training, device_event
from support.screen_states import RUN_INFO, STYLE, gpu_screen_data, rows_text, screen_data_of


def test_without_a_gpu_the_host_is_shown_in_one_row_or_two_and_why_on_the_full_screen() -> None:
    facts = screen_data_of(Training())
    for width in (56, 60, 66):
        load, own = rows_text(panel_devices.render_panel(facts, width, 3, STYLE))
        assert load.endswith("43%  21.0 of 23.1 GiB free")
        assert own == "this run  1.80 cores   774 MiB"
    (wide,) = rows_text(panel_devices.render_panel(facts, 100, 3, STYLE))
    assert wide.endswith("43%  21.0 of 23.1 GiB free  this run  1.80 cores   774 MiB")
    more = rows_text(panel_devices.render_full_screen(facts, 100, 20, STYLE))
    assert more[0] == wide
    assert more[-1] == "no GPU: NVML library not found"


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("width", [36, 56, 76, 96])
def test_no_gpu_is_left_out_without_a_sign(count: int, width: int) -> None:
    facts = gpu_screen_data(count)
    for height in (3, 5, 8, 12, 20):
        rows = rows_text(panel_devices.render_panel(facts, width, height, STYLE))
        text = "\n".join(rows)
        shown = [i for i in range(count) if any(row.startswith(f"{i:2d} ") for row in rows) or f"  {i:2d} " in text]
        assert len(shown) == count, "each has its row; those beyond the height are announced by the frame"
        if width >= 52 and height >= 12:
            assert len(rows) <= height
        assert all(row_width([(row, "")]) <= width for row in rows)


def test_the_gpus_of_the_run_come_first_and_others_are_dim() -> None:
    state = gpu_screen_data(4).state
    others = {
        index: state.devices[index]._replace(data={**state.devices[index].data, "of_run": False, "mem_run_bytes": 0})
        for index in (0, 2)
    }
    state = state.with_facts(devices={**state.devices, **others})
    rows = panel_devices.render_panel(ScreenData(state, 0, RUN_INFO), 60, 6, STYLE)
    assert [plain_text(row)[:2] for row in rows[:4]] == [" 1", " 3", " 0", " 2"]
    assert "dim" not in {style for text, style in rows[0] if "%" in text}
    assert {style for text, style in rows[2] if "%" in text or "GiB" in text} == {"dim"}


def test_a_throttle_reason_names_its_gpu() -> None:
    facts = gpu_screen_data(2, throttle=["power cap", "too\x1b hot"])
    rows = rows_text(panel_devices.render_panel(facts, 76, 9, STYLE))
    assert any(row.startswith("throttled power cap:  0  1; too") for row in rows)
    assert "\x1b" not in "".join(rows)


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("width", [56, 96])
def test_growing_memory_has_an_arrow_and_the_time_until_it_is_full(count: int, width: int) -> None:
    facts = gpu_screen_data(count) if count else screen_data_of(Training())
    assert not any(row.startswith("▲") for row in rows_text(panel_devices.render_panel(facts, width, 9, STYLE)))
    growing = ScreenData(facts.state.with_facts(memory_trends=[GROWING_MEMORY]), 0, RUN_INFO)
    assert panel_devices.preferred_height(growing) == panel_devices.preferred_height(facts) + 1
    (row,) = (row for row in rows_text(panel_devices.render_panel(growing, width, 9, STYLE)) if row.startswith("▲"))
    assert row == "▲ memory of the run +2.20 MiB/step: full in 41 min"
    _, corner = panel_devices.panel_title(growing, folded=True)
    assert plain_text(corner).endswith("  ▲ full in 41 min")


def test_a_gpu_is_called_what_the_run_calls_it_where_that_differs() -> None:
    facts = gpu_screen_data(1, ordinals=[{"process": 0, "device": "cuda:3"}])
    assert rows_text(panel_devices.render_panel(facts, 76, 9, STYLE))[0].startswith(" 0 cuda:3 ")


@pytest.mark.parametrize(
    ("absent", "shown"),
    [
        ({}, "none"),
        ({"xid": "no XID error since the run's start"}, "none"),
        ({"xid": "not supported"}, "–"),
    ],
)
def test_without_an_xid_the_panel_says_none_and_an_unknown_one_is_a_dash(absent: dict[str, str], shown: str) -> None:
    facts = gpu_screen_data(1, xid=None, absent=absent)
    text = "\n".join(rows_text(panel_devices.render_full_screen(facts, 116, 35, STYLE)))
    found = re.search(r"newest XID +(none|–)", text)
    assert found is not None
    assert found.group(1) == shown
    assert "since the run's start" not in text
    assert ("xid: not supported" in text) == (absent == {"xid": "not supported"})


def test_an_unknown_utilization_is_a_dash() -> None:
    state = snapshot_of_rows(
        [device_event(1.0, 0, util_pct=None, mem_used_bytes=None, absent={"util_pct": "GPU is lost"})]
    )
    rows = rows_text(panel_devices.render_panel(ScreenData(state, 0, RUN_INFO), 80, 6, STYLE))
    assert " – " in rows[0]
    assert "– of 141 GiB free" in rows[0]
    assert "utilization: GPU is lost" in rows


def test_the_link_of_a_gpu_has_its_maximum_only_if_it_is_below() -> None:
    link = {"pcie_gen": 4, "pcie_gen_max": 4, "pcie_width": 16, "pcie_width_max": 16}
    for changes, text in (
        ({}, "PCIe gen 4 x16   in"),
        ({"pcie_gen": 1, "pcie_width": 4}, "PCIe gen 1 x4 of gen 4 x16   in"),
        (dict.fromkeys(link), "PCIe         –   in"),
    ):
        facts = gpu_screen_data(1, **{**link, **changes, "nvlinks_down": 2})
        rows = rows_text(panel_devices.render_full_screen(facts, 116, 60, STYLE))
        assert any(text in row for row in rows), text
        assert any("NVLinks down         2" in row for row in rows)


def test_the_reason_for_the_unknown_energy_of_cpus_is_not_on_the_screen() -> None:
    facts = screen_data_of(Training())
    host = facts.state.host
    data = {**host.data, "absent": {"energy_j": "the kernel does not report it", "load_1m": "unknown"}}
    facts = ScreenData(facts.state.with_facts(host=host._replace(data=data)), 0, RUN_INFO)
    (*_, last) = rows_text(panel_devices.render_full_screen(facts, 100, 20, STYLE))
    assert last == "no GPU: NVML library not found; load 1m: unknown"
