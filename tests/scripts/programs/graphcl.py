"""Contrastive pre-training on small molecule-like graphs.

Two views of each graph (bonds dropped, atoms masked), a GIN encoder, a slow copy of it
that makes the keys, and a ring of older keys as further negatives.
"""

import copy
import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    seed: int = 5
    graphs: int = 72
    batch: int = 24
    width: int = 24
    layers: int = 3
    out: int = 16
    ring: int = 96
    temperature: float = 0.3
    drop_bonds: float = 0.2
    mask_atoms: float = 0.25
    lr: float = 0.02
    decay: float = 0.05
    warmup: int = 4
    total: int = 30
    clip: float = 0.7
    slow: float = 0.8


ELEMENTS = ("H", "C", "N", "O", "F", "S")
COMMON = torch.tensor([0.15, 0.45, 0.12, 0.15, 0.05, 0.08])
# electronegativity, covalent radius in pm, valence
PROPERTIES = {
    "C": (2.55, 76.0, 4.0),
    "F": (3.98, 57.0, 1.0),
    "H": (2.20, 31.0, 1.0),
    "N": (3.04, 71.0, 3.0),
    "O": (3.44, 66.0, 2.0),
    "S": (2.58, 105.0, 2.0),
}
MASKED = len(ELEMENTS)
BONDS = 4


# ------------------------------------------------------------------ graphs


@dataclass
class Graphs:
    """Some graphs as one: a bond stands twice, there and back, one after the other."""

    atom: Tensor
    src: Tensor
    dst: Tensor
    bond: Tensor
    owner: Tensor
    count: int


def random_graph(gen):
    """A tree with a few rings closed."""
    n = int(torch.randint(6, 15, (), generator=gen))
    atom = torch.multinomial(COMMON, n, replacement=True, generator=gen)
    up = torch.rand(n - 1, generator=gen) * torch.arange(1, n)
    pairs = [(i + 1, int(j)) for i, j in enumerate(up)]
    for _ in range(int(torch.randint(0, 4, (), generator=gen))):
        a, b = torch.randperm(n, generator=gen)[:2].tolist()
        if (a, b) not in pairs and (b, a) not in pairs:
            pairs.append((a, b))
    bond = torch.randint(BONDS, (len(pairs),), generator=gen)
    ends = torch.tensor([both for a, b in pairs for both in ((a, b), (b, a))])
    return atom, ends, bond.repeat_interleave(2)


def collate(graphs):
    sizes = torch.tensor([len(atom) for atom, _, _ in graphs])
    starts = sizes.cumsum(0) - sizes
    ends = torch.cat([e + start for (_, e, _), start in zip(graphs, starts)])
    return Graphs(
        atom=torch.cat([atom for atom, _, _ in graphs]),
        src=ends[:, 0],
        dst=ends[:, 1],
        bond=torch.cat([bond for _, _, bond in graphs]),
        owner=torch.arange(len(graphs)).repeat_interleave(sizes),
        count=len(graphs),
    )


