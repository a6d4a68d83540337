"""Anomaly detection for the compressor halls, release 4.

Windows of readings are cut into patches, some patches are hidden, and a small transformer has
to tell what they held from the others and from a memory of what normal operation looks like
(prototypes that follow the encoder's output as moving averages). A window is anomalous if it is
badly told; how badly is calibrated on a stretch of normal operation held back from training.

Encoder and memory start from release 3, which had longer windows and another framework's layout.
"""

import copy
import math
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset


@dataclass(frozen=True)
class Config:
    seed: int = 23
    # readings
    sensors: int = 5
    length: int = 720
    calibration_share: float = 0.25
    cycle: float = 97.0  # samples per load cycle
    limit: float = 4.0
    # windows
    window: int = 48
    hop: int = 6
    patch: int = 6
    hidden_share: float = 0.4
    jitter: float = 0.1
    # model
    width: int = 24
    heads: int = 3
    depth: int = 2
    inner: int = 40
    dropout: float = 0.1
    slots: int = 10
    slot_decay: float = 0.9
    sharpness: float = 0.25
    shrink: float = 0.04
    embedding: int = 16
    # objective
    delta: float = 0.6
    contrast_temperature: float = 0.3
    w_contrast: float = 0.2
    w_compact: float = 0.3
    w_entropy: float = 0.05
    # optimisation
    micro_batch: int = 6
    accumulate: int = 2
    updates: int = 5
    warmup: int = 3
    lr: float = 3e-3
    adopted_lr: float = 0.3  # of what release 3 knew already
    betas: tuple[float, float] = (0.9, 0.97)
    weight_decay: float = 0.05
    max_norm: float = 0.3
    ema: float = 0.8
    calibrate_every: int = 2
    quantile: float = 0.95

    @property
    def patches(self):
        return self.window // self.patch


# ======================================================================================
# readings


def simulate(cfg: Config) -> torch.Tensor:
    """Normal operation, [length, sensors] in the sensors' own units; nan where nothing came."""
    rng = torch.Generator().manual_seed(cfg.seed)
    shape = (cfg.sensors, cfg.length)
    t = torch.arange(cfg.length) - 15.0 * torch.rand(cfg.sensors, 1, generator=rng)
    load = torch.sin(2 * math.pi * t / cfg.cycle) + 0.4 * torch.sin(2 * math.pi * t / 23 + 1)
    load = load * (0.5 + torch.rand(cfg.sensors, 1, generator=rng))
    load = load + torch.linspace(0, 0.8, cfg.length)  # filters clog up

    memory = 0.75 ** torch.arange(16.0).flip(0)
    shocks = torch.randn(cfg.sensors, cfg.length + 15, generator=rng)
    noise = F.conv1d(shocks[:, None], memory[None, None])[:, 0]
    spikes = 6.0 * (torch.rand(shape, generator=rng) < 0.01)

    # bar, degrees Celsius, amperes, mm/s, litres per minute
    unit = torch.tensor([0.7, 6.0, 14.0, 0.4, 55.0])
    zero = torch.tensor([7.5, 68.0, 112.0, 2.3, 640.0])
    readings = zero + unit * (load + 0.25 * noise + spikes).T

    lost = (torch.rand(shape, generator=rng) < 0.008).float()
    lost = F.max_pool1d(F.pad(lost, (4, 0)), 5, stride=1).T > 0  # five samples at a time
    return readings.masked_fill(lost, math.nan)


@dataclass
class Normaliser:
    """Robust: spikes are part of normal operation."""

    centre: torch.Tensor
    spread: torch.Tensor
    limit: float

    @classmethod
    def fit(cls, readings, limit):
        quartiles = torch.tensor([0.25, 0.5, 0.75])
        low, centre, high = readings.nanquantile(quartiles, dim=0)
        return cls(centre, (high - low) / 1.349, limit)

    def __call__(self, readings):
        scaled = (readings - self.centre) / self.spread
        return scaled.clamp(-self.limit, self.limit)


