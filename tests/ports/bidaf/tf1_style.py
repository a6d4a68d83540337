"""After TensorFlow 1: variables by scope, time first, cells with gates i, j, f, o.

Tensors are [JX, N, d]. There is no row for padding in the tables, the characters come
before the word, and the open forget gate is a constant of the cell.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

VERY_NEGATIVE_NUMBER = -1e30
FLAGS: dict = {
    "word_vocab_size": 48,
    "hidden_size": 10,
    "highway_num_layers": 2,
    "forget_bias": 1.0,
    "init_lr": 1.0,
    "emb_lr_mult": 0.4,
    "rho": 0.95,
    "epsilon": 1e-6,
    "warmup_steps": 2,
    "decay_rate": 0.8,
    "max_grad_norm": 2.0,
    "var_decay": 0.99,
}


class Graph(nn.Module):
    """Variables by their full name, and a shadow of each."""

    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            value = value.clone().contiguous()
            self.register_parameter(name, nn.Parameter(value))
            self.register_buffer(shadow_name(name), value.clone())

    def __getitem__(self, name):
        return getattr(self, name)

    def trainable_variables(self):
        return dict(self.named_parameters())

    def forward(self, x, cx, q, cq):
        """Logits of both ends, [N, JX]."""
        x_mask, q_mask = x > 0, q > 0
        x_len, q_len = torch.sum(x_mask, dim=0), torch.sum(q_mask, dim=0)

        xx = highway_network(self, embed(self, x, cx), "main/highway")
        qq = highway_network(self, embed(self, q, cq), "main/highway")
        h = bidirectional_dynamic_rnn(self, xx, x_len, "main/prepro/u1")
        u = bidirectional_dynamic_rnn(self, qq, q_len, "main/prepro/u1")

        p0 = attention_layer(self, h, u, x_mask, q_mask, "main/main/p0")
        g0 = bidirectional_dynamic_rnn(self, p0, x_len, "main/main/g0")
        g1 = bidirectional_dynamic_rnn(self, g0, x_len, "main/main/g1")
        logits = get_logits(self, [g1, p0], "main/main/logits1")
        a1i = softsel(g1, exp_mask(logits, x_mask), 0)
        a1i = torch.tile(a1i[None], (g1.shape[0], 1, 1))
        inputs = torch.cat([p0, g1, a1i, g1 * a1i], -1)
        g2 = bidirectional_dynamic_rnn(self, inputs, x_len, "main/main/g2")
        logits2 = get_logits(self, [g2, p0], "main/main/logits2")

        zeros = torch.zeros_like(logits)
        logits = torch.where(x_mask, logits, zeros)
        logits2 = torch.where(x_mask, logits2, zeros)
        return torch.transpose(logits, 0, 1), torch.transpose(logits2, 0, 1)


def shadow_name(name):
    return name + "/ExponentialMovingAverage"


# -------------------------------------------------------------------- general


def exp_mask(val, mask):
    return val + (1.0 - mask.to(val.dtype)) * VERY_NEGATIVE_NUMBER


def softmax(logits, axis):
    out = torch.exp(logits - torch.amax(logits, axis, keepdim=True))
    return out / torch.sum(out, axis, keepdim=True)


def softsel(target, logits, axis):
    return torch.sum(softmax(logits, axis)[..., None] * target, axis)


def linear(graph, args, scope):
    out = torch.matmul(torch.cat(args, -1), graph[scope + "/matrix"])
    return out + graph[scope + "/bias"]


def get_logits(graph, args, scope):
    matrix = graph[scope + "/matrix"]
    return torch.squeeze(torch.matmul(torch.cat(args, -1), matrix), -1)


# --------------------------------------------------------------------- layers


def embedding_lookup(params, ids):
    """Id 0 is a row of zeros that is no variable."""
    table = torch.cat([torch.zeros_like(params[:1]), params], 0)
    return nn.functional.embedding(ids, table)


def conv1d(inputs, kernel, bias):
    """inputs [..., W, in], kernel [height, in, out]; padding is VALID."""
    height = kernel.shape[0]
    windows = inputs.unfold(-2, height, 1)
    return torch.einsum("...wch,hcd->...wd", windows, kernel) + bias


def embed(graph, words, chars):
    scope = "main/emb/char"
    c = embedding_lookup(graph[scope + "/char_emb_mat"], chars)
    c = conv1d(c, graph[scope + "/conv1d/filter"], graph[scope + "/conv1d/bias"])
    c = torch.amax(torch.relu(c), -2)
    unknown = torch.ones_like(words)
    words = torch.where(words < FLAGS["word_vocab_size"], words, unknown)
    w = embedding_lookup(graph["main/emb/word/word_emb_mat"], words)
    return torch.cat([c, w], -1)


def highway_network(graph, arg, scope):
    for i in range(FLAGS["highway_num_layers"]):
        trans = torch.relu(linear(graph, [arg], f"{scope}/layer_{i}/trans"))
        gate = torch.sigmoid(linear(graph, [arg], f"{scope}/layer_{i}/gate"))
        arg = gate * trans + (1.0 - gate) * arg
    return arg


def basic_lstm_cell(graph, inputs, state, scope):
    c, h = state
    kernel, bias = graph[scope + "/kernel"], graph[scope + "/bias"]
    value = torch.matmul(torch.cat([inputs, h], 1), kernel) + bias
    i, j, f, o = torch.split(value, FLAGS["hidden_size"], 1)
    keep = torch.sigmoid(f + FLAGS["forget_bias"])
    new_c = c * keep + torch.sigmoid(i) * torch.tanh(j)
    return new_c, torch.tanh(new_c) * torch.sigmoid(o)


def dynamic_rnn(graph, inputs, sequence_length, scope):
    """The state stays and outputs are zero behind the end."""
    zero = torch.zeros_like(inputs[0, :, :1]).expand(-1, FLAGS["hidden_size"])
    c, h = zero, zero
    outputs = []
    for time in range(inputs.shape[0]):
        new_c, new_h = basic_lstm_cell(graph, inputs[time], (c, h), scope)
        running = (time < sequence_length)[:, None]
        c, h = torch.where(running, new_c, c), torch.where(running, new_h, h)
        outputs.append(torch.where(running, new_h, zero))
    return torch.stack(outputs)


def reverse_sequence(inputs, sequence_length):
    """Turn the first steps of each example, as many as it has; leave the others."""
    time = torch.arange(inputs.shape[0])[:, None]
    last = sequence_length[None, :] - 1
    index = torch.where(time <= last, last - time, time)
    return torch.gather(inputs, 0, index[..., None].expand_as(inputs))


def bidirectional_dynamic_rnn(graph, inputs, sequence_length, scope):
    fw = dynamic_rnn(graph, inputs, sequence_length, scope + "/fw")
    turned = reverse_sequence(inputs, sequence_length)
    bw = dynamic_rnn(graph, turned, sequence_length, scope + "/bw")
    return torch.cat([fw, reverse_sequence(bw, sequence_length)], -1)


def attention_layer(graph, h, u, h_mask, u_mask, scope):
    """h [JX, N, 2d] and u [JQ, N, 2d] -> [JX, N, 8d]."""
    h_aug = torch.tile(h[:, None], (1, u.shape[0], 1, 1))
    u_aug = torch.tile(u[None], (h.shape[0], 1, 1, 1))
    hu_mask = torch.logical_and(h_mask[:, None], u_mask[None])
    logits = get_logits(graph, [h_aug, u_aug, h_aug * u_aug], scope + "/u_logits")
    logits = exp_mask(logits, hu_mask)
    u_a = softsel(u_aug, logits, 1)
    h_a = softsel(h, torch.amax(logits, 1), 0)
    h_a = torch.tile(h_a[None], (h.shape[0], 1, 1))
    return torch.cat([h, u_a, h * u_a, h * h_a], -1)


# ----------------------------------------------------------------- checkpoint


def variables(state):
    """Weights of the torch model -> variables by name."""
    channels = state["char_cnn.conv.bias"].shape[0]
    units = FLAGS["hidden_size"]
    out = {}

    def chars_first(value, axis=0):
        word, char = torch.split(value, [value.shape[axis] - channels, channels], axis)
        return torch.cat([char, word], axis)

    def gates(value):
        i, f, j, o = torch.chunk(value, 4)
        return torch.cat([i, j, f, o])

    def cell(scope, name, suffix):
        inputs = state[f"{name}.weight_ih_{suffix}"]
        if scope.startswith("main/prepro"):
            inputs = chars_first(inputs, 1)
        kernel = torch.cat([inputs, state[f"{name}.weight_hh_{suffix}"]], 1)
        out[scope + "/kernel"] = gates(kernel).T
        bias = state[f"{name}.bias_hh_{suffix}"].clone()
        bias[units : 2 * units] -= FLAGS["forget_bias"]
        out[scope + "/bias"] = gates(bias + state[f"{name}.bias_ih_{suffix}"])

    def cells(scope, name, layer=0):
        cell(scope + "/fw", name, f"l{layer}")
        cell(scope + "/bw", name, f"l{layer}_reverse")

    def pointer(scope, name):
        p0, g = torch.split(state[name + ".weight"], [8 * units, 2 * units], 1)
        out[scope + "/matrix"] = torch.cat([g, p0], 1).T

    out["main/emb/char/char_emb_mat"] = state["char_cnn.embed.weight"][1:]
    kernel = state["char_cnn.conv.weight"]
    out["main/emb/char/conv1d/filter"] = torch.permute(kernel, (2, 1, 0))
    out["main/emb/char/conv1d/bias"] = state["char_cnn.conv.bias"]
    out["main/emb/word/word_emb_mat"] = state["word_embed.weight"][1:]
    for i in range(FLAGS["highway_num_layers"]):
        for part, name in (("trans", "transforms"), ("gate", "gates")):
            scope, name = f"main/highway/layer_{i}/{part}", f"highway.{name}.{i}"
            matrix = chars_first(chars_first(state[name + ".weight"], 0), 1)
            out[scope + "/matrix"] = matrix.T
            out[scope + "/bias"] = chars_first(state[name + ".bias"])
    cells("main/prepro/u1", "encoder.rnn")
    parts = [state[f"attention.{name}_weight"] for name in ("c", "q", "cq")]
    out["main/main/p0/u_logits/matrix"] = torch.cat(parts)[:, None]
    cells("main/main/g0", "modelling.rnn", 0)
    cells("main/main/g1", "modelling.rnn", 1)
    pointer("main/main/logits1", "start")
    cells("main/main/g2", "end_encoder.rnn")
    pointer("main/main/logits2", "end")
    return out


# ------------------------------------------------------------------- training


def model():
    return Graph(variables(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    names = ("passage", "passage_chars", "question", "question_chars")
    yp, yp2 = net(*[torch.transpose(batch[name], 0, 1) for name in names])
    return {"start": yp, "end": yp2}


def get_word_span(spans, char_start, char_stop):
    idxs = [
        idx
        for idx, (start, stop) in enumerate(spans)
        if start < char_stop and stop > char_start
    ]
    return idxs[0], idxs[-1]


def get_feed(batch):
    """One-hot starts and ends, [N, JX]; nothing where there is no answer."""
    y = np.zeros(batch["passage"].shape, dtype="bool")
    y2 = np.zeros(batch["passage"].shape, dtype="bool")
    for i, (char_start, char_stop) in enumerate(batch["answer"].tolist()):
        if char_start >= 0:
            spans = batch["offsets"][i].tolist()
            first, last = get_word_span(spans, char_start, char_stop)
            y[i, first], y2[i, last] = True, True
    return torch.from_numpy(y), torch.from_numpy(y2)


def softmax_cross_entropy_with_logits(logits, labels):
    top = torch.amax(logits, 1, keepdim=True)
    log_z = torch.log(torch.sum(torch.exp(logits - top), 1)) + top[:, 0]
    return log_z * torch.sum(labels, 1) - torch.sum(labels * logits, 1)


def loss(output, batch):
    x_mask = batch["passage"] > 0
    ce_losses = []
    for logits, y in zip((output["start"], output["end"]), get_feed(batch)):
        loss_mask = torch.any(y, 1).to(logits.dtype)
        labels = y.to(logits.dtype)
        losses = softmax_cross_entropy_with_logits(exp_mask(logits, x_mask), labels)
        ce_losses.append(torch.sum(losses * loss_mask) / torch.sum(loss_mask))
    return sum(ce_losses)


class ExponentialMovingAverage:
    def __init__(self, decay):
        self.decay = decay

    def apply(self, graph, num_updates):
        decay = min(self.decay, (1.0 + num_updates) / (10.0 + num_updates))
        for name, variable in graph.trainable_variables().items():
            shadow = graph[shadow_name(name)]
            shadow.sub_((shadow - variable) * (1.0 - decay))


def learning_rate(global_step):
    if global_step < FLAGS["warmup_steps"]:
        return FLAGS["init_lr"] * (global_step + 1) / FLAGS["warmup_steps"]
    power = global_step + 1 - FLAGS["warmup_steps"]
    return FLAGS["init_lr"] * FLAGS["decay_rate"] ** power


def clip_by_global_norm(t_list, clip_norm):
    global_norm = torch.sqrt(sum(torch.sum(torch.square(t)) for t in t_list))
    scale = clip_norm / torch.clamp(global_norm, min=clip_norm)
    return [t * scale for t in t_list]


class AdadeltaOptimizer(torch.optim.Optimizer):
    def __init__(self, graph):
        super().__init__(list(graph.trainable_variables().values()), {})
        self.graph = graph
        self.var_ema = ExponentialMovingAverage(FLAGS["var_decay"])
        self.global_step = 0

    def apply_adadelta(self, var, grad, lr):
        rho, epsilon = FLAGS["rho"], FLAGS["epsilon"]
        slots = self.state[var]
        if not slots:
            slots["accum"] = torch.zeros_like(var)
            slots["accum_update"] = torch.zeros_like(var)
        accum, accum_update = slots["accum"], slots["accum_update"]
        accum.copy_(rho * accum + (1.0 - rho) * torch.square(grad))
        update = torch.sqrt(accum_update + epsilon) * torch.rsqrt(accum + epsilon)
        update = update * grad
        accum_update.copy_(rho * accum_update + (1.0 - rho) * torch.square(update))
        var.sub_(lr * update)

    @torch.no_grad()
    def step(self, closure=None):
        named = self.graph.trainable_variables()
        grads = [var.grad for var in named.values()]
        grads = clip_by_global_norm(grads, FLAGS["max_grad_norm"])
        lr = learning_rate(self.global_step)
        for (name, var), grad in zip(named.items(), grads):
            slow = name.endswith("emb_mat")
            mult = FLAGS["emb_lr_mult"] if slow else 1.0
            self.apply_adadelta(var, grad, lr * mult)
        self.global_step += 1
        self.var_ema.apply(self.graph, self.global_step)


def optimizer(net):
    return AdadeltaOptimizer(net)
