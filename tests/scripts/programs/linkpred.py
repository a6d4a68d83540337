# Missing links of a graph of parts: GraphSAGE over sampled neighbours, one round from the
# features, the other over embeddings of which most are remembered from earlier blocks.
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

torch.manual_seed(23)
gen = torch.Generator().manual_seed(24)

nodes, links, relations = 90, 420, 3
raw, wide, out, marks = 10, 20, 16, 4  # features, hidden, embedding, features of a link
fanout = (6, 4)
block, per_update, negatives, updates = 12, 2, 18, 3
lr, warm, decay, clip = 0.01, 4, 0.1, 0.5
power = 0.75


# ================================================================ graph


def make_links():
    """Head, relation, tail and marks; few parts have most of the links."""
    place = torch.randn(nodes, 3, generator=gen)
    fame = torch.rand(nodes, generator=gen) ** -0.6
    head = torch.multinomial(fame, links, replacement=True, generator=gen)
    rel = torch.multinomial(torch.tensor([0.5, 0.3, 0.2]), links, True, generator=gen)
    turn = torch.randn(relations, 3, 3, generator=gen)
    towards = torch.einsum("ei,eij->ej", place[head], turn[rel])
    near = -torch.cdist(towards, place) + fame.log()
    near.scatter_(1, head[:, None], -1e9)
    tail = torch.multinomial(near.softmax(1), 1, generator=gen)[:, 0]
    mark = torch.randn(links, marks, generator=gen) + 0.5 * F.one_hot(rel, marks)
    noise = torch.randn(nodes, raw, generator=gen)
    feature = place @ torch.randn(3, raw, generator=gen) + 0.5 * noise
    return head, rel, tail, mark, feature * torch.linspace(0.4, 2.5, raw) + 1.0


class Graph:
    """Each link both ways; edge e and edge e + links are the same one."""

    def __init__(self, head, tail, mark):
        self.src, self.dst = torch.cat([head, tail]), torch.cat([tail, head])
        self.mark = torch.cat([mark, mark])
        self.degree = torch.bincount(self.dst, minlength=nodes).float()
        root = self.degree.clamp(min=1).rsqrt()
        self.norm = root[self.src] * root[self.dst]

    def sample(self, seeds, most, hidden):
        """Up to `most` edges into each seed, none of the hidden links."""
        into = torch.isin(self.dst, seeds)
        into &= ~torch.isin(torch.arange(2 * links) % links, hidden)
        edges = into.nonzero()[:, 0]
        key = torch.rand(len(edges), generator=gen)
        edges = edges[(self.dst[edges] + key).argsort()]
        dst = self.dst[edges]
        rank = torch.arange(len(edges)) - torch.searchsorted(dst, dst)
        return edges[rank < most]

    def smooth(self, x):
        return torch.zeros_like(x).index_add_(0, self.dst, x[self.src] * self.norm[:, None])


# ================================================================ kernels


class GatherRows(Function):
    """Rows of a table; the gradients of a row are added up in a fixed order."""

    @staticmethod
    def forward(ctx, table, index):
        ctx.save_for_backward(index)
        ctx.rows = len(table)
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        order = index.argsort(stable=True)
        size = torch.bincount(index, minlength=ctx.rows)
        total = torch.segment_reduce(grad[order], "sum", lengths=size, axis=0, initial=0.0)
        return total, None


class Triples(Function):
    """Score of each head and relation with each of the tails."""

    @staticmethod
    def forward(ctx, head, rel, tails):
        ctx.save_for_backward(head, rel, tails)
        return (head * rel) @ tails.T

    @staticmethod
    def backward(ctx, grad):
        head, rel, tails = ctx.saved_tensors
        turned = grad @ tails
        return turned * rel, turned * head, grad.T @ (head * rel)


# ================================================================ model


class Sage(nn.Module):
    """Own row, mean and maximum of the gated rows of the neighbours."""

    def __init__(self, n_in, n_out):
        super().__init__()
        self.gate = nn.Linear(marks, n_in)
        self.own = nn.Linear(n_in, n_out)
        self.mean = nn.Linear(n_in, n_out, bias=False)
        self.most = nn.Linear(n_in, n_out, bias=False)

    def forward(self, own, rows, where, mark, weight):
        message = rows * self.gate(mark).sigmoid()
        mean = torch.zeros_like(own).index_add(0, where, message * weight[:, None])
        index = where[:, None].expand_as(message)
        most = torch.zeros_like(own)
        most = most.scatter_reduce(0, index, message, "amax", include_self=False)
        return self.own(own) + self.mean(mean) + self.most(most)


