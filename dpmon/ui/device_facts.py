"""All facts about one GPU, for the zoomed devices panel, with a reason for each missing one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dpmon.cleaning import clean
from dpmon.model.state import DeviceTrack
from dpmon.record.plainjson import number_in
from dpmon.text.cells import right, span_width, wrapped
from dpmon.text.quantities import UNKNOWN, group, memory, memory_of
from dpmon.ui.chart import area, resampled
from dpmon.ui.look import Look
from dpmon.ui.rows import Row, width_of

Data = Mapping[str, Any]

_NO_XID = "no XID error since the run's start"
"""The sampler's reason when no error occurred. Any other reason means that the value is unknown."""
_WORDS = {
    "util_pct": "utilisation",
    "mem_used_bytes": "memory",
    "mem_total_bytes": "memory",
    "mem_reserved_bytes": "reserved memory",
    "mem_run_bytes": "this run's memory",
    "mem_others_bytes": "others' memory",
    "mem_torch_bytes": "torch's memory",
    "of_run": "this run's share",
    "temperature_c": "temperature",
    "temperature_limit_c": "temperature limit",
    "power_w": "power",
    "power_limit_w": "power limit",
    "energy_j": "energy",
    "sm_clock_mhz": "clock",
    "mem_clock_mhz": "memory clock",
    "throttle": "clock throttling",
    "fan_pct": "fan",
    "sm_active_pct": "SM activity",
    "tensor_active_pct": "tensor activity",
    "dram_active_pct": "memory activity",
    "cpu_pct": "cpu",
    "run_cpu_pct": "this run's cpu",
    "run_mem_bytes": "this run's memory",
    "processes": "processes",
    "process_count": "processes",
    "ordinals": "its number in the run",
    "mig_devices": "MIG instances",
}


def device_name(data: Data) -> str:
    """The GPU's name without "NVIDIA"."""
    return clean(data.get("name") or "GPU", 60).removeprefix("NVIDIA ")


def mine(data: Data) -> bool:
    """Whether the GPU belongs to the run, or may belong to it."""
    return data.get("of_run") is not False and data.get("visible") is not False


def label(index: object, data: Data) -> str:
    """A GPU's number, followed by its name in the run's processes (cuda:N) if that has another number."""
    named = _ordinal(data)
    shown = str(index) if isinstance(index, int) and not isinstance(index, bool) else UNKNOWN
    return shown.rjust(2) if named is None or named == f"cuda:{shown}" else f"{shown.rjust(2)} {named}"


def _ordinal(data: Data) -> str | None:
    listed = data.get("ordinals")
    names = {
        clean(one["device"], 10)
        for one in (listed if isinstance(listed, list) else [])[:64]
        if isinstance(one, Mapping) and isinstance(one.get("device"), str)
    }
    return names.pop() if len(names) == 1 else None


def reasons(samples: Sequence[Data], only: Sequence[str] | None = None) -> str:
    """Why values are missing, each reason once; for all values or those in `only`."""
    by_reason: dict[str, list[str]] = {}
    for data in samples:
        absent = data.get("absent")
        if isinstance(absent, Mapping):
            for key, reason in list(absent.items())[:80]:
                if (only is not None and key not in only) or (key == "xid" and reason == _NO_XID):
                    continue
                what = by_reason.setdefault(clean(reason, 200), [])
                name = _WORDS.get(key, clean(key, 40).replace("_", " "))
                if name not in what:
                    what.append(name)
    return "; ".join(f"{', '.join(what)}: {reason}" for reason, what in by_reason.items())


# ------------------------------------------------------------------------------------------------ one GPU


