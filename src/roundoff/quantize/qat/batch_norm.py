"""BatchNorm while a quantized model is trained: keep its statistics from a step on, or
train it folded into its layer.

A BatchNorm that was folded before training is gone, and there is nothing to do. One
that was kept goes on with the statistics of each batch, which are noisier than those
that the deployed network uses: freeze it for the last part of the training
(arXiv:1806.08342, section 3.2.2). ``FoldedNorm`` instead quantizes, in training, the
weights that are deployed.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from roundoff.errors import QuantizationError
from roundoff.formats import working_dtype

__all__ = ["FoldedNorm", "freeze_batch_norm"]


def freeze_batch_norm(model: nn.Module) -> list[RemovableHandle]:
    """Every BatchNorm of a model uses its running statistics from now on, and no longer
    changes them.

    Also after ``model.train()``; scale and shift go on learning. Those that keep no
    running statistics stay as they are.

    Returns:
        One handle for each BatchNorm; ``remove()`` ends it, at the next
        ``model.train()``. Empty where all were folded.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        >>> len(freeze_batch_norm(model)), model.train()(torch.ones(4, 2)).shape, model[1].num_batches_tracked.item()
        (1, torch.Size([4, 2]), 0)
    """
    folded = [m for m in model.modules() if isinstance(m, FoldedNorm)]
    inside = {id(m.norm) for m in folded}
    norms = [
        m
        for m in model.modules()
        if isinstance(m, _BatchNorm) and id(m) not in inside and m.track_running_stats
    ]
    return [module.register_forward_pre_hook(_to_eval) for module in (*folded, *norms)]


def _to_eval(module: nn.Module, _inputs: object) -> None:
    (module.norm if isinstance(module, FoldedNorm) else module).eval()


class FoldedNorm(nn.Module):
    """A convolution or linear layer and its BatchNorm, trained in the form in which
    they are deployed.

    Jacob et al. (arXiv:1712.05877), section 3.2 and figure C.8: the layer runs once in
    high precision for mean and variance of its batch; then with the quantized folded
    weight ``Q(gamma w / sqrt(variance + eps))`` (eq. 14) and the bias
    ``beta + gamma (b - mean) / sqrt(variance + eps)``. In evaluation mode, and once
    frozen, with the running statistics.

    Without a quantizer it computes what layer and BatchNorm compute, gradients too.
    Costs a second run of the layer.

    Args:
        layer: Conv1d, Conv2d, Conv3d, or Linear for inputs ``(N, C)``.
        norm: its BatchNorm, affine, with running statistics.
        quantizer: of the folded weight, such as a learner; by default none.

    Raises:
        QuantizationError: another kind of layer, or one that does not fit the BatchNorm.
    """

    def __init__(
        self, layer: nn.Module, norm: _BatchNorm, quantizer: nn.Module | None = None
    ) -> None:
        super().__init__()
        if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            raise QuantizationError(
                "this layer cannot be trained folded",
                where=type(layer).__name__,
                expected="Conv1d, Conv2d, Conv3d or Linear",
                got=type(layer).__name__,
                do="keep its BatchNorm and freeze it for the last steps",
            )
        if (
            not norm.affine
            or norm.running_mean is None
            or norm.num_features != layer.weight.shape[0]
        ):
            raise QuantizationError(
                "this BatchNorm cannot be folded",
                where=type(norm).__name__,
                expected=f"{layer.weight.shape[0]} channels, affine, with running statistics",
                got=str(norm),
            )
        self.layer = layer
        self.norm = norm
        self.quantizer = quantizer

    def forward(self, x: Tensor) -> Tensor:
        """The layer's normalised result."""
        mean, variance = self._statistics(x) if self.norm.training else self._running()
        weight, bias = self._folded(mean, variance)
        return self._layer(
            x, weight if self.quantizer is None else self.quantizer(weight), bias
        )

    def folded(self) -> nn.Module:
        """A copy of the layer with the running statistics folded in, its weight not quantized."""
        layer = copy.deepcopy(self.layer)
        weight, bias = self._folded(*self._running())
        layer.weight = nn.Parameter(weight.detach().clone())
        layer.bias = nn.Parameter(bias.detach().clone())
        return layer

    def _folded(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.norm.weight * (variance + self.norm.eps).rsqrt()
        bias = -mean if self.layer.bias is None else self.layer.bias - mean
        weight = self.layer.weight * factor.reshape(
            -1, *[1] * (self.layer.weight.ndim - 1)
        )
        return weight, self.norm.bias + bias * factor

    def _layer(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if isinstance(self.layer, nn.Linear):
            return functional.linear(x, weight, bias)
        result: Tensor = self.layer._conv_forward(
            x, weight, bias
        )  # with its padding mode
        return result

    def _running(self) -> tuple[Tensor, Tensor]:
        mean = self.norm.running_mean
        variance = self.norm.running_var
        if mean is None or variance is None:
            raise QuantizationError(
                "the BatchNorm lost its running statistics", where=str(self.norm)
            )
        return mean, variance

    def _share_of_batch(self) -> float:
        """The weight of a batch in the running statistics; without momentum 1/n."""
        if self.norm.momentum is not None:
            return self.norm.momentum
        tracked = self.norm.num_batches_tracked
        return 1.0 if tracked is None else 1.0 / float(tracked)

    def _statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the batch; the running ones move towards them, as BatchNorm has it."""
        result = self._layer(x, self.layer.weight, self.layer.bias)
        result = result.to(working_dtype(result))  # bf16 in an autocast region
        dims = [i for i in range(result.ndim) if i != 1]
        count = result.numel() // result.shape[1]
        if count < 2:
            raise QuantizationError(
                "one value per channel has no variance",
                where=str(self.norm),
                expected="2 or more per batch",
                got=f"an output of shape {tuple(result.shape)}",
            )
        variance, mean = torch.var_mean(result, dims, correction=0)
        with torch.no_grad():
            tracked = self.norm.num_batches_tracked
            if tracked is not None:
                tracked.add_(1)
            share = self._share_of_batch()
            old_mean, old_variance = self._running()
            old_mean.lerp_(mean.to(old_mean), share)
            old_variance.lerp_(
                (variance * (count / (count - 1))).to(old_variance), share
            )
        return mean, variance
