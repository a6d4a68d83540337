"""Faulty ports of the recommender."""

from ..bank import Change

FAULTS = [
    Change(
        "multi_hot",
        "tags are summed",
        "tags = (tags / tags.sum(dim=1, keepdim=True)) @ self.tags_table",
        "tags = tags @ self.tags_table",
        reference='tags = self.tags(batch["tags"]',
    ),
    Change(
        "multi_hot",
        "weights of the history are left out",
        '            batch["history"], batch["history_offsets"], 50, batch["history_weights"]\n',
        '            batch["history"], batch["history_offsets"], 50\n',
        at="clicks = multi_hot(|amount = torch.ones(|accumulate=True|history = clicks @",
        reference="per_sample_weights=",
    ),
    Change(
        "multi_hot",
        "an id that comes twice counts once",
        "accumulate=True",
        "accumulate=False",
    ),
    Change(
        "multi_hot",
        "crosses multiply by themselves",
        "x = x0 * u(v(x)) + x",
        "x = x * u(v(x)) + x",
    ),
    Change(
        "multi_hot",
        "pairs above the diagonal, in their order",
        "below = torch.ones(4, 4).tril(-1).bool()",
        "below = torch.ones(4, 4).triu(1).bool()",
        at="dots = gram[:, below]",
    ),
    Change(
        "multi_hot",
        "last activation of the bottom is missing",
        "self.dense_1 = Dense(16, 8, activation=torch.relu)",
        "self.dense_1 = Dense(16, 8)",
        at="numbers = self.dense_1(|return self.activation(y)|y = y + self.bias",
        reference="numbers = self.bottom(",
    ),
    Change(
        "multi_hot",
        "dots in half precision",
        'gram = torch.einsum("bie,bje->bij", fields, fields)',
        "low = fields.half()\n"
        '        gram = torch.einsum("bie,bje->bij", low, low).float()',
    ),
    Change(
        "multi_hot",
        "weight of positives on both",
        "negative = (1 - clicked) * softplus(logit)",
        "negative = (1 - clicked) * softplus(logit) * 2.5",
    ),
    Change(
        "multi_hot",
        "accumulator starts at the library's default",
        "return Adagrad(net.parameters(), 0.02, 0.01)",
        "return Adagrad(net.parameters(), 0.02, 0.1)",
        phase="optimizer",
    ),
    Change(
        "one_table",
        "tags start one row too early",
        '"tags": 90',
        '"tags": 89',
        at='return p["table"].index_select|rows = lookup(p, "tags"',
    ),
    Change(
        "one_table",
        "bias of the cross is not reordered",
        'p[f"cross{k}_b"] = pairs_first(w[f"crosses.{k}.up.bias"], 0)',
        'p[f"cross{k}_b"] = w[f"crosses.{k}.up.bias"]',
        parameter="cross0_b|cross1_b",
    ),
    Change(
        "one_table",
        "pairs in the order of columns",
        "[(1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)]",
        "[(1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (3, 2)]",
        at="for i, j in PAIRS|torch.stack(pairs, 1)",
    ),
    Change(
        "one_table",
        "no way around the cross",
        "x = x + x0 * (",
        "x = x0 * (",
        reference="return first * self.up(",
    ),
    Change(
        "one_table",
        "weights of what was seen divide the sum",
        "return each.sum() / len(each)",
        'return each.sum() / batch["seen"].sum()',
    ),
    Change(
        "one_table",
        "deep layers read the crossed vector",
        'y = torch.relu(affine(p, "top1", x0))',
        'y = torch.relu(affine(p, "top1", x))',
    ),
    Change(
        "one_table",
        "raw counts",
        'torch.log1p(batch["counts"])',
        'batch["counts"]',
        reference="numbers = self.bottom(torch.log1p",
    ),
]
