"""Points of a shape: aligned, seen one by one and all together, and named one by one."""

import torch
from torch import nn
from torch.nn import functional as F

KINDS = 5


def shared(*widths):
    layers = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv1d(before, after, 1), nn.BatchNorm1d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class Align(nn.Module):
    def __init__(self, k, width):
        super().__init__()
        self.k = k
        self.points = shared(k, width, 2 * width)
        self.hidden = nn.Linear(2 * width, width)
        self.norm = nn.BatchNorm1d(width)
        self.matrix = nn.Linear(width, k * k)

    def forward(self, x):
        y = self.points(x).max(dim=2).values
        y = F.relu(self.norm(self.hidden(y)))
        identity = torch.eye(self.k, dtype=y.dtype).flatten()
        return (self.matrix(y) + identity).view(-1, self.k, self.k)


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.align = Align(3, 8)
        self.early = shared(3, 10)
        self.align_features = Align(10, 12)
        self.late = shared(10, 16, 24)
        self.head = shared(10 + 24, 18)
        self.last = nn.Conv1d(18, KINDS, 1)

    def forward(self, x):
        x = torch.bmm(self.align(x).transpose(1, 2), x)
        local = self.early(x)
        turn = self.align_features(local)
        local = torch.bmm(turn.transpose(1, 2), local)
        whole = self.late(local).amax(dim=2, keepdim=True)
        x = torch.cat([local, whole.expand(-1, -1, x.shape[2])], dim=1)
        return {"kinds": self.last(self.head(x)).transpose(1, 2), "turn": turn}


def model():
    torch.manual_seed(21)
    net = Segments()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.3)
    return net


def batches():
    generator = torch.Generator().manual_seed(22)
    x = torch.randn(6, 3, 20, generator=generator)
    kinds = torch.randint(0, 5, (6, 20), generator=generator)
    return [{"x": x, "kinds": kinds}]


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    logs = F.log_softmax(output["kinds"], dim=-1)
    error = F.nll_loss(logs.flatten(0, 1), batch["kinds"].flatten())
    turn = output["turn"]
    apart = torch.eye(turn.shape[1]) - turn @ turn.transpose(1, 2)
    return error + 0.01 * apart.norm(dim=(1, 2)).mean()


def optimizer(net):
    return torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
