"""Questions find their passages: a slow encoder fills a queue of negatives, the hardest of the batch weigh more."""

import math

import torch
from torch import nn
from torch.nn import functional as F

CFG = {
    # corpus
    "vocab": 64, "topics": 8, "passages": 48, "longest": 12, "asked": 4, "typo": 0.15,
    # encoder
    "embed": 16, "hidden": 24, "out": 12, "drop": 0.1,
    # negatives
    "queue": 20, "hard": 2, "margin": 0.5, "keep": 0.9, "tau": 0.1, "tau_least": 0.02, "spread": 0.2,
    # optimisation
    "micro": 6, "accumulate": 2, "steps": 6, "warm": 2, "peak": 1e-2, "decay": 0.1, "clip": 0.5,
}  # fmt: skip


class OnSphere(torch.autograd.Function):
    """x / |x| for each row; only what goes along the sphere comes back."""

    @staticmethod
    def forward(ctx, x):
        length = x.norm(dim=1, keepdim=True).clamp_min(1e-6)
        unit = x / length
        ctx.save_for_backward(unit, length)
        return unit

    @staticmethod
    def backward(ctx, grad):
        unit, length = ctx.saved_tensors
        outwards = (grad * unit).sum(1, keepdim=True)
        return (grad - outwards * unit) / length


def write_corpus(seed: int) -> torch.Tensor:
    """Token ids by passage, 0 behind the last one; a topic has its own words."""
    rng = torch.Generator().manual_seed(seed)
    likely = torch.rand(CFG["topics"], CFG["vocab"], generator=rng) ** 5
    likely[:, 0] = 0.0
    topic = torch.arange(CFG["passages"]) % CFG["topics"]
    tokens = torch.multinomial(likely[topic], CFG["longest"], replacement=True, generator=rng)
    length = torch.randint(5, CFG["longest"] + 1, (len(tokens), 1), generator=rng)
    return tokens.masked_fill(torch.arange(CFG["longest"]) >= length, 0)


