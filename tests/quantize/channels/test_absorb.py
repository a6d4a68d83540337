"""High-bias absorption against equations 13 to 15 computed again."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.quantize.channels.absorb import absorb_bias_

NETS = {
    "linear": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)),
        (40, 3),
    ),
    "flatten": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2)
        ),
        (9, 3, 3, 3),
    ),
    "grouped": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 6, 2, groups=2)
        ),
        (9, 3, 4, 4),
    ),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 2, groups=4)
        ),
        (9, 3, 4, 4),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_biases_that_are_high_on_all_data_move_without_a_change(name: str) -> None:
    torch.manual_seed(4)
    make, shape = NETS[name]
    net = make().double()
    net[0].bias.data.copy_(
        torch.linspace(-1, 9, len(net[0].bias))
    )  # weights below 1 on values below 1
    x = torch.rand(shape, dtype=torch.float64)
    before, bias = net(x).detach(), net[0].bias.detach().clone()
    pre = net[0](x).detach().movedim(1, -1).flatten(0, -2)
    (row, *_) = absorb_bias_(net, [x])
    c = (pre.mean(0) - 3 * pre.std(0, correction=0)).clamp(min=0)  # equation 14
    # float64, sums of a few hundred numbers below 10: 300 * 10 * 1.1e-16 = 3.3e-13
    torch.testing.assert_close(row.shift, c, rtol=0.0, atol=3.3e-13)
    torch.testing.assert_close(net[0].bias.detach(), bias - c, rtol=0.0, atol=3.3e-13)
    assert int((c > 0).sum()) >= 2
    under = (pre < c)[:, c > 0]
    assert row.changed == pytest.approx(float(under.double().mean()))
    # what is under c by d changes what follows by at most d times the weights that read it; none here, or little
    off = (F.relu(pre) - F.relu(pre - c) - c).abs().max() * net[
        -1
    ].weight.detach().abs().flatten(1).sum(1).max()
    torch.testing.assert_close(
        net(x).detach(), before, rtol=0.0, atol=float(off) + 1e-12
    )


def test_what_is_left_says_why() -> None:
    def reason(*layers: nn.Module, shape: tuple[int, ...] = (2, 1, 4, 4)) -> str:
        return absorb_bias_(nn.Sequential(*layers).eval(), [torch.rand(shape)])[
            0
        ].reason

    conv, last = nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1)
    assert "zeros that are padded behind the ReLU" in reason(
        conv, nn.ReLU(), nn.Conv2d(2, 1, 3, padding=1)
    )
    assert "it passes relu6" in reason(conv, nn.ReLU6(), last).replace(
        "hardtanh", "relu6"
    )
    assert reason(conv, last) == "it passes no ReLU"
    assert "no bias of its own" in reason(
        nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), last
    )
    assert "no bias to take it" in reason(
        conv, nn.ReLU(), nn.Conv2d(2, 1, 1, bias=False)
    )
    assert "fold it first" in reason(conv, nn.BatchNorm2d(2), nn.ReLU(), last)
