"""Faulty ports of the codec."""

from ..bank import Change

FAULTS = [
    Change(
        "frames",
        "snake without its square",
        "x + (0.5 - 0.5 * torch.cos(2 * a * x)) / (a + 1e-9)",
        "x + torch.sin(a * x) / (a + 1e-9)",
    ),
    Change(
        "frames",
        "frames reach into the future",
        "(0, 0, reach - (self.stride - 1), 0)",
        "(0, 0, reach - reach // 2 - (self.stride - 1), reach // 2)",
    ),
    Change(
        "frames",
        "lengths of the transposed kernels are of the outputs",
        "over = [d for d in range(3) if self.g.shape[d] == 1]",
        "over = [0, 1]",
        at="length = self.v.square()",
    ),
    Change(
        "frames",
        "kernels of the way up are read backwards",
        "self.load(w, at, (2, 0, 1))\n",
        "self.load(w, at, (2, 0, 1))\n        self.v = nn.Parameter(self.v.flip(0))\n",
        parameter="dec.2.v|dec.5.v",
        at="now, later = self.kernel()|first = torch.einsum|second = torch.einsum",
    ),
    Change(
        "frames",
        "the later half goes one step too late",
        "(0, 0, 0, 0, 1, 0))[:, :-1]",
        "(0, 0, 0, 0, 2, 0))[:, :-2]",
    ),
    Change(
        "frames",
        "second unit is not dilated",
        '("unit", "encoder.4", 1, 3)',
        '("unit", "encoder.4", 1, 1)',
        at="y = self.conv1(self.act1(x))|reach = (size - 1)|x = nn.functional.pad(x|frames = x.unfold|kernel) + self.b",
    ),
    Change(
        "frames",
        "no way past the codes",
        "passed = residual + (found - residual).detach()",
        "passed = found",
        reference="near = left + (near - left).detach()",
    ),
    Change(
        "frames",
        "the second book reads the first's input",
        "residual = residual - passed.detach()",
        "residual = residual.clone()",
        reference="left = left - near.detach()",
    ),
    Change(
        "frames",
        "codes move ten times as slowly",
        "decay=0.9, eps=1e-5",
        "decay=0.99, eps=1e-5",
        at="self.cluster_size.copy_(decay|self.embed_sum.copy_(decay",
        parameter="quantizers.0.cluster_size|quantizers.1.cluster_size|quantizers.0.embed_sum|quantizers.1.embed_sum",
    ),
    Change(
        "frames",
        "codes are sums over raw counts of the batch",
        "self.embed.copy_(self.embed_sum / smooth.unsqueeze(1))",
        "self.embed.copy_(self.embed_sum / count.clamp(min=1).unsqueeze(1))",
        parameter="quantizers.0.embed|quantizers.1.embed",
        at="self.embed.copy_(",
    ),
    Change(
        "frames",
        "commitment is a mean of the books",
        "torch.stack(commitment).sum()",
        "torch.stack(commitment).mean()",
    ),
    Change(
        "frames",
        "window is symmetric",
        "2 * math.pi * n / size)",
        "2 * math.pi * n / (size - 1))",
    ),
    Change(
        "frames",
        "natural logarithms",
        "apart.abs().mean() / math.log(10)",
        "apart.abs().mean()",
        at="apart = torch.log(",
    ),
    Change(
        "frames",
        "decay is part of the gradient",
        '                p.mul_(1 - lr * group["decay"])\n'
        "                m.lerp_(p.grad, 1 - b1)\n"
        "                v.lerp_(p.grad**2, 1 - b2)\n",
        '                grad = p.grad + group["decay"] * p\n'
        "                m.lerp_(grad, 1 - b1)\n"
        "                v.lerp_(grad**2, 1 - b2)\n",
        phase="optimizer",
    ),
    Change(
        "frames",
        "both snakes of a unit have the first one's frequencies",
        'self.act2 = Snake(w, at + ".steps.2")',
        'self.act2 = Snake(w, at + ".steps.0")',
        parameter="enc.1.act2.alpha|enc.4.act2.alpha|dec.3.act2.alpha",
    ),
]