def ask(passages: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """A few words of each passage in their order; now and then one is mistyped."""
    places = torch.multinomial((passages > 0).float(), CFG["asked"], generator=rng)
    words = passages.gather(1, places.sort(1).values)
    mistyped = torch.rand(words.shape, generator=rng) < CFG["typo"]
    others = torch.randint(1, CFG["vocab"], words.shape, generator=rng)
    return torch.where(mistyped, others, words)


def rarity(tokens: torch.Tensor) -> torch.Tensor:
    """Inverse document frequency, smoothed; padding weighs nothing."""
    present = torch.zeros(len(tokens), CFG["vocab"]).scatter_(1, tokens, 1.0)
    idf = torch.log((1 + len(tokens)) / (1 + present.sum(0))) + 1
    idf[0] = 0.0
    return idf


def make_encoder(idf: torch.Tensor) -> nn.ModuleDict:
    net = nn.ModuleDict()
    net["words"] = nn.Embedding(CFG["vocab"], CFG["embed"], padding_idx=0)
    net["near"] = nn.Conv1d(CFG["embed"], CFG["embed"], 3, padding=1, groups=4)
    net["norm"] = nn.LayerNorm(CFG["embed"])
    net["drop"] = nn.Dropout(CFG["drop"])
    net["wide"] = nn.Linear(2 * CFG["embed"], CFG["hidden"])
    net["narrow"] = nn.Linear(CFG["hidden"], CFG["out"], bias=False)
    net.register_buffer("idf", idf.clone())
    nn.init.normal_(net["words"].weight[1:], std=0.3)
    nn.init.orthogonal_(net["wide"].weight, gain=math.sqrt(2))
    nn.init.zeros_(net["wide"].bias)
    return net


def encode(net: nn.ModuleDict, tokens: torch.Tensor) -> torch.Tensor:
    x = net["words"](tokens)
    x = x + F.gelu(net["near"](x.mT)).mT
    x = net["drop"](net["norm"](x))
    weight = net.idf[tokens]
    weight = weight / weight.sum(1, keepdim=True)
    mean = (weight[:, :, None] * x).sum(1)
    peak = x.masked_fill((tokens == 0)[:, :, None], -math.inf).amax(1)
    x = torch.cat([mean, peak], dim=1)
    return OnSphere.apply(net["narrow"](F.gelu(net["wide"](x))))


def filled(slow: nn.ModuleDict, tokens: torch.Tensor) -> dict:
    """A queue of the first passages."""
    ids = torch.arange(CFG["queue"])
    with torch.no_grad():
        return {"keys": encode(slow, tokens[ids]), "ids": ids, "next": 0}


def enqueue(queue: dict, keys: torch.Tensor, ids: torch.Tensor) -> None:
    """The newest keys take the places of the oldest ones."""
    size = len(queue["ids"])
    places = (queue["next"] + torch.arange(len(ids))) % size
    queue["keys"][places] = keys
    queue["ids"][places] = ids
    queue["next"] = (queue["next"] + len(ids)) % size


def contrastive(q, k, ids, queue, log_scale):
    """The right passage against the hardest others of the batch, and against the queue."""
    q = q * log_scale.clamp(max=-math.log(CFG["tau_least"])).exp()
    right = (q * k).sum(1, keepdim=True)
    batch = (q @ k.T).masked_fill(ids[:, None] == ids, -math.inf)
    hard = batch.topk(CFG["hard"], dim=1).values + CFG["margin"]
    older = q @ queue["keys"].T
    older = older.masked_fill(ids[:, None] == queue["ids"], -math.inf)
    logits = torch.cat([right, hard, older], dim=1)
    return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def crowding(q):
    """Low where the questions spread over the whole sphere."""
    return torch.pdist(q).square().mul(-2).exp().mean().log()


def rate(step: int) -> float:
    rising = min(1.0, (step + 1) / CFG["warm"])
    return rising * 0.5 * (1 + math.cos(math.pi * step / CFG["steps"]))


def parameter_groups(net: nn.ModuleDict, log_scale: nn.Parameter) -> list[dict]:
    decayed, free = [], [log_scale]
    for name, p in net.named_parameters():
        (free if p.ndim == 1 or name.startswith("words") else decayed).append(p)
    return [
        {"params": decayed, "weight_decay": CFG["decay"]},
        {"params": free, "weight_decay": 0.0},
    ]


def follow(slow: nn.ModuleDict, fast: nn.ModuleDict) -> None:
    with torch.no_grad():
        for s, f in zip(slow.parameters(), fast.parameters(), strict=True):
            s.copy_(CFG["keep"] * s + (1 - CFG["keep"]) * f)


@torch.no_grad()
def recall(fast, slow, tokens, first: int = 3) -> float:
    fast.eval()
    questions = encode(fast, ask(tokens, torch.Generator().manual_seed(7)))
    found = (questions @ encode(slow, tokens).T).topk(first, dim=1).indices
    fast.train()
    return (found == torch.arange(len(tokens))[:, None]).any(1).float().mean().item()


def train() -> None:
    torch.manual_seed(110)
    tokens = write_corpus(111)
    idf = rarity(tokens)
    fast = make_encoder(idf)
    slow = make_encoder(idf).requires_grad_(False).eval()
    slow.load_state_dict(fast.state_dict())
    log_scale = nn.Parameter(torch.tensor(-math.log(CFG["tau"])))
    optimizer = torch.optim.AdamW(parameter_groups(fast, log_scale), lr=CFG["peak"], betas=(0.9, 0.98))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    queue = filled(slow, tokens)
    rng = torch.Generator().manual_seed(112)
    order = torch.randperm(len(tokens), generator=rng)
    for step, rows in enumerate(order.split(CFG["micro"] * CFG["accumulate"])):
        optimizer.zero_grad()
        shown = 0.0
        for ids in rows.split(CFG["micro"]):
            passages = tokens[ids]
            q = encode(fast, ask(passages, rng))
            with torch.no_grad():
                k = encode(slow, passages)
            loss = contrastive(q, k, ids, queue, log_scale) + CFG["spread"] * crowding(q)
            (loss / CFG["accumulate"]).backward()
            enqueue(queue, k, ids)
            shown += loss.item() / CFG["accumulate"]
        norm = nn.utils.clip_grad_norm_([*fast.parameters(), log_scale], CFG["clip"])
        optimizer.step()
        scheduler.step()
        follow(slow, fast)
        print(f"step {step}: loss {shown:.5f}, norm {norm:.4f}, scale {log_scale.exp():.4f}")
    print(f"recall {recall(fast, slow, tokens):.3f}")


if __name__ == "__main__":
    train()
