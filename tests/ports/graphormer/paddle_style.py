"""After PaddlePaddle and PGL: the nodes of all graphs in one list, with ids and offsets.

Each graph begins with its virtual node. Kernels are [in, out]. Pairs of nodes, and the edges
between them, are lists as well; only attention works on blocks of one size.
"""

import math
from collections import deque
from pathlib import Path

import torch
from torch import nn

args: dict = {
    "hidden_size": 64,
    "num_heads": 4,
    "ffn_size": 128,
    "num_layers": 3,
    "atom_dims": [12, 5, 4],
    "bond_dims": [5, 3],
    "num_atom_types": 11,
    "mask_token": 11,
    "max_degree": 3,
    "max_dist": 6,
    "multi_hop_max_dist": 4,
    "label_mean": 5.2,
    "label_std": 1.6,
    "mask_atom_weight": 0.3,
    "learning_rate": 4e-3,
    "end_lr": 1e-5,
    "power": 2.0,
    "warmup_steps": 2,
    "total_steps": 8,
    "weight_decay": 0.4,
    "clip_norm": 1.0,
}

# ------------------------------------------------------------------ paddle ops


class ScatterAdd(torch.autograd.Function):
    """Rows of updates are added to rows of nought."""

    @staticmethod
    def forward(ctx, updates, index, num_rows):
        ctx.save_for_backward(index)
        out = updates.new_zeros(num_rows, *updates.shape[1:])
        return out.index_add_(0, index, updates)

    @staticmethod
    def backward(ctx, out_grad):
        (index,) = ctx.saved_tensors
        return out_grad.index_select(0, index), None, None


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, index):
        ctx.save_for_backward(index)
        ctx.num_rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, out_grad):
        (index,) = ctx.saved_tensors
        x_grad = out_grad.new_zeros(ctx.num_rows, *out_grad.shape[1:])
        x_grad.index_add_(0, index, out_grad)
        return x_grad, None


def scatter(updates, index, num_rows):
    return ScatterAdd.apply(updates, index, num_rows)


def gather(x, index):
    return Gather.apply(x, index)


def segment_sum(data, segment_ids, num_segments):
    return ScatterAdd.apply(data, segment_ids, num_segments)


def segment_mean(data, segment_ids, num_segments):
    total = segment_sum(data, segment_ids, num_segments)
    count = torch.bincount(segment_ids, minlength=num_segments)
    return total / count.clamp(min=1).unsqueeze(-1)


