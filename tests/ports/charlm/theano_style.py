"""After Theano: shared variables by name, one scan over time, dictionaries of updates.

Layout is [time, samples, dim]; weights are [in, 4 * dim] with the gates i, f, o, c.
"""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import nn

options: dict[str, Any] = {
    "n_words": 90,
    "dim_word": 24,
    "dims": (32, 32),
    "n_samples": 4,
    "alpha_c": 2.0,
    "beta_c": 1.0,
    "lrate": 1.2,
    "lrate_factor": 0.5,
    "bad_counter_at": (1, 2),
    "decay_c": 0.02,
    "clip_c": 0.25,
    "average_from": 1,
}
STATES = ("lstm1_h", "lstm1_c", "lstm2_h", "lstm2_c")


def _p(pp, name):
    return f"{pp}_{name}"


# ----------------------------------------------------------- shared variables


class Shared(nn.Module):
    """Shared variables: parameters, their averages `_ax`, and what is kept of the scan."""

    def __init__(self, params):
        super().__init__()
        for kk, vv in params.items():
            self.register_parameter(kk, nn.Parameter(vv.clone().contiguous()))
        for kk, vv in params.items():
            self.register_buffer(_p(kk, "ax"), vv.clone().contiguous())
        for kk in STATES:
            dim = options["dims"][0] if kk.startswith("lstm1") else options["dims"][1]
            self.register_buffer(kk, torch.zeros(options["n_samples"], dim))

    def __getitem__(self, name):
        return getattr(self, name)


def load_params(path):
    pp = torch.load(path)
    params = OrderedDict()

    def gates(x):
        """i, f, c, o -> i, f, o, c along the first axis."""
        i, f, c, o = torch.chunk(x, 4)
        return torch.cat([i, f, o, c])

    params["Wemb"] = pp["encoder.weight"]
    for layer, prefix in enumerate(("lstm1", "lstm2")):
        key = f"rnns.{layer}."
        b_in, b_hid = pp[key + "bias_ih_l0"], pp[key + "bias_hh_l0"]
        params[_p(prefix, "W")] = gates(pp[key + "weight_ih_l0"]).T
        params[_p(prefix, "U")] = gates(pp[key + "weight_hh_l0"]).T
        params[_p(prefix, "b")] = torch.stack([gates(b_in), gates(b_hid)])
    params["ff_W"] = pp["projection.weight"].T
    params["ff_b"] = pp["projection.bias"]
    params["logit_b"] = pp["decoder.bias"]
    return params


def model():
    return Shared(load_params(Path(__file__).with_name("weights.pt")))


# ----------------------------------------------------------------------- data


def prepare_data(batch):
    """x, x_mask [n_timesteps, n_samples] and y: words that come next."""
    seqs = batch["text"].T
    seqs = torch.where(seqs < options["n_words"], seqs, torch.ones_like(seqs))
    x, y = seqs[:-1], seqs[1:]
    x_mask = torch.ne(y, 0).float()
    return x, x_mask, y


# ---------------------------------------------------------------------- graph


def sigmoid(x):
    return 1.0 / (1.0 + torch.exp(-x))


def scan(fn, sequences, outputs_info, non_sequences):
    """As theano.scan: the steps of each output, stacked."""
    rval, last = [], list(outputs_info)
    for slices in zip(*sequences):
        last = fn(*slices, *last, *non_sequences)
        rval.append(last)
    return [torch.stack(steps) for steps in zip(*rval)]


def _slice(_x, n, dim):
    return _x[:, n * dim : (n + 1) * dim]


def lstm_unit(preact, c_, dim):
    i = sigmoid(_slice(preact, 0, dim))
    f = sigmoid(_slice(preact, 1, dim))
    o = sigmoid(_slice(preact, 2, dim))
    c = torch.tanh(_slice(preact, 3, dim))
    c = f * c_ + i * c
    h = o * torch.tanh(c)
    return h, c


def _step(x_, h1_, c1_, h2_, c2_, U1, W2, U2, b2):
    """Both layers in one step; x_ is the first layer's input times its weights."""
    dim1, dim2 = options["dims"]
    h1, c1 = lstm_unit(x_ + torch.mm(h1_, U1), c1_, dim1)
    preact = torch.mm(h1, W2) + torch.mm(h2_, U2) + b2
    h2, c2 = lstm_unit(preact, c2_, dim2)
    return h1, c1, h2, c2


