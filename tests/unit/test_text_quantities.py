"""Numbers as text: durations, counts, percentages, bytes, clocks; and widths of text, which are those of Rich."""

from __future__ import annotations

import random

import pytest
from rich.cells import cell_len, set_cell_size

from dpmon.record.schema import Quantity
from dpmon.sanitize import displayable_char, strip_control_chars
from dpmon.store.step_stats import Rate
from dpmon.store.tally import SeriesStats
from dpmon.text.cells import char_width, crop_text, span_width, wrap_text
from dpmon.text.formatting import (
    format_bytes,
    format_bytes_of_total,
    format_compact,
    format_count,
    format_duration,
    format_elapsed,
    format_factor,
    format_free_bytes,
    format_long_duration,
    format_minutes,
    format_percent,
    format_quantity,
    format_rate,
    format_run_time,
    format_samples_per_s,
    format_updates,
)

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, "–"),
        (0, "0.00 µs"),
        (950, "0.95 µs"),
        (23_000, "23.0 µs"),
        (99_949, "99.9 µs"),
        (99_960, "100 µs"),
        (999_400, "999 µs"),
        (999_600, "1.00 ms"),
        (4_120_000, "4.12 ms"),
        (12_345_678, "12.3 ms"),
        (123_456_789, "123 ms"),
        (1_250_000_000, "1.25 s"),
        (999_400_000, "999 ms"),
    ],
)
def test_durations(ns: float | None, text: str) -> None:
    assert format_duration(ns) == text
    assert len(text) <= 7
    assert format_duration(ns, "") == text.replace(" ", "")


def test_numbers() -> None:
    assert [format_count(n) for n in (None, 0, 999, 12_340, 1_234_567)] == ["–", "0", "999", "12,340", "1,234,567"]
    assert [format_compact(n) for n in (None, 0.5, 41.2, 412.3, 12_400, 999_960, 3.1e6)] == [
        "–",
        "0.50",
        "41.2",
        "412",
        "12.4k",
        "1.00M",
        "3.10M",
    ]
    assert [format_percent(n) for n in (None, 0.0, 0.004, 0.31, 1.0)] == ["–", "0%", "<1%", "31%", "100%"]
    assert [format_bytes(n) for n in (None, 0, 1023, 1024, 71 << 30)] == ["–", "0 B", "1023 B", "1.00 KiB", "71.0 GiB"]
    assert format_bytes_of_total(512 << 20, 141 << 30) == "512 MiB / 141 GiB"
    assert format_free_bytes(72 << 30, 141 << 30) == "69.0 of 141 GiB free"
    assert format_free_bytes((80 << 30) - (871 << 20), 80 << 30) == "0.85 of 80.0 GiB free"
    assert format_free_bytes(None, 80 << 30) == "– of 80.0 GiB free"
    assert format_free_bytes(None, None) == "–"
    assert [format_elapsed(n) for n in (None, 0, 221 * SECOND, 90_061 * SECOND)] == [
        "–",
        "00:00:00",
        "00:03:41",
        "1d 01:01:01",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.412, "0.41 s"), (12.34, "12.3 s"), (59.96, "60.0 s"), (221, "3 min 41 s"), (7500, "2 h 05 min")],
)
def test_the_time_of_a_run(seconds: float, text: str) -> None:
    assert format_run_time(seconds) == text


def test_minutes_and_hours() -> None:
    assert [format_minutes(seconds) for seconds in (99.96, 3600)] == ["1 min 40 s", "1 h 00 min"]
    found = [format_long_duration(ns) for ns in (412_000, 99_940_000_000, 99_960_000_000, 7_500_000_000_000, None)]
    assert found == ["412 µs", "99.9 s", "1 min 40 s", "2 h 05 min", "–"]


@pytest.mark.parametrize(
    ("unit", "known", "text"),
    [
        ("bytes", SeriesStats(100, 120 << 20), "copied: 1.20 MiB per step, 120 MiB total"),
        ("bytes", SeriesStats(1, 1 << 20), "copied: 1.00 MiB per step, 1.00 MiB total (known in 1 of 100 steps)"),
        ("tokens", SeriesStats(100, 1_234_567), "copied: 12.3k tokens per step, 1,234,567 tokens total"),
        ("copied", SeriesStats(100, 50), "copied: 0.50 per step, 50 total"),
    ],
)
def test_quantities_of_steps(unit: str, known: SeriesStats, text: str) -> None:
    quantity = Quantity("copied_units", unit, "", "", "", label="copied")
    assert format_quantity(quantity, known, 100) == text


@pytest.mark.parametrize(
    ("steps", "updates", "text", "mean"),
    [
        (100, 0, "", "2.00 per step"),  # no optimizer step was seen
        (100, 100, "", "2.00 per step"),
        (100, 25, ", 25 updates", "8.00 per update"),
        (100, 400, ", 400 updates", "2.00 per step"),
    ],
)
def test_averages_are_per_update_if_an_update_takes_several_steps(
    steps: int, updates: int, text: str, mean: str
) -> None:
    quantity = Quantity("copied", "", "", "", "")
    assert format_updates(steps, updates) == text
    assert format_quantity(quantity, SeriesStats(steps, 200), steps, updates) == f"copied: {mean}, 200 total"


def test_ratios() -> None:
    assert [format_factor(ratio) for ratio in (0.611, 9.99, 12.5)] == ["0.61×", "9.99×", "12.5×"]
    assert format_factor(9.996, "x") == "10.0x"


def test_texts_show_both_rates_only_if_they_differ() -> None:
    nearly, apart = Rate(10 / 1.02, 40 / 1.02, 10, 40), Rate(2.5, 10, 10, 40)
    assert format_rate(nearly) == "39.2 samples/s"
    assert format_rate(apart) == "10.0 samples/s (40.0 within steps)"
    assert format_samples_per_s(apart) == "10.0 (40.0 within steps)"
    assert format_rate(Rate(2.5, None, 10, None)) == "2.50 steps/s (10.0 within steps)"
    assert format_rate(Rate(2.5, 10, 10, 40, 1)) == "10.0 samples/s (40.0 within steps, 1 step not counted)"
    assert (format_rate(None), format_samples_per_s(None)) == ("", "–")


def test_every_character_is_as_wide_as_rich_says() -> None:
    shown = [char for char in map(chr, range(0x110000)) if displayable_char(char) == char]
    assert [f"{ord(char):X}" for char in shown if char_width(char) != cell_len(char)] == []


def test_texts_are_cropped_as_rich_does() -> None:
    chance = random.Random(7)
    signs = ["a", " ", "é", "漢", "…", "─", "🚀", "e\u0301", "한", "\u1112\u1161", "क\u093f", "👍\U0001f3fd", "䷀"]
    for _ in range(2000):
        text = strip_control_chars("".join(chance.choices(signs, k=chance.randint(1, 30))))
        assert span_width(text) == cell_len(text)
        width = chance.randint(0, cell_len(text))
        assert crop_text(text, width) == set_cell_size(text, width)


def test_wrapping() -> None:
    assert wrap_text("one two three four", 9) == ["one two", "three", "four"]


@pytest.mark.parametrize("width", range(1, 20))
def test_wrapped_lines_fit(width: int) -> None:
    assert all(span_width(line) <= width for line in wrap_text("one 漢字漢字漢字 three e\u0301 five", width))
