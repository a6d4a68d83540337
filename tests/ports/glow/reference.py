"""A small Glow: actnorm, 1x1 convolutions by LU and couplings on two levels."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CHANNELS, HEIGHT, WIDTH = 3, 8, 12
NUM_CLASSES = 4
LEVELS, STEPS, HIDDEN = 2, 2, 32
N_BITS = 5
N_BINS = 2**N_BITS
DIMS = CHANNELS * HEIGHT * WIDTH
LOG_SCALE_FACTOR = 3.0
LABEL_WEIGHT = 0.1
BASE_LR, WARMUP_STEPS = 1e-2, 5
BETAS, EPS = (0.9, 0.98), 1e-7
CLIP_VALUE, CLIP_NORM = 0.2, 0.8
POLYAK_DECAY = 0.9


class ActNorm(nn.Module):
    """Scale and bias of each channel; the first batch ever seen sets them."""

    def __init__(self, channels):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.logs = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.initialized = False

    @torch.no_grad()
    def initialize(self, x):
        self.bias.copy_(-x.mean(dim=(0, 2, 3), keepdim=True))
        self.logs.copy_(-torch.log(x.std(dim=(0, 2, 3), keepdim=True) + 1e-6))
        self.initialized = True

    def forward(self, x):
        if not self.initialized:
            self.initialize(x)
        return (x + self.bias) * torch.exp(self.logs)


class InvertibleConv(nn.Module):
    """A 1x1 convolution with weight P L (U + diag(sign exp(log_s)))."""

    def __init__(self, channels):
        super().__init__()
        q = torch.linalg.qr(torch.randn(channels, channels))[0]
        p, lower, upper = torch.linalg.lu(q)
        s = upper.diagonal()
        self.register_buffer("p", p)
        self.register_buffer("sign_s", torch.sign(s))
        self.lower = nn.Parameter(lower.tril(-1))
        self.upper = nn.Parameter(upper.triu(1))
        self.log_s = nn.Parameter(torch.log(torch.abs(s)))

    def weight(self):
        lower = self.lower.tril(-1) + torch.eye(len(self.lower))
        upper = self.upper.triu(1) + torch.diag(self.sign_s * torch.exp(self.log_s))
        return self.p @ lower @ upper

    def forward(self, x):
        return F.conv2d(x, self.weight()[:, :, None, None])


class ZeroConv(nn.Module):
    """Starts at zero, and has a learned log-scale of its outputs."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.logs = nn.Parameter(torch.zeros(outputs, 1, 1))
        nn.init.zeros_(self.conv.weight)
        nn.init.zeros_(self.conv.bias)

    def forward(self, x):
        return self.conv(x) * torch.exp(self.logs * LOG_SCALE_FACTOR)


