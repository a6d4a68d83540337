"""As one writes it with arrays: time comes first, and there are hardly any layers of torch.

Maps are (time, batch, mels, channels). The spectrum is two banks of filters, cosines and
sines. Some parts have gradients by hand, and the optimizer sees one long vector.
"""

from math import cos, log, pi
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

RATE = 8000
SIZE, WIDTH, STRIDE = 256, 200, 100
BANDS = 16
UNITS = 14
RARITY = (0.5, 1.0, 1.6, 0.8, 1.3, 2.2, 1.0)
EPS = 1e-5
MEMORY = 0.1


# ------------------------------------------------------------------ the filters


def dft_filters():
    """(2 * bins, 1, SIZE): cosines and sines with the window in them."""
    n = torch.arange(SIZE, dtype=torch.float64)
    bell = torch.zeros(SIZE, dtype=torch.float64)
    begin = (SIZE - WIDTH) // 2
    bell[begin : begin + WIDTH] = torch.sin(pi * n[:WIDTH] / WIDTH) ** 2
    angle = torch.outer(2 * pi * torch.arange(SIZE // 2 + 1) / SIZE, n)
    waves = torch.cat([torch.cos(angle), -torch.sin(angle)])
    return (waves * bell).unsqueeze(1).float()


def mel_of(hertz):
    return 2595 * log(1 + hertz / 700, 10)


def hertz_of(mel):
    return 700 * (10 ** (mel / 2595) - 1)


def band_filters(low=60, high=3800):
    """(bands, bins): triangles, each with an area of one."""
    step = (mel_of(high) - mel_of(low)) / (BANDS + 1)
    knots = [hertz_of(mel_of(low) + i * step) for i in range(BANDS + 2)]
    f = torch.arange(SIZE // 2 + 1, dtype=torch.float64) * RATE / SIZE
    rows = []
    for left, peak, right in zip(knots, knots[1:], knots[2:]):
        side = torch.where(f < peak, peak - left, right - peak)
        triangle = 1 - (f - peak).abs() / side
        rows.append(triangle.clamp(min=0) * 2 / (right - left))
    return torch.stack(rows).float()


# --------------------------------------------------- parts with gradients by hand


class Compress(Function):
    """log(1 + exp(gain) * energy); energy (time, batch, bands) has no gradient."""

    @staticmethod
    def forward(ctx, energy, gain):
        scaled = energy * gain.exp()
        ctx.save_for_backward(scaled)
        return scaled.log1p()

    @staticmethod
    def backward(ctx, grad):
        (scaled,) = ctx.saved_tensors
        return None, (grad * scaled / (1 + scaled)).sum((0, 1))


class NormRelu(Function):
    """x (time, batch, mels, channels); gain and shift (channels)."""

    @staticmethod
    def forward(ctx, x, gain, shift):
        axes = (0, 1, 2)
        mean = x.mean(axes)
        spread = ((x - mean) ** 2).mean(axes)
        root = (spread + EPS) ** -0.5
        unit = (x - mean) * root
        y = unit * gain + shift
        ctx.save_for_backward(unit, root, gain, y > 0)
        ctx.mark_non_differentiable(mean, spread)
        return y.relu(), mean, spread

    @staticmethod
    def backward(ctx, grad, _mean, _spread):
        unit, root, gain, open_ = ctx.saved_tensors
        axes = (0, 1, 2)
        grad = grad * open_
        d_gain = (grad * unit).sum(axes)
        d_shift = grad.sum(axes)
        g = grad * gain
        level = g.mean(axes)
        slope = (g * unit).mean(axes)
        d_x = root * (g - level - unit * slope)
        return d_x, d_gain, d_shift


class SoftPool(Function):
    """Mean of x (time, batch, units) with weights exp(score), score (time, batch)."""

    @staticmethod
    def forward(ctx, x, score, inside):
        score = score.masked_fill(~inside, -torch.inf)
        share = (score - score.logsumexp(0)).exp()
        pooled = (share[:, :, None] * x).sum(0)
        ctx.save_for_backward(x, share, pooled)
        return pooled

    @staticmethod
    def backward(ctx, grad):
        x, share, pooled = ctx.saved_tensors
        d_x = share[:, :, None] * grad
        pull = ((x - pooled) * grad).sum(2)
        return d_x, share * pull, None


# -------------------------------------------------------------------- the network


def taps(x, down, across):
    """The nine shifts of a map with a rim of zeros, every so many places."""
    high = (x.shape[0] - 1) // down + 1
    wide = (x.shape[2] - 1) // across + 1
    rim = nn.functional.pad(x, (0, 0, 1, 1, 0, 0, 1, 1))
    for i in range(3):
        for j in range(3):
            rows = rim[i : i + down * (high - 1) + 1 : down]
            yield rows[:, :, j : j + across * (wide - 1) + 1 : across]


def depthwise(x, kernel, across=1):
    """kernel (9, channels), times first."""
    total = 0
    for tap, weight in zip(taps(x, 1, across), kernel):
        total = total + tap * weight
    return total


class Spotter(nn.Module):
    def __init__(self, weights, stats):
        super().__init__()
        self.w = nn.ParameterDict({k: nn.Parameter(v) for k, v in weights.items()})
        for key, value in stats.items():
            self.register_buffer(key, value)
        self.register_buffer("waves", dft_filters())
        self.register_buffer("bands", band_filters())

    def sound(self, wave):
        """wave (batch, samples) -> energies (time, batch, bands)."""
        ago = torch.nn.functional.pad(wave, (1, 0))[:, :-1]
        wave = wave - 0.97 * ago
        half = SIZE // 2
        head = wave[:, 1 : half + 1].flip(1)
        tail = wave[:, -half - 1 : -1].flip(1)
        wave = torch.cat([head, wave, tail], 1)
        both = nn.functional.conv1d(wave[:, None], self.waves, stride=STRIDE)
        re, im = both.chunk(2, 1)
        return (self.bands @ (re**2 + im**2)).permute(2, 0, 1)

    def features(self, wave, frames, freq_mask, time_mask):
        x = Compress.apply(self.sound(wave), self.w["gain"])
        t = torch.arange(len(x))[:, None]
        inside = (t < frames)[:, :, None].float()
        n = frames[:, None]
        mean = (x * inside).sum(0) / n
        centred = (x - mean) * inside
        x = centred * ((centred**2).sum(0) / n + 1e-3) ** -0.5

        b = torch.arange(BANDS)
        since = b - freq_mask[:, :1]
        seen_band = ((since < 0) | (since >= freq_mask[:, 1:])).float()
        since = t - time_mask[:, 0]
        seen_time = ((since < 0) | (since >= time_mask[:, 1])).float()
        return x * seen_band * seen_time[:, :, None]

    def norm(self, key, x):
        y, mean, spread = NormRelu.apply(
            x, self.w[key + "_gain"], self.w[key + "_shift"]
        )
        with torch.no_grad():
            n = x[..., 0].numel()
            seen = torch.stack([mean, spread * n / (n - 1)])
            stat = getattr(self, key + "_stat")
            stat += MEMORY * (seen - stat)
        return y

    def recurrent(self, x):
        """x (time, batch, mels, channels) -> states (time, batch, units)."""
        w = self.w
        drive = torch.einsum("tbfc,gcfu->tgbu", x, w["gates_in"])
        drive = drive + w["gates_in_bias"][:, None]
        h = x.new_zeros(x.shape[1], UNITS)
        states = []
        for into in drive:
            back = h @ w["gates_back"] + w["gates_back_bias"][:, None]
            reset = (into[0] + back[0]).sigmoid()
            keep = (into[1] + back[1]).sigmoid()
            new = (into[2] + reset * back[2]).tanh()
            h = new + keep * (h - new)
            states.append(h)
        return torch.stack(states)

    def forward(self, wave, length, freq_mask, time_mask):
        w = self.w
        frames = length // STRIDE + 1
        x = self.features(wave, frames, freq_mask, time_mask)

        x = torch.cat(list(taps(x[..., None], 2, 2)), -1) @ w["stem"]
        x = self.norm("stem", x)
        x = self.norm("one_depth", depthwise(x, w["one_depth"]))
        x = self.norm("one_point", x @ w["one_point"])
        x = self.norm("two_depth", depthwise(x, w["two_depth"], across=2))
        x = self.norm("two_point", x @ w["two_point"])

        h = self.recurrent(x)
        steps = (frames + 1) // 2
        last = h[steps - 1, torch.arange(len(steps))]
        score = (h @ w["look"] + w["look_bias"]).tanh() @ w["score"]
        inside = torch.arange(len(h))[:, None] < steps
        pooled = SoftPool.apply(h, score, inside)
        return pooled @ w["out"][:UNITS] + last @ w["out"][UNITS:] + w["out_bias"]


# -------------------------------------------------------------------- the weights


def read(state):
    """The weights of the layers, as arrays of other shapes."""
    weights, stats = {}, {}

    def norm(key, name):
        weights[key + "_gain"] = state[name + ".weight"]
        weights[key + "_shift"] = state[name + ".bias"]
        both = state[name + ".running_mean"], state[name + ".running_var"]
        stats[key + "_stat"] = torch.stack(both)

    def nine(name):
        """(channels, 1, mel, time) -> (time * mel, channels)."""
        kernel = state[name + ".weight"][:, 0]
        return kernel.transpose(1, 2).flatten(1).t().contiguous()

    def product(name):
        return state[name + ".weight"].flatten(1).t().contiguous()

    weights["gain"] = state["frontend.log_gain"]
    weights["stem"] = nine("stem")
    norm("stem", "norm")
    for key, name in (("one", "block1"), ("two", "block2")):
        weights[key + "_depth"] = nine(name + ".depthwise")
        norm(key + "_depth", name + ".norm1")
        weights[key + "_point"] = product(name + ".pointwise")
        norm(key + "_point", name + ".norm2")

    gates = state["gru.weight_ih_l0"].view(3, UNITS, 12, 4)
    weights["gates_in"] = gates.permute(0, 2, 3, 1).contiguous()
    weights["gates_in_bias"] = state["gru.bias_ih_l0"].view(3, UNITS)
    gates = state["gru.weight_hh_l0"].view(3, UNITS, UNITS)
    weights["gates_back"] = gates.mT.contiguous()
    weights["gates_back_bias"] = state["gru.bias_hh_l0"].view(3, UNITS)

    weights["look"] = product("pool.proj")
    weights["look_bias"] = state["pool.proj.bias"]
    weights["score"] = state["pool.score.weight"][0]
    weights["out"] = product("head")
    weights["out_bias"] = state["head.bias"]
    return weights, stats


def model():
    return Spotter(*read(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------- the training


def forward(net, batch):
    other = batch["partner"]
    wave = torch.lerp(batch["wave"][other], batch["wave"], batch["lam"][:, None])
    length = torch.stack([batch["length"], batch["length"][other]]).amax(0)
    return net(wave, length, batch["freq_mask"], batch["time_mask"])


def loss(output, batch, smooth=0.1):
    rarity = torch.tensor(RARITY)
    surprise = output.logsumexp(1, keepdim=True) - output
    labels = torch.stack([batch["label"], batch["label"][batch["partner"]]])
    shares = torch.stack([batch["lam"], 1 - batch["lam"]]) * rarity[labels]
    hit = (shares * surprise.gather(1, labels.t()).t()).sum()
    flat = (surprise @ rarity).sum() / len(rarity)
    return ((1 - smooth) * hit + smooth * flat) / shares.sum()


class LongVector(torch.optim.Optimizer):
    """Adam with decay, for one vector of all weights; one cycle of rate and inertia."""

    plain = ("bias", "gain", "shift")

    def __init__(self, named, top, cycle, fade, limit):
        named = list(named)
        super().__init__([p for _, p in named], {})
        marks = [
            torch.full((p.numel(),), float(not name.endswith(self.plain)))
            for name, p in named
        ]
        self.fade = fade * torch.cat(marks)
        self.top, self.cycle, self.limit = top, cycle, limit
        self.m = torch.zeros_like(self.fade)
        self.v = torch.zeros_like(self.fade)
        self.t = 0

    def phase(self):
        """The rate, and the part of the last average that stays."""
        peak, end = 0.3 * self.cycle - 1, self.cycle - 1
        if self.t <= peak:
            swing = cos(pi * self.t / peak)
            low = self.top / 10
        else:
            swing = -cos(pi * (self.t - peak) / (end - peak))
            low = self.top / 1000
        rate = (self.top + low) / 2 - (self.top - low) / 2 * swing
        return rate, 0.9 + 0.05 * swing

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        rate, inertia = self.phase()
        self.t += 1
        g = torch.cat([p.grad.reshape(-1) for p in params])
        g = g * (self.limit / g.norm()).clamp(max=1)
        self.m = inertia * self.m + (1 - inertia) * g
        self.v = 0.99 * self.v + 0.01 * g**2
        m = self.m / (1 - inertia**self.t)
        v = self.v / (1 - 0.99**self.t)
        x = torch.cat([p.reshape(-1) for p in params])
        x = x * (1 - rate * self.fade) - rate * m / (v.sqrt() + 1e-8)
        for p, part in zip(params, x.split([p.numel() for p in params])):
            p.copy_(part.view_as(p))


def optimizer(net):
    return LongVector(net.named_parameters(), top=1e-2, cycle=20, fade=0.2, limit=0.5)
