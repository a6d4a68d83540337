"""A tree of arrays, views with channels last, returns by one walk back."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

HYPER = dict(gamma=0.97, lam=0.9, clip=0.2, vf_coef=0.5, ent_coef=0.01)


def dense(p, name, x):
    return x @ p[f"{name}/kernel"] + p[f"{name}/bias"]


def elu(x):
    return torch.where(x > 0, x, torch.expm1(x.clamp(max=0)))


def conv(p, name, x, stride):
    """A valid convolution of NHWC by a kernel HWIO."""
    kernel = p[f"{name}/kernel"]
    kh, kw, inside, outside = kernel.shape
    patches = x.unfold(1, kh, stride).unfold(2, kw, stride)
    y = torch.einsum("nhwcij,ijco->nhwo", patches, kernel)
    return y + p[f"{name}/bias"]


def torso(p, head, x):
    for i in range(2):
        x = torch.tanh(dense(p, f"{head}/{i}", x))
    return x


def apply(p, body, view):
    lead = view.shape[:2]
    x = view.reshape(-1, *view.shape[2:]).permute(0, 2, 3, 1)
    x = elu(conv(p, "conv_0", x, 2))
    x = elu(conv(p, "conv_1", x, 1))
    x = torch.cat([x.reshape(*lead, -1), body], -1)
    mean = dense(p, "mean", torso(p, "pi", x))
    log_std = torch.clip(p["log_std"], -3.0, 1.0)
    value = dense(p, "value", torso(p, "vf", x))[..., 0]
    return mean, log_std, value


class Agent(nn.Module):
    def __init__(self, tree, stats):
        super().__init__()
        self.tree = nn.ParameterDict(
            {name: nn.Parameter(v.contiguous().clone()) for name, v in tree.items()}
        )
        for name, value in stats.items():
            self.register_buffer(name, value.clone())

    @torch.no_grad()
    def update_stats(self, x):
        n = x.shape[0] * x.shape[1]
        old_n = self.obs_n.clone()
        self.obs_n += n
        delta = x - self.obs_mean
        self.obs_mean += delta.sum((0, 1)) / self.obs_n
        m2 = (delta * (x - self.obs_mean)).sum((0, 1))
        self.obs_var.copy_((self.obs_var * old_n + m2) / self.obs_n)

    def forward(self, body, view):
        self.update_stats(body)
        body = (body - self.obs_mean) * torch.rsqrt(self.obs_var + 1e-8)
        body = torch.clip(body, -3.0, 3.0)
        mean, log_std, value = apply(dict(self.tree), body, view)
        log_std = torch.broadcast_to(log_std, mean.shape)
        return {"mean": mean, "log_std": log_std, "value": value}


def seen_first(kernel):
    """Inputs: the view's numbers (place before channel), then the body's."""
    body, seen = kernel[:7], kernel[7:]
    seen = seen.reshape(6, 4, -1).transpose(0, 1).reshape(24, -1)
    return torch.cat([seen, body])


def model():
    w = torch.load(Path(__file__).with_name("weights.pt"))
    tree = {"log_std": w["log_std"]}
    for name, old in [
        ("pi/0", "actor.0"),
        ("pi/1", "actor.2"),
        ("mean", "mean"),
        ("vf/0", "critic.0"),
        ("vf/1", "critic.2"),
        ("value", "value"),
    ]:
        kernel = w[old + ".weight"].T
        if name.endswith("/0"):
            kernel = seen_first(kernel)
        tree[name + "/kernel"] = kernel
        tree[name + "/bias"] = w[old + ".bias"]
    for i, old in enumerate(["eye.0", "eye.2"]):
        tree[f"conv_{i}/kernel"] = w[old + ".weight"].permute(2, 3, 1, 0)
        tree[f"conv_{i}/bias"] = w[old + ".bias"]
    stats = {
        "obs_mean": w["standardize.mean"],
        "obs_var": w["standardize.var"],
        "obs_n": w["standardize.count"],
    }
    return Agent(tree, stats)


def forward(net, batch):
    return net(batch["body"], batch["view"])


def gae(batch):
    values = torch.cat([batch["values"], batch["last"][None]])
    mask = 1.0 - batch["done"]
    steps = len(batch["rewards"])
    adv = torch.zeros_like(batch["rewards"])
    carry = torch.zeros_like(batch["last"])
    for t in range(steps - 1, -1, -1):
        target = batch["rewards"][t] + HYPER["gamma"] * mask[t] * values[t + 1]
        delta = target - values[t]
        carry = delta + HYPER["gamma"] * HYPER["lam"] * mask[t] * carry
        adv[t] = carry
    return adv, adv + values[:-1]


def log_prob(mean, log_std, raw):
    z = (raw - mean) * torch.exp(-log_std)
    normal = -0.5 * z * z - log_std - 0.5 * np.log(2 * np.pi)
    jacobian = torch.log(1 - torch.tanh(raw) ** 2)
    return torch.sum(normal - jacobian, -1)


def loss(output, batch):
    adv, ret = gae(batch)
    adv = (adv - torch.mean(adv)) / (torch.std(adv) + 1e-8)
    new = log_prob(output["mean"], output["log_std"], batch["raw"])
    ratio = torch.exp(new - batch["old"])
    low, high = 1 - HYPER["clip"], 1 + HYPER["clip"]
    surrogate = torch.where(
        adv >= 0, torch.clip(ratio, max=high) * adv, torch.clip(ratio, min=low) * adv
    )
    v, v_old = output["value"], batch["values"]
    v_clip = v_old + torch.clip(v - v_old, -HYPER["clip"], HYPER["clip"])
    v_loss = 0.5 * torch.maximum((v - ret).square(), (v_clip - ret).square()).mean()
    entropy = (output["log_std"] + 0.5 + 0.5 * np.log(2 * np.pi)).sum(-1).mean()
    return HYPER["vf_coef"] * v_loss - surrogate.mean() - HYPER["ent_coef"] * entropy


class Chain(torch.optim.Optimizer):
    """Clip by the global norm, then Adam."""

    def __init__(self, params, lr, max_norm):
        super().__init__(params, dict(lr=lr, max_norm=max_norm))
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            grads = [p.grad for p in group["params"]]
            norm = torch.sqrt(sum((g * g).sum() for g in grads))
            shrink = torch.clip(group["max_norm"] / (norm + 1e-6), max=1.0)
            for p in group["params"]:
                g = p.grad * shrink
                slot = self.state[p]
                mu = 0.9 * slot.get("mu", 0.0) + 0.1 * g
                nu = 0.999 * slot.get("nu", 0.0) + 0.001 * g * g
                slot["mu"], slot["nu"] = mu, nu
                mu_hat = mu / (1 - 0.9**self.count)
                nu_hat = nu / (1 - 0.999**self.count)
                p -= group["lr"] * mu_hat / (torch.sqrt(nu_hat) + 1e-5)


def optimizer(net):
    return Chain(net.parameters(), 1e-3, 0.5)
