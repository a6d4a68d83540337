"""A small SchNet: continuous-filter convolutions, energies of molecules and forces."""

import math

import torch
from torch import nn
from torch.nn import functional as F

MAX_Z = 10
FEATURES, FILTERS, N_RBF, BLOCKS = 24, 20, 16, 3
CUTOFF = 3.0
EV_PER_KCAL = 0.0433641153
ENERGY_WEIGHT, FORCES_WEIGHT = 0.3, 0.7
LR, LR_DECAY, WEIGHT_DECAY = 4e-3, 0.8, 0.2
BETAS, EPS = (0.9, 0.99), 1e-6
MAX_NORM = 1.0


class ShiftedSoftplus(nn.Module):
    def forward(self, x):
        return F.softplus(x) - math.log(2.0)


class GaussianRBF(nn.Module):
    def __init__(self, n_rbf, cutoff):
        super().__init__()
        offsets = torch.linspace(0.0, cutoff, n_rbf)
        self.register_buffer("offsets", offsets, persistent=False)
        self.coeff = -0.5 / float(offsets[1] - offsets[0]) ** 2

    def forward(self, d):
        return torch.exp(self.coeff * (d.unsqueeze(-1) - self.offsets) ** 2)


class CosineCutoff(nn.Module):
    def __init__(self, cutoff):
        super().__init__()
        self.cutoff = cutoff

    def forward(self, d):
        values = 0.5 * (torch.cos(d * math.pi / self.cutoff) + 1.0)
        return values * (d < self.cutoff)


class Interaction(nn.Module):
    def __init__(self):
        super().__init__()
        self.in2f = nn.Linear(FEATURES, FILTERS, bias=False)
        self.filter_net = nn.Sequential(
            nn.Linear(N_RBF, FILTERS), ShiftedSoftplus(), nn.Linear(FILTERS, FILTERS)
        )
        self.f2out = nn.Sequential(
            nn.Linear(FILTERS, FEATURES),
            ShiftedSoftplus(),
            nn.Linear(FEATURES, FEATURES),
        )

    def forward(self, x, f_ij, rcut_ij, idx_i, idx_j):
        w_ij = self.filter_net(f_ij) * rcut_ij.unsqueeze(-1)
        x_ij = self.in2f(x)[idx_j] * w_ij
        out = torch.zeros(len(x), FILTERS).index_add(0, idx_i, x_ij)
        return self.f2out(out)


class SchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(MAX_Z, FEATURES, padding_idx=0)
        self.rbf = GaussianRBF(N_RBF, CUTOFF)
        self.cutoff_fn = CosineCutoff(CUTOFF)
        self.interactions = nn.ModuleList([Interaction() for _ in range(BLOCKS)])
        self.atomwise = nn.Sequential(
            nn.Linear(FEATURES, FEATURES // 2),
            ShiftedSoftplus(),
            nn.Linear(FEATURES // 2, 1),
        )
        self.scale = nn.Embedding(MAX_Z, 1)
        self.shift = nn.Embedding(MAX_Z, 1)

    def energies(self, z, pos, molecule, n_molecules):
        idx_i, idx_j = neighbour_list(pos.detach(), molecule)
        d_ij = torch.linalg.vector_norm(pos[idx_j] - pos[idx_i], dim=1)
        f_ij, rcut_ij = self.rbf(d_ij), self.cutoff_fn(d_ij)

        x = self.embedding(z)
        for interaction in self.interactions:
            x = x + interaction(x, f_ij, rcut_ij, idx_i, idx_j)

        y = self.atomwise(x) * self.scale(z) + self.shift(z)
        return torch.zeros(n_molecules).index_add(0, molecule, y.squeeze(-1))

    def forward(self, z, pos, n_atoms):
        molecule = torch.repeat_interleave(torch.arange(len(n_atoms)), n_atoms)
        pos = pos.detach().clone().requires_grad_(True)
        energy = self.energies(z, pos, molecule, len(n_atoms))
        (grad,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return {"energy": energy, "forces": -grad}


def neighbour_list(pos, molecule):
    """Ordered pairs of different atoms of one molecule that are within the cutoff."""
    d = torch.linalg.vector_norm(pos[:, None] - pos, dim=-1)
    near = (d < CUTOFF) & (molecule[:, None] == molecule)
    near.fill_diagonal_(False)
    return near.nonzero().unbind(1)


def model():
    torch.manual_seed(1706)
    net = SchNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    module.bias.normal_(0, 0.3)
        net.scale.weight.uniform_(0.6, 1.8)
        net.shift.weight.normal_(-0.5, 0.6)
    return net


def batches():
    """Atoms on a shaken lattice; energies in kcal/mol are those of pairs, and noise."""
    generator = torch.Generator().manual_seed(1707)
    sites = torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2))
    elements = torch.tensor([1, 1, 6, 7, 8, 9])
    made = []
    for n_atoms in ((5, 7, 4, 8), (6, 3, 9, 5)):
        zs, positions, energies, forces = [], [], [], []
        for n in n_atoms:
            chosen = torch.randperm(len(sites), generator=generator)[:n]
            shake = 0.14 * torch.randn(n, 3, generator=generator)
            pos = 1.3 * sites[chosen] + shake
            z = elements[torch.randint(0, 6, (n,), generator=generator)]
            diff = pos[:, None] - pos
            d = diff.norm(dim=-1) + 9 * torch.eye(n)
            depth = 12.0 + 2.0 * (z[:, None] + z).sqrt()
            e = torch.exp(-1.6 * (d - 1.35))
            pull = depth * 3.2 * (e - e**2) / d
            noise = torch.randn(n, 3, generator=generator)
            forces.append(-(pull.unsqueeze(-1) * diff).sum(1) + noise)
            energies.append(0.5 * (depth * (e**2 - 2 * e)).sum() - 2.0 * z.sum())
            zs.append(z)
            positions.append(pos)
        made.append(
            {
                "z": torch.cat(zs),
                "pos": torch.cat(positions),
                "n_atoms": torch.tensor(n_atoms),
                "energy": torch.stack(energies),
                "forces": torch.cat(forces),
            }
        )
    return made


def forward(net, batch):
    return net(batch["z"], batch["pos"], batch["n_atoms"])


def loss(output, batch):
    """Energies in eV for each atom, forces in eV/Å."""
    energy = batch["energy"] * EV_PER_KCAL
    forces = batch["forces"] * EV_PER_KCAL
    energy_loss = F.mse_loss(
        output["energy"] / batch["n_atoms"], energy / batch["n_atoms"]
    )
    forces_loss = F.mse_loss(output["forces"], forces)
    return ENERGY_WEIGHT * energy_loss + FORCES_WEIGHT * forces_loss


class ClippedAdamW(torch.optim.AdamW):
    """Clips the norm of all gradients; the rate decays after each step."""

    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(params, MAX_NORM)
        result = super().step(closure)
        for group in self.param_groups:
            group["lr"] *= LR_DECAY
        return result


def optimizer(net):
    """Only weights of linear layers decay."""
    decay = [m.weight for m in net.modules() if isinstance(m, nn.Linear)]
    ids = {id(p) for p in decay}
    rest = [p for p in net.parameters() if id(p) not in ids]
    groups = [
        {"params": decay, "weight_decay": WEIGHT_DECAY},
        {"params": rest, "weight_decay": 0.0},
    ]
    return ClippedAdamW(groups, lr=LR, betas=BETAS, eps=EPS)
