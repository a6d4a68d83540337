"""A codec of sound: causal convolutions, residual codebooks kept by moving means."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

WIDTH, CODES, LEVELS = 6, 16, 2


class Snake(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x):
        return x + (self.alpha * x).sin().square() / (self.alpha + 1e-9)


class CausalConv(nn.Module):
    def __init__(self, inside, outside, size, stride=1, dilation=1):
        super().__init__()
        self.pad = (size - 1) * dilation - (stride - 1)
        self.conv = weight_norm(
            nn.Conv1d(inside, outside, size, stride, dilation=dilation)
        )

    def forward(self, x):
        return self.conv(F.pad(x, (self.pad, 0)))


class CausalUp(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.stride = stride
        self.conv = weight_norm(nn.ConvTranspose1d(inside, outside, 2 * stride, stride))

    def forward(self, x):
        return self.conv(x)[..., : -self.stride]


class Residual(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.steps = nn.Sequential(
            Snake(channels),
            CausalConv(channels, channels, 3, dilation=dilation),
            Snake(channels),
            CausalConv(channels, channels, 1),
        )

    def forward(self, x):
        return x + self.steps(x)


class Codebook(nn.Module):
    """Nearest codes; their means move towards what chose them."""

    def __init__(self, codes, size, decay=0.9):
        super().__init__()
        self.decay = decay
        self.register_buffer("codes", torch.randn(codes, size) * 0.4)
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", self.codes.clone())

    @torch.no_grad()
    def move(self, rows, chosen):
        onehot = F.one_hot(chosen, len(self.codes)).to(rows.dtype)
        self.counts.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(onehot.T @ rows, alpha=1 - self.decay)
        total = self.counts.sum()
        share = (self.counts + 1e-5) / (total + len(self.codes) * 1e-5)
        self.codes.copy_(self.sums / (share * total)[:, None])

    def forward(self, x):
        rows = x.transpose(1, 2).flatten(0, 1)
        far = (
            rows.square().sum(1, keepdim=True)
            - 2 * rows @ self.codes.T
            + self.codes.square().sum(1)
        )
        chosen = far.argmin(dim=1)
        near = F.embedding(chosen, self.codes).unflatten(0, (len(x), -1))
        near = near.transpose(1, 2)
        if self.training:
            self.move(rows, chosen)
        return near


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            CausalConv(1, WIDTH, 5),
            Residual(WIDTH, 1),
            Snake(WIDTH),
            CausalConv(WIDTH, 2 * WIDTH, 4, stride=2),
            Residual(2 * WIDTH, 3),
            Snake(2 * WIDTH),
            CausalConv(2 * WIDTH, 8, 4, stride=2),
        )
        self.books = nn.ModuleList([Codebook(CODES, 8) for _ in range(LEVELS)])
        self.decoder = nn.Sequential(
            CausalConv(8, 2 * WIDTH, 3),
            Snake(2 * WIDTH),
            CausalUp(2 * WIDTH, WIDTH, 2),
            Residual(WIDTH, 3),
            Snake(WIDTH),
            CausalUp(WIDTH, WIDTH, 2),
            Snake(WIDTH),
            CausalConv(WIDTH, 1, 5),
        )

    def forward(self, sound):
        left = self.encoder(sound)
        coded = torch.zeros_like(left)
        commit: torch.Tensor | float = 0.0
        for book in self.books:
            near = book(left)
            commit = commit + F.mse_loss(left, near.detach())
            near = left + (near - left).detach()
            left = left - near.detach()
            coded = coded + near
        return {"sound": torch.tanh(self.decoder(coded)), "commit": commit}


def model():
    torch.manual_seed(340)
    net = Codec()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, Snake):
                module.alpha.uniform_(0.5, 1.5)
            elif isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
                module.parametrizations.weight.original0.mul_(1.6)
                module.bias.normal_(0, 0.1)
    return net


def batches():
    generator = torch.Generator().manual_seed(341)
    time = torch.arange(96) / 16
    pitch = torch.rand(2, 1, 1, generator=generator) * 3 + 2
    noise = torch.randn(2, 1, 96, generator=generator)
    return [{"sound": 0.6 * torch.sin(pitch * time) + 0.15 * noise}]


def forward(net, batch):
    return net(batch["sound"])


def spectrum(sound, size):
    window = torch.hann_window(size, dtype=sound.dtype)
    waves = torch.stft(
        sound[:, 0],
        size,
        hop_length=size // 4,
        window=window,
        center=False,
        return_complex=True,
    )
    return waves.abs()


def loss(output, batch):
    total = F.l1_loss(output["sound"], batch["sound"]) + 0.25 * output["commit"]
    for size in (16, 32):
        ours, theirs = spectrum(output["sound"], size), spectrum(batch["sound"], size)
        logs = torch.log10(ours.clamp(min=1e-4)) - torch.log10(theirs.clamp(min=1e-4))
        total = total + F.l1_loss(ours, theirs) + logs.abs().mean()
    return total


def optimizer(net):
    return torch.optim.AdamW(
        net.parameters(), lr=1e-3, betas=(0.8, 0.99), weight_decay=0.02
    )
