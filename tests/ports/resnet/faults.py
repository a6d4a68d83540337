"""Faulty ports of the residual network."""

from ..bank import Change

FAULTS = [
    Change("keras_like", "wrong epsilon", "variance + 1e-5", "variance + 1e-3"),
    Change(
        "keras_like",
        "normalised over rows",
        "mean = x.mean(dim=(0, 1, 2))",
        "mean = x[:, 0].mean(dim=(0, 1))",
    ),
    Change(
        "keras_like",
        "unbiased variance",
        "y = (x - mean) / torch.sqrt(variance + 1e-5)",
        "y = (x - mean) / torch.sqrt(variance * count / (count - 1) + 1e-5)",
    ),
    Change(
        "keras_like",
        "running variance is biased",
        "0.1 * variance * count / (count - 1)",
        "0.1 * variance",
    ),
    Change(
        "keras_like",
        "momentum the wrong way round",
        "self.moving_mean.mul_(0.9).add_(0.1 * mean)",
        "self.moving_mean.mul_(0.1).add_(0.9 * mean)",
    ),
    Change("keras_like", "no shortcut", "x = shortcut + x", "x = 0 * shortcut + x"),
    Change(
        "keras_like",
        "activation before the sum",
        "x = shortcut + x",
        "x = shortcut + torch.relu(x)",
    ),
    Change(
        "keras_like",
        "padding of the 1 x 1 kernel",
        "kernel.shape[-1] // 2)",
        "1)[:, :, : -(-x.shape[2] // self.strides), : -(-x.shape[3] // self.strides)]",
    ),
    Change(
        "keras_like",
        "kernels turned",
        "layer.kernel.copy_(weight.permute(2, 3, 1, 0))",
        "layer.kernel.copy_(weight.permute(3, 2, 1, 0))",
        parameter="conv.kernel|blocks.0.first_conv.kernel",
    ),
    Change(
        "keras_like",
        "norms exchanged",
        'set_norm(block.first_norm, w, name + "bn1")',
        'set_norm(block.first_norm, w, name + "bn2")',
        parameter="blocks.0.first_norm.gamma|blocks.0.first_norm.beta",
    ),
    Change("keras_like", "smoothing twice", "* 0.9 + 0.1 / 10", "* 0.9 + 0.1"),
    Change("keras_like", "sum for mean", ".sum(-1).mean()", ".mean(-1).mean()"),
    Change(
        "keras_like",
        "no weight decay",
        "weight_decay=1e-4",
        "weight_decay=0.0",
        phase="optimizer",
    ),
    Change(
        "sequential",
        "maximum for mean",
        "feats.mean((2, 3), keepdim=True)",
        "feats.amax((2, 3), keepdim=True)",
    ),
    Change(
        "sequential",
        "other epsilon",
        "nn.BatchNorm2d(cout)",
        "nn.BatchNorm2d(cout, eps=1e-3)",
        at="self.trunk(x)",
    ),
    Change(
        "sequential",
        "norms in evaluation mode",
        "return net.train()",
        "return net.eval()",
        at="self.trunk(x)",
    ),
    Change(
        "sequential",
        "convolutions exchanged",
        '"layer1.conv1",\n    "layer1.conv2"',
        '"layer1.conv2", "layer1.conv1"',
        parameter="trunk.1.body.0.0.weight|trunk.1.body.1.0.weight",
    ),
    Change("sequential", "no smoothing", ", label_smoothing=0.1", ""),
    Change(
        "sequential",
        "skip after the activation",
        "out += self.skip(x)\n        return out.relu_()",
        "out = out.relu_()\n        return out + self.skip(x)",
    ),
]
