"""RWKV with all steps at once, time first: a channel's past is weighted by a matrix."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn


def previous(x):
    """Return the features of one step before; before the first there is nothing."""
    return F.pad(x[:-1], (0, 0, 0, 0, 1, 0))


def log_decays(rate, bonus, length):
    """Return the log of what step s weighs at step t: (t, s, channel)."""
    step = torch.arange(length)
    age = (step[:, None] - step)[..., None]
    logs = -rate * (age - 1)
    logs = torch.where(age == 0, bonus, logs)
    return logs.masked_fill(age < 0, -torch.inf)


class TimeMixing(nn.Module):
    def __init__(self, width):
        super().__init__()
        # of receptance, key and value
        self.mix = nn.Parameter(torch.empty(3, width))
        self.rkv = nn.Parameter(torch.empty(3, width, width))
        self.rate = nn.Parameter(torch.empty(width))
        self.bonus = nn.Parameter(torch.empty(width))
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x):
        mixed = torch.lerp(previous(x), x, self.mix[:, None, None])
        r, k, v = torch.einsum("ntbi,noi->ntbo", mixed, self.rkv)
        decays = log_decays(self.rate, self.bonus, len(x))
        logs = decays[:, :, None] + k
        total = torch.logsumexp(logs, dim=1, keepdim=True)
        mean = torch.einsum("tsbc,sbc->tbc", torch.exp(logs - total), v)
        return self.out(torch.sigmoid(r) * mean)


class ChannelMixing(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        # of gate and hidden units
        self.mix = nn.Parameter(torch.empty(2, width))
        self.gate = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        for_gate, for_up = torch.lerp(previous(x), x, self.mix[:, None, None])
        hidden = F.relu(self.up(for_up))
        return self.down(hidden**2) * torch.sigmoid(self.gate(for_gate))


class Layer(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.time_norm = nn.LayerNorm(width)
        self.time = TimeMixing(width)
        self.channel_norm = nn.LayerNorm(width)
        self.channel = ChannelMixing(width, hidden)

    def forward(self, x):
        x = x + self.time(self.time_norm(x))
        return x + self.channel(self.channel_norm(x))


class ParallelRWKV(nn.Module):
    def __init__(self, vocabulary, width, hidden, depth):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.token_norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, hidden) for _ in range(depth)))
        self.last_norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.token_norm(self.tokens(ids.t()))
        x = self.last_norm(self.layers(x))
        return self.logits(x).transpose(0, 1)


def translated(w, depth):
    """Return a checkpoint of the recurrent form under the names of this one."""
    state = {
        "tokens.weight": w["emb.weight"],
        "logits.weight": w["head.weight"],
    }
    norms = {"token_norm": "ln0", "last_norm": "ln_out"}
    for i in range(depth):
        norms[f"layers.{i}.time_norm"] = f"blocks.{i}.ln1"
        norms[f"layers.{i}.channel_norm"] = f"blocks.{i}.ln2"
    for to, source in norms.items():
        state[f"{to}.weight"] = w[f"{source}.weight"]
        state[f"{to}.bias"] = w[f"{source}.bias"]

    for i in range(depth):
        to, source = f"layers.{i}.time.", f"blocks.{i}.att."
        mixes = [w[f"{source}time_mix_{name}"].flatten() for name in "rkv"]
        names = ("receptance", "key", "value")
        state[to + "mix"] = torch.stack(mixes)
        state[to + "rkv"] = torch.stack([w[f"{source}{name}.weight"] for name in names])
        state[to + "rate"] = torch.exp(w[source + "time_decay"])
        state[to + "bonus"] = w[source + "time_first"]
        state[to + "out.weight"] = w[source + "output.weight"]

        to, source = f"layers.{i}.channel.", f"blocks.{i}.ffn."
        mixes = [w[f"{source}time_mix_{name}"].flatten() for name in "rk"]
        state[to + "mix"] = torch.stack(mixes)
        state[to + "gate.weight"] = w[source + "receptance.weight"]
        state[to + "up.weight"] = w[source + "key.weight"]
        state[to + "down.weight"] = w[source + "value.weight"]
    return state


def model():
    w = torch.load(Path(__file__).with_name("weights.pt"))
    vocabulary, width = w["emb.weight"].shape
    hidden = len(w["blocks.0.ffn.key.weight"])
    depth = sum(name.endswith("time_decay") for name in w)
    net = ParallelRWKV(vocabulary, width, hidden, depth)
    net.load_state_dict(translated(w, depth))
    return net


def forward(net, batch):
    return net(batch["idx"])


def loss(output, batch):
    targets = batch["targets"]
    real = (targets != 0).float()
    chosen = torch.log_softmax(output, -1).gather(-1, targets[..., None])[..., 0]
    return -(chosen * real).sum() / real.sum()


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-6)
