"""From a target to a plan: pins, and what is said where no plan meets it."""

import copy

import pytest
import torch
from torch import nn

from roundoff.errors import InfeasibleError
from roundoff.quantize.fallback import reach
from roundoff.workload.workload import Workload


@pytest.fixture
def workload():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return Workload(net, [torch.randn(32, 8) for _ in range(2)], name="net")


def test_a_pin_may_have_a_format_that_is_not_offered(workload):
    found = reach(workload, "15dB", ["int8"], pin={"0/linear": "w4a8"})
    assert found.met
    assert {
        site: fmt
        for rule in found.plan.rules
        for site in rule.sites
        for fmt in [rule.format]
    } == {
        "0/linear": "w4a8",
        "2/linear": "int8",
    }  # the pinned format is no choice for other sites


def test_a_target_out_of_reach_says_how_far_the_formats_come(workload):
    before = copy.deepcopy(workload.model.state_dict())
    with pytest.raises(
        InfeasibleError, match="net: no plan with the offered formats meets the target"
    ) as error:
        reach(workload, "90dB", ["w4a4"])
    assert error.value.expected == "90dB"
    said = error.value.got
    assert said.startswith(
        "fp32 for every site; quantized as well as they can be, 2 sites reach about "
    )
    # both layers with steps of 1/15 of their ranges: 20 to 30 dB, as 4 bits have
    assert 10 < float(said.split("about ")[1].split(" dB")[0]) < 35
    assert "/linear in w4a4 (" in said
    assert all(
        torch.equal(before[name], value)
        for name, value in workload.model.state_dict().items()
    )


def test_a_pin_in_the_way_of_a_target_is_named(workload):
    found = reach(workload, "60dB", ["int8"], pin={"0/linear": "w4a4"})
    assert not found.met
    assert (
        f"the best plan found reaches {found.trials[-1].measured_db:.1f} dB: most noise comes from 0/linear in w4a4"
        in (found.note)
    )
    assert found.note.endswith("; fixed: 0/linear=w4a4")
