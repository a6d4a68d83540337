"""Second moments of an operator's inputs, summed over batches.

They are all that GPTQ and its relatives know of the data, and with the means beside
them all that bias correction needs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.quantize.weights.output_error import check_finite, check_matrices


class Hessian:
    """``H = Σ g x xᵀ / Σ g`` over the rows x seen, and the means beside it.

    With x̂ the inputs in the quantized network (``inputs``) and x those in full
    precision (``reference``)::

        matrix     E[x̂ x̂ᵀ]   [groups, in, in]   the Hessian of |Ŵ x̂|²
        cross      E[x x̂ᵀ]    [groups, in, in]   None without reference
        mean       E[x̂]       [groups, in]
        reference_mean  E[x]  [groups, in]       None without reference

    (GPTQ's Hessian is ``2 X Xᵀ``; the factor does not count.) The weights g are one
    number ≥ 0 for each row: with the squared adjoint of the row's outputs the error is
    that of the network's output instead of the layer's. Summed in fp32 (fp64 for fp64
    inputs).

    Example:
        >>> hessian = Hessian()
        >>> hessian.add(torch.tensor([[1.0, 2.0], [3.0, 0.0]]))
        >>> hessian.matrix
        tensor([[[5., 1.],
                 [1., 2.]]])
        >>> hessian.rows, hessian.mean
        (2, tensor([[2., 1.]]))
    """

    def __init__(self) -> None:
        self.rows = 0
        self._weight = 0.0
        self._sums: dict[str, Tensor] = {}

    def add(
        self,
        inputs: Tensor,
        weights: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> None:
        """Add one batch of rows.

        Args:
            inputs: ``[n, in]`` or ``[groups, n, in]`` (see ``patches``).
            weights: of the rows, ``[n]`` or ``[groups, n]``; by default 1.
            reference: the rows in full precision, of the same shape.

        Raises:
            QuantizationError: NaN or Inf, a negative weight, shapes that do not fit
                each other or earlier batches, or a reference that is given only
                sometimes. The sums are then as before.
        """
        rows = _with_groups(inputs)
        exact = None if reference is None else _with_groups(reference)
        self._check_fit(rows, exact, weights)
        if rows.dtype != torch.float64:
            rows = rows.float()
            exact = None if exact is None else exact.float()
        factor = None
        if weights is not None:
            factor = weights.to(rows.dtype).expand(rows.shape[:2])[..., None]
        sums = _batch_sums(rows, exact, factor)
        finite = [sums[name].isfinite().all() for name in sums if "mean" in name]
        if not bool(torch.stack(finite).all()):
            # raises for NaN and Inf among the rows; else only the sums are Inf
            check_finite(
                "Hessian.add", inputs=inputs, weights=weights, reference=reference
            )
        self._add_sums(sums)
        self.rows += rows.shape[1]
        if factor is None:
            self._weight += rows.shape[1]
        else:
            # all groups have the same weights, or each its own: then the mean over groups
            # is the common factor
            self._weight += float(factor.double().sum()) / rows.shape[0]

    def _add_sums(self, sums: dict[str, Tensor]) -> None:
        for name, batch_sum in sums.items():
            if name in self._sums:
                self._sums[name].add_(batch_sum)
            else:
                self._sums[name] = batch_sum

    def merge(self, other: Hessian) -> Hessian:
        """Return the second moments of both data together.

        >>> parts = Hessian(), Hessian()
        >>> for part, row in zip(parts, ([1.0, 2.0], [3.0, 0.0])):
        ...     part.add(torch.tensor([row]))
        >>> parts[0].merge(parts[1]).matrix
        tensor([[[5., 1.],
                 [1., 2.]]])
        """
        merged = Hessian()
        merged.rows = self.rows + other.rows
        merged._weight = self._weight + other._weight
        if not self.rows or not other.rows:
            merged._sums = dict((self if self.rows else other)._sums)
            return merged
        merged._sums = {
            name: total + other._sums[name]
            for name, total in self._sums.items()
            if name in other._sums
        }
        return merged

    @property
    def matrix(self) -> Tensor:
        """``E[x̂ x̂ᵀ]``, shape [groups, in, in]."""
        return self._mean("matrix")

    @property
    def mean(self) -> Tensor:
        """``E[x̂]``, shape [groups, in]."""
        return self._mean("mean")

    @property
    def cross(self) -> Tensor | None:
        """``E[x x̂ᵀ]``, shape [groups, in, in]; None without reference."""
        return self._mean("cross") if "cross" in self._sums else None

    @property
    def reference_mean(self) -> Tensor | None:
        """``E[x]``, shape [groups, in]; None without reference."""
        return self._mean("reference_mean") if "reference_mean" in self._sums else None

    @property
    def centred(self) -> Tensor:
        """``E[x̂ x̂ᵀ] - E[x̂] E[x̂]ᵀ``: the Hessian where a bias takes up the mean error.

        An input whose variance is lost in rounding (1e-5 of its power in fp32, 1e-13 in
        fp64) is constant: zero here. See ``mean_error``.
        """
        varies = self._varies()
        centred = self._without_means("matrix", self.mean, varies)
        return centred * varies[..., None]

    @property
    def centred_cross(self) -> Tensor | None:
        """``E[x x̂ᵀ] - E[x] E[x̂]ᵀ``; None without reference.

        Zero for x̂ that are constant, as in ``centred``.
        """
        reference_mean = self.reference_mean
        if reference_mean is None:
            return None
        return self._without_means("cross", reference_mean, self._varies())

    def _varies(self) -> Tensor:
        """1 for each input whose variance is more than rounding, 0 for others."""
        power = self.matrix.diagonal(dim1=-2, dim2=-1)
        least = 1e-13 if power.dtype == torch.float64 else 1e-5
        return (power - self.mean.square() > least * power).to(power)

    def _without_means(self, name: str, left: Tensor, varies: Tensor) -> Tensor:
        """``(E[a x̂ᵀ] - E[a] E[x̂]ᵀ)`` with the columns of constant x̂ zero."""
        centred = self._mean(name) - left[..., None] * self.mean[..., None, :]
        return centred * varies[..., None, :]

    def _mean(self, name: str) -> Tensor:
        if not self.rows or self._weight <= 0:
            raise QuantizationError(
                "all weights of the rows are zero"
                if self.rows
                else "no inputs were seen",
                where="Hessian",
                expected="calibration data that reaches this operator",
                do="call add with its inputs first",
            )
        return self._sums[name] / self._weight

    def _check_fit(
        self, rows: Tensor, exact: Tensor | None, weights: Tensor | None
    ) -> None:
        fault = (
            _reference_fault(rows, exact)
            or _weights_fault(rows, weights)
            or self._batch_fault(rows, exact)
        )
        if fault:
            raise QuantizationError(
                "the inputs do not fit",
                where="Hessian.add",
                expected="[n, in] or [groups, n, in], weights ≥ 0 of [n] or [groups, n], the same in each batch",
                got=fault,
            )

    def _batch_fault(self, rows: Tensor, exact: Tensor | None) -> str:
        """How a batch differs from those before, ``""`` where it does not."""
        groups, _, features = rows.shape
        if not self._sums:
            return ""
        earlier = self._sums["mean"].shape
        if earlier != (groups, features):
            return f"(groups, in) = {(groups, features)} after {tuple(earlier)}"
        if ("cross" in self._sums) != (exact is not None):
            return "a reference in some batches only"
        return ""


def _with_groups(rows: Tensor) -> Tensor:
    return rows if rows.dim() == 3 else rows[None]


def _reference_fault(rows: Tensor, exact: Tensor | None) -> str:
    if exact is None or exact.shape == rows.shape:
        return ""
    return f"a reference of shape {tuple(exact.shape)} beside inputs of shape {tuple(rows.shape)}"


def _weights_fault(rows: Tensor, weights: Tensor | None) -> str:
    if weights is None:
        return ""
    groups, count, _ = rows.shape
    if tuple(weights.shape) not in ((count,), (groups, count)):
        return f"weights of shape {tuple(weights.shape)} for inputs of shape {tuple(rows.shape)}"
    return "weights below 0" if bool((weights < 0).any()) else ""


def _batch_sums(
    rows: Tensor, exact: Tensor | None, factor: Tensor | None
) -> dict[str, Tensor]:
    """The sums over one batch by name; ``factor`` is ``[groups, n, 1]``."""
    weighted = rows if factor is None else rows * factor
    sums = {"matrix": _symmetric_product(weighted, rows), "mean": weighted.sum(1)}
    if exact is not None:
        weighted_exact = exact if factor is None else exact * factor
        sums["cross"] = weighted_exact.mT @ rows
        sums["reference_mean"] = weighted_exact.sum(1)
    return sums


def _symmetric_product(left: Tensor, right: Tensor, block: int = 256) -> Tensor:
    """``leftᵀ right`` where that is symmetric.

    The upper triangle is computed in blocks of rows, the lower mirrored.
    """
    count = right.shape[-1]
    if count <= 2 * block:
        return left.mT @ right
    product = right.new_empty(*right.shape[:-2], count, count)
    for start in range(0, count, block):
        stop = min(start + block, count)
        upper = left[..., start:stop].mT @ right[..., start:]
        product[..., start:stop, start:] = upper
        product[..., stop:, start:stop] = product[..., start:stop, stop:].mT
    return product


def mean_error(weight: Tensor, quantized: Tensor, hessian: Hessian) -> Tensor:
    """``E[y - ŷ] = W E[x] - Ŵ E[x̂]``, to be added to the bias: shape ``[groups, out]``.

    Bias correction (Nagel, van Baalen, Blankevoort and Welling, arXiv:1906.04721,
    section 4.2): with ``Ŵ = W + ε`` the output is off by ``ε E[x]`` on average,
    equation 17 there, and that is subtracted. Without full-precision inputs in
    ``hessian`` this is ``-ε E[x̂]``. It belongs to weights that were rounded under
    ``Hessian.centred``, whose loss leaves the mean to the bias.

    Args:
        weight: ``[groups, out, in]`` (``matrix_view``).
        quantized: the same shape.
        hessian: of the operator's inputs.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, or no inputs were seen.

    Example:
        >>> hessian = Hessian()
        >>> hessian.add(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
        >>> mean_error(torch.tensor([[[0.4, 0.6]]]), torch.tensor([[[0.5, 0.5]]]), hessian)
        tensor([[0.1000]])
    """
    check_matrices("mean_error", weight, hessian.matrix)
    check_finite("mean_error", quantized=quantized)
    mean = hessian.mean
    reference_mean = hessian.reference_mean
    exact_mean = mean if reference_mean is None else reference_mean
    exact_output = weight @ exact_mean[..., None].to(weight)
    rounded_output = quantized @ mean[..., None].to(weight)
    return (exact_output - rounded_output).squeeze(-1)
