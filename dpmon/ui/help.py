"""What the words on the screen mean, a sentence each; and the dialogs' texts."""

from __future__ import annotations

from dpmon.record.schema import PHASES
from dpmon.text.cells import cut, wrapped
from dpmon.ui.keys import DEEDS, PLAYED
from dpmon.ui.look import Look
from dpmon.ui.rows import Row
from dpmon.ui.scene import NAMES, RANK_NAMES

_PANELS = (
    (NAMES["devices"], "what each GPU does, once a second; without a GPU what this machine's processor does, and why."),
    (
        NAMES["replicas"],
        "a replica is one device's share of a batch: what went in, what came out, how long its forward took.",
    ),
    ("", "Rows are the first dimension of its input; idle means the batch made fewer chunks than there are devices."),
    ("", "Virtual replicas share a device that is no separate GPU: right sizes and gradients, but no real speed-up."),
    (
        NAMES["batch"],
        "where a step's time goes. Median: half the steps are faster. p95: 95 of 100 are. Share: of all the time.",
    ),
    ("", "Columns are one second each, from left to right, their phases stacked in the order below."),
    ("", "Host times: what the script's thread spent. A GPU may still be at work when the thread goes on."),
    ("", "Device: what the slowest GPU took for it, between two events of its stream: work, and waiting for the host."),
    (
        RANK_NAMES["replicas"],
        "where the mean step of each rank goes: the last 50 steps, 5 s at least. Straggler: the rank that the others"
        " wait for.",
    ),
    ("", "Exposed: communication that no computation hides, the same on all ranks."),
    ("", "Wait: how long a rank waits for the slowest one at the end of its backward pass."),
    ("", "More than 16 ranks: a cell a rank, with the tenths of its step that it waits; below it the slowest ranks."),
    (RANK_NAMES["compare"], "what ranks spend in it, and what to try. Ranks have no mode to compare."),
    ("", "Bucket: gradients that are averaged together, as soon as the last of them is ready."),
    ("", "Sampled: the collectives of one step now and then. An arrow is a launch without a known end."),
    (NAMES["compare"], "both modes' figures side by side, once both ran; d switches the running job."),
    (
        NAMES["output"],
        "what the script prints. Page keys scroll, end follows again; nothing in it can steer this terminal.",
    ),
)
_MOVES = (
    ("tab, arrows", "go to the next panel; in the output and in full screen the arrows scroll"),
    ("page keys", "scroll the panel in full screen, else the output; home and end: to its ends. The wheel scrolls too"),
)


def _entries(pairs: list[tuple[str, str, str]], label: int, width: int) -> list[Row]:
    rows: list[Row] = []
    for word, style, text in pairs:
        for index, line in enumerate(wrapped(text, max(width - label, 10))):
            head = cut(word, label - 1).ljust(label) if index == 0 else " " * label
            rows.append([(head, style), (line, "")])
    return rows


def _once() -> dict[str, str]:
    """What each key does; where this depends on the place, all its effects in one text."""
    found: dict[str, list[str]] = {}
    for deed in DEEDS:
        found.setdefault(deed.key, []).append(deed.says)
    return {key: "; ".join(says) for key, says in found.items()}


def _signs(look: Look, lettered: bool) -> tuple[str, str]:
    """What else there is to know of the columns of panel 3, as they look here."""
    little = "A small letter (or a dot)" if lettered else "The lowest block"
    return (
        f"{little} alone: steps too short for a cell of this scale (single beside dp); it is of their longest phase.",
        f"{look.glyphs.cut_top} on top: longer than the scale, which 95 % of the columns stay under.",
    )


def help_rows(width: int, look: Look) -> list[Row]:
    """The help, in rows of at most `width` cells."""
    label = 14 if width < 90 else 22
    rows: list[Row] = [[("Panels", "title")]]
    rows += _entries([(name, "bold", text) for name, text in _PANELS], label, width)
    rows += [[], [("Phases of a step", "title")]]
    lettered = not look.colour or look.glyphs.ascii
    phases = [
        (
            f"{phase.letter} {phase.shown}" if lettered else phase.shown,
            f"phase.{phase.shown}",
            f"{phase.meaning}. {phase.on_screen}".rstrip(),
        )
        for phase in PHASES
    ]
    rows += _entries(phases, label, width)
    rows += _entries([("", "", text) for text in _signs(look, lettered)], label, width)
    rows += [[], [("Keys", "title")]]
    rows += _entries([(key, "key", says) for key, says in _once().items()], label, width)
    rows += _entries([(keys, "key", text) for keys, text in _MOVES], label, width)
    rows += [[], [("Keys of a playback (dpmon attach, once a run is over)", "title")]]
    rows += _entries([(deed.key, "key", deed.says) for deed in PLAYED], label, width)
    return rows
