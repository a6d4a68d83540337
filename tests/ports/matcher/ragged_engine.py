"""As in an engine: the points that are there in one matrix (channels, points), no padding.

Segments tell which columns are whose. Weights of a block are packed, its vectors in one;
rows of a projection go by depth, then by head. Attention keeps a running maximum over
blocks of keys and has its own backward, as the norm with its activation has.
"""

import math
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

N_LAYER, N_HEAD, N_EMBD = 3, 3, 24
N_DEPTH = N_EMBD // N_HEAD
KEY_BLOCK = 4
NORM_EPS = 1e-5
#: The vectors of a block, as they lie in its packed tensor.
SELF_VECTORS = {
    "q": N_EMBD,
    "k": N_EMBD,
    "v": N_EMBD,
    "out": N_EMBD,
    "up": 2 * N_EMBD,
    "gain": 2 * N_EMBD,
    "shift": 2 * N_EMBD,
    "down": N_EMBD,
}
CROSS_VECTORS = {name: SELF_VECTORS[name] for name in SELF_VECTORS if name != "k"}


# kernels


class FlashAttention(torch.autograd.Function):
    """q, k, v: (depth, head, points); the softmax is made up block by block."""

    @staticmethod
    def forward(ctx, q, k, v, scale):
        peak = q.new_full(q.shape[1:], -torch.inf)
        mass = q.new_zeros(q.shape[1:])
        acc = torch.zeros_like(q)
        for at in range(0, k.shape[2], KEY_BLOCK):
            kb, vb = k[:, :, at : at + KEY_BLOCK], v[:, :, at : at + KEY_BLOCK]
            logit = torch.einsum("dhi,dhj->hij", q, kb) * scale
            higher = torch.maximum(peak, logit.amax(2))
            shrink = torch.exp(peak - higher)
            p = torch.exp(logit - higher.unsqueeze(2))
            mass = mass * shrink + p.sum(2)
            acc = acc * shrink + torch.einsum("hij,dhj->dhi", p, vb)
            peak = higher
        out = acc / mass
        ctx.save_for_backward(q, k, v, out, peak + mass.log())
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, d_out):
        q, k, v, out, lse = ctx.saved_tensors
        inner = (d_out * out).sum(0)
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for at in range(0, k.shape[2], KEY_BLOCK):
            block = slice(at, at + KEY_BLOCK)
            logit = torch.einsum("dhi,dhj->hij", q, k[:, :, block]) * ctx.scale
            p = torch.exp(logit - lse.unsqueeze(2))
            d_p = torch.einsum("dhi,dhj->hij", d_out, v[:, :, block])
            d_logit = p * (d_p - inner.unsqueeze(2)) * ctx.scale
            d_q += torch.einsum("hij,dhj->dhi", d_logit, k[:, :, block])
            d_k[:, :, block] = torch.einsum("hij,dhi->dhj", d_logit, q)
            d_v[:, :, block] = torch.einsum("hij,dhi->dhj", p, d_out)
        return d_q, d_k, d_v, None


class NormGelu(torch.autograd.Function):
    """Normalize columns of (channels, points), scale and shift them, activate."""

    @staticmethod
    def forward(ctx, x, gain, shift):
        var, mean = torch.var_mean(x, dim=0, correction=0)
        inv = torch.rsqrt(var + NORM_EPS)
        unit = (x - mean) * inv
        y = unit * gain[:, None] + shift[:, None]
        cdf = 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        ctx.save_for_backward(unit, inv, gain, y, cdf)
        return y * cdf

    @staticmethod
    def backward(ctx, d_out):
        unit, inv, gain, y, cdf = ctx.saved_tensors
        pdf = torch.exp(-0.5 * y * y) / math.sqrt(2 * math.pi)
        d_y = d_out * (cdf + y * pdf)
        d_gain, d_shift = (d_y * unit).sum(1), d_y.sum(1)
        d_unit = d_y * gain[:, None]
        d_x = d_unit - d_unit.mean(0) - unit * (d_unit * unit).mean(0)
        return d_x * inv, d_gain, d_shift


def mul_mat(weight, x, bias):
    return torch.addmm(bias.unsqueeze(1), weight, x)


