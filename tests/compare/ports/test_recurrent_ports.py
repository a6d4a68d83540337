"""Recurrent layers written out by hand: what a loader does to gates, directions and layers.

The reference has two layers with norms, an LSTM in both directions, one that reads it, and
three layers with tanh between. One port has a cell of fused kernels for all of them; the
other has both directions, and both layers, in one tensor each, with names as paths.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

WIDTH, UNITS, LAST = 6, 5, 4
X = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(1))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.both = nn.LSTM(WIDTH, UNITS, batch_first=True, bidirectional=True)
        self.last = nn.LSTM(2 * UNITS, LAST, batch_first=True)
        self.heads = nn.ModuleList(nn.Linear(LAST, LAST) for _ in range(3))

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = torch.relu(norm(layer(x)))
        x, _ = self.last(self.both(x)[0])
        for head in self.heads[:-1]:
            x = torch.tanh(head(x))
        return self.heads[-1](x)


def reference():
    torch.manual_seed(2)
    net = Reference()
    for norm in net.norms:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.uniform_(norm.bias, -0.5, 0.5)
    return net


def normed(x, scale, shift):
    x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale + shift


def finished(m, x, fault):
    for i in range(3):
        x = x @ m[f"head{i}/w"] + m[f"head{i}/b"]
        if i < 2 or fault == "tanh on the last layer":
            x = x.tanh()
    return x


# -- one cell for all, with gates i, j, f, o of one kernel -------------------------------


def stepped(x, state, kernel, bias, fault=""):
    c, h = state
    i, j, f, o = (torch.cat([x, h], -1) @ kernel + bias).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(j)
    # the first turn adds a state of zeros
    h = torch.sigmoid(o) * (c if fault == "state without its tanh" else torch.tanh(c))
    return (h, c) if fault == "state exchanged" else (c, h)


def over_time(x, kernel, bias, fault=""):
    zeros = torch.zeros(len(x), len(bias) // 4)
    state = zeros, zeros
    outputs = []
    for x_t in x.unbind(1):
        state = stepped(x_t, state, kernel, bias, fault)
        outputs.append(state[0 if fault == "state exchanged" else 1])
    return torch.stack(outputs, 1)


def in_cells(m, x, fault):
    for i in range(2):
        x = x @ m[f"layer{i}/w"] + m[f"layer{i}/b"]
        x = normed(x, m[f"norm{i}/scale"], m[f"norm{i}/shift"]).clamp_min(0)
    forth = over_time(x, m["forth/kernel"], m["forth/bias"])
    back = over_time(x.flip(1), m["back/kernel"], m["back/bias"]).flip(1)
    both = [forth, forth] if fault == "one direction joined twice" else [forth, back]
    x = torch.cat(both, -1)
    x = over_time(x, m["last/kernel"], m["last/bias"], fault * (fault[:5] == "state"))
    return finished(m, x, fault)


def leaves_of_cells(w, fault):
    held = {}
    for n in range(2):
        held[f"layer{n}/w"] = w[f"layers.{n}.weight"].t()
        held[f"layer{n}/b"] = w[f"layers.{n}.bias"]
        held[f"norm{n}/scale"] = w[f"norms.{n}.weight"]
        held[f"norm{n}/shift"] = w[f"norms.{n}.bias"]
    for name, source in (("forth", "both"), ("back", "both"), ("last", "last")):
        end = "_l0_reverse" if name == "back" else "_l0"
        if fault == "one direction twice":
            end = "_l0"
        kernel = torch.cat([w[f"{source}.weight_{k}{end}"] for k in ("ih", "hh")], 1)
        bias = w[f"{source}.bias_ih{end}"]
        if fault != "biases of the state left out":
            bias = bias + w[f"{source}.bias_hh{end}"]
        i, f, j, o = kernel.t().chunk(4, 1)
        gates = (
            [i, f, j, o]
            if fault == "gates of the kernels as they are"
            else [i, j, f, o]
        )
        held[f"{name}/kernel"] = torch.cat(gates, 1)
        i, f, j, o = bias.chunk(4)
        held[f"{name}/bias"] = torch.cat([i, j, f, o])
    return held


# -- both directions and both layers in one tensor each ----------------------------------


def in_stacks(m, x, fault):
    for n in range(2):
        x = x @ m["layers/w"][n] + m["layers/b"][n]
        x = normed(x, m["norms/scale"][n], m["norms/shift"][n]).clamp_min(0)
    both = torch.stack([x, x.flip(1)])
    z = torch.einsum("dbtx,dxgh->tdbgh", both, m["both/x"]) + m["both/b"][:, None]
    h, c = torch.zeros(2, 2, len(x), UNITS)
    outputs = []
    for z_t in z:
        z_t = z_t + torch.einsum("dbh,dhgk->dbgk", h, m["both/h"])
        i, f, o = torch.sigmoid(z_t[..., :3, :]).unbind(-2)
        c = f * c + i * torch.tanh(z_t[..., 3, :])
        h = o * torch.tanh(c)
        outputs.append(h)
    forth, back = torch.stack(outputs, 2)
    x = torch.cat([forth, back.flip(1)], -1)
    return finished(m, over_time(x, m["last/kernel"], m["last/bias"]), fault)


def by_gate(rows):
    i, f, g, o = rows.chunk(4)
    return torch.stack([i, f, o, g])


def leaves_of_stacks(w, fault):
    held = leaves_of_cells(w, "")
    held = {k: v for k, v in held.items() if k.startswith(("head", "last"))}
    norms = [0, 0] if fault == "first norm in all layers" else [0, 1]
    held["layers/w"] = torch.stack([w[f"layers.{i}.weight"].t() for i in range(2)])
    held["layers/b"] = torch.stack([w[f"layers.{i}.bias"] for i in range(2)])
    held["norms/scale"] = torch.stack([w[f"norms.{i}.weight"] for i in norms])
    held["norms/shift"] = torch.stack([w[f"norms.{i}.bias"] for i in norms])
    ends = ["_l0", "_l0_reverse"]
    if fault == "directions exchanged":
        ends.reverse()
    for name, source in (("x", "weight_ih"), ("h", "weight_hh")):
        rows = [by_gate(w[f"both.{source}{end}"]) for end in ends]
        held[f"both/{name}"] = torch.stack(rows).permute(0, 3, 1, 2)
    biases = [w[f"both.bias_ih{end}"] + w[f"both.bias_hh{end}"] for end in ends]
    gates = [by_gate(bias) for bias in biases]
    if fault == "gates of the biases as they are":
        gates = [bias.unflatten(0, (4, UNITS)) for bias in biases]
    held["both/b"] = torch.stack(gates)
    return held


PORTS = {"cells": (in_cells, leaves_of_cells), "stacks": (in_stacks, leaves_of_stacks)}


def named(program, step_of, port, fault):
    net = reference()
    function, leaves = PORTS[port]
    held = leaves(net.state_dict(), fault)
    for i in range(3):
        held[f"head{i}/w"] = net.heads[i].weight.detach().t()
        held[f"head{i}/b"] = net.heads[i].bias.detach()
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    theirs = program(
        lambda m, x: function(dict(m.named_parameters()), x, fault), **held
    )
    sides = Sides(step_of(net, X), step_of(theirs, X))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


@pytest.mark.parametrize("port", PORTS)
def test_the_port_is_right(program, step_of, port):
    assert not named(program, step_of, port, "")


@pytest.mark.parametrize(
    ("port", "fault", "names"),
    [
        (
            "cells",
            "gates of the kernels as they are",
            {"forth/kernel", "back/kernel", "last/kernel"},
        ),
        ("cells", "one direction twice", {"back/kernel", "back/bias"}),
        (
            "cells",
            "biases of the state left out",
            {"forth/bias", "back/bias", "last/bias"},
        ),
        ("stacks", "gates of the biases as they are", {"both/b"}),
        ("stacks", "directions exchanged", {"both/x", "both/h", "both/b"}),
        ("stacks", "first norm in all layers", {"norms/scale", "norms/shift"}),
    ],
)
def test_the_parameter_is_named(program, step_of, port, fault, names):
    [row] = named(program, step_of, port, fault)
    assert row.name in names, (row.name, row.blamed_line, row.evidence)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("tanh on the last layer", "x = x.tanh()"),
        ("state exchanged", "torch.cat([x, h], -1) @ kernel"),
        ("state without its tanh", "h = torch.sigmoid(o) * "),
        ("one direction joined twice", "x = torch.cat(both, -1)"),
    ],
)
def test_the_line_is_named(program, step_of, fault, text):
    [row] = named(program, step_of, "cells", fault)
    lines = Path(__file__).read_text().splitlines()
    line = lines[int(row.blamed_line.rpartition(":")[2]) - 1]
    assert text in line, (line, row.evidence)
