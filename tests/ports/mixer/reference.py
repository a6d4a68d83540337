"""An MLP-mixer."""

import torch
from torch import nn
from torch.nn import functional as F


class Mlp(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class Mixer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.tokens = Mlp(tokens, 12)
        self.norm2 = nn.LayerNorm(dim)
        self.channels = Mlp(dim, 40)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MlpMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, 3)
        self.blocks = nn.Sequential(Mixer(9, 16), Mixer(9, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 7)

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x))
        return self.head(x.mean(1))


def model():
    torch.manual_seed(14)
    net = MlpMixer()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(15)
    x = torch.randn(3, 3, 9, 9, generator=generator)
    y = torch.randint(0, 7, (3,), generator=generator)
    return [{"x": x, "y": y}]


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    return F.cross_entropy(output, batch["y"])


def optimizer(net):
    return torch.optim.RMSprop(net.parameters(), lr=1e-3)