class Linear(nn.Module):
    def __init__(self, in_features, out_features, bias_attr=True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(in_features, out_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias_attr else None

    def forward(self, x):
        out = torch.matmul(x, self.weight)
        return out if self.bias is None else out + self.bias


class Embedding(nn.Module):
    def __init__(self, num_embeddings, embedding_dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim))

    def forward(self, ids):
        rows = gather(self.weight, ids.reshape(-1))
        return rows.reshape(*ids.shape, -1)


# -------------------------------------------------------------------- pgl data


def breadth_first(source, successors):
    """Hops to the nodes that can be reached, and the node and edge before each."""
    hops, before = {source: 0}, {}
    queue = deque([source])
    while queue:
        node = queue.popleft()
        for edge, target in successors[node]:
            if target not in hops:
                hops[target] = hops[node] + 1
                before[target] = (node, edge)
                queue.append(target)
    return hops, before


def walk(target, before):
    """Edges from the source of a search to the target."""
    edges = []
    while target in before:
        target, edge = before[target]
        edges.append(edge)
    return edges[::-1]


class BatchGraph:
    """Graphs joined to one; ``lod`` has where each begins."""

    def __init__(self, graphs):
        sizes = [len(graph["atoms"]) for graph in graphs]
        self.num_graph = len(graphs)
        self.lod = torch.tensor([0, *sizes]).cumsum(0)
        self.graph_node_id = torch.repeat_interleave(
            torch.arange(self.num_graph), torch.tensor(sizes)
        )
        self.num_nodes = int(self.lod[-1])

        feature = torch.cat([graph["atoms"] for graph in graphs]).clone()
        masked = torch.cat([graph["masked"] for graph in graphs])
        feature[masked, 0] = args["mask_token"]
        self.node_feat = self.ids(feature, args["atom_dims"])
        edges = [graph["edges"] + self.lod[i] for i, graph in enumerate(graphs)]
        self.src, self.dst = torch.cat(edges, dim=1)
        self.edge_feat = self.ids(
            torch.cat([graph["bonds"] for graph in graphs]), args["bond_dims"]
        )

        self.make_tokens(max(sizes) + 1)
        self.make_pairs()

    @staticmethod
    def ids(feature, dims):
        start, columns = 1, []
        for column, size in enumerate(dims):
            columns.append(feature[:, column] + start)
            start += size
        return torch.stack(columns, dim=1)

    def indegree(self):
        return torch.bincount(self.dst, minlength=self.num_nodes)

    def outdegree(self):
        return torch.bincount(self.src, minlength=self.num_nodes)

    def make_tokens(self, length):
        """Places of nodes and virtual nodes in the list, and of these in the blocks."""
        self.length = length
        graphs = torch.arange(self.num_graph)
        self.node_token = torch.arange(self.num_nodes) + self.graph_node_id + 1
        self.virtual_token = self.lod[:-1] + graphs
        self.num_tokens = self.num_nodes + self.num_graph
        self.block = torch.zeros(self.num_graph * length, dtype=torch.long)
        self.slot = torch.empty(self.num_tokens, dtype=torch.long)
        self.slot[self.virtual_token] = graphs * length
        within = torch.arange(self.num_nodes) - self.lod[self.graph_node_id]
        self.slot[self.node_token] = self.graph_node_id * length + within + 1
        self.block[self.slot] = torch.arange(self.num_tokens)
        filled = torch.zeros(self.num_graph * length)
        filled[self.slot] = 1.0
        self.filled = filled.reshape(self.num_graph, length)

    def make_pairs(self):
        """Lists of pairs with a type each, and of the edges between them."""
        successors = [[] for _ in range(self.num_nodes)]
        for edge, (src, dst) in enumerate(zip(self.src.tolist(), self.dst.tolist())):
            successors[src].append((edge, dst))
        pair_slot, pair_type, path_pair, path_hop, path_edge = [], [], [], [], []
        for graph in range(self.num_graph):
            begin, end = self.lod[graph : graph + 2].tolist()
            for i in range(1, end - begin + 1):
                for pair in ((0, i), (i, 0)):
                    pair_slot.append((graph, *pair))
                    pair_type.append(0)
            for source in range(begin, end):
                hops, before = breadth_first(source, successors)
                for target in range(begin, end):
                    for hop, edge in enumerate(walk(target, before)):
                        if hop < args["multi_hop_max_dist"]:
                            path_pair.append(len(pair_slot))
                            path_hop.append(hop)
                            path_edge.append(edge)
                    if target in hops:
                        kind = 1 + min(hops[target], args["max_dist"])
                    else:
                        kind = args["max_dist"] + 2
                    pair_slot.append((graph, source - begin + 1, target - begin + 1))
                    pair_type.append(kind)
        graph, row, column = torch.tensor(pair_slot).T
        self.pair_slot = (graph * self.length + row) * self.length + column
        self.pair_type = torch.tensor(pair_type)
        self.path_pair = torch.tensor(path_pair)
        self.path_hop = torch.tensor(path_hop)
        self.path_edge = torch.tensor(path_edge)


# ----------------------------------------------------------------------- layers


class CentralityEncoding(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.in_degree = Embedding(args["max_degree"] + 2, hidden)
        self.out_degree = Embedding(args["max_degree"] + 2, hidden)

    def forward(self, g):
        indegree = torch.clip(g.indegree(), max=args["max_degree"]) + 1
        outdegree = torch.clip(g.outdegree(), max=args["max_degree"]) + 1
        return self.in_degree(indegree) + self.out_degree(outdegree)


class PairEncoding(nn.Module):
    """One table for the pairs: with a virtual node, by distance, without a path."""

    def __init__(self, num_heads):
        super().__init__()
        hops = args["multi_hop_max_dist"]
        self.pair_type = Embedding(args["max_dist"] + 3, num_heads)
        self.edge_type = Embedding(sum(args["bond_dims"]) + 1, num_heads)
        self.hop = nn.Parameter(torch.empty(num_heads, hops, num_heads))

    def forward(self, g):
        edge = torch.mean(self.edge_type(g.edge_feat), dim=1)
        by_hop = torch.tensordot(edge, self.hop, dims=1)
        step = gather(by_hop.flatten(0, 1), g.path_edge * by_hop.shape[1] + g.path_hop)
        path = segment_mean(step, g.path_pair, len(g.pair_type))
        pair = self.pair_type(g.pair_type) + path
        dense = scatter(pair, g.pair_slot, g.num_graph * g.length**2)
        dense = dense.reshape(g.num_graph, g.length, g.length, -1)
        return dense.permute(0, 3, 1, 2)


def masked_softmax(x, keep):
    """Softmax of the last axis over what is kept."""
    high = torch.amax(x.detach(), dim=-1, keepdim=True)
    power = torch.exp(x - high) * keep
    return power / torch.sum(power, dim=-1, keepdim=True)


class MultiHeadAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.q_proj = Linear(embed_dim, embed_dim)
        self.k_proj = Linear(embed_dim, embed_dim, bias_attr=False)
        self.v_proj = Linear(embed_dim, embed_dim)
        self.out_proj = Linear(embed_dim, embed_dim)

    def to_block(self, g, x):
        x = gather(x, g.block)
        x = x.reshape(g.num_graph, g.length, self.num_heads, self.head_dim)
        return x.permute(0, 2, 1, 3)

    def forward(self, g, x, attn_bias):
        q = self.to_block(g, self.q_proj(x))
        k = self.to_block(g, self.k_proj(x))
        v = self.to_block(g, self.v_proj(x))
        product = torch.matmul(q, k.permute(0, 1, 3, 2)) / math.sqrt(self.head_dim)
        weights = masked_softmax(product + attn_bias, g.filled[:, None, None, :])
        out = torch.matmul(weights, v).permute(0, 2, 1, 3)
        out = gather(out.reshape(g.num_graph * g.length, -1), g.slot)
        return self.out_proj(out)


class TransformerEncoderLayer(nn.Module):
    def __init__(self, d_model, nhead, dim_feedforward):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, nhead)
        self.linear1 = Linear(d_model, dim_feedforward)
        self.linear2 = Linear(dim_feedforward, d_model)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)
        self.activation = nn.GELU()

    def forward(self, g, tgt, attn_bias):
        residual = tgt
        tgt = self.norm1(tgt)
        tgt = residual + self.self_attn(g, tgt, attn_bias)
        residual = tgt
        tgt = self.norm2(tgt)
        tgt = self.linear2(self.activation(self.linear1(tgt)))
        return residual + tgt


