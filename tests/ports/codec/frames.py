"""Time before channels: convolutions by frames, spectra by matrices of waves."""

import math
from pathlib import Path

import torch
from torch import nn

ENCODER = [
    ("conv", "encoder.0", 1, 1),
    ("unit", "encoder.1", 1, 1),
    ("snake", "encoder.2", 1, 1),
    ("conv", "encoder.3", 2, 1),
    ("unit", "encoder.4", 1, 3),
    ("snake", "encoder.5", 1, 1),
    ("conv", "encoder.6", 2, 1),
]
DECODER = [
    ("conv", "decoder.0", 1, 1),
    ("snake", "decoder.1", 1, 1),
    ("up", "decoder.2", 2, 1),
    ("unit", "decoder.3", 1, 3),
    ("snake", "decoder.4", 1, 1),
    ("up", "decoder.5", 2, 1),
    ("snake", "decoder.6", 1, 1),
    ("conv", "decoder.7", 1, 1),
]


class Snake(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.alpha = nn.Parameter(w[at + ".alpha"].flatten().clone())

    def forward(self, x):
        a = self.alpha
        return x + (0.5 - 0.5 * torch.cos(2 * a * x)) / (a + 1e-9)


class Normed(nn.Module):
    """A direction (size, in, out), and a length."""

    def load(self, w, at, order):
        at += ".conv"
        v = w[at + ".parametrizations.weight.original1"].permute(order)
        g = w[at + ".parametrizations.weight.original0"].permute(order)
        self.v = nn.Parameter(v.contiguous())
        self.g = nn.Parameter(g.contiguous())
        self.b = nn.Parameter(w[at + ".bias"].clone())

    def kernel(self):
        over = [d for d in range(3) if self.g.shape[d] == 1]
        length = self.v.square().sum(over, keepdim=True).sqrt()
        return self.g * self.v / length


class Conv(Normed):
    def __init__(self, w, at, stride=1, rate=1):
        super().__init__()
        self.stride, self.rate = stride, rate
        self.load(w, at, (2, 1, 0))

    def forward(self, x):
        kernel = self.kernel()
        size = len(kernel)
        reach = (size - 1) * self.rate
        x = nn.functional.pad(x, (0, 0, reach - (self.stride - 1), 0))
        frames = x.unfold(1, reach + 1, self.stride)[..., :: self.rate]
        return torch.einsum("btik,kio->bto", frames, kernel) + self.b


class Up(Normed):
    def __init__(self, w, at, stride):
        super().__init__()
        self.stride = stride
        self.load(w, at, (2, 0, 1))

    def forward(self, x):
        now, later = self.kernel().split(self.stride)
        first = torch.einsum("bti,kio->btko", x, now)
        second = torch.einsum("bti,kio->btko", x, later)
        second = nn.functional.pad(second, (0, 0, 0, 0, 1, 0))[:, :-1]
        return (first + second).flatten(1, 2) + self.b


class Unit(nn.Module):
    def __init__(self, w, at, rate):
        super().__init__()
        self.act1 = Snake(w, at + ".steps.0")
        self.conv1 = Conv(w, at + ".steps.1", 1, rate)
        self.act2 = Snake(w, at + ".steps.2")
        self.conv2 = Conv(w, at + ".steps.3")

    def forward(self, x):
        y = self.conv1(self.act1(x))
        return x + self.conv2(self.act2(y))


def built(w, plan):
    layers = nn.ModuleList()
    for kind, at, stride, rate in plan:
        if kind == "conv":
            layers.append(Conv(w, at, stride, rate))
        elif kind == "up":
            layers.append(Up(w, at, stride))
        elif kind == "unit":
            layers.append(Unit(w, at, rate))
        else:
            layers.append(Snake(w, at))
    return layers


class EMAQuantizer(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.register_buffer("embed", w[at + ".codes"].clone())
        self.register_buffer("cluster_size", w[at + ".counts"].clone())
        self.register_buffer("embed_sum", w[at + ".sums"].clone())

    @torch.no_grad()
    def update(self, flat, index, decay=0.9, eps=1e-5):
        n = len(self.embed)
        count = torch.bincount(index, minlength=n).to(flat.dtype)
        added = torch.zeros_like(self.embed).index_add_(0, index, flat)
        self.cluster_size.copy_(decay * self.cluster_size + (1 - decay) * count)
        self.embed_sum.copy_(decay * self.embed_sum + (1 - decay) * added)
        whole = self.cluster_size.sum()
        smooth = (self.cluster_size + eps) / (whole + n * eps) * whole
        self.embed.copy_(self.embed_sum / smooth.unsqueeze(1))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        distance = ((flat[:, None] - self.embed[None]) ** 2).sum(-1)
        index = torch.argmin(distance, 1)
        found = self.embed[index].reshape(x.shape)
        self.update(flat.detach(), index)
        return found


class FrameCodec(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.enc = built(w, ENCODER)
        self.quantizers = nn.ModuleList(
            [EMAQuantizer(w, f"books.{i}") for i in range(2)]
        )
        self.dec = built(w, DECODER)

    def forward(self, sound):
        x = sound.transpose(1, 2)
        for layer in self.enc:
            x = layer(x)
        residual, commitment = x, []
        total: torch.Tensor | int = 0
        for quantizer in self.quantizers:
            found = quantizer(residual)
            commitment.append(((residual - found) ** 2).mean())
            passed = residual + (found - residual).detach()
            total = total + passed
            residual = residual - passed.detach()
        y = total
        for layer in self.dec:
            y = layer(y)
        y = torch.tanh(y).transpose(1, 2)
        return {"sound": y, "commit": torch.stack(commitment).sum()}


def model():
    return FrameCodec(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["sound"])


def magnitudes(sound, size):
    n = torch.arange(size)
    window = 0.5 - 0.5 * torch.cos(2 * math.pi * n / size)
    frames = sound.squeeze(1).unfold(1, size, size // 4) * window
    angle = 2 * math.pi * torch.outer(n, torch.arange(size // 2 + 1)) / size
    real, imaginary = frames @ torch.cos(angle), frames @ torch.sin(angle)
    return torch.sqrt(real**2 + imaginary**2)


def loss(output, batch):
    ours, target = output["sound"], batch["sound"]
    value = (ours - target).abs().mean() + 0.25 * output["commit"]
    for size in (16, 32):
        a, b = magnitudes(ours, size), magnitudes(target, size)
        floor = torch.tensor(1e-4)
        apart = torch.log(torch.maximum(a, floor) / torch.maximum(b, floor))
        value = value + (a - b).abs().mean() + apart.abs().mean() / math.log(10)
    return value


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, lr, betas, decay):
        super().__init__(params, dict(lr=lr, betas=betas, decay=decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, (b1, b2) = group["lr"], group["betas"]
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                m = state.setdefault("m", torch.zeros_like(p))
                v = state.setdefault("v", torch.zeros_like(p))
                p.mul_(1 - lr * group["decay"])
                m.lerp_(p.grad, 1 - b1)
                v.lerp_(p.grad**2, 1 - b2)
                m_hat = m / (1 - b1 ** state["n"])
                v_hat = v / (1 - b2 ** state["n"])
                p.sub_(lr * m_hat / (torch.sqrt(v_hat) + 1e-8))


def optimizer(net):
    return AdamW(net.parameters(), 1e-3, (0.8, 0.99), 0.02)
