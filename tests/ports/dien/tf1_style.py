"""After TensorFlow 1: one store of variables with scopes, and functions that look them up.

Kernels are [in, out]. The first RNN has the layout of CuDNNGRU: gates z, r, h.
"""

from pathlib import Path

import torch
from torch import nn

N_HOURS_PER_BUCKET = 3
NUM_UNITS = 20
VERY_NEGATIVE = -(2**32) + 1
BN_DECAY, BN_EPSILON, DICE_EPSILON = 0.9, 1e-3, 1e-8


class Variables(nn.Module):
    """tf.get_variable by full name; moving averages are not trainable."""

    def __init__(self, trainable, moving):
        super().__init__()
        for name, value in trainable.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
        for name, value in moving.items():
            self.register_buffer(name, value.clone())

    def get(self, scope, name):
        return getattr(self, f"{scope}/{name}")

    def forward(self, features):
        return dien(self, features)


# ---------------------------------------------------------------- layers


def sequence_mask(lengths, maxlen):
    return torch.arange(maxlen)[None, :] < lengths[:, None]


def embedding_lookup(v, scope, ids, zero_pad=False):
    table = v.get(scope, "embeddings")
    if zero_pad:
        table = torch.cat([torch.zeros(1, table.size(1)), table[1:]], 0)
    return table[ids]


def dense(v, scope, inputs, use_bias=True):
    outputs = torch.tensordot(inputs, v.get(scope, "kernel"), 1)
    if use_bias:
        outputs = outputs + v.get(scope, "bias")
    return outputs


def prelu(v, scope, _x):
    alphas = v.get(scope, "alpha")
    pos = torch.clamp(_x, min=0.0)
    neg = alphas * (_x - torch.abs(_x)) * 0.5
    return pos + neg


def moments(v, scope, x):
    """Of the batch; the moving variance takes the unbiased one, as fused norms do."""
    mean = torch.mean(x, 0)
    variance = torch.mean(torch.square(x - mean), 0)
    with torch.no_grad():
        n = x.size(0)
        moving_mean = v.get(scope, "moving_mean")
        moving_mean.sub_((moving_mean - mean) * (1.0 - BN_DECAY))
        moving_variance = v.get(scope, "moving_variance")
        unbiased = variance * (n / (n - 1.0))
        moving_variance.sub_((moving_variance - unbiased) * (1.0 - BN_DECAY))
    return mean, variance


def batch_normalization(v, scope, x):
    mean, variance = moments(v, scope, x)
    inv = torch.rsqrt(variance + BN_EPSILON) * v.get(scope, "gamma")
    return x * inv + (v.get(scope, "beta") - mean * inv)


def dice(v, scope, _x):
    mean, variance = moments(v, scope, _x)
    x_normed = (_x - mean) / torch.sqrt(variance + DICE_EPSILON)
    x_p = torch.sigmoid(x_normed)
    return v.get(scope, "alpha") * (1.0 - x_p) * _x + x_p * _x


# ---------------------------------------------------------------- recurrent cells


def cudnn_gru_cell(v, scope, inputs, state):
    input_bias, recurrent_bias = torch.chunk(v.get(scope, "bias"), 2)
    kernel, recurrent = v.get(scope, "kernel"), v.get(scope, "recurrent_kernel")
    x_z, x_r, x_h = torch.split(inputs @ kernel + input_bias, NUM_UNITS, 1)
    h_z, h_r, h_h = torch.split(state @ recurrent + recurrent_bias, NUM_UNITS, 1)
    z = torch.sigmoid(x_z + h_z)
    r = torch.sigmoid(x_r + h_r)
    hh = torch.tanh(x_h + r * h_h)
    return z * state + (1.0 - z) * hh


def vec_att_gru_cell(v, scope, inputs, state, att_score):
    """The update gate is how much of the candidate comes in."""
    value = torch.sigmoid(dense(v, scope + "/gates", torch.cat([inputs, state], -1)))
    r, u = torch.split(value, NUM_UNITS, 1)
    r_state = r * state
    c = torch.tanh(dense(v, scope + "/candidate", torch.cat([inputs, r_state], -1)))
    u = att_score * u
    return state + u * (c - state)


