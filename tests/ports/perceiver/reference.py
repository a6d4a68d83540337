"""A few latents read the cells of a table, talk to each other, and answer two questions."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, LATENTS, HEADS = 24, 5, 3


class GEGLU(nn.Module):
    def __init__(self, width, times=2):
        super().__init__()
        self.enter = nn.Linear(width, 2 * times * width)
        self.leave = nn.Linear(times * width, width)

    def forward(self, x):
        x, gate = self.enter(x).chunk(2, dim=-1)
        return self.leave(x * F.gelu(gate))


class Attention(nn.Module):
    def __init__(self, width, context):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.norm_context = nn.LayerNorm(context)
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_kv = nn.Linear(context, 2 * width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, x, context=None, keep=None):
        x = self.norm(x)
        context = x if context is None else self.norm_context(context)
        q = self.to_q(x)
        k, v = self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        mask = None if keep is None else keep[:, None, None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.to_out(y.transpose(1, 2).flatten(2))


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.columns = nn.Parameter(torch.randn(9, 10) * 0.5)
        self.scale = nn.Parameter(torch.randn(9) * 0.3 + 1)
        self.offset = nn.Parameter(torch.randn(9) * 0.1)
        self.kinds = nn.Embedding(7, 12)
        self.latents = nn.Parameter(torch.randn(LATENTS, WIDTH) * 0.4)
        self.read = nn.ModuleList([Attention(WIDTH, 12 + 10) for _ in range(2)])
        self.read_mlp = nn.ModuleList([GEGLU(WIDTH) for _ in range(2)])
        self.talk = nn.ModuleList([Attention(WIDTH, WIDTH) for _ in range(2)])
        self.talk_mlp = nn.ModuleList([GEGLU(WIDTH) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(4)])
        self.last = nn.LayerNorm(WIDTH)
        self.amount = nn.Linear(WIDTH, 1)
        self.kind = nn.Linear(WIDTH, 4)

    def forward(self, values, kinds, keep):
        values = values * self.scale + self.offset
        cells = values[..., None] * self.columns
        cells = torch.cat([cells, self.kinds(kinds)], dim=-1)
        x = self.latents.expand(len(values), -1, -1)
        for i in range(2):
            x = x + self.read[i](x, cells, keep)
            x = x + self.read_mlp[i](self.norms[2 * i](x))
            x = x + self.talk[i](x)
            x = x + self.talk_mlp[i](self.norms[2 * i + 1](x))
        x = self.last(x).mean(dim=1)
        return {"amount": self.amount(x)[:, 0], "kind": self.kind(x)}


def model():
    torch.manual_seed(11)
    net = Perceiver()
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "norm" in name or name.startswith("last"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(12)
    values = torch.randn(6, 9, generator=generator)
    kinds = torch.randint(0, 7, (6, 9), generator=generator)
    keep = torch.rand(6, 9, generator=generator) > 0.25
    keep[:, 0] = True
    amount = torch.randn(6, generator=generator)
    kind = torch.randint(0, 4, (6,), generator=generator)
    return [
        {"values": values, "kinds": kinds, "keep": keep, "amount": amount, "kind": kind}
    ]


def forward(net, batch):
    return net(batch["values"], batch["kinds"], batch["keep"])


def loss(output, batch):
    error = F.smooth_l1_loss(output["amount"], batch["amount"], beta=0.5)
    return error + 0.3 * F.cross_entropy(
        output["kind"], batch["kind"], label_smoothing=0.05
    )


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.9, 0.98))
