"""Points on the rows of matrices: layers are arrays in dictionaries, norms by hand."""

from pathlib import Path

import torch
from torch import nn


class Arrays(nn.Module):
    def __init__(self, tree):
        super().__init__()
        for name, (kernel, bias) in tree["dense"].items():
            self.register_parameter(f"{name}_kernel", nn.Parameter(kernel.contiguous()))
            self.register_parameter(f"{name}_bias", nn.Parameter(bias.clone()))
        for name, (gain, shift, mean, spread) in tree["norms"].items():
            self.register_parameter(f"{name}_gain", nn.Parameter(gain.clone()))
            self.register_parameter(f"{name}_shift", nn.Parameter(shift.clone()))
            self.register_buffer(f"{name}_mean", mean.clone())
            self.register_buffer(f"{name}_spread", spread.clone())

    def dense(self, name, x):
        return x @ getattr(self, f"{name}_kernel") + getattr(self, f"{name}_bias")

    def norm(self, name, x):
        rows = x.reshape(-1, x.shape[-1])
        mean = rows.mean(0)
        spread = rows.var(0, unbiased=False)
        with torch.no_grad():
            count = len(rows)
            getattr(self, f"{name}_mean").lerp_(mean, 0.1)
            getattr(self, f"{name}_spread").lerp_(spread * count / (count - 1), 0.1)
        scale = getattr(self, f"{name}_gain") / torch.sqrt(spread + 1e-5)
        return (x - mean) * scale + getattr(self, f"{name}_shift")

    def step(self, name, x):
        return torch.clamp(self.norm(name, self.dense(name, x)), min=0)

    def square(self, name, x):
        y = self.step(f"{name}_b", self.step(f"{name}_a", x))
        y = torch.amax(y, 1)
        y = self.step(f"{name}_hidden", y)
        y = self.dense(f"{name}_matrix", y)
        size = x.shape[2]
        return y.reshape(-1, size, size) + torch.eye(size)

    def forward(self, x):
        points = x.permute(0, 2, 1)
        points = torch.einsum("nik,nkl->nil", points, self.square("first", points))
        seen = self.step("early", points)
        turn = self.square("second", seen)
        seen = torch.einsum("nik,nkl->nil", seen, turn)
        far = self.step("late_b", self.step("late_a", seen))
        far = torch.amax(far, 1)
        far = torch.tile(far[:, None, :], (1, seen.shape[1], 1))
        y = self.step("head", torch.cat((seen, far), -1))
        return {"kinds": self.dense("last", y), "turn": turn}


DENSE = {
    "first_a": "align.points.0",
    "first_b": "align.points.3",
    "first_hidden": "align.hidden",
    "first_matrix": "align.matrix",
    "early": "early.0",
    "second_a": "align_features.points.0",
    "second_b": "align_features.points.3",
    "second_hidden": "align_features.hidden",
    "second_matrix": "align_features.matrix",
    "late_a": "late.0",
    "late_b": "late.3",
    "head": "head.0",
    "last": "last",
}
NORMS = {
    "first_a": "align.points.1",
    "first_b": "align.points.4",
    "first_hidden": "align.norm",
    "early": "early.1",
    "second_a": "align_features.points.1",
    "second_b": "align_features.points.4",
    "second_hidden": "align_features.norm",
    "late_a": "late.1",
    "late_b": "late.4",
    "head": "head.1",
}


def loaded(w):
    dense = {}
    for name, old in DENSE.items():
        kernel = w[old + ".weight"].flatten(1).t()
        dense[name] = (kernel, w[old + ".bias"])
    norms = {}
    for name, old in NORMS.items():
        moving = (w[old + ".running_mean"], w[old + ".running_var"])
        norms[name] = (w[old + ".weight"], w[old + ".bias"], *moving)
    return {"dense": dense, "norms": norms}


def model():
    return Arrays(loaded(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    scores = output["kinds"]
    logs = scores - torch.logsumexp(scores, -1, keepdim=True)
    picked = torch.gather(logs, 2, batch["kinds"][..., None])
    turn = output["turn"]
    gram = torch.einsum("nij,nkj->nik", turn, turn)
    apart = torch.sqrt(((torch.eye(len(gram[0])) - gram) ** 2).sum((1, 2)))
    return 0.01 * apart.mean() - picked.mean()


class Nesterov(torch.optim.Optimizer):
    def __init__(self, params, lr, keep):
        super().__init__(params, dict(lr=lr, keep=keep))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "speed" not in state:
                    state["speed"] = torch.zeros_like(p)
                state["speed"].mul_(group["keep"]).add_(p.grad)
                ahead = p.grad + group["keep"] * state["speed"]
                p.sub_(group["lr"] * ahead)


def optimizer(net):
    return Nesterov(net.parameters(), 0.02, 0.9)
