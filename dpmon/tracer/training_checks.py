"""Records what can prove that a training is wrong although it does not fail. It draws no conclusions."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

import torch

from dpmon.record.shared_names import shorten_name
from dpmon.tracer.calls.roots import RootFinder
from dpmon.tracer.core import module_tables
from dpmon.tracer.core.session import Session
from dpmon.tracer.steps.losses import LossTracer, unreadable_reason

MIN_GAP_NS, MAX_NAMES = 30_000_000_000, 8
"""Shortest time between later looks; maximum number of listed names, and of parameters whose values are read."""
_NORM_DIMENSIONS: dict[type, int] = {torch.nn.BatchNorm1d: 3, torch.nn.BatchNorm2d: 4, torch.nn.BatchNorm3d: 5}
"""Number of dimensions of inputs with several positions per row: torch accepts a single row only for them."""

_WITH_MODES = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd


class TrainingChecks:
    """The checks of one process's training."""

    def __init__(self, session: Session, roots: RootFinder, losses: LossTracer) -> None:
        self._session, self._roots, self._losses = session, roots, losses
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._gap, self._last_ns = 2, 0

    def poll(self, optimizer: object, update: int) -> int:
        """Look at an optimizer after its step. Return the update after which to call again.

        Ranks look after the same updates: near multiples of a power of two, which grows until looks are about a minute
        apart. How near varies, so that not all looks meet the last batch of an epoch, or one of several optimizers.
        """
        now = monotonic_ns()
        if now - self._last_ns < MIN_GAP_NS:
            self._gap *= 2
        self._last_ns = now
        if self._session.ring is not None:
            with self._session.hidden("checks of the training"), torch._C._DisableTorchDispatch():
                self._look(optimizer, update)
        multiple = (update // self._gap + 1) * self._gap
        return multiple + multiple % 7

    def _look(self, optimizer: Any, update: int) -> None:
        """Record an optimizer and the models that it trains."""
        trained = [value for group in optimizer.param_groups for value in group["params"] if value.requires_grad]
        trained_ids = {id(value) for value in trained}
        names, models, shapes = dict[int, str](), dict[str, Any](), list[Any]()
        for module in list(self._roots.call_tracer.traced_modules.modules_by_id.values()):
            model = module_tables.unwrap_module(module.module_ref())
            own_names = module_tables.names_of_parameters(model)
            if any(key in trained_ids and key not in names for key in own_names):
                models[module.model_name] = model
                caches = [inputs for inputs, _ in module.replica_caches] or [module.input_cache]
                if len(caches) > 1 or (self._session.world_size or 1) > 1:
                    shapes += [cache.shape or () for cache in caches]
            for key, name in own_names.items():
                names.setdefault(key, name)
        bare = [names.get(id(value), "") for value in trained if value.grad is None and value not in optimizer.state]
        rates = [group.get("lr") for group in optimizer.param_groups]
        parts: list[Any] = [part for model in models.values() for part in module_tables.modules_of(model)]
        training = [part for part in parts if module_tables.in_training_mode(part)]
        single_rows = {len(shape) for shape in shapes if shape[:1] == (1,)}
        facts = {
            "update": update,
            "optimizer_class": module_tables.class_name(optimizer),
            "roots": list(models),
            "idle": bool(names) and not models and 0 < len(bare) == len(trained),
            "no_gradient": [shorten_name(name) for name in bare if name and optimizer.state][:MAX_NAMES],
            "has_rate": any(type(rate) not in (int, float) or rate for rate in rates),
            "evaluating": not training and any(map(_depends_on_mode, parts)),
            "single_rows": any(_NORM_DIMENSIONS.get(type(part)) in single_rows for part in training),
            "has_wrapper": self._roots.synced_names is not None,
        }
        is_sharded = any(type(value) not in (torch.Tensor, torch.nn.Parameter) for value in trained)
        step = len(trained) // MAX_NAMES or 1
        sampled = [value for value in trained[::step][:MAX_NAMES] if value.numel() and not is_sharded]
        weights = [value.detach()[tuple(size // 2 for size in value.shape)] for value in sampled]
        if any(unreadable_reason(weight) or weight.device != weights[0].device for weight in weights):
            weights = []
        losses = [loss for loss in self._losses.losses_of_update() if weights and loss.device == weights[0].device]

        def record(*values: float) -> None:
            read = {"weights": values[: len(weights)], "losses": values[len(weights) :]}
            self._session.record_event("check", None, **facts, **read)

        if not self._losses.read_values(weights + losses, record):
            record()


def _depends_on_mode(part: Any) -> bool:
    """Return whether a module is a Dropout that drops values, or a BatchNorm that is not frozen."""
    own: list[Any] = module_tables.values_of(part, module_tables.PARAMETERS)
    return isinstance(part, _WITH_MODES) and getattr(part, "p", 1) > 0 and all(value.requires_grad for value in own)
