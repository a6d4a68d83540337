"""Faulty ports of the segmenter."""

from ..bank import Change

FAULTS = [
    Change(
        "tf_like",
        "edge repeated, not reflected",
        "x = torch.cat([x[:, 1:2], x, x[:, -2:-1]], 1)\n    return torch.cat([x[:, :, 1:2], x, x[:, :, -2:-1]], 2)",
        "x = torch.cat([x[:, :1], x, x[:, -1:]], 1)\n    return torch.cat([x[:, :, :1], x, x[:, :, -1:]], 2)",
    ),
    Change(
        "tf_like",
        "groups of two",
        "x.reshape(b, h, w, 4, c // 4)",
        "x.reshape(b, h, w, 2, c // 2)",
    ),
    Change(
        "tf_like",
        "corners of pixels are aligned",
        "torch.arange(size) * ((n - 1) / (size - 1))",
        "((torch.arange(size) + 0.5) * n / size - 0.5).clamp(0, n - 1)",
        at="at = |share = at - low",
    ),
    Change(
        "tf_like",
        "hard sigmoid of Keras",
        "torch.clamp(x + 3, 0, 6) / 6",
        "torch.clamp(x + 2.5, 0, 5) / 5",
    ),
    Change("tf_like", "one rate for all", "rate=i + 1)", "rate=1)"),
    Change(
        "tf_like",
        "ignored pixels are counted",
        "weight = share[y] * kept",
        "weight = share[y]",
    ),
    Change("tf_like", "mean without weights", "/ weight.sum()", "/ kept.sum()"),
    Change(
        "tf_like",
        "kernel of the transposed convolution flipped",
        'w["up.weight"].permute(2, 3, 0, 1).clone()',
        'w["up.weight"].flip(2, 3).permute(2, 3, 0, 1).clone()',
        parameter="kt",
    ),
    Change(
        "tf_like",
        "clamped at one",
        "x = torch.clamp(2 * x, 0, 6)",
        "x = torch.clamp(2 * x, 0, 1)",
    ),
    Change(
        "tf_like",
        "norm over channels too",
        "mean, variance = moments(x, (1, 2))",
        "mean, variance = moments(x, (1, 2, 3))",
    ),
    Change("tf_like", "cut one late", "out[:, 1:-1, 1:-1]", "out[:, 2:, 2:]"),
]
