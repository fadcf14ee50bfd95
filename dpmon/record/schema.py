"""Defines the phases and quantities of a step, each once, with unit, meaning and labels.

The store's tables, CSV columns, JSON keys, metrics, numbers in the report and the summary, the screen's phase table and
legend, and docs/records.md all come from these lists. To add a phase or quantity, add it here and where it is measured;
a phase of calls is also in dpmon.record.shared_names.CALL_PHASES.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpmon.record.shared_names import CALL_PHASES

SECOND = 1_000_000_000
"""A second in ns."""

# ------------------------------------------------------------------------------------------------ phases, quantities


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step. Durations are in ns in the store, in ms in JSON and CSV, in s in metrics."""

    name: str
    """Its name in records."""
    letter: str
    """The letter that marks the phase on screens without color; a dot for `other`."""
    meaning: str
    of_call: bool = False
    """Whether it is a phase of the step's calls, and therefore a part of `forward`."""
    label: str = ""
    """Its name on the screen, if `name` is too long."""
    short: str = ""
    """Its name on the screen where there is little room."""
    optional: bool = False
    """Whether tables omit it if it never ran."""
    absent: str = "it did not run"
    """Why a step may lack it."""
    on_screen: str = ""
    """A sentence that follows its meaning where the screen also shows the phases of the calls."""

    @property
    def display_name(self) -> str:
        """Its name on the screen."""
        return self.label or self.name

    @property
    def short_display_name(self) -> str:
        """Its name on the screen where there is little room."""
        return self.short or self.display_name


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number that is counted per step, such as its samples. It can be summed over steps."""

    name: str
    unit: str
    meaning: str
    metric: str
    """Its name as a Prometheus counter."""
    absent: str
    """Why a step may lack it."""
    absent_is_zero: bool = False
    """Whether the record of a step without it omits it: it has zero of it, or unknown FLOPs. Otherwise, it is null."""
    label: str = ""
    """Its name next to its numbers, if `name` does not read well there."""
    listed_elsewhere: bool = False
    """Whether rates or counts of steps show it, so that it is not listed separately."""

    @property
    def display_name(self) -> str:
        """Its name next to its numbers."""
        return self.label or self.name


PHASES = (
    Phase("data", "D", "waiting until the loader hands over the next batch", absent="no DataLoader"),
    Phase("copy", "C", "the script copies tensors from the host to a GPU (.to, .cuda)", optional=True),
    Phase("scatter", "S", "the batch is split into chunks, one for each device", of_call=True, short="scat"),
    Phase(
        "replicate",
        "R",
        "the module's parameters are copied to every device, again for every batch",
        of_call=True,
        short="repl",
    ),
    Phase(
        "parallel_apply",
        "A",
        "all replicas run their forward at the same time (torch: parallel_apply); it ends with the slowest one",
        of_call=True,
        label="apply",
    ),
    Phase("gather", "G", "the replicas' outputs are collected on one device", of_call=True, short="gath"),
    Phase(
        "forward",
        "F",
        "the forward",
        short="forw",
        absent="no model was called",
        on_screen="Where scatter to gather are shown separately, this is the other forward time.",
    ),
    Phase(
        "backward",
        "B",
        "autograd computes the gradients, and sums those of the replicas",
        short="back",
        absent="no backward pass",
    ),
    Phase(
        "sync",
        "Y",
        "the end of the backward pass, after this rank's last gradient: exposed communication, and the wait for the"
        " slowest rank",
        optional=True,
        absent="no backward pass of DistributedDataParallel averaged gradients",
    ),
    Phase("optimizer", "O", "the optimizer changes the parameters", short="opt", absent="no optimizer step"),
    Phase(
        "other",
        ".",
        "the rest of the step: the script's own work between the other phases",
        absent="nothing is left of the step",
    ),
)
"""The phases in their order within a step. Those of the calls lie within `forward`; the others add up to the step."""
STEP_PHASES = tuple(phase.name for phase in PHASES if not phase.of_call)
"""The step's own phases, which add up to the step; the last one is the remainder."""
NO_RANK_WAIT = "the other ranks' steps with this sync_number are not in this record, or a rank evaluated before it"
"""Why a step's wait for other ranks is unknown."""
QUANTITIES = (
    Quantity(
        "samples",
        unit="samples",
        meaning="rows of the batches",
        metric="samples_total",
        absent="no call of this step had a tensor with rows",
        listed_elsewhere=True,
    ),
    Quantity(
        "tokens",
        unit="tokens",
        meaning="elements of input_ids, or of a like input; with an attention_mask, an estimate without padding",
        metric="tokens_total",
        absent="no call of this step had tokens",
        absent_is_zero=True,
    ),
    Quantity(
        "updates",
        unit="updates",
        meaning="optimizer updates: the steps of the optimizer that stepped most often",
        metric="updates_total",
        absent="no optimizer stepped",
        absent_is_zero=True,
        listed_elsewhere=True,
    ),
    Quantity(
        "copied_bytes",
        unit="bytes",
        meaning="bytes copied to GPUs",
        metric="copied_bytes_total",
        absent="nothing was copied",
        absent_is_zero=True,
        label="copied to GPUs",
    ),
    Quantity(
        "synced",
        unit="passes",
        meaning="backward passes in which the ranks averaged their gradients",
        metric="synced_passes_total",
        absent="no backward pass averaged gradients",
        absent_is_zero=True,
        label="backward passes that synced gradients",
    ),
    Quantity(
        "unsynced",
        unit="passes",
        meaning="backward passes of DistributedDataParallel that averaged nothing (no_sync)",
        metric="unsynced_passes_total",
        absent="every backward pass averaged gradients",
        absent_is_zero=True,
        label="backward passes under no_sync",
    ),
    Quantity(
        "flops",
        unit="FLOP",
        meaning="FLOPs of the model: those of the step with the same calls that was counted, without recomputation",
        metric="flops_total",
        absent="no step with the same calls was counted before (see the records of kind flops)",
        listed_elsewhere=True,
    ),
    Quantity(
        "recomputed_flops",
        unit="FLOP",
        meaning="further FLOPs: activation checkpointing repeats them in the backward pass",
        metric="recomputed_flops_total",
        absent="nothing was recomputed, or `flops` is unknown",
        absent_is_zero=True,
        listed_elsewhere=True,
    ),
)
SYNC_NUMBER = "sync_number"
"""Number of a step's last sync pass: a backward pass in which ranks averaged gradients. The same on all ranks."""