def facts(index: int, track: DeviceTrack, width: int, tall: int, span: int, look: Look) -> list[Row]:
    """The rows of one GPU: name and number, histories of `tall` rows, then every figure."""
    data = track.data
    ours = mine(data)
    head: Row = [
        (f"{label(index, data)} ", "bold" if ours else "dim"),
        (device_name(data), "bold" if ours else "dim"),
        (f"  {_whose(data)}", "" if ours else "dim"),
    ]
    uuid = data.get("uuid")
    if isinstance(uuid, str) and width_of(head) + 2 + span_width(clean(uuid, 60)) <= width:
        head.append((f"  {clean(uuid, 60)}", "dim"))
    rows = [head, *_charts(track, width, tall, span, look)]
    rows += _topics(_all(data), width)
    rows += _processes(data, width, look)
    why = reasons([data])
    if why:
        rows += [[("   ", ""), (line, "dim")] for line in wrapped(why, width - 3, 4, look.glyphs.more)]
    return rows


def _whose(data: Data) -> str:
    if data.get("visible") is False:
        return "hidden by CUDA_VISIBLE_DEVICES"
    return {True: "used by this run", False: "not used by this run"}.get(data.get("of_run"), "")  # type: ignore[arg-type]


def _charts(track: DeviceTrack, width: int, tall: int, span: int, look: Look) -> list[Row]:
    """Use, memory and power side by side, each with its newest value in front."""
    data = track.data
    limit = number_in(data, "power_limit_w")
    top_power = limit or max((p for p in track.power if p is not None), default=0.0)
    charts = [
        ("util", track.util, 100.0, _unit(number_in(data, "util_pct"), "%")),
        ("mem", track.mem, 100.0, _unit(track.mem[-1] if track.mem else None, "%")),
        ("power", track.power, top_power, _unit(number_in(data, "power_w"), "W")),
    ]
    each = (width - 3) // len(charts)
    graph = each - 8
    if graph < 8:
        return []
    blocks = []
    for word, values, top, figure in charts:
        dots = graph * (2 if look.glyphs.braille else 1)
        drawn = area(resampled(values, track.second + 1, span, dots), graph, tall, top or 1.0, look.glyphs)
        heads = [word, figure] if tall > 1 else [figure]
        blocks.append([(heads[i] if i < len(heads) else "", line) for i, line in enumerate(drawn)])
    return [[("   ", "")] + [span for block in blocks for span in _with_head(*block[row])] for row in range(tall)]


def _with_head(word: str, line: str) -> Row:
    return [(right(word, 6) + " ", "dim"), (line, "bar"), (" ", "")]


def _unit(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.0f} {unit}"