class MaskAtomHead(nn.Module):
    """Scores by the rows of the table of atoms."""

    def __init__(self, hidden):
        super().__init__()
        self.transform = Linear(hidden, hidden)
        self.layer_norm = nn.LayerNorm(hidden)
        self.decoder_bias = nn.Parameter(torch.empty(args["num_atom_types"]))

    def forward(self, x, table):
        x = self.layer_norm(nn.functional.gelu(self.transform(x)))
        rows = table[1 : args["num_atom_types"] + 1]
        return torch.matmul(x, rows.T) + self.decoder_bias


class GraphormerModel(nn.Module):
    def __init__(self):
        super().__init__()
        hidden, heads = args["hidden_size"], args["num_heads"]
        self.atom_encoder = Embedding(sum(args["atom_dims"]) + 1, hidden)
        self.centrality = CentralityEncoding(hidden)
        self.virtual_node = nn.Parameter(torch.empty(1, hidden))
        self.pair_encoding = PairEncoding(heads)
        self.encoder = nn.ModuleList(
            [
                TransformerEncoderLayer(hidden, heads, args["ffn_size"])
                for _ in range(args["num_layers"])
            ]
        )
        self.final_norm = nn.LayerNorm(hidden)
        self.graph_pred = nn.Sequential(
            Linear(hidden, hidden), nn.GELU(), Linear(hidden, 1)
        )
        self.mask_atom = MaskAtomHead(hidden)

    def embed(self, g):
        node = torch.sum(self.atom_encoder(g.node_feat), dim=1) + self.centrality(g)
        virtual = self.virtual_node.expand(g.num_graph, -1)
        feature = scatter(node, g.node_token, g.num_tokens)
        return feature + scatter(virtual, g.virtual_token, g.num_tokens)

    def forward(self, g):
        feature = self.embed(g)
        attn_bias = self.pair_encoding(g)
        for layer in self.encoder:
            feature = layer(g, feature, attn_bias)
        feature = self.final_norm(feature)
        graph_feat = gather(feature, g.virtual_token)
        node_feat = gather(feature, g.node_token)
        pred = self.graph_pred(graph_feat)[:, 0]
        return pred, self.mask_atom(node_feat, self.atom_encoder.weight)