def split_heads(x):
    return x.view(N_DEPTH, N_HEAD, -1)


def rope(x, cos, sin):
    """Neighbours in depth are turned together."""
    even, odd = x[0::2], x[1::2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=1)
    return turned.flatten(0, 1)


# points of a batch


class Points:
    """The columns of a batch: first image, second image of one pair, then of the next."""

    def __init__(self, batch):
        counts0 = batch["mask0"].sum(1).tolist()
        counts1 = batch["mask1"].sum(1).tolist()
        self.padded = batch["mask0"].shape[1], batch["mask1"].shape[1]
        self.spans, descriptors, places = [], [], []
        end = 0
        for pair, counts in enumerate(zip(counts0, counts1, strict=True)):
            for image, count in enumerate(counts):
                self.spans.append((end, end + count))
                end += count
                descriptors.append(batch[f"descriptors{image}"][pair, :count].T)
                xy = batch[f"keypoints{image}"][pair, :count].T
                turn = batch[f"oris{image}"][pair, :count].unsqueeze(0)
                places.append(self.place(xy, turn, batch[f"size{image}"][pair]))
        self.descriptors = self.rooted(torch.cat(descriptors, dim=1))
        self.places = torch.cat(places, dim=1)

    @staticmethod
    def place(xy, turn, size):
        width, height = size.unbind()
        longest = torch.maximum(width, height)
        x = (2 * xy[:1] - width) / longest
        y = (2 * xy[1:] - height) / longest
        return torch.cat([x, y, turn.deg2rad()])

    @staticmethod
    def rooted(desc):
        share = desc / desc.sum(0)
        return share.clamp_min(1e-6).sqrt()

    def pairs(self):
        return list(zip(self.spans[0::2], self.spans[1::2], strict=True))


def columns(x, span):
    return x[..., span[0] : span[1]]


def attend(q, k, v, own, other):
    """Points of one span look at those of another."""
    q, k, v = columns(q, own), columns(k, other), columns(v, other)
    return FlashAttention.apply(q, k, v, 1 / math.sqrt(N_DEPTH))


# network


class Engine(nn.Module):
    def __init__(self, tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone().contiguous()))

    def tensor(self, name, il):
        return getattr(self, f"{name}_{il}")

    def vectors(self, kind, il):
        sizes = SELF_VECTORS if kind == "self" else CROSS_VECTORS
        parts = self.tensor(kind + "_vec", il).split(list(sizes.values()))
        return dict(zip(sizes, parts, strict=True))

    def feed(self, kind, il, x, heads):
        vec = self.vectors(kind, il)
        context = heads.reshape(N_EMBD, -1)
        message = mul_mat(self.tensor(kind + "_out", il), context, vec["out"])
        both = torch.cat([message, x])
        h = mul_mat(self.tensor(kind + "_up", il), both, vec["up"])
        h = NormGelu.apply(h, vec["gain"], vec["shift"])
        return x + mul_mat(self.tensor(kind + "_down", il), h, vec["down"])

    def self_block(self, il, x, cos, sin, points):
        vec = self.vectors("self", il)
        bias = torch.cat([vec["q"], vec["k"], vec["v"]])
        qkv = mul_mat(self.tensor("self_qkv", il), x, bias)
        q, k, v = map(split_heads, qkv.chunk(3))
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        done = [attend(q, k, v, span, span) for span in points.spans]
        return self.feed("self", il, x, torch.cat(done, dim=2))

    def cross_block(self, il, x, points):
        vec = self.vectors("cross", il)
        bias = torch.cat([vec["q"], vec["v"]])
        qv = mul_mat(self.tensor("cross_qv", il), x, bias)
        q, v = map(split_heads, qv.chunk(2))
        done = []
        for first, second in points.pairs():
            done.append(attend(q, q, v, first, second))
            done.append(attend(q, q, v, second, first))
        return self.feed("cross", il, x, torch.cat(done, dim=2))

    def score(self, il, x, points):
        """Scores of each pair, with what is left over in the last row and column."""
        vec = self.tensor("head_vec", il)
        code = mul_mat(self.tensor("head_proj", il), x, vec[:N_EMBD])
        matchable = self.tensor("head_rows", il)[0] @ x + vec[N_EMBD]
        yes, no = F.logsigmoid(matchable), F.logsigmoid(-matchable)
        m, n = points.padded
        table = x.new_zeros(len(points.pairs()), m + 1, n + 1)
        for pair, (first, second) in enumerate(points.pairs()):
            sim = columns(code, first).T @ columns(code, second) / math.sqrt(N_EMBD)
            forth = sim - sim.logsumexp(1, keepdim=True)
            back = sim - sim.logsumexp(0, keepdim=True)
            certain = columns(yes, first).unsqueeze(1) + columns(yes, second)
            table[pair, : sim.shape[0], : sim.shape[1]] = forth + back + certain
            table[pair, : sim.shape[0], n] = columns(no, first)
            table[pair, m, : sim.shape[1]] = columns(no, second)
        return table

    def trust(self, il, x, points):
        """How far each point of either image can be trusted to have its match."""
        bias = self.tensor("head_vec", il)[N_EMBD + 1]
        trust = (self.tensor("head_rows", il)[1] @ x.detach() + bias).sigmoid()
        tables = []
        for image, padded in enumerate(points.padded):
            rows = [columns(trust, span) for span in points.spans[image::2]]
            rows = [F.pad(row, (0, padded - len(row))) for row in rows]
            tables.append(torch.stack(rows))
        return tables

    def forward(self, points):
        angle = (self.place_mat @ points.places).unsqueeze(1)
        cos, sin = angle.cos(), angle.sin()
        x = mul_mat(self.input_mat, points.descriptors, self.input_vec)
        result = {}
        for il in range(N_LAYER):
            x = self.self_block(il, x, cos, sin, points)
            x = self.cross_block(il, x, points)
            result[f"scores_{il}"] = self.score(il, x, points)
            if il + 1 < N_LAYER:
                first, second = self.trust(il, x, points)
                result[f"confidence0_{il}"] = first
                result[f"confidence1_{il}"] = second
        return result


