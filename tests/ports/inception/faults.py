"""Faulty ports of the inception network."""

from ..bank import Change

_UNITS = (
    "conv1/5x5_s2 conv2/3x3_reduce conv2/3x3 loss1/conv inception_3b/7x7_reduce "
    "inception_3b/1x7 inception_3b/7x1"
).split()
_UNITS += [
    f"inception_{block}/{branch}"
    for block in ("3a", "3b", "4a")
    for branch in ("1x1", "3x3_reduce", "3x3", "pool_proj")
]
_UNITS += [
    f"inception_{block}/{branch}"
    for block in ("3a", "4a")
    for branch in ("5x5_reduce", "5x5_a", "5x5_b")
]
_MIXED = ("mixed_3a", "mixed_3b", "mixed_4a")

FAULTS = [
    Change(
        "caffe_style",
        "first kernel stays in the order of R, G, B",
        "weight = weight.flip(1)  # B, G, R",
        "weight = weight.clone()",
        parameter="layers.conv1/5x5_s2.blobs.0",
        at="top = torch.matmul(weight.flatten(1), col)",
    ),
    Change(
        "caffe_style",
        "blobs of Scale in the order of shift and scale",
        '[state[bn + "weight"], state[bn + "bias"]]',
        '[state[bn + "bias"], state[bn + "weight"]]',
        parameter="|".join(
            f"layers.{unit}/scale.blobs.{i}" for unit in _UNITS for i in (0, 1)
        ),
        at="return bottom * scale.view(",
    ),
    Change(
        "caffe_style",
        "mean values in the order of R, G, B",
        "(103.53, 116.28, 123.675)",
        "(123.675, 116.28, 103.53)",
        at='return (datum.float() - mean_value) * p["scale"]|mean_value = torch.tensor(',
    ),
    Change(
        "caffe_style",
        "the picture is mirrored before it is cut out",
        "    column = torch.arange(width)\n"
        "    column = torch.where(mirror[:, None], width - 1 - column, column)\n"
        "    column = corner[:, 1:] + column\n",
        "    column = corner[:, 1:] + torch.arange(width)\n"
        "    last = image.shape[3] - 1\n"
        "    column = torch.where(mirror[:, None], last - column, column)\n",
        at="datum = image[item, bgr",
    ),
    Change(
        "caffe_style",
        "alpha is not divided by the size of the window",
        "scale = 1 + alpha / size * squares",
        "scale = 1 + alpha * squares",
        at="return LRNFunction.apply(",
    ),
    Change(
        "caffe_style",
        "factor of two left out of the gradient across channels",
        "across = 2 * alpha * beta / size * bottom * ratio",
        "across = alpha * beta / size * bottom * ratio",
        at="return LRNFunction.apply(",
    ),
    Change(
        "caffe_style",
        "mean taken for constant in the gradient of the norm",
        "        diff = diff + top_diff.mean((0, 2, 3), keepdim=True)\n",
        "",
        at="return (top_diff - diff) / deviation, None|BatchNormFunction.apply(",
    ),
    Change(
        "caffe_style",
        "projection of the pool stands before 5x5 in the last block",
        '            "inception_4a/5x5_b",\n            "inception_4a/pool_proj",\n',
        '            "inception_4a/pool_proj",\n            "inception_4a/5x5_b",\n',
        at="return torch.cat(bottoms, dim=1)",
    ),
    Change(
        "caffe_style",
        "average over the whole window where it hangs over the edge",
        "return seen.sum(-1) / pool_size",
        "return seen.sum(-1) / kernel**2",
    ),
    Change(
        "caffe_style",
        "auxiliary loss has the default weight",
        '"loss1/loss": 0.3',
        '"loss1/loss": 1.0',
        at='LOSS_WEIGHT["loss1/loss"] * loss1',
    ),
    Change(
        "caffe_style",
        "share of a smoothed label goes to the other classes only",
        '    label = torch.full_like(output["logits"], LABEL_SMOOTHING / classes)\n'
        '    label[torch.arange(len(label)), batch["label"]] += 1 - LABEL_SMOOTHING\n',
        "    rest = LABEL_SMOOTHING / (classes - 1)\n"
        '    label = torch.full_like(output["logits"], rest)\n'
        '    label[torch.arange(len(label)), batch["label"]] = 1 - LABEL_SMOOTHING\n',
        at="return -(label * log_prob).sum()|SoftmaxWithLoss.apply(",
    ),
    Change(
        "caffe_style",
        "history has the rate in it, as Caffe's solvers do",
        '        self.history[i].mul_(self.solver["momentum"]).add_(step)\n'
        "        self.learned[i].grad.copy_(self.history[i]).mul_(rate)\n",
        '        self.history[i].mul_(self.solver["momentum"]).add_(step, alpha=rate)\n'
        "        self.learned[i].grad.copy_(self.history[i])\n",
        phase="optimizer",
        steps=3,
    ),
    Change(
        "caffe_style",
        "blobs of Scale and biases decay too, for they have no decay_mult",
        "decay_mult.append(float(blob.ndim > 1))",
        "decay_mult.append(1.0)",
        phase="optimizer",
    ),
    Change(
        "jaxish",
        "height and width of the kernels exchanged",
        'torch.permute(state[name + ".conv.weight"], (2, 3, 1, 0))',
        'torch.permute(state[name + ".conv.weight"], (3, 2, 1, 0))',
        parameter="|".join(
            [f"params.conv_{i}.kernel" for i in (1, 3)]
            + [
                f"params.{block}.{unit}.kernel"
                for block in _MIXED
                for unit in ("square", "far_0", "far_1")
            ]
        ),
        at="return torch.permute(F.conv2d(lhs, rhs|rhs = torch.permute(kernel",
    ),
    Change(
        "jaxish",
        "hidden layer of the auxiliary head keeps rows of channels first",
        "    kernel = torch.permute(kernel, (1, 2, 0, 3))\n",
        "",
        parameter="params.aux.hidden.kernel",
        at="x = torch.relu(dense(p|return torch.einsum("
        '"ni,io->no"|kernel = torch.reshape(hidden|hidden["kernel"] = torch.reshape(kernel',
    ),
    Change(
        "jaxish",
        "branches are joined in another order than they are split",
        '"entry": unit(point, square + ".0", far + ".0")',
        '"entry": unit(point, far + ".0", square + ".0")',
        parameter="|".join(
            f"{dict_of}.{block}.entry.{name}"
            for block in _MIXED
            for dict_of, names in (
                ("params", ("kernel", "scale", "bias")),
                ("batch_stats", ("mean", "var")),
            )
            for name in names
        ),
        at='y, new["entry"] = conv_bn(|point, square, far = torch.split(',
    ),
    Change(
        "jaxish",
        "pictures are mirrored upside down",
        "torch.flip(x, (2,))",
        "torch.flip(x, (1,))",
    ),
    Change(
        "jaxish",
        "zeros of SAME around the input of the first kernel",
        "x, strides=(2, 2), padding=((2, 2), (2, 2))",
        'x, strides=(2, 2), padding="SAME"',
        at="return F.pad(x, (0, 0, left, right, above, below)"
        "|x = padded(x, kernel.shape[:2]|return torch.permute(F.conv2d(lhs, rhs",
    ),
    Change(
        "jaxish",
        "last row and column left out where the map is halved again",
        "strides=(2, 2), padding=((0, 1), (0, 1))",
        'strides=(2, 2), padding="VALID"',
        at="y = F.max_pool2d(torch.permute(x",
    ),
    Change(
        "jaxish",
        "size of the window taken for its radius",
        "<= size // 2",
        "<= size",
        at='sums = torch.einsum("nhwc,cd->nhwd"',
    ),
    Change(
        "jaxish",
        "average over the pixels of the map only, as in TensorFlow",
        'padding="SAME", count_include_pad=True',
        'padding="SAME", count_include_pad=False',
        at="return total / patches(ones",
    ),
    Change(
        "jaxish",
        "running statistics normalise in training too",
        "    mul = torch.rsqrt(var + epsilon)",
        '    mean, var = stats["mean"], stats["var"]\n'
        "    mul = torch.rsqrt(var + epsilon)",
        at="mul = torch.rsqrt(var|return (x - mean) * mul",
    ),
    Change(
        "jaxish",
        "batch statistics carry no gradient",
        "    count = x.numel() // x.shape[-1]\n",
        "    count = x.numel() // x.shape[-1]\n"
        "    mean, var = mean.detach(), var.detach()\n",
        at="mean = torch.mean(x, dim=axes)|var = torch.mean(torch.square(x - mean)"
        "|return (x - mean) * mul|mul = torch.rsqrt(var",
    ),
    Change(
        "jaxish",
        "loss of the auxiliary head is not smoothed",
        'aux = softmax_cross_entropy(output["aux"], labels)',
        'one_hot = smooth_labels(batch["label"], alpha=0.0)\n'
        '    aux = softmax_cross_entropy(output["aux"], one_hot)',
        at="return torch.logsumexp(logits",
    ),
    Change(
        "jaxish",
        "epsilon under the root, as is the default there",
        "u / (torch.sqrt(v) + eps)",
        "u * torch.rsqrt(v + eps)",
        phase="optimizer",
    ),
    Change(
        "jaxish",
        "rate falls at every step, not in stairs",
        "staircase=True",
        "staircase=False",
        phase="optimizer",
        steps=2,
    ),
]
