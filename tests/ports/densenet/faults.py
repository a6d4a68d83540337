"""Faulty ports of the small DenseNet."""

from ..bank import Change

_BLOCKS = [f"conv{block}_block{i}" for block in (2, 3) for i in (1, 2, 3)]
_NORMS = (
    "conv1_bn",
    "pool2_bn",
    "bn",
    *(f"{block}_{i}_bn" for block in _BLOCKS for i in (0, 1)),
)
_VARIANCES = "|".join(f"{norm}.moving_variance" for norm in _NORMS)
_MEANS = "|".join(f"{norm}.moving_mean" for norm in _NORMS)
_MOVES_VARIANCE = "self.moving_variance.copy_(|self.moving_variance * keep"
_LOSSES = "main = SoftmaxWithLoss.apply(|aux = SoftmaxWithLoss.apply("

FAULTS = [
    Change(
        "keras_style",
        "kernel's height and width exchanged",
        "(2, 3, 1, 0))}",
        "(3, 2, 1, 0))}",
        parameter="|".join(
            ["conv1_conv.kernel", *(f"{block}_2_conv.kernel" for block in _BLOCKS)]
        ),
    ),
    Change(
        "keras_style",
        "default epsilon of the layer",
        "self.epsilon = 1e-5",
        "self.epsilon = 1e-3",
        at="inv = torch.rsqrt(",
    ),
    Change(
        "keras_style",
        "momentum as the other library has it",
        "self.momentum = 0.9",
        "self.momentum = 0.1",
        parameter=f"{_MEANS}|{_VARIANCES}",
        at=f"self.moving_mean.copy_(|{_MOVES_VARIANCE}",
    ),
    Change(
        "keras_style",
        "moving variance is biased",
        "sample_variance = variance * (count / (count - 1))",
        "sample_variance = variance",
        parameter=_VARIANCES,
        at=_MOVES_VARIANCE,
    ),
    Change(
        "keras_style",
        "new channels come before the old",
        "torch.cat([x, x1], dim=-1)",
        "torch.cat([x1, x], dim=-1)",
    ),
    Change(
        "keras_style",
        "first convolution padded as SAME",
        "x = zero_padding(image, 1, 1)",
        "x = zero_padding(image, 0, 1)",
        at="return nn.functional.pad(x, (0, 0, before|y = nn.functional.conv2d("
        "|x = self.conv1_conv(x)",
    ),
    Change(
        "keras_style",
        "zeros outside are averaged too",
        "return total / count",
        "return total / size**2",
    ),
    Change(
        "keras_style",
        "no activation behind the last norm",
        "        x = torch.relu(x)\n",
        "",
        at="x = self.bn(x)|x = global_average_pooling(x)|return torch.mean(x, dim=(1, 2))",
        reference="x = F.relu(self.norm5(x))",
    ),
    Change(
        "keras_style",
        "gradient does not flow through the squeeze",
        "squeezed = global_average_pooling(x)",
        "squeezed = global_average_pooling(x.detach())",
        at="return torch.mean(x, dim=(1, 2))|return torch.cat([x, x1]",
    ),
    Change(
        "keras_style",
        "pixels from -1 to 1, as another mode of the preprocessing has them",
        "return (x - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)",
        "return x * 2.0 - 1.0",
        reference="return net((image - mean) / std)",
    ),
    Change(
        "keras_style",
        "weighted losses are divided by the number of images",
        "torch.sum(each) / torch.sum(class_weight[label])",
        "torch.sum(each) / label.shape[0]",
    ),
    Change(
        "keras_style",
        "norms and biases decay",
        '{"params": others}]',
        '{"params": others, "l2": 1e-3}]',
        phase="optimizer",
    ),
    Change(
        "keras_style",
        "step ahead is kept as the velocity",
        "                    variable.add_(self.momentum * velocity - rate * gradient)\n",
        "                    velocity = self.momentum * velocity - rate * gradient\n"
        '                    state["velocity"] = velocity\n'
        "                    variable.add_(velocity)\n",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "caffe_style",
        "first kernels stay RGB",
        'state["conv0.weight"].flip(1).flatten(1)',
        'state["conv0.weight"].flatten(1)',
        parameter="conv1_w",
        at="data = image.flip(1)",
    ),
    Change(
        "caffe_style",
        "channels last in the rows of the 3 x 3 kernels",
        'put_conv(f"{target}_{i}_x2", source + ".conv2")',
        'blobs[f"{target}_{i}_x2_w"] = '
        'state[source + ".conv2.weight"].permute(0, 2, 3, 1).flatten(1)',
        parameter="|".join(
            f"conv{block}_{i}_x2_w" for block in (2, 3) for i in (0, 1, 2)
        ),
    ),
    Change(
        "caffe_style",
        "normalised with the variance of a sample",
        "var = centred.square().mean((1, 2, 3), keepdim=True)",
        "var = bottom.var((1, 2, 3), keepdim=True)",
        at="inv_std = 1 / (var|top = centred * inv_std|normed, mean, var = BatchNorm.apply(",
    ),
    Change(
        "caffe_style",
        "backward of the norm takes the variance for a constant",
        "(top_diff - common - top * along) * inv_std",
        "(top_diff - common) * inv_std",
        at="normed, mean, var = BatchNorm.apply(",
    ),
    Change(
        "caffe_style",
        "gradient passes where the normed value is positive, not the shifted",
        "masked_fill(top <= 0, 0)",
        "masked_fill(bottom <= 0, 0)",
        at="scale_diff = |shift_diff = |return top_diff * scale"
        "|return ScaleRelu.apply(",
    ),
    Change(
        "caffe_style",
        "earlier channels get no gradient from later layers of the block",
        "x = top[:used]\n",
        "x = top[:used].detach()\n",
        at="top[:used] = bottom|top[used : used + GROWTH] = x"
        '|x = self.conv(f"{name}_{i}_x1"',
    ),
    Change(
        "caffe_style",
        "overlapping columns overwrite each other in backward",
        "padded[:, :, down, across] += col[:, k]",
        "padded[:, :, down, across] = col[:, k]",
        at="bottom_diff = col2im(|return col2im(|return Convolution.apply("
        "|x = MaxPool.apply(",
    ),
    Change(
        "caffe_style",
        "cut windows are divided by the size of whole ones",
        "pool_size = torch.outer(high, wide)",
        "pool_size = torch.full((len(high), len(wide)), 4.0)",
        at="return top / pool_size|x = AvePool.apply(x)",
    ),
    Change(
        "caffe_style",
        "backward of the pooling hands on the sum",
        "share = top_diff / pool_size",
        "share = top_diff",
        at="spread = share.|x = AvePool.apply(x)",
    ),
    Change(
        "caffe_style",
        "an image's weight is that of its label for all classes",
        "target = target * class_weight[:, None]",
        "target = target * class_weight[label]",
        at=_LOSSES,
    ),
    Change(
        "caffe_style",
        "backward of the loss as if targets came to one",
        "log_prob.exp() * target.sum(0) - target",
        "log_prob.exp() - target",
        at=f"return score_diff * (top_diff|{_LOSSES}",
    ),
    Change(
        "caffe_style",
        "backward of the loss without its weight",
        "return score_diff * (top_diff / normalizer), None",
        "return score_diff / normalizer, None",
        at="aux = SoftmaxWithLoss.apply(|return main + 0.4 * aux",
    ),
    Change(
        "caffe_style",
        "history before the step is the same tensor as after it",
        "before = history.clone()",
        "before = history",
        phase="optimizer",
    ),
]