# conversion


def depth_first(value):
    """(head * depth, ...) -> (depth * head, ...)."""
    return value.unflatten(0, (N_HEAD, N_DEPTH)).transpose(0, 1).flatten(0, 1)


class Converter:
    def __init__(self, weights):
        self.weights = weights

    def __getitem__(self, key):
        return self.weights[key]

    def fused(self, key):
        """Take q, k, v apart, which alternate there in the rows."""
        q, k, v = self[key].unflatten(0, (N_EMBD, 3)).unbind(1)
        return [depth_first(part) for part in (q, k, v)]

    def block(self, kind, il, at, out):
        """Everything behind the attention is the same in both kinds."""
        state, message = self[at + ".ffn.0.weight"].chunk(2, dim=1)
        return {
            f"{kind}_out_{il}": depth_first(self[f"{at}.{out}.weight"].T).T,
            f"{kind}_up_{il}": torch.cat([message, state], dim=1),
            f"{kind}_down_{il}": self[at + ".ffn.3.weight"],
        }

    def packed(self, at, out):
        keys = (f"{out}.bias", "ffn.0.bias", "ffn.1.weight", "ffn.1.bias", "ffn.3.bias")
        return [self[f"{at}.{key}"] for key in keys]

    def layer(self, il):
        at = f"transformers.{il}.self_attn"
        tensors = {f"self_qkv_{il}": torch.cat(self.fused(at + ".Wqkv.weight"))}
        tensors |= self.block("self", il, at, "out_proj")
        biases = self.fused(at + ".Wqkv.bias")
        tensors[f"self_vec_{il}"] = torch.cat([*biases, *self.packed(at, "out_proj")])

        at = f"transformers.{il}.cross_attn"
        names = ("to_qk", "to_v")
        mats = [depth_first(self[f"{at}.{name}.weight"]) for name in names]
        biases = [depth_first(self[f"{at}.{name}.bias"]) for name in names]
        tensors[f"cross_qv_{il}"] = torch.cat(mats)
        tensors |= self.block("cross", il, at, "to_out")
        tensors[f"cross_vec_{il}"] = torch.cat([*biases, *self.packed(at, "to_out")])
        return tensors

    def head(self, il):
        at = f"log_assignment.{il}."
        rows = [self[at + "matchability.weight"]]
        vec = [self[at + "final_proj.bias"], self[at + "matchability.bias"]]
        if il + 1 < N_LAYER:
            rows.append(self[f"token_confidence.{il}.token.0.weight"])
            vec.append(self[f"token_confidence.{il}.token.0.bias"])
        return {
            f"head_proj_{il}": self[at + "final_proj.weight"],
            f"head_rows_{il}": torch.cat(rows),
            f"head_vec_{il}": torch.cat(vec),
        }

    def tensors(self):
        tensors = {
            "input_mat": self["input_proj.weight"],
            "input_vec": self["input_proj.bias"],
            "place_mat": self["posenc.Wr.weight"],
        }
        for il in range(N_LAYER):
            tensors |= self.layer(il) | self.head(il)
        return tensors