class Windows(Dataset):
    """(as the model gets it, as it was, where there are readings, time of its start)"""

    def __init__(self, cfg, readings, offset, normaliser, jitter=0.0):
        self.cfg, self.offset, self.jitter = cfg, offset, jitter
        self.present = ~readings.isnan()
        self.values = normaliser(readings).nan_to_num(0.0)
        self.starts = range(0, len(readings) - cfg.window + 1, cfg.hop)
        self.rng = torch.Generator().manual_seed(cfg.seed + 1)

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, number):
        start = self.starts[number]
        span = slice(start, start + self.cfg.window)
        clean, present = self.values[span], self.present[span]
        noise = torch.randn(clean.shape, generator=self.rng)
        noisy = clean + self.jitter * noise * present
        return noisy, clean, present, float(self.offset + start)


def prepare(cfg):
    readings = simulate(cfg)
    cut = int(cfg.length * (1 - cfg.calibration_share))
    training, calibration = readings[:cut], readings[cut:]
    normaliser = Normaliser.fit(training, cfg.limit)
    return (
        Windows(cfg, training, 0, normaliser, cfg.jitter),
        Windows(cfg, calibration, cut, normaliser),
    )


def endless(dataset, cfg):
    rng = torch.Generator().manual_seed(cfg.seed + 2)
    loader = DataLoader(dataset, cfg.micro_batch, shuffle=True, drop_last=True, generator=rng)
    while True:
        yield from loader


def to_patches(x, patch):
    """[windows, time, sensors] -> [windows, patches, sensors * patch]"""
    return x.unfold(1, patch, patch).flatten(2)


# ======================================================================================
# functions with gradients of their own


class WeightedHuber(torch.autograd.Function):
    """Mean of Huber's loss under weights."""

    @staticmethod
    def forward(ctx, told, truth, weight, delta):
        error = told - truth
        size = error.abs()
        inside = 0.5 * error**2
        outside = delta * (size - 0.5 * delta)
        mass = weight.sum().clamp(min=1.0)
        ctx.save_for_backward(error, weight, mass)
        ctx.delta = delta
        return (weight * torch.where(size <= delta, inside, outside)).sum() / mass

    @staticmethod
    def backward(ctx, grad):
        error, weight, mass = ctx.saved_tensors
        slope = error.clamp(-ctx.delta, ctx.delta)
        return grad * weight * slope / mass, None, None, None


class ShrunkSoftmax(torch.autograd.Function):
    """Softmax over the last axis, less a threshold, nothing below nought, and of sum one again."""

    @staticmethod
    def forward(ctx, scores, threshold):
        full = scores.softmax(-1)
        kept = (full - threshold).relu()
        total = kept.sum(-1, keepdim=True)
        shares = kept / total
        ctx.save_for_backward(full, shares, total)
        return shares

    @staticmethod
    def backward(ctx, grad):
        full, shares, total = ctx.saved_tensors
        by_kept = (grad - (grad * shares).sum(-1, keepdim=True)) / total
        by_full = by_kept * (shares > 0)
        by_scores = full * (by_full - (by_full * full).sum(-1, keepdim=True))
        return by_scores, None


class Compactness(torch.autograd.Function):
    """Mean square of what lies between a state and its nearest prototype."""

    @staticmethod
    def forward(ctx, states, prototypes):
        nearest = torch.cdist(states, prototypes).argmin(-1)
        away = states - prototypes[nearest]
        ctx.save_for_backward(away)
        return away.square().mean()

    @staticmethod
    def backward(ctx, grad):
        (away,) = ctx.saved_tensors
        return grad * 2 * away / away.numel(), None


# ======================================================================================
# model


