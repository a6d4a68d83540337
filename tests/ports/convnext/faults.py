"""Faulty ports of the depthwise network."""

from ..bank import Change

FAULTS = [
    Change(
        "flax_like",
        "kernel of height and width exchanged",
        'w[name + ".weight"].permute(2, 3, 1, 0)',
        'w[name + ".weight"].permute(3, 2, 1, 0)',
        parameter="tree.stem.conv.kernel|tree.one.dw.kernel|tree.two.dw.kernel|tree.down.conv.kernel",
        at="kernel.permute(3, 2, 0, 1)",
    ),
    Change(
        "flax_like",
        "gelu of tanh",
        "y = F.gelu(y)",
        'y = F.gelu(y, approximate="tanh")',
    ),
    Change(
        "flax_like",
        "size along the channels",
        "(x**2).sum((1, 2), keepdim=True).sqrt()",
        "(x**2).sum((1, 3), keepdim=True).sqrt()",
    ),
    Change(
        "flax_like",
        "no layer scale",
        'x + y * leaves["scale"]["gamma"]',
        "x + y",
        reference="self.gamma * y",
    ),
    Change(
        "flax_like",
        "response without the input",
        'x * (1 + leaf["gamma"] * share)',
        'x * (leaf["gamma"] * share)',
    ),
    Change(
        "flax_like",
        "epsilon of torch",
        "epsilon=1e-6",
        "epsilon=1e-4",
        at="torch.rsqrt(",
    ),
    Change("flax_like", "maximum for mean", "x = x.mean((1, 2))", "x = x.amax((1, 2))"),
    Change(
        "flax_like",
        "norms of two layers exchanged",
        '"stem": {"conv": conv_leaf(w, "stem.0"), "ln": norm_leaf(w, "stem.1")}',
        '"stem": {"conv": conv_leaf(w, "stem.0"), "ln": norm_leaf(w, "down.0")}',
        parameter="tree.stem.ln.scale|tree.stem.ln.bias",
    ),
]
