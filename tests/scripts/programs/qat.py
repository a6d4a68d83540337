# Wake words on the microcontroller: int4 weights, int8 activations, trained with both in place.
# The float network comes from the archive; it is where this one starts, and its teacher.
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SEED, CLIPS, BATCH, STEPS = 42, 96, 16, 3
WORDS, BANDS, FRAMES = 6, 12, 16
WIDTH, W_BITS, A_BITS = 16, 4, 8
LR, SLOW, DECAY, WARMUP, TOTAL = 6e-3, 0.2, 0.05, 3, 20
CLIP, EMA, OBSERVE, HEAT, TEACH = 0.8, 0.95, 0.8, 3.0, 0.6


# --- clips


def record_clips(n, rng):
    """Power by band and frame, and the word: two tones that rise or fall."""
    word = torch.randint(WORDS, (n,), generator=rng)
    t = torch.linspace(0, 1, FRAMES)
    low = 2.0 + 1.2 * word[:, None] + 2.5 * t * (1 - 2.0 * (word[:, None] % 2))
    high = 9.0 - 0.8 * word[:, None] - 1.5 * t
    band = torch.arange(BANDS)[None, :, None]
    power = 40 * torch.exp(-((band - low[:, None]) ** 2))
    power += 15 * torch.exp(-((band - high[:, None]) ** 2) / 2)
    loud = torch.exp(0.7 * torch.randn(n, 1, 1, generator=rng))
    hiss = -torch.rand(n, BANDS, FRAMES, generator=rng).clamp(min=1e-4).log()
    return loud * power + hiss, word


def features(power, mean, std):
    """Log power, standardised by band."""
    return ((torch.log1p(power) - mean) / std).unsqueeze(1)


def shift_in_time(x, rng):
    by = torch.randint(-3, 4, (len(x),), generator=rng)
    return torch.stack([clip.roll(int(n), dims=-1) for clip, n in zip(x, by)])


# --- quantizers


class LSQ(torch.autograd.Function):
    """Signed weights on a grid with a learned step for each channel (Esser et al., 2020)."""

    @staticmethod
    def forward(ctx, w, step, bits):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
        s = step.view(-1, *[1] * (w.dim() - 1))
        v = w / s
        ctx.save_for_backward(v)
        ctx.bounds = low, high
        return v.round().clamp(low, high) * s

    @staticmethod
    def backward(ctx, grad):
        (v,) = ctx.saved_tensors
        low, high = ctx.bounds
        inside = (v > low) & (v < high)
        slope = torch.where(inside, v.round() - v, v.clamp(low, high))
        scale = 1.0 / math.sqrt(v[0].numel() * high)
        d_step = (grad * slope).flatten(1).sum(1) * scale
        return grad * inside, d_step, None


class Affine(torch.autograd.Function):
    """Unsigned grid with a zero point; straight through where it isn't clamped."""

    @staticmethod
    def forward(ctx, x, scale, zero, top):
        q = (x / scale).round() + zero
        ctx.save_for_backward((q >= 0) & (q <= top))
        return (q.clamp(0, top) - zero) * scale

    @staticmethod
    def backward(ctx, grad):
        (inside,) = ctx.saved_tensors
        return grad * inside, None, None, None


class Observer(nn.Module):
    """Moving average of the range, and the grid that it makes."""

    def __init__(self, bits=A_BITS):
        super().__init__()
        self.top = 2**bits - 1
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))
        self.fresh, self.on = True, True

    def forward(self, x):
        if self.training:
            low, high = x.detach().aminmax()
            keep = 0.0 if self.fresh else OBSERVE
            self.low.mul_(keep).add_(low, alpha=1 - keep)
            self.high.mul_(keep).add_(high, alpha=1 - keep)
            self.fresh = False
        if not self.on:
            return x
        low, high = self.low.clamp(max=0), self.high.clamp(min=0)  # nought is on the grid
        scale = ((high - low) / self.top).clamp(min=1e-8)
        zero = (-low / scale).round().clamp(0, self.top)
        return Affine.apply(x, scale, zero, self.top)


# --- network


