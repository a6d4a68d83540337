"""Two towers that agree on pairs: pictures and words, a contrastive loss."""

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.conv1 = nn.Conv2d(inp, out, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.down = nn.Conv2d(inp, out, 1, bias=False)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.down(F.avg_pool2d(x, 2)))


class Pictures(nn.Module):
    def __init__(self, out):
        super().__init__()
        self.block1 = Residual(3, 6)
        self.block2 = Residual(6, 10)
        self.project = nn.Linear(10, out, bias=False)

    def forward(self, x):
        x = self.block2(self.block1(x))
        return self.project(x.mean((2, 3)))


class Words(nn.Module):
    def __init__(self, count, dim, out):
        super().__init__()
        self.table = nn.Embedding(count, dim, padding_idx=0)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.norm = nn.LayerNorm(dim)
        self.project = nn.Sequential(
            nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, out)
        )

    def forward(self, ids):
        is_word = (ids != 0)[..., None]
        x = self.table(ids)
        x = x + F.gelu(self.conv(x.transpose(1, 2)).transpose(1, 2))
        x = self.norm(x) * is_word
        x = x.sum(1) / is_word.sum(1)
        return self.project(x)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.pictures = Pictures(7)
        self.words = Words(19, 8, 7)
        self.log_scale = nn.Parameter(torch.tensor(1.6))

    def forward(self, image, ids):
        a = F.normalize(self.pictures(image), dim=-1)
        b = F.normalize(self.words(ids), dim=-1)
        return self.log_scale.exp() * a @ b.T


def model():
    torch.manual_seed(240)
    net = Pair()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(241)
    image = torch.randn(6, 3, 8, 8, generator=generator)
    ids = torch.randint(1, 19, (6, 7), generator=generator)
    lengths = torch.tensor([7, 4, 5, 3, 7, 6])
    ids = ids * (torch.arange(7) < lengths[:, None])
    return [{"image": image, "ids": ids}]


def forward(net, batch):
    return net(batch["image"], batch["ids"])


def loss(output, batch):
    target = torch.arange(len(output))
    rows = F.cross_entropy(output, target, label_smoothing=0.1)
    columns = F.cross_entropy(output.T, target, label_smoothing=0.1)
    return (rows + columns) / 2


def optimizer(net):
    plain = [p for p in net.parameters() if p.ndim < 2]
    decayed = [p for p in net.parameters() if p.ndim >= 2]
    groups = [{"params": decayed, "weight_decay": 5e-3}, {"params": plain}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, dampening=0.1, nesterov=False)
