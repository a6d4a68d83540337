"""Tags for words of product names: low-rank adapters on a small frozen encoder.

q and v of every block get an adapter, the head is new. What is shipped is the moving
average of the adapters, merged into the weights, so that is what is evaluated.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

PAD, BOS, UNK, FIRST = 0, 1, 2, 3
IGNORE = -100
TAGS = ["other", "brand", "size", "colour", "model"]


@dataclass
class Config:
    seed: int = 5
    vocab: int = 48
    longest: int = 16  # with the first piece
    dim: int = 32
    heads: int = 4
    blocks: int = 3
    checkpointed: int = 1
    rank: int = 4
    alpha: float = 10.0
    names: int = 160
    batch: int = 10
    accumulate: int = 2
    steps: int = 3
    lr: float = 4e-3
    head_lr: float = 1e-2
    layer_decay: float = 0.6
    b_ratio: float = 3.0
    weight_decay: float = 0.05
    warmup: int = 4
    clip: float = 0.3
    ema: float = 0.7
    word_drop: float = 0.1


C = Config()


def make_names(gen):
    """Pieces of words, whether a piece goes on with a word, and a tag for every piece."""
    kind = torch.randint(len(TAGS), (C.vocab,), generator=gen)
    kind[torch.rand(C.vocab, generator=gen) < 0.45] = 0
    rows = []
    for _ in range(C.names):
        n = int(torch.randint(5, C.longest, (), generator=gen))
        pieces = torch.randint(FIRST, C.vocab, (n,), generator=gen)
        goes_on = torch.rand(n, generator=gen) < 0.25
        goes_on[0] = False
        tags = kind[pieces].clone()
        # a size after a brand is the name of a model
        tags[1:][(tags[1:] == 2) & (tags[:-1] == 1)] = 4
        rows.append((pieces, goes_on, tags))
    return rows


def collate(rows):
    """Padded on the right, after a first piece that has no tag."""
    width = 1 + max(len(pieces) for pieces, _, _ in rows)
    tokens = torch.full((len(rows), width), PAD)
    target = torch.full((len(rows), width), IGNORE)
    tokens[:, 0] = BOS
    for i, (pieces, goes_on, tags) in enumerate(rows):
        tokens[i, 1 : len(pieces) + 1] = pieces
        target[i, 1 : len(pieces) + 1] = tags.masked_fill(goes_on, IGNORE)
    return tokens, target


def drop_words(tokens, gen):
    dropped = torch.rand(tokens.shape, generator=gen) < C.word_drop
    return tokens.masked_fill(dropped & (tokens >= FIRST), UNK)


def batches(rows, gen):
    """Micro-batches without an end."""
    while True:
        order = torch.randperm(len(rows), generator=gen).tolist()
        for start in range(0, len(order) - C.batch + 1, C.batch):
            tokens, target = collate([rows[i] for i in order[start : start + C.batch]])
            yield drop_words(tokens, gen), target


def class_weights(rows):
    """Rare tags count more."""
    tags = torch.cat([tags[~goes_on] for _, goes_on, tags in rows])
    counts = torch.bincount(tags, minlength=len(TAGS)).float()
    return (counts.mean() / counts).sqrt()


class LowRank(torch.autograd.Function):
    """x W^T + b + scale (x A^T) B^T; W and b are frozen and get no gradient."""

    @staticmethod
    def forward(ctx, x, weight, bias, a, b, scale):
        down = x @ a.T
        ctx.save_for_backward(x, weight, a, b, down)
        ctx.scale = scale
        return torch.addmm(bias, x, weight.T).addmm_(down, b.T, alpha=scale)

    @staticmethod
    def backward(ctx, grad):
        x, weight, a, b, down = ctx.saved_tensors
        up = ctx.scale * (grad @ b)
        grad_x = grad @ weight + up @ a
        grad_a = up.T @ x
        grad_b = ctx.scale * (grad.T @ down)
        return grad_x, None, None, grad_a, grad_b, None


class AdaptedLinear(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.empty(C.rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, C.rank))
        self.scale = C.alpha / C.rank
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        nn.init.normal_(self.lora_b, std=0.02)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        args = self.base.weight, self.base.bias, self.lora_a, self.lora_b, self.scale
        return LowRank.apply(flat, *args).view_as(x)

    @torch.no_grad()
    def merged(self):
        whole = copy.deepcopy(self.base)
        whole.weight += self.scale * (self.lora_b @ self.lora_a)
        return whole


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C.dim), nn.LayerNorm(C.dim)
        self.q, self.k, self.v, self.out = (nn.Linear(C.dim, C.dim) for _ in range(4))
        self.up, self.down = nn.Linear(C.dim, 2 * C.dim), nn.Linear(2 * C.dim, C.dim)

    def attend(self, x, there):
        n, t, _ = x.shape
        q, k, v = (f(x).view(n, t, C.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        score = q @ k.mT / math.sqrt(q.shape[-1])
        score = score.masked_fill(~there[:, None, None, :], -1e9)
        mixed = score.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(n, t, -1))

    def forward(self, x, there):
        x = x + self.attend(self.norm1(x), there)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(C.vocab, C.dim)
        self.places = nn.Embedding(C.longest, C.dim)
        self.blocks = nn.ModuleList(Block() for _ in range(C.blocks))
        self.norm = nn.LayerNorm(C.dim)
        self.head = nn.Linear(C.dim, len(TAGS))

    def forward(self, tokens):
        there = tokens != PAD
        x = self.tokens(tokens)
        x = x + self.places.weight[: tokens.shape[1]]
        for i, block in enumerate(self.blocks):
            if i == C.checkpointed and torch.is_grad_enabled():
                x = checkpoint(block, x, there, use_reentrant=False)
            else:
                x = block(x, there)
        return self.head(self.norm(x))


def pretrained():
    """As the hub has it: q, k, v in one, kernels as [in, out], gains as distance to one."""
    gen = torch.Generator().manual_seed(1706)

    def normal(*shape, std):
        return std * torch.randn(*shape, generator=gen)

    d = C.dim
    saved = {"wte": normal(C.vocab, d, std=1.0), "wpe": normal(C.longest, d, std=0.7)}
    for i in range(C.blocks):
        for name, a, b in (("qkv", d, 3 * d), ("proj", d, d), ("fc", d, 2 * d), ("fc2", 2 * d, d)):
            saved[f"h{i}.{name}.kernel"] = normal(a, b, std=1.1 / math.sqrt(a))
            saved[f"h{i}.{name}.bias"] = normal(b, std=0.1)
        for name in ("ln1", "ln2"):
            saved[f"h{i}.{name}.gain"] = normal(d, std=0.3)
            saved[f"h{i}.{name}.shift"] = normal(d, std=0.2)
    saved["lnf.gain"], saved["lnf.shift"] = normal(d, std=0.3), normal(d, std=0.2)
    return saved


@torch.no_grad()
def load(model, saved):
    def linear(layer, kernel, bias):
        layer.weight.copy_(kernel.T)
        layer.bias.copy_(bias)

    def norm(layer, name):
        layer.weight.copy_(1 + saved[f"{name}.gain"])
        layer.bias.copy_(saved[f"{name}.shift"])

    model.tokens.weight.copy_(saved["wte"])
    model.places.weight.copy_(saved["wpe"])
    for i, block in enumerate(model.blocks):
        kernels = saved[f"h{i}.qkv.kernel"].chunk(3, dim=1)
        biases = saved[f"h{i}.qkv.bias"].chunk(3)
        for layer, kernel, bias in zip((block.q, block.k, block.v), kernels, biases, strict=True):
            linear(layer, kernel, bias)
        for layer, name in ((block.out, "proj"), (block.up, "fc"), (block.down, "fc2")):
            linear(layer, saved[f"h{i}.{name}.kernel"], saved[f"h{i}.{name}.bias"])
        norm(block.norm1, f"h{i}.ln1")
        norm(block.norm2, f"h{i}.ln2")
    norm(model.norm, "lnf")


def adapters(model):
    return {name: p for name, p in model.named_parameters() if "lora_" in name}


def param_groups(model):
    """Blocks near the input learn slowly, B faster than A."""
    groups = []
    for i, block in enumerate(model.blocks):
        lr = C.lr * C.layer_decay ** (C.blocks - 1 - i)
        low = adapters(block)
        for end, faster in (("_a", 1.0), ("_b", C.b_ratio)):
            params = [p for name, p in low.items() if name.endswith(end)]
            groups.append({"params": params, "lr": faster * lr})
    head = {"params": [*model.head.parameters()], "lr": C.head_lr}
    return [*groups, head | {"weight_decay": C.weight_decay}]


def tag_loss(logits, target, weights):
    """Mean over tagged pieces, each with the weight of its tag."""
    known = target != IGNORE
    logp = logits[known].log_softmax(-1)
    tag = target[known]
    nll = -logp.gather(1, tag[:, None]).squeeze(1)
    return (weights[tag] * nll).sum() / weights[tag].sum()


@torch.no_grad()
def evaluate(model, average, tokens, target, weights):
    shipped = copy.deepcopy(model)
    for name, p in adapters(shipped).items():
        p.copy_(average[name])
    for block in shipped.blocks:
        block.q, block.v = block.q.merged(), block.v.merged()
    return tag_loss(shipped(tokens), target, weights).item()


def main():
    torch.manual_seed(C.seed)
    gen = torch.Generator().manual_seed(C.seed + 1)
    rows = make_names(gen)
    held, rows = rows[:30], rows[30:]
    weights = class_weights(rows)
    model = Tagger()
    load(model, pretrained())
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    for block in model.blocks:
        block.q, block.v = AdaptedLinear(block.q), AdaptedLinear(block.v)
    average = {name: p.detach().clone() for name, p in adapters(model).items()}
    trained = [p for p in model.parameters() if p.requires_grad]

    opt = torch.optim.AdamW(param_groups(model), betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / C.warmup))
    stream = batches(rows, gen)
    for step in range(C.steps):
        opt.zero_grad()
        total = 0.0
        for _ in range(C.accumulate):
            tokens, target = next(stream)
            loss = tag_loss(model(tokens), target, weights) / C.accumulate
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(trained, C.clip)
        opt.step()
        sched.step()
        with torch.no_grad():
            for name, p in adapters(model).items():
                average[name].lerp_(p, 1 - C.ema)
        held_loss = evaluate(model, average, *collate(held), weights)
        print(f"step {step} loss {total:.5f} norm {norm:.4f} held {held_loss:.5f}")


if __name__ == "__main__":
    main()
