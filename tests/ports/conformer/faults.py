"""Faulty ports of the speech network."""

from ..bank import Change

FAULTS = [
    Change(
        "numpy_like",
        "whole step of the first layer",
        'x = x + feed(p, at + "/ff1", x) / 2',
        'x = x + feed(p, at + "/ff1", x)',
    ),
    Change("numpy_like", "scale of all channels", "/ np.sqrt(d // 2)", "/ np.sqrt(d)"),
    Change("numpy_like", "padding is heard", "* -1e30", "* 0.0"),
    Change(
        "numpy_like",
        "halves of the gate exchanged",
        "h[..., :d] * torch.sigmoid(h[..., d:])",
        "torch.sigmoid(h[..., :d]) * h[..., d:]",
    ),
    Change(
        "numpy_like",
        "norm over the batch alone",
        "mean = h.mean((0, 1))\n    variance = h.var((0, 1), unbiased=False)",
        "mean = h.mean(1, keepdim=True)\n    variance = h.var(1, unbiased=False, keepdim=True)",
    ),
    Change(
        "numpy_like",
        "positions interleaved",
        "np.concatenate([np.sin(place), np.cos(place)], 1)",
        "np.stack([np.sin(place), np.cos(place)], 2).reshape(t, d)",
        at="positions(t, 12)|return torch.tensor(",
    ),
    Change(
        "numpy_like",
        "kernel of the entry in torch's order",
        'w["enter.weight"].reshape(12, 4, 4).permute(2, 1, 0).reshape(16, 12)',
        'w["enter.weight"].t()',
        parameter="p.enter/w",
    ),
    Change(
        "numpy_like",
        "square kernel is not transposed",
        'put(a + "/mha/o", b + ".attention.out_proj")',
        'put(a + "/mha/o", b + ".attention.out_proj")\n        p[a + "/mha/o/w"] = p[a + "/mha/o/w"].t()',
        parameter="p.block0/mha/o/w|p.block1/mha/o/w",
    ),
    Change(
        "numpy_like",
        "gelu for swish",
        'swish(dense(p, at + "/up", h))',
        'torch.nn.functional.gelu(dense(p, at + "/up", h))',
    ),
    Change(
        "numpy_like",
        "padded on one side",
        "torch.cat([edge, x, edge], 1)",
        "torch.cat([edge, edge, x], 1)",
    ),
]
