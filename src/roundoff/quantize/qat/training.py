"""What an optimizer and a loop need to know of learners: groups of parameters, and freezing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.quantize.qat.batch_norm import freeze_batch_norm
from roundoff.quantize.qat.learner import Learner

__all__ = ["Freezing", "freeze", "learners", "parameter_groups"]


def learners(model: nn.Module) -> dict[str, Learner]:
    """The learners of a model, by module path."""
    return {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, Learner)
    }


def parameter_groups(
    model: nn.Module, lr: float, scale_lr: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimizer: scales have a learning rate of their
    own, and no weight decay.

    Groups are named ``model``, ``scales``, and ``clips`` for PACT's alphas, which have
    the scales' learning rate and the model's weight decay (arXiv:1805.06085, section
    3). Empty ones are left out.

    Raises:
        QuantizationError: a learner has no parameters yet; the optimizer would not know
            them.

    Example:
        >>> import torch
        >>> from roundoff.quantize.qat.learners import make_learner
        >>> model = nn.Sequential(make_learner("lsq", "int8_asym", role="activation"), nn.Linear(2, 2))
        >>> _ = model(torch.randn(4, 2))
        >>> groups = parameter_groups(model, lr=0.1, scale_lr=0.01, weight_decay=1e-4)
        >>> [(g["name"], len(g["params"]), g["lr"], g["weight_decay"]) for g in groups]
        [('model', 2, 0.1, 0.0001), ('scales', 1, 0.01, 0.0)]
    """
    scales: list[Tensor] = []
    clips: list[Tensor] = []
    for path, learner in learners(model).items():
        if not learner.ready:
            raise QuantizationError(
                "this learner has no parameters yet",
                where=learner.name or path,
                expected="qparams, or one batch through the model",
                got="neither",
                do="run one batch before the optimizer is made",
            )
        learned = [getattr(learner, name) for name in learner.learned]
        if learner.decays:
            clips += learned
        else:
            scales += learned
    taken = {id(parameter) for parameter in (*scales, *clips)}
    others = [p for p in model.parameters() if id(p) not in taken]
    groups: list[dict[str, Any]] = []
    for name, parameters, rate, decay in (
        ("model", others, lr, weight_decay),
        ("scales", scales, scale_lr, 0.0),
        ("clips", clips, scale_lr, weight_decay),
    ):
        if parameters:
            group = {"name": name, "params": parameters}
            groups.append(group | {"lr": rate, "weight_decay": decay})
    return groups


def freeze(model: nn.Module, frozen: bool = True) -> int:
    """Keep all learned and observed scales as they are, or let them go on; returns how
    many learners there are.
    """
    all_learners = learners(model)
    for learner in all_learners.values():
        learner.freeze(frozen)
    return len(all_learners)


@dataclass
class Freezing:
    """Freezes scales and BatchNorm statistics when a step is reached.

    Call ``step`` after each optimizer step.

    Args:
        model: the model in training.
        scales: after how many steps learned and observed scales stay as they are;
            ``None``: never.
        batch_norm: after how many steps BatchNorm keeps its running statistics;
            ``None``: never.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.BatchNorm1d(2))
        >>> freezing = Freezing(model, batch_norm=1)
        >>> for _ in range(3):
        ...     _ = model.train()(torch.ones(4, 2))
        ...     freezing.step()
        >>> model[0].num_batches_tracked.item()
        1
    """

    model: nn.Module
    scales: int | None = None
    batch_norm: int | None = None
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._reached()

    def step(self) -> None:
        """One optimizer step is done."""
        self.steps += 1
        self._reached()

    def _reached(self) -> None:
        if self.steps == self.scales:
            freeze(self.model)
        if self.steps == self.batch_norm:
            freeze_batch_norm(self.model)
