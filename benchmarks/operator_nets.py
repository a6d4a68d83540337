"""Small trainings that call many kinds of operators, for the benchmark of faults in operators.

Each net is one step of a training: forward, loss, backward, optimizer. Together they use more than a hundred operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


class Pictures(nn.Module):
    """Convolutions of several kinds, three kinds of normalisation and of pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.batch = nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.group = nn.GroupNorm(4, 16)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.prelu = nn.PReLU(8)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = functional.relu(self.batch(self.stem(x)))
        b = functional.silu(self.group(self.down(a)))
        c = functional.hardswish(self.depth(b)) + b
        d = self.prelu(self.up(c))
        e = torch.cat([functional.max_pool2d(a + d, 2), functional.avg_pool2d(d, 2)], 1)
        f = functional.interpolate(
            e, scale_factor=2, mode="bilinear", align_corners=False
        )
        pooled: Tensor = self.head(functional.adaptive_avg_pool2d(f, 1).flatten(1))
        return pooled


class Words(nn.Module):
    """Attention written out and fused, gelu, layer norm."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.token = nn.Embedding(30, width)
        self.place = nn.Parameter(0.1 * torch.randn(6, width))
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width, bias=False)
        self.q2 = nn.Linear(width, width)
        self.up = nn.Linear(width, 32)
        self.down = nn.Linear(32, width)
        self.head = nn.Linear(width, 30)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.place
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        scores = q @ k.transpose(1, 2) / 4.0
        mask = torch.ones(6, 6, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(mask, float("-inf")).softmax(-1)
        x = x + self.mix(weights @ v)
        y = self.norm2(x)
        heads = self.q2(y).view(*y.shape[:2], 2, -1).transpose(1, 2)
        x = x + functional.scaled_dot_product_attention(heads, heads, heads).transpose(
            1, 2
        ).reshape(x.shape)
        x = x + self.down(functional.gelu(self.up(x)))
        logits: Tensor = self.head(x)
        return logits.flatten(0, 1)


class Sequences(nn.Module):
    """A gated recurrent cell written out, a cumulative sum, a linear recurrence."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3 * width)
        self.outer = nn.Linear(width, 3 * width)
        self.decay = nn.Parameter(torch.linspace(-2.0, 1.0, width))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.decay.numel())
        state = h
        for t in range(x.shape[1]):
            r, z, n = self.inner(x[:, t]).chunk(3, -1)
            hr, hz, hn = self.outer(h).chunk(3, -1)
            gate = torch.sigmoid(z + hz)
            new = torch.tanh(n + torch.sigmoid(r + hr) * hn)
            h = torch.lerp(new.to(h.dtype), h, gate.to(h.dtype))
            state = torch.addcmul(h, state, torch.exp(-functional.softplus(self.decay)))
        total = state.cumsum(1) / 4 + functional.elu(state) + functional.leaky_relu(h)
        scores: Tensor = self.head(total)
        return scores


class Formulas(nn.Module):
    """Elementary functions, reductions and norms."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one = nn.Linear(6, width)
        self.two = nn.Linear(width, width)
        self.gain = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.one(x)
        b = a * torch.rsqrt(a.pow(2).mean(-1, keepdim=True) + 1e-3) * self.gain
        c = torch.log1p(b.abs()) - torch.sqrt(b.square() + 0.5)
        d = c / (1.0 + torch.exp(-b)) + torch.atan(b) + torch.sin(c)
        e = functional.normalize(self.two(d), dim=-1) * d.std(-1, keepdim=True)
        f = torch.logsumexp(d, -1, keepdim=True) + e.clamp(-0.3, 0.3)
        g = torch.erf(f) + d.var(0) + torch.maximum(e, f) + functional.mish(d)
        scores: Tensor = self.head(g - g.mean(0) + functional.hardtanh(g))
        return scores


class Graph(nn.Module):
    """Messages along edges: index, scatter, gather, max over neighbours."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.into = nn.Linear(5, width)
        self.message = nn.Bilinear(width, width, width)
        self.update = nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 4)
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("ends", torch.randint(12, (2, 40), generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        start, end = self.ends  # type: ignore[misc]
        h = functional.relu6(self.into(x))
        h = h.to(self.message.weight.dtype)  # autocast leaves a bilinear form as it is
        said = self.message(h[start], h.index_select(0, end))
        heard = torch.zeros_like(h).index_add(0, end, said)
        degree = h.new_zeros(len(h)).scatter_add(0, end, h.new_ones(len(end)))
        heard = heard / (degree + 1).unsqueeze(1)
        best = (torch.einsum("nc,mc->nm", heard, h).softmax(1) @ h).to(h.dtype)
        nearest = heard.gather(1, best.argsort(1))
        joined = torch.tanh(self.update(torch.cat([best, nearest], 1)))
        scores: Tensor = self.head(joined + joined.amax(0) + joined.sum(0) / 12)
        return scores


@dataclass(frozen=True)
class Net:
    """A training by its parts.

    Attributes:
        name: of the net.
        build: the model.
        batch: input and target.
        loss: of the output and the target.
        optimizer: of the parameters.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def _draw(*shape: int) -> Tensor:
    return torch.randn(*shape)


NETS = (
    Net(
        "pictures",
        Pictures,
        lambda: (_draw(4, 3, 8, 8), torch.randint(5, (4,))),
        functional.cross_entropy,
        lambda p: torch.optim.SGD(
            p, 1e-2, momentum=0.9, weight_decay=1e-2, foreach=False
        ),
    ),
    Net(
        "words",
        Words,
        lambda: (torch.randint(30, (3, 6)), torch.randint(30, (18,))),
        lambda y, t: functional.cross_entropy(y, t, label_smoothing=0.1),
        lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    ),
    Net(
        "sequences",
        Sequences,
        lambda: (_draw(5, 4, 4), _draw(5, 3)),
        functional.smooth_l1_loss,
        lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    ),
    Net(
        "formulas",
        Formulas,
        lambda: (_draw(10, 6), _draw(10, 2)),
        functional.mse_loss,
        lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.5, foreach=True),
    ),
    Net(
        "graph",
        Graph,
        lambda: (_draw(12, 5), torch.rand(12, 4)),
        functional.binary_cross_entropy_with_logits,
        lambda p: torch.optim.Adam(p, 1e-2, weight_decay=1e-2, foreach=False),
    ),
)
