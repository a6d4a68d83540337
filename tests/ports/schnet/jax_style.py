"""After jax-md and haiku: flat parameters by path, a padded table of neighbours per atom.

All atoms of a batch are one system; segments tell its molecules. Weights are [in, out].
A row of the neighbour table is filled up with the number of atoms, which is no atom.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

LOG2 = float(np.log(2.0))
ATOMIC_NUMBERS = 10
N_BLOCKS = 3
R_CUTOFF = 3.0
N_GAUSSIANS = 16
MAX_NEIGHBORS = 8
KCAL_PER_MOL = 0.0433641153


# ------------------------------------------------------------------ space


def displacement(ra, rb):
    return rb - ra


def safe_norm(dr, mask):
    """Length where the mask holds, and 1 elsewhere, without a NaN in the gradient."""
    squared = torch.sum(dr * dr, dim=-1)
    return torch.sqrt(torch.where(mask, squared, torch.ones_like(squared)))


def segment_sum(data, segment_ids, num_segments):
    onehot = nn.functional.one_hot(segment_ids, num_segments).to(data.dtype)
    return torch.einsum("n,ns->s", data, onehot)


def segments_of(counts):
    """[2, 3] -> [0, 0, 1, 1, 1]"""
    ends = torch.cumsum(counts, dim=0)
    return torch.searchsorted(ends, torch.arange(int(ends[-1])), right=True)


def allocate_neighbors(R, segment_ids):
    """Returns idx [atoms, MAX_NEIGHBORS], nearest first."""
    n = R.shape[0]
    dr = displacement(R[:, None, :], R[None, :, :])
    squared = torch.sum(dr * dr, dim=-1)
    allowed = segment_ids[:, None] == segment_ids[None, :]
    allowed = allowed & (squared < R_CUTOFF**2) & ~torch.eye(n, dtype=torch.bool)
    squared = torch.where(allowed, squared, torch.inf)
    values, order = torch.sort(squared, dim=1)
    idx = torch.where(torch.isinf(values), n, order)
    return idx[:, :MAX_NEIGHBORS]


# ------------------------------------------------------------------ features


def gaussian_smearing(dr):
    mu = torch.arange(N_GAUSSIANS) * (R_CUTOFF / (N_GAUSSIANS - 1))
    spacing = R_CUTOFF / (N_GAUSSIANS - 1)
    gamma = 0.5 / spacing**2
    return torch.exp(-gamma * torch.square(dr[..., None] - mu))


def smooth_cutoff(dr):
    """Half a cosine, as the square of one of half the angle."""
    inside = dr < R_CUTOFF
    return torch.where(inside, torch.cos(0.5 * torch.pi * dr / R_CUTOFF) ** 2, 0.0)


def shifted_softplus(x):
    return torch.logaddexp(x, torch.zeros_like(x)) - LOG2


def linear(params, scope, x):
    y = torch.tensordot(x, params[scope + "/w"], dims=1)
    b = params.get(scope + "/b")
    return y if b is None else y + b


def mlp(params, scope, x):
    """Two layers; nothing stands behind the second."""
    h = shifted_softplus(linear(params, scope + "/linear_0", x))
    return linear(params, scope + "/linear_1", h)


# ------------------------------------------------------------------ network


def continuous_filter_conv(params, scope, h, basis, envelope, idx):
    filters = mlp(params, scope + "/filter", basis)
    filters = filters * envelope[..., None]
    messages = linear(params, scope + "/project", h)[idx]
    return torch.einsum("nkf,nkf->nf", messages, filters)


def interaction(params, scope, h, basis, envelope, idx):
    v = continuous_filter_conv(params, scope, h, basis, envelope, idx)
    v = mlp(params, scope + "/update", v)
    return h + v


def atomic_energies(params, R, Z, neighbors):
    n = R.shape[0]
    mask = neighbors < n
    idx = torch.clamp(neighbors, max=n - 1)
    dr = safe_norm(displacement(R[:, None, :], R[idx]), mask)
    basis = gaussian_smearing(dr)
    envelope = smooth_cutoff(dr) * mask

    species = nn.functional.one_hot(Z, ATOMIC_NUMBERS).to(R.dtype)
    h = species @ params["schnet/embed/embeddings"]
    for block in range(N_BLOCKS):
        h = interaction(params, f"schnet/block_{block}", h, basis, envelope, idx)

    per_atom = mlp(params, "schnet/readout", h)[:, 0]
    scale = species @ params["schnet/per_species/scale"]
    offset = species @ params["schnet/per_species/offset"]
    return per_atom * scale + offset


def energy_and_forces(params, R, Z, counts):
    segment_ids = segments_of(counts)
    neighbors = allocate_neighbors(R, segment_ids)
    R = R.clone().requires_grad_()
    atomic = atomic_energies(params, R, Z, neighbors)
    gradient = torch.autograd.grad(torch.sum(atomic), R, create_graph=True)[0]
    return segment_sum(atomic, segment_ids, len(counts)), -gradient


# ------------------------------------------------------------------ weights


def convert(state):
    """From the names and layouts of torch."""
    params = {}

    def put_linear(scope, name):
        params[scope + "/w"] = state[name + ".weight"].T
        if name + ".bias" in state:
            params[scope + "/b"] = state[name + ".bias"]

    params["schnet/embed/embeddings"] = state["embedding.weight"]
    for block in range(N_BLOCKS):
        scope, name = f"schnet/block_{block}", f"interactions.{block}"
        put_linear(scope + "/project", name + ".in2f")
        put_linear(scope + "/filter/linear_0", name + ".filter_net.0")
        put_linear(scope + "/filter/linear_1", name + ".filter_net.2")
        put_linear(scope + "/update/linear_0", name + ".f2out.0")
        put_linear(scope + "/update/linear_1", name + ".f2out.2")
    put_linear("schnet/readout/linear_0", "atomwise.0")
    put_linear("schnet/readout/linear_1", "atomwise.2")
    params["schnet/per_species/scale"] = state["scale.weight"][:, 0]
    params["schnet/per_species/offset"] = state["shift.weight"][:, 0]
    return params


class Params(nn.Module):
    def __init__(self, values):
        super().__init__()
        for path, value in values.items():
            self.register_parameter(path, nn.Parameter(value.clone().contiguous()))

    def tree(self):
        return dict(self.named_parameters())


def model():
    state = torch.load(Path(__file__).parent / "weights.pt")
    return Params(convert(state))


# ------------------------------------------------------------------ training


def forward(net, batch):
    energy, forces = energy_and_forces(
        net.tree(), batch["pos"], batch["z"], batch["n_atoms"]
    )
    return {"energy": energy, "forces": forces}


def loss(output, batch, w_energy=0.3, w_forces=0.7):
    de = output["energy"] - KCAL_PER_MOL * batch["energy"]
    df = output["forces"] - KCAL_PER_MOL * batch["forces"]
    de = de / batch["n_atoms"]
    return w_energy * torch.mean(de**2) + w_forces * torch.mean(df**2)


def global_norm(grads):
    return torch.sqrt(sum(torch.sum(g**2) for g in grads.values()))


def exponential_decay(count, init_value=4e-3, rate=0.8):
    return init_value * rate**count


def decay_mask(path):
    return path.endswith("/w")


class AdamW(torch.optim.Optimizer):
    """As optax.chain(clip_by_global_norm, adamw with a schedule and a mask)."""

    def __init__(self, params):
        super().__init__(params.parameters(), {})
        self.tree = params.tree()
        self.mu = {k: torch.zeros_like(p) for k, p in self.tree.items()}
        self.nu = {k: torch.zeros_like(p) for k, p in self.tree.items()}
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None, b1=0.9, b2=0.99, eps=1e-6, weight_decay=0.2):
        grads = {k: p.grad for k, p in self.tree.items()}
        trim = torch.clamp(1.0 / (global_norm(grads) + 1e-6), max=1.0)
        lr = exponential_decay(self.count)
        self.count += 1
        for k, p in self.tree.items():
            g = grads[k] * trim
            self.mu[k] = b1 * self.mu[k] + (1.0 - b1) * g
            self.nu[k] = b2 * self.nu[k] + (1.0 - b2) * g**2
            mu_hat = self.mu[k] / (1.0 - b1**self.count)
            nu_hat = self.nu[k] / (1.0 - b2**self.count)
            update = mu_hat / (torch.sqrt(nu_hat) + eps)
            if decay_mask(k):
                update = update + weight_decay * p
            p.sub_(lr * update)


def optimizer(net):
    return AdamW(net)
