"""Faulty ports of the small MobileNet."""

from ..bank import Change

_MOVING = "|".join(
    f"{place}.{part}"
    for place in (
        "stem_bn",
        "top_bn",
        *(
            f"block_{i}.{name}_bn"
            for i in range(3)
            for name in ("expand", "depthwise", "project")
        ),
    )
    for part in ("moving_mean", "moving_variance")
)
_DEPTHWISE = "|".join(f"block_{i}.depthwise.depthwise_kernel" for i in range(3))
_SHIFTS = "|".join(
    f"weights.features_{name}_shift"
    for name in (
        "0",
        "4",
        "1_block_0",
        "1_block_2",
        "2_block_0",
        "2_block_1",
        "2_block_2",
        "3_block_0",
        "3_block_1",
        "3_block_3",
    )
)

FAULTS = [
    Change(
        "keras_nhwc",
        "padding of SAME at stride two",
        "pad = (size // 2, size // 2)",
        "pad = ((size - stride) // 2, (size - stride + 1) // 2)",
        at="x = nn.functional.pad(|return x.unfold(1, size|columns = patches(|windows = patches(|rows @ self.kernel|rows = columns",
    ),
    Change(
        "keras_nhwc",
        "hard sigmoid of Keras",
        "torch.clamp(x + 3.0, 0.0, 6.0) * (1.0 / 6.0)",
        "torch.clamp(0.2 * x + 0.5, 0.0, 1.0)",
        at="return x * hard_sigmoid(x)",
    ),
    Change(
        "keras_nhwc",
        "height and width of depthwise kernels exchanged",
        "weight.permute(2, 3, 0, 1)",
        "weight.permute(3, 2, 0, 1)",
        parameter=_DEPTHWISE,
        at='torch.einsum("nhwcij,ijc->nhwc"',
    ),
    Change(
        "keras_nhwc",
        "moving momentum of another library",
        "momentum=0.99, epsilon",
        "momentum=0.9, epsilon",
        parameter=_MOVING,
        at="self.moving_mean -=|self.moving_variance -=",
    ),
    Change(
        "keras_nhwc",
        "moving variance is biased",
        "        variance = variance * (count / (count - 1))\n",
        "",
        parameter=_MOVING,
        at="self.moving_variance -=",
    ),
    Change(
        "keras_nhwc",
        "no activation after the depthwise kernel",
        "        x = self.activation(x)\n        if self.squeeze",
        "        if self.squeeze",
        at="x = self.depthwise_bn(",
        reference="layers.append(act(",
    ),
    Change(
        "keras_nhwc",
        "activation behind the bottleneck",
        "x = self.project_bn(self.project(x))",
        "x = self.activation(self.project_bn(self.project(x)))",
        at="return torch.maximum(|return x * hard_sigmoid",
    ),
    Change(
        "keras_nhwc",
        "squeeze carries no gradient back",
        "gate = x.sum(dim=(1, 2))",
        "gate = x.detach().sum(dim=(1, 2))",
        at="return x * gate[",
    ),
    Change(
        "keras_nhwc",
        "targets are not spread",
        "hot * (1 - 0.1) + 0.1 / classes",
        "hot * (1 - 0.1) + 0.1 / (classes - 1)",
        at="return -(soft * log_probs)",
    ),
    Change(
        "keras_nhwc",
        "epsilon under the root",
        "grad / (rms.sqrt() + self.epsilon)",
        "grad / (rms + self.epsilon).sqrt()",
        phase="optimizer",
    ),
    Change(
        "taps",
        "no shortcut in the last block",
        "SHORTCUTS = {1: 3, 7: 10}",
        "SHORTCUTS = {1: 3}",
        at="torch.addcmul(|x = self.norm(",
        reference="return result + x if self.residual",
    ),
    Change(
        "taps",
        "epsilon of another library",
        "(var + 1e-3).sqrt()",
        "(var + 1e-5).sqrt()",
    ),
    Change(
        "taps",
        "taps run down columns first",
        "w[i * kernel + j]",
        "w[j * kernel + i]",
        at="total = total + moved",
    ),
    Change(
        "taps",
        "gate is a plain sigmoid",
        "(F.relu6(scale + 3) / 6)[:, :, None, None]",
        "torch.sigmoid(scale)[:, :, None, None]",
    ),
    Change(
        "taps",
        "shifts start at zero",
        'self.weights[name + "_shift"] = state[prefix + ".1.bias"]',
        'self.weights[name + "_shift"] = torch.zeros_like(state[prefix + ".1.bias"])',
        parameter=_SHIFTS,
        at='return torch.addcmul(self.weights[name + "_shift"]',
    ),
]
