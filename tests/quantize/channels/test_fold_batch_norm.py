"""BatchNorm folding, against the network that was not folded, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from roundoff.errors import QuantizationError, WorkloadError
from roundoff.quantize.channels.fold_batch_norm import (
    fold_batch_norm_,
    pads_with_zeros,
)


def used(norm: nn.Module) -> nn.Module:
    """A BatchNorm with statistics and parameters that are not those of a new one."""
    generator = torch.Generator().manual_seed(3)
    for name, tensor in (*norm.named_parameters(), *norm.named_buffers()):
        if tensor.is_floating_point():
            tensor.data.copy_(
                torch.rand(tensor.shape, generator=generator)
                + (0.1 if "var" in name else -0.4)
            )
    return norm


def close(after: torch.Tensor, before: torch.Tensor) -> None:
    # float64; sums of fewer than 200 products in each of three layers, each rounded to 2**-53 relative to the largest
    # partial sum, which is at most 100 times the largest output here: 3 * 200 * 100 * 1.1e-16 = 7e-12
    torch.testing.assert_close(
        after, before, rtol=0.0, atol=7e-12 * float(before.abs().max())
    )


LAYERS = {
    "conv1d": (nn.Conv1d(4, 6, 3, 2, 1), nn.BatchNorm1d(6), (3, 4, 9)),
    "conv2d without bias": (
        nn.Conv2d(4, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        (3, 4, 7, 7),
    ),
    "conv2d in groups": (
        nn.Conv2d(4, 6, 3, padding=1, groups=2),
        nn.BatchNorm2d(6),
        (3, 4, 5, 5),
    ),
    "depthwise": (
        nn.Conv2d(4, 8, 3, padding=1, groups=4),
        nn.BatchNorm2d(8),
        (3, 4, 5, 5),
    ),
    "conv3d": (nn.Conv3d(2, 3, 2), nn.BatchNorm3d(3), (2, 2, 4, 4, 4)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, 2), nn.BatchNorm1d(6), (3, 4, 5)),
    "transposed 2d in groups": (
        nn.ConvTranspose2d(4, 6, 3, 2, groups=2, bias=False),
        nn.BatchNorm2d(6),
        (2, 4, 5, 5),
    ),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2), nn.BatchNorm3d(3), (2, 2, 3, 3, 3)),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), (5, 4)),
    "one channel": (nn.Conv2d(3, 1, 3), nn.BatchNorm2d(1), (2, 3, 5, 5)),
    "without affine": (
        nn.Linear(4, 6, bias=False),
        nn.BatchNorm1d(6, affine=False),
        (5, 4),
    ),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_folded_into_the_layer_before(kind: str) -> None:
    layer, norm, shape = LAYERS[kind]
    net = nn.Sequential(layer, used(norm), nn.ReLU()).double().eval()
    x = torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    before = net(x).detach()
    (row,) = fold_batch_norm_(net, [x])
    assert (row.layer, row.reason) == ("0", "")
    assert isinstance(net[1], nn.Identity)
    assert net[0] is layer
    close(net(x).detach(), before)


BEHIND = {
    "linear": (nn.BatchNorm1d(4), nn.Linear(4, 3), (5, 4)),
    "depthwise": (nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, groups=4), (2, 4, 6, 6)),
    "one channel": (nn.BatchNorm2d(1), nn.Conv2d(1, 3, 3), (2, 1, 6, 6)),
    "valid padding": (
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 6, 3, padding="valid"),
        (2, 4, 6, 6),
    ),
    "conv in groups": (
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        (2, 4, 6, 6),
    ),
}


@pytest.mark.parametrize("kind", BEHIND)
def test_folded_into_the_layer_behind(kind: str) -> None:
    norm, layer, shape = BEHIND[kind]
    net = nn.Sequential(nn.ReLU(), used(norm), layer).double().eval()
    x = torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    before = net(x).detach()
    (row,) = fold_batch_norm_(net, [x])
    assert (row.layer, row.reason) == ("2", "")
    close(net(x).detach(), before)


def test_channels_that_are_joined_later_are_folded_before() -> None:
    net = nn.Sequential(
        nn.Conv2d(2, 8, 3),
        used(nn.BatchNorm2d(8)),
        nn.ReLU(),
        nn.PixelShuffle(2),
        nn.Conv2d(2, 1, 3),
    )
    net, x = (
        net.double().eval(),
        torch.randn(
            2, 2, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        ),
    )
    before = net(x).detach()
    (row,) = fold_batch_norm_(net, [x])
    assert row.layer == "0"
    close(net(x).detach(), before)


def test_a_residual_network(nets) -> None:
    net = nets.Residual().double().eval()
    used(net.b1), used(net.b2)
    x = net.example.double()
    before = net(x).detach()
    assert [(r.norm, r.layer) for r in fold_batch_norm_(net, [x])] == [
        ("b1/batch_norm", "c1"),
        ("b2/batch_norm", "c2"),
    ]
    close(net(x).detach(), before)


@pytest.mark.parametrize(
    ("kernel", "padding", "pads"),
    [
        (3, "valid", False),
        (3, "same", True),
        (1, "same", False),  # torch pads dilation * (kernel - 1) = 0 elements
        ((1, 3), "same", True),
        (3, 0, False),
        (3, (0, 1), True),
    ],
)
def test_which_convolutions_pad_with_zeros(kernel, padding, pads: bool) -> None:
    assert pads_with_zeros(nn.Conv2d(2, 2, kernel, padding=padding)) is pads


class Calls(nn.Module):
    """A convolution, a BatchNorm, and what the test does with them."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.c, self.n, self.d = (
            nn.Conv2d(2, 2, 1),
            used(nn.BatchNorm2d(2)),
            nn.Conv2d(2, 2, 3, padding=1),
        )
        self.how = forward

    def forward(self, x):
        return self.how(self, x)