def augment(g, cfg, gen):
    """Drop bonds, both ways at once, and hide what some atoms are."""
    keep = torch.rand(len(g.src) // 2, generator=gen) >= cfg.drop_bonds
    keep = keep.repeat_interleave(2)
    hide = torch.rand(len(g.atom), generator=gen) < cfg.mask_atoms
    atom = g.atom.masked_fill(hide, MASKED)
    return replace(g, atom=atom, src=g.src[keep], dst=g.dst[keep], bond=g.bond[keep])


def loader(graphs, cfg, gen):
    while True:
        order = torch.randperm(len(graphs), generator=gen).tolist()
        for start in range(0, len(order), cfg.batch):
            yield collate([graphs[i] for i in order[start : start + cfg.batch]])


# ------------------------------------------------------------------ kernels


class ScatterSum(torch.autograd.Function):
    """Rows added up where `index` says."""

    @staticmethod
    def forward(ctx, rows, index, size):
        ctx.save_for_backward(index)
        return rows.new_zeros(size, rows.shape[1]).index_add_(0, index, rows)

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        return grad[index], None, None


class NTXent(torch.autograd.Function):
    """Each query against all keys of the batch, its own first, and against the ring."""

    @staticmethod
    def forward(ctx, query, key, ring, temperature):
        others = torch.cat([key, ring])
        logits = query @ others.T / temperature
        own = torch.arange(len(query))
        ctx.temperature = temperature
        ctx.save_for_backward(logits, others, own)
        return (logits.logsumexp(1) - logits[own, own]).mean()

    @staticmethod
    def backward(ctx, grad):
        logits, others, own = ctx.saved_tensors
        slope = logits.softmax(1)
        slope[own, own] -= 1.0
        slope = grad * slope / (len(slope) * ctx.temperature)
        return slope @ others, None, None, None


# ------------------------------------------------------------------ model


class BatchStats(nn.Module):
    """Normalises over all atoms of the batch and remembers mean and variance."""

    def __init__(self, width, momentum=0.2, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.shift = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        if self.training:
            var, mean = torch.var_mean(x, 0, correction=0)
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var * len(x) / (len(x) - 1), self.momentum)
        else:
            mean, var = self.mean, self.var
        return (x - mean) * torch.rsqrt(var + self.eps) * self.gain + self.shift


class GINLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.eps = nn.Parameter(torch.tensor(0.1))
        self.bond = nn.Embedding(BONDS, width)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.norm = BatchStats(2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, h, g):
        message = F.relu(h[g.src] + self.bond(g.bond))
        gathered = ScatterSum.apply(message, g.dst, len(h))
        inner = self.up((1 + self.eps) * h + gathered)
        return self.down(F.relu(self.norm(inner)))


class Encoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.atom = nn.Embedding(len(ELEMENTS) + 1, cfg.width)
        self.layers = nn.ModuleList(GINLayer(cfg.width) for _ in range(cfg.layers))
        self.register_buffer("size", torch.tensor(1.0))
        self.head = nn.Sequential(
            nn.Linear(cfg.width * cfg.layers, cfg.width),
            nn.ReLU(),
            nn.Linear(cfg.width, cfg.out, bias=False),
        )

    def forward(self, g):
        h = self.atom(g.atom)
        reads = []
        for layer in self.layers:
            h = h + layer(h, g)
            reads.append(ScatterSum.apply(h, g.owner, g.count) / self.size)
        return F.normalize(self.head(torch.cat(reads, 1)), dim=1)


@torch.no_grad()
def start_from_chemistry(net, graphs):
    """First columns of the atoms' table: what is known of the elements, standardised."""
    table = torch.tensor([PROPERTIES[element] for element in ELEMENTS])
    table = (table - table.mean(0)) / table.std(0)
    net.atom.weight[: len(ELEMENTS), : table.shape[1]] = table
    net.atom.weight[MASKED] = 0.0
    net.size.fill_(sum(len(atom) for atom, _, _ in graphs) / len(graphs))
    for layer in net.layers:
        # strong bonds speak up from the start
        layer.bond.weight += torch.linspace(-0.5, 0.5, BONDS)[:, None]


class Ring:
    """The last keys, oldest overwritten first."""

    def __init__(self, size, width, gen):
        self.keys = F.normalize(torch.randn(size, width, generator=gen), dim=1)
        self.at = 0

    def push(self, keys):
        places = (self.at + torch.arange(len(keys))) % len(self.keys)
        self.keys[places] = keys
        self.at = (self.at + len(keys)) % len(self.keys)


# ------------------------------------------------------------------ training


@torch.no_grad()
def follow(slow, net, keep):
    for s, p in zip(slow.parameters(), net.parameters()):
        s.mul_(keep).add_(p, alpha=1 - keep)


def rate(step, cfg):
    """Linear up, then half a cosine down."""
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    return 0.5 + 0.5 * math.cos(
        math.pi * (step - cfg.warmup) / (cfg.total - cfg.warmup)
    )


def train(cfg, steps):
    torch.manual_seed(cfg.seed)
    data_gen = torch.Generator().manual_seed(cfg.seed + 1)
    view_gen = torch.Generator().manual_seed(cfg.seed + 2)
    graphs = [random_graph(data_gen) for _ in range(cfg.graphs)]

    net = Encoder(cfg)
    start_from_chemistry(net, graphs)
    slow = copy.deepcopy(net).requires_grad_(False)
    ring = Ring(cfg.ring, cfg.out, data_gen)

    matrices = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": cfg.decay}, {"params": others}]
    opt = torch.optim.SGD(groups, lr=cfg.lr, momentum=0.9, weight_decay=0.0)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: rate(step, cfg))

    batches = loader(graphs, cfg, data_gen)
    for step in range(steps):
        g = next(batches)
        one, two = augment(g, cfg, view_gen), augment(g, cfg, view_gen)
        with torch.no_grad():
            key_one, key_two = slow(one), slow(two)
        older = ring.keys.clone()
        loss_one = NTXent.apply(net(one), key_two, older, cfg.temperature)
        loss_two = NTXent.apply(net(two), key_one, older, cfg.temperature)
        loss = (loss_one + loss_two) / 2
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), cfg.clip)
        opt.step()
        sched.step()
        follow(slow, net, cfg.slow)
        ring.push(key_one)
        print(f"{step} loss {loss.item():.4f} norm {norm:.3f}")
    return net, slow, ring, loss


if __name__ == "__main__":
    net, slow, ring, loss = train(Config(), steps=3)
