"""Faulty ports of the transformer over columns."""

from ..bank import Change

FAULTS = [
    Change(
        "columns",
        "sine and cosine exchanged",
        "torch.cos(2 * pi * turns) @ self.cos + torch.sin(2 * pi * turns) @ self.sin",
        "torch.sin(2 * pi * turns) @ self.cos + torch.cos(2 * pi * turns) @ self.sin",
    ),
    Change(
        "columns",
        "angle without two pi for the sine",
        "torch.sin(2 * pi * turns)",
        "torch.sin(pi * turns)",
    ),
    Change(
        "columns",
        "halves of the kernel interleaved",
        "self.cos = nn.Parameter(kernel[:half].clone())\n        self.sin = nn.Parameter(kernel[half:].clone())",
        "self.cos = nn.Parameter(kernel[::2].clone())\n        self.sin = nn.Parameter(kernel[1::2].clone())",
        parameter="|".join(
            f"numbers.{i}.{k}" for i in range(4) for k in ("cos", "sin")
        ),
    ),
    Change(
        "columns",
        "missing numbers are attended",
        "lost[:, 1:5] = missing",
        "lost[:, 1:5] = False",
        at="score.masked_fill|torch.softmax(score",
    ),
    Change(
        "columns",
        "mask begins with the summary",
        "lost[:, 1:5] = missing",
        "lost[:, 0:4] = missing",
        at="score.masked_fill|torch.softmax(score",
    ),
    Change(
        "columns",
        "first category's table for all",
        "zip(self.tables, self.shifts, strict=True)",
        "zip([self.tables[1]] * 3, self.shifts, strict=True)",
        at="rows.append(table[kinds",
    ),
    Change(
        "columns",
        "category's shift left out",
        "table[kinds[:, i]] + shift",
        "table[kinds[:, i]]",
        reference="self.kind_bias",
    ),
    Change(
        "columns",
        "summary stands last",
        "        x = torch.stack(rows, dim=1)\n",
        "        x = torch.stack(rows[1:] + rows[:1], dim=1)\n",
    ),
    Change("columns", "scale of the width", "SIZE**0.5", "WIDTH**0.5", at="q = ("),
    Change(
        "columns",
        "heads take turns",
        "part = slice(h * SIZE, (h + 1) * SIZE)",
        "part = slice(h, None, HEADS)",
        at="score = (|heads.append(",
    ),
    Change(
        "columns",
        "first block is normed too",
        'self.pre = None if first else Norm(w, at + ".norm1")',
        'self.pre = Norm(w, "blocks.1.norm1")',
        at="return d / (|mu = x.mean|d = x - mu|self.pre(x)",
    ),
    Change(
        "columns",
        "value and gate exchanged",
        "value, gate = w[at",
        "gate, value = w[at",
        parameter="|".join(
            f"layers.{i}.{k}" for i in range(2) for k in ("value", "gate")
        ),
        at="gated = (|gate = torch",
    ),
    Change(
        "columns",
        "gelu for relu in the gate",
        "torch.relu(h @ self.gate + self.gate_b)",
        "nn.functional.gelu(h @ self.gate + self.gate_b)",
    ),
    Change(
        "columns",
        "norm without its root",
        "+ self.eps) ** 0.5 * self.g",
        "+ self.eps) * self.g",
    ),
    Change(
        "columns",
        "norm of the sum is not used",
        "h = self.mid(x)",
        "h = x",
        reference="self.norm2(x)",
        at="gated = (|gate = torch",
    ),
    Change(
        "columns",
        "second layer holds the first's output kernel",
        'self.wo = nn.Parameter(w[at + ".out.weight"].T',
        'self.wo = nn.Parameter(w["blocks.0.out.weight"].T',
        parameter="layers.1.wo",
    ),
    Change(
        "columns",
        "output kernel is not transposed",
        'w[at + ".out.weight"].T.contiguous()',
        'w[at + ".out.weight"].contiguous()',
        parameter="layers.0.wo|layers.1.wo",
    ),
    Change(
        "columns",
        "mean of all columns",
        "torch.relu(self.last(x[:, 0]))",
        "torch.relu(self.last(x.mean(1)))",
    ),
    Change(
        "columns",
        "relu after the last norm left out",
        "torch.relu(self.last(x[:, 0])) @",
        "self.last(x[:, 0]) @",
        reference="F.relu(self.norm(",
    ),
    Change(
        "columns",
        "smoothing over the other classes",
        "soft = target * (1 - smooth) + smooth / classes",
        "soft = target * (1 - smooth) + (1 - target) * smooth / (classes - 1)",
    ),
    Change(
        "columns",
        "weight of the label alone",
        "each = -(soft * weight * logs).sum(1)",
        "each = -(soft * logs).sum(1) * (target @ weight)",
    ),
    Change(
        "columns",
        "confidence is detached",
        "sure = (target * logs).sum(1).exp()",
        "sure = (target * logs).sum(1).exp().detach()",
    ),
    Change("columns", "gamma of one", "gamma=2", "gamma=1", at="focal = ("),
    Change(
        "columns",
        "mean over the samples",
        "return focal.sum() / whole +",
        "return focal.mean() +",
        at="whole = (",
    ),
    Change(
        "columns",
        "decay of all",
        '{"params": no, "decay": 0.0}',
        '{"params": no, "decay": decay}',
        phase="optimizer",
    ),
    Change(
        "columns",
        "epsilon under the root",
        'size = (v / (1 - two**self.t)) ** 0.5 + group["eps"]',
        "size = (v / (1 - two**self.t) + 1e-6) ** 0.5",
        phase="optimizer",
    ),
]
