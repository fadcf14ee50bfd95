"""Records what can prove that a training is wrong although it does not fail. It draws no conclusions.

Looks follow updates whose number is a multiple of a power of two, which grows until looks are about a minute apart, so
ranks look after the same updates. A look takes each optimizer that steps within WINDOW updates.
"""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

import torch

from dpmon.tracer.calls.traced_modules import TracedModules
from dpmon.tracer.core.identity_table import IdentityTable
from dpmon.tracer.core.module_tables import class_name, in_training_mode, modules_of, names_of_parameters, unwrap_module
from dpmon.tracer.core.session import Session
from dpmon.tracer.steps.losses import LossTracer

WINDOW, MIN_GAP_NS, MAX_NAMES = 4, 30_000_000_000, 8
"""Updates in which a look waits for optimizers, and number of the first; a gap between looks that is not doubled."""
_NORM_DIMENSIONS: dict[type, int] = {torch.nn.BatchNorm1d: 3, torch.nn.BatchNorm2d: 4, torch.nn.BatchNorm3d: 5}
"""SyncBatchNorm uses the rows of all ranks."""
_WITH_MODES = torch.nn.modules.batchnorm._BatchNorm, torch.nn.modules.dropout._DropoutNd


class TrainingChecks:
    """The looks at one process's training."""

    def __init__(self, session: Session, modules: TracedModules, losses: LossTracer) -> None:
        self._session, self._modules, self._losses = session, modules, losses
        self.reset()

    def reset(self) -> None:
        """Set the initial state, also in a forked child."""
        self._last_updates: IdentityTable[int] = IdentityTable()  # of the looks at each optimizer
        self._due, self._gap, self._due_ns = WINDOW, WINDOW, 0

    def poll(self, optimizer: object, update: int) -> int:
        """Look at an optimizer after its step if it is time to. Return the update after which to call again."""
        if update >= self._due + WINDOW:
            now = monotonic_ns()
            self._gap <<= now - self._due_ns < MIN_GAP_NS
            self._due, self._due_ns = (update // self._gap + 1) * self._gap, now
        if update >= self._due > (self._last_updates.get(optimizer) or 0) and self._session.ring is not None:
            with self._session.hidden("checks of the training"), torch._C._DisableTorchDispatch():
                self._look(optimizer, update)
        return max(self._due, update + 1)

    def _look(self, optimizer: Any, update: int) -> None:
        """Look at an optimizer and at the models that it trains."""
        groups, owners, model_names = optimizer.param_groups, dict[int, tuple[str, Any]](), dict[int, str]()
        for traced_module in list(self._modules.modules_by_id.values()):
            root = unwrap_module(traced_module.module_ref())
            model_names[id(root)] = traced_module.model_name
            for key, name in names_of_parameters(root).items():
                owners.setdefault(key, (name, root))
        trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
        owned = [(parameter, *owners[id(parameter)]) for parameter in trained if id(parameter) in owners]
        roots = {id(root): root for *_, root in owned}.values()
        evaluated = [root for root in roots if not in_training_mode(root)]
        norms = [part for root in roots for part in modules_of(root) if type(part) in _NORM_DIMENSIONS]
        bare_names = [name for parameter, name, _ in owned if parameter.grad is None]
        facts = {
            "update": update,
            "optimizer_class": class_name(optimizer),
            "roots": [model_names[id(root)] for root in roots],
            "idle": bool(owners and trained and not owned) and all(parameter.grad is None for parameter in trained),
            "no_gradient": bare_names[: MAX_NAMES * (len(bare_names) < len(owned))],
            "rates": [rate if type(rate) in (int, float) else None for rate in (group.get("lr") for group in groups)],
            "evaluating": any(isinstance(part, _WITH_MODES) for root in evaluated for part in modules_of(root)),
            "norm_dimensions": sorted({_NORM_DIMENSIONS[type(norm)] for norm in norms if in_training_mode(norm)}),
        }
        plain = [parameter for parameter, *_ in owned if type(parameter) is torch.nn.Parameter and parameter.numel()]
        values = [
            parameter.detach()[tuple(size // 2 for size in parameter.shape)]
            for parameter in plain[:: len(plain) // MAX_NAMES or 1][:MAX_NAMES]
            if parameter.device == trained[0].device
        ]
        losses = [loss for loss in self._losses.losses_of_update() if trained and loss.device == trained[0].device]

        def record(read: list[float]) -> None:
            parts = {"weights": read[: len(values)], "losses": read[len(values) :]}
            self._session.record_event("check", None, **facts, **parts)

        if self._losses.read_values(values + losses, record):
            self._last_updates.set(optimizer, update)
