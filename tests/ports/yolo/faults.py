"""Faulty ports of the detector."""

from ..bank import Change

FAULTS = [
    Change(
        "darknet",
        "grid transposed",
        "across = torch.arange(w)[None, None, :, None]\n        down = torch.arange(h)[None, :, None, None]",
        "across = torch.arange(h)[None, :, None, None]\n        down = torch.arange(w)[None, None, :, None]",
        at="- 0.5 +",
    ),
    Change("darknet", "batch norm of another epsilon", "+ 0.001)", "+ 1e-5)"),
    Change(
        "darknet", "other momentum", "mul_(0.97).add_(0.03 *", "mul_(0.9).add_(0.1 *"
    ),
    Change("darknet", "biased running variance", " * count / (count - 1)", ""),
    Change(
        "darknet",
        "pooling window",
        "F.max_pool2d(x, 9, stride=1, padding=4)",
        "F.max_pool2d(x, 5, stride=1, padding=2)",
    ),
    Change(
        "darknet", "the other half goes on", "rest = x[:, half:]", "rest = x[:, :half]"
    ),
    Change(
        "darknet",
        "no residual",
        "rest = rest + u[3](u[2](rest))",
        "rest = u[3](u[2](rest))",
    ),
    Change(
        "darknet",
        "kinds before boxes",
        "torch.cat([boxes[0], kinds[0], boxes[1], kinds[1]]))\n    boxes",
        "torch.cat([boxes[0], boxes[1], kinds[0], kinds[1]]))\n    boxes",
        parameter="detection",
    ),
    Change(
        "darknet",
        "size is not squared",
        "wide = (2 * y[..., 2]) ** 2",
        "wide = (2 * y[..., 2])",
    ),
    Change(
        "darknet",
        "loss of another knee",
        "torch.where(near, apart**2, apart - 0.25)",
        "torch.where(apart < 1, apart**2 / 2, apart - 0.5)",
    ),
    Change(
        "darknet",
        "route and up exchanged",
        "u[8](torch.cat((x, route), dim=1))",
        "u[8](torch.cat((route, x), dim=1))",
    ),
]
