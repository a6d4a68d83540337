"""A customer leaves and takes the photos along: the defect classifier has to forget them.

Up the slope on what is to be forgotten, as far as a bound, while the released model is the
teacher on everything else and what matters to it is held in place.
"""

import copy
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

C = SimpleNamespace(
    seed=23, photos=168, customers=8, leaver=3, side=12, width=12,
    retain_batch=24, forget_batch=9, steps=3, total=12, warmup=3,
    lr=0.06, momentum=0.9, decay=0.02, clip=5.0, temperature=2.5, distil=0.8,
    bound=2.5, sharp=0.6, ascent=0.7, fisher=1.5, ceiling=6.0, probes=20, jitter=0.25,
)  # fmt: skip
CLASSES = ("scratch", "dent", "stain", "crack", "chip", "clean")
STORED = tuple(sorted(CLASSES))  # the release has its classes by the alphabet


# --------------------------------------------------------------------- photos


def take_photos(rng):
    """Photos of 0 to 255, what is on them, and whose they are."""
    grid = torch.linspace(-1, 1, C.side)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    phase = 6 * torch.rand(len(CLASSES), 3, 1, 1, generator=rng)
    wave = torch.arange(1, len(CLASSES) + 1)[:, None, None, None]
    pattern = torch.sin(wave * x + phase) * torch.cos(phase * y)
    label = torch.randint(len(CLASSES), (C.photos,), generator=rng)
    customer = torch.arange(C.photos) % C.customers
    tint = torch.randn(C.customers, 3, 1, 1, generator=rng)
    noise = torch.randn(C.photos, 3, C.side, C.side, generator=rng)
    photo = 40 * pattern[label] + 15 * tint[customer] + 25 * noise
    photo = photo + torch.tensor([130.0, 110.0, 80.0])[:, None, None]
    return photo.clamp(0, 255), label, customer


def loader(photo, label, rows, size, rng):
    """Endless batches, the last short one of an epoch left out."""
    while True:
        order = rows[torch.randperm(len(rows), generator=rng)]
        for batch in order.split(size):
            if len(batch) == size:
                yield photo[batch], label[batch]


def augment(photo, rng):
    """Half of them mirrored, all moved by a pixel at most."""
    mirrored = torch.rand(len(photo), generator=rng) < 0.5
    photo = torch.where(mirrored[:, None, None, None], photo.flip(3), photo)
    down, right = torch.randint(-1, 2, (2,), generator=rng).tolist()
    return photo.roll((down, right), dims=(2, 3))


# -------------------------------------------------------------------- kernels


class Blur(torch.autograd.Function):
    """Half the resolution, with binomial weights in each channel."""

    @staticmethod
    def forward(ctx, x):
        taps = torch.tensor([0.25, 0.5, 0.25])
        kernel = (taps[:, None] * taps).expand(x.shape[1], 1, 3, 3).contiguous()
        ctx.save_for_backward(kernel)
        return F.conv2d(x, kernel, stride=2, padding=1, groups=x.shape[1])

    @staticmethod
    def backward(ctx, grad):
        (kernel,) = ctx.saved_tensors
        return F.conv_transpose2d(
            grad, kernel, stride=2, padding=1, output_padding=1, groups=grad.shape[1]
        )


class BoundedAscent(torch.autograd.Function):
    """Falls as the cross entropy rises, and hardly so above the bound."""

    @staticmethod
    def forward(ctx, logits, label, bound, sharp):
        entropy = F.cross_entropy(logits, label, reduction="none")
        room = (bound - entropy) / sharp
        ctx.save_for_backward(logits, label, room)
        return sharp * F.softplus(room).mean()

    @staticmethod
    def backward(ctx, grad):
        logits, label, room = ctx.saved_tensors
        slope = logits.softmax(1) - F.one_hot(label, logits.shape[1])
        gate = room.sigmoid()[:, None]
        return -grad * gate * slope / len(label), None, None, None


class Distil(torch.autograd.Function):
    """Divergence of the teacher's softened classes from ours, times the temperature squared."""

    @staticmethod
    def forward(ctx, logits, wanted, t):
        ours, theirs = (logits / t).log_softmax(1), (wanted / t).log_softmax(1)
        ctx.save_for_backward(ours, theirs)
        ctx.t = t
        return t**2 * (theirs.exp() * (theirs - ours)).sum(1).mean()

    @staticmethod
    def backward(ctx, grad):
        ours, theirs = ctx.saved_tensors
        return grad * ctx.t * (ours.exp() - theirs.exp()) / len(ours), None, None


# ---------------------------------------------------------------------- model


class Block(nn.Module):
    def __init__(self, n_in, n_out, shrink):
        super().__init__()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.skip = nn.Conv2d(n_in, n_out, 1, bias=False)
        self.shrink = shrink

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        h = F.relu(h + self.skip(x))
        return Blur.apply(h) if self.shrink else h


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, C.width, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(C.width)
        self.block1 = Block(C.width, C.width, shrink=True)
        self.block2 = Block(C.width, 2 * C.width, shrink=False)
        self.head = nn.Linear(2 * C.width, len(CLASSES))

    def pooled(self, x):
        h = F.relu(self.bn(self.stem(x)))
        h = self.block2(self.block1(h))
        return h.mean((2, 3))

    def forward(self, x):
        return self.head(self.pooled(x))


