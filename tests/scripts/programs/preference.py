"""Tune a small decoder on pairs of answers (DPO), starting from last round's adapter.

The reference is the supervised model without it, whose log-probabilities are made once.
"""

import copy
import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

PAD, BOS, SEP, EOS, FIRST = 0, 1, 2, 3, 4


cfg = SimpleNamespace(
    seed=23, vocab=44, width=32, heads=4, hidden=48, layers=2, dropout=0.1,
    rank=4, alpha=16.0, pairs=48, longest_prompt=8, micro=6, accumulate=2, steps=3,
    beta=0.4, smoothing=0.15, lr=4e-3, warmup=4, decay=0.05, clip=0.8,
)  # fmt: skip


# --- pairs of answers
def make_pairs(gen):
    """Prompts end in a separator; the better answer counts on, the worse one strays."""
    span = cfg.vocab - FIRST
    pairs = []
    for _ in range(cfg.pairs):
        size = int(torch.randint(4, 13, (), generator=gen))
        body = torch.randint(span, (size,), generator=gen).tolist()
        many, fewer = torch.randint(3, 8, (2,), generator=gen).tolist()
        stride = 1 + body[0] % 3
        good = [(body[-1] + stride * (i + 1)) % span for i in range(many)]
        noise = torch.randint(span, (fewer,), generator=gen).tolist()
        bad = [n if i % 2 else g for i, (n, g) in enumerate(zip(noise, good * 3))]
        prompt = [BOS] + [FIRST + token for token in body] + [SEP]
        pair = {"prompt": prompt[-cfg.longest_prompt :]}
        pair["chosen"] = [FIRST + token for token in good] + [EOS]
        pair["rejected"] = [FIRST + token for token in bad] + [EOS]
        pairs.append(pair)
    return pairs


def collate(pairs):
    """All chosen, then all rejected: prompts padded on the left, answers on the right."""
    wide = max(len(pair["prompt"]) for pair in pairs)
    long = max(len(pair[side]) for pair in pairs for side in ("chosen", "rejected"))
    ids, attend, answer = [], [], []
    for side in ("chosen", "rejected"):
        for pair in pairs:
            prompt, reply = pair["prompt"], pair[side]
            left, right = wide - len(prompt), long - len(reply)
            ids.append([PAD] * left + prompt + reply + [PAD] * right)
            attend.append([0] * left + [1] * (len(prompt) + len(reply)) + [0] * right)
            answer.append([0] * wide + [1] * len(reply) + [0] * right)
    return torch.tensor(ids), torch.tensor(attend), torch.tensor(answer)


# --- kernels
class RootNorm(torch.autograd.Function):
    """x over its root mean square, times a gain."""

    @staticmethod
    def forward(ctx, x, gain, eps):
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, gain, rstd)
        return x * rstd * gain

    @staticmethod
    def backward(ctx, grad):
        x, gain, rstd = ctx.saved_tensors
        normed = x * rstd
        dgain = (grad * normed).flatten(0, -2).sum(0)
        inner = grad * gain
        dx = rstd * (inner - normed * (inner * normed).mean(-1, keepdim=True))
        return dx, dgain, None


