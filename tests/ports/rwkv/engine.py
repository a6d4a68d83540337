"""RWKV as it is served: one token after the other, all memory in a state of five rows a layer.

Rows of a layer's state: last input of the attention, numerator, denominator, greatest
exponent, last input of the feed-forward net. Matrices are stored (in, out).
"""

from pathlib import Path

import torch
from torch import nn

EPS = 1e-5


class Weights(nn.Module):
    def __init__(self, arrays):
        super().__init__()
        for name, value in arrays.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))


def norm(x, gain, bias):
    x = x - x.mean()
    return x * torch.rsqrt(x.square().mean() + EPS) * gain + bias


def attention(p, x, last, num, den, top):
    r = torch.sigmoid((x + (last - x) * p.att_past_r) @ p.att_r)
    k = (x + (last - x) * p.att_past_k) @ p.att_k
    v = (x + (last - x) * p.att_past_v) @ p.att_v

    boosted = k + p.bonus
    peak = torch.maximum(top, boosted)
    old, new = torch.exp(top - peak), torch.exp(boosted - peak)
    mean = (old * num + new * v) / (old * den + new)

    aged = top - torch.exp(p.decay)
    top = torch.maximum(aged, k)
    old, new = torch.exp(aged - top), torch.exp(k - top)
    num = old * num + new * v
    den = old * den + new
    return (r * mean) @ p.att_out, (num, den, top)


def feed_forward(p, x, last):
    r = torch.sigmoid((x + (last - x) * p.ffn_past_r) @ p.ffn_r)
    k = (x + (last - x) * p.ffn_past_k) @ p.ffn_k
    k = torch.clamp(k, min=0)
    return r * ((k * k) @ p.ffn_v)


class Engine(nn.Module):
    def __init__(self, top_level, layers):
        super().__init__()
        self.base = Weights(top_level)
        self.layers = nn.ModuleList(Weights(arrays) for arrays in layers)

    def fresh_state(self):
        """Return the state before the first token: (layers, 5, width)."""
        width = self.base.emb.shape[1]
        state = torch.zeros(len(self.layers), 5, width)
        state[:, 3] = -1e30
        return state

    def step(self, token, state):
        p = self.base
        x = norm(p.emb[token], p.emb_gain, p.emb_bias)
        rows = []
        for i, layer in enumerate(self.layers):
            att_last, num, den, top, ffn_last = state[i].unbind()
            a = norm(x, layer.att_gain, layer.att_bias)
            y, sums = attention(layer, a, att_last, num, den, top)
            x = x + y
            f = norm(x, layer.ffn_gain, layer.ffn_bias)
            x = x + feed_forward(layer, f, ffn_last)
            rows.append(torch.stack([a, *sums, f]))
        x = norm(x, p.out_gain, p.out_bias)
        return x @ p.head, torch.stack(rows)

    def forward(self, prompts):
        answers = []
        for prompt in prompts:
            state = self.fresh_state()
            scores = []
            for token in prompt:
                score, state = self.step(token, state)
                scores.append(score)
            answers.append(torch.stack(scores))
        return torch.stack(answers)


def read_layer(w, i):
    block = f"blocks.{i}."
    att, ffn = block + "att.", block + "ffn."
    p = {
        "att_gain": w[block + "ln1.weight"],
        "att_bias": w[block + "ln1.bias"],
        "ffn_gain": w[block + "ln2.weight"],
        "ffn_bias": w[block + "ln2.bias"],
        "decay": w[att + "time_decay"],
        "bonus": w[att + "time_first"],
    }
    for key in ("r", "k", "v"):
        p["att_past_" + key] = 1 - w[att + "time_mix_" + key].squeeze()
    for key in ("r", "k"):
        p["ffn_past_" + key] = 1 - w[ffn + "time_mix_" + key].squeeze()
    for key, name in (("r", "receptance"), ("k", "key"), ("v", "value")):
        p["att_" + key] = w[att + name + ".weight"].t()
        p["ffn_" + key] = w[ffn + name + ".weight"].t()
    p["att_out"] = w[att + "output.weight"].t()
    return p


def model():
    w = torch.load(Path(__file__).with_name("weights.pt"))
    base = {
        "emb": w["emb.weight"],
        "emb_gain": w["ln0.weight"],
        "emb_bias": w["ln0.bias"],
        "out_gain": w["ln_out.weight"],
        "out_bias": w["ln_out.bias"],
        "head": w["head.weight"].t(),
    }
    n_layer = 1 + max(int(name.split(".")[1]) for name in w if "blocks" in name)
    return Engine(base, [read_layer(w, i) for i in range(n_layer)])


def forward(net, batch):
    return net(batch["idx"])


def loss(output, batch):
    spoken = batch["targets"] > 0
    scores, wanted = output[spoken], batch["targets"][spoken]
    right = scores[torch.arange(len(wanted)), wanted]
    return torch.mean(torch.logsumexp(scores, dim=1) - right)


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-6)