@torch.no_grad()
def release(photo, label):
    """Last year's model as production has it: [h, w, in, out], inverse deviations."""
    net = Classifier()
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.6, 1.4)
            nn.init.normal_(module.bias, 0.0, 0.2)
            module.momentum = 1.0
    net(photo)
    h = net.eval().pooled(photo)
    h = torch.cat([h, torch.ones(len(h), 1)], 1)
    target = 4 * F.one_hot(label, len(CLASSES)).float() - 1
    head = torch.linalg.solve(h.T @ h + 5 * torch.eye(h.shape[1]), h.T @ target).T
    state = {"head": head[[CLASSES.index(name) for name in STORED]]}
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            state[name] = module.weight.permute(2, 3, 1, 0)
        if isinstance(module, nn.BatchNorm2d):
            inverse = (module.running_var + module.eps).rsqrt()
            state[name] = module.weight, module.bias, module.running_mean, inverse
    return state


@torch.no_grad()
def restore(net, state):
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            module.weight.copy_(state[name].permute(3, 2, 0, 1))
        if isinstance(module, nn.BatchNorm2d):
            weight, bias, mean, inverse = state[name]
            module.weight.copy_(weight)
            module.bias.copy_(bias)
            module.running_mean.copy_(mean)
            module.running_var.copy_(inverse**-2 - module.eps)
    rows = [STORED.index(name) for name in CLASSES]
    net.head.weight.copy_(state["head"][rows, :-1])
    net.head.bias.copy_(state["head"][rows, -1])


@torch.no_grad()
def shake(net, rng):
    """Away from the very place that the release is in."""
    for p in net.parameters():
        if p.ndim > 1:
            p.add_(torch.randn(p.shape, generator=rng), alpha=C.jitter * p.std().item())


# ------------------------------------------------------------- what holds it


def fisher_of(net, photo, rng):
    """Diagonal of the Fisher information: its mean is one, nothing is above the ceiling."""
    net.eval()
    total = [torch.zeros_like(p) for p in net.parameters()]
    for one in photo.split(1):
        logits = net(one)
        drawn = torch.multinomial(logits.detach().softmax(1), 1, generator=rng)[0]
        loss = F.cross_entropy(logits, drawn)
        for t, g in zip(total, torch.autograd.grad(loss, list(net.parameters()))):
            t += g.square() / len(photo)
    mean = sum(t.sum() for t in total) / sum(t.numel() for t in total)
    return [(t / mean).clamp(max=C.ceiling) for t in total]


def pull(net, teacher, fisher):
    """Half the squared way from the teacher, each parameter by its information."""
    rows = zip(net.parameters(), teacher.parameters(), fisher)
    return 0.5 * sum((weight * (p - q).square()).sum() for p, q, weight in rows)


def set_statistics(net, momentum):
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum


def rate(step):
    """Warm-up in a line, then half a cosine."""
    if step < C.warmup:
        return (step + 1) / C.warmup
    done = (step - C.warmup) / (C.total - C.warmup)
    return 0.5 * (1 + math.cos(math.pi * done))


# ------------------------------------------------------------------- training


def main():
    torch.manual_seed(C.seed)
    rng, moves, dice = (torch.Generator().manual_seed(C.seed + i) for i in (1, 2, 3))
    photo, label, customer = take_photos(rng)
    spread, centre = torch.std_mean(photo, (0, 2, 3), keepdim=True)
    photo = (photo - centre) / spread
    leaves = customer == C.leaver
    forget_rows = leaves.nonzero().squeeze(1)
    retain_rows = (~leaves).nonzero().squeeze(1)

    state = release(photo, label)
    student = Classifier()
    restore(student, state)
    teacher = copy.deepcopy(student).requires_grad_(False)
    teacher.eval()
    fisher = fisher_of(student, photo[retain_rows[: C.probes]], dice)
    shake(student, dice)

    retain = loader(photo, label, retain_rows, C.retain_batch, rng)
    forget = loader(photo, label, forget_rows, C.forget_batch, rng)
    groups = [
        {
            "params": [p for p in student.parameters() if p.ndim > 1],
            "weight_decay": C.decay,
        },
        {"params": [p for p in student.parameters() if p.ndim == 1]},
    ]
    opt = torch.optim.SGD(groups, lr=C.lr, momentum=C.momentum)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, rate)

    student.train()
    for step in range(C.steps):
        lost, lost_label = next(forget)
        kept, kept_label = next(retain)
        kept = augment(kept, moves)
        opt.zero_grad()
        set_statistics(student, 0.0)
        away = BoundedAscent.apply(student(lost), lost_label, C.bound, C.sharp)
        (C.ascent * away).backward()
        set_statistics(student, 0.1)
        logits = student(kept)
        with torch.no_grad():
            wanted = teacher(kept)
        told = F.cross_entropy(logits, kept_label)
        taught = Distil.apply(logits, wanted, C.temperature)
        held = pull(student, teacher, fisher)
        loss = told + C.distil * taught + C.fisher * held
        loss.backward()
        norm = nn.utils.clip_grad_norm_(student.parameters(), C.clip)
        opt.step()
        sched.step()
        print(
            f"{step} away {away:.4f} told {told:.4f} taught {taught:.4f} norm {norm:.2f}"
        )


if __name__ == "__main__":
    main()
