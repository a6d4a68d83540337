"""Lottery tickets for the defect camera: how few weights of the small ConvNet are enough?

Starts from a finished dense run: its last weights say which ones matter, its first ones are
what training goes back to at the start of each round. Within a round the masks tighten at
every update, along a cubic schedule.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    seed: int = 5
    images: int = 120
    size: int = 12
    width: int = 12
    micro: int = 10
    accumulate: int = 2
    updates: int = 3
    per_round: int = 2
    lr: float = 0.2
    warmup: int = 3
    momentum: float = 0.9
    decay: float = 0.1
    smooth: float = 0.15
    clip: float = 1.5
    sparse_from: float = 0.2
    sparse_to: float = 0.85
    prune_updates: int = 8


cfg = Config()
KINDS = ("clean", "scratch", "dent", "stain", "crack")
SHARE = torch.tensor([0.4, 0.2, 0.15, 0.15, 0.1])  # what the line sees in a month
RGB_MEAN, RGB_STD = (0.62, 0.47, 0.31), (0.21, 0.17, 0.26)


# ------------------------------------------------------------------ pictures


def photograph(n, gen):
    """Bytes [n, 3, size, size] and the kind of defect: a grating for each kind."""
    label = torch.multinomial(SHARE, n, replacement=True, generator=gen)
    label = label.sort().values  # as the archive has them: a folder for each kind
    at = torch.arange(cfg.size) / cfg.size
    angle = label * 0.7 + 0.1 * torch.randn(n, generator=gen)
    phase = 2 * math.pi * torch.rand(n, generator=gen)
    along = angle.cos()[:, None, None] * at[:, None] + angle.sin()[:, None, None] * at
    wave = torch.sin(2 * math.pi * (1.5 + 0.4 * label)[:, None, None] * along + phase[:, None, None])
    tint = torch.tensor(RGB_STD)[:, None, None] * wave[:, None]
    tint = tint * (1 + 0.4 * torch.randn(n, 3, 1, 1, generator=gen))
    noise = 0.06 * torch.randn(n, 3, cfg.size, cfg.size, generator=gen)
    image = torch.tensor(RGB_MEAN)[:, None, None] + tint + noise
    return (255 * image.clamp(0, 1)).round().byte(), label


def batches(image, label, gen):
    """Endless micro-batches: in a new order for each epoch, each picture a bit brighter or darker."""
    while True:
        order = torch.randperm(len(image), generator=gen)
        for rows in order.split(cfg.micro):
            x = image[rows].float() / 255
            y = label[rows]
            light = 0.7 + 0.6 * torch.rand(len(rows), 1, 1, 1, generator=gen)
            yield (x * light).clamp(max=1.0), y


# ------------------------------------------------------------------ kernels


class Masked(torch.autograd.Function):
    """Weights where the mask is one; the others are zero and learn nothing."""

    @staticmethod
    def forward(ctx, weight, mask):
        ctx.save_for_backward(mask)
        return weight * mask

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return grad * mask, None


class SmoothCrossEntropy(torch.autograd.Function):
    """Mean cross entropy with a target that leaves a share to all classes."""

    @staticmethod
    def forward(ctx, logits, label, smooth):
        classes = logits.shape[1]
        log_p = logits.log_softmax(1)
        target = F.one_hot(label, classes) * (1 - smooth) + smooth / classes
        ctx.save_for_backward(log_p, target)
        return -(target * log_p).sum(1).mean()

    @staticmethod
    def backward(ctx, grad):
        log_p, target = ctx.saved_tensors
        return grad * (log_p.exp() - target) / len(target), None, None


class NesterovW(torch.optim.Optimizer):
    """SGD with Nesterov momentum; decay by the rate, apart from the gradient."""

    def __init__(self, groups, lr, momentum):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "decay": 0.0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            mu, lr = group["momentum"], group["lr"]
            for p in group["params"]:
                if "speed" not in self.state[p]:
                    self.state[p]["speed"] = torch.zeros_like(p)
                speed = self.state[p]["speed"]
                speed.mul_(mu).add_(p.grad)
                p.mul_(1 - lr * group["decay"])
                p.sub_(lr * (p.grad + mu * speed))


# ------------------------------------------------------------------ network


class MaskedConv(nn.Conv2d):
    def __init__(self, n_in, n_out, kernel, stride=1):
        super().__init__(n_in, n_out, kernel, stride, padding=kernel // 2, bias=False)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        weight = Masked.apply(self.weight, self.mask)
        return F.conv2d(x, weight, None, self.stride, self.padding)


class MaskedLinear(nn.Linear):
    def __init__(self, n_in, n_out):
        super().__init__(n_in, n_out)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return F.linear(x, Masked.apply(self.weight, self.mask), self.bias)


class Block(nn.Module):
    def __init__(self, n_in, n_out):
        super().__init__()
        self.conv1, self.bn1 = MaskedConv(n_in, n_out, 3, 2), nn.BatchNorm2d(n_out)
        self.conv2, self.bn2 = MaskedConv(n_out, n_out, 3), nn.BatchNorm2d(n_out)
        self.short = MaskedConv(n_in, n_out, 1, 2)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return F.relu(h + self.short(x))


class Inspector(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("mean", torch.tensor(RGB_MEAN)[:, None, None])
        self.register_buffer("std", torch.tensor(RGB_STD)[:, None, None])
        self.stem, self.bn = MaskedConv(3, width, 3), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(Block(width, width), Block(width, 2 * width))
        self.head = MaskedLinear(2 * width, len(KINDS))

    def forward(self, x):
        x = (x - self.mean) / self.std
        h = F.relu(self.bn(self.stem(x)))
        h = self.blocks(h)
        return self.head(h.mean((2, 3)))

    def masked_layers(self):
        return [m for m in self.modules() if isinstance(m, (MaskedConv, MaskedLinear))]


# ------------------------------------------------------------------ dense run


def dense_run(net, gen):
    """What the dense run left: first and last weights, kernels as [height, width, in, out]."""
    saved = {"first": {}, "last": {}}
    for name, p in net.named_parameters():
        if p.dim() == 1:
            continue
        first = p.detach().clone()
        drift = torch.randn(p.shape, generator=gen) * first.std()
        ramp = 1 + 0.5 * torch.linspace(-1, 1, p.shape[-1])
        last = 0.8 * first * ramp + 0.6 * drift
        if p.dim() == 4:
            first, last = first.permute(2, 3, 1, 0), last.permute(2, 3, 1, 0)
        saved["first"][name], saved["last"][name] = first.contiguous(), last.contiguous()
    return saved


def unpack(weights):
    """Kernels as PyTorch has them."""
    return {n: w.permute(3, 2, 0, 1) if w.dim() == 4 else w for n, w in weights.items()}


@torch.no_grad()
def restore(net, saved):
    """Put the last weights in place and return the first ones."""
    last = unpack(saved["last"])
    first = unpack(saved["first"])
    for name, p in net.named_parameters():
        if name in last:
            p.copy_(last[name])
    net.head.bias.copy_(SHARE.log())
    return first


# ------------------------------------------------------------------ pruning


def sparsity(update):
    """Share of weights that are gone at an update: quickly at first, then slowly."""
    done = min(1.0, (update + 1) / cfg.prune_updates)
    return cfg.sparse_to + (cfg.sparse_from - cfg.sparse_to) * (1 - done) ** 3


@torch.no_grad()
def tighten(net, opt, share):
    """The smallest of all weights go, together with their speed. What is gone stays gone."""
    layers = net.masked_layers()
    size = [(layer.weight * layer.mask).abs() for layer in layers]
    everything = torch.cat([s.flatten() for s in size])
    threshold = everything.kthvalue(round(share * len(everything))).values
    for layer, s in zip(layers, size):
        layer.mask.copy_(s > threshold)
        layer.weight.mul_(layer.mask)
        if "speed" in opt.state[layer.weight]:
            opt.state[layer.weight]["speed"].mul_(layer.mask)


@torch.no_grad()
def rewind(net, opt, first):
    """A new round: weights that are left start again from the first ones, at rest."""
    for name, layer in net.named_modules():
        if isinstance(layer, (MaskedConv, MaskedLinear)):
            layer.weight.copy_(first[f"{name}.weight"] * layer.mask)
    opt.state.clear()


@torch.no_grad()
def accuracy(net, image, label):
    net.eval()
    guess = net(image.float() / 255).argmax(1)
    net.train()
    return (guess == label).float().mean().item()


# ------------------------------------------------------------------ training


def main():
    torch.manual_seed(cfg.seed)
    gen = torch.Generator().manual_seed(cfg.seed + 1)
    image, label = photograph(cfg.images, gen)
    net = Inspector(cfg.width)
    first = restore(net, dense_run(net, gen))

    weights = [layer.weight for layer in net.masked_layers()]
    others = [p for p in net.parameters() if p.dim() == 1]
    groups = [{"params": weights, "decay": cfg.decay}, {"params": others}]
    opt = NesterovW(groups, cfg.lr, cfg.momentum)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / cfg.warmup))
    stream = batches(image, label, gen)
    print(f"dense: accuracy {accuracy(net, image, label):.3f}")

    for update in range(cfg.updates):
        tighten(net, opt, sparsity(update))
        if update % cfg.per_round == 0:
            rewind(net, opt, first)
        opt.zero_grad()
        total = 0.0
        for _ in range(cfg.accumulate):
            x, y = next(stream)
            loss = SmoothCrossEntropy.apply(net(x), y, cfg.smooth) / cfg.accumulate
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(net.parameters(), cfg.clip)
        opt.step()
        sched.step()
        left = torch.cat([layer.mask.flatten() for layer in net.masked_layers()]).mean()
        print(f"{update}: loss {total:.4f}, gradient {norm:.3f}, left {left:.3f}")
    print(f"sparse: accuracy {accuracy(net, image, label):.3f}")


if __name__ == "__main__":
    main()
