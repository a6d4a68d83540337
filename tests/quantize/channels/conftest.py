"""Networks whose channel dependencies are known by construction: fixture ``nets``, name → class."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Residual(nn.Module):
    """A basic block with downsampling, then one without, and a head behind flatten."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        bn = nn.BatchNorm2d if norm else lambda _: nn.Identity()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.c1, self.b1 = nn.Conv2d(4, 6, 3, 2, 1), bn(6)
        self.c2, self.b2 = nn.Conv2d(6, 8, 3, padding=1), bn(8)
        self.down = nn.Conv2d(4, 8, 1, 2)
        self.d1, self.d2 = nn.Conv2d(8, 5, 3, padding=1), nn.Conv2d(5, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.b2(self.c2(F.relu(self.b1(self.c1(x))))) + self.down(x))
        x = F.relu(x + self.d2(torch.relu(self.d1(x))))
        return self.fc(F.max_pool2d(x, 2).flatten(1))

    example = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class Dense(nn.Module):
    """Each layer reads all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.c = nn.Conv2d(7, 5, 1)
        self.fc = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.a(x))
        b = F.relu(self.b(a))
        c = self.c(torch.cat([a, b], 1))
        return self.fc(torch.cat([c, a, b], 1).mean((2, 3)))

    example = torch.randn(2, 2, 6, 6, generator=torch.Generator().manual_seed(0))


class Inverted(nn.Module):
    """1x1, depthwise, 1x1 with ReLU6 and a residual."""

    def __init__(self, norm: bool = True) -> None:
        super().__init__()
        bn = nn.BatchNorm2d if norm else lambda _: nn.Identity()
        self.stem = nn.Conv2d(1, 4, 1)
        self.m = nn.Sequential(
            nn.Conv2d(4, 12, 1),
            bn(12),
            nn.ReLU6(),
            nn.Conv2d(12, 12, 3, padding=1, groups=12),
            bn(12),
            nn.ReLU6(),
            nn.Conv2d(12, 4, 1),
            bn(4),
        )
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.fc(F.adaptive_avg_pool2d(x + self.m(x), 1).flatten(1))

    example = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0)) * 3


class Grouped(nn.Module):
    """A convolution in 2 groups between two plain ones."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(1, 8, 1)
        self.g = nn.Conv2d(8, 12, 3, padding=1, groups=2)
        self.c = nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(F.relu(self.g(F.relu(self.a(x))))).mean((2, 3))

    example = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a skip connection that is concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 3, 3, padding=1), nn.Conv2d(3, 5, 3, 2, 1)
        self.up = nn.ConvTranspose2d(5, 4, 2, 2)
        self.out = nn.Conv2d(7, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.relu(self.down1(x))
        return self.out(torch.cat([skip, F.relu(self.up(F.relu(self.down2(skip))))], 1))

    example = torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0))


class Transformer(nn.Module):
    """One encoder layer with learned positions, a class token, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.cls, self.pos = (
            nn.Parameter(torch.randn(1, 1, 8)),
            nn.Parameter(torch.randn(1, 6, 8)),
        )
        self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 2)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(x.shape[0], -1, 2, 4).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.softmax(q @ k.transpose(-1, -2) / 2.0, -1) @ v
        return self.o(y.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        x = x + self.attention(self.n1(x))
        x = x + self.down(F.gelu(self.up(self.n2(x))))
        return self.head(x[:, 0])

    example = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))


class Gated(nn.Module):
    """An embedding, RMSNorm and a gated MLP whose two halves come from one projection; the head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.norm = nn.RMSNorm(6)
        self.gate_up, self.down = (
            nn.Linear(6, 20, bias=False),
            nn.Linear(10, 6, bias=False),
        )
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        up, gate = self.gate_up(self.norm(x)).chunk(2, -1)
        return self.head(x + self.down(up * F.silu(gate)))

    example = torch.arange(6).view(2, 3)


class Twice(nn.Module):
    """One module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.shared, self.b = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.relu(self.shared(F.relu(self.shared(F.relu(self.a(x)))))))

    example = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


class Branching(nn.Module):
    """Another branch for other data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.out = (
            nn.Linear(3, 5),
            nn.Linear(3, 5),
            nn.Linear(5, 2),
            nn.Linear(5, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        if x.sum() > 0:
            return self.c(h)
        return self.out(h + self.b(x))

    example = torch.ones(4, 3)


class Gate(nn.Module):
    """Squeeze and excitation."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.down, self.up, self.b = (
            nn.Conv2d(1, 6, 1),
            nn.Conv2d(6, 3, 1),
            nn.Conv2d(3, 6, 1),
            nn.Conv2d(6, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.a(x))
        return self.b(
            x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3), keepdim=True)))))
        )

    example = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))


class HardCoded(nn.Module):
    """Channel counts held as numbers in the code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.fc, self.out = (
            nn.Conv2d(1, 4, 3),
            nn.Linear(36, 6),
            nn.Linear(6, 2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.relu(self.fc(F.relu(self.a(x)).view(-1, 36))))

    example = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))


class Pixels(nn.Module):
    """pixel_shuffle, channel_shuffle, PReLU and padding."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.prelu = nn.Conv2d(1, 8, 3), nn.PReLU(8)
        self.b, self.c, self.d = (
            nn.Conv2d(2, 6, 1),
            nn.Conv2d(6, 6, 1, groups=2),
            nn.Conv2d(6, 1, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.pixel_shuffle(
            self.prelu(self.a(F.pad(x, (1, 1, 1, 1), mode="reflect"))), 2
        )
        x = F.channel_shuffle(F.pad(F.relu(self.b(x)), (1, 1)), 2)
        return self.d(self.c(x))

    example = torch.randn(2, 1, 5, 5, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def nets() -> SimpleNamespace:
    kinds = (
        Residual,
        Dense,
        Inverted,
        Grouped,
        UNet,
        Transformer,
        Gated,
        Twice,
        Branching,
        Gate,
        HardCoded,
        Pixels,
    )
    return SimpleNamespace(**{kind.__name__: kind for kind in kinds})