# ------------------------------------------------------------------- state dict


def convert(state):
    """A state dict of torch -> one of this model."""
    out = {
        "atom_encoder.weight": state["features.atom_embed.weight"],
        "centrality.in_degree.weight": state["features.in_degree_embed.weight"],
        "centrality.out_degree.weight": state["features.out_degree_embed.weight"],
        "virtual_node": state["features.graph_token"][None],
        "pair_encoding.pair_type.weight": torch.cat(
            [
                state["bias.virtual_distance"][None],
                state["bias.distance_embed.weight"][1:],
            ]
        ),
        "pair_encoding.edge_type.weight": state["bias.bond_embed.weight"],
        "pair_encoding.hop": state["bias.hop_weight"].permute(1, 0, 2),
        "mask_atom.decoder_bias": state["atom_bias"],
    }

    def linear(name, key):
        out[name + ".weight"] = state[key + ".weight"].T
        out[name + ".bias"] = state[key + ".bias"]

    def norm(name, key):
        out[name + ".weight"] = state[key + ".weight"]
        out[name + ".bias"] = state[key + ".bias"]

    linear("graph_pred.0", "value_hidden")
    linear("graph_pred.2", "value_out")
    linear("mask_atom.transform", "atom_hidden")
    norm("mask_atom.layer_norm", "atom_norm")
    norm("final_norm", "norm")
    for i in range(args["num_layers"]):
        name, key = f"encoder.{i}", f"layers.{i}"
        q, k, v = state[key + ".attn.qkv.weight"].chunk(3)
        out[name + ".self_attn.q_proj.weight"] = q.T
        out[name + ".self_attn.k_proj.weight"] = k.T
        out[name + ".self_attn.v_proj.weight"] = v.T
        out[name + ".self_attn.q_proj.bias"] = state[key + ".attn.q_bias"]
        out[name + ".self_attn.v_proj.bias"] = state[key + ".attn.v_bias"]
        linear(name + ".self_attn.out_proj", key + ".attn.out")
        linear(name + ".linear1", key + ".fc1")
        linear(name + ".linear2", key + ".fc2")
        norm(name + ".norm1", key + ".attn_norm")
        norm(name + ".norm2", key + ".ffn_norm")
    return out


def model():
    net = GraphormerModel()
    net.load_state_dict(convert(torch.load(Path(__file__).with_name("weights.pt"))))
    return net


# --------------------------------------------------------------------- training


def forward(net, batch):
    pred, atom_logits = net(BatchGraph(batch["graphs"]))
    return {"value": pred, "atoms": atom_logits}


def graph_loss(pred, label):
    label = (label - args["label_mean"]) / args["label_std"]
    return nn.functional.l1_loss(pred, label, reduction="mean")


def mask_atom_loss(logits, label, graph_id, num_graph, ignore_index=-100):
    """Summed by graph, then divided by the number of masked atoms."""
    keep = label != ignore_index
    index = torch.where(keep, label, 0).unsqueeze(-1)
    log_prob = logits - torch.logsumexp(logits, dim=-1, keepdim=True)
    nll = -torch.take_along_dim(log_prob, index, dim=-1)[:, 0]
    nll = torch.where(keep, nll, 0.0)
    per_graph = segment_sum(nll, graph_id, num_graph)
    count = segment_sum(keep.float(), graph_id, num_graph)
    return torch.sum(per_graph) / torch.sum(count)


def loss(output, batch):
    graphs = batch["graphs"]
    label = torch.cat(
        [torch.where(g["masked"], g["atoms"][:, 0], -100) for g in graphs]
    )
    graph_id = torch.cat(
        [torch.full((len(g["atoms"]),), i) for i, g in enumerate(graphs)]
    )
    atom_loss = mask_atom_loss(output["atoms"], label, graph_id, len(graphs))
    value_loss = graph_loss(output["value"], batch["target"])
    return value_loss + args["mask_atom_weight"] * atom_loss


