"""Molecules padded to one size, all pairs of their atoms as dense tensors.

Tensors are [molecule, atom i, atom j, feature]; a mask says which pairs interact. Filters of
all blocks start from the same distances, so that their first layers are one product.
"""

import math
import os

import torch
import torch.nn as nn

N_TYPES = 10
WIDTH, FILTER_WIDTH, DEPTH = 24, 20, 3
R_CUT = 3.0
RBF_CENTERS = 16
KCAL_IN_EV = 0.0433641153


def ssp(x):
    return torch.log(0.5 * torch.exp(x) + 0.5)


class Affine(nn.Module):
    """x @ kernel + offset."""

    def __init__(self, n_in, n_out, offset=True):
        super().__init__()
        self.kernel = nn.Parameter(torch.zeros(n_in, n_out))
        self.offset = nn.Parameter(torch.zeros(n_out)) if offset else None

    def forward(self, x):
        out = x @ self.kernel
        if self.offset is not None:
            out = out + self.offset
        return out


class PairGeometry(nn.Module):
    """Distances in Gaussians, and the envelope, of each pair."""

    def __init__(self):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0, R_CUT, RBF_CENTERS))
        self.width = R_CUT / (RBF_CENTERS - 1)

    def forward(self, vectors, pair_mask):
        # 1 under the root where there is no pair: its slope stays finite.
        dist = ((vectors**2).sum(-1) + (1.0 - pair_mask)).sqrt()
        smeared = (dist.unsqueeze(-1) - self.centers) / self.width
        smeared = (-0.5 * smeared.square()).exp()
        ramp = (dist / R_CUT).clamp(max=1.0)
        envelope = 0.5 + 0.5 * torch.cos(math.pi * ramp)
        return smeared, envelope * pair_mask


class MessageBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.sender = Affine(WIDTH, FILTER_WIDTH, offset=False)
        self.filter_out = Affine(FILTER_WIDTH, FILTER_WIDTH)
        self.receive = Affine(FILTER_WIDTH, WIDTH)
        self.mix = Affine(WIDTH, WIDTH)

    def forward(self, atoms, hidden, envelope):
        filters = self.filter_out(hidden) * envelope.unsqueeze(-1)
        gathered = torch.einsum("bjf,bijf->bif", self.sender(atoms), filters)
        return self.mix(ssp(self.receive(gathered)))


class DenseSchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.type_table = nn.Parameter(torch.zeros(N_TYPES, WIDTH))
        self.geometry = PairGeometry()
        self.filters_in = Affine(RBF_CENTERS, DEPTH * FILTER_WIDTH)
        self.blocks = nn.ModuleList(MessageBlock() for _ in range(DEPTH))
        self.head_hidden = Affine(WIDTH, WIDTH // 2)
        self.head_out = Affine(WIDTH // 2, 1)
        self.scale_and_shift = nn.Parameter(torch.zeros(N_TYPES, 2))

    def energy(self, types, vectors, atom_mask, pair_mask):
        smeared, envelope = self.geometry(vectors, pair_mask)
        hidden = ssp(self.filters_in(smeared))
        hidden = hidden.unflatten(-1, (DEPTH, FILTER_WIDTH)).unbind(-2)

        atoms = self.type_table[types]
        for block, block_hidden in zip(self.blocks, hidden):
            atoms = atoms + block(atoms, block_hidden, envelope)

        raw = self.head_out(ssp(self.head_hidden(atoms))).squeeze(-1)
        scale, shift = self.scale_and_shift[types].unbind(-1)
        return ((raw * scale + shift) * atom_mask).sum(dim=1)

    def forward(self, types, coords, atom_mask):
        vectors = coords.unsqueeze(1) - coords.unsqueeze(2)  # from i to j
        vectors.requires_grad_(True)
        pair_mask = atom_mask.unsqueeze(1) * atom_mask.unsqueeze(2)
        pair_mask = pair_mask * (1.0 - torch.eye(coords.shape[1]))
        energy = self.energy(types, vectors, atom_mask, pair_mask)
        # Each vector ends at j and begins at i.
        (slope,) = torch.autograd.grad(energy.sum(), vectors, create_graph=True)
        forces = slope.sum(dim=2) - slope.sum(dim=1)
        return energy, forces


def load_reference(net, path):
    saved = torch.load(path)
    blocks = [f"interactions.{k}." for k in range(DEPTH)]

    def fill(affine, prefix):
        affine.kernel.copy_(saved[prefix + ".weight"].t())
        if affine.offset is not None:
            affine.offset.copy_(saved[prefix + ".bias"])

    with torch.no_grad():
        net.type_table.copy_(saved["embedding.weight"])
        kernels = [saved[b + "filter_net.0.weight"].t() for b in blocks]
        offsets = [saved[b + "filter_net.0.bias"] for b in blocks]
        net.filters_in.kernel.copy_(torch.cat(kernels, dim=1))
        net.filters_in.offset.copy_(torch.cat(offsets))
        for block, prefix in zip(net.blocks, blocks):
            fill(block.sender, prefix + "in2f")
            fill(block.filter_out, prefix + "filter_net.2")
            fill(block.receive, prefix + "f2out.0")
            fill(block.mix, prefix + "f2out.2")
        fill(net.head_hidden, "atomwise.0")
        fill(net.head_out, "atomwise.2")
        columns = [saved["scale.weight"], saved["shift.weight"]]
        net.scale_and_shift.copy_(torch.cat(columns, dim=1))
    return net


def model():
    here = os.path.dirname(os.path.abspath(__file__))
    return load_reference(DenseSchNet(), os.path.join(here, "weights.pt"))


def pad(rows, counts):
    """[atoms, ...] -> [molecules, most atoms, ...] with zeros."""
    return nn.utils.rnn.pad_sequence(rows.split(counts.tolist()), batch_first=True)


def mask_of(counts):
    return (torch.arange(int(counts.max())) < counts.unsqueeze(1)).float()


def forward(net, batch):
    counts = batch["n_atoms"]
    mask = mask_of(counts)
    energy, forces = net(pad(batch["z"], counts), pad(batch["pos"], counts), mask)
    return {"energy": energy, "forces": forces[mask.bool()]}


def loss(output, batch):
    counts = batch["n_atoms"]
    per_atom = (output["energy"] - batch["energy"] * KCAL_IN_EV) / counts
    energy_term = per_atom.square().sum() / len(counts)
    off = output["forces"] - batch["forces"] * KCAL_IN_EV
    forces_term = off.square().sum() / (3 * counts.sum())
    return 0.3 * energy_term + 0.7 * forces_term


class DecayedAdam(torch.optim.Optimizer):
    """Kernels shrink first, by themselves, then Adam takes its step."""

    def __init__(self, net, lr=4e-3, betas=(0.9, 0.99), eps=1e-6, shrink=0.2):
        kernels = [p for n, p in net.named_parameters() if n.endswith("kernel")]
        others = [p for n, p in net.named_parameters() if not n.endswith("kernel")]
        groups = [
            {"params": kernels, "shrink": shrink},
            {"params": others, "shrink": 0.0},
        ]
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})
        self.t = 0

    def clip(self, limit=1.0):
        grads = [p.grad for g in self.param_groups for p in g["params"]]
        total = torch.stack([g.norm() for g in grads]).norm()
        if total > limit:
            for g in grads:
                g.mul_(limit / (total + 1e-6))

    @torch.no_grad()
    def step(self, closure=None):
        self.clip()
        self.t += 1
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            fix1, fix2 = 1 - beta1**self.t, 1 - beta2**self.t
            for p in group["params"]:
                slots = self.state[p]
                if not slots:
                    slots["m"] = torch.zeros_like(p)
                    slots["v"] = torch.zeros_like(p)
                m, v = slots["m"], slots["v"]
                m.lerp_(p.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                p.mul_(1 - group["lr"] * group["shrink"])
                p.addcdiv_(
                    m, (v / fix2).sqrt().add_(group["eps"]), value=-group["lr"] / fix1
                )
            group["lr"] *= 0.8


def optimizer(net):
    return DecayedAdam(net)
