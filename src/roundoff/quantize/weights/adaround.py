"""AdaRound: learn by gradient descent which weights round up and which down.

Nagel, Amjad, van Baalen, Louizos and Blankevoort, arXiv:2004.10568. A weight lies
between its neighbours on the grid, ``W̃ = lower + h(V) (upper - lower)`` (equation 22
there, for integers ``s clip(⌊W/s⌋ + h(V), n, p)``), with the rectified sigmoid
``h(V) = clip(σ(V) (ζ - γ) + γ, 0, 1)``, ζ = 1.1, γ = -0.1 (equation 23), and the term
``f(V) = Σ 1 - |2 h(V) - 1|^β`` (equation 24), β falling, which drives each h to 0 or 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import Format, QParams, fake_quantize, working_dtype
from roundoff.quantize.weights.flips import Codes
from roundoff.quantize.weights.matrix import elementwise
from roundoff.quantize.weights.output_error import (
    Gain,
    Repaired,
    check_finite,
    check_matrices,
    output_db,
    quadratic,
    relative_db,
)

_ZETA = 1.1
_GAMMA = -0.1
#: β at the end of the warm-up and at the end.
_BETA = (20.0, 2.0)


class _Choice:
    """The two neighbours of each weight on the grid, and V.

    Attributes:
        grid: scale and zero point of each weight.
        nearest: the weights rounded to nearest.
        lower: the lower neighbours.
        gap: how far above them the upper ones lie; 0 for weights beyond the range.
        v: V for which h(V) gives the weights as they are (within the range).
    """

    def __init__(self, weight: Tensor, fmt: Format, qparams: QParams) -> None:
        scale, zero_point = elementwise(qparams, weight.shape)
        scale = scale.to(weight.dtype)
        zero_point = None if zero_point is None else zero_point.to(weight.dtype)
        self.grid = QParams(scale, zero_point)
        self.nearest = fake_quantize(weight, self.grid, fmt)
        rows = self.nearest.reshape(-1, weight.shape[-1])
        codes = Codes(
            rows,
            scale.reshape(rows.shape),
            None if zero_point is None else zero_point.reshape(rows.shape),
            fmt,
        )
        # the other neighbour lies towards the weight; where there is none, beyond the
        # range, the step is 0
        error = (self.nearest - weight).reshape(rows.shape)
        step = codes.step(error).reshape(weight.shape)
        self.lower = self.nearest + step.clamp(max=0.0)
        self.gap = step.abs()
        position = (weight - self.lower) / self.gap.clamp(min=1e-38)
        position = torch.where(self.gap > 0, position, 0.0).clamp_(0.0, 1.0)
        self.v = torch.logit((position - _GAMMA) / (_ZETA - _GAMMA))

    def soft(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """h(V) and the weights that it gives."""
        h = (torch.sigmoid(v) * (_ZETA - _GAMMA) + _GAMMA).clamp(0.0, 1.0)
        return h, torch.addcmul(self.lower, h, self.gap)

    def hard(self, v: Tensor) -> Tensor:
        """The weights rounded as V says.

        A code that was at the nearest place is exactly ``nearest`` again.
        """
        up = v >= 0
        rounded = torch.where(up, self.lower + self.gap, self.lower)
        nearest_is_up = self.nearest > self.lower
        same = torch.where(up, nearest_is_up, self.nearest <= self.lower)
        return torch.where(same, self.nearest, rounded)


def _beta(progress: float, warm_up: float) -> float:
    """β after a share ``progress`` of the steps.

    After the warm-up it falls from 20 to 2 along half a cosine.
    """
    first, last = _BETA
    t = max(0.0, progress - warm_up) / (1 - warm_up)
    return last + 0.5 * (first - last) * (1 + math.cos(math.pi * t))


def _regularizer_slope(h: Tensor, beta: float) -> Tensor:
    """d/dh of ``1 - |2h - 1|^β``."""
    centred = 2 * h - 1
    return -2 * beta * centred.abs().pow_(beta - 1) * centred.sign()


def adaround_hessian(
    weight: Tensor,
    hessian: Tensor,
    fmt: Format,
    qparams: QParams,
    *,
    iterations: int = 300,
    rate: float = 0.1,
    regularization: float = 10.0,
    warm_up: float = 0.2,
) -> Repaired:
    """AdaRound on ``tr((W̃ - W) H (W̃ - W)ᵀ)``, without data passes.

    That is equation 21 with its expectation taken first. One step is one product
    ``[out, in] @ [in, in]``. Adam (Kingma and Ba, arXiv:1412.6980) on V, with the loss
    of each row in units of that row's loss when rounded to nearest, times the number of
    inputs; so one ``rate`` and one ``regularization`` fit all layers (chosen on random
    matrices of 16 × 144 with correlated inputs). A row that nearest serves better keeps
    nearest.

    Args:
        weight: ``[..., out, in]``.
        hessian: ``[..., in, in]``.
        fmt: integers, or a format of at most 16 bits.
        qparams: of the weight's shape; not changed.
        iterations: steps of Adam.
        rate: of V.
        regularization: λ of equation 21.
        warm_up: share of the steps without regularization.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, or no iterations.
    """
    check_matrices("adaround_hessian", weight, hessian)
    _check_steps("adaround_hessian", iterations, warm_up)
    dtype = working_dtype(weight)
    w = weight.detach().to(dtype)
    h = hessian.detach().to(dtype)
    choice = _Choice(w, fmt, qparams)
    nearest_loss = quadratic(choice.nearest - w, h)
    scaled = w.shape[-1] / nearest_loss.clamp(min=torch.finfo(dtype).tiny)
    unit = torch.where(nearest_loss > 0, scaled, 0.0)[..., None]
    v = choice.v.clone()
    adam = _Adam(v, rate)
    for i in range(iterations):
        sigmoid = torch.sigmoid(v)
        unclipped = sigmoid * (_ZETA - _GAMMA) + _GAMMA
        share = unclipped.clamp(0.0, 1.0)
        soft = torch.addcmul(choice.lower, share, choice.gap)
        slope = ((soft - w) @ h).mul_(2 * unit).mul_(choice.gap)
        if i >= warm_up * iterations:
            beta = _beta(i / iterations, warm_up)
            slope.add_(_regularizer_slope(share, beta), alpha=regularization)
        # d h / d V, zero where it is clipped
        slope.mul_(sigmoid * (1 - sigmoid) * (_ZETA - _GAMMA))
        slope.mul_((unclipped > 0) & (unclipped < 1))
        adam.step_(slope)
    chosen = choice.hard(v)
    worse = quadratic(chosen - w, h) > nearest_loss
    chosen = torch.where(worse[..., None], choice.nearest, chosen)
    gain = Gain("adaround", output_db(choice.nearest, w, h), output_db(chosen, w, h))
    return Repaired(chosen.to(weight.dtype), qparams, gain)


class _Adam:
    """Adam with β₁ = 0.9 and β₂ = 0.999 on one tensor, in place.

    ``step_`` overwrites the slope.
    """

    def __init__(self, parameter: Tensor, rate: float) -> None:
        self.parameter = parameter
        self.rate = rate
        self.mean = torch.zeros_like(parameter)
        self.square = torch.zeros_like(parameter)
        self.steps = 0

    def step_(self, slope: Tensor) -> None:
        self.steps += 1
        self.mean.lerp_(slope, 0.1)
        self.square.lerp_(slope.square_(), 0.001)
        size = self.rate / (1 - 0.9**self.steps)
        deviation = self.square.div(1 - 0.999**self.steps).sqrt_().add_(1e-8)
        self.parameter.addcdiv_(self.mean, deviation, value=-size)


def adaround(
    weight: Tensor,
    inputs: Tensor,
    targets: Tensor,
    fmt: Format,
    qparams: QParams,
    *,
    bias: Tensor | None = None,
    activation: Callable[[Tensor], Tensor] | None = None,
    iterations: int = 500,
    batch: int = 512,
    rate: float = 0.1,
    regularization: float = 10.0,
    warm_up: float = 0.2,
    seed: int = 0,
) -> Repaired:
    """AdaRound with the layer's data: ``E|f(W̃ x̂ + b) - f(y)|² + λ f(V)`` (equation 25).

    f is the activation that follows, x̂ are the inputs in the quantized network and y
    the outputs, before the activation, in full precision. The loss is in units of the
    loss of rounding to nearest, times the number of weights, so that ``regularization``
    fits all layers.

    Args:
        weight: ``[groups, out, in]``, or ``[out, in]`` (``matrix_view``).
        inputs: ``[groups, n, in]`` or ``[n, in]`` (``patches``).
        targets: ``[groups, n, out]`` or ``[n, out]``, the rows' outputs.
        fmt: integers, or a format of at most 16 bits.
        qparams: of the weight's shape; not changed.
        bias: ``[groups, out]`` or ``[out]``, added to ``W̃ x̂``.
        activation: f, elementwise; by default none.
        iterations: steps of Adam.
        batch: rows in a step, drawn anew in each.
        rate: of V.
        regularization: λ.
        warm_up: share of the steps without regularization.
        seed: of the draws.

    Returns:
        The weight; the gain is the SQNR of ``f(W̃ x̂ + b)`` against ``f(y)`` on all
        rows, before (nearest) and after. If it fell, nearest is kept.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, no rows or no iterations.
    """
    check_matrices("adaround", weight, None)
    check_finite("adaround", inputs=inputs, targets=targets, bias=bias)
    _check_steps("adaround", iterations, warm_up)
    _check_data(weight, inputs, targets)
    dtype = working_dtype(weight)
    w = weight.detach().to(dtype)
    x = inputs.detach().to(dtype)
    shift = torch.zeros((), dtype=dtype)
    if bias is not None:
        shift = bias.detach().to(dtype)[..., None, :]
    f = activation or (lambda output: output)
    target = f(targets.detach().to(dtype))

    def output(candidate: Tensor, rows: Tensor) -> Tensor:
        return f(rows @ candidate.mT + shift)

    def decibels(candidate: Tensor) -> float:
        return relative_db((output(candidate, x) - target).square(), target.square())

    choice = _Choice(w, fmt, qparams)
    nearest_loss = float((output(choice.nearest, x) - target).square().mean())
    unit = w.numel() / nearest_loss if nearest_loss > 0 else 0.0
    generator = torch.Generator().manual_seed(seed)
    v = choice.v.clone().requires_grad_()
    optimizer = torch.optim.Adam([v], lr=rate)
    rows = x.shape[-2]
    for i in range(iterations):
        drawn = torch.randint(rows, (min(batch, rows),), generator=generator)
        drawn = drawn.to(x.device)
        with torch.enable_grad():
            h, soft = choice.soft(v)
            error = output(soft, x.index_select(-2, drawn)) - target.index_select(
                -2, drawn
            )
            loss = error.square().mean() * unit
            if i >= warm_up * iterations:
                beta = _beta(i / iterations, warm_up)
                undecided = (1 - (2 * h - 1).abs().pow(beta)).sum()
                loss = loss + regularization * undecided
        (v.grad,) = torch.autograd.grad(loss, v)
        optimizer.step()
    chosen = choice.hard(v.detach())
    before = decibels(choice.nearest)
    after = decibels(chosen)
    if after < before:
        note = "rounding to nearest kept: learning did not help"
        gain = Gain("adaround", before, before, note)
        return Repaired(choice.nearest.to(weight.dtype), qparams, gain)
    return Repaired(chosen.to(weight.dtype), qparams, Gain("adaround", before, after))


def _check_data(weight: Tensor, inputs: Tensor, targets: Tensor) -> None:
    rows = inputs.shape[-2] if inputs.dim() >= 2 else 0
    groups = weight.shape[:-2]
    inputs_fit = inputs.shape == (*groups, rows, weight.shape[-1])
    targets_fit = targets.shape == (*groups, rows, weight.shape[-2])
    if rows < 1 or not inputs_fit or not targets_fit:
        raise QuantizationError(
            "the data does not fit the weight",
            where="adaround",
            expected=f"inputs {(*groups, 'n', weight.shape[-1])} and targets {(*groups, 'n', weight.shape[-2])}",
            got=f"{tuple(inputs.shape)} and {tuple(targets.shape)}",
            do="see patches for convolutions",
        )


def _check_steps(where: str, iterations: int, warm_up: float) -> None:
    if iterations < 1 or not 0 <= warm_up < 1:
        raise QuantizationError(
            "no steps to learn in",
            where=where,
            expected="iterations ≥ 1 and warm_up in [0, 1)",
            got=f"iterations {iterations}, warm_up {warm_up}",
        )
