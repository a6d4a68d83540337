"""FixMatch on small pictures: few labels, a mean teacher, guesses aligned with the labels' shares."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

SEED, STEPS, HORIZON = 5, 3, 5
CLASSES, SIDE, WIDTHS = 4, 16, (8, 16, 32)
LABELLED, UNLABELLED, TEST = 48, 240, 64
BATCH, MU, GHOSTS = 8, 4, 2  # labelled pictures, how many more unlabelled ones, parts for the norms
LR, MOMENTUM, DECAY = 0.03, 0.9, 0.02
THRESHOLD, WEIGHT, FOLLOW, EMA = 0.7, 1.0, 0.8, 0.95
IMPRINT = 3.0
SHARES = (0.4, 0.3, 0.2, 0.1)


# ---- pictures


def make_pictures(n, gen, shapes):
    """Bytes, and the class of each."""
    label = torch.multinomial(torch.tensor(SHARES), n, replacement=True, generator=gen)
    light = 0.6 + 0.8 * torch.rand(n, 1, 1, 1, generator=gen)
    noise = torch.randn(n, 3, SIDE, SIDE, generator=gen)
    tint = torch.tensor([30.0, 5.0, -25.0])[:, None, None]
    picture = 120 + tint + 45 * light * shapes[label] + 30 * noise
    return picture.clamp(0, 255).to(torch.uint8), label


def make_shapes(gen):
    coarse = torch.randn(CLASSES, 3, 4, 4, generator=gen)
    fine = F.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    return (fine + fine.flip(3)) / 2**0.5


def batches(n, size, gen):
    """Rows, for ever; each pass in its own order."""
    while True:
        order = torch.randperm(n, generator=gen)
        for start in range(0, n - size + 1, size):
            yield order[start : start + size]


def weak(x, gen, reach=2):
    """Flipped or not, and moved by up to two pixels."""
    n = len(x)
    flip = torch.rand(n, generator=gen) < 0.5
    down, right = torch.randint(2 * reach + 1, (2, n, 1), generator=gen)
    x = torch.where(flip[:, None, None, None], x.flip(3), x)
    padded = F.pad(x, (reach,) * 4, mode="reflect")
    rows, cols = down + torch.arange(SIDE), right + torch.arange(SIDE)
    each = torch.arange(n)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[each, rows[:, :, None], cols[:, None, :]]
    return moved.permute(0, 3, 1, 2)


def strong(x, gen, hole=6):
    """The weak changes, then contrast, light, solarisation and a hole."""
    x = weak(x, gen)
    n = len(x)
    contrast, light, burnt = torch.rand(3, n, 1, 1, 1, generator=gen)
    corner = torch.randint(SIDE - hole + 1, (2, n, 1), generator=gen)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = (x - mean) * (0.4 + 1.2 * contrast) + mean
    x = (x + 0.4 * (light - 0.5)).clamp(0.0, 1.0)
    x = torch.where((burnt < 0.3) & (x > 0.6), 1 - x, x)
    line = torch.arange(SIDE)
    inside = (line >= corner) & (line < corner + hole)
    covered = inside[0][:, :, None] & inside[1][:, None, :]
    return x.masked_fill(covered[:, None], 0.5)


def interleave(x, size):
    """Spread the labelled pictures, which come first, over all parts."""
    return x.reshape(-1, size, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


def undo_interleave(x, size):
    return x.reshape(size, -1, *x.shape[1:]).transpose(0, 1).reshape(x.shape)


# ---- kernels


class BlurDown(torch.autograd.Function):
    """Every second pixel of the picture blurred by 1-2-1."""

    @staticmethod
    def taps(x):
        line = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype) / 4
        return torch.outer(line, line).expand(x.shape[1], 1, 3, 3)

    @staticmethod
    def forward(ctx, x):
        return F.conv2d(x, BlurDown.taps(x), stride=2, padding=1, groups=x.shape[1])

    @staticmethod
    def backward(ctx, grad):
        taps, how = BlurDown.taps(grad), {"stride": 2, "padding": 1, "output_padding": 1}
        return F.conv_transpose2d(grad, taps, groups=grad.shape[1], **how)


class GuessLoss(torch.autograd.Function):
    """Cross entropy with guessed classes; those not sure count as nought, but count."""

    @staticmethod
    def forward(ctx, logits, guess, sure):
        logs = logits.log_softmax(1)
        ctx.save_for_backward(logs, guess, sure)
        return -(logs.gather(1, guess[:, None])[:, 0] * sure).sum() / len(guess)

    @staticmethod
    def backward(ctx, grad):
        logs, guess, sure = ctx.saved_tensors
        slope = logs.exp() - F.one_hot(guess, logs.shape[1])
        return grad * slope * sure[:, None] / len(guess), None, None


# ---- net


class Block(nn.Module):
    """Pre-activated, two convolutions; narrows the picture where it widens the channels."""

    def __init__(self, n_in, n_out, down):
        super().__init__()
        self.bn1 = nn.BatchNorm2d(n_in)
        self.conv1 = nn.Conv2d(n_in, n_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(n_out)
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.short = nn.Conv2d(n_in, n_out, 1, bias=False) if down else None
        self.down = down

    def forward(self, x):
        a = F.leaky_relu(self.bn1(x), 0.1)
        if self.down:
            a = BlurDown.apply(a)
            x = self.short(a)
        a = self.conv1(a)
        a = F.leaky_relu(self.bn2(a), 0.1)
        return x + self.conv2(a)


class WideResNet(nn.Module):
    def __init__(self, centre, spread):
        super().__init__()
        self.register_buffer("centre", centre)
        self.register_buffer("spread", spread)
        self.stem = nn.Conv2d(3, WIDTHS[0], 3, padding=1, bias=False)
        pairs = zip((WIDTHS[0], *WIDTHS), WIDTHS)
        self.blocks = nn.ModuleList([Block(i, o, down=i != o) for i, o in pairs])
        self.bn = nn.BatchNorm2d(WIDTHS[-1])
        self.head = nn.Linear(WIDTHS[-1], CLASSES)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, a=0.1, mode="fan_out")

    def features(self, x):
        x = self.stem((x - self.centre) / self.spread)
        for block in self.blocks:
            x = block(x)
        return F.leaky_relu(self.bn(x), 0.1).mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


class Aligner(nn.Module):
    """Probabilities as they were if the classes had the labels' shares."""

    def __init__(self, target):
        super().__init__()
        self.register_buffer("target", target)
        self.register_buffer("seen", torch.full_like(target, 1 / len(target)))

    def forward(self, prob):
        self.seen.mul_(FOLLOW).add_(prob.mean(0), alpha=1 - FOLLOW)
        aligned = prob * (self.target / self.seen)
        return aligned / aligned.sum(1, keepdim=True)


