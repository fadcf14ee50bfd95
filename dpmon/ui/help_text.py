"""The help: a sentence for each word on the screen, and all keys."""

from __future__ import annotations

from dpmon.record.schema import PHASES
from dpmon.text.cells import truncate
from dpmon.ui.keys import COMMANDS, PLAYBACK_COMMANDS
from dpmon.ui.screen_data import NAMES, RANK_NAMES
from dpmon.ui.styled_rows import Row, wrap_to_rows
from dpmon.ui.terminal_style import TerminalStyle

_PANELS = (
    (NAMES["devices"], "what each GPU does, once a second; without a GPU, this machine's CPU, and why."),
    (
        NAMES["replicas"],
        "a replica is one device's share of a batch: its input, its output and the time of its forward.",
    ),
    ("", "Rows are the length of its input along the batch's dimension."),
    ("", "Idle means the batch made fewer chunks than there are devices."),
    ("", "Virtual replicas share one device instead of separate GPUs: right sizes and gradients, but no speed-up."),
    (
        NAMES["batch"],
        "where step time goes. Median: half the steps are faster. p95: 95 of 100 steps are faster. Share: of all time.",
    ),
    ("", "Each column is one second or more (a note says how many)."),
    ("", "In six rows or more, its phases are stacked in the order below."),
    ("", "Host times: time of the script's thread. A GPU may still be working when the thread continues."),
    ("", "Device: time of the slowest GPU (data: of the one that waits least) between two events of its stream."),
    ("", "It includes the GPU's waits for the host."),
    (
        RANK_NAMES["replicas"],
        "the mean step of each rank: the last 50 steps, at least 5 s. Straggler: the rank that the others wait for.",
    ),
    ("", "Exposed: communication that no computation hides, the same on all ranks."),
    ("", "Wait: how long a rank waits for the slowest one at the end of its backward pass."),
    ("", "More than 16 ranks: one cell per rank shows its wait in tenths of its step; the slowest ranks are below."),
    ("", "On several nodes, the ranks of each node are together; slow and disconnected nodes are marked."),
    ("", "/ finds a rank or a node; enter then shows its node alone, esc all nodes again."),
    (RANK_NAMES["compare"], "how much time ranks spend in it, and what to try. Ranks have no mode to compare."),
    ("", "Bucket: gradients that are averaged together once the last of them is ready."),
    (NAMES["compare"], "both modes' metrics side by side, once both ran; d switches the running job."),
    (
        NAMES["output"],
        "the script's output. Page keys scroll, end follows again. Control codes in it cannot affect this terminal.",
    ),
    (
        NAMES["progress"],
        "an epoch is one loop over a DataLoader that trains; the time left is that of its recent batches.",
    ),
    ("", "Evaluation: in and after an epoch. Between: other time since the previous epoch."),
    ("", "Loss: the value on which backward is called, sampled once per second; an update's passes are added up."),
)
_MOVES = (
    ("tab, arrows", "go to the next panel; in the output and in a zoomed panel up and down scroll"),
    ("page keys", "scroll the zoomed panel, else the output; home and end: to its ends. The wheel scrolls too"),
)


def _entries(entries: list[tuple[str, str, str]], label_cells: int, width: int) -> list[Row]:
    rows: list[Row] = []
    for word, style, text in entries:
        heading = truncate(word, label_cells - 1).ljust(label_cells)
        rows += wrap_to_rows(text, width, "", label=[(heading, style)])
    return rows


def _effects() -> dict[str, str]:
    """Return the effect of each key; several effects of one key are joined."""
    effects_by_key: dict[str, list[str]] = {}
    for command in COMMANDS:
        effects_by_key.setdefault(command.key, []).append(command.description)
    return {key: "; ".join(effects) for key, effects in effects_by_key.items()}


def _signs(uses_letters: bool) -> tuple[str, ...]:
    """Return sentences about the signs in panel 3. `uses_letters`: phases are drawn as letters."""
    low_sign = "a small letter (or a dot)" if uses_letters else "the lowest block"
    return (
        "The marked letter of a name stands for the phase where there is no room for the name, such as Y for sync.",
        f"A column of {low_sign} only: its steps are too short for a full cell. It shows their longest phase.",
        f"{'╱' * 3}: the run was stalled, and no step ended.",
        "Below the columns: e2 is where epoch 2 begins, ▲ the time that you look back to.",
        "A gap in the line: no step was running, e.g. while saving a checkpoint.",
        "▲ on top: longer than the scale, which covers 95% of the columns.",
    )


def help_rows(width: int, style: TerminalStyle) -> list[Row]:
    """Return the help, in rows of at most `width` cells."""
    label_cells = 22
    rows: list[Row] = [[("Panels", "title")]]
    rows += _entries([(name, "bold", text) for name, text in _PANELS], label_cells, width)
    rows += [[], [("Phases of a step", "title")]]
    uses_letters = not style.has_color or style.is_ascii
    phases = [
        (
            f"{phase.letter} {phase.display_name}" if uses_letters else phase.display_name,
            f"phase.{phase.display_name}",
            f"{phase.meaning}. {phase.on_screen}".rstrip(),
        )
        for phase in PHASES
    ]
    rows += _entries(phases, label_cells, width)
    rows += _entries([("", "", text) for text in _signs(uses_letters)], label_cells, width)
    rows += [[], [("Keys", "title")]]
    rows += _entries([(key, "key", effect) for key, effect in _effects().items()], label_cells, width)
    rows += _entries([(keys, "key", text) for keys, text in _MOVES], label_cells, width)
    rows += [[], [("Keys of a playback (an ended run; an earlier time after space)", "title")]]
    rows += _entries([(command.key, "key", command.description) for command in PLAYBACK_COMMANDS], label_cells, width)
    return rows