class LRScheduler:
    def __init__(self, learning_rate, last_epoch=-1):
        self.base_lr = learning_rate
        self.last_epoch = last_epoch
        self.step()

    def __call__(self):
        return self.last_lr

    def get_lr(self):
        raise NotImplementedError

    def step(self, epoch=None):
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self.last_lr = self.get_lr()


class PolynomialDecay(LRScheduler):
    def __init__(self, learning_rate, decay_steps, end_lr, power):
        self.decay_steps, self.end_lr, self.power = decay_steps, end_lr, power
        super().__init__(learning_rate)

    def get_lr(self):
        step = min(self.last_epoch, self.decay_steps)
        share = (1 - step / self.decay_steps) ** self.power
        return (self.base_lr - self.end_lr) * share + self.end_lr


class LinearWarmup(LRScheduler):
    def __init__(self, learning_rate, warmup_steps, start_lr, end_lr, last_epoch=-1):
        self.after, self.warmup_steps = learning_rate, warmup_steps
        self.start_lr, self.end_lr = start_lr, end_lr
        super().__init__(end_lr, last_epoch)

    def get_lr(self):
        if self.last_epoch < self.warmup_steps:
            rise = self.end_lr - self.start_lr
            return rise * self.last_epoch / self.warmup_steps + self.start_lr
        self.after.step(self.last_epoch - self.warmup_steps)
        return self.after()


class ClipGradByGlobalNorm:
    def __init__(self, clip_norm):
        self.clip_norm = clip_norm

    def __call__(self, grads):
        global_norm = torch.sqrt(sum(torch.sum(torch.square(g)) for g in grads))
        scale = self.clip_norm / torch.clamp(global_norm, min=self.clip_norm)
        return [g * scale for g in grads]


class AdamW(torch.optim.Optimizer):
    def __init__(
        self,
        learning_rate,
        named_parameters,
        weight_decay,
        apply_decay_param_fun,
        grad_clip,
        beta1=0.9,
        beta2=0.98,
        epsilon=1e-6,
    ):
        named_parameters = list(named_parameters)
        super().__init__([p for _, p in named_parameters], {})
        self.names = [name for name, _ in named_parameters]
        self.learning_rate, self.grad_clip = learning_rate, grad_clip
        self.coeff, self.decays = weight_decay, apply_decay_param_fun
        self.beta1, self.beta2, self.epsilon = beta1, beta2, epsilon
        self.beta1_pow, self.beta2_pow = beta1, beta2

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = self.grad_clip([p.grad for p in params])
        lr = self.learning_rate()
        root = math.sqrt(1 - self.beta2_pow)
        lr_t = lr * root / (1 - self.beta1_pow)
        for name, param, grad in zip(self.names, params, grads):
            acc = self.state[param]
            if not acc:
                acc["moment1"] = torch.zeros_like(param)
                acc["moment2"] = torch.zeros_like(param)
            if self.decays(name):
                param.mul_(1 - lr * self.coeff)
            mom1, mom2 = acc["moment1"], acc["moment2"]
            mom1.mul_(self.beta1).add_((1 - self.beta1) * grad)
            mom2.mul_(self.beta2).add_((1 - self.beta2) * grad * grad)
            param.sub_(lr_t * mom1 / (torch.sqrt(mom2) + self.epsilon * root))
        self.beta1_pow *= self.beta1
        self.beta2_pow *= self.beta2
        self.learning_rate.step()


NO_DECAY = ("bias", "norm", "atom_encoder", "degree", "virtual", "_type")


def apply_decay(name):
    return not any(part in name for part in NO_DECAY)


def optimizer(net):
    rate, steps = args["learning_rate"], args["total_steps"] - args["warmup_steps"]
    decay = PolynomialDecay(rate, steps, args["end_lr"], args["power"])
    # The first step has the rate of one step of the warm-up, not of none.
    scheduler = LinearWarmup(decay, args["warmup_steps"], 0.0, rate, last_epoch=0)
    return AdamW(
        learning_rate=scheduler,
        named_parameters=net.named_parameters(),
        weight_decay=args["weight_decay"],
        apply_decay_param_fun=apply_decay,
        grad_clip=ClipGradByGlobalNorm(args["clip_norm"]),
    )
