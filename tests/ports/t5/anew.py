"""An encoder and decoder with relative positions, as one would write it anew."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

W = Path(__file__).parent / "weights.pt"
HEADS = 4


def bucket(distance, both):
    """distance = key - query."""
    n, base = 8, 0
    if both:
        n = 4
        base = n if distance > 0 else 0
        distance = abs(distance)
    else:
        distance = max(-distance, 0)
    exact = n // 2
    if distance < exact:
        return base + distance
    far = exact + int(math.log(distance / exact) / math.log(16 / exact) * (n - exact))
    return base + min(far, n - 1)


def buckets(q, k, both):
    return torch.tensor([[bucket(j - i, both) for j in range(k)] for i in range(q)])


def rms(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, eps=1e-6)


class Attend(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(n))
        self.query = nn.Parameter(torch.zeros(n, HEADS, n // HEADS))
        self.keyvalue = nn.Parameter(torch.zeros(2, n, HEADS, n // HEADS))
        self.out = nn.Parameter(torch.zeros(HEADS, n // HEADS, n))

    def forward(self, x, memory=None, bias=None):
        h = rms(x, self.norm)
        memory = h if memory is None else memory
        q = torch.einsum("bqn,nhd->bhqd", h, self.query)
        k, v = torch.einsum("bkn,tnhd->tbhkd", memory, self.keyvalue)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=1.0)
        return x + torch.einsum("bhqd,hdn->bqn", y, self.out)


class Gated(nn.Module):
    def __init__(self, n, wide):
        super().__init__()
        self.norm = nn.Parameter(torch.ones(n))
        self.gate_up = nn.Linear(n, 2 * wide, bias=False)
        self.down = nn.Linear(wide, n, bias=False)

    def forward(self, x):
        gate, up = self.gate_up(rms(x, self.norm)).chunk(2, -1)
        gate = (
            0.5
            * gate
            * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        )
        return x + self.down(gate * up)


class Net(nn.Module):
    def __init__(self, vocab=70, n=32, wide=48):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(vocab, n))
        self.near = nn.Parameter(torch.zeros(8, HEADS))
        self.past = nn.Parameter(torch.zeros(8, HEADS))
        self.encoder = nn.ModuleList(
            [Attend(n), Gated(n, wide), Attend(n), Gated(n, wide)]
        )
        self.encoded = nn.Parameter(torch.ones(n))
        self.own = Attend(n)
        self.cross = Attend(n)
        self.mlp = Gated(n, wide)
        self.decoded = nn.Parameter(torch.ones(n))

    def forward(self, source, keep, target):
        x = self.table[source]
        hidden = torch.zeros(keep.shape).masked_fill(keep == 0, -1e9)[:, None, None, :]
        s, t = source.shape[1], target.shape[1]
        bias = self.near[buckets(s, s, True)].permute(2, 0, 1) + hidden
        for layer in self.encoder:
            x = layer(x, bias=bias) if isinstance(layer, Attend) else layer(x)
        memory = rms(x, self.encoded)
        y = self.table[target]
        future = torch.full((t, t), -1e9).triu(1)
        past = self.past[buckets(t, t, False)].permute(2, 0, 1) + future
        y = self.own(y, bias=past[None].expand(len(y), -1, -1, -1))
        y = self.cross(y, memory, hidden.expand(-1, HEADS, t, -1))
        y = rms(self.mlp(y), self.decoded)
        return y @ self.table.T


def model():
    w = torch.load(W)
    s = {
        "table": w["shared.weight"],
        "near": w[
            "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ],
        "past": w[
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        ],
        "encoded": w["encoder.final_layer_norm.weight"],
        "decoded": w["decoder.final_layer_norm.weight"],
    }

    def heads(matrix):
        return matrix.t().reshape(32, HEADS, 8)

    def attend(to, layer, kind):
        a = f"{layer}.{kind}."
        s[to + ".norm"] = w[layer + ".layer_norm.weight"]
        s[to + ".query"] = heads(w[a + "q.weight"])
        s[to + ".keyvalue"] = torch.stack(
            [heads(w[a + "k.weight"]), heads(w[a + "v.weight"])]
        )
        s[to + ".out"] = w[a + "o.weight"].t().reshape(HEADS, 8, 32)

    def gated(to, layer):
        a = layer + ".DenseReluDense."
        s[to + ".norm"] = w[layer + ".layer_norm.weight"]
        s[to + ".gate_up.weight"] = torch.cat(
            [w[a + "wi_0.weight"], w[a + "wi_1.weight"]]
        )
        s[to + ".down.weight"] = w[a + "wo.weight"]

    for i in range(2):
        attend(f"encoder.{2 * i}", f"encoder.block.{i}.layer.0", "SelfAttention")
        gated(f"encoder.{2 * i + 1}", f"encoder.block.{i}.layer.1")
    attend("own", "decoder.block.0.layer.0", "SelfAttention")
    attend("cross", "decoder.block.0.layer.1", "EncDecAttention")
    gated("mlp", "decoder.block.0.layer.2")
    net = Net()
    net.load_state_dict(s)
    return net


def forward(model, batch):
    return model(*batch[:3])


def loss(output, batch):
    logs = output.log_softmax(-1)
    picked = logs.gather(-1, batch[3].unsqueeze(-1)).squeeze(-1)
    return -(0.9 * picked + 0.1 * logs.mean(-1)).mean()


def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-6)
