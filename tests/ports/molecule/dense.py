"""Molecules padded to one size, all pairs of atoms; functions of a dictionary of arrays."""

from pathlib import Path

import torch
from torch import nn

CUTOFF = 3.5


def softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x)) - 0.6931471805599453


def dense(layer, x):
    y = torch.einsum("...i,io->...o", x, layer["kernel"])
    return y + layer["bias"] if "bias" in layer else y


def rbf(d, centers):
    gamma = 1 / (centers[1] - centers[0]) ** 2
    return torch.exp(-0.5 * gamma * (d[..., None] - centers) ** 2)


def interaction(p, x, features, envelope):
    """x (molecule, atom, width); features (molecule, to, from, gaussians)."""
    filters = dense(p["filter_1"], softplus(dense(p["filter_0"], features)))
    filters = filters * envelope[..., None]
    gathered = torch.einsum("mijf,mjf->mif", filters, dense(p["in"], x))
    return dense(p["post"], softplus(dense(p["out"], gathered)))


def pairs(positions, real):
    """Distances of all pairs, and what a pair within the cutoff weighs."""
    vectors = positions[:, :, None] - positions[:, None, :]
    both = real[:, :, None] & real[:, None, :]
    both = both & ~torch.eye(real.shape[1], dtype=torch.bool)
    squares = (vectors**2).sum(-1)
    d = torch.sqrt(torch.where(both, squares, 1.0))
    envelope = 0.5 * torch.cos(torch.pi * d / CUTOFF) + 0.5
    return d, torch.where(both & (d < CUTOFF), envelope, 0.0)


def energies(p, atoms, positions):
    real = atoms > 0
    d, envelope = pairs(positions, real)
    features = rbf(d, torch.linspace(0, CUTOFF, 7))
    x = p["embed"][atoms]
    for name in ("round_0", "round_1"):
        x = x + interaction(p[name], x, features, envelope)
    y = dense(p["head_1"], softplus(dense(p["head_0"], x)))[..., 0]
    y = p["mean"] + p["std"] * y + p["single"][atoms]
    return torch.where(real, y, 0.0).sum(1)


def converted(sd):
    def layer(name):
        arrays = {"kernel": sd[name + ".weight"].T.contiguous()}
        if name + ".bias" in sd:
            arrays["bias"] = sd[name + ".bias"]
        return arrays

    def round_of(at):
        return {
            "filter_0": layer(at + "conv.mlp.0"),
            "filter_1": layer(at + "conv.mlp.2"),
            "in": layer(at + "conv.lin1"),
            "out": layer(at + "conv.lin2"),
            "post": layer(at + "lin"),
        }

    return {
        "embed": sd["embedding.weight"],
        "round_0": round_of("interactions.0."),
        "round_1": round_of("interactions.1."),
        "head_0": layer("lin1"),
        "head_1": layer("lin2"),
        "single": sd["atomref.weight"][:, 0].clone(),
        "mean": sd["mean"],
        "std": sd["std"],
    }


class Params(nn.Module):
    """A dictionary of arrays that an optimizer can read."""

    def __init__(self, tree):
        super().__init__()
        self.tree: dict[str, object] = {}
        for name, value in tree.items():
            if isinstance(value, dict):
                below = Params(value)
                self.add_module("p_" + name, below)
                self.tree[name] = below.tree
            elif value.ndim:
                self.tree[name] = nn.Parameter(value)
                self.register_parameter("p_" + name, self.tree[name])
            else:
                self.tree[name] = float(value)


def model():
    return Params(converted(torch.load(Path(__file__).with_name("weights.pt"))))


def padded(values, sizes):
    parts = values.split(sizes)
    return nn.utils.rnn.pad_sequence(parts, batch_first=True)


@torch.enable_grad()
def forward(net, batch):
    sizes = batch["batch"].bincount().tolist()
    atoms = padded(batch["z"], sizes)
    positions = padded(batch["pos"], sizes).requires_grad_()
    energy = energies(net.tree, atoms, positions)
    (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
    return {"energy": energy, "force": -slope[atoms > 0]}


def loss(output, batch):
    energy = (output["energy"] - batch["energy"]).square().mean()
    force = (output["force"] - batch["force"]).square().mean()
    return 0.05 * energy + force


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=5e-4, amsgrad=True)