class LinkPredictor(nn.Module):
    def __init__(self, graph, feature):
        super().__init__()
        self.graph = graph
        self.register_buffer("feature", feature)
        self.register_buffer("norm", graph.norm)
        self.register_buffer("history", torch.zeros(nodes, wide))
        self.node = nn.Embedding(nodes, wide)
        self.inlet = nn.Linear(raw, wide)
        self.first, self.second = Sage(wide, wide), Sage(wide, out)
        self.scale = nn.LayerNorm(out)
        self.diagonal = nn.Embedding(relations, out)
        self.sharp = nn.Embedding(relations, 1)
        nn.init.normal_(self.diagonal.weight, 1.0, 0.2)
        nn.init.constant_(self.sharp.weight, -0.5 * math.log(out))

    def edges(self, seeds, most, hidden):
        """Sources and what a layer wants; weights as if all edges had been taken."""
        chosen = self.graph.sample(seeds, most, hidden)
        where = torch.searchsorted(seeds, self.graph.dst[chosen])
        taken = torch.bincount(where, minlength=len(seeds))
        share = self.graph.degree[seeds] / taken.clamp(min=1)
        weight = self.norm[chosen] * share[where]
        return self.graph.src[chosen], (where, self.graph.mark[chosen], weight)

    def low(self, seeds, most, hidden):
        table = self.inlet(self.feature) + self.node.weight
        src, rest = self.edges(seeds, most, hidden)
        own = GatherRows.apply(table, seeds)
        rows = GatherRows.apply(table, src)
        return F.elu(self.first(own, rows, *rest))

    def forward(self, seeds, hidden):
        fresh = self.low(seeds, fanout[0], hidden)
        src, rest = self.edges(seeds, fanout[1], hidden)
        table = self.history.index_copy(0, seeds, fresh)
        rows = GatherRows.apply(table, src)
        self.history[seeds] = fresh.detach()
        return self.scale(self.second(fresh, rows, *rest))

    def score(self, head, rel, tails):
        return self.sharp(rel).exp() * Triples.apply(head, self.diagonal(rel), tails)


@torch.no_grad()
def prepare(model, graph):
    """Rows of the nodes begin as smooth noise, what is remembered as all edges give it."""
    noise = torch.randn(nodes, wide, generator=gen)
    smooth = graph.smooth(graph.smooth(noise))
    model.node.weight.copy_(smooth / smooth.std())
    everyone, none = torch.arange(nodes), torch.empty(0, dtype=torch.long)
    model.history.copy_(model.low(everyone, 2 * links, none))


# ================================================================ loss


def link_loss(model, picked):
    """Cross entropy of the tail among it and the negatives, as if those were not drawn by fame."""
    h, r, t = head[picked], rel[picked], tail[picked]
    drawn = torch.multinomial(chance, negatives, replacement=True, generator=gen)
    seeds = torch.cat([h, t, drawn]).unique()
    z = model(seeds, picked)
    hz, tz, nz = (z[torch.searchsorted(seeds, ids)] for ids in (h, t, drawn))
    against = model.score(hz, r, nz) - (negatives * chance[drawn]).log()
    against = against.masked_fill(t[:, None] == drawn, -1e9)
    true = model.score(hz, r, tz).diagonal() - (negatives * chance[t]).log()
    logits = torch.cat([true[:, None], against], 1)
    return F.cross_entropy(logits, torch.zeros(len(h), dtype=torch.long))


# ================================================================ training

head, rel, tail, mark, feature = make_links()
graph = Graph(head, tail, mark)
feature = (feature - feature.mean(0)) / feature.std(0)
chance = (graph.degree + 1) ** power
chance = chance / chance.sum()
model = LinkPredictor(graph, feature)
prepare(model, graph)

matrices = [p for p in model.parameters() if p.ndim > 1]
vectors = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
opt = torch.optim.AdamW(groups, lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=decay)
sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min(1.0, (n + 1) / warm))

queue = torch.randperm(links, generator=gen).split(block)
for update in range(updates):
    opt.zero_grad()
    seen = 0.0
    for part in range(per_update):
        picked = queue[update * per_update + part]
        loss = link_loss(model, picked) / per_update
        loss.backward()
        seen += loss.item()
    size = nn.utils.clip_grad_norm_(model.parameters(), clip)
    opt.step()
    sched.step()
    print(f"update {update} loss {seen:.4f} gradient {size:.3f}")
