"""Functions of a dictionary of arrays; keys are never written out: queries go to the latent."""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

H, N, R, V = 2, 6, 4, 5
einsum = torch.einsum


def norm(scale, x, eps=1e-6):
    return x / torch.sqrt(torch.mean(x * x, -1, keepdim=True) + eps) * scale


def rope(x, positions):
    """x (batch, length, ..., R), pairs side by side."""
    rates = 10000.0 ** (-torch.arange(R // 2) * 2 / R)
    angles = positions[:, None] * rates
    angles = angles.reshape(1, len(positions), *[1] * (x.ndim - 3), R // 2)
    cos, sin = torch.cos(angles), torch.sin(angles)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat([even * cos - odd * sin, even * sin + odd * cos], -1)


def attention(p, x, mask):
    positions = torch.arange(x.shape[1])
    c_q = norm(p["q_scale"], einsum("btd,dr->btr", x, p["q_down"]))
    q = einsum("btr,rhk->bthk", c_q, p["q_up"])
    c = norm(p["kv_scale"], einsum("btd,dr->btr", x, p["kv_down"]))
    k_pe = rope(einsum("btd,dk->btk", x, p["k_rope"]), positions)
    q_c = einsum("bthn,rhn->bthr", q[..., :N], p["k_up"])
    logits = einsum("bthr,bsr->bhts", q_c, c)
    logits = logits + einsum("bthk,bsk->bhts", rope(q[..., N:], positions), k_pe)
    logits = logits * ((0.1 * np.log(4.0) + 1.0) ** 2 / np.sqrt(N + R))
    logits = torch.where(mask, logits, -1e30)
    probs = torch.exp(logits - torch.logsumexp(logits, -1, keepdim=True))
    context = einsum("bhts,bsr->bthr", probs, c)
    return einsum("bthr,rhv,hvd->btd", context, p["v_up"], p["out"])


def swiglu(p, x):
    gate = x @ p["gate"]
    return (gate * torch.sigmoid(gate) * (x @ p["up"])) @ p["down"]


def experts(p, x):
    """Every expert sees every token; those that were not chosen weigh nothing."""
    probs = torch.sigmoid(x @ p["router"])
    ranked = torch.argsort(probs + p["bias"], -1, descending=True)
    chosen = torch.zeros_like(probs).scatter(-1, ranked[..., :2], 1.0)
    weights = probs * chosen
    weights = weights / weights.sum(-1, keepdim=True) * 1.5
    gate = einsum("btd,edf->btef", x, p["e_gate"])
    up = einsum("btd,edf->btef", x, p["e_up"])
    hidden = gate * torch.sigmoid(gate) * up
    routed = einsum("btef,efd,bte->btd", hidden, p["e_down"], weights)
    return routed + swiglu(p["shared"], x)


def decoder_layer(p, x, mask, mlp):
    x = x + attention(p["attention"], norm(p["before_attention"], x), mask)
    return x + mlp(p["mlp"], norm(p["before_mlp"], x))


def apply(p, ids, real, labels):
    t = torch.arange(ids.shape[1])
    causal = t[None, :] <= t[:, None]
    near = causal & (t[None, :] > t[:, None] - 4)
    real = real.bool()[:, None, None, :]
    x = p["embed"][ids]
    x = decoder_layer(p["first"], x, causal & real, swiglu)
    x = decoder_layer(p["second"], x, near & real, experts)
    x = decoder_layer(p["third"], x, causal & real, experts)
    logits = norm(p["final"], x) @ p["unembed"]
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], -100)], 1)
    weights = (targets >= 0).float()
    one_hot = torch.nn.functional.one_hot(targets.clamp(min=0), logits.shape[-1])
    nll = torch.logsumexp(logits, -1) - (logits * one_hot).sum(-1)
    return (nll * weights).sum() / weights.sum()


def converted(sd):
    def kernel(name):
        return sd[name + ".weight"].T

    def heads(name, size):
        return kernel(name).unflatten(1, (H, size))

    def mlp(at):
        names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
        return {to: kernel(at + name) for to, name in names.items()}

    def moe(at):
        each = [mlp(f"{at}experts.{i}.") for i in range(5)]
        return {
            "router": kernel(at + "gate"),
            "bias": sd[at + "correction"],
            "shared": mlp(at + "shared_experts."),
            **{f"e_{to}": torch.stack([e[to] for e in each]) for to in each[0]},
        }

    def layer(i, convert):
        at = f"layers.{i}."
        attn = at + "self_attn."
        kv = heads(attn + "kv_b_proj", N + V)
        return {
            "before_attention": sd[at + "input_layernorm.weight"],
            "before_mlp": sd[at + "post_attention_layernorm.weight"],
            "mlp": convert(at + "mlp."),
            "attention": {
                "q_down": kernel(attn + "q_a_proj"),
                "q_scale": sd[attn + "q_a_layernorm.weight"],
                "q_up": heads(attn + "q_b_proj", N + R),
                "kv_down": kernel(attn + "kv_a_proj_with_mqa")[:, :8],
                "k_rope": kernel(attn + "kv_a_proj_with_mqa")[:, 8:],
                "kv_scale": sd[attn + "kv_a_layernorm.weight"],
                "k_up": kv[..., :N],
                "v_up": kv[..., N:],
                "out": kernel(attn + "o_proj").unflatten(0, (H, V)),
            },
        }

    return {
        "embed": sd["embed_tokens.weight"],
        "first": layer(0, mlp),
        "second": layer(1, moe),
        "third": layer(2, moe),
        "final": sd["norm.weight"],
        "unembed": kernel("lm_head"),
    }


class Tree(nn.Module):
    """Holds the arrays of a dictionary, so that an optimizer finds them."""

    def __init__(self, arrays):
        super().__init__()
        for name, value in arrays.items():
            if isinstance(value, dict):
                self.add_module(name, Tree(value))
            else:
                trained = name != "bias"
                self.register_parameter(
                    name, nn.Parameter(value.contiguous(), requires_grad=trained)
                )

    def arrays(self):
        below = {name: tree.arrays() for name, tree in self.named_children()}
        return dict(self._parameters) | below


def model():
    return Tree(converted(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    run = partial(apply, net.arrays())
    return run(batch["input_ids"], batch["attention_mask"], batch["labels"])


def loss(output, batch):
    return output


NORMS = ("scale", "before_attention", "before_mlp", "final")


def optimizer(net):
    decay, none = [], []
    for name, array in net.named_parameters():
        if array.requires_grad:
            (none if name.endswith(NORMS) else decay).append(array)
    groups = [{"params": decay}, {"params": none, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, 3e-3, (0.9, 0.95), 1e-8, 0.1)
