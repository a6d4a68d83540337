"""Small networks that decide: experts, codebooks, hard attention, thresholds, clamps. None is trained.

Where a decision changes, an output jumps, and no derivative says so. Each is a ``Workload`` made with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from roundoff.workload import Workload

WIDTH = 16
BATCHES = 2
SAMPLES = 16


class TopKExperts(nn.Module):
    """Each token goes to its best experts, mixed by the softmax of their scores."""

    def __init__(self, experts: int = 6, chosen: int = 2) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
            for _ in range(experts)
        )
        self.leave = nn.Linear(WIDTH, WIDTH)
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        tokens = x.reshape(-1, WIDTH)
        scores, places = self.router(tokens).topk(self.chosen, dim=-1)
        gates = scores.softmax(-1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = (places == number).nonzero(as_tuple=True)
            if len(rows):
                part = expert(tokens[rows]) * gates[rows, slots, None]
                mixed = mixed.index_add(0, rows, part)
        output: Tensor = self.leave(x + mixed.reshape(x.shape))
        return output


class SwitchRouting(nn.Module):
    """Each token goes to one expert by a mask, two layers of it."""

    def __init__(self) -> None:
        super().__init__()
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))
        self.weights = nn.ParameterList(
            torch.randn(4, WIDTH, WIDTH) / WIDTH**0.5 for _ in range(2)
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.leave = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        for router, weight in zip(self.routers, self.weights, strict=True):
            shares = router(x).softmax(-1)
            gate, place = shares.max(-1)
            mask = functional.one_hot(place, shares.shape[-1]).to(x.dtype)
            every = torch.einsum("bti,eij->btej", x, weight)
            x = self.norm(x + gate[..., None] * (every * mask[..., None]).sum(-2))
        output: Tensor = self.leave(x)
        return output


class HardAttention(nn.Module):
    """Each query reads the one value whose key fits best."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.leave = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        best = functional.one_hot(scores.argmax(-1), x.shape[1]).to(x.dtype)
        output: Tensor = self.leave(x + best @ self.value(x))
        return output


class Codebook(nn.Module):
    """A VQ-VAE: each vector becomes the nearest entry of a codebook."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv1d(4, 24, 5, 2, 2), nn.ReLU(), nn.Conv1d(24, WIDTH, 3, 1, 1)
        )
        self.entries = nn.Parameter(torch.randn(32, WIDTH) * 0.3)
        self.decode = nn.Sequential(
            nn.Conv1d(WIDTH, 24, 3, 1, 1),
            nn.ReLU(),
            nn.ConvTranspose1d(24, 4, 4, 2, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        vectors = self.encode(x).transpose(1, 2)
        distances = (
            vectors.square().sum(-1, keepdim=True)
            - 2 * vectors @ self.entries.T
            + self.entries.square().sum(-1)
        )
        nearest = self.entries[distances.argmin(-1)]
        straight = vectors + (nearest - vectors).detach()
        output: Tensor = self.decode(straight.transpose(1, 2))
        return output


class GraphAttention(nn.Module):
    """Attention over the edges of a graph: softmax by scatter, leaky scores."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList(
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2)
        )
        self.score = nn.ParameterList(torch.randn(2 * WIDTH) * 0.5 for _ in range(2))
        self.leave = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        for project, score in zip(self.project, self.score, strict=True):
            h = project(x)
            pairs = torch.cat([h[source], h[target]], -1)
            e = functional.leaky_relu(pairs @ score, 0.2)
            top = torch.full((len(x),), -torch.inf).scatter_reduce(
                0, target, e, "amax", include_self=True
            )
            weight = (e - top[target]).exp()
            total = torch.zeros(len(x)).index_add(0, target, weight)
            share = weight / total[target]
            x = functional.elu(
                torch.zeros_like(h).index_add(0, target, share[:, None] * h[source])
            )
        output: Tensor = self.leave(x)
        return output