class FlowStep(nn.Module):
    def __init__(self, channels, hidden):
        super().__init__()
        self.actnorm = ActNorm(channels)
        self.invconv = InvertibleConv(channels)
        self.block = nn.Sequential(
            nn.Conv2d(channels // 2, hidden, 3, padding=1, bias=False),
            ActNorm(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 1, bias=False),
            ActNorm(hidden),
            nn.ReLU(),
            ZeroConv(hidden, channels),
        )

    def forward(self, x, log_det):
        pixels = x.shape[2] * x.shape[3]
        x = self.actnorm(x)
        log_det = log_det + pixels * self.actnorm.logs.sum()

        x = self.invconv(x)
        log_det = log_det + pixels * self.invconv.log_s.sum()

        x1, x2 = x.chunk(2, dim=1)
        h = self.block(x1)
        shift, raw = h[:, 0::2], h[:, 1::2]
        x2 = (x2 + shift) * torch.sigmoid(raw + 2.0)
        log_det = log_det + F.logsigmoid(raw + 2.0).sum(dim=(1, 2, 3))
        return torch.cat([x1, x2], dim=1), log_det


def squeeze(x):
    """(n, c, h, w) -> (n, 4 c, h / 2, w / 2)."""
    n, c, h, w = x.shape
    x = x.view(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4)
    return x.reshape(n, 4 * c, h // 2, w // 2)


def gaussian_log_prob(x, mean, log_var):
    log_prob = -0.5 * (
        math.log(2 * math.pi) + log_var + (x - mean) ** 2 / torch.exp(log_var)
    )
    return log_prob.sum(dim=(1, 2, 3))


class Glow(nn.Module):
    def __init__(self):
        super().__init__()
        channels = CHANNELS
        self.levels, self.priors = nn.ModuleList(), nn.ModuleList()
        for level in range(LEVELS):
            channels *= 4
            steps = [FlowStep(channels, HIDDEN) for _ in range(STEPS)]
            self.levels.append(nn.ModuleList(steps))
            if level < LEVELS - 1:
                channels //= 2
                self.priors.append(ZeroConv(channels, 2 * channels))
        self.class_prior = nn.Embedding(NUM_CLASSES, 2 * channels)
        self.classifier = nn.Linear(channels, NUM_CLASSES)

    def forward(self, x, label):
        log_det = x.new_zeros(len(x))
        log_prob = x.new_zeros(len(x))
        for level, steps in enumerate(self.levels):
            x = squeeze(x)
            for step in steps.children():
                x, log_det = step(x, log_det)
            if level < len(self.priors):
                x, z = x.chunk(2, dim=1)
                h = self.priors[level](x)
                mean, log_var = h[:, 0::2], h[:, 1::2]
                log_prob = log_prob + gaussian_log_prob(z, mean, log_var)

        mean, log_var = self.class_prior(label)[:, :, None, None].chunk(2, dim=1)
        log_prob = log_prob + gaussian_log_prob(x, mean, log_var)
        logits = self.classifier(x.mean(dim=(2, 3)))
        nll = DIMS * math.log(N_BINS) - log_prob - log_det
        return {"nll": nll, "logits": logits}


class PolyakAverage(nn.Module):
    def __init__(self, net):
        super().__init__()
        for name, p in net.named_parameters():
            self.register_buffer(name.replace(".", "_"), p.detach().clone())

    @torch.no_grad()
    def update(self, net):
        for name, p in net.named_parameters():
            average = getattr(self, name.replace(".", "_"))
            average.mul_(POLYAK_DECAY).add_(p, alpha=1 - POLYAK_DECAY)


def model():
    """As after some steps: what starts at zero is a little away from it."""
    torch.manual_seed(2212)
    net = Glow()
    first = batches()[0]
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, ZeroConv):
                module.conv.weight.normal_(0, 0.04)
                module.conv.bias.normal_(0, 0.2)
                module.logs.normal_(0, 0.15)
            if isinstance(module, InvertibleConv):
                module.log_s.add_(0.1 * torch.randn_like(module.log_s))
        net.class_prior.weight.normal_(0, 0.4)
        net.classifier.weight.normal_(0, 0.5)
        net(dequantize(first["image"], first["noise"]), first["label"])
        for module in net.modules():
            if isinstance(module, ActNorm):
                module.bias.add_(0.1 * torch.randn_like(module.bias))
                module.logs.add_(0.1 * torch.randn_like(module.logs))
    net.average = PolyakAverage(net)
    return net


def batches():
    """Waves whose direction and colour depend on the class; noise within a bin."""
    generator = torch.Generator().manual_seed(2213)
    rows, columns = torch.arange(8.0)[:, None], torch.arange(12.0)
    made = []
    for size in (6, 5, 6):
        label = torch.randint(0, 4, (size,), generator=generator)
        phase, height, grey = torch.rand(3, size, 1, 1, 1, generator=generator)
        turn = (0.4 + 0.6 * label).view(size, 1, 1, 1)
        wave = torch.cos(turn) * rows + torch.sin(turn) * columns
        colour = torch.arange(3.0)[:, None, None] * (1 + label.view(size, 1, 1, 1))
        image = (
            80
            + 80 * grey
            + (30 + 40 * height) * torch.sin(0.9 * wave + 6.28 * phase + 0.7 * colour)
        )
        image = image + 14 * torch.randn(size, 3, 8, 12, generator=generator)
        noise = torch.rand(size, 3, 8, 12, generator=generator)
        image = image.clamp(0, 255).to(torch.uint8)
        made.append({"image": image, "noise": noise, "label": label})
    return made


def dequantize(image, noise):
    """Bytes -> bins with noise, from -0.5 to 0.5."""
    bins = torch.floor(image.float() / 2 ** (8 - N_BITS))
    return (bins + noise) / N_BINS - 0.5


def forward(net, batch):
    return net(dequantize(batch["image"], batch["noise"]), batch["label"])


def loss(output, batch):
    bits_per_dim = output["nll"].mean() / (DIMS * math.log(2))
    label_loss = F.cross_entropy(output["logits"], batch["label"])
    return bits_per_dim + LABEL_WEIGHT * label_loss


class WarmupAdamax(torch.optim.Adamax):
    """Clips by value and then by norm; the average follows each step."""

    def __init__(self, net):
        self.net = net
        self.done = 0
        super().__init__(net.parameters(), lr=BASE_LR, betas=BETAS, eps=EPS)

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_value_(params, CLIP_VALUE)
        nn.utils.clip_grad_norm_(params, CLIP_NORM)
        self.done += 1
        for group in self.param_groups:
            group["lr"] = BASE_LR * min(1.0, self.done / WARMUP_STEPS)
        result = super().step(closure)
        self.net.average.update(self.net)
        return result


def optimizer(net):
    return WarmupAdamax(net)
