"""The text format of numbers: durations, counts, shares, bytes, rates, clocks and time ranges.

Three digits and the unit that makes them 1 to 999, so that the width stays steady; counts in full, with a comma every
three digits.
"""

from __future__ import annotations

from dpmon.record.schema import Quantity
from dpmon.store.step_stats import Rate, StepStats
from dpmon.store.tally import SeriesStats, averaging_unit

UNKNOWN = "–"
_UNITS = ((1e3, "µs"), (1e6, "ms"), (1e9, "s"))


def format_three_digits(value: float) -> str:
    """Return three digits of a number below 1000: "1.25", "12.5", "125"."""
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def format_duration(ns: float | None, gap: str = " ") -> str:
    """Return a duration in ns: "23.0 µs", "412 µs", "4.12 ms", "1.25 s"; at most 7 cells below 1000 s."""
    if ns is None:
        return UNKNOWN
    scale, unit = next(((scale, unit) for scale, unit in _UNITS if ns < 999.5 * scale), _UNITS[-1])
    return format_three_digits(ns / scale) + gap + unit


def format_minutes(seconds: float) -> str:
    """Return a duration of a minute or more: "3 min 20 s", "2 h 05 min"."""
    minutes, remaining_s = divmod(round(seconds), 60)
    return f"{minutes} min {remaining_s:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def format_long_duration(ns: float | None) -> str:
    """Return a duration with three digits: 412 µs, 12.3 ms, 4.50 s, 3 min 20 s."""
    if ns is None or ns < 99.95e9:
        return format_duration(ns)
    return format_minutes(ns / 1e9)


def format_count(number: int | None) -> str:
    """Return a count with its digits in groups of three: 12340 -> "12,340"."""
    return UNKNOWN if number is None else f"{number:,}"


def format_percent(share: float | None) -> str:
    """Return a share (0 to 1) in whole per cent; a positive one that rounds to 0 is "<1%"."""
    if share is None:
        return UNKNOWN
    return "<1%" if 0 < share < 0.005 else f"{share * 100:.0f}%"


def format_factor(value: float, sign: str = "×") -> str:
    """Return a ratio: "0.61×", "12.5×"."""
    return (f"{value:.2f}" if value < 9.995 else f"{value:.1f}") + sign


def format_loss(loss: float | None) -> str:
    """Return a loss with four digits: "2.303", "0.05995", "1.2e-05", "NaN", "inf"."""
    if loss is None:
        return UNKNOWN
    return "NaN" if loss != loss else f"{loss:.4g}"


def format_calls_so_far(calls: int) -> str:
    """Return the text for a run whose calls are not divided into steps yet."""
    return f"{format_count_with_noun(calls, 'call')} so far; the end of a step is not known yet"


def format_count_with_noun(count: int, noun: str) -> str:
    """Return a count with its noun: "1 row", "2 rows"."""
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def format_compact(number: float | None) -> str:
    """Return three digits and a thousands letter: 412, 12.4k, 3.10M, 0.52."""
    if number is None:
        return UNKNOWN
    for scale, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= scale * 0.9995:
            return format_three_digits(number / scale) + letter
    return format_three_digits(number)


def format_flops(flops_per_s: float) -> str:
    """Return FLOPs per second with three digits: "376 TFLOP/s", "12.1 GFLOP/s"."""
    text = format_compact(flops_per_s)
    number = text.rstrip("PTGMk")
    return f"{number} {text[len(number) :]}FLOP/s"


def format_rate_note(rate: Rate | None) -> str:
    """Return " (332 within steps, 1 step not counted)" after a rate; each part only if it matters, or ""."""
    notes = []
    if rate is not None and rate.differs_within_steps:
        within = rate.steps_per_s_within if rate.samples_per_s_within is None else rate.samples_per_s_within
        notes.append(f"{format_compact(within)} within steps")
    if rate is not None and rate.samples_per_s is not None and rate.uncounted_steps:
        notes.append(f"{format_count_with_noun(rate.uncounted_steps, 'step')} not counted")
    return f" ({', '.join(notes)})" if notes else ""


def format_samples_per_s(rate: Rate | None) -> str:
    """Return samples per second without the unit, for a table: "35.7" or "35.7 (332 within steps)"."""
    if rate is None or rate.samples_per_s is None:
        return UNKNOWN
    return format_compact(rate.samples_per_s) + format_rate_note(rate)