class Detector(nn.Module):
    """ReLU and clamps everywhere, scores cut off below a threshold."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.BatchNorm2d(16),
            nn.ReLU6(),
            nn.Conv2d(16, 16, 3, 1, 1, groups=16),
            nn.Hardswish(),
            nn.Conv2d(16, 24, 1),
            nn.ReLU(),
        )
        self.boxes = nn.Conv2d(24, 4, 1)
        self.scores = nn.Conv2d(24, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        boxes = self.boxes(h).clamp(-0.3, 0.3)
        scores = self.scores(h).sigmoid()
        kept = torch.where(scores > 0.5, scores, torch.zeros_like(scores))
        return torch.cat([boxes, kept], 1)


class MaxPoolNet(nn.Module):
    """Convolutions and maximum pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3, 1, 1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, 1, 1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 3, 1, 1),
            nn.ReLU(),
            nn.AdaptiveMaxPool2d(1),
            nn.Flatten(),
            nn.Linear(32, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output


class Spectrum(nn.Module):
    """Log magnitudes of a short-time Fourier transform, then a recurrent layer."""

    real: Tensor
    imaginary: Tensor

    def __init__(self) -> None:
        super().__init__()
        window = torch.hann_window(32)
        basis = torch.fft.rfft(torch.eye(32)) * window[:, None]
        self.register_buffer("real", basis.real.T.contiguous()[:, None])
        self.register_buffer("imaginary", basis.imag.T.contiguous()[:, None])
        self.mix = nn.Conv1d(17, 12, 3, 1, 1)
        self.recurrent = nn.LSTM(12, WIDTH, batch_first=True)
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        real = functional.conv1d(x[:, None], self.real, stride=16)
        imaginary = functional.conv1d(x[:, None], self.imaginary, stride=16)
        magnitude = (real.square() + imaginary.square()).clamp(min=1e-10).sqrt()
        h = functional.relu(self.mix(magnitude.log()))
        h, _ = self.recurrent(h.transpose(1, 2))
        output: Tensor = self.leave(h).sigmoid()
        return output


class RecurrentEncoder(nn.Module):
    """Three recurrent layers and a unit vector: few sites, a dear backward."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(12, 24, 3, batch_first=True)
        self.leave = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.recurrent(x)
        return functional.normalize(functional.relu(self.leave(hidden[-1])), dim=-1)


class Rounder(nn.Module):
    """Values rounded to steps, signs, and bins."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, 24)
        self.table = nn.Embedding(9, 24)
        self.leave = nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        bins = torch.bucketize(h[..., 0].contiguous(), torch.linspace(-1, 1, 8))
        steps = h + ((h * 4).round() / 4 - h).detach()
        output: Tensor = self.leave(steps * torch.sign(h).detach() + self.table(bins))
        return output


class Nearest(nn.Module):
    """The features of the nearest points: gathered by sorted distances."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU())
        self.edge = nn.Sequential(nn.Linear(2 * WIDTH, 24), nn.ReLU())
        self.leave = nn.Linear(24, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        near = torch.cdist(h, h).topk(4, largest=False).indices
        rows = torch.arange(len(x))[:, None, None]
        around = h[rows, near]
        centre = h[:, :, None].expand_as(around)
        edges = self.edge(torch.cat([centre, around - centre], -1))
        output: Tensor = self.leave(edges.amax(2).amax(1))
        return output


class EarlyExit(nn.Module):
    """Samples that are sure leave early; the others go through a second part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU())
        self.sure = nn.Linear(32, 1)
        self.second = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        self.leave = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        unsure = self.sure(h)[..., 0] < 0
        h = h.clone()
        h[unsure] = self.second(h[unsure])
        output: Tensor = self.leave(h)
        return output


class Attention(nn.Module):
    """A plain encoder layer: nothing decides."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 32, dropout=0.0, batch_first=True
        )
        self.leave = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.leave(self.layer(x))
        return output


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 12, WIDTH, generator=generator)


def _images(generator: torch.Generator) -> Tensor:
    return torch.randn(SAMPLES, 3, 16, 16, generator=generator)


def _graph(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    nodes = 60
    edges = torch.randint(0, nodes, (2, 300), generator=generator)
    loops = torch.arange(nodes).expand(2, -1)
    return torch.randn(nodes, WIDTH, generator=generator), torch.cat([edges, loops], 1)


def _shaped(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda generator: torch.randn(SAMPLES, *shape, generator=generator)


NETS: dict[str, tuple[type[nn.Module], Callable[[torch.Generator], object]]] = {
    "top_k_experts": (TopKExperts, _tokens),
    "switch_routing": (SwitchRouting, _tokens),
    "hard_attention": (HardAttention, _tokens),
    "codebook": (Codebook, _shaped(4, 32)),
    "graph_attention": (GraphAttention, _graph),
    "box_detector": (Detector, _images),
    "max_pool": (MaxPoolNet, _images),
    "spectrum": (Spectrum, _shaped(256)),
    "recurrent": (RecurrentEncoder, _shaped(20, 12)),
    "rounder": (Rounder, _tokens),
    "nearest": (Nearest, _shaped(20, 3)),
    "early_exit": (EarlyExit, _tokens),
    "attention": (Attention, _tokens),
}


def workload(name: str) -> Workload:
    """The network with its batches."""
    kind, batch = NETS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind().eval()
    generator = torch.Generator().manual_seed(1)
    batches = [batch(generator) for _ in range(BATCHES)]
    return Workload(model, batches, name=name)
