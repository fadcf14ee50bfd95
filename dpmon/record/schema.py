"""What a step and a call are made of: every phase and every quantity once, with unit, meaning and labels.

The tables of the store, the columns of CSV, the keys of JSON, the metrics, the figures of the report and the summary,
and the phase table of the screen with its legend are made from these lists. A new phase or quantity is added here, in
`wire` (its place in the bytes) and where it is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpmon.record.wire import CALL_PHASES, MODES, STEP_PHASES

__all__ = [
    "EVALUATION",
    "KINDS",
    "MODES",
    "PHASES",
    "QUANTITIES",
    "REST",
    "SERIES",
    "SETTLING",
    "SETTLING_STEPS",
    "STEP",
    "Phase",
    "Quantity",
    "Series",
    "device_series",
    "phase_named",
]


@dataclass(frozen=True, slots=True)
class Phase:
    """A phase of a step. Durations are ns in the store, ms in JSON and CSV, s in metrics."""

    name: str
    """Its name in the record."""
    letter: str
    """Stands for it where there is no colour."""
    meaning: str
    of_call: bool = False
    """Whether it is a phase of the step's calls, and so a part of `forward`."""
    label: str = ""
    """Its name on the screen, if `name` is too long."""
    optional: bool = False
    """Whether tables leave it out if it never ran."""

    @property
    def shown(self) -> str:
        """Its name on the screen."""
        return self.label or self.name


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number that a step counts, such as its samples; sums of it make sense."""

    name: str
    unit: str
    meaning: str
    metric: str
    """Its name as a Prometheus counter."""
    absent: str
    """Why a step may have none."""
    optional: bool = False
    """Whether a record leaves it out if it is absent."""


PHASES = (
    Phase("data", "D", "waiting for the loader's next batch"),
    Phase("copy", "C", "copying tensors from the host to a GPU, by the script's own .to and .cuda", optional=True),
    Phase("scatter", "S", "splitting the batch over the devices", of_call=True),
    Phase("replicate", "R", "copying the model to the devices", of_call=True),
    Phase("parallel_apply", "A", "the forward of all replicas at once", of_call=True, label="apply"),
    Phase("gather", "G", "collecting the outputs on one device", of_call=True),
    Phase("forward", "F", "the calls of the model"),
    Phase("backward", "B", "computing gradients"),
    Phase("optimizer", "O", "updating the parameters"),
    Phase("other", ".", "the script's own work between the phases"),
)
"""In the order of a step. The phases of the calls lie within `forward`; the others add up to the step."""
QUANTITIES = (
    Quantity(
        "samples",
        unit="samples",
        meaning="rows of the batches",
        metric="samples_total",
        absent="no call of this step had a tensor with rows",
    ),
    Quantity(
        "copied_bytes",
        unit="bytes",
        meaning="bytes that copies brought to GPUs",
        metric="copied_bytes_total",
        absent="nothing was copied",
        optional=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Series:
    """Durations of which the store keeps counts, sums and quantiles, one value a step."""

    name: str
    phase: Phase | None = None


STEP, REST = "step", "rest"
"""The whole step; and what the phases of its calls leave of its forward."""
SERIES = (Series(STEP), *(Series(phase.name, phase) for phase in PHASES), Series(REST))


EVALUATION, SETTLING = 1, 2
"""Flags of a step's kind. An evaluation step has neither a backward pass nor an optimizer step. Settling steps are the
first after a change of mode: caches are filled, algorithms are chosen."""
KINDS = (0, EVALUATION, SETTLING, EVALUATION | SETTLING)
SETTLING_STEPS = 5
"""Steps after a change of mode, or the start, that count as settling."""
_BY_NAME = {phase.name: phase for phase in PHASES}
assert set(_BY_NAME) == {*STEP_PHASES, *CALL_PHASES}, "schema and wire name different phases"


def phase_named(name: str) -> Phase:
    """The phase of that name in the record; KeyError if there is none."""
    return _BY_NAME[name]


def device_series(phase: str) -> str:
    """The name of the series of device times of a phase."""
    return f"{phase}@device"
