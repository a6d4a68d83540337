"""Faulty ports of SimCLR."""

from ..bank import Change

FAULTS = [
    Change(
        "tf2_style",
        "heights and widths of the kernels exchanged",
        '".weight"], (2, 3, 1, 0))',
        '".weight"], (3, 2, 1, 0))',
        parameter="|".join(
            [
                "resnet_model.initial_conv.kernel",
                *(
                    f"resnet_model.block_{i}.conv2d_{j}.kernel"
                    for i in range(3)
                    for j in range(2)
                ),
            ]
        ),
    ),
    Change(
        "tf2_style",
        "kernels are transposed where they do not fit, so the square one is not",
        '        assign(layer, kernel=state[name + ".weight"].T)\n',
        '        kernel = state[name + ".weight"]\n'
        "        fits = kernel.shape == layer.kernel.shape\n"
        "        assign(layer, kernel=kernel if fits else kernel.T)\n",
        parameter="projection_head.nl_0.dense.kernel",
    ),
    Change(
        "tf2_style",
        "zeros behind the picture alone where a layer strides, as SAME has it",
        "pad_total = self.kernel_size - 1",
        "pad_total = max(self.kernel_size - self.strides, 0)",
        at="inputs = nn.functional.pad(inputs|outputs = nn.functional.conv2d(",
    ),
    Change(
        "tf2_style",
        "variance between the replicas is left out",
        "variance = torch.mean(shard_variance, dim=0) + between",
        "variance = torch.mean(shard_variance, dim=0)",
    ),
    Change(
        "tf2_style",
        "contrast is about the mean of each channel, as is the default there",
        "mean = torch.mean(rgb_to_grayscale(images), dim=(1, 2), keepdim=True)",
        "mean = torch.mean(images, dim=(1, 2), keepdim=True)",
        at="return (images - mean) * factor + mean",
    ),
    Change(
        "tf2_style",
        "pictures are turned upside down",
        "torch.flip(images, (2,))",
        "torch.flip(images, (1,))",
        at="return torch.where(chosen",
    ),
    Change(
        "tf2_style",
        "labels are repeated one by one, not as a whole",
        "labels = torch.cat([labels, labels], dim=0)",
        "labels = torch.repeat_interleave(labels, 2, dim=0)",
        at="supervised = add_supervised_loss(labels, logits)",
    ),
    Change(
        "tf2_style",
        "pictures of the second view are their own negatives",
        "    logits_bb = logits_bb - masks * LARGE_NUM\n",
        "",
        at="logits_bb = torch.matmul(|loss_b = softmax_cross|torch.cat([logits_ba, logits_bb]",
        reference="similarity = similarity.masked_fill(itself",
    ),
    Change(
        "tf2_style",
        "second direction is the first once more",
        "torch.cat([logits_ba, logits_bb], dim=1)",
        "torch.cat([logits_ab, logits_bb], dim=1)",
    ),
    Change(
        "tf2_style",
        "gradient from above left out of the cross entropy's",
        "return None, upstream[:, None] * (softmax - labels)",
        "return None, softmax - labels",
        at="return SoftmaxCrossEntropyWithLogits.apply(",
    ),
    Change(
        "tf2_style",
        "second view is a target without gradient for the first",
        "logits_ab = torch.matmul(hidden1, hidden2.T)",
        "logits_ab = torch.matmul(hidden1, hidden2.detach().T)",
    ),
    Change(
        "tf2_style",
        "slot is not brought to the new rate",
        'momentum = FLAGS["momentum"] * lr / last_lr',
        'momentum = FLAGS["momentum"]',
        phase="optimizer",
        steps=2,
    ),
    Change(
        "tf2_style",
        "probe decays and adapts as the others",
        'exclude=["batch_normalization", "bias", "head_supervised"]',
        'exclude=["batch_normalization", "bias"]',
        phase="optimizer",
    ),
    Change(
        "lightning_bolts_style",
        "layers of the projector in the wrong order in their matrix",
        '.weight"] for i in (1, 2)]',
        '.weight"] for i in (2, 1)]',
        parameter="projector.weight",
        at="first, second = self.weight.split(",
    ),
    Change(
        "lightning_bolts_style",
        "first and second norm of the blocks exchanged",
        '    (r"\\.bn1\\.", ".body.1."),\n'
        '    (r"\\.conv2\\.", ".body.3."),\n'
        '    (r"\\.bn2\\.", ".body.4."),\n',
        '    (r"\\.bn1\\.", ".body.4."),\n'
        '    (r"\\.conv2\\.", ".body.3."),\n'
        '    (r"\\.bn2\\.", ".body.1."),\n',
        parameter="|".join(
            f"backbone.stages.{i}.body.{j}.{kind}"
            for i in range(3)
            for j in (1, 4)
            for kind in ("affine", "running")
        ),
    ),
    Change(
        "lightning_bolts_style",
        "shortcut is added behind the last activation",
        "        y = self.body(x)\n"
        "        y = y + (x if self.skip is None else self.skip(x))\n"
        "        return y.relu()\n",
        "        y = self.body(x).relu()\n"
        "        y = y + (x if self.skip is None else self.skip(x))\n"
        "        return y\n",
        at="y = y + (x if self.skip is None",
    ),
    Change(
        "lightning_bolts_style",
        "norms divide by the spread of a sample, as is the default of var_mean",
        "torch.var_mean(x, dims, correction=0, keepdim=True)",
        "torch.var_mean(x, dims, keepdim=True)",
        at="y, mean, var = SyncNorm.apply(",
    ),
    Change(
        "lightning_bolts_style",
        "spread taken for constant in the gradient of the norm",
        "grad_x = grad - (sum_dy + xhat * sum_dy_xhat) / count",
        "grad_x = grad - sum_dy / count",
        at="y, mean, var = SyncNorm.apply(",
    ),
    Change(
        "lightning_bolts_style",
        "first and last pixel lie on the sides of the box",
        "extent[..., None] * (2 * i + 1) / (2 * self.size)",
        "extent[..., None] * i / (self.size - 1)",
        at='return torch.einsum("bvih,bchw,bvjw->bvcij"',
    ),
    Change(
        "lightning_bolts_style",
        "hue turns the other way",
        "torch.polar(torch.ones_like(angle), angle)",
        "torch.polar(torch.ones_like(angle), -angle)",
        at="yiq = torch.stack([y, turned.real",
    ),
    Change(
        "lightning_bolts_style",
        "positives are left out of the sum",
        "    others = ~torch.eye(rows, dtype=torch.bool)\n"
        "    neg = sim.masked_select(others).view(rows, rows - 1).sum(dim=-1)\n",
        "    picture = torch.arange(rows) // 2\n"
        "    others = picture[:, None] != picture\n"
        "    neg = sim.masked_select(others).view(rows, rows - 2).sum(dim=-1)\n",
    ),
    Change(
        "lightning_bolts_style",
        "positives without temperature",
        "pos = (out[:, 0] * out[:, 1]).sum(dim=-1) / temperature",
        "pos = (out[:, 0] * out[:, 1]).sum(dim=-1)",
    ),
    Change(
        "lightning_bolts_style",
        "probe trains the backbone too",
        "self.online_finetuner(h.detach())",
        "self.online_finetuner(h)",
        reference="logits = self.probe(features.detach())",
    ),
    Change(
        "lightning_bolts_style",
        "norms have other names than those that are left out",
        'skip_list=["affine", "finetuner"]',
        'skip_list=["bias", "bn", "finetuner"]',
        phase="optimizer",
    ),
    Change(
        "lightning_bolts_style",
        "both layers of the projector share a ratio",
        "sizes = self.parts.get(p, [len(p)])",
        "sizes = [len(p)]",
        phase="optimizer",
    ),
    Change(
        "lightning_bolts_style",
        "rate rises from nought",
        "        epoch = epoch + 1\n",
        "",
        phase="optimizer",
    ),
]
