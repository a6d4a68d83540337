"""Loops over heads and queries; a dot product with one distance at a time."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

HEADS, SIZE, WIDTH = 3, 4, 12


class Head(nn.Module):
    def __init__(self, w, prefix, head):
        super().__init__()
        at = slice(head * SIZE, (head + 1) * SIZE)
        qkv = w[prefix + "qkv_net.weight"].view(3, WIDTH, WIDTH)
        self.key_value = nn.Linear(WIDTH, 2 * SIZE, bias=False)
        self.key_value.weight.data = torch.cat([qkv[1, at], qkv[2, at]])
        self.query = nn.Linear(WIDTH, SIZE, bias=False)
        self.query.weight.data = qkv[0, at].clone()
        self.far = nn.Linear(WIDTH, SIZE, bias=False)
        self.far.weight.data = w[prefix + "r_net.weight"][at].clone()

    def forward(self, now, context, waves, u, v):
        """now (n, t, width), context (n, s, width), waves by distance."""
        q = self.query(now)
        key, value = self.key_value(context).split(SIZE, dim=2)
        far = self.far(waves)
        before = context.shape[1] - now.shape[1]
        rows = []
        for i in range(now.shape[1]):
            last = before + i + 1
            seen = torch.bmm(key[:, :last], (q[:, i] + u).unsqueeze(2)).squeeze(2)
            place = (q[:, i] + v) @ far[:last].flip(0).t()
            share = F.softmax((seen + place) / math.sqrt(SIZE), dim=1)
            rows.append((share.unsqueeze(2) * value[:, :last]).sum(1))
        return torch.stack(rows, 1)


class Layer(nn.Module):
    def __init__(self, w, prefix):
        super().__init__()
        self.heads = nn.ModuleList(
            Head(w, prefix + "attn.", head) for head in range(HEADS)
        )
        self.join = nn.Linear(WIDTH, WIDTH, bias=False)
        self.join.weight.data = w[prefix + "attn.o_net.weight"]
        self.norm_a = nn.LayerNorm(WIDTH)
        self.norm_b = nn.LayerNorm(WIDTH)
        for norm, name in (
            (self.norm_a, "attn.layer_norm"),
            (self.norm_b, "layer_norm"),
        ):
            norm.weight.data = w[prefix + name + ".weight"]
            norm.bias.data = w[prefix + name + ".bias"]
        self.inner = nn.Linear(WIDTH, 20)
        self.outer = nn.Linear(20, WIDTH)
        for layer, i in ((self.inner, 0), (self.outer, 2)):
            layer.weight.data = w[prefix + f"core.{i}.weight"]
            layer.bias.data = w[prefix + f"core.{i}.bias"]

    def forward(self, x, past, waves, u, v):
        context = x if past is None else torch.cat((past, x), 1)
        parts = [
            head(x, context, waves, u[i], v[i]) for i, head in enumerate(self.heads)
        ]
        x = self.norm_a(self.join(torch.cat(parts, -1)) + x)
        return self.norm_b(self.outer(self.inner(x).relu()) + x)


class Net(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.words = nn.Embedding.from_pretrained(w["word_emb.weight"], freeze=False)
        self.logits = nn.Linear(WIDTH, len(w["out_bias"]))
        self.logits.weight = self.words.weight
        self.logits.bias.data = w["out_bias"]
        self.u = nn.Parameter(w["r_w_bias"])
        self.v = nn.Parameter(w["r_r_bias"])
        self.layers = nn.ModuleList(Layer(w, f"layers.{i}.") for i in (0, 1))
        far = torch.arange(10.0)[:, None] * w["pos_emb.inv_freq"]
        self.register_buffer("waves", torch.cat((far.sin(), far.cos()), 1))

    def forward(self, text):
        memory: list[torch.Tensor | None] = [None, None]
        result = []
        for piece in text.split(4, dim=1):
            x = self.words(piece) * math.sqrt(WIDTH)
            for i, layer in enumerate(self.layers):
                past = memory[i]
                fresh = x.detach()
                kept = fresh if past is None else torch.cat((past, fresh), 1)
                memory[i] = kept[:, -6:]
                x = layer(x, past, self.waves, self.u, self.v)
            result.append(self.logits(x))
        return torch.cat(result, 1)


def model():
    return Net(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["text"][:, :-1])


def loss(output, batch):
    return F.nll_loss(output.log_softmax(-1).transpose(1, 2), batch["text"][:, 1:])


def optimizer(net):
    return torch.optim.Adam(net.parameters(), 2e-3, eps=1e-6)
