"""Which parameters of the reference one of the candidate holds packed."""

from __future__ import annotations

import torch

from roundoff.compare.ports.counterparts import named_leaves
from roundoff.compare.repairs.packed_leaves import parts_of


def drawn(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.complex64)


def test_complex_parameters_are_found_in_one_that_packs_them(sides_of, program):
    first, second, other = (drawn(3, 4, seed=seed) for seed in (1, 2, 3))
    x = drawn(2, 4, seed=4)

    def ours(m, x):
        return torch.cat([x @ w.t() for w in (m.other, m.first, m.second)], 1)

    def theirs(m, x):
        return x @ m.packed.t()

    packed = torch.stack([second, first], 1).flatten(0, 1)  # rows in turns
    leaves = {"first": first, "second": second, "other": other}
    sides = sides_of(program(ours, **leaves), program(theirs, packed=packed), x)
    present = [*named_leaves(sides.reference).values()]
    [(found, parts)] = parts_of(sides, packed, present)
    assert {leaf.row.name for leaf in found} == {"first", "second"}
    assert all(
        torch.equal(part, leaves[leaf.row.name])
        for leaf, part in zip(found, parts, strict=True)
    )