class Attention(nn.Module):
    """What is further away in time weighs less, by a slope for each head."""

    def __init__(self, cfg):
        super().__init__()
        self.heads = cfg.heads
        self.to_q = nn.Linear(cfg.width, cfg.width, bias=False)
        self.to_k = nn.Linear(cfg.width, cfg.width, bias=False)
        self.to_v = nn.Linear(cfg.width, cfg.width)
        self.merge = nn.Linear(cfg.width, cfg.width)
        slopes = 2.0 ** -torch.arange(1, cfg.heads + 1)
        place = torch.arange(cfg.patches)
        distance = (place[:, None] - place).abs()
        self.register_buffer("far", -slopes[:, None, None] * distance, persistent=False)

    def split(self, x):
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(x)), self.split(self.to_v(x))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        scores = scores + self.far
        mixed = scores.softmax(3) @ v
        return self.merge(mixed.transpose(1, 2).flatten(2))


class TemporalFeedForward(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.up = nn.Linear(cfg.width, cfg.inner)
        self.near = nn.Conv1d(cfg.inner, cfg.inner, 3, padding=1, groups=cfg.inner)
        self.down = nn.Linear(cfg.inner, cfg.width)

    def forward(self, x):
        h = self.up(x)
        h = h + self.near(h.transpose(1, 2)).transpose(1, 2)
        return self.down(F.gelu(h))


class Block(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(cfg.width), Attention(cfg)
        self.norm2, self.feed = nn.LayerNorm(cfg.width), TemporalFeedForward(cfg)
        self.drop = nn.Dropout(cfg.dropout)

    def forward(self, x):
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.feed(self.norm2(x)))


class Memory(nn.Module):
    """Prototypes of normal operation: means of the states that were nearest, weighted to the recent."""

    def __init__(self, cfg):
        super().__init__()
        self.decay, self.sharpness, self.shrink = cfg.slot_decay, cfg.sharpness, cfg.shrink
        self.register_buffer("prototypes", torch.zeros(cfg.slots, cfg.width))
        self.register_buffer("sums", torch.zeros(cfg.slots, cfg.width))
        self.register_buffer("usage", torch.zeros(cfg.slots))

    def start(self, prototypes, usage):
        self.prototypes.copy_(prototypes)
        self.usage.copy_(usage)
        self.sums.copy_(prototypes * usage[:, None])

    def forward(self, states):
        likeness = F.normalize(states, dim=-1) @ F.normalize(self.prototypes, dim=-1).T
        shares = ShrunkSoftmax.apply(likeness / self.sharpness, self.shrink)
        return shares @ self.prototypes, shares

    @torch.no_grad()
    def absorb(self, states):
        """Move towards states, [states, width]."""
        nearest = torch.cdist(states, self.prototypes).argmin(1)
        mine = F.one_hot(nearest, len(self.prototypes)).to(states.dtype)
        self.usage.mul_(self.decay).add_(mine.sum(0), alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(mine.T @ states, alpha=1 - self.decay)
        self.prototypes.copy_(self.sums / self.usage.clamp(min=1e-3)[:, None])


class Detector(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        size = cfg.sensors * cfg.patch
        self.embed = nn.Linear(size, cfg.width)
        self.calendar = nn.Linear(2, cfg.width, bias=False)
        self.positions = nn.Parameter(0.02 * torch.randn(cfg.patches, cfg.width))
        self.blank = nn.Parameter(0.02 * torch.randn(cfg.width))
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.depth))
        self.norm = nn.LayerNorm(cfg.width)
        self.memory = Memory(cfg)
        self.decoder = nn.Sequential(
            nn.Linear(2 * cfg.width, cfg.inner), nn.GELU(), nn.Linear(cfg.inner, size)
        )
        self.project = nn.Linear(cfg.width, cfg.embedding)

    def when(self, start):
        """Phase in the load cycle, of the middles of patches: [windows, patches, 2]"""
        middle = self.cfg.patch * (torch.arange(self.cfg.patches) + 0.5)
        phase = 2 * math.pi * (start[:, None] + middle) / self.cfg.cycle
        return torch.stack([phase.sin(), phase.cos()], 2)

    def encode(self, values, start, hidden):
        x = self.embed(to_patches(values, self.cfg.patch))
        x = torch.where(hidden[:, :, None], self.blank, x)
        x = x + self.positions + self.calendar(self.when(start))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, values, start, hidden):
        states = self.encode(values, start.float(), hidden)
        recalled, shares = self.memory(states)
        told = self.decoder(torch.cat([states, recalled], 2))
        return states, shares, told


