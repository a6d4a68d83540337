"""Faulty ports of RegNetY."""

from ..bank import Change

FAULTS = [
    Change("channels_last", "biased running variance", " * n / (n - 1)", ""),
    Change(
        "channels_last",
        "momentum of the statistics",
        "self.mean.mul_(0.9).add_(0.1 * mean)",
        "self.mean.mul_(0.99).add_(0.01 * mean)",
    ),
    Change(
        "channels_last",
        "corrected variance in the norm",
        "flat.var(0, unbiased=False)",
        "flat.var(0)",
    ),
    Change("channels_last", "eps 1e-3", "var + 1e-5", "var + 1e-3"),
    Change(
        "channels_last",
        "eps outside the root",
        "torch.sqrt(var + 1e-5)",
        "(torch.sqrt(var) + 1e-5)",
    ),
    Change(
        "channels_last",
        "gate without sigmoid",
        "torch.sigmoid(self.up(F.relu(self.down(z))))",
        "torch.clamp(self.up(F.relu(self.down(z))) / 6 + 0.5, 0, 1)",
    ),
    Change(
        "channels_last",
        "gate relu left out",
        "self.up(F.relu(self.down(z)))",
        "self.up(self.down(z))",
    ),
    Change(
        "channels_last",
        "squeeze over one axis only",
        "z = x.mean(dim=(1, 2))",
        "z = x.mean(dim=1).amax(1)",
    ),
    Change(
        "channels_last",
        "squeeze before the relu",
        "y = torch.relu(self.b(y))\n        y = self.c(self.se(y))",
        "y = self.c(torch.relu(self.se(self.b(y))))",
        at="self.c(torch.relu(self.se(self.b(y))))",
    ),
    Change(
        "channels_last",
        "skip of the plain input only where strided",
        "self.skip(x) if self.skip is not None else x",
        "self.skip(x) if self.skip is not None else torch.relu(-x)",
    ),
    Change(
        "channels_last",
        "relu before the sum",
        "torch.relu(y + short)",
        "torch.relu(y) + short",
    ),
    Change(
        "channels_last",
        "kernel turned",
        "permute(2, 3, 1, 0)",
        "permute(3, 2, 1, 0)",
        parameter="stem.kernel",
    ),
    Change(
        "channels_last",
        "pool by maximum",
        "self.out(x.mean(dim=(1, 2)))",
        "self.out(x.amax(dim=(1, 2)))",
    ),
    Change("channels_last", "no nesterov", "(g + mu * v)", "v", phase="optimizer"),
    Change(
        "channels_last",
        "decay left out",
        ' + group["decay"] * p',
        "",
        phase="optimizer",
    ),
    Change(
        "channels_last",
        "gamma and beta exchanged",
        's[to + ".bn.gamma"] = w[source + ".normalization.weight"]\n        s[to + ".bn.beta"] = w[source + ".normalization.bias"]',
        's[to + ".bn.gamma"] = w[source + ".normalization.bias"]\n        s[to + ".bn.beta"] = w[source + ".normalization.weight"]',
        parameter="stem.bn.gamma|stem.bn.beta",
    ),
    Change(
        "channels_last",
        "no padding in the stem",
        "pad = kernel.shape[0] // 2",
        "pad = kernel.shape[0] // 2\n    x = x.roll(1, 1)",
    ),
    Change(
        "channels_last",
        "a and c exchanged where sizes allow",
        '(("a", 0), ("b", 1), ("c", 3)):',
        '((("a", 0), ("b", 1), ("c", 3)) if number < 2 else (("a", 3), ("b", 1), ("c", 0))):',
        parameter="body.2.a.kernel|body.2.a.bn.gamma|body.2.a.bn.beta|body.2.a.bn.mean|body.2.a.bn.var|body.2.c.kernel|body.2.c.bn.gamma|body.2.c.bn.beta|body.2.c.bn.mean|body.2.c.bn.var",
    ),
    Change(
        "channels_last",
        "image in another order",
        "image.permute(0, 2, 3, 1)",
        "image.flip(1).permute(0, 2, 3, 1)",
    ),
]
