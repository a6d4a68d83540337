"""Actor and critic side by side in batched kernels; advantages by one matrix of decays."""

from pathlib import Path

import torch
from torch import nn

CFG = {"discount": 0.97, "trace": 0.9, "ratio_clip": 0.2, "value_clip": 0.2}


class Twin(nn.Module):
    """Two layers at once: kernels (2, in, out)."""

    def __init__(self, w, actor, critic):
        super().__init__()
        pair = [w[actor + ".weight"].t(), w[critic + ".weight"].t()]
        self.kernels = nn.Parameter(torch.stack(pair))
        pair = [w[actor + ".bias"], w[critic + ".bias"]]
        self.biases = nn.Parameter(torch.stack(pair).unsqueeze(1))

    def forward(self, x):
        return torch.tanh(torch.baddbmm(self.biases, x, self.kernels))


class Moments(nn.Module):
    """The first two moments of what was seen."""

    def __init__(self, w):
        super().__init__()
        self.register_buffer("mean", w["standardize.mean"].clone())
        self.register_buffer("var", w["standardize.var"].clone())
        self.register_buffer("count", w["standardize.count"].clone())

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                n = float(len(x))
                share = n / (self.count + n)
                new_mean = torch.lerp(self.mean, x.mean(0), share)
                new_var = torch.lerp(self.var, x.var(0, correction=0), share)
                new_var += share * (1 - share) * (x.mean(0) - self.mean) ** 2
                self.mean.copy_(new_mean)
                self.var.copy_(new_var)
                self.count.add_(n)
        return torch.clamp((x - self.mean) / torch.sqrt(self.var + 1e-8), -3, 3)


class Player(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.moments = Moments(w)
        for i, old in enumerate(("eye.0", "eye.2"), 1):
            setattr(self, f"k{i}", nn.Parameter(w[old + ".weight"].clone()))
            setattr(self, f"c{i}", nn.Parameter(w[old + ".bias"].clone()))
        self.first = Twin(w, "actor.0", "critic.0")
        self.second = Twin(w, "actor.2", "critic.2")
        heads = torch.block_diag(w["mean.weight"], w["value.weight"])
        self.mean_kernel = nn.Parameter(heads[:3, :16].t().contiguous())
        self.value_kernel = nn.Parameter(heads[3:, 16:].t().contiguous())
        self.mean_bias = nn.Parameter(w["mean.bias"].clone())
        self.value_bias = nn.Parameter(w["value.bias"].clone())
        self.rho = nn.Parameter(w["log_std"].clone())

    def forward(self, body, view):
        t, n = body.shape[:2]
        y = torch.conv2d(view.reshape(t * n, 2, 7, 7), self.k1, self.c1, stride=2)
        y = torch.nn.functional.elu(y)
        y = torch.nn.functional.elu(torch.conv2d(y, self.k2, self.c2))
        x = torch.hstack([self.moments(body.reshape(t * n, 7)), y.reshape(t * n, 24)])
        both = self.second(self.first(x.expand(2, -1, -1)))
        mean = both[0] @ self.mean_kernel + self.mean_bias
        value = both[1] @ self.value_kernel + self.value_bias
        rho = torch.clamp(self.rho, -3, 1).repeat(t * n, 1)
        return {
            "mean": mean.view(t, n, 3),
            "log_std": rho.view(t, n, 3),
            "value": value.view(t, n),
        }


def model():
    return Player(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["body"], batch["view"])


def generalized_advantage(batch):
    go_on = 1 - batch["done"]
    next_values = torch.cat([batch["values"][1:], batch["last"].unsqueeze(0)])
    delta = batch["rewards"] + CFG["discount"] * go_on * next_values - batch["values"]
    steps = len(delta)
    decay = CFG["discount"] * CFG["trace"] * go_on
    rows = []
    for t in range(steps):
        later = torch.cat([torch.ones_like(decay[:1]), decay[t:-1]]).cumprod(0)
        rows.append((later * delta[t:]).sum(0))
    return torch.stack(rows)


def loss(output, batch):
    advantage = generalized_advantage(batch)
    target = advantage + batch["values"]
    spread, mean = torch.std_mean(advantage)
    advantage = (advantage - mean) / (spread + 1e-8)

    policy = torch.distributions.Normal(output["mean"], output["log_std"].exp())
    squashed = torch.tanh(batch["raw"])
    logp = policy.log_prob(batch["raw"]) - torch.log1p(-squashed.square())
    ratio = (logp.sum(2) - batch["old"]).exp()
    limit = CFG["ratio_clip"]
    gains = torch.stack(
        [ratio * advantage, ratio.clamp(1 - limit, 1 + limit) * advantage]
    )
    objective = gains.amin(0).mean()

    change = output["value"] - batch["values"]
    limit = CFG["value_clip"]
    errors = torch.stack(
        [
            output["value"] - target,
            batch["values"] + change.clamp(-limit, limit) - target,
        ]
    )
    critic = errors.square().amax(0).mean() / 4
    return critic - objective - 0.01 * policy.entropy().sum(2).mean()
