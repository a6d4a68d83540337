"""A small SchNet: energies of molecules from distances, forces as their gradients."""

import math

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, FILTERS, GAUSSIANS, CUTOFF, ROUNDS = 10, 8, 7, 3.5, 2


class GaussianSmearing(nn.Module):
    def __init__(self):
        super().__init__()
        offset = torch.linspace(0.0, CUTOFF, GAUSSIANS)
        self.coeff = -0.5 / (offset[1] - offset[0]).item() ** 2
        self.register_buffer("offset", offset)

    def forward(self, dist):
        dist = dist.view(-1, 1) - self.offset.view(1, -1)
        return torch.exp(self.coeff * torch.pow(dist, 2))


class ShiftedSoftplus(nn.Module):
    def __init__(self):
        super().__init__()
        self.shift = math.log(2.0)

    def forward(self, x):
        return F.softplus(x) - self.shift


class CFConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = nn.Linear(WIDTH, FILTERS, bias=False)
        self.lin2 = nn.Linear(FILTERS, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(GAUSSIANS, FILTERS),
            ShiftedSoftplus(),
            nn.Linear(FILTERS, FILTERS),
        )

    def forward(self, x, edge_index, edge_weight, edge_attr):
        c = 0.5 * (torch.cos(edge_weight * math.pi / CUTOFF) + 1.0)
        w = self.mlp(edge_attr) * c.view(-1, 1)
        x = self.lin1(x)
        source, target = edge_index
        messages = x.index_select(0, source) * w
        x = torch.zeros_like(x).index_add(0, target, messages)
        return self.lin2(x)


class InteractionBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = CFConv()
        self.act = ShiftedSoftplus()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, edge_index, edge_weight, edge_attr):
        x = self.conv(x, edge_index, edge_weight, edge_attr)
        return self.lin(self.act(x))


class SchNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH, padding_idx=0)
        self.distance_expansion = GaussianSmearing()
        self.interactions = nn.ModuleList(InteractionBlock() for _ in range(ROUNDS))
        self.lin1 = nn.Linear(WIDTH, WIDTH // 2)
        self.act = ShiftedSoftplus()
        self.lin2 = nn.Linear(WIDTH // 2, 1)
        self.atomref = nn.Embedding(10, 1)
        self.register_buffer("mean", torch.tensor(-1.3))
        self.register_buffer("std", torch.tensor(0.7))

    def energy(self, z, pos, batch, edge_index):
        h = self.embedding(z)
        row, col = edge_index
        edge_weight = (pos[row] - pos[col]).norm(dim=-1)
        edge_attr = self.distance_expansion(edge_weight)
        for interaction in self.interactions:
            h = h + interaction(h, edge_index, edge_weight, edge_attr)
        h = self.lin2(self.act(self.lin1(h)))
        h = h * self.std + self.mean
        h = h + self.atomref(z)
        out = h.new_zeros(int(batch.max()) + 1, 1)
        return out.index_add(0, batch, h).squeeze(-1)

    @torch.enable_grad()
    def forward(self, z, pos, batch, edge_index):
        pos = pos.requires_grad_()
        energy = self.energy(z, pos, batch, edge_index)
        (grad,) = torch.autograd.grad(energy.sum(), pos, create_graph=True)
        return energy, -grad


def model():
    torch.manual_seed(630)
    net = SchNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.Linear):
                module.weight.mul_(1.6)
    return net


def batches():
    generator = torch.Generator().manual_seed(631)
    sizes = [5, 3, 6]
    z = torch.randint(1, 10, (sum(sizes),), generator=generator)
    batch = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    pos = 1.3 * torch.randn(sum(sizes), 3, generator=generator)
    distance = (pos[:, None] - pos[None]).norm(dim=-1)
    near = (distance < 3.5) & (batch[:, None] == batch[None])
    near = near & ~torch.eye(sum(sizes), dtype=torch.bool)
    return [
        {
            "z": z,
            "pos": pos,
            "batch": batch,
            "edge_index": near.nonzero().T.flip(0).contiguous(),
            "energy": torch.randn(3, generator=generator) - 5,
            "force": 0.3 * torch.randn(sum(sizes), 3, generator=generator),
        }
    ]


def forward(net, batch):
    pos = batch["pos"].clone()
    energy, force = net(batch["z"], pos, batch["batch"], batch["edge_index"])
    return {"energy": energy, "force": force}


def loss(output, batch):
    energy = F.mse_loss(output["energy"], batch["energy"])
    force = F.mse_loss(output["force"], batch["force"])
    return 0.05 * energy + force


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=5e-4, amsgrad=True)
