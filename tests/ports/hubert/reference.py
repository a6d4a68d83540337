"""A small HuBERT: masked frames of speech are told apart by the units of their sound.

Positions come from a convolution and, as in WavLM, from buckets of distances with a gate.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

CONVS = ((16, 10, 5), (24, 4, 2), (24, 3, 2))
GROUPS = 4
DIM, HEADS, FFN, LAYERS = 32, 4, 48, 3
POS_KERNEL, POS_GROUPS = 8, 4
BUCKETS, MAX_DISTANCE = 12, 23
UNITS, CODE_DIM, TEMPERATURE = 10, 12, 0.1
SPAN = 4
FEATURE_GRAD = 0.1
UNMASKED_WEIGHT, PENALTY_WEIGHT = 0.3, 2.0
LR, BETAS, EPS, WEIGHT_DECAY = 2e-3, (0.9, 0.98), 1e-6, 0.1
WARMUP, TOTAL = 3, 20


def lengths_of_frames(lengths):
    for _, kernel, stride in CONVS:
        lengths = (lengths - kernel) // stride + 1
    return lengths


def valid_frames(lengths, frames):
    return torch.arange(frames) < lengths_of_frames(lengths).unsqueeze(1)


def masked_frames(starts, frames):
    """Each start masks a span; -1 is no start."""
    ahead = torch.arange(frames).view(1, -1, 1) - starts.unsqueeze(1)
    inside = (ahead >= 0) & (ahead < SPAN) & (starts >= 0).unsqueeze(1)
    return inside.any(dim=2)


def normalise(wave, lengths):
    """Zero mean and unit variance of what is not padding."""
    valid = torch.arange(wave.shape[1]) < lengths.unsqueeze(1)
    rows = []
    for row, keep in zip(wave, valid):
        part = row[keep]
        row = (row - part.mean()) / torch.sqrt(part.var(unbiased=False) + 1e-7)
        rows.append(row.masked_fill(~keep, 0.0))
    return torch.stack(rows)


class ConvLayer(nn.Module):
    def __init__(self, inp, out, kernel, stride, norm):
        super().__init__()
        self.conv = nn.Conv1d(inp, out, kernel, stride, bias=not norm)
        self.norm = nn.GroupNorm(GROUPS, out) if norm else None

    def forward(self, x):
        x = self.conv(x)
        if self.norm is not None:
            x = self.norm(x)
        return F.gelu(x)


class FeatureExtractor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList()
        inp = 1
        for i, (out, kernel, stride) in enumerate(CONVS):
            self.layers.append(ConvLayer(inp, out, kernel, stride, norm=i == 0))
            inp = out

    def forward(self, wave):
        x = wave.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return x


class FeatureProjection(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(CONVS[-1][0])
        self.proj = nn.Linear(CONVS[-1][0], DIM)

    def forward(self, x):
        return self.proj(self.norm(x))


class PositionalConv(nn.Module):
    """An even kernel gives a frame too many."""

    def __init__(self):
        super().__init__()
        conv = nn.Conv1d(
            DIM, DIM, POS_KERNEL, padding=POS_KERNEL // 2, groups=POS_GROUPS
        )
        self.conv = nn.utils.parametrizations.weight_norm(conv, dim=2)

    def forward(self, x):
        x = self.conv(x.transpose(1, 2))
        return F.gelu(x[:, :, :-1]).transpose(1, 2)


class RelativePositions(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, HEADS)

    def buckets(self, frames):
        place = torch.arange(frames)
        distance = place.unsqueeze(0) - place.unsqueeze(1)
        half = BUCKETS // 2
        exact = half // 2
        bucket = (distance > 0).long() * half
        distance = distance.abs()
        ratio = torch.log(distance.clamp(min=1) / exact) / math.log(
            MAX_DISTANCE / exact
        )
        far = (exact + ratio * (half - exact)).long().clamp(max=half - 1)
        return bucket + torch.where(distance < exact, distance, far)

    def forward(self, frames):
        return self.table(self.buckets(frames)).permute(2, 0, 1)


class GatedAttention(nn.Module):
    """Keys have no bias: softmax forgets it."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, DIM)
        self.k = nn.Linear(DIM, DIM, bias=False)
        self.v = nn.Linear(DIM, DIM)
        self.out = nn.Linear(DIM, DIM)
        self.gate = nn.Linear(DIM // HEADS, 8)
        self.gate_const = nn.Parameter(torch.ones(1, HEADS, 1, 1))

    def heads(self, x):
        return x.unflatten(2, (HEADS, -1)).transpose(1, 2)

    def forward(self, x, bias, valid):
        q, k, v = self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))
        gates = self.gate(self.heads(x)).unflatten(-1, (2, 4)).sum(dim=-1)
        update, reset = gates.sigmoid().split(1, dim=-1)
        gate = update * (reset * self.gate_const - 1.0) + 2.0
        scores = q @ k.transpose(2, 3) / math.sqrt(DIM // HEADS)
        scores = scores + gate * bias
        scores = scores.masked_fill(~valid[:, None, None, :], float("-inf"))
        mixed = scores.softmax(dim=-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = GatedAttention()
        self.norm1 = nn.LayerNorm(DIM)
        self.fc1 = nn.Linear(DIM, FFN)
        self.fc2 = nn.Linear(FFN, DIM)
        self.norm2 = nn.LayerNorm(DIM)

    def forward(self, x, bias, valid):
        x = self.norm1(x + self.attn(x, bias, valid))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Hubert(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor = FeatureExtractor()
        self.feature_projection = FeatureProjection()
        self.mask_emb = nn.Parameter(torch.empty(DIM).uniform_())
        self.pos_conv = PositionalConv()
        self.norm = nn.LayerNorm(DIM)
        self.positions = RelativePositions()
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.final_proj = nn.Linear(DIM, CODE_DIM)
        self.codes = nn.Parameter(torch.empty(UNITS, CODE_DIM).uniform_())

    def encode(self, x, valid):
        x = x.masked_fill(~valid.unsqueeze(2), 0.0)
        x = self.norm(x + self.pos_conv(x))
        bias = self.positions(x.shape[1])
        for layer in self.layers:
            x = layer(x, bias, valid)
        return x

    def forward(self, wave, lengths, starts):
        features = self.feature_extractor(normalise(wave, lengths))
        still = features.detach()
        features = still + FEATURE_GRAD * (features - still)
        penalty = features.pow(2).mean()
        x = self.feature_projection(features.transpose(1, 2))
        valid = valid_frames(lengths, x.shape[1])
        masked = masked_frames(starts, x.shape[1])
        x = torch.where(masked.unsqueeze(2), self.mask_emb, x)
        x = self.final_proj(self.encode(x, valid))
        logits = F.cosine_similarity(x.unsqueeze(2), self.codes, dim=-1) / TEMPERATURE
        return {"logits": logits, "penalty": penalty}


def model():
    torch.manual_seed(13)
    net = Hubert()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.LayerNorm | nn.GroupNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(0, 1.2 / math.sqrt(module.in_features))
                if module.bias is not None:
                    module.bias.normal_(0, 0.2)
            elif isinstance(module, ConvLayer):
                nn.init.kaiming_normal_(module.conv.weight)
                if module.conv.bias is not None:
                    module.conv.bias.normal_(0, 0.2)
            elif isinstance(module, GatedAttention):
                module.gate_const.uniform_(0.6, 1.8)
        weight = net.pos_conv.conv.parametrizations.weight
        weight.original0.uniform_(1.0, 3.0)
        net.pos_conv.conv.bias.normal_(0, 0.2)
        net.mask_emb.normal_(0, 0.8)
        net.codes.normal_()
    return net


def batches():
    """Each unit hums at a height of its own, over a microphone that is not at zero."""
    generator = torch.Generator().manual_seed(2107)
    made = []
    for lengths in ([640, 553, 431], [611, 388, 640, 470]):
        size, samples, length = len(lengths), max(lengths), torch.tensor(lengths)
        # A frame sees 45 samples, and the next begins 20 later.
        frames = (length - 45) // 20 + 1
        units = torch.randint(0, 10, (size, 11), generator=generator)
        units = units.repeat_interleave(3, dim=1)
        height = units.repeat_interleave(20, dim=1)[:, :samples]
        phase = (0.15 + 0.12 * height).cumsum(dim=1)
        level, shift = torch.rand(2, size, 1, generator=generator)
        wave = (0.01 + 0.02 * level) * (phase.sin() + 0.4 * (2.3 * phase).cos())
        wave = wave + 0.004 * torch.randn(wave.shape, generator=generator)
        wave = wave + 0.02 * shift - 0.005
        wave = wave * (torch.arange(samples) < length.unsqueeze(1))
        starts = torch.rand(size, 3, generator=generator) * (frames - 4).unsqueeze(1)
        starts = starts.long()
        starts[1, 2] = -1
        made.append(
            {
                "wave": wave,
                "lengths": length,
                "starts": starts,
                "units": units[:, : int(frames.max())],
            }
        )
    return made


def forward(net, batch):
    return net(batch["wave"], batch["lengths"], batch["starts"])


def loss(output, batch):
    logits, units = output["logits"], batch["units"]
    valid = valid_frames(batch["lengths"], units.shape[1])
    masked = masked_frames(batch["starts"], units.shape[1])
    hidden, seen = masked & valid, ~masked & valid
    masked_loss = F.cross_entropy(logits[hidden], units[hidden])
    unmasked_loss = F.cross_entropy(logits[seen], units[seen])
    return (
        masked_loss
        + UNMASKED_WEIGHT * unmasked_loss
        + PENALTY_WEIGHT * output["penalty"]
    )


class LinearAdamW(torch.optim.AdamW):
    """The rate rises and falls in straight lines."""

    done = 0

    def step(self, closure=None):
        self.done += 1
        rise, fall = self.done / WARMUP, (TOTAL - self.done) / (TOTAL - WARMUP)
        for group in self.param_groups:
            group["lr"] = LR * min(rise, fall)
        return super().step(closure)


def optimizer(net):
    """Only kernels and matrices decay."""
    decay, rest = [], []
    for name, param in net.named_parameters():
        still = name.endswith(("gate_const", "original0", "table.weight", "codes"))
        (rest if still or param.ndim == 1 else decay).append(param)
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return LinearAdamW(groups, lr=LR, betas=BETAS, eps=EPS)
