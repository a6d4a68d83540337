"""Both forward passes of two programs by different hands, in fp64."""

from __future__ import annotations

import torch

from roundoff.compare.ports.fp64_values import in_fp64


def test_a_constant_of_nought_is_no_mask_of_the_other_program(sides_of, program):
    """Nought and minus infinity are alike in what is known of them: nothing but a mask."""

    def ours(m, x):
        scores = x @ m.weight
        return torch.where(x < 0, -torch.inf, scores).softmax(-1).square().sum(0)

    def theirs(m, x):
        bias = torch.where(x < 0, -1e10, 0.0)
        return (
            torch.softmax(torch.einsum("bi,io->bo", x, m.weight) + bias, -1)
            .pow(2)
            .sum(0)
        )

    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(1))
    x = torch.randn(9, 6, generator=torch.Generator().manual_seed(2))
    sides = sides_of(program(ours, weight=weight), program(theirs, weight=weight), x)
    exact = in_fp64(sides)
    assert exact is not None
    end = list(exact.candidate.in_order())[-1]
    wanted = theirs(program(theirs, weight=weight).double(), x.double())
    # one sum of nine terms and a softmax of six: a few roundings of 2**-53 each way
    torch.testing.assert_close(
        exact.candidate.tensor(end.key), wanted, rtol=1e-14, atol=0.0
    )
