"""After the C++ of Marian: a graph of named matrices, time before batch, nodes with gradients.

Vectors are rows of one. Words come as flat lists of indices with masks of 1 and 0. All
parameters lie behind one another for the optimizer.
"""

import math
from pathlib import Path

import torch
from torch import nn
from torch.autograd import Function

OPTIONS = {
    "dim-emb": 32,
    "enc-depth": 2,
    "dec-depth": 2,
    "transformer-heads": 4,
    "label-smoothing": 0.1,
    "learn-rate": 0.006,
    "lr-warmup": 2,
    "lr-decay-inv-sqrt": 2,
    "clip-norm": 1.0,
    "exponential-smoothing": 1e-3,
    "max-length": 24,
}
OPTIMIZER_PARAMS = (0.9, 0.98, 1e-9)
EOS_ID, PAD_ID = 0, 43


# ------------------------------------------------------------------- nodes


class RowsNode(Function):
    """Rows of a table; that of the padding is left alone on the way back."""

    @staticmethod
    def forward(ctx, table, indices):
        ctx.save_for_backward(indices)
        ctx.size = table.shape
        return table.index_select(0, indices)

    @staticmethod
    def backward(ctx, adj):
        (indices,) = ctx.saved_tensors
        adj = adj * (indices != PAD_ID).to(adj.dtype).unsqueeze(1)
        return adj.new_zeros(ctx.size).index_add(0, indices, adj), None


class SwishNode(Function):
    @staticmethod
    def forward(ctx, x):
        gate = torch.sigmoid(x)
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx, adj):
        x, gate = ctx.saved_tensors
        return adj * (gate + x * gate * (1 - gate))


class SoftmaxNode(Function):
    @staticmethod
    def forward(ctx, x):
        x = torch.exp(x - torch.max(x, dim=-1, keepdim=True)[0])
        val = x / x.sum(-1, keepdim=True)
        ctx.save_for_backward(val)
        return val

    @staticmethod
    def backward(ctx, adj):
        (val,) = ctx.saved_tensors
        return val * adj - val * (val * adj).sum(-1, keepdim=True)


class LayerNormalizationNode(Function):
    """x (rows, cols), scale and bias (1, cols)."""

    @staticmethod
    def forward(ctx, x, scale, bias):
        cols = x.shape[-1]
        mean = x.sum(-1, keepdim=True) / cols
        centred = x - mean
        sigma = torch.sqrt((centred * centred).sum(-1, keepdim=True) / cols + 1e-5)
        unit = centred / sigma
        ctx.save_for_backward(unit, sigma, scale)
        return scale * unit + bias

    @staticmethod
    def backward(ctx, adj):
        unit, sigma, scale = ctx.saved_tensors
        cols = unit.shape[-1]
        adj_scale = (adj * unit).sum(0, keepdim=True)
        adj_bias = adj.sum(0, keepdim=True)
        adj = adj * scale
        sum_adj = adj.sum(-1, keepdim=True)
        sum_adj_unit = (adj * unit).sum(-1, keepdim=True)
        adj_x = (cols * adj - sum_adj - unit * sum_adj_unit) / (cols * sigma)
        return adj_x, adj_scale, adj_bias


# ------------------------------------------------------------------- batches


class SubBatch:
    """Indices (width * size), of width words of size sentences, and their mask."""

    def __init__(self, words):
        size, width = words.shape
        vectors = [row[row != PAD_ID].tolist() + [EOS_ID] for row in words]
        width = width + 1
        self.size, self.width = size, width
        self.indices = torch.full((width * size,), PAD_ID)
        mask = torch.zeros(width, size)
        for i, vector in enumerate(vectors):
            for j, word in enumerate(vector):
                self.indices[j * size + i] = word
                mask[j, i] = 1.0
        self.mask = mask

    def shifted(self):
        """Indices one word later, behind the start."""
        start = self.indices.new_full((self.size,), PAD_ID)
        return torch.cat([start, self.indices[: -self.size]])


# ------------------------------------------------------------------- model


