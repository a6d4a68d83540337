"""Models whose gradients are planted, so that a test knows which of them are not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Planted(nn.Module):
    """Two layers; ``plant`` multiplies the gradient of ``second`` (and all before it) on its way back."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.plant = 1.0

    def forward(self, x):
        y = self.second(self.first(x).tanh())
        if y.requires_grad and self.plant != 1.0:
            y.register_hook(lambda g, by=self.plant: g * by)
        return y


@pytest.fixture
def planted():
    return Planted