def model():
    weights = torch.load(Path(__file__).with_name("weights.pt"))
    return Engine(Converter(weights).tensors())


def forward(net, batch):
    return net(Points(batch))


# training


def mean_of_entries(table, rows, cols):
    return table[rows, cols].sum() / max(len(rows), 1)


def pair_nll(table, to1, to0):
    """Scores (m + 1, n + 1) of one pair against its matches."""
    m, n = len(to1), len(to0)
    rows = (to1 >= 0).nonzero().squeeze(1)
    matched = mean_of_entries(table, rows, to1[rows])
    alone0 = (to1 == -1).nonzero().squeeze(1)
    alone1 = (to0 == -1).nonzero().squeeze(1)
    alone = mean_of_entries(
        table,
        torch.cat([alone0, torch.full_like(alone1, m)]),
        torch.cat([torch.full_like(alone0, n), alone1]),
    )
    return -(0.6 * matched + 0.4 * alone)


def best_of(table, count0, count1):
    """Where the points of either image go: an index, or one past the last."""
    kept = table[[*range(count0), -1]][:, [*range(count1), -1]].detach()
    return kept[:-1].argmax(1), kept[:, :-1].argmax(0)


def trust_loss(tables, trusts, counts):
    """Cross entropy of the trust that a layer's matches are those of the last layer."""
    totals, sizes = [0.0, 0.0], [0, 0]
    for pair, of_pair in enumerate(counts):
        now = best_of(tables[0][pair], *of_pair)
        final = best_of(tables[1][pair], *of_pair)
        for image, count in enumerate(of_pair):
            trust = trusts[image][pair, :count]
            right = now[image] == final[image]
            entropy = torch.where(right, -trust.log(), -(1 - trust).log())
            totals[image] = totals[image] + entropy.sum()
            sizes[image] += count
    return (totals[0] / sizes[0] + totals[1] / sizes[1]) / 2


def loss(output, batch):
    counts0 = batch["mask0"].sum(1).tolist()
    counts1 = batch["mask1"].sum(1).tolist()
    counts = list(zip(counts0, counts1, strict=True))
    tables = [output[f"scores_{il}"] for il in range(N_LAYER)]
    parts, weight, weights = [], 1.0, 0.0
    for table in reversed(tables):
        every = [
            pair_nll(table[pair], batch["matches0"][pair], batch["matches1"][pair])
            for pair in range(len(counts))
        ]
        parts.append(weight * torch.stack(every).mean())
        weights += weight
        weight *= 0.8
    trust = 0.0
    for il, _ in enumerate(pairwise(tables)):
        trusts = output[f"confidence0_{il}"], output[f"confidence1_{il}"]
        trust = trust + trust_loss((tables[il], tables[-1]), trusts, counts)
    matching = torch.stack(parts).sum() / weights
    return matching + trust / (N_LAYER - 1)


def optimizer(net):
    slow, matrices, vectors = [], [], []
    for name, value in net.named_parameters():
        if name == "place_mat":
            slow.append(value)
        elif "_vec" in name:
            vectors.append(value)
        else:
            matrices.append(value)
    return torch.optim.NAdam(
        [
            {"params": vectors},
            {"params": matrices, "weight_decay": 0.1},
            {"params": slow, "lr": 5e-4},
        ],
        lr=2e-3,
        betas=(0.9, 0.98),
        decoupled_weight_decay=True,
    )
