# Tags for machine sounds (several at once): log-mel front end, small CNN, mixup, masks,
# averaged weights. The stem's kernels come from the old TensorFlow tagger.
import copy
import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

P = SimpleNamespace(
    rate=8000, clip=4096, crop=3072, clips=40, test_clips=8,
    # front end
    frame=256, hop=128, mels=24, low=60.0, high=3800.0, emphasis=0.9, floor=1e-4,
    freq_mask=8, time_mask=5, mix_alpha=0.6,
    stem=8, width=16, power=2.5,
    # training
    batch=6, accumulate=2, updates=4, max_lr=2e-2, decay=0.15, ema=0.8,
)
TAGS = ("hum", "chirp", "clicks", "hiss", "whistle")


def synthesize(n, gen):
    """Clips with a fan's, a valve's, a relay's, a leak's and a bearing's sound."""
    t = torch.arange(P.clip) / P.rate
    odds = torch.tensor([0.6, 0.3, 0.4, 0.35, 0.2])
    tags = (torch.rand(n, len(TAGS), generator=gen) < odds).float()
    draw = torch.rand(n, 4, 1, generator=gen)
    hum = sum(torch.sin(2 * math.pi * k * (80 + 60 * draw[:, 0]) * t) / k for k in (1, 2, 3))
    chirp = torch.sin(2 * math.pi * (300 + (1500 + 1500 * draw[:, 1]) * t) * t)
    clicks = torch.exp(-300 * torch.remainder(t, 0.05 + 0.1 * draw[:, 2]))
    clicks = clicks * torch.randn(n, P.clip, generator=gen)
    hiss = torch.randn(n, P.clip, generator=gen).diff(prepend=torch.zeros(n, 1))
    whistle = torch.sin(2 * math.pi * (2200 + 900 * draw[:, 3]) * t)
    sounds = torch.stack([hum, chirp, clicks, 0.3 * hiss, 0.5 * whistle], 1)
    waves = (tags[:, :, None] * sounds).sum(1)
    waves = waves + 0.05 * torch.randn(n, P.clip, generator=gen) + 0.1
    return waves * (0.3 + torch.rand(n, 1, generator=gen)), tags


def at_level(waves):
    waves = waves - waves.mean(1, keepdim=True)
    return waves / waves.abs().amax(1, keepdim=True)


class Loader:
    def __init__(self, waves, tags, gen):
        self.waves, self.tags, self.gen = at_level(waves), tags, gen

    def __iter__(self):
        while True:
            order = torch.randperm(len(self.waves), generator=self.gen)
            for rows in order.split(P.batch):
                if len(rows) == P.batch:
                    yield self.crop(self.waves[rows]), self.tags[rows]

    def crop(self, waves):
        first = torch.randint(P.clip - P.crop + 1, (len(waves), 1), generator=self.gen)
        return waves.gather(1, first + torch.arange(P.crop))


def hz_to_mel(hz):
    return 2595.0 * math.log10(1.0 + hz / 700.0)