class Transformer(nn.Module):
    def __init__(self, items):
        super().__init__()
        for name, item in items.items():
            self.register_parameter(name, nn.Parameter(item.contiguous()))
        self.heads = OPTIONS["transformer-heads"]
        self.register_buffer("signal", self.sinusoidal(OPTIONS["dim-emb"]))

    def get(self, name):
        return getattr(self, name)

    @staticmethod
    def sinusoidal(dim):
        timescales = dim // 2
        increment = math.log(10000.0) / timescales
        signal = torch.zeros(OPTIONS["max-length"], 1, dim)
        for p in range(OPTIONS["max-length"]):
            for i in range(timescales):
                v = p * math.exp(i * -increment)
                signal[p, 0, i] = math.sin(v)
                signal[p, 0, timescales + i] = math.cos(v)
        return signal

    def embeddings(self, indices, width):
        """(width, size, dim) of flat indices, with positions."""
        x = RowsNode.apply(self.get("Wemb"), indices)
        x = x.view(width, -1, x.shape[1])
        return math.sqrt(x.shape[2]) * x + self.signal[:width]

    def affine(self, x, weight, bias):
        rows = torch.addmm(self.get(bias), x.reshape(-1, x.shape[-1]), self.get(weight))
        return rows.view(*x.shape[:-1], -1)

    def log_mask(self, mask):
        """Of mask (size, queries or 1, keys): 0 and a great negative number, for each head."""
        ninf = -1e9
        return ((1.0 - mask) * ninf).repeat_interleave(self.heads, dim=0)

    def split_heads(self, x):
        """(width, size, dim) -> (size * heads, width, dim of a head)."""
        width, size, dim = x.shape
        return x.reshape(width, size * self.heads, dim // self.heads).transpose(0, 1)

    def join_heads(self, x, size):
        return x.transpose(0, 1).reshape(x.shape[1], size, -1)

    def attention(self, prefix, q, k, v, log_mask):
        size = q.shape[1]
        q, k, v = self.split_heads(q), self.split_heads(k), self.split_heads(v)
        scale = 1.0 / math.sqrt(q.shape[-1])
        z = torch.bmm(q, k.transpose(1, 2)) * scale
        weights = SoftmaxNode.apply(z + log_mask)
        output = self.join_heads(torch.bmm(weights, v), size)
        return self.affine(output, prefix + "_Wo", prefix + "_bo")

    def post_process(self, prefix, x, previous):
        """Add and norm."""
        x = x + previous
        scale, bias = self.get(prefix + "_ln_scale"), self.get(prefix + "_ln_bias")
        rows = x.reshape(-1, x.shape[-1])
        return LayerNormalizationNode.apply(rows, scale, bias).view(x.shape)

    def layer_self(self, prefix, x, log_mask):
        packed = self.affine(x, prefix + "_Wqkv", prefix + "_bqkv")
        q, k, v = torch.split(packed, x.shape[-1], dim=2)
        output = self.attention(prefix, q, k, v, log_mask)
        return self.post_process(prefix + "_Wo", output, x)

    def layer_context(self, prefix, x, context, log_mask):
        q = self.affine(x, prefix + "_Wq", prefix + "_bq")
        packed = self.affine(context, prefix + "_Wkv", prefix + "_bkv")
        k, v = torch.split(packed, x.shape[-1], dim=2)
        output = self.attention(prefix, q, k, v, log_mask)
        return self.post_process(prefix + "_Wo", output, x)

    def layer_ffn(self, prefix, x):
        output = SwishNode.apply(self.affine(x, prefix + "_W1", prefix + "_b1"))
        output = self.affine(output, prefix + "_W2", prefix + "_b2")
        return self.post_process(prefix + "_ffn", output, x)

    def forward(self, source, target):
        source_mask = self.log_mask(source.mask.t().unsqueeze(1))
        layer = self.embeddings(source.indices, source.width)
        for i in range(1, OPTIONS["enc-depth"] + 1):
            layer = self.layer_self(f"encoder_l{i}_self", layer, source_mask)
            layer = self.layer_ffn(f"encoder_l{i}_ffn", layer)
        context = layer

        triangle = torch.tril(torch.ones(target.width, target.width))
        target_mask = self.log_mask(triangle * target.mask.t().unsqueeze(1))
        layer = self.embeddings(target.shifted(), target.width)
        for i in range(1, OPTIONS["dec-depth"] + 1):
            layer = self.layer_self(f"decoder_l{i}_self", layer, target_mask)
            layer = self.layer_context(
                f"decoder_l{i}_context", layer, context, source_mask
            )
            layer = self.layer_ffn(f"decoder_l{i}_ffn", layer)
        return self.logits(layer)

    def logits(self, x):
        """(size, width, words) of x (width, size, dim)."""
        width, size, dim = x.shape
        bias, table = self.get("decoder_ff_logit_out_b"), self.get("Wemb")
        rows = torch.addmm(bias, x.reshape(-1, dim), table.t())
        return rows.view(width, size, -1).transpose(0, 1)


def convert(state):
    """Items of the graph, of a model of PyTorch."""
    items = {"Wemb": state["shared.weight"]}

    def matrix(*names):
        return torch.cat([state[name + ".weight"] for name in names]).t()

    def row(*names):
        return torch.cat([state[name + ".bias"] for name in names])[None, :]

    def norm(prefix, name):
        items[prefix + "_ln_scale"] = state[name + ".weight"][None, :]
        items[prefix + "_ln_bias"] = state[name + ".bias"][None, :]

    def part(item, *names):
        prefix, _, short = item.rpartition("_")
        items[f"{prefix}_W{short}"] = matrix(*names)
        items[f"{prefix}_b{short}"] = row(*names)

    for side in ("encoder", "decoder"):
        for i in range(OPTIONS["enc-depth"]):
            old, new = f"{side}.{i}", f"{side}_l{i + 1}"
            q, k, v = (f"{old}.self_attn.{letter}_proj" for letter in "qkv")
            part(f"{new}_self_qkv", q, k, v)
            part(f"{new}_self_o", f"{old}.self_attn.out_proj")
            norm(f"{new}_self_Wo", f"{old}.self_attn_norm")
            if side == "decoder":
                q, k, v = (f"{old}.cross_attn.{letter}_proj" for letter in "qkv")
                part(f"{new}_context_q", q)
                part(f"{new}_context_kv", k, v)
                part(f"{new}_context_o", f"{old}.cross_attn.out_proj")
                norm(f"{new}_context_Wo", f"{old}.cross_attn_norm")
            part(f"{new}_ffn_1", f"{old}.ffn.fc1")
            part(f"{new}_ffn_2", f"{old}.ffn.fc2")
            norm(f"{new}_ffn_ffn", f"{old}.final_norm")
    items["decoder_ff_logit_out_b"] = state["final_logits_bias"][None, :]
    return items


def model():
    return Transformer(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------- training


def forward(net, batch):
    return [
        net(SubBatch(micro["source"]), SubBatch(micro["target"]))
        for micro in batch["micro"]
    ]


def cross_entropy(logits, labels, alpha):
    """Of each row, with a share alpha spread evenly over all words."""
    logprobs = logits - torch.logsumexp(logits, dim=1, keepdim=True)
    ce = -logprobs.gather(1, labels[:, None])
    return (1 - alpha) * ce - alpha * logprobs.mean(1, keepdim=True)


def loss(output, batch):
    """Sums of micro-batches, over the words of all."""
    costs, labels = [], []
    for logits, micro in zip(output, batch["micro"]):
        target = SubBatch(micro["target"])
        rows = logits.transpose(0, 1).flatten(0, 1)
        ce = cross_entropy(rows, target.indices, OPTIONS["label-smoothing"])
        costs.append((ce * target.mask.view(-1, 1)).sum())
        labels.append(target.mask.sum())
    return sum(costs) / sum(labels)


class Parameters:
    """Values and gradients of all, in one row each."""

    def __init__(self, net):
        self.each = list(net.parameters())

    def vals(self):
        return torch.cat([p.detach().reshape(-1) for p in self.each])

    def grads(self):
        return torch.cat([p.grad.reshape(-1) for p in self.each])

    def write(self, vals):
        at = 0
        for p in self.each:
            p.copy_(vals[at : at + p.numel()].view(p.shape))
            at += p.numel()


class Adam(torch.optim.Optimizer):
    def __init__(self, net):
        super().__init__(net.parameters(), {})
        self.params = Parameters(net)
        vals = self.params.vals()
        self.mt, self.vt = torch.zeros_like(vals), torch.zeros_like(vals)
        self.avg = vals.clone()
        self.updates = 0

    def eta(self):
        rate = OPTIONS["learn-rate"]
        warmup, start = OPTIONS["lr-warmup"], OPTIONS["lr-decay-inv-sqrt"]
        rate *= min(1.0, self.updates / warmup)
        return rate * math.sqrt(start) / math.sqrt(max(self.updates, start))

    def clip(self, grads):
        norm = torch.sqrt((grads * grads).sum())
        limit = OPTIONS["clip-norm"]
        return grads * torch.clamp(limit / (norm + 1e-6), max=1.0)

    @torch.no_grad()
    def step(self, closure=None):
        self.updates += 1
        grads = self.clip(self.params.grads())
        beta1, beta2, eps = OPTIMIZER_PARAMS
        denom1 = 1 - beta1**self.updates
        denom2 = 1 - beta2**self.updates
        self.mt = beta1 * self.mt + (1 - beta1) * grads
        self.vt = beta2 * self.vt + (1 - beta2) * (grads * grads)
        vals = self.params.vals()
        step = (self.mt / denom1) / (torch.sqrt(self.vt / denom2) + eps)
        vals = vals - self.eta() * step
        self.params.write(vals)
        smoothing = OPTIONS["exponential-smoothing"]
        share = max(smoothing, 1 - (self.updates + 1) / (self.updates + 10))
        self.avg = (1 - share) * self.avg + share * vals


def optimizer(net):
    return Adam(net)
