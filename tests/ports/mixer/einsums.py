"""Everything by einsum, weights as input by output."""

from pathlib import Path

import torch
from torch import nn


class MixerLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_t = nn.Parameter(torch.empty(2, 16))
        self.wt_in = nn.Parameter(torch.empty(9, 12))
        self.bt_in = nn.Parameter(torch.empty(12))
        self.wt_out = nn.Parameter(torch.empty(12, 9))
        self.bt_out = nn.Parameter(torch.empty(9))
        self.ln_c = nn.Parameter(torch.empty(2, 16))
        self.wc_in = nn.Parameter(torch.empty(16, 40))
        self.bc_in = nn.Parameter(torch.empty(40))
        self.wc_out = nn.Parameter(torch.empty(40, 16))
        self.bc_out = nn.Parameter(torch.empty(16))

    def forward(self, x):
        y = normalise(x, self.ln_t)
        y = torch.einsum("btc,tu->buc", y, self.wt_in) + self.bt_in[:, None]
        y = gelu(y)
        y = torch.einsum("buc,ut->btc", y, self.wt_out) + self.bt_out[:, None]
        x = x + y
        y = normalise(x, self.ln_c)
        y = gelu(torch.einsum("btc,cd->btd", y, self.wc_in) + self.bc_in)
        y = torch.einsum("btd,dc->btc", y, self.wc_out) + self.bc_out
        return x + y


def normalise(x, parameters):
    scale, shift = parameters
    mean = x.mean(-1, keepdim=True)
    square = (x * x).mean(-1, keepdim=True)
    y = (x - mean) * torch.rsqrt(square - mean * mean + 1e-5)
    return y * scale + shift


def gelu(x):
    return x * 0.5 * torch.erfc(-x * 0.7071067811865476)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Parameter(torch.empty(27, 16))
        self.patch_bias = nn.Parameter(torch.empty(16))
        self.layers = nn.ModuleList([MixerLayer(), MixerLayer()])
        self.ln = nn.Parameter(torch.empty(2, 16))
        self.out = nn.Parameter(torch.empty(16, 7))
        self.out_bias = nn.Parameter(torch.empty(7))

    def forward(self, x):
        b = x.shape[0]
        x = x.reshape(b, 3, 3, 3, 3, 3).permute(0, 2, 4, 1, 3, 5).reshape(b, 9, 27)
        x = x @ self.patch + self.patch_bias
        for layer in self.layers:
            x = layer(x)
        x = normalise(x, self.ln)
        x = x.sum(1) / x.shape[1]
        return x @ self.out + self.out_bias


def load(net, w):
    net.patch.copy_(w["stem.weight"].reshape(16, 27).t())
    net.patch_bias.copy_(w["stem.bias"])
    for i, layer in enumerate(net.layers):
        name = f"blocks.{i}."
        for new, old in (("t", "tokens"), ("c", "channels")):
            for end, fc in (("in", "fc1"), ("out", "fc2")):
                getattr(layer, f"w{new}_{end}").copy_(w[f"{name}{old}.{fc}.weight"].t())
                getattr(layer, f"b{new}_{end}").copy_(w[f"{name}{old}.{fc}.bias"])
        for target, norm in ((layer.ln_t, "norm1"), (layer.ln_c, "norm2")):
            target[0].copy_(w[f"{name}{norm}.weight"])
            target[1].copy_(w[f"{name}{norm}.bias"])
    net.ln[0].copy_(w["norm.weight"])
    net.ln[1].copy_(w["norm.bias"])
    net.out.copy_(w["head.weight"].t())
    net.out_bias.copy_(w["head.bias"])


def model():
    net = Network()
    with torch.no_grad():
        load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["x"])
