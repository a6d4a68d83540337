"""Faulty ports of the Gated PixelCNN."""

from ..bank import Change


def _bundles(*names, depth=3):
    """Return names in each block of the first port."""
    return "|".join(
        f"pixel_cnn/~/block_{i}/{name}" for i in range(depth) for name in names
    )


def _layers(*names, depth=3):
    """Return names in each layer of the second port."""
    return "|".join(f"layers.{i}.{name}" for i in range(depth) for name in names)


FAULTS = [
    Change(
        "haiku_style",
        "kernels of the upper stack have columns before rows",
        '"w": hwio(state[f"{old}.v_conv.weight"])',
        '"w": hwio(state[f"{old}.v_conv.weight"].mT)',
        parameter=_bundles("above_conv/w"),
        at='above = conv2d(p["w"] * above_mask(',
    ),
    Change(
        "haiku_style",
        "residual projections stay [out, in]",
        '"w": matrix(state[f"{old}.h_out.weight"])',
        '"w": state[f"{old}.h_out.weight"].flatten(1)',
        parameter=_bundles("residual/w", depth=2),
        at='residual = pointwise_b(params[f"{scope}/residual"], x)'
        '|w = p["w"] if mask is None|torch.einsum("nyxc,cd->nyxd", x, w)',
    ),
    Change(
        "haiku_style",
        "projections of the label of both stacks change places",
        'labels = [state[f"{old}.v_label.weight"], state[f"{old}.h_label.weight"]]',
        'labels = [state[f"{old}.h_label.weight"], state[f"{old}.v_label.weight"]]',
        parameter=_bundles("label_to_gates/w"),
        at='biases = context @ params[f"{scope}/label_to_gates"]["w"]'
        "|above_bias, row_bias = torch.split(",
    ),
    Change(
        "haiku_style",
        "bias between the stacks is loaded from the upper convolution",
        '"b": state[f"{old}.v_to_h.bias"]',
        '"b": state[f"{old}.v_conv.bias"]',
        parameter=_bundles("above_to_row/b"),
        at='x = x + pointwise(params[f"{scope}/above_to_row"]'
        '|torch.einsum("nyxc,cd->nyxd", x, w)',
    ),
    Change(
        "haiku_style",
        "tanh and sigmoid act on each other's half",
        "return torch.tanh(signal) * sigmoid(gate)",
        "return torch.tanh(gate) * sigmoid(signal)",
    ),
    Change(
        "haiku_style",
        "upper stack is not shifted down",
        'params[f"{scope}/above_to_row"], shift_down(above))',
        'params[f"{scope}/above_to_row"], above)',
        reference="above = F.pad(v",
    ),
    Change(
        "haiku_style",
        "row is added before the residual projection, not behind it",
        '    residual = pointwise_b(params[f"{scope}/residual"], x)\n'
        '    row = residual if kind == "a" else row + residual\n',
        '    row = x if kind == "a" else row + x\n'
        '    row = pointwise_b(params[f"{scope}/residual"], row)\n',
    ),
    Change(
        "haiku_style",
        "elu in the head before the logits",
        "    x = torch.relu(x)\n"
        '    x = pointwise_b(params["pixel_cnn/~/head/logits"], x)\n',
        "    x = nn.functional.elu(x)\n"
        '    x = pointwise_b(params["pixel_cnn/~/head/logits"], x)\n',
    ),
    Change(
        "haiku_style",
        "bias of the label is added behind the gate of the own row",
        "    x = gated_activation(x, row_bias)\n",
        "    x = gated_activation(x, torch.zeros_like(row_bias))\n"
        "    x = x + row_bias[:, None, None, : CFG.features]\n",
        at="x = x + bias[:, None, None, :]",
        reference="value, gain = (x + label",
    ),
    Change(
        "haiku_style",
        "mask of the upper stack hides the middle row",
        "seen = np.arange(size) <= size // 2",
        "seen = np.arange(size) < size // 2",
        at='above = conv2d(p["w"] * above_mask(|return torch.from_numpy(seen',
    ),
    Change(
        "haiku_style",
        "grey levels are divided by their number, not by the highest",
        "x = x * (2.0 / (CFG.levels - 1)) - 1.0",
        "x = x * (2.0 / CFG.levels) - 1.0",
    ),
    Change(
        "haiku_style",
        "bits are for a pixel, not for each of its channels",
        "torch.sum(bits, dim=(1, 2, 3)) / target[0].numel()",
        "torch.sum(bits, dim=(1, 2, 3)) / target[0, ..., 0].numel()",
    ),
    Change(
        "haiku_style",
        "learning rate falls by steps of a staircase",
        "CFG.decay_rate ** (count / CFG.transition_steps)",
        "CFG.decay_rate ** (count // CFG.transition_steps)",
        phase="optimizer",
        steps=2,
    ),
    Change(
        "paddle_style",
        "projections of the label are reshaped, not transposed",
        "return gate_first(value).t()",
        "return gate_first(value).reshape(value.shape[1], value.shape[0])",
        parameter=_layers(
            "vertical_gate.condition.weight", "horizontal_gate.condition.weight"
        ),
        at="return torch.matmul(x, self.weight)|bias = self.condition(embedded)",
    ),
    Change(
        "paddle_style",
        "horizontal kernels keep torch's order of the halves",
        '"horizontal.weight": gate_first(source["h_conv.weight"])',
        '"horizontal.weight": source["h_conv.weight"]',
        parameter=_layers("horizontal.weight"),
        at="left, here, _ = torch.split(self.weight"
        "|kernel = torch.cat([left, here * self.mask]|return F.conv2d(x, kernel)"
        "|linked + self.horizontal(h_stack)",
    ),
    Change(
        "paddle_style",
        "projection to the head stands before that to the next block",
        'parts = [source[f"h_out.{kind}"]] + parts',
        'parts = parts + [source[f"h_out.{kind}"]]',
        parameter=_layers("project.weight", "project.bias", depth=2),
        at="*out, skip = self.project(features)"
        "|y = F.conv2d(x, self.weight * self.mask, self.bias)",
    ),
    Change(
        "paddle_style",
        "vertical biases of all layers are loaded from the second block",
        '"vertical.bias": gate_first(source["v_conv.bias"])',
        '"vertical.bias": gate_first(torch_state["blocks.1.v_conv.bias"])',
        parameter="layers.0.vertical.bias|layers.2.vertical.bias",
        at="return F.conv2d(x, seen, self.bias)",
    ),
    Change(
        "paddle_style",
        "zeros beside the columns stand at the right, not at the left",
        "        x = F.pad(x, [self.reach, 0, 0, 0])\n"
        "        return F.conv2d(x, kernel)\n",
        "        x = F.pad(x, [0, self.reach, 0, 0])\n"
        "        return F.conv2d(x, kernel)\n",
        at="return F.conv2d(x, kernel)",
    ),
    Change(
        "paddle_style",
        "label biases the sigmoid only",
        "value = torch.tanh(value + value_bias)",
        "value = torch.tanh(value)",
        reference="value, gain = (x + label",
    ),
    Change(
        "paddle_style",
        "only the last layer goes to the head",
        "total = total + skip",
        "total = skip",
        reference="skips = skips + skip",
    ),
    Change(
        "paddle_style",
        "logits are taken apart with levels before channels",
        "        return logits.reshape(batch, IMG_CHANNELS, COLOR_LEVELS, height, width)\n",
        "        logits = logits.reshape(batch, COLOR_LEVELS, IMG_CHANNELS, height, width)\n"
        "        return logits.transpose(1, 2)\n",
    ),
    Change(
        "paddle_style",
        "first layer is masked with type B, too",
        'mask_type = "A" if depth == 0 else "B"',
        'mask_type = "B"',
        at="kernel = torch.cat([left, here * self.mask]"
        "|mask = color_mask(mask_type, color_of(in_channels), out_color)"
        "|allowed = out_color.unsqueeze(1) >= in_color",
    ),
    Change(
        "paddle_style",
        "features belong to the channels by turns",
        "return torch.arange(num_channels) // per_color",
        "return torch.arange(num_channels) % IMG_CHANNELS",
        at="kernel = torch.cat([left, here * self.mask]"
        "|y = F.conv2d(x, self.weight * self.mask, self.bias)"
        "|allowed = out_color.unsqueeze(1) >= in_color"
        "|allowed = out_color.unsqueeze(1) > in_color",
    ),
    Change(
        "paddle_style",
        "mask of the gates forgets that there are two halves",
        "out_color = color_of(out_channels // 2).tile([2])",
        "out_color = color_of(out_channels)",
        at="kernel = torch.cat([left, here * self.mask]"
        "|mask = color_mask(mask_type, color_of(in_channels), out_color)",
    ),
    Change(
        "paddle_style",
        "no gradient goes back along the shortcut",
        "out = [out[0] + h_stack]",
        "out = [out[0] + h_stack.detach()]",
    ),
    Change(
        "paddle_style",
        "weights decay",
        "        epsilon=1e-4,\n",
        "        epsilon=1e-4,\n        weight_decay=0.01,\n",
        phase="optimizer",
    ),
]
