"""How often the host waits for a device: once for all, where it asks for many numbers."""

import math

import pytest
import torch

from roundoff.budget.terms import project
from roundoff.ops import numbers_of
from roundoff.plan.output_noise import powers

from .conftest import PRETENDS
from .pretended import waits


def drawn(device, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(device)


def test_numbers_are_those_of_each_tensor_and_cost_one_wait(device):
    values = [row.square().sum() for row in drawn(device, 7, 33)]
    flags = [value > 30 for value in values]
    expected = [*map(float, values), *map(bool, flags)]
    with waits() as counted:
        found = numbers_of([*values, *flags])
    assert found == expected
    if PRETENDS:
        assert counted.total() == 2  # one of each dtype
    assert numbers_of([]) == []


@pytest.mark.parametrize("odd", [0.0, math.inf, math.nan])
def test_powers_of_an_output(device, odd):
    exact = drawn(device, 33)
    exact[3] = odd
    candidate = exact + 0.01 * drawn(device, 33)
    kept = exact.isfinite()
    error = (candidate[kept].double() - exact[kept].double()).square().sum()
    signal = exact[kept].double().square().sum()
    with waits() as counted:
        found = powers(candidate, exact)
    assert found == (float(error), float(signal))
    if PRETENDS and odd == 0.0:
        assert counted.total() == 1


@pytest.mark.parametrize("odd", [0.0, math.inf])
def test_projections_arrive_on_the_host(device, odd):
    """An infinite error that one of two probes looks at costs that probe everything."""
    error = drawn(device, 1, 1, 9)
    error[0, 0, 4] = odd
    probes = drawn(device, 1, 9, 2)
    probes[0, 4, 0] = 0.0
    with waits() as counted:
        values, lost = project(probes, error)
    assert values.device.type == "cpu"
    expected = torch.bmm(error.nan_to_num(posinf=0.0), probes)[:, 0, :].T.cpu()
    assert torch.equal(values[0], expected[0])
    assert lost == (1 if odd else 0)
    assert values[1].isinf().all() if odd else torch.equal(values, expected)
    if PRETENDS and not odd:
        assert counted.total() == 1
