"""Faulty ports of the classifier."""

from ..bank import Change

FAULTS = [
    Change(
        "nhwc", "wrong epsilon", "epsilon=1e-5", "epsilon=1e-3", at="inv = torch.rsqrt"
    ),
    Change(
        "nhwc",
        "no epsilon",
        "self.moving_variance + self.epsilon",
        "self.moving_variance",
    ),
    Change(
        "nhwc",
        "patches in another order",
        "permute(0, 1, 2, 4, 5, 3)",
        "permute(0, 1, 2, 5, 4, 3)",
    ),
    Change(
        "nhwc",
        "padding on one side",
        "(0, 0, pad, pad, pad, pad)",
        "(0, 0, 0, 2 * pad, 0, 2 * pad)",
    ),
    Change("nhwc", "no bias", "y = y + self.bias_b", "y = y + 0 * self.bias_b"),
    Change("nhwc", "mean for maximum", "y.amax(dim=(2, 4))", "y.mean(dim=(2, 4))"),
    Change(
        "nhwc",
        "pooling regroups",
        "reshape(n, h // 2, 2, w // 2, 2, c)",
        "reshape(n, 2, h // 2, 2, w // 2, c).transpose(1, 2).transpose(3, 4)",
    ),
    Change(
        "nhwc",
        "dense kernel in the order of channels first",
        "first.permute(2, 3, 1, 0).reshape(192, 20)",
        "weights['fc1.weight'].t()",
        parameter="dense1_kernel",
    ),
    Change(
        "nhwc",
        "kernel turned",
        'weights["conv1.weight"].permute(2, 3, 1, 0)',
        'weights["conv1.weight"].permute(3, 2, 1, 0)',
        parameter="kernel_a",
    ),
    Change(
        "nhwc",
        "mean and variance of the other layer",
        'weights[f"{name}.running_mean"]',
        'weights[f"{name}.running_mean"] * 0',
        parameter="norm_a.moving_mean|norm_b.moving_mean",
    ),
    Change(
        "folded",
        "wrong epsilon",
        "eps=1e-5",
        "eps=1e-3",
        parameter="features.0.weight|features.2.weight|features.0.bias|features.2.bias",
    ),
    Change(
        "folded",
        "scale without the root",
        'torch.sqrt(weights[f"{norm}.running_var"] + eps)',
        '(weights[f"{norm}.running_var"] + eps)',
        parameter="features.0.weight|features.2.weight|features.0.bias|features.2.bias",
    ),
    Change(
        "folded",
        "bias is not scaled",
        '(bias - weights[f"{norm}.running_mean"]) * scale',
        'bias - weights[f"{norm}.running_mean"] * scale',
        parameter="features.2.bias",
    ),
    Change(
        "folded",
        "bias left out",
        "(bias - weights",
        "(-weights",
        parameter="features.2.bias",
    ),
    Change(
        "folded",
        "average for maximum",
        "nn.MaxPool2d(2)",
        "nn.AvgPool2d(2)",
        at="x = self.features(x)",
    ),
    Change(
        "functional",
        "scale without the root",
        'torch.sqrt(p[name + "_var"] + eps)',
        '(p[name + "_var"] + eps)',
    ),
    Change(
        "functional",
        "mean is not scaled",
        'p[name + "_mean"] * scale',
        'p[name + "_mean"]',
    ),
    Change(
        "functional",
        "stride after",
        "stride=2, padding=1)",
        "padding=1)[:, :, 1::2, 1::2]",
    ),
    Change(
        "functional",
        "no activation",
        'normalize(x, p, "n2").relu()',
        'normalize(x, p, "n2")',
        reference="x = F.relu(self.bn2",
    ),
    Change(
        "functional",
        "offsets in reverse",
        'p[name + "_offset"] = w[old + ".bias"]',
        'p[name + "_offset"] = w[old + ".bias"].flip(0)',
        parameter="p.n1_offset|p.n2_offset",
    ),
    Change(
        "functional",
        "bias of the last layer is zero",
        'p[name + "_b"] = w[old + ".bias"]',
        'p[name + "_b"] = w[old + ".bias"] * (name == "d1")',
        parameter="p.d2_b",
    ),
]