class GatedUnit(torch.autograd.Function):
    """silu(gate) * up, keeping its two inputs only."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        return gate * gate.sigmoid() * up

    @staticmethod
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        s = gate.sigmoid()
        return grad * up * s * (1 + gate * (1 - s)), grad * gate * s


class SequenceLogp(torch.autograd.Function):
    """Log-probability of the marked tokens of a sequence."""

    @staticmethod
    def forward(ctx, logits, target, mark):
        norm = logits.logsumexp(-1)
        picked = logits.gather(-1, target[..., None]).squeeze(-1)
        ctx.save_for_backward(logits, target, mark, norm)
        return ((picked - norm) * mark).sum(-1)

    @staticmethod
    def backward(ctx, grad):
        logits, target, mark, norm = ctx.saved_tensors
        slope = -torch.exp(logits - norm[..., None])
        slope.scatter_add_(-1, target[..., None], torch.ones_like(slope[..., :1]))
        return slope * (grad[:, None] * mark)[..., None], None, None


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(cfg.width))

    def forward(self, x):
        return RootNorm.apply(x, self.gain, 1e-5)


def turn(x, positions):
    """Rotary positions; the two halves of a head are the two coordinates."""
    half = x.shape[-1] // 2
    speed = 100.0 ** (-torch.arange(half) / half)
    angle = positions[:, None, :, None] * speed
    a, b, cos, sin = x[..., :half], x[..., half:], angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("query", "key", "value", "out"):
            self.add_module(name, nn.Linear(cfg.width, cfg.width, bias=False))

    def forward(self, x, positions, visible):
        n, t, _ = x.shape
        q, k, v = (
            layer(x).view(n, t, cfg.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q = turn(q, positions)
        k = turn(k, positions)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~visible[:, None], -1e9)
        mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = Norm(), Norm()
        self.attention = Attention()
        for name in ("gate", "up"):
            self.add_module(name, nn.Linear(cfg.width, cfg.hidden, bias=False))
        self.down = nn.Linear(cfg.hidden, cfg.width, bias=False)

    def forward(self, x, positions, visible):
        x = x + self.attention(self.norm1(x), positions, visible)
        h = self.norm2(x)
        return x + self.down(GatedUnit.apply(self.gate(h), self.up(h)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(cfg.vocab, cfg.width)
        self.drop = nn.Dropout(cfg.dropout)
        self.blocks = nn.ModuleList(Block() for _ in range(cfg.layers))
        self.norm = Norm()
        self.head = nn.Linear(cfg.width, cfg.vocab, bias=False)

    def forward(self, ids, attend):
        positions = (attend.cumsum(1) - 1).clamp(min=0)
        every = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool)
        visible = every.tril() & attend.bool()[:, None, :]
        visible = visible | torch.eye(ids.shape[1], dtype=torch.bool)
        x = self.drop(self.embed(ids))
        for block in self.blocks:
            x = block(x, positions, visible)
        return self.head(self.norm(x))


def answer_logp(model, ids, attend, answer):
    logits = model(ids, attend)[:, :-1]
    return SequenceLogp.apply(logits, ids[:, 1:], answer[:, 1:].float())


# --- what was trained before
def supervised_checkpoint(gen):
    """As the other framework saves it: fused projections, norms as offsets from one."""
    w, hidden = cfg.width, cfg.hidden
    shapes = {"embed": (cfg.vocab, w, 1.0), "head": (cfg.vocab, w, w**-0.5)}
    shapes["norm"] = (1, w, 0.2)
    for i in range(cfg.layers):
        shapes[f"{i}.kvq"] = (3 * w, w, 1.3 * w**-0.5)
        shapes[f"{i}.out"] = (w, w, w**-0.5)
        shapes[f"{i}.up_gate"] = (2 * hidden, w, w**-0.5)
        shapes[f"{i}.down"] = (w, hidden, hidden**-0.5)
        shapes[f"{i}.norms"] = (2, w, 0.2)
    return {k: s * torch.randn(n, m, generator=gen) for k, (n, m, s) in shapes.items()}


def adapter_checkpoint(gen):
    """The low-rank adapter of the first round, on the queries and the values."""
    pairs = {}
    for name in (f"{i}.{part}" for i in range(cfg.layers) for part in ("query", "value")):
        down = torch.randn(cfg.rank, cfg.width, generator=gen) / math.sqrt(cfg.width)
        pairs[name] = (down, 0.08 * torch.randn(cfg.width, cfg.rank, generator=gen))
    return pairs


@torch.no_grad()
def load_supervised(model, saved):
    model.embed.weight.copy_(saved["embed"])
    model.head.weight.copy_(saved["head"])
    model.norm.gain.copy_(1 + saved["norm"][0])
    for i, block in enumerate(model.blocks):
        key, value, query = saved[f"{i}.kvq"].chunk(3)
        att = block.attention
        for layer, weight in ((att.query, query), (att.key, key), (att.value, value)):
            layer.weight.copy_(weight)
        att.out.weight.copy_(saved[f"{i}.out"])
        up, gate = saved[f"{i}.up_gate"].chunk(2)
        block.up.weight.copy_(up)
        block.gate.weight.copy_(gate)
        block.down.weight.copy_(saved[f"{i}.down"])
        for norm, offset in zip((block.norm1, block.norm2), saved[f"{i}.norms"]):
            norm.gain.copy_(1 + offset)


@torch.no_grad()
def merge_adapter(model, pairs):
    for name, (down, up) in pairs.items():
        layer = getattr(model.blocks[int(name[0])].attention, name[2:])
        layer.weight += cfg.alpha / cfg.rank * up @ down


# --- training
@torch.no_grad()
def reference_logps(model, pairs):
    """For each pair: of the chosen answer, of the rejected one."""
    parts = []
    for start in range(0, len(pairs), 16):
        batch = collate(pairs[start : start + 16])
        parts.append(torch.stack(answer_logp(model, *batch).chunk(2), 1))
    return torch.cat(parts)


def preference_loss(logp, reference):
    """Sigmoid loss where some of the labels are taken to be wrong; the margins too."""
    chosen, rejected = logp.chunk(2)
    gained = chosen - reference[:, 0]
    lost = rejected - reference[:, 1]
    margin = cfg.beta * (gained - lost)
    right, wrong = F.logsigmoid(margin), F.logsigmoid(-margin)
    loss = -(1 - cfg.smoothing) * right - cfg.smoothing * wrong
    return loss.mean(), margin.detach()


def main():
    torch.manual_seed(cfg.seed)
    gen = torch.Generator().manual_seed(cfg.seed + 1)
    pairs = make_pairs(gen)
    policy = Decoder()
    load_supervised(policy, supervised_checkpoint(gen))
    reference = copy.deepcopy(policy).requires_grad_(False)
    merge_adapter(policy, adapter_checkpoint(gen))
    reference.eval()
    known = reference_logps(reference, pairs)
    matrices = [p for p in policy.parameters() if p.ndim > 1]
    vectors = [p for p in policy.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    opt = torch.optim.AdamW(groups, cfg.lr, (0.9, 0.95), 1e-6, cfg.decay)
    warm = lambda step: min(1.0, (step + 1) / cfg.warmup)  # noqa: E731
    sched = torch.optim.lr_scheduler.LambdaLR(opt, warm)
    policy.train()
    order = torch.randperm(len(pairs), generator=gen)
    chunks = iter(order.split(cfg.micro))
    for step in range(cfg.steps):
        opt.zero_grad()
        total, accuracy = 0.0, 0.0
        for _ in range(cfg.accumulate):
            rows = next(chunks)
            batch = collate([pairs[row] for row in rows.tolist()])
            logp = answer_logp(policy, *batch)
            loss, margin = preference_loss(logp, known[rows])
            (loss / cfg.accumulate).backward()
            total += loss.item() / cfg.accumulate
            accuracy += (margin > 0).float().mean().item() / cfg.accumulate
        norm = nn.utils.clip_grad_norm_(policy.parameters(), cfg.clip)
        opt.step()
        sched.step()
        print(f"{step}: loss {total:.4f} accuracy {accuracy:.2f} norm {norm:.3f}")


if __name__ == "__main__":
    main()
