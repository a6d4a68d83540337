"""Tokens sorted by their expert, each expert on its slice, put back by scatter."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Norm(nn.RMSNorm):
    def __init__(self, n):
        super().__init__(n, eps=1e-6)


class GLU(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.gate_up = nn.Linear(n, 2 * m, bias=False)
        self.down = nn.Linear(m, n, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class SparseMLP(nn.Module):
    def __init__(self, n, m, experts, k):
        super().__init__()
        self.k = k
        self.gate = nn.Linear(n, experts, bias=False)
        self.mlps = nn.ModuleList([GLU(n, m) for _ in range(experts)])
        self.always = GLU(n, m)
        self.always_gate = nn.Linear(n, 1)

    def forward(self, x):
        flat = x.flatten(0, 1)
        logits = self.gate(flat)
        top, index = logits.topk(self.k)
        # softmax over the chosen alone is softmax over all, renormalised
        share = top.softmax(-1).flatten()
        order = index.flatten().argsort(stable=True)
        rows = order // self.k
        sizes = torch.bincount(index.flatten(), minlength=len(self.mlps)).tolist()
        outs = [mlp(part) for mlp, part in zip(self.mlps, flat[rows].split(sizes))]
        y = torch.cat(outs) * share[order].unsqueeze(1)
        y = torch.zeros_like(flat).scatter_add(0, rows[:, None].expand_as(y), y)
        y = y + self.always(flat) * self.always_gate(flat).sigmoid()
        p = F.softmax(logits, dim=1)
        f = torch.tensor(sizes, dtype=p.dtype) / len(flat)
        return y.view_as(x), len(self.mlps) * (f * p.mean(0)).sum()


class Layer(nn.Module):
    def __init__(self, n, heads):
        super().__init__()
        self.heads = heads
        self.ln_attn = Norm(n)
        self.q_proj = nn.Linear(n, n, bias=False)
        self.k_proj = nn.Linear(n, n, bias=False)
        self.v_proj = nn.Linear(n, n, bias=False)
        self.o_proj = nn.Linear(n, n, bias=False)
        self.ln_mlp = Norm(n)
        self.mlp = SparseMLP(n, 10, 5, 2)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        h = self.ln_attn(x)
        q, k, v = map(self.split, (self.q_proj(h), self.k_proj(h), self.v_proj(h)))
        scores = q @ k.mT / q.size(-1) ** 0.5
        ban = torch.full((x.size(1), x.size(1)), float("-inf"), dtype=x.dtype).triu(1)
        h = (scores + ban).softmax(-1) @ v
        x = x + self.o_proj(h.transpose(1, 2).flatten(2))
        h, aux = self.mlp(self.ln_mlp(x))
        return x + h, aux


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(23, 12)
        self.embed_positions = nn.Embedding(9, 12)
        self.layers = nn.ModuleList([Layer(12, 2), Layer(12, 2)])
        self.ln_f = Norm(12)
        self.lm_head = nn.Linear(12, 23, bias=False)

    def forward(self, ids):
        x = self.embed_tokens(ids) + self.embed_positions(torch.arange(ids.size(1)))
        losses = []
        for layer in self.layers:
            x, aux = layer(x)
            losses.append(aux)
        return {"logits": self.lm_head(self.ln_f(x)), "balance": sum(losses)}


def renamed(w):
    s = {}
    s["embed_tokens.weight"] = w["words.weight"]
    s["embed_positions.weight"] = w["places.weight"]
    s["ln_f.weight"] = w["norm.weight"]
    s["lm_head.weight"] = w["head.weight"]

    def glu(to, source):
        pair = [w[source + "w1.weight"], w[source + "w3.weight"]]
        s[to + "gate_up.weight"] = torch.cat(pair)
        s[to + "down.weight"] = w[source + "w2.weight"]

    for i in range(2):
        a, b = f"layers.{i}.", f"blocks.{i}."
        s[a + "ln_attn.weight"] = w[b + "norm1.weight"]
        s[a + "ln_mlp.weight"] = w[b + "norm2.weight"]
        for name, part in zip("qkv", w[b + "attention.qkv.weight"].chunk(3)):
            s[a + f"{name}_proj.weight"] = part
        s[a + "o_proj.weight"] = w[b + "attention.out.weight"]
        s[a + "mlp.gate.weight"] = w[b + "mixture.router.weight"]
        for e in range(5):
            glu(a + f"mlp.mlps.{e}.", b + f"mixture.experts.{e}.")
        glu(a + "mlp.always.", b + "mixture.shared.")
        for kind in ("weight", "bias"):
            s[a + f"mlp.always_gate.{kind}"] = w[b + f"mixture.shared_gate.{kind}"]
    return s


def model():
    net = LM()
    net.load_state_dict(renamed(torch.load(Path(__file__).with_name("weights.pt"))))
    return net


def forward(net, batch):
    return net(batch["ids"])


def loss(output, batch):
    ids = batch["ids"]
    scores = output["logits"][:, :-1].transpose(1, 2)
    return F.cross_entropy(scores, ids[:, 1:]) + output["balance"] * 0.02


def optimizer(net):
    small = [p for p in net.parameters() if p.dim() < 2]
    large = [p for p in net.parameters() if p.dim() >= 2]
    return torch.optim.AdamW(
        [
            {"params": small, "weight_decay": 0.0},
            {"params": large, "weight_decay": 0.1},
        ],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
