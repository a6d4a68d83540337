"""After Paddle: layers with sublayers; Linear is [in, out], padded ids are the mask.

The recurrent layers go over time first. The projection of the inputs of the second one is
fused for its two gates and the candidate.
"""

from pathlib import Path

import torch
from torch import nn

USERS, ITEMS, CATS, HOUR_BINS, DEVICES = 24, 60, 12, 8, 4
HIDDEN = 20


def param(*shape):
    return nn.Parameter(torch.empty(*shape))


class Linear(nn.Module):
    def __init__(self, in_features, out_features, bias_attr=None):
        super().__init__()
        self.weight = param(in_features, out_features)
        self.bias = None if bias_attr is False else param(out_features)

    def forward(self, x):
        out = torch.matmul(x, self.weight)
        return out if self.bias is None else out + self.bias


class Embedding(nn.Module):
    """Rows of padding come out as zeros, and are not trained."""

    def __init__(self, num_embeddings, embedding_dim, padding_idx=None):
        super().__init__()
        self.weight = param(num_embeddings, embedding_dim)
        self.padding_idx = padding_idx

    def forward(self, ids):
        out = torch.index_select(self.weight, 0, ids.flatten())
        out = out.reshape(*ids.shape, -1)
        if self.padding_idx is not None:
            out = out * (ids != self.padding_idx).unsqueeze(-1).float()
        return out


class BatchNorm1D(nn.Module):
    """momentum is the part that stays."""

    def __init__(self, num_features, momentum=0.9, epsilon=1e-5, affine=True):
        super().__init__()
        self.momentum, self.epsilon = momentum, epsilon
        self.weight = param(num_features) if affine else None
        self.bias = param(num_features) if affine else None
        self.register_buffer("_mean", torch.zeros(num_features))
        self.register_buffer("_variance", torch.ones(num_features))

    def forward(self, x):
        mean = x.mean(dim=0, keepdim=True)
        centered = x - mean
        var = centered.pow(2).mean(dim=0, keepdim=True)
        with torch.no_grad():
            rest = 1 - self.momentum
            unbiased = centered.pow(2).sum(dim=0) / (len(x) - 1)
            self._mean.mul_(self.momentum).add_(rest * mean.squeeze(0))
            self._variance.mul_(self.momentum).add_(rest * unbiased)
        out = centered / (var + self.epsilon).sqrt()
        if self.weight is not None:
            out = out * self.weight + self.bias
        return out


