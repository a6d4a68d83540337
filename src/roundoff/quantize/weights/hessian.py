"""Second moments of an operator's inputs, summed over batches: all that GPTQ and its relatives know of the data."""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.quantize.weights.output_error import check_finite


class Hessian:
    """``H = Σ g x xᵀ / Σ g`` over the rows x seen, with means and, where given, the full-precision inputs beside them.

    With x̂ the inputs in the quantized network (``inputs``) and x those in full precision (``reference``)::

        matrix     E[x̂ x̂ᵀ]   [groups, in, in]   the Hessian of |Ŵ x̂|² (GPTQ's 2 X Xᵀ, up to a factor that does not count)
        cross      E[x x̂ᵀ]    [groups, in, in]   None without reference
        mean       E[x̂]       [groups, in]
        reference_mean  E[x]  [groups, in]       None without reference

    ``weights`` g are one number ≥ 0 for each row: the squared adjoint of the row's outputs makes it the error of the
    network's output instead of the layer's. Summed in fp32 (fp64 for fp64 inputs).

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
        """One batch: rows ``[n, in]`` or ``[groups, n, in]`` (see ``patches``), their weights ``[n]`` or ``[groups, n]``.

        Raises:
            QuantizationError: NaN or Inf, a negative weight, shapes that do not fit each other or earlier batches, or
                a reference that is given only sometimes. The sums are then as before.
        """
        rows = inputs if inputs.dim() == 3 else inputs[None]
        exact = (
            reference if reference is None or reference.dim() == 3 else reference[None]
        )
        self._fits(rows, exact, weights)
        if rows.dtype != torch.float64:
            rows, exact = rows.float(), None if exact is None else exact.float()
        weighted = rows
        if weights is not None:
            factor = weights.to(rows.dtype).expand(rows.shape[:2])[..., None]
            weighted = rows * factor
        found = {"matrix": _symmetric(weighted, rows), "mean": weighted.sum(1)}
        if exact is not None:
            held = exact if weights is None else exact * factor
            found |= {"cross": held.mT @ rows, "reference_mean": held.sum(1)}
        if not all(
            bool(sums.isfinite().all())
            for name, sums in found.items()
            if "mean" in name
        ):
            check_finite(
                "Hessian.add", inputs=inputs, weights=weights, reference=reference
            )  # else only the sums are Inf
        for name, value in found.items():
            self._sums[name] = (
                self._sums[name].add_(value) if name in self._sums else value
            )
        self.rows += rows.shape[1]
        # all groups have the same weights, or each its own: then the mean over groups is the common factor
        self._weight += (
            rows.shape[1]
            if weights is None
            else float(factor.double().sum()) / rows.shape[0]
        )

    def merge(self, other: Hessian) -> Hessian:
        """The second moments of both data together.

        >>> parts = Hessian(), Hessian()
        >>> for part, row in zip(parts, ([1.0, 2.0], [3.0, 0.0])):
        ...     part.add(torch.tensor([row]))
        >>> parts[0].merge(parts[1]).matrix
        tensor([[[5., 1.],
                 [1., 2.]]])
        """
        found = Hessian()
        found.rows, found._weight = self.rows + other.rows, self._weight + other._weight
        if not self.rows or not other.rows:
            found._sums = dict((self if self.rows else other)._sums)
        else:
            found._sums = {
                name: total + other._sums[name]
                for name, total in self._sums.items()
                if name in other._sums
            }
        return found

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
        """``E[x̂ x̂ᵀ] - E[x̂] E[x̂]ᵀ``: the Hessian where a bias takes up the mean of the error (see ``bias.py``).

        An input whose variance is lost in rounding (1e-5 of its power in fp32, 1e-13 in fp64) is constant: zero here.
        """
        return self._centred("matrix", self.mean)

    @property
    def centred_cross(self) -> Tensor | None:
        """``E[x x̂ᵀ] - E[x] E[x̂]ᵀ``; None without reference. Zero for x̂ that are constant, as in ``centred``."""
        mean = self.reference_mean
        return None if mean is None else self._centred("cross", mean)

    def _centred(self, name: str, left: Tensor) -> Tensor:
        power, mean = self.matrix.diagonal(dim1=-2, dim2=-1), self.mean
        least = 1e-13 if power.dtype == torch.float64 else 1e-5
        varies = (power - mean.square() > least * power).to(power)
        centred = (self._mean(name) - left[..., None] * mean[..., None, :]) * varies[
            ..., None, :
        ]
        return centred * varies[..., None] if name == "matrix" else centred

    def _mean(self, name: str) -> Tensor:
        if not self.rows or self._weight <= 0:
            raise QuantizationError(
                "no inputs were seen"
                if not self.rows
                else "all weights of the rows are zero",
                where="Hessian",
                expected="calibration data that reaches this operator",
                do="call add with its inputs first",
            )
        return self._sums[name] / self._weight

    def _fits(self, rows: Tensor, exact: Tensor | None, weights: Tensor | None) -> None:
        groups, n, features = rows.shape
        fault = None
        if exact is not None and exact.shape != rows.shape:
            fault = f"a reference of shape {tuple(exact.shape)} beside inputs of shape {tuple(rows.shape)}"
        elif weights is not None and tuple(weights.shape) not in ((n,), (groups, n)):
            fault = f"weights of shape {tuple(weights.shape)} for inputs of shape {tuple(rows.shape)}"
        elif weights is not None and bool((weights < 0).any()):
            fault = "weights below 0"
        elif self._sums and self._sums["mean"].shape != (groups, features):
            fault = f"(groups, in) = {(groups, features)} after {tuple(self._sums['mean'].shape)}"
        elif self._sums and ("cross" in self._sums) != (exact is not None):
            fault = "a reference in some batches only"
        if fault:
            raise QuantizationError(
                "the inputs do not fit",
                where="Hessian.add",
                expected="[n, in] or [groups, n, in], weights ≥ 0 of [n] or [groups, n], the same in each batch",
                got=fault,
            )


def _symmetric(left: Tensor, right: Tensor, block: int = 256) -> Tensor:
    """``leftᵀ right`` where that is symmetric: the upper triangle in blocks of rows, the lower mirrored."""
    count = right.shape[-1]
    if count <= 2 * block:
        return left.mT @ right
    found = right.new_empty(*right.shape[:-2], count, count)
    for start in range(0, count, block):
        stop = min(start + block, count)
        found[..., start:stop, start:] = left[..., start:stop].mT @ right[..., start:]
        found[..., stop:, start:stop] = found[..., start:stop, stop:].mT
    return found
