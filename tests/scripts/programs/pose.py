"""Joints of little figures: a heatmap for each joint, and its mean as where the joint is.

The stem comes from a classifier and its norm stays as it was; all else is new.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

JOINTS = ("head", "hip", "l_arm", "r_arm", "l_hand", "r_hand", "l_foot", "r_foot")
OTHER_SIDE = {"l": "r", "r": "l"}
SWAP = [
    JOINTS.index(f"{OTHER_SIDE[j[0]]}{j[1:]}") if j[1] == "_" else i for i, j in enumerate(JOINTS)
]
# how far apart two annotators are, in pixels
SPREAD = {"head": 0.5, "hip": 2.0, "arm": 1.2, "hand": 0.8, "foot": 1.0}
REST = [(20, 7), (20, 22), (14, 13), (26, 13), (9, 19), (31, 19), (15, 33), (25, 33)]


@dataclass(frozen=True)
class Config:
    seed: int = 23
    figures: int = 64
    canvas: int = 40
    crop: int = 32
    stride: int = 2
    batch: int = 8
    steps: int = 3
    width: int = 16
    sigma: float = 1.3
    lr: float = 0.08
    stem_rate: float = 0.3
    momentum: float = 0.9
    decay: float = 5e-3
    warm: int = 2
    total: int = 12
    clip: float = 0.35
    integral: float = 0.6
    ema: float = 0.8


cfg = Config()
GRID = cfg.crop // cfg.stride


# ------------------------------------------------------------------ figures


def draw(gen):
    """Pictures as bytes, joints as (x, y), and flags: 0 not marked, 1 hidden, 2 seen."""
    n, k, size = cfg.figures, len(JOINTS), cfg.canvas
    joints = torch.tensor(REST, dtype=torch.float32).repeat(n, 1, 1)
    joints += 2.0 * torch.randn(n, k, 2, generator=gen)
    joints += 2.5 * torch.randn(n, 1, 2, generator=gen)
    chance = torch.rand(n, k, generator=gen)
    flag = 2 - (chance < 0.25).long() - (chance < 0.12).long()
    colour = torch.rand(k, 3, generator=gen) * 200 + 20
    at = torch.arange(size, dtype=torch.float32)
    far_x = (at - joints[..., :1]) ** 2
    far_y = (at - joints[..., 1:]) ** 2
    blob = torch.exp(-(far_y[..., :, None] + far_x[..., None, :]) / 4.5)
    blob = blob * (flag == 2)[..., None, None]
    picture = torch.einsum("nkhw,kc->nchw", blob, colour)
    picture += 30 + 15 * torch.randn(n, 3, size, size, generator=gen)
    picture += torch.tensor([25.0, 10.0, 0.0])[:, None, None] * (at / size)
    return picture.clamp(0, 255).byte(), joints, flag


def augment(picture, joints, flag, gen):
    """A window of the picture, as in a mirror half of the time."""
    room = cfg.canvas - cfg.crop + 1
    top, left = torch.randint(room, (2,), generator=gen).tolist()
    picture = picture[:, top : top + cfg.crop, left : left + cfg.crop].float()
    joints = joints - torch.tensor([left, top])
    if torch.rand((), generator=gen) < 0.5:
        picture = picture.flip(2)
        joints = torch.stack([cfg.crop - 1 - joints[:, 0], joints[:, 1]], 1)
        joints, flag = joints[SWAP], flag[SWAP]
    gain = 1 + 0.1 * torch.randn(3, 1, 1, generator=gen)
    inside = ((joints >= 0) & (joints <= cfg.crop - 1)).all(1)
    return picture * gain, joints, (flag > 0) & inside


class Loader:
    def __init__(self, data, gen):
        self.picture, self.joints, self.flag = data
        self.gen = gen
        values = self.picture.float() / 255
        self.mean = values.mean((0, 2, 3))[:, None, None]
        self.std = values.std((0, 2, 3))[:, None, None]

    def __iter__(self):
        order = torch.randperm(len(self.picture), generator=self.gen)
        for rows in order.split(cfg.batch):
            parts = [
                augment(self.picture[i], self.joints[i], self.flag[i], self.gen)
                for i in rows.tolist()
            ]
            picture, joints, known = (torch.stack(part) for part in zip(*parts))
            picture = (picture / 255 - self.mean) / self.std
            # in cells of the heatmap, whose centres are whole numbers
            place = (joints + 0.5) / cfg.stride - 0.5
            yield picture, place, known.float()


def gaussians(place):
    cell = torch.arange(GRID, dtype=place.dtype)
    dx = cell - place[..., 0, None]
    dy = cell - place[..., 1, None]
    far = dy[..., :, None] ** 2 + dx[..., None, :] ** 2
    return torch.exp(-far / (2 * cfg.sigma**2))


# ------------------------------------------------------------------ net


class SoftArgmax(torch.autograd.Function):
    """Mean place (x, y) under softmax(beta * heat), a beta for each joint."""

    @staticmethod
    def forward(ctx, heat, beta):
        n, k, rows, cols = heat.shape
        scaled = heat * beta[:, None, None]
        prob = scaled.flatten(2).softmax(2).view(n, k, rows, cols)
        x = prob.sum(2) @ torch.arange(cols, dtype=heat.dtype)
        y = prob.sum(3) @ torch.arange(rows, dtype=heat.dtype)
        ctx.save_for_backward(heat, beta, prob, x, y)
        return torch.stack([x, y], 2)

    @staticmethod
    def backward(ctx, grad):
        heat, beta, prob, x, y = ctx.saved_tensors
        gx, gy = grad[..., 0], grad[..., 1]
        dx = torch.arange(heat.shape[3], dtype=heat.dtype) - x[..., None]
        dy = torch.arange(heat.shape[2], dtype=heat.dtype) - y[..., None]
        along_x = (gx[..., None] * dx)[:, :, None, :]
        along_y = (gy[..., None] * dy)[:, :, :, None]
        slope = prob * (along_x + along_y)
        grad_heat = slope * beta[:, None, None]
        grad_beta = (slope * heat).sum((0, 2, 3))
        return grad_heat, grad_beta


class FrozenNorm(nn.Module):
    """Batch norm as a classifier left it."""

    def __init__(self, width):
        super().__init__()
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("shift", torch.zeros(width))

    def forward(self, x):
        return x * self.scale[:, None, None] + self.shift[:, None, None]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x):
        h = F.relu(self.norm1(self.first(x)))
        return F.relu(x + self.norm2(self.second(h)))


class PoseNet(nn.Module):
    def __init__(self, width, joints):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=2, padding=1, bias=False)
        self.frozen = FrozenNorm(width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.block = Block(2 * width)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, stride=2, padding=1)
        self.lateral = nn.Conv2d(width, width, 1)
        self.head = nn.Conv2d(width, joints, 1)
        self.beta = nn.Parameter(torch.full((joints,), 3.0))

    def forward(self, picture):
        fine = F.relu(self.frozen(self.stem(picture)))
        coarse = self.block(F.relu(self.down(fine)))
        merged = self.up(coarse) + self.lateral(fine)
        heat = self.head(F.relu(merged))
        return heat, SoftArgmax.apply(heat, self.beta)


def classifier():
    """As it was published: kernels [h, w, in, out], channels blue, green, red."""
    gen = torch.Generator().manual_seed(1998)
    width = cfg.width
    return {
        "conv1/kernel": 0.3 * torch.randn(3, 3, 3, width, generator=gen),
        "bn1/gamma": 0.6 + torch.rand(width, generator=gen),
        "bn1/beta": 0.2 * torch.randn(width, generator=gen),
        "bn1/moving_mean": 0.3 * torch.randn(width, generator=gen),
        "bn1/moving_variance": 0.5 + 3 * torch.rand(width, generator=gen),
    }


@torch.no_grad()
def adopt(net, saved):
    kernel = saved["conv1/kernel"].permute(3, 2, 0, 1)
    net.stem.weight.copy_(kernel.flip(1))
    scale = saved["bn1/gamma"] / (saved["bn1/moving_variance"] + 1e-5).sqrt()
    net.frozen.scale.copy_(scale)
    net.frozen.shift.copy_(saved["bn1/beta"] - scale * saved["bn1/moving_mean"])


def joint_weights():
    """Joints that are marked well count for more; one on average."""
    spread = torch.tensor([SPREAD[j.split("_")[-1]] for j in JOINTS])
    weight = 1 / spread
    return weight / weight.mean()


# ------------------------------------------------------------------ training


def losses(heat, found, place, known, weight):
    counts = known * weight
    square = (heat - gaussians(place)).square().sum((2, 3))
    by_heat = (square * counts).sum() / counts.sum()
    apart = F.smooth_l1_loss(found, place, reduction="none", beta=0.5).sum(2)
    by_place = (apart * counts).sum() / counts.sum()
    return by_heat, by_place


def rate(step):
    if step < cfg.warm:
        return (step + 1) / (cfg.warm + 1)
    done = (step - cfg.warm) / (cfg.total - cfg.warm)
    return 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def follow(average, net):
    for a, p in zip(average.parameters(), net.parameters()):
        a.mul_(cfg.ema).add_(p, alpha=1 - cfg.ema)
    for a, b in zip(average.buffers(), net.buffers()):
        a.copy_(b)


def groups_of(net):
    stem = [net.stem.weight]
    new = [p for name, p in net.named_parameters() if not name.startswith("stem")]
    return [
        {"params": stem, "lr": cfg.lr * cfg.stem_rate, "weight_decay": 0.0},
        {"params": [p for p in new if p.ndim > 1], "weight_decay": cfg.decay},
        {"params": [p for p in new if p.ndim == 1], "weight_decay": 0.0},
    ]


def main():
    torch.manual_seed(cfg.seed)
    gen = torch.Generator().manual_seed(cfg.seed)
    loader = Loader(draw(gen), gen)
    net = PoseNet(cfg.width, len(JOINTS))
    adopt(net, classifier())
    average = copy.deepcopy(net).requires_grad_(False)
    weight = joint_weights()
    opt = torch.optim.SGD(groups_of(net), cfg.lr, momentum=cfg.momentum)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, rate)
    for step, (picture, place, known) in zip(range(cfg.steps), loader):
        heat, found = net(picture)
        by_heat, by_place = losses(heat, found, place, known, weight)
        loss = by_heat / GRID + cfg.integral * by_place
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), cfg.clip)
        opt.step()
        sched.step()
        follow(average, net)
        print(f"step {step} heat {by_heat.item():.4f} place {by_place.item():.4f}")

    average.eval()
    picture, place, known = next(iter(loader))
    with torch.no_grad():
        miss = (average(picture)[1] - place).norm(dim=2) * cfg.stride
    print(f"off by {(miss * known).sum().item() / known.sum().item():.2f} pixels")


if __name__ == "__main__":
    main()