REASONS = {
    "read twice": (
        lambda m, x: m.n(h := m.c(x)) + h,
        "the output of c/conv2d is read elsewhere too",
    ),
    "functional": (
        lambda m, x: F.batch_norm(m.c(x), m.n.running_mean, m.n.running_var),
        "not a BatchNorm module's own",
    ),
    "used twice": (
        lambda m, x: m.n(m.c(m.n(m.c(x)))),
        "the module is used more than once",
    ),
    "weight used twice": (
        lambda m, x: m.n(m.c(m.c(x))),
        "the weight of c/conv2d#1 is used more than once",
    ),
    "padded behind": (
        lambda m, x: m.d(m.n(x.relu())),
        "d/conv2d pads with zeros behind it",
    ),
    "relu between": (
        lambda m, x: m.n(m.c(x).relu()),
        "/relu is no convolution or linear layer",
    ),
    "computed": (
        lambda m, x: m.n(F.conv2d(x, m.c.weight * 2)),
        "is not in a plain convolution or linear module",
    ),
    "transposed": (
        lambda m, x: m.n(m.c(x).transpose(1, 2)),
        "the channels of c/conv2d are not those of the BatchNorm",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_folded_says_why(name: str) -> None:
    how, reason = REASONS[name]
    net = Calls(how).eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    size = (1, 2, 2, 2) if name == "transposed" else (1, 2, 4, 4)
    rows = fold_batch_norm_(net, [torch.rand(size)])
    assert rows
    assert all(not row.layer and reason in row.reason for row in rows)
    assert isinstance(net.n, nn.BatchNorm2d)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_training_mode_is_a_reason() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).train()
    (row,) = fold_batch_norm_(net, [torch.rand(2, 1, 3, 3)])
    assert "call model.eval()" in row.reason
    (row,) = fold_batch_norm_(
        nn.Sequential(
            nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)
        ).eval(),
        [torch.rand(2, 1, 3, 3)],
    )
    assert "keeps no statistics" in row.reason


def test_no_batches() -> None:
    with pytest.raises(WorkloadError):
        fold_batch_norm_(nn.BatchNorm1d(2).eval(), [])


def test_a_linear_layer_whose_features_are_not_the_channels() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    (row,) = fold_batch_norm_(
        net, [torch.rand(2, 3, 4)]
    )  # the BatchNorm runs over the 3 places of the middle axis
    assert "the channels of 0/linear are not those of the BatchNorm" in row.reason


def test_one_that_cannot_be_folded_leaves_the_others() -> None:
    net = Calls(lambda m, x: (m.second(m.c(x)), m.n(m.d(x).transpose(1, 2))))
    net.second = used(nn.BatchNorm2d(2))
    net.eval()
    x = torch.rand(1, 2, 2, 2)
    before = net(x)
    rows = {r.norm: r for r in fold_batch_norm_(net, [x])}
    assert rows["second/batch_norm"].layer == "c"
    assert rows["n/batch_norm"].reason.startswith(
        "layer before it: the channels of d/conv2d"
    )
    for found, expected in zip(net(x), before, strict=True):
        # float32; sums of at most 18 products, no cancellation beyond 100: 18 * 100 * 6e-8 = 1.1e-4
        torch.testing.assert_close(
            found,
            expected,
            rtol=0.0,
            atol=1.1e-4 * float(expected.detach().abs().max()),
        )


def test_nan_and_infinity_on_the_batch_are_kept() -> None:
    net = nn.Sequential(nn.Linear(2, 2), used(nn.BatchNorm1d(2))).eval()
    x = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0], [1.0, 1.0]])
    before = net(x).detach()
    (row,) = fold_batch_norm_(net, [x])
    assert row.layer == "0"
    torch.testing.assert_close(
        net(x).detach(), before, rtol=0.0, atol=1e-6, equal_nan=True
    )  # 10 roundings below 1


def test_a_refused_fold_leaves_the_model_as_it_was() -> None:
    """A model whose output depends on the module being a BatchNorm: refused, and as before."""
    net = nn.Sequential(nn.Linear(2, 2), used(nn.BatchNorm1d(2)))
    state = {k: v.clone() for k, v in net.eval().state_dict().items()}

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.m = net

        def forward(self, x):
            return self.m[1](self.m[0](x)) * (
                2.0 if isinstance(self.m[1], nn.BatchNorm1d) else 1.0
            )

    whole = Whole().eval()
    with pytest.raises(
        QuantizationError, match="folding BatchNorm changed the model's output"
    ):
        fold_batch_norm_(whole, [torch.rand(3, 2)])
    assert all(torch.equal(v, state[k]) for k, v in net.state_dict().items())
    assert isinstance(net[1], nn.BatchNorm1d)
