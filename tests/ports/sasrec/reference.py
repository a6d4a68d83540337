"""SASRec: the next item of a user's history; gaps in time between items bias the attention."""

import math

import torch
from torch import nn
from torch.nn import functional as F

ITEMS, MAX_LEN = 60, 12
DIM, HEADS, HIDDEN, BLOCKS = 24, 3, 40, 2
GAP_EDGES = torch.tensor([0, 1, 3, 7, 15, 31])  # hours
SMOOTHING, RANKING = 0.1, 0.5
PEAK_LR, WARMUP, WEIGHT_DECAY, MAX_NORM = 8e-3, 2, 0.1, 1.0


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(DIM, DIM, bias=False)
        self.key = nn.Linear(DIM, DIM, bias=False)
        self.value = nn.Linear(DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, DIM)
        self.gap = nn.Embedding(len(GAP_EDGES) + 1, HEADS)

    def split(self, x):
        return x.unflatten(-1, (HEADS, DIM // HEADS)).transpose(1, 2)

    def forward(self, x, bucket, allowed):
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(DIM // HEADS)
        scores = scores + self.gap(bucket).permute(0, 3, 1, 2)
        scores = scores.masked_fill(~allowed.unsqueeze(1), float("-inf"))
        y = scores.softmax(dim=-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class PointWiseFeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv1d(DIM, HIDDEN, kernel_size=1)
        self.conv2 = nn.Conv1d(HIDDEN, DIM, kernel_size=1)

    def forward(self, x):
        h = F.gelu(self.conv1(x.transpose(1, 2)))
        return self.conv2(h).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(DIM)
        self.attention = Attention()
        self.norm2 = nn.LayerNorm(DIM)
        self.ffn = PointWiseFeedForward()

    def forward(self, x, bucket, allowed):
        x = x + self.attention(self.norm1(x), bucket, allowed)
        return x + self.ffn(self.norm2(x))


class SASRec(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ITEMS + 1, DIM, padding_idx=0)
        self.position = nn.Embedding(MAX_LEN + 1, DIM, padding_idx=0)
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(DIM)
        self.item_bias = nn.Parameter(torch.zeros(ITEMS))

    def forward(self, items, hours, candidates):
        """Histories are padded on the left; logits are those of real items only."""
        real = items > 0
        length = items.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        itself = torch.eye(length, dtype=torch.bool)  # no row of a softmax is empty
        allowed = causal & real.unsqueeze(1) | itself
        gap = (hours.unsqueeze(2) - hours.unsqueeze(1)).clamp(min=0)
        bucket = torch.bucketize(gap, GAP_EDGES)

        x = self.item(items) * math.sqrt(DIM)
        x = x + self.position(real.cumsum(dim=1) * real)
        for block in self.blocks:
            x = block(x, bucket, allowed)
        x = self.norm(x)

        logits = F.linear(x[real], self.item.weight[1:], self.item_bias)
        scores = (self.item(candidates) @ x[:, -1].unsqueeze(-1)).squeeze(-1)
        return logits, scores + self.item_bias[candidates - 1]


def model():
    torch.manual_seed(1210)
    net = SASRec()
    with torch.no_grad():
        net.item.weight[1:].normal_(0, 0.2)
        net.position.weight[1:].normal_(0, 0.4)
        net.item_bias.normal_(0, 0.3)
        for module in net.modules():
            if isinstance(module, nn.LayerNorm):
                module.weight.uniform_(0.6, 1.4)
                module.bias.normal_(0, 0.2)
            elif isinstance(module, Attention):
                module.query.weight.mul_(2)
                module.key.weight.mul_(2)
                module.out.bias.normal_(0, 0.2)
    return net


def batches():
    """Users walk through the catalogue; some steps have no target."""
    generator = torch.Generator().manual_seed(1211)

    def draw(low, high, *size):
        return torch.randint(low, high, size, generator=generator)

    made = []
    for users, length in ((6, 10), (5, 12), (7, 8)):
        lengths = draw(3, length + 1, users)
        lengths[1] = length
        walk = draw(0, 60, users, 1) + draw(1, 9, users, length + 1).cumsum(1)
        walk = walk % 60 + 1
        real = torch.arange(length) >= length - lengths.unsqueeze(1)
        has_target = real & (draw(0, 5, users, length) > 0)
        has_target[:, -1] = True
        waits = draw(0, 12, users, length) * draw(0, 3, users, length)
        candidates = torch.cat([walk[:, -1:], draw(1, 61, users, 4)], dim=1)
        made.append(
            {
                "items": walk[:, :-1] * real,
                "hours": waits.cumsum(1) * real,
                "targets": walk[:, 1:] * has_target,
                "candidates": candidates,
            }
        )
    return made


def forward(net, batch):
    logits, scores = net(batch["items"], batch["hours"], batch["candidates"])
    return {"logits": logits, "scores": scores}


def loss(output, batch):
    """The next item among all, and the last one before those drawn at random."""
    target = batch["targets"][batch["items"] > 0] - 1
    next_item = F.cross_entropy(
        output["logits"], target, ignore_index=-1, label_smoothing=SMOOTHING
    )
    scores = output["scores"]
    ranking = -F.logsigmoid(scores[:, :1] - scores[:, 1:]).mean()
    return next_item + RANKING * ranking


class ScheduledAdamW(torch.optim.AdamW):
    """Clips; the rate grows linearly, then falls with the root of the steps."""

    done = 0

    def step(self, closure=None):
        self.done += 1
        factor = min(self.done / WARMUP, (WARMUP / self.done) ** 0.5)
        for group in self.param_groups:
            group["lr"] = PEAK_LR * factor
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        return super().step(closure)


def optimizer(net):
    plain = ("bias", "norm", "position", "gap")
    decayed, others = [], []
    for name, p in net.named_parameters():
        (others if any(word in name for word in plain) else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return ScheduledAdamW(groups, lr=PEAK_LR, betas=(0.9, 0.98), eps=1e-6)
