"""GPTQ: weights rounded one input at a time, each rounding error made up for by the inputs that are still to come.

Frantar, Ashkboos, Hoefler and Alistarh, arXiv:2210.17323. Algorithm 1 there keeps changing the weights by equations 2
and 4, ``δ = -(w_q - quant(w_q)) / [H⁻¹]_qq · (H⁻¹)_{:,q}``, through the Cholesky factor of ``H⁻¹``. Here is the same
sequence without an inverse: with ``H = U Uᵀ``, U upper triangular, the error of a row is ``Σ_j (Σ_{i≤j} e_i U_ij)²``,
``e = w - ŵ``, and the codes in the order 0, 1, … that make one term after the other least are::

    ŵ_j = quant(w_j + Σ_{i<j} e_i U_ij / U_jj)

(Chen et al., arXiv:2507.18553, show that this is Babai's nearest-plane algorithm and that the two agree.) One Cholesky
factor in fp32 is enough, and the errors that arrive at a block of inputs are one matrix product.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    """Weights on the grid of ``qparams`` that keep the layer's output: small ``tr((Ŵ - W) H (Ŵ - W)ᵀ)``.

    With ``cross`` the inputs x̂ of the quantized layer differ from those x of the full-precision layer, whose output is
    the target (the asymmetric objective of GPTAQ, Li et al., arXiv:2504.02692). What is minimised is then::

        E|Ŵ x̂ - W x|² + λ|Ŵ - W|²  =  tr((Ŵ - W*) (H + λ) (Ŵ - W*)ᵀ) + constant,   W* = W (C + λ) (H + λ)⁻¹

    with ``H = E[x̂ x̂ᵀ]``, ``C = E[x x̂ᵀ]`` and λ the damping: the least-squares weights W* are found first, then rounded as
    above. GPTAQ folds the same correction into the loop; this is its exact solution over real weights.

    A row that rounding to nearest serves better keeps that, so no row is worse than nearest. Inputs that are always zero
    round to nearest. Groups of inputs (PerGroup) and ``order`` go together: scales are fixed beforehand.

    Args:
        weight: ``[..., out, in]``, leading axes are groups (``matrix_view``).
        hessian: ``[..., in, in]``, from ``Hessian.matrix``, or ``centred`` where a bias is corrected afterwards.
        fmt: the format of the codes, without blocks.
        qparams: of the weight's shape (``matrix_qparams``).
        cross: ``[..., in, in]``, ``Hessian.cross`` or ``centred_cross``.
        damp: λ as a share of the mean of H's diagonal. Where the Cholesky factor does not exist, it is raised tenfold
            until it does; the gain's note says so.
        order: inputs with the largest diagonal first ("act-order"), else as they come.
        block: how many inputs the lazy update takes together; no influence on the result but rounding.
        ratios: each row's scales are tried times each of these, and the ratio with the least loss after GPTQ is kept:
            the scale search under the loss that counts. Only for qparams per output channel or finer.
        kept: bool, of the weight's shape: which weights there are; the others have been pruned. A pruned one stays at the
            grid's value for 0, and the kept ones that are still to come make up for that (as in SparseGPT, Frantar and
            Alistarh, arXiv:2301.00774, section 3.3, whose masks are chosen here beforehand).

    Returns:
        The weight in its dtype, and its qparams: as given, or with ``ratios`` of the weight's shape. The gain is the
        output's SQNR against W (with ``cross``: against W* on x̂, the part that rounding can change), rounding W to
        nearest before, this after.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, a ratio that is not positive, a negative ``damp``, a weight
            that is not 0 where it is not kept, or a Hessian that is no second moment (a negative diagonal, or no Cholesky
            factor with all of the diagonal's mean added).

    Example:
        >>> from roundoff.formats import PerToken, choose_qparams, parse_format
        >>> torch.manual_seed(0)
        <torch...>
        >>> rows, weight = torch.randn(100, 4) @ torch.randn(4, 16), torch.randn(8, 16)
        >>> int4 = parse_format("int4")
        >>> found = gptq(weight, rows.T @ rows / 100, int4, choose_qparams(weight, int4, PerToken()))
        >>> found.gain.db > 3
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
    w, h = weight.detach().to(dtype), hessian.detach().to(dtype)
    check_kept("gptq", w, kept)
    scale, zero_point = elementwise(qparams, weight.shape)
    scale, zero_point = (
        scale.to(dtype),
        None if zero_point is None else zero_point.to(dtype),
    )
    damped, added, note = damped_hessian(h, damp)
    target = w if cross is None else _least_squares(w, damped, cross, added)
    scales = torch.cat([scale * r for r in ratios], -2)
    wide = torch.cat([target] * len(ratios), -2)
    points = None if zero_point is None else torch.cat([zero_point] * len(ratios), -2)
    wide_kept = None if kept is None else torch.cat([kept] * len(ratios), -2)
    tried = _in_order(wide, damped, fmt, scales, points, order, block, wide_kept)
    split = (*w.shape[:-2], len(ratios), *w.shape[-2:])
    best = quadratic(tried - wide, h).reshape(split[:-1]).argmin(-2, keepdim=True)
    at = best[..., None].expand(*best.shape, w.shape[-1])
    chosen, scales = (
        t.reshape(split).gather(-3, at).squeeze(-3) for t in (tried, scales)
    )
    nearest = fake_quantize(w, QParams(scale, zero_point), fmt)
    worse = (quadratic(chosen - target, h) > quadratic(nearest - target, h))[..., None]
    chosen, scales = (
        torch.where(worse, nearest, chosen),
        torch.where(worse, scale, scales),
    )
    gain = Gain(
        "gptq", output_db(nearest, target, h), output_db(chosen, target, h), note
    )
    grid = qparams if tuple(ratios) == (1.0,) else QParams(scales, zero_point)
    return Repaired(chosen.to(weight.dtype), grid, gain)


def least_squares(
    weight: Tensor, hessian: Tensor, cross: Tensor, damp: float = 0.01
) -> Tensor:
    """``W* = W (C + λ) (H + λ)⁻¹``, the real weights that come nearest to the full-precision output ``W x`` from x̂.

    Shapes, damping and errors as in ``gptq``. With ``C = H`` it is W.
    """
    check_matrices("least_squares", weight, hessian)
    dtype = working_dtype(weight)
    damped, added, _ = damped_hessian(hessian.detach().to(dtype), damp)
    return _least_squares(weight.detach().to(dtype), damped, cross, added).to(
        weight.dtype
    )


def supported(
    weight: Tensor, parts: Sequence[tuple[Tensor, Tensor]], damp: float = 0.01
) -> Tensor:
    """How much of the correction ``D = W* - W`` for other inputs holds on data that it was not fitted to: κ in [0, 1].

    W* is fitted to as many numbers as the weight has, so with few rows much of it is noise. Each half of the data fits its
    own D and tries it on the other half: the error there is quadratic in κ, least at ``tr(W (C - H) Dᵀ) / tr(D H Dᵀ)``,
    summed over both. Take ``H + κ (C - H)`` for ``cross``: then the fitted weights are ``W + κ D``.

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
    above, below = (
        torch.zeros((), dtype=torch.float64),
        torch.zeros((), dtype=torch.float64),
    )
    for (hessian, cross), (other, other_cross) in (tuple(parts), tuple(parts)[::-1]):
        fitted = least_squares(w, hessian.to(dtype), cross.to(dtype), damp) - w
        wanted = w @ (other_cross - other).to(dtype)
        above = above + (wanted * fitted).double().sum((-2, -1), keepdim=True)
        below = below + ((fitted @ other.to(dtype)) * fitted).double().sum(
            (-2, -1), keepdim=True
        )
    return (
        torch.where(below > 0, above / below.clamp(min=1e-300), 0.0)
        .clamp_(0.0, 1.0)
        .to(dtype)
    )


def least_squares_output(
    weight: Tensor, hessian: Tensor, output: Tensor, damp: float = 0.01
) -> Tensor:
    """``W* = (E[y x̂ᵀ] + λ W) (H + λ)⁻¹``: the real weights nearest to W that give any wanted output y from x̂.

    With ``y = W x`` this is ``least_squares``. With a residual branch y may be ``W x + s - ŝ``: then this operator makes up
    for what the branch ŝ beside it has lost. Round the result as a weight of its own, without ``cross``.

    Args:
        weight: ``[..., out, in]``.
        hessian: ``[..., in, in]``, ``E[x̂ x̂ᵀ]``.
        output: ``[..., out, in]``, ``E[y x̂ᵀ]``; centred if the Hessian is.
        damp: λ as a share of the mean of H's diagonal.

    Raises QuantizationError as ``gptq`` does.
    """
    check_matrices("least_squares_output", weight, hessian)
    check_finite("least_squares_output", output=output)
    if output.shape != weight.shape:
        raise QuantizationError(
            "the wanted output does not fit the weight",
            where="least_squares_output",
            expected=f"shape {tuple(weight.shape)}",
            got=f"shape {tuple(output.shape)}",
        )
    dtype = working_dtype(weight)
    damped, added, _ = damped_hessian(hessian.detach().to(dtype), damp)
    return _solve(
        output.detach().to(dtype) + weight.detach().to(dtype) * added[..., None, :],
        damped,
    ).to(weight.dtype)


def damped_hessian(hessian: Tensor, damp: float) -> tuple[Tensor, Tensor, str]:
    """``H`` with what makes it positive definite, what that is (``[..., in]``, added to its diagonal), and a note.

    The damping, and the mean power for inputs that are always zero. The note says where damping had to be raised.
    """
    diagonal = hessian.diagonal(dim1=-2, dim2=-1)
    if damp < 0 or bool((diagonal < 0).any()):
        raise QuantizationError(
            "no second moments" if damp >= 0 else "negative damping",
            where="damped_hessian",
            expected="a Hessian with diagonal ≥ 0 and damp ≥ 0",
            got=f"smallest {float(diagonal.min())}, damp {damp}",
        )
    alive = diagonal > 0
    mean = diagonal.sum(-1, keepdim=True) / alive.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(mean > 0, mean, 1.0)
    fill = torch.where(alive, 0.0, mean)
    damping = (damp * mean).expand_as(diagonal)
    raised, note = damp, ""
    for _ in range(8):
        damped = hessian + torch.diag_embed(fill + damping)
        failed = torch.linalg.cholesky_ex(damped).info > 0
        if not bool(failed.any()):
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


def _least_squares(
    weight: Tensor, damped: Tensor, cross: Tensor, added: Tensor
) -> Tensor:
    check_finite("gptq", cross=cross)
    if cross.shape != damped.shape:
        raise QuantizationError(
            "the cross term does not fit the Hessian",
            where="gptq",
            expected=f"shape {tuple(damped.shape)}",
            got=f"shape {tuple(cross.shape)}",
            do="take both from one Hessian",
        )
    return _solve(
        weight @ (cross.detach().to(weight.dtype) + torch.diag_embed(added)), damped
    )


def _solve(right: Tensor, damped: Tensor) -> Tensor:
    """``right (H + λ)⁻¹``."""
    return torch.cholesky_solve(right.mT, torch.linalg.cholesky(damped)).mT


def _in_order(
    w: Tensor,
    damped: Tensor,
    fmt: Format,
    scale: Tensor,
    zero_point: Tensor | None,
    order: bool,
    block: int,
    kept: Tensor | None,
) -> Tensor:
    """The sequence of the module docstring. Inside, inputs lie along the rows, so that one input is contiguous."""
    turn = None
    if order:
        turn = damped.diagonal(dim1=-2, dim2=-1).argsort(
            dim=-1, descending=True, stable=True
        )
        damped = damped.take_along_dim(turn[..., None], -2).take_along_dim(
            turn[..., None, :], -1
        )
    upper = torch.linalg.cholesky(damped.flip(-1, -2)).flip(-1, -2)
    feed = (upper / upper.diagonal(dim1=-2, dim2=-1)[..., None, :]).mT.contiguous()
    at = None if turn is None else turn.expand(*w.shape[:-2], w.shape[-1])[..., None]
    w, scale = _rows(w, at), _rows(scale, at)
    zero_point, kept = (None if x is None else _rows(x, at) for x in (zero_point, kept))
    errors = torch.empty_like(w)
    count = w.shape[-2]
    for start in range(0, count, block):
        stop = min(start + block, count)
        wanted = w[..., start:stop, :]
        if start:
            wanted = wanted + feed[..., start:stop, :start] @ errors[..., :start, :]
        for j in range(start, stop):
            value = wanted[..., j - start, :]
            if j > start:
                value = value + (
                    feed[..., j, None, start:j] @ errors[..., start:j, :]
                ).squeeze(-2)
            if kept is not None:
                value = value * kept[..., j, :]
            point = None if zero_point is None else zero_point[..., j, :]
            found = fake_quantize(value, QParams(scale[..., j, :], point), fmt)
            torch.sub(w[..., j, :], found, out=errors[..., j, :])
            scale[..., j, :] = found  # the scale of this input is not needed any more
    chosen = scale
    if at is not None:
        chosen = torch.empty_like(chosen).scatter_(-2, at.expand_as(chosen), chosen)
    return chosen.mT


def _rows(x: Tensor, at: Tensor | None) -> Tensor:
    """``x`` ``[..., out, in]`` as ``[..., in, out]``, inputs in the order of ``at``, in memory of its own."""
    turned = x.mT
    return (
        turned.clone(memory_format=torch.contiguous_format)
        if at is None
        else turned.take_along_dim(at, -2).contiguous()
    )
