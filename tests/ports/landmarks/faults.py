"""Faulty ports of the landmark network."""

from ..bank import Change

_SCOPES = (
    "stem",
    *(f"block{i}/conv{j}" for i in (1, 2, 3) for j in (1, 2)),
    *(f"{name}{i}" for name in ("reduce", "fpn/smooth") for i in (1, 2)),
)
_BLOCKS = ("one", "two", "three")
_HALVES = [f"{block}_{half}" for block in _BLOCKS for half in "ab"]
_NORMS = ("stem", "into_two", "into_three", "join1", "join2", *_HALVES)

FAULTS = [
    Change(
        "tf_slim",
        "odd pixel of the padding comes before",
        "return total // 2, total - total // 2",
        "return total - total // 2, total // 2",
        at="padded = pad_same(|return nn.functional.pad(inputs, (0, 0, left"
        "|outputs = nn.functional.conv2d(",
    ),
    Change(
        "tf_slim",
        "second block is not dilated",
        '"block2", rate=2)',
        '"block2")',
        at="padded = pad_same(inputs, weights|outputs = nn.functional.conv2d(",
    ),
    Change(
        "tf_slim",
        "height and width of depthwise kernels exchanged",
        'state[f"down{i}.depthwise.weight"].permute(2, 3, 0, 1)',
        'state[f"down{i}.depthwise.weight"].permute(3, 2, 0, 1)',
        parameter="reduce1/depthwise_weights|reduce2/depthwise_weights",
    ),
    Change(
        "tf_slim",
        "resized from the corners of pixels, as the first version did",
        "((torch.arange(2 * size) + 0.5) / 2 - 0.5).clamp(min=0)",
        "torch.arange(2 * size) / 2",
        at="lower = position|fraction = (position|before = inputs.|after = inputs."
        "|return before + (after|top_down = resize_bilinear(",
    ),
    Change(
        "tf_slim",
        "moving means start at zero",
        'moving[f"{scope}/moving_mean"] = state[f"{name}.running_mean"]',
        'moving[f"{scope}/moving_mean"] = torch.zeros_like(state[f"{name}.bias"])',
        parameter="|".join(f"{scope}/BatchNorm/moving_mean" for scope in _SCOPES),
    ),
    Change(
        "tf_slim",
        "lateral channels come first",
        "torch.cat([top_down, lateral], dim=-1)",
        "torch.cat([lateral, top_down], dim=-1)",
    ),
    Change(
        "tf_slim",
        "gate is a true sigmoid",
        "gate = nn.functional.relu6(net + 3.0) / 6.0",
        "gate = torch.sigmoid(net)",
    ),
    Change(
        "tf_slim",
        "y before x",
        "torch.stack([expected_x, expected_y], dim=-1)",
        "torch.stack([expected_y, expected_x], dim=-1)",
    ),
    Change(
        "tf_slim",
        "blots are half a pixel off",
        'centre = points / FLAGS["heatmap_stride"] - 0.5',
        'centre = points / FLAGS["heatmap_stride"]',
        at="x = torch.arange(width)|y = torch.arange(height)|exponent = -(x"
        "|return torch.exp(exponent)|error = torch.square(heatmaps - make_labels(",
    ),
    Change(
        "tf_slim",
        "heat maps of hidden points count",
        "    error = error * weights[:, None, None, :]\n",
        "",
        at="error = torch.square(heatmaps|return torch.sum(error) / (",
        reference="squared = (heatmaps - target).square() * visible",
    ),
    Change(
        "tf_slim",
        "only one part of the wing's constant is multiplied",
        "c = w * (1.0 - math.log(1.0 + w / epsilon))",
        "c = w - math.log(1.0 + w / epsilon)",
        at="losses = torch.where(w > x",
    ),
    Change(
        "tf_slim",
        "average is slow from the start",
        'decay = min(FLAGS["ema_decay"], (1 + num_updates) / (10 + num_updates))',
        'decay = FLAGS["ema_decay"]',
        phase="optimizer",
    ),
    Change(
        "tf_slim",
        "norms decay, too",
        'return name.endswith("weights")',
        'return not name.endswith("biases")',
        phase="optimizer",
    ),
    Change(
        "folded",
        "kernels of the residual blocks go from out to in",
        '            self.matrix(f"{key}_{letter}", f"{name}.conv{number}")\n',
        '            kernel = self.state[f"{name}.conv{number}.weight"]\n'
        '            self.learned[f"{key}_{letter}"] = kernel.transpose(0, 1).flatten(1)\n',
        parameter="|".join(_HALVES),
    ),
    Change(
        "folded",
        "second norms of the blocks are loaded from the first",
        'f"{name}.bn{number}"',
        'f"{name}.bn1"',
        parameter="|".join(
            f"{block}_b_{kind}"
            for block in _BLOCKS
            for kind in ("gain", "shift", "mean", "var")
        ),
    ),
    Change(
        "folded",
        "momentum is the share that is kept",
        "SPEED = 0.03",
        "SPEED = 0.97",
        parameter="|".join(
            f"{norm}_{kind}" for norm in _NORMS for kind in ("mean", "var")
        ),
        at='bag[key + "_mean"].lerp_(|bag[key + "_var"].lerp_(',
    ),
    Change(
        "folded",
        "gate sees what goes into the block",
        "s = gate(bag, key, y)",
        "s = gate(bag, key, x)",
        at="s = x.mean((2, 3))",
    ),
    Change(
        "folded",
        "new channels of the skip come first",
        "torch.cat([kept, zeros], 1)",
        "torch.cat([zeros, kept], 1)",
    ),
    Change(
        "folded",
        "corners are aligned",
        "        near = i // 2\n"
        "        far = near - 1 if i % 2 == 0 else near + 1\n"
        "        matrix[i, near] += 0.75\n"
        "        matrix[i, min(max(far, 0), size - 1)] += 0.25\n",
        "        near, rest = divmod(i * (size - 1), 2 * size - 1)\n"
        "        part = rest / (2 * size - 1)\n"
        "        matrix[i, near] += 1 - part\n"
        "        matrix[i, min(near + 1, size - 1)] += part\n",
        at="return doubling(x, h) @ x @|both = [smooth_up(",
    ),
    Change(
        "folded",
        "sharpness left out of the gradient of the place",
        "return SHARPNESS * p * (pull - mean_pull), None",
        "return p * (pull - mean_pull), None",
        at="place = ExpectedPlace.apply(",
    ),
    Change(
        "folded",
        "inner derivative of the logarithm forgotten",
        "BEND / (CURVE + size), 1.0)",
        "BEND / (1 + size / CURVE), 1.0)",
        at="return g * weight[:, None] * slope|Wing.apply(",
    ),
    Change(
        "folded",
        "wing loss is divided by images, not by points that are seen",
        "heat_total / count, wing_total / count",
        'heat_total / count, wing_total / len(batch["visible"])',
    ),
    Change(
        "folded",
        "weights of two losses exchanged",
        "0.2 * wing_loss + 0.5 * seen_loss",
        "0.5 * wing_loss + 0.2 * seen_loss",
    ),
    Change(
        "folded",
        "no look ahead",
        "torch._foreach_add_(params, ahead, alpha=-rate)",
        'torch._foreach_add_(params, group["speed"], alpha=-rate)',
        phase="optimizer",
    ),
    Change(
        "folded",
        "rate is that of the next step",
        "cos(pi * self.time / self.end / 2)",
        "cos(pi * (self.time + 1) / self.end / 2)",
        phase="optimizer",
    ),
    Change(
        "folded",
        "speed has the rate of its time in it",
        '            torch._foreach_add_(group["speed"], grads)\n'
        '            ahead = torch._foreach_add(grads, group["speed"], alpha=0.9)\n'
        "            torch._foreach_add_(params, ahead, alpha=-rate)\n",
        "            grads = torch._foreach_mul(grads, rate)\n"
        '            torch._foreach_add_(group["speed"], grads)\n'
        '            ahead = torch._foreach_add(grads, group["speed"], alpha=0.9)\n'
        "            torch._foreach_sub_(params, ahead)\n",
        phase="optimizer",
        steps=2,
    ),
]
