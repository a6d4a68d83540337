"""Graph attention: a softmax over the edges of a node by scatter, energies of molecules."""

import torch
from torch import nn
from torch.nn import functional as F


def scatter_softmax(scores, index, count):
    """Softmax of scores (edges, heads) over the edges that share an index."""
    where = index[:, None].expand_as(scores)
    top = torch.full((count, scores.size(1)), float("-inf"), device=scores.device)
    top = top.scatter_reduce(0, where, scores, reduce="amax", include_self=False)
    weight = (scores - top[index]).exp()
    total = torch.zeros_like(top).index_add(0, index, weight)
    return weight / (total[index] + 1e-16)


class GATLayer(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, self.size = heads, dim // heads
        self.lin = nn.Linear(dim, dim)
        self.a_src = nn.Parameter(torch.randn(heads, self.size) * 0.3)
        self.a_dst = nn.Parameter(torch.randn(heads, self.size) * 0.3)
        self.skip = nn.Linear(dim, dim)

    def forward(self, x, src, dst):
        n = x.size(0)
        z = self.lin(x).view(n, self.heads, self.size)
        s = (z * self.a_src).sum(-1)[src] + (z * self.a_dst).sum(-1)[dst]
        alpha = scatter_softmax(F.leaky_relu(s, 0.2), dst, n)
        y = torch.zeros_like(z).index_add(0, dst, z[src] * alpha.unsqueeze(-1))
        h = F.relu(y.flatten(1))
        if self.training:  # a gradient needs what relu returned
            return h + self.skip(x)
        h += self.skip(x)
        return h


class Energy(nn.Module):
    def __init__(self, kinds=6, dim=32):
        super().__init__()
        self.atom = nn.Embedding(kinds, dim)
        self.layers = nn.ModuleList([GATLayer(dim), GATLayer(dim)])
        self.readout = nn.Sequential(nn.Linear(dim, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, atoms, edges, molecule, molecules):
        x = self.atom(atoms)
        for layer in self.layers:
            x = layer(x, edges[0], edges[1])
        out = x.new_zeros(molecules.numel(), 1)
        out.index_add_(0, molecule, self.readout(x))
        return out.squeeze(1)


def molecules(seed, count=16):
    """Rings of 5 to 9 atoms; the energy sums over kinds and over pairs of neighbours."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(5, 10, (count,), generator=g)
    molecule = torch.repeat_interleave(torch.arange(count), sizes)
    first = torch.cumsum(sizes, 0) - sizes
    place = torch.arange(len(molecule)) - first[molecule]
    following = first[molecule] + (place + 1) % sizes[molecule]
    here = torch.arange(len(molecule))
    edges = torch.stack([torch.cat([here, following]), torch.cat([following, here])])
    atoms = torch.randint(0, 6, (len(molecule),), generator=g)
    pair = (atoms - 2.0) * (atoms[following] - 2.0)
    energy = torch.zeros(count).index_add(0, molecule, atoms + 0.5 * pair)
    return (atoms, edges, molecule, torch.arange(count)), energy


def model():
    torch.manual_seed(0)
    net = Energy()
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    for step in range(120):
        batch, energy = molecules(1000 + step)
        optimizer.zero_grad()
        F.smooth_l1_loss(net(*batch), energy).backward()
        optimizer.step()
    return net.eval()


def batches():
    return [molecules(seed)[0] for seed in range(8)]


def held_out():
    return [molecules(seed)[0] for seed in range(20, 26)]
