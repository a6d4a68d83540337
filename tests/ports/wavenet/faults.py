"""Faulty ports of the dilated convolutions."""

from ..bank import Change

FAULTS = [
    Change(
        "taps",
        "taps the other way round",
        "self.rate * (count - 1 - k)",
        "self.rate * k",
        at="self.rate * k|enumerate(self.taps)",
    ),
    Change(
        "taps",
        "dilation one more",
        "self.rate * (count - 1 - k)",
        "(self.rate + (self.rate > 1)) * (count - 1 - k)",
    ),
    Change(
        "taps",
        "corners are aligned",
        "(torch.arange(n * times) + 0.5) / times - 0.5",
        "torch.arange(n * times) * (n - 1) / (n * times - 1)",
        at="c[:, low] * (1 - part)",
    ),
    Change(
        "taps",
        "gates exchanged",
        "z = torch.tanh(self.filter(x) + self.filter_c(c))\n        z = z * torch.sigmoid(self.gate(x) + self.gate_c(c))",
        "z = torch.sigmoid(self.filter(x) + self.filter_c(c))\n        z = z * torch.tanh(self.gate(x) + self.gate_c(c))",
    ),
    Change(
        "taps",
        "residual is not scaled",
        "(x + self.to_next(z)) / 2**0.5",
        "(x + self.to_next(z))",
    ),
    Change("taps", "other slope", "0.1 * x", "0.01 * x"),
    Change(
        "taps",
        "other elu",
        "torch.exp(x.clamp(max=0)) - 1)",
        "1.2 * (torch.exp(x.clamp(max=0)) - 1))",
    ),
    Change(
        "taps",
        "groups interleaved",
        "groups = x.reshape(b, t, 2, c // 2)",
        "groups = x.reshape(b, t, c // 2, 2).transpose(2, 3)",
    ),
    Change(
        "taps",
        "norm over time alone",
        "mean = groups.mean((1, 3), keepdim=True)\n        variance = groups.var((1, 3), keepdim=True, correction=0)",
        "mean = groups.mean((1,), keepdim=True)\n        variance = groups.var((1,), keepdim=True, correction=0)",
    ),
    Change(
        "taps",
        "square kernel is not transposed",
        'taps(layer.to_next, w[at + "residual.weight"]',
        'taps(layer.to_next, w[at + "residual.weight"].transpose(0, 1)',
        parameter="stack.0.to_next.taps|stack.1.to_next.taps|stack.2.to_next.taps",
    ),
]
