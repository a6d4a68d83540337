"""Faulty ports of the U-Net."""

from ..bank import Change

FAULTS = [
    Change(
        "tf_like",
        "groups of interleaved channels",
        "g = x.reshape(n, h, w, self.groups, c // self.groups)",
        "g = x.reshape(n, h, w, c // self.groups, self.groups).transpose(3, 4)",
    ),
    Change(
        "tf_like",
        "normalised over space alone",
        "mean = g.mean(dim=(1, 2, 4), keepdim=True)",
        "mean = g.mean(dim=(1, 2), keepdim=True)",
    ),
    Change("tf_like", "epsilon", "var + 1e-5", "var + 1e-3"),
    Change(
        "tf_like",
        "slope",
        "x = torch.maximum(x, 0.1 * x)",
        "x = torch.maximum(x, 0.2 * x)",
    ),
    Change(
        "tf_like",
        "skip and input exchanged",
        "torch.cat([x, s2], dim=-1)",
        "torch.cat([s2, x], dim=-1)",
    ),
    Change(
        "tf_like",
        "other skip",
        "x = self.dec1(torch.cat([x, s1], dim=-1))",
        "x = self.dec1(torch.cat([x, s1.flip(1)], dim=-1))",
    ),
    Change(
        "tf_like",
        "kernel of the transposed convolution flipped",
        'w["up2.weight"].permute(2, 3, 1, 0)',
        'w["up2.weight"].permute(2, 3, 1, 0).flip(0, 1)',
        parameter="up_kernel",
    ),
    Change(
        "tf_like",
        "rows and columns exchanged",
        '"nhwc,ijoc->nhiwjo"',
        '"nhwc,ijoc->nhjwio"',
    ),
    Change("tf_like", "no bias", "-1) + self.up_bias", "-1) + 0 * self.up_bias"),
    Change(
        "tf_like",
        "tiled, not repeated",
        "x.repeat_interleave(2, dim=1)",
        "x.repeat(1, 2, 1, 1)",
    ),
    Change(
        "tf_like",
        "padding before alone",
        "F.pad(x, (0, 0, pad, pad, pad, pad))",
        "F.pad(x, (0, 0, 2 * pad, 0, 2 * pad, 0))",
    ),
    Change(
        "tf_like",
        "kernels turned",
        '.weight"].permute(2, 3, 1, 0))\n        conv.bias',
        '.weight"].permute(3, 2, 1, 0))\n        conv.bias',
        parameter="enc1.conv_1.kernel",
    ),
    Change(
        "tf_like",
        "loss of the ones alone",
        "(y * torch.log(p) + (1 - y) * torch.log(1 - p))",
        "(y * torch.log(p))",
    ),
    Change(
        "flat",
        "one group",
        "nn.GroupNorm(2, cout)",
        "nn.GroupNorm(1, cout)",
        at="x = stage(x)",
    ),
    Change(
        "flat",
        "average for maximum",
        "F.max_pool2d(x, kernel_size=2, stride=2)",
        "F.avg_pool2d(x, kernel_size=2, stride=2)",
    ),
    Change(
        "flat",
        "slope of the library",
        "nn.LeakyReLU(0.1, inplace=True)",
        "nn.LeakyReLU(inplace=True)",
        at="x = stage(x)",
    ),
    Change(
        "flat",
        "skips from the other end",
        "x = self.stages[4](torch.cat((x, skips.pop()), dim=1))",
        "x = self.stages[4](torch.cat((x, skips.pop().roll(1, 2)), dim=1))",
    ),
    Change(
        "flat",
        "bias of the up-convolution left",
        'net.expand.bias.copy_(w["up2.bias"])',
        "net.expand.bias.zero_()",
        parameter="expand.bias",
    ),
    Change(
        "flat",
        "norms of the stage exchanged",
        '(1, "na"), (3, "b"), (4, "nb")',
        '(1, "nb"), (3, "b"), (4, "na")',
        parameter="stages.0.1.weight|stages.0.1.bias",
    ),
    Change(
        "flat",
        "bilinear",
        "x = x[:, :, :, None, :, None].expand(n, c, h, 2, w, 2)\n        x = x.reshape(n, c, 2 * h, 2 * w)",
        "x = F.interpolate(x, scale_factor=2, mode='bilinear', align_corners=False)",
    ),
]