def dynamic_rnn(cell, sequences, sequence_length):
    """Past the end outputs are zero, and the state is carried through."""
    batch_size, max_time = sequences[0].shape[:2]
    state = torch.zeros(batch_size, NUM_UNITS)
    outputs = []
    for time in range(max_time):
        alive = torch.unsqueeze(sequence_length > time, 1)
        new_state = cell(*(s[:, time] for s in sequences), state)
        outputs.append(torch.where(alive, new_state, torch.zeros_like(new_state)))
        state = torch.where(alive, new_state, state)
    return torch.stack(outputs, 1), state


# ---------------------------------------------------------------- the graph


def din_fcn_attention(v, query, facts, mask):
    query = prelu(v, "attention/prelu", dense(v, "attention/query", query))
    queries = torch.tile(query[:, None, :], (1, facts.size(1), 1))
    din_all = torch.cat([queries, facts, queries - facts, queries * facts], -1)
    d_layer_1 = torch.sigmoid(dense(v, "attention/f1", din_all))
    d_layer_2 = dense(v, "attention/f2", d_layer_1, use_bias=False)
    scores = torch.squeeze(d_layer_2, 2)
    paddings = torch.ones_like(scores) * VERY_NEGATIVE
    scores = torch.where(mask, scores, paddings)
    scores = torch.exp(scores - torch.amax(scores, 1, keepdim=True))
    return scores / torch.sum(scores, 1, keepdim=True)


def auxiliary_net(v, in_):
    dnn1 = torch.sigmoid(dense(v, "auxiliary/f1", in_))
    return torch.squeeze(dense(v, "auxiliary/f2", dnn1), 2)


def sigmoid_cross_entropy_with_logits(labels, logits):
    return (
        torch.clamp(logits, min=0.0)
        - logits * labels
        + torch.log1p(torch.exp(-torch.abs(logits)))
    )


def auxiliary_loss(v, h_states, click_seq, noclick_seq, mask):
    mask = mask.to(torch.float32)
    click_logits = auxiliary_net(v, torch.cat([h_states, click_seq], -1))
    noclick_logits = auxiliary_net(v, torch.cat([h_states, noclick_seq], -1))
    click_loss = sigmoid_cross_entropy_with_logits(1.0, click_logits) * mask
    noclick_loss = sigmoid_cross_entropy_with_logits(0.0, noclick_logits) * mask
    return torch.sum(click_loss + noclick_loss) / torch.sum(mask)


def build_fcn_net(v, inp):
    bn1 = batch_normalization(v, "bn1", inp)
    dnn1 = dice(v, "dice_1", dense(v, "f1", bn1))
    dnn2 = dice(v, "dice_2", dense(v, "f2", dnn1))
    return torch.squeeze(dense(v, "f3", dnn2), 1)


def dien(v, features):
    def item_cat(mid, cat):
        mid_emb = embedding_lookup(v, "mid", features[mid], zero_pad=True)
        cat_emb = embedding_lookup(v, "cat", features[cat], zero_pad=True)
        return torch.cat([mid_emb, cat_emb], -1)

    item_eb = item_cat("item", "category")
    item_his_eb = item_cat("history_item", "history_category")
    noclk_his_eb = item_cat("negative_item", "negative_category")
    seq_len = features["length"]
    mask = sequence_mask(seq_len, item_his_eb.size(1))

    rnn_outputs, _ = dynamic_rnn(
        lambda x, state: cudnn_gru_cell(v, "rnn_1", x, state), [item_his_eb], seq_len
    )
    aux_loss = auxiliary_loss(
        v,
        rnn_outputs[:, :-1, :],
        item_his_eb[:, 1:, :],
        noclk_his_eb[:, 1:, :],
        mask[:, 1:],
    )
    alphas = din_fcn_attention(v, item_eb, rnn_outputs, mask)
    _, final_state2 = dynamic_rnn(
        lambda x, a, state: vec_att_gru_cell(v, "rnn_2", x, state, a),
        [rnn_outputs, torch.unsqueeze(alphas, 2)],
        seq_len,
    )

    float_mask = mask.to(torch.float32)
    item_his_eb_sum = torch.einsum("btd,bt->bd", item_his_eb, float_mask)
    item_his_eb_mean = item_his_eb_sum / seq_len.to(torch.float32)[:, None]
    bucket = torch.floor_divide(features["hour"], N_HOURS_PER_BUCKET)
    inp = torch.cat(
        [
            embedding_lookup(v, "uid", features["user"]),
            embedding_lookup(v, "hour", bucket),
            embedding_lookup(v, "device", features["device"]),
            item_eb,
            item_eb * item_his_eb_mean,
            final_state2,
        ],
        -1,
    )
    return build_fcn_net(v, inp), aux_loss


