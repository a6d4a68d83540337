"""A graph convolution network: messages along edges by index_select and index_add."""

import torch
import torch.nn as nn
import torch.nn.functional as F

NODES, FEATURES, CLASSES = 60, 16, 4


class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, edge_index):
        source, target = edge_index[0], edge_index[1]
        degree = torch.ones(x.size(0), dtype=x.dtype, device=x.device)
        degree = degree.index_add(0, target, torch.ones_like(target, dtype=x.dtype))
        norm = degree.rsqrt()
        h = self.lin(x)
        messages = h.index_select(0, source) * (norm[source] * norm[target])[:, None]
        out = h * (norm * norm)[:, None]
        return out.index_add(0, target, messages) + self.bias


class GCN(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.conv1 = GCNConv(FEATURES, hidden)
        self.conv2 = GCNConv(hidden, hidden)
        self.out = GCNConv(hidden, CLASSES)

    def forward(self, x, edge_index):
        x = F.relu(self.conv1(x, edge_index))
        x = F.dropout(x, 0.2, training=self.training)
        x = F.relu(self.conv2(x, edge_index))
        return self.out(x, edge_index)


def graph(seed):
    """Four communities; edges mostly inside one; features tell little by themselves."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (NODES,), generator=g)
    same = label[:, None] == label
    linked = torch.rand(NODES, NODES, generator=g) < torch.where(same, 0.25, 0.02)
    edge_index = linked.nonzero().T.contiguous()
    centre = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    x = centre[label] + 2 * torch.randn(NODES, FEATURES, generator=g)
    return (x, edge_index), label


def model():
    torch.manual_seed(0)
    net = GCN()
    opt = torch.optim.Adam(net.parameters(), lr=1e-2, weight_decay=5e-4)
    for seed in range(80):
        batch, label = graph(100 + seed)
        opt.zero_grad()
        F.cross_entropy(net(*batch), label).backward()
        opt.step()
    return net.eval()


def batches():
    return [graph(seed)[0] for seed in range(8)]


def held_out():
    return [graph(seed)[0] for seed in range(20, 26)]