_BY_NAME = {phase.name: phase for phase in PHASES}
_BODY = ("data", "forward", "backward", "optimizer")
SPAN_PHASES = (*_BODY, *(name for name in STEP_PHASES[:-1] if name not in _BODY))
"""The phases with spans and device times. A row refers to a phase by its index here."""
_BY_LABEL = {phase.display_name: phase for phase in PHASES}
assert tuple(phase.name for phase in PHASES if phase.of_call) == CALL_PHASES, "schema and names differ in call phases"


def phase_by_name(name: str) -> Phase:
    """Return the phase with this name in records. Raises KeyError if there is none."""
    return _BY_NAME[name]


def phase_by_display_name(label: str) -> Phase:
    """Return the phase with this name on the screen. Raises KeyError if there is none."""
    return _BY_LABEL[label]


STEP, REST = "step", "rest"
"""Names of series: the whole step, and its forward without the phases of its calls."""
EXPOSED, WAIT, STRAGGLER_DELAY, UNCOMPARED = "exposed", "wait", "held", "uncompared"
"""Names of series that compare the ranks in steps with sync passes. EXPOSED: exposed communication. WAIT: the wait for
the slowest rank. STRAGGLER_DELAY, on the slowest rank only: how much later it was than the second slowest. UNCOMPARED:
the time of a step that has none of these, because a rank has AFTER_OTHER_KIND in it."""


TRAINING, EVALUATION, WARM_UP, STALLED, STARTUP, FORWARD_ONLY, AFTER_OTHER_KIND, MIXED_MODES = 0, 1, 2, 4, 8, 16, 32, 64
"""Flags of a step. TRAINING: a backward pass or an optimizer step ran in it. EVALUATION: neither ran, and all its calls
were in eval mode or without gradients. FORWARD_ONLY: neither ran, but a call could have trained. WARM_UP: it is one of
the first steps after the start or a mode switch, in which caches are filled and algorithms chosen, or dpmon slowed it:
its FLOPs were counted, or torch.profiler ran in it. STALLED: the run stalled in it. STARTUP: it is the first step of a
process, and waited long for its first batch or for other ranks. AFTER_OTHER_KIND: steps of other kinds, or steps that
dpmon slowed, ran in its process since the previous sync pass, and the other ranks may have waited for them.
MIXED_MODES: the mode was switched between its calls."""
STEP_KINDS = {TRAINING: "training", EVALUATION: "evaluation", FORWARD_ONLY: "forward_only"}
"""The kinds of steps. Steps of each kind are numbered from 1 in their process."""


def step_kind(flags: int) -> int:
    """Return the kind in the flags of a step: a key of STEP_KINDS."""
    return flags & (EVALUATION | FORWARD_ONLY)


EXCLUDED = STALLED | STARTUP | MIXED_MODES
"""Flags of steps that no metric includes."""
WARM_UP_STEPS = 5
"""Number of warm-up steps after the start or a mode switch."""


_ON_DEVICE = "@device"


def device_series(name: str) -> str:
    """Return the name of the series with the device times of a phase, replica or stage."""
    return name + _ON_DEVICE


def is_device_series(name: str) -> bool:
    """Return whether a series has device times."""
    return name.endswith(_ON_DEVICE)
