"""Faulty ports of the RCAN."""

from ..bank import Change


def _keras_kernels():
    """Return the names of all kernels of convolutions in the Keras port."""
    names = ["shallow", "deep", "rgb_3x", "rgb_6x"]
    names += ["upsample_3x.conv", "upsample_2x.conv"]
    for i in (0, 1):
        names.append(f"groups.{i}.conv")
        names += [f"groups.{i}.blocks.{j}.conv_{k}" for j in range(3) for k in "ab"]
    return "|".join(name + ".kernel" for name in names)


def _stacked(names):
    """Return the names of arrays of the stacked blocks in the Equinox port."""
    return "|".join(f"groups.blocks.{name}" for name in names.split())


_EINSUM = 'return torch.einsum("ihwyx,...iyx->...hw", windows, rhs)'
_CONV_EQUINOX = f"|return conv_general_dilated(x, self.weight)|{_EINSUM}"

FAULTS = [
    Change(
        "keras_style",
        "kernels have columns before rows",
        "    return weight.permute(2, 3, 1, 0)\n",
        "    return weight.permute(3, 2, 1, 0)\n",
        parameter=_keras_kernels(),
        at="y = nn.functional.conv2d(x, torch.permute(filters"
        "|return conv2d(inputs, self.kernel)",
    ),
    Change(
        "keras_style",
        "biases in front of depth_to_space keep the order of the pixel shuffle",
        "layer.conv.bias.copy_(blocks_first(bias, layer.block_size))",
        "layer.conv.bias.copy_(bias)",
        parameter="upsample_3x.conv.bias|upsample_2x.conv.bias",
        at="return conv2d(inputs, self.kernel) + self.bias"
        "|x = depth_to_space(self.conv(inputs), self.block_size)",
    ),
    Change(
        "keras_style",
        "mean colour is read as blue, green and red",
        'copy_(checkpoint["add_mean.bias"])',
        'copy_(checkpoint["add_mean.bias"].flip(0))',
        parameter="normalization.mean",
        at="return inputs - self.mean|return inputs + self.mean",
    ),
    Change(
        "keras_style",
        "channels change slower than places where depth becomes space",
        "    x = torch.reshape(x, (batch, height, width, block_size, block_size, depth))\n"
        "    x = torch.permute(x, (0, 1, 3, 2, 4, 5))\n",
        "    x = torch.reshape(x, (batch, height, width, depth, block_size, block_size))\n"
        "    x = torch.permute(x, (0, 1, 4, 2, 5, 3))\n",
        at="return torch.reshape(x, (batch, height * block_size"
        "|x = depth_to_space(self.conv(inputs), self.block_size)",
    ),
    Change(
        "keras_style",
        "squeeze is a mean over the pictures of the batch, too",
        "return torch.mean(inputs, dim=(1, 2), keepdim=True)",
        "return torch.mean(inputs, dim=(0, 1, 2), keepdim=True)",
    ),
    Change(
        "keras_style",
        "gates are hard sigmoids",
        "    return 1.0 / (1.0 + torch.exp(-x))\n",
        "    return torch.clamp(0.2 * x + 0.5, 0.0, 1.0)\n",
        at="return self.activation(torch.matmul(",
    ),
    Change(
        "keras_style",
        "skip of a group starts behind its first block",
        "        short_skip = inputs\n"
        "        x = inputs\n"
        "        for block in self.blocks:\n"
        "            x = block(x)\n",
        "        x = short_skip = self.blocks[0](inputs)\n"
        "        for block in self.blocks[1:]:\n"
        "            x = block(x)\n",
        at="return torch.add(self.conv(x), short_skip)",
        reference="return x + self.conv(res)",
    ),
    Change(
        "keras_style",
        "sum of the skip and the block is scaled, not the block alone",
        "return torch.add(x * RESIDUAL_SCALING, inputs)",
        "return torch.add(x, inputs) * RESIDUAL_SCALING",
    ),
    Change(
        "keras_style",
        "what is below zero has the wrong sign",
        "neg = -self.alpha * torch.relu(-inputs)",
        "neg = self.alpha * torch.relu(-inputs)",
        at="return pos + neg",
    ),
    Change(
        "keras_style",
        "mean colour is not added to the picture of the first stage",
        "coarse = self.normalization.invert(self.rgb_3x(x))",
        "coarse = self.rgb_3x(x)",
        reference='"x3": self.add_mean(self.tail1(x3))',
    ),
    Change(
        "keras_style",
        "borders are symmetric, so that the last pixel comes twice",
        "first, last = torch.narrow(x, axis, 1, 1), torch.narrow(x, axis, size - 2, 1)",
        "first, last = torch.narrow(x, axis, 0, 1), torch.narrow(x, axis, size - 1, 1)",
        at="return torch.cat((first, x, last), dim=axis)"
        "|padded = pad_reflect(pad_reflect(|edges = [torch.sum(patches * kernel",
    ),
    Change(
        "keras_style",
        "derivatives are smoothed by the kernel of Prewitt",
        "smooth, slope = torch.tensor([1.0, 2.0, 1.0])",
        "smooth, slope = torch.tensor([1.0, 1.0, 1.0])",
        at="kernels = [torch.outer(slope, smooth)|edges = [torch.sum(patches * kernel",
    ),
    Change(
        "keras_style",
        "sum is divided by the number of all values, not by the weights",
        "return total / torch.sum(sample_weight)",
        "return total / values.numel()",
    ),
    Change(
        "equinox_style",
        "blocks come before groups in the stacked arrays",
        '    blocks = [load_block(state, f"{name}.body.{i}") for i in range(num_blocks)]\n',
        "    group = int(name[-1])\n"
        "    places = [divmod(2 * i + group, 3) for i in range(num_blocks)]\n"
        '    blocks = [load_block(state, f"body.{g}.body.{i}") for g, i in places]\n',
        parameter=_stacked(
            "conv_in.weight conv_in.bias conv_out.weight conv_out.bias"
            " gate.squeeze.weight gate.squeeze.bias gate.excite.weight gate.excite.bias"
        ),
        at=_EINSUM
        + "|return conv_general_dilated(x, self.weight) + self.bias"
        + "|return self.weight @ x + self.bias|h = self.conv_out(F.relu("
        "|hidden = F.relu(self.squeeze(|return torch.sigmoid(self.excite("
        "|h = scan(lambda carry, block|carry = f(carry, tree_map(",
    ),
    Change(
        "equinox_style",
        "both convolutions of a block are read from the first",
        'conv_out=load_conv(state, name + ".conv2")',
        'conv_out=load_conv(state, name + ".conv1")',
        parameter=_stacked("conv_out.weight conv_out.bias"),
        at=_EINSUM + "|return conv_general_dilated(x, self.weight) + self.bias"
        "|h = self.conv_out(F.relu(self.conv_in(x)))",
    ),
    Change(
        "equinox_style",
        "matrices of the gates are reshaped where they should be transposed",
        "    return Linear(weight[:, :, 0, 0], bias)\n",
        "    return Linear(weight.reshape(weight.shape[1], -1).T, bias)\n",
        parameter=_stacked("gate.squeeze.weight gate.excite.weight"),
        at="return self.weight @ x + self.bias|hidden = F.relu(self.squeeze("
        "|return torch.sigmoid(self.excite(hidden))",
    ),
    Change(
        "equinox_style",
        "windows begin at the pixel, all padding is behind",
        "    before = [(size - 1) // 2 for size in rhs.shape[-2:]]\n"
        "    after = [size // 2 for size in rhs.shape[-2:]]\n",
        "    before = [0 for size in rhs.shape[-2:]]\n"
        "    after = [size - 1 for size in rhs.shape[-2:]]\n",
        at="lhs = F.pad(lhs, (before[1]|windows = lhs.unfold(1" + _CONV_EQUINOX,
    ),
    Change(
        "equinox_style",
        "rows of the blocks come before rows of the small picture",
        "return x.permute(0, 3, 1, 4, 2).reshape(c, h * r1, w * r2)",
        "return x.permute(0, 1, 3, 2, 4).reshape(c, h * r1, w * r2)",
        at="x = rearrange_to_space(self.conv(x))",
    ),
    Change(
        "equinox_style",
        "no activation between squeeze and excitation",
        "hidden = F.relu(self.squeeze(statistics))",
        "hidden = self.squeeze(statistics)",
        at="return torch.sigmoid(self.excite(hidden))",
        reference="y = self.conv_du(",
    ),
    Change(
        "equinox_style",
        "no gradient goes through the statistics of the gate",
        "statistics = torch.mean(x, dim=(1, 2))",
        "statistics = torch.mean(x, dim=(1, 2)).detach()",
        reference="y = self.conv_du(self.avg_pool(x))",
    ),
    Change(
        "equinox_style",
        "gate is computed of what goes into the block",
        "h = h * self.gate(h)[:, None, None]",
        "h = h * self.gate(x)[:, None, None]",
        at="statistics = torch.mean(x, dim=(1, 2))",
    ),
    Change(
        "equinox_style",
        "long skip is missing",
        "features = shallow + self.trunk(deep)",
        "features = self.trunk(deep)",
        reference="res = x + self.body_conv(res)",
    ),
    Change(
        "equinox_style",
        "epsilon under the root is not squared",
        "return torch.sqrt(squared_error + eps**2)",
        "return torch.sqrt(squared_error + eps)",
    ),
    Change(
        "equinox_style",
        "target of the middle size is every second pixel",
        "    target_3, weight_3 = shrink(high, known, 2), reduce_cells(known, 2)\n",
        "    target_3, weight_3 = high[:, ::2, ::2], reduce_cells(known, 2)\n",
        at="charbonnier((x3 - target_3) ** 2)",
        reference="mean = F.interpolate(x * known, size",
    ),
    Change(
        "equinox_style",
        "mask of the edges grows where it should shrink",
        "    x = x[:, :-2] * x[:, 1:-1] * x[:, 2:]\n"
        "    return x[:, :, :-2] * x[:, :, 1:-1] * x[:, :, 2:]\n",
        "    x = torch.maximum(torch.maximum(x[:, :-2], x[:, 1:-1]), x[:, 2:])\n"
        "    return torch.maximum(torch.maximum(x[:, :, :-2], x[:, :, 1:-1]), x[:, :, 2:])\n",
        at="masked_sums(values, erode(known))|return torch.sum(values * weight)",
    ),
    Change(
        "equinox_style",
        "each derivative has a loss of its own",
        "values = charbonnier(dy**2 + dx**2)",
        "values = charbonnier(dy**2) + charbonnier(dx**2)",
        at="return torch.sqrt(squared_error + eps**2)",
        reference="length = torch.sqrt(diff.square().sum(dim=2)",
    ),
]
