"""Faulty ports of the graph network."""

from ..bank import Change

FAULTS = [
    Change(
        "messages",
        "degree of the source alone",
        "degree[source] * degree[target]",
        "degree[source] * degree[source]",
    ),
    Change(
        "messages",
        "source and target exchanged",
        "h[source] * weight[:, None]",
        "h[target] * weight[:, None]",
    ),
    Change(
        "messages",
        "no own part",
        "total + x @ self.own + self.bias",
        "total + 0 * (x @ self.own) + self.bias",
    ),
    Change(
        "messages", "elu without the one", "torch.exp(x) - 1)", "torch.exp(x) - 0.5)"
    ),
    Change(
        "messages",
        "no tanh",
        "logits = torch.tanh(x @ self.gate_w + self.gate_b)",
        "logits = x @ self.gate_w + self.gate_b",
    ),
    Change(
        "messages",
        "own and neighbour exchanged",
        'layer.own.copy_(w[f"conv{i}.root.weight"].t())',
        'layer.own.copy_(w[f"conv{i}.lin.weight"].t())',
        parameter="layers.0.own",
    ),
    Change("messages", "no root", "1 / torch.sqrt(", "1 / ("),
    Change(
        "fused",
        "parts exchanged",
        "torch.cat(parts, 1)",
        "torch.cat(parts[::-1], 1)",
        parameter="g1.both.weight",
    ),
    Change("fused", "softmax over one", "s = s.softmax(0)", "s = s.softmax(1)"),
    Change(
        "fused",
        "laplacian of one side",
        "laplacian = d @ a @ d",
        "laplacian = d @ d @ a",
    ),
    Change(
        "fused",
        "relu for elu",
        "x = F.elu(self.g2(x, laplacian))",
        "x = F.relu(self.g2(x, laplacian))",
    ),
    Change("fused", "power of the degree", "pow(-0.5)", "pow(-1.0)"),
]