@torch.no_grad()
def imprint(net, pictures, label, shares):
    """Norms see the labelled pictures; the head begins as the centres of the classes."""
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    for part in pictures.split(12):
        net(part)
    for norm in norms:
        norm.momentum = 0.1
    net.eval()
    features = net.features(pictures)
    middle = features.mean(0)
    centres = torch.stack([features[label == k].mean(0) for k in range(CLASSES)])
    weight = IMPRINT * F.normalize(centres - middle, dim=1)
    net.head.weight.copy_(weight)
    net.head.bias.copy_(shares.log() - weight @ middle)
    net.train()


@torch.no_grad()
def follow(teacher, net, step):
    keep = min(EMA, (1 + step) / (4 + step))
    for t, s in zip(teacher.state_dict().values(), net.state_dict().values()):
        if t.is_floating_point():
            t.lerp_(s, 1 - keep)
        else:
            t.copy_(s)


# ---- training


def main():
    torch.manual_seed(SEED)
    gen = torch.Generator().manual_seed(SEED + 1)
    shapes = make_shapes(gen)
    few, label = make_pictures(LABELLED, gen, shapes)
    many, _ = make_pictures(UNLABELLED, gen, shapes)
    test, test_label = make_pictures(TEST, gen, shapes)
    few, many, test = (x.float() / 255 for x in (few, many, test))

    centre = many.mean((0, 2, 3))[:, None, None]
    spread = many.var((0, 2, 3)).sqrt()[:, None, None]
    shares = (torch.bincount(label, minlength=CLASSES) + 1.0) / (LABELLED + CLASSES)
    net = WideResNet(centre, spread)
    aligner = Aligner(shares)
    imprint(net, few, label, shares)
    teacher = copy.deepcopy(net).requires_grad_(False)
    teacher.eval()

    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors}]
    opt = torch.optim.SGD(groups, LR, momentum=MOMENTUM, nesterov=True)
    sched = LambdaLR(opt, lambda step: math.cos(7 * math.pi * step / (16 * HORIZON)))

    few_rows, many_rows = batches(LABELLED, BATCH, gen), batches(UNLABELLED, MU * BATCH, gen)
    for step in range(STEPS):
        rows, others = next(few_rows), next(many_rows)
        x, y = weak(few[rows], gen), label[rows]
        easy, hard = weak(many[others], gen), strong(many[others], gen)

        with torch.no_grad():
            prob = aligner(teacher(easy).softmax(1))
            confidence, guess = prob.max(1)
            sure = (confidence >= THRESHOLD).float()

        mixed = interleave(torch.cat([x, hard]), MU + 1)
        logits = torch.cat([net(part) for part in mixed.chunk(GHOSTS)])
        logits = undo_interleave(logits, MU + 1)
        known, guessed = logits.split([BATCH, MU * BATCH])
        supervised = F.cross_entropy(known, y)
        consistent = GuessLoss.apply(guessed, guess, sure)
        loss = supervised + WEIGHT * consistent

        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        follow(teacher, net, step)
        print(f"{step} loss {loss:.4f} guesses {consistent:.4f} sure {sure.mean():.2f}")

    with torch.no_grad():
        right = teacher(test).argmax(1) == test_label
    print(f"accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