# ======================================================================================
# release 3


def export_release3(cfg, path):
    """As its exporter left it: patches time-major, longer windows, attention in one matrix."""
    rng = torch.Generator().manual_seed(20190311)

    def draw(*shape, scale):
        return scale * torch.randn(*shape, generator=rng)

    width, size = cfg.width, cfg.sensors * cfg.patch
    smooth = draw(4, width, scale=0.6).T[None]
    long = F.interpolate(smooth, size=12, mode="linear", align_corners=True)[0].T
    net = {
        "net/patch/kernel": draw(size, width, scale=0.25),
        "net/patch/bias": draw(width, scale=0.1),
        "net/position": long + draw(12, width, scale=0.1),
        "net/blank": draw(width, scale=0.3),
    }
    for number in range(cfg.depth):
        net[f"net/layer{number}/qkv"] = draw(3 * width, width, scale=0.3)
        net[f"net/layer{number}/merge"] = draw(width, width, scale=0.2)
    memory = {
        "prototypes": draw(cfg.slots, width, scale=0.9),
        "usage": 1.0 + 5.0 * torch.rand(cfg.slots, generator=rng),
    }
    torch.save({"release": 3, "net": net, "memory": memory}, path)


@torch.no_grad()
def adopt_release3(model, path):
    """Take over what fits; returns the names of the parameters that came from there."""
    cfg = model.cfg
    saved = torch.load(path, weights_only=True)
    net = saved["net"]
    state = {}
    kernel = net["net/patch/kernel"].unflatten(0, (cfg.patch, cfg.sensors))
    state["embed.weight"] = kernel.transpose(0, 1).flatten(0, 1).T
    state["embed.bias"] = net["net/patch/bias"]
    positions = net["net/position"].T[None]
    positions = F.interpolate(positions, size=cfg.patches, mode="linear", align_corners=True)
    state["positions"] = positions[0].T
    state["blank"] = net["net/blank"]
    for number in range(cfg.depth):
        here = f"blocks.{number}.attention"
        q, k, v = net[f"net/layer{number}/qkv"].chunk(3)
        state[f"{here}.to_q.weight"] = q
        state[f"{here}.to_k.weight"] = k
        state[f"{here}.to_v.weight"] = v
        state[f"{here}.merge.weight"] = net[f"net/layer{number}/merge"]
    outcome = model.load_state_dict(state, strict=False)
    assert not outcome.unexpected_keys, outcome
    model.memory.start(saved["memory"]["prototypes"], saved["memory"]["usage"])
    return set(state)


# ======================================================================================
# training


def hide(windows, cfg, rng):
    """The same number of patches in each window, chosen anew."""
    rank = torch.rand(windows, cfg.patches, generator=rng).argsort(1)
    return rank < round(cfg.hidden_share * cfg.patches)


def contrast(a, b, temperature):
    """Two views of a window are alike, those of different windows are not."""
    a, b = F.normalize(a, dim=1), F.normalize(b, dim=1)
    logits = a @ b.T / temperature
    same = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same))


def parameter_groups(model, adopted, cfg):
    groups = {}
    for name, parameter in model.named_parameters():
        rate = cfg.lr * (cfg.adopted_lr if name in adopted else 1.0)
        decay = cfg.weight_decay if name.endswith("weight") and parameter.ndim > 1 else 0.0
        groups.setdefault((rate, decay), []).append(parameter)
    return [
        {"params": members, "lr": rate, "weight_decay": decay}
        for (rate, decay), members in groups.items()
    ]


