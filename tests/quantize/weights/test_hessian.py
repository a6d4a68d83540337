"""Second moments of inputs."""

import numpy as np
import pytest
import torch

from roundoff.quantize.weights.hessian import Hessian, mean_error


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


def test_mean_error_from_second_moments_is_that_of_the_outputs():
    torch.manual_seed(0)
    x = torch.randn(2, 50, 6, dtype=torch.float64).relu()
    noisy = x + 0.1
    hessian = Hessian()
    hessian.add(noisy, reference=x)
    w, rounded = (
        torch.randn(2, 3, 6, dtype=torch.float64),
        torch.randn(2, 3, 6, dtype=torch.float64),
    )
    torch.testing.assert_close(
        mean_error(w, rounded, hessian), (x @ w.mT - noisy @ rounded.mT).mean(1)
    )