class FoldedConv(nn.Module):
    """Convolution and batch norm, quantized as they will be on the chip: as one."""

    def __init__(self, n_in, n_out, kernel, groups=1):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in // groups, kernel, kernel))
        self.gamma = nn.Parameter(torch.ones(n_out))
        self.beta = nn.Parameter(torch.zeros(n_out))
        self.step = nn.Parameter(torch.ones(n_out))
        self.register_buffer("mean", torch.zeros(n_out))
        self.register_buffer("var", torch.ones(n_out))
        self.how = {"padding": kernel // 2, "groups": groups}
        self.on = True
        nn.init.kaiming_normal_(self.weight, nonlinearity="relu")

    def folded(self, var):
        return self.weight * (self.gamma * (var + 1e-5).rsqrt()).view(-1, 1, 1, 1)

    def forward(self, x):
        if self.training:
            raw = F.conv2d(x, self.weight, **self.how)
            var, mean = torch.var_mean(raw, (0, 2, 3), correction=0)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.var.lerp_(var, 0.1)
        else:
            mean, var = self.mean, self.var
        weight = self.folded(var)
        bias = self.beta - mean * self.gamma * (var + 1e-5).rsqrt()
        if self.on:
            weight = LSQ.apply(weight, self.step, W_BITS)
        return F.conv2d(x, weight, bias, **self.how)


class Separable(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.deep = FoldedConv(width, width, 3, groups=width)
        self.point = FoldedConv(width, width, 1)
        self.see_deep, self.see_sum = Observer(), Observer()

    def forward(self, x):
        h = self.see_deep(F.relu(self.deep(x)))
        h = self.point(h)
        return self.see_sum(F.relu(x + h))


class Spotter(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.see_input, self.see_stem = Observer(), Observer()
        self.stem = FoldedConv(1, width, 3)
        self.blocks = nn.ModuleList([Separable(width), Separable(width)])
        self.head = nn.Linear(width, WORDS)

    def forward(self, x):
        h = self.see_stem(F.relu(self.stem(self.see_input(x))))
        h = F.avg_pool2d(self.blocks[0](h), 2)
        h = self.blocks[1](h)
        return self.head(h.amax(3).mean(2))

    def parts(self, kind):
        return [m for m in self.modules() if isinstance(m, kind)]


# --- from the archive


def archive(rng):
    """The float network as the other framework keeps it: kernels [height, width, in, out]."""
    source, kept = Spotter(WIDTH), {}
    for name, value in source.state_dict().items():
        if name.endswith(("step", "low", "high")):
            continue
        if name.endswith("var"):
            value = 1.5 + 2.0 * torch.rand(value.shape, generator=rng)
            kept[name.replace("var", "deviation")] = value.sqrt()
            continue
        if name.endswith(("mean", "beta", "bias")):
            value = 0.3 * torch.randn(value.shape, generator=rng)
        if name.endswith("gamma"):
            value = value + 0.3 * torch.randn(value.shape, generator=rng)
        kept[name] = value.permute(2, 3, 1, 0).contiguous() if value.dim() == 4 else value
    return kept


def convert(kept):
    state = {}
    for name, value in kept.items():
        if value.dim() == 4:
            value = value.permute(3, 2, 0, 1)
        if name.endswith("deviation"):
            name, value = name.replace("deviation", "var"), value.square()
        state[name] = value
    return state


@torch.no_grad()
def start_steps(net):
    """Twice the mean size of a folded weight, by the root of the grid's end."""
    for conv in net.parts(FoldedConv):
        size = conv.folded(conv.var).abs().mean((1, 2, 3))
        conv.step.copy_(2 * size / math.sqrt(2 ** (W_BITS - 1) - 1))


def set_quantized(net, on):
    for part in net.parts((FoldedConv, Observer)):
        part.on = on


@torch.no_grad()
def calibrate(net, x):
    """Ranges of the activations, before anything is rounded. Moments stay as they are."""
    set_quantized(net, False)
    net.eval()
    for observer in net.parts(Observer):
        observer.train()
    for few in x.split(6):
        net(few)
    set_quantized(net, True)


# --- training


def groups_of(net):
    """Weights with decay; steps, norms and biases without, and slower."""
    heavy = [p for p in net.parameters() if p.dim() > 1]
    light = [p for p in net.parameters() if p.dim() == 1]
    return [{"params": heavy, "weight_decay": DECAY}, {"params": light, "lr": LR * SLOW}]


def rate(n):
    if n < WARMUP:
        return (n + 1) / WARMUP
    return 0.5 * (1 + math.cos(math.pi * (n - WARMUP) / (TOTAL - WARMUP)))


@torch.no_grad()
def follow(average, net, n):
    keep = min(EMA, (1 + n) / (4 + n))
    for a, p in zip(average.parameters(), net.parameters()):
        a.mul_(keep).add_(p, alpha=1 - keep)
    for a, b in zip(average.buffers(), net.buffers()):
        a.copy_(b)


def loss_of(logits, taught, word):
    soft = (taught / HEAT).softmax(1)
    kl = F.kl_div((logits / HEAT).log_softmax(1), soft, reduction="batchmean")
    return (1 - TEACH) * F.cross_entropy(logits, word) + TEACH * HEAT**2 * kl


torch.manual_seed(SEED)
rng = torch.Generator().manual_seed(SEED + 1)
power, word = record_clips(CLIPS, rng)
std, mean = torch.std_mean(torch.log1p(power), (0, 2), keepdim=True)
clips = TensorDataset(features(power, mean, std), word)
loader = DataLoader(clips, BATCH, shuffle=True, generator=rng)

net = Spotter(WIDTH)
net.load_state_dict(convert(archive(rng)), strict=False)
teacher = copy.deepcopy(net).eval().requires_grad_(False)
set_quantized(teacher, False)
start_steps(net)
calibrate(net, features(power[:72], mean, std))
average = copy.deepcopy(net).requires_grad_(False)

opt = torch.optim.AdamW(groups_of(net), LR, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
sched = torch.optim.lr_scheduler.LambdaLR(opt, rate)
stream = iter(loader)
net.train()
for n in range(STEPS):
    x, y = next(stream)
    x = shift_in_time(x, rng)
    logits = net(x)
    loss = loss_of(logits, teacher(x), y)
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), CLIP)
    opt.step()
    follow(average, net, n)
    sched.step()
    print(f"{n}: loss {loss.item():.4f}, gradient {norm.item():.3f}")

right = (average.eval()(clips.tensors[0]).argmax(1) == word).float().mean()
print(f"right, by the average: {right.item():.3f}")
