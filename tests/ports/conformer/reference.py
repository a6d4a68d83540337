"""A block of speech networks: half feed-forward steps, attention, gated convolution."""

import torch
from torch import nn
from torch.nn import functional as F


class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.one = nn.Linear(dim, 3 * dim)
        self.two = nn.Linear(3 * dim, dim)

    def forward(self, x):
        return self.two(F.silu(self.one(self.norm(x))))


class Conv(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.wide = nn.Conv1d(dim, 2 * dim, 1)
        self.deep = nn.Conv1d(dim, dim, 5, padding=2, groups=dim)
        self.batch = nn.BatchNorm1d(dim)
        self.narrow = nn.Conv1d(dim, dim, 1)

    def forward(self, x):
        x = self.norm(x).transpose(1, 2)
        x = F.glu(self.wide(x), 1)
        x = F.silu(self.batch(self.deep(x)))
        return self.narrow(x).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.ff1 = FeedForward(dim)
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.conv = Conv(dim)
        self.ff2 = FeedForward(dim)
        self.last = nn.LayerNorm(dim)

    def forward(self, x, is_pad):
        x = x + 0.5 * self.ff1(x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, key_padding_mask=is_pad, need_weights=False)[0]
        x = x + self.conv(x)
        x = x + 0.5 * self.ff2(x)
        return self.last(x)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        self.sub = nn.Conv2d(1, 4, 3, stride=2)
        self.enter = nn.Linear(4 * 4, 12)
        self.blocks = nn.ModuleList([Block(12), Block(12)])
        self.leave = nn.Linear(12, 9)

    def forward(self, x, lengths):
        x = F.relu(self.sub(x[:, None]))
        b, c, t, f = x.shape
        x = self.enter(x.transpose(1, 2).reshape(b, t, c * f))
        place = torch.arange(t)[:, None] / 100 ** (torch.arange(0, 12, 2) / 12)
        x = x * 12**0.5 + torch.cat([place.sin(), place.cos()], -1)
        is_pad = torch.arange(t)[None] >= lengths[:, None]
        for block in self.blocks:
            x = block(x, is_pad)
        return self.leave(x).log_softmax(-1)


def model():
    torch.manual_seed(80)
    net = Speech()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm | nn.BatchNorm1d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
        for block in net.blocks:
            block.attention.in_proj_bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(81)
    x = torch.randn(3, 23, 9, generator=generator)
    lengths = torch.tensor([11, 8, 9])
    y = torch.randint(0, 9, (3, 11), generator=generator)
    return [{"x": x, "lengths": lengths, "y": y}]


def forward(net, batch):
    return net(batch["x"], batch["lengths"])


def loss(output, batch):
    return F.nll_loss(output.flatten(0, 1), batch["y"].flatten())


def optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=1e-3)
