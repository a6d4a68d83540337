"""One convolutional body, two tasks: what is in the picture, and how deep each pixel lies."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

CLASSES = 4


@torch.library.custom_op("rooms::box_mean", mutates_args=())
def box_mean(x: torch.Tensor, size: int) -> torch.Tensor:
    """The mean of each window of the last axis, as wide as `size`, with one step."""
    total = torch.cumsum(F.pad(x, (1, 0)), -1)
    return (total[..., size:] - total[..., :-size]) / size


@box_mean.register_fake
def _(x, size):
    return x.new_empty(*x.shape[:-1], x.shape[-1] - size + 1)


def box_setup(ctx, inputs, output):
    ctx.size = inputs[1]


def box_backward(ctx, grad):
    padded = F.pad(grad, (ctx.size - 1, ctx.size - 1))
    total = torch.cumsum(F.pad(padded, (1, 0)), -1)
    return (total[..., ctx.size :] - total[..., : -ctx.size]) / ctx.size, None


box_mean.register_autograd(box_backward, setup_context=box_setup)


class Berhu(torch.autograd.Function):
    """The reversed Huber loss of each pixel: linear near 0, square far away."""

    @staticmethod
    def forward(ctx, error, limit):
        size = error.abs()
        ctx.save_for_backward(error, limit)
        return torch.where(size <= limit, size, (error**2 + limit**2) / (2 * limit))

    @staticmethod
    def backward(ctx, grad):
        error, limit = ctx.saved_tensors
        slope = torch.where(error.abs() <= limit, error.sign(), error / limit)
        return grad * slope, None


class LeakyGate(torch.autograd.Function):
    """x where a gate is open, a tenth of it where it is not; and the gate learns."""

    @staticmethod
    def forward(ctx, x, gate):
        opened = torch.sigmoid(gate)
        ctx.save_for_backward(x, opened)
        return x * (0.1 + 0.9 * opened)

    @staticmethod
    def backward(ctx, grad):
        x, opened = ctx.saved_tensors
        to_gate = grad * x * 0.9 * opened * (1 - opened)
        return grad * (0.1 + 0.9 * opened), to_gate.sum((0, 2, 3), keepdim=True)[0]


def conv(inside, outside, stride=1):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False),
        nn.BatchNorm2d(outside, momentum=0.2),
        nn.Mish(),
    )


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = conv(3, 8)
        self.left = conv(8, 8)
        self.right = conv(8, 8)
        self.down = conv(8, 16, stride=2)
        self.gate = nn.Parameter(torch.linspace(-1, 1, 16).view(16, 1, 1))

    def forward(self, x):
        x = self.stem(x)
        x = self.left(x) - 0.5 * self.right(x)
        return LeakyGate.apply(self.down(x), self.gate)


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = Body()
        self.drop = nn.Dropout(0.1)
        self.kind = nn.Linear(16, CLASSES)
        self.rise = nn.ConvTranspose2d(16, 6, 2, stride=2)
        self.depth = nn.Conv2d(6, 1, 1)
        self.doubt = nn.Parameter(torch.tensor([0.1, -0.2]))

    def forward(self, x):
        shared = self.body(x)
        kind = self.kind(self.drop(shared.mean((2, 3))))
        raised = F.leaky_relu(self.rise(shared), 0.2)
        depth = F.softplus(self.depth(raised)).squeeze(1)
        return kind, depth

    def balanced(self, kind_loss, depth_loss):
        precision = torch.exp(-self.doubt)
        return precision[0] * kind_loss + precision[1] * depth_loss + self.doubt.sum()


def rooms(count=40, side=10):
    draw = torch.Generator().manual_seed(2024)
    kind = torch.randint(CLASSES, (count,), generator=draw)
    tilt = torch.rand(count, 1, 1, generator=draw)
    across = torch.linspace(0, 1, side)
    depth = 1 + tilt * across + 0.3 * kind.view(-1, 1, 1) * across[:, None]
    colour = torch.stack([depth, depth.square() / 2, depth.flip(2)], 1)
    picture = colour + 0.2 * torch.randn(colour.shape, generator=draw)
    mean, std = picture.mean((0, 2, 3)), picture.std((0, 2, 3))
    picture = (picture - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    return TensorDataset(picture, kind, depth)


def earlier_run(model):
    """The weights of an earlier run, where left and right had other names."""
    draw = torch.Generator().manual_seed(5)
    names = {"body.left": "body.branches.0", "body.right": "body.branches.1"}
    saved = {}
    for name, value in model.state_dict().items():
        for new, old in names.items():
            name = name.replace(new, old)
        if value.dtype.is_floating_point:
            value = (value + 0.1 * torch.randn(value.shape, generator=draw)).abs() if "var" in name else value + 0.1 * torch.randn(value.shape, generator=draw)
        saved[name] = value
    renamed = {}
    for name in model.state_dict():
        old = name
        for new, before in names.items():
            old = old.replace(new, before)
        renamed[name] = saved[old]
    return renamed


torch.manual_seed(99)
model = Tasks()
model.load_state_dict(earlier_run(model))
train_set, _ = random_split(rooms(), [32, 8], torch.Generator().manual_seed(1))
loader = DataLoader(train_set, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(4))
heads = [*model.kind.parameters(), *model.rise.parameters(), *model.depth.parameters()]
optimizer = torch.optim.NAdam(
    [
        {"params": model.body.parameters(), "lr": 1e-3},
        {"params": heads, "lr": 4e-3, "weight_decay": 1e-2},
        {"params": [model.doubt], "lr": 1e-2},
    ],
    momentum_decay=5e-3,
)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=[2e-3, 8e-3, 2e-2], total_steps=12, pct_start=0.4
)
model.train()
for step, (picture, kind, depth) in enumerate(loader):
    optimizer.zero_grad()
    logits, guess = model(picture)
    kind_loss = F.cross_entropy(logits, kind, label_smoothing=0.1)
    smooth = box_mean(guess, 3) - box_mean(depth, 3)
    depth_loss = Berhu.apply(guess - depth, torch.tensor(0.4)).mean() + smooth.square().mean()
    model.balanced(kind_loss, depth_loss).backward()
    nn.utils.clip_grad_value_(model.parameters(), 0.2)
    optimizer.step()
    schedule.step()
    print(step, kind_loss.item(), depth_loss.item())
