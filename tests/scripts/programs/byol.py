"""Views of the same picture that agree: a network, its slow average, and layer-wise rates in bfloat16."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

PICTURES, BATCH, SIZE, CHANNELS, HIDDEN, DIM = 24, 8, 12, 8, 16, 10
BASE, WARM, TOTAL, DECAY, MOMENTUM = 0.6, 2, 8, 1e-3, 0.9
TAU, TRUST, TEMPERATURE, CONTRAST = 0.9, 0.02, 0.2, 0.3


def pictures(seed=5):
    """Stripes of four directions in noise, as bytes."""
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(0, 4, (PICTURES,), generator=g)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    angle = (kinds * math.pi / 4)[:, None, None]
    stripes = torch.sin(0.9 * (rows * torch.cos(angle) + columns * torch.sin(angle)))
    tint = torch.rand(PICTURES, 3, 1, 1, generator=g)
    images = 110 + 70 * stripes[:, None] * tint + 25 * torch.randn(PICTURES, 3, SIZE, SIZE, generator=g)
    return images.clamp(0, 255).to(torch.uint8), kinds


class Augment:
    """Crop, flip, brightness and contrast, grey now and then; one draw for each picture."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def uniform(self, size, low, high):
        return low + (high - low) * torch.rand(size, 1, 1, 1, generator=self.g)

    def crop(self, x, border=2):
        padded = F.pad(x, (border,) * 4, mode="reflect")
        corners = torch.randint(0, 2 * border + 1, (len(x), 2), generator=self.g)
        cut = [p[:, i : i + SIZE, j : j + SIZE] for p, (i, j) in zip(padded, corners.tolist())]
        return torch.stack(cut)

    def __call__(self, x):
        x = self.crop(x)
        flip = torch.rand(len(x), generator=self.g) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(-1), x)
        x = x * self.uniform(len(x), 0.6, 1.4)
        mean = x.mean((1, 2, 3), keepdim=True)
        x = (x - mean) * self.uniform(len(x), 0.5, 1.5) + mean
        grey = (x * torch.tensor([0.299, 0.587, 0.114])[:, None, None]).sum(1, keepdim=True)
        chosen = torch.rand(len(x), generator=self.g) < 0.2
        return torch.where(chosen[:, None, None, None], grey.expand_as(x), x).clamp(0, 1)


def mlp(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, HIDDEN, bias=False), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)
    )


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.short(x))


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(3, CHANNELS, 1), Block(CHANNELS, HIDDEN, 2))
        self.projector = mlp(HIDDEN, DIM)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        for block in self.blocks:
            nn.init.constant_(block.bn2.weight, 0.2)

    def forward(self, x):
        return self.projector(self.blocks(x).mean((2, 3)))


class Lars(torch.optim.Optimizer):
    """Momentum with a rate for each weight; vectors have no trust ratio and no decay."""

    def __init__(self, params, lr, momentum, decay, trust):
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay, "trust": trust})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                update = p.grad
                if p.dim() > 1:
                    update = update + group["decay"] * p
                    weight, size = p.norm(), update.norm()
                    ratio = torch.where((weight > 0) & (size > 0), group["trust"] * weight / size, 1.0)
                    update = update * ratio
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                state["momentum"].mul_(group["momentum"]).add_(update)
                p.add_(state["momentum"], alpha=-group["lr"])


def cosine(step):
    if step < WARM:
        return BASE * (step + 1) / WARM
    return 0.5 * BASE * (1 + math.cos(math.pi * (step - WARM) / (TOTAL - WARM)))


def tau_at(step):
    """The average slows down towards the end."""
    return 1 - (1 - TAU) * (math.cos(math.pi * step / TOTAL) + 1) / 2


@torch.no_grad()
def follow(target, online, tau):
    for slow, fast in zip(target.parameters(), online.parameters()):
        slow.mul_(tau).add_(fast, alpha=1 - tau)
    for slow, fast in zip(target.buffers(), online.buffers()):
        slow.copy_(fast)


def regression(said, wanted):
    said = F.normalize(said.float(), dim=-1)
    wanted = F.normalize(wanted.float(), dim=-1)
    return 2 - 2 * (said * wanted).sum(-1)


def contrast(first, second):
    """Each view finds the other one among the views of all pictures."""
    both = F.normalize(torch.cat([first, second]).float(), dim=-1)
    logits = both @ both.T / TEMPERATURE
    itself = torch.eye(len(both), dtype=torch.bool)
    logits = logits.masked_fill(itself, float("-inf"))
    size = len(first)
    labels = torch.cat([torch.arange(size) + size, torch.arange(size)])
    return F.cross_entropy(logits, labels)


def losses(online, predictor, target, first, second):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z1, z2 = online(first), online(second)
        p1, p2 = predictor(z1), predictor(z2)
        with torch.no_grad():
            t1, t2 = target(first), target(second)
    agree = (regression(p1, t2) + regression(p2, t1)).mean()
    return agree, contrast(z1, z2)


def main():
    torch.manual_seed(60)
    online, predictor = Network(), mlp(DIM, DIM)
    target = copy.deepcopy(online).requires_grad_(False)
    images, _ = pictures()
    images = images.float() / 255
    augment = Augment(61)
    vectors = [p for net in (online, predictor) for p in net.parameters() if p.dim() == 1]
    matrices = [p for net in (online, predictor) for p in net.parameters() if p.dim() > 1]
    groups = [{"params": matrices}, {"params": vectors, "momentum": 0.8}]
    optimizer = Lars(groups, BASE, MOMENTUM, DECAY, TRUST)
    shuffle = torch.Generator().manual_seed(62)
    order = torch.randperm(PICTURES, generator=shuffle)
    for step, rows in enumerate(order.split(BATCH)):
        for group in optimizer.param_groups:
            group["lr"] = cosine(step)
        chosen = images[rows]
        first, second = augment(chosen), augment(chosen)
        agree, apart = losses(online, predictor, target, first, second)
        loss = agree + CONTRAST * apart
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        follow(target, online, tau_at(step))
        print(step, f"{agree.item():.5f} {apart.item():.5f}")


main()