class Trainer:
    def __init__(self, cfg, model, adopted, training, calibration):
        self.cfg, self.model, self.calibration = cfg, model, calibration
        self.batches = endless(training, cfg)
        self.rng = torch.Generator().manual_seed(cfg.seed + 3)
        self.optimizer = torch.optim.AdamW(parameter_groups(model, adopted, cfg), betas=cfg.betas)
        warm = LinearLR(self.optimizer, start_factor=0.25, total_iters=cfg.warmup)
        cool = CosineAnnealingLR(self.optimizer, T_max=40)
        self.scheduler = SequentialLR(self.optimizer, [warm, cool], milestones=[cfg.warmup])
        self.average = copy.deepcopy(model).requires_grad_(False)
        self.average.eval()

    def objective(self, noisy, clean, present, start):
        """Loss of a micro-batch, its parts, and the states that memory may absorb."""
        cfg = self.cfg
        first, second = hide(len(noisy), cfg, self.rng), hide(len(noisy), cfg, self.rng)
        hidden = torch.cat([first, second])
        states, shares, told = self.model(noisy.repeat(2, 1, 1), start.repeat(2), hidden)

        truth = to_patches(clean, cfg.patch).repeat(2, 1, 1)
        there = to_patches(present, cfg.patch).repeat(2, 1, 1)
        weight = (there & hidden[:, :, None]).float()
        summary = self.model.project(states.mean(1))
        parts = {
            "huber": WeightedHuber.apply(told, truth, weight, cfg.delta),
            "contrast": contrast(*summary.chunk(2), cfg.contrast_temperature),
            "compact": Compactness.apply(states.flatten(0, 1), self.model.memory.prototypes),
            "entropy": -(shares * (shares + 1e-6).log()).sum(2).mean(),
        }
        loss = (
            parts["huber"]
            + cfg.w_contrast * parts["contrast"]
            + cfg.w_compact * parts["compact"]
            + cfg.w_entropy * parts["entropy"]
        )
        whole = there.all(2) & ~hidden
        return loss, parts, states.detach()[whole]

    def update(self):
        self.optimizer.zero_grad()
        log, seen = {}, []
        for _ in range(self.cfg.accumulate):
            loss, parts, states = self.objective(*next(self.batches))
            (loss / self.cfg.accumulate).backward()
            seen.append(states)
            for name, part in parts.items():
                log[name] = log.get(name, 0.0) + part.item() / self.cfg.accumulate
        self.model.memory.absorb(torch.cat(seen))
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.follow()
        return log | {"norm": norm.item()}

    @torch.no_grad()
    def follow(self):
        """The average is what gets deployed; its memory is the model's."""
        for mean, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
            mean.lerp_(new, 1 - self.cfg.ema)
        for kept, new in zip(self.average.buffers(), self.model.buffers(), strict=True):
            kept.copy_(new)

    @torch.no_grad()
    def scores(self, dataset):
        """How badly windows are told, every other patch at a time."""
        odd = torch.arange(self.cfg.patches) % 2 == 1
        found = []
        for noisy, clean, present, start in DataLoader(dataset, batch_size=16):
            truth, there = to_patches(clean, self.cfg.patch), to_patches(present, self.cfg.patch)
            score = torch.zeros(len(clean))
            for hidden in (odd, ~odd):
                hidden = hidden.expand(len(clean), -1)
                _, _, told = self.average(noisy, start, hidden)
                square = (told - truth).square() * there * hidden[:, :, None]
                score += square.sum((1, 2))
            found.append(score / there.sum((1, 2)))
        return torch.cat(found)

    def run(self):
        for number in range(1, self.cfg.updates + 1):
            log = self.update()
            line = "  ".join(f"{name} {value:.4f}" for name, value in log.items())
            if number % self.cfg.calibrate_every == 1:
                threshold = self.scores(self.calibration).quantile(self.cfg.quantile)
                line += f"  threshold {threshold:.4f}"
            print(f"[{number:3d}] {line}")


def main():
    cfg = Config()
    torch.manual_seed(cfg.seed)
    training, calibration = prepare(cfg)
    model = Detector(cfg)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "release3.pt"
        export_release3(cfg, path)
        adopted = adopt_release3(model, path)
    Trainer(cfg, model, adopted, training, calibration).run()


if __name__ == "__main__":
    main()
