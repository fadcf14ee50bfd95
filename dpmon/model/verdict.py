"""The result of the comparison of two modes, in a sentence. Pure."""

from __future__ import annotations

from dpmon.model.compare import COPIES, WORTH, Comparison, Reason
from dpmon.model.numbers import duration, percent, times
from dpmon.model.uneven import INPUT, WAITING_TEXT


def sentence(found: Comparison) -> str | None:
    """The verdict with its reason, in one sentence; None without a verdict."""
    if found.speedup is None:
        return None
    over = f" over {len(found.devices)}" if found.devices else ""
    name = f"DataParallel{over}{' virtual replicas' if found.virtual and found.devices else ''}"
    value, low, high = map(times, found.speedup)
    reason = "" if found.uncertain else _reason_text(found)
    if found.uncertain:
        head = f"{name} is {low} to {high} as fast as one device: too uncertain for a verdict"
    elif found.outcome == "even":
        head = f"{name} makes no difference that shows ({low} to {high} as fast as one device)"
    else:
        head = f"{name} is {value} as fast as one device"
    means = ""
    if found.by_mean is not None:
        means = f" By the mean step it is {times(found.by_mean)}{_why_uneven(found)}."
    return f"{head}: {reason}.{means}" if reason else f"{head}.{means}"


def _why_uneven(found: Comparison) -> str:
    if found.uneven is None:
        return ""
    mode, how = found.uneven
    by = f" ({WAITING_TEXT})" if how.phase == INPUT else ""
    return f": of the steps in {mode}, about {percent(how.steps)} take {percent(how.time)} of the time{by}"


def _reason_text(found: Comparison) -> str:
    reason, cost = found.reason, found.cost
    if reason is None:
        return ""
    if reason.phase in COPIES:
        return f"{reason.phase} takes {_of_step(found, reason)}"
    dp, single = _duration_or_none(reason.dp_ns), _duration_or_none(reason.single_ns)
    if reason.phase == "forward":
        # The names in panel 3. This includes starting the threads, so it is more than the forward of any replica.
        text = f"parallel_apply and the forward rest take {dp} against {single} of forward on one device"
    else:
        text = f"{_PHRASES.get(reason.phase, reason.phase)} takes {dp} against {single} on one device"
    if found.outcome == "faster" and cost is not None and (cost.share or 0) >= WORTH:
        text += f", {cost.phase} {_of_step(found, cost)}"
    return text


def _of_step(found: Comparison, reason: Reason) -> str:
    """A phase's median time in a median dp step: the verdict compares medians, but a share refers to the mean step."""
    step = found.sides["dp"].median_ns
    if step is None or reason.dp_ns is None:
        return f"{percent(reason.share)} of the time"
    return f"{duration(reason.dp_ns)} of a {duration(step)} step"


_PHRASES = {"data": "waiting for data", "other": "the script's own work"}


def _duration_or_none(ns: float | None) -> str:
    return "none" if ns is None else duration(ns)