class Dice(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bn = BatchNorm1D(dim, epsilon=1e-8, affine=False)
        self.alpha = param(dim)

    def forward(self, x):
        gate = torch.sigmoid(self.bn(x))
        return x * (self.alpha + (1 - self.alpha) * gate)


class PReLU(nn.Module):
    def __init__(self, num_parameters):
        super().__init__()
        self._weight = param(num_parameters)

    def forward(self, x):
        return torch.where(x > 0, x, self._weight * x)


class GRU(nn.Module):
    """Gates r, z and c, weights [3 * hidden, in] as in paddle.nn.GRUCell."""

    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.weight_ih = param(3 * hidden_size, input_size)
        self.weight_hh = param(3 * hidden_size, hidden_size)
        self.bias_ih = param(3 * hidden_size)
        self.bias_hh = param(3 * hidden_size)

    def forward(self, inputs, mask):
        """inputs [time, batch, in], mask [time, batch, 1]"""
        x_gates = torch.einsum("tbi,gi->tbg", inputs, self.weight_ih) + self.bias_ih
        pre_h = inputs.new_zeros(inputs.shape[1], self.hidden_size)
        outputs = []
        for x_gate, keep in zip(x_gates, mask):
            h_gate = torch.einsum("bh,gh->bg", pre_h, self.weight_hh) + self.bias_hh
            x_r, x_z, x_c = x_gate.chunk(3, dim=1)
            h_r, h_z, h_c = h_gate.chunk(3, dim=1)
            r = torch.sigmoid(x_r + h_r)
            z = torch.sigmoid(x_z + h_z)
            c = torch.tanh(x_c + r * h_c)
            h = (pre_h - c) * z + c
            outputs.append(h * keep)
            pre_h = keep * h + (1 - keep) * pre_h
        return torch.stack(outputs), pre_h


class AttentionUpdateGRU(nn.Module):
    """Where the attention is zero, as behind the end, nothing is updated."""

    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.i2h = Linear(input_size, 3 * hidden_size)
        self.h2h_gate = Linear(hidden_size, 2 * hidden_size, bias_attr=False)
        self.h2h_cand = Linear(hidden_size, hidden_size, bias_attr=False)

    def forward(self, inputs, att):
        """inputs [time, batch, in], att [time, batch, 1]"""
        projected = self.i2h(inputs)
        hidden = inputs.new_zeros(inputs.shape[1], self.hidden_size)
        for step in range(inputs.shape[0]):
            x_gate = projected[step, :, : 2 * self.hidden_size]
            x_cand = projected[step, :, 2 * self.hidden_size :]
            gate = torch.sigmoid(x_gate + self.h2h_gate(hidden))
            reset_gate, update_gate = gate.chunk(2, dim=-1)
            cand = torch.tanh(x_cand + self.h2h_cand(hidden * reset_gate))
            update_gate = update_gate * att[step]
            hidden = update_gate * cand + (1 - update_gate) * hidden
        return hidden


class AttentionLayer(nn.Module):
    def __init__(self, query_size, key_size, hidden_size):
        super().__init__()
        self.query_fc = Linear(query_size, key_size)
        self.prelu = PReLU(key_size)
        self.fc = Linear(4 * key_size, hidden_size)
        self.out = Linear(hidden_size, 1, bias_attr=False)

    def forward(self, query, keys, mask):
        """keys [time, batch, key], mask [time, batch, 1]"""
        query = self.prelu(self.query_fc(query))
        query = query.unsqueeze(0).expand(keys.shape[0], -1, -1)
        concat = torch.cat([query, keys, query - keys, query * keys], dim=2)
        weight = self.out(torch.sigmoid(self.fc(concat)))
        weight = weight + (mask - 1) * 1e9
        return torch.softmax(weight, dim=0)


class AuxLayer(nn.Module):
    def __init__(self, embed_size, hidden_size):
        super().__init__()
        self.fc1 = Linear(embed_size + hidden_size, 16)
        self.fc2 = Linear(16, 1)

    def score(self, embed, hidden):
        x = torch.sigmoid(self.fc1(torch.cat([embed, hidden], dim=2)))
        return self.fc2(x)

    def forward(self, hidden, pos, neg, mask):
        pos_score = torch.sigmoid(self.score(pos, hidden))
        neg_score = torch.sigmoid(self.score(neg, hidden))
        cost = -torch.log(pos_score) - torch.log(1 - neg_score)
        return (cost * mask).sum() / mask.sum()


class DIENLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.user_emb = Embedding(USERS, 8)
        self.item_emb = Embedding(ITEMS, 12, padding_idx=0)
        self.cat_emb = Embedding(CATS, 6, padding_idx=0)
        self.hour_emb = Embedding(HOUR_BINS, 4)
        self.device_emb = Embedding(DEVICES, 4)
        self.gru = GRU(18, HIDDEN)
        self.aux = AuxLayer(18, HIDDEN)
        self.att = AttentionLayer(18, HIDDEN, 16)
        self.augru = AttentionUpdateGRU(HIDDEN, HIDDEN)
        self.bn = BatchNorm1D(72, epsilon=1e-3)
        self.mlp = nn.Sequential(
            Linear(72, 32), Dice(32), Linear(32, 16), Dice(16), Linear(16, 1)
        )

    def embed(self, item, cat):
        return torch.cat([self.item_emb(item), self.cat_emb(cat)], dim=-1)

    def forward(self, user, hour, device, target, hist, neg):
        mask = (hist[0] > 0).float().unsqueeze(-1)
        target_emb = self.embed(*target)
        hist_emb, neg_emb = self.embed(*hist), self.embed(*neg)

        interests, last = self.gru(hist_emb, mask)
        aux_cost = self.aux(interests[:-1], hist_emb[1:], neg_emb[1:], mask[1:])
        att = self.att(target_emb, interests, mask)
        evolved = self.augru(interests, att)

        pooled = (hist_emb * mask).sum(dim=0) / mask.sum(dim=0)
        profile = [self.user_emb(user), self.hour_emb(hour), self.device_emb(device)]
        feature = profile + [target_emb, target_emb * pooled, evolved]
        logit = self.mlp(self.bn(torch.cat(feature, dim=-1)))
        return logit, aux_cost


# ---------------------------------------------------------------------- parameters


def convert(source):
    """The state dict of torch -> that of the layers."""
    target = {}

    def linear(ours, theirs, bias=True):
        target[ours + ".weight"] = source[theirs + ".weight"].T.contiguous()
        if bias:
            target[ours + ".bias"] = source[theirs + ".bias"]

    def statistics(ours, theirs):
        target[ours + "._mean"] = source[theirs + ".running_mean"]
        target[ours + "._variance"] = source[theirs + ".running_var"]

    tables = {
        "user_emb": "user",
        "item_emb": "item",
        "cat_emb": "category",
        "hour_emb": "slot",
        "device_emb": "device",
    }
    for ours, theirs in tables.items():
        target[ours + ".weight"] = source[theirs + ".weight"]
    for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        target[f"gru.{kind}"] = source[f"extractor.gru.{kind}_l0"]

    # Ours has the embedding before the hidden state.
    aux_hidden, aux_embed = source["auxiliary.fc1.weight"].T.split([HIDDEN, 18])
    target["aux.fc1.weight"] = torch.cat([aux_embed, aux_hidden])
    target["aux.fc1.bias"] = source["auxiliary.fc1.bias"]
    linear("aux.fc2", "auxiliary.fc2")

    linear("att.query_fc", "attention.query")
    target["att.prelu._weight"] = source["attention.act.weight"]
    linear("att.fc", "attention.fc1")
    linear("att.out", "attention.fc2", bias=False)

    gates = source["evolution.gates.weight"]
    cand = source["evolution.candidate.weight"]
    x_weight = torch.cat([gates[:, :HIDDEN], cand[:, :HIDDEN]])
    x_bias = [source["evolution.gates.bias"], source["evolution.candidate.bias"]]
    target["augru.i2h.weight"] = x_weight.T
    target["augru.i2h.bias"] = torch.cat(x_bias)
    target["augru.h2h_gate.weight"] = gates[:, HIDDEN:].T
    target["augru.h2h_cand.weight"] = cand[:, HIDDEN:].T

    target["bn.weight"], target["bn.bias"] = source["norm.weight"], source["norm.bias"]
    statistics("bn", "norm")
    linear("mlp.0", "fc1")
    linear("mlp.2", "fc2")
    linear("mlp.4", "fc3")
    for ours, theirs in (("mlp.1", "dice1"), ("mlp.3", "dice2")):
        target[ours + ".alpha"] = source[theirs + ".alpha"]
        statistics(ours + ".bn", theirs + ".norm")
    return target


def model():
    net = DIENLayer()
    source = torch.load(Path(__file__).with_name("weights.pt"))
    net.load_state_dict(convert(source))
    return net


# ---------------------------------------------------------------------- training


def feeds(batch):
    """Sequences have time first."""
    return {
        "user": batch["user"],
        "hour": batch["hour"].div(24 // HOUR_BINS, rounding_mode="floor"),
        "device": batch["device"],
        "target": (batch["item"], batch["category"]),
        "hist": (batch["history_item"].T, batch["history_category"].T),
        "neg": (batch["negative_item"].T, batch["negative_category"].T),
    }


def forward(net, batch):
    logit, aux_cost = net(**feeds(batch))
    return {"logit": logit.squeeze(-1), "aux_loss": aux_cost}


def log_loss(predict, label):
    return -(label * torch.log(predict) + (1 - label) * torch.log(1 - predict))


def loss(output, batch):
    predict = torch.sigmoid(output["logit"])
    avg_cost = log_loss(predict, batch["click"]).mean()
    return avg_cost + 0.5 * output["aux_loss"]


class Adam(torch.optim.Optimizer):
    def __init__(self, learning_rate, parameters, epsilon=1e-8, weight_decay=0.0):
        super().__init__(parameters, {"learning_rate": learning_rate})
        self.beta1, self.beta2, self.epsilon = 0.9, 0.999, epsilon
        self.weight_decay = weight_decay
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        scale1, scale2 = 1 - self.beta1**self.t, 1 - self.beta2**self.t
        for group in self.param_groups:
            for p in group["params"]:
                grad = p.grad + self.weight_decay * p
                state = self.state[p]
                moment1 = state.get("moment1", torch.zeros_like(p))
                moment2 = state.get("moment2", torch.zeros_like(p))
                state["moment1"] = torch.lerp(grad, moment1, self.beta1)
                state["moment2"] = torch.lerp(grad * grad, moment2, self.beta2)
                denom = (state["moment2"] / scale2).sqrt() + self.epsilon
                p -= group["learning_rate"] / scale1 * state["moment1"] / denom


def optimizer(net):
    return Adam(learning_rate=4e-3, parameters=net.parameters(), epsilon=1e-6)
