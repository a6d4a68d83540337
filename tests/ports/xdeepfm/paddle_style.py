"""After PaddleRec: a fused sparse table, dense features in front, weights [in, out].

The first column of a row is its first-order weight, the others are its embedding.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CONFIG: dict[str, Any] = {
    "slot_sizes": [41, 61, 13, 7, 24, 19],
    "sparse_feature_dim": 8,
    "dense_input_dim": 4,
    "genre_slot_len": 5,
    "cin_layer_sizes": [16, 12],
    "cross_num": 2,
    "num_experts": 3,
    "low_rank": 8,
    "fc_sizes": [48, 32, 24],
    "bn_momentum": 0.95,
    "bn_epsilon": 1e-3,
    "dense_clip": 2.0,
    "pos_weight": 2.0,
    "calib_coeff": 0.3,
    "l2_coeff": 0.02,
    "sparse_lr": 0.02,
    "dense_lr": 0.005,
    "adam_epsilon": 1e-3,
    "clip_norm": 0.5,
}


def create_parameter(shape):
    return nn.Parameter(torch.zeros(shape))


# -------------------------------------------------------------------------- reader


def slot_signs(values, slot, size):
    """Feature signs of a slot, kept to 32 bits; 0 is for an empty slot."""
    sign = (values * 2654435761 + 40503 * (slot + 1)) & 0xFFFFFFFF
    sign = sign ^ torch.div(sign, 1 << 15, rounding_mode="floor")
    sign = sign % (size - 1) + 1
    return sign * (values >= 0)


def slot_begins(sizes):
    begins, total = [], 0
    for size in sizes:
        begins.append(total)
        total += size
    return begins


def read_slots(batch):
    """Signs of all slots side by side, in rows of the fused table: [batch, 5 + 5]."""
    sizes = CONFIG["slot_sizes"]
    columns = [batch["ids"][:, i] for i in range(len(sizes) - 1)]
    columns += list(batch["genres"].unbind(1))
    slots = [min(i, len(sizes) - 1) for i in range(len(columns))]
    begins = slot_begins(sizes)
    rows = [slot_signs(c, s, sizes[s]) + begins[s] for c, s in zip(columns, slots)]
    return torch.stack(rows, dim=1)


def read_lod(batch):
    """Weights of the places of the genre slot."""
    places = torch.arange(1, CONFIG["genre_slot_len"] + 1)
    return torch.le(places, batch["genre_count"].unsqueeze(-1)).float()


# -------------------------------------------------------------------------- layers


class SequencePool(torch.autograd.Function):
    """Average of the places that exist."""

    @staticmethod
    def forward(ctx, x, lod):
        share = lod / lod.sum(dim=1, keepdim=True).clamp(min=1.0)
        ctx.save_for_backward(share)
        return torch.bmm(share.unsqueeze(1), x).squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        (share,) = ctx.saved_tensors
        return share.unsqueeze(2) * grad.unsqueeze(1), None


class Linear(nn.Module):
    def __init__(self, in_features, out_features, bias=True):
        super().__init__()
        self.weight = create_parameter([in_features, out_features])
        self.bias = create_parameter([out_features]) if bias else None

    def forward(self, x):
        y = x @ self.weight
        if self.bias is not None:
            y = y + self.bias
        return y


class BatchNorm1D(nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.weight = create_parameter([num_features])
        self.bias = create_parameter([num_features])
        self.register_buffer("_mean", torch.zeros(num_features))
        self.register_buffer("_variance", torch.ones(num_features))

    def forward(self, x):
        if not self.training:
            mean, variance = self._mean, self._variance
        else:
            mean = x.mean(dim=0)
            variance = (x * x).mean(dim=0) - mean * mean
            keep = CONFIG["bn_momentum"]
            unbiased = variance.detach() * len(x) / (len(x) - 1)
            self._mean.mul_(keep).add_((1 - keep) * mean.detach())
            self._variance.mul_(keep).add_((1 - keep) * unbiased)
        std = torch.sqrt(variance + CONFIG["bn_epsilon"])
        return (x - mean) / std * self.weight + self.bias


class PReLU(nn.Module):
    def __init__(self, num_parameters):
        super().__init__()
        self._weight = create_parameter([num_parameters])

    def forward(self, x):
        return torch.where(x > 0, x, x * self._weight)


class EmbeddingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        rows = sum(CONFIG["slot_sizes"])
        self.sparse_table = create_parameter([rows, 1 + CONFIG["sparse_feature_dim"]])
        self.dense_w = create_parameter(
            [1, CONFIG["dense_input_dim"], CONFIG["sparse_feature_dim"]]
        )
        self.register_buffer("dense_shift", torch.zeros(CONFIG["dense_input_dim"]))
        self.register_buffer("dense_scale", torch.ones(CONFIG["dense_input_dim"]))

    def normalize(self, dense_inputs):
        limit = CONFIG["dense_clip"]
        logged = torch.log(dense_inputs.relu() + 1)
        normed = ((logged - self.dense_shift) * self.dense_scale).clip(-limit, limit)
        return normed * (dense_inputs >= 0)

    def forward(self, sparse_inputs, lod, dense_inputs):
        pulled = F.embedding(sparse_inputs, self.sparse_table)
        single, genres = pulled.split([5, CONFIG["genre_slot_len"]], dim=1)
        pooled = SequencePool.apply(genres, lod)
        pulled = torch.cat([single, pooled.unsqueeze(1)], dim=1)
        embed_w, embedx = pulled[:, :, 0], pulled[:, :, 1:]
        dense = self.normalize(dense_inputs)
        dense_embedx = dense.unsqueeze(2) * self.dense_w
        return embed_w, embedx, dense, dense_embedx


class FM(nn.Module):
    """Inner products of all pairs."""

    def __init__(self, num_field):
        super().__init__()
        first, second = torch.triu_indices(num_field, num_field, offset=1)
        self.first, self.second = first, second

    def forward(self, feat_embeddings):
        gram = torch.bmm(feat_embeddings, feat_embeddings.transpose(1, 2))
        return gram[:, self.first, self.second].sum(dim=1, keepdim=True)


class CIN(nn.Module):
    def __init__(self, num_field):
        super().__init__()
        self.num_field = num_field
        sizes = CONFIG["cin_layer_sizes"]
        self.cnn_layers = nn.ModuleList()
        last_s = num_field
        for s in sizes:
            self.cnn_layers.append(Linear(last_s * num_field, s))
            last_s = s // 2
        self.cin_linear = Linear(sizes[0] - sizes[0] // 2 + sizes[1], 1, bias=False)

    def forward(self, feat_embeddings):
        # [batch, dim, fields]: the embedding is like time here.
        x0 = feat_embeddings.transpose(1, 2)
        xk = x0
        pooled = []
        for layer in self.cnn_layers[:-1]:
            xk = F.relu(layer(self.interact(xk, x0)))
            half = xk.shape[2] // 2
            pooled.append(xk[:, :, half:].sum(dim=1))
            xk = xk[:, :, :half]
        xk = F.relu(self.cnn_layers[-1](self.interact(xk, x0)))
        pooled.append(xk.sum(dim=1))
        return self.cin_linear(torch.cat(pooled, dim=1))

    def interact(self, xk, x0):
        z = xk.unsqueeze(3) * x0.unsqueeze(2)
        return z.reshape(z.shape[0], z.shape[1], -1)


class CrossMixLayer(nn.Module):
    """Experts side by side: gates weigh the low-rank features of each.

    Gates come to one, so that the bias stands outside of them.
    """

    def __init__(self, dim):
        super().__init__()
        self.experts, self.rank = CONFIG["num_experts"], CONFIG["low_rank"]
        self.v = create_parameter([dim, self.experts * self.rank])
        self.c = create_parameter([self.experts, self.rank, self.rank])
        self.u = create_parameter([self.experts * self.rank, dim])
        self.b = create_parameter([dim])
        self.gate = Linear(dim, self.experts)

    def forward(self, x0, xl):
        h = torch.tanh(xl @ self.v).reshape(-1, self.experts, self.rank)
        h = torch.tanh(torch.bmm(h.transpose(0, 1), self.c)).transpose(0, 1)
        logit = self.gate(xl)
        prob = torch.exp(logit - logit.logsumexp(dim=1, keepdim=True))
        h = (h * prob.unsqueeze(2)).reshape(-1, self.experts * self.rank)
        return x0 * (h @ self.u + self.b) + xl


class DNNLayer(nn.Module):
    def __init__(self, in_size):
        super().__init__()
        self.mlp = nn.ModuleList()
        for size in CONFIG["fc_sizes"]:
            self.mlp.append(Linear(in_size, size, bias=False))
            self.mlp.append(BatchNorm1D(size))
            self.mlp.append(PReLU(size))
            in_size = size

    def forward(self, x):
        for n_layer in self.mlp:
            x = n_layer(x)
        return x


class XDeepFMLayer(nn.Module):
    def __init__(self):
        super().__init__()
        num_slot, dense_dim = len(CONFIG["slot_sizes"]), CONFIG["dense_input_dim"]
        dim = dense_dim + num_slot * CONFIG["sparse_feature_dim"]
        self.embedding = EmbeddingLayer()
        self.dense_first = Linear(dense_dim, 1)
        self.fm = FM(num_slot + dense_dim)
        self.cin = CIN(num_slot + dense_dim)
        self.cross = nn.ModuleList(
            CrossMixLayer(dim) for _ in range(CONFIG["cross_num"])
        )
        self.dnn = DNNLayer(dim)
        self.cross_fc = Linear(dim, 1, bias=False)
        self.dnn_fc = Linear(CONFIG["fc_sizes"][-1], 1, bias=False)

    def forward(self, sparse_inputs, lod, dense_inputs):
        embed_w, embedx, dense, dense_embedx = self.embedding(
            sparse_inputs, lod, dense_inputs
        )
        y_first_order = embed_w.sum(dim=1, keepdim=True) + self.dense_first(dense)
        feat_embeddings = torch.cat([embedx, dense_embedx], dim=1)

        x0 = torch.cat([dense, embedx.reshape(embedx.shape[0], -1)], dim=1)
        xl = x0
        for layer in self.cross:
            xl = layer(x0, xl)
        y_cross = self.cross_fc(xl)
        y_dnn = self.dnn_fc(self.dnn(x0))
        y_second_order = self.fm(feat_embeddings)
        y_cin = self.cin(feat_embeddings)
        predict = y_first_order + y_second_order + y_cin + y_cross + y_dnn
        return predict.squeeze(1), embedx


# ------------------------------------------------------------------------- weights


def dense_first(weight, dim):
    """Turn the features of the towers: numbers stand last over there."""
    return torch.roll(weight, CONFIG["dense_input_dim"], dims=dim)


def load_torch_params(net, params):
    embedding = params["features.embedding.weight"]
    first_order = params["features.first_order.weight"]
    state = {
        "embedding.sparse_table": torch.cat([first_order, embedding], dim=1),
        "embedding.dense_w": params["features.number_vectors"].unsqueeze(0),
        "embedding.dense_shift": params["features.number_mean"],
        "embedding.dense_scale": 1 / params["features.number_std"],
        "dense_first.weight": params["linear.weight"].t(),
        "dense_first.bias": params["linear.bias"],
        "cin.cin_linear.weight": params["cin.out.weight"].t(),
    }
    for i in range(len(CONFIG["cin_layer_sizes"])):
        conv = params[f"cin.convs.{i}.weight"]
        state[f"cin.cnn_layers.{i}.weight"] = conv.squeeze(2).t()
        state[f"cin.cnn_layers.{i}.bias"] = params[f"cin.convs.{i}.bias"]
    for i in range(CONFIG["cross_num"]):
        old, new = f"cross.{i}", f"cross.{i}"
        v = dense_first(params[f"{old}.v"], 1)
        u = dense_first(params[f"{old}.u"], 2)
        state[f"{new}.v"] = v.permute(1, 0, 2).flatten(1)
        state[f"{new}.c"] = params[f"{old}.c"]
        state[f"{new}.u"] = u.flatten(0, 1)
        state[f"{new}.b"] = dense_first(params[f"{old}.bias"], 0)
        state[f"{new}.gate.weight"] = dense_first(params[f"{old}.gate.weight"], 1).t()
        state[f"{new}.gate.bias"] = params[f"{old}.gate.bias"]
    for i in range(len(CONFIG["fc_sizes"])):
        fc, bn, act = 3 * i, 3 * i + 1, 3 * i + 2
        weight = params[f"deep.{fc}.weight"]
        if i == 0:
            weight = dense_first(weight, 1)
        state[f"dnn.mlp.{fc}.weight"] = weight.t()
        state[f"dnn.mlp.{bn}.weight"] = params[f"deep.{bn}.weight"]
        state[f"dnn.mlp.{bn}.bias"] = params[f"deep.{bn}.bias"]
        state[f"dnn.mlp.{bn}._mean"] = params[f"deep.{bn}.running_mean"]
        state[f"dnn.mlp.{bn}._variance"] = params[f"deep.{bn}.running_var"]
        state[f"dnn.mlp.{act}._weight"] = params[f"deep.{act}.weight"]
    head = params["head.weight"]
    cross_dim = head.shape[1] - CONFIG["fc_sizes"][-1]
    state["cross_fc.weight"] = dense_first(head[:, :cross_dim], 1).t()
    state["dnn_fc.weight"] = head[:, cross_dim:].t()
    net.load_state_dict(state)


def model():
    net = XDeepFMLayer()
    load_torch_params(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    predict, embedx = net(read_slots(batch), read_lod(batch), batch["numbers"])
    return {"logit": predict, "embedded": embedx}


# ---------------------------------------------------------------------------- loss


def click_cost(predict, label, weight):
    positive = -F.logsigmoid(predict) * label * CONFIG["pos_weight"]
    negative = -F.logsigmoid(-predict) * (1 - label)
    return ((positive + negative) * weight).sum() / weight.sum()


def calibration_cost(predict, label, weight):
    q = torch.sigmoid(predict - math.log(CONFIG["pos_weight"]))
    ctr = (label * weight).sum() / weight.sum()
    pctr = (q * weight).sum() / weight.sum()
    return torch.log(pctr / ctr) ** 2


def loss(output, batch):
    predict, embedx = output["logit"], output["embedded"]
    label, weight = batch["label"], batch["weight"]
    avg_cost = click_cost(predict, label, weight)
    calib_cost = calibration_cost(predict, label, weight)
    l2_cost = 0.5 * (embedx**2).flatten(1).sum(dim=1)
    l2_cost = l2_cost.mean()
    return avg_cost + CONFIG["calib_coeff"] * calib_cost + CONFIG["l2_coeff"] * l2_cost


# ----------------------------------------------------------------------- optimizer


class Adam(torch.optim.Optimizer):
    """Powers of the betas are kept per parameter, as accumulators."""

    def __init__(self, groups, beta1=0.9, beta2=0.99):
        super().__init__(groups, {"learning_rate": CONFIG["dense_lr"]})
        self._beta1, self._beta2 = beta1, beta2
        self._epsilon = CONFIG["adam_epsilon"]
        for group in self.param_groups:
            for param in group["params"]:
                self._add_accumulators(param)

    def _add_accumulators(self, param):
        acc = self.state[param]
        acc["moment1"] = torch.zeros_like(param)
        acc["moment2"] = torch.zeros_like(param)
        acc["beta1_pow"], acc["beta2_pow"] = self._beta1, self._beta2

    def _clip_global_norm(self):
        params = [p for group in self.param_groups for p in group["params"]]
        total = torch.stack([p.grad.norm() for p in params]).norm()
        limit = CONFIG["clip_norm"]
        for p in params:
            p.grad.mul_(limit / total.clamp(min=limit))

    def _append_optimize_op(self, param, lr):
        acc, grad = self.state[param], param.grad
        acc["moment1"].lerp_(grad, 1 - self._beta1)
        acc["moment2"].lerp_(grad * grad, 1 - self._beta2)
        root = math.sqrt(1 - acc["beta2_pow"])
        lr_t = lr * root / (1 - acc["beta1_pow"])
        denom = acc["moment2"].sqrt() + self._epsilon * root
        param.sub_(lr_t * acc["moment1"] / denom)
        acc["beta1_pow"] *= self._beta1
        acc["beta2_pow"] *= self._beta2

    @torch.no_grad()
    def step(self, closure=None):
        self._clip_global_norm()
        for group in self.param_groups:
            for param in group["params"]:
                self._append_optimize_op(param, group["learning_rate"])


def optimizer(net):
    table = net.embedding.sparse_table
    others = [p for p in net.parameters() if p is not table]
    return Adam(
        [
            {"params": [table], "learning_rate": CONFIG["sparse_lr"]},
            {"params": others},
        ]
    )
