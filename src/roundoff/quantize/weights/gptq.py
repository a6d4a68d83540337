"""GPTQ: inputs round one at a time, and those still to come make up for each error.

Frantar, Ashkboos, Hoefler and Alistarh, arXiv:2210.17323. Algorithm 1 there keeps
changing the weights by equations 2 and 4,
``δ = -(w_q - quant(w_q)) / [H⁻¹]_qq · (H⁻¹)_{:,q}``, through the Cholesky factor of
``H⁻¹``. Here is the same sequence without an inverse: with ``H = U Uᵀ``, U upper
triangular, the error of a row is ``Σ_j (Σ_{i≤j} e_i U_ij)²``, ``e = w - ŵ``, and the
codes in the order 0, 1, … that make one term after the other least are::

    ŵ_j = quant(w_j + Σ_{i<j} e_i U_ij / U_jj)

(Chen et al., arXiv:2507.18553, show that this is Babai's nearest-plane algorithm and
that the two agree.) One Cholesky factor in fp32 is enough, and the errors that arrive
at a block of inputs are one matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.formats import Format, QParams, fake_quantize, working_dtype
from roundoff.quantize.weights.matrix import elementwise
from roundoff.quantize.weights.output_error import (
    Gain,
    Repaired,
    check_finite,
    check_kept,
    check_matrices,
    output_db,
    quadratic,
)


def gptq(
    weight: Tensor,
    hessian: Tensor,
    fmt: Format,
    qparams: QParams,
    *,
    cross: Tensor | None = None,
    damp: float = 0.01,
    order: bool = True,
    block: int = 128,
    ratios: Sequence[float] = (1.0,),
    kept: Tensor | None = None,
) -> Repaired:
    """Weights on the grid of ``qparams`` with small ``tr((Ŵ - W) H (Ŵ - W)ᵀ)``.

    With ``cross`` the inputs x̂ of the quantized layer differ from those x of the
    full-precision layer, whose output is the target (the asymmetric objective of GPTAQ,
    Li et al., arXiv:2504.02692). GPTQ then minimises::

        E|Ŵ x̂ - W x|² + λ|Ŵ - W|²  =  tr((Ŵ - W*) (H + λ) (Ŵ - W*)ᵀ) + constant

    with ``W* = W (C + λ) (H + λ)⁻¹``, ``H = E[x̂ x̂ᵀ]``, ``C = E[x x̂ᵀ]`` and λ the
    damping: it solves for the least-squares weights W* first, then rounds them as
    above. GPTAQ folds the same correction into the loop; this is its exact solution
    over real weights.

    A row that rounding to nearest serves better keeps that, so no row is worse than
    nearest. Inputs that are always zero round to nearest. Groups of inputs (PerGroup)
    and ``order`` go together: scales are fixed beforehand.

    Args:
        weight: ``[..., out, in]``, leading axes are groups (``matrix_view``).
        hessian: ``[..., in, in]``, from ``Hessian.matrix``, or ``centred`` where a bias
            is corrected afterwards.
        fmt: the format of the codes, without blocks.
        qparams: of the weight's shape (``matrix_qparams``).
        cross: ``[..., in, in]``, ``Hessian.cross`` or ``centred_cross``.
        damp: λ as a share of the mean of H's diagonal. Where the Cholesky factor does
            not exist, it is raised tenfold until it does; the gain's note says so.
        order: inputs with the largest diagonal first ("act-order"), else as they come.
        block: how many inputs the lazy update takes together; no influence on the
            result but rounding.
        ratios: each row's scales are tried times each of these, and the ratio with the
            least loss after GPTQ is kept: the scale search under the loss that counts.
            Only for qparams per output channel or finer.
        kept: bool, of the weight's shape: False for weights that have been pruned. A
            pruned one stays at the grid's value for 0, and the kept ones that are still
            to come make up for that (as in SparseGPT, Frantar and Alistarh,
            arXiv:2301.00774, section 3.3, whose masks are chosen here beforehand).

    Returns:
        The weight in its dtype, and its qparams: as given, or with ``ratios`` of the
        weight's shape. The gain is the output's SQNR against W (with ``cross``: against
        W* on x̂, the part that rounding can change), rounding W to nearest before, this
        after.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, a ratio that is not
            positive, a negative ``damp``, a weight that is not 0 where it is not kept,
            or a Hessian that is no second moment (a negative diagonal, or no Cholesky
            factor with all of the diagonal's mean added).

    Example:
        >>> from roundoff.formats import PerToken, choose_qparams, parse_format
        >>> torch.manual_seed(0)
        <torch...>
        >>> rows, weight = torch.randn(100, 4) @ torch.randn(4, 16), torch.randn(8, 16)
        >>> int4 = parse_format("int4")
        >>> start = choose_qparams(weight, int4, PerToken())
        >>> rounded = gptq(weight, rows.T @ rows / 100, int4, start)
        >>> rounded.gain.db > 3
        True
    """
    check_matrices("gptq", weight, hessian)
    if not ratios or not all(r > 0 for r in ratios):
        raise QuantizationError(
            "a ratio is not positive",
            where="gptq",
            expected="ratios > 0",
            got=str(tuple(ratios)),
        )
    dtype = working_dtype(weight)
    w = weight.detach().to(dtype)
    h = hessian.detach().to(dtype)
    check_kept("gptq", w, kept)
    scale, zero_point = elementwise(qparams, weight.shape)
    grid = QParams(
        scale.to(dtype), None if zero_point is None else zero_point.to(dtype)
    )
    damped, damping, note = damped_hessian(h, damp)
    target = w
    if cross is not None:
        target = _solve_least_squares(w, damped, cross, damping)

    scales = torch.cat([grid.scale * ratio for ratio in ratios], -2)
    targets = _repeat_rows(target, len(ratios))
    candidates = _round_inputs(
        targets,
        damped,
        fmt,
        scales,
        _repeat_rows(grid.zero_point, len(ratios)),
        order=order,
        block=block,
        kept=_repeat_rows(kept, len(ratios)),
    )
    losses = quadratic(candidates - targets, h)
    chosen, scales = _best_ratio(losses, candidates, scales, len(ratios))
    nearest = fake_quantize(w, grid, fmt)
    worse = quadratic(chosen - target, h) > quadratic(nearest - target, h)
    chosen = torch.where(worse[..., None], nearest, chosen)
    scales = torch.where(worse[..., None], grid.scale, scales)
    before = output_db(nearest, target, h)
    gain = Gain("gptq", before, output_db(chosen, target, h), note)
    if tuple(ratios) != (1.0,):
        qparams = QParams(scales, grid.zero_point)
    return Repaired(chosen.to(weight.dtype), qparams, gain)


@overload
def _repeat_rows(x: Tensor, count: int) -> Tensor: ...


@overload
def _repeat_rows(x: Tensor | None, count: int) -> Tensor | None: ...


def _repeat_rows(x: Tensor | None, count: int) -> Tensor | None:
    """``[..., out, in]`` as ``[..., count · out, in]``; None stays None."""
    return None if x is None else torch.cat([x] * count, -2)


def _best_ratio(
    losses: Tensor, weights: Tensor, scales: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """The weights and scales of each row's ratio with the least loss.

    Losses are ``[..., count · out]``, weights and scales ``[..., count · out, in]``;
    the results are ``[..., out, in]``.
    """
    inputs = weights.shape[-1]
    split = (*weights.shape[:-2], count, weights.shape[-2] // count, inputs)
    best = losses.reshape(split[:-1]).argmin(-2, keepdim=True)
    place = best[..., None].expand(*best.shape, inputs)
    return (
        weights.reshape(split).gather(-3, place).squeeze(-3),
        scales.reshape(split).gather(-3, place).squeeze(-3),
    )


def least_squares(
    weight: Tensor, hessian: Tensor, cross: Tensor, damp: float = 0.01
) -> Tensor:
    """``W* = W (C + λ) (H + λ)⁻¹``: the real weights nearest to the output ``W x`` from x̂.

    Shapes, damping and errors as in ``gptq``. With ``C = H`` it is W.
    """
    check_matrices("least_squares", weight, hessian)
    dtype = working_dtype(weight)
    w = weight.detach().to(dtype)
    damped, damping, _ = damped_hessian(hessian.detach().to(dtype), damp)
    return _solve_least_squares(w, damped, cross, damping).to(weight.dtype)


def supported(
    weight: Tensor, parts: Sequence[tuple[Tensor, Tensor]], damp: float = 0.01
) -> Tensor:
    """The share κ of the correction ``D = W* - W`` that holds on other data: in [0, 1].

    W* is fitted to as many numbers as the weight has, so with few rows much of it is
    noise. Each half of the data fits its own D and tries it on the other half: the
    error there is quadratic in κ, least at ``tr(W (C - H) Dᵀ) / tr(D H Dᵀ)``, summed
    over both. Take ``H + κ (C - H)`` for ``cross``: then the fitted weights are
    ``W + κ D``.

    Args:
        weight: ``[..., out, in]``.
        parts: ``(hessian, cross)`` of two halves of the data, each ``[..., in, in]``.
        damp: λ as a share of the mean of H's diagonal.

    Returns:
        κ for each group, ``[..., 1, 1]``; 0 where there is nothing to correct.

    Example:
        >>> torch.manual_seed(0)
        <torch...>
        >>> x, noise = torch.randn(2, 64, 32), 0.1 * torch.randn(2, 64, 32)
        >>> parts = [(a.T @ a / 64, b.T @ a / 64) for a, b in zip(x + noise, x)]
        >>> float(supported(torch.eye(32), parts)) < 0.3  # noise alone
        True
        >>> parts = [(a.T @ a / 64, b.T @ a / 64) for a, b in zip(0.8 * x, x)]
        >>> float(supported(torch.eye(32), parts)) > 0.9  # inputs that really are too small
        True
    """
    dtype = working_dtype(weight)
    w = weight.detach().to(dtype)
    above = torch.zeros((), dtype=torch.float64)
    below = torch.zeros((), dtype=torch.float64)
    for fitted_to, tried_on in (tuple(parts), tuple(parts)[::-1]):
        hessian, cross = (moments.to(dtype) for moments in fitted_to)
        other_hessian, other_cross = tried_on
        correction = least_squares(w, hessian, cross, damp) - w
        wanted = w @ (other_cross - other_hessian).to(dtype)
        above = above + _inner(wanted, correction)
        below = below + _inner(correction @ other_hessian.to(dtype), correction)
    share = torch.where(below > 0, above / below.clamp(min=1e-300), 0.0)
    return share.clamp_(0.0, 1.0).to(dtype)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """``tr(a bᵀ)`` of each matrix in float64, ``[..., 1, 1]``."""
    return (a * b).double().sum((-2, -1), keepdim=True)


def damped_hessian(hessian: Tensor, damp: float) -> tuple[Tensor, Tensor, str]:
    """``H`` made positive definite, the diagonal added for that ``[..., in]``, and a note.

    The diagonal is the damping, and beside it the mean power for inputs that are always
    zero. The note says where damping had to be raised.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    is_negative = (diagonal < 0).any()
    alive = diagonal > 0
    mean = diagonal.sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(mean > 0, mean, 1.0)
    fill = torch.where(alive, 0.0, mean)
    damping = (damp * mean).expand_as(diagonal)
    raised = damp
    note = ""
    for _ in range(8):
        damped = hessian + torch.diag_embed(fill + damping)
        failed = torch.linalg.cholesky_ex(damped).info > 0
        # read at once: each reading waits for the device
        has_failed, has_negative = torch.stack([failed.any(), is_negative]).tolist()
        if damp < 0 or has_negative:
            raise QuantizationError(
                "no second moments" if damp >= 0 else "negative damping",
                where="damped_hessian",
                expected="a Hessian with diagonal ≥ 0 and damp ≥ 0",
                got=f"smallest {float(diagonal.min())}, damp {damp}",
            )
        if not has_failed:
            return damped, fill + damping, note
        if raised >= 1:
            break
        raised = min(max(10 * raised, 1e-6), 1.0)
        damping = torch.where(failed[..., None], raised * mean, damping)
        note = f"damping raised to {raised:g} of the mean diagonal"
    raise QuantizationError(
        "the Hessian is not positive semidefinite",
        where="damped_hessian",
        expected="second moments of real inputs",
        got="no Cholesky factor, with the mean of the diagonal added",
        do="accumulate it with Hessian, in float64 if its inputs are nearly dependent",
    )


def _solve_least_squares(
    weight: Tensor, damped: Tensor, cross: Tensor, damping: Tensor
) -> Tensor:
    """``W (C + λ) (H + λ)⁻¹``, with ``H + λ`` and the diagonal of λ."""
    check_finite("gptq", cross=cross)
    if cross.shape != damped.shape:
        raise QuantizationError(
            "the cross term does not fit the Hessian",
            where="gptq",
            expected=f"shape {tuple(damped.shape)}",
            got=f"shape {tuple(cross.shape)}",
            do="take both from one Hessian",
        )
    right = weight @ (cross.detach().to(weight.dtype) + torch.diag_embed(damping))
    return torch.cholesky_solve(right.mT, torch.linalg.cholesky(damped)).mT


def _round_inputs(
    w: Tensor,
    damped: Tensor,
    fmt: Format,
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    order: bool,
    block: int,
    kept: Tensor | None,
) -> Tensor:
    """The sequence of the module docstring for weights ``[..., out, in]``.

    Inside, inputs lie along the rows, so that one input is contiguous.
    """
    place = None
    if order:
        power = damped.diagonal(dim1=-2, dim2=-1)
        turn = power.argsort(dim=-1, descending=True, stable=True)
        damped = damped.take_along_dim(turn[..., None], -2)
        damped = damped.take_along_dim(turn[..., None, :], -1)
        place = turn.expand(*w.shape[:-2], w.shape[-1])[..., None]
    feed = _feed(damped)
    w = _inputs_first(w, place)
    scale = _inputs_first(scale, place)
    zero_point = None if zero_point is None else _inputs_first(zero_point, place)
    kept = None if kept is None else _inputs_first(kept, place)
    errors = torch.empty_like(w)
    rounded = scale  # written over, input by input: its scale is not needed any more
    count = w.shape[-2]
    for start in range(0, count, block):
        stop = min(start + block, count)
        wanted = w[..., start:stop, :]
        if start:
            wanted = wanted + feed[..., start:stop, :start] @ errors[..., :start, :]
        for j in range(start, stop):
            value = wanted[..., j - start, :]
            if j > start:
                arriving = feed[..., j, None, start:j] @ errors[..., start:j, :]
                value = value + arriving.squeeze(-2)
            if kept is not None:
                value = value * kept[..., j, :]
            point = None if zero_point is None else zero_point[..., j, :]
            on_grid = fake_quantize(value, QParams(scale[..., j, :], point), fmt)
            torch.sub(w[..., j, :], on_grid, out=errors[..., j, :])
            rounded[..., j, :] = on_grid
    if place is not None:
        place = place.expand_as(rounded)
        rounded = torch.empty_like(rounded).scatter_(-2, place, rounded)
    return rounded.mT


def _feed(damped: Tensor) -> Tensor:
    """``U_ij / U_jj`` of ``U Uᵀ``, transposed: row j feeds errors e_i into input j."""
    upper = torch.linalg.cholesky(damped.flip(-1, -2)).flip(-1, -2)
    diagonal = upper.diagonal(dim1=-2, dim2=-1)
    shares: Tensor = upper / diagonal[..., None, :]
    return shares.mT.contiguous()


def _inputs_first(x: Tensor, place: Tensor | None) -> Tensor:
    """A copy as ``[..., in, out]``, inputs in the order of ``place``."""
    if place is None:
        return x.mT.clone(memory_format=torch.contiguous_format)
    return x.mT.take_along_dim(place, -2).contiguous()
