"""A language model of experts, as functions over a dict of tensors; a slow average is kept."""

import math

import torch
import torch.nn.functional as F

LAYERS, DIM, HEADS, EXPERTS, TOP, VOCAB, LENGTH = 2, 16, 2, 4, 2, 40, 12
ACCUMULATE, SLOW, AUX, PEAK = 2, 0.9, 0.02, 1e-2


def fresh(generator):
    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=generator) * scale / math.sqrt(shape[-1])

    params = {"embed": normal(VOCAB, DIM, scale=2.0), "out.gain": torch.ones(DIM)}
    for layer in range(LAYERS):
        params |= {
            f"{layer}.qkv": normal(3, DIM, DIM),
            f"{layer}.o": normal(DIM, DIM),
            f"{layer}.gain": torch.ones(DIM) + 0.1 * normal(DIM),
            f"{layer}.gate": normal(EXPERTS, DIM),
            f"{layer}.up": normal(EXPERTS, 2 * DIM, DIM),
            f"{layer}.down": normal(EXPERTS, DIM, 2 * DIM),
            f"{layer}.bias": 0.1 * normal(EXPERTS, DIM),
        }
    return params


def checkpoint():
    """What another program saved: other names, and matrices the other way round."""
    saved = fresh(torch.Generator().manual_seed(31))
    return {
        "model/" + name.replace(".", "/"): value.mT if value.ndim > 1 else value
        for name, value in saved.items()
    }


def restored(params):
    saved = checkpoint()
    for name in params:
        value = saved["model/" + name.replace(".", "/")]
        params[name] = (value.mT if value.ndim > 1 else value).clone()
    return params


def rms(x, gain):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def rotary(length, size):
    inverse = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angle = torch.outer(torch.arange(length), inverse)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x, turn):
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def attention(x, p, layer, turn):
    q, k, v = torch.einsum("bld,ned->nble", x, p[f"{layer}.qkv"]).unbind(0)
    q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
    q, k = rotate(q, turn), rotate(k, turn)
    score = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones(score.shape[-2:], dtype=torch.bool).triu(1)
    weight = score.masked_fill(future, float("-inf")).softmax(-1)
    mixed = (weight @ v).transpose(1, 2).flatten(2)
    return mixed @ p[f"{layer}.o"].T


def experts(x, p, layer):
    flat = x.reshape(-1, DIM)
    chance = (flat @ p[f"{layer}.gate"].T).softmax(-1)
    best, chosen = chance.topk(TOP, dim=-1)
    best = best / best.sum(-1, keepdim=True)
    out = torch.zeros_like(flat)
    for expert in range(EXPERTS):
        row, rank = torch.where(chosen == expert)
        if not len(row):
            continue
        hidden = F.gelu(flat[row] @ p[f"{layer}.up"][expert].T, approximate="tanh")
        result = hidden @ p[f"{layer}.down"][expert].T + p[f"{layer}.bias"][expert]
        out = out.index_add(0, row, best[row, rank, None] * result)
    share = F.one_hot(chosen[:, 0], EXPERTS).float().mean(0)
    balance = EXPERTS * (share * chance.mean(0)).sum()
    return out.view_as(x), balance


def loss_of(p, tokens):
    x = p["embed"][tokens[:, :-1]]
    turn = rotary(LENGTH, DIM // HEADS)
    auxiliary = 0.0
    for layer in range(LAYERS):
        x = x + attention(rms(x, p[f"{layer}.gain"]), p, layer, turn)
        more, balance = experts(x, p, layer)
        x = x + more
        auxiliary = auxiliary + balance
    logits = rms(x, p["out.gain"]) @ p["embed"].T
    nll = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return nll + AUX * auxiliary, nll.detach()


def text(count):
    """Sentences in which each word tells the next but one."""
    generator = torch.Generator().manual_seed(14)
    rows = torch.randint(VOCAB, (count, LENGTH + 1), generator=generator)
    rows[:, 2:] = (rows[:, :-2] * 3 + 1) % VOCAB
    return rows


def train(updates=2, batch=4):
    params = restored(fresh(torch.Generator().manual_seed(1)))
    for value in params.values():
        value.requires_grad_()
    slow = {name: value.detach().clone() for name, value in params.items()}
    decayed = [v for n, v in params.items() if v.ndim > 1 and n != "embed"]
    others = [v for n, v in params.items() if v.ndim == 1 or n == "embed"]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0}],
        lr=PEAK,
        betas=(0.9, 0.95),
        eps=1e-9,
    )
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1, (n + 1) / 4))
    batches = text(updates * ACCUMULATE * batch).split(batch)
    for update in range(updates):
        total = 0.0
        for part in batches[update * ACCUMULATE : (update + 1) * ACCUMULATE]:
            loss, nll = loss_of(params, part)
            (loss / ACCUMULATE).backward()
            total += nll.item() / ACCUMULATE
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
        warm.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, value in params.items():
                slow[name].mul_(SLOW).add_((1 - SLOW) * value)
        print(f"update {update}: {total:.5f}, norm {norm:.4f}")
    with torch.no_grad():
        print(f"slow weights: {loss_of(slow, batches[0])[1]:.5f}")


train()