def _all(data: Data) -> dict[str, list[tuple[str, str, str]]]:
    """Label, value and style of every figure by topic, in a fixed order."""

    def of(key: str, unit: str, digits: int = 0) -> str:
        value = number_in(data, key)
        return UNKNOWN if value is None else f"{value:.{digits}f} {unit}"

    def held_by(key: str) -> str:
        return memory(number_in(data, key))

    def speed(key: str) -> str:
        value = number_in(data, key)
        return UNKNOWN if value is None else memory(value) + "/s"

    def count(key: str) -> str:
        value = number_in(data, key)
        return UNKNOWN if value is None else group(int(value))

    def bad(key: str) -> str:
        return "bad" if (number_in(data, key) or 0) > 0 else ""

    energy = number_in(data, "energy_j")
    throttle = data.get("throttle")
    down = ", ".join(clean(word, 30) for word in throttle[:8]) if isinstance(throttle, list) else UNKNOWN
    no_xid = data.get("xid") is None and _absent(data).get("xid", _NO_XID) == _NO_XID
    return {
        "activity": [
            ("SM", of("sm_active_pct", "%"), ""),
            ("tensor", of("tensor_active_pct", "%"), ""),
            ("dram", of("dram_active_pct", "%"), ""),
        ],
        "memory": [
            ("", memory_of(number_in(data, "mem_used_bytes"), number_in(data, "mem_total_bytes")), ""),
            ("this run", held_by("mem_run_bytes"), "bold"),
            ("others", held_by("mem_others_bytes"), ""),
            ("torch", held_by("mem_torch_bytes"), ""),
            ("driver", held_by("mem_reserved_bytes"), ""),
        ],
        "power": [
            ("", of("power_w", "W"), ""),
            ("limit", of("power_limit_w", "W"), ""),
            ("energy", UNKNOWN if energy is None else f"{energy / 3.6e6:.2f} kWh", ""),
        ],
        "heat": [
            ("", of("temperature_c", "°C"), ""),
            ("limit", of("temperature_limit_c", "°C"), ""),
            ("fan", of("fan_pct", "%"), ""),
        ],
        "clocks": [
            ("SM", of("sm_clock_mhz", "MHz"), ""),
            ("memory", of("mem_clock_mhz", "MHz"), ""),
            ("held down by", down or "nothing", "wait" if down and down != UNKNOWN else ""),
        ],
        "links": [
            ("PCIe in", speed("pcie_rx_bytes_s"), ""),
            ("out", speed("pcie_tx_bytes_s"), ""),
            ("NVLink in", speed("nvlink_rx_bytes_s"), ""),
            ("out", speed("nvlink_tx_bytes_s"), ""),
        ],
        "errors": [
            ("ECC corrected", count("ecc_corrected"), ""),
            ("uncorrected", count("ecc_uncorrected"), bad("ecc_uncorrected")),
            ("retired pages", count("retired_pages"), bad("retired_pages")),
            ("remapped rows", count("remapped_rows"), bad("remapped_rows")),
            ("newest XID", "none" if no_xid else count("xid"), bad("xid")),
        ],
        "modes": [
            ("MIG", _on_off(data.get("mig")), ""),
            ("persistence", _on_off(data.get("persistence")), ""),
        ],
    }


def _on_off(value: object) -> str:
    return "on" if value is True else "off" if value is False else UNKNOWN


def _absent(data: Data) -> Data:
    absent = data.get("absent")
    return absent if isinstance(absent, Mapping) else {}


def _topics(found: Mapping[str, Sequence[tuple[str, str, str]]], width: int) -> list[Row]:
    """One row or more per topic; the values have fixed widths, so that they do not move."""
    rows: list[Row] = []
    for topic, items in found.items():
        row: Row = [("   " + topic.ljust(10), "dim")]
        for word, value, style in items:
            room = 15 if topic == "memory" and not word else 9 if "/s" not in value else 11
            shown = value if span_width(value) > room else right(value, room)
            piece: Row = [(word + " " if word else "", "dim"), (shown, style)]
            if width_of(row) + 3 + width_of(piece) > width and len(row) > 1:
                rows.append(row)
                row = [(" " * 13, "")]
            row += [("   ", ""), *piece] if len(row) > 1 else piece
        rows.append(row)
    return rows


def _processes(data: Data, width: int, look: Look) -> list[Row]:
    """The processes that hold memory on the GPU, the run's own first."""
    listed = data.get("processes")
    if not isinstance(listed, list):
        return []
    count = number_in(data, "process_count")
    total = int(count) if count is not None else len(listed)
    rows: list[Row] = []
    text: Row = [("   processes ", "dim")]
    for one in listed[:16]:
        if not isinstance(one, Mapping):
            continue
        pid, held = number_in(one, "pid"), number_in(one, "mem_bytes")
        whose = one.get("of_run") is True
        piece: Row = [
            (f"{UNKNOWN if pid is None else int(pid)} ", "bold" if whose else ""),
            (memory(held) + (" this run" if whose else "") + "   ", "" if whose else "dim"),
        ]
        if width_of(text) + width_of(piece) > width:
            break
        text += piece
        total -= 1
    if total > 0 and len(text) > 1:
        text.append((f"{total} more{look.glyphs.more}", "dim"))
    elif len(text) == 1:
        text.append(("none", ""))
    rows.append(text)
    return rows