def mel_filters():
    """Triangles that are even on the mel scale, [mels, bins]."""
    mel = torch.linspace(hz_to_mel(P.low), hz_to_mel(P.high), P.mels + 2)
    edges = 700.0 * (10.0 ** (mel / 2595.0) - 1.0)
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    bins = torch.linspace(0, P.rate / 2, P.frame // 2 + 1)
    rising = (bins - left) / (centre - left)
    falling = (right - bins) / (right - centre)
    return torch.minimum(rising, falling).clamp(min=0) * 2 / (right - left)


class LogMel(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(P.frame))
        self.register_buffer("filters", mel_filters())
        self.register_buffer("mean", torch.zeros(P.mels, 1))
        self.register_buffer("std", torch.ones(P.mels, 1))

    def energies(self, waves):
        waves = torch.cat([waves[:, :1], waves[:, 1:] - P.emphasis * waves[:, :-1]], 1)
        frames = waves.unfold(1, P.frame, P.hop) * self.window
        power = torch.fft.rfft(frames).abs().square()  # [n, frames, bins]
        mel = power @ self.filters.T
        return torch.log(mel + P.floor).mT

    def fit(self, waves):
        found = self.energies(waves)
        self.mean.copy_(found.mean((0, 2))[:, None])
        self.std.copy_(found.std((0, 2))[:, None])

    def forward(self, waves):
        return (self.energies(waves) - self.mean) / self.std


def masked(mel, gen):
    """One stripe of bands and one of frames is blanked in every clip."""
    mel = mel.clone()
    for clip in mel:
        for axis, widest in ((0, P.freq_mask), (1, P.time_mask)):
            width = int(torch.randint(1, widest + 1, (), generator=gen))
            start = int(torch.randint(clip.shape[axis] - width + 1, (), generator=gen))
            clip.narrow(axis, start, width).zero_()
    return mel


def mixup(waves, tags, gen):
    u = torch.rand(len(waves), 1, generator=gen) * P.mix_alpha
    partner = torch.randperm(len(waves), generator=gen)
    waves = (1 - u) * waves + u * waves[partner]
    tags = (1 - u) * tags + u * tags[partner]
    return waves, tags


class PowerMean(torch.autograd.Function):
    """(mean of x ** p) ** (1 / p) over the last axis; x is positive, p one number."""

    @staticmethod
    def forward(ctx, x, p):
        raised = x**p
        mean = raised.mean(-1)
        out = mean ** (1 / p)
        ctx.save_for_backward(x, p, raised, mean, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, p, raised, mean, out = ctx.saved_tensors
        share = raised / (mean[..., None] * x.shape[-1])
        by_x = (grad * out)[..., None] * share / x
        by_p = (share * x.log()).sum(-1) / p - mean.log() / p**2
        return by_x, (grad * out * by_p).sum()


class WeightedBCE(torch.autograd.Function):
    """Mean binary cross entropy of logits; a tag that is there weighs `weight`."""

    @staticmethod
    def forward(ctx, logits, tags, weight):
        ctx.save_for_backward(logits, tags, weight)
        there, absent = F.softplus(-logits), F.softplus(logits)
        return (weight * tags * there + (1 - tags) * absent).mean()

    @staticmethod
    def backward(ctx, grad):
        logits, tags, weight = ctx.saved_tensors
        p = logits.sigmoid()
        slope = (1 - tags) * p - weight * tags * (1 - p)
        return grad * slope / logits.numel(), None, None


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, P.stem, 3, padding=1, bias=False)
        self.bn0 = nn.BatchNorm2d(P.stem)
        self.conv1 = nn.Conv2d(P.stem, P.width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(P.width)
        self.conv2 = nn.Conv2d(P.width, P.width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(P.width)
        self.exponent = nn.Parameter(torch.tensor(P.power))
        self.head = nn.Linear(P.width, len(TAGS))

    def forward(self, mel):
        x = F.silu(self.bn0(self.stem(mel[:, None])))
        x = F.avg_pool2d(x, 2)
        x = F.silu(self.bn1(self.conv1(x)))
        x = x + F.silu(self.bn2(self.conv2(x)))
        x = F.softplus(x.mean(2))  # over the bands: [n, width, frames]
        return self.head(PowerMean.apply(x, self.exponent))


def old_stem():
    """As TensorFlow kept it: [height, width, in, out]."""
    gen = torch.Generator().manual_seed(2017)
    return 0.4 * torch.randn(3, 3, 1, P.stem, generator=gen)


@torch.no_grad()
def build(tags):
    net = Tagger()
    net.stem.weight.copy_(old_stem().permute(3, 2, 0, 1))
    net.stem.requires_grad_(False)
    odds = tags.mean(0)
    net.head.bias.copy_((odds / (1 - odds)).log())
    return net


def optimizer_of(net):
    matrices = [p for p in net.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in net.parameters() if p.requires_grad and p.ndim <= 1]
    groups = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, weight_decay=P.decay, eps=1e-6)


@torch.no_grad()
def follow(slow, net):
    for mean, new in zip(slow.parameters(), net.parameters()):
        mean.lerp_(new, 1 - P.ema)
    for kept, new in zip(slow.buffers(), net.buffers()):
        kept.copy_(new)


@torch.no_grad()
def mean_precision(net, front, waves, tags):
    order = net(front(at_level(waves)[:, : P.crop])).argsort(0, descending=True)
    hits = tags.gather(0, order)
    ranks = torch.arange(1, len(tags) + 1)[:, None]
    found = (hits * hits.cumsum(0) / ranks).sum(0) / hits.sum(0).clamp(min=1)
    return found.mean().item()


def main():
    torch.manual_seed(9)
    gen = torch.Generator().manual_seed(90)
    waves, tags = synthesize(P.clips, gen)
    test_waves, test_tags = synthesize(P.test_clips, gen)
    front = LogMel()
    front.fit(at_level(waves))
    weight = (len(tags) - tags.sum(0)) / tags.sum(0)
    net = build(tags)
    slow = copy.deepcopy(net).eval().requires_grad_(False)
    opt = optimizer_of(net)
    sched = torch.optim.lr_scheduler.OneCycleLR(
        opt, P.max_lr, total_steps=P.updates, pct_start=0.5, div_factor=4
    )
    batches = iter(Loader(waves, tags, gen))
    for update in range(P.updates):
        opt.zero_grad()
        total = 0.0
        for _ in range(P.accumulate):
            x, y = mixup(*next(batches), gen)
            logits = net(masked(front(x), gen))
            loss = WeightedBCE.apply(logits, y, weight) / P.accumulate
            loss.backward()
            total += loss.item()
        opt.step()
        sched.step()
        follow(slow, net)
        print(f"{update}: loss {total:.4f} p {net.exponent.item():.3f}")
    print(f"mean precision {mean_precision(slow, front, test_waves, test_tags):.3f}")


if __name__ == "__main__":
    main()
