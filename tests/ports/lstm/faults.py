"""Faulty ports of the tagger."""

from ..bank import Change

FAULTS = [
    Change(
        "tf_cell",
        "gates in torch's order",
        "return torch.cat([i, g, f, o], 0)",
        "return torch.cat([i, f, g, o], 0)",
        parameter="cells.0.kernel",
        at="torch.s",
    ),
    Change(
        "tf_cell", "forget bias", "torch.sigmoid(f) * c", "torch.sigmoid(f + 1.0) * c"
    ),
    Change(
        "tf_cell",
        "one bias left out",
        ' + w[f"lstm.bias_hh_l{n}"]',
        "",
        parameter="cells.0.bias",
    ),
    Change(
        "tf_cell",
        "no tanh of the state",
        "h = torch.sigmoid(o) * torch.tanh(c)",
        "h = torch.sigmoid(o) * c",
    ),
    Change(
        "tf_cell",
        "state before input",
        "torch.cat([ih, hh], 1).t()",
        "torch.cat([hh, ih], 1).t()",
        parameter="cells.0.kernel",
    ),
    Change(
        "tf_cell",
        "gates are read in another order",
        "i, j, f, o = torch.split",
        "i, f, j, o = torch.split",
        at="c = torch.sigmoid(f) * c",
    ),
    Change(
        "tf_cell",
        "states over the batch",
        "torch.stack(states, 1)",
        "torch.stack(states, 1).flip(1)",
    ),
    Change(
        "tf_cell",
        "tanh for the gate",
        "torch.sigmoid(i) * torch.tanh(j)",
        "torch.tanh(i) * torch.tanh(j)",
    ),
    Change(
        "tf_cell",
        "normalised over time",
        "torch.logsumexp(logits, -1, keepdim=True)",
        "torch.logsumexp(logits, 1, keepdim=True)",
    ),
    Change(
        "gates",
        "forget and input exchanged",
        "order = (cell.input, cell.forget,",
        "order = (cell.forget, cell.input,",
        parameter="first.forget.weight|first.input.weight|first.forget.bias|first.input.bias",
    ),
    Change(
        "gates",
        "new memory before the output",
        "memory = f * memory + i * g",
        "memory = f * memory + (1 - f) * g",
    ),
    Change(
        "gates",
        "hard sigmoid",
        "i = self.input(both).sigmoid()",
        "i = nn.functional.hardsigmoid(self.input(both))",
    ),
    Change(
        "gates",
        "transposed the wrong way",
        "scores = self.project(xs).transpose(0, 1)",
        "scores = self.project(xs).reshape(words.shape[0], words.shape[1], 6)",
    ),
    Change("gates", "sequence reversed", "for x in xs:", "for x in xs.flip(0):"),
    Change(
        "cells",
        "second cell reads the memory",
        "s2 = self.cell2(s1[0], s2)",
        "s2 = self.cell2(s1[1], s2)",
    ),
    Change(
        "cells",
        "state is not kept",
        "s2 = self.cell2(s1[0], s2)",
        "s2 = self.cell2(s1[0], None)",
    ),
    Change(
        "cells",
        "biases of one layer",
        'getattr(cell, part).copy_(w[f"lstm.{part}_l{n}"])',
        'getattr(cell, part).copy_(w[f"lstm.{part}_l{n}"])\n    net.cell2.bias_hh.copy_(w["lstm.bias_hh_l0"])',
        parameter="cell2.bias_hh",
    ),
]