def build_model(tparams, x, reset):
    n_timesteps, n_samples = x.shape
    keep = 1.0 - reset.float()[:, None]
    emb = tparams["Wemb"][x.flatten()]
    emb = emb.reshape(n_timesteps, n_samples, options["dim_word"])
    state_below = torch.matmul(emb, tparams["lstm1_W"]) + tparams["lstm1_b"].sum(0)
    names = ("lstm1_U", "lstm2_W", "lstm2_U")
    rval = scan(
        _step,
        sequences=[state_below],
        outputs_info=[tparams[kk] * keep for kk in STATES],
        non_sequences=[*(tparams[kk] for kk in names), tparams["lstm2_b"].sum(0)],
    )
    updates = OrderedDict()
    for kk, steps in zip(STATES, rval):
        updates[kk] = steps[-1].detach()

    proj = rval[2]
    ctx = torch.matmul(proj, tparams["ff_W"]) + tparams["ff_b"]
    logit = torch.matmul(ctx, tparams["Wemb"].T) + tparams["logit_b"]
    return logit, proj, updates


def forward(tparams, batch):
    x, _, _ = prepare_data(batch)
    logit, proj, updates = build_model(tparams, x, batch["fresh"])
    for kk, value in updates.items():
        setattr(tparams, kk, value)
    return {"logits": logit.permute(1, 0, 2), "hidden": proj.permute(1, 0, 2)}


# ----------------------------------------------------------------------- cost


def softmax(x):
    e_x = torch.exp(x - x.amax(1, keepdim=True))
    return e_x / e_x.sum(1, keepdim=True)


def loss(output, batch):
    _, x_mask, y = prepare_data(batch)
    logit = output["logits"].permute(1, 0, 2)
    proj = output["hidden"].permute(1, 0, 2)
    probs = softmax(logit.reshape(-1, logit.shape[2]))
    y_flat = y.flatten()
    y_flat_idx = torch.arange(len(y_flat)) * options["n_words"] + y_flat
    cost = -torch.log(probs.flatten()[y_flat_idx])
    cost = (cost.reshape(y.shape) * x_mask).sum() / x_mask.sum()

    act = (proj**2).mean(2)
    act_reg = options["alpha_c"] * (act * x_mask).sum() / x_mask.sum()
    tmp = ((proj[1:] - proj[:-1]) ** 2).mean(2)
    tmp_mask = x_mask[1:]
    tmp_reg = options["beta_c"] * (tmp * tmp_mask).sum() / tmp_mask.sum()
    return cost + act_reg + tmp_reg


# -------------------------------------------------------------------- updates


def clip_grads(grads, clip_c):
    g2 = 0.0
    for g in grads:
        g2 += (g**2).sum()
    new_grads = []
    for g in grads:
        new_grads.append(torch.where(g2 > clip_c**2, g / torch.sqrt(g2) * clip_c, g))
    return new_grads


def sgd_updates(tparams, grads, lr, uidx):
    """New values by name; uidx counts from 1."""
    updates = OrderedDict()
    for (kk, p), g in zip(tparams.named_parameters(), grads):
        updates[kk] = p - lr * (g + options["decay_c"] * p)
    for kk, _ in tparams.named_parameters():
        p_ax = tparams[_p(kk, "ax")]
        t = max(1, uidx - options["average_from"])
        updates[_p(kk, "ax")] = p_ax + (updates[kk] - p_ax) / t
    return updates


class SGD(torch.optim.Optimizer):
    def __init__(self, tparams):
        super().__init__(tparams.parameters(), {})
        self.tparams = tparams
        self.lrate = options["lrate"]
        self.uidx = 0

    @torch.no_grad()
    def step(self, closure=None):
        if self.uidx in options["bad_counter_at"]:
            self.lrate = self.lrate * options["lrate_factor"]
        self.uidx += 1
        grads = [p.grad for p in self.tparams.parameters()]
        grads = clip_grads(grads, options["clip_c"])
        updates = sgd_updates(self.tparams, grads, self.lrate, self.uidx)
        for kk, value in updates.items():
            self.tparams[kk].copy_(value)


def optimizer(tparams):
    return SGD(tparams)