# ---------------------------------------------------------------- restoring


def restore(ckpt):
    trainable, moving = {}, {}

    def table(scope, name):
        trainable[scope + "/embeddings"] = ckpt[name + ".weight"]

    def linear(scope, name, use_bias=True):
        trainable[scope + "/kernel"] = ckpt[name + ".weight"].t()
        if use_bias:
            trainable[scope + "/bias"] = ckpt[name + ".bias"]

    def averages(scope, name):
        moving[scope + "/moving_mean"] = ckpt[name + ".running_mean"]
        moving[scope + "/moving_variance"] = ckpt[name + ".running_var"]

    def zrh(value):
        """torch has the gates r, z, n."""
        r, z, h = torch.chunk(value, 3, 0)
        return torch.cat([z, r, h], 0)

    table("uid", "user")
    table("mid", "item")
    table("cat", "category")
    table("hour", "slot")
    table("device", "device")

    gru = "extractor.gru."
    trainable["rnn_1/kernel"] = zrh(ckpt[gru + "weight_ih_l0"]).t()
    trainable["rnn_1/recurrent_kernel"] = zrh(ckpt[gru + "weight_hh_l0"]).t()
    biases = [zrh(ckpt[gru + "bias_ih_l0"]), zrh(ckpt[gru + "bias_hh_l0"])]
    trainable["rnn_1/bias"] = torch.cat(biases)

    linear("rnn_2/gates", "evolution.gates")
    linear("rnn_2/candidate", "evolution.candidate")
    linear("auxiliary/f1", "auxiliary.fc1")
    linear("auxiliary/f2", "auxiliary.fc2")
    linear("attention/query", "attention.query")
    trainable["attention/prelu/alpha"] = ckpt["attention.act.weight"]
    linear("attention/f1", "attention.fc1")
    linear("attention/f2", "attention.fc2", use_bias=False)

    trainable["bn1/gamma"] = ckpt["norm.weight"]
    trainable["bn1/beta"] = ckpt["norm.bias"]
    averages("bn1", "norm")
    for i in (1, 2):
        linear(f"f{i}", f"fc{i}")
        trainable[f"dice_{i}/alpha"] = ckpt[f"dice{i}.alpha"]
        averages(f"dice_{i}", f"dice{i}.norm")
    linear("f3", "fc3")
    return Variables(trainable, moving)


def model():
    return restore(torch.load(Path(__file__).with_name("weights.pt")))


# ---------------------------------------------------------------- training


def forward(net, batch):
    logits, aux_loss = net(batch)
    return {"logit": logits, "aux_loss": aux_loss}


def loss(output, batch):
    ctr_loss = sigmoid_cross_entropy_with_logits(batch["click"], output["logit"])
    return torch.mean(ctr_loss) + 0.5 * output["aux_loss"]


class AdamOptimizer(torch.optim.Optimizer):
    """Slots m and v; epsilon is scaled along with the rate, so that it is that of torch."""

    def __init__(self, var_list, learning_rate, beta1, beta2, epsilon):
        super().__init__(var_list, {})
        self.lr, self.beta1, self.beta2 = learning_rate, beta1, beta2
        self.epsilon = epsilon
        self.beta1_power, self.beta2_power = beta1, beta2

    @torch.no_grad()
    def step(self, closure=None):
        correction = (1.0 - self.beta2_power) ** 0.5
        lr_t = self.lr * correction / (1.0 - self.beta1_power)
        for var in self.param_groups[0]["params"]:
            slots, grad = self.state[var], var.grad
            if not slots:
                slots["m"], slots["v"] = torch.zeros_like(var), torch.zeros_like(var)
            m, v = slots["m"], slots["v"]
            m.mul_(self.beta1).add_(grad * (1.0 - self.beta1))
            v.mul_(self.beta2).add_(torch.square(grad) * (1.0 - self.beta2))
            var.sub_(lr_t * m / (torch.sqrt(v) + self.epsilon * correction))
        self.beta1_power *= self.beta1
        self.beta2_power *= self.beta2


def optimizer(net):
    return AdamOptimizer(net.parameters(), 4e-3, 0.9, 0.999, 1e-6)
