"""From a target to a plan: pins, and what is said where no plan meets it."""

import copy

import pytest
import torch
from torch import nn

from roundoff.errors import InfeasibleError, PlanError
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


@pytest.mark.parametrize("target", ["30dB", "cls=30dB,price=90dB", {"cls": 25}])
def test_every_output_meets_its_own_target_on_held_out_batches(TwoHeads, target):
    torch.manual_seed(0)
    x = torch.rand(5, 64, 16) * 2 - 1
    held_out = x[4:].clone()
    workload = Workload(TwoHeads(torch.tanh), list(x[:4]), held_out=list(held_out))
    reached = reach(workload, target, ["int8", "w4a8", "w4a4"])
    assert reached.met
    with torch.no_grad():
        exact = workload.model(held_out[0])
        rounded = reached.model(held_out[0])
    wanted = {"cls": 30, "price": 90} if "price" in target else {"cls": 25}
    if target == "30dB":
        wanted = {"cls": 30, "price": 30}
    for name, least in wanted.items():
        error = (rounded[name].double() - exact[name].double()).square().sum()
        signal = exact[name].double().square().sum()
        assert -10 * torch.log10(error / signal) >= least
    assert [row.output for row in reached.trials[-1].outputs] == ["cls", "price"]


def test_a_target_for_an_output_that_is_not_there(TwoHeads):
    torch.manual_seed(0)
    workload = Workload(TwoHeads(torch.tanh), [torch.randn(8, 16)])
    with pytest.raises(PlanError, match="did you mean price"):
        reach(workload, "prise=30dB")
