"""One step of a policy's update: advantages, clipped ratios, a clipped critic."""

import math

import torch
from torch import nn
from torch.nn import functional as F

GAMMA, LAMBDA, CLIP = 0.97, 0.9, 0.2


class Standardize(nn.Module):
    """Mean and variance of all observations so far."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("var", torch.ones(size))
        self.register_buffer("count", torch.tensor(20.0))

    @torch.no_grad()
    def watch(self, x):
        rows = x.flatten(0, -2)
        mean, var = rows.mean(0), rows.var(0, unbiased=False)
        total = self.count + len(rows)
        apart = mean - self.mean
        between = apart.square() * self.count * len(rows) / total
        spread = self.var * self.count + var * len(rows) + between
        self.mean.add_(apart * len(rows) / total)
        self.var.copy_(spread / total)
        self.count.copy_(total)

    def forward(self, x):
        if self.training:
            self.watch(x)
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-3, 3)


def perceptron(*widths):
    layers = []
    for before, after in zip(widths[:-1], widths[1:]):
        layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers)


class ActorCritic(nn.Module):
    def __init__(self, body=7, actions=3):
        super().__init__()
        self.standardize = Standardize(body)
        self.eye = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2), nn.ELU(), nn.Conv2d(4, 6, 2), nn.ELU()
        )
        size = body + 6 * 2 * 2
        self.actor = perceptron(size, 20, 16)
        self.mean = nn.Linear(16, actions)
        self.log_std = nn.Parameter(torch.zeros(actions))
        self.critic = perceptron(size, 20, 16)
        self.value = nn.Linear(16, 1)

    def forward(self, body, view):
        seen = self.eye(view.flatten(0, 1)).flatten(1).unflatten(0, view.shape[:2])
        x = torch.cat([self.standardize(body), seen], dim=-1)
        mean = self.mean(self.actor(x))
        log_std = self.log_std.clamp(-3, 1).expand_as(mean)
        value = self.value(self.critic(x)).squeeze(-1)
        return {"mean": mean, "log_std": log_std, "value": value}


def advantages(rewards, values, done, last):
    result = []
    running = torch.zeros_like(last)
    following = last
    for reward, value, ended in zip(
        reversed(rewards), reversed(values), reversed(done), strict=True
    ):
        alive = 1 - ended
        surprise = reward + GAMMA * following * alive - value
        running = surprise + GAMMA * LAMBDA * alive * running
        following = value
        result.append(running)
    return torch.stack(result[::-1])


def model():
    torch.manual_seed(350)
    net = ActorCritic()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight, 1.2)
                module.bias.normal_(0, 0.2)
        net.log_std.copy_(torch.tensor([-0.5, 0.1, -0.2]))
        net.standardize.mean.normal_(0, 0.3)
        net.standardize.var.uniform_(0.4, 2)
    return net


def batches():
    generator = torch.Generator().manual_seed(351)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    done = torch.zeros(8, 3)
    done[3, 0] = done[5, 2] = done[7, 1] = 1.0
    return [
        {
            "body": normal(8, 3, 7) * 1.5 + 0.4,
            "view": normal(8, 3, 2, 7, 7),
            "raw": normal(8, 3, 3),
            "old": normal(8, 3) * 0.3 - 2.5,
            "values": normal(8, 3),
            "rewards": normal(8, 3),
            "done": done,
            "last": normal(3),
        }
    ]


def forward(net, batch):
    return net(batch["body"], batch["view"])


def loss(output, batch):
    mean, log_std, raw = output["mean"], output["log_std"], batch["raw"]
    gain = advantages(batch["rewards"], batch["values"], batch["done"], batch["last"])
    returns = gain + batch["values"]
    gain = (gain - gain.mean()) / (gain.std() + 1e-8)

    spread = log_std.exp()
    density = -0.5 * ((raw - mean) / spread) ** 2 - log_std
    density = density - 0.5 * math.log(2 * math.pi)
    squash = 2 * (math.log(2) - raw - F.softplus(-2 * raw))
    ratio = ((density - squash).sum(-1) - batch["old"]).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    policy = -torch.minimum(ratio * gain, clipped * gain).mean()

    value, old = output["value"], batch["values"]
    near = old + (value - old).clamp(-CLIP, CLIP)
    error = torch.maximum((value - returns) ** 2, (near - returns) ** 2)
    entropy = (log_std + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)
    return policy + 0.5 * 0.5 * error.mean() - 0.01 * entropy.mean()


class ClippedAdam(torch.optim.Adam):
    """Adam of gradients that are no longer than a limit all together."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, 0.5)
        return super().step(closure)


def optimizer(net):
    return ClippedAdam(net.parameters(), lr=1e-3, eps=1e-5)
