"""Faulty ports of the state space model."""

from ..bank import Change

FAULTS = [
    Change("minimal", "other epsilon", "EPS = 1e-5", "EPS = 1e-3", at="v.square()"),
    Change(
        "minimal", "no skip", 'torch.stack(out) + w["skip"] * x', "torch.stack(out)"
    ),
    Change("minimal", "gate not silu", "gate * gate.sigmoid()", "gate.sigmoid()"),
    Change(
        "minimal",
        "gate and value exchanged",
        "wx, wz = sd",
        "wz, wx = sd",
        parameter="wx0|wz0",
    ),
    Change(
        "minimal",
        "taps reversed",
        'conv1d.weight"].squeeze(1).t()',
        'conv1d.weight"].squeeze(1).t().flip(0)',
        parameter="taps0",
    ),
    Change(
        "minimal",
        "drive without step",
        '"tbe,tbn->tben", step * x',
        '"tbe,tbn->tben", x',
    ),
    Change(
        "minimal",
        "state read too early",
        'state = keep[t] * state + drive[t]\n            out.append(torch.einsum("ben,bn->be", state, read[t]))',
        'out.append(torch.einsum("ben,bn->be", state, read[t]))\n            state = keep[t] * state + drive[t]',
        at="out.append|state = keep",
    ),
    Change(
        "minimal",
        "no softplus",
        "step = torch.log1p(torch.exp(step))",
        "step = torch.relu(step)",
    ),
    Change(
        "minimal",
        "read and drive exchanged",
        "wd, wb, wc = sd",
        "wd, wc, wb = sd",
        parameter="wb0|wc0",
    ),
    Change(
        "minimal", "decay is not negative", ".exp().neg()", ".neg()", parameter="decay0"
    ),
    Change(
        "minimal",
        "pad of the convolution on the right",
        "torch.cat([x.new_zeros(3, *x.shape[1:]), x])",
        "torch.cat([x, x.new_zeros(3, *x.shape[1:])])",
        at="past = |past[j",
    ),
    Change("minimal", "bias of the step dropped", ' + w["up_bias"]', ""),
    Change("minimal", "residual of the normed", "return s + (y", "return r + (y"),
]
