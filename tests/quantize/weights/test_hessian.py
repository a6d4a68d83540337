"""Second moments of inputs."""

import numpy as np
import pytest
import torch

from roundoff.quantize.weights.hessian import Hessian


@pytest.mark.parametrize("weighted", [False, True])
def test_many_inputs_are_summed_by_halves(weighted):
    """Above 512 inputs only one triangle is computed: the same as numpy's sums in float64, and symmetric."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 40, 700, generator=generator, dtype=torch.float64)
    weights = (
        torch.rand(40, generator=generator, dtype=torch.float64) if weighted else None
    )
    hessian = Hessian()
    hessian.add(rows, weights)
    factor = np.ones(40) if weights is None else weights.numpy()
    wanted = (
        np.einsum("n,gni,gnj->gij", factor, rows.numpy(), rows.numpy()) / factor.sum()
    )
    # sums of 40 products in fp64, each off by 2⁻⁵³ of their size at most
    np.testing.assert_allclose(
        hessian.matrix.numpy(),
        wanted,
        rtol=0,
        atol=80 * 2**-53 * np.abs(rows.numpy()).max() ** 2,
    )
    assert (
        hessian.matrix - hessian.matrix.mT
    ).abs().max() <= 80 * 2**-53 * rows.abs().max() ** 2