def format_rate(rate: Rate | None) -> str:
    """Return a rate: "35.7 samples/s (332 within steps)"; in steps/s if samples are unknown; "" without a rate."""
    if rate is None:
        return ""
    if rate.samples_per_s is None:
        text = f"{format_compact(rate.steps_per_s)} steps/s"
    else:
        text = f"{format_compact(rate.samples_per_s)} samples/s"
    return text + format_rate_note(rate)


_BYTES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B"))


def format_bytes(count: float | None) -> str:
    """Return bytes with a binary unit and three digits: "71.2 GiB"."""
    if count is None:
        return UNKNOWN
    scale, unit = next(((scale, unit) for scale, unit in _BYTES if count >= scale * 0.9995), _BYTES[-1])
    return f"{format_three_digits(count / scale)} {unit}" if scale > 1 else f"{count:.0f} {unit}"


def format_bytes_of_total(used: float | None, total: float | None) -> str:
    """Return used and total bytes, with one unit if both have the same: "71.2 / 141 GiB"."""
    total_text = format_bytes(total)
    number, _, unit = format_bytes(used).partition(" ")
    return f"{number} / {total_text}" if total_text.endswith(" " + unit) else f"{format_bytes(used)} / {total_text}"


def format_free_bytes(used: float | None, total: float | None) -> str:
    """Return what is left of a memory, in the unit of its size: "69.8 of 141 GiB free"."""
    if total is None:
        return UNKNOWN
    total_text = format_bytes(total)
    scale = next(scale for scale, unit in _BYTES if total_text.endswith(f" {unit}"))
    return f"{UNKNOWN if used is None else format_three_digits(max(total - used, 0) / scale)} of {total_text} free"


def format_updates(steps: int, updates: int, separator: str = ", ") -> str:
    """Return the number of optimizer updates after a separator, ", 15 updates", if it is known and not one per step."""
    return "" if updates in (0, steps) else f"{separator}{format_count_with_noun(updates, 'update')}"


def format_quantities(stats: StepStats) -> list[str]:
    """Return a text per quantity, except those that are 1 in every step or update."""
    counts = stats.steps, stats.tally.updates
    _, total = averaging_unit(*counts)
    return [
        format_quantity(quantity, known, *counts) for quantity, known in stats.known_quantities if known.total != total
    ]


def format_quantity(quantity: Quantity, total: SeriesStats, steps: int, updates: int = 0) -> str:
    """Return a quantity of steps with these updates: "copied to GPUs: 1.20 MiB per step, 240 MiB total"."""
    averaged, number = averaging_unit(total.count, updates if total.count == steps else 0)
    mean = total.total / number
    if quantity.unit == "bytes":
        mean_text, total_text = format_bytes(mean), format_bytes(total.total)
    else:
        unit = "" if quantity.unit in ("", quantity.display_name) else f" {quantity.unit}"
        mean_text, total_text = format_compact(mean) + unit, format_count(total.total) + unit
    known_text = (
        "" if total.count == steps else f" (known in {format_count(total.count)} of {format_count(steps)} steps)"
    )
    return f"{quantity.display_name}: {mean_text} per {averaged}, {total_text} total{known_text}"


def format_elapsed(ns: int | None) -> str:
    """Return the time since the run's start, or another time span, as hh:mm:ss; UNKNOWN for None.

    From a day on, the days come first: "1d 02:03:04".
    """
    if ns is None:
        return UNKNOWN
    seconds = max(ns, 0) // 1_000_000_000
    days, seconds_of_day = divmod(seconds, 86_400)
    text = f"{seconds_of_day // 3600:02d}:{seconds_of_day // 60 % 60:02d}:{seconds_of_day % 60:02d}"
    return f"{days}d {text}" if days else text


def format_short_elapsed(ns: int) -> str:
    """Return the time since the run's start, or another time span, as mm:ss below an hour, else as hh:mm:ss."""
    return format_elapsed(ns).removeprefix("00:")


def format_run_time(seconds: float) -> str:
    """Return how long a run took: 0.41 s, 12.3 s, 3 min 41 s, 2 h 05 min."""
    if seconds < 60:
        return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"
    return format_minutes(seconds)


def format_time_range(range_s: int) -> str:
    """Return a time range in words: "last 30 s", "last 2 min", "whole run"."""
    return f"last {format_range_length(range_s)}" if range_s else format_range_length(range_s)


def format_range_length(seconds: int) -> str:
    """Return the length of a time range: "30 s", "2 min", "whole run"."""
    if seconds <= 0:
        return "whole run"
    return f"{seconds} s" if seconds < 60 else f"{seconds // 60} min"
