"""Faulty ports of the two towers."""

from ..bank import Change

FAULTS = [
    Change(
        "keras_like",
        "normed over the batch",
        "v = v / torch.linalg.vector_norm(v, dim=1, keepdim=True)",
        "v = v / torch.linalg.vector_norm(v, dim=0, keepdim=True)",
    ),
    Change(
        "keras_like",
        "temperature is not raised",
        "* torch.exp(self.temperature)",
        "* self.temperature",
    ),
    Change(
        "keras_like",
        "momentum of Keras",
        "momentum=0.9, epsilon=1e-5",
        "momentum=0.99, epsilon=1e-5",
        at="keep * self.moving_mean|keep * self.moving_variance",
        parameter="stage1.bn_a.moving_mean|stage1.bn_a.moving_variance",
    ),
    Change(
        "keras_like",
        "epsilon of Keras",
        "momentum=0.9, epsilon=1e-5",
        "momentum=0.9, epsilon=1e-3",
        at="variance + self.epsilon",
    ),
    Change(
        "keras_like",
        "padding counts in the mean",
        "mask / mask.sum(1, keepdim=True)",
        "mask / mask.shape[1]",
    ),
    Change(
        "keras_like",
        "padding at the end as with strides of Keras",
        "x = F.pad(x, (0, 0, pad, pad, pad, pad))",
        "lead = pad - (self.strides - 1)\n        x = F.pad(x, (0, 0, lead, 2 * pad - lead, lead, 2 * pad - lead))",
    ),
    Change(
        "keras_like",
        "one direction alone",
        "0.5 * (smoothed(output, 1) + smoothed(output, 0))",
        "smoothed(output, 1)",
    ),
    Change(
        "keras_like",
        "taps reversed",
        'w["words.conv.weight"].permute(2, 1, 0)',
        'w["words.conv.weight"].permute(2, 1, 0).flip(0)',
        parameter="text.taps",
    ),
    Change(
        "keras_like",
        "padding learns",
        "torch.where((tokens == 0)[..., None], rows.detach(), rows)",
        "rows",
        at="self.embeddings[tokens]",
        phase="backward",
    ),
    Change(
        "functional",
        "relu before the sum",
        'torch.relu(batch_norm(s, at + ".bn2", x) + short)',
        'torch.relu(batch_norm(s, at + ".bn2", x)) + short',
    ),
    Change(
        "functional",
        "gelu by tanh",
        "x = F.gelu(F.linear(",
        'x = F.gelu(approximate="tanh", input=F.linear(',
    ),
    Change(
        "functional",
        "norm before the sum",
        'F.layer_norm(\n        x + F.gelu(y), x.shape[-1:], s["words.norm.weight"], s["words.norm.bias"]\n    )',
        'x + F.layer_norm(\n        F.gelu(y), x.shape[-1:], s["words.norm.weight"], s["words.norm.bias"]\n    )',
    ),
    Change(
        "functional",
        "decay of all",
        "dict(params=groups[False])]",
        "dict(params=groups[False], weight_decay=0.005)]",
        phase="optimizer",
    ),
    Change(
        "functional",
        "maximum for the mean",
        "F.adaptive_avg_pool2d(x, 1)",
        "F.adaptive_max_pool2d(x, 1)",
    ),
    Change(
        "functional",
        "shortcut takes every second",
        "F.conv2d(F.avg_pool2d(x, 2), s[at",
        "F.conv2d(x[:, :, ::2, ::2], s[at",
    ),
]
