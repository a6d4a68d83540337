# Mesh style: every expert sees every token; a dense table says how much of it counts.
from pathlib import Path

import torch
import torch.nn as nn


def rms(x, scale, eps=1e-6):
    variance = torch.mean(torch.square(x), dim=-1, keepdim=True)
    return scale * (x / torch.sqrt(variance + eps))


class SelfAttention(nn.Module):
    def __init__(self, w, at, n_head=2):
        super().__init__()
        q, k, v = w[at + "qkv.weight"].chunk(3)
        dim = q.shape[1]
        self.q = nn.Parameter(q.T.reshape(dim, n_head, -1).clone())
        self.k = nn.Parameter(k.T.reshape(dim, n_head, -1).clone())
        self.v = nn.Parameter(v.T.reshape(dim, n_head, -1).clone())
        self.o = nn.Parameter(w[at + "out.weight"].T.reshape(n_head, -1, dim).clone())

    def forward(self, x):
        q = torch.einsum("bld,dhk->blhk", x, self.q)
        k = torch.einsum("bld,dhk->blhk", x, self.k)
        v = torch.einsum("bld,dhk->blhk", x, self.v)
        scores = torch.einsum("bqhk,bmhk->bhqm", q, k) * q.shape[-1] ** -0.5
        length = x.shape[1]
        future = torch.arange(length)[None, :] > torch.arange(length)[:, None]
        scores = scores.masked_fill(future, -torch.inf)
        share = torch.softmax(scores, dim=-1)
        y = torch.einsum("bhqm,bmhk->bqhk", share, v)
        return torch.einsum("bqhk,hkd->bqd", y, self.o)


class MoE(nn.Module):
    def __init__(self, w, at, n_experts=5):
        super().__init__()
        self.n_experts = n_experts
        self.gate = nn.Parameter(w[at + "router.weight"].T.clone())

        def stacked(name):
            parts = [w[f"{at}experts.{e}.{name}.weight"].T for e in range(n_experts)]
            return nn.Parameter(torch.stack(parts))

        self.wi = stacked("w1")
        self.wu = stacked("w3")
        self.wo = stacked("w2")
        self.shared_in = nn.Parameter(
            torch.cat(
                [w[at + "shared.w1.weight"], w[at + "shared.w3.weight"]]
            ).T.clone()
        )
        self.shared_out = nn.Parameter(w[at + "shared.w2.weight"].T.clone())
        self.shared_gate = nn.Parameter(w[at + "shared_gate.weight"][0].clone())
        self.shared_bias = nn.Parameter(w[at + "shared_gate.bias"].clone())

    def forward(self, x):
        probs = torch.softmax(torch.einsum("bld,de->ble", x, self.gate), dim=-1)
        best, where = probs.topk(2, dim=-1)
        picked = nn.functional.one_hot(where, self.n_experts).to(x.dtype)
        best = best / best.sum(dim=-1, keepdim=True)
        combine = torch.einsum("blk,blke->ble", best, picked)
        up = torch.einsum("bld,edf->blef", x, self.wi)
        up = up * torch.sigmoid(up) * torch.einsum("bld,edf->blef", x, self.wu)
        y = torch.einsum("blef,efd,ble->bld", up, self.wo, combine)
        a, b = torch.einsum("bld,df->blf", x, self.shared_in).chunk(2, dim=-1)
        s = (nn.functional.silu(a) * b) @ self.shared_out
        y = y + s * torch.sigmoid(x @ self.shared_gate + self.shared_bias)[..., None]
        density = picked.sum(dim=2).mean(dim=(0, 1))
        aux = torch.dot(density, probs.mean(dim=(0, 1))) * self.n_experts
        return y, aux


class Layer(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.pre_attention = nn.Parameter(w[at + "norm1.weight"].clone())
        self.pre_moe = nn.Parameter(w[at + "norm2.weight"].clone())
        self.mha = SelfAttention(w, at + "attention.")
        self.moe = MoE(w, at + "mixture.")

    def forward(self, x):
        x = x + self.mha(rms(x, self.pre_attention))
        update, aux = self.moe(rms(x, self.pre_moe))
        return x + update, aux


class Transformer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.embed = nn.Parameter(w["words.weight"].clone())
        self.pos = nn.Parameter(w["places.weight"].clone())
        self.layer_0 = Layer(w, "blocks.0.")
        self.layer_1 = Layer(w, "blocks.1.")
        self.final = nn.Parameter(w["norm.weight"].clone())
        self.unembed = nn.Parameter(w["head.weight"].T.clone())

    def forward(self, tokens):
        x = self.embed[tokens]
        x = x + self.pos[torch.arange(tokens.shape[1])]
        x, aux0 = self.layer_0(x)
        x, aux1 = self.layer_1(x)
        return {"logits": rms(x, self.final) @ self.unembed, "balance": aux0 + aux1}


def model():
    return Transformer(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["ids"])


def loss(output, batch):
    logp = torch.log_softmax(output["logits"], dim=-1)[:, :-1]
    onehot = nn.functional.one_hot(batch["ids"][:, 1:], logp.shape[-1])
    nll = -(logp * onehot).sum(dim=-1)
    return nll.mean() + 2e-2 * output["balance"]


def optimizer(net):
    decayed, plain = [], []
    for name, p in net.named_parameters():
        is_vector = p.ndim == 1 and not name.endswith("shared_gate")
        (plain if is_vector else decayed).append(p)
    return torch.optim.AdamW(
        [
            {"params": decayed, "weight_decay": 0.1},
            {"params": plain, "weight_decay": 0.0},
        ],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
