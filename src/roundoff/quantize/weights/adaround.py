"""AdaRound: for each weight whether it rounds up or down, learned by gradient descent on the layer's output.

Nagel, Amjad, van Baalen, Louizos and Blankevoort, arXiv:2004.10568. A weight lies between its neighbours on the grid,
``W̃ = lower + h(V) (upper - lower)`` (equation 22 there, for integers ``s clip(⌊W/s⌋ + h(V), n, p)``), with the rectified
sigmoid ``h(V) = clip(σ(V) (ζ - γ) + γ, 0, 1)``, ζ = 1.1, γ = -0.1 (equation 23), and the term
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

_ZETA, _GAMMA = 1.1, -0.1
#: β at the end of the warm-up and at the end.
_BETA = (20.0, 2.0)


class _Choice:
    """The two neighbours of each weight on the grid, and V."""

    def __init__(self, weight: Tensor, fmt: Format, qparams: QParams) -> None:
        scale, zero_point = (
            None if x is None else x.to(weight.dtype)
            for x in elementwise(qparams, weight.shape)
        )
        self.grid = QParams(scale if scale is not None else weight, zero_point)
        self.nearest = fake_quantize(weight, self.grid, fmt)
        rows = self.nearest.reshape(-1, weight.shape[-1])
        codes = Codes(
            rows,
            self.grid.scale.reshape(rows.shape),
            None if zero_point is None else zero_point.reshape(rows.shape),
            fmt,
        )
        # the other neighbour lies towards the weight; where there is none, beyond the range, the step is 0
        step = codes.step((self.nearest - weight).reshape(rows.shape)).reshape(
            weight.shape
        )
        self.lower = self.nearest + step.clamp(max=0.0)
        self.gap = step.abs()
        share = torch.where(
            self.gap > 0, (weight - self.lower) / self.gap.clamp(min=1e-38), 0.0
        ).clamp_(0.0, 1.0)
        self.v = torch.logit((share - _GAMMA) / (_ZETA - _GAMMA))

    def soft(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """h(V) and the weights that it gives."""
        h = (torch.sigmoid(v) * (_ZETA - _GAMMA) + _GAMMA).clamp(0.0, 1.0)
        return h, torch.addcmul(self.lower, h, self.gap)

    def hard(self, v: Tensor) -> Tensor:
        """The weights rounded as V says. A code that was at the nearest place is exactly ``nearest`` again."""
        up = v >= 0
        other = torch.where(up, self.lower + self.gap, self.lower)
        same = torch.where(up, self.nearest > self.lower, self.nearest <= self.lower)
        return torch.where(same, self.nearest, other)


def _beta(progress: float, warm_up: float) -> float:
    """β after a share ``progress`` of the steps: a half cosine from 20 to 2 after the warm-up."""
    t = max(0.0, progress - warm_up) / (1 - warm_up)
    return _BETA[1] + 0.5 * (_BETA[0] - _BETA[1]) * (1 + math.cos(math.pi * t))


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
    """AdaRound on ``tr((W̃ - W) H (W̃ - W)ᵀ)`` (equation 21 with its expectation taken first), without data passes.

    One step is one product ``[out, in] @ [in, in]``. Adam (Kingma and Ba, arXiv:1412.6980) on V, with the loss of each
    row in units of that row's loss when rounded to nearest, times the number of inputs; so one ``rate`` and one
    ``regularization`` fit all layers (found on random matrices of 16 × 144 with correlated inputs). A row that nearest
    serves better keeps nearest.

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
    w, hess = weight.detach().to(dtype), hessian.detach().to(dtype)
    choice = _Choice(w, fmt, qparams)
    basis = quadratic(choice.nearest - w, hess)
    unit = torch.where(
        basis > 0, w.shape[-1] / basis.clamp(min=torch.finfo(dtype).tiny), 0.0
    )[..., None]
    v, mean, square = choice.v.clone(), torch.zeros_like(w), torch.zeros_like(w)
    for i in range(iterations):
        s = torch.sigmoid(v)
        raw = s * (_ZETA - _GAMMA) + _GAMMA
        h = raw.clamp(0.0, 1.0)
        slope = (
            ((torch.addcmul(choice.lower, h, choice.gap) - w) @ hess)
            .mul_(2 * unit)
            .mul_(choice.gap)
        )
        if i >= warm_up * iterations:
            slope.add_(
                _regularizer_slope(h, _beta(i / iterations, warm_up)),
                alpha=regularization,
            )
        # d h / d V, zero where it is clipped
        slope.mul_(s * (1 - s) * (_ZETA - _GAMMA)).mul_((raw > 0) & (raw < 1))
        mean.lerp_(slope, 0.1)
        square.lerp_(slope.square_(), 0.001)
        size = rate / (1 - 0.9 ** (i + 1))
        v.addcdiv_(
            mean, square.div(1 - 0.999 ** (i + 1)).sqrt_().add_(1e-8), value=-size
        )
    chosen = choice.hard(v)
    worse = quadratic(chosen - w, hess) > basis
    chosen = torch.where(worse[..., None], choice.nearest, chosen)
    gain = Gain(
        "adaround", output_db(choice.nearest, w, hess), output_db(chosen, w, hess)
    )
    return Repaired(chosen.to(weight.dtype), qparams, gain)


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
    """AdaRound with the layer's data: ``E|f(W̃ x̂ + b) - f(y)|² + λ f(V)``, f the activation that follows (equation 25).

    x̂ are the inputs in the quantized network and y the outputs, before the activation, in full precision. The loss is in
    units of the loss of rounding to nearest, times the number of weights, so that ``regularization`` fits all layers.

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
        The weight; the gain is the SQNR of ``f(W̃ x̂ + b)`` against ``f(y)`` on all rows, before (nearest) and after. If it
        fell, nearest is kept.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, no rows or no iterations.
    """
    check_matrices("adaround", weight, None)
    check_finite("adaround", inputs=inputs, targets=targets, bias=bias)
    _check_steps("adaround", iterations, warm_up)
    rows = inputs.shape[-2] if inputs.dim() >= 2 else 0
    lead = weight.shape[:-2]
    if (
        rows < 1
        or inputs.shape != (*lead, rows, weight.shape[-1])
        or targets.shape != (*lead, rows, weight.shape[-2])
    ):
        raise QuantizationError(
            "the data does not fit the weight",
            where="adaround",
            expected=f"inputs {(*lead, 'n', weight.shape[-1])} and targets {(*lead, 'n', weight.shape[-2])}",
            got=f"{tuple(inputs.shape)} and {tuple(targets.shape)}",
            do="see patches for convolutions",
        )
    dtype = working_dtype(weight)
    w, x, y = (t.detach().to(dtype) for t in (weight, inputs, targets))
    shift = (
        torch.zeros((), dtype=dtype)
        if bias is None
        else bias.detach().to(dtype)[..., None, :]
    )
    follow = activation or (lambda z: z)
    wanted = follow(y)
    choice = _Choice(w, fmt, qparams)
    nearest_loss = float(
        (follow(x @ choice.nearest.mT + shift) - wanted).square().mean()
    )
    unit = w.numel() / nearest_loss if nearest_loss > 0 else 0.0
    generator = torch.Generator().manual_seed(seed)
    v = choice.v.clone().requires_grad_()
    optimizer = torch.optim.Adam([v], lr=rate)
    for i in range(iterations):
        at = torch.randint(rows, (min(batch, rows),), generator=generator).to(x.device)
        with torch.enable_grad():
            h, soft = choice.soft(v)
            got = follow(x.index_select(-2, at) @ soft.mT + shift)
            loss = (got - wanted.index_select(-2, at)).square().mean() * unit
            if i >= warm_up * iterations:
                loss = (
                    loss
                    + regularization
                    * (1 - (2 * h - 1).abs().pow(_beta(i / iterations, warm_up))).sum()
                )
        (v.grad,) = torch.autograd.grad(loss, v)
        optimizer.step()

    def decibels(candidate: Tensor) -> float:
        return relative_db(
            (follow(x @ candidate.mT + shift) - wanted).square(), wanted.square()
        )

    chosen = choice.hard(v.detach())
    before, after = decibels(choice.nearest), decibels(chosen)
    note = ""
    if after < before:
        chosen, after, note = (
            choice.nearest,
            before,
            "rounding to nearest kept: learning did not help",
        )
    return Repaired(
        chosen.to(weight.dtype), qparams, Gain("adaround", before, after, note)
    )


def _check_steps(where: str, iterations: int, warm_up: float) -> None:
    if iterations < 1 or not 0 <= warm_up < 1:
        raise QuantizationError(
            "no steps to learn in",
            where=where,
            expected="iterations ≥ 1 and warm_up in [0, 1)",
            got=f"iterations {iterations}, warm_up {warm_up}",
        )
