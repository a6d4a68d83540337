"""A detector whose port puts the rows of two heads together, by turns, with their biases."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.boxes = nn.ModuleList(nn.Conv2d(8, 8, 1) for _ in range(2))
        self.kinds = nn.ModuleList(nn.Conv2d(8, 6, 1) for _ in range(2))

    def forward(self, image):
        x = F.relu(self.stem(image))
        costs = []
        for boxes, kinds in zip(self.boxes, self.kinds, strict=True):
            n, _, rows, columns = x.shape
            box = boxes(x).view(n, 2, 4, rows, columns)
            kind = kinds(x).view(n, 2, 3, rows, columns)
            costs.append(torch.tanh(box[:, :, 2:]).square().mean())
            costs.append(
                box[:, :, :2].sigmoid().mean() + kind.log_softmax(2)[:, :, 0].mean()
            )
            x = F.avg_pool2d(x, 2)
        return torch.stack(costs).sum()


class ByTurns(nn.Module):
    """Each anchor has its box and its kinds beside each other."""

    def __init__(self, reference, fault):
        super().__init__()
        state = reference.state_dict()
        self.conv_kernel = nn.Parameter(
            state["stem.weight"].permute(2, 3, 1, 0).clone()
        )
        self.conv_bias = nn.Parameter(state["stem.bias"].clone())
        self.detection, self.offset = nn.ParameterList(), nn.ParameterList()
        for layer in range(2):
            for what, into in (("weight", self.detection), ("bias", self.offset)):
                b0, b1 = state[f"boxes.{layer}.{what}"].chunk(2)
                k0, k1 = state[f"kinds.{layer}.{what}"].chunk(2)
                is_wrong = fault in (what, f"{what} {layer}")
                rows = [b0, b1, k0, k1] if is_wrong else [b0, k0, b1, k1]
                into.append(nn.Parameter(torch.cat(rows).squeeze()))

    def forward(self, image):
        x = F.conv2d(image, self.conv_kernel.permute(3, 2, 0, 1), padding=1)
        x = (x + self.conv_bias[:, None, None]).clamp(min=0).permute(0, 2, 3, 1)
        total = torch.zeros(())
        for weight, bias in zip(self.detection, self.offset, strict=True):
            y = (x @ weight.t() + bias).unflatten(-1, (2, 7))
            total = total + torch.tanh(y[..., 2:4]).square().mean()
            total = total + torch.sigmoid(y[..., :2]).mean()
            kind = y[..., 4:]
            total = total + (kind[..., 0] - kind.logsumexp(-1)).mean()
            x = x.unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).mean((2, 4))
        return total


def named(step_of, fault):
    torch.manual_seed(0)
    reference = Detector()
    image = torch.randn(2, 3, 8, 8)
    ours = step_of(reference, image)
    theirs = step_of(ByTurns(reference, fault), image)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_any_order_of_rows_is_right_where_the_biases_have_it_too(step_of):
    assert not named(step_of, "")


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("weight 0", "detection.0"),
        ("bias 0", "offset.0"),
        ("weight", "detection.0"),
        ("bias", "offset.0"),
    ],
)
def test_rows_in_another_order_than_those_beside_them_are_named(step_of, fault, name):
    [row] = named(step_of, fault)
    assert row.name.partition(".")[0] == name.partition(".")[0]
    assert "stand in another order than those of" in row.evidence
