"""Finds trainings that do not fail but are wrong, as `check` records prove."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import MIN_STEPS, process_suffix
from dpmon.record.schema import TRAINING, step_kind
from dpmon.store.events import read_events

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis

KIND, MIN_LOOKS, MAX_CHECKS, MIN_LOSSES, MIN_UPDATES = "wrong", 3, 10_000, 20, 100
"""Fewest recorded losses and updates from which a loss is constant."""
MAX_STEP_BYTES, MIN_GAP = 1024, 1e-4
"""Ranks that exchange more per step may average gradients; least relative difference of weights that differ."""
_IDLE = "No parameter of {} belongs to a model that is called, and none has a gradient."
_SINGLE_ROWS = "BatchNorm in {} normalizes batches of one row."


def find_wrong_training(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each problem that was seen at all newest looks, of the first process that has it."""
    by_optimizer, by_update = defaultdict[Any, list[Any]](list), defaultdict[int, dict[Any, Any]](dict)
    for look in (event.data for event in read_events(run.store, "check", limit=MAX_CHECKS)):
        by_optimizer[look["process"], look["optimizer_class"], " and ".join(look["roots"])].append(look)
        if None not in look["weights"]:  # NaN
            by_update[look["update"]][look["rank"]] = look
    yield from _find_constant_losses(run, by_optimizer.values())
    yield from _compare_ranks(run, [looks for _, looks in sorted(by_update.items())])
    texts = set()
    for (process, optimizer, model), looks in sorted(by_optimizer.items()):
        newest = looks[-MIN_LOOKS:]
        unused = [name for name in looks[-1]["no_gradient"] if all(name in look["no_gradient"] for look in looks)]
        has_rate = any(None in look["rates"] or any(look["rates"]) for look in newest)
        has_norm = all(look["norm_dimensions"] for look in newest)
        problems = (
            (all(look["idle"] for look in newest), _IDLE.format(optimizer), "an optimizer made of the called model"),
            (has_norm and _has_single_rows(run, newest[-1]), _SINGLE_ROWS.format(model), "more rows, or GroupNorm"),
            (all(look["evaluating"] for look in newest), f"{model} is in eval mode while it trains.", "model.train()"),
            (not has_rate, f"The learning rate of {optimizer} is 0.", "another schedule of the learning rate"),
            (unused, f"No gradient ever reaches {', '.join(unused)} of {model}.", "requires_grad_(False)"),
        )
        for holds, text, advice in problems:
            if holds and text not in texts and len(newest) == MIN_LOOKS:
                texts.add(text)
                ground = f"at the last {MIN_LOOKS} looks, up to update {newest[-1]['update']:,}"
                yield Finding(KIND, text, ground + process_suffix(process, run), advice, 1.0)


def _has_single_rows(run: RunAnalysis, look: dict[str, Any]) -> bool:
    """Return whether most training calls of a look's models give a BatchNorm one row, at least in one replica."""
    calls = Counter[bool]()
    for shape, layout in run.layouts.known_shapes:
        if shape.process == look["process"] and layout.root in look["roots"] and step_kind(shape.kind) == TRAINING:
            inputs = [run.layouts.first_shape(shape.process, sizes) for sizes, _ in shape.replicas]
            calls[any(1 in size[:1] and len(size) in look["norm_dimensions"] for size in inputs)] += shape.calls
    return calls[True] >= max(calls[False], MIN_STEPS)


def _find_constant_losses(run: RunAnalysis, optimizers: Iterable[list[dict[str, Any]]]) -> Iterator[Finding]:
    """Yield a finding for each loss that never changes. `optimizers`: the looks at each."""
    update = max((looks[-1]["update"] for looks in optimizers), default=0)
    for curve in run.whole_losses if update >= MIN_UPDATES else ():
        extremes = {extreme for point in curve.points for extreme in (point.low, point.high)}
        count = sum(point.values for point in curve.points)
        if count >= MIN_LOSSES and extremes == {curve.first} and not any(point.unfit for point in curve.points):
            text = f"The loss never changes: it is {curve.first:.4g} ({curve.place})."
            ground = f"{count} recorded losses are equal, bit for bit, up to update {update:,}"
            yield Finding(KIND, text, ground, "a look at the loss: argmax, detach, a single class", 1.0)


def _compare_ranks(run: RunAnalysis, updates: list[dict[Any, Any]]) -> Iterator[Finding]:
    """Yield a finding if ranks do not average gradients, or all train on the same data. `updates`: looks by rank."""
    ranks, communication = {rank for by_rank in updates for rank in by_rank}, run.whole_communication
    looks = [[*by_rank.values()] for by_rank in updates if by_rank.keys() == ranks]
    weights = [list(zip(*(look["weights"] for look in by_rank), strict=False)) for by_rank in looks]
    if len(ranks) < 2 or len(looks) < MIN_LOOKS or communication is None or not all(weights):
        return
    gaps = [max((max(values) - min(values)) / (max(map(abs, values)) or 1) for values in pairs) for pairs in weights]
    losses = [{(*look["losses"],) for look in by_rank} for by_rank in looks]
    sums, ground = communication.collectives, f"at {len(looks)} looks at {len(ranks)} ranks after the same updates"
    step_bytes = sum(operation.bytes for operation in sums.operations) / (sums.samples or 1)
    if sums.samples and step_bytes <= MAX_STEP_BYTES and min(gaps[1:]) > 0 and min(gaps[-MIN_LOOKS:]) > MIN_GAP:
        text = f"Nothing averages the gradients: weights of the ranks differ by up to {100 * gaps[-1]:.2g}%."
        advice = "calling the DistributedDataParallel itself in the loop, not its .module"
        yield Finding(KIND, text, f"{ground}; {step_bytes:.0f} bytes exchanged per step", advice, 1.0)
    elif not (any(gaps) or sums.own) and all(len(equal) == 1 for equal in losses) and len(set.union(*losses)) > 1:
        text = "All ranks train on the same data: their losses and weights are equal."
        yield Finding(KIND, text, ground, "a DistributedSampler for the loader", 1.0)
