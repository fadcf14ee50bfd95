"""Finds trainings that do not fail but are wrong, as `check` records and losses prove."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpmon.model.findings.finding import Finding
from dpmon.model.findings.finding_evidence import process_suffix
from dpmon.store.events import read_events

if TYPE_CHECKING:
    from dpmon.model.run_analysis import RunAnalysis

KIND, MIN_LOOKS, MAX_LOOKS, MAX_LOOKS_OF_PROCESS, MIN_LOSSES = "wrong", 3, 10_000, 100, 20
_DDP_OPERATIONS = {"all_reduce", "broadcast"}
"""Through other operations, the loss of a rank may depend on the data of all ranks."""


def find_wrong_training(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each problem that the newest looks show, of the first process that has it.

    Its text stays the same while the problem lasts: without a screen, each text is printed once.
    """
    by_optimizer, by_update = defaultdict[Any, list[Any]](list), defaultdict[int, dict[Any, Any]](dict)
    limit = min(MAX_LOOKS, MAX_LOOKS_OF_PROCESS * len(run.order))
    for look in (event.data for event in read_events(run.store, "check", limit=limit)):
        by_optimizer[look["process"], look["optimizer_class"], " and ".join(look["roots"])].append(look)
        if look["weights"] and None not in look["weights"]:  # NaN
            by_update[look["update"]][look["rank"]] = look
    yield from _find_constant_losses(run)
    yield from _compare_ranks(run, [by_rank for _, by_rank in sorted(by_update.items())])
    findings = dict[str, Finding]()
    for (process, optimizer, model), looks in sorted(by_optimizer.items()):
        if len(looks) >= MIN_LOOKS:
            ground = f"at {MIN_LOOKS} looks up to update {looks[-1]['update']:,}{process_suffix(process, run)}"
            for text, advice in _find_problems(optimizer, model, looks[-MIN_LOOKS:]):
                findings.setdefault(text, Finding(KIND, text, ground, advice, 1.0))
    yield from findings.values()


def _find_problems(optimizer: str, model: str, looks: list[Any]) -> Iterator[tuple[str, str]]:
    """Yield text and advice for each problem that all these looks at an optimizer show."""
    unused = [name for name in looks[-1]["no_gradient"] if all(name in look["no_gradient"] for look in looks)]
    if all(look["idle"] for look in looks):
        text = f"No parameter of {optimizer} belongs to a model that is called, and none has ever had a gradient."
        yield text, "an optimizer made of the parameters of the called model"
    if unused:
        advice = "a look at its use (.data, detach, no_grad, an unused branch); requires_grad_(False) if that is right"
        yield f"No gradient has ever reached {', '.join(unused)} of {model}.", advice
    if all(look["evaluating"] for look in looks):
        yield f"{model} is in eval mode while it trains.", "model.train()"
    if not any(look["has_rate"] for look in looks):
        yield f"The learning rate of {optimizer} is 0.", "another learning rate, or another schedule of it"
    if all(look["single_rows"] for look in looks):
        yield f"BatchNorm in {model} normalizes batches of one row.", "SyncBatchNorm, GroupNorm, or larger batches"


def _find_constant_losses(run: RunAnalysis) -> Iterator[Finding]:
    """Yield a finding for each loss that never changes; not for 0, as without rewards or beyond a margin."""
    for curve in run.whole_losses:
        count = sum(point.values for point in curve.points)
        is_constant = all(point.low == point.high == curve.first and not point.unfit for point in curve.points)
        if curve.first and is_constant and count >= MIN_LOSSES:
            text = f"The loss never changes: it is {curve.first:.4g} ({curve.place})."
            ground = f"{count} recorded losses are equal, bit for bit"
            yield Finding(KIND, text, ground, "a look at the loss: softmax over one class, argmax, detach", 1.0)


def _compare_ranks(run: RunAnalysis, updates: list[dict[Any, Any]]) -> Iterator[Finding]:
    """Yield a finding if ranks do not average gradients, or all train on the same data. `updates`: looks by rank."""
    ranks = {rank for by_rank in updates for rank in by_rank}
    newest = [list(by_rank.values()) for by_rank in updates if by_rank.keys() == ranks][-MIN_LOOKS:]
    weights = [list(zip(*(look["weights"] for look in looks), strict=False)) for looks in newest]
    if len(ranks) < 2 or len(newest) < MIN_LOOKS or not all(weights):
        return
    gaps = [max((max(values) - min(values)) / (max(map(abs, values)) or 1) for values in pairs) for pairs in weights]
    losses = [{tuple(look["losses"]) for look in looks} for looks in newest]
    has_wrappers = all(look["has_wrapper"] for looks in newest for look in looks)
    has_equal_losses = all(len(equal) == 1 for equal in losses) and len(set.union(*losses)) > 1
    has_equal_data, is_apart = has_equal_losses and not any(gaps), has_wrappers and all(gaps)
    # The communication of the whole run is read last, because this takes longest.
    if not (has_equal_data or is_apart) or (communication := run.whole_communication) is None:
        return
    ground, sums = f"at {MIN_LOOKS} looks at {len(ranks)} ranks after equal updates", communication.collectives
    if is_apart and not (communication.synced or communication.unsynced):
        text = "Nothing averages the gradients: the weights of the ranks differ."
        gap = f"a sampled weight differs by up to {100 * gaps[-1]:.2g}%"
        by = f"{gap} {ground}; no backward pass began at a DistributedDataParallel"
        yield Finding(KIND, text, by, "calling the DistributedDataParallel in the loop, not its .module", 1.0)
    is_own = bool(sums.own or {operation.name for operation in sums.operations} - _DDP_OPERATIONS)
    if has_equal_data and sums.samples and not is_own:
        text = "All ranks train on the same data: their losses and weights are equal."
        yield Finding(KIND, text, ground, "a DistributedSampler for the loader", 1.0)
