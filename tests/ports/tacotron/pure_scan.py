"""As in JAX: arrays by name, pure functions, scans over time; both directions run at once."""

from functools import partial
from pathlib import Path

import torch
from torch import nn

MEL, REDUCTION, WIDTH = 10, 2, 20
GATES = ("i", "f", "o", "g")


def scan(step, carry, xs):
    ys = []
    for x in xs:
        carry, y = step(carry, x)
        ys.append(y)
    return carry, ys


def windows(x, size):
    """(b, t, c) -> (b, t, c, size), zeros around."""
    x = nn.functional.pad(x, (0, 0, size // 2, size // 2))
    return x.unfold(1, size, 1)


def conv(x, kernel):
    return torch.einsum("btck,kcd->btd", windows(x, len(kernel)), kernel)


def batch_norm(x, mean, var, scale, offset):
    return (x - mean) * torch.rsqrt(var + 1e-5) * scale + offset


def lstm(z, cell):
    """z: (..., gates, units)."""
    i, f, o = torch.sigmoid(z[..., :3, :]).unbind(-2)
    g = torch.tanh(z[..., 3, :])
    cell = f * cell + i * g
    return o * torch.tanh(cell), cell


def flip_sequences(x, lengths):
    steps = x.shape[1]
    index = torch.arange(steps - 1, -1, -1) + lengths[:, None]
    rows = torch.arange(len(x))[:, None]
    return x[rows, index % steps]


def encode(p, text, lengths, heard):
    x = p["embed"][text]
    for layer in range(3):
        x = conv(x, p["enc_conv/w"][layer]) + p["enc_conv/b"][layer]
        mean, var = p["enc_conv/mean"][layer], p["enc_conv/var"][layer]
        x = batch_norm(
            x, mean, var, p["enc_conv/scale"][layer], p["enc_conv/offset"][layer]
        )
        x = torch.clamp(x, min=0)
    both = torch.stack([x, flip_sequences(x, lengths)])
    z = torch.einsum("dbtc,dcgh->tdbgh", both, p["enc_rnn/x"])
    z = z + p["enc_rnn/b"][:, None]

    def step(carry, z_t):
        h, c = carry
        z_t = z_t + torch.einsum("dbh,dhgk->dbgk", h, p["enc_rnn/h"])
        h, c = lstm(z_t, c)
        return (h, c), h

    start = torch.zeros(2, len(x), p["enc_rnn/h"].shape[1])
    _, hs = scan(step, (start, start), z)
    right, left = torch.stack(hs, dim=2)
    memory = torch.cat([right, flip_sequences(left, lengths)], dim=-1)
    return memory * heard[..., None]


def attend(p, h, keys, memory, heard, share, total):
    place = conv(torch.stack([share, total], dim=-1), p["attend/place"])
    query = torch.einsum("bh,ha->ba", h, p["attend/query"])
    score = torch.tanh(keys + query[:, None] + place) @ p["attend/v"]
    share = torch.softmax(score + (heard - 1) * 1e9, dim=-1)
    return torch.einsum("bt,btc->bc", share, memory), share


def decode_step(p, keys, memory, heard, carry, z_frame):
    (h1, c1), (h2, c2), context, share, total = carry
    z = z_frame + torch.einsum("bc,cgh->bgh", context, p["cell1/context"])
    z = z + torch.einsum("bh,hgk->bgk", h1, p["cell1/h"])
    h1, c1 = lstm(z, c1)
    context, share = attend(p, h1, keys, memory, heard, share, total)
    z = torch.einsum("bx,xgh->bgh", torch.cat([h1, context], -1), p["cell2/x"])
    z = z + torch.einsum("bh,hgk->bgk", h2, p["cell2/h"]) + p["cell2/b"]
    h2, c2 = lstm(z, c2)
    y = torch.cat([h2, context], -1) @ p["readout/w"] + p["readout/b"]
    return ((h1, c1), (h2, c2), context, share, total + share), (y, share)


def decode(p, memory, heard, mels):
    """mels: (b, t, m)."""
    b, t, m = mels.shape
    groups = mels.reshape(b, t // REDUCTION, REDUCTION * m).transpose(0, 1)
    shifted = torch.cat([torch.zeros_like(groups[:1]), groups[:-1]])
    frame = torch.clamp(shifted @ p["prenet/0"], min=0)
    frame = torch.clamp(frame @ p["prenet/1"], min=0)
    z = torch.einsum("sbp,pgh->sbgh", frame, p["cell1/frame"]) + p["cell1/b"]

    keys = memory @ p["attend/key"]
    nothing = torch.zeros(b, WIDTH)
    carry = (
        (nothing, nothing),
        (nothing, nothing),
        torch.zeros(b, memory.shape[2]),
        torch.zeros_like(heard),
        torch.zeros_like(heard),
    )
    step = partial(decode_step, p, keys, memory, heard)
    _, ys = scan(step, carry, z)
    y = torch.stack([y for y, _ in ys], dim=1)
    mel = y[..., :-1].reshape(b, t, m)
    return mel, y[..., -1], torch.stack([share for _, share in ys], dim=1)


def postnet(p, x):
    for layer in range(4):
        at = f"post{layer}/"
        x = conv(x, p[at + "w"]) + p[at + "b"]
        x = batch_norm(
            x, *(p[at + name] for name in ("mean", "var", "scale", "offset"))
        )
        if layer < 3:
            x = torch.tanh(x)
    return x


def network(p, batch):
    size, steps = batch["text"].shape[1], batch["mels"].shape[2]
    heard = (torch.arange(size) < batch["text_lengths"][:, None]).float()
    spoken = (torch.arange(steps) < batch["mel_lengths"][:, None]).float()
    memory = encode(p, batch["text"], batch["text_lengths"], heard)
    mel, stop, share = decode(p, memory, heard, batch["mels"].transpose(1, 2))
    fine = (mel + postnet(p, mel)) * spoken[..., None]
    goes_on = spoken[:, ::REDUCTION]
    return {
        "mel": (mel * spoken[..., None]).transpose(1, 2),
        "mel_postnet": fine.transpose(1, 2),
        "gate": stop * goes_on + 1e3 * (1 - goes_on),
        "alignments": share,
    }


def by_gate(rows):
    """Rows of i, f, g, o as (rest, gates, units), the sigmoids first."""
    i, f, g, o = rows.chunk(4)
    gates = {"i": i, "f": f, "g": g, "o": o}
    stacked = torch.stack([gates[name] for name in GATES])
    return stacked.permute(*range(2, stacked.ndim), 0, 1)


def converted(w):
    p, fixed = {"embed": w["encoder.embedding.weight"]}, {}

    kinds = (
        (p, "scale", "weight"),
        (p, "offset", "bias"),
        (fixed, "mean", "running_mean"),
        (fixed, "var", "running_var"),
    )

    encoder = [f"encoder.convolutions.{i}" for i in range(3)]
    p["enc_conv/w"] = torch.stack(
        [w[at + ".0.weight"].permute(2, 1, 0) for at in encoder]
    )
    p["enc_conv/b"] = torch.stack([w[at + ".0.bias"] for at in encoder])
    for tree, name, source in kinds:
        tree["enc_conv/" + name] = torch.stack(
            [w[f"{at}.1.{source}"] for at in encoder]
        )
    for i in range(4):
        at = f"postnet.convolutions.{i}"
        p[f"post{i}/w"] = w[at + ".0.weight"].permute(2, 1, 0)
        p[f"post{i}/b"] = w[at + ".0.bias"]
        for tree, name, source in kinds:
            tree[f"post{i}/{name}"] = w[f"{at}.1.{source}"]

    sides = ("_l0", "_l0_reverse")
    for name, source in (("x", "weight_ih"), ("h", "weight_hh")):
        each = [by_gate(w[f"encoder.lstm.{source}{side}"]) for side in sides]
        p["enc_rnn/" + name] = torch.stack(each)
    each = [
        w[f"encoder.lstm.bias_ih{s}"] + w[f"encoder.lstm.bias_hh{s}"] for s in sides
    ]
    p["enc_rnn/b"] = torch.stack([by_gate(bias) for bias in each])

    for name, source in (("cell1", "attention_rnn"), ("cell2", "decoder_rnn")):
        at = f"decoder.{source}."
        p[name + "/x"] = by_gate(w[at + "weight_ih"])
        p[name + "/h"] = by_gate(w[at + "weight_hh"])
        p[name + "/b"] = by_gate(w[at + "bias_ih"] + w[at + "bias_hh"])
    x = p.pop("cell1/x")
    p["prenet/0"], p["prenet/1"] = (
        w[f"decoder.prenet.layers.{i}.weight"].T for i in (0, 1)
    )
    p["cell1/frame"], p["cell1/context"] = x.split([12, len(x) - 12])

    at = "decoder.attention."
    p["attend/query"] = w[at + "query_layer.weight"].T
    p["attend/key"] = w[at + "memory_layer.weight"].T
    p["attend/v"] = w[at + "v.weight"][0]
    filters = w[at + "location_layer.conv.weight"]
    dense = w[at + "location_layer.dense.weight"]
    p["attend/place"] = torch.einsum("fck,af->kca", filters, dense)

    heads = ("decoder.linear_projection", "decoder.gate_layer")
    p["readout/w"] = torch.cat([w[at + ".weight"] for at in heads]).T
    p["readout/b"] = torch.cat([w[at + ".bias"] for at in heads])
    return p, fixed


class Arrays(nn.Module):
    def __init__(self, learned, fixed):
        super().__init__()
        for name, value in learned.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
        for name, value in fixed.items():
            self.register_buffer(name, value.clone())

    def forward(self, batch):
        return network(
            {**dict(self.named_parameters()), **dict(self.named_buffers())}, batch
        )


def model():
    return Arrays(*converted(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch)


def loss(output, batch):
    wrong = torch.stack([output["mel"], output["mel_postnet"]]) - batch["mels"]
    frames = (wrong**2).mean(dim=(1, 2, 3)).sum()
    sign = 1 - 2 * batch["gate"]
    stops = torch.logaddexp(output["gate"] * sign, torch.zeros(())).mean()
    return frames + stops


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-6)
